"""Calls in a caller's transaction, whatever its session, its cursor and its isolation level are."""

import warnings

import pymysql
import pytest
from support import PATIENCE, Attempt, until

import sqlsem
from sqlsem.values.errors import LockLost

pytestmark = pytest.mark.engines("mysql")

CURSORS = ("Cursor", "DictCursor", "SSCursor", "SSDictCursor")
SESSIONS = {
    "default": "SET @nothing = 1",
    "ansi": "SET SESSION sql_mode = 'ANSI'",
    "no-mode": "SET SESSION sql_mode = ''",
    "strict": "SET SESSION sql_mode = 'NO_BACKSLASH_ESCAPES,ONLY_FULL_GROUP_BY,STRICT_ALL_TABLES,NO_ZERO_DATE'",
    "far-away": "SET SESSION time_zone = '-11:00'",
    "serializable": "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE",
    "read-committed": "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "safe-updates": "SET SESSION sql_safe_updates = 1",
}


@pytest.fixture(params=sorted(SESSIONS))
def cursor(request, plain):
    """A cursor of a session with these settings, in a transaction that has read already."""
    cursor = plain().cursor()
    cursor.execute(SESSIONS[request.param])
    cursor.execute("SELECT COUNT(*) FROM sqlsem_setting")
    cursor.fetchall()
    return cursor


def test_put_works_in_any_session(connect, cursor, name):
    """The body keeps its quotes, backslashes and percent signs, and the task is due at once."""
    queue = connect().queue(name)
    body = {"text": 'O\'Brien "x" \\ %s 100% ?\n🔒'}
    first = queue.put(body, cursor=cursor, note="50% 'n' \\", unique="k\\'%")
    assert queue.put(body, cursor=cursor, unique="k\\'%") == first
    second = queue.put(body, cursor=cursor, replace="k\\'%", note="50% 'n' \\", priority=3)
    assert len(set(queue.put_many([{"number": number} for number in range(3)], cursor=cursor))) == 3
    assert queue.tasks() == []
    cursor.connection.commit()
    assert {task.put_by for task in queue.tasks()} == {"root"}
    assert {task.task_id: task.status for task in queue.tasks()}[first] == "cancelled"
    with queue.try_claim() as task:
        assert (task.id, task.body, task.note) == (second, body, "50% 'n' \\")


def test_locks_of_a_task_are_requested_after_the_commit(connect, cursor, name):
    queue = connect().queue(name)
    queue.put(1, cursor=cursor, locks=[sqlsem.mutex(name)])
    cursor.connection.commit()
    with queue.try_claim() as task:
        assert task.grant.resource == name


def test_a_key_newer_than_the_snapshot_counts(connect, cursor, name):
    """The transaction has read before the task was put: its body is not lost, and the key has one task."""
    queue = connect().queue(name)
    first = queue.put(["old"], unique="k")
    assert queue.put(["other"], unique="k", cursor=cursor) == first
    second = queue.put(["new"], replace="k", cursor=cursor)
    cursor.connection.commit()
    assert {task.task_id: task.status for task in queue.tasks()} == {first: "cancelled", second: "pending"}
    with queue.try_claim() as task:
        assert task.body == ["new"]


def test_a_rollback_undoes_a_put(connect, cursor, name):
    queue = connect().queue(name)
    first = queue.put(1, unique="k")
    assert queue.put(2, cursor=cursor, replace="k") != first
    cursor.connection.rollback()
    assert [(task.task_id, task.status) for task in queue.tasks()] == [(first, "pending")]


def test_a_put_blocks_no_lock(connect, cursor, name):
    """A transaction that has put something may stay open for long."""
    coordinator = connect()
    coordinator.queue(name).put(1, cursor=cursor)
    with coordinator.mutex(name, timeout=PATIENCE):
        pass
    cursor.connection.commit()


def test_two_transactions_put_the_same_key(connect, plain, name, threads):
    """The second one waits for the first, and returns its task."""
    queue = connect().queue(name)
    first, second = plain().cursor(), plain().cursor()
    number = queue.put(1, unique="k", cursor=first)
    later = []
    threads.start(lambda: later.append(queue.put(2, unique="k", cursor=second)))
    first.connection.commit()
    threads.join()
    second.connection.commit()
    assert later == [number]
    assert [task.task_id for task in queue.tasks()] == [number]


@pytest.mark.parametrize("kind", CURSORS)
def test_calls_work_with_any_cursor(connect, plain, name, kind):
    """The calls read their results to the end, and say nothing of an earlier one."""
    cursor = plain(cursorclass=getattr(pymysql.cursors, kind)).cursor()
    coordinator = connect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task_id = coordinator.queue(name).put(1, cursor=cursor, unique="k")
        with coordinator.mutex(name) as grant:
            grant.assert_held(cursor)
            grant.release_on_commit(cursor)
            cursor.connection.commit()
            until(lambda: coordinator.admin.entries(name) == [])
    assert [task.task_id for task in coordinator.queue(name).tasks()] == [task_id]


def test_commit_releases_the_lock_in_any_session(connect, cursor, name):
    coordinator = connect()
    with coordinator.mutex(name) as grant:
        grant.release_on_commit(cursor)
        cursor.connection.rollback()
        grant.check()
        grant.release_on_commit(cursor)
        cursor.connection.commit()
        with connect().mutex(name, timeout=PATIENCE):
            pass


def test_assert_held_pins_the_row_until_the_commit(connect, cursor, name):
    """A revoked holder's row stays while a transaction counts on it."""
    coordinator, other = connect(grace=3), connect(retry=PATIENCE)
    with coordinator.mutex(name) as grant:
        grant.assert_held(cursor)
        late = Attempt(other.mutex(name))
        grant.release()
        assert late.waits(0.5)
        cursor.connection.commit()
        late.granted()
        late.leave()


def test_assert_held_refuses_after_a_loss(connect, database, cursor, name):
    """Also a transaction with an old snapshot sees that the row is gone."""
    lock = connect().mutex(name)
    lock.acquire()
    database.rows("DELETE FROM {table} WHERE resource_id = ?", str(name))
    with pytest.raises(LockLost):
        lock.grant.assert_held(cursor)
    cursor.connection.rollback()
    with pytest.raises(LockLost):
        lock.release()
