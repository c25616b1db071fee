"""The next step of a waiter, as a table; and what holds for each state and all facts."""

import dataclasses
import itertools
import math

import pytest

from sqlsem.client.waiters.state import FINAL, Facts, Step, WaiterState, next_step
from sqlsem.util.timing import DEFAULT, Timing

NOW = 1000.0
S = WaiterState
SLICE, SUSPECT, BLOCKED = DEFAULT.slice, DEFAULT.suspect_slice, DEFAULT.blocked_locally

TABLE = [
    # the state, the facts, the next step
    (S.REGISTERED, Facts(), Step(S.ON_CONNECTION, SLICE)),
    (S.REGISTERED, Facts(is_suspect=True), Step(S.ON_CONNECTION, SUSPECT)),
    (S.REGISTERED, Facts(deadline=NOW + 0.1), Step(S.ON_CONNECTION, 0.1)),
    (S.ON_CONNECTION, Facts(), Step(S.ON_CONNECTION, SLICE)),
    (S.ON_CONNECTION, Facts(has_connection=False), Step(S.POLLED, math.inf)),
    (S.ON_CONNECTION, Facts(has_connection=False, deadline=NOW + 60), Step(S.POLLED, 60)),
    (S.POLLED, Facts(), Step(S.ON_CONNECTION, SLICE)),
    (S.POLLED, Facts(polls_for_others=True), Step(S.POLLED, math.inf)),
    # this process holds what the first waiter waits for: every second slice is local
    (S.REGISTERED, Facts(is_held=True), Step(S.LOCAL_WAIT, SLICE)),
    (S.LOCAL_WAIT, Facts(is_held=True), Step(S.ON_CONNECTION, SLICE)),
    (S.LOCAL_WAIT, Facts(is_held=True, has_connection=False), Step(S.POLLED, math.inf)),
    (S.ON_CONNECTION, Facts(is_held=True, deadline=NOW + 1), Step(S.LOCAL_WAIT, 1)),
    (S.POLLED, Facts(is_held=True, polls_for_others=True), Step(S.LOCAL_WAIT, SLICE)),
    # behind other waiters of this process
    (S.REGISTERED, Facts(is_first=False, is_blocked=True), Step(S.BLOCKED_LOCALLY, BLOCKED)),
    (S.POLLED, Facts(is_first=False, is_blocked=True, deadline=NOW + 2), Step(S.BLOCKED_LOCALLY, 2)),
    (S.BLOCKED_LOCALLY, Facts(), Step(S.ON_CONNECTION, SLICE)),
    (S.BLOCKED_LOCALLY, Facts(is_first=False), Step(S.POLLED, math.inf)),
    (S.BLOCKED_LOCALLY, Facts(is_first=False, can_share=True), Step(S.SHARED_WAKEUP)),
    (S.ON_CONNECTION, Facts(can_share=True, is_held=True), Step(S.SHARED_WAKEUP)),
    # a victim asks once more
    (S.ON_CONNECTION, Facts(is_victim=True), Step(S.VICTIM)),
    (S.BLOCKED_LOCALLY, Facts(is_victim=True, is_blocked=True, is_first=False), Step(S.VICTIM)),
    # the end
    (S.ON_CONNECTION, Facts(answer=True), Step(S.GRANTED)),
    (S.ON_CONNECTION, Facts(answer=None), Step(S.GONE)),
    (S.ON_CONNECTION, Facts(has_row=False), Step(S.GONE)),
    (S.POLLED, Facts(answer=True, has_row=False, deadline=NOW, is_victim=True), Step(S.GRANTED)),
    (S.POLLED, Facts(has_row=False, deadline=NOW), Step(S.GONE)),
    (S.POLLED, Facts(deadline=NOW, is_victim=True), Step(S.TIMED_OUT)),
]


@pytest.mark.parametrize(("state", "facts", "step"), TABLE, ids=lambda value: getattr(value, "name", None))
def test_step_follows_from_state_and_facts(state, facts, step):
    found = next_step(state, facts, NOW, DEFAULT)
    assert found.state is step.state
    assert found.seconds == pytest.approx(step.seconds)


FLAGS = [field.name for field in dataclasses.fields(Facts) if field.type == "bool"]


def all_facts():
    """Yield all facts, with and without a deadline. (No blocked waiter is the first of its queue.)"""
    for values in itertools.product((False, True), repeat=len(FLAGS)):
        for answer, deadline in itertools.product((False, True, None), (math.inf, NOW + 0.01, NOW)):
            facts = Facts(answer=answer, deadline=deadline, **dict(zip(FLAGS, values, strict=True)))
            if not (facts.is_blocked and facts.is_first):
                yield facts


STATES = [state for state in WaiterState if state not in FINAL]
#: The states in which the database is asked.
ASKING = {S.ON_CONNECTION, S.POLLED, S.SHARED_WAKEUP, S.VICTIM}


def test_every_step_keeps_the_rules():
    for state, facts in itertools.product(STATES, all_facts()):
        step = next_step(state, facts, NOW, DEFAULT)
        assert (step.state in FINAL) == (facts.answer is not False or not facts.has_row or facts.deadline <= NOW)
        assert (step.state is S.GRANTED) == (facts.answer is True), "only the database grants"
        assert 0 <= step.seconds <= facts.deadline - NOW or step.state in FINAL
        if step.state is S.ON_CONNECTION:
            assert facts.is_first, "a process waits in the database with the first waiter of a queue only"
            assert facts.has_connection
            assert not facts.polls_for_others
            assert step.seconds <= (SUSPECT if facts.is_suspect else SLICE)
        if step.state is S.LOCAL_WAIT:
            assert facts.is_held
            assert step.seconds <= SLICE
        if facts.is_victim:
            assert step.state in FINAL | {S.VICTIM}, "a victim does not wait"


def test_every_waiter_asks_at_every_second_step():
    """Unless another waiter of this process goes first: that one asks, and wakes it."""
    for state, facts in itertools.product(STATES, all_facts()):
        first = next_step(state, facts, NOW, DEFAULT)
        if first.state in FINAL or facts.is_blocked:
            continue
        second = next_step(first.state, facts, NOW, DEFAULT)
        assert first.state in ASKING or second.state in ASKING


def test_refused_connection_leads_to_polls():
    for state, facts in itertools.product(STATES, all_facts()):
        step = next_step(state, facts, NOW, DEFAULT)
        if step.state is S.ON_CONNECTION:
            refused = dataclasses.replace(facts, has_connection=False, is_held=False)
            assert next_step(step.state, refused, NOW, DEFAULT).state is S.POLLED


def test_times_come_from_the_client():
    timing = Timing(slice=1.0, suspect_slice=0.25, blocked_locally=3.0)
    assert next_step(S.REGISTERED, Facts(), NOW, timing).seconds == 1.0
    assert next_step(S.REGISTERED, Facts(is_suspect=True), NOW, timing).seconds == 0.25
    assert next_step(S.REGISTERED, Facts(is_blocked=True, is_first=False), NOW, timing).seconds == 3.0
