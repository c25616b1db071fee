"""`sqlsem.Timeout` names the holder: on every engine, for threads and tasks, and for every kind of request."""

import asyncio
import contextlib
import os
import pickle
import re
import socket
from datetime import datetime

import pytest
from support import Attempt, until

import sqlsem
from sqlsem.client.callers import this_thread
from sqlsem.client.effects import run_generator

pytestmark = [pytest.mark.faces("sync", "aio"), pytest.mark.locks]
HERE = f"{socket.gethostname()}:{os.getpid()}"

NOTE = "for the night"
#: A lock that is held, and a request that it keeps out.
IN_THE_WAY = {
    "mutex": (lambda c, n: c.mutex(n, note=NOTE), lambda c, n: c.mutex(n, timeout=0.05)),
    "try": (lambda c, n: c.mutex(n, note=NOTE), lambda c, n: c.mutex(n, timeout=0)),
    "limit": (lambda c, n: c.limit(n, 2, weight=2, note=NOTE), lambda c, n: c.limit(n, 2, timeout=0.05)),
    "read": (lambda c, n: c.write(n, note=NOTE), lambda c, n: c.read(n, timeout=0.05)),
    "write": (lambda c, n: c.read(n, note=NOTE), lambda c, n: c.write(n, timeout=0.05)),
    "stage": (lambda c, n: c.stage(n, 1, note=NOTE), lambda c, n: c.stage(n, 2, timeout=0.05)),
    "all_of": (
        lambda c, n: c.mutex(n, note=NOTE),
        lambda c, n: sqlsem.all_of(c.read(n("other")), c.mutex(n), timeout=0.05),
    ),
    "leader": (lambda c, n: c.mutex(n, note=NOTE), lambda c, n: c.leader(n, timeout=0.05)),
}


def fail(lock):
    with pytest.raises(sqlsem.Timeout) as raised, lock:
        pytest.fail("it was granted")
    return raised.value


def names(error, name, position):
    """Check that the error names the holder in its text and as an entry, also after pickling."""
    for timeout in (error, pickle.loads(pickle.dumps(error))):
        assert f"{name!r} is held by {HERE}" in str(timeout)
        assert f'"{NOTE}"' in str(timeout)
        (holder,) = timeout.holders
        assert (holder.resource, holder.position, holder.note) == (name, position, NOTE)
        assert (holder.host, holder.pid) == (socket.gethostname(), os.getpid())
        since = f"since {holder.granted_at.astimezone():%Y-%m-%d %H:%M:%S}"
        assert re.search(rf"{since} \(for [0-9.]+s\)", str(timeout)), str(timeout)
        assert isinstance(holder.granted_at, datetime)
        assert holder.program
        assert str(timeout).endswith("see the queue with: sqlsem ls")


@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_timeout_names_the_holder(connect, name, kind):
    held, make_lock = IN_THE_WAY[kind]
    first, other = connect(), connect()
    with held(first, name) as grant:
        error = fail(make_lock(other, name))
        names(error, name, grant.position)


def test_timeout_of_a_decorated_call_names_the_holder(connect, name):
    first, other = connect(), connect()
    decorator = other.mutex(name, timeout=0.05)
    lock = sqlsem.Lock(getattr(decorator, "inner", decorator).terms)

    @lock
    def load():
        pytest.fail("it was called")

    @lock
    async def awaited():
        pytest.fail("it was called")

    with first.mutex(name, note=NOTE) as grant:
        for call in (load, lambda: asyncio.run(awaited())):
            with pytest.raises(sqlsem.Timeout) as raised:
                call()
            names(raised.value, name, grant.position)


def test_timeout_counts_all_holders(connect, name):
    first, other = connect(), connect()
    with contextlib.ExitStack() as held:
        for number in range(3):
            held.enter_context(first.limit(name, 9, note=str(number)))
        error = fail(other.limit(name, 9, weight=8, timeout=0.05))
        assert [holder.note for holder in error.holders] == ["0", "1", "2"]
        assert ", and by 2 more" in str(error)


def test_timeout_behind_waiters_names_the_first(connect, name):
    """A reader waits behind a waiting writer, so no holder keeps the reader out."""
    first, other = connect(), connect()
    with first.read(name):
        writer = Attempt(other.write(name))
        until(lambda: len(first.admin.entries(name)) == 2)
        error = fail(first.read(name, timeout=0.05))
        assert error.holders == ()
        assert f"nobody holds {name!r}, but {HERE}" in str(error)
        assert "has waited for it for" in str(error)
    writer.leave()


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_timeout_of_an_upgrade_names_the_other_readers(connect, name):
    first, other = connect(), connect()
    with first.read(name, note=NOTE) as grant, other.read(name) as other_grant:
        for timeout in (0, 0.05):
            with pytest.raises(sqlsem.Timeout) as raised:
                other_grant.upgrade(timeout=timeout)
            names(raised.value, name, grant.position)


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_timeout_on_a_paused_resource_says_so(connect, name):
    coordinator = connect()
    coordinator.admin.pause(name)
    error = fail(coordinator.mutex(name, timeout=0.05))
    assert error.holders == ()
    assert f"{name!r} is paused" in str(error)
    coordinator.admin.resume(name)


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_timeout_of_a_rate_names_the_cause(connect, name):
    coordinator = connect()
    with coordinator.rate(name, 1, per="1h"):
        pass
    error = fail(coordinator.rate(name, 1, per="1h", timeout=0.05))
    assert error.holders == ()
    assert f"all of rate {name!r} was used" in str(error)


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_timeout_of_once_names_the_run(connect, name):
    first, other = connect(), connect()
    with first.once(name, "1h", note=NOTE) as run:
        error = fail(other.once(name, "1h", timeout=0.05))
        names(error, f"once:{name}", run.grant.position)


def test_timeout_is_raised_when_the_look_fails(connect, name, monkeypatch):
    """An error of the query for the holder never hides the timeout."""
    first, other = connect(), connect()
    with first.mutex(name):
        for error in (sqlsem.Unavailable("gone"), RuntimeError("a driver's own"), sqlsem.SchemaError("no right")):

            def entries(session, resource, error=error):
                raise error

            other.client.queue_cache.clear()
            with monkeypatch.context() as patch:
                patch.setattr(other.client.engine.session_class, "entries", entries)
                timeout = fail(other.mutex(name, timeout=0.05))
            assert timeout.holders == ()
            assert str(timeout).endswith("s; see the queue with: sqlsem ls")


def looks_of(coordinator, monkeypatch):
    resources = []
    kind = coordinator.client.engine.session_class
    entries = kind.entries

    def counted(session, resource):
        resources.append(resource)
        return entries(session, resource)

    monkeypatch.setattr(kind, "entries", counted)
    return resources


def test_acquire_that_returns_false_looks_at_nothing(connect, name, monkeypatch):
    """Only the exception names the cause: an `acquire` that returns False does not query it."""
    first, other = connect(), connect()
    with first.mutex(name):
        resources = looks_of(other, monkeypatch)
        for options in ({"blocking": False}, {"timeout": 0}, {"timeout": 0.05}):
            assert not other.mutex(name).acquire(**options)
        assert resources == []
        fail(other.mutex(name, timeout=0))
        assert resources == [name]


def test_many_timeouts_at_once_share_a_look(connect, name, threads, monkeypatch):
    first, other = connect(), connect()
    errors = []
    with first.mutex(name):
        resources = looks_of(other, monkeypatch)
        for _ in range(20):
            threads.start(lambda: errors.append(fail(other.mutex(name, timeout=0.5))))
        threads.join()
    assert [len(error.holders) for error in errors] == [1] * 20
    assert len(resources) < 20


def test_timeout_makes_no_connection_to_look(connect, name, monkeypatch):
    """Without a main session the timeout names no holder: it does not wait for an unreachable server."""
    first, other = connect(), connect()
    with first.mutex(name):
        lock = other.mutex(name, timeout=0)
        fail(lock)
        session, other.client.member.main.session = other.client.member.main.session, None
        try:
            monkeypatch.setattr(other.client.engine, "connect", lambda purpose: pytest.fail("connected"))
            terms = getattr(lock, "inner", lock).terms
            error = run_generator(terms.timeout_error(terms.requests, this_thread()), other.client.execute_effect)
        finally:
            other.client.member.main.session = session
    assert error.holders == ()


@pytest.mark.faces("sync")
@pytest.mark.engines("sqlite", "postgresql", "mssql")
@pytest.mark.leaves_rows
def test_timeout_of_join_names_the_worker(connect, name):
    queue = connect().queue(name)
    number = queue.put({"a": 1}, note=NOTE)
    with queue.try_claim() as task:
        assert task.id == number
        with pytest.raises(sqlsem.Timeout) as raised:
            connect().queue(name).wait(timeout=0.05)
        for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
            assert f'task {number} "{NOTE}" runs on {HERE} since ' in str(error)
            assert [(holder.task_id, holder.host, holder.pid) for holder in error.holders] == [
                (number, socket.gethostname(), os.getpid())
            ]
