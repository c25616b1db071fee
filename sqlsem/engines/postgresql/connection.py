"""psycopg connections, blocking and of an event loop: statements by their names, and error translation."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors, generators

from sqlsem.engines.answers import refusal_code
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.engines.protocol import EngineConnection
from sqlsem.engines.routines import RoutineSession
from sqlsem.util import sockets
from sqlsem.util.printable import first_line
from sqlsem.util.process import here
from sqlsem.values.errors import ConfigurationError, SchemaError, Unavailable

if TYPE_CHECKING:
    from sqlsem.engines.postgresql.engine import PostgresEngine

Connection = psycopg.Connection[tuple[Any, ...]]
AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]

#: The setting that the server's message names, in every language, if its lock table is full; and the remedy.
LOCKS_SETTING = "max_locks_per_transaction"
LOCKS_FULL = (
    "its table of locks, which all its programs share, is full: end the session that has most of them (see pg_locks; "
    f"sqlsem doctor tells how full it is), or raise {LOCKS_SETTING}"
)
#: PostgreSQL's type oids: bigint, smallint and integer; boolean; bigint[].
_INTEGERS, _BOOLEAN, _NUMBERS = (20, 21, 23), 16, 1016
#: The classes of SQLSTATE with which sqlsem's routines report a mistake of the caller: bad values, missing rights or
#: objects, and exceeded limits of a login.
CALLERS_MISTAKES = ("22", "42", "54")
_ROWS = psycopg.pq.ExecStatus.TUPLES_OK
#: The counter in the names of prepared statements.
_numbers = itertools.count(1)


class PsycopgConnection(EngineConnection):
    """A psycopg connection, either blocking or of an event loop."""

    def __init__(self, engine: PostgresEngine, connection: Connection | AsyncConnection) -> None:
        self.engine = engine
        self.options = engine.options
        self.queries = engine.queries()
        self._connection = connection
        self.given_up = False
        self._prepared_names: dict[str, bytes] = {}  # the statements prepared so far
        self.encoding = connection.info.encoding
        self._unreplicated = ""  # the server's warning about a commit that a failover may lose
        connection.add_notice_handler(self._noticed)

    def _noticed(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        # (Its text may be in any language.)
        if diagnostic.source_function == "SyncRepWaitForLSN":
            self._unreplicated = diagnostic.message_primary or "a commit was not replicated"

    def require_replicated(self) -> None:
        """Raise `Busy` if the wait of a commit for a standby was cancelled: only this server has the commit, so the
        caller must repeat the call.
        """
        if self._unreplicated:
            text, self._unreplicated = self._unreplicated, ""
            raise Busy(f"{self.engine.label}: {text}")

    def setup(self, purpose: str) -> dict[str, str]:
        """Return the parameters of the statement that prepares a new connection."""
        # (The author of a task's SQL decides how long it waits for locks.)
        lock_timeout = 0 if purpose == "work" else int(self.options.gate_timeout * 1000)
        # sqlsem's statements need no search_path; a fixed one cannot be tampered with. The SQL of tasks uses the
        # login's own, and behind a pooler (a lease) other clients would get the fixed one, too.
        own = purpose != "work" and self.options.lease is None
        return {
            "lock_timeout": str(lock_timeout),
            "keepalive": str(self.options.keepalive),
            "own": "true" if own else "false",
        }

    def translate(self, exc: psycopg.Error) -> Exception:
        """Return sqlsem's error for an error of psycopg."""
        where, text = self.engine.label, first_line(exc)
        if isinstance(exc, errors.QueryCanceled):  # by an administrator, or a statement_timeout of the login
            return Busy(f"{where}: {text}")
        if isinstance(exc, errors.LockNotAvailable):
            return Busy(f"{where}: another session keeps a lock in an open transaction: {text}")
        if isinstance(exc, errors.DeadlockDetected):
            # Another program has locks on sqlsem's tables (VACUUM FULL). The call was rolled back, and can be repeated.
            return Busy(f"{where} chose this request as deadlock victim: {text}")
        if isinstance(exc, errors.NoDataFound):
            self.given_up = True  # the owner of this session registers as a new member
            return Disconnected(f"{where}: {text}")
        if isinstance(exc, errors.ActiveSqlTransaction) or (
            text.startswith("sqlsem: ") and (exc.sqlstate or "").startswith(CALLERS_MISTAKES)
        ):
            message = "; ".join(filter(None, (text, exc.diag.message_hint)))
            return ConfigurationError(f"{where}: {message}", code=refusal_code(exc.sqlstate, text))
        if isinstance(exc, (errors.UndefinedFunction, errors.UndefinedTable, errors.InvalidSchemaName)):
            return SchemaError(f"{where}: {text}; create or upgrade the sqlsem tables with: sqlsem init")
        if isinstance(exc, errors.InsufficientPrivilege):
            return ConfigurationError(
                f"{where}: {text}; an administrator can GRANT {self.options.schema}_user (or _operator, _putter, "
                f"_worker, for what these do) to this login (see: sqlsem sql postgresql permissions)",
                code="rights",
            )
        if LOCKS_SETTING in (exc.diag.message_hint or ""):
            return Unavailable(f"{where}: {text}; {LOCKS_FULL}")
        if isinstance(exc, errors.ReadOnlySqlTransaction):
            self.given_up = True  # another server may be the primary now: connect anew
            return Disconnected(f"{where} is read-only (a standby?): {text}")
        if isinstance(exc, (errors.InvalidSqlStatementName, errors.DuplicatePreparedStatement)):
            return ConfigurationError(
                f"{where}: {text}: this connection changed sessions (a pooler in transaction mode?); "
                f"connect with lease=…, or past the pooler",
                code="session",
            )
        if _is_closed(self._connection) or isinstance(exc, (errors.AdminShutdown, errors.CrashShutdown)):
            return Disconnected(f"Lost the connection to {where}: {text}")
        return Unavailable(f"{where}: {text}")

    def statement_steps(self, name: str, *parameters: Any) -> Generator[Any, Any, list[Any]]:
        """Run a statement without psycopg's cursor, and return the values of the first row. Each connection prepares it
        once, unless there is a lease. Yields psycopg's generators to the caller, which runs them.
        """
        pgconn = self._connection.pgconn
        is_prepared = self.options.lease is None
        known = self._prepared_names.get(name)
        if known is None:
            numbers = itertools.count(1)
            statement = re.sub("%s", lambda _: f"${next(numbers)}", self.queries[name]).encode()
            # A new name each time: after an interrupt it is not known if the server has the last one.
            known = f"sqlsem_{name}_{next(_numbers)}".encode() if is_prepared else statement
            if is_prepared:
                pgconn.send_prepare(known, statement)
                self._require((yield generators.execute(pgconn)), psycopg.pq.ExecStatus.COMMAND_OK)
            self._prepared_names[name] = known
        values = [None if parameter is None else str(parameter).encode(self.encoding) for parameter in parameters]
        if b"\0" in b"".join(filter(None, values)):  # libpq would end a value there
            raise psycopg.DataError("PostgreSQL text cannot contain NUL characters")
        (pgconn.send_query_prepared if is_prepared else pgconn.send_query_params)(known, values)
        results = yield generators.execute(pgconn)
        result = results[0]
        # (Checked here first, to save calls in the usual case.)
        if len(results) > 1 or result.status != _ROWS:
            self._require(results, _ROWS)
        if self._unreplicated:
            self.require_replicated()
        if result.nfields == 1:
            return [self._read(result, 0)]
        return [self._read(result, column) for column in range(result.nfields)]

    def _read(self, result: psycopg.pq.abc.PGresult, column: int) -> Any:
        """Return a value of the first row, converted from the server's text."""
        text = result.get_value(0, column)
        if text is None:
            return None
        kind = result.ftype(column)
        if kind == _NUMBERS:  # {4711,4712}
            return [int(part) for part in text[1:-1].split(b",") if part]
        return int(text) if kind in _INTEGERS else text == b"t" if kind == _BOOLEAN else text.decode(self.encoding)

    def _require(
        self, results: Sequence[psycopg.pq.abc.PGresult], status: psycopg.pq.ExecStatus
    ) -> psycopg.pq.abc.PGresult:
        """Return the first result; raise the error of any. (The COMMIT is a step of its own, and the server may end the
        session before it.)
        """
        for result in results:
            if result.status != status:
                raise errors.error_from_result(result, encoding=self.encoding)
        return results[0]

    def discard(self) -> None:
        with contextlib.suppress(psycopg.Error):
            sockets.discard(self._connection.fileno())

    def interrupt(self) -> None:
        with contextlib.suppress(psycopg.Error):
            sockets.shut_down(self._connection.fileno())


def _is_closed(connection: Connection | AsyncConnection) -> bool:
    try:
        # (libpq may have closed the socket, and count the connection as good until its next call.)
        return connection.closed or connection.fileno() < 0
    except psycopg.Error:
        return True


class PostgresConnection(PsycopgConnection, RoutineSession):
    """One psycopg connection in autocommit mode: every routine is a transaction of its own."""

    engine: PostgresEngine

    def __init__(self, engine: PostgresEngine, connection: Connection) -> None:
        super().__init__(engine, connection)
        self.connection = connection
        self.cursor = connection.cursor()
        # Statements that every acquisition runs are prepared once (see `call`), except with a lease. A lease is for
        # poolers in transaction mode, which may use another session, without the prepared statement, for the next call.
        connection.prepare_threshold = None
        if self.options.lease is not None:
            self.call = self.row  # type: ignore[method-assign]

    def prepare(self, purpose: str) -> None:
        lease = self.options.lease is not None
        if lease or purpose in ("main", "look"):
            pid = self.backend()
            if pid != self.connection.info.backend_pid:  # a pooler is in between
                if lease or purpose == "look":
                    return  # (Settings would stay in the session for its next user.)
                self._require_own_session(pid)
        self.run("session", self.setup(purpose))

    def backend(self) -> int:
        """Return the pid of the server process that answers now."""
        return int(self.value("backend"))

    def _require_own_session(self, pid: int) -> None:
        """Raise `ConfigurationError` if a pooler shares sessions between transactions or statements: the next client
        would get the session with the beacon, which is idle.
        """
        with contextlib.closing(self.engine.open_session("look")) as other:
            assert isinstance(other, PostgresConnection)
            is_shared = other.backend() == pid or self.backend() != pid
        if is_shared:
            raise ConfigurationError(
                f"{self.engine.label}: a pooler lends sessions out by the transaction, and a beacon needs one of its "
                f"own; connect with lease=30 (--lease 30), past the pooler, or have it pool sessions",
                code="session",
            )

    def rows(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.run(name, parameters or None)

    def run(self, name: str, parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement with its parameters, in order or by name."""
        with self.translated():
            self.cursor.execute(self.queries[name], parameters)
            rows = self.cursor.fetchall()
            self.require_replicated()
        return rows

    def operate(self, name: str, *parameters: Any) -> Any:
        return self.row(name, here(), *parameters)[1]  # behind the parameter that the first column stores

    configure = operate

    def call(self, name: str, *parameters: Any) -> Sequence[Any]:
        """Run a statement as `row` does, but without psycopg's cursor, which would add half the time of the call. For
        the statements of every acquisition.
        """
        steps = self.statement_steps(name, *parameters)
        answer = None
        try:
            while True:
                answer = self.connection.wait(steps.send(answer))
        except StopIteration as done:
            values: Sequence[Any] = done.value
            return values
        except psycopg.Error as exc:
            raise self.translate(exc) from exc
        except BaseException:
            self._end_interrupted()
            raise

    def _end_interrupted(self) -> None:
        # psycopg ends the query for a KeyboardInterrupt, but not for other exceptions of a signal handler.
        if self.connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self.connection.close()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Translate psycopg's errors in the block into sqlsem's errors."""
        try:
            yield
        except psycopg.Error as exc:
            raise self.translate(exc) from exc
        except BaseException:
            self._end_interrupted()
            raise

    @property
    def usable(self) -> bool:
        return not (self.connection.closed or self.given_up)

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self.connection.close()
