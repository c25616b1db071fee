"""Rates, including the rates of starts of tasks: a queue of requests, and windows of use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from sqlsem.engines.rate_windows import RateState, Slot, WindowState
from sqlsem.engines.statements.admission import LAST
from sqlsem.engines.statements.locks import LockStatements
from sqlsem.engines.statements.members import MemberStatements
from sqlsem.values.locks import Ticket
from sqlsem.values.rates import RateAnswer, RateDemand, RateEntry, RateRequest, RateStatus


class RateUsageStatements(MemberStatements):
    """Reads and writes the windows of a rate."""

    def now_us(self, state: RateState | None = None) -> int:
        """Return the database's time in microseconds since 1970. For a rate of a cluster: no earlier than its last use,
        which a node whose clock is ahead may have recorded.
        """
        now_us = math.floor(float(self.row("clock")["now"]) * 1_000_000)
        if state is not None and self.clock_margin:
            seen_us = max((known.seen_ms * 1000 for known in state.windows.values()), default=now_us)
            if now_us < seen_us <= now_us + self.clock_margin * 1_000_000:  # (else the clock was set back)
                return seen_us
        return now_us

    def rate_state(self, resource: str) -> RateState:
        """Return the stored windows of a rate."""
        windows = {
            int(row["window_ms"]): WindowState(
                *(row["rate_limit"], int(row["seen_ms"]), row["full_us"]),
                *(row["taken"], row["returned"], row["waits"], row["burst"], row["cap"]),
            )
            for row in self.rows("rate_windows", (resource,))
        }
        for row in self.rows("rate_slots", (resource,)):
            if row["window_ms"] in windows:
                windows[row["window_ms"]].slots[row["slot"]] = Slot(row["used"], row["rate_limit"], row["burst"])
        return RateState(windows)

    def windows_of(self, resources: Iterable[str], now_ms: int) -> list[RateEntry]:
        """Return the windows of these rates for displays."""
        return [entry for name in resources for entry in self.rate_state(name).entries(name, now_ms)]

    def write_rate(self, resource: str, state: RateState) -> None:
        """Write the changes of a rate, in the transaction that read it."""
        before = state.stored
        for ms in before.keys() - state.windows.keys():
            for slot in before[ms].slots:
                self.run("drop_rate_slot", {"resource": resource, "window": ms, "slot": slot})
            self.run("drop_rate_window", {"resource": resource, "window": ms})
        for ms, known in state.windows.items():
            old = before.get(ms, WindowState(0, 0))
            key = {"resource": resource, "window": ms}
            if replace(old, slots={}) != replace(known, slots={}):
                values = {"limit": known.limit, "seen": known.seen_ms, "full": known.full_us}
                counters = {"taken": known.taken, "returned": known.returned, "waits": known.waits}
                bounds = {"burst": known.burst, "cap": known.cap, "login": self.login()}
                self.run("put_rate_window", {**key, **values, **counters, **bounds})
            for slot in old.slots.keys() - known.slots.keys():
                self.run("drop_rate_slot", {**key, "slot": slot})
            for slot, use in known.slots.items():
                if old.slots.get(slot) != use:
                    values = {"slot": slot, "used": use.used, "limit": use.limit, "burst": use.burst}
                    self.run("put_rate_slot", {**key, **values})


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
        wait_ms = state.take(request, now_us, waited=ticket is not None)
        self.write_rate(request.resource, state)
        if wait_ms:
            return RateAnswer(RateStatus.TOO_EARLY, seconds=wait_ms / 1000)
        return RateAnswer(RateStatus.TAKEN, times=(now_us // 1000,))

    def reset_rate(self, resource: str) -> bool:
        with self.forks_blocked, self.transaction():
            state = self.rate_state(resource)
            if state.windows:
                used = state.reset()
                self.write_rate(resource, state)
                self.note_operation("reset", resource=resource, old=str(used))
        return bool(state.windows)

    def set_rate(self, resource: str, window_ms: int, limit: int | None) -> bool:
        with self.forks_blocked, self.transaction():
            state = self.rate_state(resource)
            cap = state.set_cap(window_ms, limit, self.now_us(state) // 1000)
            self.write_rate(resource, state)
            if cap != limit:
                old, new = (None if number is None else f"{number} in {window_ms} ms" for number in (cap, limit))
                self.note_operation("rate_limit", resource=resource, old=old, new=new)
        return cap is not None or limit is not None

    def adjust_rate(self, resource: str, taken_ms: int, more: int) -> None:
        with self.forks_blocked, self.transaction():
            state = self.rate_state(resource)
            now_us = self.now_us(state)
            state.begin((), now_us // 1000)
            state.use(more, now_us, taken_ms)
            self.write_rate(resource, state)

    def rates(self, resource: str | None) -> list[RateEntry]:
        with self.forks_blocked, self.reading():
            now_ms = self.now_us() // 1000
            names = [row["resource_id"] for row in self.rows("rated_resources", {"resource": resource})]
            return self.windows_of(names, now_ms)
