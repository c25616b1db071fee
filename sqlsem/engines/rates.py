"""Rates, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

from sqlsem.model import Ticket
from sqlsem.model_rates import RateAnswer, RateDemand, RateEntry, RateRequest

__all__ = ["RateSession"]


class RateSession(abc.ABC):
    """So much in so long."""

    offers: ClassVar[str] = "rates"

    #: Whether it takes for several at once, and promises what is not there yet.
    batches: ClassVar[bool] = False

    @abc.abstractmethod
    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        """Take from a rate what is asked, if it is there: the limit of no window is ever passed. Without ``ticket``
        only where nobody waits in its line; with the ticket of a row there only when that is the first one, and what is
        taken takes the row away, too. On the session that has registered the row.

        ``ahead_ms``: for how long the caller would rather sleep than wait in the line. Where the engine can
        (`batches`), it is promised its share for the moment at which there is room, if that comes so soon, and for none
        before the last one promised; the share counts as used from now on. Who is promised something waits until then.

        ``more``: what others want of it that wait with this one; there are none where the engine takes for one at a
        time. As many of them get it as there is room for, one after the other, and the row goes when all have.

        One call after the other takes. A call whose answer was lost may have taken; repeated, it takes again. May raise
        `Busy`.
        """

    @abc.abstractmethod
    def adjust_rate(self, resource: str, taken_ms: int, more: int) -> None:
        """What was taken has cost so much more, which counts as used now and may go beyond the limit; or so much less
        (negative), which is given back as far as it counts still. May raise `Busy`.
        """

    @abc.abstractmethod
    def reset_rate(self, resource: str) -> bool:
        """For operators: forget all use, debts, promises and declared limits of a rate. False where it is not known."""

    @abc.abstractmethod
    def set_rate(self, resource: str, window_ms: int, limit: int | None) -> bool:
        """For operators: set the most that may be used in windows of this length, or lift that (None). False where
        there was nothing to lift.
        """

    @abc.abstractmethod
    def rates(self, resource: str | None) -> list[RateEntry]:
        """Every window of one rate or all, and how much of it is used."""
