"""Locks as decorators."""

import asyncio
import functools
import inspect
import sys
import types

import pytest

import sqlsem

pytestmark = [pytest.mark.locks, pytest.mark.quiet]


def holders(coordinator, name):
    return [entry.resource for entry in coordinator.admin.entries() if entry.resource.startswith(name)]


def test_each_call_holds_the_lock(connect, name):
    coordinator = connect()

    @coordinator.limit(name, 3)
    def load(table, *, rows=1):
        """Load a table."""
        assert holders(coordinator, name) == [name]
        return table, rows

    assert load("a", rows=2) == ("a", 2)
    assert load("b") == ("b", 1)
    assert holders(coordinator, name) == []


def test_the_signature_and_the_rest_are_kept(connect, name):
    def load(table: str, *more: int, rows: int = 1, **options: object) -> list[str]:
        """Load a table."""

    guarded = connect().mutex(name)(load)
    assert inspect.signature(guarded) == inspect.signature(load)
    assert guarded.__name__ == "load"
    assert guarded.__doc__ == "Load a table."
    assert guarded.__module__ == load.__module__
    assert guarded.__annotations__ == load.__annotations__
    assert inspect.unwrap(guarded) is load


def test_computed_name_makes_a_queue_per_value(connect, name):
    coordinator = connect()

    @coordinator.mutex(lambda table: f"{name}:{table}")
    def merge(table):
        inside = holders(coordinator, name)
        return inside if table == "b" else [*inside, *merge("b")]

    assert merge("a") == [f"{name}:a", f"{name}:a", f"{name}:b"]
    assert merge(table="b") == [f"{name}:b"]


def test_invalid_computed_name_is_refused(connect, name):
    coordinator = connect()
    for bad in ("", " x", 5, None, "x" * 256):

        @coordinator.mutex(lambda bad=bad: bad)
        def work():
            raise AssertionError("must not run")

        with pytest.raises(sqlsem.ConfigurationError):
            work()
    lock = coordinator.mutex(lambda table: table)
    for use in (lock.acquire, lock.__enter__):
        with pytest.raises(sqlsem.ConfigurationError, match="computed"):
            use()


def test_an_error_of_the_naming_function_comes_out(connect):
    @connect().mutex(lambda table: {}[table])
    def work(table):
        raise AssertionError("must not run")

    with pytest.raises(KeyError):
        work("a")


def test_methods_of_every_kind(connect, name):
    coordinator = connect()

    class Loader:
        def __init__(self, table):
            self.table = table

        @coordinator.mutex(lambda self, rows: f"{name}:{self.table}:{rows}")
        def plain(self, rows):
            return holders(coordinator, name)

        @classmethod
        @coordinator.mutex(lambda cls, rows: f"{name}:{cls.__name__}:{rows}")
        def inner_class(cls, rows):
            return holders(coordinator, name)

        @coordinator.mutex(lambda cls, rows: f"{name}:{cls.__name__}:{rows}")
        @classmethod
        def outer_class(cls, rows):
            return holders(coordinator, name)

        @staticmethod
        @coordinator.mutex(lambda rows: f"{name}:{rows}")
        def inner_static(rows):
            return holders(coordinator, name)

        @coordinator.mutex(lambda rows: f"{name}:{rows}")
        @staticmethod
        def outer_static(rows):
            return holders(coordinator, name)

    loader = Loader("t")
    assert loader.plain(1) == [f"{name}:t:1"]
    assert Loader.plain(loader, 2) == [f"{name}:t:2"]
    for owner in (loader, Loader):
        assert owner.inner_class(3) == [f"{name}:Loader:3"]
        assert owner.outer_class(4) == [f"{name}:Loader:4"]
        assert owner.inner_static(5) == [f"{name}:5"]
        assert owner.outer_static(6) == [f"{name}:6"]
    assert list(inspect.signature(loader.plain).parameters) == ["rows"]


def test_partial_objects_and_lambdas(connect, name):
    lock = connect().mutex(name)
    assert lock(lambda a: a + 1)(1) == 2
    assert lock(functools.partial(int, base=2))("101") == 5


def test_decorators_stack(connect, name):
    coordinator = connect()

    @coordinator.mutex(name("a"))
    @coordinator.read(name("b"))
    def both():
        return holders(coordinator, name)

    assert both() == [name("a"), name("b")]


def test_all_of_decorates(connect, name):
    coordinator = connect()

    @sqlsem.all_of(coordinator.mutex(lambda table: name(table)), coordinator.limit(name("b"), 2))
    def move(table):
        return holders(coordinator, name)

    assert move("a") == [name("a"), name("b")]


def test_an_error_comes_out_and_the_lock_goes_back(connect, name):
    coordinator = connect()

    @coordinator.mutex(name)
    def work():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert holders(coordinator, name) == []


def test_the_timeout_of_a_decorated_call(connect, name):
    first, other = connect(), connect()

    @other.mutex(name, timeout=0.1)
    def work():
        raise AssertionError("must not run")

    with first.mutex(name), pytest.raises(sqlsem.Timeout):
        work()


def test_decorated_function_may_call_itself(connect, name):
    coordinator = connect()

    @coordinator.mutex(name)
    def strict(depth):
        return strict(depth - 1) if depth else "deep"

    @coordinator.mutex(name, reentrant=True)
    def loose(depth):
        return loose(depth - 1) if depth else "deep"

    with pytest.raises(sqlsem.Deadlock):
        strict(2)
    assert loose(3) == "deep"


def test_generators_are_refused(connect, name):
    lock = connect().mutex(name)

    def generator():
        yield 1

    async def stream():
        yield 1

    class Thing:
        pass

    for bad in (generator, stream, Thing, 5):
        with pytest.raises(sqlsem.ConfigurationError):
            lock(bad)
    with pytest.raises(sqlsem.ConfigurationError, match="generator"):
        lock(functools.partial(generator))


def test_a_coroutine_function_does_not_run_unguarded(connect, name):
    """A decorated coroutine function is guarded or refused, never called as a plain function."""
    coordinator = connect()
    holders_seen = []

    async def work():
        holders_seen.append(holders(coordinator, name))

    try:
        guarded = coordinator.mutex(name)(work)
    except sqlsem.ConfigurationError:
        return
    import asyncio

    assert inspect.iscoroutinefunction(guarded)
    asyncio.run(guarded())
    assert holders_seen == [[name]]


def test_a_callable_string_is_a_name(connect, name):
    """A string is taken as a name, even if its class is callable."""
    assert callable(name)
    with connect().mutex(name) as grant:
        assert grant.resource == name


# -- notebooks


CELL = """
with lock as grant:
    seen.append(grant.fence)
assert lock.acquire(timeout=60)
assert lock.locked()
lock.release()
seen.append(guarded())
"""


def test_decorated_function_in_a_notebook_cell(connect, name, monkeypatch):
    """IPython runs a cell in its event loop: the cell may block that loop, a task beside it may not."""
    lock, seen = connect().mutex(name), []
    shell = types.ModuleType("IPython.core.interactiveshell")
    exec("async def run_code(code, names):\n    exec(code, names)", shell.__dict__)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    names = {"lock": lock, "seen": seen, "guarded": lock(lambda: 7), "__name__": "__main__"}

    async def cell_that_starts_a_task():
        async def task():
            exec(CELL, names)

        await asyncio.create_task(task())

    async def kernel():
        await shell.run_code(CELL, names)
        assert seen[1] == 7
        with pytest.raises(sqlsem.ConfigurationError, match="async with"):
            await cell_that_starts_a_task()

    asyncio.run(kernel())
    assert len(seen) == 2


def test_decorated_call_that_releases_early_ends_quietly(connect, name):
    coordinator = connect()
    for lock in (coordinator.mutex(name), coordinator.limit(name, 2), coordinator.mutex(name, reentrant=True)):

        @lock
        def by_lock(lock=lock):
            lock.release()
            return holders(coordinator, name)

        @lock
        def by_grant(lock=lock):
            lock.grant.release()
            return holders(coordinator, name)

        assert by_lock() == by_grant() == []

        @lock
        async def awaiting(lock=lock):
            await lock._aio.grant.release()
            return holders(coordinator, name)

        assert asyncio.run(awaiting()) == []
