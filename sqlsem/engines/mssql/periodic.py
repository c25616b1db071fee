"""Runs once per period on SQL Server."""

from __future__ import annotations

from sqlsem.engines.mssql.connection import SqlServerConnection, aware
from sqlsem.values.locks import OnceEntry, Ticket


class SqlServerPeriods(SqlServerConnection):
    """The latest run of each name."""

    def once_due(self, name: str, ticket: Ticket | None, per_ms: int, offset_ms: int) -> bool | None:
        row = (None, None) if ticket is None else (ticket.position, ticket.requesting_id)
        due = self.value("once_due", name, *row, per_ms, offset_ms)
        return None if due < 0 else bool(due)

    def mark_once(self, name: str, ticket: Ticket) -> bool:
        return bool(self.value("mark_once", name, ticket.position, ticket.requesting_id) == 0)

    def once_last(self, name: str) -> OnceEntry | None:
        rows = self.rows("once_last", name)
        return OnceEntry(name, *aware(rows[0])) if rows else None

    def once_forget(self, name: str) -> bool:
        return bool(self.value("once_forget", name) == 0)
