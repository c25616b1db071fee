"""The limit of sessions that wait on the server at a time: setting max_server_waiters."""

import contextlib
import threading
import time

import pytest
from support import PATIENCE, STEADY, slack, until

from sqlsem.engines.base import Unanswered
from sqlsem.values.locks import Request

pytestmark = pytest.mark.engines("mssql")


@pytest.fixture
def waiters(database):
    """``waiters(1)`` sets the limit of waiters in this test."""
    setting = f"UPDATE {database.beside('setting')} SET value = ? WHERE name = 'max_server_waiters'"
    before = database.rows(f"SELECT value FROM {database.beside('setting')} WHERE name = 'max_server_waiters'")
    assert before == [("100",)]
    yield lambda number: database.rows(setting, str(number))
    database.rows(setting, "100")


def test_session_above_the_limit_is_refused_at_once(session, database, refused, waiters, name):
    holder, waiter, other = session(), session(), session()
    assert holder.acquire(name).code == 0
    waiters(1)
    waiting = waiter.waiting(name, timeout_ms=60_000)
    slot = f"SELECT APPLOCK_TEST({database.schema}.lock_principal(), ?, 'Exclusive', 'Session')"
    until(lambda: database.rows(slot, f"slot.sqlsem.{database.schema}.0") == [(0,)], "it sleeps")
    with refused(50002, "max_server_waiters"):
        other.acquire(name, timeout_ms=60_000)
    # It left the queue, and the waiter goes on. Calls without a wait work.
    assert len(database.queue(name)) == 2
    assert other.acquire(name, timeout_ms=0).code == -1
    assert other.acquire(name("free")).code == 0
    holder.release(name)
    assert waiting.result(PATIENCE).code == 1
    # Its slot is free again.
    waiting = other.waiting(name, timeout_ms=60_000)
    waiter.release(name)
    assert waiting.result(PATIENCE).code == 1
    for resource in (name, name("free")):
        other.release(resource)


def test_session_above_the_limit_is_refused_on_pause(session, connect, refused, waiters, name):
    """On that engine a session sleeps by the clock."""
    waiter = session()
    with connect() as operator:
        operator.admin.pause(name)
        waiters(0)
        with refused(50002, "max_server_waiters"):
            waiter.acquire(name, timeout_ms=60_000)
        operator.admin.resume(name)
    waiters(100)
    assert waiter.acquire(name).code == 0
    waiter.release(name)


def _connect(database):
    """A program's session. (The engine in the tests compiles the routines in each session, which takes time.)"""
    engine = database.make_engine(grace=STEADY)
    while True:
        with contextlib.suppress(Unanswered):
            return engine.connect("main")


def test_a_program_waits_by_itself(session, database, waiters, name):
    """It polls at most a second apart, and is granted in its order."""
    holder = session()
    assert holder.acquire(name).code == 0
    waiters(0)
    with contextlib.closing(_connect(database)) as main:
        member = main.register_member("host", 1, "test")
        (ticket,) = main.register(member, "r", "o", "u", [Request(name, "write", 1, 1)], False)
        began = time.monotonic()
        assert main.wait(ticket, 0.5, threading.Event()) is False
        assert time.monotonic() - began >= 0.5
        released = []
        threading.Timer(0.5, lambda: (released.append(time.monotonic()), holder.release(name))).start()
        assert main.wait(ticket, PATIENCE, threading.Event()) is True
        assert time.monotonic() - released[0] < 1.2 + slack(1)
        main.deregister_member(member)


def test_every_session_may_wait_without_the_setting(session, database, name):
    """An owner may delete the row."""
    setting = database.beside("setting")
    holder, waiter = session(), session()
    assert holder.acquire(name).code == 0
    database.rows(f"DELETE FROM {setting} WHERE name = 'max_server_waiters'")
    try:
        waiting = waiter.waiting(name, timeout_ms=60_000)
        holder.release(name)
        assert waiting.result(PATIENCE).code == 1
        waiter.release(name)
    finally:
        database.rows(f"INSERT INTO {setting} (name, value) VALUES ('max_server_waiters', '100')")
