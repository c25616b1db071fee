"""Batches from SQL alone: psql sessions, scheduled jobs and Agent jobs, beside Python processes."""

import json
import re

import pytest
from support import PATIENCE, until

from sqlsem import batches

pytestmark = pytest.mark.engines("postgresql", "mssql")


def start(session, name, part, parts="a, b", window=60.0):
    return session.call("batch_part_start", name, part, parts, window)


def done(session, name, part):
    return session.call("batch_part_done", name, part)


@pytest.mark.parametrize("parts", ['["b", "a"]', "b ,a"])
def test_the_last_is_told_and_says_how_it_went_on(session, connect, name, refused, parts):
    one, other = session(), session()
    number = start(one, name, "a")
    assert start(other, name, "b", parts) == number
    assert done(one, name, "a") == (0, "succeeded")
    assert done(other, name, "b") == (1, "succeeded")
    (entry,) = batches.list_batches(connect(), name)
    assert (entry.status, entry.callback_status, entry.callback_kind) == ("succeeded", "running", "session")
    with refused("55000", 50004, "no callback"):
        one.call("batch_callback_ended", name)
    assert one.call("batch_resume", name) == 0
    assert other.call("batch_callback_ended", name) == number
    (entry,) = batches.list_batches(connect(), name)
    assert entry.callback_status == "finished"
    assert {part.pid for part in entry.parts} == {one.pid, other.pid}


def test_a_session_that_dies_before_it_has_continued(session, name, connect):
    one, other = session(), session()
    start(one, name, "a", "a")
    assert done(one, name, "a") == (1, "succeeded")
    one.die()
    until(lambda: other.call("batch_resume", name) == 1)
    other.call("batch_callback_ended", name, "the disk is full")
    (entry,) = batches.list_batches(connect(), name)
    assert (entry.callback_status, entry.callback_error, entry.callback_attempt) == ("failed", "the disk is full", 2)


def test_a_session_that_dies_in_its_part(session, name, connect, refused):
    one, other = session(), session()
    start(one, name, "a")
    with refused("55000", 50007, r"runs already(, by | \().* since"):
        start(other, name, "a")
    one.die()
    start(other, name, "a")
    (entry,) = batches.list_batches(connect(), name)
    assert [part.attempt for part in entry.parts] == [2, 0]
    other.call("batch_part_failed", name, "a", "enough")


@pytest.mark.parametrize(
    ("routine", "more"),
    [
        ("batch_resume", ()),
        ("batch_part_start", ("c", "a, b, c", 60.0)),
        ("batch_part_done", ("b",)),
        ("batch_part_failed", ("b", "no file")),
    ],
)
def test_who_notices_that_a_session_died_is_told(session, name, connect, routine, more):
    victim, one = session(), session()
    number = start(victim, name, "a", "a, b, c")
    start(one, name, "b", "a, b, c")
    victim.die()
    one.call(routine, name, *more)
    (message,) = one.told
    words = rf"of '?{re.escape(str(name))}'? has failed parts: a \(its process died\)(; run these parts again)?$"
    assert re.search(f"sqlsem: batch {number} {words}", message)
    one.told.clear()
    one.call("batch_resume", name)
    assert one.told == [], "once"
    part = {part.part: part for part in batches.list_batches(connect(), name)[0].parts}["a"]
    assert (part.status, part.error) == ("failed", "its process died")


def test_a_batch_with_a_part_of_the_dead_has_failed(session, name):
    victim, one = session(), session()
    start(victim, name, "a")
    start(one, name, "b")
    victim.die()
    assert done(one, name, "b") == (0, "succeeded")
    assert any("a (its process died)" in message for message in one.told)


def test_failed_parts(session, name):
    one = session()
    start(one, name, "a")
    assert one.call("batch_part_failed", name, "a", "no file") == (0, "failed")
    start(one, name, "b")
    assert done(one, name, "b") == (0, "succeeded")
    assert any("a (no file)" in message for message in one.told)
    start(one, name, "b")  # again, and the batch is not lost
    assert done(one, name, "b") == (0, "succeeded")
    start(one, name, "a")
    assert done(one, name, "a") == (1, "succeeded")
    one.call("batch_callback_ended", name)


def test_late_and_expired(session, name, connect):
    one, coordinator = session(), connect()
    start(one, name, "a", window=0.2)
    until(lambda: batches.list_batches(coordinator, name)[0].overdue)
    assert done(one, name, "a") == (0, "late")
    assert "does not count" in one.told.pop()
    start(one, name, "b", window=0.2)
    assert "a (ended after the window), b" in one.told.pop()
    new, old = batches.list_batches(coordinator, name)
    assert (new.status, old.status) == ("open", "expired")
    assert old.parts[0].error == "ended after the window"
    one.call("batch_part_failed", name, "b", "enough")


def test_of_two_callbacks_the_latest_is_ended_first(session, name):
    one, numbers = session(), []
    for _ in range(2):
        numbers.append(start(one, name, "a", "a"))
        assert done(one, name, "a") == (1, "succeeded")
    assert [one.call("batch_callback_ended", name) for _ in range(2)] == numbers[::-1]


def test_python_and_sessions_in_one_batch(session, connect, name):
    ran = []
    made = batches.batch(name, ["a", "b"], window=60, coordinator=connect(), on_success=lambda: ran.append(1))
    one = session()
    start(one, name, "b")
    with made.part("a") as part:
        pass
    assert not part.is_last
    assert done(one, name, "b") == (1, "succeeded")
    one.die()
    assert made.wait(PATIENCE).callback_status == "finished"
    assert ran == [1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("", "a", "a", 1.0), "batch is empty"),
        (("x", None, "a", 1.0), "part is NULL"),
        (("x", "a", None, 1.0), "no parts"),
        (("x", "a", "", 1.0), "part is empty|no parts"),
        (("x", "a", "a,,b", 1.0), "part is empty"),
        (("x", "a", "a,b,a", 1.0), "twice"),
        (("x", "a", '["a", "b", "a"]', 1.0), "twice"),
        (("x", "a", '["a", ""]', 1.0), "part is empty"),
        (("x", "a", "[]", 1.0), "no parts"),
        (("x", "c", "a,b", 1.0), "no part 'c'; it has a, b"),
        (("x", "a", "a", 0.0), "above 0"),
        (("x", "a", "a", -1.0), "above 0"),
        (("x", "a", "a", None), "above 0"),
    ],
)
def test_bad_arguments(session, arguments, words, refused):
    with refused("22023", 50000, words):
        session().call("batch_part_start", *arguments)


def test_parts_as_json(session, name, connect):
    one = session()
    start(one, name, "b, c", '["a", "b, c"]')
    (entry,) = batches.list_batches(connect(), name)
    assert [part.part for part in entry.parts] == ["a", "b, c"]
    assert done(one, name, "b, c") == (0, "succeeded")


def test_refusals(session, name, refused):
    one = session()
    number = start(one, name, "a")
    with refused("22023", 50007, "open with other parts: a, b; login .* opened it at "):
        start(one, name, "c", "a,c")
    with refused("55000", 50004, "does not run part 'b'"):
        done(one, name, "b")
    assert done(one, name, "a") == (0, "succeeded")
    assert start(one, name, "a") == number


def test_last_part_of_a_session_that_died_is_repeated(session, name):
    one, other = session(), session()
    number = start(one, name, "a", "a")
    assert done(one, name, "a") == (1, "succeeded")
    one.die()
    assert start(other, name, "a", "a") == number
    assert done(other, name, "a") == (1, "succeeded")
    assert other.call("batch_callback_ended", name) == number


def test_batch_is_abandoned_by_operator(session, connect, name):
    one = session()
    number = start(one, name, "a")
    assert one.call("abandon_batch", name) == number
    assert one.call("abandon_batch", name) is None
    assert done(one, name, "a") == (0, "late")
    assert "after the batch was abandoned" in one.told[-1]
    new = start(one, name, "a")
    assert new > number
    assert one.call("abandon_batch", name, new) == new
    assert [entry.status for entry in batches.list_batches(connect(), name)] == ["abandoned", "abandoned"]


#: What start_part refuses to its callers: what is changed of a call that is right, and the words.
BAD_STARTS = [
    ({"name": None}, "batch is NULL"),
    ({"name": "x" * 256}, "255"),
    ({"part": None}, "part is NULL"),
    ({"part": "z"}, "no part 'z'; it has a, b"),
    ({"parts": None}, "no parts|part is empty"),
    ({"parts": ["a", "a"]}, "twice"),
    ({"parts": ["a", ""]}, "part is empty"),
    ({"parts": ["a", " b"]}, "white space"),
    ({"parts": ["a"] + [str(one) for one in range(10_000)]}, "10000"),
    ({"window": None}, "window of batch .* must be 1 to 315360000000 ms"),
    ({"window": 0}, "window of batch .* must be 1 to 315360000000 ms"),
    ({"window": -1}, "window of batch .* must be 1 to 315360000000 ms"),
    ({"window": 315_360_000_001}, "window of batch .* must be 1 to 315360000000 ms"),
    ({"window": 2**63 - 1}, "window of batch .* must be 1 to 315360000000 ms"),
    ({"window": -(2**63)}, "window of batch .* must be 1 to 315360000000 ms"),
    ({"uid": None}, "uid of a start is NULL"),
]


@pytest.mark.parametrize(("change", "words"), BAD_STARTS)
def test_start_part_refuses_bad_argument(session, name, refused, database, connect, change, words):
    one = session()
    one.call("batch_resume", name)  # so it is a member
    with_words = {"name": name, "part": "a", "parts": ["a", "b"], "window": 60_000, "uid": "u", **change}
    parts = with_words["parts"]
    if parts is not None:
        parts = json.dumps(parts) if database.engine == "postgresql" else "\n".join(parts)
    values = (
        -1,
        with_words["name"],
        with_words["part"],
        parts,
        with_words["window"],
        "me",
        with_words["uid"],
        None,
        None,
    )
    with refused("22023", 50000, words):
        one.call("start_part", *values)
    assert batches.list_batches(connect(), name) == []


def test_start_part_refuses_what_is_no_json(session, name, refused, database):
    if database.engine != "postgresql":
        pytest.skip("T-SQL takes lines")
    with refused("22023", 50000, "no JSON array of names"):
        session().call("start_part", -1, name, "a", "[a, b", 60_000, "me", "u", None, None)
