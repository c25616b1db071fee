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
    return session.call("batch_part_finish", name, part)


@pytest.mark.parametrize("parts", ['["b", "a"]', "b ,a"])
def test_the_last_is_told_and_says_how_it_went_on(session, connect, name, refused, parts):
    first, other = session(), session()
    number = start(first, name, "a")
    assert start(other, name, "b", parts) == number
    assert done(first, name, "a") == (0, "succeeded")
    assert done(other, name, "b") == (1, "succeeded")
    (entry,) = batches.list_batches(connect(), name)
    assert (entry.status, entry.callback_status, entry.callback_kind) == ("succeeded", "running", "session")
    with refused("55000", 50004, "no callback"):
        first.call("batch_callback_ended", name)
    assert first.call("batch_resume", name) == 0
    assert other.call("batch_callback_ended", name) == number
    (entry,) = batches.list_batches(connect(), name)
    assert entry.callback_status == "finished"
    assert {part.pid for part in entry.parts} == {first.pid, other.pid}


def test_a_session_that_dies_before_it_has_continued(session, name, connect):
    first, other = session(), session()
    start(first, name, "a", "a")
    assert done(first, name, "a") == (1, "succeeded")
    first.die()
    until(lambda: other.call("batch_resume", name) == 1)
    other.call("batch_callback_ended", name, "the disk is full")
    (entry,) = batches.list_batches(connect(), name)
    assert (entry.callback_status, entry.callback_error, entry.callback_attempt) == ("failed", "the disk is full", 2)


def test_a_session_that_dies_in_its_part(session, name, connect, refused):
    first, other = session(), session()
    start(first, name, "a")
    with refused("55000", 50007, r"runs already(, by | \().* since"):
        start(other, name, "a")
    first.die()
    start(other, name, "a")
    (entry,) = batches.list_batches(connect(), name)
    assert [part.attempt for part in entry.parts] == [2, 0]
    other.call("batch_part_fail", name, "a", "enough")


@pytest.mark.parametrize(
    ("routine", "more"),
    [
        ("batch_resume", ()),
        ("batch_part_start", ("c", "a, b, c", 60.0)),
        ("batch_part_finish", ("b",)),
        ("batch_part_fail", ("b", "no file")),
    ],
)
def test_reaper_reports_a_dead_session(session, name, connect, routine, more):
    victim, connection = session(), session()
    number = start(victim, name, "a", "a, b, c")
    start(connection, name, "b", "a, b, c")
    victim.die()
    connection.call(routine, name, *more)
    (message,) = connection.told
    words = rf"of '?{re.escape(str(name))}'? has failed parts: a \(its process died\)(; run these parts again)?$"
    assert re.search(f"sqlsem: batch {number} {words}", message)
    connection.told.clear()
    connection.call("batch_resume", name)
    assert connection.told == [], "once"
    part = {part.part: part for part in batches.list_batches(connect(), name)[0].parts}["a"]
    assert (part.status, part.error) == ("failed", "its process died")


def test_a_batch_with_a_part_of_the_dead_has_failed(session, name):
    victim, connection = session(), session()
    start(victim, name, "a")
    start(connection, name, "b")
    victim.die()
    assert done(connection, name, "b") == (0, "succeeded")
    assert any("a (its process died)" in message for message in connection.told)


def test_failed_parts(session, name):
    connection = session()
    start(connection, name, "a")
    assert connection.call("batch_part_fail", name, "a", "no file") == (0, "failed")
    start(connection, name, "b")
    assert done(connection, name, "b") == (0, "succeeded")
    assert any("a (no file)" in message for message in connection.told)
    start(connection, name, "b")  # again, and the batch is not lost
    assert done(connection, name, "b") == (0, "succeeded")
    start(connection, name, "a")
    assert done(connection, name, "a") == (1, "succeeded")
    connection.call("batch_callback_ended", name)


def test_late_and_expired(session, name, connect):
    connection, coordinator = session(), connect()
    start(connection, name, "a", window=0.2)
    until(lambda: batches.list_batches(coordinator, name)[0].overdue)
    assert done(connection, name, "a") == (0, "late")
    assert "does not count" in connection.told.pop()
    start(connection, name, "b", window=0.2)
    assert "a (ended after the window), b" in connection.told.pop()
    new, old = batches.list_batches(coordinator, name)
    assert (new.status, old.status) == ("open", "expired")
    assert old.parts[0].error == "ended after the window"
    connection.call("batch_part_fail", name, "b", "enough")


def test_of_two_callbacks_the_latest_is_ended_first(session, name):
    connection, numbers = session(), []
    for _ in range(2):
        numbers.append(start(connection, name, "a", "a"))
        assert done(connection, name, "a") == (1, "succeeded")
    assert [connection.call("batch_callback_ended", name) for _ in range(2)] == numbers[::-1]


def test_python_and_sessions_share_a_batch(session, connect, name):
    ran = []
    batch = batches.batch(name, ["a", "b"], window=60, coordinator=connect(), on_success=lambda: ran.append(1))
    connection = session()
    start(connection, name, "b")
    with batch.part("a") as part:
        pass
    assert not part.is_last
    assert done(connection, name, "b") == (1, "succeeded")
    connection.die()
    assert batch.wait(PATIENCE).callback_status == "finished"
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
    connection = session()
    start(connection, name, "b, c", '["a", "b, c"]')
    (entry,) = batches.list_batches(connect(), name)
    assert [part.part for part in entry.parts] == ["a", "b, c"]
    assert done(connection, name, "b, c") == (0, "succeeded")


def test_refusals(session, name, refused):
    connection = session()
    number = start(connection, name, "a")
    with refused("22023", 50007, "open with other parts: a, b; login .* opened it at "):
        start(connection, name, "c", "a,c")
    with refused("55000", 50004, "does not run part 'b'"):
        done(connection, name, "b")
    assert done(connection, name, "a") == (0, "succeeded")
    assert start(connection, name, "a") == number


def test_last_part_of_a_session_that_died_is_repeated(session, name):
    first, other = session(), session()
    number = start(first, name, "a", "a")
    assert done(first, name, "a") == (1, "succeeded")
    first.die()
    assert start(other, name, "a", "a") == number
    assert done(other, name, "a") == (1, "succeeded")
    assert other.call("batch_callback_ended", name) == number


def test_batch_is_abandoned_by_operator(session, connect, name):
    connection = session()
    number = start(connection, name, "a")
    assert connection.call("abandon_batch", name) == number
    assert connection.call("abandon_batch", name) is None
    assert done(connection, name, "a") == (0, "late")
    assert "after the batch was abandoned" in connection.told[-1]
    new = start(connection, name, "a")
    assert new > number
    assert connection.call("abandon_batch", name, new) == new
    assert [entry.status for entry in batches.list_batches(connect(), name)] == ["abandoned", "abandoned"]


#: Calls that start_part refuses: the changed arguments of a correct call, and words of the message.
BAD_STARTS = [
    ({"name": None}, "batch is NULL"),
    ({"name": "x" * 256}, "255"),
    ({"part": None}, "part is NULL"),
    ({"part": "z"}, "no part 'z'; it has a, b"),
    ({"parts": None}, "no parts|part is empty"),
    ({"parts": ["a", "a"]}, "twice"),
    ({"parts": ["a", ""]}, "part is empty"),
    ({"parts": ["a", " b"]}, "white space"),
    ({"parts": ["a"] + [str(index) for index in range(10_000)]}, "10000"),
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
    connection = session()
    connection.call("batch_resume", name)  # so it is a member
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
        connection.call("start_part", *values)
    assert batches.list_batches(connect(), name) == []


def test_start_part_refuses_invalid_json(session, name, refused, database):
    if database.engine != "postgresql":
        pytest.skip("T-SQL takes lines")
    with refused("22023", 50000, "no JSON array of names"):
        session().call("start_part", -1, name, "a", "[a, b", 60_000, "me", "u", None, None)
