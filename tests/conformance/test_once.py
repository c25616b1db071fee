"""Work that runs once per period: of many callers one runs it, and a failed run may be retried."""

import threading
from datetime import timedelta

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.client.once import Period
from sqlsem.values.errors import ConfigurationError, Deadlock, LockLost, NotHeld, Timeout

pytestmark = [pytest.mark.locks, pytest.mark.faces("sync", "aio")]
#: Engines with tables, in which a test can move the recorded run in time.
tables = pytest.mark.engines("sqlite", "postgresql", "mssql")
#: A period so long that a test almost never meets its end.
LONG = "366d"


@pytest.fixture
def pair(connect):
    """Two coordinators, which the database takes for two processes."""
    return connect(), connect()


def run_of(database, name):
    """Return the table of runs and the condition for one row."""
    return database.beside("once_run"), f"WHERE once_name = '{name}'"


def shift(database, name, seconds):
    """Move the last run into the future, as if the clock had been set back."""
    table, which = run_of(database, name)
    database.rows(f"UPDATE {table} SET granted_at = {database.later('granted_at', seconds)} {which}")


def test_concurrent_once_runs_a_single_time(pair, name):
    first, other = pair
    with first.once(name, LONG) as run:
        assert run.name == name
        assert run.fence == run.grant.position
        assert run.grant.resource == f"once:{name}"
        (entry,) = other.admin.entries(f"once:{name}")
        assert (entry.state, entry.position) == ("holds", run.fence)
    for _ in range(2):
        for coordinator in pair:
            with coordinator.once(name, LONG) as again:
                assert again is None
    assert other.admin.entries(f"once:{name}") == []


def test_crowd_runs_once(pair, name, threads):
    done = []

    def work(coordinator, number):
        with coordinator.once(name, LONG) as run:
            if run is not None:
                done.append(number)

    for number in range(8):
        threads.start(work, pair[number % 2], number)
    threads.join()
    assert len(done) == 1


def test_failed_run_is_retried_by_the_next(pair, name, threads):
    first, other = pair
    ran = threading.Event()

    def next_one():
        with other.once(name, LONG) as run:
            assert run is not None
            ran.set()

    with pytest.raises(ZeroDivisionError), first.once(name, LONG) as run:
        threads.start(next_one)
        until(lambda: len(first.admin.entries(f"once:{name}")) == 2)
        assert not ran.is_set()
        run.fence / 0
    threads.join()
    assert ran.is_set()
    assert first.once(name, LONG).begin() is None


def test_begin_is_ended_by_finish_or_fail(pair, name):
    coordinator, other = pair
    first = coordinator.once(name, LONG).begin()
    assert other.once(name, LONG).begin(blocking=False) is None
    assert other.once(name, LONG).begin(timeout=0.05) is None
    first.fail()
    second = other.once(name, LONG).begin()
    assert second.fence > first.fence
    second.finish()
    assert coordinator.once(name, LONG).begin() is None
    with pytest.raises(NotHeld):
        second.finish()


def test_block_that_gives_up_marks_no_run(pair, name):
    first, other = pair
    with first.once(name, LONG) as run:
        run.fail()
    with other.once(name, LONG) as run:
        run.finish()
        assert first.once(name, LONG).begin() is None
    assert first.once(name, LONG).begin() is None


def test_wait_for_a_run_times_out(pair, name):
    first, other = pair
    with first.once(name, LONG) as run:
        assert run is not None
        with pytest.raises(Timeout), other.once(name, LONG, timeout=0.05):
            pytest.fail("two run")
        with pytest.raises(Timeout), other.once(name, LONG, timeout=0):
            pytest.fail("two run")


def test_once_inside_its_own_run_is_a_deadlock(connect, name):
    once = connect().once(name, LONG)
    with once as run:
        assert run is not None
        with pytest.raises(Deadlock), once:
            pytest.fail("two run")


def test_the_next_period_runs_again(pair, name):
    """Each period has a run, also with a period of a second."""
    first = pair[0]
    fences = []

    def ran():
        for coordinator in pair:
            with coordinator.once(name, "1s") as run:
                if run is not None:
                    fences.append(run.fence)
        return len(fences) == 3

    until(ran)
    assert fences == sorted(fences)
    last = first.once(name, "1s").last()
    assert last.fence == fences[-1]
    assert (last.granted_at <= last.done_at <= last.taken_at, last.name) == (True, name)


def test_last_run_is_shown_and_forgotten(pair, name):
    first, other = pair
    assert first.once(name, LONG).last() is None
    assert not first.once(name, LONG).forget()
    with first.once(name, LONG) as run:
        fence = run.fence
    assert other.once(name, LONG).last().fence == fence
    assert other.once(name, LONG).forget()
    with other.once(name, LONG) as run:
        assert run is not None


def test_last_runs_are_listed_and_forgotten_by_name(connect, name):
    coordinator = connect()
    names = [f"{name}-b", f"{name}-a"]
    assert coordinator.admin.once_runs(names[0]) == []
    assert not coordinator.admin.forget_once(names[0])
    fences = {}
    for job in names:
        with coordinator.once(job, LONG) as run:
            fences[job] = run.fence
    listed = [run for run in coordinator.admin.once_runs() if run.name in names]
    assert [run.name for run in listed] == sorted(names)
    assert {run.name: run.fence for run in listed} == fences
    assert all(run.granted_at <= run.done_at <= run.taken_at for run in listed)
    assert [run.fence for run in coordinator.admin.once_runs(names[0])] == [fences[names[0]]]
    assert coordinator.admin.forget_once(names[0])
    assert coordinator.admin.once_runs(names[0]) == []
    with pytest.raises(ConfigurationError):
        coordinator.admin.once_runs("x" * 251)


def test_run_counts_for_periods_of_other_lengths(pair, name):
    """A run counts for every period that contains its start, also for other lengths."""
    first, other = pair
    with first.once(name, "90d") as run:
        assert run is not None
    for per in ("90d", timedelta(days=100), LONG):
        assert other.once(name, per).begin() is None


@tables
def test_a_clock_that_steps_back_runs_nothing_twice(pair, database, name):
    first, other = pair
    with first.once(name, "1h") as run:
        assert run is not None
    shift(database, name, 3 * 3600)
    assert other.once(name, "1h").begin() is None
    assert other.once(name, "1h").last().granted_at > other.once(name, "1h").last().taken_at
    shift(database, name, -4 * 3600)
    with other.once(name, "1h") as run:
        assert run is not None


@pytest.mark.kept
@tables
def test_a_run_counts_for_the_period_of_its_turn(pair, database, name):
    """A run counts for the period of its start, also when it ends in the next one."""
    first, other = pair
    run = first.once(name, "1s").begin()
    until(lambda: other.admin.entries(f"once:{name}")[0].seconds > 1.5)
    run.finish()
    with other.once(name, "1s") as run:
        assert run is not None


@tables
def test_an_offset_moves_the_beginning(pair, database, name):
    first, other = pair
    with first.once(name, "2d") as run:
        assert run is not None
    day, at = 86400, first.once(name, "2d").last().taken_at.timestamp()
    # The last run began an hour ago: it counts for a period that began before it, not for one of half an hour ago.
    shift(database, name, -3600)
    begun, before = (at - 1800) % (2 * day), (at - 5400) % (2 * day)
    assert other.once(name, "2d", offset=before).begin() is None
    with other.once(name, "2d", offset=begun) as run:
        assert run is not None


def test_the_decorator(connect, name):
    coordinator = connect()
    ran = []

    @coordinator.once(name, LONG)
    def report(number):
        ran.append(number)
        if number == 1:
            raise ZeroDivisionError
        return number

    with pytest.raises(ZeroDivisionError):
        report(1)
    assert report(2) == 2
    assert report(3) is None
    assert ran == [1, 2]


@pytest.mark.timing(0.1)
@tables
def test_lost_run_is_not_done(pair, name):
    first, other = pair
    with pytest.raises(LockLost), first.once(name, LONG) as run:
        other.admin.revoke(run.grant.position, force=True)
        assert run.grant.lost_event.wait(PATIENCE)
    with other.once(name, LONG) as run:
        assert run is not None


@tables
def test_marking_finds_that_the_row_is_gone(pair, name):
    """`done` fails with LockLost, although this process has not heard of the revocation before."""
    first, other = pair
    run = first.once(name, LONG).begin()
    other.admin.revoke(run.grant.position, force=True)
    with pytest.raises(LockLost):
        run.finish()
    assert other.once(name, LONG).last() is None


@pytest.mark.parametrize(
    ("per", "offset", "words"),
    [
        (0, 0, "above 0"),
        (0.5, 0, "at least 1 second"),
        (float("nan"), 0, "above 0"),
        (float("inf"), 0, "at most"),
        ("367d", 0, "at most"),
        (-1, 0, "above 0"),
        ("daily", 0, "not a duration"),
        (True, 0, "number of seconds"),
        ("1d", "1d", "less than per"),
        ("1d", float("nan"), "at least 0"),
        ("1d", -1, "at least 0"),
    ],
)
def test_periods_that_cannot_be(connect, name, per, offset, words):
    with pytest.raises(ConfigurationError, match=words):
        connect().once(name, per, offset=offset)


@pytest.mark.parametrize("bad", ["", " a", "a\n", "x" * 251, 5, None])
def test_names_that_cannot_be(connect, bad):
    with pytest.raises(ConfigurationError):
        connect().once(bad, "1d")


def test_periods_are_whole_milliseconds():
    period = Period("a", "1.5s", "0.25s")
    assert (period.per_ms, period.offset_ms, period.resource) == (1500, 250, "once:a")
    assert Period("a", 1, 0.9999999).offset_ms == 999


@pytest.mark.faces("sync")
def test_coroutines_and_tasks(database, name):
    import asyncio

    with database.coordinator() as coordinator:
        once = coordinator.once(name, LONG)
        ran = []

        @once
        async def report():
            ran.append(1)
            return 5

        async def main():
            async with once as run:
                assert isinstance(run, sqlsem.aio.Run)
                run.grant.state.require_held()
                await run.fail()
            with pytest.raises(ConfigurationError):
                once.begin()
            assert await report() == 5
            assert await report() is None

        asyncio.run(main())
        assert ran == [1]
