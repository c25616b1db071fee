"""The tables of the simulated database: members that can die, their rows, and the changes that a standby may lack.

The methods for members have the names, and the order of checks, of the routines in ``sql/postgresql/routines.sql``:
beacons and leases, heartbeats, liveness checks, revocation, and the state after a restart or a promotion.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from sqlsem.engines.memory import Store
from sqlsem.testing.fibers import Fibers
from sqlsem.values.locks import READ, UPGRADE, Entry, Past, Ticket

if TYPE_CHECKING:
    from sqlsem.testing.handovers import Given
    from sqlsem.testing.server import ServerSession

__all__ = ["Member", "Tables"]

#: A promotion sets the next number forward to a multiple of this.
NUMBERS = 10_000
#: A grant does not refresh a heartbeat that is younger than this part of the member's grace or lease.
FRESH = 1 / 8
EPOCH = datetime(2000, 1, 1, tzinfo=timezone.utc)


class Member:
    """A row of table ``member``."""

    __slots__ = ("beacon", "grace", "heartbeat_at", "lease", "number", "owner")

    def __init__(self, number: int, owner: str, grace: float, lease: float | None, beacon: ServerSession) -> None:
        self.number = number
        self.owner = owner
        self.grace = grace
        self.lease = lease
        self.beacon = beacon
        self.heartbeat_at = 0.0  # the last heartbeat, by the server's clock


class Tables(Store):
    """The contents of the database, and its connections.

    Attributes:
        skew: How far its clock is ahead of the clock of the simulation, in seconds.
        down_until: It refuses connections until then.
        stalled_until: It does nothing until then.
        past: The history: rows that have ended.
        removed: Called with a row that is removed against its owner's will, and the reason.
        granted: Called with a row that is granted.
    """

    def __init__(self, fibers: Fibers) -> None:
        super().__init__()
        self.fibers = fibers
        self.skew = 0.0
        self.seed = 0  # of the run
        self.stalled_until = -math.inf
        self.down_until = -math.inf
        self.member_rows: dict[int, Member] = {}
        self.sessions: list[ServerSession] = []
        self.revoked: dict[int, float] = {}
        self.ever_granted: dict[int, datetime] = {}  # when each row was granted, even if a standby lacks that change
        self.zombies: set[int] = set()  # positions of rows that a standby still has, as it lacks their removal
        self.past: list[Past] = []
        self.removed: Callable[[Entry, str], object] = lambda row, why: None
        self.granted: Callable[[Entry], object] = lambda row: None
        self.handed_over: dict[str, Given] = {}  # by token
        self._stamp = EPOCH
        self._undo: list[Callable[[], object]] = []  # undoes changes that a standby may not have received

    # -- time, and changes that a standby lacks -----------------------------------------------------------------------

    def now(self) -> datetime:
        """Return the time for the history: no two events have the same time, and a later event has no earlier time."""
        self._stamp = max(self._stamp + timedelta(microseconds=1), EPOCH + timedelta(seconds=self.clock))
        return self._stamp

    @property
    def clock(self) -> float:
        """Return the server's time."""
        return self.fibers.now + self.skew

    def mark_durable(self) -> None:
        """Mark all changes so far as received by the standby. (The server answers a client only after that.)"""
        self._undo.clear()

    def fail_over(self, lost_changes: int, seconds: float) -> None:
        """Let a standby take over that lacks the last ``lost_changes`` changes of those that no client waits for."""
        for undo in reversed(self._undo[len(self._undo) - min(lost_changes, len(self._undo)) :]):
            undo()
        self._last = (self._last // NUMBERS + 1) * NUMBERS
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        """End all sessions, and refuse connections for a while."""
        for session in list(self.sessions):
            session.end()
        self._undo.clear()
        for member in self.member_rows.values():  # as `check_origin` in SQL: the grace of all members begins anew
            member.heartbeat_at = self.clock + seconds
        self.down_until = self.fibers.now + seconds
        self.wake()

    # -- members -----------------------------------------------------------------------------------------------------

    def record_heartbeat(self, member: Member) -> None:
        """Record a heartbeat."""
        member.heartbeat_at = self.clock

    def touch_member(self, number: int) -> bool:
        """Record a heartbeat, unless the last one is recent. Return False if the member was removed."""
        member = self.member_rows.get(number)
        if member is not None:
            life = member.grace if member.lease is None else member.lease
            if member.heartbeat_at <= self.clock - life * FRESH:
                self.record_heartbeat(member)
        return member is not None

    def check_if_dead(self, number: int, mine: int) -> bool:
        """Remove a member with its rows if it is dead. Return True if it was."""
        member = self.member_rows.get(number)
        if member is None or number == mine or self.dead_in(member) > 0:
            return False
        del self.member_rows[number]
        self.members.pop(number, None)
        self.delete_member_rows(number, "reaped")
        return True

    def dead_in(self, member: Member) -> float:
        """Return the seconds until it counts as dead without a heartbeat; infinite while its beacon is held."""
        if member.lease is not None:
            return member.heartbeat_at + member.lease - self.clock
        return math.inf if member.beacon.lives else member.heartbeat_at + member.grace - self.clock

    def is_missing(self, number: int) -> bool:
        """Return True if its beacon is missing, or its lease is over."""
        member = self.member_rows.get(number)
        return member is None or (not member.beacon.lives if member.lease is None else self.dead_in(member) <= 0)

    def delete_member_rows(self, number: int, outcome: str) -> None:
        """Remove the rows of a member."""
        for row in [row for row in self.rows() if row.member_id == number]:
            self.evict(row, outcome)

    def reap_dead_members(self, resource: str, mine: int) -> bool:
        """Check the members of a queue; return True if any row was removed."""
        removed = False
        for row in self.rows_on(resource):
            if row.position not in self.calls or row.member_id is None:
                continue
            member = self.member_rows.get(row.member_id)
            revoked_at = self.revoked.get(row.position)
            if member is None and row.member_id != mine:
                self.evict(row, "reaped")
                removed = True
            elif member is not None and revoked_at is not None and revoked_at + member.grace <= self.clock:
                self.evict(row, "revoked")
                removed = True
            else:
                removed = self.check_if_dead(row.member_id, mine) or removed
        return removed

    def seconds_until_next_check(self, resource: str) -> float:
        """Return the seconds until a member of a queue may have to be removed."""
        seconds = math.inf
        for row in self.queues.get(resource, {}).values():
            member = self.member_rows.get(row.member_id or 0)
            if member is not None:
                seconds = min(seconds, self.dead_in(member))
                if row.position in self.revoked:
                    seconds = min(seconds, self.revoked[row.position] + member.grace - self.clock)
        return max(seconds, 0.001)

    # -- rows --------------------------------------------------------------------------------------------------------

    def add(self, row: Entry, uid: str) -> Ticket:
        ticket = super().add(row, uid)
        self.mark_durable()
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
        self.ever_granted.setdefault(row.position, row.granted_at)
        self.granted(row)

    def _ungrant(self, row: Entry) -> None:
        if row.position in self.queues.get(row.resource, {}):
            self.queues[row.resource][row.position] = row

    def rows_on(self, resource: str) -> list[Entry]:
        """Return the rows of one resource, in order."""
        return list(self.queues.get(resource, {}).values())

    def convert(self, row: Entry, access: str, outcome: str = "") -> None:
        """Change the access of a granted row. Record ``outcome``, if any, in the history."""
        if outcome:
            self.past.append(self._history(row, outcome))
            self.ever_granted[row.position] = self.now()
        self.queues[row.resource][row.position] = dataclasses.replace(row, access=access)
        self.mark_durable()

    def move(self, row: Entry, member: int, requesting_id: str, owner: str, uid: str, outcome: str = "") -> None:
        """Give a granted row to another member. ``outcome``: as for `convert`."""
        if outcome:
            self.past.append(self._history(row, outcome))
            self.ever_granted[row.position] = self.now()
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
        self.mark_durable()

    def evict(self, row: Entry, outcome: str) -> None:
        """Remove a row against its owner's will, or after its death."""
        self.remove(row, outcome)
        self.mark_durable()
        self.removed(row, outcome)

    def remove(self, row: Entry, outcome: str = "released") -> None:
        call = self.calls[row.position]
        super().remove(row)
        self.revoked.pop(row.position, None)
        if row.position not in self.zombies:
            self.past.append(self._history(row, outcome))
        self.zombies.discard(row.position)
        self._undo.append(lambda: self._undo_removal(row, call[1]))

    def _undo_removal(self, row: Entry, uid: str) -> None:
        super().add(row, uid)
        queue = self.queues[row.resource]
        for position in sorted(position for position in queue if position > row.position):
            queue.move_to_end(position)
        self.zombies.add(row.position)

    def _history(self, row: Entry, outcome: str) -> Past:
        granted_at = self.ever_granted.get(row.position)
        return Past(
            resource=row.resource,
            position=row.position,
            access=row.access.replace(UPGRADE, READ),
            weight=row.weight,
            requesting_id=row.requesting_id,
            owner=row.owner,
            note=None,
            requested_at=row.requested_at,
            granted_at=granted_at,
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
                    self.evict(row, "revoked")
                else:
                    self.revoked.setdefault(position, self.clock)
