"""The base class of engines: an `Engine` opens sessions, which implement `sqlsem.engines.protocol`.

An engine knows the database's URL and its label for messages; neither its repr nor an error shows the password.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sqlsem import sql
from sqlsem.engines import borrowed
from sqlsem.engines.failures import AdaptiveTimeout, Busy, Disconnected, Unanswered, time_limited
from sqlsem.engines.installed import FeatureSelection, Installed, Statements, setting_number
from sqlsem.engines.optional import Session
from sqlsem.engines.protocol import AsyncSession, Capability, EngineConnection
from sqlsem.sql.features import CORE, from_setting
from sqlsem.util.record import record
from sqlsem.util.timing import Timing
from sqlsem.util.timing import current as current_timing
from sqlsem.values.errors import ConfigurationError, SchemaError

if TYPE_CHECKING:
    from sqlsem.values.locks import Ticket

__all__ = [
    "AdaptiveTimeout",
    "AsyncSession",
    "Busy",
    "Creator",
    "Disconnected",
    "Engine",
    "EngineConnection",
    "Options",
    "Session",
    "Unanswered",
    "time_limited",
]

#: The most seconds of silence before probes: the default of many systems. (Linux takes no more than nine hours.)
LONGEST_KEEPALIVE = 7200
#: The type of ``creator=``: returns a new DB-API connection.
Creator = Callable[[], Any]


@record
class Options:
    """The settings of one client. Durations are in seconds."""

    grace: float = 5.0
    lease: float | None = None
    schema: str = "sqlsem"
    table: str = "ProcessControl"
    #: Seconds for which one statement of the main session may wait for a gate. Short, so that heartbeats are not late.
    gate_timeout: float = 1.0
    #: Seconds to wait for a server that does not answer a connection attempt.
    connect_timeout: float = 10.0
    #: The times by which the client polls.
    timing: Timing = field(default_factory=current_timing)

    @property
    def keepalive(self) -> int:
        """Seconds of silence after which a connection is probed, so that this client notices within about a grace that
        the server has vanished.
        """
        return min(max(1, math.ceil(self.grace)), LONGEST_KEEPALIVE)


#: The features that `sqlsem init` installs without an option: the features that the database has; in a new one, all.
KEEP_FEATURES = FeatureSelection()


class Engine(abc.ABC):
    """One database, from which sessions are opened."""

    name: ClassVar[str]
    #: The class of this engine's sessions; its methods are the capabilities of this engine.
    session_class: ClassVar[type[Session]]
    #: True if a live member can lose its beacon, because the beacon is tied to a connection.
    beacon_may_fail: ClassVar[bool] = True
    #: True if workers claim short tasks in advance, while they run others: the server then works at the same time.
    prefetches: ClassVar[bool] = False
    #: The number of sessions in which the tasks of one event loop may wait at the same time, beside the main session.
    async_sessions: ClassVar[int] = 3
    #: False if the tables lie in no schema, so that the schema's name is the beginning of their names instead.
    has_schemas: ClassVar[bool] = True
    #: Seconds for all statements that prepare a new connection. None: no limit, because a file always answers.
    setup_timeout: ClassVar[float | None] = 5.0
    #: A hint for the operator who has guarded a table.
    guard_hint: ClassVar[str] = ""
    #: True if a missing database file is created (SQLite). Callers that only read set it to False.
    creates: bool = True
    #: True if another server can take over at once when one does not answer: the nodes of a cluster are equal.
    has_other_servers: bool = False
    #: The last answer of `OptionalSession.database_identity`.
    known_identity: str | None = None

    def __init__(self, url: str, options: Options, creator: Creator | None = None) -> None:
        sql.check_identifier("The schema's name", options.schema)
        sql.check_identifier("The table's name", options.table)
        self.options = options
        self.creator = creator
        #: The timeout of the statements that prepare a connection, for all together.
        self.setup = None if self.setup_timeout is None else AdaptiveTimeout(self.setup_timeout)
        #: The features that the database is known to have.
        self.installed = Installed(lambda: self.label, self.read_settings)
        if self.has(Capability.TABLES):
            self.queries()  # imports modules now: a fork during a later import would leave its lock held in the child

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """The database's name for messages, without a password."""

    @property
    def idle_heartbeat(self) -> float:
        """Seconds between two heartbeats of a member that holds nothing and waits for nothing."""
        return self.options.timing.idle_heartbeat

    @property
    def schema_label(self) -> str:
        """The location of the tables in the database, for messages."""
        return f"schema {self.options.schema}" if self.has_schemas else f"prefix {self.options.schema}_"

    @property
    def local_file(self) -> Path | None:
        """The database's file on this host, if it is a file."""
        return None

    # -- capabilities -------------------------------------------------------------------------------------------

    @classmethod
    @functools.cache
    def has(cls, capability: Capability) -> bool:
        """Return True if the sessions of this engine have a capability."""
        return cls.session_class.offers(capability)

    def require(self, capability: Capability, caller: str) -> None:
        """Raise `ConfigurationError` if this engine lacks a capability. ``caller``: the operation, for the message."""
        if not self.has(capability):
            raise ConfigurationError(
                f"{caller} needs {capability.title}, which {self.label} does not offer; name another database, such "
                f"as sqlite:///file.db (in $SQLSEM_URL, --url or sqlsem.connect(…))",
                code="feature",
            )

    # -- sessions -----------------------------------------------------------------------------------------------

    def connect(self, purpose: str) -> Session:
        """Open a session. ``purpose``: 'main', 'wait', 'look' or 'work'; shown to DBAs if the engine can. Call
        `require` first for a capability that not every engine has.

        Raises `Disconnected` if the database cannot be reached now, `ConfigurationError` if a retry cannot help
        (missing driver, wrong password).
        """
        session = self.open_session(purpose)
        try:
            with time_limited(session, self.setup):
                session.prepare(purpose)
        except BaseException:
            session.close()
            raise
        return session

    @abc.abstractmethod
    def open_session(self, purpose: str) -> Session:
        """Return the session of `connect`, before its first statement."""

    def pin_steps(self, cursor: Any, ticket: Ticket) -> Generator[Any, Any, bool]:
        """Pin the row of ``ticket`` until the transaction of the caller's ``cursor`` ends. Return False if the row was
        removed. Yields the results of the cursor's methods: callers in asyncio await them.
        """
        if not self.has(Capability.TABLES):
            raise ConfigurationError(f"{self.label} has no rows that a transaction could pin: call check() instead")
        yield cursor.execute(self.queries()["pin"], (ticket.resource, ticket.position, ticket.requesting_id))
        rows = yield cursor.fetchall()  # (all: the next statement needs an unbuffered cursor at its end)
        return bool(rows and borrowed.values(rows[0])[0])

    def identity_steps(self, cursor: Any) -> Generator[Any, Any, str]:
        """Return the identity of the database of the caller's ``cursor`` (`OptionalSession.database_identity`).
        Yields as `pin_steps` does.
        """
        yield cursor.execute(self.queries()["database_identity"])
        rows = yield cursor.fetchall()  # (as in `pin_steps`)
        return str(borrowed.values(rows[0])[0])

    def release_on_commit(self, cursor: Any, marker: str) -> Generator[Any, Any, None]:
        """Write a commit marker (`OptionalSession.is_committed`) in the transaction of the caller's ``cursor``. Yields
        as `pin_steps` does.
        """
        yield cursor.execute(self.queries()["release_on_commit"], (marker,))

    def same_database(self, identity: str, other: str) -> bool:
        """Return True if two database identities are of the same database."""
        return identity == other

    def session_notes(self, cursor: Any) -> Generator[Any, Any, tuple[int, str]]:
        """Return the number of the cursor's session on the server, and the grants that the session asserts for guarded
        tables: values of `session_entry`, separated by blanks. Yields as `pin_steps` does.
        """
        if not self.has(Capability.GUARDED_TABLES):
            raise ConfigurationError(
                f"{self.label} has no guarded tables, for which a connection could count on a grant: call "
                f"assert_held(cursor) in each transaction",
                code="feature",
            )
        yield cursor.execute(self.queries()["session_notes"])
        row = yield cursor.fetchone()
        number, entries = borrowed.values(row)
        return int(number), str(entries)

    def owns_session(self, connection: Any, number: int) -> bool:
        """Return False if the server's session of that number is known to belong to another connection."""
        return True

    def session_entry(self, cursor: Any, ticket: Ticket) -> Generator[Any, Any, str]:
        """Return the text of a grant in a session's note; empty if its row was removed. Yields as `pin_steps` does."""
        yield cursor.execute(self.queries()["session_entry"], (ticket.resource, ticket.position, ticket.requesting_id))
        row = yield cursor.fetchone()
        return str(borrowed.values(row)[0]) if row else ""

    def note_session(self, cursor: Any, entries: str) -> Generator[Any, Any, None]:
        """Store these grants as the note of the session of ``cursor``. Yields as `pin_steps` does."""
        yield cursor.execute(self.queries()["note_session"], (entries,))

    def session_on(self, cursor: Any) -> Session:
        """Return a session that runs its statements by the caller's ``cursor``, in the caller's transaction. Errors of
        the driver are raised unchanged. For ``put(…, cursor=…)``.
        """
        raise ConfigurationError(f"{self.label} cannot do this in a transaction of the caller's", code="feature")

    @property
    def supports_async(self) -> bool:
        """True if the driver has connections for asyncio, so that `connect_async` works."""
        return False

    async def connect_async(self, purpose: str) -> AsyncSession:
        """Open a session for the running event loop, as `connect` does for threads."""
        raise NotImplementedError

    @property
    def read_only_hint(self) -> str:
        """The message for a login that may only read."""
        return (
            f"This login may only read; an administrator can add it to the role {self.options.schema}_operator "
            f"(see: sqlsem sql {self.name} permissions)"
        )

    # -- the tables ---------------------------------------------------------------------------------------------

    def read_settings(self) -> dict[str, str] | None:
        """Return table ``setting``; empty if it is missing, None if it cannot be read."""
        with contextlib.closing(self.connect("look")) as session:
            try:
                return session.settings() or {}
            except SchemaError:
                return None

    def is_permission_error(self, exc: BaseException) -> bool:
        """Return True if an error of sqlsem was caused by a missing right of the login."""
        return False

    def database_message(self, exc: BaseException) -> str:
        """Return the database's own message behind an error of sqlsem, in one line."""
        return " ".join(str(exc.__cause__).split())

    def queries(self) -> Mapping[str, str]:
        """Return the client's statements; reading one raises `SchemaError` if the database lacks its feature."""
        texts = sql.queries(self.name, self.options.schema, self.options.table)
        feature_of = sql.query_features(self.name)
        return texts if set(feature_of.values()) <= {CORE} else Statements(texts, feature_of, self.installed)

    def plan(self, settings: Mapping[str, str], wish: FeatureSelection = KEEP_FEATURES) -> list[tuple[int | None, str]]:
        """Return the scripts that upgrade tables with these settings (empty: no tables), and add the features of
        ``wish``. Raises `SchemaError` if the tables are newer than this client.
        """
        version = setting_number(settings, "schema_version") if settings else 0
        if version > sql.LATEST:
            raise SchemaError(
                f"The sqlsem tables are version {version}, newer than this client's {sql.LATEST}, and are left alone; "
                f"upgrade the client with: pip install --upgrade sqlsem"
            )
        names = {"schema": self.options.schema, "table": self.options.table}
        features = wish.features(settings)
        present = from_setting(settings.get("features")) if settings else features
        scripts: list[tuple[int | None, str]] = []
        scripts += sql.migrations(self.name, version, features=present, **names)
        if features - present:
            scripts += [(None, text) for _, text in sql.migrations(self.name, 0, features=features - present, **names)]
        for name in sql.rerunnable(self.name, features):
            scripts.append((None, sql.script(self.name, name, features=features, **names)))
        return scripts

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"
