"""What those who wait are woken by, where that has a price for each row."""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.model import Ticket


class Sparing:
    """Rows that need no lock of their own (main session). Most engines have none anyway, and do nothing here."""

    def spare_entries(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        """Where a row has a lock on which those behind it sleep: these waiting rows of one resource need none, as
        others of ours that ask for the same stand right behind them. (Where others do, they keep it.) May be repeated.
        """

    def keep_entries(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        """Give these rows back such a lock: their turn is near, or they are about to leave. May be repeated."""
