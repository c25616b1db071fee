"""Limits that the server owns: an operator sets them, by name or by pattern, and requests need not name any."""

import psycopg
import pytest

import sqlsem

pytestmark = [pytest.mark.locks, pytest.mark.faces("sync", "aio")]


@pytest.fixture
def set_limit(connect, name):
    """``set_limit(resource, limit)`` sets a limit as operator; the test's end removes the limits."""
    operator, done = connect(), []

    def set_limit(resource, limit):
        done.append(resource)
        operator.admin.set_limit(resource, limit)

    yield set_limit
    for resource in done:
        operator.admin.set_limit(resource, None)


def of(coordinator, resource):
    return next((row for row in coordinator.admin.resources() if row.resource == resource), None)


def test_a_limit_without_a_number_is_the_servers(connect, name, set_limit, attempt):
    coordinator = connect()
    set_limit(name, 2)
    inside = [attempt(coordinator.limit(name)) for _ in range(2)]
    for waiter in inside:
        waiter.granted()
    third = attempt(coordinator.limit(name))
    assert third.waits()
    inside[0].leave()
    third.granted()
    for waiter in (inside[1], third):
        waiter.leave()


def test_operators_limit_changes_while_waited_for(connect, name, set_limit, attempt):
    coordinator = connect()
    set_limit(name, 1)
    first = attempt(coordinator.limit(name))
    first.granted()
    late = [attempt(coordinator.limit(name)) for _ in range(3)]
    assert late[0].waits()
    set_limit(name, 3)
    late[0].granted()
    late[1].granted()
    assert late[2].waits()
    set_limit(name, 1)
    first.leave()
    late[0].leave()
    assert late[2].waits(), "one is inside, and the limit is one"
    late[1].leave()
    late[2].leave()


def test_declared_number_is_an_upper_bound(connect, name, set_limit, attempt):
    coordinator = connect()
    set_limit(name, 5)
    three = [attempt(coordinator.limit(name, 3)) for _ in range(3)]
    for waiter in three:
        waiter.granted()
    assert attempt(coordinator.limit(name, 3)).waits()
    assert not coordinator.limit(name).acquire(blocking=False), "the requests ahead accept at most three"
    for waiter in three:
        waiter.leave()


@pytest.mark.parametrize("way", ["acquire", "try", "all_of"])
def test_missing_limit_error_names_the_command(connect, database, name, way):
    coordinator = connect()
    lock = coordinator.limit(name)
    if way == "all_of":
        lock = sqlsem.all_of(coordinator.mutex(name("other")), lock)
    with pytest.raises(sqlsem.ConfigurationError, match=f"sqlsem set {name} --limit N") as caught:
        lock.acquire(blocking=way != "try")
    assert name in str(caught.value)
    assert database.queue(name) == []
    with coordinator.mutex(name("other"), timeout=0):
        pass


def test_limit_in_use_can_be_changed_but_not_removed(connect, name, set_limit, attempt):
    coordinator, operator = connect(), connect()
    set_limit(name, 1)
    inside, waiting = attempt(coordinator.limit(name)), None
    inside.granted()
    waiting = attempt(coordinator.limit(name))
    with pytest.raises(sqlsem.ConfigurationError, match="changed, not lifted"):
        operator.admin.set_limit(name, None)
    assert of(operator, name).cap == 1
    assert waiting.waits()
    operator.admin.set_limit(name, 2)
    waiting.granted()
    inside.leave()
    waiting.leave()
    operator.admin.set_limit(name, None)
    with pytest.raises(sqlsem.ConfigurationError):
        coordinator.limit(name).acquire(blocking=False)


def test_declared_limits_do_not_keep_the_servers_limit(connect, name, set_limit, attempt):
    coordinator, operator = connect(), connect()
    set_limit(name, 1)
    inside = attempt(coordinator.limit(name, 2))
    inside.granted()
    late = attempt(coordinator.limit(name, 2))
    assert late.waits()
    operator.admin.set_limit(name, None)
    late.granted()
    inside.leave()
    late.leave()


def test_own_limit_wins_then_the_longest_pattern(connect, name, set_limit, attempt):
    coordinator = connect()
    set_limit(name("*"), 3)
    set_limit(name("a*"), 1)
    set_limit(name("ab"), 2)
    caps = {"x": 3, "a": 1, "ac": 1, "ab": 2, "abc": 1}
    for suffix, cap in caps.items():
        resource = name(suffix)
        inside = [attempt(coordinator.limit(resource)) for _ in range(cap)]
        for waiter in inside:
            waiter.granted()
        assert not coordinator.limit(resource).acquire(blocking=False)
        row = of(coordinator, resource)
        assert row.cap == cap
        assert row.pattern == {"x": name("*"), "ab": None}.get(suffix, name("a*"))
        for waiter in inside:
            waiter.leave()


def test_pattern_caps_declared_limits(connect, name, set_limit, attempt):
    coordinator = connect()
    set_limit(name("*"), 1)
    inside = attempt(coordinator.limit(name("a"), 3))
    inside.granted()
    late = attempt(coordinator.limit(name("a"), 3))
    assert late.waits()
    set_limit(name("*"), 2)
    late.granted()
    inside.leave()
    late.leave()


def test_pattern_in_use_stays_until_replaced(connect, name, set_limit, attempt):
    coordinator, operator = connect(), connect()
    operator.admin.set_limit(name("a*"), 1)
    inside = attempt(coordinator.limit(name("ab")))
    inside.granted()
    with pytest.raises(sqlsem.ConfigurationError, match="changed, not lifted"):
        operator.admin.set_limit(name("a*"), None)
    assert of(operator, name("a*")).cap == 1
    set_limit(name("*"), 7)
    operator.admin.set_limit(name("a*"), None)
    assert of(operator, name("ab")).cap == 7
    inside.leave()


def test_patterns_are_compared_byte_by_byte(connect, name, set_limit):
    coordinator = connect()
    set_limit(name("a_%[x]Ä*"), 1)
    for other in ("abxÄ", "a_%xÄ", "A_%[x]Ä", "a_%[x]ä", "a_%[x]", "a"):
        with pytest.raises(sqlsem.ConfigurationError, match=r"[Nn]o limit"):
            coordinator.limit(name(other)).acquire(blocking=False)
    with coordinator.limit(name("a_%[x]Ä"), timeout=0), pytest.raises(sqlsem.Timeout):
        coordinator.limit(name("a_%[x]Ä"), timeout=0).__enter__()
    with coordinator.limit(name("a_%[x]Ä7"), timeout=0):
        pass


def test_pattern_of_all_names_caps_every_resource(connect, name, set_limit):
    coordinator = connect()
    set_limit("*", 1)
    with coordinator.limit(name("a")):
        assert not coordinator.limit(name("a")).acquire(blocking=False)
    operator = connect()
    operator.admin.pause("*")  # only the resource named "*", no pattern
    with coordinator.limit(name("a"), timeout=0):
        operator.admin.resume("*")
    assert not any(row.paused for row in operator.admin.resources() if row.resource in ("*", name("a")))
    with coordinator.limit(name("a")):
        assert not coordinator.limit(name("a")).acquire(blocking=False)


def test_a_pattern_reaches_100_000_resources_at_once(database, connect, name, set_limit):
    coordinator, connection = connect(), database.raw()
    number = 1000 if database.engine == "mssql" else 100_000  # (more rows take SQL Server minutes)
    table = database.beside("resource")
    rows = [f"('{name}-{index}', 1000)" for index in range(number)]

    def insert(begin):
        for first in range(begin, number, 1000):
            into = f"INSERT INTO {table} (resource_id, stale_after_ms) VALUES "
            connection.execute(into + ", ".join(rows[first : min(first + 1000, number)]))

    insert(0)
    if database.engine == "postgresql":
        # Statistics of a time when the table was nearly empty: by them a scan of it looks cheaper than its index.
        connection.execute(
            f"DELETE FROM {table} WHERE resource_id LIKE '{name}-%' AND length(resource_id) > {len(name) + 2}"
        )
        connection.execute(f"ANALYZE {table}")
        insert(10)
    set_limit(name("*"), 1)
    with coordinator.limit(name("777")):
        assert not coordinator.limit(name("777")).acquire(blocking=False)
        set_limit(name("*"), 2)
        with coordinator.limit(name("777"), timeout=0):
            rows_by_name = {resource.resource: resource for resource in coordinator.admin.resources()}
    assert [rows_by_name[name(suffix)].cap for suffix in ("3", "777", number - 1, "*")] == [2, 2, 2, 2]
    connection.execute(f"DELETE FROM {table} WHERE resource_id LIKE '{name}-%'")
    connection.close()


@pytest.mark.engines("postgresql")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_limit_is_not_lifted_by_an_old_snapshot(database, connect, name, set_limit, attempt, level):
    """An old snapshot does not show requests that rely on the limit."""
    coordinator = connect()
    set_limit(name, 1)
    with database.raw(autocommit=False) as operator:
        operator.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        operator.execute("SELECT count(*) FROM sqlsem.ProcessControl")
        inside = attempt(coordinator.limit(name))
        inside.granted()
        with pytest.raises(psycopg.errors.ActiveSqlTransaction, match="READ COMMITTED"):
            operator.execute("SELECT sqlsem.set_limit(%s, NULL)", (str(name),))
        operator.rollback()
        assert of(coordinator, name).cap == 1
        inside.leave()
