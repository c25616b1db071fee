"""Locks that sessions keep in the database, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

from sqlsem.insight.kept import KeptLock

__all__ = ["KeptLockSession"]


class KeptLockSession(abc.ABC):
    """The database's own locks that other calls wait for, and that any login may be able to take."""

    offers: ClassVar[str] = "a look at locks that sessions keep in the database"

    @abc.abstractmethod
    def kept_locks(self, resource: str | None) -> list[KeptLock]:
        """Return the locks that sessions keep for longer than a call needs them; of ``resource``, or all."""
