"""What most engines need not do: sparing locks on which waiters sleep, and looking whether their files are in place."""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.model import Ticket


class WakeupLocks:
    """Rows that need no lock of their own (main session). Most engines have none anyway, and do nothing here."""

    def drop_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        """Where a row has a lock on which those behind it sleep: these waiting rows of one resource need none, as
        others of ours that ask for the same stand right behind them. (Where others do, they keep it.) May be repeated.
        """

    def restore_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        """Give these rows back such a lock: their turn is near, or they are about to leave. May be repeated."""


class InPlace:
    """The database that a session has open, and the one that other programs find. (A server has no other one.)"""

    def require_in_place(self) -> None:
        """Raise `Replaced` unless both are the same. Called after each call on the main session, whose result is
        believed only then.
        """
