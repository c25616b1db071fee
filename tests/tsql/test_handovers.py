"""Hand-overs between T-SQL sessions, and from Python to them and back."""

import contextlib

import pytest

from sqlsem.values.errors import NotHeld

pytestmark = pytest.mark.engines("mssql")

GIVE = "DECLARE @t nvarchar(200); EXEC {s}.hand_over ?, @token = @t OUTPUT; SELECT @t"
ADOPT = (
    "DECLARE @r nvarchar(255), @p bigint, @f bigint; EXEC {s}.adopt ?, @resource = @r OUTPUT, @position = @p OUTPUT, "
    "@fence = @f OUTPUT; SELECT @r, @p, @f"
)


def test_from_session_to_session(session, name):
    import pyodbc

    giver, taker = session(), session()
    granted = giver.acquire(name)
    ((token,),) = giver.rows(GIVE, name)
    assert len(token) > 50
    assert taker.acquire(name, timeout_ms=0).code == -1
    assert giver.release(name) == -1
    assert taker.rows(ADOPT, token) == [(name, granted.position, granted.fence)]
    with pytest.raises(pyodbc.Error, match="was used"):
        giver.rows(ADOPT, token)
    with pytest.raises(pyodbc.Error, match="nothing is held"):
        giver.rows(GIVE, name)
    assert taker.release(name) == 0
    with pytest.raises(pyodbc.Error, match="not known"):
        taker.rows(ADOPT, "sqlsem-0")


def test_from_python_to_tsql_and_back(session, database, name):
    with contextlib.closing(database.coordinator()) as coordinator:
        connection = session()
        with coordinator.mutex(name) as grant:
            token = grant.hand_over()
        assert connection.rows(ADOPT, token) == [(name, grant.position, grant.fence)]
        with pytest.raises(NotHeld, match="was used"):
            coordinator.adopt(token)
        ((token,),) = connection.rows(GIVE, name)
        with coordinator.adopt(token) as adopted:
            assert adopted.fence == grant.fence


@pytest.mark.parametrize("text", [GIVE, ADOPT])
def test_not_in_a_transaction(session, name, text):
    import pyodbc

    connection = session()
    connection.acquire(name)
    with pytest.raises(pyodbc.Error, match="open transaction"):
        connection.rows("BEGIN TRANSACTION; " + text, name)
    connection.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
    assert connection.release(name) == 0
