"""The face for threads: locks as context managers, decorators, and ``acquire``/``release``.

The same objects serve tasks: ``async with`` and decorated coroutine functions go to `sqlsem.aio`.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sqlsem import protocol
from sqlsem.coordinator import Coordinator, Grant
from sqlsem.errors import ConfigurationError, NotHeld, Timeout
from sqlsem.model import READ, WRITE, Duration, Request, check_count, check_duration
from sqlsem.options import GroupOptions, LostCallback, ModuleLockOptions, check_options

if TYPE_CHECKING:
    from types import FrameType

    from typing_extensions import Unpack

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

    As `threading.Lock`, `RLock` (``reentrant=True``) and `Semaphore` (`limit`), but: taking a mutex again that one
    holds raises `Deadlock` instead of hanging; a mutex is released by whoever acquired it, or through its grant;
    releasing what is free always raises `NotHeld` (a `RuntimeError`), and never counts up; and a lock may be lost.

    Can be pickled, when it is of the default coordinator; in the other process, that must be the same database.
    """

    def __init__(
        self,
        asked: Sequence[_Asked],
        *,
        coordinator: Coordinator | None = None,
        timeout: Duration | None = None,
        reentrant: bool = False,
        on_lost: LostCallback | None = None,
        cancel_on_lost: bool = False,
        semaphore: bool = False,
    ) -> None:
        self._asked = tuple(asked)
        self._coordinator = coordinator
        self._timeout = None if timeout is None else check_duration("timeout", timeout)
        self._reentrant = reentrant
        self._on_lost = on_lost
        self._cancel_on_lost = cancel_on_lost
        self._mine = threading.local()
        # As of a semaphore, what one thread acquired, and no block holds, any other thread may release.
        self._semaphore = semaphore and not reentrant
        self._loose: dict[Grant, Grant] = {}
        # Resolved once, unless a name must be computed.
        self._requests = (
            tuple(asked.request for asked in self._asked)
            if all(isinstance(asked.name, str) for asked in self._asked)
            else None
        )

    def __reduce__(self) -> tuple[Any, ...]:
        if self._coordinator is not None:
            raise ConfigurationError(
                f"{self!r} is of a coordinator, whose URL may hold a password, and cannot be pickled; make the lock in "
                f"the process that uses it, or choose the database there by sqlsem.configure or $SQLSEM_URL"
            )
        options = {
            "timeout": self._timeout,
            "reentrant": self._reentrant,
            "on_lost": self._on_lost,
            "cancel_on_lost": self._cancel_on_lost,
            "semaphore": self._semaphore,
        }
        return _unpickled, (type(self), self._asked, options, _default().engine.where)

    # -- acquire and release ------------------------------------------------------------------------------------

    def acquire(self, blocking: bool = True, timeout: Duration | None = -1) -> bool:
        """As `threading.Lock.acquire`: True when had, False when not.

        Args:
            blocking: False tries without waiting (and then takes no timeout).
            timeout: How long to wait at most; None or -1 for ever. Left out, the lock's own ``timeout`` holds.

        Raises:
            Deadlock: This thread holds it already (unless ``reentrant=True``; a `limit` may be taken several times
                while there is room), or is one of several who wait for each other. Never when it does not wait.
            Unavailable: The database is out of reach.
        """
        grant = self._acquire(self._fixed(), self._seconds(blocking, timeout))
        if grant is not None and self._semaphore:
            self._loosen(grant)
        return grant is not None

    def _seconds(self, blocking: bool, timeout: Duration | None) -> float | None:
        if not blocking:
            if timeout is not None and timeout != -1:
                raise ConfigurationError("A call that does not block takes no timeout")
            return 0.0
        if timeout == -1:
            return self._timeout
        return None if timeout is None else check_duration("timeout", timeout)

    def locked(self) -> bool:
        """Whether somebody who holds nothing of it would now try in vain (``acquire(blocking=False)``): it is full, or
        paused, or others wait for it. Asks the database; as with `threading.Lock.locked`, the answer may be old when it
        is read, so it is for people and not for decisions.

        Raises `Unavailable` when the database is out of reach.
        """
        self._require_no_loop("aio.mutex(…).locked()")
        coordinator = self._coordinator or _default()
        return protocol.drive(coordinator._locked(self._fixed()), coordinator._perform)

    def release(self, n: int = 1) -> None:
        """Give back what this thread acquired last with this lock. Of a `limit`, as of a semaphore, a thread that has
        nothing of it gives back what another one acquired (by `acquire` of this object, not by ``with``); ``n``: so
        many, one after the other.

        Raises `NotHeld` when there is nothing to give back, `LockLost` when the lock was lost meanwhile.
        """
        for _ in range(self._check_number(n)):
            self._release()

    def _check_number(self, n: int) -> int:
        if n != 1 and not self._semaphore:
            raise ConfigurationError(f"{self!r} is released once for each time that it was acquired; n is for limits")
        return check_count("The number to release", n)

    def _release(self) -> None:
        stack = self._stack()
        while stack and self._is_taken(stack[-1]):
            stack.pop()
        if not stack:
            grant = self._anybodys()
            if grant is None:
                raise NotHeld(
                    f"{self!r} is not held by this thread ({threading.current_thread().name}); it is released by the "
                    f"thread that acquired it, or from any thread through its grant (grant.release())"
                )
        else:
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

    # What may be released by anybody stands in one dictionary: whoever pops it there is who releases it.

    def _loosen(self, grant: Grant) -> None:
        for one in list(self._loose):
            if one._released:  # through the grant itself
                self._loose.pop(one, None)
        grant._is_loose = True
        self._loose[grant] = grant

    def _is_taken(self, grant: Grant) -> bool:
        """Whether another thread has released what this one had; if not, it cannot from now on."""
        return grant._is_loose and self._loose.pop(grant, None) is None

    def _anybodys(self) -> Grant | None:
        """What was acquired longest ago by another thread, and is now ours to release."""
        for one in list(self._loose):
            grant = self._loose.pop(one, None)
            if grant is not None and not grant._released and grant._pid == os.getpid():
                return grant
        return None

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
        while stack and stack[-1]._is_loose and stack[-1] not in self._loose:  # another one has released it
            stack.pop()
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
        self._require_no_loop("aio.mutex(…).acquire()")
        if self._cancel_on_lost:
            raise ConfigurationError("cancel_on_lost=True is for tasks ('async with'); a thread is told by on_lost=")
        coordinator = self._coordinator or _default()
        return coordinator.acquire(
            requests, timeout, reentrant=self._reentrant, on_lost=self._on_lost, keep=self._stack()
        )

    def _require_no_loop(self, instead: str) -> None:
        asyncio = sys.modules.get("asyncio")
        if asyncio is not None and asyncio._get_running_loop() is not None and not _in_notebook_cell():
            raise ConfigurationError(
                f"{self!r} would block the event loop that runs in this thread; use 'async with', "
                f"await sqlsem.{instead}, or a thread (asyncio.to_thread)"
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
                self._release()
            raise

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        grant = None
        try:
            stack = self._stack()
            grant = stack[-1] if stack else None
            self._release()
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

        from sqlsem.decorated import Decorated  # wrapt takes longer to load than all of ours

        return cast(F, Decorated(function, awaited if any(map(inspect.iscoroutinefunction, kinds)) else guarded))

    def _requests_of(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Request]:
        # A name is computed from all that the function is given, self or cls included.
        given = args if instance is None else (instance, *args)
        return self._requests or [asked.resolve(given, kwargs) for asked in self._asked]

    def __repr__(self) -> str:
        names = [asked.request.describe() if isinstance(asked.name, str) else "computed name" for asked in self._asked]
        return f"<Lock {', '.join(names)}>"


def _unpickled(kind: type[Lock], asked: Sequence[_Asked], options: dict[str, Any], where: str) -> Lock:
    here = _default().engine.where
    if here != where:
        raise ConfigurationError(
            f"A lock was pickled where the default database was {where}, and here it is {here}: that would be another "
            f"lock; call sqlsem.configure in this process too (multiprocessing: initializer=), or set $SQLSEM_URL"
        )
    return kind(asked, **options)


def _in_notebook_cell() -> bool:
    """Whether a cell of a notebook calls us, and not a task. IPython runs cells in its event loop, and whatever blocks
    in a cell blocks that, as everybody there knows; a task must not.
    """
    if "IPython" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "IPython.core.interactiveshell":
            return True
        if module.startswith("asyncio."):
            return False
        frame = frame.f_back
    return False


def _default() -> Coordinator:
    from sqlsem import default

    return default()


_LOCK_OPTIONS = ModuleLockOptions.__optional_keys__
_GROUP_OPTIONS = GroupOptions.__optional_keys__


def _lock(
    kind: str,
    name: Name,
    access: str,
    limit: int | None,
    options: ModuleLockOptions,
    weight: int = 1,
) -> Lock:
    check_options(f"{kind}()", options, _LOCK_OPTIONS)
    # A stand-in lets everything but a computed name be checked at once.
    resource = name if isinstance(name, str) or not callable(name) else "computed"
    request = Request(resource, access, limit, weight, options.pop("note", None))
    return Lock([_Asked(name, request)], semaphore=kind == "limit", **options)  # type: ignore[misc]


def mutex(name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """One at a time, everywhere, in the order of asking.

    Args:
        name: The resource, 1 to 255 characters; or, for a decorator, a function of the call's arguments that gives it.
        options: All of them may be left out:

            note: Words for whoever looks at the queue (``sqlsem ls``).
            timeout: How long ``with`` waits before `Timeout`: seconds, ``"10m"``, a `timedelta`; None (the default) for
                ever.
            reentrant: Let a thread that holds it take it again.
            on_lost: Called with the grant, from another thread, when the lock is lost.
            cancel_on_lost: With ``async with``: cancel the task when the lock is lost; its block then ends with
                `LockLost`.
            coordinator: Which database; left out, the default one (`sqlsem.configure`).

    Raises:
        Timeout: Not had in time (``with`` and decorator; `Lock.acquire` returns False).
        LockLost: On leaving the block, when the lock was lost inside it.
        ConfigurationError: A name that cannot be, or an option.

    >>> with sqlsem.mutex("nightly", timeout=60) as grant:  # doctest: +SKIP
    ...     load(fence=grant.fence)
    """
    return _lock("mutex", name, WRITE, 1, options)


def limit(name: Name, limit: int, *, weight: int = 1, **options: Unpack[ModuleLockOptions]) -> Lock:
    """At most ``limit`` at a time, everywhere; ``weight`` takes several of them at once. A semaphore: a thread that has
    one may take another one while there is room.

    A heavy request at the head of the queue holds back lighter ones behind it, so it is never starved. Where others
    declare another limit for the same resource, the lowest of those in the queue ahead counts. Options as for `mutex`.

    >>> @sqlsem.limit("etl", 3)  # doctest: +SKIP
    ... def load(table): ...
    """
    check_count("The limit", limit)
    return _lock("limit", name, WRITE, limit, options, weight)


def read(name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """Beside other readers, but no writer; a writer that waits holds later readers back. Options as for `mutex`."""
    return _lock("read", name, READ, 1, options)


def write(name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
    """Alone: no reader, no other writer. Options as for `mutex`."""
    return _lock("write", name, WRITE, 1, options)


def stage(name: Name, order: int, **options: Unpack[ModuleLockOptions]) -> Lock:
    """Beside others of the same order; waits for every earlier entry of another order. Options as for `mutex`."""
    if isinstance(order, bool) or not isinstance(order, int):
        raise ConfigurationError(f"The order of a stage must be a whole number, not {order!r}")
    return _lock("stage", name, f"stage:{order}", 1, options)


def all_of(*locks: Lock, **options: Unpack[GroupOptions]) -> Lock:
    """Several locks as one: all numbers are taken at once, so that two such locks never wait for each other.

    The locks must be on different resources of one database; what they say of ``timeout``, ``reentrant``, ``on_lost``
    and ``cancel_on_lost`` does not count here: give these options to all_of.

    >>> with sqlsem.all_of(sqlsem.mutex("a"), sqlsem.limit("b", 2)):  # doctest: +SKIP
    ...     move()
    """
    check_options("all_of()", options, _GROUP_OPTIONS)
    if not locks:
        raise ConfigurationError("all_of needs at least one lock")
    for lock in locks:
        if not isinstance(lock, Lock):
            raise ConfigurationError(
                f"all_of takes locks, not {lock!r}; write all_of(sqlsem.mutex('a'), sqlsem.limit('b', 2))"
            )
    if any(lock._coordinator is not locks[0]._coordinator for lock in locks):
        raise ConfigurationError("all_of takes locks of one database only: several cannot be asked in one transaction")
    asked = [one for lock in locks for one in lock._asked]
    names = [one.name for one in asked if isinstance(one.name, str)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"all_of names {name!r} twice; ask for it once, with a weight", resource=name)
    return Lock(asked, coordinator=locks[0]._coordinator, **options)
