"""The calls of a session whose database has sqlsem's routines: PostgreSQL and SQL Server share them.

Nearly every call is one call of the routine of the same name, with the same parameters (`sqlsem.sql.calls`). An engine
derives a session from `RoutineSession`. It says how a statement runs (`RoutineConnection`), and adds the few calls that
differ.
"""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlsem.engines.answers import adopted, already_upgrading, granted_rights, hash_of
from sqlsem.engines.base import Options
from sqlsem.engines.optional import TableSession
from sqlsem.engines.priorities import PriorityAnswer
from sqlsem.engines.schedules import read_options
from sqlsem.insight.patterns import with_settings
from sqlsem.values.batches import BatchEntry, Callback, PartEnd, PartStart
from sqlsem.values.locks import Entry, GuardedTable, OnceEntry, Operation, Past, Request, Resource, Ticket, Upgrading
from sqlsem.values.rates import RateEntry
from sqlsem.values.tasks import Attempt, Claimed, End, QueueCounts, QueueLimit, QueueState, QueueWait, Schedule


class RoutineConnection(TableSession):
    """Runs statements of client.sql by their names."""

    options: Options
    queries: Mapping[str, str]
    #: The last parameter of routines that wait for a gate, if the connection has no such setting: milliseconds.
    gate_patience: tuple[int, ...] = ()

    @abc.abstractmethod
    def rows(self, name: str, *parameters: Any) -> Sequence[Sequence[Any]]:
        """Run a statement; return its rows. Times in them have a time zone. A parameter may be a list of numbers."""

    def row(self, name: str, *parameters: Any) -> Sequence[Any]:
        """Run a statement; return its first row."""
        return self.rows(name, *parameters)[0]

    def value(self, name: str, *parameters: Any) -> Any:
        """Run a statement; return the first value of its first row."""
        return self.row(name, *parameters)[0]

    @abc.abstractmethod
    def call(self, name: str, *parameters: Any) -> Sequence[Any]:
        """Run a statement as `row` does, as fast as the driver can."""

    @abc.abstractmethod
    def operate(self, name: str, *parameters: Any) -> Any:
        """Run a statement that the database records as an operator's action; return its value."""

    @abc.abstractmethod
    def configure(self, name: str, *parameters: Any) -> None:
        """Run a statement as `operate` does, if it has no answer."""

    def settings(self) -> dict[str, str] | None:
        if self.value("version") is None:
            return None
        return {str(name): str(value) for name, value in self.rows("settings")}


class RoutineLocks(RoutineConnection):
    """Members, requests, conversions, hand-overs, priorities, periods, commit markers and rates."""

    def register_member(self, host: str, pid: int, program: str) -> int:
        grace, lease = int(self.options.grace * 1000), self.options.lease
        lease_ms = None if lease is None else int(lease * 1000)
        return int(self.value("register_member", host[:255], pid, program[:255], grace, lease_ms))

    def reattach_member(self, member_id: int) -> bool:
        return bool(self.value("reattach_member", member_id))

    def deregister_member(self, member_id: int) -> None:
        self.rows("deregister_member", member_id)

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        common = (member_id, requesting_id, owner, uid, only_if_free)
        if len(requests) == 1:
            request = requests[0]
            position, granted = self.call(
                "register",
                *common,
                *(request.resource, request.access, request.limit, request.weight, request.note, *self.gate_patience),
            )
            if position is None:
                return None
            return [Ticket(request.resource, position, requesting_id, bool(granted))]
        request_list = json.dumps([dataclasses.asdict(request) for request in requests])
        rows = self.rows("register_all", *common, request_list, *self.gate_patience)
        tickets = [Ticket(resource, position, requesting_id, bool(granted)) for resource, position, granted in rows]
        return tickets or None

    def restore_wakeup_lock(self, ticket: Ticket) -> None:
        """Restore the wakeup lock of a row that is about to be released."""

    def release(self, ticket: Ticket, outcome: str) -> bool:
        self.restore_wakeup_lock(ticket)
        code = self.call("release", ticket.resource, ticket.position, ticket.requesting_id, outcome)[0]
        return bool(code == 0)

    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        return int(self.value("cancel", member_id, uid, outcome))

    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        key = (ticket.resource, ticket.position, ticket.requesting_id)
        code = self.value("begin_upgrade", *key, only_if_free, *self.gate_patience)
        if code == -3:
            raise already_upgrading(self.entries(ticket.resource), ticket)
        return {0: Upgrading.DONE, 1: Upgrading.BEGUN, -1: Upgrading.NOT_YET, -2: Upgrading.GONE}[code]

    def downgrade(self, ticket: Ticket) -> bool:
        self.restore_wakeup_lock(ticket)
        return bool(self.value("downgrade", ticket.resource, ticket.position, ticket.requesting_id) == 0)

    def hand_over(self, member_id: int, tickets: Sequence[Ticket], token: str, ttl: float, to: str | None) -> bool:
        self.restore_wakeup_locks(member_id, tickets)
        positions = [ticket.position for ticket in tickets]
        return bool(self.value("hand_over_rows", member_id, positions, hash_of(token), int(ttl * 1000), to) == 0)

    def adopt(
        self, member_id: int, requesting_id: str, owner: str, uid: str, token: str
    ) -> list[tuple[Request, Ticket]]:
        rows = self.rows("adopt_rows", member_id, requesting_id, owner, uid, token)
        return adopted(rows, requesting_id, self.engine.label)

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
        row = self.row("acquire_by_priority", *common, *fields, place and place.position, *self.gate_patience)
        return PriorityAnswer.of_row(request, requesting_id, row)

    def priorities(self) -> dict[str, float]:
        return {resource: float(ageing) for resource, ageing in self.rows("priorities")}

    def once_due(self, name: str, ticket: Ticket | None, per_ms: int, offset_ms: int) -> bool | None:
        row = (None, None) if ticket is None else (ticket.position, ticket.requesting_id)
        due = self.value("once_due", name, *row, per_ms, offset_ms)
        return None if due is None or due < 0 else bool(due)

    def mark_once(self, name: str, ticket: Ticket) -> bool:
        return bool(self.value("mark_once", name, ticket.position, ticket.requesting_id) == 0)

    def once_runs(self, name: str | None) -> list[OnceEntry]:
        return [OnceEntry(*row) for row in self.rows("once_runs", name)]

    def once_forget(self, name: str) -> bool:
        return bool(self.operate("once_forget", name) == 0)

    def database_identity(self) -> str:
        return str(self.value("database_identity"))

    def is_committed(self, marker: str) -> bool:
        return bool(self.value("is_committed", marker))

    def delete_commit_marker(self, marker: str) -> None:
        self.rows("delete_commit_marker", marker)

    def adjust_rate(self, resource: str, taken_ms: int, more: int) -> None:
        self.rows("adjust_rate", resource, taken_ms, more)

    def reset_rate(self, resource: str) -> bool:
        return bool(self.operate("reset_rate", resource) == 0)

    def set_rate(self, resource: str, window_ms: int, limit: int | None) -> bool:
        return bool(self.operate("set_rate", resource, window_ms, limit) == 0)

    def rates(self, resource: str | None) -> list[RateEntry]:
        return [RateEntry.of_row(*row) for row in self.rows("rates", resource)]


class RoutineTasks(RoutineConnection):
    """Work queues: tasks, limits and schedules."""

    def claim_task(self, member_id: int, queue: str, owner: str, uid: str, again: bool) -> Claimed | None:
        return _claimed(self.call("claim_task", member_id, queue, owner, uid, again))

    def end_task(self, member_id: int, end: End) -> str | None:
        status: str | None = self.call("end_task", member_id, *end.stored)[0]
        return status

    def next_task(
        self, member_id: int, end: End, queue: str, owner: str, uid: str, again: bool
    ) -> tuple[str | None, Claimed | None]:
        status, *claimed = self.call("next_task", member_id, *end.stored, queue, owner, uid, again)
        return status, _claimed(claimed)

    def return_claim(self, member_id: int, queue: str, uid: str) -> int:
        return int(self.value("return_claim", member_id, queue, uid))

    def recover_tasks(self, queue: str | None, mine: int | None) -> int:
        return int(self.value("recover_tasks", queue, mine))

    def queue_state(self, queue: str) -> QueueState:
        pending, running, next_pending, failed, error = self.row("queue_state", queue)
        return QueueState(bool(pending), bool(running), bool(next_pending), failed, error)

    def queue_counts(self, queue: str | None) -> list[QueueCounts]:
        return [QueueCounts(*row) for row in self.rows("queue_counts", queue)]

    def queue_limits(self, queue: str | None) -> list[QueueLimit]:
        return [QueueLimit(*row) for row in self.rows("queue_limits", queue)]

    def queue_waits(self, queue: str | None) -> list[QueueWait]:
        return [QueueWait(*row) for row in self.rows("queue_waits", queue)]

    def set_queue(self, queue: str, key: str | None, what: str, value: int | None, per_ms: int | None = None) -> None:
        self.configure("set_queue", queue, key, what, value, per_ms)

    def task_attempts(self, task_id: int) -> list[Attempt]:
        return [Attempt(*row) for row in self.rows("task_attempts", task_id)]

    def set_task(self, task_id: int, what: str) -> int:
        return int(self.operate("set_task", task_id, what))

    def cancel_task(self, task_id: int) -> int:
        return int(self.value("cancel_task", task_id))

    def task_controls(self, member_id: int, task_ids: Sequence[int]) -> list[tuple[int, float | None, str | None]]:
        return [(row[0], row[1], row[2]) for row in self.rows("task_controls", member_id, list(task_ids))]

    def prune_tasks(self, maximum: int) -> int:
        return int(self.value("prune_tasks", maximum))

    def maintain_queue(self, queue: str, mine: int) -> tuple[int, bool]:
        recovered, due = self.row("maintain_queue", queue, mine)
        return int(recovered), bool(due)

    def clock(self) -> datetime:
        now = self.value("clock")
        assert isinstance(now, datetime)
        return now

    def save_schedule(
        self, name: str, queue: str, cron: str, zone: str, kind: str, body: str, options: dict[str, Any], due: datetime
    ) -> None:
        self.rows("save_schedule", name, queue, cron, zone, kind, body, json.dumps(options), due)

    def fire_schedule(
        self, name: str, due: datetime, last: datetime, following: datetime, put: bool
    ) -> tuple[bool, int | None]:
        done, task_id = self.row("fire_schedule", name, due, last, following, put)
        return bool(done), task_id

    def list_schedules(self, name: str | None, queue: str | None) -> list[Schedule]:
        schedules = [Schedule(*row) for row in self.rows("list_schedules", name, queue)]
        return [dataclasses.replace(schedule, options=read_options(str(schedule.options))) for schedule in schedules]


class RoutineBatches(RoutineConnection):
    """Batches, their parts and callbacks."""

    @abc.abstractmethod
    def part_list(self, parts: Sequence[str]) -> str:
        """Return the names of a batch's parts as the routine reads them."""

    def recover_batches(self, name: str | None, mine: int | None) -> list[int]:
        return [int(row[0]) for row in self.rows("recover_batches", name, mine)]

    def start_part(
        self,
        member_id: int,
        name: str,
        part: str,
        parts: Sequence[str],
        window: float,
        owner: str,
        uid: str,
        callback: tuple[str | None, str | None],
    ) -> PartStart:
        declaration = (self.part_list(parts), round(window * 1000))
        return PartStart(*self.row("start_part", member_id, name, part, *declaration, owner, uid, *callback))

    def end_part(
        self,
        member_id: int,
        name: str,
        part: str,
        uid: str,
        error: str | None,
        owner: str,
        callback: tuple[str | None, str | None],
    ) -> PartEnd:
        outcome = "succeeded" if error is None else "failed"
        code, number, is_last, status, attempt, kind, body = self.row(
            "end_part", member_id, name, part, uid, outcome, error, owner, *callback
        )
        claimed = None if attempt is None else Callback(number, name, attempt, kind, body)
        return PartEnd(code, number, bool(is_last), status, claimed)

    def claim_callback(
        self, member_id: int, name: str | None, batch_id: int | None, owner: str, uid: str, own: bool
    ) -> Callback | None:
        rows = self.rows("claim_callback", member_id, name, batch_id, owner, uid, own)
        return Callback(*rows[0]) if rows and rows[0][0] is not None else None

    def return_callback(self, member_id: int, uid: str) -> bool:
        return bool(self.value("return_callback", member_id, uid))

    def end_callback(self, member_id: int, batch_id: int, attempt: int, error: str | None) -> bool:
        return bool(self.value("end_callback", member_id, batch_id, attempt, error))

    def abandon_batch(self, name: str | None, batch_id: int | None) -> int | None:
        number = self.operate("abandon_batch", name, batch_id)
        return None if number is None else int(number)

    def list_batches(self, name: str | None, batch_id: int | None, maximum: int) -> list[BatchEntry]:
        return BatchEntry.of_rows(self.rows("list_batches", name, batch_id, maximum))


class RoutineAdmin(RoutineConnection):
    """Displays, and the calls of operators."""

    def age(self, seconds: float | None) -> float | None:
        """Return an age as the routines take it."""
        return seconds

    def entries(self, resource: str | None) -> list[Entry]:
        return [Entry(*row) for row in self.rows("entries", resource)]

    def history(self, resource: str | None, maximum: int, *, outcome: str | None = None, **criteria: Any) -> list[Past]:
        return [Past(*row) for row in self.rows("past", resource, maximum, *self._criteria(outcome, **criteria))]

    def operations(
        self, name: str | None, maximum: int, *, action: str | None = None, **criteria: Any
    ) -> list[Operation]:
        rows = self.rows("operations", name, maximum, *self._criteria(action, **criteria))
        return [Operation(*row) for row in rows]

    def _criteria(
        self, kind: str | None, *, since: float | None = None, until: float | None = None, who: str | None = None
    ) -> list[Any]:
        return [self.age(since), self.age(until), kind, who]

    def resources(self) -> list[Resource]:
        settings = {row[0]: row for row in self.rows("resource_settings")} if self.has_feature("operate") else {}
        priorities = self.priorities() if self.has_feature("priorities") else {}
        resources = (
            Resource(name, cap, bool(paused), stale_after, int(holding), int(waiting))
            for name, cap, paused, stale_after, holding, waiting in self.rows("resources")
        )
        return with_settings(resources, settings, priorities)

    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        self.configure("set_resource", resource, what, value)

    def rights(self) -> frozenset[str]:
        return granted_rights(self.row("rights"))

    def revoke(self, position: int, force: bool) -> int:
        return int(self.operate("revoke", position, force))

    def revoke_members(self, member: int | None, login: str | None, force: bool) -> int:
        return int(self.operate("revoke_members", member, login, force))

    def reap(self) -> int:
        return int(self.operate("reap"))

    def prune(self, maximum: int) -> int:
        return max(int(self.value("prune", maximum)), int(self.value("prune_operations", maximum)))

    @abc.abstractmethod
    def change_guard(self, name: str, table: str, *parameters: str) -> int:
        """Run a statement that guards a table, or removes the guard; return the number of triggers."""

    def guard_table(self, table: str, resource: str) -> int:
        return self.change_guard("guard_table", table, resource)

    def unguard_table(self, table: str) -> int:
        return self.change_guard("unguard_table", table)

    def guarded_tables(self) -> list[GuardedTable]:
        return [GuardedTable(*row) for row in self.rows("guarded_tables")]


class RoutineSession(RoutineLocks, RoutineTasks, RoutineBatches, RoutineAdmin):
    """The calls of sqlsem's routines."""


def _claimed(row: Sequence[Any]) -> Claimed | None:
    return None if row[0] is None else Claimed(*row)
