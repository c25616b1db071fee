"""The attempts of a call that fails: how soon the next one follows, and what is logged."""

import logging

import pytest
from support import Attempt, until

import sqlsem.testing
from sqlsem.client.connection import retries as module
from sqlsem.client.connection.retries import Retries
from sqlsem.engines.failures import AdaptiveTimeout, Busy, Conflict, Disconnected, Unanswered
from sqlsem.engines.memory import MemorySession


@pytest.fixture
def attempts(monkeypatch):
    """A function that returns how many attempts a call gets that fails each time, in these seconds at least."""
    now = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.random, "uniform", lambda shortest, longest: longest)

    def count(failure, seconds):
        retries = Retries("call", seconds, is_patient=False, is_closing=lambda: False, running=set())
        attempts = 1
        while (pause := retries.pause_after(failure)) is not None:
            now[0] += pause
            attempts += 1
        return attempts

    return count


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, 10), (4.0, 40)])
def test_conflict_in_a_cluster_is_retried_often(attempts, seconds, expected):
    """A call goes on although every second transaction conflicts with another node's."""
    assert attempts(Conflict("another node was faster"), seconds) >= expected


@pytest.mark.parametrize("failure", [Busy("another session keeps a lock"), Disconnected("no server")])
def test_pauses_grow_after_other_failures(attempts, failure):
    assert attempts(failure, 10.0) <= 16


@pytest.mark.parametrize("base", [1.0, 5.0, 15.0])
@pytest.mark.parametrize("seconds", [0.3, 3.0, 10.0, 60.0, 300.0])
def test_silent_server_is_called_once_after_retry(monkeypatch, seconds, base):
    """The attempt that is under way when the time to retry ends is followed by one more, with a longer timeout."""
    now = [1000.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    monkeypatch.setattr("sqlsem.engines.failures.monotonic", lambda: now[0])
    monkeypatch.setattr(module.random, "uniform", lambda shortest, longest: longest)
    retries = Retries("call", seconds, is_patient=True, is_closing=lambda: False, running=set())
    timeout, ends = AdaptiveTimeout(base), []
    pause = 0.0
    while pause is not None:
        now[0] += pause + timeout.seconds
        ends.append(retries.elapsed)
        pause = retries.pause_after(Unanswered.of(Disconnected("silent"), timeout))
    late = [end for end in ends if end >= seconds]
    assert 1 <= len(late) <= 2
    assert late[0] < seconds + base * 2**AdaptiveTimeout.MAX_DOUBLINGS + module.LONGEST_SECONDS
    assert late[-1] - late[0] <= base * 2**AdaptiveTimeout.MAX_DOUBLINGS + module.LONGEST_SECONDS
    if seconds < base:  # a short time to retry: no more than three times the first timeout
        assert ends[-1] <= 3 * base + module.FIRST_SECONDS


@pytest.fixture
def warnings(caplog):
    """A function that returns the messages of warnings so far."""
    caplog.set_level(logging.DEBUG, "sqlsem")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(Conflict("another node was faster"), "the next heartbeat"), (Busy("locked"), "the transaction that asserted it")],
)
def test_deferred_release_says_until_when_it_is_locked(monkeypatch, warnings, failure, expected):
    with sqlsem.testing.memory(lease=1.0) as locks:
        locks.mutex("a").acquire()
        (grant,) = locks.client.registry.grants()
        with monkeypatch.context() as failing:
            failing.setattr(MemorySession, "release", lambda *_: (_ for _ in ()).throw(failure))
            grant.release()
        assert any(f"'a' stays locked until {expected}" in message for message in warnings())
        until(lambda: locks.admin.entries("a") == [], "the heartbeat releases it")


def test_conflict_during_a_wait_is_no_warning(monkeypatch, warnings):
    wait, failures = MemorySession.wait, [Conflict("another node was faster")]

    def waiting(session, ticket, timeout, event):
        if timeout > 0 and failures:
            raise failures.pop()
        return wait(session, ticket, timeout, event)

    monkeypatch.setattr(MemorySession, "wait", waiting)
    with sqlsem.testing.memory("conflicts") as holder, sqlsem.testing.memory("conflicts") as waiter:
        holder.mutex("a").acquire()
        late = Attempt(waiter.mutex("a"))
        until(lambda: not failures, "a wait meets a conflict")
        (grant,) = holder.client.registry.grants()
        grant.release()
        late.granted()
        assert warnings() == []
