"""Rounds from T-SQL, as Agent jobs take part in them."""

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem import rounds

pytestmark = pytest.mark.engines("mssql")

START = "EXEC {s}.round_part_start ?, ?, ?, ?"


def start(session, name, part, parts="a, b", window=60.0):
    ((number,),) = session.rows(START, name, part, parts, window)
    return number


def done(session, name, part):
    ((is_last, outcome),) = session.rows("EXEC {s}.round_part_done ?, ?", name, part)
    return is_last, outcome


def resumed(session, name):
    return session.rows("EXEC {s}.round_resume ?", name) == [(1,)]


def test_the_last_is_told_and_says_how_it_went_on(session, connect, name, refused):
    one, other = session(), session()
    number = start(one, name, "a")
    assert start(other, name, "b", "b ,a") == number
    assert done(one, name, "a") == (0, "succeeded")
    ((is_last,),) = other.rows(
        "DECLARE @last bit; DECLARE @o nvarchar(16); EXEC {s}.round_part_done ?, 'b', @last OUTPUT, @o OUTPUT; "
        "SELECT CAST(@last AS int)",
        name,
    )[1:]
    assert is_last == 1
    (entry,) = rounds.list_rounds(connect(), name)
    assert (entry.status, entry.then_status, entry.then_kind) == ("succeeded", "running", "session")
    with refused(50004, "no continuation"):
        one.rows("EXEC {s}.round_continued ?", name)
    assert not resumed(one, name)
    assert other.rows("EXEC {s}.round_continued ?", name) == [(number,)]
    (entry,) = rounds.list_rounds(connect(), name)
    assert entry.then_status == "finished"
    assert {part.pid for part in entry.parts} == {one.spid, other.spid}


def test_a_session_that_dies_before_it_has_continued(session, new_session, name, connect):
    one, other = new_session(), session()
    start(one, name, "a", "a")
    assert done(one, name, "a") == (1, "succeeded")
    one.close()
    until(lambda: resumed(other, name))
    other.rows("EXEC {s}.round_continued ?, ?", name, "the disk is full")
    (entry,) = rounds.list_rounds(connect(), name)
    assert (entry.then_status, entry.then_error, entry.then_attempt) == ("failed", "the disk is full", 2)


def test_a_session_that_dies_in_its_part(session, new_session, name, connect, refused):
    one, other = new_session(), session()
    start(one, name, "a")
    with refused(50007, "runs already"):
        start(other, name, "a")
    one.close()
    made = rounds.round(name, ["a", "b"], window=60, coordinator=connect())
    until(lambda: made._recover() or made.entry().parts[0].status == "failed")
    start(other, name, "a")
    (entry,) = rounds.list_rounds(connect(), name)
    assert [part.attempt for part in entry.parts] == [2, 0]
    other.rows("EXEC {s}.round_part_failed ?, 'a', 'enough'", name)


def test_failed_parts(session, name):
    one = session()
    start(one, name, "a")
    assert one.rows("EXEC {s}.round_part_failed ?, 'a', 'no file'", name) == [(0, "failed")]
    start(one, name, "b")
    assert done(one, name, "b") == (0, "failed")
    start(one, name, "a")
    assert done(one, name, "a") == (1, "succeeded")
    one.rows("EXEC {s}.round_continued ?", name)


def test_late_and_expired(session, name, connect):
    one, coordinator = session(), connect()
    start(one, name, "a", window=0.2)
    until(lambda: rounds.list_rounds(coordinator, name)[0].overdue)
    assert done(one, name, "a") == (0, "late")
    start(one, name, "b", window=0.2)
    new, old = rounds.list_rounds(coordinator, name)
    assert (new.status, old.status) == ("open", "expired")
    assert old.parts[0].error == "ended after the window"
    one.rows("EXEC {s}.round_part_failed ?, 'b', 'enough'", name)


def test_python_and_sessions_in_one_round(new_session, connect, name):
    ran = []
    made = rounds.round(name, ["a", "b"], window=60, coordinator=connect()).then(lambda: ran.append(1))
    one = new_session()
    start(one, name, "b")
    with made.part("a") as part:
        pass
    assert not part.is_last
    assert done(one, name, "b") == (1, "succeeded")
    one.close()
    assert made.wait(PATIENCE).then_status == "finished"
    assert ran == [1]


def test_sql_as_continuation(database, session, connect, name):
    database.rows(f"CREATE TABLE made_{name} (n int)")
    made = rounds.round(name, ["a", "b"], window=60, coordinator=connect())
    made.then(sqlsem.Sql(f"INSERT INTO made_{name} (n) VALUES (1)"))
    one = session()
    start(one, name, "b")
    with made.part("a"):
        pass
    start_again = rounds.list_rounds(connect(), name)[0]
    assert start_again.then_kind == "sql"
    one.rows("EXEC {s}.round_part_failed ?, 'b'", name)
    with made.part("b") as last:
        pass
    assert last.is_last
    assert database.rows(f"SELECT n FROM made_{name}") == [(1,)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("", "a", "a", 1.0), "round is empty"),
        (("x", None, "a", 1.0), "part is NULL"),
        (("x", "a", None, 1.0), "no parts"),
        (("x", "a", "", 1.0), "no parts"),
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
def test_bad_arguments(session, arguments, told, refused):
    with refused(50000, told):
        session().rows(START, *arguments)


def test_parts_as_json(session, name, connect):
    one = session()
    start(one, name, "b, c", '["a", "b, c"]')
    (entry,) = rounds.list_rounds(connect(), name)
    assert [part.part for part in entry.parts] == ["a", "b, c"]
    assert done(one, name, "b, c") == (0, "succeeded")


def test_refusals(session, name, refused):
    one = session()
    number = start(one, name, "a")
    with refused(50007, "open with other parts: a, b"):
        start(one, name, "c", "a,c")
    with refused(50004, "does not run part 'b'"):
        done(one, name, "b")
    assert done(one, name, "a") == (0, "succeeded")
    with refused(50007, f"already in round {number} of"):
        start(one, name, "a")
    one.rows("BEGIN TRANSACTION")
    with refused(50001, "open transaction"):
        start(one, name, "b")
