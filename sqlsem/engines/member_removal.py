"""Removing members, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

__all__ = ["RemovalSession"]


class RemovalSession(abc.ABC):
    """Removal of members by an operator."""

    offers: ClassVar[str] = "removal of members"

    @abc.abstractmethod
    def revoke_members(self, member: int | None, login: str | None, force: bool) -> int:
        """Revoke all rows of a member, or of all members of a login, as `AdminSession.revoke` does, and remove the
        members without rows; return the number of removed members.
        """
