"""Tasks with locks: a capability of sessions (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

from sqlsem.model import Claimed

__all__ = ["BlockedTaskSession"]


class BlockedTaskSession(abc.ABC):
    """Blocked tasks, which wait for their locks without a process that waits. Called on the main session."""

    offers: ClassVar[str] = "tasks with locks"

    @abc.abstractmethod
    def claim_blocked(
        self, member_id: int, queue: str, owner: str, uid: str, again: bool, requesting_id: str, row_owner: str
    ) -> Claimed | None:
        """Claim a blocked task of the queue whose locks can all be granted, and renew the lease. The rows of its locks
        are then granted, and belong to this member, with this ``requesting_id`` and the owner ``row_owner``. The end of
        the attempt removes them (`TaskSession.end_task` and similar calls).

        Return None if there is no such task, or if another process checks at this moment. ``again``: as in
        `TaskSession.claim_task`.
        """
