"""Decorated functions and locks in other processes (multiprocessing), and objects that cannot go there."""

import asyncio
import copy
import multiprocessing
import os
import pickle

import pytest
from support import PATIENCE

import sqlsem
from sqlsem import aio

LOCK = sqlsem.mutex("pickled", timeout=PATIENCE)


@sqlsem.limit("pickled-etl", 3)
def load(number):
    return number + 1, os.getpid(), len(sqlsem.default().admin.entries("pickled-etl"))


@sqlsem.mutex(lambda number: f"pickled-{number}")
async def merge(number):
    return number + 1


class Job:
    def __init__(self, start):
        self.start = start

    @sqlsem.mutex("pickled-method")
    def method(self, number):
        return self.start + number

    @classmethod
    @LOCK
    def of_class(cls, number):
        return cls.__name__, number

    @LOCK
    @classmethod
    def of_class_too(cls, number):
        return cls.__name__, number

    @LOCK
    @staticmethod
    def static(number):
        return number + 2


def hold(lock):
    with lock as grant:
        return grant.resource, grant.fence, os.getpid()


def where(lock):
    return repr(lock), sqlsem.default().engine.label


@pytest.fixture
def default(tmp_path, monkeypatch):
    """The default database of this process and of its child processes."""
    monkeypatch.setenv("SQLSEM_URL", f"sqlite:///{tmp_path}/locks.db")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
    sqlsem.configure()
    yield
    sqlsem.default().close()
    monkeypatch.undo()
    sqlsem.configure()


@pytest.fixture(params=multiprocessing.get_all_start_methods())
def pool(request, default, monkeypatch):
    # (Child processes import this module by its bare name, as they import a program's module.)
    monkeypatch.syspath_prepend(os.path.dirname(__file__))
    context = multiprocessing.get_context(request.param)
    with context.Pool(2) as pool:
        yield pool


def test_pickled_locks_work_in_other_processes(pool):
    import test_pickling as here  # the name of this module in all processes

    results = pool.map(here.load, range(10))
    assert [value for value, _, _ in results] == list(range(1, 11))
    assert os.getpid() not in {pid for _, pid, _ in results}
    assert all(inside >= 1 for _, _, inside in results)
    job = here.Job(10)
    for call, expected in [
        (job.method, 15),
        (here.Job.static, 7),
        (job.static, 7),
        (here.Job.of_class, ("Job", 5)),
        (here.Job.of_class_too, ("Job", 5)),
    ]:
        assert pool.apply_async(call, (5,)).get(PATIENCE) == expected
    fences = [fence for _, fence, _ in pool.map(hold, [sqlsem.mutex("pickled-argument")] * 6)]
    assert len(set(fences)) == 6


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_copies_share_their_coordinator(default, protocol):
    def copied(value):
        return pickle.loads(pickle.dumps(value, protocol))

    assert copied(load) is load
    assert copied(merge) is merge
    assert asyncio.run(copied(merge)(1)) == 2
    lock = sqlsem.limit("a", 3, weight=2, note="x", timeout="1m", on_lost=print, cancel_on_lost=True)
    again = copied(lock)
    assert repr(again) == repr(lock)
    assert vars(again.terms) == vars(lock.terms)
    for original in (sqlsem.mutex("a"), sqlsem.all_of(sqlsem.read("a"), sqlsem.stage("b", 7)), aio.write("a")):
        assert repr(copied(original)) == repr(original)
    assert copy.copy(load) is copy.deepcopy(load) is load
    job = Job([10])
    other = copy.deepcopy({"call": job.method, "job": job})
    assert other["call"].__self__ is other["job"] is not job
    with LOCK:
        assert not copied(LOCK).acquire(blocking=False), "another object, of the same lock"
    with copied(LOCK):
        assert LOCK.locked()


def test_unpicklable_objects_raise(default, tmp_path):
    with sqlsem.connect(f"sqlite:///{tmp_path}/secret.db") as coordinator:
        for lock in (coordinator.mutex("a"), coordinator.aio.mutex("a")):
            with pytest.raises(sqlsem.ConfigurationError, match="may hold a password"):
                pickle.dumps(lock)
        with pytest.raises(sqlsem.ConfigurationError, match="connect in the process that uses it"):
            pickle.dumps(coordinator)
        with coordinator.mutex("a") as grant, pytest.raises(sqlsem.NotHeld, match="belongs to this process"):
            pickle.dumps(grant)


def test_another_default_database_is_another_lock(default, tmp_path):
    """A lock that would silently use another database is refused; the message does not show the URL."""
    text = pickle.dumps(sqlsem.mutex("a"))
    sqlsem.configure(tmp_path / "other.db")
    with pytest.raises(sqlsem.ConfigurationError, match=r"other\.db: that would be another lock"):
        pickle.loads(text)


@pytest.mark.engines("postgresql")
def test_no_password_is_pickled(database):
    sqlsem.configure(database.url.replace("@", ":secret-word@", 1) if "@" in database.url else database.url)
    try:
        text = pickle.dumps(sqlsem.mutex("a"))
        assert b"secret-word" not in text
        assert pickle.loads(text).terms.templates == sqlsem.mutex("a").terms.templates
    finally:
        sqlsem.configure()
