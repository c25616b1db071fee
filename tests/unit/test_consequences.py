"""The effects of an action, predicted before it is done, and compared with the rule."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.overviews import NOW, entry, overview, resource

from sqlsem.insight.consequences import Action, consequence, grantable
from sqlsem.insight.overview import Overview
from sqlsem.values.locks import Request
from sqlsem.values.tasks import QueueCounts


def told(snapshot: Overview, kind: str, **others: object) -> list[str]:
    result = consequence(snapshot, Action(kind, **others))
    assert result.possible
    return [result.question, *result.lines]


def test_resume_grants_as_many_as_fit_and_names_the_next():
    entries = [entry(3, "holds"), *(entry(position) for position in (4, 5, 6))]
    snapshot = overview(entries, [resource(paused=True)])
    assert told(snapshot, "resume", resource="etl") == ["Resume 'etl'?", "Grants 4 (db1:804) and 5 (db1:805), then 6."]
    assert consequence(snapshot, Action("resume", resource="etl")).admitted == (4, 5)


def test_raised_cap_grants_held_back_waiters():
    entries = [entry(3, "holds", limit=9), *(entry(position, limit=9) for position in (4, 5, 6, 7))]
    snapshot = overview(entries, [resource(cap=1)])
    assert told(snapshot, "cap", resource="etl", cap=3) == [
        "Limit 'etl' to 3 (now 1)?",
        "Grants 4 (db1:804) and 5 (db1:805), then 6.",
    ]
    assert told(snapshot, "uncap", resource="etl") == [
        "Remove the limit of 'etl' (now 1)?",
        "Grants 4 (db1:804), 5 (db1:805), 6 (db1:806) and 1 more; no request waits behind.",
    ]


def test_cap_below_holders_and_below_a_weight():
    entries = [*(entry(position, "holds", limit=9) for position in (1, 2, 3)), entry(4, limit=9, weight=2), entry(5)]
    snapshot = overview(entries)
    lines = told(snapshot, "cap", resource="etl", cap=1)
    assert lines[1] == "The 3 holders stay. No request is granted until a weight of 2 and more has left."
    assert lines[2].startswith("4 asks for a weight of 2: under this cap it can never be granted")
    # Without the cap it would have been granted at this instant.
    assert lines[3] == "Blocks 4 (db1:804)."
    assert lines[4] == "Grants nothing at once; next is 4 (db1:804)."


def test_cap_on_a_paused_resource_grants_nothing():
    snapshot = overview([entry(4)], [resource(paused=True, cap=1)])
    assert told(snapshot, "uncap", resource="etl")[1:] == ["It is paused: nothing is granted until it is resumed."]


def test_pause_holds_back_the_next_waiter():
    snapshot = overview([entry(1, "holds"), entry(2), entry(3, limit=1)])
    assert told(snapshot, "pause", resource="etl") == [
        "Pause 'etl'?",
        "The holder stays.",
        "No request is granted until it is resumed; 2 wait.",
        "Blocks 2 (db1:802).",
    ]


def test_revoke_of_a_holder_names_the_next_waiter():
    entries = [entry(3, "holds", limit=1, note="orders"), entry(4, limit=1), entry(5, limit=1)]
    assert told(overview(entries), "revoke", position=3) == [
        "Revoke 3 of 'etl' (db1:803)?",
        "It has held for 16m10s, for 'orders'.",
        "Its holder is told, and has its grace (5.0s) to stop; then it is removed.",
        "Grants 4 (db1:804), then 5.",
    ]
    assert "may be granted before its program knows" in told(overview(entries), "revoke_now", position=3)[2]


@pytest.mark.parametrize(
    ("state", "others", "words"),
    [
        ("waits", {}, "It leaves the queue; its program is told that it was revoked."),
        ("dead", {}, "Its process is dead: the row is removed."),
        ("revoked", {}, "Its holder has been told already, and is removed when its grace is over."),
        ("holds", {"member_id": None}, "No living process owns the row"),
        ("holds", {"grace": None}, "Its holder is told, and has its grace to stop"),
    ],
)
def test_consequences_of_a_revoke(state, others, words):
    assert told(overview([entry(3, state, **others)]), "revoke", position=3)[2].startswith(words)


def test_revoked_waiting_writer_grants_readers_behind():
    entries = [
        entry(1, "holds", access="read", limit=None),
        entry(2, limit=1),
        *(entry(position, access="read", limit=None) for position in (3, 4)),
    ]
    assert told(overview(entries), "revoke", position=2)[-1] == (
        "Grants 3 (db1:803) and 4 (db1:804); no request waits behind."
    )


def test_revoke_on_a_paused_resource_grants_nothing():
    snapshot = overview([entry(1, "holds", limit=1), entry(2, limit=1)], [resource(paused=True)])
    assert told(snapshot, "revoke", position=1)[-1] == "The resource is paused: this grants nothing."


def test_retry_of_a_blocking_task_names_its_queue():
    snapshot = overview(queues=[QueueCounts("nightly", 12, 0, 3, 1, 0, 0, 60.0, 1.0, 17)])
    assert told(snapshot, "retry", task_id=17) == [
        "Retry task 17?",
        "It is pending again, and the next free worker takes it.",
        "It has failed, and blocks later orders of 'nightly' (12 pending tasks there).",
        "If it succeeds, they start; if it fails again, they stay blocked.",
    ]


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (Action("pause", resource="p"), "'p' is paused already"),
        (Action("resume", resource="etl"), "'etl' is not paused"),
        (Action("uncap", resource="etl"), "'etl' has no operator's limit"),
        (Action("cap", resource="p", cap=2), "'p' has the limit 2 already"),
        (Action("cap", resource="gone", cap=2), "'gone' is not there any more"),
        (Action("revoke", position=99), "Position 99 is gone already"),
    ],
)
def test_impossible_actions_are_reported(action, why):
    snapshot = overview([entry(4)], [resource("p", paused=True, cap=2)])
    result = consequence(snapshot, action)
    assert (result.possible, result.question) == (False, why)


def test_consequences_escape_foreign_names():
    snapshot = overview([entry(1, "holds", "a\u202eb", host="\x1b[2J", note="\x07")], [])
    for action in (Action("revoke", position=1), Action("pause", resource="a\u202eb")):
        result = consequence(snapshot, action)
        assert all(text.isprintable() for text in (result.question, *result.lines, action.command)), result


def test_each_action_names_its_command():
    assert Action("pause", resource="a b").command == "sqlsem pause 'a b'"
    assert Action("cap", resource="etl", cap=2).command == "sqlsem set etl --limit 2"
    assert Action("uncap", resource="etl").command == "sqlsem set etl --no-limit"
    assert Action("revoke_now", position=4).command == "sqlsem revoke 4 --force"
    assert Action("retry", task_id=17).command == "sqlsem tasks retry 17"


requests = st.tuples(
    st.sampled_from(["write", "write", "read", "stage:1"]),
    st.sampled_from([None, 1, 2, 3, 5]),
    st.integers(1, 3),
    st.sampled_from(["waits", "waits", "holds", "dead"]),
)


@given(st.lists(requests, max_size=12), st.sampled_from([None, 1, 2, 4]))
def test_predicted_grants_match_the_rule(rows, cap):
    """The rule of the model, applied to one row after the other."""
    numbers = itertools.count(1)
    queue = [
        entry(next(numbers), state, access=access, limit=None if limit is None else max(limit, weight), weight=weight)
        for access, limit, weight, state in rows
    ]
    living = [row for row in queue if row.state != "dead"]
    expected = [
        row.position
        for at, row in enumerate(living)
        if row.state == "waits" and Request("etl", row.access, row.limit, row.weight).fits(living[:at], cap)
    ]
    assert [row.position for row in grantable(queue, cap, False)] == expected
    assert grantable(queue, cap, True) == []


def test_consequence_reads_a_long_queue_once():
    queue = [entry(position, access="read", limit=None, requested_at=NOW) for position in range(1, 20_001)]
    assert len(grantable(queue, None, False)) == 20_000
