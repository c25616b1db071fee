"""Rates on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.engines.base import here
from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.values.locks import Ticket
from sqlsem.values.rates import RateAnswer, RateDemand, RateEntry, RateRequest


class PostgresRates(PostgresConnection):
    """Rates, with batches of demands and reserved slots."""

    batches_rates = True

    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        limits, windows = [window.limit for window in request.windows], [window.ms for window in request.windows]
        row = (None, None) if ticket is None else (ticket.position, ticket.requesting_id)
        costs, ahead = [demand.cost for demand in more], [ahead_ms, *(demand.ahead_ms for demand in more)]
        return RateAnswer.of_row(
            *self.row("take_rate", request.resource, request.cost, limits, windows, request.burst, *row, costs, ahead)
        )

    def adjust_rate(self, resource: str, taken_ms: int, more: int) -> None:
        self.rows("adjust_rate", (resource, taken_ms, more))

    def reset_rate(self, resource: str) -> bool:
        return bool(self.row("reset_rate", here(), resource)[1] == 0)

    def set_rate(self, resource: str, window_ms: int, limit: int | None) -> bool:
        return bool(self.row("set_rate", here(), resource, window_ms, limit)[1] == 0)

    def rates(self, resource: str | None) -> list[RateEntry]:
        return [RateEntry.of_row(*row) for row in self.rows("rates", (resource,))]
