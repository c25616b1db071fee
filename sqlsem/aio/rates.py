"""Rates, for asyncio tasks: limits on use in a window of time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlsem.aio.driver import Driver, Signal, run_generator, this_caller
from sqlsem.client.operations.acquire_rate import RateAcquisition, split
from sqlsem.client.operations.rate_grants import BaseRateGrant, adjusting
from sqlsem.client.operations.terms import AnyRequest, Terms
from sqlsem.util import late
from sqlsem.values.locks import Duration
from sqlsem.values.rates import RateRequest

F = TypeVar("F", bound=Callable[..., Any])


class RateGrant(BaseRateGrant):
    """The use that a rate granted, as `sqlsem.RateGrant`; `adjust` is awaited."""

    def __init__(self, driver: Driver, request: RateRequest, taken_ms: int, waited: float) -> None:
        super().__init__(driver.client, request, taken_ms, waited)
        self._driver = driver

    @classmethod
    def made_by(cls, driver: Driver) -> Callable[[RateRequest, int, float], RateGrant]:
        """Return a function that makes grants for this driver. (For the package.)"""
        return functools.partial(cls, driver)

    async def adjust(self, actual: int) -> None:
        """See `sqlsem.RateGrant.adjust`."""
        await run_generator(adjusting(self, actual), self._driver.execute_effect)


class Rate:
    """A limit on use in a window of time, as `sqlsem.Rate`; made by `rate`. ``async with`` works with `sqlsem.rate`,
    too.

    >>> grant = await sqlsem.aio.rate("api", 100, per="1m").take(timeout=5)  # doctest: +SKIP
    """

    def __init__(self, terms: Terms) -> None:
        #: For the package; programs have no use for it.
        self.terms = terms

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.terms,)

    async def take(self, blocking: bool = True, timeout: Duration | None = -1) -> RateGrant | None:
        """Take the cost from the rate, as `sqlsem.Rate.take`. If the task is cancelled meanwhile, its request is
        withdrawn, and the cost returned.
        """
        return await self._take(self.terms.requests, self.terms.seconds(blocking, timeout))

    async def _take(self, requests: Sequence[AnyRequest], timeout: float | None) -> RateGrant | None:
        driver = Driver.of(self.terms.client)
        await driver.enter()
        _, (request,) = split(requests)
        return await driver.run_operation(
            RateAcquisition(
                driver.client, request, timeout, this_caller(), RateGrant.made_by(driver), lambda: Signal(driver)
            )
        )

    async def _enter(self, requests: Sequence[AnyRequest]) -> RateGrant:
        grant = await self._take(requests, self.terms.timeout)
        if grant is None:
            raise await run_generator(
                self.terms.timeout_error(requests, this_caller()), Driver.of(self.terms.client).execute_effect
            )
        return grant

    async def __aenter__(self) -> RateGrant:
        return await self._enter(self.terms.requests)

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: Any) -> None:
        pass

    def __call__(self, function: F) -> F:
        """Decorate a coroutine function or method: each call takes from the rate first.

        Raises `ConfigurationError` for any other function, and for classes.
        """
        with late.importing:
            from sqlsem.client import decorated  # wrapt takes longer to load than sqlsem

        remedy = ", and cannot await its rate; decorate it with sqlsem.rate"
        return decorated.hold_awaiting(function, self.terms, self._enter, self.__aexit__, remedy)

    def __repr__(self) -> str:
        return f"<aio.Rate {self.terms}>"
