"""Rates: all clients together use at most a limit per window, in the order of their requests."""

import contextlib
import math
import pickle
import threading
import time

import pytest
from support import PATIENCE, Attempt, until

import sqlsem
from sqlsem import aio
from sqlsem.client.operations import acquire_rate
from sqlsem.engines.base import Disconnected
from sqlsem.engines.postgresql.session import PostgresLocks
from sqlsem.values.errors import ConfigurationError, LockLost, Timeout
from sqlsem.values.rates import RateStatus

pytestmark = [pytest.mark.locks, pytest.mark.faces("sync", "aio")]
#: Longer than any test takes.
LONG = "1h"


@pytest.fixture
def looks_often(timing):
    """Make the first waiter of a rate poll often, so that it sees a refund at once."""
    timing(rate_poll=0.2)


def used(coordinator, name):
    return {rate.window: rate.used for rate in coordinator.admin.rates(name)}


def test_no_more_than_the_limit_is_taken(connect, name):
    first, other = connect(), connect()
    for coordinator in (first, other, first):
        assert coordinator.rate(name, 3, per=LONG).take(False) is not None
    assert first.rate(name, 3, per=LONG).take(False) is None
    assert other.rate(name, 3, per=LONG).take(timeout=0.05) is None
    with pytest.raises(Timeout, match=f"rate 3/1h on '{name}' within 0.05 s"), first.rate(name, 3, LONG, timeout=0.05):
        pytest.fail("more than the limit")
    assert used(first, name) == {3600: 3}
    assert first.admin.entries(f"rate:{name}") == []


def test_a_window_slides(connect, name):
    rate = connect().rate(name, 2, per=0.3)
    times = []
    for _ in range(6):
        with rate as grant:
            times.append(grant.taken_ms)
    assert all(third - first >= 300 for first, third in zip(times, times[2:], strict=False)), times


@pytest.mark.timing(0.1)
def test_uses_refunds_and_waits_are_counted(connect, name, threads):
    """Each window counts uses, refunds and waits for as long as it is known; a refused request is not counted."""
    first, other = connect(), connect()
    timeouts = []
    first.on("timeout", lambda event: timeouts.append((event.resource, event.timeout)))

    def counted():
        return {entry.window: (entry.taken, entry.returned, entry.waits) for entry in first.admin.rates(name)}

    grant = first.rate(name, 5, per=LONG, cost=4).take()
    grant.adjust(5)
    assert counted() == {3600: (5, 0, 0)}
    assert first.rate(name, 5, per=LONG).take(False) is None
    assert first.rate(name, 5, per=LONG).take(timeout=0.05) is None
    assert counted() == {3600: (5, 0, 0)}
    until(lambda: len(timeouts) == 2, "it is told")
    assert timeouts == [(f"rate:{name}", 0), (f"rate:{name}", 0.05)]
    threads.start(other.rate(name, {LONG: 5, "2h": 100}, cost=3).take)
    until(lambda: first.admin.entries(f"rate:{name}"), "it waits")
    grant.adjust(1)
    threads.join()
    assert counted()[3600] == (8, 4, 1)
    taken, _, waits = counted()[7200]
    assert (taken, waits) == (3, 1), "from when it is known"


def test_several_windows_at_once(connect, name):
    coordinator = connect()
    rate = coordinator.rate(name, {"1s": 100, LONG: 3})
    assert [rate.take(False) is not None for _ in range(4)] == [True, True, True, False]
    assert used(coordinator, name)[3600] == 3


def test_cost_is_adjusted_afterwards(connect, name):
    coordinator = connect()
    rate = coordinator.rate(name, 10, per=LONG, cost=7)
    with rate as grant:
        assert (grant.cost, grant.name) == (7, name)
    assert rate.take(False) is None
    grant.adjust(2)
    assert used(coordinator, name) == {3600: 2}
    grant.adjust(2)
    assert used(coordinator, name) == {3600: 2}
    again = rate.take(False)
    again.adjust(40)
    assert (again.cost, used(coordinator, name)) == (40, {3600: 42})
    assert coordinator.rate(name, 10, per=LONG).take(False) is None
    again.adjust(0)
    grant.adjust(0)
    assert used(coordinator, name) == {3600: 0}
    for wrong in (-1, 1.5, True, None, math.nan, 2**31):
        with pytest.raises(ConfigurationError, match="The cost adjusted"):
            again.adjust(wrong)


def test_burst_refills_evenly(connect, name):
    coordinator = connect()
    rate = coordinator.rate(name, 1000, per="20d", burst=3)
    assert [rate.take(False) is not None for _ in range(4)] == [True, True, True, False]
    fast = coordinator.rate(name("fast"), 100, per="10s", burst=2)
    began = time.monotonic()
    for _ in range(5):
        fast.take()
    assert time.monotonic() - began > 0.25  # three tokens had to return, one every 0.1 s


def test_expired_tokens_are_not_refunded(connect, name):
    """A refund of tokens that have returned already gives no second burst."""
    coordinator = connect()
    rate = coordinator.rate(name, 180, per="90s", burst=2, cost=2)  # these two return in a second
    first, second = rate.take(), rate.take()
    first.adjust(0)
    third = rate.take()
    assert third.taken_ms - second.taken_ms >= 995
    slow = coordinator.rate(name("slow"), 10, per="10000s", burst=2, cost=2)  # these two return in half an hour
    slow.take().adjust(0)
    assert slow.take(timeout=PATIENCE) is not None, "the tokens that have not expired are returned"


def test_a_debt_that_is_never_paid(connect, name):
    coordinator = connect()
    grant = coordinator.rate(name, 1, per="24d", burst=1).take()
    for actual in (2**31 - 1, 0, 2**31 - 1, 1):
        grant.adjust(actual)
        assert used(coordinator, name) == {24 * 86400: actual}
    assert coordinator.rate(name, 1, per="24d", burst=1).take(False) is None


def test_limits_of_other_clients_count(connect, name):
    first, other = connect(), connect()
    assert first.rate(name, 5, per=LONG, cost=4).take(False) is not None
    assert other.rate(name, 3, per=1800).take(False) is None, "a new window began without the recent uses"
    assert other.rate(name, 5, per=LONG).take(False) is not None
    assert first.rate(name, 5, per=LONG).take(False) is None
    assert first.rate(name, 6, per=LONG).take(False) is None, "the lower limit counts as long as its grants"
    assert first.admin.reset_rate(name) is True
    assert first.rate(name, 6, per=LONG, cost=6).take(False) is not None


def test_the_lower_limit_of_two_programs_counts(connect, name):
    strict, loose = connect(), connect()
    assert loose.rate(name, 10, per=LONG, cost=2).take(False) is not None
    assert strict.rate(name, 3, per=LONG).take(False) is not None
    assert loose.rate(name, 10, per=LONG).take(False) is None
    assert strict.rate(name, 3, per=LONG).take(False) is None
    assert [(rate.used, rate.limit) for rate in loose.admin.rates(name)] == [(3, 3)]


def test_limits_of_windows_of_different_length_hold_together(connect, name):
    strict, loose = connect(), connect()
    assert strict.rate(name, 2, per=LONG).take(False) is not None
    assert loose.rate(name, 10, per=1800).take(False) is not None
    assert loose.rate(name, 10, per=1800).take(False) is None, "the longer window is full"
    assert strict.rate(name, 2, per=LONG).take(False) is None


def test_declared_limit_counts_until_its_uses_expire(connect, name):
    strict, loose = connect(), connect()
    assert strict.rate(name, 1, per=1).take(False) is not None
    began = time.monotonic()
    assert loose.rate(name, 5, per=1, cost=5).take(timeout=PATIENCE) is not None, "it waits for the limit to lapse"
    assert time.monotonic() - began > 0.5
    assert [rate.limit for rate in loose.admin.rates(name)] == [5]


def test_the_lower_burst_of_two_programs_counts(connect, name):
    strict, loose = connect(), connect()
    assert strict.rate(name, 10, per=LONG, burst=2).take(False) is not None
    assert loose.rate(name, 10, per=LONG, burst=9).take(False) is not None
    assert loose.rate(name, 10, per=LONG, burst=9).take(False) is None
    assert loose.rate(name, 10, per=LONG).take(False) is None


def test_operators_limit_bounds_declared_limits(connect, name):
    coordinator = connect()
    with pytest.raises(ConfigurationError, match="o limit is set for"):
        coordinator.rate(name).take(False)
    coordinator.admin.set_rate(name, {3600: 3, 1800: 2})
    assert coordinator.rate(name, cost=2).take(False) is not None
    assert coordinator.rate(name).take(False) is None
    assert coordinator.rate(name, 10, per=LONG).take(False) is None
    assert {rate.window: rate.cap for rate in coordinator.admin.rates(name)} == {3600: 3, 1800: 2}
    with pytest.raises(ConfigurationError, match="can never fit"):
        coordinator.rate(name, 10, per=LONG, cost=4).take(False)
    coordinator.admin.set_rate(name, None, per=1800)
    coordinator.admin.set_rate(name, 4, per=LONG)
    assert coordinator.rate(name, cost=2).take(False) is not None
    assert coordinator.rate(name).take(False) is None


@pytest.mark.parametrize("declared", [None, 5])
@pytest.mark.parametrize("used", [0, 2])
def test_rates_shows_the_limit_in_force_after_a_clear(connect, name, declared, used):
    coordinator = connect()
    own = coordinator.rate(name) if declared is None else coordinator.rate(name, declared, per=LONG)
    coordinator.admin.set_rate(name, 3, per=LONG)
    for _ in range(used):
        assert own.take(False) is not None
    assert [(rate.limit, rate.used, rate.cap) for rate in coordinator.admin.rates(name)] == [(3, used, 3)]
    coordinator.admin.set_rate(name, None, per=LONG)
    shown = [(rate.limit, rate.used, rate.cap) for rate in coordinator.admin.rates(name)]
    if declared is None or not used:  # no limit counts any more
        assert shown == []
        with pytest.raises(ConfigurationError, match="o limit is set for"):
            coordinator.rate(name).take(False)
    else:
        assert shown == [(declared, used, None)]
    # The use counts for the next limit.
    assert (coordinator.rate(name, 2, per=LONG, burst=2).take(False) is None) == (used == 2)
    assert [(rate.limit, rate.cap) for rate in coordinator.admin.rates(name)] == [(declared if shown else 2, None)]
    coordinator.admin.set_rate(name, 3, per=LONG)
    assert [(rate.limit, rate.cap) for rate in coordinator.admin.rates(name)] == [(2 if used == 0 else 3, 3)]


def test_reset_forgets_uses_and_keeps_operators_limits(connect, name):
    coordinator = connect()
    assert coordinator.admin.reset_rate(name) is False
    coordinator.admin.set_rate(name, 3, per=LONG)
    coordinator.rate(name, 3, per=LONG, burst=3, cost=3).take().adjust(1000)
    (row,) = coordinator.admin.rates(name)
    assert row.used == 1000
    assert 3600 < row.free_in <= 36_000, "a debt is paid after ten windows at the latest"
    assert coordinator.admin.reset_rate(name) is True
    assert [(rate.used, rate.free_in, rate.cap) for rate in coordinator.admin.rates(name)] == [(0, 0, 3)]
    assert coordinator.rate(name, 5, per=LONG, burst=3, cost=3).take(False) is not None


def test_no_more_is_returned_than_was_taken_then(connect, name):
    coordinator = connect()
    grant = coordinator.rate(name, 5, per=LONG, cost=2).take()
    with contextlib.closing(coordinator.client.engine.connect("look")) as session:
        session.adjust_rate(f"rate:{name}", grant.taken_ms, -100)
        session.adjust_rate(f"rate:{name}", grant.taken_ms, -100)
    assert [(rate.used, rate.returned) for rate in coordinator.admin.rates(name)] == [(0, 2)]


def test_windows_of_a_rate_are_bounded(connect, name):
    coordinator = connect()
    for number in range(40):
        assert coordinator.rate(name, 100, per=3600 + number).take(False) is not None
    with pytest.raises(ConfigurationError, match="declared 40 windows"):
        coordinator.rate(name, 100, per=3599).take(False)
    assert coordinator.rate(name, 100, per=LONG).take(False) is not None


def test_first_come_first_served(looks_often, connect, name, threads):
    """A request with a high cost is not overtaken by one with a low cost."""
    first, other = connect(), connect()
    resource, grants = f"rate:{name}", []
    grants.append(first.rate(name, 4, per=LONG, cost=3).take())

    def take(coordinator, cost):
        grants.append(coordinator.rate(name, 4, per=LONG, cost=cost).take())

    threads.start(take, other, 4)
    until(lambda: len(first.admin.entries(resource)) == 1, "the large one in the line")
    assert first.rate(name, 4, per=LONG).take(False) is None, "it has overtaken"
    threads.start(take, first, 1)
    until(lambda: len(first.admin.entries(resource)) == 2, "the small one behind it")
    for _ in range(2):
        before = len(grants)
        grants[-1].adjust(0)
        until(lambda before=before: len(grants) > before, "the next one's turn")
    threads.join()
    assert [grant.cost for grant in grants] == [0, 0, 1]
    assert used(first, name) == {3600: 1}


def test_many_threads_of_several_processes(connect, name, threads):
    coordinators = [connect(), connect()]
    times, lock = [], threading.Lock()

    def work(coordinator):
        for _ in range(4):
            grant = coordinator.rate(name, 5, per=0.25).take()
            with lock:
                times.append(grant.taken_ms)

    for client in coordinators * 3:
        threads.start(work, client)
    threads.join()
    times.sort()
    assert len(times) == 24
    assert all(later - first >= 250 for first, later in zip(times, times[5:], strict=False)), times


@pytest.mark.engines("postgresql")
def test_batches_never_pass_the_limit(connect, name, threads):
    """Concurrent requests of a process share calls, and some time out: the total never exceeds the limit."""
    coordinators = [connect(), connect()]
    limit, length = 100, 500
    uses, lost, lock = [], [], threading.Lock()

    def work(number):
        rate = coordinators[number % 2].rate(name, limit, per=length / 1000, cost=1 + number % 3)
        for turn in range(12):
            grant = rate.take(timeout=0.02 if (number + turn) % 5 == 0 else None)
            with lock:
                if grant is None:
                    lost.append(number)
                else:
                    uses.append((grant.taken_ms, grant.cost))

    for number in range(24):
        threads.start(work, number)
    threads.join()
    assert len(uses) + len(lost) == 24 * 12
    for first, _ in uses:
        assert sum(cost for at, cost in uses if first <= at < first + length) <= limit
    assert coordinators[0].admin.entries(f"rate:{name}") == []


@pytest.mark.engines("postgresql")
def test_concurrent_takes_share_a_call(connect, name, monkeypatch, threads):
    coordinator = connect()
    rate = coordinator.rate(name, 100_000, per="1s")
    assert rate.take() is not None
    calls, original = [], PostgresLocks.take_rate

    def take_rate(self, request, ticket, ahead_ms=0, more=()):
        calls.append(1 + len(more))
        time.sleep(0.05)  # like a distant server
        return original(self, request, ticket, ahead_ms, more)

    monkeypatch.setattr(PostgresLocks, "take_rate", take_rate)
    for _ in range(12):
        threads.start(rate.take)
    threads.join()
    assert sum(calls) == 12
    assert len(calls) < 12, "each asked for itself"


@pytest.mark.engines("postgresql")
def test_served_thread_does_not_wait_for_its_batch(looks_often, connect, name):
    """Threads share a position in the queue: a served thread goes on at once, and the next takes the position over."""
    coordinator = connect()
    main = coordinator.client.member.main
    limit = 10**6  # a high limit, so that all requests fit into a batch
    rate = coordinator.rate(name, limit, per=LONG)
    grants = [rate.take() for _ in range(3)]
    assert coordinator.rate(name, limit, per=LONG, cost=limit - 3).take(False)
    served, threads = [], []

    def take():
        served.append(rate.take(timeout=PATIENCE))

    with main._lock:  # so that the threads request together
        for number in range(3):
            threads.append(threading.Thread(target=take))
            threads[-1].start()
            until(lambda number=number: riders(coordinator) == number + 1, "it rides with the others")
    until(lambda: len(connect().admin.entries(f"rate:{name}")) == 1, "they share one place")
    for number, grant in enumerate(grants, 1):
        assert len(connect().admin.entries(f"rate:{name}")) == 1, "the place is the next one's"
        grant.adjust(0)
        until(lambda number=number: len(served) == number, "one is served, and goes")
    for thread in threads:
        thread.join(PATIENCE)
    assert None not in served
    assert connect().admin.entries(f"rate:{name}") == []
    served[0].adjust(0)
    assert rate.take(timeout=PATIENCE) is not None
    assert coordinator.client.registry.grants() == []


def riders(coordinator):
    return sum(len(batch.members) for batch in acquire_rate._batches_of(coordinator.client)._open.values())


def test_lost_answer_costs_the_position_only(looks_often, connect, name, monkeypatch, threads):
    """After a lost answer its cost may count as used, and the request registers anew."""
    coordinator = connect(retry=PATIENCE)
    rate = coordinator.rate(name, 4, per=LONG, cost=2)  # (for a short wait the request would not enter the queue)
    before = [rate.take() for _ in range(2)]
    session_class = type(coordinator.client.member.main.session)
    take_rate, lost = session_class.take_rate, []

    def lose_the_first_answer(session, request, ticket, *more):
        answer = take_rate(session, request, ticket, *more)
        if ticket is not None and answer.status is RateStatus.TAKEN and not lost:
            lost.append(answer)
            raise Disconnected("the answer is lost")
        return answer

    monkeypatch.setattr(session_class, "take_rate", lose_the_first_answer)
    results = []
    threads.start(lambda: results.append(rate.take(timeout=PATIENCE)))
    until(lambda: coordinator.admin.entries(f"rate:{name}"), "it stands in the line")
    before[0].adjust(0)
    until(lambda: lost, "it has taken, and does not hear of it")
    before[1].adjust(0)
    threads.join()
    assert results not in ([], [None])
    assert coordinator.admin.entries(f"rate:{name}") == []


def test_locks_and_rates_together(connect, name):
    first, other = connect(), connect()
    rates = [first.rate(name("r"), 2, per=LONG), first.rate(name("s"), 5, per=LONG, cost=3)]
    both = sqlsem.all_of(first.mutex(name), *rates)
    # Compiles the routines first: a slow engine may need longer than a grace for that.
    first.rate(name("warm"), 1, per=LONG).take()
    with both as grant:
        assert set(grant.positions) == {name}
        assert {key: value.cost for key, value in grant.rates.items()} == {name("r"): 1, name("s"): 3}
        with pytest.raises(ConfigurationError, match="say which rate"):
            grant.adjust(1)
        grant.adjust(1, rate=name("s"))
        assert used(first, name("s")) == {3600: 1}
    with both:
        pass
    # All or nothing: a failed request releases the mutex, and refunds the rate that had room.
    assert not both.acquire(timeout=0.1)
    assert not both.acquire(blocking=False)
    assert used(first, name("s")) == {3600: 4}
    assert first.admin.entries(name) == []
    with other.mutex(name):
        assert not sqlsem.all_of(first.mutex(name), first.rate(name("t"), 1, LONG)).acquire(timeout=0.05)
    assert used(first, name("t")) == {}


def test_a_waiter_that_gives_up_leaves_no_row(looks_often, connect, name, threads):
    coordinator, other = connect(), connect()
    resource = f"rate:{name}"
    grant = coordinator.rate(name, 1, per=LONG).take()
    threads.start(other.rate(name, 1, per=LONG).take)
    until(lambda: coordinator.admin.entries(resource), "it waits")
    assert coordinator.rate(name, 1, per=LONG).take(timeout=0.05) is None
    assert [(entry.access, entry.limit) for entry in coordinator.admin.entries(resource)] == [("write", 1)]
    grant.adjust(0)
    threads.join()
    assert coordinator.admin.entries(resource) == []
    assert used(coordinator, name) == {3600: 1}


@pytest.mark.timing(0.1)
@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_operator_pauses_a_rate_and_revokes_a_waiter(connect, name, threads):
    first, other = connect(), connect()
    resource = f"rate:{name}"
    first.admin.pause(resource)
    assert first.rate(name, 1, per=LONG).take(timeout=0.05) is None
    first.admin.resume(resource)
    first.rate(name, 1, per=LONG).take()
    errors = []

    def wait():
        try:
            other.rate(name, 1, per=LONG).take()
        except LockLost as exc:
            errors.append(exc)

    threads.start(wait)
    until(lambda: first.admin.entries(resource), "it waits")
    first.admin.revoke(first.admin.entries(resource)[0].position, force=True)
    threads.join()
    assert errors
    assert errors[0].resource == resource


def test_a_decorated_function(connect, name):
    coordinator = connect()
    decorator = coordinator.rate(name, 2, per=LONG, timeout=0)

    def work(value):
        return value + 1

    with pytest.raises(TypeError, match="has no option 'weight'"):
        sqlsem.rate(name, 2, per=LONG, weight=2)
    if isinstance(decorator, sqlsem.Rate):
        decorated = decorator(work)
        assert [decorated(1), decorated(2)] == [2, 3]
        with pytest.raises(Timeout):
            decorated(3)
        named = coordinator.rate(lambda value: name(value), 1, per=LONG, timeout=0)(work)
        assert [named(1), named(2)] == [2, 3]
        with pytest.raises(Timeout):
            named(1)


async def half(value):
    return value / 2


async def test_a_decorated_coroutine_function(database, name):

    with database.coordinator() as coordinator:
        decorated = coordinator.rate(name, 2, per=LONG, timeout=0)(half)
        assert [await decorated(2), await decorated(4)] == [1, 2]
        with pytest.raises(Timeout):
            await decorated(2)
        async with coordinator.rate(name("b"), 2, per=LONG, cost=2) as grant:
            assert isinstance(grant, aio.RateGrant)
        await grant.adjust(1)
        assert [rate.used for rate in coordinator.admin.rates(name("b"))] == [1]


async def test_cancelled_task_leaves_the_rates_queue(database, name):
    import asyncio

    with database.coordinator() as coordinator:
        rate = coordinator.aio.rate(name, 1, per=LONG)
        await rate.take()
        waiter = asyncio.create_task(rate.take())
        while not coordinator.admin.entries(f"rate:{name}"):
            await asyncio.sleep(0.01)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert coordinator.admin.entries(f"rate:{name}") == []


WRONG = [
    ({"limit": 0, "per": 1}, "The limit of a rate must be from 1"),
    ({"limit": -1, "per": 1}, "The limit of a rate must be from 1"),
    ({"limit": 2**31, "per": 1}, "The limit of a rate must be from 1"),
    ({"limit": math.nan, "per": 1}, "must be a whole number"),
    ({"limit": 1.5, "per": 1}, "must be a whole number"),
    ({"limit": "5", "per": 1}, "must be a whole number"),
    ({"limit": 1, "per": 0}, "must be above 0"),
    ({"limit": 1, "per": math.nan}, "must be above 0"),
    ({"limit": 1, "per": math.inf}, "at most"),
    ({"limit": 1, "per": "3 fortnights"}, "is not a duration"),
    ({"limit": 1, "per": "25d"}, "at most"),
    ({"limit": 1}, "needs the time"),
    ({"limit": {}}, "from 1 to 10 windows"),
    ({"limit": {"1m": 1, 60: 2}}, "one window twice"),
    ({"limit": {"1m": 1}, "per": 3}, "either a limit and per"),
    ({"limit": 5, "per": 1, "cost": 6}, "can never fit into the rate"),
    ({"limit": 5, "per": 1, "cost": 0}, "The cost asked of rate"),
    ({"limit": 5, "per": 1, "cost": math.nan}, "must be a whole number"),
    ({"limit": 5, "per": 1, "burst": 6}, "The burst of rate"),
    ({"limit": 5, "per": 1, "burst": 2, "cost": 3}, "can never fit into the burst"),
    ({"limit": {"1s": 5, "1m": 50}, "burst": 2}, "goes with one window"),
    ({"limit": 5, "per": 1, "timeout": -5}, "at least 0"),
    ({"limit": 5, "per": 1, "note": 7}, "The note must be a string"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG, ids=[str(options) for options, _ in WRONG])
def test_invalid_rate_is_refused(settings, words):
    with pytest.raises(ConfigurationError, match=words):
        sqlsem.rate("api", **settings)


def test_names_that_cannot_be():
    for wrong in ("", " api", "a" * 251, "a\n", None, 7):
        with pytest.raises(ConfigurationError):
            sqlsem.rate(wrong, 1, per=1)
    sqlsem.rate("a" * 250, 1, per=1)


def test_a_group_needs_a_lock():
    with pytest.raises(ConfigurationError, match="needs a lock beside its rates"):
        sqlsem.all_of(sqlsem.rate("a", 1, 1))
    with pytest.raises(ConfigurationError, match="twice"):
        sqlsem.all_of(sqlsem.mutex("b"), sqlsem.rate("a", 1, 1), sqlsem.rate("a", 2, 2))
    with pytest.raises(ConfigurationError, match="reentrant"):
        sqlsem.all_of(sqlsem.mutex("b"), sqlsem.rate("a", 1, 1), reentrant=True)


def test_a_rate_can_be_pickled(database, name, monkeypatch):
    monkeypatch.setenv("SQLSEM_URL", database.url)
    rate = pickle.loads(pickle.dumps(sqlsem.rate(name, 5, per="1m", cost=2)))
    assert str(rate) == f"<Rate rate 5/1m on '{name}'>"


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_killed_waiter_does_not_block_the_rate(connect, name, spawn):
    coordinator = connect()
    coordinator.rate(name, 1, per=0.5).take()
    child = spawn(wait_in_line, name=str(name))
    until(lambda: coordinator.admin.entries(f"rate:{name}"), "the child waits")
    child.kill()
    attempt = Attempt(coordinator.mutex(name))  # (keeps the API's thread alive)
    attempt.leave()
    assert coordinator.rate(name, 1, per=0.5).take(timeout=PATIENCE) is not None


def wait_in_line(channel, url, options, name):
    with sqlsem.connect(url, **{**options, "grace": 1}) as coordinator:
        coordinator.rate(name, 1, per="1h").take()


def test_refund_is_applied_once(connect, name, monkeypatch):
    """A repeated refund after a lost answer must not return more than was taken."""
    coordinator = connect(retry=PATIENCE)
    rate = coordinator.rate(name, 10, per=LONG, cost=4)
    grants = [rate.take(), rate.take()]
    session_class = type(coordinator.client.member.main.session)
    adjust_rate, calls = session_class.adjust_rate, []

    def lose_the_first_answer(session, *arguments):
        calls.append(arguments)
        adjust_rate(session, *arguments)
        if len(calls) == 1:
            raise Disconnected("the answer is lost")

    monkeypatch.setattr(session_class, "adjust_rate", lose_the_first_answer)
    grants[0].adjust(0)
    assert used(coordinator, name) == {3600: 4}
    assert grants[0].cost == 0
    calls.clear()
    grants[1].adjust(6)
    assert used(coordinator, name)[3600] >= 6, "what was used in the end is not all counted"


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_dead_waiter_does_not_refuse_a_try(connect, name, spawn):
    """A try finds the dead waiter although no live waiter checks this rate."""
    coordinator = connect()
    coordinator.rate(name, 1, per=LONG).take().adjust(1)
    child = spawn(wait_in_line, name=str(name))
    until(lambda: coordinator.admin.entries(f"rate:{name}"), "the child waits")
    child.kill()
    coordinator.admin.reset_rate(name)
    until(lambda: coordinator.rate(name, 1, per=LONG).take(False) is not None, "a try is served")
