"""PostgreSQL databases that cannot be used: each command gives the reason, and leaves nothing behind. (SQLite files:
tests/conformance/test_input.py.)
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support import Database, random_name

pytestmark = pytest.mark.engines("postgresql")
COMMANDS = [("init",), ("doctor",), ("ls",), ("run", "--mutex", "x", "--", sys.executable, "-c", "print('inside')")]


def run(url, *command):
    child = subprocess.run(
        [sys.executable, "-m", "sqlsem", "--retry", "0.5", *command],
        env={**os.environ, "SQLSEM_URL": url, "SQLSEM_CONFIG": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    output = " ".join((child.stdout + child.stderr).split())
    assert "Traceback" not in output, output
    assert "inside" not in output
    return child.returncode, output


@pytest.fixture
def own(postgres_server):
    """An empty PostgreSQL database, and a login without rights."""
    import psycopg

    name = random_name()
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        connection.execute(f"CREATE ROLE {name}_stranger LOGIN")
        own = Database("postgresql", postgres_server.url(name), {}, postgres_server)
        own.name, own.stranger = name, postgres_server.url(name, user=f"{name}_stranger")
        own.admin = connection.execute
        yield own
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        connection.execute(f"DROP ROLE {name}_stranger")


def nothing_is_there(own):
    return own.rows("SELECT nspname FROM pg_namespace WHERE nspname = 'sqlsem'") == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_database_that_takes_no_connections_is_named(own, command):
    own.admin(f"ALTER DATABASE {own.name} ALLOW_CONNECTIONS false")
    code, output = run(own.stranger, *command)
    assert code == (1 if command[0] == "doctor" else 69)
    assert "not currently accepting connections" in output
    assert own.name in output


def test_init_in_a_read_only_database_leaves_nothing(own):
    own.admin(f"ALTER DATABASE {own.name} SET default_transaction_read_only = on")
    code, output = run(own.url, "init")
    assert code == 69
    assert "read-only" in output
    assert nothing_is_there(own)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_login_without_rights_leaves_nothing(own, command):
    code, output = run(own.stranger, *command)
    assert code == (1 if command[0] == "doctor" else 78)
    if command[0] == "init":
        assert "permission denied" in output
        assert "init needs a login that may create a schema in this database" in output
    else:
        assert "sqlsem init" in output, "there are no tables"
    assert nothing_is_there(own)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_login_that_may_not_connect_is_told_so(own, command):
    own.admin(f"REVOKE CONNECT ON DATABASE {own.name} FROM PUBLIC")
    code, output = run(own.stranger, *command)
    assert code == (1 if command[0] == "doctor" else 78)
    assert "permission denied for database" in output
    assert own.name in output
