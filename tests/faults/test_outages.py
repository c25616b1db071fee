"""Administrators' commands and network faults on a PostgreSQL server while locks are held and waited for."""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg
import pytest
from agent import RemoteError
from churn import Crowd
from support import AMPLE, Database, drained, random_name, remains, until

import sqlsem
from sqlsem import sql

pytestmark = pytest.mark.engines("postgresql")


def admin(database, *statements):
    with psycopg.connect(database.url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def fresh(postgres_server, make_database):
    """A database of the test's own."""
    return make_database(postgres_server)


@pytest.fixture
def ordinary(fresh, postgres_server):
    """The same for a login that is no superuser, and has the role for locks. With the login's name."""
    login = random_name()
    admin(fresh, f"CREATE ROLE {login} LOGIN", f"GRANT sqlsem_user TO {login}")
    name = psycopg.conninfo.conninfo_to_dict(fresh.url)["dbname"]
    yield Database("postgresql", postgres_server.url(name, user=login), {}, postgres_server), login
    # Roles are the whole server's; the database is ours.
    admin(
        fresh,
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{login}'",
        f"DROP OWNED BY {login}",
        f"DROP ROLE {login}",
    )


def test_read_only_for_some_seconds(own_postgres_server, restarted, agents, name, queued):
    holder, waiter, asker = agents(3, on=restarted, **AMPLE)
    (entry,) = queued(holder, waiter, on=restarted)
    admin(restarted, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
    until(lambda: restarted.rows("SHOW default_transaction_read_only") == [("on",)], "it is read-only")
    other = asker.ask("mutex", name("other"))
    leaving = holder.call("release")
    remains(lambda: not (other.ready or leaving.ready or entry.ready), 3, "all try again")
    admin(restarted, "SET default_transaction_read_only = off", "ALTER SYSTEM RESET default_transaction_read_only")
    admin(restarted, "SELECT pg_reload_conf()")
    other.get()
    left_at = leaving.get()["leaving"]
    assert entry.get()["got"] >= left_at
    waiter.release()
    asker.release()
    assert not any(agent.told("lost") for agent in (holder, waiter, asker))
    assert restarted.queue(name) == []


def test_a_read_only_server_is_named(own_postgres_server, restarted, name):
    admin(restarted, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
    until(lambda: restarted.rows("SHOW default_transaction_read_only") == [("on",)], "it is read-only")
    with restarted.coordinator(retry=0.5) as coordinator:
        with pytest.raises(sqlsem.Unavailable, match="read-only"):
            coordinator.mutex(name).acquire()


@pytest.mark.parametrize("kind", [AMPLE, pytest.param({"lease": 12}, marks=pytest.mark.soak)], ids=["grace", "lease"])
def test_timeouts_of_the_role_end_nothing(ordinary, fresh, agents, name, queued, kind):
    database, login = ordinary
    timeouts = ["statement_timeout", "idle_session_timeout", "idle_in_transaction_session_timeout", "lock_timeout"]
    timeouts += [row[0] for row in fresh.rows("SELECT name FROM pg_settings WHERE name = 'transaction_timeout'")]
    admin(fresh, *[f"ALTER ROLE {login} SET {timeout} = '500ms'" for timeout in timeouts])
    holder, waiter = agents(2, on=database, **kind)
    (entry,) = queued(holder, waiter, on=fresh)

    def sessions():
        rows = fresh.rows("SELECT pid FROM pg_stat_activity WHERE usename = ? ORDER BY pid", login)
        return [row[0] for row in rows]

    before = until(lambda: len(pids := sessions()) >= 3 and pids, "both are there, and one waits")
    remains(lambda: not entry.ready, 2, "it waits on")
    assert sessions() == before, "every session is still there"
    holder.release()
    entry.get()
    waiter.release()
    assert fresh.queue(name) == []


def test_all_connections_are_used_up(ordinary, fresh, agents, name, waiting):
    database, login = ordinary
    holder, waiter, late = agents(3, on=database, grace=90, retry=1)
    for agent in (holder, waiter):
        agent.hold("mutex", name(agent.child.pid))
        agent.release()
    holder.hold("mutex", name)

    def count():
        return fresh.rows("SELECT count(*) FROM pg_stat_activity WHERE usename = ?", login)[0][0]

    admin(fresh, f"ALTER ROLE {login} CONNECTION LIMIT {count()}")
    with pytest.raises(RemoteError, match=r"Unavailable: Cannot reach .*too many connections"):
        late.hold("mutex", name("late"))
    # A waiter without a connection to wait on polls from time to time.
    entry = waiter.ask("mutex", name)
    waiting(name, 2, on=fresh)
    remains(lambda: not entry.ready, 0.5, "it waits")
    left_at = holder.release()["leaving"]
    assert entry.get()["got"] >= left_at
    waiter.release()
    admin(fresh, f"ALTER ROLE {login} CONNECTION LIMIT -1")
    late.hold("mutex", name("late"))
    late.release()
    assert fresh.queue(name) == []


def lock_tables(database, seconds):
    with psycopg.connect(database.url) as connection:
        connection.execute("SET deadlock_timeout = '10s'")  # the session that locks all of them must not be the victim
        connection.execute("LOCK TABLE sqlsem.ProcessControl, sqlsem.member, sqlsem.task IN ACCESS EXCLUSIVE MODE")
        connection.execute("SELECT pg_sleep(%s)", [seconds])


def rewrite(database):
    for table in ("ProcessControl", "member", "history", "task"):
        for command in ("VACUUM FULL", "REINDEX TABLE"):
            try:
                admin(database, f"{command} sqlsem.{table}")
            except psycopg.errors.DeadlockDetected as exc:  # REINDEX takes its locks in another order than the library
                print(f"{command} {table}: {exc}")


@pytest.mark.parametrize("rounds", [1, pytest.param(6, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
def test_blocking_administration_breaks_nothing(fresh, spawn, name, tmp_path, rounds):
    """LOCK TABLE, VACUUM FULL, REINDEX, `sqlsem init`: all clients stand still, and no request is granted too early."""
    crowd = Crowd(spawn, tmp_path / "journal", url=fresh.url, name=str(name))
    for kind in ({"grace": 5}, {"lease": 5}):
        crowd.add(["mutex", "limit", "limit", "work"], retry=30, **kind)
    crowd.ready()
    with fresh.coordinator(grace=60, retry=60) as coordinator:
        queue = coordinator.queue(name)
        for number in range(rounds):
            for act in (functools.partial(lock_tables, fresh, 2 + 2 * number), lambda: rewrite(fresh), fresh.install):
                queue.put_many(range(20))
                act()
                crowd.until_busy(queue, time.monotonic(), "everybody goes on")
        assert drained(queue, 60)
        crowd.end()
    crowd.check(name)
    assert fresh.queue(name) == []
    assert fresh.rows("SELECT DISTINCT status FROM sqlsem.task") == [("finished",)]
    print(dict(crowd.counts()), crowd.trouble)


def test_a_deadlock_with_other_programs_costs_nothing(fresh, name):
    """PostgreSQL fails one statement or the other; the library's clients retry, and release in order."""
    admin(
        fresh,
        "CREATE SEQUENCE public.turns",
        "CREATE FUNCTION public.victim() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN "
        "IF nextval('public.turns') % 2 = 1 THEN RAISE deadlock_detected; END IF; RETURN NULL; END$$",
        "CREATE TRIGGER victim AFTER INSERT OR DELETE ON sqlsem.ProcessControl EXECUTE FUNCTION public.victim()",
    )
    with fresh.coordinator(**AMPLE) as coordinator:
        for _ in range(2):
            with coordinator.mutex(name) as grant:
                grant.check()
        coordinator.mutex(name).acquire()
    assert fresh.queue(name) == []
    assert fresh.rows("SELECT last_value >= 12 FROM public.turns") == [(True,)]


def test_init_is_not_held_up_by_a_dump(fresh, agents, name):
    """It blocks no other client behind itself, either."""
    holder, other = agents(2, on=fresh, **AMPLE)
    holder.hold("mutex", name)
    with psycopg.connect(fresh.url) as dump:
        tables = dump.execute(
            "SELECT string_agg(oid::regclass::text, ',') FROM pg_class WHERE relkind = 'r' "
            "AND relnamespace = 'sqlsem'::regnamespace"
        ).fetchone()[0]
        dump.execute(f"LOCK TABLE {tables} IN ACCESS SHARE MODE")
        fresh.install()
        other.hold("mutex", name("other"))
        other.release()
    holder.check()
    holder.release()


@pytest.mark.parametrize("kind", [pytest.param({"grace": 6}, marks=pytest.mark.soak), {"lease": 6}])
def test_dropped_tables_take_the_locks_with_them(fresh, agents, name, kind):
    """Each holder learns of its loss, and is unknown in the new tables."""
    holder, idle = agents(2, on=fresh, retry=30, **kind)
    holder.hold("mutex", name)
    idle.hold("mutex", name("idle"))
    idle.release()
    old = {row[0] for row in fresh.rows("SELECT member_id FROM sqlsem.member")}
    admin(fresh, sql.script("postgresql", "drop"))
    fresh.install()
    dropped = time.monotonic()
    # As many as before: their numbers are not used again.
    newcomers = agents(2, on=fresh, **kind)
    for number, newcomer in enumerate(newcomers):
        newcomer.hold("mutex", name(number))
    assert not old & {row[0] for row in fresh.rows("SELECT member_id FROM sqlsem.member")}
    lost = holder.event("lost")
    assert lost["at"] < dropped + 30
    with pytest.raises(RemoteError, match="LockLost"):
        holder.release()
    idle.hold("mutex", name)
    for agent in (idle, *newcomers):
        agent.check()
        agent.release()
    assert not any(agent.told("lost") for agent in newcomers)
    assert fresh.queue(name) == []


@pytest.mark.parametrize("kind", [{"grace": 12}, pytest.param({"lease": 12}, marks=pytest.mark.soak)])
def test_idle_connections_are_dropped_on_the_way(agents, proxied, proxy, database, name, queued, kind):
    """A quiet holder sends a heartbeat every four seconds; a proxy with a shorter timeout drops it every time."""
    holder, waiter = agents(2, on=proxied, **kind)
    (entry,) = queued(holder, waiter)
    proxy.drop_idle(1.0)
    until(lambda: proxy.dropped >= 6, "both were dropped again and again")
    assert not entry.ready
    left_at = holder.release()["leaving"]
    assert entry.get()["got"] >= left_at
    waiter.check()
    waiter.release()
    assert not holder.told("lost")
    assert not waiter.told("lost")
    assert database.queue(name) == []


@pytest.fixture
def small_disk():
    """A file system of 80 MB, if the test may mount one."""
    place = Path(tempfile.mkdtemp(prefix="sqlsem-test-"))
    words = ["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(place)]
    mounted = shutil.which("mount") and subprocess.run(words, check=False, capture_output=True).returncode == 0
    if not mounted:
        place.rmdir()
        pytest.skip("needs the right to mount a tmpfs (root)")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)
    place.rmdir()


@pytest.mark.soak
def test_a_full_disk_under_the_log_of_writes(small_disk, start_postgres, make_database, agents, name, queued):
    """The server panics; once there is room again, and it runs, all clients go on."""
    server = start_postgres(settings={"min_wal_size": "32MB", "max_wal_size": "32MB"})
    database = make_database(server)
    server.stop()
    log = Path(server._data) / "pg_wal"
    shutil.move(log, small_disk / "pg_wal")
    owner = log.parent.stat()
    for folder in (small_disk, *(small_disk / "pg_wal").rglob("*"), small_disk / "pg_wal"):
        os.chown(folder, owner.st_uid, owner.st_gid)
    log.symlink_to(small_disk / "pg_wal")
    server.start()
    holder, waiter, asker = agents(3, on=database, grace=40, retry=60)
    (entry,) = queued(holder, waiter, on=database)

    filler = small_disk / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    with contextlib.suppress(psycopg.OperationalError):
        while True:
            admin(database, "CREATE TABLE IF NOT EXISTS public.some (n int)", "INSERT INTO public.some VALUES (1)")
            admin(database, "SELECT pg_switch_wal()")
    until(lambda: "No space left on device" in server.log(), "the server has no room")
    other = asker.ask("mutex", name("other"))
    remains(lambda: not (other.ready or entry.ready), 2, "all wait for it")
    filler.unlink()
    with contextlib.suppress(AssertionError):
        server.start()  # unless it has come back by itself
    other.get()
    left_at = holder.release()["leaving"]
    assert entry.get()["got"] >= left_at
    waiter.release()
    asker.release()
    assert not any(agent.told("lost") for agent in (holder, waiter, asker))
    assert database.queue(name) == []
