"""The protocol between the client and an engine's session: one abstract class for each capability.

Every engine's session is a `LockSession`. Its class derives from the class of each further capability that it has.
Callers check with `Engine.require` or `Engine.has` first, and then use the session as a `Session`, which has all.

All calls block, and none retries: they raise `Disconnected` for a lost connection, and the session's owner decides.
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
        """Close what a forked child inherited of the parent's session, without sending anything to the server."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection; never raises."""


class LockSession(EngineConnection, WakeupLocks, InPlace):
    """One connection, used by one thread at a time. The client keeps one *main* session (the member's beacon,
    registration, release, heartbeats) and borrows others to wait in.

    A call that makes a member hold something renews the member's lease in the same transaction: `register`,
    `claim_task`, `next_task`, `next_tasks` when it claims, `start_part` and `claim_callback`. So do `register_member`,
    `reattach_member` and `heartbeat`, also a fresh lease. They raise `Disconnected` for a member that was removed.
    """

    #: The capability in words, for the message to a caller whose engine lacks it.
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
        """End a transaction that an exception, perhaps of a signal handler, left open."""

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
        """Add a row for each request, all in one transaction; return None if ``only_if_free`` and one is not free.
        Raises `ConfigurationError` for a request without a limit if the server has none for its resource.

        Idempotent by ``uid``: a repeated call returns the rows of the first one. May raise `Busy`.
        """

    @abc.abstractmethod
    def release(self, ticket: Ticket, outcome: str) -> bool:
        """Remove a row; return False if it was gone. May raise `Busy`."""

    @abc.abstractmethod
    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        """Remove the rows of one `register` call; return their number."""

    # -- waiting (any session) ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        """Wait up to ``timeout`` seconds until ``ticket`` is granted: True if granted, False if not yet, None if its
        row is gone. Another thread sets ``wakeup`` if polling now may succeed.
        """

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        """Poll several waiters of this member at once, on the main session. Returns {position: True (granted, now or
        before) | None (row gone, revoked or another member's)}; waiters that still wait are omitted.

        Does for each ticket what `wait` does without time: writes grants and renews the lease (`Disconnected` if the
        member was removed), and checks the head of the queue if a waiter still waits. One statement or transaction
        for all tickets, in any order and of any resources; waits only for a gate (`Busy`). Idempotent.

        This default polls one ticket after the other.
        """
        never = threading.Event()
        answers = {ticket.position: self.wait(ticket, 0.0, never) for ticket in tickets}
        return {position: answer for position, answer in answers.items() if answer is not False}

    # -- reading (any session) ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def entries(self, resource: str | None) -> list[Entry]:
        """Return the queue of one or all resources, in order. Rows of dead members are marked, not removed."""

    @abc.abstractmethod
    def resources(self) -> list[Resource]:
        """Return all resources that have rows or settings."""


class ConversionSession(LockSession):
    """Upgrades of readers and downgrades of writers: on any session, but `downgrade` on the main one."""

    offers = "upgrades and downgrades"

    @abc.abstractmethod
    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        """Begin to upgrade the reader of ``ticket``; a reader that holds alone is the writer at once. ``only_if_free``:
        change nothing otherwise.

        Idempotent. From then on no new request is granted, until `upgrade` has ended or `downgrade` is called. Raises
        `Deadlock`, without any change, if another reader of the resource is upgrading. May raise `Busy`.
        """

    @abc.abstractmethod
    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        """Wait up to ``timeout`` seconds until the upgrading reader of ``ticket`` holds alone and is the writer: True
        if it is, False if not yet (or if `downgrade` was called), None if its row is gone.
        """

    @abc.abstractmethod
    def downgrade(self, ticket: Ticket) -> bool:
        """Make the writer of ``ticket`` a reader, or end a reader's upgrade; return False if the row is gone.
        Wakes the waiters that can be granted now. Idempotent. May raise `Busy`.
        """


class DeadlockSession(LockSession):
    """Search for deadlocks."""

    offers = "a search for deadlocks"

    @abc.abstractmethod
    def find_deadlock(self, member_id: int) -> Found | None:
        """Return the deadlock whose youngest request is this member's, if any: the member cancels that request."""


class AdminSession(LockSession, SettingSession, RemovalSession):
    """History and operators' actions."""

    offers = "history, and what operators do"

    @abc.abstractmethod
    def overview(self) -> Overview:
        """Return all rows at one instant, by two statements on a server; takes time in proportion to the rows."""

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
        """Return this login's rights beside reading: ``operate`` (cap, pause, revoke, reap), ``retry`` (own tasks)."""

    @abc.abstractmethod
    def revoke(self, position: int, force: bool) -> int:
        """Revoke a row: 0 it is gone, 1 its living owner is notified and has its grace, -1 no such row."""

    @abc.abstractmethod
    def reap(self) -> int:
        """Check all members now and remove dead ones; return the number of rows removed."""

    @abc.abstractmethod
    def prune(self, maximum: int) -> int:
        """Remove up to ``most`` expired rows each of the history and of the operators' log; return the larger
        number.
        """


class TaskSession(LockSession):
    """Work queues."""

    offers = "work queues"

    @abc.abstractmethod
    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        """Put all tasks or none, and return their numbers. Idempotent by ``uid``. A task with a key is put alone: if an
        open task has the same ``unique`` key, its number is returned; if it has the ``replace`` key, it is cancelled
        (or loses the key while it runs). Raises `ConfigurationError` if this login lacks the right.
        """

    @abc.abstractmethod
    def claim_task(self, member_id: int, queue: str, owner: str, uid: str, again: bool) -> Claimed | None:
        """Claim the first task that may run now. ``again``: an earlier call with this ``uid`` may have succeeded."""

    @abc.abstractmethod
    def end_task(self, member_id: int, end: End) -> str | None:
        """End an attempt and return the task's new status; None if this member has lost the task. Idempotent."""

    @abc.abstractmethod
    def next_task(
        self, member_id: int, end: End, queue: str, owner: str, uid: str, again: bool
    ) -> tuple[str | None, Claimed | None]:
        """Call `end_task` and `claim_task` in one round trip."""

    def next_tasks(
        self, member_id: int, ends: Sequence[End], queue: str, owner: str, uid: str, again: bool, maximum: int
    ) -> tuple[list[str | None], list[Claimed]]:
        """End several tasks as `end_task` does, and claim up to ``most``: the first ones, as long as they are calls or
        SQL whose worker has never died. Any other task is claimed alone.

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
        """Subscribe this session, which does nothing else, to notifications of tasks; return False if it cannot."""
        return False

    def wait_notification(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for a notification that tasks were put or ended. It is only a hint."""
        raise NotImplementedError

    @abc.abstractmethod
    def queue_state(self, queue: str) -> QueueState:
        """Return what is left to do."""

    @abc.abstractmethod
    def queue_counts(self, queue: str | None) -> list[QueueCounts]:
        """Return the counts of one queue, or of all that have tasks."""

    @abc.abstractmethod
    def list_tasks(self, queue: str | None, status: str | None, maximum: int, skip: int = 0) -> list[TaskEntry]:
        """Return open tasks in the order in which they will run, then ended ones, newest first; leave out ``skip``."""

    @abc.abstractmethod
    def task_attempts(self, task_id: int) -> list[Attempt]:
        """Return every attempt at a task, including the running one."""

    @abc.abstractmethod
    def set_task(self, task_id: int, what: str) -> int:
        """Retry or cancel a task (``what``): 0 done, 1 it runs, -1 no such task, -2 not possible in its state, -3
        another task with its key is open. The task of a dead worker becomes pending first (which is its retry).
        """

    @abc.abstractmethod
    def cancel_task(self, task_id: int) -> int:
        """As `set_task` with 'cancel'; but for a running task ask its worker to cancel it (1)."""

    @abc.abstractmethod
    def task_controls(self, member_id: int, task_ids: Sequence[int]) -> list[tuple[int, float | None, str | None]]:
        """Return (task number, time limit in s, login that asked to cancel it) for each of a member's tasks that has a
        time limit or a cancel request.
        """

    @abc.abstractmethod
    def prune_tasks(self, maximum: int) -> int:
        """Remove up to ``most`` expired tasks with their log; return their number."""

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
        """Check the members that run parts or callbacks (of one name, or all), and end those of dead members. Return
        the batches in which parts failed by that.
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
        """Start a part in the newest batch, or in a new one if that has succeeded, was abandoned or is late. (Its last
        part joins it again until the callback has succeeded.) ``callback``: kind and body. Idempotent.
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
        """End a part; it failed if there is an error. Idempotent; an error after a success returns the callback that
        was claimed with the success.
        """

    @abc.abstractmethod
    def claim_callback(
        self, member_id: int, name: str | None, batch_id: int | None, owner: str, uid: str, own: bool
    ) -> Callback | None:
        """Claim a callback that no process runs: the oldest of a name, or that of one batch, also a failed one.
        ``own``: the caller has declared the callback, so it can also run one that only its declarer knows. Idempotent.
        """

    @abc.abstractmethod
    def return_callback(self, member_id: int, uid: str) -> bool:
        """Return the callback of a claim whose answer was lost; return False if there was none."""

    @abc.abstractmethod
    def end_callback(self, member_id: int, batch_id: int, attempt: int, error: str | None) -> bool:
        """End a callback; return False if this member has lost it. Idempotent."""

    @abc.abstractmethod
    def abandon_batch(self, name: str | None, batch_id: int | None) -> int | None:
        """Abandon the newest batch of a name, or one by its number, unless it has ended; return its number, or None."""

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
        """Read the schema's version and run the scripts that ``plan`` returns for it, under the install lock and in one
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
    """One connection of an event loop, used to wait."""

    @property
    @abc.abstractmethod
    def usable(self) -> bool:
        """False if no further wait can succeed, as after a cancellation in the middle of a call."""

    @abc.abstractmethod
    async def wait(self, ticket: Ticket, timeout: float) -> bool | None:
        """As `LockSession.wait`."""

    @abc.abstractmethod
    async def upgrade(self, ticket: Ticket, timeout: float) -> bool | None:
        """As `ConversionSession.upgrade`."""
