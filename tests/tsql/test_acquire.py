"""acquire, release and assert_holding from T-SQL sessions, where SQL Server differs (``routines`` has the rest)."""

import time

import pytest

import sqlsem

pytestmark = pytest.mark.engines("mssql")


# -- codes


@pytest.mark.parametrize("access", ["write", "read"])
def test_revoked_row_is_not_granted(session, database, name, access):
    """Also if the operator's session ended before the removal of the row."""
    first, other = session(), session()
    first.acquire(name, access="write")
    waiting = other.waiting(name, access=access, timeout_ms=60000)
    position = database.queue(name)[1][0]
    entry = database.beside("entry")
    database.rows(f"UPDATE {entry} SET revoked_at = SYSUTCDATETIME() WHERE queue_position = ?", position)
    first.release(name)
    assert waiting.result(30) == (-2, None, None)


# -- sharing


def test_polling_waiter_backs_off(session, connect, name):
    """A pause has no lock to wait for, so the waiter polls; in the end its polls are 0.8 s apart."""
    connection, operator = session(), connect()
    operator.admin.pause(name)
    began = time.monotonic()
    assert connection.acquire(name, timeout_ms=1500).code == -1
    assert time.monotonic() - began >= 1.5
    waiting = connection.waiting(name, timeout_ms=60000)
    operator.admin.resume(name)
    assert waiting.result(30).code == 1
    connection.release(name)


# -- transactions


@pytest.mark.parametrize(
    "text",
    [
        "EXEC {s}.acquire ?",
        "EXEC {s}.try ?",
        "EXEC {s}.release ?",
        "EXEC {s}.renew ?, 1",
        "EXEC {s}.pause ?",
        "EXEC {s}.resume ?",
        "EXEC {s}.set_limit ?, 1",
    ],
)
def test_an_open_transaction_is_refused_and_left_alone(session, database, refused, name, text):
    connection = session()
    connection.rows("BEGIN TRANSACTION")
    with refused(50001, "transaction"):
        connection.rows(text, name)
    assert connection.rows("SELECT @@TRANCOUNT, XACT_STATE()") == [(1, 1)]
    connection.rows("ROLLBACK TRANSACTION")
    assert database.queue(name) == []
    assert database.rows(f"SELECT resource_id FROM {database.beside('resource')} WHERE resource_id = ?", name) == []


def test_with_implicit_transactions(session, database, name):
    """IMPLICIT_TRANSACTIONS is the setting of drivers without autocommit: no session of the library may hang in one."""
    first, other = session(), session()
    first.rows("SET IMPLICIT_TRANSACTIONS ON")
    try:
        got = first.acquire(name)
        assert got.code == 0
        first.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
        assert [row[0] for row in database.queue(name)] == [got.position]
        waiting = other.waiting(name, timeout_ms=60000)
        first.rows("EXEC {s}.release ?", name)
        assert waiting.result(30).code == 1
        first.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
        assert [row[0] for row in database.queue(name)] == [waiting.result().position]
    finally:
        first.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; SET IMPLICIT_TRANSACTIONS OFF")
    other.release(name)


def test_the_callers_settings_stay(session, name):
    connection = session()
    connection.rows("SET LOCK_TIMEOUT 12345; SET XACT_ABORT OFF")
    before = connection.rows("SELECT @@LOCK_TIMEOUT, @@OPTIONS")
    connection.acquire(name)
    connection.release(name)
    assert connection.rows("SELECT @@LOCK_TIMEOUT, @@OPTIONS") == before
    connection.rows("SET LOCK_TIMEOUT -1")


# -- release


def test_release_in_a_catch_block_needs_no_variable(session, database, name):
    first, other = session(), session()
    other.acquire(name("other"))
    ((caught, released),) = first.rows(
        """
        DECLARE @code int, @number int;
        EXEC {s}.acquire @resource = ?;
        BEGIN TRY
            THROW 60000, N'the load failed', 1;
        END TRY
        BEGIN CATCH
            SET @number = ERROR_NUMBER();
            IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION;
            EXEC @code = {s}.release @resource = ?;
        END CATCH;
        SELECT @number, @code
        """,
        name,
        name,
    )
    assert (caught, released) == (60000, 0)
    assert [row[1] for row in database.queue(name)] == [name("other")]
    other.release(name("other"))


# -- renew, assert_holding


def test_asserted_row_stays_until_commit(session, new_session, connect, name):
    holder, other = new_session(), session()
    position = holder.acquire(name).position
    second = session()
    second.rows("BEGIN TRANSACTION")
    requester = connect().admin.entries(name)[0].requesting_id
    second.rows("EXEC {s}.assert_holding ?, ?, ?", name, position, requester)
    holder.close()
    waiting = other.waiting(name, timeout_ms=60000)
    time.sleep(0.5)
    assert not waiting.done()
    second.rows("COMMIT TRANSACTION")
    assert waiting.result(30).code == 1
    other.release(name)


def test_python_asserts_a_fence(session, connect, name):
    connection = session()
    first = connection.acquire(name)
    connection.release(name)
    with connect().mutex(name) as grant:
        assert grant.fence > first.fence
    assert connection.acquire(name).fence > grant.fence
    connection.release(name)
    assert isinstance(grant, sqlsem.Grant)
