"""The bounds of every amount of a task, a schedule or a queue: the same on every engine and through every API.

A test fails for an option or a method that no table here lists.
"""

import contextlib
import json
import os
from datetime import datetime, timezone

import pytest

import sqlsem
from sqlsem.client.options import PutOptions
from sqlsem.engines.protocol import Capability
from sqlsem.tasks import Json, Queue
from sqlsem.values.tasks import MAX_NESTED, TASK_BOUNDS, NewTask

MAX_INT = 2**31 - 1
#: The amounts of a task: Python values within the bounds and outside of them, the name in saved options, and the name
#: in SQL.
AMOUNTS = {
    "order": ((-MAX_INT - 1, MAX_INT), (-MAX_INT - 2, MAX_INT + 1, 1.5), "order", '"order"'),
    "priority": ((-MAX_INT - 1, MAX_INT), (-MAX_INT - 2, MAX_INT + 1, 1.5), "priority", "priority"),
    "max_attempts": ((1, MAX_INT), (0, -1, MAX_INT + 1), "max_attempts", "max_attempts"),
    "after": (
        *((0, 315_360_000), (-1, 315_360_001, 320_000_000, float("nan"), float("inf"))),
        *("after_ms", "after_seconds"),
    ),
    "backoff": ((0, 300), (-1, 300.5, 301, float("nan")), "backoff_ms", "backoff_seconds"),
    "time_limit": (
        *((0.001, MAX_INT // 1000), (0, -1, MAX_INT // 1000 + 1, float("nan"))),
        *("time_limit_ms", "time_limit_seconds"),
    ),
}
#: Options that are not amounts.
OTHERS = {"on_failure", "note", "unique", "replace", "key", "locks"}
#: The amounts of a queue: the setter, values within the bounds, and values outside of them.
SETTERS = {
    "set_limit": (lambda queue, value: queue.set_limit(value), (0, MAX_INT), (-1, MAX_INT + 1, 1.5)),
    "set_key_limit": (lambda queue, value: queue.set_key_limit(value), (0, MAX_INT), (-1, MAX_INT + 1)),
    "set_weight": (lambda queue, value: queue.set_weight("k", value), (1, MAX_INT), (0, -1, MAX_INT + 1)),
    "set_rate": (lambda queue, value: queue.set_rate(value, "1m"), (1, MAX_INT), (0, -1, MAX_INT + 1)),
    "set_key_rate": (lambda queue, value: queue.set_key_rate(value, "1m"), (1, MAX_INT), (0, -1, MAX_INT + 1)),
    "set_rate, per": (
        lambda queue, value: queue.set_rate(1, value),
        (0.001, MAX_INT // 1000),
        (0, -1, MAX_INT // 1000 + 1),
    ),
}
CASES = [
    (name, value, within)
    for name, (good, bad, *_) in AMOUNTS.items()
    for within in (True, False)
    for value in (good if within else bad)
]


@pytest.fixture
def queue(connect, name):
    return connect().queue(name)


def refused():
    """Expect a refusal. (SQL Server uses one error number for every refusal of a routine.)"""
    return pytest.raises((sqlsem.ConfigurationError, sqlsem.Unavailable))


def as_kept(name, value):
    """Return the name and value of an amount as a schedule's options store it."""
    column = AMOUNTS[name][2]
    return column, value * 1000 if column.endswith("_ms") else value


def test_every_option_is_in_a_table():
    assert set(PutOptions.__optional_keys__) == AMOUNTS.keys() | OTHERS
    assert set(TASK_BOUNDS) == {column for *_, column, _ in AMOUNTS.values()}
    for name, (good, _, column, _) in AMOUNTS.items():
        (minimum, maximum), (first, last) = good, TASK_BOUNDS[column]
        factor = 1000 if column.endswith("_ms") else 1
        assert (minimum * factor, int(maximum)) == (first, last // factor), name


def test_every_setter_is_in_a_table():
    setters = {name for name in dir(Queue) if name.startswith("set_")}
    assert setters == {name.partition(",")[0] for name in SETTERS}


@pytest.mark.parametrize(("amount", "value", "within"), CASES)
def test_python_has_the_same_bounds_everywhere(queue, amount, value, within):
    if within:
        number = queue.put(1, **{amount: value})
        schedule = queue.schedule("@yearly", Json("x"), name=queue.name, **{amount: value})
        column, number_kept = as_kept(amount, value)
        assert schedule.options.get(column, number_kept) == number_kept
        queue.claiming.client.with_connection(lambda session: session.set_schedule(queue.name, "remove", None))
        assert queue.tasks()[0].task_id == number
    else:
        with pytest.raises(sqlsem.ConfigurationError):
            queue.put(1, **{amount: value})
        with pytest.raises(sqlsem.ConfigurationError):
            queue.schedule("@yearly", Json("x"), name=queue.name, **{amount: value})
        assert queue.tasks() == []


@pytest.mark.parametrize(("amount", "value", "within"), [case for case in CASES if case[1] == case[1]])
def test_saved_options_have_the_same_bounds(database, queue, amount, value, within):
    """Saved options that another program wrote have the same bounds."""
    session = database.session(grace=600)
    column, number = as_kept(amount, value)
    number = 2**70 if number == float("inf") else number  # JSON has no infinity
    number = int(number) if isinstance(number, float) and number.is_integer() else number
    save = lambda: session.save_schedule(  # noqa: E731
        *(queue.name, queue.name, "@yearly", "UTC", "json", "1", {column: number}, datetime.now(timezone.utc))
    )
    with contextlib.nullcontext() if within else refused():
        save()
    assert bool(session.list_schedules(queue.name, None)) == within
    session.close()


@pytest.mark.parametrize(("amount", "value", "within"), CASES)
def test_the_routine_has_the_same_bounds(database, queue, amount, value, within):
    if database.engine != "postgresql":
        pytest.skip("tests/tsql has those of T-SQL; SQLite has no routines")
    argument = AMOUNTS[amount][3]
    words = f"'{value}'::float8" if isinstance(value, float) else str(value)
    with database.raw() as raw:
        call = f"SELECT sqlsem.put(%s, '1', 'json', {argument} => {words})"
        if within:
            raw.execute(call, (queue.name,))
        else:
            with pytest.raises(Exception, match=r"sqlsem: |out of range|does not exist"):
                raw.execute(call, (queue.name,))
    assert len(queue.tasks()) == within


@pytest.mark.parametrize("setter", SETTERS)
def test_queues_have_the_same_bounds_everywhere(queue, setter):
    set_it, good, bad = SETTERS[setter]
    for value in good:
        set_it(queue, value)
    (before,) = [limit for limit in queue.limits() if limit.task_key == ("k" if setter == "set_weight" else None)]
    for value in bad:
        with pytest.raises(sqlsem.ConfigurationError):
            set_it(queue, value)
    (after,) = [limit for limit in queue.limits() if limit.task_key == before.task_key]
    assert after == before


@pytest.mark.parametrize(
    ("key", "setting", "value", "per"),
    [
        *((None, "limit", -1, None), (None, "key_limit", -1, None), ("k", "weight", 0, None), ("k", "limit", -1, None)),
        *((None, "rate", 0, 1000), (None, "rate", 1, 0), (None, "key_rate", 1, -1), (None, "rate", 1, None)),
    ],
)
def test_session_setters_have_the_same_bounds(database, queue, key, setting, value, per):
    session = database.session(grace=600)
    if not session.offers(Capability.QUEUE_LIMITS):
        pytest.skip("no limits of queues here")
    with refused():
        session.set_queue(queue.name, key, setting, value, per)
    session.close()
    assert queue.limits() == []


def nested(depth, value=1, pair="[]"):
    for _ in range(depth):
        value = [value] if pair == "[]" else {"a": value}
    return value


@pytest.mark.parametrize("pair", ["[]", "{}"])
def test_json_is_nested_as_deep_everywhere(database, queue, pair):
    queue.put(nested(MAX_NESTED, pair=pair))
    queue.put(nested(MAX_NESTED, '[[[[{{{{\\"' * 100, pair=pair))
    queue.put([nested(MAX_NESTED - 1, pair=pair)] * 3)
    for depth in (MAX_NESTED + 1, 500):
        with pytest.raises(sqlsem.ConfigurationError, match="nested deeper than 100"):
            queue.put(nested(depth, pair=pair))
        with pytest.raises(sqlsem.ConfigurationError, match="nested deeper than 100"):
            queue.schedule("@daily", nested(depth, pair=pair))
        if database.engine == "postgresql":
            session = database.session(grace=600)
            with pytest.raises(sqlsem.ConfigurationError, match="nested deeper than 100"):
                session.put_tasks(
                    queue.name, os.urandom(8).hex(), [NewTask("json", json.dumps(nested(depth, pair=pair)))]
                )
            session.close()
    with pytest.raises(sqlsem.ConfigurationError, match=r"nested deeper|cannot be kept as JSON"):
        queue.put(nested(100_000, pair=pair))
    assert len(queue.tasks()) == 3


@pytest.mark.parametrize("option", ["grace", "lease", "retry"])
def test_coordinator_connects_with_long_durations(connect, name, option):
    """A day, which is the greatest grace that PostgreSQL's settings allow."""
    with connect(**{option: "1d"}).mutex(name) as grant:
        grant.check()
