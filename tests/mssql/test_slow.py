"""A server that is slow at a first call, as for compiling: the client waits, and gets its answer."""

from __future__ import annotations

import threading
import time

import pytest
from support import PATIENCE
from tdsserver import Later, done, member, result

import sqlsem
from sqlsem import Unavailable
from sqlsem.engines.base import AdaptiveTimeout
from sqlsem.engines.mssql import SqlServerEngine


class Compiling:
    """A server that answers at once after it has worked so long on one request without a break."""

    def __init__(self, seconds, answer):
        self.seconds, self.answer = seconds, answer
        self.compiled = threading.Event()
        self.asked = 0

    def __call__(self, said):
        del said
        self.asked += 1
        return self.answer() if self.compiled.is_set() else Later(self.seconds, self.answer(), self.compiled.set)


def test_while_a_connection_is_made_ready(tds, url_of, monkeypatch):
    """Also longer than the retry time of a call, as an answer is under way."""
    monkeypatch.setattr(SqlServerEngine, "setup_timeout", 2.0)
    slow = Compiling(2.8, done)
    server = tds(member(warm_up=slow))
    with sqlsem.connect(url_of(server), retry=0.3) as coordinator, coordinator.mutex("a"):
        assert slow.compiled.is_set()
    assert 2 <= slow.asked <= 5


def test_the_first_call(tds, url_of):
    """A call ends before other clients would take this process for dead."""
    numbers = iter(range(1, 100))
    slow = Compiling(3.0, lambda: result(("position", "granted"), (next(numbers), 1)))
    server = tds(member(register=slow))
    with sqlsem.connect(url_of(server), grace=1, retry=0.3) as coordinator:
        for _ in range(3):
            try:
                with coordinator.mutex("a"):
                    break
            except sqlsem.LockLost:  # the row was as old as the answer; but the next answer comes at once
                assert slow.compiled.is_set()
            except Unavailable:  # after `retry` and one attempt more; the next call waits longer
                continue
    assert slow.compiled.is_set()


def test_a_look(tds, url_of):
    slow = Compiling(1.5, done)
    server = tds(member(entries=slow))
    with sqlsem.connect(url_of(server), retry=0.3) as coordinator:
        assert coordinator.admin.entries() == []
    assert slow.compiled.is_set()
    assert slow.asked == 2


def test_silent_server_is_given_up(tds, url_of, monkeypatch):
    monkeypatch.setattr(SqlServerEngine, "setup_timeout", 0.2)
    silent = Compiling(1000, done)
    server = tds(member(warm_up=silent))
    began = time.monotonic()
    with (
        sqlsem.connect(url_of(server), retry=0.1) as coordinator,
        pytest.raises(Unavailable, match=r"no answer came within 0.4 s"),
        coordinator.mutex("a"),
    ):
        raise AssertionError("let in")
    assert silent.asked == 2, "one attempt after the time to retry"
    assert time.monotonic() - began < PATIENCE


def test_short_timeout_does_not_wait_for_a_silent_server(tds, url_of, monkeypatch):
    monkeypatch.setattr(SqlServerEngine, "setup_timeout", 0.2)
    slow = Compiling(1000, done)
    server = tds(member(warm_up=slow))
    with (
        sqlsem.connect(url_of(server), retry=30) as coordinator,
        pytest.raises((sqlsem.Timeout, Unavailable)),
        coordinator.mutex("a", timeout=0.1),
    ):
        raise AssertionError("let in")
    assert slow.asked < 4


def test_allowance(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("sqlsem.engines.failures.monotonic", lambda: now[0])
    allowance = AdaptiveTimeout(4.0)
    steps = []
    for _ in range(5):
        steps.append((allowance.seconds, allowance.grow()))
    assert steps == [(4.0, True), (8.0, True), (16.0, True), (32.0, False), (32.0, False)]
    now[0] += AdaptiveTimeout.RESET_SECONDS + 1
    assert allowance.seconds == 4.0
