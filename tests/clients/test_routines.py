"""The routines that sessions call, where PostgreSQL differs (``routines`` has the rest)."""

import contextlib
import os
import random
import signal
import time

import psycopg
import pytest
from psycopg import errors
from support import PATIENCE, Recorder, Stay, check_history, overlap, slack, until
from support.callers import Caller

pytestmark = pytest.mark.engines("postgresql")


@pytest.fixture
def kill(database):
    def kill(pid):
        database.rows("SELECT pg_terminate_backend(?)", pid)

    return kill


def rows(database, name):
    return database.rows(
        "SELECT queue_position, granted_at IS NOT NULL FROM {table} WHERE resource_id LIKE ?", f"{name}%"
    )


def waiting(database, name, number=1):
    until(lambda: sum(not granted for _, granted in rows(database, name)) == number, f"{number} to wait")


def asleep(database, session):
    state = "SELECT 1 FROM pg_stat_activity WHERE pid = ? AND wait_event_type = 'Lock' AND wait_event = 'advisory'"
    until(lambda: database.rows(state, session.pid), "the session to sleep in its wait")


def outcomes(database, name):
    return [
        row[0]
        for row in database.rows(
            "SELECT outcome FROM sqlsem.history WHERE resource_id = ? ORDER BY queue_position", str(name)
        )
    ]


# -- taking and giving back -----------------------------------------------------------------------------------------


def test_by_position_of_the_parameters(session, name):
    connection = session()
    code, position, _ = connection.acquire(name, 3, "write", 2, 0, "a note", "me", 60.0)
    assert code == 0
    rows = connection.connection.execute(
        "SELECT queue_position, concurrency_limit, access_type, weight, note, requesting_id, state "
        "FROM sqlsem.status(%s)",
        (name,),
    ).fetchall()
    assert rows == [(position, 3, "write", 2, "a note", "me", "holds")]
    assert connection.release(name, position) == -1, "the requester is another"
    assert connection.release(name, position, "me") == 0


def test_routines_accept_literals_of_psql(session, name):
    """Literals only, in the simple protocol; release with one, two and three of them is never ambiguous."""
    connection = session()
    for release in (
        f"SELECT sqlsem.release('{name}')",
        f"SELECT sqlsem.release('{name}', %s)",
        f"SELECT sqlsem.release('{name}', %s, 'me')",
        f"SELECT sqlsem.release('{name}', requesting_id => 'me')",
        f"SELECT sqlsem.release(resource => '{name}', queue_position => %s, requesting_id => 'me')",
        f"SELECT sqlsem.release('{name}', %s, 'me', 'lost')",
    ):
        argument = ", requesting_id => 'me'" if "'me'" in release else ""
        with psycopg.ClientCursor(connection.connection) as cursor:
            cursor.execute(f"CALL sqlsem.acquire('{name}', 3, timeout_ms => 1000{argument})")
            code, position, _ = cursor.fetchone()
            assert code == 0
            cursor.execute(release % position if "%s" in release else release)
            assert cursor.fetchone() == (0,)


def test_a_wait_of_many_slices(session, name):
    """Longer than the slice of acquire, three seconds, and than the lease of a waiter, five seconds."""
    connection, second, three = session(), session(), session()
    connection.acquire(name)
    second.start(name)
    three.start(name, timeout_ms=6500)
    assert second.waits(7)
    assert three.future.result(PATIENCE) == (-1, None, None)
    connection.release(name)
    second.granted()


def test_discard_all_gives_the_lock_up_and_the_session_goes_on(session, name):
    """It frees the session's advisory locks, so the session looks dead."""
    first, second = session(), session()
    first.acquire(name)
    first.connection.execute("DISCARD ALL")
    assert second.acquire(name, timeout_ms=10_000)[0] in (0, 1)
    assert first.acquire(name, timeout_ms=100)[0] == -1
    second.release(name)
    assert first.acquire(name)[0] == 0


def test_sessions_that_ended_are_forgotten(database, session, name):
    connection, lease = session(), session()
    connection.acquire(name)
    connection.release(name)
    lease.acquire(name, lease_seconds=0.1)
    lease.release(name)
    connection.close()
    until(lambda: not database.rows("SELECT pid FROM pg_stat_activity WHERE pid = ?", connection.pid))
    session().acquire(name)
    assert database.rows(
        "SELECT count(*) FROM sqlsem.member WHERE backend_pid IN (?, ?)", connection.pid, lease.pid
    ) == [(0,)]


# -- transactions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [False, True], ids=["read", "written"])
@pytest.mark.parametrize("routine", ["acquire", "try"])
def test_refused_in_an_open_transaction(database, session, name, routine, written):
    connection = session(autocommit=False)
    connection.connection.execute(f"CREATE TEMP TABLE t{name[1:]} (x int)" if written else "SELECT 1")
    with pytest.raises(errors.ActiveSqlTransaction, match=rf"sqlsem: {routine} .*open transaction.*nothing was done"):
        connection.acquire(name, routine=routine)
    connection.connection.rollback()
    assert rows(database, name) == []
    connection.connection.autocommit = True
    assert connection.acquire(name, routine=routine)[0] == 0


def test_refused_in_the_first_statement_of_a_transaction(session, name):
    connection = session()
    with pytest.raises(errors.ActiveSqlTransaction, match="open transaction"), connection.connection.transaction():
        connection.acquire(name)
    with pytest.raises(errors.ActiveSqlTransaction), psycopg.ClientCursor(connection.connection) as cursor:
        cursor.execute(f"BEGIN; CALL sqlsem.acquire('{name}'); COMMIT")
    connection.connection.rollback()
    with pytest.raises(errors.ActiveSqlTransaction), psycopg.ClientCursor(connection.connection) as cursor:
        cursor.execute(f"SELECT 1; CALL sqlsem.acquire('{name}')")  # several in one message are one transaction


def test_refused_in_a_function(session, name):
    connection = session()
    connection.connection.execute(
        f"CREATE FUNCTION pg_temp.f() RETURNS int LANGUAGE plpgsql AS "
        f"$$ DECLARE c int; p bigint; f bigint; BEGIN "
        f"CALL sqlsem.acquire('{name}', 1, 'write', 1, 0, NULL, NULL, NULL, c, p, f); RETURN c; END $$"
    )
    with pytest.raises(errors.ActiveSqlTransaction, match="or a function"):
        connection.value("pg_temp.f()")


def test_a_block_that_may_commit(database, session, name):
    connection = session()
    body = (
        "DECLARE c int; p bigint; f bigint; BEGIN {before} "
        f"CALL sqlsem.acquire('{name}', 1, 'write', 1, 0, NULL, NULL, NULL, c, p, f); "
        "PERFORM set_config('sqlsem_test.code', c::text, false); END"
    )
    connection.connection.execute(f"DO $${body.format(before='')}$$")
    assert connection.value("current_setting('sqlsem_test.code')") == "0"
    connection.release(name)
    # The call would commit the caller's earlier writes.
    connection.connection.execute(f"CREATE TABLE w{name} (x int)")
    with pytest.raises(errors.ActiveSqlTransaction, match="would commit what was written before"):
        connection.connection.execute(f"DO $${body.format(before=f'INSERT INTO w{name} VALUES (1);')}$$")
    assert connection.value(f"count(*) FROM w{name}") == 0
    assert rows(database, name) == []
    connection.connection.execute(f"DROP TABLE w{name}")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_another_isolation_is_refused(database, session, name, level):
    connection = session(options=f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}")
    with pytest.raises(errors.ActiveSqlTransaction, match="READ COMMITTED"):
        connection.acquire(name)
    assert rows(database, name) == []


def test_release_in_a_transaction_counts_when_that_is_committed(database, session, name):
    first, second = session(), session()
    first.acquire(name)
    second.start(name)
    waiting(database, name)
    with first.connection.transaction(force_rollback=True):
        assert first.release(name) == 0
        assert second.waits()
    assert second.waits(0.5), "the release was taken back"
    with first.connection.transaction():
        assert first.release(name) == 0
        assert second.waits()
    second.granted()


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"resource": "\tetl"}, "white space"),
        ({"resource": "e\x01tl"}, "control character"),
        ({"concurrency_limit": 0}, r"concurrency_limit on 'NAME' must be 1 or more \(or NULL.*\), not 0"),
        ({"concurrency_limit": -3}, "not -3"),
        ({"concurrency_limit": None}, "no limit is set for 'NAME'"),
        ({"weight": 0}, "weight on 'NAME' must be from 1 to the limit, 1, not 0"),
        ({"weight": 4, "concurrency_limit": 3}, "from 1 to the limit, 3, not 4"),
        ({"weight": None}, "not NULL"),
        ({"access": "stage:-0"}, "stage:<whole number>"),
        ({"access": "read", "concurrency_limit": 2}, "must be 1 with access read"),
        ({"timeout_ms": -2}, "timeout_ms must be 0 or more, or -1 for ever, not -2"),
        ({"lease_seconds": float("nan")}, "lease_seconds must be from 0.1"),
        ({"lease_seconds": float("inf")}, "lease_seconds must be from 0.1"),
        ({"note": "x" * 1001}, "1001 characters"),
    ],
)
def test_bad_arguments(database, session, name, named, words):
    connection = session()
    before = database.rows("SELECT count(*) FROM sqlsem.member")
    with pytest.raises(errors.InvalidParameterValue, match=words.replace("NAME", name)) as caught:
        connection.acquire(**{"resource": name, **named})
    assert str(caught.value).startswith("sqlsem: ")
    if "timeout_ms" not in named:
        with pytest.raises(errors.InvalidParameterValue, match=words.replace("NAME", name)):
            connection.acquire(routine="try", **{"resource": name, **named})
    assert rows(database, name) == []
    if "concurrency_limit" not in named or named["concurrency_limit"] is not None:  # (the registration reports that)
        assert database.rows("SELECT count(*) FROM sqlsem.member") == before, "nothing was done"


@pytest.mark.parametrize("arguments", ["'{}', 'three'", "'{}', weight => 'x'", "'{}', lease_seconds => 'soon'"])
def test_wrong_types(database, session, name, arguments):
    with pytest.raises(errors.InvalidTextRepresentation):
        session().connection.execute(f"CALL sqlsem.acquire({arguments.format(name)})")
    with pytest.raises(errors.UndefinedFunction):
        session().connection.execute(f"CALL sqlsem.acquire('{name}', max_holders => 3)")
    assert rows(database, name) == []


# -- callers that go away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["cancel", "statement_timeout"])
def test_a_cancelled_call_leaves_no_row(database, session, name, cause):
    first, second = session(), session()
    first.acquire(name)
    if cause == "statement_timeout":
        second.connection.execute("SET statement_timeout = 2000")
    second.start(name)
    waiting(database, name)
    if cause == "cancel":
        asleep(database, second)
        second.connection.cancel()
    with pytest.raises(errors.QueryCanceled, match=f"sqlsem: acquire on '{name}' was cancelled and has left the queue"):
        raise second.failed()
    assert len(rows(database, name)) == 1
    assert second.value("pg_backend_pid()") == second.pid, "the session lives on"
    second.connection.execute("SET statement_timeout = 0")
    second.start(name)
    waiting(database, name)
    first.release(name)
    second.granted()


def test_unattended_waiting_row_is_removed(database, session, name):
    """After any end of the call, the session lives and holds the beacon, but its row blocks no other request."""
    connection, second, three = session(), session(), session()
    connection.acquire(name)
    second.acquire(name("other"))  # makes it a member
    with second.connection.transaction():
        member = second.value("sqlsem.session_member(NULL)")
        position = second.value(
            "queue_position FROM sqlsem.register(%s, 'two', NULL, %s, false, %s, 'write', 1, 1, NULL)",
            member,
            name,
            name,
        )
        assert second.value("sqlsem.renew_waiter_lease(%s, %s, %s)", member, name, position) is True
    began = time.monotonic()
    three.start(name)
    waiting(database, name, 2)
    connection.release(name)
    three.granted()
    assert 4 < time.monotonic() - began < slack(12)
    assert outcomes(database, name) == ["released", "cancelled"]


@pytest.mark.skipif(os.name != "posix", reason="needs the signals of POSIX")
def test_a_session_that_stood_still_takes_a_new_number(database, session, name):
    if not database.server.mine:
        pytest.skip("needs a server of our own, to stop one of its processes")
    connection, second, three = session(), session(), session()
    connection.acquire(name)
    second.start(name)
    waiting(database, name)
    ((lost, _),) = [row for row in rows(database, name) if not row[1]]
    os.kill(second.pid, signal.SIGSTOP)
    try:
        three.start(name)
        connection.release(name)
        third = three.granted(30)
    finally:
        os.kill(second.pid, signal.SIGCONT)
    assert second.waits(0.5)
    until(lambda: len(rows(database, name)) == 2, "a new number for the second")
    assert three.release(name) == 0
    assert second.granted() > third > lost


# -- leases ---------------------------------------------------------------------------------------------------------


# -- inside the caller's transaction --------------------------------------------------------------------------------


def test_assert_holding(database, session, name):
    connection, second, three = session(), session(), session()
    position = connection.acquire(name)[1]
    with connection.connection.transaction():
        connection.run("assert_holding", name, position)
        # Even after a revocation by force, no other request is granted before this ends.
        second.value("set_config('lock_timeout', '300', false)")
        with pytest.raises(errors.LockNotAvailable):
            second.value("sqlsem.revoke(%s, true)", position)
        assert three.acquire(name, timeout_ms=100)[0] == -1
    second.value("sqlsem.revoke(%s, true)", position)
    with connection.connection.transaction(force_rollback=True):
        with pytest.raises(
            errors.ObjectNotInPrerequisiteState, match=f"position {position} on '{name}' is not held"
        ) as caught:
            connection.run("assert_holding", name, position)
        assert "ROLLBACK" in caught.value.diag.message_hint


def test_assert_holding_needs_a_transaction(session, name):
    connection = session()
    position = connection.acquire(name)[1]
    with pytest.raises(errors.ActiveSqlTransaction, match="needs an open transaction"):
        connection.run("assert_holding", name, position)
    connection.connection.execute(f"DO $$ BEGIN CALL sqlsem.assert_holding('{name}', {position}); END $$")
    connection.connection.execute(
        f"CREATE FUNCTION pg_temp.f() RETURNS void LANGUAGE plpgsql AS "
        f"$$ BEGIN CALL sqlsem.assert_holding('{name}', {position}); END $$"
    )
    connection.value("pg_temp.f()")
    with psycopg.ClientCursor(connection.connection) as cursor:
        cursor.execute(f"BEGIN; CALL sqlsem.assert_holding('{name}', {position}); COMMIT")
    for bad in (None, position + 1):
        with connection.connection.transaction(force_rollback=True), pytest.raises(errors.ObjectNotInPrerequisiteState):
            connection.run("assert_holding", name, bad)


# -- operators ------------------------------------------------------------------------------------------------------


# -- beside Python --------------------------------------------------------------------------------------------------


KINDS = ["write", "read", "stage:1", "limit", "limit"]


def worker(database, resource, rounds, seed, recorder):
    chance = random.Random(seed)
    with contextlib.closing(Caller(database)) as caller:
        for number in range(rounds):
            kind = chance.choice(KINDS)
            limit = 3 if kind == "limit" else 1
            weight = chance.choice([1, 2]) if kind == "limit" else 1
            access = "write" if kind == "limit" else kind
            lease = 30 if number % 3 == 0 else None
            code, position, _ = caller.acquire(
                resource, concurrency_limit=limit, access=access, weight=weight, timeout_ms=60_000, lease_seconds=lease
            )
            entered = time.monotonic()
            assert code in (0, 1), code
            time.sleep(chance.random() * 0.003)
            left_at = time.monotonic()
            assert caller.release(resource, position) == 0
            recorder.add(Stay(resource, position, entered, left_at, access, weight, limit, f"sql-{seed}"))


def python_worker(coordinator, resource, rounds, seed, recorder):
    chance = random.Random(seed)
    for _ in range(rounds):
        lock = {
            "write": lambda: coordinator.write(resource),
            "read": lambda: coordinator.read(resource),
            "stage:1": lambda: coordinator.stage(resource, 1),
            "limit": lambda: coordinator.limit(resource, 3, weight=chance.choice([1, 2])),
        }[chance.choice(KINDS)]()
        with recorder.stay(lock):
            time.sleep(chance.random() * 0.003)


def test_all_kinds_beside_python_under_load(connect, database, name, threads):
    """Stays never overlap, and no request is overtaken by a conflicting one."""
    recorder, rounds = Recorder(), 12
    coordinator = connect()
    for attempt in range(1, 11):
        for seed in range(4):
            threads.start(worker, database, str(name), rounds, 10 * attempt + seed, recorder)
        for seed in range(4, 7):
            threads.start(python_worker, coordinator, str(name), rounds, 10 * attempt + seed, recorder)
        threads.join()
        assert check_history(recorder.stays) == 7 * rounds * attempt
        if overlap(recorder.stays) > 1:  # as nearly always; otherwise the test proved too little
            break
    else:
        pytest.fail("nothing was shared, again and again")
    until(lambda: rows(database, name) == [])
