"""The reason for a wait, as SQL reports it: the same as in Python."""

import contextlib
import re

import pytest
from support import Attempt, until

from sqlsem.insight.estimates import Durations, estimates
from sqlsem.insight.reasons import reasons

pytestmark = pytest.mark.engines("postgresql", "mssql")


class Session:
    """A session for all queries, as the first call of a routine may take seconds in a T-SQL session."""

    def __init__(self, database):
        self.database, self.connection = database, database.raw()

    def ask(self, routine, position):
        database, cursor = self.database, self.connection.cursor()
        call = "EXEC {}.{} ?" if database.engine == "mssql" else "SELECT * FROM {}.{}(?)"
        cursor.execute(database.sql(call.format(database.schema, routine)), (position,))
        return [tuple(row) for row in cursor.fetchall()]


@pytest.fixture
def session(database):
    session = Session(database)
    with contextlib.closing(session.connection):
        yield session


def told(session, position):
    """Return the codes, the positions of the rows ahead, and all rows of the report."""
    rows = session.ask("why", position)
    return {row[0] for row in rows}, [row[2] for row in rows if row[2] is not None], rows


def compare(session, coordinator, name):
    """Compare the reports of SQL and Python for all waiters whose resources begin with ``name``; return their codes."""
    overview = coordinator.admin.overview()
    own_entries = [entry for entry in overview.entries if entry.resource.startswith(name)]
    codes = []
    for row in own_entries:
        reason = reasons(overview, only=row.position).get(row.position)
        code, behind, rows = told(session, row.position)
        if reason is None:
            assert code == {row.state}
            continue
        assert code == {reason.code}
        if reason.code == "own_earlier":
            assert set(behind) <= {other.position for other in reason.behind}
        else:
            assert behind == [other.position for other in reason.behind]
        assert rows[0][1]
        codes.append(reason.code)
    return codes


@pytest.fixture
def waiting(database, name):
    attempts = []

    def start(lock):
        before = len(database.queue(name))
        attempts.append(Attempt(lock))
        until(lambda: len(database.queue(name)) > before, "the request in the queue")

    yield start
    for attempt in attempts:
        attempt.leave()


def test_limits_and_operators(database, session, connect, name, waiting):
    first, other = connect(), connect()
    with first.limit(name, 3, note="a"), first.limit(name, 3, weight=2):
        waiting(other.limit(name, 3, weight=2))
        waiting(other.limit(name, 5))
        waiting(other.mutex(name))
        assert compare(session, first, name) == ["limit"] * 3
        first.admin.set_limit(name, 1)
        assert compare(session, first, name) == ["limit"] * 3
        first.admin.pause(name)
        assert compare(session, first, name) == ["paused"] * 3
        _, _, rows = told(session, database.queue(name)[2][0])
        assert rows[0][1].startswith("the resource is paused by ")
        first.admin.resume(name)
        first.admin.set_limit(name, None)
    with first.limit(name("c"), 3, note="b"):
        first.admin.set_limit(name("c"), 1)
        waiting(other.limit(name("c"), 3))
        waiting(other.limit(name("c"), 3, weight=2))
        assert compare(session, first, name("c")) == ["cap", "limit"]
        _, _, rows = told(session, database.queue(name("c"))[1][0])
        assert "cap of 1" in rows[0][1]
        assert rows[0][7] == "b"
        first.admin.set_limit(name("c"), None)


def test_readers_writers_and_stages(session, connect, name, waiting):
    first, other = connect(), connect()
    with first.read(name), first.stage(name("s"), 100):
        waiting(other.write(name))
        waiting(other.read(name))
        waiting(other.stage(name("s"), 200))
        assert compare(session, first, name) == ["readers_ahead", "writer_ahead", "stage"]


def test_why_continues_at_the_blocking_request(database, session, connect, name, waiting):
    first, other, third = connect(), connect(), connect()
    with first.mutex(name("a")):
        waiting(other.all_of(other.mutex(name("b")), other.mutex(name("a"))))
        waiting(third.mutex(name("b")))
        late = database.queue(name)[-1][0]
        (row,) = told(session, late)[2]
        entries = {entry.position: entry for entry in first.admin.entries()}
        assert entries[row[2]].resource == name("b")
        assert entries[row[9]].resource == name("a")
        (row,) = told(session, row[9])[2]
        assert row[9] is None, "the root blocker waits for no other row"


def test_why_of_an_unknown_position(session):
    assert told(session, 10**12)[2] == []


# -- the estimate of the grant


AGO = {
    "postgresql": "clock_timestamp() - ? * interval '1 ms'",
    "mssql": "DATEADD(millisecond, -CAST(? AS int), SYSUTCDATETIME())",
}


def remember(database, resource, held, note=None, before=0):
    """Write a history of holds with the durations ``held``, newest first; two ends are two hours apart."""
    ago = AGO[database.engine]
    for number, seconds in enumerate(held, before + 1):
        ended, ms = number * 2 * 3600 * 1000, round(seconds * 1000)
        database.rows(
            f"INSERT INTO {database.schema}.history (resource_id, queue_position, requesting_id, access_type, weight, "
            "program, note, requested_at, granted_at, ended_at, outcome) "
            f"SELECT ?, ?, 'x', 'write', 1, 'p', ?, {ago}, {ago}, {ago}, 'released'",
            *(resource, -number, note, ended + ms + 5000, ended + ms, ended),
        )


def spread(count, middle, width):
    """Return ``count`` durations spread about ``middle``, unordered."""
    return [middle * (1 + width * ((number * 7 % count) / count - 0.5)) for number in range(count)]


def compare_estimates(session, coordinator, positions):
    """Compare the estimates of SQL and Python, apart from their random part."""
    by_position = estimates(coordinator.admin.overview())
    for position in positions:
        ((low, likely, high, held_low, held_high, count),) = session.ask("estimate", position)
        python = by_position[position]
        assert (held_low, held_high, count) == pytest.approx((python.held_low, python.held_high, python.count))
        for in_sql, other in ((low, python.low), (likely, python.likely), (high, python.high)):
            assert in_sql == pytest.approx(other, abs=5 + 0.35 * (python.high - python.low)), (position, python)
        assert low <= likely <= high
    return by_position


def test_why_estimates_the_grant_time(database, session, connect, name, waiting):
    first, other = connect(), connect()
    remember(database, name, spread(60, 600, 0.5))
    with first.mutex(name):
        for _ in range(4):
            waiting(other.mutex(name))
        estimates = compare_estimates(session, first, [row[0] for row in database.queue(name)[1:]])
        likely = [estimate.likely for _, estimate in sorted(estimates.items())]
        assert likely == sorted(likely)
        (row, *_) = told(session, database.queue(name)[1][0])[2]
        assert re.search(r"; it is granted in about 0:\d\d:\d\d \(between 0:\d\d:\d\d and 0:\d\d:\d\d\)$", row[1])
        assert told(session, database.queue(name)[0][0])[2][0][1] == "it is granted"
        first.admin.pause(name)
        assert session.ask("estimate", database.queue(name)[1][0]) == []
        first.admin.resume(name)


def test_why_estimates_the_grant_time_by_kind(database, session, connect, name, waiting):
    first, other = connect(), connect()
    remember(database, name("l"), spread(60, 300, 1.8))
    remember(database, name("r"), spread(60, 100, 0.5))
    remember(database, name("k"), spread(20, 50, 0.2), note="quick 1")
    remember(database, name("k"), spread(20, 5000, 0.2), note="slow 2", before=20)
    with (
        first.limit(name("l"), 3, weight=2),
        first.limit(name("l"), 3),
        first.read(name("r")),
        first.mutex(name("k"), note="slow 3"),
    ):
        for lock in (other.limit(name("l"), 3), other.limit(name("l"), 3, weight=3), other.limit(name("l"), 3)):
            waiting(lock)
        waiting(other.write(name("r")))
        waiting(other.read(name("r")))
        waiting(other.mutex(name("k"), note="quick 4"))
        waiting(other.mutex(name("k"), note="quick 5"))
        positions = [
            entry.position
            for entry in first.admin.entries()
            if entry.resource.startswith(name) and entry.state == "waits"
        ]
        assert len(positions) == 7
        compare_estimates(session, first, positions)


def test_why_in_sql_lacks_estimates(database, session, connect, name, waiting):
    first, other = connect(), connect()
    remember(database, name, [60.0] * 4)
    with first.limit(name, 3, weight=3):
        waiting(other.limit(name, 3, weight=3))
        position = database.queue(name)[1][0]
        assert session.ask("estimate", position) == [], "four holds are too few"
        remember(database, name, [60.0] * 4, before=10)
        assert len(session.ask("estimate", position)) == 1
        assert session.ask("estimate", database.queue(name)[0][0]) == [], "it is inside"
        first.admin.set_limit(name, 2)
        assert session.ask("estimate", position) == [], "its weight is above the cap"
        first.admin.set_limit(name, None)
    assert session.ask("estimate", 10**12) == []


@pytest.mark.engines("postgresql")
def test_why_shows_expected_hold_time(database):
    """SQL and Python compute the same expected remaining time."""
    held = [10.0, 20.0, 20.0, 50.0]
    for already in (0.0, 15.0, 20.0, 50.0, 70.0):
        for share in (0.01, 0.3, 0.5, 0.81, 0.99):
            ((in_sql,),) = database.rows("SELECT sqlsem.expected_remaining(?::float[], ?, ?)", held, share, already)
            assert in_sql == pytest.approx(Durations(held).at(share, already))
