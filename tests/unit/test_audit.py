"""The audit finds every fault of a history, and none in a history that the rule made."""

import random
import sys
import tracemalloc
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import nights, processor_seconds
from support.nights import entry, past

from sqlsem.insight import audit as module
from sqlsem.insight.rule import Queue
from sqlsem.values.locks import Operation, Request, Resource

#: Rows that have ended, and that are there; all of them are of one resource.
row, there = partial(past, "a"), partial(entry, "a")


def found(rows, entries=(), rulings=(), audit=module.audit):
    """Return the findings in these rows: ``"limit 2"`` is one about the limit, at position 2."""
    findings = audit(nights.newest_first(rows), entries, rulings).findings
    assert all(finding.resource == "a" for finding in findings)
    return [f"{finding.kind} {finding.position}" for finding in findings]


@settings(max_examples=80)
@given(st.lists(nights.asks, max_size=14))
def test_audit_accepts_a_history_of_the_rule(some):
    rows = nights.lived(some)
    result = module.audit(rows)
    assert result.ok, result.findings
    assert (result.finished, result.grants) == (len(rows), sum(row.granted_at is not None for row in rows))


@settings(max_examples=150)
@given(st.lists(nights.asks, min_size=2, max_size=12), st.data())
def test_audit_finds_broken_histories(some, data):
    """Change some rows: their times, or other values. A plain comparison of all pairs gives the expected findings."""
    rows = nights.lived(some)
    for _ in range(data.draw(st.integers(1, 3))):
        number = data.draw(st.integers(0, len(rows) - 1))
        row = rows[number]
        requested = nights.seconds(row.requested_at)
        kind = data.draw(st.sampled_from(nights.KINDS))
        times = sorted(data.draw(st.lists(st.integers(0, 15), min_size=2, max_size=2)))
        changed = [
            nights.moved(row, granted_at=requested + times[0], ended_at=requested + times[1]),
            replace(row, access=kind[0], limit=kind[1], weight=kind[2]),
            replace(row, resource="a"),
        ]
        rows[number] = data.draw(st.sampled_from(changed))
    findings = module.audit(nights.newest_first(rows)).findings
    assert {finding.position for finding in findings} == nights.broken(rows)
    assert {finding.kind for finding in findings} <= {"limit", "order"}


#: Histories by description, each with its findings, and the rows that are there.
CASES = {
    "one after the other": ([row(1, 0, 0, 5), row(2, 1, 5, 6)], []),
    "two in a mutex": ([row(1, 0, 0, 5), row(2, 1, 4, 6)], ["limit 2"]),
    "two in a mutex at once": ([row(1, 0, 0, 5), row(2, 0, 0, 6)], ["limit 2"]),
    "two in a mutex, of which one is there": ([row(2, 1, 4, 6)], ["limit 2"], [there(1, 0, 0, 9)]),
    "beside who holds now": ([row(1, 0, 0, 5)], ["limit 2"], [there(2, 1, 4, 9), there(3, 2, None, 9)]),
    "past who waits now": ([row(2, 1, 4, 6)], ["order 2"], [there(1, 0, None, 9)]),
    "two resources": ([row(1, 0, 0, 5), past("b", 2, 1, 1, 6)], []),
    "four in a limit of three": ([row(n, n, n, 9 + n, limit=3) for n in range(1, 5)], ["limit 4"]),
    "the lowest limit counts": ([row(1, 0, 0, 9, limit=1), row(2, 1, 1, 9, limit=5)], ["limit 2"]),
    "a weight too much": ([row(1, 0, 0, 9, limit=3, weight=2), row(2, 1, 1, 9, limit=3, weight=2)], ["limit 2"]),
    "readers together": ([row(1, 0, 0, 9, "read"), row(2, 1, 1, 9, "read")], []),
    "a writer beside readers": ([row(1, 0, 0, 9, "read"), row(2, 1, 1, 9)], ["limit 2"]),
    "a reader past a writer that waits": (
        [row(1, 0, 0, 9, "read"), row(2, 1, 9, 12), row(3, 2, 3, 5, "read")],
        ["order 3"],
    ),
    "stages mixed": ([row(1, 0, 0, 9, "stage:1"), row(2, 1, 8, 9, "stage:2")], ["limit 2"]),
    "overtaken": ([row(1, 0, 5, 6), row(2, 1, 2, 4)], ["order 2"]),
    "past who gave up later": ([row(1, 0, None, 6, outcome="timeout"), row(2, 1, 5, 8)], ["order 2"]),
    "after who gave up": ([row(1, 0, None, 5, outcome="timeout"), row(2, 1, 5, 8)], []),
    "overtaken by a light one": (
        [row(1, 0, 0, 9, limit=3), row(2, 1, 9, 11, limit=3, weight=3), row(3, 2, 2, 8, limit=3)],
        ["order 3"],
    ),
    "the dead are in the way until they are removed": (
        [replace(row(1, 0, 0, 9, outcome="reaped"), held=3.0), row(2, 1, 4, 8)],
        ["limit 2"],
    ),
    "an upgrade": ([row(1, 0, 0, 5, "read", None, outcome="upgraded"), row(1, 0, 5, 8), row(2, 1, 8, 9, "read")], []),
    "a reader that leaves, or is taken away, while it upgrades": (
        [row(1, 0, 0, 8, "upgrade", outcome="revoked"), row(2, 1, 1, 5, "read"), row(3, 2, 8, 9, outcome="released")],
        [],
    ),
    "an upgrade beside a reader behind": (
        [*(row(1, 0, 0, 5, "read", None, outcome="upgraded"), row(1, 0, 5, 8)), row(2, 1, 1, 6, "read")],
        ["alone 1"],
    ),
    "an upgrade beside a reader ahead": (
        [*(row(2, 1, 1, 5, "read", None, outcome="upgraded"), row(2, 1, 5, 8)), row(1, 0, 0, 6, "read")],
        ["limit 2", "alone 2"],
    ),
    "an upgrade past a reader ahead that waits": (
        [
            *(row(2, 1, 1, 5, "read", None, outcome="upgraded"), row(2, 1, 5, 8)),
            row(1, 0, None, 9, "read", outcome="timeout"),
        ],
        ["order 2", "alone 2"],
    ),
    "who does not say its limit beside one that will upgrade": (
        [*(row(1, 0, 0, 5, "read", None, outcome="upgraded"), row(1, 0, 5, 8)), row(2, 1, 3, 4, limit=9)],
        ["limit 2"],
    ),
    "a reader beside an upgraded one that is there": (
        [row(1, 0, 0, 5, "read", None, outcome="upgraded"), row(2, 1, 6, 7, "read")],
        ["limit 2"],
        [there(1, 0, 5, 9)],
    ),
    "a downgrade lets readers in": (
        [*(row(1, 0, 0, 5, "write", None, outcome="downgraded"), row(1, 0, 5, 9, "read")), row(2, 1, 5, 7, "read")],
        [],
    ),
    "a reader before the downgrade": (
        [*(row(1, 0, 0, 5, "write", None, outcome="downgraded"), row(1, 0, 5, 9, "read")), row(2, 1, 4, 7, "read")],
        ["limit 2"],
    ),
    "it upgrades now, nobody knows since when": ([row(2, 1, 1, 5, "read")], [], [there(1, 0, 0, 9, access="upgrade")]),
    "a number given twice": ([row(1, 0, 0, 9, limit=5), row(1, 1, 1, 8, limit=5)], ["number 1"]),
    "numbers not in the order of asking": ([row(1, 4, 4, 5, limit=5), row(2, 0, 0, 3, limit=5)], ["number 2"]),
    "ended before it began": ([row(1, 5, 5, 3)], ["clock 1"]),
    "let in before it asked": ([row(1, 5, 4, 8)], ["clock 1"]),
    "no time at all": ([row(n, 1, 1, 1) for n in range(1, 6)], []),
    "ended as we looked": ([row(1, 0, 0, 5), row(2, 1, 5, 6)], [], [there(1, 0, 0, 4)]),
    "upgraded as we looked": (
        [row(1, 0, 0, 5, "read", None, outcome="upgraded"), row(2, 1, 1, 4, "read")],
        [],
        [there(1, 0, 0, 4, access="read")],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_audit_finds_the_expected_faults(case):
    rows, expected, *entries = case
    assert found(rows, *entries) == expected


def ruled(since, until=None, cap=None):
    return module.Ruling("a", nights.at(since), None if until is None else nights.at(until), cap)


#: It ended before all others: all later grants are known.
LONG_AGO = past("z", 0, -9, -9, -8)


def two(*times):
    """Return two rows with a limit of three, which were requested and granted and ended at these times."""
    return [row(position, *at, limit=3) for position, at in enumerate(times, 1)]


#: Caps and pauses: rows, rulings, the expected findings, and the rows that are there.
RULED = {
    "let in before the cap": (two((0, 0, 99), (1, 1, 99)), [ruled(2, None, 1)], []),
    "let in under the cap": (two((0, 0, 99), (9, 99, 120)), [ruled(2, None, 1)], []),
    "let in against the cap": (two((0, 0, 99), (9, 9, 120)), [ruled(2, None, 1)], ["cap 2"]),
    "one waits ahead": (
        [row(1, 0, None, 99, limit=3, outcome="timeout"), row(2, 9, 9, 120, limit=3)],
        [ruled(2, None, 1)],
        ["cap 2"],
    ),
    "the cap may not have been heard of": (two((0, 0, 99), (6, 6, 120)), [ruled(2, None, 1)], []),
    "a higher cap": (two((0, 0, 99), (9, 9, 120)), [ruled(2, None, 2)], []),
    "lifted": (two((0, 0, 99), (9, 30, 120)), [ruled(2, 30, 1)], []),
    "one left at that time": (two((0, 0, 20), (9, 20, 120)), [ruled(2, None, 1)], []),
    "one left at that time, and the other one at once": (two((0, 0, 20), (9, 20, 20)), [ruled(2, None, 1)], []),
    "let in during a pause": ([row(0, 0, 0, 1), row(1, 0, 9, 20)], [ruled(2, 30)], ["pause 1"]),
    "let in after a pause": ([row(0, 0, 0, 1), row(1, 0, 30, 40)], [ruled(2, 30)], []),
    "another resource": ([past("b", 0, 0, 0, 1), past("b", 1, 0, 9, 20)], [ruled(2, 30)], []),
    "converted during a pause": (
        [
            *(row(0, 0, 0, 1), row(1, 0, 1, 9, "read", None, outcome="upgraded")),
            *(row(1, 0, 9, 12, "write", None, outcome="downgraded"), row(1, 0, 12, 20, "read")),
        ],
        [ruled(2, 30)],
        [],
    ),
    "let in now during a pause": ([row(0, 0, 0, 1)], [ruled(2)], ["pause 1"], [there(1, 0, 9, 20)]),
}


@pytest.mark.parametrize("case", RULED.values(), ids=RULED.keys())
def test_caps_and_pauses(case):
    rows, some, expected, *entries = case
    assert found([*rows, LONG_AGO], *(entries or [()]), some) == expected


def operation(number, action, resource="a", old=None, new=None):
    return Operation(number, nights.at(number), None, None, None, None, action, resource, None, None, None, old, new)


def settings_of(cap=None, paused=False):
    return Resource("a", cap, paused, None, 0, 0)


@pytest.mark.parametrize(
    ("done", "now", "expected"),
    [
        ([], settings_of(cap=2), []),  # since an unrecorded time
        ([operation(5, "cap", new="2")], settings_of(cap=2), [ruled(5, None, 2)]),
        ([operation(5, "cap", new="2")], settings_of(cap=3), []),  # changed by a client that recorded nothing
        ([operation(5, "cap", new="2")], None, []),
        ([operation(5, "cap", new="2"), operation(9, "cap", old="2")], None, [ruled(5, 9, 2)]),
        (
            [operation(5, "cap", new="2"), operation(9, "cap", old="3", new="1")],
            settings_of(cap=1),
            [ruled(9, None, 1)],
        ),
        ([operation(5, "pause"), operation(9, "resume")], None, [ruled(5, 9)]),
        ([operation(5, "pause")], settings_of(paused=True), [ruled(5)]),
        ([operation(5, "pause")], settings_of(), []),
        ([operation(5, "pause")], None, []),
        ([operation(5, "pause"), operation(9, "pause")], settings_of(paused=True), [ruled(9)]),
        ([operation(5, "resume"), operation(6, "reap", resource=None), operation(7, "stale_after", new="9")], None, []),
        (
            [operation(5, "pause"), operation(6, "cap", new="2"), operation(9, "resume")],
            settings_of(cap=2),
            [ruled(5, 9), ruled(6, None, 2)],
        ),
    ],
)
def test_audit_respects_operators_settings(done, now, expected):
    rulings = module.rulings(reversed(done), [now] if now else [])
    assert sorted(rulings, key=lambda ruling: ruling.since) == expected


def test_finding_is_described():
    rows = nights.newest_first([past("a", 1, 0, 0, 5), past("a", 2, 1, None, 6), past("a", 3, 1, 4, 6)])
    result = module.audit(rows)
    (finding,) = result.findings
    assert (finding.at, finding.words) == (nights.at(4), "it was granted beside more than the limit allows: 1")
    assert [row.position for row in finding.rows] == [3, 1]
    assert not result.ok
    assert (result.first_end, result.last_end) == (nights.at(5), nights.at(6))
    assert result.as_dict()["findings"][0]["rows"][1]["position"] == 1


def test_ends_before_the_first_row_are_unknown():
    result = module.audit(nights.newest_first([past("a", 2, 0, 1, 9, limit=2), past("a", 3, 2, 3, 4, limit=2)]))
    assert (result.grants, result.partly) == (2, 2)
    result = module.audit(nights.newest_first([past("a", 1, 0, 0, 1), past("a", 3, 2, 3, 4)]))
    assert (result.grants, result.partly) == (2, 1)


def test_findings_are_counted_beyond_the_kept_ones():
    rows = [past("a", n, 0, 0, 5) for n in range(1, 200)]
    result = module.audit(nights.newest_first(rows), maximum=7)
    assert (result.found, len(result.findings)) == (198, 7)
    assert len(result.findings[0].rows) == 1 + module.MAX_ROWS
    assert result.findings[0].words.endswith("178 more")


def test_audit_of_an_empty_history_is_ok():
    result = module.audit([])
    assert result.ok
    assert (result.finished, result.first_end, result.partly) == (0, None, 0)


def test_history_with_oldest_first_is_refused():
    with pytest.raises(ValueError, match="newest end first"):
        module.audit([past("a", 1, 0, 0, 5), past("a", 2, 1, 5, 6)])


@given(
    st.lists(st.tuples(st.sampled_from(nights.KINDS), st.integers(0, 50)), unique_by=lambda pair: pair[1], max_size=30),
    st.sampled_from(nights.KINDS),
    st.integers(0, 50),
    st.none() | st.integers(1, 4),
)
def test_queue_of_kinds_follows_the_rule(rows, kind, place, cap):
    queue = Queue("a")
    for kind_of_row, position in [*rows, *rows]:
        queue.add(kind_of_row, position)
    for kind_of_row, position in rows:
        queue.remove(kind_of_row, position)
    ahead = [Request("a", *kind_of_row) for kind_of_row, position in rows if position < place]
    assert queue.fits(kind, place, cap) == Request("a", *kind).fits(ahead, cap)
    assert len(queue) == len(rows)


def long_night(number):
    """Yield the same fifty rows at a limit of ten again and again, newest end first, without keeping any."""
    for n in range(number, 0, -1):
        yield past("a", n, n - 50, n, n + 10, limit=10)


def test_audit_memory_does_not_grow_with_the_history():
    tracemalloc.start()
    try:
        assert module.audit(long_night(8_000)).ok
        bytes_of_few = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        result = module.audit(long_night(24_000))
        bytes_of_many = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (result.ok, result.grants) == (True, 24_000)
    assert bytes_of_many < bytes_of_few + 500_000, (bytes_of_few, bytes_of_many)


def test_audit_time_grows_linearly():
    """Many readers and waiters at the same time: all of them are in the queue at once."""

    def crowd(number):
        rng = random.Random(3)
        readers = [past("a", n, 0, 0, rng.randrange(10, 10**6), "read") for n in range(1, number)]
        waiters = [past("b", n, 0, None, rng.randrange(10, 10**6), limit=2) for n in range(1, number)]
        return nights.newest_first([*readers, *waiters])

    def look(rows):
        assert module.audit(rows).ok

    few, many = (partial(look, crowd(number)) for number in (2_000, 20_000))
    assert processor_seconds(many, 2) < 40 * processor_seconds(few, 3)


#: Possible faults of the checker: the cases above must find each of them.
MUTANTS = [
    ("if queue.queue.fits(row.kind, row.position):", "if True:"),
    ("self.ended > time", "self.ended >= time"),
    ("entry.position < row.position and entry.is_there", "entry.position > row.position and entry.is_there"),
    ("(-time, ASKED)", "(-time, GRANTED)"),
    ("GRANTED, ASKED = 0, 1", "GRANTED, ASKED = 1, 0"),
    ("if request.fits([entry.request() for entry in inside], None):", "if True:"),
    ("if request.fits([entry.request() for entry in inside], None):", "if False:"),
    ('if past.outcome == "upgraded":', "if False:"),
    ('if past.outcome == "upgraded":', "if converted:"),
    ('1 if converted and past.outcome != "handed_over" else past.limit', "past.limit"),
    ("queue.take(later)", "pass"),
    ("if later is not None and later.ended is not None and not converted:", "if False:"),
    ("if not queue.queue.fits((WRITE, 1, 1), row.position):", "if False:"),
    ("others = [entry for entry in queue.inside.values() if entry.is_there_after(time)]", "others = []"),
    ("after.position < row.position and after.asked > row.asked", "False"),
    ("row.asked <= begun <= row.ended", "True"),
    ("(granted_access(entry), entry.limit", "(entry.access, entry.limit"),
    ("(granted_access(past), 1 if", "(past.access, 1 if"),
    ("if row.gone:", "if False:"),
    ("self._queue(entry.resource).put(row)", "pass"),
    ("queue.put(row)\n        self._schedule(row)\n\n    def end", "queue.put(row)\n\n    def end"),
    ("if (entry.resource, entry.position) not in ended:", "if True:"),
    ("self._go_back_to(None)", "pass"),
    ("row.granted is not None:\n            self.inside", "row.granted is None:\n            self.inside"),
    ("if ruling.cap is None:\n                return ruling", "if False:\n                return ruling"),
    ("if not queue.queue.fits(row.kind, row.position, ruling.cap):", "if False:"),
    ("if not row.request().fits(ahead, ruling.cap):", "if True:"),
    ("row.ruling is not None", "False"),
    ("granted <= ruling.since + SETTING_DELAY", "granted <= ruling.since"),
    ("granted >= ruling.until", "granted > ruling.until"),
    ("granted <= time]", "granted < time]"),
]


def battery(audit):
    for rows, expected, *entries in CASES.values():
        assert found(rows, *entries, audit=audit) == expected
    for rows, some, expected, *entries in RULED.values():
        assert found([*rows, LONG_AGO], *(entries or [()]), some, audit) == expected
    result = audit(nights.newest_first([past("a", 1, 0, 0, 5), past("a", 2, 0, 0, 6)]))
    assert [row.position for row in result.findings[0].rows] == [2, 1]


@pytest.mark.parametrize("mutant", range(len(MUTANTS)))
def test_fault_in_the_checker_is_detected(mutant):
    text = Path(module.__file__).read_text(encoding="utf-8")
    was, is_ = MUTANTS[mutant]
    assert was in text, "the checker has changed: choose another fault to seed"
    changed = types.ModuleType("sqlsem.insight.mutant")
    sys.modules[changed.__name__] = changed
    try:
        exec(compile(text.replace(was, is_), "mutant", "exec"), changed.__dict__)
        with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
            battery(changed.audit)
    finally:
        del sys.modules[changed.__name__]
