"""The cost of idle workers, and how soon they start a new task."""

import inspect
import threading
import time
from collections import Counter
from functools import partial

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.client.operations.backoff import backoff_delays
from sqlsem.engines.optional import Session
from sqlsem.engines.protocol import EngineConnection
from sqlsem.tasks import Worker, claiming

pytestmark = pytest.mark.engines("sqlite", "postgresql")

#: The time at which each task began, by number.
begun: dict[int, float] = {}


def note(number):
    begun[number] = time.monotonic()


def fail_once(number):
    if number not in begun:
        note(number)
        raise ValueError("once")
    note(-number)


@pytest.fixture
def seldom(timing, monkeypatch):
    """Make polls so rare that a worker that starts a task was notified, or knew the time."""
    timing(shortest_recovery=4 * PATIENCE, longest_recovery=4 * PATIENCE)
    monkeypatch.setattr(claiming, "backoff_delays", partial(backoff_delays, first=4 * PATIENCE))


@pytest.fixture
def working(connect, name):
    """Return the queue of a worker without tasks."""
    begun.clear()
    queue = connect().queue(name)
    worker = Worker(queue, threads=4)
    thread = threading.Thread(target=worker.run)
    thread.start()
    client = queue.claiming.client
    until(lambda: client.notifications.heard, "a worker listens")
    yield queue
    worker.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.fixture
def idle(seldom, working, monkeypatch):
    """Return that queue once its worker sleeps for longer than any test waits."""
    bell, rests = working.claiming.client.queue_changes, []
    wait_changed = bell.wait_changed

    def noted(version, timeout):
        rests.append(timeout)
        wait_changed(version, timeout)

    monkeypatch.setattr(bell, "wait_changed", noted)
    bell.notify()  # wakes a worker that slept already
    until(lambda: rests and rests[-1] > PATIENCE, "the worker sleeps")
    return working


def test_idle_workers_cost_a_statement_per_second(working):
    """Idle workers cost at most a statement per second; the test counts all calls of the session."""
    time.sleep(5)  # time for the worker's pauses to grow
    session, calls, running = working.claiming.client.member.main.session, Counter(), []

    def watched(name, call):
        def counted(*arguments):
            calls[name] += not running  # a call inside another call is not counted
            running.append(name)
            try:
                return call(*arguments)
            finally:
                running.pop()

        return counted

    names = [
        name
        for name, _ in inspect.getmembers(Session, inspect.isfunction)
        if not (name.startswith("_") or hasattr(EngineConnection, name) or name == "require_in_place")
    ]
    assert {"heartbeat", "claim_task", "claim_blocked", "next_ready", "maintain_queue"} <= set(names)
    for name in names:
        setattr(session, name, watched(name, getattr(session, name)))
    began = time.monotonic()
    time.sleep(8)
    for name in names:
        delattr(session, name)
    # (Each kind of call may come once more than its share, as it may fall on the beginning and the end.)
    assert 0 < sum(calls.values()) <= len(+calls) + time.monotonic() - began, calls


def test_task_of_another_process_starts_at_once(seldom, idle, connect, name):
    """Another coordinator, like another process, shares nothing with the worker but the database."""
    other = connect().queue(name)
    for number in range(20):
        other.put(sqlsem.Call(note, number))
        until(lambda number=number: number in begun)
        time.sleep(0.1)


def test_the_next_order_is_taken_up_at_once(seldom, idle, connect, name):
    """The next order starts at once when another client ends the last task of the order before it."""
    other = connect().queue(name)
    number = other.put(sqlsem.Call(note, 0), after=60)  # holds up the later order
    other.put(sqlsem.Call(note, 1), order=1)
    time.sleep(2)
    assert begun == {}
    other.claiming.client.member.call("cancel", lambda session, _: session.set_task(number, "cancel"))
    until(lambda: 1 in begun)


def test_task_due_just_after_a_poll_starts_in_time(seldom, idle, connect, name):
    """A task becomes due between a poll and the query for the next due time, which then says: now."""
    session, answers = idle.claiming.client.member.main.session, []
    known = session.next_ready

    def next_ready(queue):
        answers.append(0.0 if not answers else known(queue))
        return answers[-1]

    session.next_ready = next_ready
    connect().queue(name).put(sqlsem.Call(note, 1), after=0.5)
    until(lambda: 1 in begun)
    assert answers[0] == 0.0


def test_delayed_task_starts_when_due(seldom, idle, connect, name):
    other = connect().queue(name)
    began = time.monotonic()
    other.put(sqlsem.Call(note, 1), after=1.3)
    other.put(sqlsem.Call(note, 2), after=2.1)
    until(lambda: len(begun) == 2)
    assert begun[1] - began > 1.2
    assert begun[2] - began > 2.0


def test_the_next_attempt_is_begun_in_time(seldom, idle, connect, name):
    connect().queue(name).put(sqlsem.Call(fail_once, 1), max_attempts=2, backoff=1)
    until(lambda: -1 in begun)
    assert begun[-1] - begun[1] > 0.4
