"""Two duties that most engines do not have: wakeup locks, and the check whether the database file was replaced."""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.model import Ticket


class WakeupLocks:
    """Wakeup locks of waiting rows, on the main session. The defaults are for engines without wakeup locks."""

    def drop_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        """Drop the wakeup locks of these waiting rows of one resource: the next waiter is this member's too, so no
        foreign waiter sleeps on them. (A row before a foreign waiter keeps its lock.) Idempotent.
        """

    def restore_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        """Restore the wakeup locks of rows that are near the head of the queue or about to be released. Idempotent."""


class InPlace:
    """The check whether other programs find the database that a session has open. (A server always has one.)"""

    def require_in_place(self) -> None:
        """Raise `Replaced` if the open database was replaced. Called after each call on the main session, whose result
        counts only then.
        """
