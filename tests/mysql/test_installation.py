"""Installations that meet others, that end in the middle, and that wait for a table."""

import contextlib
import time

import pytest
from support import Database, random_name

import sqlsem
from sqlsem.engines.base import KEEP_FEATURES, Busy
from sqlsem.engines.mysql.session import statements_of

pytestmark = pytest.mark.engines("mysql")


@pytest.fixture
def empty(mariadb_server):
    """An empty database."""
    name = random_name()
    mariadb_server.rows(f"CREATE DATABASE {name}")
    yield Database("mysql", mariadb_server.url(name), {}, mariadb_server)
    mariadb_server.end_sessions(database=name)
    mariadb_server.rows(f"DROP DATABASE {name}")


def contents(database):
    """Return all columns, indexes and triggers, and the settings."""
    return [
        sorted(database.rows(f"SELECT {columns} FROM information_schema.{table} WHERE {schema}_schema = DATABASE() "))
        for table, schema, columns in (
            ("columns", "table", "table_name, column_name, column_type, COALESCE(collation_name, '')"),
            ("statistics", "table", "table_name, index_name, seq_in_index, column_name"),
            ("triggers", "trigger", "trigger_name, event_manipulation, action_statement"),
        )
    ] + [sorted(database.rows("SELECT name, value FROM sqlsem_setting WHERE name NOT IN ('origin', 'started')"))]


@pytest.fixture
def complete(mariadb_server, make_database):
    """The contents of a database after an installation."""
    return contents(make_database(mariadb_server))


def test_two_installations_at_once(empty, complete, threads, name):
    for _ in range(3):
        threads.start(empty.install)
    threads.join()
    assert contents(empty) == complete
    with empty.coordinator() as coordinator, coordinator.mutex(name):
        pass


def test_a_killed_installation_is_finished_by_the_next(empty, complete):
    """Each statement that changes tables commits by itself, so a killed installation leaves a part of them."""
    engine = empty.make_engine()
    statements = [statement for _, text in engine.plan({}, KEEP_FEATURES) for statement in statements_of(text)]
    for count in sorted({*range(1, len(statements), 9), *range(len(statements) - 4, len(statements) + 1)}):
        with contextlib.closing(empty.session()) as session:
            for statement in statements[:count]:
                session.execute_text(statement.replace("%", "%%"))
        empty.install()
        assert contents(empty) == complete, f"after {count} statements"
        with contextlib.closing(empty.session()) as session:
            session.execute_text("SET SESSION foreign_key_checks = 0")
            for (table,) in empty.rows("SHOW TABLES"):
                session.execute_text(f"DROP TABLE {table}")


def test_an_installation_behind_an_open_transaction_gives_up(empty, plain_on):
    """A transaction that has read a table keeps its definition. The installation says so after some seconds."""
    empty.install()
    cursor = plain_on(empty.url).cursor()
    cursor.execute("SELECT COUNT(*) FROM ProcessControl")
    cursor.fetchall()
    empty.rows("DELETE FROM sqlsem_setting")
    began = time.monotonic()
    with pytest.raises(Busy, match="open transaction"):
        empty.install()
    assert time.monotonic() - began > 3
    cursor.connection.rollback()
    empty.install()


def test_two_schemas_do_not_share_the_queue(empty, name):
    empty.install()
    other = Database("mysql", empty.url, {"schema": "other"}, empty.server)
    with pytest.raises(sqlsem.ConfigurationError, match=r"does not belong to schema other.*--table"):
        other.install()
    other = Database("mysql", empty.url, {"schema": "other", "table": "OtherQueue"}, empty.server)
    other.install()
    with empty.coordinator() as coordinator, other.coordinator() as second:
        with coordinator.mutex(name), second.mutex(name, timeout=0):
            assert len(coordinator.admin.entries()) == len(second.admin.entries()) == 1
