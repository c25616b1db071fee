"""Two tasks that most engines do not have: wakeup locks, and the check whether the database file was replaced.

A *wakeup lock* is a lock of the database on a waiting row, on which the next waiter sleeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.model import Ticket


class WakeupLocks:
    """Wakeup locks of waiting rows, on the main session. The defaults are for engines without wakeup locks."""

    def drop_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        """Drop the wakeup locks of these waiting rows of one resource. The waiter behind each is this member's too, so
        no waiter of another member sleeps on them. (A row before another member's waiter keeps its lock.) Idempotent.
        """

    def restore_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        """Restore the wakeup locks of rows that are near the head of the queue, or are about to be removed.
        Idempotent.
        """


class InPlace:
    """The check whether the open database file is still the one at its path. (A server needs no such check.)"""

    def require_in_place(self) -> None:
        """Raise `Replaced` if the open database was replaced. Each call on the main session is followed by this check;
        if it raises, the result of the call does not count.
        """
