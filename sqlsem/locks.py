"""The face for threads: locks as context managers, decorators, and ``acquire``/``release``.

The same objects serve tasks: ``async with`` and decorated coroutine functions go to `sqlsem.aio`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import wrapt

from sqlsem.coordinator import Coordinator, Grant, LostCallback
from sqlsem.errors import ConfigurationError, NotHeld, Timeout
from sqlsem.model import READ, WRITE, Request, check_count, check_seconds

if TYPE_CHECKING:
    from sqlsem import aio

__all__ = ["Lock", "all_of", "limit", "mutex", "read", "stage", "write"]

F = TypeVar("F", bound=Callable[..., Any])
#: A resource's name, or a function that computes it from the arguments of a decorated function's call.
Name = str | Callable[..., str]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request whose name may still have to be computed."""

    name: Name
    request: Request  # complete when the name is a string

    def resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
        if isinstance(self.name, str):
            return self.request
        return replace(self.request, resource=self.name(*args, **kwargs))


class Lock:
    """One or more requests that can be had and given back again and again, by many threads at once.

    Made by `mutex`, `limit`, `read`, `write`, `stage` and `all_of`. Each thread has its own grant; what a thread
    acquired, that thread releases. With ``async with``, and around coroutine functions, each task has.

    As `threading.Lock`, `RLock` (``reentrant=True``) and `Semaphore` (`limit`), but: taking again what one holds raises
    `Deadlock` instead of hanging; who did not acquire releases through the grant only; releasing what is free always
    raises `NotHeld` (a `RuntimeError`), and never counts up; there is no ``locked()``; and a lock may be lost.
    """

    def __init__(
        self,
        asked: Sequence[_Asked],
        *,
        coordinator: Coordinator | None,
        timeout: float | None,
        reentrant: bool,
        on_lost: LostCallback | None,
        cancel_on_lost: bool,
    ) -> None:
        self._asked = tuple(asked)
        self._coordinator = coordinator
        self._timeout = None if timeout is None else check_seconds("timeout", timeout)
        self._reentrant = reentrant
        self._on_lost = on_lost
        self._cancel_on_lost = cancel_on_lost
        self._mine = threading.local()
        # Resolved once, unless a name must be computed.
        self._requests = (
            tuple(asked.request for asked in self._asked)
            if all(isinstance(asked.name, str) for asked in self._asked)
            else None
        )

    # -- acquire and release ------------------------------------------------------------------------------------

    def acquire(self, blocking: bool = True, timeout: float | None = -1) -> bool:
        """As `threading.Lock.acquire`: True when had, False when not.

        Args:
            blocking: False tries without waiting (and then takes no timeout).
            timeout: Seconds to wait at most; None or -1 for ever. Left out, the lock's own ``timeout`` holds.

        Raises:
            Deadlock: This thread holds it already (unless ``reentrant=True``).
            Unavailable: The database is out of reach.
        """
        return self._acquire(self._fixed(), self._seconds(blocking, timeout)) is not None

    def _seconds(self, blocking: bool, timeout: float | None) -> float | None:
        if not blocking:
            if timeout is not None and timeout != -1:
                raise ConfigurationError("A call that does not block takes no timeout")
            return 0.0
        if timeout == -1:
            return self._timeout
        return None if timeout is None else check_seconds("timeout", timeout)

    def release(self) -> None:
        """Give back what this thread acquired last with this lock.

        Raises `NotHeld` when this thread has nothing to give back, `LockLost` when the lock was lost meanwhile.
        """
        stack = self._stack()
        if not stack:
            raise NotHeld(
                f"{self!r} is not held by this thread ({threading.current_thread().name}); it is released by the "
                f"thread that acquired it, or from any thread through its grant (grant.release())"
            )
        # No call between looking and 'try': an interrupt must not part the grant from the stack.
        grant = stack[-1]
        try:
            grant.release()
        except BaseException:
            if not grant._released:  # a signal handler's exception, of whatever kind, came first
                grant._abandon()
            raise
        finally:
            if stack and stack[-1] is grant:
                del stack[-1]

    def _let_go(self, grant: Grant | None) -> None:
        """Interrupted on the way out of a block: its grant (None: the last one) is given back all the same."""
        stack = self._stack()
        if stack and (grant is None or stack[-1] is grant):
            grant = stack.pop()
            if not grant._released:
                grant._abandon()

    @property
    def grant(self) -> Grant:
        """This thread's grant. Raises `NotHeld` when it has none."""
        stack = self._stack()
        if not stack:
            raise NotHeld(f"{self!r} is not held by this thread ({threading.current_thread().name})")
        return stack[-1]

    def _stack(self) -> list[Grant]:
        stack: list[Grant] = self._mine.__dict__.setdefault("stack", [])
        return stack

    def _fixed(self) -> Sequence[Request]:
        if self._requests is None:
            raise ConfigurationError(
                "The name of this lock is computed from a call's arguments, so it can only decorate functions; "
                "use a string here"
            )
        return self._requests

    def _acquire(self, requests: Sequence[Request], timeout: float | None) -> Grant | None:
        asyncio = sys.modules.get("asyncio")
        if asyncio is not None and asyncio._get_running_loop() is not None:
            raise ConfigurationError(
                f"{self!r} would block the event loop that runs in this thread; use 'async with', "
                f"await sqlsem.aio.mutex(…).acquire(), or a thread (asyncio.to_thread)"
            )
        if self._cancel_on_lost:
            raise ConfigurationError("cancel_on_lost=True is for tasks ('async with'); a thread is told by on_lost=")
        coordinator = self._coordinator or _default()
        return coordinator.acquire(
            requests, timeout, reentrant=self._reentrant, on_lost=self._on_lost, keep=self._stack()
        )

    def _enter(self, requests: Sequence[Request]) -> Grant:
        grant = self._acquire(requests, self._timeout)
        if grant is None:
            raise self._too_late(requests)
        return grant

    def _too_late(self, requests: Sequence[Request]) -> Timeout:
        names = ", ".join(request.describe() for request in requests)
        return Timeout(
            f"Did not get {names} within {self._timeout:g} s; see who holds it with: sqlsem ls",
            resource=requests[0].resource,
        )

    def __enter__(self) -> Grant:
        stack = self._stack()
        depth = len(stack)
        try:
            return self._enter(self._fixed())
        except BaseException:
            while len(stack) > depth:  # interrupted on the way out, with the lock had
                self.release()
            raise

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        grant = None
        try:
            stack = self._stack()
            grant = stack[-1] if stack else None
            self.release()
        except BaseException as struck:
            self._let_go(grant)
            # What went wrong inside matters more; a lost lock has been logged, and called on_lost, when it was lost.
            if exc is None or not isinstance(struck, Exception):
                raise

    # -- with asyncio -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _aio(self) -> aio.Lock:
        from sqlsem import aio

        # (Before 3.12 cached_property locks; since, two threads may both come here, and must get the same one.)
        made: aio.Lock = self.__dict__.setdefault("_awaited", aio.Lock(self))
        return made

    async def __aenter__(self) -> aio.Grant:
        return await self._aio.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object
    ) -> None:
        await self._aio.__aexit__(exc_type, exc, traceback)

    # -- decorator ----------------------------------------------------------------------------------------------

    def __call__(self, function: F) -> F:
        """Decorate a function or method: each call holds the lock.

        A coroutine function is held as by ``async with``. Raises `ConfigurationError` for what cannot be guarded this
        way: generators, asynchronous ones too, and classes.
        """
        inner = inspect.unwrap(getattr(function, "__func__", function))
        name = getattr(inner, "__qualname__", repr(inner))
        if inspect.isclass(inner) or not callable(inner):
            raise ConfigurationError(f"A lock decorates functions and methods, not {name}")
        kinds = (inner, getattr(inner, "__call__", None))  # noqa: B004  (of an object, the method behind it)
        if any(map(inspect.isgeneratorfunction, kinds)):
            raise ConfigurationError(
                f"{name} is a generator: its body runs long after the call returns, when the lock would be gone; "
                f"use 'with' inside it, or decorate the function that consumes it"
            )
        if any(map(inspect.isasyncgenfunction, kinds)):
            raise ConfigurationError(
                f"{name} is an asynchronous generator: its body runs long after the call returns, when the lock would "
                f"be gone; use 'async with' inside it, or decorate the coroutine function that consumes it"
            )

        @wrapt.decorator
        async def awaited(
            wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            requests = self._requests_of(instance, args, kwargs)
            await self._aio._enter(requests)
            try:
                result = await wrapped(*args, **kwargs)
            except BaseException as exc:
                await self._aio.__aexit__(type(exc), exc, None)
                raise
            await self._aio.__aexit__(None, None, None)
            return result

        @wrapt.decorator
        def guarded(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._enter(self._requests_of(instance, args, kwargs))
            try:
                result = wrapped(*args, **kwargs)
            except BaseException as exc:
                self.__exit__(type(exc), exc, None)
                raise
            self.__exit__(None, None, None)
            if inspect.iscoroutine(result):
                result.close()
                raise ConfigurationError(
                    f"{name} returned a coroutine, whose body would run when the lock is gone; decorate a coroutine "
                    f"function ('async def'), or use 'async with' inside it"
                )
            return result

        return cast(F, (awaited if any(map(inspect.iscoroutinefunction, kinds)) else guarded)(function))

    def _requests_of(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Request]:
        # A name is computed from all that the function is given, self or cls included.
        given = args if instance is None else (instance, *args)
        return self._requests or [asked.resolve(given, kwargs) for asked in self._asked]

    def __repr__(self) -> str:
        names = [asked.request.describe() if isinstance(asked.name, str) else "computed name" for asked in self._asked]
        return f"<Lock {', '.join(names)}>"


def _default() -> Coordinator:
    from sqlsem import default

    return default()


def _lock(
    name: Name,
    access: str,
    limit: int | None,
    *,
    weight: int = 1,
    note: str | None = None,
    timeout: float | None = None,
    reentrant: bool = False,
    on_lost: LostCallback | None = None,
    cancel_on_lost: bool = False,
    coordinator: Coordinator | None = None,
) -> Lock:
    # A stand-in lets everything but a computed name be checked at once.
    resource = name if isinstance(name, str) or not callable(name) else "computed"
    request = Request(resource, access, limit, weight, note)
    return Lock(
        [_Asked(name, request)],
        coordinator=coordinator,
        timeout=timeout,
        reentrant=reentrant,
        on_lost=on_lost,
        cancel_on_lost=cancel_on_lost,
    )


def mutex(
    name: Name,
    *,
    note: str | None = None,
    timeout: float | None = None,
    reentrant: bool = False,
    on_lost: LostCallback | None = None,
    cancel_on_lost: bool = False,
    coordinator: Coordinator | None = None,
) -> Lock:
    """One at a time, everywhere, in the order of asking.

    Args:
        name: The resource, 1 to 255 characters; or, for a decorator, a function of the call's arguments that gives it.
        note: Words for whoever looks at the queue (``sqlsem ls``).
        timeout: Seconds that ``with`` waits before `Timeout`; None for ever.
        reentrant: Let a thread that holds it take it again.
        on_lost: Called with the grant, from another thread, when the lock is lost.
        cancel_on_lost: With ``async with``: cancel the task when the lock is lost; its block then ends with `LockLost`.
        coordinator: Which database; left out, the default one (`sqlsem.configure`).

    Raises:
        Timeout: Not had in time (``with`` and decorator; `Lock.acquire` returns False).
        LockLost: On leaving the block, when the lock was lost inside it.
        ConfigurationError: A name that cannot be.

    >>> with sqlsem.mutex("nightly", timeout=60) as grant:  # doctest: +SKIP
    ...     load(fence=grant.fence)
    """
    return _lock(
        name,
        WRITE,
        1,
        note=note,
        timeout=timeout,
        reentrant=reentrant,
        on_lost=on_lost,
        cancel_on_lost=cancel_on_lost,
        coordinator=coordinator,
    )


def limit(name: Name, limit: int, *, weight: int = 1, **options: Any) -> Lock:
    """At most ``limit`` at a time, everywhere; ``weight`` takes several of them at once.

    A heavy request at the head of the queue holds back lighter ones behind it, so it is never starved. Where others
    declare another limit for the same resource, the lowest of those in the queue ahead counts. Options as for `mutex`.

    >>> @sqlsem.limit("etl", 3)  # doctest: +SKIP
    ... def load(table): ...
    """
    check_count("The limit", limit)
    return _lock(name, WRITE, limit, weight=weight, **options)


def read(name: Name, **options: Any) -> Lock:
    """Beside other readers, but no writer; a writer that waits holds later readers back. Options as for `mutex`."""
    return _lock(name, READ, 1, **options)


def write(name: Name, **options: Any) -> Lock:
    """Alone: no reader, no other writer. Options as for `mutex`."""
    return _lock(name, WRITE, 1, **options)


def stage(name: Name, order: int, **options: Any) -> Lock:
    """Beside others of the same order; waits for every earlier entry of another order. Options as for `mutex`."""
    if isinstance(order, bool) or not isinstance(order, int):
        raise ConfigurationError(f"The order of a stage must be a whole number, not {order!r}")
    return _lock(name, f"stage:{order}", 1, **options)


def all_of(
    *locks: Lock,
    timeout: float | None = None,
    reentrant: bool = False,
    on_lost: LostCallback | None = None,
    cancel_on_lost: bool = False,
) -> Lock:
    """Several locks as one: all numbers are taken at once, so that two such locks never wait for each other.

    The locks must be on different resources of one database; what they say of ``timeout``, ``reentrant``, ``on_lost``
    and ``cancel_on_lost`` does not count here.

    >>> with sqlsem.all_of(sqlsem.mutex("a"), sqlsem.limit("b", 2)):  # doctest: +SKIP
    ...     move()
    """
    if not locks:
        raise ConfigurationError("all_of needs at least one lock")
    if any(lock._coordinator is not locks[0]._coordinator for lock in locks):
        raise ConfigurationError("all_of takes locks of one database only: several cannot be asked in one transaction")
    asked = [one for lock in locks for one in lock._asked]
    names = [one.name for one in asked if isinstance(one.name, str)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"all_of names {name!r} twice; ask for it once, with a weight", resource=name)
    return Lock(
        asked,
        coordinator=locks[0]._coordinator,
        timeout=timeout,
        reentrant=reentrant,
        on_lost=on_lost,
        cancel_on_lost=cancel_on_lost,
    )
