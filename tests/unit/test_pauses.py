"""Pauses between two polls."""

from itertools import islice

import pytest

from sqlsem.client.operations import backoff as module
from sqlsem.client.operations.backoff import backoff_delays


@pytest.fixture
def clock(monkeypatch):
    """A clock in seconds that the test advances."""
    passed = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: 1000.0 + passed[0])
    return passed


def test_backoff_delays_grow_up_to_the_longest():
    delays = list(islice(backoff_delays(first=0.001, longest=0.05), 20))
    assert delays[0] < 0.002
    assert 0.04 <= delays[-1] <= 0.06
    assert len(set(delays[-5:])) > 1, "the delays are random, so that waiters do not poll together"


def test_backoff_delays_end_with_the_timeout(clock):
    for pause in backoff_delays(2.5):
        clock[0] += pause
    assert clock[0] == pytest.approx(2.5)


def test_backoff_has_no_delay_without_time():
    assert list(backoff_delays(0)) == []
