"""The API for asyncio: the same locks as in `sqlsem`, with calls that are awaited. Each task has its own grants.

>>> async with sqlsem.limit("etl", 3):  # doctest: +SKIP
...     await load()

No call blocks the event loop. The operations are those of `sqlsem.client`; `sqlsem.aio.driver` awaits their effects.

driver    runs operations on an event loop
grants    the grants of tasks
leader    leaders
locks     locks
once      jobs that run once per period
rates     rates
wakeup    wakes an idle event loop at a signal
"""

from __future__ import annotations

from functools import partial

from sqlsem.aio.driver import Driver, call_in_thread, this_caller
from sqlsem.aio.grants import Grant
from sqlsem.aio.leader import Callback, Leader, Term
from sqlsem.aio.locks import Lock
from sqlsem.aio.once import Once, Run
from sqlsem.aio.rates import Rate, RateGrant
from sqlsem.client.client import DatabaseClient
from sqlsem.client.defaults import Coordinated, client_of
from sqlsem.client.factories import Factories, ModuleFactories
from sqlsem.client.held.registry import LostCallback
from sqlsem.client.leader import LeaderElection
from sqlsem.client.operations.handover import Adoption
from sqlsem.values.locks import Duration

__all__ = [
    "AsyncLocks",
    "Grant",
    "Leader",
    "Lock",
    "Once",
    "Rate",
    "RateGrant",
    "Run",
    "Term",
    "adopt",
    "all_of",
    "leader",
    "limit",
    "mutex",
    "once",
    "rate",
    "read",
    "stage",
    "write",
]


async def adopt(
    token: str,
    *,
    on_lost: LostCallback | None = None,
    cancel_on_lost: bool = False,
    coordinator: Coordinated | None = None,
) -> Grant:
    """Adopt a lock, as `sqlsem.adopt`. ``cancel_on_lost=True`` also cancels this task when the lock is lost.

    >>> async with await sqlsem.aio.adopt(token) as grant:  # doctest: +SKIP
    ...     await load(fence=grant.fence)
    """
    client = client_of(coordinator)
    return await _adopt(client, token, on_lost, cancel_on_lost)


async def _adopt(client: DatabaseClient, token: str, on_lost: LostCallback | None, cancel_on_lost: bool) -> Grant:
    driver = Driver.of(client)
    await driver.enter()

    make_grant = partial(Grant, driver=driver, cancel_on_lost=cancel_on_lost)
    adopted = await driver.run_operation(Adoption(client, token, on_lost, this_caller(), make_grant))
    adopted.arm()
    return adopted


# -- functions that make locks -------------------------------------------------------------------------------------


_functions = ModuleFactories(Lock, Rate, Once)
mutex = _functions.mutex
limit = _functions.limit
read = _functions.read
write = _functions.write
stage = _functions.stage
all_of = _functions.all_of
rate = _functions.rate
once = _functions.once


def leader(
    name: str,
    info: str | None = None,
    *,
    on_started: Callback | None = None,
    on_stopped: Callback | None = None,
    timeout: Duration | None = None,
    handle_sigterm: bool = True,
    cancel_on_lost: bool = True,
    coordinator: Coordinated | None = None,
) -> Leader:
    """Make a candidate, as `sqlsem.leader`. The event loop calls the callbacks, which may be coroutine functions. It
    calls ``on_stopped`` after a loss, too: a blocked loop would delay that.

    ``cancel_on_lost``: cancel the task when the term is lost; its block then ends with `LockLost`. On SIGTERM, if the
    program has no handler, the task is cancelled, and its block ends with ``SystemExit(143)``.

    >>> async with sqlsem.aio.leader("scheduler") as term:  # doctest: +SKIP
    ...     await schedule(term.fence)
    """
    client = None if coordinator is None else client_of(coordinator)
    return Leader(LeaderElection(name, info, timeout, on_started, on_stopped, handle_sigterm, cancel_on_lost, client))


class AsyncLocks(Factories[Lock, Rate, Once]):
    """The functions of this module for one coordinator (`sqlsem.Coordinator.aio`)."""

    _lock = Lock
    _rate = Rate
    _once = Once

    def __init__(self, client: DatabaseClient) -> None:
        self.client = client

    def leader(
        self,
        name: str,
        info: str | None = None,
        *,
        on_started: Callback | None = None,
        on_stopped: Callback | None = None,
        timeout: Duration | None = None,
        handle_sigterm: bool = True,
        cancel_on_lost: bool = True,
    ) -> Leader:
        """See `sqlsem.aio.leader`."""
        election = LeaderElection(
            *(name, info, timeout, on_started, on_stopped, handle_sigterm, cancel_on_lost, self.client)
        )
        return Leader(election)

    async def close(self) -> None:
        """Close the coordinator, as `sqlsem.Coordinator.close`, without blocking the event loop."""
        if not self.client.closed:
            await call_in_thread(self.client, partial(self.client.close, this_caller().number))

    async def adopt(self, token: str, *, on_lost: LostCallback | None = None, cancel_on_lost: bool = False) -> Grant:
        """See `sqlsem.aio.adopt`."""
        return await _adopt(self.client, token, on_lost, cancel_on_lost)
