"""What a psycopg connection is to us, awaited or not: statements past psycopg's cursor, errors in our words."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import socket
from collections.abc import Generator, Sequence
from typing import Any

import psycopg
from psycopg import errors, generators

from sqlsem.engines.base import Busy, Disconnected
from sqlsem.engines.postgresql.database import LOCKS_FULL, LOCKS_SETTING, PostgresDatabase
from sqlsem.engines.protocol import EngineConnection
from sqlsem.errors import ConfigurationError, SchemaError, Unavailable
from sqlsem.printable import first_line

Connection = psycopg.Connection[tuple[Any, ...]]
AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]

#: PostgreSQL's numbers of types: bigint, smallint and integer; boolean; a list of bigint.
_INTEGERS, _BOOLEAN, _NUMBERS = (20, 21, 23), 16, 1016
_ROWS = psycopg.pq.ExecStatus.TUPLES_OK
#: Numbers of prepared statements.
_numbers = itertools.count(1)


class PsycopgConnection(EngineConnection):
    """What a psycopg connection is to us, awaited or not."""

    def __init__(self, engine: PostgresDatabase, connection: Connection | AsyncConnection) -> None:
        self.engine = engine
        self.options = engine.options
        self.queries = engine.queries()
        self._line = connection
        self.given_up = False
        self._known: dict[str, bytes] = {}  # the statements prepared so far
        self.encoding = connection.info.encoding
        self._unsure = ""  # what the server said about a commit that may be lost in a failover
        connection.add_notice_handler(self._noticed)

    def _noticed(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        # (Its text may be in any language.)
        if diagnostic.source_function == "SyncRepWaitForLSN":
            self._unsure = diagnostic.message_primary or "a commit was not replicated"

    def require_replicated(self) -> None:
        """Somebody cancelled a commit that waited for a standby: it stands on this server only. To be repeated."""
        if self._unsure:
            text, self._unsure = self._unsure, ""
            raise Busy(f"{self.engine.label}: {text}")

    def setup(self, purpose: str) -> dict[str, str]:
        """The parameters of the statement that makes a new connection ready."""
        alive = max(1, math.ceil(self.options.grace))
        # The SQL of tasks waits for locks as long as its author let it.
        patience = 0 if purpose == "work" else int(self.options.gate_timeout * 1000)
        # Nothing of ours needs a search_path; but what is set cannot be tampered with. The SQL of tasks has the login's
        # own, and behind a pooler that lends its connections out (a lease) it would be other people's, too.
        own = purpose != "work" and self.options.lease is None
        return {"lock_timeout": str(patience), "keepalive": str(alive), "own": "true" if own else "false"}

    def translate(self, exc: psycopg.Error) -> Exception:
        """What an error means to us."""
        where, text = self.engine.label, first_line(exc)
        if isinstance(exc, errors.QueryCanceled):  # by an administrator, or a statement_timeout that is not ours to set
            return Busy(f"{where}: {text}")
        if isinstance(exc, errors.LockNotAvailable):
            return Busy(f"{where}: somebody keeps a lock in an open transaction: {text}")
        if isinstance(exc, errors.DeadlockDetected):
            # With another program's locks on our tables, as of VACUUM FULL: nothing of ours is done, and may be again.
            return Busy(f"{where} chose this request as deadlock victim: {text}")
        if isinstance(exc, errors.NoDataFound):
            self.given_up = True  # anyone who keeps this session comes back as a new member
            return Disconnected(f"{where}: {text}")
        if isinstance(exc, (errors.UndefinedFunction, errors.UndefinedTable, errors.InvalidSchemaName)):
            return SchemaError(f"{where}: {text}; create or upgrade the sqlsem tables with: sqlsem init")
        if isinstance(exc, errors.ActiveSqlTransaction) or (
            isinstance(exc, (errors.InsufficientPrivilege, errors.InvalidParameterValue))
            and text.startswith("sqlsem: ")
        ):
            return ConfigurationError(f"{where}: {'; '.join(filter(None, (text, exc.diag.message_hint)))}")
        if isinstance(exc, errors.InsufficientPrivilege):
            return ConfigurationError(
                f"{where}: {text}; an administrator can GRANT {self.options.schema}_user (or _operator, _putter, "
                f"_worker, for what these do) to this login (see: sqlsem sql postgresql permissions)"
            )
        if LOCKS_SETTING in (exc.diag.message_hint or ""):
            return Unavailable(f"{where}: {text}; {LOCKS_FULL}")
        if isinstance(exc, errors.ReadOnlySqlTransaction):
            self.given_up = True  # the primary that it was may be another one by now: look for that
            return Disconnected(f"{where} is read-only (a standby?): {text}")
        if isinstance(exc, (errors.InvalidSqlStatementName, errors.DuplicatePreparedStatement)):
            return ConfigurationError(
                f"{where}: {text}: this connection changed sessions (a pooler in transaction mode?); "
                f"connect with lease=…, or past the pooler"
            )
        if self._line.closed or isinstance(exc, (errors.AdminShutdown, errors.CrashShutdown)):
            return Disconnected(f"Lost the connection to {where}: {text}")
        return Unavailable(f"{where}: {text}")

    def asking(self, name: str, *parameters: Any) -> Generator[Any, Any, list[Any]]:
        """Run a statement past psycopg's cursor; prepared once a connection, but for those with a lease. Yields
        psycopg's generators, for their results. Returns the values of the first row.
        """
        pgconn = self._line.pgconn
        lasting = self.options.lease is None
        known = self._known.get(name)
        if known is None:
            numbers = itertools.count(1)
            statement = re.sub("%s", lambda _: f"${next(numbers)}", self.queries[name]).encode()
            # A new name each time: after an interrupt nobody knows whether the last one is taken.
            known = f"sqlsem_{name}_{next(_numbers)}".encode() if lasting else statement
            if lasting:
                pgconn.send_prepare(known, statement)
                self._require((yield generators.execute(pgconn)), psycopg.pq.ExecStatus.COMMAND_OK)
            self._known[name] = known
        values = [None if parameter is None else str(parameter).encode(self.encoding) for parameter in parameters]
        if b"\0" in b"".join(filter(None, values)):  # libpq would end a value there
            raise psycopg.DataError("PostgreSQL text cannot contain NUL characters")
        (pgconn.send_query_prepared if lasting else pgconn.send_query_params)(known, values)
        results = yield generators.execute(pgconn)
        result = results[0]
        # (Asked here as well, to spare the usual case calls: others wait for what comes next.)
        if len(results) > 1 or result.status != _ROWS:
            self._require(results, _ROWS)
        if self._unsure:
            self.require_replicated()
        if result.nfields == 1:
            return [self._read(result, 0)]
        return [self._read(result, column) for column in range(result.nfields)]

    def _read(self, result: psycopg.pq.abc.PGresult, column: int) -> Any:
        """A value of the first row, which the server has written as text."""
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
        """The result, if nothing went wrong after it: an error may follow it, as its COMMIT is a step of its own, and
        the server may end the session between the two.
        """
        for result in results:
            if result.status != status:
                raise errors.error_from_result(result, encoding=self.encoding)
        return results[0]

    def discard(self) -> None:
        # The parent's socket must not stay open here, or the server would not see the parent die. What is put in its
        # place keeps the number from being given to a file of the child's.
        with contextlib.suppress(OSError, psycopg.Error):
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, self._line.fileno())
            os.close(null)

    def interrupt(self) -> None:
        # Shutting the socket down wakes a thread that waits for an answer which may never come.
        with contextlib.suppress(OSError, psycopg.Error):
            with socket.socket(fileno=os.dup(self._line.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)
