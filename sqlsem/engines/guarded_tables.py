"""Guarded tables: a capability of sessions (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

from sqlsem.model import GuardedTable

__all__ = ["GuardedTableSession"]


class GuardedTableSession(abc.ABC):
    """Guarded tables: only transactions that have asserted a grant of the table's resource can write them.

    ``table`` is a name in the engine's SQL: ``dbo.[order line]``, ``public."Ledger"``. The calls raise
    `ConfigurationError` if the table is missing or cannot be guarded, or this login lacks the right; and `Busy` while
    other sessions use the table.
    """

    offers: ClassVar[str] = "guarded tables"

    @abc.abstractmethod
    def guard_table(self, table: str, resource: str) -> int:
        """Guard a table and its partitions. Return the number of triggers that were created or enabled."""

    @abc.abstractmethod
    def unguard_table(self, table: str) -> int:
        """Remove the guard of a table and its partitions. Return the number of removed triggers."""

    @abc.abstractmethod
    def guarded_tables(self) -> list[GuardedTable]:
        """Return the guarded tables by schema and name, without partitions."""
