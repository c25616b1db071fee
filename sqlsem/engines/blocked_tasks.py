"""Tasks with locks, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

from sqlsem.model import Claimed

__all__ = ["BlockedTaskSession"]


class BlockedTaskSession(abc.ABC):
    """Tasks that wait for their locks without a process: on the main session. `TaskSession.put_tasks` parks them."""

    offers: ClassVar[str] = "tasks with locks"

    @abc.abstractmethod
    def claim_blocked(
        self, member_id: int, queue: str, owner: str, uid: str, again: bool, requesting_id: str, row_owner: str
    ) -> Claimed | None:
        """A task of the queue whose turn has come in the lines of all its locks, claimed, with a sign of life. Its rows
        are granted, and this member's, from then on, with this ``requesting_id``; ``row_owner`` has them in that
        process. They go with the end of the attempt, in `TaskSession.end_task` and the like.

        None where there is none, or somebody else is looking just now. ``again`` as of `TaskSession.claim_task`.
        """
