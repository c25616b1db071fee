"""Virtual time: each thread of the package is a greenlet here (a fiber). One fiber runs at a time, until it waits.

`Fibers` is a runtime (`sqlsem.util.runtime`). `World` decides which ready fiber runs next (`Fibers.resume`), and sets
the time forward. Nothing else does, so these decisions alone determine a run.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlsem.util.runtime import Condition, Lock, Queue, Runtime, Thread, Timer
from sqlsem.values.errors import ConfigurationError

try:
    import greenlet
except ImportError as exc:
    raise ConfigurationError("Simulations need greenlet; install it with: pip install 'sqlsem[simulate]'") from exc

__all__ = ["Fiber", "Fibers"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Fiber:
    """A thread of a simulated process. ``group``: that process, which is stopped or dead as a whole."""

    number: int
    name: str
    group: Any
    call: Callable[[], object]
    glet: Any = None
    begun: bool = False
    over: bool = False
    ready: bool = False
    deadline: float = math.inf
    error: BaseException | None = None
    names: dict[Any, Any] = field(default_factory=dict)
    where: str = ""  # what it is about to do, or waits for


class Fibers(Runtime):
    """All fibers of a run, and their clock.

    Attributes:
        now: The time, in seconds; `World` sets it forward.
        ended: True when the run ends: a fiber that waits then gets `GreenletExit`.
        traced: True if the run has a trace, for which steps are described.
    """

    ends = (greenlet.GreenletExit,)

    def __init__(self) -> None:
        self.now = 1000.0
        self.ended = False
        self.traced = False
        self.all: list[Fiber] = []
        self.running: Fiber | None = None
        self._hub = greenlet.getcurrent()

    # -- fibers -------------------------------------------------------------------------------------------------------

    def spawn(self, name: str, group: Any, call: Callable[[], object]) -> Fiber:
        """Return a new fiber; it runs when `resume` is called."""
        fiber = Fiber(len(self.all), name, group, call)
        fiber.ready = True
        self.all.append(fiber)
        return fiber

    def resume(self, fiber: Fiber) -> None:
        """Run a fiber until it waits, makes a step, or ends."""
        fiber.ready = False
        fiber.deadline = math.inf
        if not fiber.begun:
            fiber.begun = True
            fiber.glet = greenlet.greenlet(self._run, self._hub)
        self.running = fiber
        try:
            fiber.glet.switch(fiber)
        finally:
            self.running = None

    def _run(self, fiber: Fiber) -> None:
        try:
            fiber.call()
        except greenlet.GreenletExit:
            pass
        except BaseException as exc:
            fiber.error = exc
        fiber.over = True
        fiber.ready = False
        for other in self.all:
            if other.where == f"join {fiber.name}":
                other.ready = True

    def step(self, where: str) -> None:
        """Let other fibers run before the calling fiber goes on. ``where`` says in the trace what it does next."""
        fiber = self.running
        if self.ended:
            raise greenlet.GreenletExit
        if fiber is None:
            return
        fiber.ready = True
        fiber.where = where
        self._hub.switch()
        self._check(fiber)

    def block(self, where: str, seconds: float) -> bool:
        """Wait until the calling fiber's ``ready`` is set, or for ``seconds``. Return True if it was set."""
        fiber = self.running
        if self.ended:
            raise greenlet.GreenletExit
        if fiber is None:
            raise RuntimeError(f"No fiber runs that could wait for {where}: in a simulation only its programs may wait")
        deadline = self.now + max(0.0, seconds)
        fiber.ready = False
        fiber.deadline = deadline
        fiber.where = where
        self._hub.switch()
        self._check(fiber)
        return self.now < deadline

    def _check(self, fiber: Fiber) -> None:
        fiber.where = ""
        if self.ended:
            raise greenlet.GreenletExit

    def sleep(self, seconds: float) -> None:
        """Wait for this long."""
        end = self.now + seconds
        while self.now < end:
            self.block("sleep", end - self.now)

    def end(self) -> None:
        """End all remaining fibers."""
        self.ended = True
        for fiber in self.all:
            if fiber.glet is not None and not fiber.over:
                fiber.over = True
                fiber.glet.throw(greenlet.GreenletExit)

    # -- the runtime --------------------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return self.now

    def event(self) -> threading.Event:
        return _Event(self)

    def lock(self) -> Lock:
        return _Lock(self)

    def condition(self, lock: threading.Lock) -> Condition:
        return _Condition(self, lock)

    def queue(self) -> Queue:
        return _Queue(self)

    def thread(self, target: Callable[[], object], name: str, *, daemon: bool = True) -> Thread:
        return _Thread(self, target, name)

    def timer(self, seconds: float, call: Callable[[], object]) -> Timer:
        return _Timer(self, seconds, call)

    def namespace(self, local: threading.local) -> dict[str, Any]:
        names: dict[str, Any] = {} if self.running is None else self.running.names.setdefault(local, {})
        return names


class _Event(threading.Event):
    """An event in virtual time. (It inherits from threading's class for its type only.)"""

    def __init__(self, fibers: Fibers) -> None:
        self._fibers = fibers
        self._is_set = False
        self._sleepers: list[Fiber] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for fiber in self._sleepers:
            fiber.ready = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None, where: str = "event") -> bool:
        fibers = self._fibers
        if self._is_set:
            return True
        if timeout is not None and timeout <= 0:
            return False
        deadline = math.inf if timeout is None else fibers.now + timeout
        sleeper = fibers.running
        if sleeper is not None:
            self._sleepers.append(sleeper)
        try:
            while not self._is_set and fibers.now < deadline:
                fibers.block(where, deadline - fibers.now)
        finally:
            if sleeper is not None:
                self._sleepers.remove(sleeper)
        return self._is_set


class _Lock:
    def __init__(self, fibers: Fibers) -> None:
        self._fibers = fibers
        self._free = _Event(fibers)
        self._free.set()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        deadline = math.inf if timeout < 0 else self._fibers.now + timeout
        while not self._free.is_set():
            if not blocking or not self._free.wait(deadline - self._fibers.now, "lock"):
                return False
        self._free.clear()
        return True

    def release(self) -> None:
        self._free.set()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class _Condition:
    def __init__(self, fibers: Fibers, lock: threading.Lock) -> None:
        self._lock = lock
        self._event = _Event(fibers)
        self._fibers = fibers

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        deadline = math.inf if timeout is None else self._fibers.now + timeout
        while not predicate():
            remaining = deadline - self._fibers.now
            if remaining <= 0:
                return False
            self._event.clear()
            self._lock.release()
            try:
                self._event.wait(remaining)
            finally:
                self._lock.acquire()
        return True

    def notify_all(self) -> None:
        self._event.set()

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class _Queue:
    def __init__(self, fibers: Fibers) -> None:
        self._items: deque[Any] = deque()
        self._arrived = _Event(fibers)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._arrived.set()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and block:
            self._arrived.clear()
            self._arrived.wait(timeout)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


class _Thread:
    def __init__(self, fibers: Fibers, target: Callable[[], object], name: str) -> None:
        self._fibers, self._target = fibers, target
        running = fibers.running
        self._group = None if running is None else running.group
        self._name = f"{self._group}.{name.removeprefix('sqlsem-')}"
        self._fiber: Fiber | None = None

    def start(self) -> None:
        self._fiber = self._fibers.spawn(self._name, self._group, self._target)

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.over

    def join(self, timeout: float | None = None) -> None:
        fiber, fibers = self._fiber, self._fibers
        deadline = math.inf if timeout is None else fibers.now + timeout
        while fiber is not None and not fiber.over and fibers.now < deadline:
            fibers.block(f"join {fiber.name}", deadline - fibers.now)


class _Timer:
    def __init__(self, fibers: Fibers, seconds: float, call: Callable[[], object]) -> None:
        self._cancelled = fibers.event()
        self._seconds, self._call = seconds, call
        self._thread = fibers.thread(self._run, "sqlsem-timer")

    def _run(self) -> None:
        if not self._cancelled.wait(self._seconds):
            self._call()

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        self._cancelled.set()
