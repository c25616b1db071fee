"""Guarded tables, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

from sqlsem.model import GuardedTable

__all__ = ["GuardedTableSession"]


class GuardedTableSession(abc.ABC):
    """Guarded tables, which only a transaction that has asserted a grant of their resource can write.

    A table is named as SQL of the engine names it: ``dbo.[order line]``, ``public."Ledger"``. Raises
    `ConfigurationError` if the table is missing or cannot be guarded, or this login lacks the right, and `Busy` while
    other sessions use the table.
    """

    offers: ClassVar[str] = "guarded tables"

    @abc.abstractmethod
    def guard_table(self, table: str, resource: str) -> int:
        """Guard a table with its partitions; return the number of triggers that were created or enabled."""

    @abc.abstractmethod
    def unguard_table(self, table: str) -> int:
        """Remove the guard of a table with its partitions; return the number of removed triggers."""

    @abc.abstractmethod
    def guarded_tables(self) -> list[GuardedTable]:
        """Return the guarded tables by schema and name, without partitions."""
