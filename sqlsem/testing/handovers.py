"""Hand-overs in the simulated database: the same rules as in ``sql/postgresql/handovers.sql``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlsem.engines.answers import TOO_LATE, UNKNOWN, USED, not_adopted
from sqlsem.engines.optional import Session
from sqlsem.testing.store import Member
from sqlsem.values.locks import UPGRADE, Request, Ticket

if TYPE_CHECKING:
    from sqlsem.testing.server import Server, ServerSession

__all__ = ["Given", "Handovers"]


@dataclass
class Given:
    """A hand-over under a token."""

    at: float
    by: int  # the member that handed the rows over
    transit: int  # the member that has the rows until they are adopted
    tickets: list[Ticket]
    adopted: tuple[int, str] | None = None  # the member that has adopted them, and the uid of its call


class Handovers(Session):
    """The part of a session that hands locks over and adopts them. There is only one login."""

    _server: Server

    def ask(self, what: str) -> None:
        """Begin a call: other actors may run before its effect."""
        raise NotImplementedError

    def answer(self, what: str) -> None:
        """End a call: other actors may run before the client has its answer."""
        raise NotImplementedError

    def require_member(self, member_id: int) -> None:
        """Record a heartbeat. Raises `Disconnected` if the member was removed."""
        raise NotImplementedError

    def as_beacon(self) -> ServerSession:
        """Return this session, as the beacon of a member."""
        raise NotImplementedError

    def hand_over(self, member_id: int, tickets: Sequence[Ticket], token: str, ttl: float, to: str | None) -> bool:
        what = f"hand_over {', '.join(str(ticket.position) for ticket in tickets)}"
        self.ask(what)
        accepted = self._hand_over_rows(member_id, tickets, token, ttl)
        self.answer(f"{what}: {'done' if accepted else 'gone'}")
        return accepted

    def _hand_over_rows(self, member_id: int, tickets: Sequence[Ticket], token: str, ttl: float) -> bool:
        server = self._server
        if token in server.handed_over:
            return server.handed_over[token].by == member_id
        self.require_member(member_id)
        rows = [row for ticket in tickets if (row := server.row(ticket)) is not None]
        if len(rows) < len(tickets) or any(
            row.granted_at is None
            or row.position in server.revoked
            or row.member_id != member_id
            or row.access == UPGRADE
            for row in rows
        ):
            return False
        transit = server.next_number()
        member = Member(transit, server.member_rows[member_id].owner, 0.0, ttl, self.as_beacon())
        server.member_rows[transit], server.members[transit] = member, server.members[member_id]
        server.record_heartbeat(member)
        name = f"in transit {transit}"
        for row in rows:
            server.move(row, transit, name, f"handed over by {row.owner}", f"{name}.{row.position}", "handed_over")
        moved = [Ticket(row.resource, row.position, name, True) for row in rows]
        server.handed_over[token] = Given(server.clock, member_id, transit, moved)
        return True

    def adopt(
        self, member_id: int, requesting_id: str, owner: str, uid: str, token: str
    ) -> list[tuple[Request, Ticket]]:
        self.ask("adopt")
        tickets = self._adopt_rows(member_id, requesting_id, owner, uid, token)
        self.answer(f"adopt: {', '.join(str(ticket.position) for _, ticket in tickets)}")
        return tickets

    def _adopt_rows(
        self, member_id: int, requesting_id: str, owner: str, uid: str, token: str
    ) -> list[tuple[Request, Ticket]]:
        server, database_label = self._server, "the simulated database"
        given = server.handed_over.get(token)
        if given is None:
            raise not_adopted(UNKNOWN, database_label, None, None, None, None)
        first, ago = given.tickets[0], server.clock - given.at
        if given.adopted not in (None, (member_id, uid)):
            raise not_adopted(USED, database_label, "another process", ago, first.resource, first.position)
        self.require_member(member_id)
        if given.adopted is None:
            transit = server.member_rows.get(given.transit)
            rows = [row for ticket in given.tickets if (row := server.row(ticket)) is not None]
            if transit is None or server.dead_in(transit) < 0 or len(rows) < len(given.tickets):
                raise not_adopted(TOO_LATE, database_label, None, ago, first.resource, first.position)
            for row in rows:
                server.move(row, member_id, requesting_id, owner, uid)
            del server.member_rows[given.transit], server.members[given.transit]
            given.adopted = (member_id, uid)
        tickets = server.uids.get((member_id, uid), ())
        rows = [row for ticket in tickets if (row := server.row(ticket)) is not None]
        return [
            (
                Request(row.resource, row.access, row.limit, row.weight, row.note),
                Ticket(row.resource, row.position, requesting_id, True),
            )
            for row in rows
        ]
