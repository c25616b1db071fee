"""`Queue`, the API of programs: putting and claiming tasks, waiting for them, listing them, setting limits.

Each method checks its arguments before it calls the database. A large put is split into statements of up to 500 tasks.
After a lost reply a statement is repeated under the same uid, so that no task is put twice.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from sqlsem.bodies import encode
from sqlsem.client.admin import BaseAdmin
from sqlsem.client.client import DatabaseClient
from sqlsem.client.defaults import Coordinated
from sqlsem.client.effects import run_generator
from sqlsem.client.operations.cursors import cursor_of, refuse_autocommit
from sqlsem.client.operations.release_on_commit import require_same_database
from sqlsem.client.operations.terms import Terms
from sqlsem.client.operations.timeout_details import running_tasks
from sqlsem.client.options import AnyLock, PutOptions, check_options, shows_options
from sqlsem.engines.answers import naming_resource
from sqlsem.engines.base import Session
from sqlsem.engines.protocol import Capability
from sqlsem.insight.blockers import tasks_in_words
from sqlsem.tasks.claiming import Claiming
from sqlsem.tasks.cron import check_cron, next_due
from sqlsem.tasks.schedules import MISSED
from sqlsem.tasks.task import Task
from sqlsem.util.chunks import in_chunks
from sqlsem.util.printable import first_line
from sqlsem.values.errors import ConfigurationError, NotHeld, TaskFailed, Timeout
from sqlsem.values.locks import MAX_NOTE, Duration, check_count, check_duration, check_name
from sqlsem.values.rates import RateRequest, windows_of
from sqlsem.values.tasks import (
    TASK_BOUNDS,
    Attempt,
    NewTask,
    QueueCounts,
    QueueLimit,
    QueueState,
    Schedule,
    TaskEntry,
    TaskLock,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: The most tasks and characters of one statement: a long statement would delay heartbeats. (A larger task has its own.)
MAX_TASKS, MAX_CHARACTERS = 500, 4_000_000
#: The greatest number of locks of a task.
MAX_LOCKS = 100
#: The longest delay of a task, and the longest wait for a queue: ten years.
LONGEST_SECONDS = TASK_BOUNDS["after_ms"][1] / 1000


class Queue:
    """A named queue of tasks; see `queue`. May be used from many threads at once."""

    def __init__(self, name: str, *, on_failure: str = "stop", coordinator: Coordinated | None = None) -> None:
        self.name = check_name("The queue's name", name)
        self._on_failure = _check_on_failure(on_failure)
        #: For the package, not for programs.
        self.claiming = Claiming(name, coordinator)

    @shows_options(PutOptions)
    def put(self, body: Any, *, cursor: Any = None, **options: Unpack[PutOptions]) -> int:
        """Put one task; return its number.

        Args:
            body: For workers: `Sql`, `Shell`, `Call` or a function. For programs that claim tasks themselves: any JSON
                value; wrap a plain text in `Json`.
            cursor: A DB-API cursor on the *same database* with an open transaction (psycopg, pyodbc, sqlite3, Django),
                or a ``Connection`` or ``Session`` of SQLAlchemy. The task exists once that transaction is committed,
                together with its other writes, and never if it is rolled back. The cursor's login puts it.
            options: As for `put_many`.

        Raises:
            ConfigurationError: An argument is invalid, or this login may not put tasks.
            Unavailable: The database is out of reach.

        >>> sqlsem.queue("nightly").put({"table": "customers"}, note="daily")  # doctest: +SKIP
        """
        check_options("put()", options, PutOptions.__optional_keys__)
        return self.put_many([body], cursor=cursor, **options)[0]

    @shows_options(PutOptions)
    def put_many(self, bodies: Iterable[Any], *, cursor: Any = None, **options: Unpack[PutOptions]) -> list[int]:
        """Put many tasks; return their numbers.

        All arguments are checked before any task is put. One statement puts up to 500 tasks (fewer if they are large):
        either all of them or none.

        Args:
            bodies: See `put`.
            order: Lower orders run first; a task waits until every task of a lower order has ended.
            after: The delay before the task may be claimed: seconds, ``"10m"`` or a `timedelta`.
            max_attempts: How many attempts are made before the task has failed. (An attempt whose worker dies does not
                count, up to five times.)
            backoff: The approximate pause before the second attempt; twice that before the third, up to 300 s.
            on_failure: ``'stop'``: a failed task holds up all later orders until an operator retries or cancels it.
                ``'continue'``: it does not. Left out, the queue's default.
            note: A text that lists of the queue show.
            time_limit: An attempt that runs for longer is ended, and fails. Checked about once a second.
            unique: A unique key; for a single body. While a task of this queue with the same unique key is open
                (pending, running, or failed and holding up later orders), nothing is put, and the number of the open
                task is returned.
            replace: A unique key, too; for a single body. The new task replaces the open task with the same key: if
                that is pending, it is cancelled; if it is running, it runs on beside the new one.
            key: The task's owner (a tenant, a customer, a host). Workers are shared fairly between the keys of a
                queue, however many tasks each has waiting; see also `set_limit`.
            priority: Among the tasks of the same key and order, higher priorities first; the default is 0.
            locks: The locks that each task needs to run: ``[sqlsem.write("customers"), sqlsem.limit("pg", 4)]``. The
                task waits in the queues of all of them at once, without a process. When all are granted, any worker
                starts it, holding them (`Task.grant`). The end of the attempt releases them.
            cursor: As for `put`. All of the tasks are put, or none.

        Errors as for `put`.

        >>> sqlsem.queue("nightly").put_many([sqlsem.Call("etl:load", n) for n in range(20)])  # doctest: +SKIP
        """
        check_options("put_many()", options, PutOptions.__optional_keys__)
        bodies = _encoded(bodies)
        template = self._checked(options)
        if len(bodies) > 1 and (template.unique is not None or template.replace is not None):
            raise ConfigurationError(f"A key is for one task, and these are {len(bodies)}; put each with its own")
        task_ids: list[int] = []
        resources = [lock.resource for lock in template.locks]
        if cursor is not None:
            engine = self.claiming.client.engine
            engine.require(Capability.TASKS, "put()")
            dbapi_cursor = cursor_of(cursor, "put()")
            refuse_autocommit(dbapi_cursor, "put()")
            session = engine.session_on(dbapi_cursor)
            require_same_database(self.claiming.client, session.database_identity, "put()")
            with naming_resource(*resources, in_text=True):
                for chunk in _chunks(template, bodies):
                    task_ids += session.put_tasks(self.name, os.urandom(12).hex(), chunk)
            return task_ids
        with naming_resource(*resources, in_text=True):
            for chunk in _chunks(template, bodies):
                uid = os.urandom(12).hex()
                task_ids += self.claiming.client.member.call(
                    "put",
                    lambda session, _, chunk=chunk, uid=uid: session.put_tasks(self.name, uid, chunk),  # type: ignore[misc]
                )
                self.claiming.client.queue_changes.notify()
        return task_ids

    def _checked(self, options: PutOptions) -> NewTask:
        """Check the options of tasks, and return them as a task without a body."""
        if options.get("on_failure") is None:
            options["on_failure"] = self._on_failure
        options["locks"] = _listed(options.get("locks", ()))
        template = check_put(**options)
        if template.locks:
            _check_database(options["locks"], self.claiming.client)
        return template

    @shows_options(PutOptions)
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
        """Have the workers of this queue put a task at each time of a cron expression.

        A schedule of the same name is replaced.

        Args:
            cron: Minute, hour, day of month, month, day of week: ``"0 2 * * *"``; or ``"@daily"`` and its like.
            body: As for `put`.
            name: The schedule's name, unique in the database. Left out, made of the queue's name and the body.
            time_zone: The expression's time zone, by its IANA name. The clock is the database's.
            missed: The rule for times at which the queue had no worker: ``'one'`` puts one task for all of them as soon
                as there is a worker; ``'skip'`` puts none, unless the last time is less than a minute ago.
            options: Options of each task, as for `put`.

        Raises `ConfigurationError` for an invalid argument.

        >>> sqlsem.queue("nightly").schedule("0 2 * * *", sqlsem.Sql("CALL load()"))  # doctest: +SKIP
        """
        check_options("schedule()", options, PutOptions.__optional_keys__)
        kind, text = encode(body)
        template = self._checked(options)
        task_options = {**template.as_options(), "missed": missed}
        if missed not in MISSED:
            raise ConfigurationError(f"missed is 'one' or 'skip', not {missed!r}")
        if name is None:
            digest = hashlib.sha256(f"{kind} {text}".encode()).hexdigest()[:8]
            name = f"{self.name[:240]}-{digest}"
        check_name("The schedule's name", name)
        check_cron(cron, time_zone)

        def save(session: Session) -> Schedule:
            due = next_due(cron, time_zone, session.clock())
            session.save_schedule(name, self.name, cron, time_zone, kind, text, task_options, due)
            return session.list_schedules(name, None)[0]

        with naming_resource(*(lock.resource for lock in template.locks), in_text=True):
            return self.claiming.client.with_connection(save, Capability.SCHEDULES)

    def claim(self, wait: Duration | None = None) -> Iterator[Task]:
        """Claim one task after the other; end when there was none for ``wait`` (None: never end; 0: do not wait).

        End each task with its ``with`` block before the next is claimed; leave the loop to stop.
        Raises `Unavailable` when the database is out of reach for longer than the coordinator's ``retry``.

        >>> for task in sqlsem.queue("nightly").claim(wait=30):  # doctest: +SKIP
        ...     with task:
        ...         load(task.body)
        """
        seconds = None if wait is None else check_duration("wait", wait, maximum=LONGEST_SECONDS)
        while True:
            task = self.claiming.wait_for_task(seconds)
            if task is None:
                return
            yield task
            if task.is_open:
                task.release()
                raise NotHeld(f"{task!r} was neither finished nor failed; use 'with task:' in the loop")

    def try_claim(self) -> Task | None:
        """Claim and return a task that may run now; None if there is none."""
        return self.claiming.try_claim()

    def state(self) -> QueueState:
        """Return the queue's state: is it done, and does a failed task hold it up?"""
        return self.claiming.client.member.call("look at a queue", lambda session, _: session.queue_state(self.name))

    def _wait_until_idle(self, seconds: float | None) -> bool:
        """Wait until no task is left that could run; return False if that takes longer."""

        def poll() -> bool | None:
            state = self.state()
            return True if state.done or state.stuck else None

        longest = self.claiming.client.timing.queue_poll
        result = self.claiming.poll_until(poll, seconds, between=self.claiming.recover, longest=longest)
        return result is not None

    def wait(self, timeout: Duration | None = None) -> None:
        """Wait until no task is left that could run. Raise `TaskFailed` if a task failed that was not put with
        ``on_failure='continue'``, and `Timeout` after ``timeout``: it names the worker of a running task, and its
        ``holders`` are the running tasks.

        >>> sqlsem.queue("nightly").wait(timeout="1h")  # doctest: +SKIP
        """
        seconds = None if timeout is None else check_duration("timeout", timeout, maximum=LONGEST_SECONDS)
        if not self._wait_until_idle(seconds):
            client = self.claiming.client
            running = run_generator(running_tasks(client, self.name), client.execute_effect)
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
        """Limit how many tasks of this queue, or of this ``key``, run at a time, on all workers together.

        None: no limit (for a key: the one of `set_key_limit`). 0: no task is started. Running tasks are not ended.
        For operators. Raises `ConfigurationError` for an invalid argument, or if this login may not; `Unavailable` if
        the database is out of reach.

        >>> sqlsem.queue("mails").set_limit(10)  # doctest: +SKIP
        >>> sqlsem.queue("mails").set_limit(5, key="tenant-7")  # doctest: +SKIP
        """
        self._set(key, "limit", _count("The limit", limit, 0))

    def set_key_limit(self, limit: int | None) -> None:
        """Limit how many tasks of each key run at a time, except for keys with a limit of their own; otherwise as
        `set_limit`. Tasks without a key are not limited by this.

        >>> sqlsem.queue("mails").set_key_limit(2)  # doctest: +SKIP
        """
        self._set(None, "key_limit", _count("The limit of each key", limit, 0))

    def set_rate(self, limit: int | None, per: Duration | None = None, *, key: str | None = None) -> None:
        """Limit how many tasks of this queue, or of this ``key``, all workers together start in any time window.

        ``per`` is the length of the window, from a millisecond to 24 days. None: no limit (for a key: the one of
        `set_key_rate`). Each attempt counts as a start, also one that a worker returns to the queue. The clock is the
        database's. As in `sqlsem.rate`, a window is stored in a hundred parts: the rate is never exceeded, and a task
        may wait a hundredth of the window too long. Starts before this call count if a rate was set then.

        Rights and errors as for `set_limit`.

        >>> sqlsem.queue("mails").set_rate(1000, per="1m")  # doctest: +SKIP
        >>> sqlsem.queue("mails").set_rate(10, per="1s", key="tenant-7")  # doctest: +SKIP
        """
        self._set(key, "rate", *_rate(limit, per))

    def set_key_rate(self, limit: int | None, per: Duration | None = None) -> None:
        """Limit how many tasks of each key are started in any time window, except for keys with a rate of their own;
        otherwise as `set_rate`. Tasks without a key are not limited by this.

        >>> sqlsem.queue("mails").set_key_rate(100, per="1m")  # doctest: +SKIP
        """
        self._set(None, "key_rate", *_rate(limit, per))

    def set_weight(self, key: str, weight: int | None) -> None:
        """Give a key ``weight`` times the share of the workers that other keys have (None: the same share). Rights and
        errors as for `set_limit`.

        >>> sqlsem.queue("mails").set_weight("tenant-7", 3)  # doctest: +SKIP
        """
        self._set(check_name("The key", key), "weight", _count("The weight", weight, 1))

    def _set(self, key: str | None, setting: str, value: int | None, per_ms: int | None = None) -> None:
        if key is not None:
            check_name("The key", key)
        client = self.claiming.client
        client.with_connection(
            lambda session: session.set_queue(self.name, key, setting, value, per_ms), Capability.QUEUE_LIMITS
        )
        client.queue_changes.notify()

    def limits(self) -> list[QueueLimit]:
        """Return the limits, rates and weights of this queue (first, if it has any) and of its keys."""
        client = self.claiming.client
        return client.with_connection(lambda session: session.queue_limits(self.name), Capability.QUEUE_LIMITS)

    def counts(self) -> QueueCounts | None:
        """Return how many tasks are in each state, the oldest one, the rate, and the task that holds the queue up.
        None if the database has no tasks of it.
        """
        rows = BaseAdmin(self.claiming.client).queues(self.name)
        return rows[0] if rows else None

    def tasks(self, status: str | None = None, *, maximum: int = 100, skip: int = 0) -> list[TaskEntry]:
        """Return up to ``maximum`` tasks: open ones in the order in which they will run, then ended ones, newest first.
        Leave out the first ``skip``.
        """
        return BaseAdmin(self.claiming.client).tasks(self.name, status, maximum=maximum, skip=skip)

    def log(self, task_id: int) -> list[Attempt]:
        """Return every attempt at a task: its worker, start, duration and outcome."""
        return BaseAdmin(self.claiming.client).attempts(task_id)

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"


def _chunks(template: NewTask, bodies: Sequence[tuple[str, str]]) -> Iterator[list[NewTask]]:
    """Yield the tasks of each statement: like ``template``, with these kinds and texts."""
    # (A generator: a hundred thousand objects at once make Python's garbage collection slow.)
    for chunk in in_chunks(bodies, lambda body: len(body[1]), maximum=MAX_CHARACTERS, count=MAX_TASKS):
        yield [template.alike(kind, text) for kind, text in chunk]


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
    """Check the options of `Queue.put`, and return them as a task without a body. Raises `ConfigurationError`."""
    check_count("The order of a task", order, *TASK_BOUNDS["order"])
    check_count("max_attempts", max_attempts, *TASK_BOUNDS["max_attempts"])
    check_count("The priority of a task", priority, *TASK_BOUNDS["priority"])
    if key is not None:
        check_name("The key", key)
    if note is not None:
        check_name("The note", note, MAX_NOTE)
    seconds = check_duration("after", after, maximum=LONGEST_SECONDS)
    pause = check_duration("backoff", backoff, maximum=TASK_BOUNDS["backoff_ms"][1] / 1000)
    for option, unique_key in (("unique", unique), ("replace", replace)):
        if unique_key is not None:
            check_name(f"The key ({option})", unique_key)
    if unique is not None and replace is not None:
        raise ConfigurationError("A task is unique or replaces another one, not both; give it one key")
    on_failure = _check_on_failure("stop" if on_failure is None else on_failure)
    limit = None if time_limit is None else check_duration("time_limit", time_limit, zero=False)
    return NewTask(
        *("json", "null", order, seconds, max_attempts, pause, on_failure, note, limit, unique, replace, key, priority),
        _locks(_listed(locks)),
    )


def _encoded(bodies: Iterable[Any]) -> list[tuple[str, str]]:
    """Return the bodies' kinds and text forms."""
    if not isinstance(bodies, Iterable):
        raise ConfigurationError(f"put_many() takes a list of bodies, not {type(bodies).__name__}; one: put()")
    return [encode(body) for body in bodies]


def _listed(locks: Iterable[AnyLock]) -> list[AnyLock]:
    """Return the locks as a list; a single lock is allowed."""
    if isinstance(getattr(locks, "terms", None), Terms):
        return [cast("AnyLock", locks)]
    if not isinstance(locks, Iterable):
        raise ConfigurationError(f"locks is a list of locks, not {locks!r}; write locks=[sqlsem.write('customers')]")
    return list(locks)


def _locks(locks: Iterable[AnyLock]) -> tuple[TaskLock, ...]:
    """Return the requests of a task with these locks. Raises `ConfigurationError` for locks that a task cannot have."""
    requested: dict[str, TaskLock] = {}
    for lock in locks:
        terms = getattr(lock, "terms", None)
        if not isinstance(terms, Terms):
            raise ConfigurationError(f"locks takes locks, not {lock!r}; write locks=[sqlsem.write('customers')]")
        if terms.timeout is not None or terms.on_lost is not None:
            raise ConfigurationError(
                f"{lock!r} has a timeout or on_lost, which have no effect: a task waits for as long as its locks take"
            )
        for request in terms.requests:
            if isinstance(request, RateRequest):
                raise ConfigurationError(
                    f"{lock!r} is a rate, which is not held; let the task take from it in its own code",
                    resource=request.resource,
                )
            if request.priority is not None:
                raise ConfigurationError(
                    f"{lock!r} has a priority, which locks of tasks do not have; give put() one, or name none here",
                    resource=request.resource,
                )
            if request.resource in requested:
                raise ConfigurationError(
                    f"The locks of a task name {request.resource!r} twice; ask for it once, with a weight",
                    resource=request.resource,
                )
            requested[request.resource] = TaskLock(request.resource, request.access, request.limit, request.weight)
    if len(requested) > MAX_LOCKS:
        raise ConfigurationError(f"A task takes at most {MAX_LOCKS} locks, not {len(requested)}")
    return tuple(requested.values())


def _check_database(locks: Iterable[AnyLock], client: DatabaseClient) -> None:
    """Raise `ConfigurationError` for locks of another database, or if this one has no tasks with locks."""
    client.engine.require(Capability.BLOCKED_TASKS, "put(locks=…)")
    for lock in locks:
        lock_client = lock.terms.given_client
        if lock_client is not None and lock_client is not client:
            raise ConfigurationError(f"{lock!r} is of another coordinator than the queue; its tasks cannot hold it")


def _count(what: str, value: int | None, minimum: int) -> int | None:
    return None if value is None else check_count(what, value, minimum)


def _rate(limit: int | None, per: Duration | None) -> tuple[int | None, int | None]:
    """Check a rate of a queue; return its limit and the milliseconds of its window."""
    if limit is None:
        if per is not None:
            raise ConfigurationError("A rate that is removed has no window; leave per out, or give a limit")
        return None, None
    (window,) = windows_of(check_count("The limit of a rate", limit), per)
    return window.limit, window.ms


def _check_on_failure(value: str) -> str:
    if value not in ("stop", "continue"):
        raise ConfigurationError(f"on_failure is 'stop' or 'continue', not {value!r}")
    return value


def queue(name: str, *, on_failure: str = "stop", coordinator: Coordinated | None = None) -> Queue:
    """Return the work queue of that name; a queue need not be created.

    Args:
        name: 1 to 255 characters.
        on_failure: The default for its tasks; see `Queue.put_many`.
        coordinator: The coordinator of its database; left out, the default one (`sqlsem.configure`).

    Raises `ConfigurationError` for an invalid name.
    """
    return Queue(name, on_failure=on_failure, coordinator=coordinator)
