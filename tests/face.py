"""Wrap the API for asyncio as the one for threads, so that the same bodies test both.

Each calling thread has one task on one event loop. The task makes the calls of its thread, which waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import sqlsem
from sqlsem import aio


class Loop:
    """An event loop in a thread, with a task for each calling thread."""

    def __init__(self) -> None:
        self._runner: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        self._thread.start()
        self._started.wait()
        self._mine = threading.local()

    def _run(self) -> None:
        asyncio.run(self._stay())

    async def _stay(self) -> None:
        self._end = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self._started.set()
        await self._end.wait()

    def call(self, make: Callable[[], Awaitable[Any]]) -> Any:
        """Await something in this thread's task."""
        jobs = getattr(self._mine, "jobs", None)
        if jobs is None:
            jobs = self._mine.jobs = asyncio.Queue()
            asyncio.run_coroutine_threadsafe(self._serve(jobs), self.loop)
        outcome: Future[Any] = Future()
        self.loop.call_soon_threadsafe(jobs.put_nowait, (make, outcome))
        return outcome.result()

    @staticmethod
    async def _serve(jobs: asyncio.Queue[tuple[Callable[[], Awaitable[Any]], Future[Any]]]) -> None:
        while True:
            make, outcome = await jobs.get()
            try:
                outcome.set_result(await make())
            except asyncio.CancelledError as exc:
                outcome.set_exception(exc)
                raise
            except BaseException as exc:
                outcome.set_exception(exc)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Await something in a task of its own."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


class Blocking:
    """An object of the asyncio API for the calls of threads: its coroutine functions block; its results do the same."""

    def __init__(self, loop: Loop, inner: Any) -> None:
        self._loop = loop
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if inspect.iscoroutinefunction(value):
            return lambda *args, **kwargs: self._call(lambda: value(*args, **kwargs))
        return blocking(self._loop, value)

    def _call(self, make: Callable[[], Awaitable[Any]]) -> Any:
        return blocking(self._loop, self._loop.call(make))

    def __enter__(self) -> Any:
        return self._call(self.inner.__aenter__)

    def __exit__(self, *exc: Any) -> None:
        self._call(lambda: self.inner.__aexit__(*exc))

    def __eq__(self, other: object) -> bool:
        return (other.inner if isinstance(other, Blocking) else other) is self.inner

    def __hash__(self) -> int:
        return hash(self.inner)

    def __repr__(self) -> str:
        return repr(self.inner)


class Event(Blocking):
    """An `asyncio.Event`, blocking."""

    def wait(self, timeout: float) -> bool:
        with contextlib.suppress(asyncio.TimeoutError):
            self._loop.run(asyncio.wait_for(self.inner.wait(), timeout))
        is_set: bool = self.inner.is_set()
        return is_set


class Lock(Blocking):
    """`sqlsem.aio.Lock`, blocking."""

    @property
    def grant(self) -> Any:
        async def grant() -> aio.Grant:  # in the task: each task has its own
            return self.inner.grant

        return self._call(grant)


class Leader(Blocking):
    """`sqlsem.aio.Leader`, blocking."""

    def run(self, function: Callable[[Any], Any]) -> Any:
        async def in_a_thread(term: aio.Term) -> Any:
            return await asyncio.to_thread(function, blocking(self._loop, term))

        return self._call(lambda: self.inner.run(in_a_thread))


class Once(Blocking):
    """`sqlsem.aio.Once`, blocking."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        decorated = self.inner(awaited)
        return lambda *args, **kwargs: self._call(lambda: decorated(*args, **kwargs))


KINDS: dict[type, type[Blocking]] = {
    **dict.fromkeys((aio.Grant, aio.Rate, aio.RateGrant, aio.Run, aio.Term), Blocking),
    **{asyncio.Event: Event, aio.Lock: Lock, aio.Leader: Leader, aio.Once: Once},
}


def blocking(loop: Loop, value: Any) -> Any:
    """Return a value of the asyncio API as threads use it."""
    kind = KINDS.get(type(value))
    return value if kind is None else kind(loop, value)


class Face:
    """A coordinator with the locks of ``coordinator.aio``."""

    def __init__(self, loop: Loop, coordinator: sqlsem.Coordinator) -> None:
        self._loop = loop
        self._coordinator = coordinator

    def __getattr__(self, name: str) -> Any:
        if name == "adopt":
            return lambda *args, **kwargs: blocking(
                self._loop, self._loop.call(lambda: self._coordinator.aio.adopt(*args, **kwargs))
            )
        if name not in ("mutex", "limit", "read", "write", "stage", "leader", "rate", "once"):
            return getattr(self._coordinator, name)
        # A cancellation would end the task that serves the test, not the test.
        options = {"cancel_on_lost": False} if name == "leader" else {}
        make = getattr(self._coordinator.aio, name)
        return lambda *args, **kwargs: blocking(self._loop, make(*args, **options, **kwargs))

    def __enter__(self) -> Face:
        return self

    def __exit__(self, *exc: object) -> None:
        self._coordinator.close()


def all_of(*locks: Blocking, **options: Any) -> Any:
    """Return `sqlsem.aio.all_of` of these."""
    lock = aio.all_of(*(lock.inner for lock in locks), **options)
    return blocking(locks[0]._loop, lock)
