"""Rates: a capability of sessions (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

from sqlsem.model import Ticket
from sqlsem.model_rates import RateAnswer, RateDemand, RateEntry, RateRequest

__all__ = ["RateSession"]


class RateSession(abc.ABC):
    """Rates: the use in any window of time is at most a limit."""

    offers: ClassVar[str] = "rates"

    #: True if one call serves several demands, and reserves slots in the near future.
    batches: ClassVar[bool] = False

    @abc.abstractmethod
    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        """Take the request's cost from a rate, unless that would exceed the limit of a window. Without ``ticket``, take
        only if no request waits in the rate's queue. With the ticket of a row, take only if that row is the first, and
        then remove the row. Called on the session that registered the row.

        ``ahead_ms``: the longest sleep that the caller prefers to a wait in the queue. If there is room so soon, and
        not before the latest reservation, an engine with `batches` reserves a slot for that time. The slot counts as
        used from now on, and the caller sleeps until then.

        ``more``: the demands of other waiters of the batch, served in order as far as there is room. The row is removed
        when all are served. Empty if the engine serves one demand at a time.

        Not idempotent: if the answer of a call is lost, it may have taken the cost, and a repeated call takes it again.
        May raise `Busy`.
        """

    @abc.abstractmethod
    def adjust_rate(self, resource: str, taken_ms: int, more: int) -> None:
        """Adjust the cost of an earlier take. Positive ``more`` counts as used now, and may exceed the limit. Negative
        ``more`` returns use, as far as it still counts. May raise `Busy`.
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
        """Return all windows of one rate or of all, with their use."""
