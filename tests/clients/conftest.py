"""On PostgreSQL: tables of an owner without superuser rights, as recommended, and logins with one of the roles."""

import contextlib
import secrets

import psycopg
import pytest
from psycopg import errors, sql
from support import Database, random_name, shuffling, until
from support.callers import Caller
from support.databases import name_of_database


@pytest.fixture(scope=shuffling.scope_of_databases)
def _plainly_owned_database(postgres_server):
    """A database that was installed by a login that may only create roles, and objects in this database."""
    name = random_name()
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        connection.execute(f"CREATE ROLE {name}_owner LOGIN CREATEROLE")
        connection.execute(f"GRANT CREATE ON DATABASE {name} TO {name}_owner")
    Database("postgresql", postgres_server.url(name, user=f"{name}_owner"), {}, postgres_server).install()
    yield Database("postgresql", postgres_server.url(name), {}, postgres_server)
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        connection.execute(f"DROP ROLE {name}_owner")


@pytest.fixture
def database(database, engine_name, request):
    return request.getfixturevalue("_plainly_owned_database") if engine_name == "postgresql" else database


@pytest.fixture
def login(database):
    """``login("sqlsem_user")`` makes a login with that role (or with none): a `Database` seen through it."""
    logins = []
    with psycopg.connect(database.url, autocommit=True) as connection:

        def login(role=None):
            name = f"sqlsem_test_{secrets.token_hex(5)}"
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
            logins.append(name)
            if role is not None:
                connection.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(role), sql.Identifier(name)))
            url = database.server.url(name_of_database(database), user=name)
            return Database("postgresql", url, database.options, database.server)

        yield login
        for name in logins:
            with contextlib.suppress(errors.UndefinedObject):
                connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", (name,))
                until(
                    lambda name=name: (
                        connection.execute(
                            "SELECT count(*) FROM pg_stat_activity WHERE usename = %s", (name,)
                        ).fetchone()
                        == (0,)
                    )
                )
                connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
                connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


@pytest.fixture
def user(login):
    return login("sqlsem_user")


@pytest.fixture
def session(database):
    """``session()`` opens a session, and returns its `Caller`; ``session(login)``: as that login."""
    callers = []

    def session(of=database, **options):
        callers.append(Caller(of, **options))
        return callers[-1]

    yield session
    for caller in callers:
        with contextlib.suppress(psycopg.Error):
            caller.close()
