"""Locks that are released when a transaction of the caller commits: a capability of sessions (see
`sqlsem.engines.protocol`).
"""

from __future__ import annotations

import abc
from typing import ClassVar

__all__ = ["CommitReleaseSession"]


class CommitReleaseSession(abc.ABC):
    """Commit markers. The caller's transaction writes one (statement ``release_on_commit``), and it becomes visible
    with the commit. Then the lock's own process releases the lock. No other process knows the marker.
    """

    offers: ClassVar[str] = "locks that are given back with a transaction"

    @abc.abstractmethod
    def database_identity(self) -> str:
        """Return the identity of the database: the same in all its sessions, and in no session of another database."""

    @abc.abstractmethod
    def is_committed(self, marker: str) -> bool:
        """Return True if the marker was committed. Does not wait for any transaction."""

    @abc.abstractmethod
    def delete_commit_marker(self, marker: str) -> None:
        """Delete the marker, and some markers of processes that have ended."""
