"""Locks that travel, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

from sqlsem.model import Request, Ticket

__all__ = ["TransferSession"]


class TransferSession(abc.ABC):
    """Locks go from one process to another: on the main sessions of both."""

    offers: ClassVar[str] = "locks that can be handed over"

    @abc.abstractmethod
    def hand_over(self, member_id: int, tickets: Sequence[Ticket], token: str, ttl: float, to: str | None) -> bool:
        """Put the rows of these tickets, all or none, in transit: for whoever adopts the token within ``ttl`` seconds,
        as the login ``to`` (None: ours). False when one of them is not held any more. May be repeated with the same
        token, of which only a hash is kept.

        From then on they are no rows of this member: it may no more release them. A row is in transit as with a member
        whose lease runs; where nobody adopts it, it goes with the lease. May raise `Busy`, and `ConfigurationError`
        for a login that cannot be.
        """

    @abc.abstractmethod
    def adopt(
        self, member_id: int, requesting_id: str, owner: str, uid: str, token: str
    ) -> list[tuple[Request, Ticket]]:
        """Make what was handed over under a token this member's, with a sign of life: same positions, no gap. May be
        repeated with the same ``uid``; `cancel` with it gives them back.

        Raises `NotHeld` when the token is not known, was used, or it is too late, and `ConfigurationError` when it is
        for another login (`answers.not_adopted`).
        """
