"""Guarded tables on SQL Server."""

from __future__ import annotations

from sqlsem.engines.base import Busy, Disconnected
from sqlsem.engines.mssql.connection import SqlServerConnection
from sqlsem.values.errors import ConfigurationError, Unavailable
from sqlsem.values.locks import GuardedTable


class SqlServerGuardedTables(SqlServerConnection):
    """Tables that only a transaction with an asserted grant can write."""

    def guard_table(self, table: str, resource: str) -> int:
        return self._change("guard_table", table, resource)

    def unguard_table(self, table: str) -> int:
        return self._change("unguard_table", table)

    def guarded_tables(self) -> list[GuardedTable]:
        return [GuardedTable(*row) for row in self.rows("guarded_tables")]

    def _change(self, name: str, *parameters: str) -> int:
        try:
            return int(self.value(name, *parameters))
        except (Busy, Disconnected):
            raise
        except Unavailable as exc:  # the server's answer for this table or this login: a retry cannot change it
            raise ConfigurationError(str(exc)) from exc
