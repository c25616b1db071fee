"""The tables of version 2, with locks in them, become those of this version: nothing is lost, and who had roles keeps
what they gave."""

from __future__ import annotations

import contextlib
import os
import re

import pytest
import support

from sqlsem import sql

pytestmark = pytest.mark.engines("mssql")

OLD = {"member": "member_id", "entry": "member_id", "history": "member_id", "task": "member_id",
       "task_log": "member_id", "round": "then_member", "round_part": "member_id"}  # fmt: skip


@pytest.fixture
def old(database):
    """A database with the tables of version 2, a role of that time, and rows."""
    import pyodbc

    base = support.Database("mssql", os.environ["SQLSEM_TEST_MSSQL"])
    name = support.random_name()
    server = base.raw()
    try:
        server.execute(f"CREATE DATABASE {name}")
    except pyodbc.Error as exc:
        pytest.skip(f"this login may not create databases: {exc}")
    found = support.Database("mssql", support.with_database(base.url, name), {"schema": name})
    connection = found.raw()
    for _, text in sql.migrations("mssql", 0, schema=name)[:2]:
        for batch in re.split(r"(?m)^GO$", text):
            if batch.strip():
                connection.execute(batch)
    connection.execute(f"UPDATE {name}.setting SET value = N'2' WHERE name = N'schema_version'")
    connection.execute(f"CREATE PROCEDURE {name}.register AS RETURN 0")
    for role in ("user", "operator"):
        connection.execute(f"CREATE ROLE {name}_{role}")
        connection.execute(f"CREATE ROLE {name}_some_{role}")
        connection.execute(f"ALTER ROLE {name}_{role} ADD MEMBER {name}_some_{role}")
    connection.execute(
        f"INSERT INTO {name}.member (host, grace_ms, lease_ms, lease_until) VALUES (N'h', 0, 60000, '2999')"
    )
    connection.execute(
        f"INSERT INTO {name}.entry (resource_id, requesting_id, access_type, concurrency_limit, weight, member_id, "
        f"request_uid, requested_at, granted_at) VALUES (N'held', N'me', N'write', 1, 1, 1, N'u', '2020', '2020')"
    )
    connection.execute(
        f"INSERT INTO {name}.task (queue_name, kind, body, status, member_id) "
        f"VALUES (N'q', N'sql', N'1', N'running', 1)"
    )
    connection.close()
    yield found
    with contextlib.suppress(pyodbc.Error):
        server.execute(f"DROP DATABASE {name}")
    server.close()


@pytest.mark.timeout(1200)
def test_from_version_2(old):
    old.install()
    for table, column in OLD.items():
        found = old.rows(
            "SELECT t.name, c.is_nullable FROM sys.columns AS c JOIN sys.types AS t ON t.user_type_id = c.user_type_id "
            "WHERE c.object_id = OBJECT_ID(?) AND c.name = ?",
            f"{old.schema}.{table}",
            column,
        )
        assert found == [("bigint", table != "member")], table
    ((indexes,),) = old.rows(
        "SELECT COUNT(*) FROM sys.indexes WHERE object_id IN (OBJECT_ID(?), OBJECT_ID(?)) "
        "AND (name LIKE N'entry_member%' OR name LIKE N'task_open%')",
        f"{old.schema}.entry",
        f"{old.schema}.task",
    )
    assert indexes == 2  # (some engines append to their names)
    ((resource, member, granted),) = old.rows(f"SELECT resource_id, member_id, granted_at FROM {old.table}")
    assert (resource, member) == ("held", 1)
    assert granted is not None
    assert old.rows(f"SELECT status, member_id FROM {old.beside('task')}") == [("running", 1)]
    settings = dict(old.rows(f"SELECT name, value FROM {old.beside('setting')}"))
    assert settings["schema_version"] == str(sql.LATEST)
    assert settings["oldest_client"] == "3"
    assert "roles_to_move" not in settings

    # The old lock is held still, and somebody may have the application locks: they stay public's.
    ((principal,),) = old.rows(f"SELECT {old.schema}.lock_principal()")
    assert principal == "public"
    connection = old.raw()
    try:
        cursor = connection.execute(f"DECLARE @c int; EXEC @c = {old.schema}.[try] N'held'; SELECT @c")
        while cursor.description is None:
            cursor.nextset()
        assert cursor.fetchone()[0] == -1
    finally:
        connection.close()
    # Member numbers go on beyond what they were.
    old.rows(f"DELETE FROM {old.beside('member')}")
    old.rows(f"DELETE FROM {old.beside('entry')}")

    roles = {
        (role.removeprefix(f"{old.schema}_"), member.removeprefix(f"{old.schema}_"))
        for role, member in old.rows(
            "SELECT r.name, m.name FROM sys.database_role_members AS x "
            "JOIN sys.database_principals AS r ON r.principal_id = x.role_principal_id "
            "JOIN sys.database_principals AS m ON m.principal_id = x.member_principal_id"
        )
    }
    assert {pair for pair in roles if pair[1].startswith("some_")} == {
        ("user", "some_user"),
        ("worker", "some_user"),
        ("operator", "some_operator"),
        ("putter", "some_operator"),
    }
    assert {member for role, member in roles if role == "locks"} == {"user", "putter", "worker", "operator", "reader"}

    # With nobody inside they become a role's; a second time changes nothing else.
    connection = old.raw()
    for batch in re.split(r"(?m)^GO$", sql.script("mssql", "permissions", schema=old.schema)):
        if batch.strip():
            connection.execute(batch)
    connection.close()
    ((principal,),) = old.rows(f"SELECT {old.schema}.lock_principal()")
    assert principal == f"{old.schema}_locks"
