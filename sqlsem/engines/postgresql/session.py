"""PostgreSQL's sessions: the calls that are no mere calls of routines."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors

from sqlsem import sql
from sqlsem.engines import borrowed
from sqlsem.engines.answers import name_sessions
from sqlsem.engines.base import Busy
from sqlsem.engines.installed import setting_number
from sqlsem.engines.postgresql.connection import Connection, PostgresConnection
from sqlsem.engines.postgresql.doctor import PostgresDoctor
from sqlsem.engines.protocol import Check, Plan
from sqlsem.util import late
from sqlsem.util.printable import first_line
from sqlsem.values import deadlocks
from sqlsem.values.batches import BatchEntry
from sqlsem.values.deadlocks import Found
from sqlsem.values.errors import ConfigurationError, SchemaError, TaskFailed, Unavailable
from sqlsem.values.locks import Heartbeat, Ticket, monotonic
from sqlsem.values.rates import RateAnswer, RateDemand, RateEntry, RateRequest
from sqlsem.values.tasks import Claimed, End, NewTask, QueueCounts, TaskEntry, task_locks

if TYPE_CHECKING:
    from sqlsem.engines.postgresql.engine import PostgresEngine
    from sqlsem.insight.kept import KeptLock
    from sqlsem.insight.overview import Overview

log = logging.getLogger("sqlsem")

#: Seconds that `install` waits for a table lock, while all other sessions wait behind it.
INSTALL_PATIENCE_SECONDS = 5
#: Seconds that `install` waits for another installer.
INSTALLER_PATIENCE_SECONDS = 120
#: The errors of the second of two concurrent installers on a database without tables.
MADE_BY_ANOTHER = (errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateSchema, errors.DuplicateFunction)


class PostgresLocks(PostgresConnection):
    """Locks, rates and displays. Rates have batches of demands and reserved slots.

    The *wakeup locks* of a session are advisory locks on which the waiters behind its rows sleep. The server's lock
    table has a fixed size, which all programs share; and a session goes through all its locks at the end of each
    transaction. So a member drops the wakeup locks of most of its waiting rows (`sqlsem.client.waiters.queues`).

    Invariant: ``_dropped`` contains each row of the member that has no wakeup lock. So a release frees only locks that
    exist. (The server logs a warning for each attempt to free a missing lock.)
    """

    batches_rates = True

    def __init__(self, engine: PostgresEngine, connection: Connection) -> None:
        super().__init__(engine, connection)
        self._dropped: dict[int, int] = {}  # the member, by the position of its row

    def note_dropped(self, member_id: int) -> None:
        """Read which rows have no wakeup lock, after a member was reattached to this session."""
        if self.options.lease is None:
            # (With older routines, or without the right, no lock is dropped.)
            with contextlib.suppress(SchemaError, ConfigurationError):
                rows = self.rows("missing_wakeup_locks", member_id, None)
                self._dropped = {position: member_id for (position,) in rows}

    def drop_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        if tickets and self.options.lease is None:
            positions = [ticket.position for ticket in tickets]
            self._dropped.update(dict.fromkeys(positions, member_id))  # first, because the answer may be lost
            try:
                self.rows("drop_wakeup_locks", member_id, tickets[0].resource, positions)
            except (SchemaError, ConfigurationError):  # older routines, or rights
                self._dropped.clear()
                raise

    def restore_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        dropped = [ticket.position for ticket in tickets if ticket.position in self._dropped] if self._dropped else []
        if dropped:
            self.rows("restore_wakeup_locks", member_id, dropped)
            for position in dropped:
                self._dropped.pop(position, None)

    def restore_wakeup_lock(self, ticket: Ticket) -> None:
        member_id = self._dropped.get(ticket.position)
        if member_id is not None:
            self.restore_wakeup_locks(member_id, [ticket])

    def reattach_member(self, member_id: int) -> bool:
        exists = super().reattach_member(member_id)
        if exists:
            self.note_dropped(member_id)
        return exists

    def heartbeat(self, member_id: int) -> Heartbeat:
        known, positions, revoked = self.call("heartbeat", member_id)
        return Heartbeat(known, frozenset(positions or ()), frozenset(revoked or ()))

    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("wait", (ticket.resource, ticket.position), timeout)

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        resources, positions = [ticket.resource for ticket in tickets], [ticket.position for ticket in tickets]
        _, granted, gone = self.row("poll_waiters", member_id, resources, positions)
        return {**dict.fromkeys(granted or (), True), **dict.fromkeys(gone or ())}

    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        return self._wait("upgrade", (ticket.resource, ticket.position, ticket.requesting_id), timeout)

    def _wait(self, name: str, key: tuple[Any, ...], timeout: float) -> bool | None:
        deadline = monotonic() + timeout
        while True:
            (code,) = self.call(name, *key, int(timeout * 1000))
            if code != 1:
                return {0: True, -1: False}.get(code)
            timeout = max(0.0, deadline - monotonic())

    def downgrade(self, ticket: Ticket) -> bool:
        if not super().downgrade(ticket):
            return False
        if self.options.lease is None:
            try:
                self.rows("retake_wakeup_lock", ticket.resource, ticket.position, ticket.requesting_id)
            except Busy as exc:  # without the lock, the waiters behind it poll from time to time
                log.info("Waiters behind %r at %d will poll for it: %s", ticket.resource, ticket.position, exc)
        return True

    def find_deadlock(self, member_id: int) -> Found | None:
        # (The routine `find_deadlock` is for SQL sessions: it searches in PL/pgSQL, which is slower.)
        rows = self.rows("deadlock_rows", member_id)
        caps = {row[1]: row[8] for row in rows if row[8] is not None}
        for cycle in deadlocks.find([deadlocks.Row(*row[:8]) for row in rows], caps):
            if cycle.victim.member == member_id:
                members = sorted({node[0] for node in cycle.nodes})
                processes = {row[0]: (row[1], row[2], row[3]) for row in self.rows("live_members", members, member_id)}
                return deadlocks.steps_of(cycle, processes) if processes else None
        return None

    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        limits, windows = [window.limit for window in request.windows], [window.ms for window in request.windows]
        row = (None, None) if ticket is None else (ticket.position, ticket.requesting_id)
        costs, ahead = [demand.cost for demand in more], [ahead_ms, *(demand.ahead_ms for demand in more)]
        return RateAnswer.of_row(
            *self.row("take_rate", request.resource, request.cost, limits, windows, request.burst, *row, costs, ahead)
        )

    def overview(self) -> Overview:
        with late.importing:
            from sqlsem.insight.overview import MemberEntry, Overview
        entries = self.entries(None)
        taken_at, settings, members, queues, batches, holds, rates = self.row("overview")
        return Overview.of_rows(
            taken_at,
            entries,
            _with_times(settings, 2),
            [MemberEntry(*row) for row in _with_times(members, 5)],
            [QueueCounts(*row) for row in queues or ()],
            BatchEntry.of_rows(_with_times(batches, 4, 5, 12, 13, 24, 25)),
            holds or (),
            [RateEntry.of_row(*row) for row in rates or ()],
        )

    def kept_locks(self, resource: str | None) -> list[KeptLock]:
        with late.importing:
            from sqlsem.insight.kept import KeptLock
        return [KeptLock(*row) for row in self.rows("kept_locks", resource)]

    def part_list(self, parts: Sequence[str]) -> str:
        return json.dumps(list(parts), ensure_ascii=False)


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _with_times(rows: list[list[Any]] | None, *columns: int) -> list[list[Any]]:
    """Return rows of JSON whose ``columns``, microseconds since 1970, are converted to datetimes."""
    for row in rows or ():
        for column in columns:
            if row[column] is not None:
                row[column] = _EPOCH + timedelta(microseconds=row[column])
    return rows or []


class PostgresSession(PostgresLocks):
    """One connection with all capabilities: also work queues, the SQL of tasks, the tables, and guarded tables."""

    #: The statement that puts tasks.
    putting = "put_tasks"

    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        return [row[0] for row in self.rows(self.putting, queue, uid, json.dumps(NewTask.as_documents(tasks)))]

    def claim_blocked(
        self, member_id: int, queue: str, owner: str, uid: str, again: bool, requesting_id: str, row_owner: str
    ) -> Claimed | None:
        *row, locks = self.call("claim_blocked", member_id, queue, owner, uid, again, requesting_id, row_owner)
        return None if row[0] is None else Claimed(*(*row, task_locks(locks)))

    def next_tasks(
        self, member_id: int, ends: Sequence[End], queue: str, owner: str, uid: str, again: bool, maximum: int
    ) -> tuple[list[str | None], list[Claimed]]:
        names = ("task", "attempt", "outcome", "result", "error")
        documents = json.dumps([dict(zip(names, end.stored, strict=True)) for end in ends])
        ended, claimed = self.call("next_tasks", member_id, documents, queue, owner, uid, again, maximum)
        statuses = json.loads(ended or "{}")  # by task
        return [statuses.get(str(end.task_id)) for end in ends], [Claimed(*row) for row in json.loads(claimed or "[]")]

    def next_ready(self, queue: str) -> float | None:
        seconds = self.value("next_ready", queue)
        return None if seconds is None else float(seconds)

    def listen(self) -> bool:
        if self.options.lease is not None:  # a pooler lends the session to other clients
            return False
        self.rows("listen_for_tasks")
        return True

    def wait_notification(self, timeout: float) -> bool:
        with self.translated():
            return any(True for _ in self.connection.notifies(timeout=timeout, stop_after=1))

    def list_tasks(self, queue: str | None, status: str | None, maximum: int, skip: int = 0) -> list[TaskEntry]:
        rows = self.rows("show_tasks", queue, status, maximum, skip)
        return [TaskEntry(*(*row, task_locks(locks))) for *row, locks in rows]

    def set_schedule(self, name: str, what: str, due: datetime | None) -> bool:
        return bool(self.value("set_schedule", name, what, due))

    def execute(self, text: str) -> str | None:
        try:
            # (Without parameters the text may have several statements, which then form one transaction.)
            self.cursor.execute(text.encode(self.encoding))
        except psycopg.Error as exc:
            # (Any error is the task's error. It is stored in full, because the statement is not run again for details.)
            raise TaskFailed(_in_full(exc)) from exc
        if self.connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            raise TaskFailed("The SQL left a transaction open; end it with COMMIT")
        return self.cursor.statusmessage

    def cancel_running(self) -> None:
        with contextlib.suppress(psycopg.Error):
            self.connection.cancel()

    # -- tables -------------------------------------------------------------------------------------------------------

    def change_guard(self, name: str, table: str, *parameters: str) -> int:
        try:
            row = self.cursor.execute(self.queries[name], (table, *parameters)).fetchone()
        except psycopg.Error as exc:
            text = first_line(exc)
            is_own = text.startswith("sqlsem: ")
            if not is_own and isinstance(exc, (errors.UndefinedFunction, errors.InvalidSchemaName)):
                raise self.translate(exc) from exc
            # PostgreSQL's own errors: a missing right, an invalid name, a table of another database.
            if is_own or (exc.sqlstate or "")[:2] in ("42", "0A"):
                detail = "; ".join(filter(None, (text, exc.diag.message_hint)))
                raise ConfigurationError(f"{self.engine.label}: table {table!r}: {detail}") from exc
            raise self.translate(exc) from exc
        assert row is not None
        return int(row[0] or 0)

    def install(self, plan: Plan) -> None:
        # Wait for another installer; but only briefly for a table lock, because all other sessions wait behind it.
        with self._refusing():
            try:
                try:
                    self._install(plan)
                except MADE_BY_ANOTHER:
                    self._install(plan)  # another installer has created the tables at the same time
            except psycopg.Error:
                with contextlib.suppress(psycopg.Error):
                    self._end_install()  # (While an installation is recorded, every wait reads the server's locks.)
                raise

    def _install(self, plan: Plan) -> None:
        self.cursor.execute(f"SET lock_timeout = '{INSTALLER_PATIENCE_SECONDS}s'")
        with self.connection.transaction():
            locked = self._take_install_lock()
            settings = self._installed_settings()
            if settings and not locked:
                self._take_install_lock()
                settings = self._installed_settings()
            if settings and setting_number(settings, "schema_version") < sql.LATEST:
                self.cursor.execute(self.queries["lock_tables"])
            if settings:
                self.cursor.execute(f"SET LOCAL lock_timeout = '{INSTALL_PATIENCE_SECONDS}s'")
            for version, text in plan(settings):
                self.cursor.execute(text.encode())
                if version is not None:
                    self.cursor.execute(self.queries["set_version"], (str(version),))
            self._end_install()

    def _take_install_lock(self) -> bool:
        """Exclude other installers until the transaction ends. Return False if the tables are missing."""
        if self.cursor.execute(self.queries["is_installed"]).fetchone() != (True,):
            return False
        try:
            with self.connection.transaction():
                self.cursor.execute(self.queries["install_lock"])
        except errors.LockNotAvailable as exc:
            raise Unavailable(
                f"{self.engine.label}: another installer has been at it for {INSTALLER_PATIENCE_SECONDS} s: "
                f"{self._installers()}; nothing was changed, try again when that has ended, or end it"
            ) from exc
        self.cursor.execute(self.queries["install_begin"])
        return True

    def _installers(self) -> str:
        rows = self.cursor.execute(self.queries["installers"]).fetchall()
        descriptions = [
            f"session {pid} of login {login} (SELECT pg_catalog.pg_terminate_backend({pid}))" for pid, login in rows
        ]
        return ", ".join(descriptions) or "a session that has just ended"

    def _end_install(self) -> None:
        if self.cursor.execute(self.queries["is_installed"]).fetchone() == (True,):
            self.cursor.execute(self.queries["install_end"])

    def _installed_settings(self) -> dict[str, str]:
        """Return the rows of table ``setting`` about the installed features; empty if nothing is installed."""
        if self.cursor.execute(self.queries["version"]).fetchone() == (None,):
            return {}
        # (A table without a version is not sqlsem's; `plan` raises for it.)
        return {"schema_version": ""} | dict(self.cursor.execute(self.queries["installed"]).fetchall())

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Translate errors in the block, during `install`, into sqlsem's errors with a remedy."""
        try:
            yield
        except errors.InsufficientPrivilege as exc:
            text, hint = first_line(exc), exc.diag.message_hint
            if not text.startswith("sqlsem: "):
                hint = (
                    f"sqlsem init creates schema {self.options.schema}, or changes it: the first time it needs CREATE "
                    "on the database (GRANT CREATE ON DATABASE … TO …), later it is for the owner of that schema"
                )
            raise ConfigurationError(f"{self.engine.label}: {'; '.join(filter(None, (text, hint)))}") from exc
        except errors.LockNotAvailable as exc:
            text = first_line(exc)
            hint = exc.diag.message_hint or (
                f"another session has kept a lock on the sqlsem tables for {INSTALL_PATIENCE_SECONDS} s (a dump, "
                f"VACUUM FULL, an open transaction?); nothing was changed, try again later."
            )
            with contextlib.suppress(psycopg.Error):  # (A login without the right to see the blockers gets no list.)
                blockers = self.cursor.execute(self.queries["blockers"]).fetchall()
                hint += f" They were kept by {name_sessions(blockers)}."
            raise Unavailable(f"{self.engine.label}: {text}; {hint}") from exc
        except psycopg.Error as exc:
            raise self.translate(exc) from exc

    def diagnose(self) -> list[Check]:
        return PostgresDoctor(self).examine()


def _in_full(error: psycopg.Error) -> str:
    """Return the server's full error message, as psql shows it."""
    diag = error.diag
    if diag.message_primary is None:
        return f"{type(error).__name__}: {str(error).strip()}"
    lines = [f"{diag.sqlstate}: {diag.message_primary}"]
    notes = {"DETAIL": diag.message_detail, "HINT": diag.message_hint, "CONTEXT": diag.context}
    lines += [f"{name}: {note}" for name, note in notes.items() if note]
    if diag.statement_position:
        lines.append(f"POSITION: {diag.statement_position}")
    return "\n".join(lines)


class BorrowedPostgresSession(PostgresSession):
    """A session that runs its statements by the caller's cursor."""

    putting = "put_tasks_once"

    def __init__(self, engine: PostgresEngine, cursor: Any) -> None:
        self.queries = engine.queries()
        self._cursor = cursor

    def run(self, name: str, parameters: Any) -> list[tuple[Any, ...]]:
        borrowed.execute(self._cursor, self.queries[name], parameters)
        return [tuple(borrowed.values(row)) for row in self._cursor.fetchall()]
