"""Work that runs once per period, in sessions of plain SQL."""

import pytest
from support import PATIENCE, until

pytestmark = pytest.mark.engines("postgresql", "mssql")
#: 366 days, the longest period: no test meets its end, but once a year.
LONG = 31622400.0


def begin(session, name, per=LONG, **named):
    return session.acquire(name, routine="once_begin", per_seconds=per, **named)


def test_concurrent_once_runs_a_single_time(session, connect, name):
    first, other = session(), session()
    code, position, fence = begin(first, name)
    assert (code, fence) == (0, position)
    assert begin(other, name, timeout_ms=0) == (-1, None, None)
    assert first.call("once_finish", name, position) == 0
    assert begin(other, name) == (2, None, None)
    assert begin(first, name) == (2, None, None)
    # Python and SQL have the same state.
    assert connect().once(name, LONG).begin() is None
    assert connect().once(name, LONG).last().fence == position
    assert connect().admin.entries(f"once:{name}") == []


def test_failed_run_is_retried(session, name):
    first, other = session(), session()
    _, position, _ = begin(first, name)
    assert first.call("release", f"once:{name}", position) == 0
    code, position, _ = begin(other, name)
    assert code == 0
    assert other.call("once_finish", name, position) == 0
    assert begin(first, name)[0] == 2


def test_waiter_finds_the_run_done(session, connect, name):
    first, other = session(), session()
    _, position, _ = begin(first, name)
    waiting = other.later(begin, other, name)
    coordinator = connect()
    until(lambda: len(coordinator.admin.entries(f"once:{name}")) == 2)
    assert first.call("once_finish", name, position) == 0
    assert waiting.result(PATIENCE) == (2, None, None)


def test_waiter_runs_when_the_runner_dies(session, connect, name):
    first, other = session(), session()
    assert begin(first, name)[0] == 0
    waiting = other.later(begin, other, name)
    coordinator = connect()
    until(lambda: len(coordinator.admin.entries(f"once:{name}")) == 2)
    first.die()
    answer = waiting.result(PATIENCE)
    assert answer.code == 1
    assert other.call("once_finish", name, answer.position) == 0


def test_unheld_run_cannot_be_done(session, name):
    first, other = session(), session()
    _, position, _ = begin(first, name)
    assert other.call("once_finish", name, position) == -1
    assert other.call("once_finish", name, position + 1) == -1
    assert first.call("release", f"once:{name}", position) == 0
    assert first.call("once_finish", name, position) == -1
    assert begin(other, name, timeout_ms=0)[0] == 0
    assert other.call("release", f"once:{name}") == 0


def test_a_lease_and_an_id(session, name):
    first, other = session(), session()
    _, position, _ = begin(first, name, requesting_id="job 7", lease_seconds=600)
    assert other.call("once_finish", name, position, "job 7") == 0
    assert begin(first, name)[0] == 2


def test_forgetting(session, name):
    connection = session()
    assert connection.call("once_forget", name) == -1
    assert connection.call("once_finish", name, begin(connection, name)[1]) == 0
    assert connection.call("once_forget", name) == 0
    code, position, _ = begin(connection, name)
    assert code == 0
    assert connection.call("once_finish", name, position) == 0


def test_invalid_period_is_refused(session, refused, name):
    connection = session()
    for per in (None, 0, 0.5, -1, 31622401, 1e300):
        with refused("22023", 50000, "per_seconds of"):
            begin(connection, name, per)
    for offset in (None, -1, 60, 1e300):
        with refused("22023", 50000, "offset_seconds of"):
            begin(connection, name, 60, offset_seconds=offset)
    for bad, words in ((None, "is NULL"), ("", "is empty"), (" a", "white space"), ("x" * 251, "250")):
        with refused("22023", 50000, words):
            begin(connection, bad)
    assert begin(connection, name, 60, offset_seconds=59.9996)[0] == 0
    assert connection.call("release", f"once:{name}") == 0
