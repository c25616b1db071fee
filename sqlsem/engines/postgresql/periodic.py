"""Runs once per period on PostgreSQL."""

from __future__ import annotations

from sqlsem.engines.base import here
from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.values.locks import OnceEntry, Ticket


class PostgresPeriods(PostgresConnection):
    """The latest run of each name."""

    def once_due(self, name: str, ticket: Ticket | None, per_ms: int, offset_ms: int) -> bool | None:
        row = (None, None) if ticket is None else (ticket.position, ticket.requesting_id)
        due: bool | None = self.row("once_due", name, *row, per_ms, offset_ms)[0]
        return due

    def mark_once(self, name: str, ticket: Ticket) -> bool:
        return self.number("mark_once", name, ticket.position, ticket.requesting_id) == 0

    def once_last(self, name: str) -> OnceEntry | None:
        rows = self.rows("once_last", (name,))
        return OnceEntry(name, *rows[0]) if rows else None

    def once_forget(self, name: str) -> bool:
        return bool(self.row("once_forget", here(), name)[1] == 0)
