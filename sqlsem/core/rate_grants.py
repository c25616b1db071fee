"""What was taken of a rate, and what it has cost in the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from sqlsem import runtime
from sqlsem.core.client import DatabaseClient
from sqlsem.core.effects import Call, Effects
from sqlsem.engines.base import Busy, Session
from sqlsem.errors import ConfigurationError
from sqlsem.model import check_count, check_some
from sqlsem.model_rates import RateRequest

__all__ = ["BaseRateGrant", "adjusting", "giving_back", "rate_of"]

R = TypeVar("R")


class BaseRateGrant:
    """What the grants of rates of all faces have in common; its attributes are those of `sqlsem.RateGrant`."""

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


def adjusting(grant: BaseRateGrant, actual: int) -> Effects[None]:
    """`RateGrant.adjust`."""
    check_count(f"The cost adjusted for rate {grant.name!r}", actual, least=0)
    resource, taken_ms = grant.resource, grant.taken_ms

    def adjust(session: Session, _: int) -> None:
        with grant.adjust_lock:  # two that adjust the same shall not both count the difference
            before, more = grant.cost, actual - grant.cost
            if more < 0:
                # Tried once, it counts as done, and is not repeated: given back twice, it would be others' too.
                grant.cost = actual
            try:
                if more:
                    session.adjust_rate(resource, taken_ms, more)
            except Busy:
                grant.cost = before
                raise
            grant.cost = actual

    yield Call("adjust", adjust)


def giving_back(resource: str, taken_ms: int, cost: int) -> Callable[[Session, int], None]:
    """Gives back what was taken; once, however often it is called. Where the answer is lost it may count as used."""
    left = cost

    def give_back(session: Session, _: int) -> None:
        nonlocal left
        now, left = left, 0
        try:
            if now:
                session.adjust_rate(resource, taken_ms, -now)
        except Busy:
            left = now
            raise

    return give_back


def rate_of(taken: Mapping[str, R], name: str | None, what: object) -> R:
    """The one of these that is meant by ``adjust(…, rate=name)``."""
    check_some("The rate's name", name)
    if name is None and len(taken) == 1:
        return next(iter(taken.values()))
    if name is None or name not in taken:
        had = ", ".join(map(repr, taken)) or "none"
        raise ConfigurationError(f"{what!r}: say which rate is adjusted, as adjust(actual, rate=…); it has {had}")
    return taken[name]
