"""The functions that make locks, rates and periodic jobs, written once for threads and for asyncio.

`ModuleFactories` are the functions of a module (`sqlsem.mutex`, `sqlsem.aio.mutex`); `Factories` are the methods of a
coordinator (`Coordinator.mutex`, ``Coordinator.aio.mutex``), which have no option ``coordinator``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from sqlsem.client.defaults import Coordinated, client_of
from sqlsem.client.once import Period, Periodic
from sqlsem.client.operations import terms
from sqlsem.client.options import (
    AnyLock,
    GroupOptions,
    LockOptions,
    ModuleLockOptions,
    ModuleRateOptions,
    RateOptions,
    shows_options,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.held.registry import LostCallback
    from sqlsem.client.operations.terms import Name, Terms
    from sqlsem.values.locks import Duration
    from sqlsem.values.rates import Windows


__all__ = ["Factories", "ModuleFactories"]

#: The classes of one API: `sqlsem.Lock` or `sqlsem.aio.Lock`, and so on.
Lock = TypeVar("Lock")
Rate = TypeVar("Rate")
Once = TypeVar("Once")


class Factories(Generic[Lock, Rate, Once]):
    """The methods of a coordinator that make locks, rates and periodic jobs. Subclasses name the classes of an API."""

    #: For the package; programs have no use for it.
    client: DatabaseClient
    _lock: Callable[[Terms], Lock]
    _rate: Callable[[Terms], Rate]
    _once: Callable[[Periodic], Once]

    @shows_options(LockOptions)
    def mutex(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.mutex`."""
        return self._lock(terms.lock("mutex", name, options, self.client))

    @shows_options(LockOptions)
    def limit(self, name: Name, limit: int | None = None, *, weight: int = 1, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.limit`."""
        return self._lock(terms.limit(name, limit, weight, options, self.client))

    @shows_options(LockOptions)
    def read(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.read`."""
        return self._lock(terms.lock("read", name, options, self.client))

    @shows_options(LockOptions)
    def write(self, name: Name, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.write`."""
        return self._lock(terms.lock("write", name, options, self.client))

    @shows_options(LockOptions)
    def stage(self, name: Name, order: int, **options: Unpack[LockOptions]) -> Lock:
        """See `sqlsem.stage`."""
        return self._lock(terms.stage(name, order, options, self.client))

    @shows_options(RateOptions)
    def rate(
        self,
        name: Name,
        limit: int | Windows | None = None,
        per: Duration | None = None,
        *,
        cost: int = 1,
        burst: int | None = None,
        **options: Unpack[RateOptions],
    ) -> Rate:
        """See `sqlsem.rate`."""
        return self._rate(terms.rate(name, limit, per, cost, burst, options, self.client))

    @shows_options(GroupOptions)
    def all_of(self, *locks: AnyLock, **options: Unpack[GroupOptions]) -> Lock:
        """See `sqlsem.all_of`. The locks must be made by this coordinator."""
        return self._lock(terms.all_of(locks, options, self.client))

    def once(
        self,
        name: str,
        per: Duration,
        *,
        offset: Duration = 0,
        note: str | None = None,
        timeout: Duration | None = None,
        on_lost: LostCallback | None = None,
        cancel_on_lost: bool = False,
    ) -> Once:
        """See `sqlsem.once`."""
        return self._once(Periodic(Period(name, per, offset), note, timeout, on_lost, cancel_on_lost, self.client))


class ModuleFactories(Generic[Lock, Rate, Once]):
    """The functions of a module that make objects of these classes, for the default coordinator or any other."""

    def __init__(
        self, lock: Callable[[Terms], Lock], rate: Callable[[Terms], Rate], once: Callable[[Periodic], Once]
    ) -> None:
        self._lock = lock
        self._rate = rate
        self._once = once

    @shows_options(ModuleLockOptions)
    def mutex(self, name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
        """Make a mutex: one holder at a time, in all processes, in the order of the requests.

        Args:
            name: The resource, 1 to 255 characters; for a decorator also a function that returns the name from the
                call's arguments.
            options: All are optional:

                - ``note``: A text for readers of the queue (``sqlsem ls``).
                - ``priority``: 0 to 99, if an operator has set priorities for the resource (``sqlsem set etl
                  --priorities``): waiters of higher priority go first. See the guide to priorities.
                - ``timeout``: How long ``with`` waits before `Timeout`: seconds, ``"10m"``, a `timedelta`; None (the
                  default) for ever.
                - ``reentrant``: The holding thread may acquire the lock again.
                - ``on_lost``: Called with the grant, from another thread, when the lock is lost.
                - ``cancel_on_lost``: With ``async with``: cancel the task when the lock is lost; its block then ends
                  with `LockLost`.
                - ``coordinator``: The database; by default that of `sqlsem.configure`.

        Raises:
            Timeout: Not granted in time (``with`` and decorator; `Lock.acquire` returns False).
            LockLost: At the end of the block, if the lock was lost inside it.
            ConfigurationError: An invalid name or option.

        >>> with sqlsem.mutex("nightly", timeout=60) as grant:  # doctest: +SKIP
        ...     load(fence=grant.fence)
        """
        return self._lock(terms.lock("mutex", name, options))

    @shows_options(ModuleLockOptions)
    def limit(
        self, name: Name, limit: int | None = None, *, weight: int = 1, **options: Unpack[ModuleLockOptions]
    ) -> Lock:
        """Make a semaphore: at most ``limit`` holders at a time, in all processes; a holder of ``weight`` n counts as
        n. A thread may hold several grants while there is room.

        A heavy request at the head of the queue blocks lighter ones behind it, so it never starves. If programs declare
        different limits for the same resource, the lowest of those in the queue ahead counts. Options as for `mutex`.

        Without ``limit`` the operator's limit applies. The operator sets it (``sqlsem set etl --limit 5``, or for many
        names: ``sqlsem set 'tenant:*' --limit 4``), and may change it while programs run. If none is set, a request
        raises `ConfigurationError`, which names that command.

        >>> @sqlsem.limit("etl", 3)  # doctest: +SKIP
        ... def load(table): ...
        """
        return self._lock(terms.limit(name, limit, weight, options))

    @shows_options(ModuleLockOptions)
    def read(self, name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
        """Make a read lock: readers hold it together, but with no writer. A waiting writer blocks later readers.
        Options as for `mutex`.
        """
        return self._lock(terms.lock("read", name, options))

    @shows_options(ModuleLockOptions)
    def write(self, name: Name, **options: Unpack[ModuleLockOptions]) -> Lock:
        """Make a write lock: its holder excludes all readers and other writers. Options as for `mutex`."""
        return self._lock(terms.lock("write", name, options))

    @shows_options(ModuleLockOptions)
    def stage(self, name: Name, order: int, **options: Unpack[ModuleLockOptions]) -> Lock:
        """Make a stage lock: holders of the same order share it; a request waits for all earlier requests of other
        orders. Options as for `mutex`.
        """
        return self._lock(terms.stage(name, order, options))

    @shows_options(ModuleRateOptions)
    def rate(
        self,
        name: Name,
        limit: int | Windows | None = None,
        per: Duration | None = None,
        *,
        cost: int = 1,
        burst: int | None = None,
        **options: Unpack[ModuleRateOptions],
    ) -> Rate:
        """Allow at most ``limit`` in any stretch of time as long as ``per``, for all processes together, in the order
        of asking.

        Only the database's clock counts. Waiters are in the queue of the resource ``rate:NAME``, visible to all
        (``sqlsem ls``). Later requests do not overtake them, even if they cost less. If programs declare different
        limits for the same rate, all of them apply: the lowest limit of a window counts, and windows of different
        lengths count together. A declared limit counts until the last request that has declared it is out of its
        window. An operator's limit (`Admin.set_rate`, ``sqlsem rates set``) always counts.

        Args:
            name: The name of the rate, 1 to 250 characters; for a decorator also a function that returns the name from
                the call's arguments.
            limit: How much may be used in the window; or several windows at once: ``{"1s": 10, "1h": 1000}``. Left out,
                together with ``per``, the operator's limit applies.
            per: The window: seconds, ``"1m"``, a `timedelta`; from a millisecond to 24 days.
            cost: How much one block or call uses: from 1 to the limit.
            burst: How much may be used at once; after that the limit comes back evenly (100 in a minute: 1 in 0.6 s).
                Left out, the whole limit may be used at once. Needs a single window.
            options: All of them may be left out:

                - ``note``: A text for readers of the queue.
                - ``timeout``: How long ``with`` waits before `Timeout`; None (the default) for ever.
                - ``coordinator``: The coordinator of the database; left out, the default one.

        Raises:
            Timeout: Not granted in time (``with`` and decorator; `Rate.take` returns None).
            LockLost: The request's position in the queue was lost.
            ConfigurationError: An invalid name, number or option; an engine without rates.
            Unavailable: The database is out of reach.

        A window is kept in a hundred parts, each of which counts until all of it is over. So the limit is never
        exceeded, and a request may wait a hundredth of the window too long.

        >>> @sqlsem.rate("api", 100, per="1m")  # doctest: +SKIP
        ... def ask(question): ...
        """
        return self._rate(terms.rate(name, limit, per, cost, burst, options))

    @shows_options(GroupOptions)
    def all_of(self, *locks: AnyLock, **options: Unpack[GroupOptions]) -> Lock:
        """Combine several locks into one. It gets all positions at once, so two such locks never wait for each other.

        Rates may be among them. Their costs are taken when all locks are granted, and returned if the timeout passes
        before everything is granted. `Grant.adjust` corrects a cost.

        The locks must be on different resources of one database. Their own options ``timeout``, ``reentrant``,
        ``on_lost`` and ``cancel_on_lost`` are ignored: give these options to all_of.

        >>> with sqlsem.all_of(sqlsem.mutex("a"), sqlsem.limit("b", 2)):  # doctest: +SKIP
        ...     move()
        """
        return self._lock(terms.all_of(locks, options))

    def once(
        self,
        name: str,
        per: Duration,
        *,
        offset: Duration = 0,
        note: str | None = None,
        timeout: Duration | None = None,
        on_lost: LostCallback | None = None,
        cancel_on_lost: bool = False,
        coordinator: Coordinated | None = None,
    ) -> Once:
        """Run a job once per period, for all processes together: one caller runs, and the others wait until it ends. If
        its block ends without an error, the job is done, and they have nothing to do; after an error the next caller
        runs.

        ``with`` gives the `Run`, or None if there is nothing to do.

        Args:
            name: The name of the job, 1 to 250 characters. A run holds the mutex ``once:<name>``, visible to all.
            per: The length of a period, from 1 second to 366 days: ``"1h"``, ``"1d"``. Periods are its multiples since
                1970 in UTC (of a week: from Thursday on), by the database's clock. A run counts for the period in which
                it was granted, also if it ends later.
            offset: Moves the beginning of the periods: ``per="1d", offset="6h"`` begins at 6:00 UTC.
            note: A text for readers of the queue, while the job runs.
            timeout: How long ``with`` waits for another run before `Timeout`; None (the default) for ever.
            on_lost: Called with the grant, from another thread, when the lock is lost.
            cancel_on_lost: With ``async with``: cancel the task when the lock is lost; its block then ends with
                `LockLost`.
            coordinator: The coordinator of the database; left out, the default one.

        Raises:
            Timeout: Another run did not end in time.
            LockLost: At the end of the block, if the lock was lost inside it: the job is not done.
            Deadlock: This thread runs the job already.
            ConfigurationError: An invalid name, period or offset, or an engine without periodic runs.
            Unavailable: The database is out of reach.

        If a process dies during the job, the job is not done. If it dies after the work, but before the run is recorded
        as done, the next caller does the work again: the work must tolerate that.

        >>> with sqlsem.once("report", per="1d") as run:  # doctest: +SKIP
        ...     if run:
        ...         send_report()
        >>> @sqlsem.once("report", per="1d")  # doctest: +SKIP
        ... def send_report(): ...
        """
        client = None if coordinator is None else client_of(coordinator)
        return self._once(Periodic(Period(name, per, offset), note, timeout, on_lost, cancel_on_lost, client))
