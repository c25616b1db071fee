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
