"""The protocol between the client and an engine's session: one abstract class for each capability.

Every engine's session is a `LockSession`. Its class derives from the class of each further capability that it has.
Callers check with `Engine.require` or `Engine.has` first, and then use the session as a `Session`, which has all.

All calls block. None retries: for a lost connection they raise `Disconnected`, and the caller may retry.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sqlsem.deadlocks import Found
from sqlsem.engines.blocked_tasks import BlockedTaskSession
from sqlsem.engines.commit_release import CommitReleaseSession
from sqlsem.engines.guarded_tables import GuardedTableSession
from sqlsem.engines.installed import Installed
from sqlsem.engines.kept_locks import KeptLockSession
from sqlsem.engines.member_removal import RemovalSession
from sqlsem.engines.periodic import PeriodicSession
from sqlsem.engines.priorities import PrioritySession
from sqlsem.engines.queue_limits import QueueLimitSession
from sqlsem.engines.rates import RateSession
from sqlsem.engines.schedules import ScheduleSession
from sqlsem.engines.settings import SettingSession, checked
from sqlsem.engines.transfers import TransferSession
from sqlsem.engines.wakeup_locks import InPlace, WakeupLocks
from sqlsem.insight.overview import Overview
from sqlsem.model import (
    Attempt,
    BatchEntry,
    Callback,
    Claimed,
    End,
    Entry,
    Heartbeat,
    NewTask,
    Operation,
    PartEnd,
    PartStart,
    Past,
    QueueCounts,
    QueueState,
    Request,
    Resource,
    TaskEntry,
    Ticket,
    Upgrading,
)

__all__ = [
    "CAPABILITIES",
    "AdminSession",
    "AsyncSession",
    "BatchSession",
    "Check",
    "ConversionSession",
    "DeadlockSession",
    "EngineConnection",
    "LockSession",
    "Plan",
    "SchemaSession",
    "Session",
    "TaskSession",
]

#: Returns the scripts for tables with these settings (empty: no tables), each with the schema version after it, if any.
Plan = Callable[[Mapping[str, str]], Iterable["tuple[int | None, str]"]]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of ``sqlsem doctor``."""

    name: str
    ok: bool
    detail: str
    mend: str = ""


class EngineConnection(abc.ABC):
    """A connection that another thread can interrupt, and that a forked child can discard."""

    @abc.abstractmethod
    def interrupt(self) -> None:
        """Make the running call fail soon with `Disconnected`; called from another thread."""

    def discard(self) -> None:  # noqa: B027 - most sessions hold nothing that a fork copies
        """In a forked child, close the inherited copy of the parent's session, without a message to the server."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection; never raises."""


class LockSession(EngineConnection, WakeupLocks, InPlace):
    """One connection, used by one thread at a time. The client keeps one *main* session (for the member's beacon,
    registration, release and heartbeats), and has others to wait in.

    A call that makes a member hold something renews the member's lease in the same transaction, unless the lease is
    fresh: `register`, `claim_task`, `next_task`, `next_tasks` when it claims, `start_part` and `claim_callback`.
    `register_member`, `reattach_member` and `heartbeat` renew even a fresh one. All raise `Disconnected` for a removed
    member.
    """

    #: The name of the capability, for the error message if an engine lacks it.
    offers: ClassVar[str] = "locks"

    def prepare(self, purpose: str) -> None:
        """Prepare a new connection."""

    def check_schema(self) -> dict[str, str]:
        """Return table ``setting``; raise `SchemaError` if this client cannot work with the database."""
        return {}

    def has_feature(self, feature: str) -> bool:
        """True unless the database is known to lack that feature (`sqlsem.sql.features`)."""
        return True

    @property
    def usable(self) -> bool:
        """False if no further call can succeed on this session."""
        return True

    def recover(self) -> None:
        """Roll back a transaction that an exception (perhaps of a signal handler) left open."""

    # -- membership (main session) ------------------------------------------------------------------------------

    @abc.abstractmethod
    def register_member(self, host: str, pid: int, program: str) -> int:
        """Add a member whose beacon this session holds; return its number."""

    @abc.abstractmethod
    def reattach_member(self, member_id: int) -> bool:
        """Move an existing member to this new session; return False if the member was removed meanwhile."""

    @abc.abstractmethod
    def heartbeat(self, member_id: int) -> Heartbeat:
        """Renew the member's lease, and return its rows."""

    @abc.abstractmethod
    def deregister_member(self, member_id: int) -> None:
        """Remove the member and all its rows."""

    # -- requests (main session) --------------------------------------------------------------------------------

    @abc.abstractmethod
    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        """Add a row for each request, all in one transaction. With ``only_if_free``, add none and return None if one of
        them cannot be granted at once. Raises `ConfigurationError` for a request without a limit if no operator set it.

        Idempotent by ``uid``: a repeated call returns the rows of the first call. May raise `Busy`.
        """

    @abc.abstractmethod
    def release(self, ticket: Ticket, outcome: str) -> bool:
        """Remove a row; return False if it was removed before. May raise `Busy`."""

    @abc.abstractmethod
    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        """Remove the rows of one `register` call; return their number."""

    # -- waiting (any session) ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        """Wait up to ``timeout`` seconds until ``ticket`` is granted. Return True if it is granted, False if not yet,
        None if its row was removed. Another thread sets ``wakeup`` when a poll may succeed.
        """

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        """Poll for several waiters of this member at once, on the main session. Return by position: True (granted, now
        or before) or None (row removed, revoked or another member's). Waiters that still wait are left out.

        For each ticket this does what `wait` with timeout 0 does: it writes grants and renews the lease (`Disconnected`
        if the member was removed), and checks the head of the queue if a waiter still waits. It is one statement or
        transaction for all tickets, in any order and of any resources; it waits only for a gate (`Busy`). Idempotent.

        This default polls for one ticket after the other.
        """
        never = threading.Event()
        answers = {ticket.position: self.wait(ticket, 0.0, never) for ticket in tickets}
        return {position: answer for position, answer in answers.items() if answer is not False}

    # -- reading (any session) ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def entries(self, resource: str | None) -> list[Entry]:
        """Return the rows of one resource or all, in order. Rows of dead members are marked, and not removed."""

    @abc.abstractmethod
    def resources(self) -> list[Resource]:
        """Return all resources that have rows or settings."""


class ConversionSession(LockSession):
    """Upgrades of readers and downgrades of writers. `downgrade` needs the main session."""

    offers = "upgrades and downgrades"

    @abc.abstractmethod
    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        """Begin to upgrade the reader of ``ticket``. If it is the only holder, it becomes the writer at once. With
        ``only_if_free`` nothing is changed otherwise.

        Idempotent. After this call no new request is granted, until `upgrade` succeeds or `downgrade` is called. Raises
        `Deadlock`, without any change, if another reader of the resource is upgrading. May raise `Busy`.
        """

    @abc.abstractmethod
    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        """Wait up to ``timeout`` seconds until the upgrading reader of ``ticket`` is alone, and so the writer. Return
        True if it is, False if not yet (or if `downgrade` was called), None if its row was removed.
        """

    @abc.abstractmethod
    def downgrade(self, ticket: Ticket) -> bool:
        """Make the writer of ``ticket`` a reader, or end a reader's upgrade. Return False if the row was removed. Wakes
        the waiters that can be granted now. Idempotent. May raise `Busy`.
        """


class DeadlockSession(LockSession):
    """Search for deadlocks."""

    offers = "a search for deadlocks"

    @abc.abstractmethod
    def find_deadlock(self, member_id: int) -> Found | None:
        """Return a deadlock whose youngest request is this member's, or None. The member then cancels that request."""


class AdminSession(LockSession, SettingSession, RemovalSession):
    """History and operators' actions."""

    offers = "history, and what operators do"

    @abc.abstractmethod
    def overview(self) -> Overview:
        """Return all rows at one instant. On a server this takes two statements, and time in proportion to the rows."""

    @abc.abstractmethod
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
        """Return finished requests, newest first, that ended at most ``since`` and at least ``until`` seconds ago.
        ``who``: the request's login, host, ``host:pid``, program or id, or the login that ended it.
        """

    @abc.abstractmethod
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
        """Return operators' actions, newest first, on a resource or queue of that name, or on all."""

    @abc.abstractmethod
    def rights(self) -> frozenset[str]:
        """Return this login's rights beyond reading: ``operate`` (pause, revoke and others), ``retry`` (own tasks)."""

    @abc.abstractmethod
    def revoke(self, position: int, force: bool) -> int:
        """Revoke a row: 0 (removed), 1 (its live owner is notified, and has its grace) or -1 (no such row)."""

    @abc.abstractmethod
    def reap(self) -> int:
        """Check all members now, and remove dead members with their rows. Return the number of removed rows."""

    @abc.abstractmethod
    def prune(self, maximum: int) -> int:
        """Remove up to ``maximum`` expired rows each of history and operators' actions. Return the larger number."""


class TaskSession(LockSession):
    """Work queues."""

    offers = "work queues"

    @abc.abstractmethod
    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        """Put all tasks or none, and return their numbers. Idempotent by ``uid``. A task with a ``unique`` or
        ``replace`` key is put alone. Return the number of an open task with the same ``unique`` key, if there is one.
        Cancel an open task with the ``replace`` key (a running one only loses the key). May raise `ConfigurationError`.
        """

    @abc.abstractmethod
    def claim_task(self, member_id: int, queue: str, owner: str, uid: str, again: bool) -> Claimed | None:
        """Claim the first task that may run now. ``again``: an earlier call with this ``uid`` may have succeeded."""

    @abc.abstractmethod
    def end_task(self, member_id: int, end: End) -> str | None:
        """End an attempt, and return the task's new status; None if this member has lost the task. Idempotent."""

    @abc.abstractmethod
    def next_task(
        self, member_id: int, end: End, queue: str, owner: str, uid: str, again: bool
    ) -> tuple[str | None, Claimed | None]:
        """Call `end_task` and `claim_task` in one round trip."""

    def next_tasks(
        self, member_id: int, ends: Sequence[End], queue: str, owner: str, uid: str, again: bool, maximum: int
    ) -> tuple[list[str | None], list[Claimed]]:
        """End several tasks as `end_task` does, and claim up to ``maximum`` of the first tasks. Only calls and SQL
        whose worker has never died are claimed together; any other task is claimed alone.

        Idempotent. Engines that can do this in one round trip override it; this default claims one task.
        """
        if not maximum:
            return [self.end_task(member_id, end) for end in ends], []
        if not ends:
            claimed = self.claim_task(member_id, queue, owner, uid, again)
            return [], [] if claimed is None else [claimed]
        *before, last = ends
        statuses = [self.end_task(member_id, end) for end in before]
        status, claimed = self.next_task(member_id, last, queue, owner, uid, again)
        return [*statuses, status], [] if claimed is None else [claimed]

    @abc.abstractmethod
    def return_claim(self, member_id: int, queue: str, uid: str) -> int:
        """Return to the queue the tasks of a claim whose answer was lost; return their number."""

    @abc.abstractmethod
    def recover_tasks(self, queue: str | None, mine: int | None) -> int:
        """Check the members that run tasks; return the number of tasks of dead members that are pending again."""

    def next_ready(self, queue: str) -> float | None:
        """Return the seconds until the next delayed task may run; None if there is none, or it is unknown."""
        return None

    def listen(self) -> bool:
        """Subscribe this session, which has no other use, to notifications of tasks; return False if there are none."""
        return False

    def wait_notification(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a notification that tasks were put or ended. It is only a hint."""
        raise NotImplementedError

    @abc.abstractmethod
    def queue_state(self, queue: str) -> QueueState:
        """Return a summary of the queue's open tasks."""

    @abc.abstractmethod
    def queue_counts(self, queue: str | None) -> list[QueueCounts]:
        """Return the counts of one queue, or of all queues with tasks."""

    @abc.abstractmethod
    def list_tasks(self, queue: str | None, status: str | None, maximum: int, skip: int = 0) -> list[TaskEntry]:
        """Return tasks from number ``skip`` on: open ones in the order of their runs, then ended ones, newest first."""

    @abc.abstractmethod
    def task_attempts(self, task_id: int) -> list[Attempt]:
        """Return every attempt at a task, including the running one."""

    @abc.abstractmethod
    def set_task(self, task_id: int, what: str) -> int:
        """Retry or cancel a task (``what``). Return 0 if that is done, 1 if the task runs, -1 if there is no such task,
        -2 if its state forbids it, -3 if another task with its key is open. A dead worker's task first becomes pending.
        """

    @abc.abstractmethod
    def cancel_task(self, task_id: int) -> int:
        """Cancel a task as `set_task` does; but for a running task, record a cancel request for its worker (1)."""

    @abc.abstractmethod
    def task_controls(self, member_id: int, task_ids: Sequence[int]) -> list[tuple[int, float | None, str | None]]:
        """Return (task number, time limit in seconds, login that cancels it) for each of these tasks of the member that
        has a time limit or a cancel request.
        """

    @abc.abstractmethod
    def prune_tasks(self, maximum: int) -> int:
        """Remove up to ``maximum`` expired tasks with their attempts; return their number."""

    @abc.abstractmethod
    def execute(self, text: str) -> str | None:
        """Run the SQL of a task, in one transaction unless the text begins its own; return a summary, if any."""

    def cancel_running(self) -> None:
        """Cancel the running SQL of a task, on the server too if the engine can; called from another thread."""
        self.interrupt()


class BatchSession(LockSession):
    """Batches: many processes run the parts, and the last one to finish runs the callback."""

    offers = "batches"

    @abc.abstractmethod
    def recover_batches(self, name: str | None, mine: int | None) -> list[int]:
        """Check the members that run parts or callbacks (of one name, or all), and end the parts and callbacks of dead
        members. Return the batches in which a part failed through this.
        """

    @abc.abstractmethod
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

    @abc.abstractmethod
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

    @abc.abstractmethod
    def claim_callback(
        self, member_id: int, name: str | None, batch_id: int | None, owner: str, uid: str, own: bool
    ) -> Callback | None:
        """Claim a callback that no process runs: the oldest of a name, or that of one batch; also one that has failed.
        ``own``: the caller has declared the callback, so it may also be a local function. Idempotent.
        """

    @abc.abstractmethod
    def return_callback(self, member_id: int, uid: str) -> bool:
        """Return the callback of a claim whose answer was lost; return False if there was none."""

    @abc.abstractmethod
    def end_callback(self, member_id: int, batch_id: int, attempt: int, error: str | None) -> bool:
        """End a callback; return False if this member has lost it. Idempotent."""

    @abc.abstractmethod
    def abandon_batch(self, name: str | None, batch_id: int | None) -> int | None:
        """Abandon the newest batch of a name, or the batch with a number. Return its number; None if it has ended."""

    @abc.abstractmethod
    def list_batches(self, name: str | None, batch_id: int | None, maximum: int) -> list[BatchEntry]:
        """Return batches with their parts, newest first."""


class SchemaSession(LockSession):
    """Installation, upgrade and diagnosis of the tables."""

    offers = "tables"

    @property
    @abc.abstractmethod
    def installed(self) -> Installed:
        """The features that are installed in the database."""

    @abc.abstractmethod
    def settings(self) -> dict[str, str] | None:
        """Return table ``setting``; None if the tables are missing."""

    @abc.abstractmethod
    def install(self, plan: Plan) -> None:
        """Read the settings, and run the scripts that ``plan`` returns for them, under the install lock and in one
        transaction.
        """

    def has_feature(self, feature: str) -> bool:
        return self.installed.has(feature)

    @abc.abstractmethod
    def diagnose(self) -> list[Check]:
        """Run the engine's checks for ``sqlsem doctor``."""

    def check_schema(self) -> dict[str, str]:
        """Return table ``setting``; raise `SchemaError` if this client cannot work with the schema."""
        settings = checked(self.settings())
        self.installed.note(settings)
        return settings


#: The capabilities that a session may have beside locks.
CAPABILITIES: tuple[type[LockSession], ...] = (
    *(ConversionSession, DeadlockSession, AdminSession),
    *(TaskSession, BatchSession, SchemaSession),
)


class Session(
    ConversionSession,
    TransferSession,
    PrioritySession,
    PeriodicSession,
    CommitReleaseSession,
    DeadlockSession,
    AdminSession,
    TaskSession,
    ScheduleSession,
    QueueLimitSession,
    BlockedTaskSession,
    BatchSession,
    GuardedTableSession,
    KeptLockSession,
    RateSession,
    SchemaSession,
):
    """A session with all capabilities, for callers that have checked those that they need (`Engine.require`)."""


class AsyncSession(EngineConnection):
    """One connection of an event loop, on which tasks wait."""

    @property
    @abc.abstractmethod
    def usable(self) -> bool:
        """False if no further wait can succeed, for example after a cancellation in the middle of a call."""

    @abc.abstractmethod
    async def wait(self, ticket: Ticket, timeout: float) -> bool | None:
        """As `LockSession.wait`."""

    @abc.abstractmethod
    async def upgrade(self, ticket: Ticket, timeout: float) -> bool | None:
        """As `ConversionSession.upgrade`."""
