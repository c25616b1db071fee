"""Operators' actions in T-SQL."""

import pytest
from support import until

pytestmark = pytest.mark.engines("mssql")


def test_reap_as_drivers_in_manual_commit_call_it(new_session, database, name, refused):
    holder, operator = new_session(), new_session()
    holder.acquire(name)
    operator.rows("BEGIN TRANSACTION")
    with refused(50001, "reap must not be called inside an open transaction"):
        operator.call("reap")
    operator.rows("ROLLBACK TRANSACTION; SET IMPLICIT_TRANSACTIONS ON; SET ROWCOUNT 1")
    holder.close()
    until(lambda: operator.call("reap") >= 1 or not database.queue(name), "the row of the dead session going")
    assert operator.rows("EXEC {s}.reap @answer = 1")[0][0] >= 0
    assert operator.rows("SELECT @@TRANCOUNT") == [(0,)]


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
