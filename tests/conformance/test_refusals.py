"""Refusals by the database have the same class, code and attributes of error on every engine.

The arguments of most of these calls pass the checks of the client. Only the database knows the mistake: PostgreSQL and
SQL Server refuse the call in a routine, the other engines in Python. The attributes are all that `sqlsem.values.errors`
documents.
"""

import pytest
from support import PATIENCE, until

import sqlsem

WRONG, PRIORITY, RATE, HANDOVER = "configuration", "priority", "rate", "handover"


def no_limit(coordinator, name):
    coordinator.limit(name).acquire()


def no_limit_in_a_group(coordinator, name):
    coordinator.all_of(coordinator.mutex(name("a")), coordinator.limit(name)).acquire(timeout=0)


def limit_in_use(coordinator, name):
    coordinator.admin.set_limit(name, 2)
    with coordinator.limit(name):
        try:
            coordinator.admin.set_limit(name, None)
        finally:
            coordinator.admin.set_limit(name, 3)


def priority_of_a_resource_without(coordinator, name):
    coordinator.mutex(name, priority=1).acquire()


def no_priority(coordinator, name):
    coordinator.admin.set_priorities(name)
    coordinator.mutex(name).acquire(timeout=0)


def no_priority_in_a_group(coordinator, name):
    coordinator.admin.set_priorities(name)
    coordinator.all_of(coordinator.mutex(name("a")), coordinator.mutex(name)).acquire()


def no_limit_by_priority(coordinator, name):
    coordinator.admin.set_priorities(name)
    coordinator.limit(name, priority=1).acquire()


def priorities_end_while_it_waits(coordinator, name, attempt):
    coordinator.admin.set_priorities(name)
    with coordinator.mutex(name, priority=1):
        waiting = attempt(coordinator.mutex(name, priority=1), queue=f"priority:{name}")
        coordinator.admin.set_priorities(name, None)
        raise waiting.failed()


def priority_while_it_holds(coordinator, name):
    coordinator.admin.set_priorities(name)
    with coordinator.mutex(name("a")):
        coordinator.mutex(name, priority=1).acquire()


def rate_without_limit(coordinator, name):
    coordinator.rate(name).take()


def rate_in_a_group_without_limit(coordinator, name):
    coordinator.all_of(coordinator.mutex(name("a")), coordinator.rate(name)).acquire()


def cost_above_an_operators_limit(coordinator, name):
    coordinator.admin.set_rate(name, 2, "1h")
    coordinator.rate(name, 5, "1h", cost=3).take()


def too_many_windows(coordinator, name):
    for number in range(1, 42):
        coordinator.rate(name, 1000, 3600 + number).take(timeout=0)


def too_many_windows_of_operators(coordinator, name):
    for number in range(1, 12):
        coordinator.admin.set_rate(name, 5, 3600 + number)


def unknown_token(coordinator, name):
    coordinator.adopt(f"sqlsem-{name}")


def task_with_a_lock_without_limit(coordinator, name):
    coordinator.queue(name).put({}, locks=[coordinator.limit(name("a"))])


def schedule_with_a_lock_without_limit(coordinator, name):
    locks = [coordinator.mutex(name("b")), coordinator.limit(name("a"))]
    coordinator.queue(name).schedule("0 2 * * *", {}, name=name, locks=locks)


def limit_of_a_pattern_in_use(coordinator, name):
    coordinator.admin.set_limit(f"{name}*", 2)
    with coordinator.limit(name("a")):
        try:
            coordinator.admin.set_limit(f"{name}*", None)
        finally:
            coordinator.admin.set_limit(f"{name}*", 3)


def quoted_name_in_a_group(coordinator, name):
    odd = coordinator.limit(name("it's 'odd' \\"))
    coordinator.all_of(coordinator.limit(name("it's"), 1), odd, coordinator.limit("odd", 2)).acquire()


def second_upgrade(coordinator, name, attempt):
    other = coordinator.read(name)
    with coordinator.read(name) as grant:
        first = attempt(other, entering=lambda: other.grant.upgrade())
        rows = coordinator.admin.entries
        until(lambda: first.settled or any(row.access == "upgrade" for row in rows(name)), "the upgrade")
        grant.upgrade()


def used_token(coordinator, name):
    lock = coordinator.mutex(name)
    lock.acquire()
    token = lock.grant.hand_over()
    with coordinator.adopt(token):
        coordinator.adopt(token)


def revoked_token(coordinator, name):
    lock = coordinator.mutex(name)
    lock.acquire()
    token = lock.grant.hand_over()
    coordinator.admin.revoke(coordinator.admin.entries(name)[0].position, force=True)
    coordinator.adopt(token)


def revoked_while_it_waits(coordinator, name, attempt):
    with coordinator.mutex(name):
        waiting = attempt(coordinator.mutex(name))
        coordinator.admin.revoke(coordinator.admin.entries(name)[1].position)
        raise waiting.failed()


def revoked_while_it_is_held(coordinator, name):
    with coordinator.mutex(name) as grant:
        coordinator.admin.revoke(grant.position)
        until(lambda: grant.lost, "the loss")


def timeout(coordinator, name, attempt):
    attempt(coordinator.mutex(name)).granted()
    coordinator.mutex(name, timeout=0.01).__enter__()


def timeout_in_a_group(coordinator, name, attempt):
    attempt(coordinator.mutex(name)).granted()
    coordinator.all_of(coordinator.mutex(name("a")), coordinator.mutex(name), timeout=0.01).__enter__()


def failed_task(coordinator, name):
    queue = coordinator.queue(name)
    number = queue.put({})
    queue.try_claim().fail("wrong")
    try:
        queue.wait(timeout=PATIENCE)
    finally:
        coordinator.admin.cancel_task(number)


def unfinished_task(coordinator, name):
    queue = coordinator.queue(name)
    number = queue.put({})
    try:
        queue.wait(timeout=0.01)
    finally:
        coordinator.admin.cancel_task(number)


def part_that_runs(coordinator, name):
    batch = sqlsem.batch(name, ["a", "b"], window="1h", coordinator=coordinator)
    with batch.part("a"):
        batch.part("a").start()


def other_parts(coordinator, name):
    with sqlsem.batch(name, ["a", "b"], window="1h", coordinator=coordinator).part("a"):
        sqlsem.batch(name, ["a", "c"], window="1h", coordinator=coordinator).part("c").start()


def failed_batch(coordinator, name):
    batch = sqlsem.batch(name, ["a"], window=1, on_failed=lambda failure: None, coordinator=coordinator)
    with pytest.raises(ArithmeticError), batch.part("a"):
        raise ArithmeticError("wrong")
    batch.wait(timeout=PATIENCE)


def unknown_position(coordinator, name):
    coordinator.admin.revoke(2**62)


def unknown_task(coordinator, name):
    coordinator.admin.retry_task(2**62)


def itself(name):
    return {"resource": name}


def suffixed(suffix):
    return lambda name: {"resource": name(suffix)}


def rate_itself(name):
    return {"resource": f"rate:{name}"}


def without(name):
    return {"resource": None}


REFUSALS = [
    (no_limit, sqlsem.ConfigurationError, WRONG, itself),
    (no_limit_in_a_group, sqlsem.ConfigurationError, WRONG, itself),
    (quoted_name_in_a_group, sqlsem.ConfigurationError, WRONG, suffixed("it's 'odd' \\")),
    (limit_in_use, sqlsem.ConfigurationError, WRONG, itself),
    (limit_of_a_pattern_in_use, sqlsem.ConfigurationError, WRONG, lambda name: {"resource": f"{name}*"}),
    (priority_of_a_resource_without, sqlsem.ConfigurationError, PRIORITY, itself),
    (no_priority, sqlsem.ConfigurationError, PRIORITY, itself),
    (no_priority_in_a_group, sqlsem.ConfigurationError, PRIORITY, itself),
    (no_limit_by_priority, sqlsem.ConfigurationError, WRONG, itself),
    (priorities_end_while_it_waits, sqlsem.ConfigurationError, PRIORITY, itself),
    (priority_while_it_holds, sqlsem.ConfigurationError, PRIORITY, itself),
    (rate_without_limit, sqlsem.ConfigurationError, RATE, rate_itself),
    (rate_in_a_group_without_limit, sqlsem.ConfigurationError, RATE, rate_itself),
    (cost_above_an_operators_limit, sqlsem.ConfigurationError, RATE, rate_itself),
    (too_many_windows, sqlsem.ConfigurationError, RATE, rate_itself),
    (too_many_windows_of_operators, sqlsem.ConfigurationError, RATE, rate_itself),
    (unknown_token, sqlsem.NotHeld, HANDOVER, without),
    (used_token, sqlsem.NotHeld, HANDOVER, itself),
    (revoked_token, sqlsem.NotHeld, HANDOVER, itself),
    (task_with_a_lock_without_limit, sqlsem.ConfigurationError, WRONG, suffixed("a")),
    (schedule_with_a_lock_without_limit, sqlsem.ConfigurationError, WRONG, suffixed("a")),
    (second_upgrade, sqlsem.Deadlock, "deadlock", itself),
    (revoked_while_it_waits, sqlsem.LockLost, "lock-lost", itself),
    (revoked_while_it_is_held, sqlsem.LockLost, "lock-lost", itself),
    (timeout, sqlsem.Timeout, "timeout", lambda name: {"resource": name, "holders": [name]}),
    (timeout_in_a_group, sqlsem.Timeout, "timeout", lambda name: {"resource": name("a"), "holders": [name]}),
    (failed_task, sqlsem.TaskFailed, "task-failed", lambda name: {"resource": name, "task_id": int}),
    (unfinished_task, sqlsem.Timeout, "timeout", lambda name: {"resource": name, "holders": []}),
    (part_that_runs, sqlsem.ConfigurationError, WRONG, itself),
    (other_parts, sqlsem.ConfigurationError, WRONG, itself),
    (
        failed_batch,
        sqlsem.BatchFailed,
        "batch-failed",
        lambda name: {"resource": name, "batch_id": int, "failed": ["a"]},
    ),
    (unknown_position, sqlsem.NotHeld, "not-held", without),
    (unknown_task, sqlsem.NotHeld, "task", without),
]


def attributes(error):
    """Return the attributes of an error but its code, with numbers of the database as their type, and rows and parts by
    their names.
    """
    found = {key: value for key, value in vars(error).items() if key not in ("code", "__notes__")}
    for key in found.keys() & {"task_id", "batch_id"}:
        found[key] = type(found[key])
    if "holders" in found:
        found["holders"] = [row.resource for row in found["holders"]]
    if "failed" in found:
        found["failed"] = list(found["failed"])
    return found


@pytest.mark.locks
@pytest.mark.timing(0.1)
@pytest.mark.parametrize(("call", "kind", "code", "expected"), REFUSALS, ids=[call.__name__ for call, *_ in REFUSALS])
def test_refusals_have_the_same_attributes_on_every_engine(connect, name, attempt, call, kind, code, expected):
    coordinator = connect()
    arguments = (attempt,) if call.__code__.co_argcount == 3 else ()
    with pytest.raises(kind) as refused:
        call(coordinator, name, *arguments)
    if refused.value.code == "feature":  # (then the case is skipped)
        raise refused.value
    assert type(refused.value) is kind
    assert refused.value.code == code, refused.value
    assert attributes(refused.value) == expected(name), refused.value
    coordinator.admin.set_priorities(name, None)
