"""Each lock of the library that a login without any role can take: its effect on others, and its name in messages.

The table is complete: a scan of the SQL and of Python finds every lock that is taken. The test fails for a new lock
that is not in the table.
"""

import contextlib
import json
import re
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner
from support import Database, until

import sqlsem
from sqlsem import cli, sql
from sqlsem.insight.kept import KINDS

pytestmark = pytest.mark.engines("postgresql")

ROOT = Path(__file__).resolve().parents[2]
#: Routines that take a lock named by their caller.
GIVEN = {"is_free", "wait_until_lock_free", "release_session_lock_after_commit", "take_exclusive_lock"}
#: The longest waits in these tests of a session that bounds them itself.
PATIENCE_MS = 300


# -- what is taken ---------------------------------------------------------------------------------------------------


def advisory_keys():
    """Yield (class, key) of each advisory lock in the scripts, as they are written."""
    for script in sql.rerunnable("postgresql"):
        text = re.sub(r"--[^\n]*", "", sql.script("postgresql", script, schema="s"))
        for routine in re.split(r"(?=CREATE OR REPLACE )", text):
            name = re.match(r"CREATE OR REPLACE \w+ s\.(\w+)", routine)
            for call in re.finditer(rf"(?:pg_(?:try_)?advisory_\w+|s\.(?:{'|'.join(sorted(GIVEN))}))\(", routine):
                if call.group(0).startswith("s.") and routine[: call.start()].endswith("FUNCTION "):
                    continue
                rest = routine[call.end() :]
                key = re.match(r"s\.lock_class\((\d)\), (?:s\.)?(\w+)\(?", rest)
                if key is None:
                    assert name is not None
                    own = name.group(1) in GIVEN or "classid::" in rest[:40]  # (releases the lock that pg_locks shows)
                    assert own, (script, name.group(1), rest[:60])
                    continue
                yield int(key.group(1)), key.group(2)


#: Class and key, as written, of each advisory lock; the kind by which `kept_locks` names it.
ADVISORY = {
    (0, "hashtext"): "gate",
    (0, "g"): "gate",
    (1, "v_beacon"): "beacon",
    (1, "v_member"): "beacon",
    (2, "lock_key"): "entry",
    (2, "v_key"): "entry",
    (3, "lock_key"): "waiting",
    (4, "hashtext"): "batch",
    (5, "1"): "news",
    (6, "hashtext"): "put",
    (7, "lock_key"): "number",
}
#: Tables that are locked instead.
TABLES = {"limit_pattern": "limits", "queue_key": "turns", "installer": "install"}
#: Tables that an upgrade locks, all at once.
UPGRADED = {"member", "processcontrol", "%s"}


def test_each_advisory_lock_is_in_the_table():
    assert set(advisory_keys()) == set(ADVISORY)


def test_each_locked_table_is_in_the_table():
    texts = [sql.script("postgresql", name, schema="s") for name in (*sql.rerunnable("postgresql"), "client")]
    locked = {name.lower() for text in texts for name in re.findall(r"LOCK TABLE (?:s\.)?([\w%]+)", text)}
    assert locked == set(TABLES) | UPGRADED


def test_each_kind_is_told_in_words():
    assert set(KINDS) == {*ADVISORY.values(), *TABLES.values(), "pin"}


def test_no_python_takes_an_advisory_lock():
    """Only the scripts take advisory locks, and the scan reads them (the doctor takes one more, with a random key)."""
    for path in (ROOT / "sqlsem").rglob("*.py"):
        assert not re.search(r"pg_\w*advisory_\w*lock|sp_getapplock", path.read_text(encoding="utf-8")), path
    doctor = sql.script("postgresql", "client") + "".join(sql.queries("postgresql", file="doctor").values())
    assert all("%(key)s" in line for line in doctor.splitlines() if "advisory_" in line)


def test_each_wait_for_a_lock_is_bounded():
    for script in sql.rerunnable("postgresql"):
        text = re.sub(r"--[^\n]*", "", sql.script("postgresql", script, schema="s"))
        for routine in re.split(r"(?=CREATE OR REPLACE )", text):
            waits = re.findall(r"pg_advisory_(?:xact_)?lock\w*\(|LOCK TABLE [^;]*", routine)
            if any("NOWAIT" not in wait for wait in waits):
                name = re.match(r"CREATE OR REPLACE \w+ s\.(\w+)", routine).group(1)
                # (register and set_resource call check_registration and set_pattern, and bound the wait.)
                assert "lock_timeout" in routine or name in ("check_registration", "set_pattern"), name


# -- what a stranger can keep ----------------------------------------------------------------------------------------


def class_of(database, number):
    return database.rows("SELECT sqlsem.lock_class(?)", number)[0][0]


def last_of(database, sequence):
    """Return the last number of a sequence; if it has given none, the one before its first."""
    return database.rows(f"SELECT last_value - (NOT is_called)::integer FROM sqlsem.{sequence}")[0][0]


def hashed(database, text):
    return database.rows("SELECT hashtext(?)", text)[0][0]


@pytest.fixture
def stranger(login):
    """A session of a login that may only connect."""
    connection = login().raw()
    yield connection
    connection.close()


def keep(stranger, database, number, key, shared=False):
    """Have the stranger take a lock for as long as its session lives."""
    function = "pg_advisory_lock_shared" if shared else "pg_advisory_lock"
    key = key & 0x7FFFFFFF if key > 0 else key  # numbers may go beyond 2^31 (lock_key); hashes do not
    stranger.execute(f"SELECT {function}(%s::integer, %s::integer)", (class_of(database, number), key))


def run(database, *arguments):
    result = CliRunner().invoke(cli.main, arguments, env={"SQLSEM_URL": database.url})
    return result.exit_code, result.output


def assert_named(database, stranger, kind, resource=None):
    """The operator's views name the session, its login, and the statement that ends it."""
    pid = stranger.info.backend_pid
    login_name = stranger.info.user
    with contextlib.closing(database.coordinator()) as coordinator:
        (kept_lock,) = [lock for lock in coordinator.admin.kept_locks() if lock.pid == pid]
        assert (kept_lock.kind, kept_lock.login, kept_lock.is_stranger) == (kind, login_name, True)
        assert kept_lock.seconds is None or kept_lock.seconds >= 0
        if resource is not None:
            (kept_lock,) = [lock for lock in coordinator.admin.kept_locks(resource) if lock.pid == pid]
            assert kept_lock.resource == resource
    ending = f"pg_terminate_backend({pid})"
    for arguments in (("ls",), ("why", resource or "nothing"), ("ls", resource or "nothing"), ("ls", "--json")):
        _, output = run(database, *arguments)
        assert login_name in output, (arguments, output)
        assert ending in output, (arguments, output)
    code, output = run(database, "doctor", "--json")
    (check,) = [item for item in json.loads(output)["checks"] if item["name"] == "kept"]
    assert code == 1
    assert not check["ok"]
    assert login_name in check["detail"]
    assert ending in check["mend"]


def test_doctor_is_content_where_no_lock_is_kept(database):
    _, output = run(database, "doctor", "--json")
    (check,) = [item for item in json.loads(output)["checks"] if item["name"] == "kept"]
    assert check["ok"], check


def bounded(database):
    """A session with short waits for locks."""
    connection = database.raw()
    connection.execute(f"SET lock_timeout = '{PATIENCE_MS}ms'")
    return connection


@pytest.mark.parametrize("shared", [False, True])
def test_stranger_keeps_a_gate(database, user, stranger, name, shared):
    keep(stranger, database, 0, hashed(database, name), shared)
    code, output = run(user, "run", "--mutex", str(name), "--timeout", "1", "--", "true")
    assert code == 75
    assert f"session {stranger.info.backend_pid} of login {stranger.info.user}" in output
    assert "has just left" not in output
    with contextlib.closing(user.coordinator(grace=1)) as coordinator:
        with pytest.raises(sqlsem.Timeout, match=rf"session {stranger.info.backend_pid} of login"):
            with coordinator.mutex(name, timeout=1):
                pass
    assert_named(database, stranger, "gate", str(name))
    with contextlib.closing(bounded(user)) as victim:
        assert victim.execute("CALL sqlsem.acquire(%s, timeout_ms => 300)", (name,)).fetchone()[0] == -1
    stranger.close()
    assert run(user, "run", "--mutex", str(name), "--", "true")[0] == 0


def test_stranger_keeps_a_beacon(database, user, stranger):
    beacon = last_of(database, "beacon")
    for number in range(1, 20):
        keep(stranger, database, 1, beacon + number)
    with contextlib.closing(user.coordinator()) as coordinator, coordinator.mutex("beacons"):
        pass
    assert_named(database, stranger, "beacon")


def test_stranger_keeps_an_entry_lock(database, user, stranger, name):
    position = last_of(database, "processcontrol_queue_position_seq")
    for number in range(1, 6):
        keep(stranger, database, 2, position + number)
    with contextlib.closing(user.coordinator()) as coordinator, coordinator.mutex(name) as grant:
        assert grant.position > position + 5
    assert_named(database, stranger, "entry")


def test_stranger_keeps_a_waiting_lock(database, user, stranger, name):
    with contextlib.closing(user.coordinator()) as first, contextlib.closing(user.coordinator()) as second:
        with first.limit(name, 2, weight=2):
            position = database.queue(name)[-1][0]
            keep(stranger, database, 3, position + 1)
            assert not second.limit(name, 2).acquire(timeout=0.2)
        with second.limit(name, 2):
            pass
    assert_named(database, stranger, "waiting")


@pytest.mark.parametrize("shared", [False, True])
def test_stranger_keeps_a_batchs_lock(database, user, stranger, name, shared):
    keep(stranger, database, 4, hashed(database, name), shared)
    with contextlib.closing(bounded(user)) as victim:
        with pytest.raises(psycopg.errors.LockNotAvailable, match=f"session {stranger.info.backend_pid} .login "):
            victim.execute("SELECT sqlsem.batch_part_start(%s, 'a', 'a', 60)", (name,))
    assert_named(database, stranger, "batch")


def test_stranger_keeps_the_listeners_lock(database, login, stranger, name):
    keep(stranger, database, 5, 1)
    worker = login("sqlsem_worker")
    database.rows("SELECT sqlsem.put(?, 'SELECT 1')", name)
    with worker.raw() as session:
        session.execute("SET statement_timeout = '60s'")
        assert session.execute("CALL sqlsem.work(%s, 0.1)", (name,)).fetchone() == (1, 0)
    assert_named(database, stranger, "news")


@pytest.mark.parametrize("shared", [False, True])
def test_stranger_keeps_a_put_lock(database, login, stranger, name, shared):
    keep(stranger, database, 6, hashed(database, name), shared)
    with contextlib.closing(bounded(login("sqlsem_putter"))) as putter:
        if shared:
            putter.execute("SELECT sqlsem.put(%s, 'SELECT 1')", (name,))
        else:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                putter.execute("SELECT sqlsem.put(%s, 'SELECT 1')", (name,))
    assert_named(database, stranger, "put")


def test_stranger_keeps_a_members_lock(database, user, stranger, name):
    with contextlib.closing(bounded(user)) as victim:
        member = victim.execute("SELECT sqlsem.register_member('h', 7, 'p', 0, NULL)").fetchone()[0]
        keep(stranger, database, 7, member)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            victim.execute(
                "SELECT sqlsem.register(%s, 'me', NULL, %s, false, %s, 'write', 1, 1, NULL)", (member, name, name)
            )
        assert_named(database, stranger, "number")
        victim.execute("SELECT sqlsem.deregister_member(%s)", (member,))


#: The kinds of locks that a stranger can keep; each has a test above.
def test_each_advisory_kind_is_tried():
    kinds = set(re.findall(r'assert_named\(database, stranger, "(\w+)"', Path(__file__).read_text(encoding="utf-8")))
    assert kinds == set(ADVISORY.values())


@pytest.mark.parametrize("table", sorted(TABLES))
def test_stranger_cannot_lock_our_tables(stranger, user, table):
    with user.raw() as connection:
        for session, mode in ((stranger, "ROW SHARE"), (stranger, "ACCESS SHARE"), (connection, "ACCESS SHARE")):
            with pytest.raises(psycopg.errors.InsufficientPrivilege), session.transaction():
                session.execute(f"LOCK TABLE sqlsem.{table} IN {mode} MODE NOWAIT")


def former_keys(database, queue):
    """The keys of the former advisory locks: one number for the installer's, two for the others."""
    return [
        ("SELECT pg_advisory_lock(hashtext('sqlsem.install.sqlsem'))", ()),
        ("SELECT pg_advisory_lock(%s, hashtext(%s))", (class_of(database, 6), f"turns.{queue}")),
        ("SELECT pg_advisory_lock(%s, 0)", (class_of(database, 5),)),
        ("SELECT pg_advisory_lock(%s, 2)", (class_of(database, 5),)),
    ]


def test_stranger_stops_no_wait_no_claim_and_no_limit(database, login, user, stranger, name, threads):
    """In an earlier version every wait took a lock of the installer, and each claim took a lock of its queue."""
    for statement, values in former_keys(database, name):
        stranger.execute(statement, values)
    with user.raw() as holder, user.raw() as waiter:
        assert holder.execute("CALL sqlsem.acquire(%s)", (name,)).fetchone()[0] == 0
        answers = []
        threads.start(
            lambda: answers.append(waiter.execute("CALL sqlsem.acquire(%s, timeout_ms => 60000)", (name,)).fetchone())
        )
        until(lambda: len(database.queue(name)) == 2)
        holder.execute("SELECT sqlsem.release(%s)", (name,))
        threads.join()
        assert answers[0][0] == 1
        waiter.execute("SELECT sqlsem.release(%s)", (name,))
    database.rows("SELECT sqlsem.put(?, 'SELECT 1')", name)
    with login("sqlsem_worker").raw() as worker:
        assert worker.execute("CALL sqlsem.work(%s, 0.1)", (name,)).fetchone() == (1, 0)
    with login("sqlsem_operator").raw() as operator:
        operator.execute("SELECT sqlsem.set_limit(%s, 3)", (name,))
        operator.execute("SELECT sqlsem.set_limit(%s, NULL)", (name,))
        operator.execute("SELECT sqlsem.set_queue(%s, NULL, 'limit', 3, NULL)", (name,))
        operator.execute("SELECT sqlsem.set_queue(%s, NULL, 'limit', NULL, NULL)", (name,))


# -- what a client can keep by an open transaction --------------------------------------------------------------------


def test_gate_of_an_open_registration_is_named(database, user, name):
    with user.raw(autocommit=False) as connection:
        member = connection.execute("SELECT sqlsem.register_member('h', 7, 'p', 0, NULL)").fetchone()[0]
        connection.commit()
        connection.execute(
            "SELECT sqlsem.register(%s, 'me', NULL, %s, false, %s, 'write', 1, 1, NULL)", (member, name, name)
        )
        pid = connection.info.backend_pid
        code, output = run(user, "run", "--mutex", str(name), "--timeout", "1", "--", "true")
        assert code == 75
        assert f"session {pid} " in output
        for arguments in (("why", str(name)), ("ls", str(name)), ("doctor",)):
            _, output = run(database, *arguments)
            assert f"pg_terminate_backend({pid})" in output.replace("\n", " "), (arguments, output)
            assert "no role" not in output
        connection.rollback()
    with contextlib.closing(database.coordinator()) as coordinator:
        assert [lock for lock in coordinator.admin.kept_locks(str(name)) if lock.pid == pid] == []


def test_pin_of_an_open_transaction_is_named_by_why_alone(database, user, name):
    with user.raw(autocommit=False) as connection:
        connection.autocommit = True
        position = connection.execute("CALL sqlsem.acquire(%s)", (name,)).fetchone()[1]
        connection.autocommit = False
        connection.execute("CALL sqlsem.assert_holding(%s, %s)", (name, position))
        ending = f"pg_terminate_backend({connection.info.backend_pid})"
        assert ending in run(database, "why", str(name))[1]
        assert ending not in run(database, "ls", str(name))[1]
        connection.rollback()


def test_short_registrations_are_never_told_as_kept(database, user, name, threads):
    """Many requests take the gate in turn, each for a short time."""
    stop = []

    def takes():
        with contextlib.closing(user.coordinator()) as coordinator:
            while not stop:
                with coordinator.mutex(name):
                    pass

    threads.start(takes)
    try:
        with contextlib.closing(database.coordinator()) as coordinator:
            for _ in range(10):
                assert [lock for lock in coordinator.admin.kept_locks(str(name)) if lock.kind == "gate"] == []
    finally:
        stop.append(True)
        threads.join()


def test_installer_waits_bounded_and_names_the_other(database, monkeypatch, name):
    place = psycopg.conninfo.conninfo_to_dict(database.url)["dbname"]
    owner = Database("postgresql", database.server.url(place, user=f"{place}_owner"), {}, database.server)
    monkeypatch.setattr("sqlsem.engines.postgresql.session.INSTALLER_PATIENCE_SECONDS", 1)
    with owner.raw(autocommit=False) as first:
        first.execute(sql.queries("postgresql")["install_lock"])
        first.execute(sql.queries("postgresql")["install_begin"])
        with pytest.raises(sqlsem.Unavailable, match=rf"session {first.info.backend_pid} of login {place}_owner"):
            owner.install()
        with database.raw() as connection:
            assert connection.execute("SELECT sqlsem.is_upgraded()").fetchone() == (True,), "the other still is at it"
        first.rollback()
    with database.raw() as connection:
        assert connection.execute("SELECT sqlsem.is_upgraded()").fetchone() == (False,), "its lock is gone"
    owner.install()
    assert database.rows("SELECT pg_sequence_last_value('sqlsem.installer_backend_pid_seq')") == [(None,)]
