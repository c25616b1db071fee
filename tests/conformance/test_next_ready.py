"""The query of idle workers for the time when the next task is ready, and its cost beside a large backlog."""

import contextlib

import pytest
from support import cost_of_next_ready, until

from sqlsem.values.tasks import NewTask, TaskLock

pytestmark = pytest.mark.engines("sqlite", "postgresql")  # (on SQL Server workers do not query it)

#: Kinds of backlog: the options of a task by its number, and the seconds until the first task is ready (None: unknown).
BACKLOGS = {
    "for its time": (lambda number: {"after": 900.0 + number}, 900),
    "for its time, with a key": (lambda number: {"after": 900.0 + number, "key": str(number)}, 900),
    "for one of a lower order": (lambda number: {"after": 900.0 - number % 7, "order": int(number > 0)}, 900),
    "for a limit": (lambda number: {}, None),
    "for a limit, and some for their time": (lambda number: {"after": 900.0} if number % 100 == 99 else {}, 900),
    "for a rate": (lambda number: {}, 900),
    "for a rate, and then for its time": (lambda number: {"after": 60.0 + number} if number else {}, 900),
    "for a rate of its key": (lambda number: {"key": "a"}, 900),
    "for a lock": (lambda number: {"locks": (TaskLock("never", "write", 1, 1),)}, 0.25),
}


@pytest.fixture(params=BACKLOGS)
def backlog(request, database, connect, name):
    """Return a function that makes a queue with ``count`` waiting tasks, and the bounds of the first ready time."""
    options, ready = BACKLOGS[request.param]
    between = None if ready is None else (ready / 2, ready * 1.02)  # (plus a hundredth of a window)
    coordinator, queues = connect(), []

    def make(count):
        queue = coordinator.queue(name(str(count)))
        queues.append(queue)
        if "for a rate" in request.param:
            key = "a" if "key" in request.param else None
            queue.set_rate(1, per=ready, key=key)
            queue.put(0, key=key)
            queue.try_claim().finish()
        if "for a limit" in request.param:
            queue.set_limit(0)
        with contextlib.closing(database.session(grace=600)) as session:
            tasks = [NewTask("json", "1", **options(number)) for number in range(count)]
            for start in range(0, count, 500):
                session.put_tasks(queue.name, f"{queue.name}.{start}", tasks[start : start + 500])
        assert queue.try_claim() is None
        return queue.name, between

    with coordinator.mutex("never"):
        yield make
    for queue in queues:
        queue.set_limit(None)
        queue.set_rate(None)


def test_next_ready_costs_the_same_beside_many_tasks(database, backlog):
    costs = [cost_of_next_ready(database, *backlog(count)) for count in (100, 10_000)]
    assert costs[1] < 2 * costs[0]


def test_task_just_due_is_announced(database, connect, name):
    """A task that just became due is announced; an overdue one that cannot run does not hide a later one."""
    queue = connect().queue(name)
    queue.set_limit(0)
    with contextlib.closing(database.session(grace=600)) as session:
        session.put_tasks(queue.name, "both", [NewTask("json", "1", after=0.001), NewTask("json", "2", after=600.0)])
        until(lambda: queue.counts().oldest is not None, "the first one is due")
        assert session.next_ready(queue.name) == 0
        minute = "interval '1 min'" if database.engine == "postgresql" else "60"
        with contextlib.closing(database.raw()) as raw:
            raw.cursor().execute(
                f"UPDATE {database.beside('task')} SET put_at = put_at - {minute}, ready_at = ready_at - {minute} "
                f"WHERE queue_name = '{queue.name}'"
            )
        assert 300 < session.next_ready(queue.name) <= 540
    queue.set_limit(None)
