"""Priorities from T-SQL: @priority of acquire and try, beside Python's."""

import pytest
from support import Attempt, until

from sqlsem.engines.priorities import priority_queue

pytestmark = pytest.mark.engines("mssql")


@pytest.fixture
def ranked(connect, name):
    """The test's resource has priorities."""
    operator = connect()
    operator.admin.set_priorities(name, 3600)
    yield operator
    operator.admin.set_priorities(name, None)


def test_higher_ones_go_first_also_among_pythons(session, connect, database, name, ranked):
    def in_line(number):
        until(lambda: len(database.queue(priority_queue(name))) == number, f"{number} in the line")

    connection, low, high = session(), session(), session()
    first = connection.acquire(name, priority=0)
    assert first.code == 0
    assert connection.acquire(name, routine="try", priority=99).code == -1
    assert low.acquire(name, timeout_ms=100, priority=99) == (-1, None, None)
    in_line(0)
    waits = low.later(low.acquire, name, timeout_ms=60000, priority=1)
    in_line(1)
    urgent = high.later(high.acquire, name, timeout_ms=60000, priority=5)
    in_line(2)
    python = Attempt(connect().mutex(name, priority=3))
    in_line(3)
    assert connection.release(name) == 0
    second = urgent.result(30)
    assert second.code == 1
    assert second.fence > first.fence
    assert high.release(name) == 0
    python.granted()
    assert not waits.done()
    python.leave()
    assert waits.result(30).code == 1
    assert low.release(name) == 0
    in_line(0)


def test_invalid_priorities_are_refused(session, name, ranked):
    connection = session()
    for more, words in (
        ({}, "no priority is named"),
        ({"priority": 100}, "from 0 to 99"),
        ({"priority": 1, "lease_seconds": 5}, "lease_seconds"),
    ):
        with pytest.raises(Exception, match=words):
            connection.acquire(name, **more)
    with pytest.raises(Exception, match="no priorities are set"):
        connection.acquire(name("other"), priority=1)
    assert connection.acquire(name("other")).code == 0
    with pytest.raises(Exception, match="while this session holds something else"):
        connection.acquire(name, priority=1)
    assert connection.release(name("other")) == 0
    with pytest.raises(Exception, match="no priority is named"):
        connection.rows(
            f"INSERT INTO {{s}}.{connection.database.table} (resource_id, requesting_id) VALUES (?, N'bare')", str(name)
        )


def test_unattended_priority_entry_is_removed(new_session, session, connect, database, name, ranked):
    """Its caller was disconnected; its session lives on."""
    holder, other = session(), session()
    assert holder.acquire(name, priority=0).code == 0
    member = other.rows(
        "DECLARE @m bigint; EXEC {s}.session_member NULL, @m OUTPUT; "
        "EXEC {s}.acquire_by_priority @m, N'cut off', N'me', N'cut', 0, ?, N'write', 1, 1, NULL, 99, NULL, "
        "@attended_ms = 200; "
        "SELECT @m",
        str(name),
    )
    assert member
    assert len(database.queue(priority_queue(name))) == 1
    assert holder.release(name) == 0
    waiting = Attempt(connect().mutex(name, priority=0))
    waiting.granted()
    waiting.leave()
    assert database.queue(priority_queue(name)) == []
