"""Locks, conversions, hand-overs, priorities and administration on PostgreSQL. Each call is one call of a routine."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlsem.engines.answers import adopted, already_upgrading, granted_rights, hash_of
from sqlsem.engines.base import Busy, here
from sqlsem.engines.postgresql.wakeup_locks import PostgresWakeupLocks
from sqlsem.engines.priorities import PriorityAnswer
from sqlsem.insight.overview import MemberEntry, Overview
from sqlsem.insight.patterns import with_settings
from sqlsem.values import deadlocks
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
    monotonic,
)
from sqlsem.values.rates import RateEntry

log = logging.getLogger("sqlsem")


class PostgresLocks(PostgresWakeupLocks):
    """The queue of every resource."""

    def register_member(self, host: str, pid: int, program: str) -> int:
        grace, lease = int(self.options.grace * 1000), self.options.lease
        return self.number("register_member", host, pid, program, grace, None if lease is None else int(lease * 1000))

    def reattach_member(self, member_id: int) -> bool:
        exists = bool(self.row("reattach_member", member_id)[0])
        if exists:
            self.note_dropped(member_id)
        return exists

    def heartbeat(self, member_id: int) -> Heartbeat:
        known, positions, revoked = self.call("heartbeat", member_id)
        return Heartbeat(known, frozenset(positions or ()), frozenset(revoked or ()))

    def deregister_member(self, member_id: int) -> None:
        self.rows("deregister_member", (member_id,))

    # -- requests -----------------------------------------------------------------------------------------------

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        common = (member_id, requesting_id, owner, uid, only_if_free)
        if len(requests) == 1:
            request = requests[0]
            position, granted = self.call(
                "register", *common, request.resource, request.access, request.limit, request.weight, request.note
            )
            if position is None:
                return None
            return [Ticket(request.resource, position, requesting_id, granted)]
        request_list = json.dumps([dataclasses.asdict(request) for request in requests])
        rows = self.rows("register_all", (*common, request_list))
        return [Ticket(resource, position, requesting_id, granted) for resource, position, granted in rows] or None

    def release(self, ticket: Ticket, outcome: str) -> bool:
        self.restore_wakeup_lock(ticket)
        (code,) = self.call("release", ticket.resource, ticket.position, ticket.requesting_id, outcome)
        return bool(code == 0)

    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        return self.number("cancel", member_id, uid, outcome)

    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("wait", (ticket.resource, ticket.position), timeout)

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        resources, positions = [ticket.resource for ticket in tickets], [ticket.position for ticket in tickets]
        _, granted, gone = self.row("poll_waiters", member_id, resources, positions)
        return {**dict.fromkeys(granted or (), True), **dict.fromkeys(gone or ())}

    def _wait(self, name: str, key: tuple[Any, ...], timeout: float) -> bool | None:
        deadline = monotonic() + timeout
        while True:
            (code,) = self.call(name, *key, int(timeout * 1000))
            if code != 1:
                return {0: True, -1: False}.get(code)
            timeout = max(0.0, deadline - monotonic())

    # -- conversions --------------------------------------------------------------------------------------------

    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        key = (ticket.resource, ticket.position, ticket.requesting_id)
        code = self.number("begin_upgrade", *key, only_if_free)
        if code == -3:
            raise already_upgrading(self.entries(ticket.resource), ticket)
        return {0: Upgrading.DONE, 1: Upgrading.BEGUN, -1: Upgrading.NOT_YET, -2: Upgrading.GONE}[code]

    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("upgrade", (ticket.resource, ticket.position, ticket.requesting_id), timeout)

    def downgrade(self, ticket: Ticket) -> bool:
        self.restore_wakeup_lock(ticket)
        key = (ticket.resource, ticket.position, ticket.requesting_id)
        if self.number("downgrade", *key) != 0:
            return False
        if self.options.lease is None:
            try:
                self.rows("retake_wakeup_lock", key)
            except Busy as exc:  # without the lock, the waiters behind it poll from time to time
                log.info("Waiters behind %r at %d will poll for it: %s", ticket.resource, ticket.position, exc)
        return True

    # -- hand-overs ---------------------------------------------------------------------------------------------

    def hand_over(self, member_id: int, tickets: Sequence[Ticket], token: str, ttl: float, to: str | None) -> bool:
        self.restore_wakeup_locks(member_id, tickets)
        positions = [ticket.position for ticket in tickets]
        return self.number("hand_over", member_id, positions, hash_of(token), int(ttl * 1000), to) == 0

    def adopt(
        self, member_id: int, requesting_id: str, owner: str, uid: str, token: str
    ) -> list[tuple[Request, Ticket]]:
        rows = self.rows("adopt", (member_id, requesting_id, owner, uid, token))
        return adopted(rows, requesting_id, self.engine.label)

    def find_deadlock(self, member_id: int) -> Found | None:
        # (The routine `find_deadlock` for SQL sessions searches in PL/pgSQL, which is slow among thousands of rows.)
        rows = self.rows("deadlock_rows", (member_id,))
        caps = {row[1]: row[8] for row in rows if row[8] is not None}
        for cycle in deadlocks.find([deadlocks.Row(*row[:8]) for row in rows], caps):
            if cycle.victim.member == member_id:
                members = sorted({node[0] for node in cycle.nodes})
                processes = {
                    row[0]: (row[1], row[2], row[3]) for row in self.rows("live_members", (members, member_id))
                }
                return deadlocks.steps_of(cycle, processes) if processes else None
        return None

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
        fields = (request.resource, request.access, request.limit, request.weight, request.note, request.priority)
        common = (member_id, requesting_id, owner, uid, only_if_free)
        position, granted, before, ahead = self.row("acquire_by_priority", *common, *fields, place and place.position)
        return PriorityAnswer.of(request, requesting_id, position, granted, before, ahead)

    def priorities(self) -> dict[str, float]:
        return dict(self.rows("priorities"))

    # -- displays and administration ----------------------------------------------------------------------------

    def entries(self, resource: str | None) -> list[Entry]:
        return [Entry(*row) for row in self.rows("entries", (resource,))]

    def overview(self) -> Overview:
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
        return [Past(*row) for row in self.rows("past", (resource, maximum, since, until, outcome, who))]

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
        return [Operation(*row) for row in self.rows("operations", (name, maximum, since, until, action, who))]

    def resources(self) -> list[Resource]:
        settings = {row[0]: row for row in self.rows("resource_settings")} if self.has_feature("operate") else {}
        priorities = self.priorities() if self.has_feature("priorities") else {}
        return with_settings((Resource(*row) for row in self.rows("resources")), settings, priorities)

    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        self.rows("set_resource", (here(), resource, what, value))

    def rights(self) -> frozenset[str]:
        return granted_rights(self.row("rights"))

    def revoke(self, position: int, force: bool) -> int:
        return int(self.row("revoke", here(), position, force)[1])

    def reap(self) -> int:
        return int(self.row("reap", here())[1])

    def prune(self, maximum: int) -> int:
        return max(self.number("prune", maximum), self.number("prune_operations", maximum))


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _with_times(rows: list[list[Any]] | None, *columns: int) -> list[list[Any]]:
    """Return rows of JSON whose ``columns``, microseconds since 1970, are converted to datetimes."""
    for row in rows or ():
        for column in columns:
            if row[column] is not None:
                row[column] = _EPOCH + timedelta(microseconds=row[column])
    return rows or []
