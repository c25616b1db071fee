"""Removing members, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

__all__ = ["RemovalSession"]


class RemovalSession(abc.ABC):
    """Members that an operator removes."""

    offers: ClassVar[str] = "removal of members"

    @abc.abstractmethod
    def revoke_members(self, member: int | None, login: str | None, force: bool) -> int:
        """Take all rows from a member, or from all members of a login, as `AdminSession.revoke` does, and remove the
        members that have none left; how many members are gone.
        """
