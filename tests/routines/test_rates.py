"""Rates in sessions of plain SQL: take and adjust."""

import contextlib

import pytest
from support import PATIENCE, until

pytestmark = pytest.mark.engines("postgresql", "mssql")
HOUR = 3_600_000


def take(session, name, limit=3, per_ms=HOUR, **named):
    """Return (code, taken_ms) of take."""
    return session.outputs("take", {"code": "int", "taken_ms": "bigint"}, name, limit, per_ms, **named)


def adjust(session, *arguments):
    session.call("adjust", *arguments)


def used(database, name):
    with contextlib.closing(database.coordinator()) as coordinator:
        return {rate.window: rate.used for rate in coordinator.admin.rates(name)}


def age(database, name):
    """Move all uses of the rates with this prefix two days back."""
    days = 86_400_000 * 2
    for table, change in (("rate_window", f"seen_ms = seen_ms - {days}"),
                          ("rate_slot", f"slot = slot - {days} / ((window_ms + 99) / 100)")):  # fmt: skip
        database.rows(f"UPDATE {database.beside(table)} SET {change} WHERE resource_id LIKE ?", f"rate:{name}%")


def test_the_limit_is_kept_with_programs_in_python(session, database, name):
    connection = session()
    assert [take(connection, name, timeout_ms=0)[0] for _ in range(2)] == [0, 0]
    with contextlib.closing(database.coordinator()) as coordinator:
        rate = coordinator.rate(name, 3, per="1h")
        assert rate.take(False) is not None
        assert rate.take(False) is None
    assert take(connection, name, timeout_ms=0) == (-1, None)
    assert take(connection, name, timeout_ms=200) == (-1, None)
    assert database.queue(f"rate:{name}") == []


def test_cost_is_adjusted_afterwards(session, database, name):
    connection = session()
    code, taken_ms = take(connection, name, 10, cost=7)
    assert code == 0
    assert taken_ms > 0
    adjust(connection, name, taken_ms, 7, 2)
    assert used(database, name) == {3600: 2}
    adjust(connection, name, taken_ms, 2, 30)
    assert used(database, name) == {3600: 30}
    assert take(connection, name, 10, timeout_ms=0)[0] == -1


def test_session_waits_for_its_turn_in_a_rate(session, database, name):
    first, other = session(), session()
    _, taken_ms = take(first, name, 1)
    waiter = other.later(take, other, name, 1)
    until(lambda: database.queue(f"rate:{name}"), "it waits")
    adjust(first, name, taken_ms, 1, 0)
    assert waiter.result(PATIENCE)[0] == 1
    assert database.queue(f"rate:{name}") == []
    assert used(database, name) == {3600: 1}


def test_a_burst_and_further_windows(session, database, name):
    connection = session()
    assert [take(connection, name, 1000, HOUR, burst=2, timeout_ms=0)[0] for _ in range(3)] == [0, 0, -1]
    named = (
        {"more_windows": '[{"limit": 2, "ms": 60000}]'}
        if connection.tsql
        else {"more_limits": [2], "more_per_ms": [60000]}
    )
    other = name("b")
    assert [take(connection, other, 5, HOUR, timeout_ms=0, **named)[0] for _ in range(3)] == [0, 0, -1]
    assert used(database, other) == {60: 2, 3600: 2}


def test_an_operator_sets_and_clears_limits(session, refused, database, name):
    """Programs that declare no limit have the operator's; it is an upper bound on declared limits."""
    connection, operator, resource = session(), session(), f"rate:{name}"

    def set_rate(limit, per_ms=HOUR):
        return operator.call("set_rate", resource, per_ms, limit)

    def shown():
        rows = operator.listed("rates", resource)
        return [(window_ms, limit, used, cap) for _, window_ms, limit, used, *_, cap in rows]

    assert (set_rate(None), operator.call("reset_rate", resource), shown()) == (-1, -1, [])
    with refused("22023", 50008, "no limit is set"):
        take(connection, name, None, None)
    assert (set_rate(2), set_rate(9, HOUR * 2)) == (0, 0)
    assert [take(connection, name, None, None, timeout_ms=0)[0] for _ in range(3)] == [0, 0, -1]
    assert take(connection, name, 50, timeout_ms=0)[0] == -1, "a program cannot declare more"
    assert shown() == [(HOUR, 2, 2, 2), (HOUR * 2, 9, 2, 9)]
    with refused("22023", 50000, "can never fit into the limit of 2"):
        take(connection, name, None, None, cost=3)
    waiter = connection.later(take, connection, name, None, None)
    until(lambda: database.queue(resource), "it waits")
    assert set_rate(3) == 0
    assert waiter.result(PATIENCE)[0] == 1, "a higher limit lets the first waiter take"
    assert (set_rate(None, HOUR * 2), shown()) == (0, [(HOUR, 3, 3, 3)])
    assert operator.call("reset_rate", resource) == 0
    assert (shown(), take(connection, name, None, None)[0]) == ([(HOUR, 3, 0, 3)], 0)
    assert (set_rate(None), shown(), set_rate(None)) == (0, [], -1)
    with refused("22023", 50008, "no limit is set"):
        take(connection, name, None, None)
    assert take(connection, name, 1, timeout_ms=0)[0] == -1, "earlier use counts for the next limit"
    for limit, per_ms in ((0, HOUR), (2**31, HOUR), (1, 0), (1, None)):
        with refused("22023", 50000, "from 1 to 2147483647"):
            set_rate(limit, per_ms)


@pytest.mark.parametrize(
    ("limit", "per_ms", "named", "words"),
    [
        (0, 1000, {}, "not from 1 to 2147483647"),
        (5, 0, {}, "not from 1 to 2147483647"),
        (None, 1000, {}, "not from 1 to 2147483647"),
        (5, 2**31, {}, "not from 1 to 2147483647"),
        (2**40, 1000, {}, "not from 1 to 2147483647"),
        (5, 1000, {"cost": 6}, "can never fit into its limit of 5"),
        (5, 1000, {"cost": 0}, "the cost must be 1 or more"),
        (5, 1000, {"burst": 6}, "burst"),
        (5, 1000, {"burst": 2, "cost": 3}, "can never fit into its burst of 2"),
        (5, 1000, {"timeout_ms": -2}, "timeout_ms must be 0 or more"),
    ],
)
def test_invalid_rate_is_refused(session, refused, name, limit, per_ms, named, words):
    with refused("22023", 50000, words):
        take(session(), name, limit, per_ms, **named)


def test_not_in_a_transaction(session, refused, database, name):
    connection = session()
    with connection.rolled_back(), refused("25001", 50001, "transaction"):
        take(connection, name)
    assert used(database, name) == {}


@pytest.mark.engines("postgresql")
def test_window_in_use_is_not_pruned(database, name):
    """A caller has read the window, and writes its use there."""
    with database.coordinator() as coordinator:
        coordinator.rate(name, 3, per="1m").take()
    window, resource = database.beside("rate_window"), f"rate:{name}"
    age(database, name)

    def is_kept():
        return database.rows(f"SELECT 1 FROM {window} WHERE resource_id = ?", resource)

    with contextlib.closing(database.session()) as other, contextlib.closing(database.raw(autocommit=False)) as taker:
        schema = database.schema
        taker.cursor().execute(f"SELECT pg_advisory_xact_lock({schema}.lock_class(0), hashtext(%s))", (resource,))
        for _ in range(100):
            other.prune(10)
        assert is_kept()
        taker.rollback()
        until(lambda: other.prune(10) is not None and not is_kept(), "it is forgotten")


def test_expired_rate_is_pruned_completely(database, name):
    """Each call removes a few rows; in the end no old row stays."""
    with contextlib.closing(database.coordinator()) as coordinator:
        for number in range(6):
            coordinator.rate(f"{name}.{number}", {"1m": 3, "1h": 30}).take()
    age(database, name)
    slot = database.beside("rate_slot")
    for _ in range(5):
        database.rows(
            f"INSERT INTO {slot} (resource_id, window_ms, slot, login, used) "
            f"SELECT resource_id, window_ms, MIN(slot) - 1, MIN(login), 1 FROM {slot} WHERE resource_id LIKE ? "
            f"GROUP BY resource_id, window_ms",
            f"rate:{name}%",
        )

    def left(table):
        return database.rows(f"SELECT 1 FROM {database.beside(table)} WHERE resource_id LIKE ?", f"rate:{name}%")

    with contextlib.closing(database.session()) as session:
        assert left("rate_slot")
        until(lambda: session.prune(6) is not None and not left("rate_window"), "they are forgotten")
    assert left("rate_slot") == []


@pytest.mark.parametrize("resource", ["tasks:cd54", "rate:", "once:a"])
def test_starts_of_tasks_are_no_rate(session, refused, database, resource):
    """Starts of a queue's tasks are counted beside the rates, and no session can return them."""
    connection, schema = session(), database.schema
    if connection.tsql:
        calls = (f"EXEC {schema}.adjust_rate ?, 1, -1", f'EXEC {schema}.take_rate ?, 1, N\'[{{"limit": 1, "ms": 1}}]\'')
    else:
        calls = (f"SELECT {schema}.adjust_rate(?, 1, -1)", f"SELECT {schema}.take_rate(?, 1, '{{1}}', '{{1}}')")
    for call in calls:
        with refused("22023", 50000, "is no rate"):
            connection.rows(call, resource)


@pytest.mark.engines("postgresql")
@pytest.mark.parametrize(("more", "burst"), [("{4}", None), ("{1,2}", 1), ("{0}", None), ("{1,NULL}", None)])
def test_cost_must_fit_limits_of_other_clients(session, refused, database, name, more, burst):
    connection = session()
    with refused("22023", 50000, "what others want"):
        connection.rows(
            f"SELECT {database.schema}.take_rate(?, 1, '{{3}}', '{{3600000}}', ?, p_more => '{more}')",
            f"rate:{name}",
            burst,
        )
    assert used(database, name) == {}
