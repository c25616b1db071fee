"""Rates of a queue or of its keys limit the starts of tasks in a window: on every engine, for programs, workers and the
command line.
"""

import contextlib
import time
from collections import Counter
from datetime import datetime, timedelta, timezone

import pytest
from support import PATIENCE, cost_of_turns, drained, until
from support.queues import drain, work_until_killed

import sqlsem
from sqlsem.engines.statements.fair_queueing import weighted_order
from sqlsem.insight.reasons import task_reasons
from sqlsem.tasks import Json, Worker
from sqlsem.values.tasks import NewTask


def most_in(window, times):
    """Return the largest number of ``times`` within ``window`` seconds."""
    times = sorted(times)
    length = timedelta(seconds=window)
    return max(sum(start <= other < start + length for other in times) for start in times)


def test_exhausted_key_rate_blocks_no_other_key(queue):
    queue.set_key_rate(2, per="1h")
    queue.put_many([Json("a")] * 4, key="a")
    queue.put_many([Json("b")] * 3, key="b")
    queue.put_many([Json("none")] * 3)
    assert Counter(drain(queue)) == {"a": 2, "b": 2, "none": 3}
    assert queue.try_claim() is None
    queue.set_rate(3, per="1h", key="b")
    assert drain(queue) == ["b"], "what was started before counts"
    queue.set_key_rate(3, per="1h")
    assert drain(queue) == ["a"]
    queue.set_key_rate(None)
    assert drain(queue) == ["a"]


def test_queue_rate_bounds_all_keys(queue):
    queue.set_rate(3, per="1h")
    queue.put_many([Json("a")] * 2, key="a")
    queue.put_many([Json("none")] * 3)
    assert len(drain(queue)) == 3
    (wait,) = queue.claiming.client.with_connection(lambda session: session.queue_waits(queue.name))
    assert (wait.queue, wait.task_key) == (queue.name, None)
    assert 3500 < wait.seconds <= 3700
    queue.set_rate(None)
    assert len(drain(queue)) == 2


def test_every_attempt_is_a_start(queue):
    """A retry after a failure and a claim after a return each count as a start."""
    queue.set_key_rate(3, per="1h")
    queue.put(Json("again"), key="a", max_attempts=9, backoff=0)
    with pytest.raises(ZeroDivisionError), queue.try_claim():
        raise ZeroDivisionError
    next(queue.claim(wait=PATIENCE)).release()
    next(queue.claim(wait=PATIENCE)).release()
    assert queue.try_claim() is None


def test_a_worker_that_dies_does_not_give_its_start_back(spawn, queue, name):
    queue.set_key_rate(2, per="1h")
    queue.put_many([1, 2], key="a")
    child = spawn(work_until_killed, name=str(name), grace=3)
    child.expect("claimed")
    child.kill()
    task = next(queue.claim(wait=PATIENCE))
    task.finish()
    until(lambda: queue.claiming.recover(now=True) == 0 and not queue.state().running, "all are pending again")
    assert queue.try_claim() is None, "two attempts were started; their outcome does not matter"
    assert queue.counts().pending == 1


def test_rate_is_never_exceeded_nor_starts_late(connect, queue, threads):
    """Three workers with two threads each, idle between the windows, keep the rate and start in time."""
    queue.set_key_rate(4, per=3)
    queue.set_rate(7, per=3)
    for key in ("a", "b", "c"):
        queue.put_many([sqlsem.Call("time:sleep", 0)] * 8, key=key)
    workers = [Worker(connect().queue(queue.name), 2, idle_exit=5) for _ in range(3)]
    for worker in workers:
        threads.start(worker.run)
    drained(queue, PATIENCE)
    for worker in workers:
        worker.stop()
    threads.join()
    tasks = queue.tasks()
    assert Counter(task.status for task in tasks) == {"finished": 24}
    # A claim is written after its start was counted, by the same clock: tenths of a second later on a slow machine.
    assert most_in(1.5, [task.claimed_at for task in tasks]) <= 7
    for key in ("a", "b", "c"):
        assert most_in(1.5, [task.claimed_at for task in tasks if task.key == key]) <= 4


def test_task_starts_when_the_rate_allows(queue):
    queue.set_key_rate(1, per=1.5)
    queue.put(0, key="first")  # (The first claim of a session may be slow after its start was counted.)
    next(queue.claim(wait=PATIENCE)).finish()
    queue.put_many([1, 2], key="a")
    for task in (next(queue.claim(wait=PATIENCE)), next(queue.claim(wait=PATIENCE))):
        task.finish()
    _, first, second = (
        task_row.claimed_at for task_row in sorted(queue.tasks(), key=lambda task_row: task_row.task_id)
    )
    assert 1.4 < (second - first).total_seconds() < PATIENCE


def test_a_rate_that_is_raised_is_noticed(connect, queue, threads):
    queue.set_rate(1, per="1h")
    queue.put_many([1, 2])
    drain(queue)
    bodies = []
    threads.start(lambda: bodies.append(next(connect().queue(queue.name).claim(wait=PATIENCE)).body))
    time.sleep(0.2)  # (makes it likely that the thread waits)
    assert not bodies
    queue.set_rate(2, per="1h")
    threads.join()
    assert bodies == [2]


def test_tasks_with_locks_obey(queue, name):
    queue.set_key_rate(2, per="1h")
    resources = [f"{name}-{number}" for number in range(3)]
    for resource in resources:
        queue.put(Json(resource), key="a", locks=[sqlsem.mutex(resource)])
    queue.put(Json("other"), key="b", locks=[sqlsem.mutex(f"{name}-other")])
    bodies = []
    for task in queue.claim(wait=3):
        with task:
            bodies.append(task.body)
    assert Counter(bodies) == {resources[0]: 1, resources[1]: 1, "other": 1}
    pending = [task_row for task_row in queue.tasks() if task_row.status == "pending"]
    assert [row.body for row in pending] == [f'"{resources[2]}"']
    assert all(lock.position is None for lock in pending[0].locks), "it blocks no other request while it cannot run"
    queue.set_key_rate(3, per="1h")
    with next(queue.claim(wait=PATIENCE)) as task:
        assert task.body == resources[2]


def test_invalid_queue_rate_is_refused(queue):
    for change in (
        lambda: queue.set_rate(0, per=1),
        lambda: queue.set_rate(-1, per=1),
        lambda: queue.set_rate(1.5, per=1),
        lambda: queue.set_rate(True, per=1),
        lambda: queue.set_rate(float("nan"), per=1),
        lambda: queue.set_rate(2**31, per=1),
        lambda: queue.set_rate({"1s": 1}),
        lambda: queue.set_rate(1),
        lambda: queue.set_rate(None, per=1),
        lambda: queue.set_rate(1, per=0),
        lambda: queue.set_rate(1, per=float("nan")),
        lambda: queue.set_rate(1, per=float("inf")),
        lambda: queue.set_rate(1, per="1y"),
        lambda: queue.set_rate(1, per="60d"),
        lambda: queue.set_rate(1, per=1, key=""),
        lambda: queue.set_key_rate(0, per=1),
        lambda: queue.set_key_rate(1),
    ):
        with pytest.raises(sqlsem.ConfigurationError):
            change()
    assert queue.limits() == []
    queue.set_rate(2**31 - 1, per="24d")
    queue.put(1)
    assert drain(queue) == [1]
    queue.set_rate(None)
    assert queue.limits() == []


def test_rates_and_waits_of_keys_are_listed(queue):
    queue.set_rate(5, per="1h")
    queue.set_key_rate(1, per="1h")
    queue.set_rate(2, per="30m", key="b")
    of_queue, of_key = queue.limits()
    assert (of_queue.task_rate, of_queue.task_per, of_queue.key_rate, of_queue.key_per) == (5, 3600, 1, 3600)
    assert (of_key.task_key, of_key.task_rate, of_key.task_per, of_key.key_rate) == ("b", 2, 1800, None)
    _, second = queue.put_many([Json("a")] * 2, key="a")
    queue.put(Json("b"), key="b")
    assert len(drain(queue)) == 2
    coordinator = queue.claiming.client
    waits = coordinator.with_connection(lambda session: session.queue_waits(queue.name))
    assert [wait.task_key for wait in waits] == ["a"]
    reasons = task_reasons(queue.tasks(), datetime.now(timezone.utc), queue.limits(), waits=waits)
    assert reasons[second].code == "key_rate"
    assert reasons[second].words.startswith("the rate of its key 'a', 1/1h, is used up; there is room in ")
    assert reasons.keys() == {second}


def test_setting_a_queue_rate_is_recorded(connect, queue):
    queue.set_key_rate(100, per="1m")
    queue.set_key_rate(100, per="1m")
    queue.set_rate(5, per="1s", key="a")
    queue.set_rate(None, key="a")
    recorded = [
        (operation.action, operation.old, operation.new) for operation in connect().admin.operations(queue.name)
    ]
    assert recorded == [
        ("rate", "a: 5 in 1000 ms", "a: "),
        ("rate", "a: ", "a: 5 in 1000 ms"),
        ("key_rate", "", "100 in 60000 ms"),
    ]


@pytest.mark.engines("sqlite", "postgresql")  # (elsewhere a test with so many keys takes too long)
def test_exhausted_keys_cost_a_claim_a_lookup_each(database, queue):
    """A claim that finds all of 200 keys used up costs little more than one that finds them all at their limit.

    (A claim that read all keys for each key would cost 200 times as much.)
    """
    tasks = [NewTask("call", "1", 0, 0.0, 1, 0.0, key=f"k{number}") for number in range(200)]
    session = database.session(grace=600)
    session.put_tasks(queue.name, "many", tasks)
    session.close()

    queue.set_key_rate(1, per="1h")
    for _ in range(200):
        queue.try_claim().release()  # the task is pending again, and its start counts
    assert queue.try_claim() is None
    assert len(queue.claiming.client.with_connection(lambda session: session.queue_waits(queue.name))) == 200
    used_up = cost_of_turns(database, queue.name, finds=False)
    queue.set_key_rate(None)
    queue.set_key_limit(0)
    at_limit = cost_of_turns(database, queue.name, finds=False)
    queue.set_key_limit(None)
    assert used_up < 4 * at_limit


def test_keys_are_drawn_by_their_weights():
    settings = [
        {"task_key": "a", "weight": 1, "maximum": None},
        {"task_key": "b", "weight": 3, "maximum": 1},
        {"task_key": "c", "weight": 1000, "maximum": None},
        {"task_key": "full", "weight": 1000, "maximum": 0},
    ]
    parts = dict.fromkeys(("a", "b", "c", "full"), 1.0)
    drawn = Counter(weighted_order(settings, parts, {"c": 1})[0] for _ in range(4000))
    assert drawn.keys() == {"a", "b"}
    assert 800 < drawn["a"] < 1200


@pytest.mark.engines("postgresql", "mssql")  # (SQLite has no routines that other programs call)
@pytest.mark.parametrize(
    ("key", "setting", "value", "per_ms"),
    [
        *((None, "rate", 5, None), (None, "rate", None, 1000), (None, "rate", 5, 0), (None, "key_rate", 0, 1000)),
        *((None, "limit", 5, 1000), ("a", "key_rate", 5, 1000), ("a", "weight", 5, 1000), (None, None, 5, 1000)),
    ],
)
def test_routine_refuses_invalid_rates(database, queue, key, setting, value, per_ms):
    session = database.session(grace=600)
    # (SQL Server uses one error number for every refusal of a routine.)
    with pytest.raises((sqlsem.ConfigurationError, sqlsem.Unavailable), match="sqlsem: "):
        session.set_queue(queue.name, key, setting, value, per_ms)
    session.close()
    assert queue.limits() == []


@pytest.mark.engines("postgresql")
def test_start_is_counted_while_expired_uses_are_pruned(database, queue, threads):
    """A start is counted while another client prunes the last use of a key that was long unused."""
    queue.set_key_rate(2, per="1h")
    queue.put_many([1, 2], key="a")
    queue.try_claim().finish()
    rate_name = database.rows(f"SELECT {database.schema}.start_rate_name(?, 'a')", queue.name)[0][0]
    window, slot = database.beside("rate_window"), database.beside("rate_slot")
    database.rows(f"UPDATE {window} SET seen_ms = seen_ms - 86400000 * 2 WHERE resource_id = ?", rate_name)
    database.rows(f"DELETE FROM {slot} WHERE resource_id = ?", rate_name)
    with contextlib.closing(database.raw(autocommit=False)) as pruner:
        cursor = pruner.cursor()

        def is_over():
            cursor.execute(f"SELECT {database.schema}.prune(10)")
            return not cursor.execute(f"SELECT 1 FROM {window} WHERE resource_id = %s", (rate_name,)).fetchall()

        until(is_over, "it is forgotten")
        claimed = []
        threads.start(lambda: claimed.append(queue.try_claim()))
        until(lambda: database.waiting_for("transactionid"), "it waits for the transaction that prunes")
        pruner.commit()
        threads.join()
    claimed[0].finish()
    assert database.rows(f"SELECT sum(used) FROM {slot} WHERE resource_id = ?", rate_name) == [(1,)]
