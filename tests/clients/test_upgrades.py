"""`sqlsem init` at bad moments, and clients and tables of different versions. The next version of the tables exists in
`support.next_version` only.
"""

import contextlib
import itertools
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from support import PATIENCE, Attempt, Database, next_version, random_name, until
from support.databases import empty_database
from support.next_version import NEXT, THIS

import sqlsem
from sqlsem import sql

pytestmark = pytest.mark.engines("postgresql")


@pytest.fixture
def new_empty(postgres_server):
    """Make empty databases."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(empty_database(postgres_server))


@pytest.fixture
def empty(new_empty):
    """An empty database."""
    return new_empty()


@pytest.fixture
def later_version(monkeypatch):
    """Let this client bring the next version."""
    next_version.bring(monkeypatch)


@pytest.fixture
def current(engine_name, request, tmp_path):
    """A database of the test's own with the tables of this version, on each engine."""
    if engine_name == "postgresql":
        database = request.getfixturevalue("new_empty")()
    elif engine_name == "sqlite":
        database = Database("sqlite", f"sqlite:///{tmp_path / 'upgraded.db'}")
    else:
        shared = request.getfixturevalue("database")
        database = Database("mssql", shared.url, {"schema": random_name()})
    database.install()
    yield database
    if engine_name == "mssql":
        database.rows(sql.script("mssql", "drop", schema=database.schema))


def settings(database):
    return dict(database.rows(f"SELECT name, value FROM {database.beside('setting')}"))


def upgrade(database):
    """Run `sqlsem init` of a client of the next version, in a process of its own."""
    process = next_version.start_upgrade(database)
    output, _ = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 0, output
    assert settings(database)["schema_version"] == str(NEXT)


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


def test_concurrent_installations_are_serialised(empty, threads):
    """The install lock is held to the end: the second finds the tables of the first."""
    empty.install()
    with empty.raw(autocommit=False) as first:
        first.execute(sql.queries("postgresql")["install_lock"])
        process = init(empty)
        until(lambda: empty.waiting_for("relation"))
        assert process.poll() is None
        first.commit()
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output


def test_init_while_locks_are_held_and_waited_for(connect, database, name):
    place = database.rows("SELECT current_database()")[0][0]
    owner = database.server.url(place, user=f"{place}_owner")  # the installing login: see conftest
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


def test_a_failed_upgrade_leaves_everything_as_it_was(empty, monkeypatch, later_version, name):
    with pytest.MonkeyPatch.context() as older:
        older.setattr(sql, "LATEST", THIS)
        empty.install()
    next_version.bring(monkeypatch, ending="\nSELECT 1 / 0;")
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
    values = settings(empty)
    assert (values["schema_version"], values["oldest_client"], values["history_days"]) == (str(NEXT), "1", "30")
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


# -- from this version to the next ---------------------------------------------------------------------------------


class Load:
    """Clients that acquire and release a lock, and put and claim tasks, until they are stopped."""

    def __init__(self, database, name, threads):
        self.stop = threading.Event()
        self.inside = []
        self.done = []
        for number, work in enumerate((self.lock, self.lock, self.work)):
            self.done.append(0)
            threads.start(work, number, database, name)

    def lock(self, number, database, name):
        with database.coordinator() as coordinator:
            while not self.stop.is_set():
                with coordinator.mutex(name("load")):
                    self.inside.append(number)
                    time.sleep(0.002)
                    assert self.inside == [number], "two clients hold the lock at a time"
                    self.inside.remove(number)
                self.done[number] += 1

    def work(self, number, database, name):
        with database.coordinator() as coordinator:
            queue = coordinator.queue(name("load"))
            while not self.stop.is_set():
                task_id = queue.put({"number": self.done[number]})
                with queue.try_claim() as task:
                    assert task.id == task_id
                self.done[number] += 1

    def goes_on(self):
        before = list(self.done)
        until(lambda: all(now >= then + 3 for now, then in zip(self.done, before, strict=True)), "each client goes on")


def has_next_routine(database):
    """True if the database runs the next version's routine (SQLite: trigger)."""
    if database.engine == "sqlite":
        with pytest.raises(sqlite3.IntegrityError) as refused:
            database.rows("INSERT INTO ProcessControl (resource_id, requesting_id, colour) VALUES ('b', 'x', 'blue')")
        return "and colour" in str(refused.value)
    call = "SELECT * FROM sqlsem.settings()" if database.engine == "postgresql" else f"EXEC {database.schema}.settings"
    return ("colour", "red") in database.rows(call)


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_upgrade_keeps_locks_waits_and_tasks_under_load(current, name, threads):
    load = Load(current, name, threads)
    with current.coordinator() as client, current.coordinator() as second:
        queue = client.queue(name)
        claimed_id, late_id = queue.put({"number": 1}), queue.put({"number": 2})
        claimed = queue.try_claim()
        with client.mutex(name) as grant:
            late = Attempt(second.mutex(name))
            until(lambda: len(current.queue(str(name))) >= 2)
            load.goes_on()
            upgrade(current)
            load.goes_on()
            grant.check()
            assert late.waits()
            assert has_next_routine(current)
        late.granted()
        late.leave()
        with claimed:
            assert claimed.id == claimed_id
        with queue.try_claim() as task:
            assert task.id == late_id
        load.stop.set()
        threads.join()
        outcomes = {task.task_id: task.status for task in client.admin.tasks(str(name))}
    assert outcomes[claimed_id] == outcomes[late_id] == "finished"
    assert current.rows(f"SELECT count(*) FROM {current.beside('added')}") == [(1,)], "the schema script ran once"
    assert set(current.rows(f"SELECT colour FROM {current.beside('task')}")) == {("red",)}


class SqlClient:
    """A client's calls: a main session that sends heartbeats, and a session that waits."""

    def __init__(self, database, resource):
        self.resource = resource
        self.main = database.raw()
        self.waiting = database.raw()
        self.longest = 0.0  # between two heartbeats
        self.member = self.value("sqlsem.register_member('h', 1, 'client', 5000, NULL)")
        self.position, self.granted = self.main.execute(
            "SELECT queue_position, granted FROM sqlsem.register(%s, 'r', 'o', gen_random_uuid()::varchar, false, "
            "%s, 'write', 1, 1, NULL)",
            (self.member, resource),
        ).fetchone()
        self.stop = threading.Event()
        self.entered = threading.Event()

    def value(self, text, *parameters):
        return self.main.execute(f"SELECT {text}", parameters).fetchone()[0]

    def ping(self):
        last = time.monotonic()
        while not self.stop.wait(0.1):
            known, positions = self.main.execute(
                "SELECT known, positions FROM sqlsem.heartbeat(%s)", (self.member,)
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
        assert self.value("sqlsem.release(%s::varchar, %s, 'r', 'released')", self.resource, self.position) == 0

    def close(self):
        self.stop.set()
        self.main.close()
        self.waiting.close()


def test_upgrade_keeps_sql_sessions_and_their_heartbeats(empty, name, threads):
    empty.install()
    clients = [SqlClient(empty, str(name)) for _ in range(4)]
    with empty.raw() as session, contextlib.closing(empty.raw()) as late:
        assert session.execute("CALL sqlsem.acquire(%s)", (name("s"),)).fetchone()[0] == 0
        for client in clients:
            threads.start(client.ping)
        for client in clients[1:]:
            threads.start(client.wait)
        threads.start(late.execute, "CALL sqlsem.acquire(%s)", (name("s"),))
        until(lambda: empty.waiting_for("advisory"))
        upgrade(empty)
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
    assert max(client.longest for client in clients) < 4, "a heartbeat waited so long that locks would be believed lost"
    assert empty.queue(str(name)) == []


def test_upgrade_locks_every_table_of_the_schema_at_once(empty):
    """A script that locks its tables one after another would meet transactions that hold the others: a deadlock."""
    empty.install()
    tables = "SELECT oid FROM pg_class WHERE relnamespace = 'sqlsem'::regnamespace AND relkind IN ('r', 'p', 'm', 'f')"
    with empty.raw(autocommit=False) as connection:
        connection.execute(sql.queries("postgresql")["lock_tables"])
        locked = connection.execute(
            "SELECT relation FROM pg_locks WHERE pid = pg_backend_pid() AND mode = 'AccessExclusiveLock'"
        ).fetchall()
        assert sorted(locked) == sorted(connection.execute(tables).fetchall())


@pytest.mark.parametrize("table", ["ProcessControl", "member", "task", "commit_marker"])
def test_upgrade_gives_up_behind_a_table_lock(empty, name, table):
    """Other clients wait behind a session that waits for a table, so it waits for moments only."""
    empty.install()
    with empty.raw(autocommit=False) as dump:
        dump.execute(f"LOCK TABLE sqlsem.{table} IN ACCESS SHARE MODE")
        process = next_version.start_upgrade(empty)
        output, _ = process.communicate(timeout=2 * PATIENCE)
        assert process.returncode == 69, output
        assert "An open transaction keeps them (a dump, VACUUM FULL?)" in output
        pid = dump.execute("SELECT pg_backend_pid()").fetchone()[0]
        assert re.search(rf"session {pid} of login .*, idle in transaction since \d{{4}}-", " ".join(output.split()))
        assert settings(empty)["schema_version"] == str(THIS)
        with empty.raw() as session:
            acquired = session.execute("CALL sqlsem.acquire(%s, timeout_ms => 1000)", (name,)).fetchone()
            assert acquired[0] == 0
            session.execute("SELECT sqlsem.release(%s)", (name,))
    upgrade(empty)


CATALOGUES = {
    "postgresql": (
        "SELECT table_name::text, column_name::text, data_type::text, is_nullable::text, column_default::text "
        "FROM information_schema.columns WHERE table_schema = 'sqlsem' ORDER BY 1, 2",
        "SELECT oid::regprocedure::text, prosrc, proconfig, proacl::text FROM pg_proc "
        "WHERE pronamespace = 'sqlsem'::regnamespace AND proname <> 'wait_before' ORDER BY 1",
        "SELECT indexdef FROM pg_indexes WHERE schemaname = 'sqlsem' ORDER BY 1",
        "SELECT conrelid::regclass::text, conname::text, pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE connamespace = 'sqlsem'::regnamespace ORDER BY 1, 2",
        "SELECT sequencename::text, data_type::text, max_value FROM pg_sequences "
        "WHERE schemaname = 'sqlsem' ORDER BY 1",
        "SELECT relname::text, relacl::text FROM pg_class WHERE relnamespace = 'sqlsem'::regnamespace ORDER BY 1",
        "SELECT name, value FROM sqlsem.setting ORDER BY 1",
    ),
    "sqlite": (
        "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY 1, 2",
        "SELECT name, value FROM sqlsem_setting ORDER BY 1",
    ),
}


@pytest.mark.engines("sqlite", "postgresql")
def test_upgrade_equals_a_new_installation(current, engine_name, request, tmp_path, monkeypatch):
    upgrade(current)
    if engine_name == "postgresql":
        fresh = request.getfixturevalue("new_empty")()
    else:
        fresh = Database("sqlite", f"sqlite:///{tmp_path / 'fresh.db'}")
    next_version.bring(monkeypatch)
    fresh.install()
    for text in CATALOGUES[engine_name]:
        assert current.rows(text) == fresh.rows(text)
