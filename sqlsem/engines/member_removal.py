"""Removal of members: a capability of sessions (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

__all__ = ["RemovalSession"]


class RemovalSession(abc.ABC):
    """Removal of members by an operator."""

    offers: ClassVar[str] = "removal of members"

    @abc.abstractmethod
    def revoke_members(self, member: int | None, login: str | None, force: bool) -> int:
        """Revoke all rows of a member, or of all members of a login, as `AdminSession.revoke` does. Remove those
        members that have no rows left, and return their number.
        """
