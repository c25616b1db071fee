"""Locks, rates and displays on PostgreSQL, as far as they are no mere calls of routines."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from sqlsem.engines.base import Busy
from sqlsem.engines.postgresql.wakeup_locks import PostgresWakeupLocks
from sqlsem.util import late
from sqlsem.values import deadlocks
from sqlsem.values.batches import BatchEntry
from sqlsem.values.deadlocks import Found
from sqlsem.values.locks import Heartbeat, Ticket, monotonic
from sqlsem.values.rates import RateAnswer, RateDemand, RateEntry, RateRequest
from sqlsem.values.tasks import QueueCounts

if TYPE_CHECKING:
    from sqlsem.insight.kept import KeptLock
    from sqlsem.insight.overview import Overview


log = logging.getLogger("sqlsem")


class PostgresLocks(PostgresWakeupLocks):
    """The queue of every resource. Rates have batches of demands and reserved slots."""

    batches_rates = True

    def reattach_member(self, member_id: int) -> bool:
        exists = super().reattach_member(member_id)
        if exists:
            self.note_dropped(member_id)
        return exists

    def heartbeat(self, member_id: int) -> Heartbeat:
        known, positions, revoked = self.call("heartbeat", member_id)
        return Heartbeat(known, frozenset(positions or ()), frozenset(revoked or ()))

    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("wait", (ticket.resource, ticket.position), timeout)

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        resources, positions = [ticket.resource for ticket in tickets], [ticket.position for ticket in tickets]
        _, granted, gone = self.row("poll_waiters", member_id, resources, positions)
        return {**dict.fromkeys(granted or (), True), **dict.fromkeys(gone or ())}

    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("upgrade", (ticket.resource, ticket.position, ticket.requesting_id), timeout)

    def _wait(self, name: str, key: tuple[Any, ...], timeout: float) -> bool | None:
        deadline = monotonic() + timeout
        while True:
            (code,) = self.call(name, *key, int(timeout * 1000))
            if code != 1:
                return {0: True, -1: False}.get(code)
            timeout = max(0.0, deadline - monotonic())

    def downgrade(self, ticket: Ticket) -> bool:
        if not super().downgrade(ticket):
            return False
        if self.options.lease is None:
            try:
                self.rows("retake_wakeup_lock", ticket.resource, ticket.position, ticket.requesting_id)
            except Busy as exc:  # without the lock, the waiters behind it poll from time to time
                log.info("Waiters behind %r at %d will poll for it: %s", ticket.resource, ticket.position, exc)
        return True

    def find_deadlock(self, member_id: int) -> Found | None:
        # (The routine `find_deadlock` is for SQL sessions: it searches in PL/pgSQL, which is slower.)
        rows = self.rows("deadlock_rows", member_id)
        caps = {row[1]: row[8] for row in rows if row[8] is not None}
        for cycle in deadlocks.find([deadlocks.Row(*row[:8]) for row in rows], caps):
            if cycle.victim.member == member_id:
                members = sorted({node[0] for node in cycle.nodes})
                processes = {row[0]: (row[1], row[2], row[3]) for row in self.rows("live_members", members, member_id)}
                return deadlocks.steps_of(cycle, processes) if processes else None
        return None

    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        limits, windows = [window.limit for window in request.windows], [window.ms for window in request.windows]
        row = (None, None) if ticket is None else (ticket.position, ticket.requesting_id)
        costs, ahead = [demand.cost for demand in more], [ahead_ms, *(demand.ahead_ms for demand in more)]
        return RateAnswer.of_row(
            *self.row("take_rate", request.resource, request.cost, limits, windows, request.burst, *row, costs, ahead)
        )

    def overview(self) -> Overview:
        with late.importing:
            from sqlsem.insight.overview import MemberEntry, Overview
        entries = self.entries(None)
        taken_at, settings, members, queues, batches, holds, rates = self.row("overview")
        return Overview.of_rows(
            taken_at,
            entries,
            _with_times(settings, 2),
            [MemberEntry(*row) for row in _with_times(members, 5)],
            [QueueCounts(*row) for row in queues or ()],
            BatchEntry.of_rows(_with_times(batches, 4, 5, 12, 13, 24, 25)),
            holds or (),
            [RateEntry.of_row(*row) for row in rates or ()],
        )

    def kept_locks(self, resource: str | None) -> list[KeptLock]:
        with late.importing:
            from sqlsem.insight.kept import KeptLock
        return [KeptLock(*row) for row in self.rows("kept_locks", resource)]

    def part_list(self, parts: Sequence[str]) -> str:
        return json.dumps(list(parts), ensure_ascii=False)


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _with_times(rows: list[list[Any]] | None, *columns: int) -> list[list[Any]]:
    """Return rows of JSON whose ``columns``, microseconds since 1970, are converted to datetimes."""
    for row in rows or ():
        for column in columns:
            if row[column] is not None:
                row[column] = _EPOCH + timedelta(microseconds=row[column])
    return rows or []
