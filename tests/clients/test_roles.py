"""The rights of a login that has one of the roles. All logins are real."""

import contextlib

import pytest
from psycopg import errors
from support import until
from support.databases import name_of_login

import sqlsem
from sqlsem.cli import nights
from sqlsem.insight.audit import audit
from sqlsem.tasks import Json

pytestmark = pytest.mark.engines("postgresql")

TABLES = ("ProcessControl", "member", "resource", "history", "setting")
OPERATORS = (
    "reap()",
    "set_limit('x', 1)",
    "pause('x')",
    "resume('x')",
    "revoke(1, true)",
    "set_resource('x', 'cap', 1)",
)


def test_a_user_can_use_all_that_it_should(user, name):
    with user.raw() as connection:
        for arguments in (
            {"concurrency_limit": 3, "weight": 2},
            {"access": "read"},
            {"access": "stage:7"},
            {"lease_seconds": 20.0},
            {"note": "why", "requesting_id": "me"},
        ):
            parameters = ", ".join(f"{parameter} => %({parameter})s" for parameter in ("resource", *arguments))
            code, position, _ = connection.execute(
                f"CALL sqlsem.acquire({parameters})", {"resource": name, **arguments}
            ).fetchone()
            assert code == 0
            requester = arguments.get("requesting_id")
            assert connection.execute("SELECT sqlsem.renew(%s, %s, %s)", (name, position, requester)).fetchone() == (0,)
            with connection.transaction():
                connection.execute("CALL sqlsem.assert_holding(%s, %s, %s)", (name, position, requester))
            assert connection.execute("SELECT state FROM sqlsem.status(%s)", (name,)).fetchall() == [("holds",)]
            assert connection.execute("SELECT sqlsem.release(%s, %s, %s)", (name, position, requester)).fetchone() == (
                0,
            )
        assert connection.execute("CALL sqlsem.try(%s)", (name,)).fetchone()[0] == 0
        with user.raw() as other:
            assert other.execute("CALL sqlsem.try(%s)", (name,)).fetchone()[0] == -1
            assert other.execute("CALL sqlsem.acquire(%s, timeout_ms => 50)", (name,)).fetchone()[0] == -1
            connection.execute("SELECT sqlsem.release(%s)", (name,))
            assert other.execute("CALL sqlsem.acquire(%s, timeout_ms => 5000)", (name,)).fetchone()[0] in (0, 1)
            assert other.execute("SELECT count(*) FROM sqlsem.past(%s, 100)", (name,)).fetchone()[0] > 3


def test_the_python_client_as_a_user(user, name):
    with contextlib.closing(user.coordinator()) as coordinator, contextlib.closing(user.coordinator()) as other:
        with coordinator.mutex(name) as grant, user.raw(autocommit=False) as connection:
            grant.assert_held(connection.cursor())
            assert other.mutex(name).acquire(timeout=0) is False
        with coordinator.limit(name, 3, weight=2), coordinator.read(name("r")), coordinator.stage(name("s"), 1):
            pass
        with sqlsem.all_of(coordinator.mutex(name("a")), coordinator.limit(name("b"), 2)):
            assert {entry.resource for entry in coordinator.admin.entries() if entry.resource.startswith(name)} == {
                name("a"),
                name("b"),
            }
        with pytest.raises(sqlsem.ConfigurationError, match="sqlsem_user \\(or _operator"):
            coordinator.admin.reap()


def test_a_user_reads_and_writes_no_table(user):
    with user.raw() as connection:
        for table in TABLES:
            for text in (
                f"SELECT * FROM sqlsem.{table}",
                f"DELETE FROM sqlsem.{table}",
                f"INSERT INTO sqlsem.{table} DEFAULT VALUES",
                f"TRUNCATE sqlsem.{table}",
                f"DROP TABLE sqlsem.{table}",
            ):
                with pytest.raises(errors.InsufficientPrivilege):
                    connection.execute(text)


@pytest.mark.parametrize("call", OPERATORS)
def test_a_user_is_no_operator(user, login, call):
    with user.raw() as connection, pytest.raises(errors.InsufficientPrivilege):
        connection.execute(f"SELECT sqlsem.{call}")
    with login("sqlsem_operator").raw() as connection:
        connection.execute(f"SELECT sqlsem.{call}")
        connection.execute("SELECT sqlsem.set_limit('x', NULL)")


def test_no_routine_is_open_to_everybody(database, login):
    """Users may call no routine that changes other logins' rows."""
    with database.raw() as connection, login().raw() as stranger:
        names = [
            row[0]
            for row in connection.execute(
                "SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'sqlsem'::regnamespace"
            )
        ]
        assert len(names) > 40
        internal = {
            "remove",
            "delete_member_rows",
            "check_if_dead",
            "reap_dead_members",
            "insert_request",
            "eligibility",
            "reap",
            "revoke",
            "set_resource",
        }
        assert internal <= bare_names(names)
        for role, may in ((name_of_session(stranger), set()), ("sqlsem_user", None)):
            allowed = {
                name
                for name in names
                if connection.execute("SELECT has_function_privilege(%s, %s, 'EXECUTE')", (role, name)).fetchone()[0]
            }
            if may is not None:
                assert allowed == may
            assert not bare_names(allowed) & internal
        with pytest.raises(errors.InsufficientPrivilege):
            stranger.execute("CALL sqlsem.acquire('x')")


def bare_names(signatures):
    return {signature.partition("(")[0].removeprefix("sqlsem.").strip('"') for signature in signatures}


def name_of_session(connection):
    return connection.execute("SELECT session_user").fetchone()[0]


def test_row_of_another_login_is_protected(database, user, login, name):
    other = login("sqlsem_user")
    with user.raw() as connection, other.raw() as other_connection:
        for lease in (None, 60.0):
            position = connection.execute(
                "CALL sqlsem.acquire(%s, requesting_id => 'me', lease_seconds => %s)", (name, lease)
            ).fetchone()[1]
            ((member, requester),) = other_connection.execute(
                "SELECT member_id, requesting_id FROM sqlsem.status(%s)", (name,)
            ).fetchall()
            assert requester == "me"
            for text, answer in (
                ("SELECT sqlsem.release(%(name)s, %(position)s, 'me')", -1),
                ("SELECT sqlsem.release(%(name)s, requesting_id => 'me')", -1),
                ("SELECT sqlsem.release(%(name)s, %(position)s, 'me', 'released')", -1),
                ("SELECT sqlsem.release_rows(%(name)s, %(position)s, 'me')", -1),
                ("SELECT sqlsem.renew(%(name)s, %(position)s, 'me')", -1),
                ("SELECT sqlsem.renew(%(name)s, %(position)s, 'me', 0.1)", -1),
                ("SELECT sqlsem.renew_waiter_lease(%(member)s, %(name)s, %(position)s)", False),
                ("SELECT known FROM sqlsem.heartbeat(%(member)s)", False),
                ("SELECT sqlsem.reattach_member(%(member)s)", False),
            ):
                values = {"name": name, "position": position, "member": member}
                assert other_connection.execute(text, values).fetchone() == (answer,), text
            other_connection.execute("SELECT sqlsem.deregister_member(%s)", (member,))
            with pytest.raises(errors.InsufficientPrivilege, match="another login"):
                other_connection.execute(
                    "SELECT sqlsem.register(%s, 'me', NULL, %s, false, %s, 'write', 1, 1, NULL)", (member, name, name)
                )
            assert [row[0] for row in database.queue(name)] == [position]
            assert connection.execute("SELECT sqlsem.renew(%s, %s, 'me')", (name, position)).fetchone() == (0,)
            assert connection.execute("SELECT sqlsem.release(%s, %s, 'me')", (name, position)).fetchone() == (0,)


def test_an_operator_takes_a_users_row(database, user, login, name):
    with user.raw() as connection, login("sqlsem_operator").raw() as operator:
        position = connection.execute("CALL sqlsem.acquire(%s)", (name,)).fetchone()[1]
        assert operator.execute("SELECT sqlsem.release(%s, %s)", (name, position)).fetchone() == (-1,)
        assert operator.execute("SELECT sqlsem.revoke(%s, true)", (position,)).fetchone() == (0,)
        assert database.queue(name) == []


def test_a_reader_looks_back_at_a_night(user, login, name):
    with contextlib.closing(user.coordinator()) as coordinator, coordinator.limit(name, 3):
        with coordinator.mutex(name("done")):
            pass
        with contextlib.closing(login("sqlsem_reader").coordinator()) as reader:
            night = nights.Night(reader, None, 3600)
            result = audit(night.past(), night.entries, night.rulings())
    assert result.ok, result.findings
    assert (result.finished > 0, result.present > 0) == (True, True)


def test_a_reader_only_looks(user, login, name):
    with user.raw() as connection, login("sqlsem_reader").raw() as reader:
        connection.execute("CALL sqlsem.acquire(%s)", (name,))
        assert reader.execute("SELECT state FROM sqlsem.status(%s)", (name,)).fetchone() == ("holds",)
        assert reader.execute(
            "SELECT count(*) FROM sqlsem.ProcessControl WHERE resource_id = %s", (name,)
        ).fetchone() == (1,)
        for text in ("CALL sqlsem.acquire('x')", "SELECT sqlsem.release('x')", "DELETE FROM sqlsem.ProcessControl"):
            with pytest.raises(errors.InsufficientPrivilege):
                reader.execute(text)


@pytest.mark.parametrize("quote", ["'", '"', "$$", "\\", "%s", "{}"])
def test_injection(user, name, quote):
    """The routines have more rights than the user: a name is never part of a statement."""
    evil = f"{name}{quote}; DROP TABLE sqlsem.ProcessControl; --{quote}"
    with user.raw() as connection:
        code, position, _ = connection.execute(
            "CALL sqlsem.acquire(%(evil)s, note => %(evil)s, requesting_id => %(evil)s)", {"evil": evil}
        ).fetchone()
        assert code == 0
        rows = connection.execute("SELECT resource_id, note, requesting_id FROM sqlsem.status(%s)", (evil,)).fetchall()
        assert rows == [(evil, evil, evil)]
        with connection.transaction():
            connection.execute("CALL sqlsem.assert_holding(%s, %s, %s)", (evil, position, evil))
        assert connection.execute("SELECT sqlsem.renew(%s, %s, %s)", (evil, position, evil)).fetchone() == (0,)
        assert connection.execute("SELECT sqlsem.release(%s, NULL, %s)", (evil, evil)).fetchone() == (0,)
        with pytest.raises(errors.InvalidParameterValue):
            connection.execute("CALL sqlsem.acquire('x', access => %s)", (evil,))


def test_functions_of_the_callers_own_do_not_stand_in(database, user, name):
    """A routine with its owner's rights ignores the search_path of its caller."""
    with database.raw() as owner:
        schema = f"s{name}"
        owner.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {name_of_login(user)}")
    try:
        with user.raw() as connection:
            connection.execute(f"SET search_path = {schema}, pg_catalog")
            for text in (
                "clock_timestamp() RETURNS timestamptz",
                "hashtext(text) RETURNS int",
                "hashtext(varchar) RETURNS int",
            ):
                connection.execute(
                    f"CREATE FUNCTION {schema}.{text} LANGUAGE plpgsql AS "
                    f"$$ BEGIN IF current_user <> session_user THEN RAISE 'ran as %', current_user; END IF; "
                    f"RETURN NULL; END $$"
                )
            member = connection.execute("SELECT sqlsem.session_member(NULL)").fetchone()[0]
            assert connection.execute(
                "SELECT granted FROM sqlsem.register(%s, 'me', NULL, %s, false, %s, 'write', 1, 1, NULL)",
                (member, name, name),
            ).fetchone() == (True,)
            assert connection.execute("SELECT sqlsem.release(%s, requesting_id => 'me')", (name,)).fetchone() == (0,)
    finally:
        with database.raw() as owner:
            owner.execute(f"DROP SCHEMA {schema} CASCADE")


# -- bare participants ----------------------------------------------------------------------------------------------


def bare_round(connection, name):
    connection.execute("INSERT INTO sqlsem.ProcessControl (resource_id, requesting_id) VALUES (%s, 'bare')", (name,))
    position = connection.execute(
        "SELECT max(queue_position) FROM sqlsem.ProcessControl WHERE resource_id = %s AND requesting_id = 'bare'",
        (name,),
    ).fetchone()[0]
    connection.execute(
        "SELECT count(*) FROM sqlsem.ProcessControl WHERE resource_id = %s AND queue_position < %s", (name, position)
    )
    connection.execute(
        "DELETE FROM sqlsem.ProcessControl WHERE queue_position = %s AND requesting_id = 'bare'", (position,)
    )


@pytest.mark.parametrize(
    "insert", ["INSERT", "INSERT (resource_id, requesting_id, access_type, concurrency_limit, weight, note)"]
)
def test_bare_participants_need_three_rights_and_no_more(database, login, name, insert):
    bare = login()
    with bare.raw() as connection, database.raw() as owner:
        with pytest.raises(errors.InsufficientPrivilege):
            bare_round(connection, name)
        owner.execute(f"GRANT USAGE ON SCHEMA sqlsem TO {name_of_login(bare)}")
        with pytest.raises(errors.InsufficientPrivilege):
            bare_round(connection, name)
        rights = (insert, "SELECT", "DELETE")
        for right in rights:
            owner.execute(f"GRANT {right} ON sqlsem.ProcessControl TO {name_of_login(bare)}")
            if right != rights[-1]:
                with pytest.raises(errors.InsufficientPrivilege):
                    bare_round(connection, name)
        owner.execute("DELETE FROM sqlsem.ProcessControl WHERE resource_id = %s", (name,))
        bare_round(connection, name)
        assert database.queue(name) == []
        with pytest.raises(errors.InsufficientPrivilege):
            connection.execute("UPDATE sqlsem.ProcessControl SET granted_at = now()")
        if insert != "INSERT":
            with pytest.raises(errors.InsufficientPrivilege):  # not past the trigger either
                connection.execute(
                    "INSERT INTO sqlsem.ProcessControl (resource_id, requesting_id, request_uid) VALUES (%s, 'x', 'x')",
                    (name,),
                )


def test_a_user_is_no_bare_participant(user, name):
    with user.raw() as connection, pytest.raises(errors.InsufficientPrivilege):
        bare_round(connection, name)


def test_after_set_role_the_login_counts(database, login, name):
    group = login("sqlsem_user")
    with database.raw() as owner:
        owner.execute(f"SET ROLE {name_of_login(group)}")
        with pytest.raises(errors.InvalidParameterValue, match="may not see when this session began"):
            owner.execute("CALL sqlsem.acquire(%s)", (name,))
        position = owner.execute("CALL sqlsem.acquire(%s, requesting_id => 'me')", (name,)).fetchone()[1]
        with group.raw() as other:
            assert other.execute("SELECT sqlsem.release(%s, %s, 'me')", (name, position)).fetchone() == (-1,)
        owner.execute("RESET ROLE")
        assert owner.execute("SELECT sqlsem.release(%s, %s, 'me')", (name, position)).fetchone() == (0,)


def test_worker_role_manages_the_locks_of_its_tasks(database, login, connect, name):
    worker, boss = login("sqlsem_worker"), connect()
    queue = boss.queue(name)
    with contextlib.closing(worker.coordinator(grace=3)) as workers_locks, worker.raw() as connection:
        queue.put(Json("load"), locks=[sqlsem.mutex(name)])
        with workers_locks.queue(name).try_claim() as task, connection.transaction():
            task.grant.assert_held(connection.cursor())
        with pytest.raises(errors.InsufficientPrivilege):
            connection.execute("CALL sqlsem.acquire(%s)", (name,))
        queue.put(Json("load"), locks=[sqlsem.mutex(name)])
        with workers_locks.queue(name).try_claim() as task:
            token = task.grant.hand_over()
        boss.adopt(token).release()
        queue.put(Json("load"), locks=[sqlsem.mutex(name)], on_failure="continue")
        task = workers_locks.queue(name).try_claim()
        boss.admin.revoke(task.grant.position)
        until(lambda: boss.admin.entries(name) == [])  # the next heartbeat releases the revoked rows
        with pytest.raises(sqlsem.LockLost), task:
            pass
