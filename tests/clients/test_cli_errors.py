"""The commands' messages for errors of PostgreSQL: the server's words, and advice that fits."""

from __future__ import annotations

import json

import psycopg
import pytest
from click.testing import CliRunner

from sqlsem import cli

pytestmark = pytest.mark.engines("postgresql")


def call(url: str, *arguments: str):
    result = CliRunner().invoke(cli.main, ["--url", url, *arguments], env={"COLUMNS": None})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


FAILING = """
DO $$ BEGIN
  RAISE EXCEPTION 'the ledger is closed' USING ERRCODE = 'P0042', DETAIL = 'since Monday', HINT = 'open it first';
END $$
"""


def test_failed_sql_task_keeps_the_servers_message(database, name):
    for text in (FAILING, "SELECT * FROM nowhere_at_all"):
        assert call(database.url, "put", name, "--on-failure", "continue", "--sql", text).exit_code == 0
    worked = call(database.url, "work", name, "--idle-exit", "0")
    assert "P0042: the ledger is closed" in worked.stderr
    missing, raised = (task["error"] for task in json.loads(call(database.url, "tasks", name, "--json").stdout))
    assert raised.splitlines()[0].endswith("P0042: the ledger is closed")
    for words in ("since Monday", "open it first", "PL/pgSQL function inline_code_block line"):
        assert raised.count(words) == 1
    assert '42P01: relation "nowhere_at_all" does not exist' in missing.splitlines()[0]
    for words in ("Unavailable", "Traceback", "sqlsem init", "bodies/"):
        assert words not in missing + raised
    assert "the ledger is closed" in call(database.url, "tasks", name).stdout


def test_a_task_without_a_right_is_not_told_to_get_ours(database, name):
    login = f"{name}_reads_nothing"
    with database.raw() as connection:
        connection.execute(f"CREATE TABLE {name}_secret ()")
        connection.execute(f"CREATE ROLE {login}")
    try:
        text = f"SET LOCAL ROLE {login}; SELECT * FROM {name}_secret"
        call(database.url, "put", name, "--on-failure", "continue", "--sql", text)
        call(database.url, "work", name, "--idle-exit", "0")
        (task,) = json.loads(call(database.url, "tasks", name, "--json").stdout)
        assert "42501: permission denied for table" in task["error"].splitlines()[0]
        assert "GRANT" not in task["error"]
    finally:
        with database.raw() as connection:
            connection.execute(f"DROP TABLE {name}_secret")
            connection.execute(f"DROP ROLE {login}")


def test_init_without_the_rights_says_which(database, name):
    login = f"{name}_installer"
    with database.raw() as connection:
        connection.execute(f"CREATE ROLE {login} LOGIN PASSWORD 'secret'")
    try:
        parts = {**psycopg.conninfo.conninfo_to_dict(database.url), "user": login, "password": "secret"}
        host = parts.get("host", "127.0.0.1")
        url = f"postgresql://{login}:secret@{host}:{parts['port']}/{parts['dbname']}"
        for schema in ("sqlsem", f"{name}_other"):
            result = call(url, "--schema", schema, "init")
            assert result.exit_code == 78, result.output
            assert "permission denied" in result.stderr or "must be owner" in result.stderr
            assert "init needs a login that may create a schema in this database or" in result.stderr
            assert "GRANT" not in result.stderr
    finally:
        with database.raw() as connection:
            connection.execute(f"DROP ROLE {login}")
