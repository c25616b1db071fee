"""Grants of rates, and the adjustment of their costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from sqlsem.client.effects import Call, Effects
from sqlsem.engines.failures import Busy
from sqlsem.util import runtime
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import check_count, check_some

if TYPE_CHECKING:
    from sqlsem.client.client import DatabaseClient
    from sqlsem.engines.base import Session
    from sqlsem.values.rates import RateRequest

__all__ = ["BaseRateGrant", "adjusting", "rate_of"]

R = TypeVar("R")


class BaseRateGrant:
    """The common part of the rate grants for threads and for tasks. For its attributes see `sqlsem.RateGrant`."""

    def __init__(self, client: DatabaseClient, request: RateRequest, taken_ms: int, waited: float) -> None:
        self.name = request.name
        self.cost = request.cost
        self.waited = waited
        self.resource = request.resource
        self.client = client
        self.taken_ms = taken_ms
        self.adjust_lock = runtime.lock()

    def __repr__(self) -> str:
        return f"<RateGrant {self.cost} of {self.name!r}>"


def adjusting(grant: BaseRateGrant, actual: int, retry_timeout: float | None = None) -> Effects[None]:
    """Carry out `RateGrant.adjust`."""
    check_count(f"The cost adjusted for rate {grant.name!r}", actual, minimum=0)
    resource, taken_ms = grant.resource, grant.taken_ms

    def adjust(session: Session, _: int) -> None:
        with grant.adjust_lock:  # two concurrent calls must not both count the difference
            before, more = grant.cost, actual - grant.cost
            if more < 0:
                # One attempt counts as done: after a lost answer, a second one might return the use of others.
                grant.cost = actual
            try:
                if more:
                    session.adjust_rate(resource, taken_ms, more)
            except Busy:
                grant.cost = before
                raise
            grant.cost = actual

    yield Call("adjust", adjust, retry_timeout)


def rate_of(taken: Mapping[str, R], name: str | None, what: object) -> R:
    """Return the rate grant that ``adjust(…, rate=name)`` means."""
    check_some("The rate's name", name)
    if name is None and len(taken) == 1:
        return next(iter(taken.values()))
    if name is None or name not in taken:
        names = ", ".join(map(repr, taken)) or "none"
        raise ConfigurationError(f"{what!r}: say which rate is adjusted, as adjust(actual, rate=…); it has {names}")
    return taken[name]
