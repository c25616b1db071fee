"""The stored windows of rates, including the rates of starts of tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from sqlsem.engines.rate_windows import RateState, Slot, WindowState
from sqlsem.engines.statements.members import MemberStatements
from sqlsem.values.rates import RateEntry


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

    def write_rate(self, resource: str, before: dict[int, WindowState], state: RateState) -> None:
        """Write the differences from ``before``, in the transaction that read it."""
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
