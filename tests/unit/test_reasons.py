"""The reason for a wait, its blockers and its expected end, from rows of the test."""

import itertools
import json
import math
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import overviews
from support.overviews import NOW

from sqlsem.insight.chains import WaitGraph, root_blockers
from sqlsem.insight.estimates import Durations, SimulatedQueue, estimates
from sqlsem.insight.overview import Hold, HoldTimes
from sqlsem.insight.reasons import reasons, task_reasons, wait_in_words
from sqlsem.insight.task_estimates import TaskHistory, WorkQueue, kinds_of, task_estimates
from sqlsem.insight.words import clock, span_in_words
from sqlsem.values.locks import Request, Resource


def entry(position, state="waits", access="write", limit=1, weight=1, resource="r", member=None, owner="t", **more):
    member = position if member is None else member
    process = {"member_id": member, "owner": owner, "host": f"h{member}", "pid": member, "program": None}
    known = {"access": access, "limit": limit, "weight": weight, "requested_at": NOW, "seconds": 60.0}
    return overviews.entry(position, state, resource, **{**process, **known, **more})


def overview(entries, *settings, holds=None):
    times = {
        name: HoldTimes(tuple(Hold(held, 0.0, None, None) for held in held)) for name, held in (holds or {}).items()
    }
    return overviews.overview(entries, settings, holds=times)


def setting(cap=None, paused=False, resource="r", **more):
    return Resource(resource, cap, paused, None, 0, 0, paused_at=NOW if paused else None, **more)


def why(entries, *settings, at=None, **more):
    by_position = reasons(overview(entries, *settings, **more))
    return by_position[max(by_position) if at is None else at]


# -- each rule has its words


def test_reason_behind_a_mutex():
    holder = entry(1, "holds", program="load.py", note="orders", seconds=723.0)
    reason = why([holder, entry(2), entry(3)])
    assert (reason.code, reason.behind, reason.waiters, reason.head) == ("limit", (holder,), 1, holder)
    assert reason.words == 'it is behind h1:1 (load.py, "orders"), which has held it for 12m03s; 1 more waits before it'
    assert reason.short == "behind h1:1, 1 before"
    assert json.dumps(reason.as_dict())


def test_line_of_a_wait_names_the_first_blocker():
    holder = entry(1, "holds", program="load.py", note="orders", seconds=723.0)
    waiter = entry(3, seconds=5.0)
    words = wait_in_words(waiter, why([holder, entry(2), waiter]), since=2.0)
    behind = 'behind h1:1 (load.py, "orders"), which has held it for 12m05s'
    assert words == f"waiting for 'r' for 7.0s, {behind}"
    second = wait_in_words(entry(4), why([entry(1, "holds", limit=3, weight=3), entry(4, limit=3)]))
    assert second == "waiting for 'r' for 1m00s, behind h1:1, which has held it for 1m00s"


def test_line_of_a_wait_counts_down_to_the_likely_grant():
    rows = [entry(1, "holds", seconds=0.0), entry(2)]
    reason = why(rows, holds={"r": [60.0] * 20})
    assert reason.enters is not None
    for since in (0.0, 20.0, 1000.0):
        likely = clock(max(reason.enters.likely - since, 0.0))
        assert f", likely granted in {likely}, behind h1:1" in wait_in_words(rows[1], reason, since)


def test_line_of_a_wait_without_blockers():
    words = wait_in_words(entry(1), why([entry(1)], setting(paused=True, paused_by="anna")))
    assert words == "waiting for 'r' for 1m00s: paused by anna"
    assert wait_in_words(entry(1), None, since=1.0) == "waiting for 'r' for 1m01s"


def test_reason_behind_a_full_limit():
    reason = why([entry(n, "holds", limit=3) for n in (1, 2, 3)] + [entry(4, limit=3)])
    assert (reason.code, len(reason.behind)) == ("limit", 3)
    assert reason.words == "the limit of 3 is full: h1:1, h2:2 and h3:3"


def test_reason_behind_a_lower_limit_of_another():
    reason = why([entry(1, "holds", limit=2), entry(2, "holds", limit=2), entry(3, limit=5)])
    assert reason.words.startswith("the limit of 2 is full")


def test_reason_behind_a_cap():
    rows = [entry(1, "holds", limit=3), entry(2, limit=3)]
    reason = why(rows, setting(cap=1, cap_by="anna"))
    assert reason.code == "cap"
    assert reason.words == "the operator's cap of 1 by anna is reached: h1:1, which has held it for 1m00s"
    assert reason.short == "cap 1 by anna"


def test_reason_for_a_weight_above_the_cap():
    reason = why([entry(1, limit=3, weight=3)], setting(cap=2))
    assert (reason.code, reason.behind) == ("cap", ())
    assert "its weight of 3 is above the operator's cap of 2" in reason.words


def test_reasons_for_two_weights_above_the_cap():
    by_position = reasons(overview([entry(1, limit=3, weight=3), entry(2, limit=3, weight=3)], setting(cap=2)))
    assert (by_position[1].code, by_position[1].behind) == ("cap", ())
    assert (by_position[2].code, [cause.position for cause in by_position[2].behind]) == ("limit", [1])
    assert "its weight of 3 is above the operator's cap of 2" in by_position[2].words


def test_reason_on_a_paused_resource():
    reason = why([entry(1, limit=3)], setting(paused=True, paused_by="bob"))
    assert (reason.code, reason.behind, reason.head) == ("paused", (), None)
    assert reason.words.startswith("the resource is paused by bob since 2026-1")
    behind = why([entry(1, "holds"), entry(2)], setting(paused=True))
    assert "; then it is still behind h1:1" in behind.words


def test_reasons_of_readers_and_writers():
    reader, writer = entry(1, "holds", "read"), entry(2)
    by_position = reasons(overview([reader, writer, entry(3, access="read")]))
    assert by_position[2].code == "readers_ahead"
    assert by_position[3].code == "writer_ahead"
    assert by_position[3].behind == (writer,)
    assert by_position[3].head == reader
    assert by_position[3].words == (
        "a writer is ahead: h2:2, which waits itself for 1m00s; in the end for h1:1, which has held it for 1m00s (r)"
    )


def test_reason_behind_a_stage():
    reason = why([entry(n, "holds", "stage:100") for n in (1, 2)] + [entry(3, access="stage:200")])
    assert reason.code == "stage"
    assert reason.short == "stage 100"
    assert reason.words.startswith("all of stage 100 that came before it have to leave")


def test_reason_of_an_upgrade():
    rows = [entry(1, "holds", "upgrade"), entry(2, "holds", "read")]
    by_position = reasons(overview(rows))
    assert set(by_position) == {1}
    assert by_position[1].code == "upgrading"
    assert by_position[1].behind == (rows[1],)
    assert reasons(overview(rows[:1]))[1].words == "it is alone and becomes the writer in a moment"


def test_reason_behind_an_own_row():
    reason = why([entry(1, "holds", member=7), entry(2, member=7)])
    assert reason.code == "own_earlier"
    assert reason.words.startswith("it waits for its own earlier row at 1")
    # With a limit, other holders may release first.
    other = why([entry(1, "holds", limit=2, member=7), entry(2, "holds", limit=2), entry(3, limit=2, member=7)])
    assert other.code == "limit"


def test_reason_of_a_waiter_that_may_enter():
    assert why([entry(1)]).code == "turn_now"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"state": "dead"}, "which is dead; the next waiter that checks removes it"),
        ({"state": "revoked"}, "and has been asked to stop"),
        ({"state": "holds", "missing_for": 2.0}, "and cannot be found for 2.0s of its grace of 5.0s"),
    ],
)
def test_reason_behind_a_holder_in_trouble(more, words):
    assert words in why([replace(entry(1, "holds"), **more), entry(2)]).words


def test_reason_with_a_single_holder():
    rows = [entry(1, "holds"), entry(2), entry(3)]
    assert set(reasons(overview(rows), only=3)) == {3}
    assert reasons(overview(rows), only=3)[3] == reasons(overview(rows))[3]
    assert reasons(overview(rows), only=1) == {}


# -- what holds for any queue

asked = st.builds(
    lambda access, limit, weight: ("write", limit, min(weight, limit)) if access == "limit" else (access, 1, 1),
    st.sampled_from(["limit", "limit", "write", "read", "stage:1", "stage:2"]),
    st.integers(1, 4),
    st.integers(1, 3),
)


@st.composite
def queues(draw):
    """Draw rows that come and go under the rule; some grantable rows have not polled yet."""
    rows, caps, paused = [], {}, set()
    for position in range(1, draw(st.integers(1, 14)) + 1):
        resource = draw(st.sampled_from("ab"))
        access, limit, weight = draw(asked)
        rows.append(
            entry(position, "waits", access, limit, weight, resource, member=draw(st.integers(1, 4)), owner="m")
        )
    for resource in "ab":
        if draw(st.booleans()):
            caps[resource] = draw(st.integers(1, 3))
        if draw(st.integers(0, 4)) == 0:
            paused.add(resource)
    # First without cap and pause, as they come later than some.
    for leave in draw(st.lists(st.integers(0, 20), max_size=4)):
        rows = [
            replace(row, state="holds", granted_at=NOW)
            if request(row).fits([request(other) for other in ahead(rows, row)], None) and row.position % 5
            else row
            for row in rows
        ]
        if rows and rows[leave % len(rows)].state == "holds":
            del rows[leave % len(rows)]
    settings = [setting(caps.get(name), name in paused, name) for name in "ab"]
    return rows, settings


def request(row):
    return Request(row.resource, row.access, row.limit, row.weight)


def ahead(rows, row):
    return [other for other in rows if other.resource == row.resource and other.position < row.position]


@given(queues())
def test_every_reason_follows_the_rule(made):
    rows, set_ = made
    by_position = reasons(overview(rows, *set_))
    assert set(by_position) == {row.position for row in rows if row.state == "waits"}, "and no other row has a reason"
    for row in rows:
        if row.state != "waits":
            continue
        its, reason = set_["ab".index(row.resource)], by_position[row.position]
        before = ahead(rows, row)
        assert (reason.code == "paused") == its.paused
        if not its.paused:
            fits = request(row).fits(map(request, before), its.cap)
            assert (reason.code == "turn_now") == fits
            assert (reason.code == "cap") == (not fits and request(row).fits(map(request, before), None))
        if reason.behind:
            assert set(reason.behind) <= set(before)
            assert not request(row).fits(map(request, reason.behind), its.cap)
            if reason.code != "own_earlier" and request(row).fits([], its.cap):
                assert request(row).fits(map(request, reason.behind[:-1]), its.cap), "and no more than are needed"
        elif reason.code not in ("paused", "turn_now"):
            assert not request(row).fits([], its.cap), "no other row blocks it"
        assert reason.words
        assert reason.short


@given(queues())
def test_chains_end_at_a_root_blocker(made):
    rows, set_ = made
    waits = WaitGraph(overview(rows, *set_))
    parties = {(row.member_id, row.owner) for row in rows if row.state == "waits"}
    for position in waits.blocked:
        chain = waits.chain(position)
        assert waits.head(position) == chain.head
        for link, behind in chain.links:
            assert behind in ahead(rows, link)
        for (_, behind), (following, _) in itertools.pairwise(chain.links):
            assert (behind.member_id, behind.owner) == (following.member_id, following.owner) or behind == following
        if chain.head is not None:
            assert (chain.head.member_id, chain.head.owner) not in parties
    blockers = root_blockers(overview(rows, *set_))
    assert sum(blocker.waiters for blocker in blockers) == sum(
        waits.head(position) is not None for position in waits.blocked
    )
    assert [blocker.waiting_seconds for blocker in blockers] == sorted(
        (blocker.waiting_seconds for blocker in blockers), reverse=True
    )


def test_chain_is_followed_across_resources():
    """1 holds a; 2 holds b and waits for a; 3 waits for b, and 4 behind it."""
    rows = [
        entry(1, "holds", resource="a", member=1),
        entry(2, "holds", resource="b", member=2),
        entry(3, resource="a", member=2),
        entry(4, resource="b", member=3),
        entry(5, resource="b", member=4),
    ]
    by_position = reasons(overview(rows))
    assert by_position[4].head == by_position[5].head == by_position[3].head == rows[0]
    chain = WaitGraph(overview(rows)).chain(5)
    assert [(waiter.position, behind.position) for waiter, behind in chain.links] == [(5, 2), (3, 1)]
    (leader,) = root_blockers(overview(rows))
    assert (leader.entry, leader.waiters, leader.waiting_seconds) == (rows[0], 3, 180.0)
    assert json.dumps(leader.as_dict())
    assert "; in the end for h1:1, which has held it for 1m00s (a)" in by_position[5].words


def test_cycle_has_no_root_blocker():
    rows = [
        entry(1, "holds", resource="a", member=1),
        entry(2, "holds", resource="b", member=2),
        entry(3, resource="a", member=2),
        entry(4, resource="b", member=1),
    ]
    waits = WaitGraph(overview(rows))
    assert waits.chain(4).deadlock
    assert waits.head(4) is None
    assert root_blockers(overview(rows)) == []
    assert set(reasons(overview(rows))) == {3, 4}


def test_reason_names_the_holder_that_can_leave():
    rows = [
        entry(1, "holds", limit=2, member=1),
        entry(2, "holds", limit=2, member=2),
        entry(3, limit=2, member=3),
        entry(4, "holds", resource="s", member=4),
        entry(5, resource="s", member=1),
    ]
    assert reasons(overview(rows))[3].head == rows[1]


def test_bare_row_hides_no_other_holder():
    rows = [entry(1, "holds"), entry(2, limit="three", weight="two"), entry(3)]
    assert set(reasons(overview(rows))) == {2, 3}


def test_reasons_of_a_long_queue_are_counted():
    """Each of a thousand waiters behind one another has a reason, in time that grows with their number."""
    rows = [entry(1, "holds")] + [entry(n) for n in range(2, 1002)]
    by_position = reasons(overview(rows, holds={"r": [10.0] * 20}))
    assert by_position[1001].waiters == 999
    assert by_position[1001].head == rows[0]


# -- estimates


def test_estimate_of_a_regular_mutex():
    by_position = estimates(overview([entry(1, "holds", seconds=40.0), entry(2), entry(3)], holds={"r": [100.0] * 50}))
    assert 50 < by_position[2].low <= by_position[2].likely <= by_position[2].high < 70
    assert 150 < by_position[3].likely < 170
    assert by_position[2].words == "usually about 100 s, in about 01:00"


def test_estimates_behind_a_limit():
    rows = [entry(1, "holds", limit=2, seconds=90.0), entry(2, "holds", limit=2, seconds=10.0)]
    by_position = estimates(overview([*rows, *(entry(n, limit=2) for n in (3, 4, 5))], holds={"r": [100.0] * 50}))
    assert [round(by_position[n].likely, -1) for n in (3, 4, 5)] == [10, 90, 110]


def test_estimates_of_readers_ignore_readers():
    rows = [entry(1, "holds", seconds=90.0), entry(2, access="read"), entry(3, access="read"), entry(4)]
    by_position = estimates(overview(rows, holds={"r": [100.0] * 50}))
    assert round(by_position[2].likely, -1) == round(by_position[3].likely, -1) == 10
    assert round(by_position[4].likely, -1) == 110


def test_unknown_estimates():
    rows = [entry(1, "holds"), entry(2)]
    assert estimates(overview(rows)) == {}
    assert estimates(overview(rows, holds={"r": [1.0] * 4})) == {}, "too few"
    assert estimates(overview(rows, setting(paused=True), holds={"r": [1.0] * 50})) == {}
    heavy = [entry(1, limit=3, weight=3), entry(2, limit=3)]
    assert estimates(overview(heavy, setting(cap=2), holds={"r": [1.0] * 50})) == {}


def test_estimate_of_an_overlong_hold():
    by_position = estimates(overview([entry(1, "holds", seconds=1000.0), entry(2)], holds={"r": [100.0] * 50}))
    assert 0 < by_position[2].low < by_position[2].likely < by_position[2].high
    assert 100 < by_position[2].likely < 1000


def test_missing_holder_is_gone_after_its_grace():
    rows = [replace(entry(1, "holds", seconds=1.0), missing_for=3.0), entry(2)]
    assert estimates(overview(rows, holds={"r": [100.0] * 50}))[2].high == pytest.approx(2.0)
    rows[0] = replace(rows[0], state="dead")
    assert estimates(overview(rows, holds={"r": [100.0] * 50}))[2].high == 0


def test_estimate_prefers_holds_with_the_same_note():
    holds = [Hold(10.0, 0.0, f"quick {n}", None) for n in range(20)] + [
        Hold(500.0, 0.0, "slow", None) for _ in range(20)
    ]
    rows = [entry(1, "holds", note="quick 99", seconds=0.0), entry(2)]
    snapshot = replace(overview(rows), holds={"r": HoldTimes(tuple(holds))})
    assert estimates(snapshot)[2].high < 20
    other = replace(overview([replace(rows[0], note="slow"), rows[1]]), holds=snapshot.holds)
    assert estimates(other)[2].likely > 400


def test_reasons_are_deterministic():
    snapshot = overview([entry(1, "holds"), entry(2), entry(3)], holds={"r": [float(n) for n in range(50, 150)]})
    assert estimates(snapshot) == estimates(snapshot)
    assert reasons(snapshot)[3].enters == estimates(snapshot)[3]
    assert "such locks usually take" in reasons(snapshot)[3].words


@given(st.lists(st.tuples(st.floats(0, 100), asked), max_size=12), asked, st.none() | st.integers(1, 4))
def test_simulated_queue_follows_the_rule(rows, its, cap):
    """The request is granted at the first moment at which it fits beside the remaining rows."""
    simulation = SimulatedQueue(0.0)
    for leaves, (access, limit, weight) in rows:
        simulation.add(leaves, access, limit, weight)
    ask = Request("r", *its)
    moments = sorted({0.0, *(leaves for leaves, _ in rows)})
    right = next(
        (at for at in moments if ask.fits([Request("r", *words) for leaves, words in rows if leaves > at], cap)),
        math.inf,
    )
    assert simulation.granted_at(*its, cap) == right


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 1e6), st.lists(st.floats(0, 0.999), min_size=2)
)
def test_durations_grow_with_their_share(held, already, shares):
    durations = Durations(held)
    seconds = [durations.at(share, already) for share in sorted(shares)]
    assert all(duration >= -1e-6 for duration in seconds)
    assert all(after >= before - 1e-6 for before, after in itertools.pairwise(seconds))


# -- tasks


def task(task_id, order=0, status="pending", queue="q", **more):
    known = {"kind": "json", "body": "1", "attempt": 0, "max_attempts": 3, "claimed_at": None}
    return overviews.task(task_id, status, order=order, queue=queue, **{**known, **more})


def test_reasons_of_tasks():
    failed, running = task(1, 1, "failed"), task(5, 1, "running", "other", host="h", pid=7, seconds=61.0)
    later = task(8, 3, "pending", "third", ready_at=NOW + timedelta(seconds=90), failures=1, attempt=1)
    tasks = [failed, task(2, 1), task(3, 2), running, task(6, 2, queue="other"), task(7, 3, queue="other"), later]
    by_task = task_reasons(tasks, NOW)
    assert set(by_task) == {2, 3, 6, 7, 8}
    assert (by_task[2].code, by_task[3].code) == ("turn_now", "order_open")
    assert by_task[3].words == "order 1 is open because task 1 failed; retry or cancel it"
    assert by_task[3].behind == (failed,)
    assert by_task[6].words == "order 1 is open: task 5, which h:7 has run for 1m01s"
    assert by_task[7].behind[0].task_id == 6
    assert (by_task[8].code, by_task[8].words, by_task[8].ready_in) == (
        "not_ready",
        "attempt 2 of 3 is due in 01:30",
        90,
    )
    assert json.dumps([reason.as_dict() for reason in by_task.values()])


def test_failed_task_with_continue_blocks_no_order():
    by_task = task_reasons([task(1, 1, "failed", on_failure="continue"), task(2, 2), task(3, 2)], NOW)
    assert by_task[2].code == by_task[3].code == "turn_now"
    assert by_task[3].words == "the next free worker takes it after 1 before it"


# -- when tasks will be started


def at(seconds):
    return NOW + timedelta(seconds=seconds)


def ended(number, seconds, ended_at=-1000.0, status="finished", worker="w", **more):
    times = {"claimed_at": at(ended_at - seconds), "ended_at": at(ended_at), "seconds": seconds}
    return task(number, status=status, host="h", pid=1, owner=worker, **{**times, **more})


def night(count=20, seconds=100.0, first=1000, **more):
    """Tasks that have ended long ago, one after another."""
    return [ended(first + n, seconds, -5000.0 - n * 2 * seconds, **more) for n in range(count)]


def runs(number, seconds, worker="w", **more):
    return task(
        number, status="running", host="h", pid=1, owner=worker, claimed_at=at(-seconds), seconds=seconds, **more
    )


def starts(*tasks):
    return {number: round(estimate.likely, -1) for number, estimate in task_estimates(tasks, NOW).items()}


def test_tasks_behind_running_tasks():
    assert starts(*night(), runs(1, 40.0), task(2), task(3)) == {2: 60, 3: 160}
    assert starts(*night(), runs(1, 40.0), runs(2, 10.0, "other"), task(3), task(4), task(5)) == {3: 60, 4: 90, 5: 160}


def test_tasks_wait_for_all_of_a_lower_order():
    running = [runs(1, 40.0), runs(2, 10.0, "other")]
    assert starts(*night(), *running, task(3, 1), task(4, 1), task(5, 2)) == {3: 90, 4: 90, 5: 190}


def test_reason_of_a_task_due_later():
    late = task(2, ready_at=at(300))
    assert starts(*night(), runs(1, 40.0), late, task(3)) == {2: 300, 3: 60}
    # An idle worker starts it at once.
    (estimate,) = task_estimates([*night(), ended(99, 10.0, -30.0), late], NOW).values()
    assert (estimate.low, estimate.likely, estimate.high) == (300, 300, 300)


def test_unknown_estimates_of_tasks():
    assert starts(*night(4), runs(1, 40.0), task(2)) == {}, "too few"
    assert starts(*night(), task(2)) == {}, "no worker runs it"
    assert starts(*night(), ended(99, 10.0, -30.0), task(2, ready_at=at(-10))) == {}, "the worker has ended"
    assert starts(*night(), ended(99, 10.0, -70.0), task(2, ready_at=at(300))) == {}, "long ago"
    held_up = [task(1, 1, "failed"), task(2, 1), task(3, 2), runs(4, 40.0)]
    assert set(starts(*night(), *held_up)) == {2}, "the time of a retry is unknown"
    held_up[0] = replace(held_up[0], on_failure="continue")
    assert set(starts(*night(), *held_up)) == {2, 3}


def test_task_of_a_dead_worker_comes_first():
    assert starts(*night(), runs(2, 40.0), task(1, status="lost"), task(3)) == {3: 160}


def test_estimate_ignores_other_queues():
    assert starts(*night(queue="other"), runs(1, 40.0), task(2)) == {}


def test_estimate_uses_tasks_of_the_same_kind():
    quick = night(10, 10.0, 100, worker="other", kind="shell", body='["./quick.sh", "--day", "3"]')
    slow = night(10, 500.0, 200, kind="shell", body='["./slow.sh", "--day", "3"]')
    running = runs(1, 0.0, kind="shell", body='["./quick.sh", "--day", "17"]')
    assert task_estimates([*quick, *slow, running, task(2)], NOW)[2].high < 20
    running = replace(running, body='["./slow.sh", "--all"]')
    assert task_estimates([*quick, *slow, running, task(2)], NOW)[2].low > 400
    running = replace(running, note="quick")
    assert task_estimates([*quick, *slow, running, task(2)], NOW)[2].low > 400, "no earlier hold has this note"
    noted = [replace(past, note="quick") for past in quick]
    assert task_estimates([*noted, *slow, running, task(2)], NOW)[2].high < 20


def test_the_closest_kind_comes_first():
    kinds = list(kinds_of(task(1, kind="call", body='{"function": "etl:load", "args": [7]}', note="day 7")))
    assert [kind for _, kind in kinds] == [
        "day 7",
        "day #",
        '{"function": "etl:load", "args": [7]}',
        '{"function": "etl:load", "args": [#]}',
        '{"function": "etl:load",',
        '{"function":',
    ]


def test_tasks_of_a_group_share_its_time():
    """Return runs that a worker claimed together and ended together."""
    group = [ended(100 + n, 10.0, -500.0) for n in range(10)]
    group += [ended(200 + n, 20.0, -470.0 + n * 0.001) for n in range(10)]
    estimate = task_estimates([*group, runs(1, 0.0), runs(2, 0.0), task(3)], NOW)[3]
    assert 1.0 <= estimate.held_low <= estimate.held_high <= 2.01
    assert 1.5 < estimate.likely < 5, "two of a group are run one after the other"


def test_reasons_of_tasks_are_worded():
    tasks = [*night(), runs(1, 40.0), task(2), task(3, 7, ready_at=at(10))]
    by_task = task_reasons(tasks, NOW)
    usual = "such tasks usually take about 100 s: it starts in about 01:"
    assert by_task[2].words.startswith(f"the next free worker takes it; {usual}")
    assert by_task[2].short == f"~{clock(by_task[2].starts.likely)}"
    assert by_task[3].short == f"after order 0, ~{clock(by_task[3].starts.likely)}"
    assert by_task[2].as_dict()["starts"]["count"] == 20
    assert json.dumps([reason.as_dict() for reason in by_task.values()])


lasting = st.integers(1, 9)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(-9, 9), lasting), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(0, 2), lasting), min_size=1, max_size=3),
)
def test_simulated_queue_matches_workers(pending, running):
    """Compared with a simulation of every second."""
    rows = [runs(100 + n, 5.0, f"w{n}", order=order) for n, (order, _) in enumerate(running)]
    rows += [task(n, order, ready_at=at(due)) for n, (order, due, _) in enumerate(pending)]
    lasts = {n: float(seconds) for n, (_, _, seconds) in enumerate(pending)}
    lasts |= {100 + n: float(left) for n, (_, left) in enumerate(running)}
    rows.sort(key=lambda row: (row.order, row.task_id))
    played = dict(WorkQueue(rows, TaskHistory([]), NOW).simulate(lasts))
    ends = {100 + n: left for n, (_, left) in enumerate(running)}
    expected = {}
    for now in range(120):  # twelve of nine seconds, and when they are due
        busy = sum(end > now for end in ends.values())
        for row in rows:
            is_open = [other for other in rows if ends.get(other.task_id, math.inf) > now]
            may = row.order == min((other.order for other in is_open), default=None)
            due = row.status == "pending" and (row.ready_at - NOW).total_seconds() <= now
            if row.task_id not in ends and due and may and busy < len(running):
                expected[row.task_id], ends[row.task_id] = now, now + lasts[row.task_id]
                busy += 1
    assert played == expected


# -- words


def test_spans_and_clock_times_are_worded():
    assert span_in_words(660, 840) == "11\N{EN DASH}14 min"
    assert span_in_words(0.2, 3) == "0.2\N{EN DASH}3 s"
    assert span_in_words(100, 100) == "about 100 s"
    assert span_in_words(3600, 4 * 3600) == "1\N{EN DASH}4 h"
    assert span_in_words(86400, 3 * 86400) == "1\N{EN DASH}3 d"
    assert (clock(171), clock(3771), clock(0)) == ("02:51", "1:02:51", "00:00")
