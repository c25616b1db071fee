"""One connection of PyMySQL: statements by their names, transactions under the gate, and error translation."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pymysql
from pymysql import err
from pymysql.constants import CR, ER

from sqlsem.engines import borrowed
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.engines.failures import Conflict
from sqlsem.engines.mysql.sleeper import LockSleeper
from sqlsem.engines.statements.session import StatementSession
from sqlsem.util import sockets
from sqlsem.util.chunks import in_chunks
from sqlsem.util.printable import first_line
from sqlsem.values.errors import ConfigurationError, SchemaError, SqlsemError, Unavailable

if TYPE_CHECKING:
    from sqlsem.engines.mysql.engine import MysqlEngine

#: Error codes that PyMySQL does not name: a message of a trigger; a CHECK, in MySQL and in MariaDB; a time limit of
#: statements; a killed connection; a deadlock of locks by name; read-only servers; a full disk or table.
SIGNALLED, CHECKS, TOO_LONG, KILLED, NAMES_DEADLOCK = 1644, (3819, 4025), (3024, 1969), 1927, 3058
READ_ONLY, FULL = (ER.OPTION_PREVENTS_STATEMENT, 1792, 1836), (1021, 1114, 1041)
#: A node of a cluster without a majority, or one that receives the database, answers nothing else.
NOT_READY = 1047
#: Another session has a lock. (The code of a failed certification in a cluster is that of a deadlock.)
LOCKED = (ER.LOCK_WAIT_TIMEOUT, ER.LOCK_DEADLOCK, NAMES_DEADLOCK, *TOO_LONG, ER.QUERY_INTERRUPTED)
LOST = (CR.CR_SERVER_GONE_ERROR, CR.CR_SERVER_LOST, ER.SERVER_SHUTDOWN, KILLED, NOT_READY, 0)
DENIED = (ER.TABLEACCESS_DENIED_ERROR, ER.COLUMNACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, 1227, 1370)
#: How long an idle session lives, in heartbeats of its member, and in seconds at least and at most (what each server
#: takes): the server ends the session of a host that has vanished.
IDLE_HEARTBEATS, IDLE_SECONDS, LONGEST_IDLE_SECONDS = 4, 60, 2_000_000
#: The same in seconds for a session without a beacon: a day.
IDLE_SECONDS_WITHOUT_BEACON = 86400
#: Two sessions may compute times of the server's start that differ by this many seconds.
START_SECONDS = 3.0
#: The length of a text of several statements, in characters. (The server's max_allowed_packet is at least 1 MB.)
TEXT_SIZE = 200_000
#: Seconds by which the clocks of a cluster's nodes may differ.
CLUSTER_MARGIN = 2.0
#: The state of a node that has the writes of all nodes.
SYNCED = "Synced"
#: A parameter of a statement (as ``:name`` or ``?``), or text in which there is none, or a percent sign.
_PART = re.compile(r"(?<![:\w]):(\w+)|(\?)|('[^']*'|\"[^\"]*\")|(--[^\n]*\n?)|(%)")


class Row(tuple[Any, ...]):
    """A row of a result. Its columns have names and numbers; each list of names has a subclass."""

    numbers: dict[str, int]

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self.numbers[key] if isinstance(key, str) else key)

    def keys(self) -> list[str]:
        """The names of the columns, in order."""
        return list(self.numbers)


@functools.lru_cache(maxsize=1000)
def _row_class(names: tuple[str, ...]) -> type[Row]:
    return type("Row", (Row,), {"numbers": {name: number for number, name in enumerate(names)}})


class Answer:
    """The result of a statement, or of the last of several in one text."""

    def __init__(self, rows: list[Row], rowcounts: list[int], lastrowid: int | None) -> None:
        self.rows = rows
        #: The numbers of rows that the statements found.
        self.rowcounts = rowcounts
        #: The last number that a row got, in any of the statements.
        self.lastrowid = lastrowid

    @property
    def rowcount(self) -> int:
        """The number of rows that the last statement found."""
        return self.rowcounts[-1]


class MysqlConnection(StatementSession):
    """One connection. A statement waits for the lock of another session for `Options.gate_timeout`."""

    engine: MysqlEngine
    sleeper: LockSleeper

    def __init__(self, engine: MysqlEngine, connection: Any) -> None:
        super().__init__(engine)
        self.connection = connection
        self.server = f"{connection.host}:{connection.port}"
        self.sleeper = LockSleeper(self)
        self._in_transaction = False
        self.login_name = ""
        self.idle = IDLE_SECONDS_WITHOUT_BEACON  # the seconds after which the server ends this session if it is idle
        self.in_cluster = False  # True on a node of a Galera cluster
        self.fractions = False  # True if locks by name are waited for in fractions of a second
        #: Which server or cluster this is, and about when it was started.
        self.origin, self.started = "", 0.0
        #: The beginning of the names of locks in this database. (Names are the server's, and of at most 64 characters.)
        self.lock_prefix = ""
        #: Expressions to evaluate after the transaction's end.
        self._after: list[str] = []

    def prepare(self, purpose: str) -> None:
        gate = max(1, math.ceil(self.options.gate_timeout))
        if purpose == "main":
            life = self.options.grace if self.options.lease is None else self.options.lease
            interval = max(self.engine.idle_heartbeat, life * self.options.timing.heartbeat_share)
            self.idle = min(max(IDLE_SECONDS, math.ceil(IDLE_HEARTBEATS * interval)), LONGEST_IDLE_SECONDS)
        self.run("session", {"gate": gate, "metadata": max(5, gate), "idle": self.idle})
        login, database, version, place, now, read_only = self.row("facts")
        if read_only and purpose != "look":  # (A login with SUPER could write there.)
            self.engine.leave_server(self.server)
            raise Disconnected(
                f"{self.engine.label} is read-only (a replica?); connect to the primary", code="read-only"
            )
        self.login_name = str(login)
        self.origin = str(place)
        self.fractions = "MariaDB" in version  # MySQL counts the time limit of GET_LOCK in whole seconds
        table = f"{database}.{self.options.schema}.{self.options.table}"
        self.lock_prefix = f"sqlsem.{hashlib.sha256(table.encode()).hexdigest()[:24]}."
        status = {str(name): str(value) for name, value in self.rows("status")}
        self.started = now - int(status.get("Uptime", 0))
        if status.get("wsrep_ready") is not None and status.get("wsrep_connected") == "ON":
            self._prepare_cluster(status["wsrep_cluster_state_uuid"])
        self.follow_origin()

    def _prepare_cluster(self, identity: str) -> None:
        if self.options.lease is None:
            raise ConfigurationError(
                f"{self.engine.label} is a node of a Galera cluster, whose nodes do not share the locks of sessions; "
                f"connect with lease=30 (--lease 30)",
                code="session",
            )
        self.in_cluster = True
        self.clock_margin = CLUSTER_MARGIN
        self.origin, self.started = identity, 0.0  # (Members outlive a node.)
        self.run("wait_for_cluster")

    def follow_origin(self) -> None:
        """After a restart of the server begin all graces and leases anew, as no member could be seen meanwhile. After a
        failover also skip numbers: the new server may not know the last ones.
        """
        if self.row("version") is None:  # there are no tables yet
            return
        known = dict(self.rows("origin"))
        if "schema_version" not in known or self._is_origin(known):  # (without a version they are not complete)
            return
        with self.transaction():
            known = dict(self.rows("origin"))
            if self._is_origin(known):  # another session was faster
                return
            self.run("restart_members")
            if "origin" in known and known["origin"] != self.origin:
                self.run("skip_numbers", {"by": secrets.randbelow(10**9)})
            self.run_many(
                "note_origin",
                [{"name": "origin", "value": self.origin}, {"name": "started", "value": str(self.started)}],
            )

    def _is_origin(self, known: Mapping[str, str]) -> bool:
        """Return True if these settings name this server, and this start of it."""
        return known.get("origin") == self.origin and abs(float(known["started"]) - self.started) <= START_SECONDS

    # -- statements ---------------------------------------------------------------------------------------------

    def execute_text(self, text: str, parameters: Any = ()) -> Answer:
        """Run one statement or several in one text, in which percent signs are doubled."""
        try:
            if self.connection is None:
                raise err.InterfaceError(0, "the connection is closed")
            with self.connection.cursor() as cursor:
                cursor.execute(text, parameters)
                number, rowcounts = None, []
                while True:
                    number = cursor.lastrowid or number
                    rowcounts.append(cursor.rowcount)
                    rows = rows_of(cursor)
                    if not cursor.nextset():
                        return Answer(rows, rowcounts, number)
        except (pymysql.MySQLError, OSError) as exc:
            raise self.translate(exc) from exc
        except BaseException:
            self._force_close()  # an exception of a signal handler: an answer may be on its way
            raise

    def run(self, name: str, parameters: Any = ()) -> Answer:
        return self.execute_text(self.queries[name], parameters)

    def run_many(self, name: str, parameters: Sequence[Any]) -> None:
        text = self.queries[name]
        with self.connection.cursor() as cursor:
            statements = [cursor.mogrify(text, values) for values in parameters]
        for chunk in in_chunks(statements, len, maximum=TEXT_SIZE):
            self.execute_text(";\n".join(chunk).replace("%", "%%"))

    def rows(self, name: str, parameters: Any = ()) -> list[Any]:
        return self.execute_text(self.queries[name], parameters).rows

    def transaction(self) -> contextlib.AbstractContextManager[None]:
        return _Transaction(self, "begin", "COMMIT")

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return _Transaction(self, "begin_reading", "ROLLBACK")

    def run_alone(self, name: str, parameters: Any) -> Answer:
        """Run a statement of client.sql that is a whole transaction."""
        self.roll_back()
        self._in_transaction = True
        try:
            answer = self.run(name, parameters)
            self._in_transaction = False
            return answer
        finally:
            self.roll_back()  # (an error in the middle leaves the transaction open, which is the gate)

    def begin(self, name: str) -> None:
        """Begin a transaction by a statement of client.sql."""
        self.roll_back()
        self._in_transaction = True
        self.run(name)

    def end(self, text: str) -> None:
        """End the transaction, and evaluate what waits for that (`after_commit`)."""
        after, self._after = self._after, []
        self.execute_text("; DO ".join((text, *after)))
        self._in_transaction = False

    def after_commit(self, expression: str) -> None:
        """Have the server evaluate an expression after the end of this transaction."""
        self._after.append(expression)

    def roll_back(self) -> None:
        self._after.clear()
        if self._in_transaction:
            self._in_transaction = False
            with contextlib.suppress(SqlsemError):  # the first error counts; and the server rolls back a lost session
                self.execute_text("ROLLBACK")

    def version(self) -> object:
        return self.row("writes")[0]

    # -- errors and the end -------------------------------------------------------------------------------------

    def translate(self, exc: Exception) -> Exception:
        """Return sqlsem's error for an error of PyMySQL or of the socket."""
        where, code = self.engine.label, exc.args[0] if exc.args else 0
        text = first_line(exc.args[-1] if exc.args else exc)
        if code == NOT_READY:
            self._give_up()  # another node may be ready
            return Disconnected(f"{where}: the node {self.server} does not take part in its cluster now: {text}")
        if code == ER.LOCK_WAIT_TIMEOUT and self.in_cluster and (state := self._node_state()) != SYNCED:
            # It waited for the writes of other nodes, which this node does not execute while it sends its data to a new
            # node. (It may have waited for a lock, and another node serves as well.)
            self._give_up()
            return Disconnected(f"{where}: the node {self.server} is behind its cluster (it is {state}): {text}")
        if isinstance(exc, OSError) or code in LOST or not self.connection or not self.connection.open:
            self._force_close()
            self.engine.leave_server(self.server)
            return Disconnected(f"Lost the connection to {where}: {text}")
        if code == ER.LOCK_DEADLOCK and self.in_cluster:
            return Conflict(f"{where}: a transaction on another node was faster: {text}", code="unreachable")
        if code in LOCKED:
            return Busy(f"{where}: another session keeps a lock in an open transaction: {text}")
        if code in READ_ONLY:
            self._give_up()  # another server may be the primary now
            return Disconnected(f"{where} is read-only (a replica?): {text}", code="read-only")
        if code in (ER.NO_SUCH_TABLE, ER.BAD_FIELD_ERROR):
            return SchemaError(f"{where}: {text}; create or upgrade the sqlsem tables with: sqlsem init")
        if code in DENIED:
            return ConfigurationError(
                f"{where}: {text}; an administrator can grant the rights (see: sqlsem sql mysql permissions)",
                code="rights",
            )
        if code == SIGNALLED or code in CHECKS or isinstance(exc, err.DataError):
            return ConfigurationError(f"{where}: {text}")
        if code in FULL:
            return Unavailable(f"{where}: {text}; free some room on the server", code="full")
        return Unavailable(f"{where}: {text}")

    def _give_up(self) -> None:
        """Let this session be replaced by one on another server."""
        self.given_up = True
        self.engine.leave_server(self.server)

    def _node_state(self) -> str:
        """Return the state of this node in its cluster, which it tells even while it executes nothing else."""
        try:
            return str(dict(self.rows("status"))["wsrep_local_state_comment"])
        except SqlsemError as exc:
            return f"silent: {exc}"

    @property
    def usable(self) -> bool:
        return not self.given_up and self.connection is not None and bool(self.connection.open)

    def interrupt(self) -> None:
        sock = socket_of(self.connection)
        if sock is not None:  # (another thread may close it meanwhile: then its number is -1)
            sockets.shut_down(sock.fileno())

    def discard(self) -> None:
        sock = socket_of(self.connection)
        if sock is not None:
            sockets.discard(sock.fileno())

    def _force_close(self) -> None:
        self.interrupt()  # so that no goodbye is sent into the middle of an answer
        if self.connection is not None:
            with contextlib.suppress(pymysql.MySQLError, OSError):
                self.connection.close()

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            with contextlib.suppress(pymysql.MySQLError, OSError):
                connection.close()


class _Transaction:
    """A transaction, ended by ``end`` unless an error was raised. (A class, as `sqlsem.engines.sqlite` explains.)"""

    __slots__ = ("_begin", "_end", "_session")

    def __init__(self, session: MysqlConnection, begin: str, end: str) -> None:
        self._session, self._begin, self._end = session, begin, end

    def __enter__(self) -> None:
        try:
            self._session.begin(self._begin)
        except BaseException:
            self._session.roll_back()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._session.end(self._end)
        finally:
            self._session.roll_back()


def socket_of(connection: Any) -> Any:
    """Return the socket of a connection, for which PyMySQL has no public name; None if it is closed."""
    return None if connection is None else vars(connection).get("_sock")


def rows_of(cursor: Any) -> list[Row]:
    """Return the rows of a cursor, if its statement has a result."""
    if not cursor.description:
        return []
    kind = _row_class(tuple(column[0] for column in cursor.description))
    return [kind(map(_plain, borrowed.values(row))) for row in cursor.fetchall()]


def _plain(value: Any) -> Any:
    """Return a number of the server as Python's int or float."""
    if type(value) is Decimal:
        return int(value) if value == value.to_integral_value() and not value.as_tuple().exponent else float(value)
    return value


def for_driver(text: str) -> str:
    """Return a statement with the parameters that PyMySQL fills in, and without comments."""

    def part(match: re.Match[str]) -> str:
        name, mark, quoted, _comment, percent = match.groups()
        if name:
            return f"%({name})s"
        if quoted:
            return str(quoted).replace("%", "%%")
        return "%s" if mark else "%%" if percent else "\n"

    return _PART.sub(part, text).strip()
