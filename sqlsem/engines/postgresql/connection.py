"""A blocking psycopg connection, which runs statements by their names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from sqlsem.engines.postgresql.database import PostgresDatabase
from sqlsem.engines.postgresql.psycopg_connection import Connection, PsycopgConnection
from sqlsem.engines.routines import RoutineSession
from sqlsem.util.process import here
from sqlsem.values.errors import ConfigurationError


class PostgresConnection(PsycopgConnection, RoutineSession):
    """One psycopg connection in autocommit mode: every routine is a transaction of its own."""

    engine: PostgresDatabase

    def __init__(self, engine: PostgresDatabase, connection: Connection) -> None:
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
