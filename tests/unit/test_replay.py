"""The replay of a night: equal to the history without changes, and to the rule's result with changed settings."""

import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import nights, processor_seconds
from support.nights import Ask, entry, past

from sqlsem.insight.replay import ORDERS, ReplaySettings, replay
from sqlsem.values.errors import ConfigurationError

#: Requests for a mutex or a limit, which can be replayed with another limit.
limited = st.builds(
    lambda when, weight, hold: Ask(when, "a", "write", 4, weight, hold),
    st.integers(0, 12),
    st.integers(1, 4),
    st.integers(0, 6),
)


@settings(max_examples=150)
@given(st.lists(nights.asks, min_size=1, max_size=14))
def test_replay_with_equal_terms_changes_nothing(some):
    result = replay(nights.lived(some))
    assert result.everything.would == result.everything.was
    for resource in result.resources.values():
        assert resource.would == resource.was
    assert (result.guessed, result.stuck, result.refused, result.unfinished) == (0, 0, 0, 0)


@settings(max_examples=100)
@given(st.lists(limited, min_size=1, max_size=14), st.integers(4, 9))
def test_replay_with_another_limit_follows_the_rule(some, limit):
    """Beside a plain model of the rule, second by second."""
    would = replay(nights.lived(some), settings=ReplaySettings(limits={"a": limit})).everything.would
    other = replay(nights.lived([replace(row, limit=limit) for row in some])).everything.was
    assert would == other


@settings(max_examples=60)
@given(st.lists(limited, min_size=1, max_size=14))
def test_replay_with_another_weight_follows_the_rule(some):
    would = replay(nights.lived(some), settings=ReplaySettings(weights={"a": 2})).everything.would
    assert would == replay(nights.lived([replace(row, weight=2) for row in some])).everything.was


def three_after_one_another():
    """One holder for 10 s; behind it wait a long request, a short request, and a heavy request."""
    return [
        past("a", 1, 0, 0, 10, limit=2, weight=2),
        past("a", 2, 1, 10, 30, limit=2, weight=2),
        past("a", 3, 2, 30, 31, limit=2, weight=2),
    ]


def test_replay_report():
    result = replay(three_after_one_another())
    was = result.resources["a"].was
    assert (was.requests, was.granted, was.not_granted, was.end) == (3, 3, 0, nights.at(31))
    assert (was.wait_p50, was.wait_p99, was.wait_total) == (9, 28, 37)
    assert was.use == 1.0
    assert result.as_dict()["resources"]["a"]["would"]["wait_total"] == 37


@pytest.mark.parametrize(
    ("order", "waits"), [("asked", 37), ("shortest", 8 + 10), ("longest", 37), ("lightest", 37), ("heaviest", 37)]
)
def test_replay_in_another_order(order, waits):
    assert order in ORDERS
    would = replay(three_after_one_another(), settings=ReplaySettings(order=order)).everything.would
    assert would.wait_total == waits
    assert would.end == nights.at(31)


def test_replay_with_light_or_heavy_requests_first():
    rows = [
        past("a", 1, 0, 0, 10, limit=3, weight=3),
        past("a", 2, 1, 10, 20, limit=3, weight=2),
        past("a", 3, 2, 20, 30, limit=3, weight=3),
        past("a", 4, 3, 30, 40, limit=3, weight=1),
    ]

    def entered(order):
        return replay(rows, settings=ReplaySettings(order=order)).everything.would.wait_total

    assert entered("lightest") == 7 + 9 + 18  # the light ones beside each other
    assert entered("heaviest") == 8 + 19 + 17


def test_replay_with_a_higher_limit_ends_earlier():
    rows = [past("etl", n, 0, 10 * (n - 1), 10 * n) for n in range(1, 7)]
    both = replay(rows, settings=ReplaySettings(limits={"etl": 3})).resources["etl"]
    assert (both.was.end, both.would.end) == (nights.at(60), nights.at(20))
    assert (both.was.use, both.would.use) == (1.0, 1.0)
    assert (both.was.wait_total, both.would.wait_total) == (150, 30)
    assert replay(rows, settings=ReplaySettings(limits={"etl": 4})).resources["etl"].would.use == 0.75


def test_replay_keeps_limits_of_readers_and_stages():
    rows = [past("a", 1, 0, 0, 10, "read"), past("a", 2, 1, 10, 20), past("a", 3, 2, 20, 30, "read")]
    assert replay(rows, settings=ReplaySettings(limits={"a": 5})).everything.would.end == nights.at(30)
    assert replay(rows).resources["a"].was.use == 10 / 30  # of the writer alone


def test_replay_refuses_a_weight_that_never_fits():
    rows = [past("a", 7, 0, 0, 10, limit=4, weight=4)]
    with pytest.raises(ConfigurationError, match="position 7 of 'a' weighs 4"):
        replay(rows, settings=ReplaySettings(limits={"a": 3}))
    assert replay(rows, settings=ReplaySettings(limits={"a": 3}, weights={"a": 1})).everything.would.granted == 1


def test_replay_grants_timed_out_requests():
    rows = [
        past("a", 1, 0, 0, 10),
        past("a", 2, 1, None, 5, outcome="timeout"),
        past("a", 3, 2, 10, 14),
        past("b", 4, 0, None, 1, outcome="timeout"),
    ]
    result = replay(rows, settings=ReplaySettings(limits={"a": 2}))
    assert result.guessed == 2  # (the reason of the wait for b is unknown: the history has no holder of b)
    assert result.resources["a"].would.granted == 3
    # 2 at 1 for 4 s (the usual, of 4 and 10), 3 at 5 when that has left
    assert result.resources["a"].would.wait_total == 3


def test_replay_grants_all_of_requests_together():
    both = {"requesting_id": "x"}
    rows = [
        past("a", 1, 0, 0, 10),
        past("b", 2, 0, 0, 20),
        past("a", 3, 1, 10, 25, **both),
        past("b", 4, 1.001, 20, 25.001, **both),
    ]
    result = replay(rows)
    assert abs((result.everything.would.end - nights.at(25)).total_seconds()) < 0.01
    # room for two on a alone is of no use: a is held during the wait for b
    result = replay(rows, settings=ReplaySettings(limits={"a": 2}))
    assert result.resources["a"].would.wait_total == pytest.approx(0, abs=0.01)
    assert abs((result.resources["a"].would.end - nights.at(25)).total_seconds()) < 0.01
    # with room on b as well, they would have 5 s of work
    result = replay(rows, settings=ReplaySettings(limits={"a": 2, "b": 2}))
    assert abs((result.resources["a"].would.end - nights.at(10)).total_seconds()) < 0.01


def test_replay_requests_a_nested_lock_after_the_outer():
    shared = {"requesting_id": "x"}
    rows = [
        past("outer", 1, 0, 0, 50),
        past("outer", 2, 5, 50, 60, **shared),
        past("inner", 3, 52, 52, 57, **shared),
        past("outer", 4, 70, 70, 71, **shared),  # later, by itself
    ]
    assert replay(rows).everything.would == replay(rows).everything.was
    result = replay(rows, settings=ReplaySettings(limits={"outer": 2}))
    assert result.resources["inner"].would.end == nights.at(12)
    assert result.resources["outer"].would.end == nights.at(71)
    # And the outer request waits for the inner one.
    rows = [past("inner", 5, 0, 0, 30), *rows[1:3]]
    rows[1] = past("outer", 2, 5, 5, 45, **shared)
    rows[2] = past("inner", 3, 10, 30, 40, **shared)
    result = replay(rows, settings=ReplaySettings(limits={"inner": 2}))
    assert result.resources["outer"].would.end == nights.at(25)


def test_replay_reports_deadlocks():
    x, y = {"requesting_id": "x"}, {"requesting_id": "y"}
    rows = [
        past("gate", 1, 0, 0, 10),
        past("a", 2, 1, 1, 30, **x),
        past("gate", 3, 5, 10, 30, **x),
        past("b", 4, 20, 20, 29, **x),
        past("b", 5, 14, 14, 18, **y),
        past("a", 6, 15, None, 18, outcome="deadlock", **y),
    ]
    assert replay(rows).stuck == 0
    # Had x not waited at the gate, it would ask for b at 15, when y has it and asks for a.
    rows[5] = past("a", 6, 15.5, 30, 31, **y)
    rows[4] = past("b", 5, 14, 14, 32, **y)
    rows[3] = past("b", 4, 20, 20, 29, **x)
    assert replay(rows, settings=ReplaySettings(limits={"gate": 2})).stuck > 0


def test_replay_follows_upgrades_and_downgrades():
    rows = [
        past("a", 1, 0, 0, 5, "read", None, outcome="upgraded"),
        past("a", 1, 0, 5, 8, outcome="downgraded"),
        past("a", 1, 0, 8, 20, "read"),
        past("a", 2, 1, 1, 5, "read"),
        past("a", 3, 6, 8, 10, "read"),
        past("a", 4, 7, 20, 22),
    ]
    result = replay(rows)
    assert result.everything.was == result.everything.would
    assert result.everything.was.requests == 4
    assert result.everything.was.wait_total == 2 + 13
    # The reader beside it stays for longer: the upgrade waits for it.
    longer = [*rows[:3], past("a", 2, 1, 1, 7, "read")]
    assert replay(longer).resources["a"].would.end == nights.at(22)


def test_replay_refuses_a_concurrent_second_upgrade():
    rows = [past("a", 9, 0, 0, 30, "read")]
    for n in (1, 2):
        rows += [past("a", n, 1, 1, 5 + n, "read", None, outcome="upgraded"), past("a", n, 1, 5 + n, 9)]
    result = replay(rows)
    assert (result.refused, result.stuck) == (1, 0)


def test_replay_counts_open_rows_until_now():
    entries = [entry("a", 1, 0, 0, 10), entry("a", 2, 4, None, 10), entry("a", 3, 5, None, 10, access="read")]
    result = replay([], entries)
    assert result.unfinished == 3
    assert result.everything.would == result.everything.was
    assert (result.everything.was.granted, result.everything.was.not_granted) == (1, 2)


def test_replay_of_an_empty_history():
    result = replay([])
    assert result.resources == {}
    assert (result.everything.would.requests, result.everything.would.end) == (0, None)


def test_replay_time_grows_linearly():
    def night(number):
        rng = random.Random(4)
        rows = []
        for n in range(1, number + 1):
            requested, held = rng.uniform(0, number), rng.uniform(0, 30)
            access, weight = rng.choice([("write", 1), ("write", 2), ("read", 1)])
            rows.append(
                past(
                    "ab"[n % 2], n, requested, requested, requested + held, access, 1 if access == "read" else 4, weight
                )
            )
        return rows

    def play(rows):
        # The load is ten times the capacity: nearly all requests wait at the same time.
        assert replay(rows).everything.would.granted == len(rows)

    few, many = (partial(play, night(number)) for number in (1_000, 10_000))
    assert processor_seconds(many, 2) < 40 * processor_seconds(few, 3)
