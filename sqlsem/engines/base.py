"""What every engine offers: an `Engine` that opens sessions, which speak the protocol in `sqlsem.engines.protocol`."""

from __future__ import annotations

import abc
import contextlib
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from sqlsem import runtime, sql
from sqlsem.engines import borrowed
from sqlsem.engines.installed import FeatureSelection, Installed, Statements
from sqlsem.engines.protocol import (
    CAPABILITIES,
    AsyncSession,
    Check,
    EngineConnection,
    LockSession,
    Plan,
    SchemaSession,
    Session,
)
from sqlsem.engines.settings import setting_number
from sqlsem.errors import ConfigurationError, SchemaError, Unavailable
from sqlsem.model import Ticket, monotonic
from sqlsem.sql.features import CORE, from_setting

__all__ = [
    "AdaptiveTimeout",
    "AsyncSession",
    "Busy",
    "Check",
    "Creator",
    "Disconnected",
    "Engine",
    "EngineConnection",
    "LockSession",
    "Options",
    "Plan",
    "Refused",
    "Replaced",
    "Session",
    "Unanswered",
    "here",
    "program_name",
    "setting_number",
    "time_limited",
]

#: What ``creator=`` is: returns a new DB-API connection.
Creator = Callable[[], Any]


class Disconnected(Unavailable):
    """This session is gone or never came; another may do better."""


class Refused(Disconnected):
    """The server has answered, and makes no connection now: its address is right."""


class Replaced(Disconnected):
    """The database of this session is not the one that other programs find: nothing in it counts any more."""


class Unanswered(Disconnected):
    """A statement was given up that took longer than it may. The server may be slow rather than gone: the next attempt
    is given more time, so another try is worth it even when no time is left for tries (``patient``), up to a point.
    """

    patient = False

    @classmethod
    def of(cls, exc: Disconnected, allowance: AdaptiveTimeout) -> Unanswered:
        """What is to be raised in place of ``exc``, which came of giving a statement up."""
        told = cls(f"{exc} (no answer came within {allowance.seconds:.1f} s)")
        told.patient = allowance.grow()
        return told


class Busy(Unavailable):
    """Somebody holds a lock in the database for longer than we are willing to wait in one go; try again."""


class AdaptiveTimeout:
    """How long an answer may take: ``base`` seconds, and twice as long after each time that was too short.

    Else a server that needs longer, as it has to compile something first, would be asked, cut short, and asked again
    for ever. What never answers is given up later and later, but not much.
    """

    #: How often it is doubled at the most.
    MAX_DOUBLINGS = 3
    #: When nothing was cut short for so many seconds, it is as at first.
    RESET_SECONDS = 300.0

    def __init__(self, base: float) -> None:
        self.base = base
        self._times, self._since = 0, -math.inf

    @property
    def seconds(self) -> float:
        """What an answer may take now."""
        if monotonic() - self._since > self.RESET_SECONDS:
            self._times = 0
        return self.base * float(2**self._times)

    def grow(self) -> bool:
        """That was too short. Whether the next attempt is given more."""
        patient = self._times < self.MAX_DOUBLINGS
        self._times, self._since = min(self._times + 1, self.MAX_DOUBLINGS), monotonic()
        return patient


@dataclass(frozen=True, slots=True)
class Options:
    """How this process takes part; durations in seconds."""

    grace: float = 5.0
    lease: float | None = None
    schema: str = "sqlsem"
    table: str = "ProcessControl"
    #: Seconds that one statement of the main session may wait for a gate, so that heartbeats get through.
    gate_timeout: float = 1.0
    #: Seconds to reach a server that does not answer.
    connect_timeout: float = 10.0


#: What `sqlsem init` does unless it is told otherwise.
KEEP_FEATURES = FeatureSelection()


class Engine(abc.ABC):
    """A database that can be reached: knows its URL (and keeps the password to itself)."""

    name: ClassVar[str]
    #: What `open_session` gives: from what it derives from follows what this engine offers.
    session_class: ClassVar[type[LockSession]]
    #: Whether a living member's beacon can be lost, as one that hangs on a connection can.
    beacon_may_fail: ClassVar[bool] = True
    #: Whether a worker claims short tasks while it runs others: a server does that work meanwhile.
    prefetches: ClassVar[bool] = False
    #: Sessions in which the tasks of one event loop may wait at the same time. With the main session that makes four.
    async_sessions: ClassVar[int] = 3
    #: Seconds for the statements that make a new connection ready: the server may fall silent there too. None: a file
    #: does not.
    setup_timeout: ClassVar[float | None] = 5.0
    #: Seconds between two pings of a member that holds nothing and waits for nothing.
    idle_heartbeat_seconds: ClassVar[float] = 60.0
    #: What else an operator has to know about a table that is guarded from now on.
    guard_hint: ClassVar[str] = ""
    #: Whether a database that is not there is created (SQLite). Set to False by who only looks.
    creates: bool = True
    #: What `CommitReleaseSession.database_identity` has said last.
    known_identity: str | None = None

    def __init__(self, url: str, options: Options, creator: Creator | None = None) -> None:
        sql.check_identifier("The schema's name", options.schema)
        sql.check_identifier("The table's name", options.table)
        self.options = options
        self.creator = creator
        #: What the statements that make a connection ready may take, altogether.
        self.setup = None if self.setup_timeout is None else AdaptiveTimeout(self.setup_timeout)
        #: The features that the database is known to have.
        self.installed = Installed(lambda: self.label, self.read_settings)
        if self.has(SchemaSession):
            self.queries()  # now: later, a fork in the middle of it would leave the import system locked in the child

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """The database in words, for messages: never with a password."""

    @property
    def schema_label(self) -> str:
        """Where in the database the tables are, in words."""
        return f"schema {self.options.schema}"

    @property
    def local_file(self) -> Path | None:
        """The file of this host in which the database is, if it is one."""
        return None

    # -- capabilities -------------------------------------------------------------------------------------------

    @classmethod
    def has(cls, capability: type[Any]) -> bool:
        """True if the sessions of this engine have a capability (a class of `sqlsem.engines.protocol`)."""
        return issubclass(cls.session_class, capability)

    @classmethod
    def capabilities(cls) -> tuple[type[LockSession], ...]:
        """Return the capabilities that the sessions of this engine have beside locks."""
        return tuple(capability for capability in CAPABILITIES if cls.has(capability))

    def require(self, capability: type[Any], caller: str) -> None:
        """Raise `ConfigurationError` if this engine lacks a capability that ``caller`` (in words) needs."""
        if not self.has(capability):
            raise ConfigurationError(
                f"{caller} needs {capability.offers}, which {self.label} does not offer; name another database, such "
                f"as sqlite:///file.db (in $SQLSEM_URL, --url or sqlsem.connect(…))"
            )

    # -- sessions -----------------------------------------------------------------------------------------------

    def connect(self, purpose: str) -> Session:
        """Open a session; ``purpose`` ('main', 'wait', 'look', 'work') is shown to DBAs where the engine can. For what
        not every engine offers, ask `require` first.

        Raises `Disconnected` when the database is out of reach (worth another try), `ConfigurationError` when it
        never will be (missing driver, wrong password).
        """
        session = self.open_session(purpose)
        try:
            with time_limited(session, self.setup):
                session.prepare(purpose)
        except BaseException:
            session.close()
            raise
        return cast("Session", session)

    @abc.abstractmethod
    def open_session(self, purpose: str) -> LockSession:
        """The connection of `connect`, before the first statement."""

    def pin(self, cursor: Any, ticket: Ticket) -> bool:
        """Inside the transaction of the caller's ``cursor``: is the row there, and kept there until that ends?"""
        asked = self.pin_steps(cursor, ticket)
        answer = None
        while True:
            try:
                answer = asked.send(answer)
            except StopIteration as done:
                there: bool = done.value
                return there

    def pin_steps(self, cursor: Any, ticket: Ticket) -> Generator[Any, Any, bool]:
        """`pin`, yielding what the cursor's methods return, so that it can be awaited where it has to be."""
        raise ConfigurationError(f"{self.label} has no rows that a transaction could keep: ask check() instead")

    def identity_steps(self, cursor: Any) -> Generator[Any, Any, str]:
        """As `CommitReleaseSession.database_identity`, for the caller's ``cursor``; yields as `pin_steps` does."""
        yield cursor.execute(self.queries()["whereabouts"])
        row = yield cursor.fetchone()
        return str(borrowed.values(row)[0])

    def release_on_commit(self, cursor: Any, word: str) -> Generator[Any, Any, None]:
        """Write a commit marker in the transaction of the caller's ``cursor`` (`CommitReleaseSession`); yields as
        `pin_steps` does.
        """
        yield cursor.execute(self.queries()["release_on_commit"], (word,))

    def same_database(self, one: str, other: str) -> bool:
        """Whether two such words mean the same database."""
        return one == other

    def session_notes(self, cursor: Any) -> Generator[Any, Any, tuple[int, str]]:
        """Which of the server's sessions that is, by its number, and the grants that it counts on in guarded tables, as
        `session_entry` tells them, with blanks between. Yields as `pin_steps` does.
        """
        raise ConfigurationError(
            f"{self.label} has no guarded tables, for which a connection could count on a grant: call "
            f"assert_held(cursor) in each transaction"
        )

    def owns_session(self, connection: Any, number: int) -> bool:
        """Whether the server's session of that number is this connection's own, as far as can be told."""
        return True

    def session_entry(self, cursor: Any, ticket: Ticket) -> Generator[Any, Any, str]:
        """A grant as a session notes it; empty when it is gone. Yields as `pin_steps` does."""
        yield cursor.execute(self.queries()["session_entry"], (ticket.resource, ticket.position, ticket.requesting_id))
        row = yield cursor.fetchone()
        return str(borrowed.values(row)[0]) if row else ""

    def note_session(self, cursor: Any, entries: str) -> Generator[Any, Any, None]:
        """Have the session of ``cursor`` count on those grants; yields as `pin_steps` does."""
        yield cursor.execute(self.queries()["note_session"], (entries,))

    def session_on(self, cursor: Any) -> Session:
        """A session that runs its statements by the caller's ``cursor``, inside the caller's own transaction, and says
        what goes wrong in the driver's own words. To put tasks with.
        """
        raise ConfigurationError(f"{self.label} does not offer what is to be done in a transaction of the caller's")

    @property
    def supports_async(self) -> bool:
        """Whether `connect_async` can be used here: the driver has connections for asyncio."""
        return False

    async def connect_async(self, purpose: str) -> AsyncSession:
        """As `connect`, in a running event loop."""
        raise NotImplementedError

    @property
    def read_only_hint(self) -> str:
        """What to tell somebody who may look, and no more."""
        return (
            f"This login may look, and no more; an administrator can add it to the role {self.options.schema}_operator "
            f"(see: sqlsem sql {self.name} permissions)"
        )

    # -- the tables ---------------------------------------------------------------------------------------------

    def read_settings(self) -> dict[str, str] | None:
        """Table ``setting`` (empty: not there), without changing anything; None when it cannot be told."""
        session = self.connect("look")
        try:
            return session.settings() or {}
        except SchemaError:
            return None
        finally:
            session.close()

    def is_permission_error(self, exc: BaseException) -> bool:
        """Whether an error of ours says that the database's login lacks a right."""
        return False

    def queries(self) -> Mapping[str, str]:
        """The client's statements for this engine; `SchemaError` for one whose feature the database lacks."""
        texts = sql.queries(self.name, self.options.schema, self.options.table)
        feature_of = sql.query_features(self.name)
        return texts if set(feature_of.values()) <= {CORE} else Statements(texts, feature_of, self.installed)

    def plan(self, settings: Mapping[str, str], wish: FeatureSelection = KEEP_FEATURES) -> list[tuple[int | None, str]]:
        """The scripts that bring tables with these settings (empty: there are none) up to date, and add the features
        wished for. Raises `SchemaError` rather than downgrade.
        """
        version = setting_number(settings, "schema_version") if settings else 0
        if version > sql.LATEST:
            raise SchemaError(
                f"The sqlsem tables are version {version}, newer than this client's {sql.LATEST}, and are left alone; "
                f"upgrade the client with: pip install --upgrade sqlsem"
            )
        names = {"schema": self.options.schema, "table": self.options.table}
        features = wish.features(settings)
        there = from_setting(settings.get("features")) if settings else features
        scripts: list[tuple[int | None, str]] = []
        scripts += sql.migrations(self.name, version, features=there, **names)
        if features - there:
            scripts += [(None, text) for _, text in sql.migrations(self.name, 0, features=features - there, **names)]
        for name in sql.rerunnable(self.name, features):
            scripts.append((None, sql.script(self.name, name, features=features, **names)))
        return scripts

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"


def program_name() -> str:
    """What this process is called where people see it."""
    return os.path.basename(sys.argv[0] or sys.executable)[:255] or "python"


def here() -> str:
    """Where something is done, for what is written down of it: host, process and program, in lines."""
    return f"{socket.gethostname()}\n{os.getpid()}\n{program_name()}"


@contextlib.contextmanager
def time_limited(session: EngineConnection, limit: AdaptiveTimeout | float | None) -> Iterator[None]:
    """Interrupt what goes on with a session after so many seconds: the other side may never answer."""
    if limit is None:
        yield
        return
    over = threading.Event()

    def end() -> None:
        over.set()
        session.interrupt()

    timer = runtime.current().timer(limit.seconds if isinstance(limit, AdaptiveTimeout) else limit, end)
    timer.start()
    try:
        yield
    except Disconnected as exc:
        if over.is_set() and isinstance(limit, AdaptiveTimeout):
            raise Unanswered.of(exc, limit) from exc
        raise
    finally:
        timer.cancel()
