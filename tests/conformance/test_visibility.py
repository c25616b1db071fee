"""The race that the bare protocol loses: a number is given out before its row can be seen.

First the attack on a table without protection, where it must succeed (or the attack proves nothing); then the same
attack on the queue.
"""

import threading
import time

import pytest
from support import PATIENCE, Attempt, Recorder, check_history, until
from support.bare import bare_worker, delete_bare, member_worker


@pytest.mark.engines("postgresql", "mssql")
def test_without_protection_both_enter(database, two, name):
    slow, quick = two
    table = f"bare_{name}"
    identity = {
        "postgresql": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        "mssql": "bigint IDENTITY PRIMARY KEY",
    }[database.engine]
    database.rows(f"CREATE TABLE {table} (queue_position {identity}, requesting_id varchar(20))")
    count = database.sql(f"SELECT count(*) FROM {table} WHERE queue_position < ?")

    def take(cursor, requester):
        cursor.execute(database.sql(f"INSERT INTO {table} (requesting_id) VALUES (?)"), (requester,))
        if database.engine == "mssql":
            cursor.execute("SELECT @@IDENTITY")
        else:
            cursor.execute(f"SELECT currval(pg_get_serial_sequence('{table}', 'queue_position'))")
        return int(cursor.fetchone()[0])

    slow_cursor, other = slow.cursor(), quick.cursor()
    if database.engine == "mssql":
        other.execute("SET LOCK_TIMEOUT 2000")
    first = take(slow_cursor, "slow")  # has its number, but has not committed
    second = take(other, "quick")
    assert first < second
    try:
        other.execute(count, (second,))
    except Exception as exc:  # a server without snapshot reads waits for the row instead
        slow.rollback()
        pytest.skip(f"this server does not read snapshots: {exc}")
    quick_may = other.fetchone()[0] == 0
    slow.commit()
    slow_cursor.execute(count, (first,))
    slow_may = slow_cursor.fetchone()[0] == 0
    slow.commit()
    database.rows(f"DROP TABLE {table}")
    assert quick_may
    assert slow_may, "the attack has lost its force: it must let both in here"


@pytest.mark.kept
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_member_waits_for_a_bare_row_not_committed_yet(connect, database, two, name, end):
    slow, quick = two
    coordinator = connect(retry=PATIENCE)
    coordinator.admin.entries(name)
    with coordinator.mutex(name("warm")):
        pass
    bare = database.insert_bare(slow.cursor(), name, "bare", concurrency_limit=1)
    late = Attempt(coordinator.mutex(name))
    assert late.waits(0.5), "entered beside a number that was given out and not seen"
    getattr(slow, end)()
    if end == "commit":
        assert late.waits(0.3)
        left_at = time.monotonic()
        delete_bare(database, quick.cursor(), bare)
        assert late.granted().position > bare
        assert late.entered > left_at
    late.leave()


def test_a_try_does_not_overtake_a_bare_row_not_committed_yet(connect, database, two, name):
    slow, quick = two
    coordinator = connect(retry=2)
    with coordinator.mutex(name("warm")):
        pass
    bare = database.insert_bare(slow.cursor(), name, "bare", concurrency_limit=1)
    assert coordinator.mutex(name).acquire(timeout=0.5) is False
    slow.commit()
    assert coordinator.mutex(name).acquire(timeout=0) is False
    delete_bare(database, quick.cursor(), bare)
    assert len(database.queue(name)) == 0


def test_bare_rows_get_their_numbers_in_the_order_of_commits(database, two, name, threads):
    slow, quick = two
    first = database.insert_bare(slow.cursor(), name, "slow")
    numbers = []
    done = threading.Event()

    def take():
        numbers.append(database.insert_bare(quick.cursor(), name, "quick"))
        done.set()

    threads.start(take)
    assert not done.wait(0.5), "took a number while an earlier one was not committed"
    slow.commit()
    threads.join()
    assert numbers[0] > first
    assert [row[0] for row in database.queue(name)] == [first, *numbers]
    database.rows("DELETE FROM {table} WHERE resource_id = ?", str(name))


@pytest.mark.engines("postgresql")
def test_a_bare_row_with_an_old_snapshot(connect, database, two, name):
    """A bare row inserted with an old snapshot gets a new number all the same."""
    import psycopg

    slow, _ = two
    slow.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    cursor = slow.cursor()
    cursor.execute("SELECT 1")
    with connect().mutex(name) as grant:
        bare = database.insert_bare(cursor, name, "bare", concurrency_limit=1)
        slow.commit()
        assert bare > grant.position
        assert [row[0] for row in database.queue(name)] == [grant.position, bare]
        database.rows("DELETE FROM {table} WHERE queue_position = ?", bare)


def test_different_resources_do_not_wait_for_each_other(connect, database, two, name):
    if database.engine in ("sqlite", "mysql"):
        pytest.skip("a database of this engine has one writer at a time")
    slow, _ = two
    database.insert_bare(slow.cursor(), name("a"), "bare")
    with connect().mutex(name("b"), timeout=30):
        pass
    slow.rollback()


@pytest.mark.parametrize("members", [0, 2], ids=["bare-only", "mixed"])
def test_bare_participants_and_members_under_load(connect, database, name, threads, members):
    recorder, rounds = Recorder(), 15
    coordinator = connect(retry=PATIENCE)
    for seed in range(4 - members):
        threads.start(bare_worker, database, str(name), rounds, seed, recorder)
    for seed in range(members):
        threads.start(member_worker, coordinator, str(name), rounds, seed, recorder)
    threads.join()
    assert check_history(recorder.stays) == 4 * rounds
    until(lambda: database.queue(name) == [])
