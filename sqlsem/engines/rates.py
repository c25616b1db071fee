"""Rates, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

from sqlsem.model import Ticket
from sqlsem.model_rates import RateAnswer, RateDemand, RateEntry, RateRequest

__all__ = ["RateSession"]


class RateSession(abc.ABC):
    """Rates: at most a limit of use in any window of time."""

    offers: ClassVar[str] = "rates"

    #: True if one call serves several demands, and reserves future shares.
    batches: ClassVar[bool] = False

    @abc.abstractmethod
    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        """Take the request's cost from a rate if no window's limit is exceeded. Without ``ticket``: only if no request
        waits in the rate's queue. With the ticket of a waiting row: only if that row is the first; then the row is
        removed, too. Called on the session that registered the row.

        ``ahead_ms``: the longest sleep that the caller prefers to a wait in the queue. If the engine can (`batches`),
        it reserves a share for the moment at which there is room, if that is soon enough and not before the latest
        reservation. The share counts as used from now on, and the caller sleeps until that moment.

        ``more``: the demands of other waiters of the batch, served in order as far as there is room; the row is
        removed when all are served. Empty if the engine serves one demand at a time.

        Not idempotent: a call whose answer was lost may have taken, and a repeated call takes again. May raise `Busy`.
        """

    @abc.abstractmethod
    def adjust_rate(self, resource: str, taken_ms: int, more: int) -> None:
        """Adjust the cost of an earlier take: add ``more``, which counts as used now and may exceed the limit, or
        return it (negative), as far as it still counts. May raise `Busy`.
        """

    @abc.abstractmethod
    def reset_rate(self, resource: str) -> bool:
        """Delete all use, debts, reservations and declared limits of a rate; return False if it is unknown."""

    @abc.abstractmethod
    def set_rate(self, resource: str, window_ms: int, limit: int | None) -> bool:
        """Set the operator's limit for windows of this length, or remove it (None); return False if there was none to
        remove.
        """

    @abc.abstractmethod
    def rates(self, resource: str | None) -> list[RateEntry]:
        """Return every window of one rate or all, with its use."""
