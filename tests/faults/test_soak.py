"""The soak (``python tests/soak``): its checkers find each kind of fault, and a short soak runs on every database."""

import contextlib
import fcntl
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from soak import checks, jobs, night
from soak.checks import Happened
from soak.kernel_locks import KernelLocks, holders
from soak.places import PLACES
from soak.record import Record, class_of, percentile
from support.journals import Journal

NOTHING = Happened()


def stay(position, entered, left, **more):
    words = {"what": "stay", "resource": "r", "access": "write", "limit": 1, "lost": False, "pid": 1}
    return {**words, "position": position, "fence": position, "entered": entered, "left": left, **more}


def hop(number, entered, left, **more):
    return stay(7, entered, left, what="hop", hop=number, **more)


def term(what, fence, at, **more):
    return {"what": what, "resource": "r", "fence": fence, "at": at, "pid": 1, "lost": False, **more}


def attempt(number, entered, left, **more):
    return {"what": "attempt", "task": 1, "attempt": number, "pid": 1, "lost": False} | {
        "entered": entered,
        "left": left,
        **more,
    }


def judge(words, happened=NOTHING):
    return [finding for check in checks.CHECKS for finding in check(words, happened)]


WELL = [
    [stay(1, 0, 1), stay(2, 1, 2), stay(1, 0, 5, resource="s")],
    [stay(1, 0, 5, access="read", limit=None), stay(2, 1, 4, access="read", limit=None)],
    [stay(number, 0, 5, limit=3) for number in (1, 2, 3)],
    [hop(0, 0, 1), hop(1, 1, 2, pid=2), hop(2, 3, 4)],
    [term("started", 1, 0), term("stopped", 1, 1), term("started", 2, 1), term("stopped", 2, 2)],
    [attempt(1, 0, 1), attempt(2, 1, 2)],
]


@pytest.mark.parametrize("words", WELL)
def test_soak_checker_accepts_a_correct_history(words):
    assert judge(words) == []


SEEDED = {
    "two inside": ([stay(1, 0, 2), stay(2, 1, 3)], "entered though"),
    "four in a limit of three": ([stay(number, 0, 5, limit=3) for number in (1, 2, 3, 4)], "4 > 3"),
    "a writer beside a reader": ([stay(1, 0, 5, access="read", limit=None), stay(2, 1, 2)], "entered though"),
    "overtaken": ([stay(1, 3, 4), stay(2, 1, 2)], "entered though"),
    "a number twice": ([stay(1, 0, 1), stay(1, 2, 3)], "assigned twice"),
    "two owners of what travels": ([hop(0, 0, 2), hop(1, 1, 3, pid=2)], "two owners"),
    "another fence on the way": ([hop(0, 0, 1), hop(1, 2, 3, fence=8)], "changed its fence"),
    "a token used twice": ([hop(0, 0, 1), hop(1, 1, 2), hop(1, 3, 4, pid=3)], "adopted twice"),
    "somebody between giver and adopter": (
        [hop(0, 0, 1), stay(8, 2, 3, what="hop", hop=0), hop(1, 4, 5, pid=2)],
        "entered though",
    ),
    "two leaders": (
        [term("started", 1, 0), term("stopped", 1, 2), term("started", 2, 1, pid=2), term("stopped", 2, 3, pid=2)],
        "two led",
    ),
    "a leader beside one who never stopped": (
        [term("started", 1, 0), term("started", 2, 1, pid=2), term("stopped", 2, 3, pid=2)],
        "never ended",
    ),
    "told twice that it leads": (
        [term("started", 1, 0), term("started", 1, 1), term("stopped", 1, 2)],
        "began 2 times",
    ),
    "told twice that it does not": (
        [term("started", 1, 0), term("stopped", 1, 1), term("stopped", 1, 2)],
        "ended 2 times",
    ),
    "a later leader with a smaller fence": (
        [term("started", 2, 0), term("stopped", 2, 1), term("started", 1, 2), term("stopped", 1, 3)],
        "went back",
    ),
    "a task in two hands": ([attempt(1, 0, 2), attempt(2, 1, 3, pid=2)], "two hands"),
    "an attempt twice": ([attempt(1, 0, 1), attempt(1, 2, 3)], "two hands"),
    "somebody behind the door": (
        [{"what": "refused", "resource": "r", "tried": 1.0, "at": 1.0, "holders": [2], "pid": 1}],
        "flock: 1 found",
    ),
    "what a job finds": ([{"what": "wrong", "words": "a zombie wrote", "pid": 1}], "a zombie wrote"),
}


@pytest.mark.parametrize("seeded", SEEDED)
def test_a_seeded_bug_is_found(seeded):
    words, expected = SEEDED[seeded]
    assert any(expected in finding for finding in judge(words))


def test_soak_checker_accepts_declared_losses_only():
    happened = Happened(sleeps=[(1, 1.0, 9.0)])
    assert judge([stay(1, 0, 9, lost=True), stay(2, 2, 3, pid=2)], happened) == []
    assert judge([stay(1, 0, 9), stay(2, 2, 3, pid=2)], happened)  # it held the lock all the time
    assert judge([stay(1, 0, 9, lost=True, pid=3), stay(2, 2, 3, pid=2)], happened)  # another one slept
    assert judge([stay(1, 0, 9, lost=True), stay(2, 0.5, 3, pid=2)], happened)  # before it slept
    refused = {"what": "refused", "resource": "r", "tried": 5.0, "at": 5.0, "holders": [1], "pid": 2}
    assert judge([refused], happened) == []
    assert judge([{**refused, "at": 12.0}], happened)
    assert judge([{**refused, "holders": [3]}], happened)


def test_soak_checker_allows_the_end_of_a_killed_process():
    refused = {"what": "refused", "resource": "r", "tried": 5.0, "at": 5.1, "holders": [], "pid": 2}
    killed = Happened(killed={1: 4.9})
    assert judge([refused], killed) == []
    assert judge([{**refused, "holders": [1]}], killed) == []
    assert judge([refused])
    assert judge([refused], Happened(killed={1: 1.0}))  # its lock had long gone
    assert judge([refused], Happened(killed={1: 5.2}))  # it was killed later
    assert judge([{**refused, "holders": [3]}], killed)
    assert judge([refused, stay(1, 4.0, 5.05, pid=3)], killed)  # another process was inside


def test_soak_checker_allows_late_answers():
    notice = {"what": "told", "resource": "r", "position": 1, "at": 4.0, "pid": 1}
    refused = {"what": "refused", "resource": "r", "tried": 4.9, "at": 5.0, "holders": [1], "pid": 2}
    release = {"what": "releasing", "position": 1, "pid": 1, "at": 6.0}
    assert judge([notice, refused, release]) == []
    assert judge([notice, release, refused]) == []  # a refused client may record it late
    assert judge([notice, {**release, "at": 4.95}, refused]) == []  # it has just left
    assert judge([{**notice, "at": 5.5}, refused, release])  # too late
    assert judge([notice, {**release, "at": 4.5}, refused])  # it has released, and holds it again
    assert judge([{**notice, "pid": 3}, refused, release])
    assert judge([{**notice, "resource": "s"}, refused, release])


def test_a_leader_that_was_killed_led_until_then():
    words = [term("started", 1, 0), term("started", 2, 5, pid=2), term("stopped", 2, 6, pid=2)]
    assert judge(words, Happened(killed={1: 4.0})) == []
    assert judge(words, Happened(killed={1: 5.5}))


def test_locks_that_go_with_a_transaction():
    def note(what, position=1):
        return {"what": what, "position": position, "pid": 1}

    leaving, committed, back, releasing = map(note, ("leaving", "committed", "rolled back", "releasing"))
    assert checks.departures([leaving, committed], NOTHING, {1}, {1}) == []
    assert checks.departures([leaving, back, releasing], NOTHING, set(), {1}) == []
    assert checks.departures([leaving], NOTHING, set(), set()) == []  # killed
    assert checks.departures([leaving], NOTHING, {1}, {1}) == []  # killed, after the commit
    assert checks.departures([leaving, committed], NOTHING, set(), {1})
    assert checks.departures([leaving, back, releasing], NOTHING, {1}, {1})
    assert checks.departures([leaving, back], NOTHING, set(), {1})
    assert checks.departures([leaving], NOTHING, set(), {1})


def test_writes_of_a_zombie():
    rows = [(1, "r", 5, 100), (2, "r", 5, 100), (3, "r", 8, 200), (4, "s", 1, 300)]
    assert checks.writes(rows, NOTHING) == []
    assert checks.writes([*rows, (5, "r", 5, 100)], NOTHING)
    assert checks.writes([*rows, (5, "r", 8, 201)], NOTHING)


def test_a_rate_that_was_passed():
    takes = [{"what": "take", "entered": at, "left": at + 0.1, "pid": 1} for at in (0.0, 0.5, 1.0, 2.2)]
    assert checks.rates(takes, NOTHING, 3, 2.0) == []
    assert checks.rates(takes, NOTHING, 2, 2.0)


def test_kernel_locks_count_a_move_once(tmp_path, monkeypatch):
    """While a check counts the second lock, a holder moves to it from the first: the holder is counted once."""
    book = Journal(tmp_path / "book")
    own, other = KernelLocks(tmp_path, book), KernelLocks(tmp_path, book)
    first = iter([0, 0, 1])
    monkeypatch.setattr(random, "randrange", lambda _: next(first))
    with contextlib.ExitStack() as moving:
        inside = moving.enter_context(contextlib.ExitStack())
        inside.enter_context(other.enter("l", places=2))

        def move(descriptor):
            inside.close()
            inside.enter_context(other.enter("l", places=2))
            return [1]

        monkeypatch.setattr("soak.kernel_locks.holders", move)
        with own.enter("l", places=2):
            assert (tmp_path / "book").read_text() == ""


def test_holder_that_left_since_is_known_by_its_stay():
    """The kernel's list is read after the refusal. A process that was stopped may wake and leave in between."""
    refused = {"what": "refused", "resource": "r", "tried": 9.9, "at": 10.1, "holders": [], "pid": 2}

    def stay(pid, resource, entered, left):
        return {"what": "stay", "resource": resource, "entered": entered, "left": left, "pid": pid}

    words = [
        refused,
        stay(1, "r", 1.0, 10.0),
        stay(3, "r", 1.0, 9.8),
        stay(4, "r", 10.2, 11.0),
        stay(5, "s", 1.0, 20.0),
    ]
    assert checks.holders_of(refused, words) == {1}
    assert checks.holders_of({**refused, "holders": [3]}, words) == {3}


def test_soak_doors_name_the_holders(tmp_path):
    book = Journal(tmp_path / "book")
    locks = KernelLocks(tmp_path, book)
    with locks.enter("r"):
        assert (tmp_path / "book").read_text() == ""
        with locks.enter("r"):
            assert f'"holders": [{os.getpid()}]' in (tmp_path / "book").read_text()
    with locks.enter("l", places=2), locks.enter("l", places=2), locks.enter("t", access="read"):
        with locks.enter("t", access="read"), locks.enter("r"):
            pass
        assert (tmp_path / "book").read_text().count("refused") == 1
        with locks.enter("l", places=2):
            assert (tmp_path / "book").read_text().count("refused") == 2
    with open(tmp_path / "r.0") as file:
        assert holders(file.fileno()) == []
        fcntl.flock(file, fcntl.LOCK_EX)
        assert holders(file.fileno()) == [os.getpid()]


def test_a_record_goes_on_where_it_stopped(tmp_path):
    first = Record(tmp_path / "record.json")
    result = night.Result("sqlite", "sqlite", 1, seconds=2.0, waits=[0.001] * 99 + [1.0])
    result.entered["mutex"] = 100
    result.faults["kill -9"] = 2
    first.add(result)
    again = Record(tmp_path / "record.json")
    again.add(result)
    again.not_run["sqlite, clock steps"] = "libfaketime"
    assert (again.grants("sqlite"), again.nights("sqlite")) == (200, 2)
    report = again.report()
    for words in ("200 grants in 4 s (50 a second)", "kill -9 4", "not run: sqlite, clock steps", "violations: 0"):
        assert words in report
    result.findings.append("two inside")
    again.add(result)
    assert "violations: 1\n  sqlite, seed 1: two inside" in Record(tmp_path / "record.json").report()


def test_classes_of_waiting_times():
    waits = {class_of(0.001): 90, class_of(1.0): 10}
    assert 0.001 <= percentile(waits, 0.5) < 0.0013
    assert 1.0 <= percentile(waits, 0.99) < 1.2


#: The time in each place of the default run.
SECONDS = float(os.environ.get("SQLSEM_SOAK_SECONDS", "25"))
#: The most nights in a place, until all required events have happened.
NIGHTS = 4
#: The least numbers of events in every place.
EVERYWHERE = ("mutex", "limit", "table", "ranked", "work", "shared", "rate", "once", "travel", "leader", "departure")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name.replace(", ", "-").replace(" ", "-"))
def test_a_short_soak(place):
    lacks = place.lacks()
    if lacks is not None:
        pytest.skip(f"not run: needs {lacks}")
    # (Not pytest's: a server runs as another user, to whom every pytest that begins closes them. Kept when something is
    # found.)
    folder = Path(tempfile.mkdtemp(prefix="sqlsem-soak-"))
    folder.chmod(0o755)
    entered: Counter[str] = Counter()
    # (A process stopped inside a transaction on SQLite stops all others: a night may be too quiet for all kinds.)
    for number in range(NIGHTS):
        result = night.run(place, folder / f"night {number}", SECONDS, random.randrange(2**31))
        print(f"seed {result.seed}: {dict(result.entered)} beside {dict(result.faults)}, {dict(result.trouble)}")
        assert result.findings == []
        entered += result.entered
        if set(EVERYWHERE) <= set(entered):
            shutil.rmtree(folder)
            return
    raise AssertionError(f"not all kinds in {NIGHTS} nights: {entered}")


def test_every_kind_is_a_job():
    for kinds in jobs.KINDS.values():
        for kind in kinds:
            assert callable(getattr(jobs.Jobs, kind))
