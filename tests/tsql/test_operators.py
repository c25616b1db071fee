"""Operators' actions in T-SQL."""

import pytest
from support import Attempt, until

pytestmark = pytest.mark.engines("mssql")


def test_set_limit(session, connect, database, name):
    connection, other, operator = session(), session(), session()
    operator.call("set_limit", name, 1)
    assert [resource.cap for resource in connect().admin.resources() if resource.resource == name] == [1]
    assert connection.acquire(name, 3).code == 0
    assert other.acquire(name, 3, routine="try").code == -1
    waiting = other.waiting(name, 3, timeout_ms=60000)
    operator.call("set_limit", name, None)
    assert waiting.result(30).code == 1
    connection.release(name)
    other.release(name)
    assert [resource for resource in connect().admin.resources() if resource.resource == name] == []


def test_pause_and_resume(session, connect, name):
    connection, operator = session(), session()
    operator.call("pause", name)
    assert connection.acquire(name, routine="try").code == -1
    waiting = connection.waiting(name, timeout_ms=60000)
    attempt = Attempt(connect().mutex(name))
    assert attempt.waits(0.3)
    assert not waiting.done()
    operator.call("resume", name)
    assert waiting.result(30).code == 1
    assert attempt.waits(0.2)
    connection.release(name)
    attempt.granted()
    attempt.leave()


def test_reap_answers_by_its_code_and_by_a_row(session, new_session, database, name):
    holder, operator = new_session(), session()
    holder.acquire(name)
    assert operator.rows("EXEC {s}.reap @answer = 1")[0][0] >= 0
    assert len(database.queue(name)) == 1
    holder.close()
    until(lambda: operator.call("reap") >= 1 or not database.queue(name), "the row of the dead session going")
    assert database.queue(name) == []


def test_reap_as_drivers_in_manual_commit_call_it(new_session, database, name, refused):
    holder, operator = new_session(), new_session()
    holder.acquire(name)
    operator.rows("BEGIN TRANSACTION")
    with refused(50001, "reap must not be called inside an open transaction"):
        operator.call("reap")
    operator.rows("ROLLBACK TRANSACTION; SET IMPLICIT_TRANSACTIONS ON; SET ROWCOUNT 1")
    holder.close()
    until(lambda: operator.call("reap") >= 1 or not database.queue(name), "the row of the dead session going")
    assert operator.rows("SELECT @@TRANCOUNT") == [(0,)]


def test_status_of_all_and_of_a_single_resource(session, name):
    first, other = session(), session()
    first.acquire(name("a"))
    other.acquire(name("b"), access="read")
    waiting = other.waiting(name("a"), timeout_ms=60000)
    rows = [row for row in first.rows("EXEC {s}.status") if row[0].startswith(name)]
    assert [(row[0], row[2], row[3]) for row in rows] == [
        (name("a"), "holds", "write"),
        (name("a"), "waits", "write"),
        (name("b"), "holds", "read"),
    ]
    assert [row[0] for row in first.rows("EXEC {s}.status @resource = ?", name("b"))] == [name("b")]
    first.release(name("a"))
    waiting.result(30)
    other.release(name("a"))
    other.release(name("b"))


def test_revoke_while_the_owner_gives_up(session, database, name):
    """The owner learns of the revocation and removes the row, while the operator tries to remove it, too."""
    holder, owner, operator = session(), session(), session()
    position = holder.acquire(name).position
    owner.rows(
        "DECLARE @p nvarchar(128) = {s}.lock_principal(); BEGIN TRANSACTION; EXEC sp_getapplock @Resource = ?, "
        "@LockMode = N'Exclusive', @LockOwner = N'Transaction', @LockTimeout = 1000, @DbPrincipal = @p",
        f"pin.sqlsem.{database.schema}.{position}",
    )
    revoking = operator.later(operator.call, "[revoke]", position, 1)
    until(lambda: database.rows(f"SELECT 1 FROM {database.schema}.operation WHERE queue_position = ?", position))
    owner.rows("EXEC {s}.remove ?, ?, N'revoked'; COMMIT TRANSACTION", name, position)
    assert revoking.result(30) == 0
    assert database.queue(name) == []
