"""The work queue: tasks are put by anybody, and each is carried out once, by whichever worker is free.

Tasks of the lowest order that is open run first, first come first served among themselves; a task of a higher order
waits until all of lower ones have ended. A claim belongs to this process's member: while the process lives nobody takes
its tasks, however long they run; when it dies they are pending again within ``grace``. So a task is run again only
after its worker died or lost the database for longer than that: make tasks that may be repeated.

>>> q = sqlsem.queue("nightly")  # doctest: +SKIP
>>> q.put(sqlsem.Sql("EXEC load_customers"), order=100)  # doctest: +SKIP
>>> for task in q.claim(wait=30):  # doctest: +SKIP
...     with task:
...         print(task.body)
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from sqlsem.bodies import Call, Shell, Sql, as_json, encode, run, told
from sqlsem.core.defaults import Coordinated, process_of
from sqlsem.core.operators import Operators
from sqlsem.core.options import PutOptions, check_options
from sqlsem.core.process import Process
from sqlsem.engines.roles import TaskSession
from sqlsem.errors import ConfigurationError, Deadlock, LockLost, NotHeld, SqlsemError, TaskFailed, Timeout
from sqlsem.model import (
    MAX_INT,
    MAX_NOTE,
    Attempt,
    Claimed,
    Duration,
    End,
    NewTask,
    QueueState,
    TaskEntry,
    check_duration,
    check_name,
    monotonic,
)
from sqlsem.workers import Worker

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sqlsem.engines.base import Session

__all__ = ["Call", "Queue", "Shell", "Sql", "Task", "Worker", "encode", "queue", "run"]

log = logging.getLogger("sqlsem")

#: Tasks that one statement puts, and the characters of their bodies (unless it is one): it must not keep the pings out.
BULK, BULK_TEXT = 500, 4_000_000
#: The longest time that a task may be kept back, or a queue waited for: some ten years.
LATEST = 3.2e8
#: Seconds between two looks at a queue with nothing to do: at first, and at the most.
SHORTEST, LONGEST = 0.003, 0.5


# -- tasks ------------------------------------------------------------------------------------------------------------


class Task:
    """A claimed task. Leave its ``with`` block well and it is finished; with an error, and it has failed.

    Attributes:
        id: Its number.
        kind: ``'sql'``, ``'shell'``, ``'call'`` or ``'json'``.
        body: The value that was put (for ``json``), or the text.
        order, note: As put.
        attempt: How often it has been claimed, this time included.
        result: Set it to any JSON value to have it kept in the log.

    An `Exception` out of the block ends the attempt as failed (tried again as ``max_attempts`` says) and goes on to the
    caller; a ``KeyboardInterrupt`` and its like give the task back at once. Raises `LockLost` on leaving the block when
    the claim was lost meanwhile: the task is or will be run by somebody else.
    """

    can_be_lost: ClassVar[bool] = True
    _ended = True  # until it is whole: an interrupt can strike before

    def __init__(self, queue: Queue, claimed: Claimed, uid: str) -> None:
        self._why_lost: str | None = None
        self._pid = os.getpid()
        self._queue = queue
        self._uid = uid  # of its claim
        self._process = queue.process
        self.lost_event = threading.Event()  # set when the claim is lost
        self.id = claimed.task_id
        self.kind = claimed.kind
        self.order = claimed.order
        self.note = claimed.note
        self.attempt = claimed.attempt
        self.text = claimed.body
        self.began = monotonic()
        self.result: Any = None
        self._ended = False

    def __del__(self) -> None:
        # An interrupt can strike between the claim and the block that would end it. And what was declared lost may be
        # this member's still, when it came back before anybody gave it up.
        if not self._ended and self._pid == os.getpid():
            self._process.member.leftovers.append(self._returning())

    def _returning(self) -> Callable[[Session, int], object]:
        end = End(self.id, self.attempt, "returned")
        return lambda session, me: session.end_task(me, end)

    @property
    def body(self) -> Any:
        """The value that was put, or the text of what a worker runs."""
        return json.loads(self.text) if self.kind == "json" else self.text

    @property
    def lost(self) -> bool:
        """Whether the claim was lost: the database was out of reach for too long, and others may run the task."""
        return self._why_lost is not None

    @property
    def ended(self) -> bool:
        """Whether the attempt was ended, or lost."""
        return self._ended or self.lost

    def lose(self, why: str) -> None:
        self._why_lost = self._why_lost or why
        self.lost_event.set()

    def finish(self, result: Any = None) -> None:
        """End the attempt well. Raises `LockLost` when the claim was lost, `NotHeld` when it was ended before."""
        self._finish(End(self.id, self.attempt, "finished", None if result is None else as_json(result)))

    def fail(self, error: BaseException | str) -> None:
        """End the attempt as failed. Errors as for `finish`."""
        self._finish(End(self.id, self.attempt, "failed", error=told(error)))

    def give_back(self) -> None:
        """End the attempt as if it had never been: the task is pending at once. Errors as for `finish`."""
        self._finish(End(self.id, self.attempt, "returned"))

    def _require(self) -> None:
        if self._pid != os.getpid():
            raise NotHeld(f"Task {self.id} belongs to the process that this one was forked from")
        if self._why_lost is not None:
            raise LockLost(f"The claim of task {self.id} was lost: {self._why_lost}; it will be run by somebody else")
        if self._ended:
            raise NotHeld(f"Task {self.id} was ended before")

    def _finish(self, end: End) -> None:
        self._drop_lost()
        self._require()
        member = self._process.member
        try:
            status = member.call("end of a task", lambda session, me: session.end_task(me, end), member.seconds_left())
        except BaseException:
            # Whatever is not known to have ended in time ends when the database can be reached again.
            member.later(lambda session, me: session.end_task(me, end))
            self._settle()
            raise
        finally:
            self._process.bell.notify()
        self._process.unfinished_ends.append((monotonic(), end))
        self._ended_as(status)
        if status is None:
            self._require()

    def _drop_lost(self) -> None:
        """If it was lost: nobody else gets it while our member lives, and that may have outlived the outage."""
        if self._why_lost is not None and not self._ended and self._pid == os.getpid():
            self._ended = True
            self._process.member.later(self._returning())

    def _ended_as(self, status: str | None) -> None:
        """Its end has got this answer."""
        if status is None:
            self.lose("this process was given up meanwhile")
        self._settle()

    def _settle(self) -> None:
        self._ended = True
        self._process.claims.discard(self)

    def __enter__(self) -> Task:
        self._require()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        if self._ended:  # by hand
            return
        try:
            if exc is None:
                self.finish(self.result)
            elif isinstance(exc, Exception):
                self.fail(exc)
            else:
                self.give_back()
        except SqlsemError as struck:
            if exc is None:
                raise
            log.warning("Task %d: %s", self.id, struck)  # what went wrong inside matters more

    def __repr__(self) -> str:
        return f"<Task {self.id} of {self._queue.name!r}, attempt {self.attempt}{', lost' if self.lost else ''}>"


# -- queues -----------------------------------------------------------------------------------------------------------


class Queue:
    """A named queue of tasks; see `queue`. May be used from many threads at once."""

    def __init__(self, name: str, *, on_failure: str = "stop", coordinator: Coordinated | None = None) -> None:
        self.name = check_name("The queue's name", name)
        self._on_failure = _check_on_failure(on_failure)
        self._given = coordinator
        self._recovered = 0.0

    @property
    def process(self) -> Process:
        """For the package; programs have no use for it."""
        process = process_of(self._given)
        process.engine.require(TaskSession, f"Queue {self.name!r}")
        return process

    def put(self, body: Any, **options: Unpack[PutOptions]) -> int:
        """Put one task; returns its number.

        Args:
            body: `Sql`, `Shell`, `Call` or a function for workers; any JSON value for code that claims for itself.
            options: As for `put_many`.

        Raises:
            ConfigurationError: What cannot be kept, or not by this login.
            Unavailable: The database is out of reach.

        >>> sqlsem.queue("nightly").put({"table": "customers"}, note="daily")  # doctest: +SKIP
        """
        check_options("put()", options, PutOptions.__optional_keys__)
        return self.put_many([body], **options)[0]

    def put_many(
        self,
        bodies: Iterable[Any],
        *,
        order: int = 0,
        after: Duration = 0.0,
        max_attempts: int = 1,
        backoff: Duration = 1.0,
        on_failure: str | None = None,
        note: str | None = None,
    ) -> list[int]:
        """Put many tasks; returns their numbers. Each 500, fewer when they are large, are put all or none.

        What cannot be kept is refused before any is put.

        Args:
            bodies: See `put`.
            order: Lower ones first; the task waits until every task of a lower order has ended.
            after: How long it is not claimed: seconds, ``"10m"`` or a `timedelta`.
            max_attempts: How often it is tried before it has failed. (An attempt whose worker dies does not count, up
                to five times.)
            backoff: How long before the second attempt, about; twice that before the third, and so on up to 300 s.
            on_failure: ``'stop'``: a failed task holds up all later orders until somebody retries or cancels it.
                ``'continue'``: it does not. Left out, as the queue has it.
            note: Words for whoever looks at the queue.

        Errors as for `put`.

        >>> sqlsem.queue("nightly").put_many([sqlsem.Call("etl:load", n) for n in range(20)])  # doctest: +SKIP
        """
        if isinstance(order, bool) or not isinstance(order, int) or not -MAX_INT <= order <= MAX_INT:
            raise ConfigurationError(f"The order of a task must be a whole number of at most {MAX_INT}, not {order!r}")
        if isinstance(max_attempts, bool) or not isinstance(max_attempts, int) or not 1 <= max_attempts <= MAX_INT:
            raise ConfigurationError(f"max_attempts must be a whole number from 1 on, not {max_attempts!r}")
        if note is not None:
            check_name("The note", note, MAX_NOTE)
        common = NewTask(
            "json",
            "",
            order,
            check_duration("after", after, most=LATEST),
            max_attempts,
            check_duration("backoff", backoff, most=300.0),
            self._on_failure if on_failure is None else _check_on_failure(on_failure),
            note,
        )
        tasks = [replace(common, kind=kind, body=text) for kind, text in map(encode, bodies)]
        numbers: list[int] = []
        for some in _portions(tasks):
            uid = os.urandom(12).hex()
            numbers += self.process.member.call(
                "put",
                lambda session, _, some=some, uid=uid: session.put_tasks(self.name, uid, some),  # type: ignore[misc]
            )
            self.process.bell.notify()
        return numbers

    def claim(self, wait: Duration | None = None) -> Iterator[Task]:
        """Claim one task after the other; ends when nothing came for so long (None: never; 0: at once).

        End each task with its ``with`` block before the next is claimed; leaving the loop is enough to stop.
        Raises `Unavailable` when the database is out of reach for longer than the coordinator's ``retry``.

        >>> for task in sqlsem.queue("nightly").claim(wait=30):  # doctest: +SKIP
        ...     with task:
        ...         load(task.body)
        """
        seconds = None if wait is None else check_duration("wait", wait, most=LATEST)
        while True:
            task = self._wait_for_one(seconds)
            if task is None:
                return
            yield task
            if not task._ended:
                task.give_back()
                raise NotHeld(f"{task!r} was neither finished nor failed; use 'with task:' in the loop")

    def _wait_for_one(self, wait: float | None, stop: threading.Event | None = None) -> Task | None:
        began, pause = monotonic(), SHORTEST
        while stop is None or not stop.is_set():
            rung = self.process.bell.version()
            task = self.try_claim()
            if task is not None:
                return task
            left = math.inf if wait is None else wait - (monotonic() - began)
            if left <= 0:
                return None
            self.process.bell.wait_changed(rung, min(pause, left))
            pause = min(pause * 1.5, LONGEST)
        return None

    def try_claim(self) -> Task | None:
        """Claim a task if there is one that may run now."""
        _, claimed = self._next([], 1)
        return claimed[0] if claimed else None

    def _next(self, ends: Sequence[End], most: int) -> tuple[list[str | None], list[Task]]:
        """End what was done, and claim up to ``most`` in the same call: what has become of each, and what was claimed.

        What is not known to have ended, or been claimed, in time ends or is given back as soon as that can be.
        """
        process, member = self.process, self.process.member
        uid = f"{process.secret}{os.getpid():x}.{next(_numbers)}"
        owner = threading.current_thread().name[:255]
        tried: list[int] = []

        def step(session: Session, me: int) -> tuple[list[str | None], list[Task]]:
            again = me in tried
            tried.append(me)
            statuses: list[str | None] = []
            claimed: list[Claimed]
            if not ends and most == 1:
                claimed = _all(session.claim_task(me, self.name, owner, uid, again))
            elif len(ends) == 1 and most == 1:
                status, one = session.next_task(me, ends[0], self.name, owner, uid, again)
                statuses, claimed = [status], _all(one)
            else:
                statuses, claimed = session.next_tasks(me, ends, self.name, owner, uid, again, most)
            process.unfinished_ends.extend((monotonic(), end) for end in ends)
            tasks = [Task(self, one, uid) for one in claimed]
            for task in tasks:
                process.claims.add(task)
            if tasks:
                member.stir()
            return statuses, tasks

        try:
            if not most:
                return member.call("end of tasks", step, member.seconds_left())
            self._recover()
            return member.call("claim", step, sign=True)
        except BaseException:
            # Interrupted, or the answer never came.
            if tried and most:
                member.later(lambda session, me: session.return_claim(me, self.name, uid))
            if ends:
                member.later(lambda session, me: session.next_tasks(me, ends, self.name, owner, uid, True, 0))
            raise

    def _recover(self, *, now: bool = False) -> int:
        """Now and then, or now, look after tasks whose workers died; how many are pending again."""
        process = self.process
        every = max(0.25, min(2.0, process.engine.options.grace / 4))
        if monotonic() - self._recovered < every and not now:
            return 0
        self._recovered = monotonic()
        try:
            count = process.member.call("recovery", lambda session, me: session.recover_tasks(self.name, me))
        except Deadlock as exc:
            log.info("Looking after the dead again in a moment: %s", exc)
            return 0
        if count:
            log.warning("%d task%s of %r lost their worker", count, "s" if count > 1 else "", self.name)
            process.bell.notify()
        return count

    def state(self) -> QueueState:
        """What is left to do, now."""
        return self.process.member.call("look at a queue", lambda session, _: session.queue_state(self.name))

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait until nothing is left that could run; False when that takes longer than ``timeout``."""
        seconds = math.inf if timeout is None else check_duration("timeout", timeout, most=LATEST)
        began, pause = monotonic(), SHORTEST
        while True:
            rung = self.process.bell.version()
            state = self.state()
            if state.done or state.stuck:
                return True
            left = seconds - (monotonic() - began)
            if left <= 0:
                return False
            self.process.bell.wait_changed(rung, min(pause, left))
            pause = min(pause * 1.5, LONGEST)
            self._recover()

    def join(self, timeout: Duration | None = None) -> None:
        """As `wait`, and raises `TaskFailed` when a task failed that was not put with ``on_failure='continue'``,
        `Timeout` when time is up.

        >>> sqlsem.queue("nightly").join(timeout="1h")  # doctest: +SKIP
        """
        seconds = None if timeout is None else check_duration("timeout", timeout, most=LATEST)
        if not self.wait(seconds):
            raise Timeout(
                f"Queue {self.name!r} still has work after {seconds:g} s; see: sqlsem tasks {self.name}",
                resource=self.name,
            )
        state = self.state()
        if state.failed is not None:
            raise TaskFailed(
                f"Task {state.failed} of queue {self.name!r} has failed: {(state.error or '').partition(chr(10))[0]}; "
                f"see it with: sqlsem tasks log {state.failed}, then retry or cancel it",
                resource=self.name,
                task_id=state.failed,
            )

    def tasks(self, status: str | None = None, *, most: int = 100) -> list[TaskEntry]:
        """Open tasks in the order in which they will run, then those that ended, newest first."""
        return Operators(self.process).tasks(self.name, status, most=most)

    def log(self, task_id: int) -> list[Attempt]:
        """Every attempt at a task: who, when, how long, how it ended."""
        return Operators(self.process).attempts(task_id)

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"


_numbers = itertools.count(1)


def _all(claimed: Claimed | None) -> list[Claimed]:
    return [] if claimed is None else [claimed]


def _portions(tasks: Sequence[NewTask]) -> Iterator[list[NewTask]]:
    """What each statement shall put."""
    some: list[NewTask] = []
    size = 0
    for task in tasks:
        if some and (len(some) == BULK or size + len(task.body) > BULK_TEXT):
            yield some
            some, size = [], 0
        some.append(task)
        size += len(task.body)
    if some:
        yield some


def _check_on_failure(value: str) -> str:
    if value not in ("stop", "continue"):
        raise ConfigurationError(f"on_failure is 'stop' or 'continue', not {value!r}")
    return value


def queue(name: str, *, on_failure: str = "stop", coordinator: Coordinated | None = None) -> Queue:
    """The work queue of that name; it need not be made.

    Args:
        name: 1 to 255 characters.
        on_failure: What its tasks have unless they are put otherwise; see `Queue.put`.
        coordinator: Which database; left out, the default one (`sqlsem.configure`).

    Raises `ConfigurationError` for a name that cannot be.
    """
    return Queue(name, on_failure=on_failure, coordinator=coordinator)
