"""Rates: a queue of requests, and windows of use."""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.engines.statements.admission import LAST
from sqlsem.engines.statements.locks import LockStatements
from sqlsem.engines.statements.rate_usage import RateUsageStatements
from sqlsem.values.locks import Ticket
from sqlsem.values.rates import RateAnswer, RateDemand, RateEntry, RateRequest, RateStatus


class RateStatements(LockStatements, RateUsageStatements):
    """Rates. Each call reads, calculates and writes them in one writing transaction."""

    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        end = {"resource": request.resource, "position": LAST}
        if ticket is None and self.rows("first_in_line", end):  # remove rows of dead owners
            self.check_blockers(request.queue_request(), LAST, self.member_id)
        with self.forks_blocked:
            with self.transaction():
                answer = self._take(request, ticket)
                is_served = answer.status is RateStatus.TAKEN and ticket is not None
                granted = self.leave(ticket, "released")[1] if is_served and ticket is not None else []
            if granted:
                self.sleeper.notify(granted)
        return answer

    def _take(self, request: RateRequest, ticket: Ticket | None) -> RateAnswer:
        key = {"resource": request.resource, "position": LAST if ticket is None else ticket.position}
        if ticket is not None and not self.rows("in_line", {**key, "requesting_id": ticket.requesting_id}):
            return RateAnswer(RateStatus.GONE)
        if self.rows("first_in_line", key):
            return RateAnswer(RateStatus.OTHERS_FIRST)
        state = self.rate_state(request.resource)
        now_us = self.now_us(state)
        before = {ms: known.copy() for ms, known in state.windows.items()}
        wait_ms = state.take(request, now_us, waited=ticket is not None)
        self.write_rate(request.resource, before, state)
        if wait_ms:
            return RateAnswer(RateStatus.TOO_EARLY, seconds=wait_ms / 1000)
        return RateAnswer(RateStatus.TAKEN, times=(now_us // 1000,))

    def reset_rate(self, resource: str) -> bool:
        with self.forks_blocked, self.transaction():
            state = self.rate_state(resource)
            before = {ms: known.copy() for ms, known in state.windows.items()}
            if before:
                used = state.reset()
                self.write_rate(resource, before, state)
                self.note_operation("reset", resource=resource, old=str(used))
        return bool(before)

    def set_rate(self, resource: str, window_ms: int, limit: int | None) -> bool:
        with self.forks_blocked, self.transaction():
            state = self.rate_state(resource)
            before = {ms: known.copy() for ms, known in state.windows.items()}
            cap = state.set_cap(window_ms, limit, self.now_us(state) // 1000)
            self.write_rate(resource, before, state)
            if cap != limit:
                old, new = (None if number is None else f"{number} in {window_ms} ms" for number in (cap, limit))
                self.note_operation("rate_limit", resource=resource, old=old, new=new)
        return cap is not None or limit is not None

    def adjust_rate(self, resource: str, taken_ms: int, more: int) -> None:
        with self.forks_blocked, self.transaction():
            state = self.rate_state(resource)
            now_us = self.now_us(state)
            before = {ms: known.copy() for ms, known in state.windows.items()}
            state.begin((), now_us // 1000)
            state.use(more, now_us, taken_ms)
            self.write_rate(resource, before, state)

    def rates(self, resource: str | None) -> list[RateEntry]:
        with self.forks_blocked, self.reading():
            now_ms = self.now_us() // 1000
            names = [row["resource_id"] for row in self.rows("rated_resources", {"resource": resource})]
            return self.windows_of(names, now_ms)
