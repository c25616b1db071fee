"""Refusals by the database have the same class and code of error on every engine.

The arguments of these calls pass the checks of the client. Only the database knows the mistake: PostgreSQL and SQL
Server refuse the call in a routine, the other engines in Python.
"""

import pytest

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


REFUSALS = [
    (no_limit, sqlsem.ConfigurationError, WRONG),
    (no_limit_in_a_group, sqlsem.ConfigurationError, WRONG),
    (limit_in_use, sqlsem.ConfigurationError, WRONG),
    (priority_of_a_resource_without, sqlsem.ConfigurationError, PRIORITY),
    (no_priority, sqlsem.ConfigurationError, PRIORITY),
    (no_priority_in_a_group, sqlsem.ConfigurationError, PRIORITY),
    (no_limit_by_priority, sqlsem.ConfigurationError, WRONG),
    (priorities_end_while_it_waits, sqlsem.ConfigurationError, PRIORITY),
    (priority_while_it_holds, sqlsem.ConfigurationError, PRIORITY),
    (rate_without_limit, sqlsem.ConfigurationError, RATE),
    (rate_in_a_group_without_limit, sqlsem.ConfigurationError, RATE),
    (cost_above_an_operators_limit, sqlsem.ConfigurationError, RATE),
    (too_many_windows, sqlsem.ConfigurationError, RATE),
    (too_many_windows_of_operators, sqlsem.ConfigurationError, RATE),
    (unknown_token, sqlsem.NotHeld, HANDOVER),
    (task_with_a_lock_without_limit, sqlsem.ConfigurationError, WRONG),
]


@pytest.mark.locks
@pytest.mark.parametrize(("call", "kind", "code"), REFUSALS, ids=[call.__name__ for call, _, _ in REFUSALS])
def test_refusals_have_the_same_code_on_every_engine(connect, name, attempt, call, kind, code):
    coordinator = connect()
    arguments = (attempt,) if call is priorities_end_while_it_waits else ()
    with pytest.raises(kind) as refused:
        call(coordinator, name, *arguments)
    if refused.value.code == "feature":  # (then the case is skipped)
        raise refused.value
    assert type(refused.value) is kind
    assert refused.value.code == code, refused.value
    coordinator.admin.set_priorities(name, None)
