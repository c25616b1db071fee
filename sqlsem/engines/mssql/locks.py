"""Locks, rates and displays on SQL Server, as far as they are no mere calls of routines."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sqlsem.engines.mssql.connection import LONGEST_WAIT_SECONDS, SqlServerConnection
from sqlsem.util import late
from sqlsem.values.batches import BatchEntry
from sqlsem.values.deadlocks import Found
from sqlsem.values.locks import Heartbeat, Ticket
from sqlsem.values.rates import RateAnswer, RateDemand, RateEntry, RateRequest
from sqlsem.values.tasks import QueueCounts

if TYPE_CHECKING:
    from sqlsem.insight.overview import Overview


#: The first and the longest pause between two polls, as in `poll_pause`, where the database has no lock to wait for (a
#: lease, a paused resource).
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.04, 0.8
#: The first and the longest pause of a wait that finds no slot on the server (setting ``max_server_waiters``).
FIRST_ELSEWHERE_SECONDS, LONGEST_ELSEWHERE_SECONDS = 0.25, 1.0


class SqlServerLocks(SqlServerConnection):
    """The queue of every resource."""

    def heartbeat(self, member_id: int) -> Heartbeat:
        rows = self.rows("heartbeat", member_id)
        if not rows or not rows[0][0]:
            return Heartbeat(False)
        return Heartbeat(
            True,
            frozenset(int(row[1]) for row in rows if row[1] is not None),
            frozenset(int(row[1]) for row in rows if row[1] is not None and row[2]),
        )

    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("wait", (ticket.resource, ticket.position), timeout, wakeup)

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        rows = self.rows("poll_waiters", member_id, [ticket.position for ticket in tickets]) if tickets else []
        return {int(position): True if granted else None for position, granted in rows}

    def _wait(self, name: str, key: tuple[Any, ...], timeout: float, wakeup: threading.Event) -> bool | None:
        deadline = time.monotonic() + min(timeout, LONGEST_WAIT_SECONDS)
        pause, elsewhere = FIRST_PAUSE_SECONDS, FIRST_ELSEWHERE_SECONDS
        while True:
            left = max(0.0, deadline - time.monotonic())
            code = self.value(name, *key, int(left * 1000))
            if code == 0:
                return True
            if code == -2:
                return None
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if code == 2:  # the server has no free waiting slot: wait in the client
                if wakeup.wait(min(left, random.uniform(0.8, 1.2) * elsewhere)):
                    wakeup.clear()
                elsewhere = min(elsewhere * 1.5, LONGEST_ELSEWHERE_SECONDS)
            elif code in (-1, -3):  # no lock to wait for, or not with this session
                if wakeup.wait(min(pause, left)):
                    wakeup.clear()
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def find_deadlock(self, member_id: int) -> Found | None:
        return Found.of_rows(self.rows("find_deadlock", member_id))

    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("upgrade", (ticket.resource, ticket.position, ticket.requesting_id), timeout, wakeup)

    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        windows = json.dumps([{"limit": window.limit, "ms": window.ms} for window in request.windows])
        row = (None, None) if ticket is None else (ticket.position, ticket.requesting_id)
        code, wait_ms, taken_ms = self.row("take_rate", request.resource, request.cost, windows, request.burst, *row)
        return RateAnswer.of_row(int(code), wait_ms, () if taken_ms is None else (taken_ms,))

    def overview(self) -> Overview:
        with late.importing:
            from sqlsem.insight.overview import MemberEntry, Overview
        entries = self.entries(None)
        found: dict[str, list[list[Any]]] = {}
        for what, *row in self.rows("overview"):
            found.setdefault(what, []).append(row)
        return Overview.of_rows(
            found["clock"][0][0],
            entries,
            found.get("setting", ()),
            [MemberEntry(*row) for row in found.get("member", ())],
            [QueueCounts(*row) for row in found.get("queue", ())],
            BatchEntry.of_rows(found.get("batch", ())),
            found.get("hold", ()),
            [RateEntry.of_row(*row) for row in found.get("rate", ())],
        )

    def age(self, seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1000)

    def part_list(self, parts: Sequence[str]) -> str:
        return "\n".join(parts)  # names contain no control characters
