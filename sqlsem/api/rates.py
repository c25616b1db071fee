"""Rates, for threads: limits on use in a window of time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from sqlsem.client.callers import require_no_event_loop, this_thread
from sqlsem.client.effects import run_generator, run_operation
from sqlsem.client.operations.acquire_rate import RateAcquisition, split
from sqlsem.client.operations.rate_grants import BaseRateGrant, adjusting
from sqlsem.util import late

if TYPE_CHECKING:
    from sqlsem import aio  # for types only; `_aio` imports it at its first use, so that only asyncio programs load it
    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.operations.terms import AnyRequest, Terms
    from sqlsem.values.locks import Duration
    from sqlsem.values.rates import RateRequest

F = TypeVar("F", bound=Callable[..., Any])


class RateGrant(BaseRateGrant):
    """The use that a rate granted. It needs no release; safe to use from several threads.

    Attributes:
        name: The name of the rate.
        cost: How much was taken, or the adjusted cost.
        waited: Seconds from the request to the grant.
    """

    @classmethod
    def made_by(cls, client: DatabaseClient) -> Callable[[RateRequest, int, float], RateGrant]:
        """Return a function that makes grants for this client. (For the package.)"""
        return functools.partial(cls, client)

    def adjust(self, actual: int) -> None:
        """Correct the cost, if the actual cost is known only afterwards.

        A lower cost returns the difference, as far as it still counts and this login has taken it; 0 returns all. (The
        difference stays used if the database's answer is lost, as it must not be returned twice.) A higher cost uses
        the difference now, and may exceed the limit: then no request is granted until enough has left the window, with
        a burst after ten windows at the latest. May be called again.

        Raises `Unavailable` if the database is out of reach, and `ConfigurationError` if ``actual`` is no whole number.

        >>> with sqlsem.rate("tokens", 90_000, per="1m", cost=4_000) as grant:  # doctest: +SKIP
        ...     answer = model.complete(prompt, max_tokens=4_000)
        ...     grant.adjust(answer.usage.total_tokens)
        """
        run_generator(adjusting(self, actual), self.client.execute_effect)


class Rate:
    """A limit on use in a window of time, for all processes together. Made by `rate`; may be used again and again, by
    many threads at once.

    A block, or the call of a decorated function, begins when the rate has granted its cost. Its end returns nothing.
    Can be pickled if it belongs to the default coordinator.
    """

    def __init__(self, terms: Terms) -> None:
        #: For the package; programs have no use for it.
        self.terms = terms

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.terms,)

    def take(self, blocking: bool = True, timeout: Duration | None = -1) -> RateGrant | None:
        """Take the cost from the rate, and return the grant; None if it was not granted in time.

        Args:
            blocking: False takes it only if it is free now and no request waits (and accepts no timeout).
            timeout: How long to wait at most; None or -1 for ever. Left out, the rate's own ``timeout`` applies.

        Raises:
            LockLost: The request's position was lost: an operator revoked it, or the database was out of reach for too
                long.
            Unavailable: The database is out of reach.
        """
        return self._take(self.terms.requests, self.terms.seconds(blocking, timeout))

    def _take(self, requests: Sequence[AnyRequest], timeout: float | None) -> RateGrant | None:
        require_no_event_loop(self, "use 'async with', await sqlsem.aio.rate(…).take()")
        client = self.terms.client
        _, (request,) = split(requests)
        acquisition = RateAcquisition(client, request, timeout, this_thread(), RateGrant.made_by(client))
        return run_operation(acquisition, client.execute_effect)

    def _enter(self, requests: Sequence[AnyRequest]) -> RateGrant:
        grant = self._take(requests, self.terms.timeout)
        if grant is None:
            raise run_generator(self.terms.timeout_error(requests, this_thread()), self.terms.client.execute_effect)
        return grant

    def __enter__(self) -> RateGrant:
        return self._enter(self.terms.requests)

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        pass

    @functools.cached_property
    def _aio(self) -> aio.Rate:
        with late.importing:
            from sqlsem import aio  # at the first use only

        return aio.Rate(self.terms)

    async def __aenter__(self) -> aio.RateGrant:
        return await self._aio.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object
    ) -> None:
        pass

    def __call__(self, function: F) -> F:
        """Decorate a function or method: each call takes from the rate first.

        A coroutine function awaits the grant. Raises `ConfigurationError` for generators, asynchronous ones too, and
        classes: they cannot be decorated.
        """
        with late.importing:
            from sqlsem.client import decorated  # wrapt takes longer to load than sqlsem

        if decorated.is_coroutine(function):
            return self._aio(function)
        return decorated.hold(function, self.terms, lambda requests: contextlib.nullcontext(self._enter(requests)))

    def __repr__(self) -> str:
        return f"<Rate {self.terms}>"
