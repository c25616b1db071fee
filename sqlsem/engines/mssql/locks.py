"""Locks, conversions, hand-overs, priorities and administration on SQL Server: one routine call each."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from sqlsem.engines.answers import adopted, already_upgrading, granted_rights, hash_of
from sqlsem.engines.mssql.connection import LONGEST_WAIT_SECONDS, SqlServerConnection, aware
from sqlsem.engines.priorities import PriorityAnswer
from sqlsem.insight.overview import MemberEntry, Overview
from sqlsem.insight.patterns import with_settings
from sqlsem.values.deadlocks import Found
from sqlsem.values.locks import (
    BatchEntry,
    Entry,
    Heartbeat,
    Operation,
    Past,
    QueueCounts,
    Request,
    Resource,
    Ticket,
    Upgrading,
)
from sqlsem.values.rates import RateEntry

#: The first and the longest pause between two polls, as in `poll_pause`, where the database has no lock to wait for (a
#: lease, a paused resource).
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.04, 0.8
#: The first and the longest pause of a wait that finds no slot on the server (setting ``max_server_waiters``).
FIRST_ELSEWHERE_SECONDS, LONGEST_ELSEWHERE_SECONDS = 0.25, 1.0


class SqlServerLocks(SqlServerConnection):
    """The queue of every resource."""

    def register_member(self, host: str, pid: int, program: str) -> int:
        lease = self.options.lease
        lease_ms = None if lease is None else int(lease * 1000)
        return int(
            self.value("register_member", host[:255], pid, program[:255], int(self.options.grace * 1000), lease_ms)
        )

    def reattach_member(self, member_id: int) -> bool:
        return bool(self.value("reattach_member", member_id))

    def heartbeat(self, member_id: int) -> Heartbeat:
        rows = self.rows("heartbeat", member_id)
        if not rows or not rows[0][0]:
            return Heartbeat(False)
        return Heartbeat(
            True,
            frozenset(int(row[1]) for row in rows if row[1] is not None),
            frozenset(int(row[1]) for row in rows if row[1] is not None and row[2]),
        )

    def deregister_member(self, member_id: int) -> None:
        self.rows("deregister_member", member_id)

    # -- requests -----------------------------------------------------------------------------------------------

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        common = (member_id, requesting_id, owner, uid, int(only_if_free))
        patience = int(self.options.gate_timeout * 1000)
        if len(requests) == 1:
            request = requests[0]
            position, granted = self.rows(
                "register",
                *common,
                request.resource,
                request.access,
                request.limit,
                request.weight,
                request.note,
                patience,
            )[0]
            return None if position is None else [Ticket(request.resource, int(position), requesting_id, bool(granted))]
        asked = json.dumps([dataclasses.asdict(request) for request in requests])
        rows = self.rows("register_all", *common, asked, patience)
        return [Ticket(name, int(position), requesting_id, bool(granted)) for name, position, granted in rows] or None

    def release(self, ticket: Ticket, outcome: str) -> bool:
        return bool(self.value("release", ticket.resource, ticket.position, ticket.requesting_id, outcome) == 0)

    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        return int(self.value("cancel", member_id, uid, outcome))

    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("wait", (ticket.resource, ticket.position), timeout, wakeup)

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        rows = (
            self.rows("poll_waiters", member_id, json.dumps([ticket.position for ticket in tickets])) if tickets else []
        )
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

    # -- conversions --------------------------------------------------------------------------------------------

    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        key = (ticket.resource, ticket.position, ticket.requesting_id)
        code = self.rows("begin_upgrade", *key, int(only_if_free), int(self.options.gate_timeout * 1000))[0][0]
        if code == -3:
            raise already_upgrading(self.entries(ticket.resource), ticket)
        return {0: Upgrading.DONE, 1: Upgrading.BEGUN, -1: Upgrading.NOT_YET, -2: Upgrading.GONE}[code]

    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("upgrade", (ticket.resource, ticket.position, ticket.requesting_id), timeout, wakeup)

    def downgrade(self, ticket: Ticket) -> bool:
        return bool(self.value("downgrade", ticket.resource, ticket.position, ticket.requesting_id) == 0)

    # -- hand-overs ---------------------------------------------------------------------------------------------

    def hand_over(self, member_id: int, tickets: Sequence[Ticket], token: str, ttl: float, to: str | None) -> bool:
        positions = json.dumps([ticket.position for ticket in tickets])
        return bool(self.value("hand_over", member_id, positions, hash_of(token), int(ttl * 1000), to) == 0)

    def adopt(
        self, member_id: int, requesting_id: str, owner: str, uid: str, token: str
    ) -> list[tuple[Request, Ticket]]:
        rows = self.rows("adopt", member_id, requesting_id, owner, uid, token)
        return adopted(rows, requesting_id, self.engine.label)

    # -- priorities ---------------------------------------------------------------------------------------------

    def acquire_by_priority(
        self,
        member_id: int,
        requesting_id: str,
        owner: str,
        uid: str,
        request: Request,
        only_if_free: bool,
        place: Ticket | None,
    ) -> PriorityAnswer:
        asked = (request.resource, request.access, request.limit, request.weight, request.note, request.priority)
        common = (member_id, requesting_id, owner, uid, int(only_if_free))
        patience = int(self.options.gate_timeout * 1000)
        row = self.rows("acquire_by_priority", *common, *asked, place and place.position, patience)[0]
        return PriorityAnswer.of(request, requesting_id, *row)

    def priorities(self) -> dict[str, float]:
        return {name: float(ageing) for name, ageing in self.rows("priorities")}

    # -- displays and administration ----------------------------------------------------------------------------

    def entries(self, resource: str | None) -> list[Entry]:
        return [Entry(*aware(row)) for row in self.rows("entries", resource)]

    def overview(self) -> Overview:
        entries = self.entries(None)
        found: dict[str, list[list[Any]]] = {}
        for what, *row in map(aware, self.rows("overview")):
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

    def history(
        self,
        resource: str | None,
        maximum: int,
        *,
        since: float | None = None,
        until: float | None = None,
        outcome: str | None = None,
        who: str | None = None,
    ) -> list[Past]:
        ages = [None if age is None else round(age * 1000) for age in (since, until)]
        return [Past(*aware(row)) for row in self.rows("past", resource, maximum, *ages, outcome, who)]

    def operations(
        self,
        name: str | None,
        maximum: int,
        *,
        since: float | None = None,
        until: float | None = None,
        action: str | None = None,
        who: str | None = None,
    ) -> list[Operation]:
        ages = [None if age is None else round(age * 1000) for age in (since, until)]
        return [Operation(*aware(row)) for row in self.rows("operations", name, maximum, *ages, action, who)]

    def resources(self) -> list[Resource]:
        settings = {}
        if self.has_feature("operate"):
            settings = {row[0]: row for row in map(aware, self.rows("resource_settings"))}
        priorities = self.priorities() if self.has_feature("priorities") else {}
        found = (
            Resource(name, cap, bool(paused), stale, int(holding), int(waiting))
            for name, cap, paused, stale, holding, waiting in self.rows("resources")
        )
        return with_settings(found, settings, priorities)

    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        self.rows("set_resource", resource, what, value)

    def rights(self) -> frozenset[str]:
        return granted_rights(self.rows("rights")[0])

    def revoke(self, position: int, force: bool) -> int:
        return int(self.value("revoke", position, int(force)))

    def reap(self) -> int:
        return int(self.value("reap"))

    def prune(self, maximum: int) -> int:
        return max(int(self.value("prune", maximum)), int(self.value("prune_operations", maximum)))
