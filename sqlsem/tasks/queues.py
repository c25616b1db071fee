"""Queues as programs have them: putting, claiming, waiting, looking."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sqlsem.bodies import encode
from sqlsem.core.defaults import Coordinated
from sqlsem.core.operators import Operators
from sqlsem.core.options import PutOptions, check_options
from sqlsem.errors import ConfigurationError, NotHeld, TaskFailed, Timeout
from sqlsem.model import (
    MAX_INT,
    MAX_NOTE,
    Attempt,
    Duration,
    NewTask,
    QueueCounts,
    QueueState,
    TaskEntry,
    check_count,
    check_duration,
    check_name,
)
from sqlsem.printable import first_line
from sqlsem.tasks.claiming import Claiming
from sqlsem.tasks.task import Task

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Queue", "check_put", "queue"]

#: What one statement puts at the most, unless it is a single task: it must not keep the pings out.
MOST_TASKS, MOST_CHARACTERS = 500, 4_000_000
#: Between two looks whether a queue has come to its end, of which nobody tells.
WAIT_SECONDS = 0.5
#: The longest time that a task may be kept back, or a queue waited for: some ten years.
LONGEST_SECONDS = 3.2e8


class Queue:
    """A named queue of tasks; see `queue`. May be used from many threads at once."""

    def __init__(self, name: str, *, on_failure: str = "stop", coordinator: Coordinated | None = None) -> None:
        self.name = check_name("The queue's name", name)
        self._on_failure = _check_on_failure(on_failure)
        #: For the package; programs have no use for it.
        self.claiming = Claiming(name, coordinator)

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
        time_limit: Duration | None = None,
        unique: str | None = None,
        replace: str | None = None,
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
            note: Words for anyone who looks at the queue.
            time_limit: An attempt that runs for longer is ended, and has failed. Looked at about once a second.
            unique: A key, for one body. While a task of this queue with the same key is open (pending, running, or
                failed and holding up), nothing is put, and that one's number is returned.
            replace: A key, for one body. The task takes the place of the one that is open with the same key: that one
                is cancelled, or, while it runs, runs on beside it.

        Errors as for `put`.

        >>> sqlsem.queue("nightly").put_many([sqlsem.Call("etl:load", n) for n in range(20)])  # doctest: +SKIP
        """
        bodies = [encode(body) for body in bodies]
        failing = self._on_failure if on_failure is None else on_failure
        how = check_put(
            order, after, max_attempts, backoff, failing, note, time_limit=time_limit, unique=unique, replace=replace
        )
        if len(bodies) > 1 and (unique is not None or replace is not None):
            raise ConfigurationError(f"A key is for one task, and these are {len(bodies)}; put each with its own")
        tasks = [dataclasses.replace(how, kind=kind, body=text) for kind, text in bodies]
        task_ids: list[int] = []
        for some in _portions(tasks):
            uid = os.urandom(12).hex()
            task_ids += self.claiming.process.member.call(
                "put",
                lambda session, _, some=some, uid=uid: session.put_tasks(self.name, uid, some),  # type: ignore[misc]
            )
            self.claiming.process.bell.notify()
        return task_ids

    def claim(self, wait: Duration | None = None) -> Iterator[Task]:
        """Claim one task after the other; ends when nothing came for so long (None: never; 0: at once).

        End each task with its ``with`` block before the next is claimed; leaving the loop is enough to stop.
        Raises `Unavailable` when the database is out of reach for longer than the coordinator's ``retry``.

        >>> for task in sqlsem.queue("nightly").claim(wait=30):  # doctest: +SKIP
        ...     with task:
        ...         load(task.body)
        """
        seconds = None if wait is None else check_duration("wait", wait, most=LONGEST_SECONDS)
        while True:
            task = self.claiming.wait_for_task(seconds)
            if task is None:
                return
            yield task
            if task.is_open:
                task.give_back()
                raise NotHeld(f"{task!r} was neither finished nor failed; use 'with task:' in the loop")

    def try_claim(self) -> Task | None:
        """Claim a task if there is one that may run now."""
        return self.claiming.try_claim()

    def state(self) -> QueueState:
        """What is left to do, now."""
        return self.claiming.process.member.call("look at a queue", lambda session, _: session.queue_state(self.name))

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait until nothing is left that could run; False when that takes longer than ``timeout``. (`join`, and the
        ``wait`` of a round, raise `Timeout` then.)
        """
        seconds = None if timeout is None else check_duration("timeout", timeout, most=LONGEST_SECONDS)

        def look() -> bool | None:
            state = self.state()
            return True if state.done or state.stuck else None

        found = self.claiming.look_until(look, seconds, between=self.claiming.recover, longest=WAIT_SECONDS)
        return found is not None

    def join(self, timeout: Duration | None = None) -> None:
        """As `wait`, and raises `TaskFailed` when a task failed that was not put with ``on_failure='continue'``,
        `Timeout` when time is up.

        >>> sqlsem.queue("nightly").join(timeout="1h")  # doctest: +SKIP
        """
        seconds = None if timeout is None else check_duration("timeout", timeout, most=LONGEST_SECONDS)
        if not self.wait(seconds):
            raise Timeout(
                f"Queue {self.name!r} still has work after {seconds:g} s; see: sqlsem tasks {self.name}",
                resource=self.name,
            )
        state = self.state()
        if state.failed is not None:
            raise TaskFailed(
                f"Task {state.failed} of queue {self.name!r} has failed: {first_line(state.error)}; "
                f"see it with: sqlsem tasks log {state.failed}, then retry or cancel it",
                resource=self.name,
                task_id=state.failed,
            )

    def counts(self) -> QueueCounts | None:
        """How many tasks are in which state, the oldest, the rate, and what holds it up; None when nothing is kept."""
        found = Operators(self.claiming.process).queues(self.name)
        return found[0] if found else None

    def tasks(self, status: str | None = None, *, most: int = 100, skip: int = 0) -> list[TaskEntry]:
        """Open tasks in the order in which they will run, then those that ended, newest first; all but the first
        ``skip``.
        """
        return Operators(self.claiming.process).tasks(self.name, status, most=most, skip=skip)

    def log(self, task_id: int) -> list[Attempt]:
        """Every attempt at a task: who, when, how long, how it ended."""
        return Operators(self.claiming.process).attempts(task_id)

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"


def _portions(tasks: Sequence[NewTask]) -> Iterator[list[NewTask]]:
    """What each statement shall put."""
    some: list[NewTask] = []
    size = 0
    for task in tasks:
        if some and (len(some) == MOST_TASKS or size + len(task.body) > MOST_CHARACTERS):
            yield some
            some, size = [], 0
        some.append(task)
        size += len(task.body)
    if some:
        yield some


def check_put(
    order: int = 0,
    after: Duration = 0.0,
    max_attempts: int = 1,
    backoff: Duration = 1.0,
    on_failure: str | None = None,
    note: str | None = None,
    time_limit: Duration | None = None,
    unique: str | None = None,
    replace: str | None = None,
) -> NewTask:
    """The options of `Queue.put`, as a task without a body. Raises `ConfigurationError` for what cannot be."""
    check_count("The order of a task", order, -MAX_INT)
    check_count("max_attempts", max_attempts)
    if note is not None:
        check_name("The note", note, MAX_NOTE)
    seconds = check_duration("after", after, most=LONGEST_SECONDS)
    pause = check_duration("backoff", backoff, most=300.0)
    for what, key in (("unique", unique), ("replace", replace)):
        if key is not None:
            check_name(f"The key ({what})", key)
    if unique is not None and replace is not None:
        raise ConfigurationError("A task is unique or replaces another one, not both; give it one key")
    failing = _check_on_failure("stop" if on_failure is None else on_failure)
    limit = None if time_limit is None else check_duration("time_limit", time_limit, zero=False)
    return NewTask("json", "null", order, seconds, max_attempts, pause, failing, note, limit, unique, replace)


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
