"""PostgreSQL in a simulation: the real engine on a real server, one connection a session, in virtual time.

A step is a call of a routine, the COMMIT after it, and the answer after that; within a routine each wait for a lock,
each sleep, and the part after a lock was granted. Only one session works in the server at a time. A session that is
blocked there (``pg_blocking_pids``) is not chosen until another session's step unblocks it, or its lock_timeout is over
in virtual time.

The database is one of its own on that server, in which the clock, sleeps and waits for advisory locks are replaced
(``sql/postgresql/simulated.sql``). The tables and routines are exactly the shipped ones. Needs a superuser there.
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
from sqlsem.engines.postgresql.engine import PostgresEngine, PostgresSession
from sqlsem.engines.postgresql.psycopg_connection import Connection
from sqlsem.errors import ConfigurationError
from sqlsem.testing.calling import Calling
from sqlsem.testing.faults import Trouble
from sqlsem.testing.fibers import Fiber, Fibers
from sqlsem.testing.real import RealServer, Row

__all__ = ["PostgresServer", "servers"]

T = TypeVar("T")

#: Seconds that a call takes, so that no two calls have the same time.
CALL_SECONDS = 0.0005
#: Seconds after which we ask whether a session that waits for a lock is blocked,
LOOK_SECONDS = 0.001
#: and a session that has not answered: it may wait for a row. Then after twice the time, and so on.
UNSURE_SECONDS = 0.01
#: Seconds, in real time, after which the server ends waits for rows (deadlock_timeout, lock_timeout).
DEADLOCK_SECONDS = 5.0
#: Seconds, in real time, after which we give up on a server that does not answer.
SILENT_SECONDS = 30.0
#: Calls that are no steps: they prepare a connection, or only read.
QUIET = frozenset(("backend", "session", "version", "settings", "installed"))
#: Calls that leave nothing in the database.
LOOKS = frozenset(
    ("deadlock_rows", "live_members", "entries", "past", "overview", "priorities", "database_identity", "is_committed")
)
_SAID = re.compile(r"simulated: (stops|waits) (\S+)")
#: Names and ids that are drawn at random, or made from the process's number.
_OWN = re.compile(r"[:#\n]|\.\d|[0-9a-f]{16}|\.py$")
_UNITS = {"": 0.001, "us": 1e-6, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class _Call:
    """A call under way in the server: a generator of psycopg's, and what it waits for."""

    def __init__(self, generator: Generator[Any, Any, Any]) -> None:
        self.generator = generator
        self.wants: Any = None
        self.over = False
        self.answer: Any = None
        self.waits = False  # for a lock, or it has just been granted
        self.limit = math.inf  # the lock_timeout of that wait
        self.stop: float | None = None  # it sleeps for so many seconds

    def advance(self, ready: Ready | None) -> None:
        """Let psycopg begin (None), or read what has arrived. Raises the server's error."""
        try:
            self.wants = next(self.generator) if ready is None else self.generator.send(ready)
        except StopIteration as done:
            self.over, self.answer = True, done.value

    def hear(self, word: str, value: str) -> None:
        """Record what one of the replaced functions announces."""
        if word == "stops":
            self.waits, self.stop = False, float(value)
        else:
            self.waits, self.limit = True, _seconds(value) or math.inf


class Line(psycopg.Connection[Any]):
    """A connection. In a fiber it waits in virtual time."""

    session: SimulatedSession | None = None

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        if self.session is None:
            return super().wait(gen, interval)
        return self.session.wait_for(gen)

    @property
    def closed(self) -> bool:
        return super().closed or (self.session is not None and self.session.cut)


class SimulatedSession(Calling, PostgresSession):
    """A connection of an actor: others may run before each of its calls and commits, and before its answers."""

    _server: PostgresServer

    def __init__(self, engine: SimulatedEngine, line: Line, lots: random.Random) -> None:
        super().__init__(engine, cast("Connection", line))
        self._server, self._fibers, self.owner = engine.server, engine.server.fibers, engine.owner
        self.line = line
        self.pid = line.info.backend_pid
        self.cut = False
        self.shut = False  # closed by the client; the server has not noticed yet
        self.left_behind: Fiber | None = None  # runs the call that the client abandoned in the server
        self.goes_on: _Call | None = None
        self._lots = lots  # decides which calls are transactions whose COMMIT is a step of its own
        self._inside = False  # in a call that is already cut into steps
        self.call = functools.partial(self._called, self.call)
        line.add_notice_handler(self._hear)
        line.session = self
        self._server.sessions.append(self)

    def _hear(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        match = _SAID.fullmatch(diagnostic.message_primary or "")
        if match is not None and self.goes_on is not None:
            self.goes_on.hear(match[1], match[2])

    # -- its calls, cut into steps ----------------------------------------------------------------------------------

    def rows(self, name: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        return self._cut_into_steps(name, parameters, functools.partial(super().rows, name, parameters))

    def _called(self, call: Callable[..., Sequence[Any]], name: str, *parameters: Any) -> Sequence[Any]:
        return self._cut_into_steps(name, parameters, functools.partial(call, name, *parameters))

    def _cut_into_steps(self, name: str, parameters: Any, call: Callable[[], T]) -> T:
        if self._inside or name in QUIET or self._fibers.running is None:
            return call()
        self._inside = True
        try:
            return self._in_steps(name, f"{name} {_described(parameters)}", call)
        finally:
            self._inside = False

    def _in_steps(self, name: str, what: str, call: Callable[[], T]) -> T:
        self._step(what)
        if name in LOOKS or self._lots.random() < 0.5:
            answer = self._timed(call)
        else:
            self._run("BEGIN")
            try:
                answer = self._timed(call)
                self._step(f"COMMIT of: {what}")
            except BaseException:
                if not self.line.closed and not self._fibers.ended:
                    self._run("ROLLBACK")
                raise
            self._run("COMMIT")
        if name not in LOOKS:
            self._step("the answer")
        return answer

    def _timed(self, call: Callable[[], T]) -> T:
        self._server.set_time()
        try:
            return call()
        finally:
            self._fibers.now += CALL_SECONDS

    def run_for_program(self, what: str, call: Callable[[], object]) -> None:
        """Run a statement of the program's own."""
        self._step(what)
        with self.translated():
            self._timed(call)

    def _run(self, words: str) -> None:
        with self.translated():
            self.line.execute(words.encode())

    def _step(self, what: str) -> None:
        self._require_still()
        self.let_others_in(what)
        self._require_still()

    def _require_still(self) -> None:
        if not self._fibers.ended:
            with self.translated():
                self.require_line()

    def require_line(self) -> None:
        """Raise psycopg's error if the connection is broken."""
        if self.cut:
            raise psycopg.OperationalError("the connection is broken")

    def register_member(self, host: str, pid: int, program: str) -> int:
        return super().register_member(self.owner, pid, program)

    # -- in the server -----------------------------------------------------------------------------------------------

    def wait_for(self, generator: Any) -> Any:
        """Return the answer to the sent call, as psycopg reads it."""
        call = self.goes_on = _Call(generator)
        try:
            with self.in_a_call():
                call.advance(None)
                for _ in self._server.going_on(self, call):
                    self.require_line()
        finally:
            if self.left_behind is None:
                self.goes_on = None
        return call.answer

    def _leave_behind(self, call: _Call) -> None:
        """Let the call go on in the server, which does not know yet that the client is gone."""

        def run() -> None:
            with contextlib.suppress(psycopg.Error):
                for _ in self._server.going_on(self, call):
                    if self not in self._server.sessions:
                        return
            self.goes_on = None
            if self.shut:
                self.end()

        self.left_behind = self._server.spawn(run)

    # -- its end -----------------------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Break the connection. Its call goes on in the server, and its answer is lost."""
        if self.cut:
            return
        self.cut = True
        if self.goes_on is not None and self in self._server.sessions:
            self._leave_behind(self.goes_on)
        self.rouse()

    def end(self) -> None:
        """End the session in the server, which rolls back its transaction and releases its locks."""
        self.cut = True
        if self in self._server.sessions:
            self._server.sessions.remove(self)
            self._server.terminate(self)
        self.rouse()
        if self.left_behind is not None:
            self.left_behind.ready = True

    def drop(self) -> None:
        self.end()

    def interrupt(self) -> None:
        self.shut = True
        self.lose()

    def close(self) -> None:
        if self._fibers.ended or self not in self._server.sessions:
            return
        if not self.cut or (self.shut and self.goes_on is None):
            self.end()


class SimulatedEngine(PostgresEngine):
    """The database, as one process sees it."""

    def __init__(self, server: PostgresServer, options: Options, owner: str) -> None:
        super().__init__(server.url, options)
        self.server, self.owner = server, owner

    def open_session(self, purpose: str) -> SimulatedSession:
        self.server.fibers.step(f"connect to {purpose}")
        lots = self.server.lots()
        try:
            line = Line.connect(**self.connect_parameters(purpose))
            line.execute(_queries()["lots"].encode(), (lots.uniform(-1, 1),))
        except psycopg.Error as exc:
            raise self.unreachable(exc) from exc
        return SimulatedSession(self, line, lots)


class Cursor:
    """A cursor of a program, in a transaction of its own."""

    def __init__(self, session: SimulatedSession) -> None:
        self._session = session
        self._cursor = session.line.cursor()
        self.connection = session.line

    def execute(self, statement: str, parameters: Any = None) -> Cursor:
        self._session.run_for_program(statement, functools.partial(self._execute, statement, parameters))
        return self

    def _execute(self, statement: str, parameters: Any) -> None:
        self._cursor.execute(statement.encode(), parameters)

    def fetchone(self) -> Any:
        return self._cursor.fetchone()

    def commit(self) -> None:
        self.execute("COMMIT")
        self._session.run_for_program("the answer", lambda: None)


class _Server:
    """The server process, which runs the calls that clients abandoned."""

    dead = False
    runs = True
    paused_until = -math.inf

    def __repr__(self) -> str:
        return "server"


class PostgresServer(RealServer):
    """A database of its own on a real server, made anew for each run."""

    name = "postgresql"
    faults = ("crash", "pause", "cut", "slow", "clock", "revoke", "hold", "cap", "reap", "stall")
    beginning = datetime(2100, 1, 1, tzinfo=timezone.utc)  # after the start of any server

    def __init__(self, fibers: Fibers, url: str, control: psycopg.Connection[Any], own: Session) -> None:
        super().__init__(fibers)
        self.url = url
        self._control, self._own = control, own
        self._numbers = itertools.count()
        self._blocked: dict[SimulatedSession, Fiber] = {}
        self._changed = True
        self._time = -1  # the last value of its clock
        self._group_of_server = _Server()
        self._ask("begin")
        self.set_time(forward=False)

    def _ask(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        cursor = self._control.execute(_queries()[name].encode(), parameters or None)
        return cursor.fetchall() if cursor.description else []

    def spawn(self, call: Callable[[], object]) -> Fiber:
        """Start a fiber that runs in the server."""
        return self.fibers.spawn("server", self._group_of_server, call)

    def lots(self) -> random.Random:
        """Return random numbers for a new session, from the seed of the run."""
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

    @property
    def own(self) -> Session:
        return self._own

    # -- time --------------------------------------------------------------------------------------------------------

    def set_time(self, forward: bool = True) -> None:
        """Set the database's clock to ours."""
        now = round(self.clock * 1e6)
        if now != self._time:
            self._ask("set_clock", now, forward)
            self._time = now

    def set_clock(self, seconds: float) -> None:
        if seconds > 0:
            raise Trouble("it would count as time that has passed")
        self.skew += seconds
        self._stepped = True
        self.set_time(forward=False)

    def stall(self, seconds: float) -> None:
        self.stalled_until = self.fibers.now + seconds

    # -- calls under way ----------------------------------------------------------------------------------------------

    def going_on(self, session: SimulatedSession, call: _Call) -> Iterator[None]:
        """Run a call in the server until there is an answer; yields after each wait, in virtual time."""
        self._changed = True
        patience = UNSURE_SECONDS
        while not call.over:
            if call.stop is not None:
                seconds, call.stop = call.stop, None
                if seconds > 0:
                    self.fibers.block(f"sleeps in the server for {seconds:.3f} s", seconds)
                else:
                    self.fibers.step("has got a lock in the server")
                yield
                self._unblock(session)
            elif (ready := _ready(session.line, call.wants, LOOK_SECONDS if call.waits else patience)) is not None:
                call.advance(ready)
                patience = UNSURE_SECONDS
            elif not self._are_blocked([session]):
                patience *= 1 if call.waits else 2
            elif (ready := _ready(session.line, call.wants, 0)) is not None:
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
        """After each step, mark the calls that it unblocked in the server as ready, once they have stopped there."""
        until = time.monotonic() + SILENT_SECONDS
        while self._blocked:
            blocked = self._are_blocked(list(self._blocked))
            unblocked = [session for session in self._blocked if session.pid not in blocked]
            if not unblocked:
                return
            for session in unblocked:
                if _ready(session.line, Wait.R, LOOK_SECONDS) is not None:
                    self._blocked.pop(session).ready = True
            if time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL has not said anything for {SILENT_SECONDS:g} s")

    def moves(self) -> bool:
        until = time.monotonic() + DEADLOCK_SECONDS
        while self._blocked and time.monotonic() < until:
            before = len(self._blocked)
            self._mark_unblocked()
            if len(self._blocked) < before:
                return True
            _ready(next(iter(self._blocked)).line, Wait.R, LOOK_SECONDS)
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
        psycopg.Connection.close(session.line)

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
    """Make servers in a new database, which is dropped at the end. Raises `ConfigurationError` if that fails."""
    name = f"sqlsem_simulated_{secrets.token_hex(6)}"
    try:
        maintenance = psycopg.connect(url, autocommit=True)
        maintenance.execute(compose.SQL("CREATE DATABASE {}").format(compose.Identifier(name)))
    except psycopg.Error as exc:
        raise PostgresEngine(url, Options()).unreachable(exc) from None
    try:
        ours = conninfo.make_conninfo(url, dbname=name)
        with psycopg.connect(ours, autocommit=True) as control:
            _prepare(control)
            engine = PostgresEngine(ours, Options())
            own = engine.connect("look")
            try:
                own.install(engine.plan)
                own.reap()  # finds its tables before the clock is replaced
                yield lambda fibers: PostgresServer(fibers, ours, control, own)
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


def _ready(line: Line, wants: Wait, seconds: float) -> Ready | None:
    """Return what a connection is ready for; None: for nothing, after so many seconds."""
    socket = line.pgconn.socket
    reads = [socket] if wants & Wait.R else []
    writes = [socket] if wants & Wait.W else []
    readable, writable, _ = select.select(reads, writes, [], seconds)
    if readable:
        return Ready.RW if writable else Ready.R
    return Ready.W if writable else None


def _seconds(setting: str) -> float:
    """Return a setting of PostgreSQL in seconds: 250ms, 1min, 0."""
    number = setting.rstrip("dhimnsu")
    return float(number) * _UNITS[setting[len(number) :]]


def _described(parameters: Any) -> str:
    """Return a call's parameters without those that differ between processes: ids, hashes, names of processes."""
    values = parameters.values() if isinstance(parameters, dict) else parameters or ()
    return ", ".join(str(value) for value in values if value is not None and not _OWN.search(str(value)))[:60]
