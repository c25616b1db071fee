"""The views of work queues: counts by state, pages of tasks."""

import time

import pytest
from support import until

import sqlsem
from sqlsem.insight.reasons import task_reasons
from sqlsem.tasks import Json, Worker


def nothing():
    """The function of the tasks here."""


def fail():
    raise ValueError("no")


def die(channel, url, options, name):
    """Claim a task and keep it."""
    task = sqlsem.connect(url, **options, grace=0.2).queue(name).try_claim()
    channel.tell("claimed", id=task.id)
    channel.ask()


def test_queue_summary_shows_counts_age_rate_and_blocker(connect, name):
    coordinator = connect()
    queue, other = coordinator.queue(name), coordinator.queue(name("other"))
    assert queue.counts() is None
    failed = queue.put(fail, order=1)
    queue.put_many([nothing] * 3)
    Worker(queue, idle_exit=0).run()
    queue.put_many([Json("late"), Json("later")], order=2)
    queue.put(Json("kept back"), order=2, after=3600)
    coordinator.admin.cancel_task(queue.put(Json("cancelled"), order=3))
    running = queue.put(Json("runs"), order=0)
    task = queue.try_claim()
    assert task.id == running
    other.put(Json("x"), after=60)
    counts = queue.counts()
    assert (counts.pending, counts.running, counts.lost) == (3, 1, 0)
    assert (counts.finished, counts.failed, counts.cancelled) == (3, 1, 1)
    assert 0 <= counts.oldest < 60
    assert counts.rate == pytest.approx(5 / 5), "of five minutes: three finished, one failed, one cancelled"
    assert counts.blocked_by == failed
    task.finish()
    summaries = {row.queue: row for row in coordinator.admin.queues()}
    assert summaries[name("other")].pending == 1
    assert summaries[name("other")].oldest is None, "nothing there that could be started"
    assert (summaries[name("other")].rate, summaries[name("other")].blocked_by) == (0, None)
    coordinator.admin.cancel_task(failed)
    assert queue.counts().blocked_by is None
    assert queue.counts().as_dict()["cancelled"] == 2


def test_when_a_task_will_be_started(connect, name):
    """Every engine has the data of the estimate: the workers, the start of their tasks, and past durations."""
    coordinator = connect()
    queue = coordinator.queue(name)
    queue.put_many([nothing] * 20, note="short")
    Worker(queue, idle_exit=0).run()
    queue.put(Json("runs"), note="short")
    waits, behind = queue.put(Json("waits"), note="short"), queue.put(Json("behind"), order=1, note="short")
    with queue.try_claim():
        listed = coordinator.admin.tasks(name)
        reasons = task_reasons(listed, max(task.put_at for task in listed))
        assert (reasons[waits].code, reasons[behind].code) == ("turn_now", "order_open")
        for number in (waits, behind):
            estimate = reasons[number].starts
            assert estimate.count == 20
            assert 0 <= estimate.held_low <= estimate.held_high < 5
            assert 0 <= estimate.low <= estimate.likely <= estimate.high
        assert reasons[waits].starts.likely <= reasons[behind].starts.likely


def test_tasks_of_dead_workers_are_counted(spawn, connect, name):
    queue = connect().queue(name)
    queue.put_many([1, 2])
    task = queue.try_claim()
    child = spawn(die, name=str(name))
    child.expect("claimed")
    child.kill()
    until(lambda: queue.counts().lost == 1)
    assert queue.counts().running == 2
    task.finish()


def test_pages(connect, name):
    coordinator = connect()
    queue = coordinator.queue(name)
    numbers = queue.put_many(range(7))
    for _ in range(3):
        queue.try_claim().finish()
        time.sleep(0.002)
    expected = [*numbers[3:], *reversed(numbers[:3])]
    assert [task_row.task_id for task_row in queue.tasks()] == expected
    pages = [[task_row.task_id for task_row in queue.tasks(maximum=3, skip=skip)] for skip in (0, 3, 6, 9)]
    assert pages == [expected[:3], expected[3:6], expected[6:], []]
    assert [task_row.task_id for task_row in queue.tasks("finished", maximum=2, skip=2)] == [numbers[0]]
    task = queue.try_claim()
    assert [task_row.task_id for task_row in queue.tasks("running", maximum=1)] == [task.id]
    assert queue.tasks("running", maximum=1, skip=1) == []
    task.finish()
    with pytest.raises(sqlsem.ConfigurationError, match="skip must be from 0"):
        queue.tasks(skip=-1)
