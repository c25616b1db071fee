"""Other things than a plain lock that `sqlsem run` acquires: an adopted lock, a lock once per period, rates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import click

import sqlsem
from sqlsem.client.effects import run_generator
from sqlsem.client.once import Period
from sqlsem.values.errors import LockLost
from sqlsem.values.locks import Duration
from sqlsem.values.rates import RateRequest

__all__ = ["Adopted", "OncePerPeriod", "rate_of", "take_rates"]

log = logging.getLogger("sqlsem")


class Adopted:
    """A lock to adopt by its token, which another process has handed over."""

    def __init__(
        self, coordinator: sqlsem.Coordinator, token: str | None, on_lost: Callable[[sqlsem.Grant], object]
    ) -> None:
        if not token:
            raise click.UsageError("--adopt takes the token from $SQLSEM_TOKEN, which is not set.")
        self._adopt = partial(coordinator.adopt, token, on_lost=on_lost)
        self._grant: sqlsem.Grant | None = None

    def acquire(self, *, timeout: Duration | None) -> bool:
        """Adopt the lock."""
        self._grant = self._adopt()
        return True

    @property
    def grant(self) -> sqlsem.Grant:
        """The adopted grant."""
        assert self._grant is not None
        return self._grant


class OncePerPeriod:
    """A lock that is acquired once per period, unless the command fails. Calling it with ``on_lost`` makes the lock.

    Attributes:
        done: True if the job is done for this period.
    """

    def __init__(
        self,
        coordinator: sqlsem.Coordinator,
        period: Period,
        make_lock: Callable[[Callable[[sqlsem.Grant], object]], sqlsem.Lock],
    ) -> None:
        self.done = False
        self._client = coordinator.client
        self._period = period
        self._make_lock = make_lock
        self._lock: sqlsem.Lock | None = None

    def __call__(self, on_lost: Callable[[sqlsem.Grant], object]) -> OncePerPeriod:
        self._lock = self._make_lock(on_lost)
        return self

    def acquire(self, *, timeout: Duration | None) -> bool:
        """Acquire the lock, unless the job is done for this period."""
        assert self._lock is not None
        if not self._due(None):
            return False
        if not self._lock.acquire(timeout=timeout):
            return False
        if self._due(self._lock.grant):
            return True
        self._lock.release()
        return False

    def _due(self, grant: sqlsem.Grant | None) -> bool:
        self.done = not run_generator(self._period.due(self._client, grant), self._client.execute_effect)
        return not self.done

    @property
    def grant(self) -> sqlsem.Grant:
        """The grant of this thread."""
        assert self._lock is not None
        return self._lock.grant

    def finish(self, grant: sqlsem.Grant, status: int) -> None:
        """Mark the job as done if the command's status is 0. The lock is still held."""
        if status != 0:
            log.info("%r may run again in this period, as the command failed: %d", self._period.name, status)
            return
        try:
            run_generator(self._period.mark(self._client, grant), self._client.execute_effect)
        except LockLost as exc:
            log.info("%r is not done: %s", self._period.name, exc)  # (the release reports the loss)


def rate_of(coordinator: sqlsem.Coordinator, request: RateRequest, note: str) -> sqlsem.Rate:
    """Return the rate that the command line names."""
    windows: dict[Duration, int] = {window.ms / 1000: window.limit for window in request.windows}
    return coordinator.rate(request.name, windows or None, cost=request.cost, note=note)


def take_rates(coordinator: sqlsem.Coordinator, rates: Sequence[RateRequest], note: str, timeout: float | None) -> bool:
    """Take from rates, one after another. Return False if that takes longer than ``timeout``; nothing is used then."""
    taken: list[sqlsem.RateGrant] = []
    began = time.monotonic()
    for request in rates:
        remaining = max(0.001, timeout - (time.monotonic() - began)) if timeout else timeout
        grant = rate_of(coordinator, request, note).take(timeout=remaining)
        if grant is None:
            for earlier in taken:
                earlier.adjust(0)
            return False
        taken.append(grant)
    return True
