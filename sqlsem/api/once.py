"""Jobs that run once per period, for threads: one caller runs the job, and after a failure the next caller may."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sqlsem.api.locks import Lock
from sqlsem.client.callers import require_no_event_loop, this_thread
from sqlsem.client.effects import run_generator
from sqlsem.client.once import Period, Periodic, release_after_interrupt
from sqlsem.util import late, runtime

if TYPE_CHECKING:
    from sqlsem import aio  # for types only; `_aio` imports it at its first use, so that only asyncio programs load it
    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.grants import Grant
    from sqlsem.values.locks import Duration, OnceEntry

F = TypeVar("F", bound=Callable[..., Any])


class Run:
    """The one run of a period. It ends by `finish` or `fail`, or with the block of its `Once`.

    Attributes:
        name: The name given to `sqlsem.once`.
        grant: The grant of the mutex ``once:<name>``, which the run holds until it ends.
    """

    def __init__(self, client: DatabaseClient, period: Period, lock: Lock, grant: Grant) -> None:
        self.name = period.name
        self.grant = grant
        self._client = client
        self._period = period
        self._lock = lock

    @property
    def fence(self) -> int:
        """A number that grows with every run; store it with what you write, and refuse smaller ones."""
        return self.grant.fence

    def finish(self) -> None:
        """End the run as finished: no other run takes place in this period. Raises `LockLost` if the lock was lost
        before, and `Unavailable`; then another run may take place.
        """
        try:
            self._mark()
        finally:
            self.grant.release()

    def fail(self) -> None:
        """End the run as failed: the next caller may run at once. Raises `LockLost` if the lock was lost before."""
        self.grant.release()

    def _mark(self) -> None:
        run_generator(self._period.mark(self._client, self.grant), self._client.execute_effect)

    def _leave(self, exc: BaseException | None) -> None:
        if self.grant.state.released:
            return  # by `finish` or `fail`, inside the block
        try:
            if exc is None:
                self._mark()
        except BaseException as error:
            self._lock.__exit__(type(error), error, None)
            raise
        self._lock.__exit__(None if exc is None else type(exc), exc, None)

    def __repr__(self) -> str:
        return f"<Run {self.name!r}, {self.grant!r}>"


class Once:
    """A job that runs once per period; made by `sqlsem.once`. Several threads may use it, again and again."""

    def __init__(self, periodic: Periodic) -> None:
        self._periodic = periodic
        self._runs: runtime.PerThread[list[Run | None]] = runtime.PerThread(list)

    def begin(self, blocking: bool = True, timeout: Duration | None = -1) -> Run | None:
        """Return the run, which the caller ends by `Run.finish` or `Run.fail`; None if the job is done for this
        period, or another run did not end in time.

        Args:
            blocking: False does not wait for another run.
            timeout: How long to wait for another run, which may fail; None or -1 for ever. Left out, the timeout of
                `sqlsem.once` applies.

        Raises `Deadlock` if this thread runs the job already, and `Unavailable`.

        >>> run = sqlsem.once("report", per="1d").begin(blocking=False)  # doctest: +SKIP
        """
        return self._begin(self._periodic.terms.seconds(blocking, timeout))[0]

    def _begin(self, timeout: float | None) -> tuple[Run | None, bool]:
        """Return the run, if this caller runs; and True if another run did not end in time."""
        require_no_event_loop("once()", "use 'async with', or sqlsem.aio.once(…)")
        client, period = self._periodic.client, self._periodic.period
        if not run_generator(period.due(client, None), client.execute_effect):
            return None, False
        lock = Lock(self._periodic.terms)
        try:
            if not lock.acquire(timeout=timeout):
                return None, True
            grant = lock.grant
            if run_generator(period.due(client, grant), client.execute_effect):
                return Run(client, period, lock, grant), False
            lock.release()
        except BaseException:
            release_after_interrupt(lock)
            raise
        return None, False

    def last(self) -> OnceEntry | None:
        """Return the last run and its process; None: never. Raises `Unavailable`."""
        return self._periodic.last()

    def forget(self) -> bool:
        """Delete the record of the last run, so that the job may run again in this period (also after the database's
        clock was ahead for a while). Return True if there was a record. Raises `Unavailable`.
        """
        return self._periodic.forget()

    def __enter__(self) -> Run | None:
        runs = self._runs.get()
        run, late = self._begin(self._periodic.terms.timeout)
        if late:
            terms = self._periodic.terms
            raise run_generator(
                terms.timeout_error(terms.requests, this_thread()), self._periodic.client.execute_effect
            )
        runs.append(run)
        return run

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        run = self._runs.get().pop()
        if run is not None:
            run._leave(exc)

    @functools.cached_property
    def _aio(self) -> aio.Once:
        with late.importing:
            from sqlsem import aio  # at the first use only

        aio_once: aio.Once = self.__dict__.setdefault("_awaited", aio.Once(self._periodic))
        return aio_once

    async def __aenter__(self) -> aio.Run | None:
        return await self._aio.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object
    ) -> None:
        await self._aio.__aexit__(exc_type, exc, traceback)

    def __call__(self, function: F) -> F:
        """Decorate a function or method, or a coroutine function: it is called once per period, and other calls return
        None. Raises `ConfigurationError` for generators and classes, which cannot be decorated.
        """
        with late.importing:
            from sqlsem.client import decorated  # wrapt takes longer to load than sqlsem

        if decorated.is_coroutine(function):
            return decorated.run_once_awaiting(function, self._aio)
        return decorated.run_once(function, self)

    def __repr__(self) -> str:
        return f"<Once {self._periodic}>"
