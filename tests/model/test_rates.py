"""Rates: no window exceeds its limit, and a refusal names a cause that ends at the stated time.

Time is moved by changing stored times: a use stored as an hour old is an hour old.
"""

import bisect
import contextlib
import itertools
import random
import time
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.state_machines import run_machine

from sqlsem.engines.rate_windows import RateState
from sqlsem.values.rates import AHEAD_MS, RateDemand, RateRequest, RateStatus, windows_of

#: The limits of windows with slots of 50 and 200 s: a test is much shorter than a slot.
WINDOWS = {5_000: 7, 20_000: 12}
SLOT_SECONDS = 200


@dataclass
class Used:
    at: float
    cost: int
    windows: list[int]  # the windows that it declared
    counts_from: float = 0.0  # later than `at` if the clock went back in between

    def __post_init__(self):
        self.counts_from = self.at


class Machine(RuleBasedStateMachine):
    """A state machine of one rate, in a database or in memory."""

    burst = None

    @initialize()
    def begin(self):
        self.passed = 0.0
        self.used = []
        self.known = {}  # by window, the time it was first declared: earlier uses are only partly known
        self.start()

    def start(self):
        raise NotImplementedError

    def now(self):
        return time.monotonic() + self.passed

    @rule(cost=st.integers(1, 7), windows=st.sampled_from([[5_000], [20_000], [5_000, 20_000]]))
    def take(self, cost, windows):
        request = RateRequest(self.name, windows_of({window: WINDOWS[window] for window in windows}, None), cost)
        before = self.now()
        for length in windows:
            self.known.setdefault(length, before)
        # A window counts as long as a use that declared it is inside, and longer by the rounding of slots.
        certain = {*windows, *(length for length in WINDOWS if self.counts(length, before, 0))}
        possible = {*windows, *(length for length in WINDOWS if self.counts(length, before, 2 * SLOT_SECONDS + 2))}
        wait = self.take_now(request)
        if wait is None:
            self.used.append(Used(before, cost, windows))
            for length in certain:
                assert self.inside(length) <= WINDOWS[length]
        else:
            assert 0 < wait <= max(possible) * 1.01 + 1
            # A limit would have been exceeded, if only by the rounding of slots.
            now, slack = self.now(), 2 * SLOT_SECONDS + 2
            counted = {
                length: sum(use.cost for use in self.used if now - use.counts_from < length + slack)
                for length in possible
            }
            assert any(counted[length] + cost > WINDOWS[length] for length in possible)

    def counts(self, length, now, slack):
        return any(
            length in use.windows and now - (use.counts_from if slack else use.at) < length + slack for use in self.used
        )

    def inside(self, length):
        now = self.now()
        return sum(use.cost for use in self.used if now - use.at < length and use.at >= self.known[length])

    @rule(slots=st.integers(1, 120))
    def time_passes(self, slots):
        self.shift(slots * SLOT_SECONDS)
        self.passed += slots * SLOT_SECONDS

    @rule(slots=st.integers(1, 500))
    def the_clock_steps_back(self, slots):
        """Earlier uses count from the time at which the step is noticed."""
        self.shift(-slots * SLOT_SECONDS)
        self.adjust(0)
        for use in self.used:
            use.counts_from = self.now()

    @rule(more=st.integers(1, 30), data=st.data())
    def settle_more(self, more, data):
        if self.used:
            self.adjust(more)
            self.used.append(Used(self.now(), more, []))


class InMemory(Machine):
    name = "api"

    def start(self):
        self.state, self.offset = RateState(), 0

    def clock(self):
        return time.time_ns() // 1000 + self.offset

    def take_now(self, request):
        wait = self.state.take(request, self.clock())
        return None if wait == 0 else wait / 1000

    def shift(self, seconds):
        self.offset += seconds * 1_000_000

    @rule(seconds=st.integers(1, SLOT_SECONDS))
    def less_than_a_slot_passes(self, seconds):
        self.offset += seconds * 1_000_000
        self.passed += seconds

    def adjust(self, more):
        now = self.clock()
        self.state.begin((), now // 1000)
        self.state.use(more, now, 0)


class InDatabase(Machine):
    database = None
    names = itertools.count()

    def start(self):
        self.name = f"{self.prefix}-{next(self.names)}"
        self.session = self.database.session()

    def teardown(self):
        if hasattr(self, "session"):
            self.session.close()

    def take_now(self, request):
        answer = self.session.take_rate(request, None)
        assert answer.status in (RateStatus.TAKEN, RateStatus.TOO_EARLY)
        return None if answer.status is RateStatus.TAKEN else answer.seconds

    def shift(self, seconds):
        resource = f"rate:{self.name}"
        window, slot = self.database.beside("rate_window"), self.database.beside("rate_slot")
        self.database.rows(f"UPDATE {window} SET seen_ms = seen_ms - {seconds * 1000} WHERE resource_id = ?", resource)
        # (In two steps: the numbers of slots must not meet on their way.)
        for text in (
            f"UPDATE {slot} SET slot = -(slot - {seconds} * 1000 / ((window_ms + 99) / 100)) WHERE resource_id = ?",
            f"UPDATE {slot} SET slot = -slot WHERE resource_id = ?",
        ):
            self.database.rows(text, resource)

    def adjust(self, more):
        self.session.adjust_rate(f"rate:{self.name}", 0, more)


def test_no_window_is_ever_passed_by_reckoning():
    run_machine(InMemory, max_examples=100, stateful_step_count=40)


@pytest.mark.timeout(600)
def test_no_window_is_ever_passed(database, name):
    machine = type("Machine", (InDatabase,), {"database": database, "prefix": str(name)})
    run_machine(machine, max_examples=3 if database.engine == "mssql" else 12, stateful_step_count=30)


@pytest.mark.engines("sqlite", "postgresql", "mssql", "mysql")
def test_a_slot_counts_until_all_of_it_is_out_of_the_window(database, name):
    """A slot that overlaps the window counts as a whole."""
    session = database.session()
    slot = database.beside("rate_slot")
    request = RateRequest(str(name), windows_of(1, "20d"))  # a slot is almost 5 hours: longer than this takes

    def back(slots):
        database.rows(f"UPDATE {slot} SET slot = slot - {slots} WHERE resource_id = ?", request.resource)

    assert session.take_rate(request, None).status is RateStatus.TAKEN
    back(100)
    assert session.take_rate(request, None).status is RateStatus.TOO_EARLY
    back(1)
    assert session.take_rate(request, None).status is RateStatus.TAKEN
    session.close()


@pytest.mark.engines("sqlite", "postgresql", "mssql", "mysql")
def test_the_clients_clock_does_not_count(database, name, monkeypatch):
    session = database.session()
    for clock in ("time", "time_ns"):
        monkeypatch.setattr(time, clock, lambda: 0)
    answer = session.take_rate(RateRequest(str(name), windows_of(1, "1h")), None)
    assert answer.taken_ms > 1_700_000_000_000
    session.close()


@pytest.mark.engines("postgresql")
@pytest.mark.timeout(300)
def test_reservations_never_exceed_a_limit_and_are_fifo(database, name):
    """Some callers take several, some return their reservation, some have no time; the clock steps back."""
    names, promised = itertools.count(), []
    windows = windows_of({0.2: 20, 0.7: 45}, None)

    @settings(
        max_examples=8,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )
    @given(seed=st.integers(0, 2**32), burst=st.sampled_from([None, 6]))
    def check(seed, burst):
        rng = random.Random(seed)
        declared = windows if burst is None else windows[:1]
        request = RateRequest(f"{name}-{next(names)}", declared, burst=burst)
        counted, last = [], 0
        for _ in range(60):
            wishes = [
                RateDemand(rng.randint(1, 5), rng.choice([0, 100, AHEAD_MS, 5000]))
                for _ in range(rng.choice([1, 1, 2, 9]))
            ]
            first, *more = wishes
            rate_request = RateRequest(request.name, declared, first.cost, burst)
            answer = session.take_rate(rate_request, None, first.ahead_ms, more)
            if answer.status is RateStatus.TOO_EARLY:
                assert answer.seconds * 1000 > min(first.ahead_ms, AHEAD_MS)
                time.sleep(rng.choice([0, 0.02, answer.seconds / 2]))
                continue
            assert list(answer.times) == sorted(answer.times)
            assert answer.times[0] >= last, "a later request got an earlier reservation"
            last = answer.times[-1]
            for number, (at, wish) in enumerate(zip(answer.times, wishes, strict=False)):
                assert answer.due_in(number) * 1000 <= min(wish.ahead_ms, AHEAD_MS)
                promised.append(answer.due_in(number) > 0)
                if rng.random() < 0.15:
                    session.adjust_rate(request.resource, at, -wish.cost)
                else:
                    counted.append((at, wish.cost))
            if rng.random() < 0.05:
                step_back(request.resource)
                last = 0  # (reservations move, and with them the earlier order)
        counted.sort()
        times = [at for at, _ in counted]
        for window in declared:
            for number, since in enumerate(times):
                end = bisect.bisect_left(times, since + window.ms)
                assert sum(cost for _, cost in counted[number:end]) <= window.limit

    def step_back(resource):
        """Set the clock back by 700 ms: stored times become that much later."""
        window, slot = database.beside("rate_window"), database.beside("rate_slot")
        database.rows(
            f"UPDATE {window} SET seen_ms = seen_ms + 700, promised_ms = promised_ms + 700, full_us = full_us + 700000 "
            f"WHERE resource_id = ?",
            resource,
        )
        for text in (
            f"UPDATE {slot} SET slot = -(slot + 700 / ((window_ms + 99) / 100)) WHERE resource_id = ?",
            f"UPDATE {slot} SET slot = -slot WHERE resource_id = ?",
        ):
            database.rows(text, resource)

    with contextlib.closing(database.session()) as session:
        check()
        assert sum(promised) > 50
