"""`sqlsem init` at bad moments, and clients and tables of different versions. The third version of the schema that is
used here exists in this file only.
"""

import contextlib
import os
import subprocess
import sys

import psycopg
import pytest
from support import PATIENCE, Attempt, Database, random_name, until

import sqlsem
from sqlsem import sql

pytestmark = pytest.mark.engines("postgresql")

THIRD = """
ALTER TABLE {schema}.{table} ADD COLUMN colour text;
CREATE TABLE {schema}.added (made_by integer NOT NULL DEFAULT pg_backend_pid());
INSERT INTO {schema}.added DEFAULT VALUES;
"""


@pytest.fixture
def empty(postgres_server):
    """A database with nothing in it."""
    name = random_name()
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield Database("postgresql", postgres_server.url(name), {}, postgres_server)
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def version_three(monkeypatch):
    """This client brings version 3."""
    read = sql._read.__wrapped__
    monkeypatch.setattr(sql, "LATEST", 3)
    monkeypatch.setattr(sql, "_read", lambda engine, file: THIRD if file == "schema-3.sql" else read(engine, file))


def settings(database):
    return dict(database.rows("SELECT name, value FROM sqlsem.setting"))


def init(database):
    return subprocess.Popen(
        [sys.executable, "-m", "sqlsem", "init"],
        env={**os.environ, "SQLSEM_URL": database.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_several_at_once_on_an_empty_database(empty, name):
    started = [init(empty) for _ in range(5)]
    for process in started:
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        assert output.endswith("Done.\n")
    assert settings(empty)["schema_version"] == "2"
    with contextlib.closing(empty.coordinator()) as coordinator, coordinator.mutex(name) as grant:
        assert grant.position == 1


def test_several_upgrades_at_once(empty, version_three, threads):
    with pytest.MonkeyPatch.context() as older:
        older.setattr(sql, "LATEST", 2)
        empty.install()
    assert settings(empty)["schema_version"] == "2"
    for _ in range(4):
        threads.start(empty.install)
    threads.join()
    assert settings(empty)["schema_version"] == "3"
    assert empty.rows("SELECT count(*) FROM sqlsem.added") == [(1,)], "the schema script ran once"


def test_one_waits_for_another(empty, threads):
    """The install lock is held to the end: the second finds the tables of the first."""
    empty.install()
    with empty.raw(autocommit=False) as first:
        first.execute(sql.queries("postgresql")["install_lock"])
        process = init(empty)
        until(
            lambda: empty.rows(
                "SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'advisory' AND database = "
                "(SELECT oid FROM pg_database WHERE datname = current_database())"
            )
        )
        assert process.poll() is None
        first.commit()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output


def test_init_while_locks_are_held_and_waited_for(connect, database, name):
    holder, coordinator = connect(), connect()
    with database.raw() as session, database.raw() as waiting:
        with holder.mutex(name) as grant:
            code, position, _ = session.execute("CALL sqlsem.acquire(%s)", (name("b"),)).fetchone()
            assert code == 0
            late = Attempt(coordinator.mutex(name))
            until(lambda: len(database.queue(name)) == 3)
            for _ in range(3):
                process = init(database)
                output, _ = process.communicate(timeout=PATIENCE)
                assert process.returncode == 0, output
                assert "run again" in output or "running again" in output
            grant.check()
            assert late.waits()
            assert waiting.execute("CALL sqlsem.try(%s)", (name("b"),)).fetchone()[0] == -1
            assert session.execute("SELECT sqlsem.renew(%s, %s)", (name("b"), position)).fetchone() == (0,)
        late.granted()
        late.leave()
        assert session.execute("SELECT sqlsem.release(%s, %s)", (name("b"), position)).fetchone() == (0,)


def test_an_upgrade_while_locks_are_held_and_waited_for(empty, version_three, name, threads):
    with pytest.MonkeyPatch.context() as older:
        older.setattr(sql, "LATEST", 2)
        empty.install()
        coordinators = [empty.coordinator() for _ in range(2)]
        with coordinators[0].mutex(name) as grant:
            late = Attempt(coordinators[1].mutex(name))
            until(lambda: len(empty.queue(name)) == 2)
            older.setattr(sql, "LATEST", 3)
            empty.install()
            older.setattr(sql, "LATEST", 2)
            assert settings(empty)["schema_version"] == "3"
            grant.check()
            assert late.waits()
        late.granted()
        late.leave()
        # The older client goes on with the newer tables.
        with coordinators[0].mutex(name):
            pass
        for coordinator in coordinators:
            coordinator.close()


def test_a_failed_upgrade_leaves_everything_as_it_was(empty, monkeypatch, version_three, name):
    with pytest.MonkeyPatch.context() as older:
        older.setattr(sql, "LATEST", 2)
        empty.install()
    whole = sql._read
    monkeypatch.setattr(
        sql,
        "_read",
        lambda engine, file: whole(engine, file) + "\nSELECT 1 / 0;" if file == "schema-3.sql" else whole(engine, file),
    )
    with pytest.raises(sqlsem.SqlsemError, match="division by zero"):
        empty.install()
    assert settings(empty)["schema_version"] == "2"
    assert empty.rows("SELECT to_regclass('sqlsem.added')") == [(None,)]
    monkeypatch.setattr(sql, "LATEST", 2)
    with contextlib.closing(empty.coordinator()) as coordinator, coordinator.mutex(name):
        pass


def test_never_a_downgrade(empty, version_three):
    empty.install()
    before = empty.rows("SELECT oid, xmin::text FROM pg_proc WHERE pronamespace = 'sqlsem'::regnamespace ORDER BY oid")
    process = init(empty)  # which knows version 2 only
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 78
    assert "version 3, newer than this client's 2" in output
    assert "pip install --upgrade sqlsem" in output
    assert settings(empty)["schema_version"] == "3"
    assert before == empty.rows(
        "SELECT oid, xmin::text FROM pg_proc WHERE pronamespace = 'sqlsem'::regnamespace ORDER BY oid"
    )


def test_an_older_client_works_as_long_as_the_tables_say_so(empty, monkeypatch, version_three, name):
    empty.install()
    monkeypatch.setattr(sql, "LATEST", 2)
    assert settings(empty) == {"schema_version": "3", "oldest_client": "1", "history_days": "30"}
    with contextlib.closing(empty.coordinator()) as coordinator:
        with coordinator.mutex(name), coordinator.limit(name("b"), 3):
            pass
    empty.rows("UPDATE sqlsem.setting SET value = '3' WHERE name = 'oldest_client'")
    with contextlib.closing(empty.coordinator()) as coordinator:
        with pytest.raises(
            sqlsem.SchemaError, match=r"version 3 and need a client of version 3 or later, this one is 2.*pip install"
        ):
            coordinator.mutex(name).acquire(timeout=5)
    assert empty.queue(name) == []


def test_a_newer_client_says_how_to_upgrade(empty, monkeypatch, version_three, name):
    with pytest.MonkeyPatch.context() as older:
        older.setattr(sql, "LATEST", 2)
        empty.install()
    with contextlib.closing(empty.coordinator()) as coordinator:
        with pytest.raises(sqlsem.SchemaError, match=r"version 2, this client needs 3.*sqlsem init"):
            coordinator.mutex(name).acquire(timeout=5)
        empty.install()
        with coordinator.mutex(name):
            pass
