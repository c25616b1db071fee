"""Locks that are taken in opposite orders: reported once, before any wait, with both places."""

import asyncio
import itertools
import threading
import warnings

import pytest
import support

import sqlsem
from sqlsem.client.monitors import lock_order
from sqlsem.client.monitors.lock_order import LockOrder
from sqlsem.values.errors import LockOrderWarning


@pytest.fixture
def orders():
    return LockOrder()


def told(orders, held, *requested, database="db", alone=True):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        orders.entering(database, [(resource, alone) for resource in held], requested)
    assert all(warning.category is LockOrderWarning for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def first_place(orders):
    return told(orders, "a", "b")


def second_place(orders):
    return told(orders, "b", "a")


def test_opposite_orders_are_reported(orders):
    assert first_place(orders) == []
    assert first_place(orders) == []
    (text,) = second_place(orders)
    assert text.startswith(
        "'a' is asked for here while 'b' is held, and elsewhere 'b' is while 'a' is held: at the same time they would "
        "wait for each other."
    )
    assert "'a' was asked for while 'b' was held, in thread MainThread, here:" in text
    assert "'b' was asked for while 'a' was held, in thread MainThread, here:" in text
    assert text.index("in second_place") < text.index("in first_place")
    assert 'return told(orders, "b", "a")' in text
    assert "sqlsem/lockorder.py" not in text.replace("\\", "/")
    # Once, for any thread.
    assert second_place(orders) == first_place(orders) == []


def test_opposite_orders_raise_if_warnings_are_errors(orders):
    first_place(orders)
    with warnings.catch_warnings(), pytest.raises(LockOrderWarning, match="'b' is held"):
        warnings.simplefilter("error")
        orders.entering("db", [("b", True)], ["a"])


@pytest.mark.parametrize("size", [3, 4, 5])
def test_longer_circles_are_reported(orders, size):
    names = "abcde"[:size]
    for name, other in itertools.pairwise(names):
        assert told(orders, name, other) == []
    (text,) = told(orders, names[-1], "a")
    assert text.count("was asked for while") == size
    assert told(orders, names[-1], "a") == []


def test_consistent_order_is_no_fault(orders):
    assert told(orders, "a", "b") == told(orders, "ab", "c") == told(orders, "b", "c") == told(orders, "a", "c") == []
    assert told(orders, "", "a") == []
    assert told(orders, "a", "a") == []


def test_locks_of_all_of_have_no_order(orders):
    assert told(orders, "", "a", "b") == told(orders, "", "b", "a") == []
    assert told(orders, "x", "a", "b") == told(orders, "x", "b", "a") == []
    assert len(told(orders, "ab", "x")) == 2


def test_common_exclusive_lock_prevents_a_deadlock(orders):
    assert told(orders, "ga", "b") == told(orders, "gb", "a") == []
    # One of the places, once without it.
    assert len(told(orders, "a", "b")) == 1


def test_shared_common_lock_prevents_no_deadlock(orders):
    assert told(orders, "ga", "b", alone=False) == []
    assert len(told(orders, "gb", "a", alone=False)) == 1


def test_other_databases_have_other_locks(orders):
    assert told(orders, "a", "b") == []
    assert told(orders, "b", "a", database="another") == []


def test_orders_of_other_threads_count(orders):
    thread = threading.Thread(target=first_place, args=(orders,), name="the loader")
    thread.start()
    thread.join()
    (text,) = second_place(orders)
    assert "'b' was asked for while 'a' was held, in thread the loader, here:" in text


def test_oldest_names_are_forgotten(orders, monkeypatch):
    monkeypatch.setattr(lock_order, "MAX_ORDERS", 10)
    first_place(orders)
    for number in range(20):
        assert told(orders, ["a"], f"load:{number}") == []
    assert len(orders._seen) == 10
    assert sum(map(len, orders._after.values())) == 10
    assert second_place(orders) == []


def test_disabled_search_keeps_no_orders():
    assert lock_order.current is None
    lock_order.configure(True)
    try:
        assert isinstance(lock_order.current, LockOrder)
    finally:
        lock_order.configure(False)
    assert lock_order.current is None


# -- as people use it -----------------------------------------------------------------------------------------------


@pytest.fixture
def debugging(tmp_path):
    """A coordinator that watches the orders."""
    sqlsem.configure(debug=True)
    with sqlsem.connect(f"sqlite:///{tmp_path / 'locks.db'}") as coordinator:
        yield coordinator
    sqlsem.configure(debug=False)


def load(coordinator):
    with coordinator.mutex("customer"), coordinator.limit("etl", 3):
        pass


def publish(coordinator):
    with coordinator.limit("etl", 3), coordinator.mutex("customer"):
        pass


def test_warning_names_both_places(debugging):
    load(debugging)
    with pytest.warns(LockOrderWarning) as caught:
        publish(debugging)
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert text.startswith("'customer' is asked for here while 'etl' is held, and elsewhere 'etl' is while 'customer'")
    assert text.index("in publish") < text.index("in load")
    assert "with coordinator.limit" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        publish(debugging)
        load(debugging)


def test_order_error_is_raised_before_any_request(debugging):
    load(debugging)
    with warnings.catch_warnings(), pytest.raises(LockOrderWarning):
        warnings.simplefilter("error")
        publish(debugging)
    assert debugging.admin.entries() == []
    assert {hold.resource for hold in debugging.admin.history()} == {"customer", "etl"}
    assert len(debugging.admin.history()) == 3  # not a fourth


def test_orders_of_asyncio_tasks_count(debugging):
    async def fetch():
        async with debugging.mutex("a"):
            async with debugging.mutex("b"):
                pass

    async def store():
        async with debugging.mutex("b"):
            async with debugging.mutex("a"):
                pass

    asyncio.run(fetch())
    with pytest.warns(LockOrderWarning) as caught:
        asyncio.run(store())
    (warning,) = caught
    assert "in store" in str(warning.message)
    assert "in fetch" in str(warning.message)


def test_harmless_orders_are_accepted(debugging):
    a, b = debugging.mutex("a"), debugging.mutex("b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with a, b:
            pass
        with sqlsem.all_of(b, a):
            pass
        with b:  # a try cannot wait, and so cannot be part of a deadlock
            assert a.acquire(blocking=False)
            a.release()
        c, d = debugging.mutex("c"), debugging.mutex("d")
        with debugging.mutex("gate"), c, d:
            pass
        with debugging.mutex("gate"), d, c:
            pass


def take_and_give_back(lock):
    with lock:
        pass


def test_other_threads_hold_something_else(debugging):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with debugging.mutex("a"):
            threads = support.Threads()
            threads.start(take_and_give_back, debugging.mutex("b"))
            threads.join()
        with debugging.mutex("b"), debugging.mutex("a"):
            pass


def test_disabled_search_warns_of_nothing(tmp_path):
    with sqlsem.connect(f"sqlite:///{tmp_path / 'locks.db'}") as coordinator, warnings.catch_warnings():
        warnings.simplefilter("error")
        load(coordinator)
        publish(coordinator)


def test_debug_alone_leaves_the_database_as_it_is(tmp_path):
    sqlsem.configure(f"sqlite:///{tmp_path / 'locks.db'}")
    before = sqlsem.default()
    sqlsem.configure(debug=True)
    try:
        assert sqlsem.default() is before
        assert lock_order.current is not None
    finally:
        sqlsem.configure(debug=False)
    assert lock_order.current is None
    assert sqlsem.default() is before
    before.close()
