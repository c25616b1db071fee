"""The tables of the simulated database: members that can die, their rows, and what a standby has of all that.

What the routines of the real engines do about members is done here in the same order and under the same names
(``sql/postgresql/routines.sql``): beacons and leases, heartbeats, liveness tests, revocation, and the state after a
restart or a promotion.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from sqlsem.engines.memory import Store
from sqlsem.model import READ, UPGRADE, Entry, Past, Ticket
from sqlsem.testing.fibers import Fibers

if TYPE_CHECKING:
    from sqlsem.testing.handovers import Given
    from sqlsem.testing.server import ServerSession

__all__ = ["Member", "Tables"]

#: A promotion sets all numbers forward to a multiple of this.
NUMBERS = 10_000
#: A grant does not refresh a heartbeat that is younger than this part of the member's grace or lease.
FRESH = 1 / 8
EPOCH = datetime(2000, 1, 1, tzinfo=timezone.utc)


class Member:
    """A row of table ``member``."""

    __slots__ = ("beacon", "grace", "lease", "number", "owner", "seen")

    def __init__(self, number: int, owner: str, grace: float, lease: float | None, beacon: ServerSession) -> None:
        self.number = number
        self.owner = owner
        self.grace = grace
        self.lease = lease
        self.beacon = beacon
        self.seen = 0.0  # the last heartbeat, by the server's clock


class Tables(Store):
    """The contents of the database, and its connections.

    Attributes:
        skew: How far its clock is ahead of the clock of the simulation, in seconds.
        down_until: It refuses connections until then.
        stalled_until: It does nothing until then.
        past: Rows that are no more.
        removed: Called with a row that leaves against its owner's will, and why.
        granted: Called with a row that is granted.
    """

    def __init__(self, fibers: Fibers) -> None:
        super().__init__()
        self.fibers = fibers
        self.skew = 0.0
        self.seed = 0  # of the run
        self.stalled_until = -math.inf
        self.down_until = -math.inf
        self.people: dict[int, Member] = {}
        self.sessions: list[ServerSession] = []
        self.revoked: dict[int, float] = {}
        self.let_in: dict[int, datetime] = {}  # when each row was granted, also if a standby has forgotten it
        self.zombies: set[int] = set()  # rows whose end a standby has forgotten
        self.past: list[Past] = []
        self.removed: Callable[[Entry, str], object] = lambda row, why: None
        self.granted: Callable[[Entry], object] = lambda row: None
        self.handed_over: dict[str, Given] = {}  # by token
        self._stamp = EPOCH
        self._undo: list[Callable[[], object]] = []  # undoes changes that a standby may not have received

    # -- time, and what a standby has --------------------------------------------------------------------------------

    def now(self) -> datetime:
        """Return the time for the history: no two events have the same time, and a later event has no earlier time."""
        self._stamp = max(self._stamp + timedelta(microseconds=1), EPOCH + timedelta(seconds=self.clock))
        return self._stamp

    @property
    def clock(self) -> float:
        """Return the server's time."""
        return self.fibers.now + self.skew

    def durable(self) -> None:
        """Mark all changes so far as received by the standby: a client that was answered was answered after that."""
        self._undo.clear()

    def fail_over(self, forget: int, seconds: float) -> None:
        """Let a standby take over that has not received the last ``forget`` changes that no client waits for."""
        for undo in reversed(self._undo[len(self._undo) - min(forget, len(self._undo)) :]):
            undo()
        self._last = (self._last // NUMBERS + 1) * NUMBERS
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        """End all sessions, and refuse connections for a while."""
        for session in list(self.sessions):
            session.end()
        self._undo.clear()
        for member in self.people.values():  # check_origin: all members begin their grace anew
            member.seen = self.clock + seconds
        self.down_until = self.fibers.now + seconds
        self.wake()

    # -- members -----------------------------------------------------------------------------------------------------

    def record_heartbeat(self, member: Member) -> None:
        """Record a heartbeat."""
        member.seen = self.clock

    def touch_member(self, number: int) -> bool:
        """Record a heartbeat, unless the last one is young; False if the member was removed."""
        member = self.people.get(number)
        if member is not None:
            life = member.grace if member.lease is None else member.lease
            if member.seen <= self.clock - life * FRESH:
                self.record_heartbeat(member)
        return member is not None

    def check_if_dead(self, number: int, mine: int) -> bool:
        """Remove a member with its rows if it is dead. Return True if it was."""
        member = self.people.get(number)
        if member is None or number == mine or self.dead_in(member) > 0:
            return False
        del self.people[number]
        self.members.pop(number, None)
        self.delete_member_rows(number, "reaped")
        return True

    def dead_in(self, member: Member) -> float:
        """Return the seconds until it counts as dead without a heartbeat; infinite while its beacon is held."""
        if member.lease is not None:
            return member.seen + member.lease - self.clock
        return math.inf if member.beacon.lives else member.seen + member.grace - self.clock

    def is_missing(self, number: int) -> bool:
        """Return True if its beacon is missing, or its lease is over."""
        member = self.people.get(number)
        return member is None or (not member.beacon.lives if member.lease is None else self.dead_in(member) <= 0)

    def delete_member_rows(self, number: int, outcome: str) -> None:
        """Remove the rows of a member."""
        for row in [row for row in self.rows() if row.member_id == number]:
            self.take_away(row, outcome)

    def reap_dead_members(self, resource: str, mine: int) -> bool:
        """Test the members of a queue; return True if any row was removed."""
        removed = False
        for row in self.rows_on(resource):
            if row.position not in self.calls or row.member_id is None:
                continue
            member = self.people.get(row.member_id)
            taken = self.revoked.get(row.position)
            if member is None and row.member_id != mine:
                self.take_away(row, "reaped")
                removed = True
            elif member is not None and taken is not None and taken + member.grace <= self.clock:
                self.take_away(row, "revoked")
                removed = True
            else:
                removed = self.check_if_dead(row.member_id, mine) or removed
        return removed

    def next_test(self, resource: str) -> float:
        """Return the seconds until a member of a queue may have to be removed."""
        left = math.inf
        for row in self.queues.get(resource, {}).values():
            member = self.people.get(row.member_id or 0)
            if member is not None:
                left = min(left, self.dead_in(member))
                if row.position in self.revoked:
                    left = min(left, self.revoked[row.position] + member.grace - self.clock)
        return max(left, 0.001)

    # -- rows --------------------------------------------------------------------------------------------------------

    def add(self, row: Entry, uid: str) -> Ticket:
        ticket = super().add(row, uid)
        self.durable()
        if row.granted_at is not None:
            self._record_grant(row)
        return ticket

    def grant(self, row: Entry) -> bool:
        if row.granted_at is not None:
            return True
        if row.position in self.revoked or not super().grant(row):
            return False
        self._undo.append(lambda: self._ungrant(row))
        self._record_grant(self.queues[row.resource][row.position])
        return True

    def _record_grant(self, row: Entry) -> None:
        assert row.granted_at is not None
        self.let_in.setdefault(row.position, row.granted_at)
        self.granted(row)

    def _ungrant(self, row: Entry) -> None:
        if row.position in self.queues.get(row.resource, {}):
            self.queues[row.resource][row.position] = row

    def rows_on(self, resource: str) -> list[Entry]:
        """Return the rows of one resource, in order."""
        return list(self.queues.get(resource, {}).values())

    def convert(self, row: Entry, access: str, outcome: str = "") -> None:
        """Change the access of a granted row. ``outcome``: recorded in the history for its former access."""
        if outcome:
            self.past.append(self._history(row, outcome))
            self.let_in[row.position] = self.now()
        self.queues[row.resource][row.position] = dataclasses.replace(row, access=access)
        self.durable()

    def move(self, row: Entry, member: int, requesting_id: str, owner: str, uid: str, outcome: str = "") -> None:
        """Give a granted row to another member. ``outcome``: as of `convert`."""
        if outcome:
            self.past.append(self._history(row, outcome))
            self.let_in[row.position] = self.now()
        call = self.calls[row.position]
        self.uids[call] = [ticket for ticket in self.uids[call] if ticket.position != row.position]
        if not self.uids[call]:
            del self.uids[call]
        host, pid, program = self.members[member]
        moved = dataclasses.replace(
            row, member_id=member, requesting_id=requesting_id, owner=owner, host=host, pid=pid, program=program
        )
        self.queues[row.resource][row.position] = moved
        self.calls[row.position] = (member, uid)
        self.uids.setdefault((member, uid), []).append(Ticket(row.resource, row.position, requesting_id, True))
        self.durable()

    def take_away(self, row: Entry, outcome: str) -> None:
        """Remove a row against its owner's will, or after its death."""
        self.remove(row, outcome)
        self.durable()
        self.removed(row, outcome)

    def remove(self, row: Entry, outcome: str = "released") -> None:
        call = self.calls[row.position]
        super().remove(row)
        self.revoked.pop(row.position, None)
        if row.position not in self.zombies:
            self.past.append(self._history(row, outcome))
        self.zombies.discard(row.position)
        self._undo.append(lambda: self._put_back(row, call[1]))

    def _put_back(self, row: Entry, uid: str) -> None:
        super().add(row, uid)
        queue = self.queues[row.resource]
        for position in sorted(position for position in queue if position > row.position):
            queue.move_to_end(position)
        self.zombies.add(row.position)

    def _history(self, row: Entry, outcome: str) -> Past:
        let_in = self.let_in.get(row.position)
        return Past(
            resource=row.resource,
            position=row.position,
            access=row.access.replace(UPGRADE, READ),
            weight=row.weight,
            requesting_id=row.requesting_id,
            owner=row.owner,
            note=None,
            requested_at=row.requested_at,
            granted_at=let_in,
            ended_at=self.now(),
            waited=0.0,
            held=None,
            outcome=outcome,
            limit=row.limit,
            host=row.host,
        )

    def revoke(self, position: int, force: bool = False) -> None:
        """Revoke a row, as an operator does."""
        for row in self.rows():
            if row.position == position:
                if force or row.granted_at is None:
                    self.take_away(row, "revoked")
                else:
                    self.revoked.setdefault(position, self.clock)
