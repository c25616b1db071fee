"""Queues as programs have them: putting, claiming, waiting, looking."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from sqlsem.bodies import encode
from sqlsem.core.cursors import cursor_of, refuse_autocommit
from sqlsem.core.defaults import Coordinated
from sqlsem.core.late import running_tasks
from sqlsem.core.leaving import here
from sqlsem.core.operators import Operators
from sqlsem.core.options import AnyLock, PutOptions, check_options
from sqlsem.core.process import Process
from sqlsem.core.steps import drive
from sqlsem.core.terms import Terms
from sqlsem.engines.base import Session
from sqlsem.engines.blocked_tasks import BlockedTaskSession
from sqlsem.engines.protocol import TaskSession
from sqlsem.engines.queue_limits import QueueLimitSession
from sqlsem.engines.schedules import ScheduleSession
from sqlsem.errors import ConfigurationError, NotHeld, TaskFailed, Timeout
from sqlsem.insight.blockers import tasks_in_words
from sqlsem.model import (
    MAX_NOTE,
    TASK_BOUNDS,
    Attempt,
    Duration,
    NewTask,
    QueueCounts,
    QueueLimit,
    QueueState,
    Schedule,
    TaskEntry,
    TaskLock,
    check_count,
    check_duration,
    check_name,
)
from sqlsem.model_rates import RateRequest, windows_of
from sqlsem.printable import first_line
from sqlsem.tasks.claiming import Claiming
from sqlsem.tasks.cron import check_cron, next_due
from sqlsem.tasks.schedules import MISSED
from sqlsem.tasks.task import Task

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Queue", "check_put", "queue"]

#: What one statement puts at the most, unless it is a single task: it must not keep the pings out.
MOST_TASKS, MOST_CHARACTERS = 500, 4_000_000
#: So many locks a task may be put with.
MOST_LOCKS = 100
#: Between two looks whether a queue has come to its end, of which nobody tells.
WAIT_SECONDS = 0.5
#: The longest time that a task may be kept back, or a queue waited for: ten years.
LONGEST_SECONDS = TASK_BOUNDS["after_ms"][1] / 1000


class Queue:
    """A named queue of tasks; see `queue`. May be used from many threads at once."""

    def __init__(self, name: str, *, on_failure: str = "stop", coordinator: Coordinated | None = None) -> None:
        self.name = check_name("The queue's name", name)
        self._on_failure = _check_on_failure(on_failure)
        #: For the package; programs have no use for it.
        self.claiming = Claiming(name, coordinator)

    def put(self, body: Any, *, cursor: Any = None, **options: Unpack[PutOptions]) -> int:
        """Put one task; returns its number.

        Args:
            body: `Sql`, `Shell`, `Call` or a function for workers; any JSON value for code that claims for itself (a
                plain text only as `Json`).
            cursor: A DB-API cursor on the *same database* with a transaction open (psycopg, pyodbc, sqlite3, Django),
                or a ``Connection`` or ``Session`` of SQLAlchemy: the task is there when that transaction is committed,
                together with what it has written, and never if it is rolled back. It is put by that cursor's login.
            options: As for `put_many`.

        Raises:
            ConfigurationError: What cannot be kept, or not by this login.
            Unavailable: The database is out of reach.

        >>> sqlsem.queue("nightly").put({"table": "customers"}, note="daily")  # doctest: +SKIP
        """
        check_options("put()", options, PutOptions.__optional_keys__)
        return self.put_many([body], cursor=cursor, **options)[0]

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
        key: str | None = None,
        priority: int = 0,
        locks: Iterable[AnyLock] = (),
        cursor: Any = None,
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
            key: Whose task it is (a tenant, a customer, a host). Workers share themselves out between the keys of a
                queue, however many tasks each has waiting, and how many run at a time can be limited for each; see
                `set_limit`.
            priority: Among the tasks of the same key and order: higher ones first; negative ones after those of 0.
            locks: What each of them needs to run: ``[sqlsem.write("customers"), sqlsem.limit("pg", 4)]``. The task
                waits in the lines of all of them at once, without a process, and any worker starts it when its turn has
                come in all, holding them (`Task.grant`). They are given back with the end of the attempt.
            cursor: As for `put`: all are put by it, or none.

        Errors as for `put`.

        >>> sqlsem.queue("nightly").put_many([sqlsem.Call("etl:load", n) for n in range(20)])  # doctest: +SKIP
        """
        bodies = _encoded(bodies)
        locks = _listed(locks)
        failing = self._on_failure if on_failure is None else on_failure
        how = check_put(
            *(order, after, max_attempts, backoff, failing, note, time_limit, unique, replace, key, priority, locks),
        )
        if len(bodies) > 1 and (unique is not None or replace is not None):
            raise ConfigurationError(f"A key is for one task, and these are {len(bodies)}; put each with its own")
        if how.locks:
            _check_database(locks, self.claiming.process)
        task_ids: list[int] = []
        if cursor is not None:
            engine = self.claiming.process.engine
            engine.require(TaskSession, "put()")
            theirs = cursor_of(cursor, "put()")
            refuse_autocommit(theirs, "put()")
            session = engine.session_on(theirs)
            here(self.claiming.process, session.database_identity, "put()")
            for some in _portions(how, bodies):
                task_ids += session.put_tasks(self.name, os.urandom(12).hex(), some)
            return task_ids
        for some in _portions(how, bodies):
            uid = os.urandom(12).hex()
            task_ids += self.claiming.process.member.call(
                "put",
                lambda session, _, some=some, uid=uid: session.put_tasks(self.name, uid, some),  # type: ignore[misc]
            )
            self.claiming.process.bell.notify()
        return task_ids

    def schedule(
        self,
        cron: str,
        body: Any,
        *,
        name: str | None = None,
        time_zone: str = "UTC",
        missed: str = "one",
        **options: Unpack[PutOptions],
    ) -> Schedule:
        """Have a task put at all times of a cron expression, once for each, by whoever works on this queue then.

        A schedule of the same name is replaced.

        Args:
            cron: Minute, hour, day of month, month, day of week: ``"0 2 * * *"``; or ``"@daily"`` and its like.
            body: As for `put`.
            name: What it is called, in the whole database. Left out, made of the queue's name and the body.
            time_zone: Of the expression, as the IANA database calls it. The clock is the database's.
            missed: What becomes of times at which nobody worked on the queue: ``'one'`` task for all of them, as soon
                as somebody does; ``'skip'``: none, but for one that is less than a minute late.
            options: Of each task, as for `put`.

        Raises `ConfigurationError` for what cannot be.

        >>> sqlsem.queue("nightly").schedule("0 2 * * *", sqlsem.Sql("CALL load()"))  # doctest: +SKIP
        """
        check_options("schedule()", options, PutOptions.__optional_keys__)
        options.setdefault("on_failure", self._on_failure)
        if "locks" in options:
            options["locks"] = _listed(options["locks"])
        kind, text = encode(body)
        kept = {**check_put(**options).as_options(), "missed": missed}
        if "locks" in options:
            _check_database(options["locks"], self.claiming.process)
        if missed not in MISSED:
            raise ConfigurationError(f"missed is 'one' or 'skip', not {missed!r}")
        if name is None:
            digest = hashlib.sha256(f"{kind} {text}".encode()).hexdigest()[:8]
            name = f"{self.name[:240]}-{digest}"
        check_name("The schedule's name", name)
        check_cron(cron, time_zone)

        def save(session: Session) -> Schedule:
            due = next_due(cron, time_zone, session.clock())
            session.save_schedule(name, self.name, cron, time_zone, kind, text, kept, due)
            return session.list_schedules(name, None)[0]

        return self.claiming.process.look(save, ScheduleSession)

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
        ``wait`` of a batch, raise `Timeout` then.)
        """
        seconds = None if timeout is None else check_duration("timeout", timeout, most=LONGEST_SECONDS)

        def look() -> bool | None:
            state = self.state()
            return True if state.done or state.stuck else None

        found = self.claiming.poll_until(look, seconds, between=self.claiming.recover, longest=WAIT_SECONDS)
        return found is not None

    def join(self, timeout: Duration | None = None) -> None:
        """As `wait`, and raises `TaskFailed` when a task failed that was not put with ``on_failure='continue'``,
        `Timeout` when time is up: it names the worker that runs a task, and its ``holders`` are the tasks that run.

        >>> sqlsem.queue("nightly").join(timeout="1h")  # doctest: +SKIP
        """
        seconds = None if timeout is None else check_duration("timeout", timeout, most=LONGEST_SECONDS)
        if not self.wait(seconds):
            process = self.claiming.process
            running = drive(running_tasks(process, self.name), process.perform)
            words = f": {tasks_in_words(running)}" if running else ""
            raise Timeout(
                f"Queue {self.name!r} still has work after {seconds:g} s{words}; see: sqlsem tasks {self.name}",
                resource=self.name,
                holders=running,
            )
        state = self.state()
        if state.failed is not None:
            raise TaskFailed(
                f"Task {state.failed} of queue {self.name!r} has failed: {first_line(state.error)}; "
                f"see it with: sqlsem tasks log {state.failed}, then retry or cancel it",
                resource=self.name,
                task_id=state.failed,
            )

    def set_limit(self, limit: int | None, *, key: str | None = None) -> None:
        """Let at most so many tasks of this queue run at a time, on all workers together; with ``key`` of this key.
        None: any number (of a key: as `set_key_limit` says). 0: none is started any more. What runs, runs on.

        For operators. Raises `ConfigurationError` for what cannot be, or not by this login; `Unavailable` when the
        database is out of reach.

        >>> sqlsem.queue("mails").set_limit(10)  # doctest: +SKIP
        >>> sqlsem.queue("mails").set_limit(5, key="tenant-7")  # doctest: +SKIP
        """
        if limit is not None:
            check_count("The limit", limit, 0)
        self._set(key, "limit", limit)

    def set_key_limit(self, limit: int | None) -> None:
        """Let at most so many tasks of each key run at a time, but for keys with a limit of their own; otherwise as
        `set_limit`. Tasks without a key are not limited by this.

        >>> sqlsem.queue("mails").set_key_limit(2)  # doctest: +SKIP
        """
        if limit is not None:
            check_count("The limit of each key", limit, 0)
        self._set(None, "key_limit", limit)

    def set_rate(self, limit: int | None, per: Duration | None = None, *, key: str | None = None) -> None:
        """Let at most ``limit`` tasks of this queue be started in any stretch of time as long as ``per``, by all
        workers together; with ``key`` of this key. None: as many as workers can (of a key: as `set_key_rate` says).

        Each attempt at a task is a start, also one that a worker gives back. Time is the database's. The window (from a
        millisecond to 24 days) is kept in a hundred parts, as that of `sqlsem.rate`: the rate is never passed, and a
        hundredth of the window may be waited for too long. What was started before counts, as far as a rate was set.

        Who may do that, and errors: as for `set_limit`.

        >>> sqlsem.queue("mails").set_rate(1000, per="1m")  # doctest: +SKIP
        >>> sqlsem.queue("mails").set_rate(10, per="1s", key="tenant-7")  # doctest: +SKIP
        """
        self._set(key, "rate", *_rate(limit, per))

    def set_key_rate(self, limit: int | None, per: Duration | None = None) -> None:
        """Let at most ``limit`` tasks of each key be started in any stretch of time as long as ``per``, but for keys
        with a rate of their own; otherwise as `set_rate`. Tasks without a key are not held back by this.

        >>> sqlsem.queue("mails").set_key_rate(100, per="1m")  # doctest: +SKIP
        """
        self._set(None, "key_rate", *_rate(limit, per))

    def set_weight(self, key: str, weight: int | None) -> None:
        """Give a key so many times the share of the workers that others have (None: the same share). Who may do that,
        and errors: as for `set_limit`.

        >>> sqlsem.queue("mails").set_weight("tenant-7", 3)  # doctest: +SKIP
        """
        if weight is not None:
            check_count("The weight", weight)
        self._set(check_name("The key", key), "weight", weight)

    def _set(self, key: str | None, what: str, value: int | None, per_ms: int | None = None) -> None:
        if key is not None:
            check_name("The key", key)
        process = self.claiming.process
        process.look(lambda session: session.set_queue(self.name, key, what, value, per_ms), QueueLimitSession)
        process.bell.notify()

    def limits(self) -> list[QueueLimit]:
        """What is set of this queue (first, where anything is), and of its keys."""
        process = self.claiming.process
        return process.look(lambda session: session.queue_limits(self.name), QueueLimitSession)

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


def _portions(how: NewTask, bodies: Sequence[tuple[str, str]]) -> Iterator[list[NewTask]]:
    """What each statement shall put: tasks like this one, with these kinds and texts."""
    # (Made as they are needed: a hundred thousand objects that live at once make Python's garbage collection slow.)
    some: list[NewTask] = []
    size = 0
    for kind, text in bodies:
        if some and (len(some) == MOST_TASKS or size + len(text) > MOST_CHARACTERS):
            yield some
            some, size = [], 0
        some.append(how.alike(kind, text))
        size += len(text)
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
    key: str | None = None,
    priority: int = 0,
    locks: Iterable[AnyLock] = (),
) -> NewTask:
    """The options of `Queue.put`, as a task without a body. Raises `ConfigurationError` for what cannot be."""
    check_count("The order of a task", order, *TASK_BOUNDS["order"])
    check_count("max_attempts", max_attempts, *TASK_BOUNDS["max_attempts"])
    check_count("The priority of a task", priority, *TASK_BOUNDS["priority"])
    if key is not None:
        check_name("The key", key)
    if note is not None:
        check_name("The note", note, MAX_NOTE)
    seconds = check_duration("after", after, most=LONGEST_SECONDS)
    pause = check_duration("backoff", backoff, most=TASK_BOUNDS["backoff_ms"][1] / 1000)
    for what, one in (("unique", unique), ("replace", replace)):
        if one is not None:
            check_name(f"The key ({what})", one)
    if unique is not None and replace is not None:
        raise ConfigurationError("A task is unique or replaces another one, not both; give it one key")
    failing = _check_on_failure("stop" if on_failure is None else on_failure)
    limit = None if time_limit is None else check_duration("time_limit", time_limit, zero=False)
    return NewTask(
        *("json", "null", order, seconds, max_attempts, pause, failing, note, limit, unique, replace, key, priority),
        _locks(_listed(locks)),
    )


def _encoded(bodies: Iterable[Any]) -> list[tuple[str, str]]:
    """Return the bodies as they are kept."""
    if not isinstance(bodies, Iterable):
        raise ConfigurationError(f"put_many() takes a list of bodies, not {type(bodies).__name__}; one: put()")
    return [encode(body) for body in bodies]


def _listed(locks: Iterable[AnyLock]) -> list[AnyLock]:
    """These; one alone is as good as a list of one."""
    if isinstance(getattr(locks, "terms", None), Terms):
        return [cast("AnyLock", locks)]
    if not isinstance(locks, Iterable):
        raise ConfigurationError(f"locks is a list of locks, not {locks!r}; write locks=[sqlsem.write('customers')]")
    return list(locks)


def _locks(locks: Iterable[AnyLock]) -> tuple[TaskLock, ...]:
    """What tasks ask for that are put with these. Raises `ConfigurationError` for what cannot be."""
    asked: dict[str, TaskLock] = {}
    for lock in locks:
        terms = getattr(lock, "terms", None)
        if not isinstance(terms, Terms):
            raise ConfigurationError(f"locks takes locks, not {lock!r}; write locks=[sqlsem.write('customers')]")
        if terms.timeout is not None or terms.on_lost is not None:
            raise ConfigurationError(
                f"{lock!r} has a timeout or on_lost, which nobody heeds: a task waits for as long as its locks take"
            )
        for request in terms.requests:
            if isinstance(request, RateRequest):
                raise ConfigurationError(
                    f"{lock!r} is a rate, of which a task can take in its own code: nothing is held of it meanwhile",
                    resource=request.resource,
                )
            if request.priority is not None:
                raise ConfigurationError(
                    f"{lock!r} has a priority, which the locks of a task have not; give put() one, or name none here",
                    resource=request.resource,
                )
            if request.resource in asked:
                raise ConfigurationError(
                    f"The locks of a task name {request.resource!r} twice; ask for it once, with a weight",
                    resource=request.resource,
                )
            asked[request.resource] = TaskLock(request.resource, request.access, request.limit, request.weight)
    if len(asked) > MOST_LOCKS:
        raise ConfigurationError(f"A task takes at most {MOST_LOCKS} locks, not {len(asked)}")
    return tuple(asked.values())


def _check_database(locks: Iterable[AnyLock], process: Process) -> None:
    """Raise `ConfigurationError` for locks of another database, or where there are no tasks with locks."""
    process.engine.require(BlockedTaskSession, "put(locks=…)")
    for lock in locks:
        given = lock.terms.given_process
        if given is not None and given is not process:
            raise ConfigurationError(f"{lock!r} is of another coordinator than the queue; its tasks cannot hold it")


def _rate(limit: int | None, per: Duration | None) -> tuple[int | None, int | None]:
    """A rate of a queue, checked, as sessions take it."""
    if limit is None:
        if per is not None:
            raise ConfigurationError("A rate that is taken away has no window; leave per out, or give a limit")
        return None, None
    (window,) = windows_of(check_count("The limit of a rate", limit), per)
    return window.limit, window.ms


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
