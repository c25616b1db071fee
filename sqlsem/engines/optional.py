"""The calls of a session that an engine may leave out, `OptionalSession`; and all calls together, `Session`.

A method that an engine leaves out raises `NotImplementedError`. Callers check first whether the engine has the
`sqlsem.engines.protocol.Capability` of that method.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from sqlsem.engines.installed import Installed, checked
from sqlsem.engines.protocol import AdminSession, Capability, EngineConnection, LockSession

if TYPE_CHECKING:
    from sqlsem.engines.base import Engine
    from sqlsem.engines.priorities import PriorityAnswer
    from sqlsem.values.batches import BatchEntry, Callback, PartEnd, PartStart
    from sqlsem.values.deadlocks import Found
    from sqlsem.values.locks import OnceEntry, Request, Ticket, Upgrading
    from sqlsem.values.rates import RateAnswer, RateDemand, RateEntry, RateRequest
    from sqlsem.values.tasks import (
        Attempt,
        Claimed,
        End,
        NewTask,
        QueueCounts,
        QueueLimit,
        QueueState,
        QueueWait,
        Schedule,
        TaskEntry,
    )


class OptionalLockCalls:
    """Conversions, hand-overs, deadlocks, priorities, runs once per period, commit markers and rates."""

    #: True if one call of `take_rate` serves several demands, and reserves slots in the near future.
    batches_rates: ClassVar[bool] = False

    # -- upgrades of readers and downgrades of writers (`downgrade` on the main session) --------------------------

    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        """Begin to upgrade the reader of ``ticket``. If it is the only holder, it becomes the writer at once. With
        ``only_if_free`` nothing is changed otherwise.

        Idempotent. After this call no new request is granted, until `upgrade` succeeds or `downgrade` is called. Raises
        `Deadlock`, without any change, if another reader of the resource is upgrading. May raise `Busy`.
        """
        raise NotImplementedError

    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        """Wait up to ``timeout`` seconds until the upgrading reader of ``ticket`` is alone, and so the writer. Return
        True if it is, False if not yet (or if `downgrade` was called), None if its row was removed.
        """
        raise NotImplementedError

    def downgrade(self, ticket: Ticket) -> bool:
        """Make the writer of ``ticket`` a reader, or end a reader's upgrade. Return False if the row was removed. Wakes
        the waiters that can be granted now. Idempotent. May raise `Busy`.
        """
        raise NotImplementedError

    # -- hand-over from one process to another, on the main sessions of both --------------------------------------

    def hand_over(self, member_id: int, tickets: Sequence[Ticket], token: str, ttl: float, to: str | None) -> bool:
        """Put the rows of these tickets, all or none, in transit. The process that presents the token within ``ttl``
        seconds, as login ``to`` (None: this login), may adopt them. Return False if one of the rows is no longer held.
        Idempotent by token; the database stores only its hash.

        After this call this member cannot release the rows. They belong to a *transit member* with a lease of ``ttl``;
        a row that no process adopts ends with that lease. May raise `Busy`, and `ConfigurationError` for an invalid
        login.
        """
        raise NotImplementedError

    def adopt(
        self, member_id: int, requesting_id: str, owner: str, uid: str, token: str
    ) -> list[tuple[Request, Ticket]]:
        """Move the rows that were handed over under a token to this member, and renew its lease. The rows keep their
        positions, and no other request is granted in between. Idempotent by ``uid``; `cancel` with the ``uid`` releases
        the rows.

        Raises `NotHeld` if the token is unknown, used or expired, and `ConfigurationError` if it is for another login
        (`answers.not_adopted`).
        """
        raise NotImplementedError

    # -- search for deadlocks -------------------------------------------------------------------------------------

    def find_deadlock(self, member_id: int) -> Found | None:
        """Return a deadlock whose youngest request is this member's, or None. The member then cancels that request."""
        raise NotImplementedError

    # -- requests with a priority, on the main session ------------------------------------------------------------

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
        """Grant a request with a priority if it is the first one that can be granted, and renew the lease. Otherwise
        add an entry to the priority queue, unless ``only_if_free``. Call again with that entry as ``place`` until the
        request is granted.

        A call is one transaction under the gate of the resource, unless a read without the gate shows that other
        requests are first. It checks the waiter right ahead, and removes that if it is dead. Idempotent by ``uid``: a
        repeated call finds the row of the first call; or no row, if that was removed. `LockSession.cancel` with the
        ``uid`` removes the entry and the granted row.

        Raises `ConfigurationError` if the resource has no priorities. May raise `Busy`.
        """
        raise NotImplementedError

    def priorities(self) -> dict[str, float]:
        """Return the ageing of each resource with priorities: the seconds of waiting that equal a step of priority."""
        raise NotImplementedError

    # -- runs once per period -------------------------------------------------------------------------------------

    # A period is done if a run was granted in it or later, so no run is repeated when the clock is set back. Periods
    # are multiples of ``per_ms`` since 1970 in UTC, shifted by ``offset_ms``.

    def once_due(self, name: str, ticket: Ticket | None, per_ms: int, offset_ms: int) -> bool | None:
        """Return True if no run is done for the period in which the row of ``ticket`` was granted; without a ticket,
        for the current period. Return None if the row was removed.
        """
        raise NotImplementedError

    def mark_once(self, name: str, ticket: Ticket) -> bool:
        """Record a run for the period in which the row was granted; return False if the row is not granted or was
        removed. Idempotent.
        """
        raise NotImplementedError

    def once_runs(self, name: str | None) -> list[OnceEntry]:
        """Return the latest run of a name, or of each name, by name."""
        raise NotImplementedError

    def once_forget(self, name: str) -> bool:
        """Delete the record of the latest run; return False if there was none."""
        raise NotImplementedError

    # -- commit markers -------------------------------------------------------------------------------------------

    # The caller's transaction writes a marker (statement ``release_on_commit``), and it becomes visible with the
    # commit. Then the lock's own process releases the lock. No other process knows the marker.

    def database_identity(self) -> str:
        """Return the identity of the database: the same in all its sessions, and in no session of another database."""
        raise NotImplementedError

    def is_committed(self, marker: str) -> bool:
        """Return True if the marker was committed. Does not wait for any transaction."""
        raise NotImplementedError

    def delete_commit_marker(self, marker: str) -> None:
        """Delete the marker, and some markers of processes that have ended."""
        raise NotImplementedError

    # -- rates: the use in any window of time is at most a limit --------------------------------------------------

    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        """Take the request's cost from a rate, unless that would exceed the limit of a window. Without ``ticket``, take
        only if no request waits in the rate's queue. With the ticket of a row, take only if that row is the first, and
        then remove the row. Called on the session that registered the row.

        ``ahead_ms``: the longest sleep that the caller prefers to a wait in the queue. If there is room so soon, and
        not before the latest reservation, an engine with `batches_rates` reserves a slot for that time. The slot counts
        as used from now on, and the caller sleeps until then.

        ``more``: the demands of other waiters of the batch, served in order as far as there is room. The row is removed
        when all are served. Empty if the engine serves one demand at a time.

        Not idempotent: if the answer of a call is lost, it may have taken the cost, and a repeated call takes it again.
        May raise `Busy`.
        """
        raise NotImplementedError

    def adjust_rate(self, resource: str, taken_ms: int, more: int) -> None:
        """Adjust the cost of an earlier take. Positive ``more`` counts as used now, and may exceed the limit. Negative
        ``more`` returns use, as far as it still counts. May raise `Busy`.
        """
        raise NotImplementedError

    def reset_rate(self, resource: str) -> bool:
        """Delete all use, debts, reservations and declared limits of a rate; return False if it is unknown."""
        raise NotImplementedError

    def set_rate(self, resource: str, window_ms: int, limit: int | None) -> bool:
        """Set the operator's limit for windows of this length, or remove it (None); return False if there was none to
        remove.
        """
        raise NotImplementedError

    def rates(self, resource: str | None) -> list[RateEntry]:
        """Return all windows of one rate or of all, with their use."""
        raise NotImplementedError


class TaskCalls(EngineConnection):
    """Work queues."""

    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        """Put all tasks or none, and return their numbers. Idempotent by ``uid``. A task with a ``unique`` or
        ``replace`` key is put alone. Return the number of an open task with the same ``unique`` key, if there is one.
        Cancel an open task with the ``replace`` key (a running one only loses the key). May raise `ConfigurationError`.
        """
        raise NotImplementedError

    def claim_task(self, member_id: int, queue: str, owner: str, uid: str, again: bool) -> Claimed | None:
        """Claim the first task that may run now. ``again``: an earlier call with this ``uid`` may have succeeded."""
        raise NotImplementedError

    def end_task(self, member_id: int, end: End) -> str | None:
        """End an attempt, and return the task's new status; None if this member has lost the task. Idempotent."""
        raise NotImplementedError

    def next_task(
        self, member_id: int, end: End, queue: str, owner: str, uid: str, again: bool
    ) -> tuple[str | None, Claimed | None]:
        """Call `end_task` and `claim_task` in one round trip."""
        raise NotImplementedError

    def next_tasks(
        self, member_id: int, ends: Sequence[End], queue: str, owner: str, uid: str, again: bool, maximum: int
    ) -> tuple[list[str | None], list[Claimed]]:
        """End several tasks as `end_task` does, and claim up to ``maximum`` of the first tasks. Only calls and SQL
        whose worker has never died are claimed together; any other task is claimed alone.

        Idempotent.
        """
        raise NotImplementedError

    def return_claim(self, member_id: int, queue: str, uid: str) -> int:
        """Return to the queue the tasks of a claim whose answer was lost; return their number."""
        raise NotImplementedError

    def recover_tasks(self, queue: str | None, mine: int | None) -> int:
        """Check the members that run tasks; return the number of tasks of dead members that are pending again."""
        raise NotImplementedError

    def next_ready(self, queue: str) -> float | None:
        """Return the seconds until the next delayed task may run; None if there is none, or it is unknown."""
        return None

    def listen(self) -> bool:
        """Subscribe this session, which has no other use, to notifications of tasks; return False if there are none."""
        return False

    def wait_notification(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a notification that tasks were put or ended. It is only a hint."""
        raise NotImplementedError

    def queue_state(self, queue: str) -> QueueState:
        """Return a summary of the queue's open tasks."""
        raise NotImplementedError

    def queue_counts(self, queue: str | None) -> list[QueueCounts]:
        """Return the counts of one queue, or of all queues with tasks."""
        raise NotImplementedError

    def list_tasks(self, queue: str | None, status: str | None, maximum: int, skip: int = 0) -> list[TaskEntry]:
        """Return tasks from number ``skip`` on: open ones in the order of their runs, then ended ones, newest first."""
        raise NotImplementedError

    def task_attempts(self, task_id: int) -> list[Attempt]:
        """Return every attempt at a task, including the running one."""
        raise NotImplementedError

    def set_task(self, task_id: int, what: str) -> int:
        """Retry or cancel a task (``what``). Return 0 if that is done, 1 if the task runs, -1 if there is no such task,
        -2 if its state forbids it, -3 if another task with its key is open. A dead worker's task first becomes pending.
        """
        raise NotImplementedError

    def cancel_task(self, task_id: int) -> int:
        """Cancel a task as `set_task` does; but for a running task, record a cancel request for its worker (1)."""
        raise NotImplementedError

    def task_controls(self, member_id: int, task_ids: Sequence[int]) -> list[tuple[int, float | None, str | None]]:
        """Return (task number, time limit in seconds, login that cancels it) for each of these tasks of the member that
        has a time limit or a cancel request.
        """
        raise NotImplementedError

    def prune_tasks(self, maximum: int) -> int:
        """Remove up to ``maximum`` expired tasks with their attempts; return their number."""
        raise NotImplementedError

    def execute(self, text: str) -> str | None:
        """Run the SQL of a task, in one transaction unless the text begins its own; return a summary, if any."""
        raise NotImplementedError

    def cancel_running(self) -> None:
        """Cancel the running SQL of a task, on the server too if the engine can; called from another thread."""
        self.interrupt()

    # -- tasks with locks, which wait for these without a process; on the main session ----------------------------

    def claim_blocked(
        self, member_id: int, queue: str, owner: str, uid: str, again: bool, requesting_id: str, row_owner: str
    ) -> Claimed | None:
        """Claim a blocked task of the queue whose locks can all be granted, and renew the lease. The rows of its locks
        are then granted, and belong to this member, with this ``requesting_id`` and the owner ``row_owner``. The end of
        the attempt removes them (`end_task` and similar calls).

        Return None if there is no such task, or if another process checks at this moment. ``again``: as in
        `claim_task`.
        """
        raise NotImplementedError

    # -- settings of queues and their keys: limits of running tasks, rates of starts, weights of the keys ---------

    def queue_limits(self, queue: str | None) -> list[QueueLimit]:
        """Return the settings of one queue or all: for each, first those of the queue, then those of its keys."""
        raise NotImplementedError

    def queue_waits(self, queue: str | None) -> list[QueueWait]:
        """Return the queues and keys whose rate a claim found used up, of one queue or all."""
        raise NotImplementedError

    def set_queue(self, queue: str, key: str | None, what: str, value: int | None, per_ms: int | None = None) -> None:
        """Set a value (``what``): of a queue ``limit``, ``key_limit``, ``rate`` or ``key_rate``; of one of its keys
        ``limit``, ``rate`` or ``weight``. None removes it. ``per_ms``: the window of a rate.
        """
        raise NotImplementedError


class ScheduleCalls:
    """Schedules: tasks that are put at the times of a cron expression, which the client evaluates."""

    def maintain_queue(self, queue: str, mine: int) -> tuple[int, bool]:
        """Recover tasks as `TaskCalls.recover_tasks` does. Return their number, and True if a schedule of the queue
        is due.
        """
        raise NotImplementedError

    def clock(self) -> datetime:
        """Return the database's time."""
        raise NotImplementedError

    def save_schedule(
        self, name: str, queue: str, cron: str, zone: str, kind: str, body: str, options: dict[str, Any], due: datetime
    ) -> None:
        """Store a schedule, and replace one of the same name. ``due``: its first time."""
        raise NotImplementedError

    def fire_schedule(
        self, name: str, due: datetime, last: datetime, following: datetime, put: bool
    ) -> tuple[bool, int | None]:
        """Put the task for the time ``due``, and store the next time ``following``, in one transaction. Return True if
        this was done, and the number of the task. It is not done if another process was faster, or the following time
        has passed. Idempotent. ``last``: the latest missed time that this task covers. Without ``put`` no task is put
        (option ``missed`` is 'skip').
        """
        raise NotImplementedError

    def set_schedule(self, name: str, what: str, due: datetime | None) -> bool:
        """Pause, resume (from ``due`` on) or remove a schedule (``what``). Return False if there is no schedule of that
        name that this login may change.
        """
        raise NotImplementedError

    def list_schedules(self, name: str | None, queue: str | None) -> list[Schedule]:
        """Return the schedules by name."""
        raise NotImplementedError


class BatchCalls:
    """Batches: many processes run the parts, and the last one to finish runs the callback."""

    def recover_batches(self, name: str | None, mine: int | None) -> list[int]:
        """Check the members that run parts or callbacks (of one name, or all), and end the parts and callbacks of dead
        members. Return the batches in which a part failed through this.
        """
        raise NotImplementedError

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
        """Start a part in the newest batch; in a new batch, if the newest one has succeeded, was abandoned or is
        overdue. (The part that ended last may run again in a batch until its callback has succeeded.) ``callback``:
        kind and body. Idempotent.
        """
        raise NotImplementedError

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
        """End a part; with ``error`` it has failed. Idempotent. If an error follows a success, return the callback that
        was claimed with the success.
        """
        raise NotImplementedError

    def claim_callback(
        self, member_id: int, name: str | None, batch_id: int | None, owner: str, uid: str, own: bool
    ) -> Callback | None:
        """Claim a callback that no process runs: the oldest of a name, or that of one batch; also one that has failed.
        ``own``: the caller has declared the callback, so it may also be a local function. Idempotent.
        """
        raise NotImplementedError

    def return_callback(self, member_id: int, uid: str) -> bool:
        """Return the callback of a claim whose answer was lost; return False if there was none."""
        raise NotImplementedError

    def end_callback(self, member_id: int, batch_id: int, attempt: int, error: str | None) -> bool:
        """End a callback; return False if this member has lost it. Idempotent."""
        raise NotImplementedError

    def abandon_batch(self, name: str | None, batch_id: int | None) -> int | None:
        """Abandon the newest batch of a name, or the batch with a number. Return its number; None if it has ended."""
        raise NotImplementedError

    def list_batches(self, name: str | None, batch_id: int | None, maximum: int) -> list[BatchEntry]:
        """Return batches with their parts, newest first."""
        raise NotImplementedError


class OptionalSession(OptionalLockCalls, TaskCalls, ScheduleCalls, BatchCalls):
    """The calls that an engine may leave out."""


class Session(LockSession, OptionalSession, AdminSession):
    """A session as callers use it: with the calls that each engine has, and the calls that this engine may lack."""

    @classmethod
    def offers(cls, capability: Capability) -> bool:
        """Return True if this class has the methods of a capability."""
        return all(getattr(cls, name) is not getattr(Session, name) for name in capability.methods)


class TableSession(Session):
    """A session of an engine that has tables."""

    engine: Engine

    @property
    def installed(self) -> Installed:
        """The features that are installed in the database."""
        return self.engine.installed

    def has_feature(self, feature: str) -> bool:
        return self.installed.has(feature)

    def check_schema(self) -> dict[str, str]:
        settings = checked(self.settings())
        self.installed.note(settings)
        return settings
