"""All capabilities that statements implement, in one class."""

from __future__ import annotations

from sqlsem.engines.statements.blocked_tasks import BlockedTaskStatements
from sqlsem.engines.statements.commit_release import CommitReleaseStatements
from sqlsem.engines.statements.handovers import HandoverStatements
from sqlsem.engines.statements.overview import OverviewStatements
from sqlsem.engines.statements.periodic import PeriodStatements
from sqlsem.engines.statements.priorities import PriorityStatements
from sqlsem.engines.statements.rates import RateStatements
from sqlsem.engines.statements.schedules import ScheduleStatements

__all__ = ["AllStatements"]


class AllStatements(
    HandoverStatements,
    PriorityStatements,
    PeriodStatements,
    CommitReleaseStatements,
    OverviewStatements,
    ScheduleStatements,
    RateStatements,
    BlockedTaskStatements,
):
    """An engine's session derives from this class, and before that from its own connection."""
