"""`sqlsem init` at bad moments, and clients and tables of different versions. The next version of the schema that is
used here exists in this file only; the earlier ones are in `older`, as they were.
"""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg
import pytest
from support import PATIENCE, Attempt, Database, random_name, until

import sqlsem
from sqlsem import sql

pytestmark = pytest.mark.engines("postgresql")

#: This client's version, and a later one.
THIS, NEXT = sql.LATEST, sql.LATEST + 1
LATER = """
ALTER TABLE {schema}.{table} ADD COLUMN colour text;
CREATE TABLE {schema}.added (made_by integer NOT NULL DEFAULT pg_backend_pid());
INSERT INTO {schema}.added DEFAULT VALUES;
"""


@pytest.fixture
def new_empty(postgres_server):
    """Makes databases with nothing in them."""
    made = []

    def new():
        name = random_name()
        with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        made.append(name)
        return Database("postgresql", postgres_server.url(name), {}, postgres_server)

    yield new
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        for name in made:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def empty(new_empty):
    """A database with nothing in it."""
    return new_empty()


@pytest.fixture
def later_version(monkeypatch):
    """This client brings the next version."""
    read = sql._read.__wrapped__
    monkeypatch.setattr(sql, "LATEST", NEXT)
    monkeypatch.setattr(
        sql, "_read", lambda engine, file: LATER if file == f"schema-{NEXT}.sql" else read(engine, file)
    )


def settings(database):
    return dict(database.rows("SELECT name, value FROM sqlsem.setting"))


def init(database, url=None):
    return subprocess.Popen(
        [sys.executable, "-m", "sqlsem", "init"],
        env={**os.environ, "SQLSEM_URL": url or database.url},
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
    assert settings(empty)["schema_version"] == str(THIS)
    with contextlib.closing(empty.coordinator()) as coordinator, coordinator.mutex(name) as grant:
        assert grant.position == 1


def test_several_upgrades_at_once(empty, later_version, threads):
    with pytest.MonkeyPatch.context() as older:
        older.setattr(sql, "LATEST", THIS)
        empty.install()
    assert settings(empty)["schema_version"] == str(THIS)
    for _ in range(4):
        threads.start(empty.install)
    threads.join()
    assert settings(empty)["schema_version"] == str(NEXT)
    assert empty.rows("SELECT count(*) FROM sqlsem.added") == [(1,)], "the schema script ran once"


def test_one_waits_for_another(empty, threads):
    """The install lock is held to the end: the second finds the tables of the first."""
    empty.install()
    with empty.raw(autocommit=False) as first:
        first.execute(sql.queries("postgresql")["install_lock"])
        process = init(empty)
        until(lambda: empty.waiting_for("advisory"))
        assert process.poll() is None
        first.commit()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output


def test_init_while_locks_are_held_and_waited_for(connect, database, name):
    place = database.rows("SELECT current_database()")[0][0]
    owner = database.server.url(place, user=f"{place}_owner")  # who installed it: see conftest
    holder, coordinator = connect(), connect()
    with database.raw() as session, database.raw() as waiting:
        with holder.mutex(name) as grant:
            code, position, _ = session.execute("CALL sqlsem.acquire(%s)", (name("b"),)).fetchone()
            assert code == 0
            late = Attempt(coordinator.mutex(name))
            until(lambda: len(database.queue(name)) == 3)
            for _ in range(3):
                process = init(database, owner)
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


def test_an_upgrade_while_locks_are_held_and_waited_for(empty, later_version, name, threads):
    with pytest.MonkeyPatch.context() as older:
        older.setattr(sql, "LATEST", THIS)
        empty.install()
        coordinators = [empty.coordinator() for _ in range(2)]
        with coordinators[0].mutex(name) as grant:
            late = Attempt(coordinators[1].mutex(name))
            until(lambda: len(empty.queue(name)) == 2)
            older.setattr(sql, "LATEST", NEXT)
            empty.install()
            older.setattr(sql, "LATEST", THIS)
            assert settings(empty)["schema_version"] == str(NEXT)
            grant.check()
            assert late.waits()
        late.granted()
        late.leave()
        # The older client goes on with the newer tables.
        with coordinators[0].mutex(name):
            pass
        for coordinator in coordinators:
            coordinator.close()


def test_a_failed_upgrade_leaves_everything_as_it_was(empty, monkeypatch, later_version, name):
    with pytest.MonkeyPatch.context() as older:
        older.setattr(sql, "LATEST", THIS)
        empty.install()
    whole = sql._read
    monkeypatch.setattr(
        sql,
        "_read",
        lambda engine, file: (
            whole(engine, file) + "\nSELECT 1 / 0;" if file == f"schema-{NEXT}.sql" else whole(engine, file)
        ),
    )
    with pytest.raises(sqlsem.SqlsemError, match="division by zero"):
        empty.install()
    assert settings(empty)["schema_version"] == str(THIS)
    assert empty.rows("SELECT to_regclass('sqlsem.added')") == [(None,)]
    monkeypatch.setattr(sql, "LATEST", THIS)
    with contextlib.closing(empty.coordinator()) as coordinator, coordinator.mutex(name):
        pass


def test_never_a_downgrade(empty, later_version):
    empty.install()
    before = empty.rows("SELECT oid, xmin::text FROM pg_proc WHERE pronamespace = 'sqlsem'::regnamespace ORDER BY oid")
    process = init(empty)  # which knows its own version only
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 78
    assert f"version {NEXT}, newer than this client's {THIS}" in output
    assert "pip install --upgrade sqlsem" in output
    assert settings(empty)["schema_version"] == str(NEXT)
    assert before == empty.rows(
        "SELECT oid, xmin::text FROM pg_proc WHERE pronamespace = 'sqlsem'::regnamespace ORDER BY oid"
    )


def test_an_older_client_works_as_long_as_the_tables_say_so(empty, monkeypatch, later_version, name):
    empty.install()
    monkeypatch.setattr(sql, "LATEST", THIS)
    found = settings(empty)
    assert (found["schema_version"], found["oldest_client"], found["history_days"]) == (str(NEXT), "3", "30")
    with contextlib.closing(empty.coordinator()) as coordinator:
        with coordinator.mutex(name), coordinator.limit(name("b"), 3):
            pass
    empty.rows("UPDATE sqlsem.setting SET value = ? WHERE name = 'oldest_client'", str(NEXT))
    with contextlib.closing(empty.coordinator()) as coordinator:
        with pytest.raises(
            sqlsem.SchemaError,
            match=rf"version {NEXT} and need a client of version {NEXT} or later, this one is {THIS}.*pip install",
        ):
            coordinator.mutex(name).acquire(timeout=5)
    assert empty.queue(name) == []


def test_a_newer_client_says_how_to_upgrade(empty, monkeypatch, later_version, name):
    with pytest.MonkeyPatch.context() as older:
        older.setattr(sql, "LATEST", THIS)
        empty.install()
    with contextlib.closing(empty.coordinator()) as coordinator:
        with pytest.raises(sqlsem.SchemaError, match=rf"version {THIS}, this client needs {NEXT}.*sqlsem init"):
            coordinator.mutex(name).acquire(timeout=5)
        empty.install()
        with coordinator.mutex(name):
            pass


# -- from earlier versions ------------------------------------------------------------------------------------

OLDER = Path(__file__).resolve().parent / "older"
#: The rerunnable scripts of those versions, in order.
SCRIPTS = {
    1: ("routines", "public", "permissions"),
    2: ("routines", "deadlocks", "public", "tasks", "rounds", "conversions", "permissions"),
    3: ("routines", "deadlocks", "public", "tasks", "rounds", "conversions", "permissions"),
    4: ("routines", "deadlocks", "public", "tasks", "rounds", "conversions", "permissions"),
    5: ("routines", "deadlocks", "public", "tasks", "rounds", "conversions", "overview", "permissions"),
}


def install_older(database, version):
    with database.raw() as connection, connection.transaction():
        for number in range(1, version + 1):
            connection.execute(dict(sql.migrations("postgresql", 0))[number].encode())
        for name in SCRIPTS[version]:
            text = (OLDER / str(version) / f"{name}.sql").read_text(encoding="utf-8")
            connection.execute(text.replace("{schema}", "sqlsem").replace("{table}", "ProcessControl").encode())
        connection.execute("UPDATE sqlsem.setting SET value = %s WHERE name = 'schema_version'", (str(version),))


class OlderClient:
    """What a Python client of those versions says to the server: one main session that pings, one to wait in."""

    def __init__(self, database, resource):
        self.resource = resource
        self.main = database.raw()
        self.waiting = database.raw()
        self.longest = 0.0  # between two pings
        self.member = self.value("sqlsem.enrol('older', 1, 'older client', 5000, NULL)")
        row = self.main.execute(
            "SELECT queue_position, granted FROM sqlsem.register(%s, 'older', 'older', "
            "gen_random_uuid()::varchar, false, %s, 'write', 1, 1, NULL)",
            (self.member, resource),
        ).fetchone()
        self.position, self.granted = row
        self.stop = threading.Event()
        self.entered = threading.Event()

    def value(self, text, *parameters):
        return self.main.execute(f"SELECT {text}", parameters).fetchone()[0]

    def ping(self):
        last = time.monotonic()
        while not self.stop.wait(0.1):
            known, positions, _ = self.main.execute(
                "SELECT known, positions, revoked FROM sqlsem.ping(%s)", (self.member,)
            ).fetchone()
            assert known
            assert positions == [self.position]
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now

    def wait(self):
        while not self.stop.is_set():
            code = self.waiting.execute(
                "SELECT sqlsem.wait(%s::varchar, %s::bigint, %s::integer)", (self.resource, self.position, 3000)
            ).fetchone()[0]
            assert code in (0, 1, -1)
            if code == 0:
                self.entered.set()
                return

    def release(self):
        self.stop.set()
        assert self.value("sqlsem.release(%s::varchar, %s, 'older', 'released')", self.resource, self.position) == 0

    def close(self):
        self.stop.set()
        self.main.close()
        self.waiting.close()


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_an_older_version_is_upgraded_while_locks_are_held_and_waited_for(empty, name, threads, version):
    install_older(empty, version)
    clients = [OlderClient(empty, str(name)) for _ in range(4)]
    with empty.raw() as session, contextlib.closing(empty.raw()) as late:
        assert session.execute("CALL sqlsem.acquire(%s)", (name("s"),)).fetchone()[0] == 0
        for client in clients:
            threads.start(client.ping)
        for client in clients[1:]:
            threads.start(client.wait)
        threads.start(late.execute, "CALL sqlsem.acquire(%s)", (name("s"),))
        until(lambda: empty.waiting_for("advisory"))
        began = time.monotonic()
        empty.install()
        assert time.monotonic() - began < 30
        assert settings(empty)["schema_version"] == str(THIS)
        # Nobody has lost anything, and the turns go on, from an older client to the next.
        for client, behind in itertools.pairwise(clients):
            assert not behind.entered.is_set()
            client.release()
            assert behind.entered.wait(PATIENCE)
        with contextlib.closing(empty.coordinator()) as coordinator:
            newer = Attempt(coordinator.mutex(name))
            assert newer.waits()
            clients[-1].release()
            newer.granted()
            newer.leave()
        assert session.execute("SELECT sqlsem.release(%s)", (name("s"),)).fetchone() == (0,)
        threads.join()
        assert late.execute("SELECT sqlsem.release(%s)", (name("s"),)).fetchone() == (0,)
    for client in clients:
        client.close()
    assert max(client.longest for client in clients) < 4, "a ping waited so long that locks would be believed lost"
    assert empty.queue(name) == []


def test_an_upgrade_takes_all_tables_at_once_that_its_scripts_lock():
    """One after another, they would be waited for by those whom the installer waits for."""
    statement = sql.queries("postgresql")["lock_tables"]
    (names,) = re.findall(r"unnest\(ARRAY\[([^]]*)\]", statement)
    at_once = set(re.findall(r"'(\w+)'", names))
    locked = set()
    for _, text in sql.migrations("postgresql", 1):
        code = re.sub(r"--.*", "", text)
        for found in re.findall(r"LOCK TABLE ([^;]*?) IN ACCESS EXCLUSIVE", code):
            locked.update(name.strip().removeprefix("sqlsem.") for name in found.split(","))
        locked.update(re.findall(r"ALTER TABLE sqlsem\.(\w+)", code))
    assert {"ProcessControl", "member", "task"} <= locked
    assert locked <= at_once


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_an_upgrade_leaves_the_tables_of_a_new_installation(empty, make_database, postgres_server, version):
    install_older(empty, version)
    empty.install()
    empty.install()  # which takes away what was left for those who were in the middle of it
    fresh = make_database(postgres_server)
    for text in (
        "SELECT table_name::text, column_name::text, data_type::text, is_nullable::text, column_default::text "
        "FROM information_schema.columns WHERE table_schema = 'sqlsem' ORDER BY 1, 2",
        "SELECT oid::regprocedure::text, prosrc, proconfig FROM pg_proc "
        "WHERE pronamespace = 'sqlsem'::regnamespace ORDER BY 1",
        "SELECT indexdef FROM pg_indexes WHERE schemaname = 'sqlsem' ORDER BY 1",
        "SELECT sequencename::text, data_type::text, max_value FROM pg_sequences "
        "WHERE schemaname = 'sqlsem' ORDER BY 1",
        "SELECT name FROM sqlsem.setting ORDER BY 1",
    ):
        assert empty.rows(text) == fresh.rows(text)


def test_tasks_and_rounds_go_on_after_an_upgrade(empty, name):
    install_older(empty, 2)
    with empty.raw() as session:
        for body in ("SELECT 1", "SELECT 2"):
            session.execute("SELECT sqlsem.put(%s, %s)", (name, body))
        member = session.execute("SELECT sqlsem.enrol('older', 7, 'w', 5000, NULL)").fetchone()[0]
        claim = "SELECT task_id, attempt FROM sqlsem.claim_task(%s, %s, 'o', 'u', false)"
        task, attempt = session.execute(claim, (member, name)).fetchone()
        session.execute("SELECT sqlsem.round_part_start(%s, 'a', 'a, b', 3600)", (name,))
        empty.install()
        assert empty.rows("SELECT member_id, host, pid, login FROM sqlsem.task WHERE status = 'running'") == [
            (member, "older", 7, "postgres")
        ]
        assert session.execute("SELECT outcome FROM sqlsem.round_part_done(%s, 'a')", (name,)).fetchone() == (
            "succeeded",
        )
        ended = session.execute("SELECT sqlsem.end_task(%s, %s, %s, 'finished', NULL, NULL)", (member, task, attempt))
        assert ended.fetchone() == ("finished",)
        assert session.execute("CALL sqlsem.work(%s, 0)", (name,)).fetchone() == (1, 0)


def test_an_upgrade_moves_who_has_what(empty, login_on):
    """Who could run tasks, or put them, still can; only once, and not in a new installation."""
    install_older(empty, 2)
    roles = {role: login_on(empty, f"sqlsem_{role}") for role in ("user", "operator", "reader")}
    empty.install()

    def has(login, role):
        return empty.rows("SELECT pg_has_role(?, ?, 'MEMBER')", login, f"sqlsem_{role}") == [(True,)]

    assert {role: has(name, "worker") for role, name in roles.items()} == {
        "user": True,
        "operator": False,
        "reader": False,
    }
    assert {role: has(name, "putter") for role, name in roles.items()} == {
        "user": False,
        "operator": True,
        "reader": False,
    }
    empty.rows(f"REVOKE sqlsem_worker FROM {roles['user']}")
    empty.install()
    assert not has(roles["user"], "worker")


def test_logins_are_dropped_while_an_upgrade_gives_them_roles(own_postgres_server, name, threads):
    """They are the whole server's, and come and go."""
    empty = Database("postgresql", own_postgres_server.url("postgres"), {}, own_postgres_server)
    install_older(empty, 2)
    empty.rows("CREATE ROLE sqlsem_worker")  # by the installer of another database
    logins = [f"{name}_{number}" for number in range(3)]
    for login in logins:
        empty.rows(f"CREATE ROLE {login}")
        empty.rows(f"GRANT sqlsem_user TO {login}")
    with empty.raw(autocommit=False) as dropping:
        dropping.execute("LOCK TABLE pg_auth_members IN SHARE ROW EXCLUSIVE MODE")
        threads.start(empty.install)
        until(lambda: empty.waiting_for("relation"), "it gives the first of them a role")
        dropping.execute(f"DROP ROLE {', '.join(logins)}")
        dropping.commit()
    threads.join()
    assert settings(empty)["schema_version"] == str(THIS)


def test_a_new_installation_gives_nobody_a_role(empty, login_on):
    name = login_on(empty, "sqlsem_user")
    empty.install()
    assert empty.rows("SELECT pg_has_role(?, 'sqlsem_worker', 'MEMBER')", name) == [(False,)]


def test_init_gives_up_behind_a_lock(new_empty, name, threads):
    """Who waits for a table has everybody else wait behind it. (From each version in a database of its own, all at the
    same time: it tries for 20 s.)
    """

    def give_up(version, table):
        empty = new_empty()
        install_older(empty, version)
        with empty.raw(autocommit=False) as dump:
            dump.execute(f"LOCK TABLE sqlsem.{table} IN ACCESS SHARE MODE")
            process = init(empty)
            output, _ = process.communicate(timeout=2 * PATIENCE)
            assert process.returncode == 69, (version, output)
            assert "open transaction (a dump, VACUUM FULL?)" in output, version
            dump.rollback()
        assert settings(empty)["schema_version"] == str(version)
        with empty.raw() as session:
            acquired = session.execute("CALL sqlsem.acquire(%s, timeout_ms => 1000)", (name,)).fetchone()
            assert acquired[0] == 0, version
            session.execute("SELECT sqlsem.release(%s)", (name,))
        process = init(empty)
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, (version, output)

    for version, table in ((2, "ProcessControl"), (3, "ProcessControl"), (4, "task")):
        threads.start(give_up, version, table)
    threads.join(4 * PATIENCE)


def test_what_is_put_while_the_tables_are_upgraded_is_not_passed_by(empty, threads):
    """A put that stood before the locked table goes on with the older routine, which takes no put lock."""
    install_older(empty, 3)
    with empty.raw(autocommit=False) as blocker, empty.raw(autocommit=False) as putter:
        blocker.execute("LOCK TABLE sqlsem.task IN ACCESS EXCLUSIVE MODE")  # as the upgrade does
        put = "SELECT sqlsem.put('q', '1', 'call')"
        threads.start(putter.execute, put)
        until(lambda: empty.waiting_for("relation"))
        # The upgrade itself, in the transaction that has the lock.
        for _, text in sql.migrations("postgresql", 3):
            blocker.execute(text.encode())
        for script in sql.rerunnable("postgresql"):
            blocker.execute(sql.script("postgresql", script).encode())
        blocker.execute(sql.queries("postgresql")["set_version"], (str(THIS),))
        blocker.commit()
        threads.join()
        with empty.raw() as worker:
            worker.execute(
                "CREATE OR REPLACE FUNCTION sqlsem.is_time_for_mark(p_mark bigint, p_task bigint, p_most integer) "
                "RETURNS boolean LANGUAGE sql AS 'SELECT true'"
            )
            member = worker.execute("SELECT sqlsem.enrol('host', 1, 'test', 0, NULL)").fetchone()[0]
            claim = "SELECT task_id, attempt FROM sqlsem.claim_task(%s, 'q', 'test', %s, false)"
            for number in range(5):
                worker.execute(put)
                task, attempt = worker.execute(claim, (member, str(number))).fetchone()
                end = "SELECT sqlsem.end_task(%s, %s, %s, 'finished', NULL, NULL)"
                assert worker.execute(end, (member, task, attempt)).fetchone() == ("finished",)
            putter.commit()
            assert worker.execute(claim, (member, "late")).fetchone()[0] == 1
