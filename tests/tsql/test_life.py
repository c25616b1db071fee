"""Live and dead members: tests, notifications, and the history."""

import json
import time

import pytest
from support import remains, slack, until

pytestmark = pytest.mark.engines("mssql")

REGISTER = "EXEC {s}.register ?, N'who', N'owner', NULL, 0, ?, @answer = 1"


@pytest.fixture
def member(new_session):
    """``member(grace_ms, lease_ms)`` returns a session, and the number of its member."""

    def member(grace_ms=0, lease_ms=None):
        connection = new_session()
        text = "DECLARE @m bigint; EXEC {s}.register_member N'host' , 17, N'program', ?, ?, @m OUTPUT; SELECT @m"
        return connection, connection.rows(text, grace_ms, lease_ms)[0][0]

    return member


def states(database, name):
    """Return (state, missing_for, grace) of the rows of a resource."""
    entries = database.rows(f"EXEC {database.schema}.entries ?", name)
    return [(row[2], row[16], row[17]) for row in entries]


def past(database, name, *others):
    """Return (outcome, host, pid, program, login, ended_by, held) of the ended rows, newest first."""
    marks = "".join(", ?" for _ in others)
    past_rows = database.rows(f"EXEC {database.schema}.past ?, 100{marks}", name, *others)
    return [(row[12], *row[14:19], row[11]) for row in past_rows]


def test_a_try_gets_in_where_the_dead_have_been(member, session, database, name):
    """Also if no client waited or polled when the holder died. Within its grace no other request is granted."""
    connection, begun = session(), time.monotonic()
    holder, number = member(6000)
    holder.rows(REGISTER, number, name)
    ((login,),) = holder.rows("SELECT ORIGINAL_LOGIN()")
    assert states(database, name) == [("holds", None, 6.0)]
    holder.close()
    until(lambda: states(database, name)[0][1] is not None, "the beacon going")
    code = connection.acquire(name, routine="try").code
    if time.monotonic() - begun < 6:
        assert code == -1
    if code == -1:
        until(lambda: states(database, name)[0][0] == "dead", "the end of the grace")
        code = connection.acquire(name, routine="try").code
    assert code == 0
    assert states(database, name) == [("holds", None, 0.0)]
    ((*known, held),) = past(database, name)
    assert known == ["reaped", "host", 17, "program", login, login]
    assert held < 6, "it held after its last sign of life"
    connection.release(name)
    assert [row[0] for row in past(database, name)] == ["released", "reaped"]
    assert past(database, name)[0][5] is None


def test_free_session_lock_alone_grants_nothing(member, session, database, name):
    """A woken waiter checks the owner of the row: it may be within its grace."""
    connection, observer, (holder, number) = session(), session(), member(round(1000 * slack(2)))

    def seen():
        return [row[2] for row in observer.rows("EXEC {s}.entries ?", name)]

    holder.rows(REGISTER, number, name)
    assert seen() == ["holds"], "compiled before it has to be quick"
    waiting = connection.waiting(name, timeout_ms=600_000)
    holder.rows("EXEC {s}.heartbeat ?", number)
    holder.close()
    states_seen = []
    until(lambda: states_seen.append(seen()) or waiting.done())
    assert waiting.result().code == 1
    assert ["holds", "waits"] in states_seen
    assert [second for second in states_seen if len(second) > 1 and second[1] != "waits"] == []
    connection.release(name)


def test_waiter_sleeps_on_the_lock_of_the_row_ahead(member, database, name):
    """Also when that row is already gone: the lock wakes the waiter."""
    (holder, first), (waiter, second) = member(60000), member(60000)
    ahead = holder.rows(REGISTER, first, name)[0][0]
    position = waiter.rows(REGISTER, second, name)[0][0]
    assert waiter.call("wait", name, position, 0) == -1
    waiting = waiter.later(waiter.call, "wait", name, position, 60000)
    remains(lambda: not waiting.done(), 2, "it sleeps")
    database.rows(f"DELETE FROM {database.beside('entry')} WHERE queue_position = ?", ahead)
    remains(lambda: not waiting.done(), 1, "it sleeps")
    holder.close()
    assert waiting.result(30) == 0
    waiter.rows("EXEC {s}.deregister_member ?", second)


def test_waiter_tests_the_owner_of_a_free_lock(member, database, name):
    """At once, and not only at the end of its call."""
    (holder, first), (waiter, second) = member(), member(60000)
    holder.rows(REGISTER, first, name)
    position = waiter.rows(REGISTER, second, name)[0][0]
    waiting = waiter.later(waiter.call, "wait", name, position, 60000)
    holder.close()
    assert waiting.result(30) == 0
    waiter.rows("EXEC {s}.deregister_member ?", second)


def test_waiter_tests_the_head_of_the_queue(member, database, name):
    """Also when it sleeps behind another waiter, which is alive and does not poll."""
    (holder, first), (between, second), (waiter, third) = member(), member(60000), member(60000)
    holder.rows(REGISTER, first, name)
    between.rows(REGISTER, second, name)
    position = waiter.rows(REGISTER, third, name)[0][0]
    holder.die()
    assert waiter.call("wait", name, position, 0) == 1
    assert len(database.queue(name)) == 2
    between.rows("EXEC {s}.deregister_member ?", second)
    assert waiter.call("wait", name, position, 0) == 0
    waiter.rows("EXEC {s}.deregister_member ?", third)


def test_waiter_tests_each_of_several_holders(member, database, name):
    three = REGISTER.replace("@answer", "@limit = 3, @weight = ?, @answer")
    (holder, first), (other, second), (waiter, third) = member(60000), member(), member(60000)
    holder.rows(three, first, name, 1)
    other.rows(three, second, name, 1)
    position = waiter.rows(three, third, name, 2)[0][0]
    waiting = waiter.later(waiter.call, "wait", name, position, 60000)
    other.close()
    assert waiting.result(30) == 0
    for session, number in ((holder, first), (waiter, third)):
        session.rows("EXEC {s}.deregister_member ?", number)


def test_next_waiter_has_a_wakeup_lock(session, database, name):
    holder, other, heavy, looker = (session() for _ in range(4))
    assert holder.acquire(name, 3).code == other.acquire(name, 3).code == 0
    waiting = heavy.waiting(name, 3, weight=2, timeout_ms=60000)
    lock = f"waiting.sqlsem.{database.schema}.{database.queue(name)[2][0]}"
    free = "SELECT APPLOCK_TEST({s}.lock_principal(), ?, N'Shared', N'Session')"
    until(lambda: looker.rows(free, lock) == [(0,)], "its lock")
    other.release(name)
    assert waiting.result(30).code == 1
    until(lambda: looker.rows(free, lock) == [(1,)], "the end of its lock")
    holder.release(name)
    heavy.release(name)


def test_wait_for_a_revoked_row(member, database, name):
    """Held or waiting, the row is gone from then on."""
    caller, number = member(60000)
    positions = [caller.rows(REGISTER, number, name)[0][0] for _ in range(2)]
    assert [caller.call("wait", name, position, 0) for position in positions] == [0, -1]
    database.rows(f"UPDATE {database.beside('entry')} SET revoked_at = SYSUTCDATETIME() WHERE resource_id = ?", name)
    assert [caller.call("wait", name, position, 0) for position in positions] == [-2, -2]
    caller.rows("EXEC {s}.deregister_member ?", number)
    assert database.queue(name) == []


def test_middle_waiter_leaves_while_the_holder_stays(session, connect, database, name):
    connection, between, last = session(), session(), session()
    connection.acquire(name)
    leaving, waiting = between.waiting(name, timeout_ms=60000), last.waiting(name, timeout_ms=60000)
    connect().admin.revoke(database.queue(name)[1][0])
    assert leaving.result(30).code == -2
    remains(
        lambda: not waiting.done() and [row[0] for row in states(database, name)] == ["holds", "waits"], 1, "it waits"
    )
    connection.release(name)
    assert waiting.result(30).code == 1
    last.release(name)


def test_a_lease_that_is_over_is_dead(member, session, database, name):
    connection, (holder, number) = session(), member(0, 1500)
    holder.rows(REGISTER, number, name)
    until(lambda: states(database, name)[0][0] == "dead", "the end of the lease")
    assert connection.acquire(name, routine="try").code == 0
    connection.release(name)


def test_a_sign_of_life_that_comes_while_it_is_tested(member, session, database, name):
    """The reaper waits for that heartbeat, and then finds a newer version of the row than the tested one."""
    connection, (holder, number) = session(), member(0, 60000)
    holder.rows(REGISTER, number, name)
    beside = database.beside("member")
    database.rows(
        f"UPDATE {beside} SET heartbeat_at = DATEADD(second, -61, SYSUTCDATETIME()), "
        f"lease_until = DATEADD(second, -1, SYSUTCDATETIME()) WHERE member_id = ?",
        number,
    )
    holder.rows("BEGIN TRANSACTION; EXEC {s}.touch_member ?", number)
    trying = connection.later(connection.acquire, name, routine="try")
    remains(lambda: not trying.done(), 2, "it waits")
    holder.rows("COMMIT TRANSACTION")
    assert trying.result(30).code == -1
    assert states(database, name) == [("holds", None, 0.0)]
    holder.rows("EXEC {s}.deregister_member ?", number)


def test_granting_call_renews_the_heartbeat(member, database, name):
    caller, number = member(0, 80000)

    def age(seconds):
        database.rows(
            f"UPDATE {database.beside('member')} SET heartbeat_at = DATEADD(second, ?, SYSUTCDATETIME()), "
            f"lease_until = DATEADD(second, ?, SYSUTCDATETIME()) WHERE member_id = ?",
            -seconds,
            80 - seconds,
            number,
        )

    def left():
        text = f"SELECT DATEDIFF(second, SYSUTCDATETIME(), lease_until) FROM {database.beside('member')}"
        return database.rows(f"{text} WHERE member_id = ?", number)[0][0]

    requests = json.dumps([{"resource": name("all"), "access": "write", "limit": 1, "weight": 1}])
    caller.rows("EXEC {s}.put ?, N'1'", name)
    calls = [
        (REGISTER, number, name("one")),
        ("EXEC {s}.register_all ?, N'who', N'owner', NULL, 0, ?", number, requests),
        ("EXEC {s}.claim_task ?, ?, N'owner', N'a'", number, name),
        ("EXEC {s}.claim_tasks ?, ?, N'owner', N'b', 0, 5", number, name),
        ("EXEC {s}.start_part ?, ?, N'a', N'a', 60000, N'owner', N'uid'", number, name),
        ("EXEC {s}.end_part ?, ?, N'a', N'uid', N'succeeded', NULL, N'owner'", number, name),
    ]
    for text, *parameters in calls:
        age(60)
        caller.rows(text, *parameters)
        assert left() > 70, text
    position = caller.rows(REGISTER, number, name("late"))[0][0]
    database.rows(f"UPDATE {database.beside('entry')} SET granted_at = NULL WHERE queue_position = ?", position)
    age(60)
    assert caller.call("wait", name("late"), position, 0) == 0
    assert left() > 70, "wait"
    age(5)  # younger than an eighth: left alone
    caller.rows(REGISTER, number, name("two"))
    assert left() <= 75
    caller.rows("EXEC {s}.deregister_member ?", number)


def test_dead_worker_is_seen_by_list_cancel_and_retry(member, session, database, name):
    connection, (worker, number) = session(), member(1500)
    put = "DECLARE @t bigint; EXEC {s}.put ?, N'1', @task_id = @t OUTPUT; SELECT @t"
    first, second = (connection.rows(put, name)[0][0] for _ in range(2))
    assert len(worker.rows("EXEC {s}.claim_tasks ?, ?, N'owner', N'a', 0, 5", number, name)) == 2
    assert connection.rows("EXEC {s}.set_task ?, N'cancel', 1", first) == [(1,)]
    worker.close()

    def listed():
        return {row[0]: row[6] for row in connection.rows("EXEC {s}.list_tasks ?", name)}

    until(lambda: listed() == {first: "lost", second: "lost"}, "the worker being dead")
    assert len(connection.rows("EXEC {s}.list_tasks ?, N'lost'", name)) == 2
    assert connection.rows("EXEC {s}.list_tasks ?, N'running'", name) == []
    # The first action on one of the tasks makes them all pending again.
    assert connection.rows("EXEC {s}.set_task ?, N'retry', 1", second) == [(0,)]
    assert connection.rows("EXEC {s}.set_task ?, N'cancel', 1", first) == [(0,)]
    assert listed() == {first: "cancelled", second: "pending"}
    assert connection.rows("EXEC {s}.set_task ?, N'cancel', 1", second) == [(0,)]


def test_history_of_a_time_and_an_outcome(session, database, name):
    connection = session()
    connection.acquire(name)
    connection.release(name)
    connection.acquire(name)
    connection.rows("EXEC {s}.release ?, @outcome = N'lost'", name)
    assert [row[0] for row in past(database, name)] == ["lost", "released"]
    assert [row[0] for row in past(database, name, None, None, "released")] == ["released"]
    assert len(past(database, name, 600000, 0, None)) == 2
    assert past(database, name, 900000, 600000, None) == []
    time.sleep(0.05)
    assert past(database, name, 1, None, None) == []


def test_only_known_outcomes_come_into_the_history(session, refused, name):
    connection = session()
    connection.acquire(name)
    for text in ("EXEC {s}.release ?, @outcome = N'reaped'", "EXEC {s}.cancel 0, ?, N'forged'"):
        with refused(50000, "bad outcome"):
            connection.rows(text, name)
    assert connection.release(name) == 0


def test_a_row_that_is_gone_leaves_no_lock_behind(session, database, name):
    connection = session()
    got = connection.acquire(name)
    lock = f"entry.sqlsem.{database.schema}.{got.position}"
    mode = "SELECT APPLOCK_MODE({s}.lock_principal(), ?, N'Session')"
    assert connection.rows(mode, lock) == [("Exclusive",)]
    database.rows("DELETE FROM {table} WHERE queue_position = ?", got.position)
    connection.rows("EXEC {s}.release ?, ?, N'who'", name, got.position)
    assert connection.rows(mode, lock) == [("NoLock",)]


def test_no_bare_row_under_a_snapshot(new_session, refused, database, name):
    connection = new_session()
    connection.rows("SET TRANSACTION ISOLATION LEVEL SNAPSHOT")
    with refused(50001, "SNAPSHOT"):
        connection.rows(f"INSERT INTO {database.table} (resource_id, requesting_id) VALUES (?, N'me')", name)
    connection = new_session()
    connection.rows(f"INSERT INTO {database.table} (resource_id, requesting_id) VALUES (?, N'me')", name)
    assert states(database, name) == [("holds", None, None)]
    connection.rows(f"DELETE FROM {database.table} WHERE resource_id = ?", name)


def test_control_characters(member, refused, database, name):
    caller, number = member()
    for bad in ("\x1b[2J", "a\x9bb", "a\x7fb", "a\r\nb"):
        with refused(50000, "control character"):
            caller.rows(REGISTER, number, name(bad))
        with refused(50000, "control character"):
            caller.rows(f"INSERT INTO {database.table} (resource_id, requesting_id) VALUES (?, N'me')", name(bad))
    text = "DECLARE @m bigint; EXEC {s}.register_member ?, 1, N'p', 0, 60000, @m OUTPUT; SELECT @m"
    ((other,),) = caller.rows(text, "ho\x1b[2Jst\x9b")
    assert database.rows(f"SELECT host FROM {database.beside('member')} WHERE member_id = ?", other) == [("ho?[2Jst?",)]
    for each in (number, other):
        caller.rows("EXEC {s}.deregister_member ?", each)


def test_a_per_cent_sign_in_a_name(session, refused, name):
    with refused(50000, f"limit of '{name}-50%d %s' must be"):
        session().call("set_limit", name("50%d %s"), 0)


def test_a_session_that_has_set_rowcount(session, database, name):
    connection = session()
    connection.rows("SET ROWCOUNT 1")
    try:
        for number in range(2):
            assert connection.acquire(name(number)).code == 0
        entries = [row for row in connection.rows("EXEC {s}.entries") if row[0].startswith(name)]
        assert len(entries) == 2
    finally:
        connection.rows("SET ROWCOUNT 0")
    for number in range(2):
        assert connection.release(name(number)) == 0


@pytest.mark.parametrize(("kind", "body"), [("json", "{"), ("json", " "), ("json", "1, 2"), ("call", "nothing")])
def test_invalid_json_is_refused(session, refused, name, kind, body):
    with refused(50000, "is no JSON"):
        session().rows("EXEC {s}.put ?, ?, @kind = ?", name, body, kind)


@pytest.mark.parametrize("body", ["1", '"a \\" b"', "null", "[1, 2]", '{"a": [true]}'])
def test_valid_json_is_accepted(session, name, body):
    connection = session()
    connection.rows("EXEC {s}.put ?, ?, @kind = N'json'", name, body)
    assert [row[4] for row in connection.rows("EXEC {s}.list_tasks ?", name)] == [body]
