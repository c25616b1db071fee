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

import importlib
import inspect
import itertools
import json
import logging
import math
import os
import secrets
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from sqlsem.errors import ConfigurationError, Deadlock, LockLost, NotHeld, SqlsemError, TaskFailed, Timeout
from sqlsem.model import MAX_INT, MAX_NOTE, Attempt, Claimed, End, NewTask, QueueState, TaskEntry, check_name, monotonic

if TYPE_CHECKING:
    from sqlsem.coordinator import Coordinator
    from sqlsem.engines.base import Session

__all__ = ["Call", "Queue", "Shell", "Sql", "Task", "Worker", "encode", "queue", "run"]

log = logging.getLogger("sqlsem")

#: Tasks that one statement puts: it must not keep the pings out.
BULK = 500
#: Seconds between two looks at a queue with nothing to do: at first, and at the most.
SHORTEST, LONGEST = 0.003, 0.5
#: What is kept of an error or of a command's output, characters.
MOST_KEPT = 8000
#: Seconds that a command gets to end after it was told to.
PATIENCE = 5.0


# -- bodies -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sql:
    """A task that is SQL text, run on the worker's database in one transaction (or those that the text begins)."""

    text: str


@dataclass(frozen=True, slots=True)
class Shell:
    """A task that is a command for the shell of the worker's host; it fails when its exit status is not 0."""

    command: str


@dataclass(frozen=True, init=False)
class Call:
    """A task that calls a function: its name and the arguments are kept, so it must be importable, and they JSON.

    >>> Call("shutil:rmtree", "/tmp/old", ignore_errors=True).function
    'shutil:rmtree'
    """

    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __init__(self, function: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "function", function if isinstance(function, str) else _name_of(function))
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)
        if not all(part.isidentifier() for part in self.function.replace(":", ".", 1).split(".")) or (
            ":" not in self.function
        ):
            raise ConfigurationError(f"A function is named as package.module:function, not {self.function!r}")


def _name_of(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or "<" in name or module == "__main__":
        raise ConfigurationError(
            f"{function!r} cannot be found by a worker, which imports it by name; use a function (no lambda, none "
            f"defined inside another) of a module that workers can import"
        )
    if _find(f"{module}:{name}") is not function:
        raise ConfigurationError(
            f"{module}:{name} is another function than the one that was given; name it by a string"
        )
    return f"{module}:{name}"


def _find(name: str) -> Any:
    """The object that ``package.module:function`` names."""
    module, _, path = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise ConfigurationError(f"There is no function {name} here: {exc}") from exc
    return found


def encode(body: Any) -> tuple[str, str]:
    """The kind of a body, and its text as it is kept. Raises `ConfigurationError` for what cannot be kept."""
    if isinstance(body, Sql | Shell):
        kind, text = ("sql", body.text) if isinstance(body, Sql) else ("shell", body.command)
        if not isinstance(text, str) or not text.strip():
            raise ConfigurationError(f"The text of a task is empty: {body!r}")
    else:
        if callable(body) and not isinstance(body, Call):
            body = Call(body)
        kind = "json"
        if isinstance(body, Call):
            kind, body = "call", {"function": body.function, "args": body.args, "kwargs": body.kwargs}
        try:
            text = json.dumps(body, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as exc:
            raise ConfigurationError(f"This cannot be kept as JSON: {exc}; put what it is made of") from exc
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError("The text of a task holds half a surrogate pair and is not valid text") from None
    if "\0" in text:
        raise ConfigurationError("The text of a task contains a NUL character, which databases cannot keep")
    return kind, text


#: How to end what a task does.
Stop = Callable[[], None]


def run(
    kind: str, body: str, coordinator: Coordinator, *, started: Callable[[Stop], None] = lambda _: None
) -> str | None:
    """Carry out a task of any kind but JSON; what came of it, as text. Raises whatever goes wrong.

    ``started`` is given a function that ends a command or SQL from another thread.
    """
    if kind == "sql":
        return coordinator._execute(body, lambda session: started(session.cancel_running))
    if kind == "shell":
        return _run_command(body, started)
    if kind == "call":
        wanted = json.loads(body)
        result = _find(wanted["function"])(*wanted["args"], **wanted["kwargs"])
        if inspect.iscoroutine(result):
            result.close()
            raise ConfigurationError(f"{wanted['function']} is a coroutine function; a worker calls plain functions")
        return None if result is None else _as_json(result)
    raise ConfigurationError(f"A worker cannot carry out a task of kind {kind}; claim it with sqlsem.queue(…).claim()")


def _as_json(value: Any) -> str:
    try:
        return _clean(json.dumps(value, allow_nan=False, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return _clean(repr(value)[:MOST_KEPT])


def _clean(text: str) -> str:
    """What any database can keep."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def _run_command(command: str, started: Callable[[Stop], None]) -> str:
    # A session of its own: a Ctrl-C is for the worker, which lets the task end.
    process = subprocess.Popen(  # noqa: S602 - a shell is what the task wants
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=os.name == "posix",
    )
    started(lambda: _end(process))
    try:
        kept = b""
        assert process.stdout is not None
        while chunk := process.stdout.read1(65536):  # type: ignore[attr-defined]
            kept = (kept + chunk)[-4 * MOST_KEPT :]
        status = process.wait()
    except BaseException:
        _end(process)
        raise
    output = kept.decode(errors="replace").replace("\0", "\N{REPLACEMENT CHARACTER}")[-MOST_KEPT:]
    if status != 0:
        raise TaskFailed(f"The command ended with status {status}: {output.strip() or 'it said nothing'}")
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command, and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL) if os.name == "posix" else (None,):
        try:
            if number is None:
                process.kill()
            else:
                os.killpg(process.pid, number)
        except ProcessLookupError:
            pass
        try:
            process.wait(PATIENCE)
            return
        except subprocess.TimeoutExpired:
            continue


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

    def __init__(self, queue: Queue, claimed: Claimed, uid: str) -> None:
        self._ended = False
        self._why_lost: str | None = None
        self._pid = os.getpid()
        self._queue = queue
        self._uid = uid
        self._coordinator = queue._coordinator
        self.lost_event = threading.Event()  # set when the claim is lost
        self.id = claimed.task_id
        self.kind = claimed.kind
        self.order = claimed.order
        self.note = claimed.note
        self.attempt = claimed.attempt
        self.text = claimed.body
        self.began = monotonic()
        self.result: Any = None

    def __del__(self) -> None:
        # An interrupt can strike between the claim and the block that would end it. And what was declared lost may be
        # this member's still, when it came back before anybody gave it up.
        if not self._ended and self._pid == os.getpid():
            self._coordinator._member.leftovers.append(self._returning())

    def _returning(self) -> Callable[[Session, int], int]:
        name, uid = self._queue.name, self._uid
        return lambda session, me: session.return_claim(me, name, uid)

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

    def _lose(self, why: str) -> None:
        self._why_lost = self._why_lost or why
        self.lost_event.set()

    def finish(self, result: Any = None) -> None:
        """End the attempt well. Raises `LockLost` when the claim was lost, `NotHeld` when it was ended before."""
        self._finish(End(self.id, self.attempt, "finished", None if result is None else _as_json(result)))

    def fail(self, error: BaseException | str) -> None:
        """End the attempt as failed. Errors as for `finish`."""
        self._finish(End(self.id, self.attempt, "failed", error=_told(error)))

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
        if self._why_lost is not None and not self._ended and self._pid == os.getpid():
            # Nobody else gets it while our member lives, and that may have outlived the outage.
            self._ended = True
            self._coordinator._member.later(self._returning())
        self._require()
        member = self._coordinator._member
        try:
            status = member.call("end of a task", lambda session, me: session.end_task(me, end), member.seconds_left())
        except BaseException:
            # Whatever is not known to have ended in time ends when the database can be reached again.
            member.later(lambda session, me: session.end_task(me, end))
            self._settle(end.outcome)
            raise
        self._ended_as(end, status)

    def _ended_as(self, end: End, status: str | None) -> None:
        if status is None:
            self._lose("this process was given up meanwhile")
        self._settle(end.outcome)
        if status is None:
            self._require()

    def _settle(self, outcome: str) -> None:
        self._ended = True
        self._coordinator._claims.discard(self)
        self._coordinator.ring()

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


def _told(error: BaseException | str) -> str:
    """An error as the log keeps it: what it says first, then where it happened."""
    if isinstance(error, str):
        told = error
    elif isinstance(error, TaskFailed):
        told = str(error)
    else:
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        trace = "".join(traceback.format_tb(error.__traceback__))
        told = f"{summary}\n{trace[-MOST_KEPT + len(summary[:MOST_KEPT]) :]}".rstrip()
    return _clean(told)[:MOST_KEPT]


# -- queues -----------------------------------------------------------------------------------------------------------


class Queue:
    """A named queue of tasks; see `queue`. May be used from many threads at once."""

    def __init__(self, name: str, *, on_failure: str = "stop", coordinator: Coordinator | None = None) -> None:
        self.name = check_name("The queue's name", name)
        self._on_failure = _check_on_failure(on_failure)
        self._given = coordinator
        self._recovered = 0.0

    @property
    def _coordinator(self) -> Coordinator:
        if self._given is not None:
            return self._given
        from sqlsem import default

        return default()

    def put(
        self,
        body: Any,
        *,
        order: int = 0,
        after: float | timedelta = 0.0,
        max_attempts: int = 1,
        backoff: float = 1.0,
        on_failure: str | None = None,
        note: str | None = None,
    ) -> int:
        """Put one task; returns its number.

        Args:
            body: `Sql`, `Shell`, `Call` or a function for workers; any JSON value for code that claims for itself.
            order: Lower ones first; the task waits until every task of a lower order has ended.
            after: Seconds (or a timedelta) before which it is not claimed.
            max_attempts: How often it is tried before it has failed. (An attempt whose worker dies does not count, up
                to five times.)
            backoff: Seconds before the second attempt, about; twice that before the third, and so on up to 300.
            on_failure: ``'stop'``: a failed task holds up all later orders until somebody retries or cancels it.
                ``'continue'``: it does not. Left out, as the queue has it.
            note: Words for whoever looks at the queue.

        Raises:
            ConfigurationError: What cannot be kept, or not by this login.
            Unavailable: The database is out of reach.

        >>> sqlsem.queue("nightly").put({"table": "customers"}, note="daily")  # doctest: +SKIP
        """
        options = {"order": order, "after": after, "max_attempts": max_attempts, "backoff": backoff}
        return self.put_many([body], **options, on_failure=on_failure, note=note)[0]

    def put_many(self, bodies: Iterable[Any], **options: Any) -> list[int]:
        """Put many tasks, with the options of `put`; returns their numbers. Each 500 are put all or none.

        What cannot be kept is refused before any is put.

        >>> sqlsem.queue("nightly").put_many([sqlsem.Call("etl:load", n) for n in range(20)])  # doctest: +SKIP
        """
        tasks = [self._new(body, **options) for body in bodies]
        numbers: list[int] = []
        for start in range(0, len(tasks), BULK):
            some, uid = tasks[start : start + BULK], secrets.token_hex(12)
            numbers += self._coordinator._member.call(
                "put",
                lambda session, _, some=some, uid=uid: session.put_tasks(self.name, uid, some),  # type: ignore[misc]
            )
            self._coordinator.ring()
        return numbers

    def _new(
        self,
        body: Any,
        *,
        order: int = 0,
        after: float | timedelta = 0.0,
        max_attempts: int = 1,
        backoff: float = 1.0,
        on_failure: str | None = None,
        note: str | None = None,
    ) -> NewTask:
        kind, text = encode(body)
        if isinstance(order, bool) or not isinstance(order, int) or not -MAX_INT <= order <= MAX_INT:
            raise ConfigurationError(f"The order of a task must be a whole number of at most {MAX_INT}, not {order!r}")
        if isinstance(max_attempts, bool) or not isinstance(max_attempts, int) or not 1 <= max_attempts <= MAX_INT:
            raise ConfigurationError(f"max_attempts must be a whole number from 1 on, not {max_attempts!r}")
        if note is not None:
            check_name("The note", note, MAX_NOTE)
        return NewTask(
            kind,
            text,
            order,
            _check_delay("after", after),
            max_attempts,
            _check_delay("backoff", backoff, 300.0),
            self._on_failure if on_failure is None else _check_on_failure(on_failure),
            note,
        )

    def claim(self, wait: float | None = None) -> Iterator[Task]:
        """Claim one task after the other; ends when nothing came for ``wait`` seconds (None: never; 0: at once).

        End each task with its ``with`` block before the next is claimed; leaving the loop is enough to stop.
        Raises `Unavailable` when the database is out of reach for longer than the coordinator's ``retry``.

        >>> for task in sqlsem.queue("nightly").claim(wait=30):  # doctest: +SKIP
        ...     with task:
        ...         load(task.body)
        """
        if wait is not None:
            _check_delay("wait", wait)
        while True:
            task = self._wait_for_one(wait)
            if task is None:
                return
            yield task
            if not task._ended:
                task.give_back()
                raise NotHeld(f"{task!r} was neither finished nor failed; use 'with task:' in the loop")

    def _wait_for_one(self, wait: float | None, stop: threading.Event | None = None) -> Task | None:
        began, pause = monotonic(), SHORTEST
        while stop is None or not stop.is_set():
            rung = self._coordinator.rung
            task = self.try_claim()
            if task is not None:
                return task
            left = math.inf if wait is None else wait - (monotonic() - began)
            if left <= 0:
                return None
            self._coordinator.await_ring(rung, min(pause, left))
            pause = min(pause * 1.5, LONGEST)
        return None

    def try_claim(self) -> Task | None:
        """Claim a task if there is one that may run now."""
        self._recover()
        return self._claim(None)[1]

    def _claim(self, end: End | None) -> tuple[str | None, Task | None]:
        """Claim, and in the same call end what was done before."""
        coordinator, member = self._coordinator, self._coordinator._member
        uid = f"{coordinator._secret}{os.getpid():x}.{next(_numbers)}"
        owner = threading.current_thread().name[:255]
        tried: list[int] = []

        def claim(session: Session, me: int) -> tuple[str | None, Task | None]:
            again = me in tried
            tried.append(me)
            status = None
            if end is None:
                claimed = session.claim_task(me, self.name, owner, uid, again)
            else:
                status, claimed = session.next_task(me, end, self.name, owner, uid, again)
            if claimed is None:
                return status, None
            task = Task(self, claimed, uid)
            coordinator._claims.add(task)
            member.stir()
            return status, task

        try:
            return member.call("claim", claim)
        except BaseException:
            # Interrupted, or the answer never came: what may have been claimed is given back by the pulse.
            if tried:
                member.later(lambda session, me: session.return_claim(me, self.name, uid))
            raise

    def _recover(self, *, now: bool = False) -> None:
        """Now and then, look after tasks whose workers died."""
        coordinator = self._coordinator
        every = max(0.25, min(2.0, coordinator.engine.options.grace / 4))
        if not now and monotonic() - self._recovered < every:
            return
        self._recovered = monotonic()
        try:
            count = coordinator._member.call("recovery", lambda session, me: session.recover_tasks(self.name, me))
        except Deadlock as exc:
            log.info("Looking after the dead again in a moment: %s", exc)
            return
        if count:
            log.warning("%d task%s of %r lost their worker", count, "s" if count > 1 else "", self.name)
            coordinator.ring()

    def state(self) -> QueueState:
        """What is left to do, now."""
        return self._coordinator._member.call("look at a queue", lambda session, _: session.queue_state(self.name))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left that could run; False when that takes longer than ``timeout`` seconds."""
        if timeout is not None:
            _check_delay("timeout", timeout)
        began, pause = monotonic(), SHORTEST
        while True:
            rung = self._coordinator.rung
            state = self.state()
            if state.done or state.stuck:
                return True
            left = math.inf if timeout is None else timeout - (monotonic() - began)
            if left <= 0:
                return False
            self._coordinator.await_ring(rung, min(pause, left))
            pause = min(pause * 1.5, LONGEST)
            self._recover()

    def join(self, timeout: float | None = None) -> None:
        """As `wait`, and raises `TaskFailed` when a task failed that was not put with ``on_failure='continue'``,
        `Timeout` when time is up.

        >>> sqlsem.queue("nightly").join(timeout=3600)  # doctest: +SKIP
        """
        if not self.wait(timeout):
            raise Timeout(
                f"Queue {self.name!r} still has work after {timeout:g} s; see: sqlsem tasks {self.name}",
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
        return self._coordinator.tasks(self.name, status, most=most)

    def log(self, task_id: int) -> list[Attempt]:
        """Every attempt at a task: who, when, how long, how it ended."""
        return self._coordinator.attempts(task_id)

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}>"


_numbers = itertools.count(1)


def _check_on_failure(value: str) -> str:
    if value not in ("stop", "continue"):
        raise ConfigurationError(f"on_failure is 'stop' or 'continue', not {value!r}")
    return value


def _check_delay(what: str, value: float | timedelta, most: float = 3.2e8) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= most:
        raise ConfigurationError(f"{what} must be from 0 to {most:g} seconds, not {value!r}")
    return float(seconds)


def queue(name: str, *, on_failure: str = "stop", coordinator: Coordinator | None = None) -> Queue:
    """The work queue of that name; it need not be made.

    Args:
        name: 1 to 255 characters.
        on_failure: What its tasks have unless they are put otherwise; see `Queue.put`.
        coordinator: Which database; left out, the default one (`sqlsem.configure`).

    Raises `ConfigurationError` for a name that cannot be.
    """
    return Queue(name, on_failure=on_failure, coordinator=coordinator)


# -- workers ----------------------------------------------------------------------------------------------------------


class Worker:
    """Carries out the tasks of one queue in so many threads, until it is stopped or has been idle for long enough.

    Args:
        queue: The queue.
        threads: How many tasks run at a time.
        idle_exit: Leave when nothing could be claimed for so many seconds while nothing ran (None: never).
        on_task: Called with (task, outcome, error) when a task starts (outcome None), and when its attempt has ended
            ('finished', 'failed', 'lost' or 'returned'); from the thread that runs it. What it raises is logged.

    What tasks do is logged (logger ``sqlsem``); errors are kept with the task.

    >>> sqlsem.tasks.Worker(sqlsem.queue("nightly"), threads=4, idle_exit=30).run()  # doctest: +SKIP
    """

    def __init__(
        self,
        queue: Queue,
        threads: int = 1,
        *,
        idle_exit: float | None = None,
        on_task: Callable[[Task, str | None, str | None], None] | None = None,
    ) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1000:
            raise ConfigurationError(f"A worker has from 1 to 1000 threads, not {threads!r}")
        self.queue = queue
        self.threads = threads
        self.idle_exit = None if idle_exit is None else _check_delay("idle_exit", idle_exit)
        self.finished = 0
        self.failed = 0
        self.running: set[Task] = set()
        self._on_task = on_task
        self._lock = threading.Lock()
        self._turnstile = threading.Lock()  # one idle thread looks for all
        self._stopping = threading.Event()
        self._aborted = False
        self._active = monotonic()
        self._stops: dict[int, Stop] = {}  # by task
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Work. Returns when stopped, or idle for long enough; raises what ended it otherwise (`Unavailable`)."""
        self._active = monotonic()
        crew = [
            threading.Thread(target=self._work, name=f"{self.queue.name[:200]}-{number}", daemon=True)
            for number in range(1, self.threads + 1)
        ]
        try:
            for thread in crew:
                thread.start()
            for thread in crew:
                while thread.is_alive():
                    thread.join(0.2)  # bounded, so that signal handlers run on every system
        finally:
            self._stopping.set()
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """Claim nothing more; `run` returns when what runs has ended. May be called from a signal handler."""
        self._stopping.set()

    def abort(self) -> None:
        """End commands and SQL, and give everything back. Python code cannot be ended: end the process next."""
        self._stopping.set()
        with self._lock:
            self._aborted = True
            running, stops = list(self.running), list(self._stops.values())
        # First, lest another worker begin while a command still runs; all at once, as each may take its time.
        ending = [threading.Thread(target=stop, name="sqlsem-end", daemon=True) for stop in stops]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join(3 * PATIENCE)
        for task in running:
            try:
                task.give_back()
            except SqlsemError as exc:
                log.warning("%r could not be given back: %s", task, exc)

    def _work(self) -> None:
        task: Task | None = None
        try:
            while True:
                if task is None:
                    task = self._wait()
                    if task is None:
                        return
                task = self._carry_out(task)
        except BaseException as exc:
            self._errors.append(exc)
            self._stopping.set()

    def _wait(self) -> Task | None:
        while not self._stopping.is_set():
            with self._turnstile:
                if self._stopping.is_set():
                    break
                task = self.queue._wait_for_one(LONGEST, self._stopping)
                if task is not None:
                    with self._lock:
                        self.running.add(task)
                    return task
                with self._lock:
                    if self.running:
                        self._active = monotonic()
                    elif self.idle_exit is not None and monotonic() - self._active >= self.idle_exit:
                        self._stopping.set()
        return None

    def _carry_out(self, task: Task) -> Task | None:
        """Run it, end it, and claim the next in the same call; None when there is none at once."""
        with self._lock:
            self.running.add(task)
        self._tell(task, None, None)
        error = result = None

        def started(stop: Stop) -> None:
            with self._lock:
                self._stops[task.id] = stop
                aborted = self._aborted
            if aborted:
                stop()

        try:
            result = run(task.kind, task.text, self.queue._coordinator, started=started)
        except BaseException as exc:
            # A task that calls sys.exit() has failed, too, and must not end the worker.
            error = _told(exc)
        outcome = "failed" if error is not None else "finished"
        end = End(task.id, task.attempt, outcome, result, error)
        following: Task | None = None
        try:
            if self._aborted and error is not None:
                outcome = "returned"  # by abort, which may be why it failed
            elif self._stopping.is_set() or task.lost:
                task._finish(end)
            else:
                try:
                    self.queue._recover()
                    status, following = self.queue._claim(end)
                except BaseException:
                    member = task._coordinator._member
                    member.later(lambda session, me: session.end_task(me, end))
                    task._settle(outcome)
                    raise
                task._ended_as(end, status)
        except (LockLost, NotHeld) as exc:
            log.warning("%s", exc)
            outcome = "lost"
        finally:
            with self._lock:
                self.running.discard(task)
                self._stops.pop(task.id, None)
                self._active = monotonic()
                self.finished += outcome == "finished"
                self.failed += outcome == "failed"
        if outcome == "failed" and error is not None:
            log.warning("Task %d of %r failed: %s", task.id, self.queue.name, error.partition("\n")[0])
        self._tell(task, outcome, error)
        return following

    def _tell(self, task: Task, outcome: str | None, error: str | None) -> None:
        if self._on_task is not None:
            try:
                self._on_task(task, outcome, error)
            except Exception:
                log.exception("on_task of a worker of %r failed", self.queue.name)
