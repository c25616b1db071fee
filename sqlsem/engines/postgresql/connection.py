"""One psycopg connection that blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg

from sqlsem.engines.postgresql.database import PostgresDatabase
from sqlsem.engines.postgresql.psycopg_connection import Connection, PsycopgConnection
from sqlsem.engines.protocol import LockSession
from sqlsem.errors import ConfigurationError


class PostgresConnection(PsycopgConnection, LockSession):
    """One psycopg connection in autocommit mode: every routine is a transaction of its own."""

    def __init__(self, engine: PostgresDatabase, connection: Connection) -> None:
        super().__init__(engine, connection)
        self.connection = connection
        self.cursor = connection.cursor()
        # What is called at every lock is prepared once (see `_prepared`). Never with a lease: that is for poolers which
        # lend their connections out by the transaction, and there a prepared statement may be gone at the next call.
        connection.prepare_threshold = None
        self.call: Callable[..., Sequence[Any]] = self.row if self.options.lease is not None else self._prepared

    def prepare(self, purpose: str) -> None:
        lease = self.options.lease is not None
        if lease or purpose in ("main", "look"):
            pid = self.backend()
            if pid != self.connection.info.backend_pid:  # a pooler stands between
                if lease or purpose == "look":
                    return  # what is set on a session here would be set for anyone who is lent it next
                self._require_own_session(pid)
        self.rows("session", self.setup(purpose))

    def backend(self) -> int:
        """The number of the server's process that answers now."""
        return self.number("backend")

    def _require_own_session(self, pid: int) -> None:
        """Refuse a beacon where connections share sessions: lent by the transaction or the statement, an idle session
        goes to anyone who asks next.
        """
        other = self.engine.open_session("look")
        assert isinstance(other, PostgresConnection)
        try:
            lent = other.backend() == pid or self.backend() != pid
        finally:
            other.close()
        if lent:
            raise ConfigurationError(
                f"{self.engine.label}: a pooler lends sessions out by the transaction, and a beacon needs one of its "
                f"own; connect with lease=30 (--lease 30), past the pooler, or have it pool sessions"
            )

    def rows(self, name: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        """Run a statement of client.sql."""
        try:
            self.cursor.execute(self.queries[name], parameters)
            rows = self.cursor.fetchall()
            self.require_replicated()
            return rows
        except psycopg.Error as exc:
            raise self.translate(exc) from exc
        except BaseException:
            self._end_interrupted()
            raise

    def row(self, name: str, *parameters: Any) -> Sequence[Any]:
        """Its first row."""
        return self.rows(name, parameters)[0]

    def number(self, name: str, *parameters: Any) -> int:
        """The first value of that."""
        return int(self.row(name, *parameters)[0])

    def _prepared(self, name: str, *parameters: Any) -> Sequence[Any]:
        """As `row`, for statements that are run at every lock: past psycopg's cursor, which takes half as long again as
        the rest of the call.
        """
        asked = self.asking(name, *parameters)
        answer = None
        try:
            while True:
                answer = self.connection.wait(asked.send(answer))
        except StopIteration as done:
            values: Sequence[Any] = done.value
            return values
        except psycopg.Error as exc:
            raise self.translate(exc) from exc
        except BaseException:
            self._end_interrupted()
            raise

    def _end_interrupted(self) -> None:
        # psycopg ends the query for a KeyboardInterrupt, but not for what else a signal handler may raise.
        if self.connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self.connection.close()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """What psycopg raises in the body means this to us."""
        try:
            yield
        except psycopg.Error as exc:
            raise self.translate(exc) from exc

    @property
    def usable(self) -> bool:
        return not (self.connection.closed or self.given_up)

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self.connection.close()
