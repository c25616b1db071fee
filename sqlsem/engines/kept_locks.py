"""Kept locks: a capability of sessions (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

from sqlsem.insight.kept import KeptLock

__all__ = ["KeptLockSession"]


class KeptLockSession(abc.ABC):
    """Locks of the database itself that calls of sqlsem take for a moment. A session that keeps one delays other calls;
    any login may be able to do so.
    """

    offers: ClassVar[str] = "a list of locks that sessions keep in the database"

    @abc.abstractmethod
    def kept_locks(self, resource: str | None) -> list[KeptLock]:
        """Return the locks that sessions keep for longer than a call needs them; of ``resource``, or all."""
