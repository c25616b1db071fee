"""What every engine offers: an `Engine` that opens `Session`\\ s, and sessions that speak the protocol.

A session is one connection. The coordinator keeps one *main* session (the member's beacon, registration, release,
pings) and borrows others to wait in; the engine decides only how each step is said in SQL. All calls block, none
retries: a lost connection is `Disconnected`, and whoever owns the session decides what then.
"""

from __future__ import annotations

import abc
import contextlib
import math
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlsem import sql
from sqlsem.deadlocks import Found
from sqlsem.errors import Deadlock, SchemaError, Unavailable
from sqlsem.model import (
    UPGRADE,
    Attempt,
    Claimed,
    Continuation,
    End,
    Entry,
    NewTask,
    PartEnd,
    PartStart,
    Past,
    Pulse,
    QueueState,
    Request,
    Resource,
    RoundEntry,
    TaskEntry,
    Ticket,
    Upgrading,
    monotonic,
)

__all__ = [
    "GROUPED",
    "GROUP_SIZE",
    "AsyncSession",
    "Busy",
    "Check",
    "Creator",
    "Disconnected",
    "Engine",
    "Options",
    "Plan",
    "Session",
    "Unanswered",
    "Wire",
    "bounded",
    "setting_number",
]

#: The kinds of tasks that may be claimed in groups, and characters of bodies after which a group is large enough.
GROUPED, GROUP_SIZE = ("call", "sql"), 1_000_000
#: What ``creator=`` is: returns a new DB-API connection.
Creator = Callable[[], Any]
#: The scripts to run on a schema of some version (0: none there), each with the version that it leads to, if any.
Plan = Callable[[int], Iterable["tuple[int | None, str]"]]


class Disconnected(Unavailable):
    """This session is gone or never came; another may do better."""


class Unanswered(Disconnected):
    """A statement was given up that took longer than it may. The server may be slow rather than gone: the next attempt
    is given more time, so another try is worth it even when no time is left for tries (``patient``), up to a point.
    """

    patient = False

    @classmethod
    def of(cls, exc: Disconnected, allowance: Allowance) -> Unanswered:
        """What is to be raised in place of ``exc``, which came of giving a statement up."""
        told = cls(f"{exc} (no answer came within {allowance.seconds:.1f} s)")
        told.patient = allowance.exceeded()
        return told


class Busy(Unavailable):
    """Somebody holds a lock in the database for longer than we are willing to wait in one go; try again."""


class Allowance:
    """How long an answer may take: ``base`` seconds, and twice as long after each time that was too short.

    Else a server that needs longer, as it has to compile something first, would be asked, cut short, and asked again
    for ever. What never answers is given up later and later, but not much.
    """

    #: How often it is doubled at the most.
    DOUBLED = 3
    #: When nothing was cut short for so many seconds, it is as at first.
    FORGOTTEN = 300.0

    def __init__(self, base: float) -> None:
        self.base = base
        self._times, self._since = 0, -math.inf

    @property
    def seconds(self) -> float:
        """What an answer may take now."""
        if monotonic() - self._since > self.FORGOTTEN:
            self._times = 0
        return self.base * float(2**self._times)

    def exceeded(self) -> bool:
        """That was too short. Whether the next attempt is given more."""
        patient = self._times < self.DOUBLED
        self._times, self._since = min(self._times + 1, self.DOUBLED), monotonic()
        return patient


@dataclass(frozen=True, slots=True)
class Options:
    """How this process takes part; durations in seconds."""

    grace: float = 5.0
    lease: float | None = None
    schema: str = "sqlsem"
    table: str = "ProcessControl"
    #: How long one statement of the main session may wait for a gate before it lets the pings through.
    patience: float = 1.0
    #: Seconds to reach a server that does not answer.
    connect_timeout: float = 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of ``sqlsem doctor``."""

    name: str
    ok: bool
    detail: str
    mend: str = ""


class Wire(abc.ABC):
    """A connection that can be made to end from another thread, and let go of in a forked child."""

    @abc.abstractmethod
    def interrupt(self) -> None:
        """From another thread: make a call that is under way fail soon with `Disconnected`."""

    def abandon(self) -> None:  # noqa: B027 - most sessions hold nothing that a fork copies
        """In a forked child: let go of what the parent's session uses, without a word to the server."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection; never raises."""


class Session(Wire):
    """One connection. Not for two threads at once.

    What makes a member hold something is a *sign of life* in the same transaction: `enrol`, `resume`, `ping`,
    `register`, `claim_task`, `next_task`, `next_tasks` when it claims, `start_part` and `claim_then` renew the member's
    lease (all but the first three let one be of which less than an eighth has run), or find that the member was given
    up and raise `Disconnected`. So nobody is let in, or starts, on a lease that is over.
    """

    @abc.abstractmethod
    def prepare(self, purpose: str) -> None:
        """Make a connection ready that was just opened."""

    # -- membership (main session) ------------------------------------------------------------------------------

    @abc.abstractmethod
    def enrol(self, host: str, pid: int, program: str) -> int:
        """Become a new member, whose beacon this session holds. Returns its number."""

    @abc.abstractmethod
    def resume(self, member_id: int) -> bool:
        """Take over an existing member on this new session; False when it has been given up meanwhile."""

    @abc.abstractmethod
    def ping(self, member_id: int) -> Pulse:
        """Give a sign of life: renew the lease; and tell which rows are ours."""

    @abc.abstractmethod
    def resign(self, member_id: int) -> None:
        """Leave for good, with all rows."""

    # -- requests (main session) --------------------------------------------------------------------------------

    @abc.abstractmethod
    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        """Take a number for each request, all in one transaction; None when ``only_if_free`` and one was not.

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
    def wait(self, ticket: Ticket, timeout: float, nudge: threading.Event) -> bool | None:
        """Wait up to ``timeout`` seconds for the turn of ``ticket``: True when granted, False when not yet,
        None when its row is gone. Setting ``nudge`` from another thread says that looking now may pay.
        """

    # -- conversions (any session; `downgrade` on the main session, which holds the entry locks) --------------------

    @abc.abstractmethod
    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        """Have the reader of ``ticket`` begin to become the writer; where it is alone it is at once. ``only_if_free``:
        change nothing otherwise.

        May be repeated. Once begun it lets nobody new in, until `upgrade` has ended it or `downgrade` is called. Raises
        `Deadlock` when another reader of the resource is upgrading; then nothing was changed. May raise `Busy`.
        """

    @abc.abstractmethod
    def upgrade(self, ticket: Ticket, timeout: float, nudge: threading.Event) -> bool | None:
        """Wait up to ``timeout`` seconds until the reader of ``ticket``, which has begun to upgrade, is alone and the
        writer: True when it is, False when not yet (or `downgrade` was called), None when its row is gone.
        """

    @abc.abstractmethod
    def downgrade(self, ticket: Ticket) -> bool:
        """Make the writer of ``ticket`` a reader, or have a reader give up its upgrade; False when the row is gone.
        Those behind who may now enter are woken. May be repeated. May raise `Busy`.
        """

    def _already_upgrading(self, ticket: Ticket) -> Deadlock:
        other = "another reader"
        for one in self.entries(ticket.resource):
            if one.access.startswith(UPGRADE) and one.position != ticket.position:
                other = f"{one.host}:{one.pid} ({one.owner}) at {one.position}"
        return Deadlock(
            f"{other} is upgrading on {ticket.resource!r} already: it waits until the reader at {ticket.position} "
            f"leaves, which would wait for it; release this one, then ask to write",
            resource=ticket.resource,
        )

    @abc.abstractmethod
    def find_deadlock(self, member_id: int) -> Found | None:
        """The deadlock whose youngest request is this member's, if there is one: it has to be given up."""

    # -- what people see and operators do (any session) ---------------------------------------------------------

    @abc.abstractmethod
    def entries(self, resource: str | None) -> list[Entry]:
        """The queue, one or all resources, in order. Whoever is dead is shown so, and removed by nobody who looks."""

    @abc.abstractmethod
    def history(
        self,
        resource: str | None,
        most: int,
        *,
        since: float | None = None,
        until: float | None = None,
        outcome: str | None = None,
    ) -> list[Past]:
        """Finished requests, newest first; that ended ``since`` seconds ago at the most, ``until`` at the least."""

    @abc.abstractmethod
    def resources(self) -> list[Resource]:
        """All resources that have rows or settings."""

    @abc.abstractmethod
    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        """Set ``cap``, ``stale_after`` (ms) or ``paused`` (1, 0)."""

    @abc.abstractmethod
    def revoke(self, position: int, force: bool) -> int:
        """Take a row away: 0 it is gone, 1 its living owner has been told and has ``grace``, -1 no such row."""

    @abc.abstractmethod
    def reap(self) -> int:
        """Test everybody now and remove the dead; the number of rows removed."""

    @abc.abstractmethod
    def prune(self, most: int) -> int:
        """Remove at most ``most`` rows of history that are past keeping."""

    # -- the work queue -----------------------------------------------------------------------------------------

    @abc.abstractmethod
    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        """Put them, all or none; their numbers. Repeated with the same ``uid``, it finds those of the first time."""

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

    @abc.abstractmethod
    def queue_state(self, queue: str) -> QueueState:
        """What is left to do."""

    @abc.abstractmethod
    def list_tasks(self, queue: str | None, status: str | None, most: int) -> list[TaskEntry]:
        """Open ones in the order in which they will run, then those that ended, newest first."""

    @abc.abstractmethod
    def task_attempts(self, task_id: int) -> list[Attempt]:
        """Every attempt at a task, the running one too."""

    @abc.abstractmethod
    def set_task(self, task_id: int, what: str) -> int:
        """'retry' or 'cancel': 0 done, 1 it runs, -1 no such task, -2 it is in no such state. The task of a dead worker
        is pending again first (and so retried by that).
        """

    @abc.abstractmethod
    def prune_tasks(self, most: int) -> int:
        """Remove at most ``most`` tasks that ended and are past keeping, with their log."""

    @abc.abstractmethod
    def execute(self, text: str) -> str | None:
        """Run the SQL text of a task, in one transaction unless the text begins its own; what came of it, in words."""

    # -- rounds -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def recover_rounds(self, name: str | None, mine: int | None) -> list[int]:
        """Test the members that run parts or continuations (of one name, or all) and act for the dead: the rounds in
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
        then: tuple[str | None, str | None],
    ) -> PartStart:
        """Start a part, in the open round or a new one. ``then``: the continuation's kind and body. May be repeated."""

    @abc.abstractmethod
    def end_part(
        self,
        member_id: int,
        name: str,
        part: str,
        uid: str,
        error: str | None,
        owner: str,
        then: tuple[str | None, str | None],
    ) -> PartEnd:
        """End a part, badly where there is an error. May be repeated; an error after a success gives back the
        continuation that came with that.
        """

    @abc.abstractmethod
    def claim_then(
        self, member_id: int, name: str | None, round_id: int | None, owner: str, uid: str, own: bool
    ) -> Continuation | None:
        """Claim a continuation that nobody runs: the oldest of a name, or that of one round, also when it has failed.
        ``own``: the caller knows what to run for those that are only known to who declared them. May be repeated.
        """

    @abc.abstractmethod
    def return_then(self, member_id: int, uid: str) -> bool:
        """Give back what a claim may have left whose answer was lost for good; whether it had."""

    @abc.abstractmethod
    def end_then(self, member_id: int, round_id: int, attempt: int, error: str | None) -> bool:
        """End a continuation; False when it is ours no more. May be repeated."""

    @abc.abstractmethod
    def list_rounds(self, name: str | None, round_id: int | None, most: int) -> list[RoundEntry]:
        """Rounds with their parts, newest first."""

    # -- upkeep -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def settings(self) -> dict[str, str] | None:
        """Table ``setting``; None when the schema is not there."""

    @abc.abstractmethod
    def install(self, plan: Plan) -> None:
        """Under the install lock and in one transaction: read the version, run the scripts that ``plan`` gives for it.
        A number beside a script is the schema's version after it.
        """

    @abc.abstractmethod
    def diagnose(self) -> list[Check]:
        """Engine-specific checks for ``sqlsem doctor``."""

    def cancel_running(self) -> None:
        """From another thread: end the SQL of a task, on the server too where that can be told."""
        self.interrupt()

    @property
    def usable(self) -> bool:
        """Whether another call may succeed on this session."""
        return True

    def check_schema(self) -> dict[str, str]:
        """The settings, when this client can work with the schema; else `SchemaError` with the remedy."""
        settings = self.settings()
        if settings is None:
            raise SchemaError("The sqlsem tables are not in this database; create them with: sqlsem init")
        version, oldest = setting_number(settings, "schema_version"), setting_number(settings, "oldest_client")
        if version < sql.LATEST:
            raise SchemaError(
                f"The sqlsem tables are version {version}, this client needs {sql.LATEST}; "
                f"upgrade them (locks may be held meanwhile) with: sqlsem init"
            )
        if oldest > sql.LATEST:
            raise SchemaError(
                f"The sqlsem tables are version {version} and need a client of version {oldest} or later, "
                f"this one is {sql.LATEST}; upgrade it with: pip install --upgrade sqlsem"
            )
        return settings


class AsyncSession(Wire):
    """One connection of an event loop, to wait in."""

    @property
    @abc.abstractmethod
    def usable(self) -> bool:
        """Whether another wait may succeed on this session; not when it was cancelled in the middle of something."""

    @abc.abstractmethod
    async def wait(self, ticket: Ticket, timeout: float) -> bool | None:
        """As `Session.wait`."""

    @abc.abstractmethod
    async def upgrade(self, ticket: Ticket, timeout: float) -> bool | None:
        """As `Session.upgrade`."""


class Engine(abc.ABC):
    """A database that can be reached: knows its URL (and keeps the password to itself)."""

    name: ClassVar[str]
    #: Whether a living member's beacon can be lost, as one that hangs on a connection can.
    beacon_may_fail: ClassVar[bool] = True
    #: Sessions in which the tasks of one event loop may wait at the same time. With the main session that makes four.
    async_sessions: ClassVar[int] = 3
    #: Seconds for the statements that make a new connection ready: the server may fall silent there too. None: a file
    #: does not.
    setup_timeout: ClassVar[float | None] = 5.0
    #: Whether a database that is not there is created (SQLite). Set to False by who only looks.
    creates: bool = True

    def __init__(self, url: str, options: Options, creator: Creator | None = None) -> None:
        sql.check_identifier("The schema's name", options.schema)
        sql.check_identifier("The table's name", options.table)
        self.options = options
        self.creator = creator
        #: What the statements that make a connection ready may take, altogether.
        self.setup = None if self.setup_timeout is None else Allowance(self.setup_timeout)
        self.queries()  # read now: later, a fork in the middle of it would leave the import system locked in the child

    @property
    @abc.abstractmethod
    def where(self) -> str:
        """The database in words, for messages: never with a password."""

    @property
    def place(self) -> str:
        """Where in the database the tables are, in words."""
        return f"schema {self.options.schema}"

    def installed_version(self) -> int | None:
        """The version of the tables (0: not there), without changing anything; None when it cannot be told."""
        session = self.connect("look")
        try:
            settings = session.settings()
        except SchemaError:
            return None
        finally:
            session.close()
        return setting_number(settings, "schema_version") if settings else 0

    def denied(self, exc: BaseException) -> bool:
        """Whether an error of ours says that the database's login lacks a right."""
        return False

    def connect(self, purpose: str) -> Session:
        """Open a session; ``purpose`` ('main', 'wait', 'look', 'work') is shown to DBAs where the engine can.

        Raises `Disconnected` when the database is out of reach (worth another try), `ConfigurationError` when it
        never will be (missing driver, wrong password).
        """
        session = self.reach(purpose)
        try:
            with bounded(session, self.setup):
                session.prepare(purpose)
        except BaseException:
            session.close()
            raise
        return session

    @abc.abstractmethod
    def reach(self, purpose: str) -> Session:
        """The connection of `connect`, before the first statement."""

    def pin(self, cursor: Any, ticket: Ticket) -> bool:
        """Inside the transaction of the caller's ``cursor``: is the row there, and kept there until that ends?"""
        asked = self.pinning(cursor, ticket)
        answer = None
        while True:
            try:
                answer = asked.send(answer)
            except StopIteration as done:
                there: bool = done.value
                return there

    @abc.abstractmethod
    def pinning(self, cursor: Any, ticket: Ticket) -> Generator[Any, Any, bool]:
        """`pin`, yielding what the cursor's methods return, so that it can be awaited where it has to be."""

    @property
    def awaits(self) -> bool:
        """Whether `connect_async` can be used here: the driver has connections for asyncio."""
        return False

    async def connect_async(self, purpose: str) -> AsyncSession:
        """As `connect`, in a running event loop."""
        raise NotImplementedError

    def queries(self) -> dict[str, str]:
        """The client's statements for this engine."""
        return sql.queries(self.name, self.options.schema, self.options.table)

    def plan(self, version: int) -> list[tuple[int | None, str]]:
        """The scripts that bring a schema of that version up to date; raises `SchemaError` rather than downgrade."""
        if version > sql.LATEST:
            raise SchemaError(
                f"The sqlsem tables are version {version}, newer than this client's {sql.LATEST}, and are left alone; "
                f"upgrade the client with: pip install --upgrade sqlsem"
            )
        names = {"schema": self.options.schema, "table": self.options.table}
        scripts: list[tuple[int | None, str]] = list(sql.migrations(self.name, version, **names))
        scripts += [(None, sql.script(self.name, name, **names)) for name in sql.rerunnable(self.name)]
        return scripts

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.where}>"


def setting_number(settings: Mapping[str, str], name: str) -> int:
    """A setting that must be a number; `SchemaError` when it is none."""
    value = settings.get(name)
    if value is None or not re.fullmatch(r"[0-9]{1,9}", str(value)):
        raise SchemaError(
            f"The sqlsem tables say {name} = {value!r}, which is no number: somebody has changed table setting. "
            f"Correct it there (this client's version is {sql.LATEST})"
        )
    return int(value)


@contextlib.contextmanager
def bounded(session: Session, limit: Allowance | float | None) -> Iterator[None]:
    """Interrupt what goes on with a session after so many seconds: the other side may never answer."""
    if limit is None:
        yield
        return
    over = threading.Event()

    def end() -> None:
        over.set()
        session.interrupt()

    timer = threading.Timer(limit.seconds if isinstance(limit, Allowance) else limit, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Disconnected as exc:
        if over.is_set() and isinstance(limit, Allowance):
            raise Unanswered.of(exc, limit) from exc
        raise
    finally:
        timer.cancel()
