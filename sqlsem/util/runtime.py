"""The runtime: threads, events, locks, and the clock.

The client makes all of them here, so that `sqlsem.testing.simulate` can run the same code in virtual time, step by
step. The default runtime is `THREADS`, the threads of the operating system. The simulator sets its own runtime for the
threads of a simulation (`instead`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from sqlsem.util import shutdown

__all__ = [
    "THREADS",
    "Condition",
    "Lock",
    "PerThread",
    "Queue",
    "Runtime",
    "Thread",
    "Timer",
    "current",
    "event",
    "had_within",
    "instead",
    "lock",
    "monotonic",
    "namespace",
]

log = logging.getLogger("sqlsem")
T = TypeVar("T")


class Lock(contextlib.AbstractContextManager[bool], Protocol):
    """A lock with the interface of `threading.Lock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...


class Condition(contextlib.AbstractContextManager[bool], Protocol):
    """The part of `threading.Condition` that sqlsem uses."""

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...


class Thread(Protocol):
    """The part of `threading.Thread` that sqlsem uses."""

    def start(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


class Timer(Protocol):
    """The part of `threading.Timer` that sqlsem uses."""

    def start(self) -> None: ...
    def cancel(self) -> None: ...


class Queue(Protocol):
    """The part of `queue.SimpleQueue` that sqlsem uses."""

    def put(self, item: Any) -> None: ...
    def get(self, block: bool = True, timeout: float | None = None) -> Any: ...
    def qsize(self) -> int: ...


_read_clock: Callable[[], float] = (
    functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)


class _AwaitedThread(threading.Thread):
    """A thread for which the end of the interpreter waits until it runs."""

    def start(self) -> None:
        with shutdown.starting():
            super().start()


class _AwaitedTimer(_AwaitedThread, threading.Timer):
    """A timer for whose thread the end of the interpreter waits until it runs."""


class Runtime:
    """The runtime with threads of the operating system.

    Attributes:
        ends: The exceptions that end a thread on purpose. They are not errors, and code must let them pass.
        monotonic: Returns the seconds of a clock that never goes back; see the function `monotonic`. A client reads
            the clock of the runtime in which it was made, five times for each lock. (So it is no Python function.)
    """

    ends: tuple[type[BaseException], ...] = ()
    monotonic: Callable[[], float] = staticmethod(_read_clock)

    def event(self) -> threading.Event:
        """Return a new event."""
        return threading.Event()

    def lock(self) -> Lock:
        """Return a new lock, for code that may wait while it holds the lock. (Other code may use `threading.Lock`.)"""
        return threading.Lock()

    def condition(self, lock: threading.Lock) -> Condition:
        """Return a new condition on this lock."""
        return threading.Condition(lock)

    def queue(self) -> Queue:
        """Return a new queue."""
        return queue.SimpleQueue()

    def thread(self, target: Callable[[], object], name: str, *, daemon: bool = True) -> Thread:
        """Return a new thread, not started yet. (For `sqlsem.util.threads`, which supervises all threads.)"""
        return _AwaitedThread(target=target, name=name, daemon=daemon)

    def timer(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Return a new timer, not started yet. It calls in a thread of its own, and logs exceptions at ERROR."""
        timer = _AwaitedTimer(seconds, _call_logged, (call,))
        timer.daemon = True
        return timer

    def namespace(self, local: threading.local) -> dict[str, Any]:
        """Return the calling thread's values in ``local``."""
        return local.__dict__


def _call_logged(call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException:
        log.exception("The call of a timer failed")


#: The runtime of all threads for which no other was set by `instead`.
THREADS = Runtime()
_instead: dict[int, Runtime] = {}


def current() -> Runtime:
    """Return the runtime of the calling thread."""
    return _instead.get(threading.get_ident(), THREADS) if _instead else THREADS


@contextlib.contextmanager
def instead(runtime: Runtime) -> Iterator[None]:
    """Set another runtime for the calling thread until the block ends. Raises `RuntimeError` if it has one."""
    ident = threading.get_ident()
    if ident in _instead:
        raise RuntimeError("This thread runs in virtual time already: a simulation cannot run in another one")
    _instead[ident] = runtime
    try:
        yield
    finally:
        del _instead[ident]


def monotonic() -> float:
    """Return the seconds of a clock that never goes back and, if the system has such a clock, also counts time asleep.

    sqlsem compares these times only with each other, never with a database's clock: they tell when the local copy of
    the state is too old to trust. The clock must go on while a laptop sleeps. So Linux's CLOCK_BOOTTIME is preferred to
    CLOCK_MONOTONIC.
    """
    return current().monotonic() if _instead else _read_clock()


def event() -> threading.Event:
    """Return a new event of the calling thread's runtime."""
    return current().event()


def namespace(local: threading.local) -> dict[str, Any]:
    """Return the calling thread's values in ``local``, as its runtime keeps them."""
    return current().namespace(local) if _instead else local.__dict__


class PerThread(Generic[T]):
    """A value for each thread, made by ``make`` when the thread first asks for it, and freed with the thread."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._local = threading.local()

    def get(self) -> T:
        """Return the calling thread's value."""
        values = current().namespace(self._local) if _instead else self._local.__dict__
        if "value" not in values:
            values.setdefault("value", self._make())  # (a signal handler may have made one meanwhile)
        value: T = values["value"]
        return value


@contextlib.contextmanager
def had_within(lock: Lock, seconds: float) -> Iterator[bool]:
    """Yield True if the lock was acquired within ``seconds``; release it at the end of the block.

    An interrupt may come after any call that Python code makes. Here `map`, which is no Python code, calls `acquire`:
    the interpreter stores the result before it handles signals.
    """
    results: list[bool] = []
    try:
        results.extend(map(lock.acquire, (True,), (seconds,)))
        yield results[0]
    finally:
        if results and results[0]:
            lock.release()


def lock() -> Lock:
    """Return a new lock of the calling thread's runtime."""
    return current().lock()
