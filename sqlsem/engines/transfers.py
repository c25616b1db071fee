"""Hand-over of locks between processes: a capability of sessions (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

from sqlsem.model import Request, Ticket

__all__ = ["TransferSession"]


class TransferSession(abc.ABC):
    """Hand-over of locks from one process to another, on the main sessions of both."""

    offers: ClassVar[str] = "locks that can be handed over"

    @abc.abstractmethod
    def hand_over(self, member_id: int, tickets: Sequence[Ticket], token: str, ttl: float, to: str | None) -> bool:
        """Put the rows of these tickets, all or none, in transit. The process that presents the token within ``ttl``
        seconds, as login ``to`` (None: this login), may adopt them. Return False if one of the rows is no longer held.
        Idempotent by token; the database stores only its hash.

        After this call this member cannot release the rows. They belong to a *transit member* with a lease of ``ttl``;
        a row that no process adopts ends with that lease. May raise `Busy`, and `ConfigurationError` for an invalid
        login.
        """

    @abc.abstractmethod
    def adopt(
        self, member_id: int, requesting_id: str, owner: str, uid: str, token: str
    ) -> list[tuple[Request, Ticket]]:
        """Move the rows that were handed over under a token to this member, and renew its lease. The rows keep their
        positions, and no other request is granted in between. Idempotent by ``uid``; `cancel` with the ``uid`` releases
        the rows.

        Raises `NotHeld` if the token is unknown, used or expired, and `ConfigurationError` if it is for another login
        (`answers.not_adopted`).
        """
