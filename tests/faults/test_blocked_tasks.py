"""Tasks with locks when workers die, or when there are none: only running tasks hold locks."""

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.engines.protocol import Capability
from sqlsem.tasks import Json

GRACE = 1.5


@pytest.fixture
def coordinator(connect):
    operator = connect(grace=30)  # of the operator
    if not operator.engine.has(Capability.BLOCKED_TASKS):
        pytest.skip("this engine has no tasks with locks")
    return operator


def hold(channel, url, options, name):
    """Claim one task and keep it."""
    queue = sqlsem.connect(url, **options, grace=GRACE).queue(name)
    for task in queue.claim(wait=60):
        channel.tell("claimed", id=task.id, positions=task.grant.positions)
        channel.ask()


def test_killed_workers_locks_are_freed_and_requeued(spawn, coordinator, name):
    queue, second = coordinator.queue(name), f"{name} 2"
    number = queue.put(Json("x"), locks=[sqlsem.mutex(name), sqlsem.limit(second, 1)])
    child = spawn(hold, name=str(name))
    claimed = child.expect("claimed")
    assert claimed["id"] == number
    assert queue.try_claim() is None
    assert not coordinator.mutex(name).acquire(timeout=0)
    child.kill()
    with until(queue.try_claim, PATIENCE) as task:
        assert (task.id, task.attempt) == (number, 2)
        assert task.grant.positions[name] > claimed["positions"][name]
        assert [entry.state for entry in coordinator.admin.entries(name)] == ["holds"]
    assert [run.outcome for run in queue.log(number)] == ["lost", "finished"]
    assert [row.outcome for row in coordinator.admin.history(name)] == ["released", "reaped"]
    assert coordinator.admin.entries(name) == coordinator.admin.entries(second) == []


def test_blocked_task_keeps_its_position_as_a_worker_dies(spawn, coordinator, name):
    held = coordinator.mutex(name)
    assert held.acquire()
    queue = coordinator.queue(name)
    number = queue.put(Json("x"), locks=[sqlsem.mutex(name)])
    child = spawn(hold, name=str(name))
    until(lambda: len(coordinator.admin.entries(name)) == 2)
    position = coordinator.admin.entries(name)[1].position
    child.kill()
    held.release()
    with until(queue.try_claim, PATIENCE) as task:
        assert (task.id, task.attempt, task.grant.position) == (number, 1, position)


PAST = {"postgresql": "'2000-01-01'", "mssql": "'20000101'", "sqlite": "1", "mysql": "1"}


def test_queue_without_workers_blocks_no_lock(coordinator, database, name):
    held = coordinator.mutex(name)
    assert held.acquire()
    queue = coordinator.queue(name)
    number = queue.put(Json("x"), locks=[sqlsem.mutex(name)])
    assert queue.try_claim() is None
    assert len(coordinator.admin.entries(name)) == 2
    held.release()
    after = coordinator.mutex(name)
    assert not after.acquire(timeout=0)
    # The last poll of a free worker was long ago.
    member, past = database.beside("member"), PAST[database.engine]
    database.rows(f"UPDATE {member} SET lease_until = {past} WHERE program = 'blocked tasks'")
    assert after.acquire(timeout=PATIENCE)
    assert queue.try_claim() is None  # it requests its locks again, behind the others
    assert [entry.state for entry in coordinator.admin.entries(name)] == ["holds", "waits"]
    after.release()
    with until(queue.try_claim, PATIENCE) as task:
        assert (task.id, task.attempt) == (number, 1)


def test_dead_holder_before_a_blocked_task_is_found(spawn, coordinator, name):
    child = spawn(keep, name=str(name))
    child.expect("held")
    queue = coordinator.queue(name)
    number = queue.put(Json("x"), locks=[sqlsem.mutex(name)])
    assert queue.try_claim() is None
    child.kill()
    for task in queue.claim(wait=PATIENCE):
        with task:
            assert task.id == number
        break
    else:
        pytest.fail("the dead holder was not found")


def keep(channel, url, options, name):
    with sqlsem.connect(url, **options, grace=GRACE).mutex(name):
        channel.tell("held")
        channel.ask()
