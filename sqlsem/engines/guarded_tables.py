"""Guarded tables, as a capability of a session (see `sqlsem.engines.protocol`)."""

from __future__ import annotations

import abc
from typing import ClassVar

from sqlsem.model import GuardedTable

__all__ = ["GuardedTableSession"]


class GuardedTableSession(abc.ABC):
    """Tables into which only a transaction can write that has asserted a grant of their resource.

    A table is named as SQL of the engine names it: ``dbo.[order line]``, ``public."Ledger"``. `ConfigurationError`
    where there is none of that name, it cannot be guarded, or this login may not; `Busy` while others use the table.
    """

    offers: ClassVar[str] = "guarded tables"

    @abc.abstractmethod
    def guard_table(self, table: str, resource: str) -> int:
        """Guard a table, with its partitions; how many triggers were made, or enabled: 0 where all were there."""

    @abc.abstractmethod
    def unguard_table(self, table: str) -> int:
        """Take the guard off a table, with its partitions; how many triggers there were."""

    @abc.abstractmethod
    def guarded_tables(self) -> list[GuardedTable]:
        """By schema and name, without the partitions of guarded tables."""
