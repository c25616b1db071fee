"""Work queues on PostgreSQL, as far as they are no mere calls of routines."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from datetime import datetime

import psycopg

from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.values.errors import TaskFailed
from sqlsem.values.tasks import Claimed, End, NewTask, TaskEntry, task_locks


class PostgresTasks(PostgresConnection):
    """Tasks, and the SQL of tasks."""

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
        documents = json.dumps(
            [
                {
                    "task": end.task_id,
                    "attempt": end.attempt,
                    "outcome": end.outcome,
                    "result": end.result,
                    "error": end.error,
                }
                for end in ends
            ]
        )
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
