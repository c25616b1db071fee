"""Upgrades and downgrades of the simulated database: the same rules as in ``sql/postgresql/conversions.sql``."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from sqlsem.engines.answers import already_upgrading
from sqlsem.engines.optional import Session
from sqlsem.values.locks import READ, UPGRADE, WRITE, Entry, Request, Ticket, Upgrading

if TYPE_CHECKING:
    from sqlsem.testing.server import Server

__all__ = ["Conversions"]


class Conversions(Session):
    """The part of a session that upgrades and downgrades locks."""

    _server: Server

    def ask(self, what: str) -> None:
        """Begin a call: other actors may run before its effect."""
        raise NotImplementedError

    def answer(self, what: str) -> None:
        """End a call: other actors may run before the client has its answer."""
        raise NotImplementedError

    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        what = f"begin_upgrade {ticket.position}"
        self.ask(what)
        result = self._begin(ticket, only_if_free)
        self.answer(f"{what}: {result.value}")
        return result

    def _begin(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        server = self._server
        row = server.row(ticket)
        if (
            row is None
            or row.granted_at is None
            or row.position in server.revoked
            or not server.touch_member(_member_of(row))
        ):
            return Upgrading.GONE
        if row.access != READ:
            return Upgrading.DONE if row.access == WRITE else Upgrading.BEGUN
        others = [other for other in server.rows_on(row.resource) if other.access == UPGRADE]
        if others:
            server.reap_dead_members(row.resource, _member_of(row))
            upgraders = [other for other in server.rows_on(row.resource) if other.access == UPGRADE]
            if any(
                other.position not in server.revoked and not server.is_missing(_member_of(other)) for other in upgraders
            ):
                raise already_upgrading(upgraders, ticket)
            if upgraders:
                return Upgrading.NOT_YET
        readers, holders = self._grantable_readers(row), self._other_holders(row)
        if (readers or holders) and only_if_free and server.reap_dead_members(row.resource, _member_of(row)):
            readers, holders = self._grantable_readers(row), self._other_holders(row)
        if not readers and not holders:
            server.convert(row, WRITE, "upgraded")
            return Upgrading.DONE
        if only_if_free or not all(server.may_enter(_request(other), other.position) for other in readers):
            return Upgrading.NOT_YET
        for other in readers:
            server.grant(other)
        server.convert(row, UPGRADE)
        return Upgrading.BEGUN

    def _grantable_readers(self, row: Entry) -> list[Entry]:
        """Return the waiting readers behind this row that could be granted without operators' settings."""
        rows = self._server.rows_on(row.resource)
        return [
            entry
            for entry in rows
            if entry.position > row.position
            and entry.access == READ
            and entry.granted_at is None
            and entry.position not in self._server.revoked
            and _request(entry).fits([other for other in rows if other.position < entry.position], None)
        ]

    def _other_holders(self, row: Entry) -> list[Entry]:
        """Return the other holders, including those that may still believe that they hold."""
        return [
            other
            for other in self._server.rows_on(row.resource)
            if other.position != row.position and (other.position < row.position or other.granted_at is not None)
        ]

    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        server = self._server
        deadline = server.fibers.now + timeout
        what = f"upgrade {ticket.position}"
        self.ask(what)
        server.waiting.add(wakeup)
        try:
            while True:
                wakeup.clear()  # before the check, so that later changes are seen
                self.require_connection()
                upgraded = self._become_writer(ticket)
                row = server.row(ticket)
                if upgraded is not False or row is None or row.access != UPGRADE:
                    break
                if server.reap_dead_members(ticket.resource, _member_of(row)):
                    continue
                remaining = deadline - server.fibers.now
                if remaining <= 0:
                    break
                wakeup.wait(min(remaining, server.seconds_until_next_check(ticket.resource)))
        finally:
            server.waiting.discard(wakeup)
        self.answer(f"{what}: {'gone' if upgraded is None else 'writes' if upgraded else 'not yet'}")
        return upgraded

    def require_connection(self) -> None:
        """Raise `Disconnected` if the connection is broken."""
        raise NotImplementedError

    def _become_writer(self, ticket: Ticket) -> bool | None:
        server = self._server
        row = server.row(ticket)
        if row is None or row.granted_at is None or row.position in server.revoked:
            return None
        if row.access != UPGRADE:
            return row.access == WRITE
        if self._other_holders(row):
            return False
        if not server.touch_member(_member_of(row)):
            return None
        server.convert(row, WRITE, "upgraded")
        return True

    def downgrade(self, ticket: Ticket) -> bool:
        server = self._server
        self.ask(f"downgrade {ticket.position}")
        row = server.row(ticket)
        is_held = row is not None and row.granted_at is not None and row.position not in server.revoked
        if row is not None and is_held and row.access != READ:
            server.convert(row, READ, "downgraded" if row.access == WRITE else "")
            server.wake()
        self.answer(f"downgrade {ticket.position}: {'reads' if is_held else 'gone'}")
        return is_held


def _member_of(row: Entry) -> int:
    """Return the member of a row."""
    assert row.member_id is not None
    return row.member_id


def _request(row: Entry) -> Request:
    return Request(row.resource, row.access, row.limit, row.weight)
