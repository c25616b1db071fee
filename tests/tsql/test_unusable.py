"""Databases that cannot be used on a real server: read-only, offline, too old, of another owner; logins without rights.

Each needs a login that may create databases or logins. Elsewhere tests/mssql/test_unusable.py has the answers alone.
"""

from __future__ import annotations

import contextlib
import secrets

import pytest
import support
from support import PATIENCE, Database, random_name, until

import sqlsem
from sqlsem.engines.mssql.odbc import join, words_of_odbc

pytestmark = pytest.mark.engines("mssql")


@pytest.fixture
def admin(database):
    """Run a statement as the login of the tests; skip the test when the server refuses it."""
    connection = database.raw()

    def run(text):
        try:
            connection.execute(text)
        except Exception as exc:
            pytest.skip(f"the server refuses {text}: {exc}")

    if "Microsoft" not in connection.execute("SELECT @@VERSION").fetchone()[0]:
        pytest.skip("a server that only speaks T-SQL has other databases and logins")
    yield run
    connection.close()


@pytest.fixture
def own(database, admin):
    """An empty database."""
    name = random_name()
    admin(f"CREATE DATABASE {name}")
    yield Database("mssql", support.with_database(database.make_engine().odbc_string, name), {"schema": "sqlsem"})
    connection = database.raw()
    connection.execute(f"IF DATABASEPROPERTYEX('{name}', 'Status') = 'OFFLINE' ALTER DATABASE {name} SET ONLINE")
    connection.execute(f"ALTER DATABASE {name} SET SINGLE_USER WITH ROLLBACK IMMEDIATE")
    connection.execute(f"DROP DATABASE {name}")
    connection.close()


def name_of(own):
    return words_of_odbc(own.url)["Database"]


def nothing_is_there(own):
    return own.rows("SELECT SCHEMA_ID(N'sqlsem'), DATABASE_PRINCIPAL_ID(N'sqlsem_user')") == [(None, None)]


@pytest.mark.parametrize("level", [130, 140, 150, 160])
def test_everything_works_at_an_old_level(own, admin, level):
    admin(f"ALTER DATABASE {name_of(own)} SET COMPATIBILITY_LEVEL = {level}")
    own.install()
    with own.coordinator() as coordinator:
        with coordinator.all_of(coordinator.mutex("a"), coordinator.limit("b", 2)):
            pass
        with coordinator.rate("c", 2, per=60):
            pass
        coordinator.queue("q").put(sqlsem.Sql("SELECT 1"))
    assert own.queue("") == []


def test_level_below_130_is_refused_and_nothing_is_left(own, admin):
    admin(f"ALTER DATABASE {name_of(own)} SET COMPATIBILITY_LEVEL = 120")
    with pytest.raises(sqlsem.ConfigurationError, match=r"below 130.*COMPATIBILITY_LEVEL = 130"):
        own.install()
    assert nothing_is_there(own)


def test_read_only_database_is_named_and_works_again(own, admin):
    own.install()
    admin(f"ALTER DATABASE {name_of(own)} SET READ_ONLY WITH ROLLBACK IMMEDIATE")
    with own.coordinator(retry=0.5) as coordinator, pytest.raises(sqlsem.Unavailable, match="READ_WRITE"):
        coordinator.mutex("a").acquire(timeout=5)
    with pytest.raises(sqlsem.Unavailable, match="read-only"):
        own.install()
    admin(f"ALTER DATABASE {name_of(own)} SET READ_WRITE WITH ROLLBACK IMMEDIATE")
    with own.coordinator() as coordinator, coordinator.mutex("a"):
        pass
    assert own.queue("") == []


def test_offline_database_is_named_and_works_again(own, admin):
    own.install()
    admin(f"ALTER DATABASE {name_of(own)} SET OFFLINE WITH ROLLBACK IMMEDIATE")
    with own.coordinator(retry=0.5) as coordinator, pytest.raises(sqlsem.Unavailable, match=name_of(own)):
        coordinator.mutex("a").acquire(timeout=5)
    with pytest.raises(sqlsem.Unavailable, match=name_of(own)):
        own.install()
    admin(f"ALTER DATABASE {name_of(own)} SET ONLINE")
    with own.coordinator() as coordinator, coordinator.mutex("a"):
        pass
    assert own.queue("") == []


@pytest.fixture
def stranger(own, admin):
    """The same database for a login that is a user there, without any right."""
    name, password = f"sqlsem_{secrets.token_hex(5)}", f"Aa1_{secrets.token_hex(10)}"
    admin(f"CREATE LOGIN {name} WITH PASSWORD = '{password}'")
    own.rows(f"CREATE USER {name} FOR LOGIN {name}")
    words = {
        key: value
        for key, value in words_of_odbc(own.url).items()
        if key.lower() not in ("uid", "pwd", "trusted_connection")
    }
    yield Database("mssql", join({**words, "UID": name, "PWD": password}), {"schema": "sqlsem"})
    own.rows(f"DROP USER {name}")

    def drop():
        with contextlib.suppress(Exception):  # its session ends a moment later
            own.rows(f"DROP LOGIN {name}")
            return True

    until(drop, "the end of the login", PATIENCE)


def test_login_without_rights_is_told_so_and_leaves_nothing(own, stranger):
    with pytest.raises(sqlsem.ConfigurationError, match="db_owner"):
        stranger.install()
    assert nothing_is_there(own)
    own.install()
    with stranger.coordinator() as coordinator, pytest.raises((sqlsem.ConfigurationError, sqlsem.SchemaError)):
        coordinator.mutex("a").acquire(timeout=5)
    with pytest.raises((sqlsem.ConfigurationError, sqlsem.SchemaError)):
        stranger.install()
    assert own.rows("SELECT COUNT(*) FROM sqlsem.member") == [(0,)]
    assert own.queue("") == []


def test_schema_of_another_owner_is_refused_until_it_is_given_over(own, stranger):
    owner = words_of_odbc(stranger.url)["UID"]
    own.rows(f"CREATE SCHEMA sqlsem AUTHORIZATION {owner}")
    with pytest.raises(sqlsem.ConfigurationError, match=rf"belongs to \[{owner}\].*ALTER AUTHORIZATION ON SCHEMA::"):
        own.install()
    assert own.rows("SELECT COUNT(*) FROM sys.objects WHERE schema_id = SCHEMA_ID(N'sqlsem')") == [(0,)]
    assert own.rows("SELECT DATABASE_PRINCIPAL_ID(N'sqlsem_user')") == [(None,)]
    own.rows("ALTER AUTHORIZATION ON SCHEMA::sqlsem TO dbo")
    own.install()
    with own.coordinator() as coordinator, coordinator.mutex("a"):
        pass
