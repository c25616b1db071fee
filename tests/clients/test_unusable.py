"""PostgreSQL databases that cannot be used: each command gives the reason, and leaves nothing behind. (SQLite files:
tests/conformance/test_input.py.)
"""

from __future__ import annotations

import sys

import psycopg
import pytest
from support.commands import output_of
from support.databases import empty_database, name_of_database, through

pytestmark = pytest.mark.engines("postgresql")
COMMANDS = [("init",), ("doctor",), ("ls",), ("run", "--mutex", "x", "--", sys.executable, "-c", "print('inside')")]


def run(url, *command):
    code, output = output_of(url, *command)
    assert "inside" not in output
    return code, output


@pytest.fixture
def empty(postgres_server):
    """An empty database, and a login without rights."""
    with empty_database(postgres_server, "stranger") as database:
        yield database


@pytest.fixture
def stranger(empty):
    """The database's URL for the login without rights."""
    return through(empty, "stranger").url


@pytest.fixture
def admin(postgres_server):
    """Run a statement outside of the database, as a superuser."""
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        yield connection.execute


def nothing_is_there(empty):
    return empty.rows("SELECT nspname FROM pg_namespace WHERE nspname = 'sqlsem'") == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_database_that_takes_no_connections_is_named(empty, stranger, admin, command):
    admin(f"ALTER DATABASE {name_of_database(empty)} ALLOW_CONNECTIONS false")
    code, output = run(stranger, *command)
    assert code == (1 if command[0] == "doctor" else 69)
    assert "not currently accepting connections" in output
    assert name_of_database(empty) in output


def test_init_in_a_read_only_database_leaves_nothing(empty, admin):
    admin(f"ALTER DATABASE {name_of_database(empty)} SET default_transaction_read_only = on")
    code, output = run(empty.url, "init")
    assert code == 69
    assert "read-only" in output
    assert nothing_is_there(empty)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_login_without_rights_leaves_nothing(empty, stranger, command):
    code, output = run(stranger, *command)
    assert code == (1 if command[0] == "doctor" else 78)
    if command[0] == "init":
        assert "permission denied" in output
        assert "init needs a login that may create a schema in this database" in output
    else:
        assert "sqlsem init" in output, "there are no tables"
    assert nothing_is_there(empty)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_login_without_connect_right_is_reported(empty, stranger, admin, command):
    admin(f"REVOKE CONNECT ON DATABASE {name_of_database(empty)} FROM PUBLIC")
    code, output = run(stranger, *command)
    assert code == (1 if command[0] == "doctor" else 78)
    assert "permission denied for database" in output
    assert name_of_database(empty) in output
