"""What runs, what waits, and the clock that is waited by: the threads of the operating system.

The core makes its threads, events and locks here, so that `sqlsem.testing.simulate` can run the very same code in
virtual time, one step at a time: it puts a runtime of its own in the place of `THREADS`, for the thread that calls it
and no other.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

__all__ = [
    "THREADS",
    "Condition",
    "Lock",
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


class Lock(Protocol):
    """As `threading.Lock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""

    def release(self) -> None:
        """Give it back."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Condition(Protocol):
    """As much of `threading.Condition` as is used."""

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Sleep until the predicate holds; whether it does."""

    def notify_all(self) -> None:
        """Have all who wait look."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Thread(Protocol):
    """As much of `threading.Thread` as is used."""

    def start(self) -> None:
        """Begin."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""

    def is_alive(self) -> bool:
        """True from its start to its end."""


class Timer(Protocol):
    """As much of `threading.Timer` as is used."""

    def start(self) -> None:
        """Begin."""

    def cancel(self) -> None:
        """Do not call."""


class Queue(Protocol):
    """As much of `queue.SimpleQueue` as is used."""

    def put(self, item: Any) -> None:
        """Have somebody get it."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next one; raises `queue.Empty` where there is none in time."""

    def qsize(self) -> int:
        """How many there are."""


class Runtime:
    """Threads of the operating system.

    Attributes:
        ends: What a thread is ended by that shall end: no fault, and nothing to be caught.
    """

    ends: tuple[type[BaseException], ...] = ()

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back. See `sqlsem.model.monotonic`."""
        return _read_clock()

    def event(self) -> threading.Event:
        """A new event."""
        return threading.Event()

    def lock(self) -> Lock:
        """A new lock under which somebody may wait for something. (Others need not come from here.)"""
        return threading.Lock()

    def condition(self, lock: threading.Lock) -> Condition:
        """A new condition on that lock."""
        return threading.Condition(lock)

    def queue(self) -> Queue:
        """A new queue."""
        return queue.SimpleQueue()

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        """A daemon thread, not started yet. (For `sqlsem.core.threads`, which sees to it that none ends unseen.)"""
        return threading.Thread(target=target, name=name, daemon=True)

    def timer(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Calls after so many seconds, in a thread of its own; not started yet. What that raises is logged at ERROR."""
        timer = threading.Timer(seconds, _call_logged, (call,))
        timer.daemon = True
        return timer

    def namespace(self, local: threading.local) -> dict[str, Any]:
        """What the thread that calls keeps there."""
        return local.__dict__


def _call_logged(call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException:
        log.exception("What a timer was to do failed")


_read_clock: Callable[[], float] = (
    functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
#: What threads have that nothing was put in the place of.
THREADS = Runtime()
_instead: dict[int, Runtime] = {}


def current() -> Runtime:
    """The runtime of the thread that calls."""
    return _instead.get(threading.get_ident(), THREADS) if _instead else THREADS


@contextlib.contextmanager
def instead(runtime: Runtime) -> Iterator[None]:
    """Put another runtime in the place of this thread's, for as long as the block lasts. Raises `RuntimeError` where
    one is there already.
    """
    ident = threading.get_ident()
    if ident in _instead:
        raise RuntimeError("This thread runs in virtual time already: a simulation cannot run in another one")
    _instead[ident] = runtime
    try:
        yield
    finally:
        del _instead[ident]


def monotonic() -> float:
    """Seconds on a clock that never goes back and, where the system has one, also counts time asleep.

    Used only to stop trusting ourselves (never compared with a database's clock): a laptop that slept must not
    believe that no time passed, so Linux's CLOCK_BOOTTIME is preferred to CLOCK_MONOTONIC.
    """
    # (Called several times at every lock, so without a detour where nothing is simulated.)
    return current().monotonic() if _instead else _read_clock()


def event() -> threading.Event:
    """A new event of the runtime that the calling thread has."""
    return current().event()


def namespace(local: threading.local) -> dict[str, Any]:
    """What the thread that calls keeps there, in the runtime that it has."""
    return current().namespace(local) if _instead else local.__dict__


@contextlib.contextmanager
def had_within(lock: Lock, seconds: float) -> Iterator[bool]:
    """Whether the lock was had in so many seconds; it is given back at the end of the block.

    An interrupt strikes after any call that Python code makes. Here no Python code makes the one that takes the lock:
    the interpreter notes its answer before it looks for signals again.
    """
    had: list[bool] = []
    try:
        had.extend(map(lock.acquire, (True,), (seconds,)))
        yield had[0]
    finally:
        if had and had[0]:
            lock.release()


def lock() -> Lock:
    """A new lock of the runtime that the calling thread has."""
    return current().lock()
