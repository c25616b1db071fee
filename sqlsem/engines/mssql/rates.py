"""Rates on SQL Server."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlsem.engines.mssql.connection import SqlServerConnection
from sqlsem.values.locks import Ticket
from sqlsem.values.rates import RateAnswer, RateDemand, RateEntry, RateRequest


class SqlServerRates(SqlServerConnection):
    """Rates: one routine call each."""

    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        windows = json.dumps([{"limit": window.limit, "ms": window.ms} for window in request.windows])
        row = (None, None) if ticket is None else (ticket.position, ticket.requesting_id)
        code, wait_ms, taken_ms = self.rows("take_rate", request.resource, request.cost, windows, request.burst, *row)[
            0
        ]
        return RateAnswer.of_row(int(code), wait_ms, () if taken_ms is None else (taken_ms,))

    def adjust_rate(self, resource: str, taken_ms: int, more: int) -> None:
        self.rows("adjust_rate", resource, taken_ms, more)

    def reset_rate(self, resource: str) -> bool:
        return bool(self.value("reset_rate", resource) == 0)

    def set_rate(self, resource: str, window_ms: int, limit: int | None) -> bool:
        return bool(self.value("set_rate", resource, window_ms, limit) == 0)

    def rates(self, resource: str | None) -> list[RateEntry]:
        return [RateEntry.of_row(*row) for row in self.rows("rates", resource)]
