"""Wrap the API for asyncio as the one for threads, so that the same bodies test both.

Each calling thread has one task on one event loop. The task makes the calls of its thread, which waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
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


class Grant:
    """`sqlsem.aio.Grant`, blocking."""

    def __init__(self, loop: Loop, grant: aio.Grant) -> None:
        self._loop = loop
        self.inner = grant

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def check(self) -> None:
        self._loop.call(self.inner.check)

    def release(self) -> None:
        self._loop.call(self.inner.release)

    def hand_over(self, **options: Any) -> str:
        token: str = self._loop.call(lambda: self.inner.hand_over(**options))
        return token

    def upgrade(self, **options: Any) -> None:
        self._loop.call(lambda: self.inner.upgrade(**options))

    def downgrade(self) -> None:
        self._loop.call(self.inner.downgrade)

    def adjust(self, actual: int, **options: Any) -> None:
        self._loop.call(lambda: self.inner.adjust(actual, **options))

    def __enter__(self) -> Grant:
        self._loop.call(self.inner.__aenter__)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._loop.call(lambda: self.inner.__aexit__(*exc))

    def assert_held(self, cursor: Any) -> None:
        self._loop.call(lambda: self.inner.assert_held(cursor))

    def release_on_commit(self, cursor: Any) -> None:
        self._loop.call(lambda: self.inner.release_on_commit(cursor))

    @property
    def lost_event(self) -> Event:
        return Event(self._loop, self.inner.lost_event)

    def __eq__(self, other: object) -> bool:
        return (other.inner if isinstance(other, Grant) else other) is self.inner

    def __hash__(self) -> int:
        return hash(self.inner)

    def __repr__(self) -> str:
        return repr(self.inner)


class Event:
    """An `asyncio.Event`, blocking."""

    def __init__(self, loop: Loop, event: asyncio.Event) -> None:
        self._loop = loop
        self._event = event
        self.is_set = event.is_set

    def wait(self, timeout: float) -> bool:
        with contextlib.suppress(asyncio.TimeoutError):
            self._loop.run(asyncio.wait_for(self._event.wait(), timeout))
        return self._event.is_set()


class Lock:
    """`sqlsem.aio.Lock`, blocking."""

    def __init__(self, loop: Loop, lock: aio.Lock) -> None:
        self._loop = loop
        self.inner = lock

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        granted: bool = self._loop.call(lambda: self.inner.acquire(*args, **kwargs))
        return granted

    def release(self) -> None:
        self._loop.call(self.inner.release)

    def locked(self) -> bool:
        locked: bool = self._loop.call(self.inner.locked)
        return locked

    @property
    def grant(self) -> Grant:
        async def grant() -> Grant:
            return Grant(self._loop, self.inner.grant)

        result: Grant = self._loop.call(grant)
        return result

    def __enter__(self) -> Grant:
        return Grant(self._loop, self._loop.call(self.inner.__aenter__))

    def __exit__(self, *exc: Any) -> None:
        self._loop.call(lambda: self.inner.__aexit__(*exc))

    def __repr__(self) -> str:
        return repr(self.inner)


class Term:
    """`sqlsem.aio.Term`, blocking."""

    def __init__(self, loop: Loop, term: aio.Term) -> None:
        self._loop = loop
        self.inner = term
        self.ending = Event(loop, term.ending)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def check(self) -> None:
        self._loop.call(self.inner.check)

    def assert_held(self, cursor: Any) -> None:
        self._loop.call(lambda: self.inner.assert_held(cursor))

    def step_down(self) -> None:
        self._loop.call(self.inner.step_down)

    def __repr__(self) -> str:
        return repr(self.inner)


class Leader:
    """`sqlsem.aio.Leader`, blocking."""

    def __init__(self, loop: Loop, leader: aio.Leader) -> None:
        self._loop = loop
        self.inner = leader

    def current(self) -> Any:
        return self._loop.call(self.inner.current)

    def run(self, function: Callable[[Term], Any]) -> Any:
        async def in_a_thread(term: aio.Term) -> Any:
            return await asyncio.to_thread(function, Term(self._loop, term))

        return self._loop.call(lambda: self.inner.run(in_a_thread))

    def __enter__(self) -> Term:
        return Term(self._loop, self._loop.call(self.inner.__aenter__))

    def __exit__(self, *exc: Any) -> None:
        self._loop.call(lambda: self.inner.__aexit__(*exc))

    def __repr__(self) -> str:
        return repr(self.inner)


class Run:
    """`sqlsem.aio.Run`, blocking."""

    def __init__(self, loop: Loop, run: aio.Run) -> None:
        self._loop = loop
        self.inner = run
        self.grant = Grant(loop, run.grant)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def finish(self) -> None:
        self._loop.call(self.inner.finish)

    def fail(self) -> None:
        self._loop.call(self.inner.fail)


class Once:
    """`sqlsem.aio.Once`, blocking."""

    def __init__(self, loop: Loop, once: aio.Once) -> None:
        self._loop = loop
        self.inner = once

    def _run(self, run: aio.Run | None) -> Run | None:
        return None if run is None else Run(self._loop, run)

    def begin(self, *args: Any, **kwargs: Any) -> Run | None:
        return self._run(self._loop.call(lambda: self.inner.begin(*args, **kwargs)))

    def last(self) -> Any:
        return self._loop.call(self.inner.last)

    def forget(self) -> Any:
        return self._loop.call(self.inner.forget)

    def __enter__(self) -> Run | None:
        return self._run(self._loop.call(self.inner.__aenter__))

    def __exit__(self, *exc: Any) -> None:
        self._loop.call(lambda: self.inner.__aexit__(*exc))

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        decorated = self.inner(awaited)
        return lambda *args, **kwargs: self._loop.call(lambda: decorated(*args, **kwargs))


class RateGrant:
    """`sqlsem.aio.RateGrant`, blocking."""

    def __init__(self, loop: Loop, grant: aio.RateGrant) -> None:
        self._loop = loop
        self.inner = grant

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def adjust(self, actual: int) -> None:
        self._loop.call(lambda: self.inner.adjust(actual))


class Rate:
    """`sqlsem.aio.Rate`, blocking."""

    def __init__(self, loop: Loop, rate: aio.Rate) -> None:
        self._loop = loop
        self.inner = rate

    def take(self, *args: Any, **kwargs: Any) -> RateGrant | None:
        grant = self._loop.call(lambda: self.inner.take(*args, **kwargs))
        return None if grant is None else RateGrant(self._loop, grant)

    def __enter__(self) -> RateGrant:
        return RateGrant(self._loop, self._loop.call(self.inner.__aenter__))

    def __exit__(self, *exc: Any) -> None:
        self._loop.call(lambda: self.inner.__aexit__(*exc))


class Face:
    """A coordinator with the locks of ``coordinator.aio``."""

    def __init__(self, loop: Loop, coordinator: sqlsem.Coordinator) -> None:
        self._loop = loop
        self._coordinator = coordinator

    def __getattr__(self, name: str) -> Any:
        if name == "adopt":
            return lambda *args, **kwargs: Grant(
                self._loop, self._loop.call(lambda: self._coordinator.aio.adopt(*args, **kwargs))
            )
        if name == "leader":  # a cancellation ends the task that serves the test, not the test
            return lambda *args, **kwargs: Leader(
                self._loop, self._coordinator.aio.leader(*args, cancel_on_lost=False, **kwargs)
            )
        if name == "rate":
            return lambda *args, **kwargs: Rate(self._loop, self._coordinator.aio.rate(*args, **kwargs))
        if name == "once":
            return lambda *args, **kwargs: Once(self._loop, self._coordinator.aio.once(*args, **kwargs))
        if name not in ("mutex", "limit", "read", "write", "stage"):
            return getattr(self._coordinator, name)
        return lambda *args, **kwargs: Lock(self._loop, getattr(self._coordinator.aio, name)(*args, **kwargs))

    def __enter__(self) -> Face:
        return self

    def __exit__(self, *exc: object) -> None:
        self._coordinator.close()


def all_of(*locks: Lock | Rate, **options: Any) -> Lock:
    """Return `sqlsem.aio.all_of` of these."""
    lock = aio.all_of(*(lock.inner for lock in locks), **options)
    return Lock(locks[0]._loop, lock)
