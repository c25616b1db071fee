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

#: The scripts to run on tables with some settings (empty: none there), each with the version that it leads to, if any.
Plan = Callable[[Mapping[str, str]], Iterable["tuple[int | None, str]"]]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of ``sqlsem doctor``."""

    name: str
    ok: bool
    detail: str
    mend: str = ""


class EngineConnection(abc.ABC):
    """A connection that can be made to end from another thread, and let go of in a forked child."""

    @abc.abstractmethod
    def interrupt(self) -> None:
        """From another thread: make a call that is under way fail soon with `Disconnected`."""

    def abandon(self) -> None:  # noqa: B027 - most sessions hold nothing that a fork copies
        """In a forked child: let go of what the parent's session uses, without a word to the server."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection; never raises."""


class LockSession(EngineConnection, WakeupLocks, InPlace):
    """One connection. Not for two threads at once. The coordinator keeps one *main* session (the member's beacon,
    registration, release, pings) and borrows others to wait in; the engine decides only how each step is done.

    A call that makes a member hold something renews the member's lease in the same transaction: `register`,
    `claim_task`, `next_task`, `next_tasks` when it claims, `start_part` and `claim_callback`. So do `register_member`,
    `reattach_member` and `heartbeat`, also a fresh lease. They raise `Disconnected` for a member that was removed.
    """

    #: The capability in words, for the message to a caller whose engine lacks it.
    offers: ClassVar[str] = "locks"

    def prepare(self, purpose: str) -> None:
        """Make a connection ready that was just opened."""

    def check_schema(self) -> dict[str, str]:
        """The settings, when this client can work with the database; else `SchemaError` with the remedy."""
        return {}

    def has_feature(self, feature: str) -> bool:
        """True unless the database is known to lack that feature (`sqlsem.sql.features`)."""
        return True

    @property
    def usable(self) -> bool:
        """Whether another call may succeed on this session."""
        return True

    def recover(self) -> None:
        """After an exception, which may have come out of a signal handler: end what that has left open."""

    # -- membership (main session) ------------------------------------------------------------------------------

    @abc.abstractmethod
    def register_member(self, host: str, pid: int, program: str) -> int:
        """Become a new member, whose beacon this session holds. Returns its number."""

    @abc.abstractmethod
    def reattach_member(self, member_id: int) -> bool:
        """Take over an existing member on this new session; False when it has been given up meanwhile."""

    @abc.abstractmethod
    def heartbeat(self, member_id: int) -> Heartbeat:
        """Give a sign of life: renew the lease; and tell which rows are ours."""

    @abc.abstractmethod
    def deregister_member(self, member_id: int) -> None:
        """Leave for good, with all rows."""

    # -- requests (main session) --------------------------------------------------------------------------------

    @abc.abstractmethod
    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        """Take a number for each request, all in one transaction; None when ``only_if_free`` and one was not.
        `ConfigurationError` where one names no limit, and the server has none for its resource.

        Repeated with the same ``uid``, it finds the rows of the first time. May raise `Busy`.
        """

    @abc.abstractmethod
    def release(self, ticket: Ticket, outcome: str) -> bool:
        """Give a number back; False when the row was not there any more. May raise `Busy`."""

    @abc.abstractmethod
    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        """Give back all that one `register` may have left; how many rows that was."""

    # -- waiting (any session) ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        """Wait up to ``timeout`` seconds for the turn of ``ticket``: True when granted, False when not yet,
        None when its row is gone. Setting ``wakeup`` from another thread says that looking now may pay.
        """

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        """Whose turn has come, of many of this member's (on the main session): by position, True where it is granted,
        now or before; None where the row is gone, taken away, or another member's. Who has to wait on is left out.

        For each ticket the answer is that of `wait` without time, and what `wait` does for it is done: grants are
        written down with a sign of life (`Disconnected` when the member was given up), and where somebody has to wait
        on, those at the head of its queue are tested, and removed when they are dead. But it is one statement, or one
        transaction, for all, in any order and of any resources; it reads no more than decides; and it waits for nothing
        but a gate (`Busy`). May be repeated: what was granted, and not heard of, is said again.

        This one asks for one ticket after the other, for engines that have nothing better.
        """
        never = threading.Event()
        answers = {ticket.position: self.wait(ticket, 0.0, never) for ticket in tickets}
        return {position: answer for position, answer in answers.items() if answer is not False}

    # -- looking (any session) ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def entries(self, resource: str | None) -> list[Entry]:
        """The queue, one or all resources, in order. The dead are shown so, and removed by nobody who looks."""

    @abc.abstractmethod
    def resources(self) -> list[Resource]:
        """All resources that have rows or settings."""


class ConversionSession(LockSession):
    """Readers become the writer, and writers become readers: on any session, but `downgrade` on the main one."""

    offers = "upgrades and downgrades"

    @abc.abstractmethod
    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        """Have the reader of ``ticket`` begin to become the writer; where it is alone it is at once. ``only_if_free``:
        change nothing otherwise.

        May be repeated. Once begun it lets nobody new in, until `upgrade` has ended it or `downgrade` is called. Raises
        `Deadlock` when another reader of the resource is upgrading; then nothing was changed. May raise `Busy`.
        """

    @abc.abstractmethod
    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        """Wait up to ``timeout`` seconds until the reader of ``ticket``, which has begun to upgrade, is alone and the
        writer: True when it is, False when not yet (or `downgrade` was called), None when its row is gone.
        """

    @abc.abstractmethod
    def downgrade(self, ticket: Ticket) -> bool:
        """Make the writer of ``ticket`` a reader, or have a reader give up its upgrade; False when the row is gone.
        Those behind who may now enter are woken. May be repeated. May raise `Busy`.
        """


class DeadlockSession(LockSession):
    """Those who wait for each other are found, and one of them is told."""

    offers = "a search for deadlocks"

    @abc.abstractmethod
    def find_deadlock(self, member_id: int) -> Found | None:
        """The deadlock whose youngest request is this member's, if there is one: it has to be given up."""


class AdminSession(LockSession, SettingSession, RemovalSession):
    """What operators see and do."""

    offers = "history, and what operators do"

    @abc.abstractmethod
    def overview(self) -> Overview:
        """All that is there at one instant, by two statements on a server; in time that grows with what is there."""

    @abc.abstractmethod
    def history(
        self,
        resource: str | None,
        most: int,
        *,
        since: float | None = None,
        until: float | None = None,
        outcome: str | None = None,
        who: str | None = None,
    ) -> list[Past]:
        """Finished requests, newest first; that ended ``since`` seconds ago at the most, ``until`` at the least.
        ``who``: its login, host, ``host:pid``, program or id, or the login that ended it.
        """

    @abc.abstractmethod
    def operations(
        self,
        name: str | None,
        most: int,
        *,
        since: float | None = None,
        until: float | None = None,
        action: str | None = None,
        who: str | None = None,
    ) -> list[Operation]:
        """What operators did, newest first; to a resource or queue of that name, or to all. What does it writes it."""

    @abc.abstractmethod
    def rights(self) -> frozenset[str]:
        """Return what this login may do beside looking: ``operate`` (cap, pause, revoke, reap), ``retry`` (its own)."""

    @abc.abstractmethod
    def revoke(self, position: int, force: bool) -> int:
        """Take a row away: 0 it is gone, 1 its living owner has been told and has ``grace``, -1 no such row."""

    @abc.abstractmethod
    def reap(self) -> int:
        """Test everybody now and remove the dead; the number of rows removed."""

    @abc.abstractmethod
    def prune(self, most: int) -> int:
        """Remove at most ``most`` rows each of history, and of what operators did, that are past keeping: the more."""


class TaskSession(LockSession):
    """The work queue."""

    offers = "work queues"

    @abc.abstractmethod
    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        """Put them, all or none; their numbers. Repeated with the same ``uid``, it finds those of the first time. One
        with a key is put alone: where its ``unique`` is another open one's, that one's number is returned; where its
        ``replace`` is, that one is cancelled (or gives up the key, while it runs). `ConfigurationError` where this
        login may not do that.
        """

    @abc.abstractmethod
    def claim_task(self, member_id: int, queue: str, owner: str, uid: str, again: bool) -> Claimed | None:
        """The first task that may run now, claimed. ``again``: an earlier call with this ``uid`` may have succeeded."""

    @abc.abstractmethod
    def end_task(self, member_id: int, end: End) -> str | None:
        """The task's new status; None when it is ours no more. May be repeated."""

    @abc.abstractmethod
    def next_task(
        self, member_id: int, end: End, queue: str, owner: str, uid: str, again: bool
    ) -> tuple[str | None, Claimed | None]:
        """`end_task` and `claim_task` in one round trip."""

    def next_tasks(
        self, member_id: int, ends: Sequence[End], queue: str, owner: str, uid: str, again: bool, most: int
    ) -> tuple[list[str | None], list[Claimed]]:
        """End several tasks, whose new statuses are given as by `end_task`, and claim up to ``most``: those that come
        first, as far as they are calls or SQL whose worker has never died; another one is claimed alone.

        Both may be repeated. Engines that can do this in one round trip do; here one is claimed.
        """
        if not most:
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
        """Give back what a claim may have left whose answer was lost for good; how many."""

    @abc.abstractmethod
    def recover_tasks(self, queue: str | None, mine: int | None) -> int:
        """Test the members that run tasks, make those of the dead pending again; how many."""

    def next_ready(self, queue: str) -> float | None:
        """Seconds until the next task may run that waits for its time; None where there is none, or nobody can tell."""
        return None

    def listen(self) -> bool:
        """Have this session, which does nothing else, told of tasks; False where that cannot be."""
        return False

    def hear(self, timeout: float) -> bool:
        """Wait so many seconds for news of tasks, which others may have put or ended. A hint, and no more than that."""
        raise NotImplementedError

    @abc.abstractmethod
    def queue_state(self, queue: str) -> QueueState:
        """What is left to do."""

    @abc.abstractmethod
    def queue_counts(self, queue: str | None) -> list[QueueCounts]:
        """One queue, or all of which anything is kept, as counts."""

    @abc.abstractmethod
    def list_tasks(self, queue: str | None, status: str | None, most: int, skip: int = 0) -> list[TaskEntry]:
        """Open ones in the order in which they will run, then the ended, newest first; all but the first ``skip``."""

    @abc.abstractmethod
    def task_attempts(self, task_id: int) -> list[Attempt]:
        """Every attempt at a task, the running one too."""

    @abc.abstractmethod
    def set_task(self, task_id: int, what: str) -> int:
        """'retry' or 'cancel': 0 done, 1 it runs, -1 no such task, -2 it is in no such state, -3 another one with its
        key is open. The task of a dead worker is pending again first (and so retried by that).
        """

    @abc.abstractmethod
    def cancel_task(self, task_id: int) -> int:
        """As `set_task` to 'cancel'; but of a task that runs its worker is told (1), and it is cancelled when that has
        ended it.
        """

    @abc.abstractmethod
    def task_controls(self, member_id: int, task_ids: Sequence[int]) -> list[tuple[int, float | None, str | None]]:
        """Of those of these tasks of a member of which anything is asked: how long they may run (s), and who wants
        them cancelled.
        """

    @abc.abstractmethod
    def prune_tasks(self, most: int) -> int:
        """Remove at most ``most`` tasks that ended and are past keeping, with their log."""

    @abc.abstractmethod
    def execute(self, text: str) -> str | None:
        """Run the SQL text of a task, in one transaction unless the text begins its own; what came of it, in words."""

    def cancel_running(self) -> None:
        """From another thread: end the SQL of a task, on the server too where that can be told."""
        self.interrupt()


class BatchSession(LockSession):
    """Batches: many processes do parts of one thing, and the last one out goes on."""

    offers = "batches"

    @abc.abstractmethod
    def recover_batches(self, name: str | None, mine: int | None) -> list[int]:
        """Test the members that run parts or callbacks (of one name, or all) and act for the dead: the batches in
        which parts have failed by that.
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
        """Start a part in the newest batch, or in a new one where that has succeeded, was abandoned or is late.
        (Its last part joins it again until the callback has ended well.) ``callback``: kind and body. Repeatable.
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
        """End a part, badly where there is an error. May be repeated; an error after a success gives back the
        callback that came with that.
        """

    @abc.abstractmethod
    def claim_callback(
        self, member_id: int, name: str | None, batch_id: int | None, owner: str, uid: str, own: bool
    ) -> Callback | None:
        """Claim a callback that nobody runs: the oldest of a name, or that of one batch, also when it has failed.
        ``own``: the caller knows what to run for those that are only known to who declared them. May be repeated.
        """

    @abc.abstractmethod
    def return_callback(self, member_id: int, uid: str) -> bool:
        """Give back what a claim may have left whose answer was lost for good; whether it had."""

    @abc.abstractmethod
    def end_callback(self, member_id: int, batch_id: int, attempt: int, error: str | None) -> bool:
        """End a callback; False when it is ours no more. May be repeated."""

    @abc.abstractmethod
    def abandon_batch(self, name: str | None, batch_id: int | None) -> int | None:
        """Abandon the newest batch of a name, or one by its number, unless it is over: its number, or None."""

    @abc.abstractmethod
    def list_batches(self, name: str | None, batch_id: int | None, most: int) -> list[BatchEntry]:
        """Batches with their parts, newest first."""


class SchemaSession(LockSession):
    """Tables that are installed, upgraded and looked after."""

    offers = "tables"

    @property
    @abc.abstractmethod
    def installed(self) -> Installed:
        """The features that the database has."""

    @abc.abstractmethod
    def settings(self) -> dict[str, str] | None:
        """Table ``setting``; None when the schema is not there."""

    @abc.abstractmethod
    def install(self, plan: Plan) -> None:
        """Under the install lock and in one transaction: read the version, run the scripts that ``plan`` gives for it.
        A number beside a script is the schema's version after it.
        """

    def has_feature(self, feature: str) -> bool:
        return self.installed.has(feature)

    @abc.abstractmethod
    def diagnose(self) -> list[Check]:
        """Engine-specific checks for ``sqlsem doctor``."""

    def check_schema(self) -> dict[str, str]:
        """The settings, when this client can work with the schema; else `SchemaError` with the remedy."""
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
    """One connection of an event loop, to wait in."""

    @property
    @abc.abstractmethod
    def usable(self) -> bool:
        """Whether another wait may succeed on this session; not when it was cancelled in the middle of something."""

    @abc.abstractmethod
    async def wait(self, ticket: Ticket, timeout: float) -> bool | None:
        """As `LockSession.wait`."""

    @abc.abstractmethod
    async def upgrade(self, ticket: Ticket, timeout: float) -> bool | None:
        """As `ConversionSession.upgrade`."""
