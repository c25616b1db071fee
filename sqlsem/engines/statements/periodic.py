"""Runs once per period."""

from __future__ import annotations

from sqlsem.engines.statements.members import MemberStatements
from sqlsem.engines.statements.values import shown
from sqlsem.values.locks import OnceEntry, Ticket


class PeriodStatements(MemberStatements):
    """The latest run of each name."""

    def once_due(self, name: str, ticket: Ticket | None, per_ms: int, offset_ms: int) -> bool | None:
        at = None
        if ticket is not None:
            at = self._granted_at(ticket)
            if at is None:
                return None
        answer = self.row("once_due", {"name": name, "at": at, "per_ms": per_ms, "offset_ms": offset_ms})
        return bool(answer["due"])

    def mark_once(self, name: str, ticket: Ticket) -> bool:
        with self.forks_blocked, self.transaction():
            at = self._granted_at(ticket)
            if at is None:
                return False
            row = {"position": ticket.position, "requesting_id": ticket.requesting_id}
            self.run("mark_once", {"name": name, "at": at, **row, "login": self.login()})
        return True

    def _granted_at(self, ticket: Ticket) -> float | None:
        """Return the time at which the row was granted, or None."""
        key = {"resource": ticket.resource, "position": ticket.position, "requesting_id": ticket.requesting_id}
        row = self.row("once_turn", key)
        return None if row is None else row["granted_at"]

    def once_runs(self, name: str | None) -> list[OnceEntry]:
        return [shown(OnceEntry, row, fence=row["position"]) for row in self.rows("once_runs", {"name": name})]

    def once_forget(self, name: str) -> bool:
        with self.forks_blocked, self.transaction():
            row = self.row("once_runs", {"name": name})
            if row is not None:
                self.run("once_forget", (name,))
                self.note_operation("forget", resource=f"once:{name}", old=str(row["done_at"]))
        return row is not None
