"""All capabilities that statements implement, in one class."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from sqlsem.engines.statements.administration import AdministrationStatements
from sqlsem.engines.statements.blocked_tasks import BlockedTaskStatements
from sqlsem.engines.statements.handovers import HandoverStatements
from sqlsem.engines.statements.priorities import PriorityStatements
from sqlsem.engines.statements.rates import RateStatements
from sqlsem.engines.statements.tasks import ScheduleStatements
from sqlsem.engines.statements.values import as_time, shown
from sqlsem.util import late
from sqlsem.values.locks import OnceEntry, Ticket

if TYPE_CHECKING:
    from sqlsem.insight.overview import Overview

#: The maximum number of resources with recent holds, and of rates with windows, in an overview.
MAX_RESOURCES = 200


class AllStatements(
    HandoverStatements,
    PriorityStatements,
    AdministrationStatements,
    ScheduleStatements,
    RateStatements,
    BlockedTaskStatements,
):
    """An engine's session derives from this class, and before that from its own connection. Here are the overview, runs
    once per period, and commit markers.
    """

    def overview(self) -> Overview:
        with late.importing:
            from sqlsem.insight.overview import MemberEntry, Overview
        with self.forks_blocked, self.reading():
            now = self.row("clock")["now"]
            entries = self.entries(None)
            holding = Counter(entry.member_id for entry in entries if entry.granted_at is not None)
            waiting = Counter(entry.member_id for entry in entries if entry.granted_at is None)
            members = []
            for row in self.rows("members"):
                dead, missing_for = self.missing(row)
                left = row["lease_left"] if missing_for is None else row["grace_left"]
                known: dict[str, Any] = {"missing_for": missing_for, "grace_left": 0.0 if dead else left}
                counts = {"holding": holding[row["member_id"]], "waiting": waiting[row["member_id"]]}
                members.append(shown(MemberEntry, row, **known, **counts))
            waiters = Counter(entry.resource for entry in entries if entry.granted_at is None)
            resources = sorted({entry.resource for entry in entries}, key=lambda name: (-waiters[name], name))
            return Overview.of_rows(
                as_time(now) or datetime.now(timezone.utc),
                entries,
                self.settings_of_resources(),
                members,
                self.queue_counts(None),
                [
                    batch
                    for (number,) in self.rows("unfinished_batches")
                    for batch in self.list_batches(None, number, 1)
                ],
                self.rows("recent_holds", {"resources": json.dumps(resources[:MAX_RESOURCES])}),
                self.windows_of(
                    sorted(row["resource_id"] for row in self.rows("wanted_rates", (MAX_RESOURCES,))),
                    self.now_us() // 1000,
                ),
            )

    # -- runs once per period: the latest run of each name ---------------------------------------------------------

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

    # -- commit markers, as rows of a table -------------------------------------------------------------------------

    def database_identity(self) -> str:
        return str(self.row("database_identity")["place"])

    def is_committed(self, marker: str) -> bool:
        return self.row("is_committed", (marker,)) is not None

    def delete_commit_marker(self, marker: str) -> None:
        with self.forks_blocked, self.transaction():
            self.run("delete_commit_marker", (marker,))
