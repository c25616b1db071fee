"""`Task`, a claimed task: it is ended by its ``with`` block or by hand, holds its locks, and may be cancelled."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

from sqlsem.bodies import as_json, format_error
from sqlsem.client.callers import Caller
from sqlsem.client.client import DatabaseClient
from sqlsem.client.grants import Grant
from sqlsem.client.held.registry import GrantState
from sqlsem.client.monitors.cancellation import Cancellable
from sqlsem.engines.base import Session
from sqlsem.values.locks import Request, Ticket, monotonic
from sqlsem.values.tasks import Claimed, End


def tickets_of(claimed: Claimed, requesting_id: str) -> list[Ticket]:
    """Return the tickets of the locks that a task was claimed with."""
    return [
        Ticket(lock.resource, lock.position, requesting_id, True) for lock in claimed.locks if lock.position is not None
    ]


class Task(Cancellable):
    """A claimed task. It is finished at the end of its ``with`` block, and has failed if the block raises an error.

    Attributes:
        id: Its number.
        kind: ``'sql'``, ``'shell'``, ``'call'`` or ``'json'``.
        body: The value that was put (for ``json``), or the text.
        order, note: As put.
        attempt: How often it has been claimed, including this time.
        grant: The grant of its locks, if it was put with locks; the same kind as that of `sqlsem.all_of`. It may be
            asserted or handed over. The end of the attempt releases it.
        result: Set it to any JSON value: the log of the task keeps it.
        stop_event: Set when an operator has cancelled the task, or its time limit is over: leave the block soon.
        why_stopped: The reason, as text.

    An `Exception` in the block ends the attempt as failed (``max_attempts`` says how many follow), and reaches the
    caller; a ``KeyboardInterrupt`` and its like return the task to the queue at once. The end of the block raises
    `LockLost` if the claim was lost (the task runs or will run elsewhere) or one of its locks (the attempt has failed).
    """

    can_be_lost: ClassVar[bool] = True
    grant: Grant | None = None
    result: Any = None
    _lost_event: threading.Event | None = None

    def __init__(self, client: DatabaseClient, queue: str, claimed: Claimed, uid: str) -> None:
        self._client = client
        self._queue = queue
        self._uid = uid  # the uid of the call that claimed it
        self.id = self.number = claimed.task_id
        self.title = f"Task {self.id}"
        self.kind = claimed.kind
        self.order = claimed.order
        self.note = claimed.note
        self.attempt = claimed.attempt
        self._is_last_attempt = claimed.failures + 1 >= claimed.max_attempts
        self.text = claimed.body
        self.began = monotonic()
        self.opened(client.claims, partial(_give_back, claimed.task_id, claimed.attempt), known=False)

    @classmethod
    def all_of(cls, client: DatabaseClient, queue: str, claimed: Iterable[Claimed | None], uid: str) -> list[Task]:
        """Return the tasks that one call has claimed. (For the package.)"""
        tasks = [cls(client, queue, row, uid) for row in claimed if row is not None]
        if tasks:
            client.claims.add(tasks)
            client.cancellation_monitor.watch()
        return tasks

    def hold(self, claimed: Claimed, requesting_id: str, caller: Caller) -> None:
        """Set `grant`, held by this thread. The member already has the rows of its locks. (For the package.)"""
        client, registry = self._client, self._client.registry
        requests = [Request(lock.resource, lock.access, lock.limit, lock.weight, self.note) for lock in claimed.locks]
        tickets = tickets_of(claimed, requesting_id)
        task_ref = weakref.ref(self)  # a task that the program drops is returned to the queue

        def lost(grant: Grant) -> None:
            task = task_ref()
            if task is not None:
                task.stop(f"its lock on {grant.resource!r} was lost")

        state = GrantState(registry, requests, tickets, caller, lost, monotonic())
        self.grant = grant = Grant(client, state, 0.0)
        registry.add(grant)
        returned = self.make_end("returned")

        def closing(session: Session, me: int) -> object:
            _discard_locks(client, grant)
            return session.end_task(me, returned)

        self.close_by(closing)
        missing = [ticket.position for ticket in tickets if not client.member.has_ticket(ticket)]
        if missing:  # the main connection was lost meanwhile, and these rows with it
            client.mark_lost_and_log(missing, "its row was removed before it could be used")
        else:
            state.is_published = True
            registry.publish_granted(state, grant.waited, {})

    @property
    def why_unlocked(self) -> str | None:
        """The reason why one of its locks was lost; None if it holds all of them. (For the package.)"""
        why = None if self.grant is None else self.grant.state.why_lost
        return None if self.grant is None or why is None else f"The lock on {self.grant.resource!r} was lost: {why}"

    def ending(self) -> None:
        """Discard its locks before the call that records the end, as that call releases them. (For the package.)"""
        if self.grant is not None:
            _discard_locks(self._client, self.grant)

    @property
    def body(self) -> Any:
        """The value that was put, or the text of the SQL, command or call."""
        return json.loads(self.text) if self.kind == "json" else self.text

    @property
    def ended(self) -> bool:
        """True if the attempt has ended or was lost."""
        return self.why_lost is not None or not self.is_open

    @property
    def lost(self) -> bool:
        """True if the claim is lost, because the database was out of reach for too long; others may have the task.
        Answered from memory, except right after this process was paused for long: then the database is asked, which
        takes up to a second.
        """
        if self.why_lost is None and self.is_open and not self.is_inherited:
            self._client.member.verify()
        return self.why_lost is not None

    @property
    def lost_event(self) -> threading.Event:
        """An event that is set when the claim is lost."""
        event = self._lost_event
        if event is None:  # made at the first use; `setdefault` gives all threads the same one
            event = self.__dict__.setdefault("_lost_event", threading.Event())
            if self.why_lost is not None:
                event.set()
        return event

    def lose(self, why: str) -> None:
        super().lose(why)
        if self._lost_event is not None:
            self._lost_event.set()

    def make_end(self, outcome: str, result: str | None = None, error: str | None = None) -> End:
        """Return an end of this attempt. (For the package.)"""
        return End(self.id, self.attempt, outcome, result, error, self._is_last_attempt)

    def finish(self, result: Any = None) -> None:
        """End the attempt as finished. Raises `LockLost` if the claim was lost, `NotHeld` if it was ended before."""
        self._end_with(self.make_end("finished", None if result is None else as_json(result)))

    def fail(self, error: BaseException | str) -> None:
        """End the attempt as failed, or as cancelled if an operator has cancelled it. Errors as for `finish`."""
        self._end_with(self.make_end("cancelled" if self.cancelled else "failed", error=format_error(error)))

    def release(self) -> None:
        """Return the task to the queue: it is pending, and the attempt does not count. Errors as for `finish`."""
        self._end_with(self.make_end("returned"))

    def _end_with(self, end: End) -> None:
        if self.why_lost is not None:
            self.leave()
        self.require_open()
        client, unlocked = self._client, self.why_unlocked
        if unlocked is not None and end.outcome == "finished":
            end = self.make_end("failed", error=unlocked)
        self.ending()
        try:
            status = self.end_by(
                "end of a task",
                lambda session, me: session.end_task(me, end),
                budget=client.member.seconds_until_loss(),
            )
        finally:
            client.queue_changes.notify()
        remember_ends(client, [end])
        self.ended_with(status)
        if status is None:  # (A recorded end counts, even if this process believed the claim lost meanwhile.)
            self.require_open()
        if unlocked is not None and self.grant is not None and end.outcome == "failed":
            self.grant.state.require_held()

    def ended_with(self, status: str | None, *, marks_ended: bool = True) -> None:
        """Apply the database's reply to the end. With ``marks_ended=False`` the caller marks several claims as ended in
        one call. (For the package.)
        """
        if status is None:
            self.lose("this process was given up meanwhile")
        if marks_ended and self.is_open:
            self.mark_ended()
        for ticket in () if self.grant is None else self.grant.state.tickets:
            self._client.notify_waiters(ticket.resource)  # a waiter of this process may be granted now

    def _succeed(self) -> None:
        self.finish(self.result)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self.fail(error)
        else:
            self.release()

    def __repr__(self) -> str:
        return f"<{self.title} of {self._queue!r}, attempt {self.attempt}{', lost' if self.why_lost else ''}>"


def _give_back(task_id: int, attempt: int, session: Session, member_id: int) -> None:
    session.end_task(member_id, End(task_id, attempt, "returned"))


def _discard_locks(client: DatabaseClient, grant: Grant) -> None:
    """Discard the rows of a task's locks in this process. The call that records its end removes them from the database,
    which must not count as a loss.
    """
    state = grant.state
    if not state.released:
        client.registry.discard(grant)
        client.member.discard(state.tickets)
        client.registry.publish_released(state)


def remember_ends(client: DatabaseClient, ends: Iterable[End]) -> None:
    """Keep recent ends, so that they can be sent again: after a failover or a restore the server may lack them."""
    client.recent_ends.extend((monotonic(), end) for end in ends)
