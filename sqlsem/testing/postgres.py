"""PostgreSQL in a simulation: the real engine on a real server, one connection a session, in virtual time.

The steps of a session are: the call of a routine, the COMMIT after it, and the answer; and inside a routine each wait
for a lock, each sleep, and the part after a grant. Only one session works in the server at a time. A blocked session
(``pg_blocking_pids``) goes on when another session's step unblocks it, or its lock_timeout is over in virtual time.

The simulation has a temporary database on that server. Its clock, its sleeps and its waits for advisory locks are
replaced (``sql/postgresql/simulated.sql``), which needs a superuser. The tables and routines are the shipped ones.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import re
import secrets
import select
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar, cast

import psycopg
from psycopg import conninfo
from psycopg import sql as compose
from psycopg.waiting import Ready, Wait

from sqlsem import sql
from sqlsem.engines.base import Engine, Options, Session
from sqlsem.engines.postgresql.connection import Connection
from sqlsem.engines.postgresql.engine import PostgresEngine
from sqlsem.engines.postgresql.session import PostgresSession
from sqlsem.testing.calling import Calling
from sqlsem.testing.fibers import Fiber, Fibers
from sqlsem.testing.real import Group, RealServer, Row
from sqlsem.values.errors import ConfigurationError

__all__ = ["PostgresServer", "servers"]

T = TypeVar("T")

#: Seconds that a call takes, so that no two calls have the same time.
CALL_SECONDS = 0.0005
#: The real time after which we check if a session that has announced a wait for a lock is blocked.
LOOK_SECONDS = 0.001
#: The same for a session that has not answered, as it may wait for a row. The time doubles with each check.
UNSURE_SECONDS = 0.01
#: The real time after which the server itself ends waits for rows (deadlock_timeout, lock_timeout), and after which a
#: server that does not answer is an error.
DEADLOCK_SECONDS, SILENT_SECONDS = 5.0, 30.0
#: Calls that are no steps: they prepare a connection, or only read.
QUIET = frozenset(("backend", "session", "version", "settings", "installed"))
#: Calls that only read: they need no COMMIT, and the answer to them is no step of its own.
LOOKS = frozenset(
    ("deadlock_rows", "live_members", "entries", "past", "overview", "priorities", "database_identity", "is_committed")
)
_ANNOUNCEMENT = re.compile(r"simulated: (stops|waits) (\S+)")
#: Matches names and ids that differ between runs: drawn at random, or made from the process's number.
_VARYING = re.compile(r"[:#\n]|\.\d|[0-9a-f]{16}|\.py$")
_UNITS = {"": 0.001, "us": 1e-6, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class _Call:
    """A call that runs in the server: psycopg's generator for it, and what the call waits for."""

    def __init__(self, generator: Generator[Any, Any, Any]) -> None:
        self.generator = generator
        self.wants: Any = None
        self.over = False
        self.answer: Any = None
        self.waits = False  # True from the announcement of a wait for a lock until the call goes on
        self.limit = math.inf  # the lock_timeout of that wait
        self.stop: float | None = None  # the seconds that the call sleeps now

    def advance(self, ready: Ready | None) -> None:
        """Let psycopg send the call (None), or read what has arrived. Raises the server's error."""
        try:
            self.wants = next(self.generator) if ready is None else self.generator.send(ready)
        except StopIteration as done:
            self.over, self.answer = True, done.value

    def record_announcement(self, word: str, value: str) -> None:
        """Record what a replaced function of the database has announced: a sleep, or a wait for a lock."""
        if word == "stops":
            self.waits, self.stop = False, float(value)
        else:
            self.waits, self.limit = True, _seconds(value) or math.inf


class SimulatedConnection(psycopg.Connection[Any]):
    """A connection of psycopg that waits in virtual time, once it belongs to a session."""

    session: SimulatedSession | None = None

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if self.session is None:
            return super().wait(gen, interval)
        return self.session.wait_for(gen)

    @property
    def closed(self) -> bool:
        return super().closed or (self.session is not None and self.session.cut)


class SimulatedSession(Calling, PostgresSession):
    """A session of an actor: other actors may run before each of its calls and commits, and before the answers."""

    _server: PostgresServer

    def __init__(self, engine: SimulatedEngine, pg_connection: SimulatedConnection, rng: random.Random) -> None:
        super().__init__(engine, cast("Connection", pg_connection))
        self._server, self._fibers, self.owner = engine.server, engine.server.fibers, engine.owner
        self.pg_connection = pg_connection
        self.pid = pg_connection.info.backend_pid
        self.cut = False
        self.shut = False  # True if the client has closed it, and the server has not noticed yet
        self.abandoned_fiber: Fiber | None = None  # of a call that the client abandoned, and that goes on
        self.running_call: _Call | None = None  # the call that runs in the server
        self._rng = rng  # decides which calls have a COMMIT as a step of its own
        self._inside = False  # True during a call that is already divided into steps
        pg_connection.add_notice_handler(self._on_notice)
        pg_connection.session = self
        self._server.sessions.append(self)

    def _on_notice(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        match = _ANNOUNCEMENT.fullmatch(diagnostic.message_primary or "")
        if match is not None and self.running_call is not None:
            self.running_call.record_announcement(match[1], match[2])

    # -- its calls, divided into steps --------------------------------------------------------------------------------

    def run(self, name: str, parameters: Any) -> list[tuple[Any, ...]]:
        return self._in_steps_once(name, parameters, functools.partial(super().run, name, parameters))

    def call(self, name: str, *parameters: Any) -> Sequence[Any]:
        return self._in_steps_once(name, parameters, functools.partial(super().call, name, *parameters))

    def _in_steps_once(self, name: str, parameters: Any, call: Callable[[], T]) -> T:
        if self._inside or name in QUIET or self._fibers.running is None:
            return call()
        self._inside = True
        try:
            return self._in_steps(name, f"{name} {_described(parameters)}", call)
        finally:
            self._inside = False

    def _in_steps(self, name: str, what: str, call: Callable[[], T]) -> T:
        self.step(what)
        if name in LOOKS or self._rng.random() < 0.5:
            answer = self._timed(call)
        else:
            self._run("BEGIN")
            try:
                answer = self._timed(call)
                self.step(f"COMMIT of: {what}")
            except BaseException:
                if not self.pg_connection.closed and not self._fibers.ended:
                    self._run("ROLLBACK")
                raise
            self._run("COMMIT")
        if name not in LOOKS:
            self.step("the answer")
        return answer

    def _timed(self, call: Callable[[], T]) -> T:
        self._server.set_time()
        try:
            return call()
        finally:
            self._fibers.now += CALL_SECONDS

    def run_for_program(self, what: str, call: Callable[[], object]) -> None:
        """Run a statement of the program, on its own connection."""
        self.step(what)
        with self.translated():
            self._timed(call)

    def _run(self, words: str) -> None:
        with self.translated():
            self.pg_connection.execute(words.encode())

    def require_connection(self) -> None:
        if not self._fibers.ended:
            with self.translated():
                self._require_uncut()

    def _require_uncut(self) -> None:
        if self.cut:
            raise psycopg.OperationalError("the connection is broken")

    def register_member(self, host: str, pid: int, program: str) -> int:
        return super().register_member(self.owner, pid, program)

    # -- in the server -----------------------------------------------------------------------------------------------

    def wait_for(self, generator: Any) -> Any:
        """Run a call in the server, and return its answer as psycopg reads it."""
        call = self.running_call = _Call(generator)
        try:
            with self.calling():
                call.advance(None)
                for _ in self._server.run_call(self, call):
                    self._require_uncut()
        finally:
            if self.abandoned_fiber is None:
                self.running_call = None
        return call.answer

    def _abandon(self, call: _Call) -> None:
        """Abandon a call: the server does not know yet that the client is gone, and goes on with it."""

        def run() -> None:
            with contextlib.suppress(psycopg.Error):
                for _ in self._server.run_call(self, call):
                    if self not in self._server.sessions:
                        return
            self.running_call = None
            if self.shut:
                self.end()

        self.abandoned_fiber = self._server.spawn(run)

    # -- its end -----------------------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Break the connection. Its call goes on in the server, and the answer is lost."""
        if self.cut:
            return
        self.cut = True
        if self.running_call is not None and self in self._server.sessions:
            self._abandon(self.running_call)
        self.wake_caller()

    def end(self) -> None:
        """End the session in the server, which rolls back its transaction and releases its locks."""
        self.cut = True
        if self in self._server.sessions:
            self._server.sessions.remove(self)
            self._server.terminate(self)
        self.wake_caller()
        if self.abandoned_fiber is not None:
            self.abandoned_fiber.ready = True

    def drop(self) -> None:
        self.end()

    def interrupt(self) -> None:
        self.shut = True
        self.lose()

    def close(self) -> None:
        if self._fibers.ended or self not in self._server.sessions:
            return
        if not self.cut or (self.shut and self.running_call is None):
            self.end()


class SimulatedEngine(PostgresEngine):
    """The engine of one process."""

    def __init__(self, server: PostgresServer, options: Options, owner: str) -> None:
        super().__init__(server.url, options)
        self.server, self.owner = server, owner

    def open_session(self, purpose: str) -> SimulatedSession:
        self.server.fibers.step(f"connect to {purpose}")
        rng = self.server.random_numbers()
        try:
            pg_connection = SimulatedConnection.connect(**self.connect_parameters(purpose))
            pg_connection.execute(_queries()["lots"].encode(), (rng.uniform(-1, 1),))
        except psycopg.Error as exc:
            raise self.unreachable(exc) from exc
        return SimulatedSession(self, pg_connection, rng)


class Cursor:
    """A cursor of a program, on the program's own connection."""

    def __init__(self, session: SimulatedSession) -> None:
        self._session = session
        self._cursor = session.pg_connection.cursor()
        self.fetchone, self.fetchall = self._cursor.fetchone, self._cursor.fetchall
        self.connection = session.pg_connection

    def execute(self, statement: str, parameters: Any = None) -> Cursor:
        self._session.run_for_program(statement, functools.partial(self._execute, statement, parameters))
        return self

    def _execute(self, statement: str, parameters: Any) -> None:
        self._cursor.execute(statement.encode(), parameters)

    def commit(self) -> None:
        self.execute("COMMIT")
        self._session.run_for_program("the answer", lambda: None)


class PostgresServer(RealServer):
    """A temporary database on a real server; its contents are deleted before each run."""

    name = "postgresql"
    faults = ("crash", "pause", "cut", "slow", "clock", "revoke", "hold", "cap", "reap", "stall")
    beginning = datetime(2100, 1, 1, tzinfo=timezone.utc)  # after the start of any server

    def __init__(self, fibers: Fibers, url: str, control: psycopg.Connection[Any], own: Session) -> None:
        super().__init__(fibers)
        self.url = url
        self._control, self.own = control, own
        self._numbers = itertools.count()
        self._blocked: dict[SimulatedSession, Fiber] = {}
        self._changed = True
        self._time = -1  # the last value of its clock
        self._group_of_server = Group("server")  # runs the calls that clients abandoned
        self._ask("begin")
        self.set_time(forward=False)

    def _ask(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        cursor = self._control.execute(_queries()[name].encode(), parameters or None)
        return cursor.fetchall() if cursor.description else []

    def spawn(self, call: Callable[[], object]) -> Fiber:
        """Start a fiber that runs in the server."""
        return self.fibers.spawn("server", self._group_of_server, call)

    def random_numbers(self) -> random.Random:
        """Return a generator of random numbers for a new session, from the seed of the run."""
        return random.Random(self.seed * 1009 + next(self._numbers))

    def engine(self, options: Options, owner: str) -> SimulatedEngine:
        return SimulatedEngine(self, options, owner)

    @contextlib.contextmanager
    def transaction(self, engine: Engine) -> Iterator[Cursor]:
        assert isinstance(engine, SimulatedEngine)
        session = engine.open_session("transaction")
        try:
            cursor = Cursor(session)
            cursor.execute("BEGIN")
            yield cursor
            cursor.commit()
        finally:
            session.close()

    # -- time --------------------------------------------------------------------------------------------------------

    def set_time(self, forward: bool = True) -> None:
        """Set the database's clock to that of the simulation."""
        now = round(self.clock * 1e6)
        if now != self._time:
            self._ask("set_clock", now, forward)
            self._time = now

    def set_clock(self, seconds: float) -> None:
        super().set_clock(seconds)
        self.set_time(forward=False)

    # -- calls under way ----------------------------------------------------------------------------------------------

    def run_call(self, session: SimulatedSession, call: _Call) -> Iterator[None]:
        """Run a call in the server until it has an answer; yield after each of its waits in virtual time."""
        self._changed = True
        timeout = UNSURE_SECONDS
        while not call.over:
            if call.stop is not None:
                seconds, call.stop = call.stop, None
                if seconds > 0:
                    self.fibers.block(f"sleeps in the server for {seconds:.3f} s", seconds)
                else:
                    self.fibers.step("has got a lock in the server")
                yield
                self._unblock(session)
            elif (
                ready := _ready(session.pg_connection, call.wants, LOOK_SECONDS if call.waits else timeout)
            ) is not None:
                call.advance(ready)
                timeout = UNSURE_SECONDS
            elif not self._are_blocked([session]):
                timeout *= 1 if call.waits else 2
            elif (ready := _ready(session.pg_connection, call.wants, 0)) is not None:
                call.advance(ready)  # read what it announced before it was blocked
            else:
                self._blocked[session] = cast("Fiber", self.fibers.running)
                try:
                    self.fibers.block(f"waits in the server for a {'lock' if call.waits else 'row'}", call.limit)
                finally:
                    self._blocked.pop(session, None)
                yield
                if self._are_blocked([session]):  # its lock_timeout is over
                    self._unblock(session)
                call.waits, call.limit = False, math.inf
            self._changed = True

    def _unblock(self, session: SimulatedSession) -> None:
        self.set_time()
        self._ask("cancel_blocked", session.pid)

    def _are_blocked(self, sessions: Sequence[SimulatedSession]) -> set[int]:
        return {pid for (pid,) in self._ask("blocked", [session.pid for session in sessions])}

    def notice(self) -> None:
        self._mark_unblocked()
        super().notice()

    def _mark_unblocked(self) -> None:
        """Mark the calls that the last step unblocked in the server as ready, once they have stopped there."""
        until = time.monotonic() + SILENT_SECONDS
        while self._blocked:
            blocked = self._are_blocked(list(self._blocked))
            unblocked = [session for session in self._blocked if session.pid not in blocked]
            if not unblocked:
                return
            for session in unblocked:
                if _ready(session.pg_connection, Wait.R, LOOK_SECONDS) is not None:
                    self._blocked.pop(session).ready = True
            if time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL has not answered for {SILENT_SECONDS:g} s")

    def moves(self) -> bool:
        until = time.monotonic() + DEADLOCK_SECONDS
        while self._blocked and time.monotonic() < until:
            before = len(self._blocked)
            self._mark_unblocked()
            if len(self._blocked) < before:
                return True
            _ready(next(iter(self._blocked)).pg_connection, Wait.R, LOOK_SECONDS)
        return False

    def terminate(self, session: SimulatedSession) -> None:
        """End its process in the server, and wait until it is gone."""
        self._changed = True
        self._ask("terminate", session.pid)
        until = time.monotonic() + SILENT_SECONDS
        while self._ask("lives", session.pid)[0][0]:
            if time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL's process {session.pid} does not end")
        self._blocked.pop(session, None)
        psycopg.Connection.close(session.pg_connection)

    # -- reading -----------------------------------------------------------------------------------------------------

    def has_changed(self) -> bool:
        changed, self._changed = self._changed, False
        return changed

    def rows(self) -> list[Row]:
        return [Row(*row) for row in self._ask("rows")]

    def reap(self) -> None:
        self.set_time()
        super().reap()

    def close(self) -> None:
        for session in list(self.sessions):
            session.end()


@contextlib.contextmanager
def servers(url: str) -> Iterator[Any]:
    """Return a function that makes servers in a new database, which is dropped at the end. Raises `ConfigurationError`
    if it cannot be created.
    """
    name = f"sqlsem_simulated_{secrets.token_hex(6)}"
    try:
        maintenance = psycopg.connect(url, autocommit=True)
        maintenance.execute(compose.SQL("CREATE DATABASE {}").format(compose.Identifier(name)))
    except psycopg.Error as exc:
        raise PostgresEngine(url, Options()).unreachable(exc) from None
    try:
        database_url = conninfo.make_conninfo(url, dbname=name)
        with psycopg.connect(database_url, autocommit=True) as control:
            _prepare(control)
            engine = PostgresEngine(database_url, Options())
            own = engine.connect("look")
            try:
                own.install(engine.plan)
                own.reap()  # so that it knows its tables before the clock is replaced
                yield lambda fibers: PostgresServer(fibers, database_url, control, own)
            finally:
                own.close()
    finally:
        maintenance.execute(compose.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(compose.Identifier(name)))
        maintenance.close()


def _prepare(control: psycopg.Connection[Any]) -> None:
    try:
        control.execute(_queries()["prepare"].encode())
    except psycopg.errors.InsufficientPrivilege as exc:
        raise ConfigurationError(
            f"A simulation replaces functions of the system, in a database of its own, for superusers only: {exc}"
        ) from None


@functools.cache
def _queries() -> dict[str, str]:
    return sql.queries(PostgresEngine.name, file="simulated")


def _ready(pg_connection: SimulatedConnection, wants: Wait, seconds: float) -> Ready | None:
    """Return whether a connection can be read or written; None if neither, after ``seconds``."""
    socket = pg_connection.pgconn.socket
    reads, writes = [socket] if wants & Wait.R else [], [socket] if wants & Wait.W else []
    readable, writable, _ = select.select(reads, writes, [], seconds)
    if readable:
        return Ready.RW if writable else Ready.R
    return Ready.W if writable else None


def _seconds(setting: str) -> float:
    """Return a setting of PostgreSQL in seconds: 250ms, 1min, 0."""
    number = setting.rstrip("dhimnsu")
    return float(number) * _UNITS[setting[len(number) :]]


def _described(parameters: Any) -> str:
    """Return a call's parameters as text, without those that differ between runs: ids, hashes, names of processes."""
    values = parameters.values() if isinstance(parameters, dict) else parameters or ()
    return ", ".join(str(value) for value in values if value is not None and not _VARYING.search(str(value)))[:60]
