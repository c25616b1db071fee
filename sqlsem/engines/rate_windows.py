"""The windows of a rate, their use, and the time until there is room: for engines that compute rates in the client.

The servers do the same in SQL; the comments in PostgreSQL's rates.sql describe it. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sqlsem.values.errors import ConfigurationError
from sqlsem.values.rates import MAX_KNOWN_WINDOWS, RateEntry, RateRequest, Window

#: The number of windows after which the bucket of a burst has room again, however large the debt is.
DEBT_WINDOWS = 10


@dataclass(frozen=True)
class Slot:
    """The use in a hundredth of a window. ``limit`` and ``burst``: the lowest ones that were declared with this use."""

    used: int
    limit: int | None = None
    burst: int | None = None

    def __add__(self, other: Slot) -> Slot:
        return Slot(self.used + other.used, _minimum(self.limit, other.limit), _minimum(self.burst, other.burst))


@dataclass
class WindowState:
    """The state of one window. Times are since 1970, by the database's clock."""

    limit: int | None  # the limit in force at the last take; ``burst`` likewise. None: no limit at all
    seen_ms: int  # the time of the last use
    full_us: int | None = None  # the time at which the bucket of a burst is full again
    taken: int = 0  # this and the next two only grow, from the time when the window became known
    returned: int = 0
    waits: int = 0
    burst: int | None = None
    cap: int | None = None  # an operator's limit
    slots: dict[int, Slot] = field(default_factory=dict)

    def copy(self) -> WindowState:
        return replace(self, slots=dict(self.slots))


@dataclass(frozen=True)
class _EffectiveWindow:
    """A window in force for a request: the slots that count, the limit that does not expire (``fixed``: that of the
    request and of an operator), and the limit and burst in force now.
    """

    ms: int
    slots: dict[int, Slot]
    fixed: int | None
    limit: int
    burst: int | None

    @property
    def used(self) -> int:
        return sum(slot.used for slot in self.slots.values())


def _minimum(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _slot_ms(window_ms: int) -> int:
    return Window(window_ms, 1).slot_ms


class RateState:
    """All windows of one rate, by their lengths in ms."""

    def __init__(self, windows: dict[int, WindowState] | None = None) -> None:
        self.windows = windows or {}
        #: As they were read from the database.
        self.stored = {ms: known.copy() for ms, known in self.windows.items()}

    def counted(self, window_ms: int, now_ms: int) -> dict[int, Slot]:
        """Return the slots of a window that count now, by number, in order."""
        known = self.windows.get(window_ms)
        first = (now_ms - window_ms) // _slot_ms(window_ms)
        return {} if known is None else {slot: known.slots[slot] for slot in sorted(known.slots) if slot >= first}

    def take(self, request: RateRequest, now_us: int, *, waited: bool = False, declares: bool = True) -> int:
        """Take the request's cost if there is room. Return the ms to wait; 0 if the cost was taken. ``declares``: the
        request's limits also count for other requests, until its use has left the windows.

        Raises `ConfigurationError` if the cost can never be taken.
        """
        self.begin(request.windows, now_us // 1000)
        if request.burst is not None:
            known = self.windows[request.windows[0].ms]
            known.full_us = now_us if known.full_us is None else known.full_us
        effective = self._in_force(request.windows, request.burst, now_us // 1000)
        if not effective:
            raise ConfigurationError(
                f"No limit is set for rate {request.name!r}: name a limit and a window, or have an operator set them "
                f"with sqlsem rates set",
                resource=request.resource,
                code="rate",
            )
        wait_ms = 0
        for window in effective:
            if window.fixed is not None and request.cost > window.fixed:
                raise ConfigurationError(
                    f"A cost of {request.cost} can never fit into the rate {request.name!r}: an operator allows "
                    f"{Window(window.ms, window.fixed)}; lower the cost, or have the limit raised",
                    resource=request.resource,
                    code="rate",
                )
            wait_ms = max(wait_ms, self._wait_ms(window, request.cost, now_us))
        if wait_ms <= 0:
            for window in effective:
                self.windows[window.ms].limit, self.windows[window.ms].burst = window.limit, window.burst
            for known in self.windows.values():
                known.waits += waited
            self.use(request.cost, now_us, 0, request if declares else None)
        return wait_ms

    def _in_force(self, windows: Sequence[Window], burst: int | None, now_ms: int) -> list[_EffectiveWindow]:
        """Return the windows in force: windows that the request declares, windows that other requests declared with use
        that still counts, and windows with an operator's limit.
        """
        declared, effective = {window.ms: window.limit for window in windows}, []
        for ms, known in self.windows.items():
            slots = self.counted(ms, now_ms)
            fixed = _minimum(declared.get(ms), known.cap)
            limit = _minimum(fixed, *(slot.limit for slot in slots.values()))
            if limit is not None:
                own = burst if ms in declared else None
                effective.append(
                    _EffectiveWindow(ms, slots, fixed, limit, _minimum(own, *(slot.burst for slot in slots.values())))
                )
        return effective

    def _wait_ms(self, window: _EffectiveWindow, cost: int, now_us: int) -> int:
        """Return the ms until the cost fits into a window. Its slots, with their limits, leave it one after the
        other.
        """
        now_ms, numbers = now_us // 1000, list(window.slots)
        used, lowest = cost, window.fixed
        while numbers:
            slot = window.slots[numbers[-1]]
            used, lowest = used + slot.used, _minimum(lowest, slot.limit)
            if lowest is not None and used > lowest:
                break
            numbers.pop()

        def ms_until_gone(slot: int) -> int:
            return (slot + 1) * _slot_ms(window.ms) + window.ms - now_ms

        wait_ms = ms_until_gone(numbers[-1]) if numbers else 0
        full_us = self.windows[window.ms].full_us
        if window.burst is not None and window.burst < cost:
            lower = [number for number, slot in window.slots.items() if slot.burst is not None and slot.burst < cost]
            wait_ms = max(wait_ms, ms_until_gone(max(lower)))
        elif window.burst is not None and full_us is not None:
            # The cost fits from this time before the moment when the bucket is full again.
            room = (window.burst - cost) * window.ms * 1000 // window.limit
            wait_ms = max(wait_ms, -((now_us + room - full_us) // 1000))
        return wait_ms

    def entries(self, resource: str, now_ms: int) -> list[RateEntry]:
        """Return the windows that have a limit, for displays."""
        entries = []
        for ms, known in sorted(self.windows.items()):
            if known.limit is None:
                continue
            effective = self._in_force([Window(ms, known.limit)], known.burst, now_ms)
            (window,) = (window for window in effective if window.ms == ms)
            entries.append(
                RateEntry.of_row(
                    resource,
                    ms,
                    window.limit,
                    window.used,
                    max(0, now_ms - known.seen_ms) / 1000,
                    known.taken,
                    known.returned,
                    known.waits,
                    self._wait_ms(window, 1, now_ms * 1000) / 1000,
                    known.cap,
                )
            )
        return entries

    def begin(self, windows: Sequence[Window], now_ms: int) -> None:
        """Add missing windows. If the clock was set back, move use in the future to now."""
        for ms, known in self.windows.items():
            if known.seen_ms > now_ms:
                current = now_ms // _slot_ms(ms)
                for number in [number for number in known.slots if number > current]:
                    future = known.slots.pop(number)
                    known.slots[current] = known.slots.get(current, Slot(0)) + future
                if known.full_us is not None:
                    known.full_us -= (known.seen_ms - now_ms) * 1000
                known.seen_ms = now_ms
        for window in windows:
            if (existing := self.windows.get(window.ms)) is not None:
                existing.limit = existing.limit or window.limit
            else:
                self._make_room([window.ms for window in windows], now_ms)
                new = WindowState(window.limit, now_ms)
                if self.windows:  # copy the use of the shortest longer window, or else of the longest one
                    other = min(self.windows, key=lambda ms: (ms < window.ms, abs(ms - window.ms)))
                    for number, slot in self.windows[other].slots.items():
                        if number >= (now_ms - window.ms) // _slot_ms(other):
                            at = min(now_ms, (number + 1) * _slot_ms(other) - 1) // window.slot_ms
                            new.slots[at] = new.slots.get(at, Slot(0)) + Slot(slot.used)
                self.windows[window.ms] = new

    def _make_room(self, requested: Sequence[int], now_ms: int) -> None:
        """If there are many windows, drop those that are not in force: every take writes to all windows."""
        if len(self.windows) < MAX_KNOWN_WINDOWS:
            return
        needed = [*requested, *(window.ms for window in self._in_force((), None, now_ms))]
        self.windows = {ms: known for ms, known in self.windows.items() if ms in needed}
        if len(self.windows) >= MAX_KNOWN_WINDOWS:
            raise ConfigurationError(
                f"Programs have declared {len(self.windows)} windows for one rate within these windows, and no further "
                f"one fits; sqlsem rates shows them, sqlsem rates reset NAME forgets them",
                code="rate",
            )

    def use(self, used: int, now_us: int, then_ms: int, request: RateRequest | None = None) -> None:
        """Record use by a request now. Negative ``used``: return use of the slot at ``then_ms``, as far as it
        counts.
        """
        now_ms = now_us // 1000
        declared = {} if request is None else {window.ms: window.limit for window in request.windows}
        for ms, known in self.windows.items():
            then = then_ms // _slot_ms(ms)
            more = used if used > 0 else -min(-used, known.slots[then].used if then in known.slots else 0)
            known.seen_ms = max(known.seen_ms, now_ms)
            known.taken += max(0, more)
            known.returned += max(0, -more)
            if known.full_us is not None and known.limit is not None:
                advance = abs(more) * ms * 1000
                if used > 0:
                    debt = max(known.full_us, now_us) - (-advance // known.limit)
                    known.full_us = min(debt, now_us + DEBT_WINDOWS * ms * 1000)
                else:
                    # (Use that has left the bucket since cannot be returned.)
                    returned = max(0, advance // known.limit - max(0, now_us - then_ms * 1000))
                    known.full_us = max(min(known.full_us, now_us), known.full_us - returned)
            if more > 0:
                burst = request.burst if request is not None and ms in declared else None
                current = now_ms // _slot_ms(ms)
                known.slots[current] = known.slots.get(current, Slot(0)) + Slot(more, declared.get(ms), burst)
            elif more < 0:
                known.slots[then] = replace(known.slots[then], used=known.slots[then].used + more)
            known.slots = self.counted(ms, now_ms)

    # -- administration ------------------------------------------------------------------------------------------

    def reset(self) -> int:
        """Delete all use, debts and declared limits; return the use of the most used window."""
        used = max((sum(slot.used for slot in known.slots.values()) for known in self.windows.values()), default=0)
        for known in self.windows.values():
            known.slots, known.full_us, known.burst = {}, None, None
        return used

    def set_cap(self, window_ms: int, cap: int | None, now_ms: int) -> int | None:
        """Set the operator's limit for windows of this length, or remove it (None); return the previous one."""
        if cap is not None:
            capped = [ms for ms, known in self.windows.items() if known.cap is not None and ms != window_ms]
            if len(capped) >= 10:
                raise ConfigurationError("This rate has limits for 10 windows; lift one of them first", code="rate")
            self.begin([Window(window_ms, cap)], now_ms)
        known = self.windows.get(window_ms)
        if known is None or (known.cap is None and cap is None):
            return None
        before, known.cap = known.cap, cap
        # (Without the operator's limit only those limits are in force that programs have declared. Without any limit
        # the window only keeps the use, and a bucket has no size.)
        known.limit = cap or _minimum(*(slot.limit for slot in self.counted(window_ms, now_ms).values()))
        known.full_us = None if known.limit is None else known.full_us
        return before
