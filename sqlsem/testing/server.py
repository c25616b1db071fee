"""A database server in a simulation: SQLite's engine on a database in memory, with sessions that can break.

A call is one step: other actors may run before its effect, and between its effect and its answer. All sessions share
one connection. Its outermost transaction is a run, and is rolled back at the end, so that no run leaves anything to
the next one, and prepared statements serve all runs.

The beacon of a member is its session, as on a server: it is missing when the server has noticed the session's end.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

from sqlsem import sql
from sqlsem.engines.base import Disconnected, Engine, Options
from sqlsem.engines.protocol import Capability, LockSession
from sqlsem.engines.sqlite.beacons import Beacons
from sqlsem.engines.sqlite.engine import SqliteEngine
from sqlsem.engines.sqlite.notifier import UnixSocketNotifier
from sqlsem.engines.sqlite.session import SqliteSession
from sqlsem.engines.sqlite.shortcuts import ROUTINES
from sqlsem.engines.statements.session import Probe
from sqlsem.testing.calling import Calling
from sqlsem.testing.faults import FAULTS
from sqlsem.testing.fibers import Fibers
from sqlsem.testing.real import OURS, Row
from sqlsem.testing.virtual_sqlite import VirtualClock, VirtualSqlite, VirtualWakeup
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import Request, Ticket
from sqlsem.values.rates import RateRequest

__all__ = ["Server", "ServerEngine", "ServerSession", "in_memory"]

T = TypeVar("T")

NO_FILE = Path("/simulated")
#: How long a call takes, in virtual seconds: no two calls have the same time.
CALL_SECONDS = 0.0001
#: Seconds between two polls of a reader that upgrades.
UPGRADE_SECONDS = 0.5
#: A check comes this much too late, and never too early because of a rounded time.
LATE_SECONDS = 0.001
#: A promotion sets the next number forward to a multiple of this.
NUMBERS = 10_000
#: Python's limit of 128 prepared statements is too low for all that a run uses.
PREPARED = 1000
#: The calls whose changes a standby may not have received when it takes over: no client waits for that.
UNDOABLE = frozenset(("release", "cancel", "wait", "poll"))
#: The calls whose changes let no waiter continue.
SILENT = frozenset(("register_member", "reattach_member", "register", "heartbeat", "wait", "poll"))
#: The calls that only read the state of the locks: they are no steps.
READS = frozenset(
    ("entries", "resources", "find_deadlock", "priorities", "history", "overview", "operations", "rights")
)
#: The calls that are no steps for another reason, and the three that `ServerSession` divides by itself.
OTHERS = frozenset(("interrupt", "close", "settings", "install", "diagnose", "register_member", "wait", "upgrade"))
#: All calls that are steps.
CALLS = (
    LockSession.__abstractmethods__.union(
        ("poll", "next_tasks"),
        *(capability.methods for capability in Capability if SqliteSession.offers(capability)),
    )
    - READS
    - OTHERS
)


class ServerSession(Calling, SqliteSession):
    """A session of an actor. The server has it for longer than the client, if only the connection breaks."""

    _server: Server

    def __init__(self, engine: ServerEngine) -> None:
        super().__init__(engine)
        self._server, self._fibers, self.owner = engine.server, engine.server.fibers, engine.owner
        self.sleeper = _NoNotifier(engine.path, "")
        self.cut = False
        self.is_undoable = False  # True if the changes of this call may be lost with a server
        self._inside = False  # True during a call that is already divided into steps
        self._set_up()
        self._server.sessions.append(self)

    # -- its calls, divided into steps --------------------------------------------------------------------------------

    def in_steps(self, name: str, arguments: Sequence[Any], call: Callable[[], T]) -> T:
        """Make a call: other actors may run before its effect, and before its answer."""
        if self._inside or self._fibers.running is None:
            return call()
        traced = self._fibers.traced
        what = f"{name} {_named(arguments)}".rstrip() if traced else name
        self.step(what)
        answer = self._at_once(name, call)
        self.step(f"{what}: {_described(answer)}" if traced else name)
        return answer

    def _at_once(self, name: str, call: Callable[[], T]) -> T:
        """Make a call without steps."""
        self._inside, self.is_undoable = True, name in UNDOABLE
        before = self._server.version
        try:
            return call()
        finally:
            self._fibers.now += CALL_SECONDS
            if self._server.version != before:
                if not self.is_undoable:
                    self._server.mark_durable()
                if name not in SILENT:
                    self._server.wake()
            self._inside = self.is_undoable = False

    def require_connection(self) -> None:
        if self.interrupted and not self._fibers.ended:
            raise Disconnected("The connection is broken")

    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        deadline = self._fibers.now + timeout
        what = f"wait {ticket.position}"
        self.step(what)
        poll = functools.partial(self._poll_once, ticket)
        while True:
            wakeup.clear()  # before the poll, so that later changes are seen
            self.require_connection()
            granted = self._at_once("wait", poll)
            remaining = deadline - self._fibers.now
            if granted is not False or remaining <= 0:
                break
            self._server.wait_for(min(remaining, self._server.seconds_until_check(ticket.resource)), wakeup)
        self.step(f"{what}: {_described(granted)}")
        return granted

    def _poll_once(self, ticket: Ticket) -> bool | None:
        row = self.row("row", {"resource": ticket.resource, "position": ticket.position})
        if row is None:
            return None
        granted = super().poll(row["member_id"], [ticket]).get(ticket.position, False)
        if granted is False and self._server.may_have_dead_members():
            request = Request(ticket.resource, row["access"], row["limit"], row["weight"])
            if self.check_blockers(request, ticket.position, row["member_id"]):
                granted = super().poll(row["member_id"], [ticket]).get(ticket.position, False)
        return granted

    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        what = f"upgrade {ticket.position}"
        self.step(what)
        waiting = VirtualWakeup(self._server, wakeup, UPGRADE_SECONDS)
        upgraded = super().upgrade(ticket, timeout, cast("threading.Event", waiting))
        self.step(f"{what}: {_described(upgraded)}")
        return upgraded

    # -- its transactions, and the connection that it shares ----------------------------------------------------------

    def _set_up(self) -> None:
        self.connection = self.has_routines = self._server.connection

    def disconnect(self) -> None:
        self.connection = None

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        return _Change(self)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def roll_back(self) -> None:
        pass  # (the run is one transaction)

    def version(self) -> tuple[int, int]:
        self.require_connection()
        return self._server.version, 0

    def require_in_place(self, *, file_by_file: bool = False) -> None:
        pass  # (there are no files)

    def check_schema(self) -> dict[str, str]:
        return {}

    def leave_alone(self, values: dict[str, Any]) -> bool:
        with self.transaction():
            return super().leave_alone(values)

    # -- members ------------------------------------------------------------------------------------------------------

    def create_beacon(self) -> str | None:
        return None if self.options.lease is not None else self._server.create_beacon(self)

    def register_member(self, host: str, pid: int, program: str) -> int:
        call = functools.partial(super().register_member, self.owner, pid, program)
        return self.in_steps("register_member", (), call)

    def check_owner(self, resource: str, position: int, member_id: int | None) -> bool:
        before, self.is_undoable = self.is_undoable, False  # a removal against the owner's will is durable
        try:
            removed = super().check_owner(resource, position, member_id)
        finally:
            self.is_undoable = before
        if removed:
            self._server.wake()
        return removed

    # -- its end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the session in the server, or let the server notice that the process is gone."""
        if self in self._server.sessions:
            self._server.remove_session(self)
            self.lose()

    def drop(self) -> None:
        """Let the server notice that the connection is broken."""
        self.end()

    def lose(self) -> None:
        """Break the connection; the server does not notice yet."""
        self.cut = self.interrupted = True
        self.wake_caller()
        self._server.wake()

    def close(self) -> None:
        if self._fibers.ended:
            return
        self.interrupted = True
        if not self.cut:
            self.end()

    def interrupt(self) -> None:
        self.close()
        self.wake_caller()
        self._server.wake()


def _divided(name: str) -> Callable[..., Any]:
    """Return a method that makes a call of `SqliteSession` in steps."""

    def method(self: ServerSession, *arguments: Any, **named: Any) -> Any:
        call = getattr(super(ServerSession, self), name)
        return self.in_steps(name, arguments, functools.partial(call, *arguments, **named))

    return method


for _name in CALLS:
    setattr(ServerSession, _name, _divided(_name))


class _Change:
    """A change by one call, as a part of the run's transaction."""

    __slots__ = ("_connection", "_session")

    def __init__(self, session: ServerSession) -> None:
        self._session = session
        self._connection = session._server.connection

    def __enter__(self) -> None:
        self._session.require_connection()
        self._connection.execute("SAVEPOINT change")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._connection.execute("ROLLBACK TO change")
        if kind is None and self._session.is_undoable:
            self._session._server.undoable_changes += 1  # the savepoint stays
        else:
            self._connection.execute("RELEASE change")
            self._session._server.mark_durable()


class _NoNotifier(UnixSocketNotifier):
    """Nothing: each call wakes the waiters itself."""

    def notify(self, positions: Iterable[int]) -> None:
        pass


class SessionBeacons(Beacons):
    """The beacons of members: their sessions."""

    def __init__(self, server: Server) -> None:
        super().__init__(NO_FILE)
        self._server = server

    def probe(self, name: object) -> Probe:
        return Probe(True if name in self._server.beacons else None)

    def names(self) -> list[str]:
        return list(self._server.beacons)


class ServerEngine(SqliteEngine):
    """The engine of one process."""

    session_class = ServerSession
    beacon_may_fail = True
    idle_heartbeat = Engine.idle_heartbeat

    def __init__(self, server: Server, options: Options, owner: str) -> None:
        Engine.__init__(self, "sqlite://", options)  # (There is no file to examine.)
        self.server, self.owner = server, owner
        self.path, self.creates, self.files = NO_FILE, False, None
        self.beacons = server.session_beacons

    @property
    def label(self) -> str:
        return "the simulated database"

    def open_session(self, purpose: str) -> ServerSession:
        self.server.fibers.step(f"connect to {purpose}")
        if self.server.fibers.now < self.server.down_until:
            raise Disconnected("The server is down")
        return ServerSession(self)


class Server(VirtualSqlite):
    """The server of a run. ``connection``: to a database with empty tables."""

    name = "memory"
    faults = FAULTS

    def __init__(self, fibers: Fibers, connection: sqlite3.Connection, clock: VirtualClock) -> None:
        super().__init__(fibers, connection)
        self.connection = connection
        clock.server = self
        self.down_until = -math.inf
        self.beacons: dict[str, ServerSession] = {}
        self.session_beacons = SessionBeacons(self)
        self.undoable_changes = 0  # since the last change that a client has waited for
        self._beacon_count = 0
        self._noticed = -1
        self._rows: list[Row] = []
        self._rows_version = -1
        if connection.in_transaction:  # a run could not end
            connection.execute("ROLLBACK")
        connection.execute("BEGIN")
        self.own = self.engine(Options(), OURS).connect("look")

    def engine(self, options: Options, owner: str) -> ServerEngine:
        return ServerEngine(self, options, owner)

    def transaction(self, engine: Engine) -> contextlib.AbstractContextManager[Any]:
        raise ConfigurationError(
            "The simulated database in memory has no transactions; simulate with database='sqlite' or on PostgreSQL"
        )

    def close(self) -> None:
        self.connection.execute("ROLLBACK")

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Return a number that grows with each changed row."""
        return self.connection.total_changes

    def has_changed(self) -> bool:
        changed, self._noticed = self.version != self._noticed, self.version
        return changed

    def rows(self) -> list[Row]:
        if self._rows_version != self.version:
            self._rows, self._rows_version = super().rows(), self.version
        return self._rows

    def may_have_dead_members(self) -> bool:
        """Return True if a member has no beacon, or a row is revoked."""
        return any(beacon not in self.beacons for (beacon,) in self.connection.execute(BEACONS))

    def seconds_until_check(self, resource: str) -> float:
        """Return the seconds after which a waiter checks the owners ahead: one of them may have to be removed then."""
        due = self.connection.execute(DUE, {"resource": resource, "now": self.clock}).fetchone()[0]
        return math.inf if due is None else float(due) - self.clock + LATE_SECONDS

    # -- members ------------------------------------------------------------------------------------------------------

    def create_beacon(self, session: ServerSession) -> str:
        """Return the name of a new beacon, which lasts as long as the session."""
        self._beacon_count += 1
        name = f"{self._beacon_count:032x}"
        self.beacons[name] = session
        return name

    def remove_session(self, session: ServerSession) -> None:
        """Remove a session, and so its beacons."""
        self.sessions.remove(session)
        for name in [name for name, holder in self.beacons.items() if holder is session]:
            del self.beacons[name]

    def reap(self) -> None:
        super().reap()  # notices that the beacons are missing
        self.fibers.now += 3600.0
        super().reap()

    # -- operators and faults -----------------------------------------------------------------------------------------

    def counts_time(self) -> bool:
        return bool(self.connection.execute(TIMED).fetchone()[0])

    def mark_durable(self) -> None:
        """Mark all changes so far as received by the standby. (The server answers a client only after that.)"""
        for _ in range(self.undoable_changes):
            self.connection.execute("RELEASE change")
        self.undoable_changes = 0

    def fail_over(self, lost_changes: int, seconds: float) -> None:
        """Let a standby take over that lacks the last ``lost_changes`` changes of those that no client waits for."""
        for _ in range(min(lost_changes, self.undoable_changes)):
            self.connection.execute("ROLLBACK TO change")
            self.connection.execute("RELEASE change")
            self.undoable_changes -= 1
        self.connection.execute(NEXT_NUMBERS)
        self.restart(seconds)

    def restart(self, seconds: float) -> None:
        """End all sessions, and refuse connections for a while."""
        for session in [session for session in self.sessions if session.owner != OURS]:
            session.end()
        self.mark_durable()
        self.connection.execute(NEW_GRACE, (self.clock + seconds,))  # as `check_origin` of the servers
        self.down_until = self.fibers.now + seconds
        self.wake()


#: The beacons of the members; NULL for a member with a lease, and for a revoked row.
BEACONS = """
SELECT CASE WHEN lease_until IS NULL THEN beacon END FROM sqlsem_member
UNION ALL
SELECT NULL FROM ProcessControl WHERE revoked_at IS NOT NULL
"""
#: The next time at which an owner or a row of a queue may have to be removed.
DUE = """
SELECT min(due) FROM (
    SELECT coalesce(m.lease_until, m.missing_since + m.grace_ms / 1000.0) AS due
    FROM ProcessControl AS q JOIN sqlsem_member AS m USING (member_id) WHERE q.resource_id = :resource
    UNION ALL
    SELECT q.revoked_at + m.grace_ms / 1000.0
    FROM ProcessControl AS q JOIN sqlsem_member AS m USING (member_id) WHERE q.resource_id = :resource)
WHERE due > :now
"""
#: True if some decision depends on the time that has passed.
TIMED = """
SELECT EXISTS (SELECT 1 FROM sqlsem_member WHERE lease_until IS NOT NULL OR missing_since IS NOT NULL)
    OR EXISTS (SELECT 1 FROM ProcessControl WHERE revoked_at IS NOT NULL)
    OR EXISTS (SELECT 1 FROM sqlsem_rate_window)
"""
NEXT_NUMBERS = f"UPDATE sqlite_sequence SET seq = (seq / {NUMBERS} + 1) * {NUMBERS}"  # noqa: S608
NEW_GRACE = """
UPDATE sqlsem_member SET missing_since = NULL, heartbeat_at = ?1, lease_until = ?1 + lease_ms / 1000.0
"""


@contextlib.contextmanager
def in_memory() -> Iterator[Callable[[Fibers], Server]]:
    """Return a function that makes the simulated database of a run."""
    with contextlib.closing(
        sqlite3.connect(":memory:", isolation_level=None, cached_statements=PREPARED)
    ) as connection:
        connection.row_factory = sqlite3.Row
        connection.executescript(sql.script(SqliteEngine.name, "schema"))
        for name in ROUTINES:
            connection.execute(sql.queries(SqliteEngine.name)[name])
        yield functools.partial(Server, connection=connection, clock=VirtualClock(connection))


def _described(answer: object) -> str:
    """Return an answer as one word or a few; empty for one that says nothing."""
    if isinstance(answer, Ticket):
        return f"{answer.position} {'granted' if answer.granted else 'waits'}"
    if isinstance(answer, Enum):
        return str(answer.value)
    if isinstance(answer, list):
        return ", ".join(filter(None, map(_described, answer)))
    return str(answer) if answer is None or isinstance(answer, (bool, int)) else ""


def _named(argument: object) -> str:
    """Return the name of the object of a call; empty for any other argument."""
    if isinstance(argument, Ticket):
        return str(argument.position)
    if isinstance(argument, Request):
        return argument.describe()
    if isinstance(argument, RateRequest):
        return argument.name
    return ", ".join(filter(None, map(_named, argument))) if isinstance(argument, (list, tuple)) else ""
