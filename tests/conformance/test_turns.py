"""Work queues with keys and limits: on every engine, by programs, workers and the command line."""

import contextlib
import json
import threading
import time
from collections import Counter
from datetime import datetime, timezone

import psycopg
import pytest
from support import PATIENCE, cost_of_turns, until
from support.queues import drain, work_until_killed

import sqlsem
from sqlsem.engines.sqlite.session import SqliteSession
from sqlsem.insight.reasons import task_reasons
from sqlsem.tasks import Json, Worker
from sqlsem.values.tasks import NewTask


def test_backlog_of_a_key_delays_no_other_key(queue):
    queue.put_many([Json("hot")] * 30, key="hot")
    queue.put_many([Json("cold")] * 3, key="cold")
    bodies = drain(queue)
    assert Counter(bodies) == {"hot": 30, "cold": 3}
    # With one worker no other task runs, so each claim draws between two keys. The cold tasks come later than this with
    # a probability of 1e-5.
    assert bodies[:25].count("cold") == 3


def test_the_key_with_the_fewest_running_comes_next(queue):
    queue.put_many([1, 2, 3], key="a")
    queue.put_many([4, 5, 6], key="b")
    claimed = [queue.try_claim() for _ in range(4)]
    assert Counter(task.body > 3 for task in claimed) == {True: 2, False: 2}
    for task in claimed:
        task.finish()


def test_a_weight_is_a_share(queue):
    queue.set_weight("a", 3)
    queue.put_many([Json("a")] * 8, key="a")
    queue.put_many([Json("b")] * 8, key="b")
    claimed = [queue.try_claim() for _ in range(8)]
    assert Counter(task.body for task in claimed) == {"a": 6, "b": 2}
    for task in claimed:
        task.finish()
    drain(queue)


def put_keys(database, queue, count, each=1):
    """Put ``each`` tasks for each of ``count`` keys, in few calls."""
    session = database.session(grace=600)
    tasks = [NewTask("json", "1", 0, 0.0, 1, 0.0, key=f"tenant-{number % count}") for number in range(count * each)]
    for start in range(0, len(tasks), 500):
        session.put_tasks(queue.name, f"{queue.name}.{start}", tasks[start : start + 500])
    session.close()


def test_of_many_keys_none_is_forgotten(database, queue):
    """No key is forgotten among more keys than a claim reads at a time."""
    count = 36 if database.engine == "mssql" else 100
    queue.set_key_limit(1)
    put_keys(database, queue, count, each=2)
    claimed = [queue.try_claim() for _ in range(count)]
    assert queue.try_claim() is None, "all are at their limits"
    keys = {task_row.task_id: task_row.key for task_row in queue.tasks(maximum=1000)}
    assert len({keys[task.id] for task in claimed}) == count
    for task in claimed:  # a claim begins to read at a random key: so each key has to be found when it is the only one
        task.finish()
        again = queue.try_claim()
        assert again is not None, f"{keys[task.id]} is forgotten"
        assert keys[again.id] == keys[task.id]
        again.finish()


def test_keys_are_compared_byte_by_byte(queue):
    """Each key has its own limit, however similar the keys are; keys of running tasks, too."""
    keys = ["a", "A", "ä", "a\u0308", "a.", ".a", "aa", "ﬀ", "ff"]
    queue.set_key_limit(1)
    for key in keys * 2:
        queue.put(Json(key), key=key)
    claimed = [queue.try_claim() for _ in keys]
    assert sorted(task.body for task in claimed) == sorted(keys)
    assert queue.try_claim() is None
    for task in claimed:
        task.finish()
    assert sorted(drain(queue)) == sorted(keys)


@pytest.mark.engines("sqlite")  # (elsewhere claims of a queue with limits run one after the other)
def test_claim_reads_a_single_snapshot(queue, connect, monkeypatch):
    """One of two keys is always free, though others take it during the search and release the other one."""
    others = connect().queue(queue.name)
    queue.set_key_limit(1)
    for key in ("a", "a", "b"):
        queue.put(Json(key), key=key)
    held = {task.body: task for task in (others.try_claim(), others.try_claim())}
    held.pop("b").release()
    rows, turned = SqliteSession.rows, []

    def rows_then_others(self, query, *parameters):
        result = rows(self, query, *parameters)
        if query == "running_keys" and not turned:  # key a is at its limit
            turned.append(held.pop("a").finish())
            while "b" not in held:
                task = others.try_claim()
                held[task.body] = task
            if "a" in held:
                held.pop("a").release()
        return result

    monkeypatch.setattr(SqliteSession, "rows", rows_then_others)
    claimed = queue.try_claim()
    assert turned
    assert claimed is not None
    assert claimed.body == "a"
    claimed.finish()
    held["b"].finish()


@pytest.mark.engines("sqlite", "postgresql")
def test_a_claim_costs_the_same_beside_many_keys(database, queue, connect, name):
    small_queue, large_queue = queue, connect().queue(name("many"))
    for measured, count in ((small_queue, 100), (large_queue, 3000)):
        measured.set_key_limit(1)
        put_keys(database, measured, count)
    costs = [cost_of_turns(database, measured.name, finds=True) for measured in (large_queue, small_queue)]
    assert costs[0] < 2 * costs[1]
    # The cost stays the same if many keys have their own settings.
    with contextlib.closing(database.raw()) as raw:
        raw.cursor().execute(
            f"INSERT INTO {database.beside('queue_key')} (queue_name, task_key, task_limit) "
            f"SELECT queue_name, task_key, 2 FROM {database.beside('task')} WHERE queue_name = '{large_queue.name}'"
        )
    assert cost_of_turns(database, large_queue.name, finds=True) < 2 * costs[1]
    large_queue.set_key_limit(None)


@pytest.mark.engines("sqlite", "postgresql")
def test_keys_without_room_cost_a_lookup_each(database, queue, connect, name):
    """The cost of a claim grows no faster than the number of exhausted keys, here from 100 to 1,600."""
    costs = []
    for measured, count in ((queue, 100), (connect().queue(name("many")), 1600)):
        measured.set_key_rate(1, per="1h")
        put_keys(database, measured, count)
        with contextlib.closing(database.raw()) as raw:
            raw.cursor().execute(
                f"INSERT INTO {database.beside('queue_wait')} (queue_name, task_key, since_ms, free_ms) "
                f"SELECT queue_name, task_key, 0, 253370764800000 FROM {database.beside('task')} "
                f"WHERE queue_name = '{measured.name}'"
            )
        costs.append(cost_of_turns(database, measured.name, finds=False, times=1) / count)
        measured.set_key_rate(None)
    assert costs[1] < 2 * costs[0]


@pytest.mark.engines("sqlite", "postgresql")
def test_a_heavy_key_has_its_share_among_many(database, queue):
    """A heavy key gets its share, although a claim does not read all other keys."""
    put_keys(database, queue, 400)
    queue.set_weight("tenant-7", 400)
    with contextlib.closing(database.session(grace=600)) as session, contextlib.closing(database.raw()) as raw:

        def draw():
            if database.engine == "sqlite":
                return session.next_pending(queue.name)
            cursor = raw.cursor()
            cursor.execute(f"SELECT {database.schema}.pick_fair_task(%s, 1)", (queue.name,))
            return cursor.fetchone()[0]

        heavy = next(task.task_id for task in queue.tasks(maximum=1000) if task.key == "tenant-7")
        drawn = Counter(draw() == heavy for _ in range(300))
    # Its share is a half. A sample of the other keys gives their total weight to about an eighth.
    assert 90 < drawn[True] < 210


def test_higher_priorities_of_a_key_come_first(queue):
    for body, priority in (("c", -1), ("d", -1), ("b", 0), ("a", 5)):
        queue.put(Json(body), key="k", priority=priority)
    assert drain(queue) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("maximum", [2, 100])
def test_open_tasks_are_listed_in_the_order_of_running(queue, maximum):
    """Open tasks are listed page by page: by order, then by priority (higher first), then by number."""
    for number, (order, priority) in enumerate(
        [(2, 0), (1, 0), (1, -1), (1, 7), (2, 9), (1, 0), (1, 7), (1, -(2**31) + 1)]
    ):
        queue.put(number, order=order, priority=priority)
    for status in (None, "pending"):
        listed = [task for skip in range(0, 8, maximum) for task in queue.tasks(status, maximum=maximum, skip=skip)]
        assert [(row.order, row.priority) for row in listed] == [
            *((1, 7), (1, 7), (1, 0), (1, 0), (1, -1), (1, -(2**31) + 1), (2, 9), (2, 0)),
        ]
    assert drain(queue) == [json.loads(row.body) for row in listed]


def test_orders_come_before_keys_and_priorities(queue):
    queue.put(Json("late"), key="a", order=1, priority=9)
    queue.put(Json("first"), key="b")
    task = queue.try_claim()
    assert task.body == "first"
    assert queue.try_claim() is None
    task.finish()
    assert drain(queue) == ["late"]


def test_limits_of_queue_of_keys_and_of_a_single_key(queue):
    queue.set_limit(4)
    queue.set_key_limit(1)
    queue.set_limit(2, key="b")
    for key in "abc":
        queue.put_many([Json(key)] * 3, key=key)
    queue.put_many([Json("none")] * 3)
    claimed = []
    while (task := queue.try_claim()) is not None:
        claimed.append(task)
    assert len(claimed) == 4
    counted = Counter(task.body for task in claimed)
    assert not counted - Counter(a=1, b=2, c=1, none=3)
    queue.set_limit(None)
    while (task := queue.try_claim()) is not None:
        claimed.append(task)
    assert Counter(task.body for task in claimed) == {"a": 1, "b": 2, "c": 1, "none": 3}
    for task in claimed:
        task.finish()
    queue.set_key_limit(0)
    queue.set_limit(0, key="b")
    assert queue.try_claim() is None
    assert {(limit.task_key, limit.task_limit, limit.key_limit) for limit in queue.limits()} == {
        (None, None, 0),
        ("b", 0, None),
    }


def test_invalid_limits_are_refused(queue):
    for change in (
        lambda: queue.set_limit(-1),
        lambda: queue.set_limit(1.5),
        lambda: queue.set_limit(1, key=""),
        lambda: queue.set_key_limit(2**31),
        lambda: queue.set_weight("a", 0),
        lambda: queue.put(1, key="a\0"),
        lambda: queue.put(1, key="a" * 256),
        lambda: queue.put(1, priority=2**31),
        lambda: queue.put(1, priority=0.5),
    ):
        with pytest.raises(sqlsem.ConfigurationError):
            change()
    assert (queue.limits(), queue.tasks()) == ([], [])


def test_the_options_of_a_schedule_have_the_key(queue, name):
    schedule = queue.schedule("0 2 * * *", sqlsem.Sql("SELECT 1"), name=str(name), key="a", priority=7)
    assert (schedule.options["key"], schedule.options["priority"]) == ("a", 7)
    queue.claiming.client.with_connection(lambda session: session.set_schedule(str(name), "remove", None))


def work(connect, queue, workers, threads):
    """Start workers that run all tasks, in threads of this process."""
    crew = [Worker(connect().queue(queue.name), threads, idle_exit=1, group=False) for _ in range(workers)]
    running = [threading.Thread(target=worker.run) for worker in crew]
    for thread in running:
        thread.start()
    return running


def beside(task, tasks):
    """Return the tasks that ran when ``task`` was claimed.

    The times are the database's: an end is recorded before its slot is free.
    """
    return [other for other in tasks if other.claimed_at < task.claimed_at < other.ended_at]


def test_threads_never_pass_a_limit(connect, queue):
    """Four workers with four threads each never exceed a limit."""
    queue.set_limit(3)
    queue.set_key_limit(2)
    for key in ("a", "b"):
        queue.put_many([sqlsem.Call("time:sleep", 0.02)] * 15, key=key)
    for thread in work(connect, queue, 4, 4):
        thread.join(PATIENCE)
    tasks = queue.tasks()
    assert Counter(task.status for task in tasks) == {"finished": 30}
    for task in tasks:
        others = beside(task, tasks)
        assert len(others) < 3, (task, others)
        assert sum(other.key == task.key for other in others) < 2, (task, others)


def test_a_limit_counts_from_the_moment_in_which_it_is_set(connect, queue):
    """A queue's first limit counts at once, also for concurrent claims that began without a limit."""
    queue.put_many([sqlsem.Call("time:sleep", 0.01)] * 60)
    threads = work(connect, queue, 3, 2)
    until(lambda: queue.counts().finished > 5, "they are at work")
    queue.set_limit(2)
    (limit,) = queue.limits()
    for thread in threads:
        thread.join(PATIENCE)
    tasks = queue.tasks()
    assert Counter(task.status for task in tasks) == {"finished": 60}
    for task in tasks:
        if task.claimed_at > limit.set_at:
            assert len(beside(task, tasks)) < 2, (task, beside(task, tasks))


def test_a_limit_that_is_raised_is_noticed(connect, queue, threads):
    queue.set_limit(0)
    queue.put(1)
    bodies = []
    threads.start(lambda: bodies.append(next(connect().queue(queue.name).claim(wait=PATIENCE)).body))
    time.sleep(0.2)  # (makes it likely that the thread waits)
    assert not bodies
    queue.set_limit(1)
    threads.join()
    assert bodies == [1]


def test_a_killed_worker_frees_its_place(spawn, queue, name):
    queue.set_key_limit(1)
    first, second = queue.put_many([1, 2], key="a")
    child = spawn(work_until_killed, name=str(name), grace=0.5)
    assert child.expect("claimed")["id"] == first
    assert queue.try_claim() is None
    child.kill()
    task = next(queue.claim(wait=PATIENCE))
    assert (task.id, task.attempt) == (first, 2), "its place is free once it is given up, and not before"
    assert queue.try_claim() is None
    task.finish()
    with queue.try_claim() as task:
        assert task.id == second


def test_task_without_key_passes_a_key_at_its_limit(queue):
    """A task without a key passes a key at its limit, although the queue had no turns when the task was put."""
    queue.put(Json("keyed"), key="a")
    with queue.try_claim() as task:
        queue.put_many([Json("plain")] * 2)
        task.release()
    queue.set_limit(0, key="a")
    queue.put(Json("later"))
    assert sorted(drain(queue)) == ["later", "plain", "plain"]
    queue.set_limit(None, key="a")
    assert drain(queue) == ["keyed"]


@pytest.fixture
def claiming(database, name):
    """A connection without autocommit, and a function that claims in its transaction and returns the task's number."""
    session = database.session(grace=600)
    member = session.register_member("host", 1, "claims")
    with database.raw(autocommit=False) as raw:

        def claim(uid):
            text = "SELECT task_id FROM sqlsem.claim_task(%s, %s, 'me', %s, false)"
            return raw.execute(text, (member, str(name), uid)).fetchone()[0]

        yield raw, claim
    session.deregister_member(member)
    session.close()


@pytest.mark.engines("postgresql")  # (elsewhere no claim is part of a longer transaction)
@pytest.mark.parametrize("removed", [False, True], ids=["the first limit", "after one was removed"])
def test_a_first_limit_waits_for_the_claims_of_a_queue_with_keys(database, queue, claiming, threads, removed):
    queue.put_many([1, 2], key="a")
    if removed:
        queue.set_limit(5)
        queue.set_limit(None)
    raw, claim = claiming
    first = claim("one")
    threads.start(queue.set_limit, 1)
    until(lambda: database.waiting_for("relation"), "it waits")
    assert queue.limits() == []
    raw.commit()
    threads.join()
    assert queue.try_claim() is None, f"task {first} runs"
    queue.set_limit(2)
    queue.try_claim().finish()


@pytest.mark.engines("postgresql")
def test_a_limit_may_go_while_a_claim_waits_for_it(database, queue, name, claiming, threads):
    """A claim whose limit was removed is like a claim without a limit: the next limit waits for it."""
    queue.put_many([1, 2], key="a")
    raw, claim = claiming
    pid = raw.info.backend_pid
    answers = []
    with database.raw(autocommit=False) as removing, database.raw() as setting:
        while not answers:  # (a claim waits for a second at most, and then finds no task)
            queue.set_limit(5)
            removing.execute("DELETE FROM sqlsem.queue_setting WHERE queue_name = %s", (str(name),))
            threads.start(lambda: answers.append(claim("late")))
            until(lambda: database.rows("SELECT 1 FROM pg_locks WHERE pid = ? AND NOT granted", pid), "it waits")
            removing.commit()
            threads.join()
            if answers == [None]:
                raw.rollback()
                answers.clear()
        setting.execute("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            setting.execute("SELECT sqlsem.set_queue(%s, NULL, 'limit', 1)", (str(name),))
        raw.commit()
        setting.execute("SELECT sqlsem.set_queue(%s, NULL, 'limit', 1)", (str(name),))
    assert queue.try_claim() is None


@pytest.mark.engines("postgresql")
def test_concurrent_claim_of_a_key_starves_no_worker(queue, claiming):
    first, second, third = (*queue.put_many([1, 2], key="a"), queue.put(3))
    raw, claim = claiming
    claimed = {claim("one"), claim("two")}
    with queue.try_claim() as task:
        assert {*claimed, task.id} == {first, second, third}
        assert queue.try_claim() is None
    raw.commit()


@pytest.mark.engines("postgresql")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_claim_with_an_old_snapshot_is_refused(queue, name, claiming, level):
    """A claim with an old snapshot would not see the limit."""
    queue.put(1)
    raw, claim = claiming
    raw.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
    raw.execute("SELECT count(*) FROM sqlsem.setting")
    queue.set_limit(0)
    with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="a claim needs READ COMMITTED"):
        claim("old")
    raw.rollback()
    raw.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
    with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="setting a limit needs READ COMMITTED"):
        raw.execute("SELECT sqlsem.set_queue(%s, NULL, 'limit', 1)", (str(name),))
    raw.rollback()


def test_a_reason_names_the_limit(queue):
    queue.set_key_limit(1)
    first, second, other = (*queue.put_many([1, 2], key="a"), queue.put(3, key="b"))
    task = queue.try_claim()
    while task.id != first:
        task.release()
        task = queue.try_claim()
    reasons_of = task_reasons(queue.tasks(), datetime.now(timezone.utc), queue.limits())
    assert (reasons_of[second].code, reasons_of[second].words) == ("key_limit", "its key 'a' has 1 of 1 running")
    assert reasons_of[other].code == "turn_now"
    queue.set_limit(1)
    reasons_of = task_reasons(queue.tasks(), datetime.now(timezone.utc), queue.limits())
    assert reasons_of[other].code == "queue_limit"
    assert "1 of 1 tasks of its queue are running" in reasons_of[other].words
    task.finish()
    assert sorted(drain(queue)) == [2, 3]
