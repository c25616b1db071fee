"""PostgreSQL, through psycopg 3."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import re
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from sqlsem import sql
from sqlsem.deadlocks import Found
from sqlsem.engines.base import (
    AsyncSession,
    Busy,
    Check,
    Creator,
    Disconnected,
    Engine,
    Options,
    Plan,
    Session,
    Wire,
    setting_number,
)
from sqlsem.engines.roles import already_upgrading
from sqlsem.errors import ConfigurationError, SchemaError, TaskFailed, Unavailable
from sqlsem.model import (
    Attempt,
    Claimed,
    Continuation,
    End,
    Entry,
    NewTask,
    PartEnd,
    PartStart,
    Past,
    Pulse,
    QueueState,
    Request,
    Resource,
    RoundEntry,
    TaskEntry,
    Ticket,
    Upgrading,
)

try:
    import psycopg
    from psycopg import conninfo, errors, generators, waiting
except ImportError as exc:
    raise ConfigurationError(
        "PostgreSQL needs psycopg 3, which is not installed; get it with: pip install 'sqlsem[postgres]'"
    ) from exc

if TYPE_CHECKING:
    Connection = psycopg.Connection[tuple[Any, ...]]
    AsyncConnection = psycopg.AsyncConnection[tuple[Any, ...]]

T = TypeVar("T")


log = logging.getLogger("sqlsem")

#: Seconds that `install` waits for a lock on a table, with everybody else behind it.
INSTALL_PATIENCE = 5


class PostgresEngine(Engine):
    """A PostgreSQL database, version 13 or later."""

    name = "postgresql"

    def __init__(self, url: str, options: Options, creator: Creator | None = None) -> None:
        super().__init__(url, options, creator)
        try:
            self._parameters = conninfo.conninfo_to_dict(url) if url else {}
        except psycopg.Error:
            # libpq's message may repeat parts of the URL; so no cause either.
            raise ConfigurationError(
                "This is not a URL that PostgreSQL understands; write postgresql://user:password@host:5432/database"
            ) from None

    @property
    def where(self) -> str:
        if self.creator is not None:
            return "the PostgreSQL database of creator="
        hosts = str(self._parameters.get("host") or self._parameters.get("hostaddr") or "localhost").split(",")
        ports = str(self._parameters.get("port") or "").split(",")
        ports = ports * len(hosts) if len(ports) == 1 else ports  # one for all
        places = ", ".join(f"{host or 'localhost'}:{port or '5432'}" for host, port in zip(hosts, ports, strict=False))
        return f"PostgreSQL database {self._parameters.get('dbname') or '(default)'!s} on {places}"

    def denied(self, exc: BaseException) -> bool:
        return isinstance(exc.__cause__, errors.InsufficientPrivilege)

    @property
    def tls_mode(self) -> str:
        """What libpq goes by, where the URL or the environment says."""
        return str(self._parameters.get("sslmode") or os.environ.get("PGSSLMODE") or "prefer")

    def reach(self, purpose: str) -> PostgresSession:
        try:
            if self.creator is not None:
                connection = self.creator()
                connection.autocommit = True
            else:
                connection = psycopg.connect(**self._connect_parameters(purpose))
        except psycopg.Error as exc:
            raise self._unreachable(exc) from exc
        return PostgresSession(self, connection)

    @property
    def awaits(self) -> bool:
        # psycopg cannot wait in the event loop that is Windows's default.
        return self.creator is None and not isinstance(asyncio.get_running_loop(), _loops_without_sockets)

    async def connect_async(self, purpose: str) -> AsyncPostgresSession:
        # In a task of its own, as older versions of psycopg may miss a cancellation.
        opening = asyncio.get_running_loop().create_task(self._open(purpose))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.cancel()
            opening.add_done_callback(_close_opened)
            raise

    async def _open(self, purpose: str) -> AsyncPostgresSession:
        try:
            connection = await psycopg.AsyncConnection.connect(**self._connect_parameters(purpose))
        except psycopg.Error as exc:
            raise self._unreachable(exc) from exc
        session = AsyncPostgresSession(self, connection)
        overdue = asyncio.get_running_loop().call_later(self.setup_timeout or 0.0, session.interrupt)
        try:
            await session.prepare(purpose)
        except BaseException:
            session.close()
            raise
        finally:
            overdue.cancel()
        return session

    def _unreachable(self, exc: psycopg.Error) -> Exception:
        """What it means that no connection could be made."""
        text = str(exc)
        refused = (errors.InvalidPassword, errors.InvalidAuthorizationSpecification, errors.InvalidCatalogName)
        # libpq reports a refusal at connect time without a SQLSTATE.
        words = ("password authentication failed", "no password supplied", "does not exist")
        if isinstance(exc, refused) or (
            isinstance(exc, psycopg.OperationalError) and any(word in text for word in words)
        ):
            return ConfigurationError(f"{self.where} refuses us: {_first_line(exc)}; check the URL")
        if isinstance(exc, psycopg.OperationalError):
            return Disconnected(f"Cannot reach {self.where}: {_first_line(exc)}")
        return exc

    def _connect_parameters(self, purpose: str) -> dict[str, Any]:
        alive = max(1, math.ceil(self.options.grace))
        return {
            "connect_timeout": math.ceil(self.options.connect_timeout),
            "application_name": f"sqlsem {purpose}",
            # A peer that vanished without a word must not keep us waiting: notice within about a grace.
            "keepalives_idle": alive,
            "keepalives_interval": 1,
            "keepalives_count": 3,
            "tcp_user_timeout": alive * 1000,
            **self._parameters,
            "client_encoding": "utf8",  # whatever the database's is; psycopg gives bytes for SQL_ASCII
            "autocommit": True,
        }

    def pinning(self, cursor: Any, ticket: Ticket) -> Generator[Any, Any, bool]:
        yield cursor.execute(self.queries()["pin"], (ticket.resource, ticket.position, ticket.requesting_id))
        row = yield cursor.fetchone()
        return bool(row and next(iter(row.values() if isinstance(row, dict) else row)))


class PostgresWire(Wire):
    """What a psycopg connection is to us, awaited or not."""

    def __init__(self, engine: PostgresEngine, connection: Connection | AsyncConnection) -> None:
        self._engine = engine
        self._options = engine.options
        self._queries = engine.queries()
        self._line = connection
        self._given_up = False
        self._known: dict[str, bytes] = {}  # the statements prepared so far
        self._encoding = connection.info.encoding
        self._unsure = ""  # what the server said about a commit that may be lost in a failover
        connection.add_notice_handler(self._noticed)

    def _noticed(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        # (Its text may be in any language.)
        if diagnostic.source_function == "SyncRepWaitForLSN":
            self._unsure = diagnostic.message_primary or "a commit was not replicated"

    def _require_replicated(self) -> None:
        """Somebody cancelled a commit that waited for a standby: it stands on this server only. To be repeated."""
        if self._unsure:
            text, self._unsure = self._unsure, ""
            raise Busy(f"{self._engine.where}: {text}")

    def _setup(self, purpose: str) -> dict[str, str]:
        """The parameters of the statement that makes a new connection ready."""
        alive = max(1, math.ceil(self._options.grace))
        # The SQL of tasks waits for locks as long as its author let it.
        patience = 0 if purpose == "work" else int(self._options.patience * 1000)
        # Nothing of ours needs a search_path; but what is set cannot be tampered with. The SQL of tasks has the login's
        # own, and behind a pooler that lends its connections out (a lease) it would be other people's, too.
        own = purpose != "work" and self._options.lease is None
        return {"lock_timeout": str(patience), "keepalive": str(alive), "own": "true" if own else "false"}

    def _translate(self, exc: psycopg.Error) -> Exception:
        where, text = self._engine.where, _first_line(exc)
        if isinstance(exc, errors.QueryCanceled):  # by an administrator, or a statement_timeout that is not ours to set
            return Busy(f"{where}: {text}")
        if isinstance(exc, errors.LockNotAvailable):
            return Busy(f"{where}: somebody keeps a lock in an open transaction: {text}")
        if isinstance(exc, errors.DeadlockDetected):
            # With another program's locks on our tables, as of VACUUM FULL: nothing of ours is done, and may be again.
            return Busy(f"{where} chose this request as deadlock victim: {text}")
        if isinstance(exc, errors.NoDataFound):
            self._given_up = True  # whoever keeps this session comes back as a new member
            return Disconnected(f"{where}: {text}")
        if isinstance(exc, (errors.UndefinedFunction, errors.UndefinedTable, errors.InvalidSchemaName)):
            return SchemaError(f"{where}: {text}; create or upgrade the sqlsem tables with: sqlsem init")
        if isinstance(exc, errors.ActiveSqlTransaction) or (
            isinstance(exc, errors.InsufficientPrivilege) and text.startswith("sqlsem: ")
        ):
            return ConfigurationError(f"{where}: {'; '.join(filter(None, (text, exc.diag.message_hint)))}")
        if isinstance(exc, errors.InsufficientPrivilege):
            return ConfigurationError(
                f"{where}: {text}; an administrator can GRANT {self._options.schema}_user (or _operator, _putter, "
                f"_worker, for what these do) to this login (see: sqlsem sql postgresql permissions)"
            )
        if isinstance(exc, errors.ReadOnlySqlTransaction):
            self._given_up = True  # the primary that it was may be another one by now: look for that
            return Disconnected(f"{where} is read-only (a standby?): {text}")
        if isinstance(exc, (errors.InvalidSqlStatementName, errors.DuplicatePreparedStatement)):
            return ConfigurationError(
                f"{where}: {text}: this connection changed sessions (a pooler in transaction mode?); "
                f"connect with lease=…, or past the pooler"
            )
        if self._line.closed or isinstance(exc, (errors.AdminShutdown, errors.CrashShutdown)):
            return Disconnected(f"Lost the connection to {where}: {text}")
        return Unavailable(f"{where}: {text}")

    def _asking(self, name: str, *parameters: Any) -> Generator[Any, Any, Sequence[bytes | None]]:
        """Run a statement past psycopg's cursor; prepared once a connection, but for those with a lease. Yields
        psycopg's generators, for their results. Returns the values of the first row, as the server wrote them.
        """
        pgconn = self._line.pgconn
        lasting = self._options.lease is None
        known = self._known.get(name)
        if known is None:
            numbers = itertools.count(1)
            statement = re.sub("%s", lambda _: f"${next(numbers)}", self._queries[name]).encode()
            # A new name each time: after an interrupt nobody knows whether the last one is taken.
            known = f"sqlsem_{name}_{next(_numbers)}".encode() if lasting else statement
            if lasting:
                pgconn.send_prepare(known, statement)
                (result,) = yield generators.execute(pgconn)
                self._require(result, psycopg.pq.ExecStatus.COMMAND_OK)
            self._known[name] = known
        values = [None if one is None else str(one).encode(self._encoding) for one in parameters]
        if b"\0" in b"".join(filter(None, values)):  # libpq would end a value there
            raise psycopg.DataError("PostgreSQL text cannot contain NUL characters")
        (pgconn.send_query_prepared if lasting else pgconn.send_query_params)(known, values)
        (result,) = yield generators.execute(pgconn)
        self._require(result, psycopg.pq.ExecStatus.TUPLES_OK)
        self._require_replicated()
        return [result.get_value(0, column) for column in range(result.nfields)]

    def _require(self, result: psycopg.pq.abc.PGresult, status: psycopg.pq.ExecStatus) -> None:
        if result.status != status:
            raise errors.error_from_result(result, encoding=self._encoding)

    def abandon(self) -> None:
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


class PostgresSession(PostgresWire, Session):
    """One psycopg connection in autocommit mode: every routine is a transaction of its own."""

    def __init__(self, engine: PostgresEngine, connection: Connection) -> None:
        super().__init__(engine, connection)
        self._connection = connection
        self._cursor = connection.cursor()
        # What is called at every lock is prepared once (see _prepared). Never with a lease: that is for poolers which
        # lend their connections out by the transaction, and there a prepared statement may be gone at the next call.
        connection.prepare_threshold = None
        self._call: Callable[..., Sequence[Any]] = self._first if self._options.lease is not None else self._prepared

    def prepare(self, purpose: str) -> None:
        lease = self._options.lease is not None
        if lease or purpose in ("main", "look"):
            pid = self._backend()
            if pid != self._connection.info.backend_pid:  # a pooler stands between
                if lease or purpose == "look":
                    return  # what is set on a session here would be set for whoever is lent it next
                self._require_own_session(pid)
        self._run("session", self._setup(purpose))

    def _backend(self) -> int:
        return int(self._run("backend")[0][0])

    def _require_own_session(self, pid: int) -> None:
        """Refuse a beacon where connections share sessions: lent by the transaction or the statement, an idle session
        goes to whoever asks next.
        """
        other = self._engine.reach("look")
        try:
            lent = other._backend() == pid or self._backend() != pid
        finally:
            other.close()
        if lent:
            raise ConfigurationError(
                f"{self._engine.where}: a pooler lends sessions out by the transaction, and a beacon needs one of its "
                f"own; connect with lease=30 (--lease 30), past the pooler, or have it pool sessions"
            )

    def _run(self, name: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        try:
            self._cursor.execute(self._queries[name], parameters)
            rows = self._cursor.fetchall()
            self._require_replicated()
            return rows
        except psycopg.Error as exc:
            raise self._translate(exc) from exc
        except BaseException:
            self._end_interrupted()
            raise

    def _first(self, name: str, *parameters: Any) -> Sequence[Any]:
        return self._run(name, parameters)[0]

    def _prepared(self, name: str, *parameters: Any) -> Sequence[Any]:
        """As `_first`, for statements that are run at every lock: past psycopg's cursor, which takes half as long
        again as the rest of the call. Values come as the server wrote them: ``b"17"``, ``b"t"``, None.
        """
        asked = self._asking(name, *parameters)
        answer = None
        try:
            while True:
                answer = self._connection.wait(asked.send(answer))
        except StopIteration as done:
            values: Sequence[Any] = done.value
            return values
        except psycopg.Error as exc:
            raise self._translate(exc) from exc
        except BaseException:
            self._end_interrupted()
            raise

    def _end_interrupted(self) -> None:
        # psycopg ends the query for a KeyboardInterrupt, but not for what else a signal handler may raise.
        if self._connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self._connection.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as exc:
            raise self._translate(exc) from exc

    # -- membership ---------------------------------------------------------------------------------------------

    def enrol(self, host: str, pid: int, program: str) -> int:
        lease = self._options.lease
        return int(
            self._run(
                "enrol",
                {
                    "host": host,
                    "pid": pid,
                    "program": program,
                    "grace": int(self._options.grace * 1000),
                    "lease": None if lease is None else int(lease * 1000),
                },
            )[0][0]
        )

    def resume(self, member_id: int) -> bool:
        return bool(self._run("resume_member", {"member": member_id})[0][0])

    def ping(self, member_id: int) -> Pulse:
        known, positions, revoked = self._run("ping", {"member": member_id})[0]
        return Pulse(known, frozenset(positions or ()), frozenset(revoked or ()))

    def resign(self, member_id: int) -> None:
        self._run("resign", {"member": member_id})

    # -- requests -----------------------------------------------------------------------------------------------

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        common = (member_id, requesting_id, owner, uid, only_if_free)
        if len(requests) == 1:
            one = requests[0]
            position, granted = self._call(
                "register", *common, one.resource, one.access, one.limit, one.weight, one.note
            )
            if position is None:
                return None
            return [Ticket(one.resource, int(position), requesting_id, granted in (True, b"t"))]
        asked = json.dumps(
            [
                {"resource": r.resource, "access": r.access, "limit": r.limit, "weight": r.weight, "note": r.note}
                for r in requests
            ]
        )
        rows = self._run("register_all", (*common, asked))
        return [Ticket(resource, position, requesting_id, granted) for resource, position, granted in rows] or None

    def release(self, ticket: Ticket, outcome: str) -> bool:
        code = self._call("release", ticket.resource, ticket.position, ticket.requesting_id, outcome)[-1]
        return int(code) == 0

    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        return int(self._first("cancel", member_id, uid, outcome)[0])

    def wait(self, ticket: Ticket, timeout: float, nudge: threading.Event) -> bool | None:
        deadline = monotonic() + timeout
        while True:
            code = int(self._call("wait", ticket.resource, ticket.position, int(timeout * 1000))[-1])
            if code != 1:
                return {0: True, -1: False}.get(code)
            timeout = max(0.0, deadline - monotonic())

    # -- conversions --------------------------------------------------------------------------------------------

    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        key = (ticket.resource, ticket.position, ticket.requesting_id)
        code = int(self._first("begin_upgrade", *key, only_if_free)[0])
        if code == -3:
            raise already_upgrading(self.entries(ticket.resource), ticket)
        return {0: Upgrading.DONE, 1: Upgrading.BEGUN, -1: Upgrading.NOT_YET, -2: Upgrading.GONE}[code]

    def upgrade(self, ticket: Ticket, timeout: float, nudge: threading.Event) -> bool | None:
        deadline = monotonic() + timeout
        key = (ticket.resource, ticket.position, ticket.requesting_id)
        while True:
            code = int(self._call("upgrade", *key, int(timeout * 1000))[0])
            if code != 1:
                return {0: True, -1: False}.get(code)
            timeout = max(0.0, deadline - monotonic())

    def downgrade(self, ticket: Ticket) -> bool:
        key = (ticket.resource, ticket.position, ticket.requesting_id)
        if int(self._first("downgrade", *key)[0]) != 0:
            return False
        if self._options.lease is None:
            try:
                self._run("hold_entry", key)
            except Busy as exc:  # it only spares those who wait from looking from time to time
                log.info("Those who wait behind %r at %d will look for it: %s", ticket.resource, ticket.position, exc)
        return True

    def find_deadlock(self, member_id: int) -> Found | None:
        return Found.of_rows(self._run("find_deadlock", (member_id,)))

    # -- what people see and operators do -----------------------------------------------------------------------

    def entries(self, resource: str | None) -> list[Entry]:
        return [Entry(*row) for row in self._run("entries", (resource,))]

    def history(
        self,
        resource: str | None,
        most: int,
        *,
        since: float | None = None,
        until: float | None = None,
        outcome: str | None = None,
    ) -> list[Past]:
        return [Past(*row) for row in self._run("past", (resource, most, since, until, outcome))]

    def resources(self) -> list[Resource]:
        return [Resource(*row) for row in self._run("resources")]

    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        self._run("set_resource", (resource, what, value))

    def revoke(self, position: int, force: bool) -> int:
        return int(self._first("revoke", position, force)[0])

    def reap(self) -> int:
        return int(self._first("reap")[0])

    def prune(self, most: int) -> int:
        return int(self._first("prune", most)[0])

    # -- the work queue -----------------------------------------------------------------------------------------

    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        asked = [
            {
                "kind": one.kind,
                "body": one.body,
                "note": one.note,
                "order": one.order,
                "after_ms": round(one.after * 1000),
                "max_attempts": one.max_attempts,
                "backoff_ms": round(one.backoff * 1000),
                "on_failure": one.on_failure,
            }
            for one in tasks
        ]
        return [row[0] for row in self._run("put_tasks", (queue, uid, json.dumps(asked)))]

    def _claimed(self, row: Sequence[Any]) -> Claimed | None:
        if row[0] is None:
            return None
        if isinstance(row[0], bytes):  # as _prepared has it
            task, order, attempt, failures, most = (int(row[column]) for column in (0, 1, 5, 6, 7))
            kind, body = (row[column].decode(self._encoding) for column in (2, 3))
            note = None if row[4] is None else row[4].decode(self._encoding)
            return Claimed(task, order, kind, body, note, attempt, failures, most)
        return Claimed(*row)

    def claim_task(self, member_id: int, queue: str, owner: str, uid: str, again: bool) -> Claimed | None:
        return self._claimed(self._call("claim_task", member_id, queue, owner, uid, again))

    def end_task(self, member_id: int, end: End) -> str | None:
        status = self._call("end_task", member_id, end.task_id, end.attempt, end.outcome, end.result, end.error)[0]
        return status.decode() if isinstance(status, bytes) else status

    def next_task(
        self, member_id: int, end: End, queue: str, owner: str, uid: str, again: bool
    ) -> tuple[str | None, Claimed | None]:
        status, *row = self._call(
            "next_task",
            *(member_id, end.task_id, end.attempt, end.outcome, end.result, end.error),
            *(queue, owner, uid, again),
        )
        return status.decode() if isinstance(status, bytes) else status, self._claimed(row)

    def next_tasks(
        self, member_id: int, ends: Sequence[End], queue: str, owner: str, uid: str, again: bool, most: int
    ) -> tuple[list[str | None], list[Claimed]]:
        asked = json.dumps(
            [
                {"task": e.task_id, "attempt": e.attempt, "outcome": e.outcome, "result": e.result, "error": e.error}
                for e in ends
            ]
        )
        answer = self._call("next_tasks", member_id, asked, queue, owner, uid, again, most)
        ended, claimed = (one.decode(self._encoding) if isinstance(one, bytes) else one for one in answer)
        statuses = json.loads(ended or "{}")  # by task
        return [statuses.get(str(end.task_id)) for end in ends], [Claimed(*row) for row in json.loads(claimed or "[]")]

    def return_claim(self, member_id: int, queue: str, uid: str) -> int:
        return int(self._first("return_claim", member_id, queue, uid)[0])

    def recover_tasks(self, queue: str | None, mine: int | None) -> int:
        return int(self._first("recover_tasks", queue, mine)[0])

    def queue_state(self, queue: str) -> QueueState:
        return QueueState(*self._first("queue_state", queue))

    def list_tasks(self, queue: str | None, status: str | None, most: int) -> list[TaskEntry]:
        return [TaskEntry(*row) for row in self._run("list_tasks", (queue, status, most))]

    def task_attempts(self, task_id: int) -> list[Attempt]:
        return [Attempt(*row) for row in self._run("task_attempts", (task_id,))]

    def set_task(self, task_id: int, what: str) -> int:
        return int(self._first("set_task", task_id, what)[0])

    def prune_tasks(self, most: int) -> int:
        return int(self._first("prune_tasks", most)[0])

    def execute(self, text: str) -> str | None:
        try:
            # Without parameters, so that it may be several statements; all of them are one transaction then.
            self._cursor.execute(text.encode(self._encoding))
        except psycopg.Error as exc:
            # Whatever it is, it is the task's error, and told in full: nobody is there to ask again.
            raise TaskFailed(_in_full(exc)) from exc
        if self._connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            raise TaskFailed("The SQL left a transaction open; end it with COMMIT")
        return self._cursor.statusmessage

    # -- rounds -------------------------------------------------------------------------------------------------

    def recover_rounds(self, name: str | None, mine: int | None) -> list[int]:
        return [row[0] for row in self._run("recover_rounds", (name, mine))]

    def start_part(
        self,
        member_id: int,
        name: str,
        part: str,
        parts: Sequence[str],
        window: float,
        owner: str,
        uid: str,
        then: tuple[str | None, str | None],
    ) -> PartStart:
        asked = (json.dumps(list(parts), ensure_ascii=False), round(window * 1000))
        return PartStart(*self._first("start_part", member_id, name, part, *asked, owner, uid, *then))

    def end_part(
        self,
        member_id: int,
        name: str,
        part: str,
        uid: str,
        error: str | None,
        owner: str,
        then: tuple[str | None, str | None],
    ) -> PartEnd:
        outcome = "succeeded" if error is None else "failed"
        code, number, is_last, status, attempt, kind, body = self._first(
            "end_part", member_id, name, part, uid, outcome, error, owner, *then
        )
        ours = None if attempt is None else Continuation(number, name, attempt, kind, body)
        return PartEnd(code, number, is_last, status, ours)

    def claim_then(
        self, member_id: int, name: str | None, round_id: int | None, owner: str, uid: str, own: bool
    ) -> Continuation | None:
        row = self._first("claim_then", member_id, name, round_id, owner, uid, own)
        return None if row[0] is None else Continuation(*row)

    def return_then(self, member_id: int, uid: str) -> bool:
        return bool(self._first("return_then", member_id, uid)[0])

    def end_then(self, member_id: int, round_id: int, attempt: int, error: str | None) -> bool:
        return bool(self._first("end_then", member_id, round_id, attempt, error)[0])

    def list_rounds(self, name: str | None, round_id: int | None, most: int) -> list[RoundEntry]:
        return RoundEntry.of_rows(self._run("list_rounds", (name, round_id, most)))

    # -- upkeep -------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, str] | None:
        if self._first("version")[0] is None:
            return None
        return {str(name): str(value) for name, value in self._run("settings")}

    def install(self, plan: Plan) -> None:
        # Waits for another installer, however long that takes; but not for who keeps a lock on the tables: everybody
        # else would wait behind us.
        with self._refusing():
            self._cursor.execute("SET lock_timeout = 0")
            if 0 < self._installed() < sql.LATEST:
                self._cursor.execute(self._queries["stand_aside"])
            with self._connection.transaction():
                self._cursor.execute(self._queries["install_lock"])
                self._cursor.execute(f"SET LOCAL lock_timeout = '{INSTALL_PATIENCE}s'")
                for version, text in plan(self._installed()):
                    self._cursor.execute(text.encode())
                    if version is not None:
                        self._cursor.execute(self._queries["set_version"], (str(version),))

    def _installed(self) -> int:
        """The version of the tables; 0 when there are none."""
        if self._cursor.execute(self._queries["version"]).fetchone() == (None,):
            return 0
        found = self._cursor.execute(self._queries["installed"]).fetchone()
        return setting_number({"schema_version": found[0]} if found else {}, "schema_version")

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """What it means that `install` is refused something."""
        try:
            yield
        except errors.InsufficientPrivilege as exc:
            text, hint = _first_line(exc), exc.diag.message_hint
            if not text.startswith("sqlsem: "):
                hint = (
                    f"sqlsem init creates schema {self._options.schema}, or changes it: the first time it needs CREATE "
                    "on the database (GRANT CREATE ON DATABASE … TO …), later it is for the owner of that schema"
                )
            raise ConfigurationError(f"{self._engine.where}: {'; '.join(filter(None, (text, hint)))}") from exc
        except errors.LockNotAvailable as exc:
            told = _first_line(exc)
            hint = exc.diag.message_hint or (
                f"somebody has kept a lock on the sqlsem tables for {INSTALL_PATIENCE} s (a dump, VACUUM FULL, an open "
                f"transaction?); nothing was changed, try again later"
            )
            raise Unavailable(f"{self._engine.where}: {told}; {hint}") from exc
        except psycopg.Error as exc:
            raise self._translate(exc) from exc

    def diagnose(self) -> list[Check]:
        import random
        import time

        schema = self._options.schema
        texts = sql.queries("postgresql", schema, self._options.table, "doctor")
        checks = []

        def ask(name: str, **parameters: Any) -> tuple[Any, ...]:
            with self._translated():
                row = self._cursor.execute(texts[name], parameters or None).fetchone()
            assert row is not None
            return row

        def check(name: str, ok: bool, detail: str, mend: str = "") -> None:
            checks.append(Check(name, ok, detail, mend))

        libpq = psycopg.pq.version()
        check("driver", True, f"psycopg {psycopg.__version__} ({psycopg.pq.__impl__}), libpq {libpq // 10000}")
        number, version, standby, read_only = ask("server")
        check("server", number >= 130000, version, "" if number >= 130000 else "Use PostgreSQL 13 or later.")
        mend = "Connect to the primary (add target_session_attrs=read-write to the URL)."
        if standby or read_only:
            check("primary", False, "a standby" if standby else "transactions are read-only by default", mend)
        else:
            check("primary", True, "not a standby, and writable")

        user, there, usage, routines, allowed = ask("permission")
        rights = {"register": "take locks", "put_tasks": "put tasks", "claim_task": "run tasks", "revoke": "operate"}
        if there and routines:
            may = [words for name, words in rights.items() if name in (allowed or ())]
            if not may and "entries" in (allowed or ()):
                may = ["look"]
            ok = bool(usage and may)
            roles = f"(roles {schema}_user, {schema}_putter, {schema}_worker, {schema}_operator, {schema}_reader)"
            mend = "" if ok else f'As an administrator: GRANT {schema}_user TO "{user}"; {roles}'
            told = f"{user} may {', '.join(may)}" if ok else f"{user} may not execute the routines of schema {schema}"
            check("permission", ok, told, mend)
        elif there:
            check("permission", False, f"the routines are not in schema {schema}", "Run: sqlsem init")

        default, synchronous, idle, interval, count, user_timeout = ask("settings")
        told = f"the server's default is {default}; sqlsem's own connections use read committed"
        usual = default == "read committed"
        mend = "" if usual else "For other clients: ALTER ROLE … SET default_transaction_isolation = …"
        check("isolation", True, told, mend)
        ok = synchronous != "off"
        mend = "" if ok else "A crash of the server can undo what was granted; prefer synchronous_commit = on."
        check("durability", True, f"synchronous_commit is {synchronous}", mend)
        line, names, standbys, in_step = ask("replication")
        if line is not None:
            told = f"timeline {int(line, 16)}"
            if names:
                told += f"; commits wait for standbys ({names})"
            elif standbys:
                told += "; standbys follow without commits waiting for them"
            if standbys is not None:
                told += f"; {standbys} connected, {in_step} of them in step"
            mend = ""
            if names and not in_step and standbys is not None:
                mend = "No synchronous standby is connected: every grant waits until one is."
            elif standbys and not names:
                mend = (
                    "After a failover grants may be forgotten, and fences repeat: see docs/guarantees.md, and "
                    "synchronous_standby_names."
                )
            check("replication", True, told, mend)

        local = self._connection.info.host.startswith(("/", "@")) or not self._connection.info.host
        mode = self._engine.tls_mode
        encrypted, version, cipher = ask("tls")
        if encrypted:
            strict = mode in ("verify-ca", "verify-full")
            mend = "" if strict else "Nobody has made sure which server this is: add sslmode=verify-full to the URL."
            check("tls", True, f"{version}, {cipher}; sslmode={mode}", mend)
        elif local:
            check("tls", True, "a socket of this host; none needed")
        else:
            mend = "Notes can be read on the way: add sslmode=verify-full to the URL (and set ssl = on on the server)."
            check("tls", True, f"not encrypted; sslmode={mode}", mend)
        if local:
            check("keepalive", True, "a socket of this host; none needed")
        else:
            told = f"server: {idle} s, then {count} times every {interval} s"
            if user_timeout != "0":
                told += f"; tcp_user_timeout {user_timeout} ms"
            check("keepalive", True, told)

        before = time.time()
        (clock,) = ask("clock")
        after = time.time()
        apart = max(0.0, before - clock, clock - after)
        mend = "" if apart <= 60 else "Harmless here, as only the database's clock counts; but set one of them right."
        check("clock", True, f"the database's and ours are {apart:.1f} s apart", mend)

        # A pooler that lends its connections out by the transaction breaks whatever belongs to a session.
        mend = "Connect past the pooler, have it pool sessions, or use a lease: sqlsem --lease 30 …, connect(lease=30)."
        key = random.getrandbits(62)
        pid, taken = ask("beacon_take", key=key)
        other = self._engine.connect("look")
        try:
            assert isinstance(other, PostgresSession)
            row = other._cursor.execute(texts["beacon_look"], {"key": key, "pid": pid}).fetchone()
        finally:
            other.close()
        assert row is not None
        other_pid, seen, blocked = row
        pid_after, given = ask("beacon_give", key=key)
        if pid == pid_after and pid != other_pid and taken and seen and blocked and given:
            pooled = " (through a pooler)" if pid != self._connection.info.backend_pid else ""
            check("beacon", True, f"a session's lock outlives its statement, and excludes others{pooled}")
        elif self._options.lease is not None:
            check("beacon", True, "connections are shared by a pooler; the lease stands in for the beacon")
        else:
            check("beacon", False, "a session's lock does not stay with its connection: a pooler shares it", mend)
        return checks

    @property
    def usable(self) -> bool:
        return not (self._connection.closed or self._given_up)

    def cancel_running(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.cancel()

    def close(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self._connection.close()


class AsyncPostgresSession(PostgresWire, AsyncSession):
    """One psycopg connection of an event loop, to wait in."""

    def __init__(self, engine: PostgresEngine, connection: AsyncConnection) -> None:
        super().__init__(engine, connection)
        self._connection = connection
        connection.prepare_threshold = None  # see PostgresSession

    async def prepare(self, purpose: str) -> None:
        """Make a connection ready that was just opened."""
        try:
            if self._options.lease is not None:
                cursor = await self._connection.execute(self._queries["backend"])
                if await cursor.fetchone() != (self._connection.info.backend_pid,):
                    return  # see PostgresSession
            await self._connection.execute(self._queries["session"], self._setup(purpose))
        except psycopg.Error as exc:
            raise self._translate(exc) from exc

    async def wait(self, ticket: Ticket, timeout: float) -> bool | None:
        return await self._wait("wait", (ticket.resource, ticket.position), timeout)

    async def upgrade(self, ticket: Ticket, timeout: float) -> bool | None:
        return await self._wait("upgrade", (ticket.resource, ticket.position, ticket.requesting_id), timeout)

    async def _wait(self, name: str, key: tuple[Any, ...], timeout: float) -> bool | None:
        deadline = monotonic() + timeout
        while True:
            asked = self._asking(name, *key, int(timeout * 1000))
            answer = None
            try:
                while True:
                    answer = await self._answer(asked.send(answer))
            except StopIteration as done:
                code = int(done.value[-1])
            except psycopg.Error as exc:
                raise self._translate(exc) from exc
            except asyncio.CancelledError:
                await self._end_query()
                raise
            if code != 1:
                return {0: True, -1: False}.get(code)
            timeout = max(0.0, deadline - monotonic())

    async def _answer(self, asked: Generator[int, int, T]) -> T:
        """Drive one of psycopg's generators. (Its own way to do that looks up ten times a second.)"""
        loop, number = asyncio.get_running_loop(), self._connection.pgconn.socket
        try:
            wanted = next(asked)
            while True:
                ready: asyncio.Future[int] = loop.create_future()
                if wanted & waiting.WAIT_R:
                    loop.add_reader(number, _ready, ready, waiting.READY_R)
                if wanted & waiting.WAIT_W:
                    loop.add_writer(number, _ready, ready, waiting.READY_W)
                try:
                    state = await ready
                finally:
                    if wanted & waiting.WAIT_R:
                        loop.remove_reader(number)
                    if wanted & waiting.WAIT_W:
                        loop.remove_writer(number)
                wanted = asked.send(state)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _end_query(self) -> None:
        """The task was cancelled: the server shall stop waiting as well, and this connection serve the next one."""
        pgconn = self._connection.pgconn
        overdue = asyncio.get_running_loop().call_later(1.0, self.interrupt)
        try:
            await self._connection.cancel_safe(timeout=1.0)
            await self._answer(generators.execute(pgconn))
        except psycopg.Error:
            self.close()
        finally:
            overdue.cancel()

    @property
    def usable(self) -> bool:
        return self._connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE

    def close(self) -> None:
        # Without awaiting: a loop that is closed, or a task that is cancelled, cannot.
        self._line.pgconn.finish()


def _ready(ready: asyncio.Future[int], state: int) -> None:
    if not ready.done():
        ready.set_result(state)


def _close_opened(opening: asyncio.Task[AsyncPostgresSession]) -> None:
    """Nobody waits any more for a connection that may have come all the same."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


#: Empty but on Windows.
_loops_without_sockets: tuple[type, ...] = tuple(filter(None, [getattr(asyncio, "ProactorEventLoop", None)]))
_numbers = itertools.count(1)


def _in_full(error: psycopg.Error) -> str:
    """What the server says of an error, as psql shows it."""
    said = error.diag
    if said.message_primary is None:
        return f"{type(error).__name__}: {str(error).strip()}"
    lines = [f"{said.sqlstate}: {said.message_primary}"]
    notes = {"DETAIL": said.message_detail, "HINT": said.message_hint, "CONTEXT": said.context}
    lines += [f"{name}: {words}" for name, words in notes.items() if words]
    if said.statement_position:
        lines.append(f"POSITION: {said.statement_position}")
    return "\n".join(lines)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


PostgresEngine.session_class = PostgresSession
engine = PostgresEngine
