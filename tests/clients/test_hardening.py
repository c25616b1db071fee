"""A login with few or no rights cannot harm others; every reader sees dead members."""

import contextlib
import subprocess
import sys

import pytest
from psycopg import errors
from support import Database, random_name, until
from support.databases import empty_database, name_of_database, name_of_login, through

import sqlsem

pytestmark = pytest.mark.engines("postgresql")


def enrol(connection, grace=0, lease=None):
    return connection.execute("SELECT sqlsem.register_member('h', 7, 'p', %s, %s)", (grace, lease)).fetchone()[0]


def register(connection, member, resource, uid="", try_=False, requesting_id="me", owner=None):
    return connection.execute(
        "SELECT queue_position, granted FROM sqlsem.register(%s, %s, %s, %s, %s, %s, 'write', 1, 1, NULL)",
        (member, requesting_id, owner, random_name() if uid == "" else uid, try_, resource),
    ).fetchone()


# -- rows and pins --------------------------------------------------------------------------------------------------


def test_no_row_outlives_everybody(user, database, name):
    with user.raw() as connection:
        member = enrol(connection)
        with pytest.raises(errors.InvalidParameterValue, match="uid is NULL"):
            register(connection, member, name, uid=None)
        with pytest.raises(errors.InvalidParameterValue, match="uid is NULL"):
            connection.execute(
                "SELECT * FROM sqlsem.register_all(%s, 'me', NULL, NULL, false, %s)",
                (member, f'[{{"resource": "{name}", "access": "write", "limit": 1, "weight": 1}}]'),
            )
    assert database.queue(name) == []


def test_pin_needs_ownership_of_the_row(user, login, database, name):
    other, operator = login("sqlsem_user"), login("sqlsem_operator")
    with user.raw() as user_connection, other.raw(autocommit=False) as other_connection, database.raw() as owner:
        position = user_connection.execute("CALL sqlsem.acquire(%s, requesting_id => 'me')", (name,)).fetchone()[1]
        pin = "SELECT sqlsem.pin(%s, %s, 'me')"
        with pytest.raises(errors.InsufficientPrivilege, match="may not keep it"):
            other_connection.execute(pin, (name, position))
        other_connection.rollback()
        with operator.raw() as connection:
            assert connection.execute(pin, (name, position)).fetchone() == (True,)
        owner.execute(f"GRANT {name_of_login(user)} TO {name_of_login(other)}")
        assert other_connection.execute(pin, (name, position)).fetchone() == (True,)
        # The refused client's error names the session that keeps the lock.
        with operator.raw() as connection:
            connection.execute("SET lock_timeout = '200ms'")
            with pytest.raises(errors.LockNotAvailable) as caught:
                connection.execute("SELECT sqlsem.revoke(%s, true)", (position,))
            expected = f"kept (assert_holding) by an open transaction: session {other_connection.info.backend_pid} "
            assert f"{expected}(login {name_of_login(other)})" in str(caught.value)
        other_connection.rollback()
        assert user_connection.execute("SELECT sqlsem.release(%s, %s, 'me')", (name, position)).fetchone() == (0,)


@pytest.mark.parametrize("outcome", ["reaped", "upgraded", "gold", "", None])
def test_history_is_not_writable_by_users(user, database, name, outcome):
    with user.raw() as connection:
        position, _ = register(connection, enrol(connection), name)
        with pytest.raises(errors.InvalidParameterValue, match="a request ends as"):
            connection.execute("SELECT sqlsem.release(%s, %s, 'me', %s)", (name, position, outcome))
        assert connection.execute("SELECT sqlsem.release(%s, %s, 'me', 'revoked')", (name, position)).fetchone() == (0,)
    assert database.rows("SELECT outcome, host, pid, program, login, ended_by FROM sqlsem.past(?, 10)", name) == [
        ("lost", "h", 7, "p", name_of_login(user), None)
    ]


@pytest.mark.parametrize("bad", ["a\nb", "a\x1b[2J", "a\x9b1m", "a\x7f"])
def test_control_characters_are_refused_in_names(user, name, bad):
    with user.raw() as connection:
        member = enrol(connection)
        for words in ({"resource": f"{name}{bad}"}, {"requesting_id": bad}, {"owner": bad}):
            with pytest.raises(errors.InvalidParameterValue, match="control character") as caught:
                register(connection, member, **{"resource": str(name), **words})
            assert bad not in str(caught.value)


def test_control_characters_are_written_out_in_warnings(user, name):
    with user.raw() as connection:
        messages = []
        connection.add_notice_handler(lambda notice: messages.append(notice.message_primary))
        for part in "ab":
            connection.execute("SELECT sqlsem.batch_part_start(%s, %s, 'a, b', 60)", (name, part))
        connection.execute("SELECT sqlsem.batch_part_fail(%s, 'a', %s)", (name, "\x1b]0;x\x07\r\nWARNING: \u202e"))
        connection.execute("SELECT sqlsem.batch_part_finish(%s, 'b')", (name,))
    assert messages[-1].endswith(r"has failed: a (\u001b]0;x\u0007\u000d\u000aWARNING: \u202e)")


def test_writes_after_a_release_are_durable(user, name):
    with user.raw() as connection:
        position = connection.execute("CALL sqlsem.acquire(%s, requesting_id => 'me')", (name,)).fetchone()[1]
        with connection.transaction():
            connection.execute("SELECT sqlsem.release(%s, %s, 'me')", (name, position))
            assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)


def test_caps_on_grace_and_lease(user, database, name):
    before = database.rows("SELECT name, value FROM sqlsem.setting WHERE name IN ('max_grace', 'max_lease')")
    database.rows(
        "UPDATE sqlsem.setting SET value = CASE name WHEN 'max_grace' THEN '60' ELSE '3600' END "
        "WHERE name IN ('max_grace', 'max_lease')"
    )
    try:
        with user.raw() as connection:
            enrol(connection, grace=60_000)
            enrol(connection, lease=3_600_000)
            for words in ({"grace": 60_001}, {"lease": 3_600_001}):
                with pytest.raises(
                    errors.InvalidParameterValue, match=r"is longer than the .* s that are allowed here"
                ):
                    enrol(connection, **words)
            with pytest.raises(errors.InvalidParameterValue, match="that are allowed here"):
                connection.execute("CALL sqlsem.acquire(%s, lease_seconds => 4000)", (name,))
            position = connection.execute(
                "CALL sqlsem.acquire(%s, lease_seconds => 60, requesting_id => 'me')", (name,)
            ).fetchone()[1]
            with pytest.raises(errors.InvalidParameterValue, match="that are allowed here"):
                connection.execute("SELECT sqlsem.renew(%s, %s, 'me', 4000)", (name, position))
            connection.execute("SELECT sqlsem.release(%s, %s, 'me')", (name, position))
        with (
            contextlib.closing(user.coordinator(grace=90)) as coordinator,
            pytest.raises(sqlsem.SqlsemError, match=r"max_grace|allowed here"),
        ):
            coordinator.mutex(name).acquire(timeout=5)
    finally:
        for setting, value in before:
            database.rows("UPDATE sqlsem.setting SET value = ? WHERE name = ?", value, setting)


def test_another_logins_batch_is_not_ended_early(user, login, name):
    with user.raw() as connection, login("sqlsem_user").raw() as other_connection:
        first = connection.execute("SELECT sqlsem.batch_part_start(%s, 'a', 'a, b', 3600)", (name,)).fetchone()[0]
        assert other_connection.execute(
            "SELECT sqlsem.batch_part_start(%s, 'b', 'a, b', 0.001)", (name,)
        ).fetchone() == (first,)
        connection.execute("SELECT sqlsem.batch_part_finish(%s, 'a')", (name,))
        assert other_connection.execute(
            "SELECT outcome FROM sqlsem.batch_part_finish(%s, 'b')", (name,)
        ).fetchone() == ("succeeded",)


# -- locks that anybody can take ------------------------------------------------------------------------------------


def test_waiter_on_a_dead_beacon_does_not_keep_it_alive(user, login, database, name):
    stranger = login()
    with contextlib.closing(stranger.raw()) as villain, user.raw() as victim, user.raw() as next_:
        member = enrol(victim)
        position, _ = register(victim, member, name)
        key = database.rows("SELECT sqlsem.lock_class(1), beacon FROM sqlsem.member WHERE member_id = ?", member)[0]
        pid = victim.info.backend_pid
        # In the queue for the beacon: it gets the lock at the moment when the victim ends.
        villain.execute("SET lock_timeout = '60s'")
        villain.pgconn.send_query(b"SELECT pg_advisory_lock(%d, %d)" % key)
        until(lambda: database.rows("SELECT 1 FROM pg_locks WHERE NOT granted AND pid = ?", villain.info.backend_pid))
        assert next_.execute("CALL sqlsem.try(%s)", (name,)).fetchone()[0] == -1
        victim.close()
        until(lambda: not database.rows("SELECT 1 FROM pg_stat_activity WHERE pid = ?", pid))
        until(
            lambda: database.rows(
                "SELECT 1 FROM pg_locks WHERE granted AND pid = ? AND locktype = 'advisory'", villain.info.backend_pid
            )
        )
        assert database.rows("SELECT state FROM sqlsem.status(?)", name) == [("dead",)]
        assert next_.execute("CALL sqlsem.try(%s)", (name,)).fetchone()[0] == 0
        assert database.rows("SELECT outcome FROM sqlsem.past(?, 9)", name) == [("reaped",)]
        assert position not in [row[0] for row in database.queue(name)]
        next_.execute("SELECT sqlsem.release(%s)", (name,))


@pytest.mark.parametrize("way", ["try", "acquire"])
def test_foreign_wakeup_lock_does_not_hide_a_dead_member(orphan, login, user, database, name, way):
    _, position = orphan(grace=200)
    with login().raw() as villain, user.raw() as connection:
        key = database.rows("SELECT sqlsem.lock_class(2)")[0][0]
        villain.execute("SELECT pg_advisory_lock(%s::integer, %s::integer)", (key, position))
        until(lambda: state_of(database, name)[0] == "dead")
        if way == "try":
            assert connection.execute("CALL sqlsem.try(%s)", (name,)).fetchone()[0] == 0
        else:
            assert connection.execute("CALL sqlsem.acquire(%s, timeout_ms => 20000)", (name,)).fetchone()[0] in (0, 1)
        connection.execute("SELECT sqlsem.release(%s)", (name,))


def test_numbers_with_taken_locks_are_skipped(user, login, database, name):
    with login().raw() as villain, user.raw() as connection:
        member = enrol(connection)
        beacon = database.rows("SELECT beacon FROM sqlsem.member WHERE member_id = ?", member)[0][0]
        position, _ = register(connection, member, name("a"))
        first, second = (database.rows("SELECT sqlsem.lock_class(?)", kind)[0][0] for kind in (1, 2))
        villain.execute(
            "SELECT pg_advisory_lock(%s, n) FROM generate_series(%s + 1, %s + 300) AS n", (first, beacon, beacon)
        )
        keys = database.rows("SELECT sqlsem.lock_key(? + n) FROM generate_series(1, 20) AS n", position)
        villain.execute("SELECT pg_advisory_lock(%s, n) FROM unnest(%s) AS n", (second, [key for (key,) in keys]))
        connection.execute("SET statement_timeout = '20s'")
        enrol(connection)
        later, granted = register(connection, member, name("b"))
        assert granted
        assert later > position + 20
        connection.execute("SELECT sqlsem.deregister_member(%s)", (member,))


# -- the installation -----------------------------------------------------------------------------------------------


@pytest.fixture
def empty(postgres_server):
    with empty_database(postgres_server, "villain") as database:
        name = name_of_database(database)
        database.rows(f"GRANT CREATE ON DATABASE {name} TO {name}_villain")
        yield database


def villain_of(database):
    return through(database, "villain")


def test_schema_of_another_owner_is_refused(empty):
    villain_of(empty).rows("CREATE SCHEMA sqlsem")
    with pytest.raises(sqlsem.ConfigurationError, match=r"schema sqlsem belongs to \w+_villain.*ALTER SCHEMA"):
        empty.install()
    assert empty.rows("SELECT to_regclass('sqlsem.setting')") == [(None,)]
    empty.rows("ALTER SCHEMA sqlsem OWNER TO postgres")
    empty.install()


@pytest.mark.parametrize(
    "definition",
    ["FUNCTION sqlsem.escape_control_chars(text) RETURNS text LANGUAGE sql AS 'SELECT $1'", "TABLE sqlsem.notes ()"],
)
def test_foreign_objects_in_the_schema_are_refused(empty, definition):
    villain = villain_of(empty)
    empty.rows("CREATE SCHEMA sqlsem")
    empty.rows(f"GRANT USAGE, CREATE ON SCHEMA sqlsem TO {name_of_login(villain)}")
    with pytest.raises(sqlsem.ConfigurationError, match=r"_villain may create objects in schema sqlsem"):
        empty.install()
    villain.rows(f"CREATE {definition}")
    empty.rows(f"REVOKE CREATE ON SCHEMA sqlsem FROM {name_of_login(villain)}")
    with pytest.raises(sqlsem.ConfigurationError, match=r"belongs to \w+_villain, and not to the owner"):
        empty.install()


def test_init_without_rights_names_the_missing_right(empty, login):
    stranger = login()
    strangers_view = Database(
        "postgresql", empty.server.url(name_of_database(empty), user=name_of_login(stranger)), {}, empty.server
    )
    with pytest.raises(sqlsem.ConfigurationError, match="GRANT CREATE ON DATABASE") as caught:
        strangers_view.install()
    assert "sqlsem_user" not in str(caught.value)
    empty.install()
    with pytest.raises(sqlsem.ConfigurationError, match=r"belongs to|owner") as caught:
        strangers_view.install()
    assert "GRANT sqlsem_user" not in str(caught.value)


def test_stale_grants_are_taken_back(empty):
    empty.install()
    empty.rows("GRANT EXECUTE ON FUNCTION sqlsem.reap() TO sqlsem_user")
    empty.rows("GRANT EXECUTE ON FUNCTION sqlsem.reap() TO PUBLIC")
    empty.rows("GRANT SELECT, DELETE ON sqlsem.member TO sqlsem_user")
    empty.rows("GRANT UPDATE ON sqlsem.member TO sqlsem_reader")
    empty.install()
    assert empty.rows("SELECT has_function_privilege('sqlsem_user', 'sqlsem.reap()', 'EXECUTE')") == [(False,)]
    for role, rights in (("user", []), ("reader", ["SELECT"]), ("operator", ["SELECT"]), ("worker", [])):
        assert [
            right
            for right in ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE")
            if empty.rows("SELECT has_table_privilege(?, 'sqlsem.member', ?)", f"sqlsem_{role}", right) == [(True,)]
        ] == rights


def test_a_version_that_is_no_number(empty):
    empty.install()
    empty.rows("UPDATE sqlsem.setting SET value = 'three' WHERE name = 'schema_version'")
    with pytest.raises(sqlsem.SchemaError, match="'three', which is no number"):
        empty.install()
    with contextlib.closing(empty.coordinator()) as coordinator, pytest.raises(sqlsem.SchemaError, match="'three'"):
        coordinator.mutex("x").acquire(timeout=1)


@pytest.mark.parametrize(
    "url", ["postgresql://u@h/db%00x", "postgresql://u%00@h/db", "postgresql://h/db?application_name=%00"]
)
def test_a_url_with_a_nul(url):
    with pytest.raises(
        sqlsem.ConfigurationError, match=r"not a URL that PostgreSQL understands|contains a control character"
    ):
        sqlsem.connect(url).mutex("x").acquire(timeout=1)


# -- the dead -------------------------------------------------------------------------------------------------------


@pytest.fixture
def orphan(database, name):
    """``orphan(grace)`` makes a member with a lock and an ended session."""

    def orphan(grace=300, resource=None):
        with database.raw() as connection:
            member = enrol(connection, grace=grace)
            position, granted = register(connection, member, resource or str(name))
            assert granted
            pid = connection.info.backend_pid
        until(lambda: not database.rows("SELECT 1 FROM pg_stat_activity WHERE pid = ?", pid))
        return member, position

    return orphan


def state_of(login, name):
    return login.rows("SELECT state, missing_for IS NOT NULL, grace FROM sqlsem.entries(?)", name)[0]


def test_reader_sees_dead_members_without_writing(orphan, login, database, name):
    reader = login("sqlsem_reader")
    member, _ = orphan(grace=600_000)
    assert state_of(reader, name) == ("holds", True, 600.0)
    database.rows(
        "UPDATE sqlsem.member SET heartbeat_at = heartbeat_at - interval '1 hour' WHERE member_id = ?", member
    )
    assert state_of(reader, name) == ("dead", True, 600.0)
    assert reader.rows("SELECT holding, waiting FROM sqlsem.resources() WHERE resource_id = ?", name) == [(1, 0)]
    rows = database.rows("SELECT missing_since FROM sqlsem.member WHERE member_id = ?", member)
    assert rows == [(None,)], "a read changes nothing"


def test_the_first_try_after_the_grace_gets_in(orphan, login, user, database, name):
    """No client waited or polled meanwhile."""
    reader = login("sqlsem_reader")
    member, position = orphan(grace=300)
    until(lambda: state_of(reader, name) == ("dead", True, 0.3))
    assert database.rows("SELECT missing_since FROM sqlsem.member WHERE member_id = ?", member) == [(None,)]
    with user.raw() as connection:
        assert connection.execute("CALL sqlsem.try(%s)", (name,)).fetchone()[0] == 0
        connection.execute("SELECT sqlsem.release(%s)", (name,))
    ended_rows = database.rows(
        "SELECT outcome, held < 0.3, host, pid, ended_by, queue_position FROM sqlsem.past(?, 1, 60, 0, 'reaped')", name
    )
    assert ended_rows == [("reaped", True, "h", 7, name_of_login(user), position)]
    assert database.rows("SELECT count(*) FROM sqlsem.past(?, 9, NULL, 3600)", name) == [(0,)]


def test_a_sign_of_life_with_each_grant(database, name):
    with database.raw() as connection:
        member = enrol(connection, grace=800)

        def seen():
            return database.rows("SELECT heartbeat_at FROM sqlsem.member WHERE member_id = ?", member)[0][0]

        first = seen()
        until(lambda: database.rows("SELECT clock_timestamp() > ?::timestamptz + interval '0.1 s'", first) == [(True,)])
        position, _ = register(connection, member, name)
        second = seen()
        assert second > first
        connection.execute("SELECT sqlsem.release(%s, %s, 'me')", (name, position))
        connection.execute("SELECT sqlsem.heartbeat(%s)", (member,))
        assert seen() > second
        connection.execute("SELECT sqlsem.deregister_member(%s)", (member,))


def test_after_a_failover_members_have_their_grace(orphan, user, database, name):
    """The new primary has not seen their heartbeats, and must allow for that."""
    orphan(grace=100)
    until(lambda: state_of(database, name)[0] == "dead")
    database.rows("UPDATE sqlsem.setting SET value = 'another server' WHERE name = 'origin'")
    database.rows("UPDATE sqlsem.member SET grace_ms = 600000 WHERE host = 'h'")
    with user.raw() as connection:
        assert connection.execute("CALL sqlsem.try(%s)", (name,)).fetchone()[0] == -1
        assert state_of(database, name)[0] == "holds"
        database.rows("UPDATE sqlsem.member SET grace_ms = 100 WHERE host = 'h'")
        until(lambda: state_of(database, name)[0] == "dead")
        assert connection.execute("CALL sqlsem.try(%s)", (name,)).fetchone()[0] == 0
        connection.execute("SELECT sqlsem.release(%s)", (name,))


def test_a_session_does_not_wait_for_itself(user, database, name):
    """An earlier version of the first example in docs/reference/protocol.md hung when pasted."""
    with user.raw() as connection:
        connection.execute("SET statement_timeout = '20s'")
        assert connection.execute("CALL sqlsem.try(%s, 3, weight => 2)", (name,)).fetchone()[0] == 0
        again = "CALL sqlsem.acquire(%s, lease_seconds => 120, requesting_id => 'job 7')"
        assert connection.execute(again, (name,)).fetchone()[0] == -3
        assert len(database.queue(name)) == 1
        connection.execute("SELECT sqlsem.release(%s)", (name,))
        if connection.info.server_version >= 140000 and sys.platform == "linux":
            assert connection.execute("SHOW client_connection_check_interval").fetchone() == ("2s",)


def test_the_doctor_tells_of_encryption_and_replication(database):
    done = subprocess.run(
        [sys.executable, "-m", "sqlsem", "--url", database.url, "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "tls" in done.stdout
    assert "sslmode=verify-full" in done.stdout
    assert "timeline 1" in done.stdout
