"""Guarded tables."""

from __future__ import annotations

import psycopg
from psycopg import errors

from sqlsem.engines.guarded_tables import GuardedTableSession
from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.errors import ConfigurationError
from sqlsem.model import GuardedTable
from sqlsem.printable import first_line


class PostgresGuardedTables(PostgresConnection, GuardedTableSession):
    """Tables that can be written only under a lock."""

    def guard_table(self, table: str, resource: str) -> int:
        return self._change("guard_table", table, resource)

    def unguard_table(self, table: str) -> int:
        return self._change("unguard_table", table)

    def guarded_tables(self) -> list[GuardedTable]:
        return [GuardedTable(*row) for row in self.rows("guarded_tables")]

    def _change(self, name: str, table: str, *parameters: str) -> int:
        try:
            row = self.cursor.execute(self.queries[name], (table, *parameters)).fetchone()
        except psycopg.Error as exc:
            text = first_line(exc)
            ours = text.startswith("sqlsem: ")
            if not ours and isinstance(exc, (errors.UndefinedFunction, errors.InvalidSchemaName)):
                raise self.translate(exc) from exc
            # Of PostgreSQL's own: who may not, a name that is none, another database's.
            if ours or (exc.sqlstate or "")[:2] in ("42", "0A"):
                told = "; ".join(filter(None, (text, exc.diag.message_hint)))
                raise ConfigurationError(f"{self.engine.label}: table {table!r}: {told}") from exc
            raise self.translate(exc) from exc
        assert row is not None
        return int(row[0] or 0)
