"""Bad arguments of the routines in T-SQL (more in ``routines``)."""

import pytest

pytestmark = pytest.mark.engines("mssql")


@pytest.mark.parametrize("routine", ["acquire", "try", "release", "renew", "set_limit", "pause", "resume"])
def test_all_white_space_counts(session, refused, routine):
    connection = session()
    more = {"renew": (1,), "set_limit": (1,)}.get(routine, ())
    for bad in ("x\u3000", "\u00a0x"):
        with refused(50000, "white space"):
            connection.call(routine, bad, *more)


@pytest.mark.parametrize(
    "text",
    [
        "EXEC {s}.acquire ?, @limit = N'three'",
        "EXEC {s}.acquire ?, @weight = N'heavy'",
        "EXEC {s}.acquire ?, @timeout_ms = N'soon'",
        "EXEC {s}.acquire ?, @lease_seconds = N'long'",
        "EXEC {s}.acquire ?, @limit = 99999999999",
        "EXEC {s}.acquire ?, @no_such_parameter = 1",
        "EXEC {s}.acquire",
        "EXEC {s}.renew ?",
        "EXEC {s}.release ?, N'x'",
    ],
)
def test_wrong_types(session, database, name, text):
    import pyodbc

    connection = session()
    with pytest.raises(pyodbc.Error):
        connection.rows(text, *([name] if "?" in text else []))
    assert connection.rows("SELECT @@TRANCOUNT") == [(0,)]
    assert database.queue(name) == []


@pytest.mark.parametrize("number", ["NULL", "-1"])
def test_lists_and_prunes_take_any_number_of_rows(session, number):
    """A list without a number has all rows, and one of fewer than none has no row. Nothing is pruned."""
    connection = session()
    for routine in ("list_batches", "list_tasks", "past", "operations", "show_tasks"):
        rows = connection.rows(f"EXEC {{s}}.{routine} @maximum = {number}")
        assert number == "NULL" or rows == [], routine
    connection.rows(f"EXEC {{s}}.show_tasks @skip = {number}")
    for routine in ("prune", "prune_operations", "prune_tasks"):
        assert connection.call(f"{routine} {number},", answer=0) == 0


@pytest.mark.parametrize("missing", ["access", "requesting_id", "resource", "weight"])
def test_request_without_an_argument_is_refused_as_bad(session, refused, database, name, missing):
    """Not as busy: a client tries a busy call again."""
    connection = session()
    ((member,),) = connection.rows("EXEC {s}.register_member N'host', 1, N'program', 60000, @answer = 1")
    given = {"access": "write", "requesting_id": "me", "resource": name, "weight": 1}
    named = ", ".join(f"@{word} = {'NULL' if word == missing else '?'}" for word in given)
    text = f"EXEC {{s}}.register @member = ?, @owner = N'me', @uid = ?, @try = 0, @limit = 1, {named}, @answer = 1"
    with refused(50000, "bad request"):
        connection.rows(text, member, name, *(value for word, value in given.items() if word != missing))
    assert database.queue(name) == []
    connection.rows("EXEC {s}.deregister_member ?", member)


def test_member_without_a_grace_is_refused_as_bad(session, refused):
    with refused(50000, "a grace of NULL ms makes no sense"):
        session().rows("EXEC {s}.register_member N'host', 1, N'program', NULL, @answer = 1")
