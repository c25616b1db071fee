"""Tasks with locks, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

from sqlsem.model import Claimed

__all__ = ["BlockedTaskSession"]


class BlockedTaskSession(abc.ABC):
    """Blocked tasks: tasks that wait for their locks without a process. Called on the main session."""

    offers: ClassVar[str] = "tasks with locks"

    @abc.abstractmethod
    def claim_blocked(
        self, member_id: int, queue: str, owner: str, uid: str, again: bool, requesting_id: str, row_owner: str
    ) -> Claimed | None:
        """Claim a blocked task of the queue whose locks can all be granted, and renew the lease. Its rows are granted
        and belong to this member from then on, with this ``requesting_id`` and owner ``row_owner``. They are removed
        with the end of the attempt (`TaskSession.end_task` and the like).

        Returns None if there is none, or another process is checking just now. ``again``: as in
        `TaskSession.claim_task`.
        """
