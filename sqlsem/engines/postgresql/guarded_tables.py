"""Guarded tables on PostgreSQL."""

from __future__ import annotations

import psycopg
from psycopg import errors

from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.util.printable import first_line
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import GuardedTable


class PostgresGuardedTables(PostgresConnection):
    """Tables that only a transaction with an asserted grant can write."""

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
            is_own = text.startswith("sqlsem: ")
            if not is_own and isinstance(exc, (errors.UndefinedFunction, errors.InvalidSchemaName)):
                raise self.translate(exc) from exc
            # PostgreSQL's own errors: a missing right, an invalid name, a table of another database.
            if is_own or (exc.sqlstate or "")[:2] in ("42", "0A"):
                detail = "; ".join(filter(None, (text, exc.diag.message_hint)))
                raise ConfigurationError(f"{self.engine.label}: table {table!r}: {detail}") from exc
            raise self.translate(exc) from exc
        assert row is not None
        return int(row[0] or 0)
