"""may_enter, by which bare participants decide: the whole rule, on committed rows only."""

import itertools

import pytest

pytestmark = pytest.mark.engines("postgresql", "mssql")


@pytest.fixture
def table(database):
    return f"{database.schema}.ProcessControl"


@pytest.fixture
def bare(database, table, name):
    """Return a function that inserts a row of a bare participant, and returns its position."""
    numbers = itertools.count(1)

    def insert(access="write", limit=1, weight=1, resource=name):
        me = f"{resource} {next(numbers)}"
        columns = "(resource_id, requesting_id, access_type, concurrency_limit, weight)"
        database.rows(f"INSERT INTO {table} {columns} VALUES (?, ?, ?, ?, ?)", resource, me, access, limit, weight)
        return database.rows(f"SELECT queue_position FROM {table} WHERE requesting_id = ?", me)[0][0]

    yield insert
    database.rows(f"DELETE FROM {table} WHERE resource_id = ? AND member_id IS NULL", name)


@pytest.fixture
def one(session):
    return session()


def answers(session, name, *positions):
    return [session.call("may_enter", name, position) for position in positions]


def test_rows_enter_in_their_order(database, table, bare, one, name):
    first, second = bare(), bare()
    assert answers(one, name, first, second) == [1, 0]
    database.rows(f"DELETE FROM {table} WHERE resource_id = ? AND queue_position = ?", name, first)
    assert answers(one, name, first, second) == [-1, 1]


def test_rule_counts_limits_weights_and_labels(bare, one, name):
    readers = [bare("read") for _ in range(3)]
    assert answers(one, name, *readers) == [1, 1, 1]
    writer, late = bare("write"), bare("read")
    assert answers(one, name, writer, late) == [0, 0]


def test_rule_counts_caps_and_pauses(bare, one, name):
    rows = [bare(limit=3) for _ in range(3)]
    heavy = bare(limit=3, weight=2)
    assert answers(one, name, *rows, heavy) == [1, 1, 1, 0]
    one.call("set_limit", name, 2)
    assert answers(one, name, *rows) == [1, 1, 0]
    one.call("pause", name)
    assert answers(one, name, *rows) == [0, 0, 0]
    one.call("resume", name)
    one.call("set_limit", name, None)
    assert answers(one, name, *rows) == [1, 1, 1]


def test_bare_rows_wait_for_sessions(bare, session, one, name):
    holder = session()
    assert holder.acquire(name)[0] == 0
    position = bare()
    assert answers(one, name, position) == [0]
    holder.call("release", name)
    assert answers(one, name, position) == [1]


def test_release_that_is_undone_admits_no_waiter(database, table, bare, one, name):
    """A row that an open transaction has deleted counts until the commit: the transaction may be rolled back."""
    first, second = bare(), bare()
    raw = database.raw(autocommit=False)
    try:
        for _ in range(3):
            raw.execute(
                database.sql(f"DELETE FROM {table} WHERE resource_id = ? AND queue_position = ?"), (name, first)
            )
            assert answers(one, name, second) == [0]
            raw.rollback()
            assert answers(one, name, first, second) == [1, 0]
        raw.execute(database.sql(f"DELETE FROM {table} WHERE resource_id = ? AND queue_position = ?"), (name, first))
        raw.commit()
        assert answers(one, name, second) == [1]
    finally:
        raw.rollback()
        raw.close()


def test_rows_of_another_resource_are_none(bare, one, name):
    position = bare()
    assert answers(one, name("other"), position) == [-1]
    assert answers(one, name, position + 1) == [-1]


@pytest.mark.engines("postgresql")
def test_older_snapshots_are_refused(bare, one, name, refused):
    position = bare()
    one.rows("BEGIN ISOLATION LEVEL REPEATABLE READ")
    with refused("25001", 50001, "may_enter needs READ COMMITTED"):
        one.call("may_enter", name, position)
    one.rows("ROLLBACK")
