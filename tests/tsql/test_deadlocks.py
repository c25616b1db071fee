"""The search for deadlocks in T-SQL, where SQL Server differs (``routines`` has the rest)."""

import pytest

pytestmark = pytest.mark.engines("mssql")


def test_deadlock_search_is_independent_of_set_options(session, name):
    first, second = session(), session()
    second.rows("SET ROWCOUNT 1")
    for which, holder in (("a", first), ("b", second)):
        assert holder.acquire(name(which)).code == 0
    waiting = first.waiting(name("b"), timeout_ms=60_000)
    assert second.acquire(name("a"), timeout_ms=30_000).code == -3
    second.rows("SET ROWCOUNT 0")
    assert f"waits for '{name('a')}' at " in second.told[-1]
    assert second.release(name("b")) == 0
    assert waiting.result(60).code == 1
    assert first.release(name("b")) == first.release(name("a")) == 0


def test_not_in_a_transaction(session, refused):
    with refused(50001, "find_deadlock must not be called inside an open transaction"):
        session().rows("BEGIN TRANSACTION; EXEC {s}.find_deadlock 1")
