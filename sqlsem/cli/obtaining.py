"""The acquisitions of `sqlsem run`: of a lock, of a lock once per period, of rates."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import sqlsem
from sqlsem.cli.supervisor import Acquire
from sqlsem.client.effects import run_generator
from sqlsem.client.held.registry import LostCallback
from sqlsem.client.once import Period
from sqlsem.values.errors import LockLost
from sqlsem.values.locks import Duration
from sqlsem.values.rates import RateRequest

__all__ = ["OncePerPeriod", "acquired", "rate_of", "take_rates"]

log = logging.getLogger("sqlsem")


def acquired(lock: sqlsem.Lock, timeout: float | None) -> sqlsem.Grant | None:
    """Acquire a lock, and return its grant; None if it is not granted in time."""
    return lock.grant if lock.acquire(timeout=timeout) else None


class OncePerPeriod:
    """Acquires a lock by ``acquire``, unless the job is done for this period.

    Attributes:
        done: True if the job is done for this period.
    """

    done = False

    def __init__(self, coordinator: sqlsem.Coordinator, period: Period, acquire: Acquire) -> None:
        self._client = coordinator.client
        self._period = period
        self._acquire = acquire

    def __call__(self, on_lost: LostCallback, timeout: float | None) -> sqlsem.Grant | None:
        grant = self._acquire(on_lost, timeout) if self._due(None) else None
        if grant is None or self._due(grant):
            return grant
        grant.release()
        return None

    def _due(self, grant: sqlsem.Grant | None) -> bool:
        self.done = not run_generator(self._period.due(self._client, grant), self._client.execute_effect)
        return not self.done

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
