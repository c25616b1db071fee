"""acquire, try, release, renew, assert_holding from T-SQL sessions, alone and beside Python's."""

import time

import pytest
from support import Attempt, until

import sqlsem

pytestmark = pytest.mark.engines("mssql")


# -- codes


def test_granted_at_once_after_waiting_and_not_in_time(session, name):
    holder, other = session(), session()
    first = holder.acquire(name)
    assert first.code == 0
    assert first.fence == first.position
    began = time.monotonic()
    assert other.acquire(name, timeout_ms=700) == (-1, None, None)
    assert 0.7 <= time.monotonic() - began < 10
    assert other.acquire(name, timeout_ms=0) == (-1, None, None)
    waiting = other.waiting(name, timeout_ms=60000)
    assert not waiting.done()
    assert holder.release(name, first.position) == 0
    second = waiting.result(30)
    assert second.code == 1
    assert second.fence > first.fence
    assert other.release(name, second.position) == 0
    assert other.release(name, second.position) == -1


def test_try(session, name):
    first, other = session(), session()
    got = first.acquire(name, routine="try")
    assert got.code == 0
    assert got.position == got.fence
    assert other.acquire(name, routine="try") == (-1, None, None)
    assert first.release(name) == 0
    assert other.acquire(name, routine="try").code == 0
    assert other.release(name) == 0


def test_try_does_not_overtake_waiters(session, name):
    first, other, third = session(), session(), session()
    assert first.acquire(name, 2, weight=1).code == 0
    waiting = other.waiting(name, 2, weight=2, timeout_ms=60000)
    assert third.acquire(name, 2, routine="try").code == -1
    first.release(name)
    assert waiting.result(30).code == 1
    other.release(name)


def test_first_come_first_served(session, database, name):
    holder, *rest = [session() for _ in range(5)]
    holder.acquire(name)
    calls = [waiter.waiting(name, timeout_ms=60000) for waiter in rest]
    positions = [row[0] for row in database.queue(name)]
    holder.release(name)
    for place, (waiter, call) in enumerate(zip(rest, calls, strict=True)):
        answer = call.result(30)
        assert answer == (1, positions[place + 1], positions[place + 1])
        assert not any(later.done() for later in calls[place + 1 :])
        waiter.release(name)


def test_an_operator_takes_the_waiting_row_away(session, connect, database, name):
    first, other = session(), session()
    first.acquire(name)
    waiting = other.waiting(name, timeout_ms=60000)
    connect().admin.revoke(database.queue(name)[-1][0])
    assert waiting.result(30) == (-2, None, None)
    assert len(database.queue(name)) == 1
    first.release(name)


@pytest.mark.parametrize("access", ["write", "read"])
def test_revoked_row_is_not_granted(session, database, name, access):
    """Also if the operator's session ended before the removal of the row."""
    first, other = session(), session()
    first.acquire(name, access="write")
    waiting = other.waiting(name, access=access, timeout_ms=60000)
    position = database.queue(name)[1][0]
    entry = database.beside("entry")
    database.rows(f"UPDATE {entry} SET revoked_at = SYSUTCDATETIME() WHERE queue_position = ?", position)
    first.release(name)
    assert waiting.result(30) == (-2, None, None)


def test_two_sessions_in_a_deadlock(session, name):
    caller, other = session(), session()
    caller.acquire(name("a"))
    other.acquire(name("b"))
    first = caller.waiting(name("b"), timeout_ms=45000)
    second = other.waiting(name("a"), timeout_ms=45000)
    until(lambda: first.done() or second.done(), "the engine choosing a victim")
    victim, survivor, call, held = (caller, other, second, "a") if first.done() else (other, caller, first, "b")
    assert (first if victim is caller else second).result() == (-3, None, None)
    assert victim.release(name(held)) == 0
    assert call.result(30).code == 1
    survivor.release(name("a"))
    survivor.release(name("b"))


@pytest.mark.parametrize(
    ("held", "asked"), [({}, {}), ({"access": "read"}, {}), ({"limit": 2, "weight": 2}, {"limit": 2})]
)
def test_a_session_that_would_wait_for_itself_is_told(session, database, name, held, asked):
    connection = session()
    assert connection.acquire(name, **held).code == 0
    assert connection.acquire(name, **asked) == (-3, None, None)
    assert connection.acquire(name, routine="try", **asked).code == -1
    assert len(database.queue(name)) == 1
    assert connection.release(name) == 0


def test_a_session_may_hold_two_places_where_they_fit(session, database, name):
    connection = session()
    assert connection.acquire(name, 2).code == 0
    assert connection.acquire(name, 2).code == 0
    assert connection.acquire(name, 2) == (-3, None, None)
    assert len({row[0] for row in database.queue(name)}) == 2
    assert connection.release(name) == 0  # both
    assert database.queue(name) == []


# -- sharing


def test_limit_and_weight(session, name):
    first, other, third = session(), session(), session()
    assert first.acquire(name, 3, weight=2).code == 0
    assert other.acquire(name, 3).code == 0
    assert third.acquire(name, 3, timeout_ms=200).code == -1
    other.release(name)
    assert third.acquire(name, 3, weight=2, timeout_ms=0).code == -1
    assert third.acquire(name, 3, timeout_ms=0).code == 0
    first.release(name)
    third.release(name)


def test_waiting_writer_holds_later_readers_back(session, name):
    connection, other, writer, late = session(), session(), session(), session()
    assert connection.acquire(name, access="read").code == 0
    assert other.acquire(name, access="reader").code == 0
    writing = writer.waiting(name, access="writer", timeout_ms=60000)
    assert late.acquire(name, access="READ", routine="try").code == -1
    reading = late.waiting(name, access="read", timeout_ms=60000)
    connection.release(name)
    assert not writing.done()
    other.release(name)
    assert writing.result(30).code == 1
    assert not reading.done()
    writer.release(name)
    assert reading.result(30).code == 1
    late.release(name)


def test_stages(session, name):
    connection, other, later = session(), session(), session()
    assert connection.acquire(name, access="stage:100").code == 0
    assert other.acquire(name, access="Stage:100").code == 0
    waiting = later.waiting(name, access="stage:200", timeout_ms=60000)
    connection.release(name)
    assert not waiting.done()
    other.release(name)
    assert waiting.result(30).code == 1
    later.release(name)


@pytest.mark.parametrize(
    ("kind", "words", "python"),
    [
        ("mutex", {}, lambda c, n: c.mutex(n)),
        ("limit", {"limit": 1, "access": "write"}, lambda c, n: c.limit(n, 1)),
        ("write", {"access": "write"}, lambda c, n: c.read(n)),
        ("read", {"access": "read"}, lambda c, n: c.write(n)),
        ("stage", {"access": "stage:5"}, lambda c, n: c.stage(n, 6)),
    ],
)
def test_excludes_python_and_is_excluded(session, connect, name, kind, words, python):
    connection, coordinator = session(), connect()
    assert connection.acquire(name, **words).code == 0
    attempt = Attempt(python(coordinator, name))
    assert attempt.waits(0.3)
    connection.release(name)
    attempt.granted()
    waiting = connection.waiting(name, timeout_ms=60000, **words)
    time.sleep(0.2)
    assert not waiting.done()
    attempt.leave()
    assert waiting.result(30).code == 1
    connection.release(name)


def test_shares_with_python(session, connect, name):
    connection, other, coordinator = session(), session(), connect()
    with coordinator.read(name("r")), coordinator.limit(name("n"), 3, weight=2), coordinator.stage(name("s"), -7):
        assert connection.acquire(name("r"), access="read", timeout_ms=0).code == 0
        assert connection.acquire(name("s"), access="stage:-7", timeout_ms=0).code == 0
        assert connection.acquire(name("n"), 3, timeout_ms=0).code == 0
        assert other.acquire(name("n"), 3, timeout_ms=0).code == -1
        (entry,) = [row for row in coordinator.admin.entries(name("s")) if row.program != "pytest" and row.pid is None]
        assert entry.access == "stage:-7"
    for kind in "rsn":
        assert connection.release(name(kind)) == 0


def test_in_line_with_python(session, connect, database, name):
    connection, other, coordinator = session(), session(), connect()
    holder = coordinator.mutex(name)
    holder.acquire()
    first = connection.waiting(name, timeout_ms=60000)
    between = Attempt(coordinator.mutex(name))
    until(lambda: len(database.queue(name)) == 3)
    last = other.waiting(name, timeout_ms=60000)
    holder.release()
    assert first.result(30).code == 1
    assert between.waits(0.2)
    connection.release(name)
    between.granted()
    assert not last.done()
    between.leave()
    assert last.result(30).code == 1
    other.release(name)


def test_a_bare_participant_is_waited_for(session, database, name):
    waiter, connection = session(), database.raw()
    cursor = connection.cursor()
    bare = database.insert_bare(cursor, name, "bare", concurrency_limit=1)
    waiting = waiter.waiting(name, timeout_ms=60000)
    time.sleep(0.3)
    assert not waiting.done()
    cursor.execute(database.sql("DELETE FROM {table} WHERE queue_position = ?"), (bare,))
    left_at = time.monotonic()
    assert waiting.result(30).code == 1
    assert time.monotonic() - left_at < 5
    waiter.release(name)
    connection.close()


def test_polling_waiter_backs_off(session, connect, name):
    """A pause has no lock to wait for, so the waiter polls; in the end its polls are 0.8 s apart."""
    connection, operator = session(), connect()
    operator.admin.pause(name)
    began = time.monotonic()
    assert connection.acquire(name, timeout_ms=1500).code == -1
    assert time.monotonic() - began >= 1.5
    waiting = connection.waiting(name, timeout_ms=60000)
    operator.admin.resume(name)
    assert waiting.result(30).code == 1
    connection.release(name)


# -- transactions


@pytest.mark.parametrize(
    "text",
    [
        "EXEC {s}.acquire ?",
        "EXEC {s}.try ?",
        "EXEC {s}.release ?",
        "EXEC {s}.renew ?, 1",
        "EXEC {s}.pause ?",
        "EXEC {s}.resume ?",
        "EXEC {s}.set_limit ?, 1",
    ],
)
def test_an_open_transaction_is_refused_and_left_alone(session, database, refused, name, text):
    connection = session()
    connection.rows("BEGIN TRANSACTION")
    with refused(50001, "transaction"):
        connection.rows(text, name)
    assert connection.rows("SELECT @@TRANCOUNT, XACT_STATE()") == [(1, 1)]
    connection.rows("ROLLBACK TRANSACTION")
    assert database.queue(name) == []
    assert database.rows(f"SELECT resource_id FROM {database.beside('resource')} WHERE resource_id = ?", name) == []


def test_with_implicit_transactions(session, database, name):
    """IMPLICIT_TRANSACTIONS is the setting of drivers without autocommit: no session of the library may hang in one."""
    first, other = session(), session()
    first.rows("SET IMPLICIT_TRANSACTIONS ON")
    try:
        got = first.acquire(name)
        assert got.code == 0
        first.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
        assert [row[0] for row in database.queue(name)] == [got.position]
        waiting = other.waiting(name, timeout_ms=60000)
        first.rows("EXEC {s}.release ?", name)
        assert waiting.result(30).code == 1
        first.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
        assert [row[0] for row in database.queue(name)] == [waiting.result().position]
    finally:
        first.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION; SET IMPLICIT_TRANSACTIONS OFF")
    other.release(name)


def test_the_callers_settings_stay(session, name):
    connection = session()
    connection.rows("SET LOCK_TIMEOUT 12345; SET XACT_ABORT OFF")
    before = connection.rows("SELECT @@LOCK_TIMEOUT, @@OPTIONS")
    connection.acquire(name)
    connection.release(name)
    assert connection.rows("SELECT @@LOCK_TIMEOUT, @@OPTIONS") == before
    connection.rows("SET LOCK_TIMEOUT -1")


def test_acquire_waits_for_a_kept_gate(session, database, name):
    """A bare participant does not commit: the wait for it counts as a wait, too, and ends in time."""
    caller, connection = session(), database.raw(autocommit=False)
    database.insert_bare(connection.cursor(), name, "bare", concurrency_limit=1)
    began = time.monotonic()
    assert caller.acquire(name, timeout_ms=800).code == -1
    assert 0.8 <= time.monotonic() - began < 10
    assert caller.acquire(name, routine="try").code == -1
    waiting = caller.later(caller.acquire, name, timeout_ms=60000)
    time.sleep(0.3)
    connection.rollback()
    assert waiting.result(30).code in (0, 1)
    caller.release(name)
    connection.close()


# -- release


def test_release_in_a_catch_block_needs_no_variable(session, database, name):
    first, other = session(), session()
    other.acquire(name("other"))
    ((caught, released),) = first.rows(
        """
        DECLARE @code int, @number int;
        EXEC {s}.acquire @resource = ?;
        BEGIN TRY
            THROW 60000, N'the load failed', 1;
        END TRY
        BEGIN CATCH
            SET @number = ERROR_NUMBER();
            IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION;
            EXEC @code = {s}.release @resource = ?;
        END CATCH;
        SELECT @number, @code
        """,
        name,
        name,
    )
    assert (caught, released) == (60000, 0)
    assert [row[1] for row in database.queue(name)] == [name("other")]
    other.release(name("other"))


def test_release_takes_only_the_requesters_own(session, database, name):
    owner, other = session(), session()
    first = owner.acquire(name, 5, requesting_id="package A")
    second = owner.acquire(name, 5, requesting_id="package B")
    third = owner.acquire(name, 5)
    assert owner.release(name, requesting_id="package C") == -1
    assert other.release(name) == -1
    assert other.release(name, third.position) == -1
    assert owner.release(name, second.position, "package A") == -1
    assert owner.release(name("x"), first.position, "package A") == -1
    assert owner.release(name, requesting_id="package A") == 0
    assert [row[0] for row in database.queue(name)] == [second.position, third.position]
    assert owner.release(name) == 0
    assert [row[0] for row in database.queue(name)] == [second.position]
    # Another session of the same login may release it with the id: a handler that runs on another connection.
    assert other.release(name, None, "package B") == 0


def test_release_is_recorded_in_history(session, connect, name):
    first, other = session(), session()
    position = first.acquire(name, note="nightly").position
    other.acquire(name, timeout_ms=0)
    other.acquire(name, timeout_ms=50)
    first.release(name)
    past = {entry.outcome: entry for entry in connect().admin.history(name)}
    assert set(past) == {"released", "timeout"}
    assert (past["released"].position, past["released"].note) == (position, "nightly")


# -- renew, assert_holding


def test_renew_of_a_session_lock(session, database, refused, name):
    first, other = session(), session()
    position = first.acquire(name).position
    members = f"{database.beside('member')} AS m JOIN {database.beside('entry')} AS t ON t.member_id = m.member_id"
    heartbeat = f"SELECT m.heartbeat_at FROM {members} WHERE t.queue_position = ?"
    before = database.rows(heartbeat, position)
    assert first.call("renew", name, position) == 0
    assert database.rows(heartbeat, position) > before, "a heartbeat"
    assert other.call("renew", name, position) == -1
    assert first.call("renew", name, position + 1) == -1
    with refused(50000, "no lease to renew"):
        first.call("renew", name, position, lease_seconds=5)
    first.release(name)
    assert first.call("renew", name, position) == -1


def test_assert_holding(session, database, refused, name):
    first, other = session(), session()
    position = first.acquire(name).position
    with refused(50001, "BEGIN TRANSACTION"):
        first.call("assert_holding", name, position)
    assert first.rows("BEGIN TRANSACTION; EXEC {s}.assert_holding ?, ?; SELECT 7; COMMIT", name, position) == [(7,)]
    for resource, number, requester in ((name, position + 1, None), (name("x"), position, None), (name, position, "x")):
        first.rows("BEGIN TRANSACTION")
        with refused(50004, "is not held"):
            first.rows("EXEC {s}.assert_holding ?, ?, ?", resource, number, requester)
        first.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
    other.rows("BEGIN TRANSACTION")
    with refused(50004, "is not held"):
        other.rows("EXEC {s}.assert_holding ?, ?", name, position)
    other.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
    first.release(name)
    first.rows("BEGIN TRANSACTION")
    with refused(50004, "is not held"):
        first.rows("EXEC {s}.assert_holding ?, ?", name, position)
    first.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")


def test_waiter_does_not_hold(session, database, refused, name):
    first, other, third = session(), session(), session()
    first.acquire(name)
    waiting = other.waiting(name, timeout_ms=60000, requesting_id="me")
    third.rows("BEGIN TRANSACTION")
    with refused(50004, "is not held"):
        third.rows("EXEC {s}.assert_holding ?, ?, N'me'", name, database.queue(name)[-1][0])
    third.rows("IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION")
    first.release(name)
    assert waiting.result(30).code == 1
    assert other.release(name, requesting_id="me") == 0


def test_asserted_row_stays_until_commit(session, new_session, connect, name):
    holder, other = new_session(), session()
    position = holder.acquire(name).position
    second = session()
    second.rows("BEGIN TRANSACTION")
    requester = connect().admin.entries(name)[0].requesting_id
    second.rows("EXEC {s}.assert_holding ?, ?, ?", name, position, requester)
    holder.close()
    waiting = other.waiting(name, timeout_ms=60000)
    time.sleep(0.5)
    assert not waiting.done()
    second.rows("COMMIT TRANSACTION")
    assert waiting.result(30).code == 1
    other.release(name)


def test_python_asserts_a_fence(session, connect, name):
    connection = session()
    first = connection.acquire(name)
    connection.release(name)
    with connect().mutex(name) as grant:
        assert grant.fence > first.fence
    assert connection.acquire(name).fence > grant.fence
    connection.release(name)
    assert isinstance(grant, sqlsem.Grant)
