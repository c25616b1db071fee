"""The overview of locks, members, queues, batches and rates at one instant."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from sqlsem.engines.statements.administration import AdministrationStatements
from sqlsem.engines.statements.locks import LockStatements
from sqlsem.engines.statements.rate_usage import RateUsageStatements
from sqlsem.engines.statements.tasks import TaskStatements
from sqlsem.engines.statements.values import as_time, shown
from sqlsem.util import late

if TYPE_CHECKING:
    from sqlsem.insight.overview import Overview


#: The maximum number of resources with recent holds, and of rates with windows, in an overview.
MAX_RESOURCES = 200


class OverviewStatements(LockStatements, TaskStatements, AdministrationStatements, RateUsageStatements):
    """The overview of locks, members, queues, batches and rates."""

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
