"""Locks that are released when a transaction of the caller commits, as a capability of a session (see
`sqlsem.engines.protocol`).
"""

from __future__ import annotations

import abc
from typing import ClassVar

__all__ = ["CommitReleaseSession"]


class CommitReleaseSession(abc.ABC):
    """The caller's transaction writes a commit marker (statement ``release_on_commit``). The marker is visible once the
    transaction has committed; then the lock's own process releases the lock. No other process knows the marker.
    """

    offers: ClassVar[str] = "locks that are given back with a transaction"

    @abc.abstractmethod
    def database_identity(self) -> str:
        """Return the identity of the database: the same for all sessions on it, and for no others."""

    @abc.abstractmethod
    def is_committed(self, word: str) -> bool:
        """Return True if the marker was committed. Waits for no transaction."""

    @abc.abstractmethod
    def delete_commit_marker(self, word: str) -> None:
        """Delete the marker, and some of processes that have ended."""
