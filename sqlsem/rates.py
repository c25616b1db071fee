"""The face for threads: rates, so much in so long."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from sqlsem.core import terms
from sqlsem.core.blocking import require_no_event_loop
from sqlsem.core.callers import this_thread
from sqlsem.core.client import DatabaseClient
from sqlsem.core.effects import run_generator, run_operation
from sqlsem.core.options import ModuleRateOptions, shows_options
from sqlsem.core.rate_grants import BaseRateGrant, adjusting
from sqlsem.core.rating import RateAcquisition, split
from sqlsem.core.terms import Ask, Name, Terms
from sqlsem.model import Duration
from sqlsem.model_rates import RateRequest, Windows

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sqlsem import aio  # at run time when it is first used: programs without asyncio need not load it

__all__ = ["Rate", "RateGrant", "rate"]

F = TypeVar("F", bound=Callable[..., Any])


class RateGrant(BaseRateGrant):
    """What was taken of a rate. There is nothing to give back; safe to use from several threads.

    Attributes:
        name: The rate's.
        cost: What was taken of it, or adjusted since.
        waited: Seconds between asking and having it.
    """

    @classmethod
    def made_by(cls, client: DatabaseClient) -> Callable[[RateRequest, int, float], RateGrant]:
        """For the package; programs have no use for it."""
        return functools.partial(cls, client)

    def adjust(self, actual: int) -> None:
        """Say what it has cost in the end, where that is known only afterwards.

        What was too much is returned, as far as it counts still and this login has taken it (and counts as used where
        the answer to that is lost, as it must not be returned twice); 0 returns all. What was too little counts as used
        now. That may go beyond the limit: then nobody gets anything until enough is out of the window again, with a
        burst after ten windows at the latest. May be called again.

        Raises `Unavailable` when the database is out of reach, and `ConfigurationError` for what is no whole number.

        >>> with sqlsem.rate("tokens", 90_000, per="1m", cost=4_000) as grant:  # doctest: +SKIP
        ...     answer = model.complete(prompt, max_tokens=4_000)
        ...     grant.adjust(answer.usage.total_tokens)
        """
        run_generator(adjusting(self, actual), self.client.execute_effect)


class Rate:
    """So much in so long, by everybody together. Made by `rate`; may be used again and again, by many threads at once.

    A block, or the call of a decorated function, begins when what it costs was taken; nothing is given back at its end.
    Can be pickled, when it is of the default coordinator.
    """

    def __init__(self, terms: Terms) -> None:
        #: For the package; programs have no use for it.
        self.terms = terms

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.terms,)

    def take(self, blocking: bool = True, timeout: Duration | None = -1) -> RateGrant | None:
        """Take from the rate, and say what was taken: None when that was not to be had in time.

        Args:
            blocking: False takes only what is there, and where nobody waits (and takes no timeout).
            timeout: How long to wait at most; None or -1 for ever. Left out, the rate's own ``timeout`` holds.

        Raises:
            LockLost: Its place in the line was lost: by an operator, or as the database was away for too long.
            Unavailable: The database is out of reach.
        """
        return self._take(self.terms.requests, self.terms.seconds(blocking, timeout))

    def _take(self, asked: Sequence[Ask], timeout: float | None) -> RateGrant | None:
        require_no_event_loop(self, "use 'async with', await sqlsem.aio.rate(…).take()")
        client = self.terms.client
        _, (request,) = split(asked)
        taking = RateAcquisition(client, request, timeout, this_thread(), RateGrant.made_by(client))
        return run_operation(taking, client.execute_effect)

    def _enter(self, asked: Sequence[Ask]) -> RateGrant:
        grant = self._take(asked, self.terms.timeout)
        if grant is None:
            raise run_generator(self.terms.too_late(asked, this_thread()), self.terms.client.execute_effect)
        return grant

    def __enter__(self) -> RateGrant:
        return self._enter(self.terms.requests)

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        pass

    @functools.cached_property
    def _aio(self) -> aio.Rate:
        from sqlsem import aio  # when it is first used: programs without asyncio need not load it

        return aio.Rate(self.terms)

    async def __aenter__(self) -> aio.RateGrant:
        return await self._aio.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object
    ) -> None:
        pass

    def __call__(self, function: F) -> F:
        """Decorate a function or method: each call takes from the rate first.

        A coroutine function awaits that. Raises `ConfigurationError` for what cannot be guarded this way: generators,
        asynchronous ones too, and classes.
        """
        from sqlsem.core import decorated  # imported late: wrapt takes longer to load than sqlsem

        if decorated.is_coroutine(function):
            return self._aio(function)
        return decorated.hold(function, self.terms, lambda asked: contextlib.nullcontext(self._enter(asked)))

    def __repr__(self) -> str:
        return f"<Rate {self.terms}>"


@shows_options(ModuleRateOptions)
def rate(
    name: Name,
    limit: int | Windows | None = None,
    per: Duration | None = None,
    *,
    cost: int = 1,
    burst: int | None = None,
    **options: Unpack[ModuleRateOptions],
) -> Rate:
    """At most ``limit`` in any stretch of time as long as ``per``, by everybody together, in the order of asking.

    Time is the database's, and nobody's clock else. Who waits stands in the line of the resource ``rate:NAME``, visible
    to all (``sqlsem ls``), and is not overtaken, also not by one who wants less. Where programs declare different
    limits for the same rate, all of them hold: the lowest limit of a window counts, and windows of different lengths
    count together. A declared limit counts until the last request that has declared it is out of its window. An
    operator's limit (`Admin.set_rate`, ``sqlsem rates set``) always counts.

    Args:
        name: The rate's, 1 to 250 characters; or, for a decorator, a function of the call's arguments that gives it.
        limit: How much may be used in the window; or several windows at once: ``{"1s": 10, "1h": 1000}``. Left out,
            together with ``per``: what an operator has set.
        per: The window: seconds, ``"1m"``, a `timedelta`; from a millisecond to 24 days.
        cost: How much is used by one block or call: from 1 to the limit.
        burst: How much may be used at once; from then on so much as comes back evenly (100 in a minute: 1 in 0.6 s).
            Left out, all of the limit may be used at once. Goes with one window.
        options: All of them may be left out:

            - ``note``: Words for anyone who looks at the line.
            - ``timeout``: How long ``with`` waits before `Timeout`; None (the default) for ever.
            - ``coordinator``: Which database; left out, the default one.

    Raises:
        Timeout: Not had in time (``with`` and decorator; `Rate.take` returns None).
        LockLost: The place in the line was lost.
        ConfigurationError: A name, number or option that cannot be; an engine without rates.
        Unavailable: The database is out of reach.

    A window is kept in a hundred parts, each of which counts until all of it is over. So the limit is never passed, and
    a hundredth of the window may be waited for too long.

    >>> @sqlsem.rate("api", 100, per="1m")  # doctest: +SKIP
    ... def ask(question): ...
    """
    return Rate(terms.rate(name, limit, per, cost, burst, options))
