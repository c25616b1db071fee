"""What was used of a rate, and how long to wait for more: for engines whose client has to reckon. The others do the
same in SQL; see the comments of PostgreSQL's rates.sql.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sqlsem.model_rates import RateEntry, RateRequest, Window

__all__ = ["Known", "RateState"]

#: No time of a bucket is later; in microseconds. (A debt may be so large that it is never paid.)
LAST_US = 2**62


@dataclass
class Known:
    """What is known of one window. Times are of the database's clock, since 1970."""

    limit: int
    seen_ms: int
    full_us: int | None = None
    taken: int = 0  # since it is known; these three only grow
    returned: int = 0
    waits: int = 0
    slots: dict[int, int] = field(default_factory=dict)

    def copy(self) -> Known:
        return replace(self, slots=dict(self.slots))


def _slot_ms(window_ms: int) -> int:
    return Window(window_ms, 1).slot_ms


class RateState:
    """All windows of one rate, by their lengths in ms."""

    def __init__(self, windows: dict[int, Known] | None = None) -> None:
        self.windows = windows or {}

    def counted(self, window_ms: int, now_ms: int) -> dict[int, int]:
        """The slots of a window that count now, in order."""
        known = self.windows.get(window_ms)
        first = (now_ms - window_ms) // _slot_ms(window_ms)
        return {} if known is None else {slot: known.slots[slot] for slot in sorted(known.slots) if slot >= first}

    def take(self, request: RateRequest, now_us: int, *, waited: bool = False) -> int:
        """Take what is asked if it is there, which was waited for or not; how many ms to wait, 0 where it was taken."""
        now_ms = now_us // 1000
        self.begin(request.windows, now_ms)
        wait_ms = max(self._wait_ms(window, request.cost, now_ms) for window in request.windows)
        if request.burst is not None:
            (window,) = request.windows
            known = self.windows[window.ms]
            if known.full_us is None:
                known.full_us = now_us
            room = (request.burst - request.cost) * window.ms * 1000 // window.limit
            wait_ms = max(wait_ms, -((now_us + room - known.full_us) // 1000))
        if wait_ms <= 0:
            for window in request.windows:
                self.windows[window.ms].limit = window.limit
            for known in self.windows.values():
                known.waits += waited
            self.use(request.cost, now_us, 0)
        return max(0, wait_ms)

    def _wait_ms(self, window: Window, cost: int, now_ms: int) -> int:
        counted = self.counted(window.ms, now_ms)
        over = sum(counted.values()) + cost - window.limit
        for slot, used in counted.items():
            if over <= 0:
                break
            over -= used
            if over <= 0:
                return (slot + 1) * window.slot_ms + window.ms - now_ms
        return 0

    def entries(self, resource: str, now_ms: int) -> list[RateEntry]:
        """Its windows as people see them."""
        return [
            RateEntry.of_row(
                resource,
                ms,
                known.limit,
                sum(self.counted(ms, now_ms).values()),
                max(0, now_ms - known.seen_ms) / 1000,
                known.taken,
                known.returned,
                known.waits,
                self._wait_ms(Window(ms, known.limit), 1, now_ms) / 1000,
            )
            for ms, known in sorted(self.windows.items())
        ]

    def begin(self, windows: Sequence[Window], now_ms: int) -> None:
        """Make windows known that are not yet, and put right what a clock that went back has left in the future."""
        for ms, known in self.windows.items():
            if known.seen_ms > now_ms:
                here = now_ms // _slot_ms(ms)
                ahead = sum(known.slots.pop(slot) for slot in list(known.slots) if slot > here)
                if ahead:
                    known.slots[here] = known.slots.get(here, 0) + ahead
                if known.full_us is not None:
                    known.full_us -= (known.seen_ms - now_ms) * 1000
                known.seen_ms = now_ms
        for window in windows:
            if window.ms not in self.windows:
                new = Known(window.limit, now_ms)
                if self.windows:  # the shortest of those that are longer, or else the longest
                    other = min(self.windows, key=lambda ms: (ms < window.ms, abs(ms - window.ms)))
                    for slot, used in self.windows[other].slots.items():
                        if slot >= (now_ms - window.ms) // _slot_ms(other):
                            at = min(now_ms, (slot + 1) * _slot_ms(other) - 1) // window.slot_ms
                            new.slots[at] = new.slots.get(at, 0) + used
                self.windows[window.ms] = new

    def use(self, used: int, now_us: int, then_ms: int) -> None:
        """So much was used now (or, negative, is given back of what was used then)."""
        now_ms = now_us // 1000
        for ms, known in self.windows.items():
            known.seen_ms = max(known.seen_ms, now_ms)
            known.taken += max(0, used)
            known.returned += max(0, -used)
            if known.full_us is not None:
                advance = abs(used) * ms * 1000
                if used > 0:
                    known.full_us = min(max(known.full_us, now_us) - (-advance // known.limit), LAST_US)
                else:
                    # (Of what has leaked since nothing is left that could be given back.)
                    back = min(advance // known.limit, LAST_US)
                    known.full_us -= max(0, min(back, min(then_ms * 1000, now_us) + back - now_us))
            slot = (now_ms if used > 0 else then_ms) // _slot_ms(ms)
            if used > 0:
                known.slots[slot] = known.slots.get(slot, 0) + used
            elif slot in known.slots:
                known.slots[slot] = max(0, known.slots[slot] + used)
            known.slots = self.counted(ms, now_ms)
