"""acquire, try, release, renew and assert_holding in sessions of plain SQL, alone and beside Python's."""

import contextlib
import time
from collections import Counter

import pytest
from support import PATIENCE, Attempt, remains, slack, until

pytestmark = pytest.mark.engines("postgresql", "mssql")


# -- codes


def test_granted_at_once_after_waiting_and_not_in_time(session, connect, database, name):
    holder, other = session(), session()
    first = holder.acquire(name, note="nightly")
    assert first == (0, first.position, first.position)
    for timeout in (0, 50, 1200):
        began = time.monotonic()
        assert other.acquire(name, timeout_ms=timeout) == (-1, None, None)
        assert timeout / 1000 <= time.monotonic() - began < timeout / 1000 + slack(5)
        assert len(database.queue(name)) == 1
    waiting = other.waiting(name, timeout_ms=60_000)
    remains(lambda: not waiting.done(), 0.2, "it waits")
    assert holder.release(name, first.position) == 0
    assert holder.release(name, first.position) == -1
    second = waiting.result(PATIENCE)
    assert second == (1, second.position, second.position)
    assert second.fence > first.fence
    assert other.release(name, second.position) == 0
    history = connect().admin.history(name)
    assert Counter(row.outcome for row in history) == {"released": 2, "timeout": 2}  # timeout 0 takes no number
    assert [row.note for row in history if row.position == first.position] == ["nightly"]


def test_try(session, name):
    first, other = session(), session()
    answer = first.acquire(name, routine="try")
    assert answer == (0, answer.position, answer.position)
    assert other.acquire(name, routine="try") == (-1, None, None)
    assert first.release(name) == 0
    assert other.acquire(name, routine="try").code == 0
    assert other.release(name) == 0


def test_try_does_not_overtake_waiters(session, name):
    first, other, third = session(), session(), session()
    assert first.acquire(name, 2, weight=1).code == 0
    waiting = other.waiting(name, 2, weight=2, timeout_ms=60_000)
    assert third.acquire(name, 2, routine="try").code == -1
    first.release(name)
    assert waiting.result(PATIENCE).code == 1
    other.release(name)


def test_first_come_first_served(session, database, name):
    holder, *rest = [session() for _ in range(5)]
    holder.acquire(name)
    calls = [waiter.waiting(name, timeout_ms=60_000) for waiter in rest]
    positions = [row[0] for row in database.queue(name)]
    holder.release(name)
    for place, (waiter, call) in enumerate(zip(rest, calls, strict=True)):
        assert call.result(PATIENCE) == (1, positions[place + 1], positions[place + 1])
        assert not any(later.done() for later in calls[place + 1 :])
        waiter.release(name)


def test_an_operator_takes_a_waiting_row_away(session, connect, database, name):
    first, other, operator = session(), session(), connect().admin
    first.acquire(name)
    waiting = other.waiting(name, timeout_ms=60_000)
    operator.revoke(database.queue(name)[-1][0])
    assert waiting.result(PATIENCE) == (-2, None, None)
    assert [row.outcome for row in operator.history(name)] == ["revoked"]
    assert len(database.queue(name)) == 1
    first.release(name)


@pytest.mark.parametrize(
    ("held", "terms"),
    [
        ([{}], {}),
        ([{"access": "read"}], {"access": "write"}),
        ([{"access": "write"}], {"access": "read"}),
        ([{"access": "stage:1"}], {"access": "stage:2"}),
        ([{"limit": 2}, {"limit": 2}], {"limit": 2}),
        ([{"limit": 2, "weight": 2}], {"limit": 2}),
        ([{"limit": 5, "weight": 3}], {"limit": 5, "weight": 3}),
        ([{"limit": 1}], {"limit": 3}),
    ],
    ids=str,
)
def test_self_wait_of_a_session_is_a_deadlock(session, database, name, held, terms):
    first, other = session(), session()
    assert [first.acquire(name, **named).code for named in held] == [0] * len(held)
    before = database.queue(name)
    assert first.acquire(name, **terms, timeout_ms=60_000) == (-3, None, None)
    assert first.acquire(name, routine="try", **terms).code == -1
    assert database.queue(name) == before
    assert first.release(name) == 0
    assert database.queue(name) == []
    assert other.acquire(name, **terms, timeout_ms=60_000).code == 0
    assert other.release(name) == 0


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


def test_waiting_writer_holds_later_readers_back(session, connect, database, name):
    connection, other, writer, late = session(), session(), session(), session()
    assert connection.acquire(name, access="read").code == 0
    assert other.acquire(name, access="reader").code == 0
    writing = writer.waiting(name, access="writer", timeout_ms=60_000)
    assert late.acquire(name, access="READ", routine="try").code == -1
    reading = late.waiting(name, access="read", timeout_ms=60_000)
    python = Attempt(connect().read(name))
    until(lambda: len(database.queue(name)) == 5, "Python's reader in the queue")
    connection.release(name)
    remains(lambda: not writing.done(), 0.2, "it waits for all readers")
    other.release(name)
    assert writing.result(PATIENCE).code == 1
    assert python.waits()
    assert not reading.done()
    writer.release(name)
    assert reading.result(PATIENCE).code == 1
    python.leave()
    late.release(name)


def test_stages(session, name):
    connection, other, later = session(), session(), session()
    assert connection.acquire(name, access="stage:100").code == 0
    assert other.acquire(name, access="Stage:100").code == 0
    waiting = later.waiting(name, access="stage:200", timeout_ms=60_000)
    connection.release(name)
    remains(lambda: not waiting.done(), 0.2, "it waits for all of the stage")
    other.release(name)
    assert waiting.result(PATIENCE).code == 1
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
    waiting = connection.waiting(name, timeout_ms=60_000, **words)
    remains(lambda: not waiting.done(), 0.2, "it waits")
    attempt.leave()
    assert waiting.result(PATIENCE).code == 1
    connection.release(name)


def test_shares_with_python(session, connect, name):
    connection, other, coordinator = session(), session(), connect()
    with coordinator.read(name("r")), coordinator.limit(name("n"), 3, weight=2), coordinator.stage(name("s"), -7):
        assert connection.acquire(name("r"), access="read", timeout_ms=0).code == 0
        assert connection.acquire(name("s"), access="stage:-7", timeout_ms=0).code == 0
        assert connection.acquire(name("n"), 3, timeout_ms=0).code == 0
        assert other.acquire(name("n"), 3, timeout_ms=0).code == -1
        assert other.acquire(name("r"), access="writer", routine="try").code == -1
        assert other.acquire(name("s"), access="stage:200", routine="try").code == -1
        assert [entry.access for entry in coordinator.admin.entries(name("s"))] == ["stage:-7"] * 2
    for kind in "rsn":
        assert connection.release(name(kind)) == 0


def test_in_line_with_python(session, connect, database, name):
    connection, other, coordinator = session(), session(), connect()
    holder = coordinator.mutex(name)
    holder.acquire()
    first = connection.waiting(name, timeout_ms=60_000)
    between = Attempt(coordinator.mutex(name))
    until(lambda: len(database.queue(name)) == 3)
    last = other.waiting(name, timeout_ms=60_000)
    holder.release()
    answer = first.result(PATIENCE)
    assert answer.code == 1
    assert between.waits(0.2)
    connection.release(name, answer.position)
    assert between.granted().fence > answer.fence
    assert not last.done()
    between.leave()
    assert last.result(PATIENCE).code == 1
    other.release(name)


# -- bare participants


def test_a_bare_participant_is_waited_for(session, database, name):
    waiter = session()
    with contextlib.closing(database.raw()) as connection:
        bare = database.insert_bare(connection.cursor(), name, "bare", concurrency_limit=1)
        assert waiter.acquire(name, timeout_ms=300) == (-1, None, None)
        assert [row[0] for row in database.queue(name)] == [bare]
        waiting = waiter.waiting(name, timeout_ms=60_000)
        remains(lambda: not waiting.done(), 0.3, "it waits")
        database.rows("DELETE FROM {table} WHERE queue_position = ?", bare)
        began = time.monotonic()
        assert waiting.result(PATIENCE).code == 1
        assert time.monotonic() - began < slack(5)
        waiter.release(name)


def test_acquire_waits_for_a_kept_gate(session, database, name):
    """A bare participant does not commit: the wait for it counts as a wait, too, and ends in time."""
    caller = session()
    with contextlib.closing(database.raw(autocommit=False)) as bare:
        database.insert_bare(bare.cursor(), name, "bare", concurrency_limit=1)
        assert caller.acquire(name, timeout_ms=0) == (-1, None, None)
        assert caller.acquire(name, routine="try") == (-1, None, None)
        began = time.monotonic()
        assert caller.acquire(name, timeout_ms=800) == (-1, None, None)
        assert 0.8 <= time.monotonic() - began < slack(5)
        waiting = caller.later(caller.acquire, name, timeout_ms=60_000)
        remains(lambda: not waiting.done(), 0.3, "it waits")
        bare.rollback()
        assert waiting.result(PATIENCE).code in (0, 1)
        caller.release(name)


# -- release


def test_release_takes_only_the_requesters_own(session, database, name):
    def left():
        return [row[0] for row in database.queue(name)]

    owner, other = session(), session()
    first, second, third, fourth = (
        owner.acquire(name, 5, requesting_id=requester).position for requester in ("package A", "package B", None, None)
    )
    others = other.acquire(name, 5).position
    assert owner.release(name, requesting_id="package C") == -1
    assert other.release(name, third) == -1
    assert other.release(name, third, "package A") == -1
    assert owner.release(name, second, "package A") == -1
    assert owner.release(name("x"), first, "package A") == -1
    assert owner.release(name, requesting_id="package A") == 0
    assert left() == [second, third, fourth, others]
    assert owner.release(name) == 0
    assert left() == [second, others]
    assert owner.release(name) == -1
    # Another session of the same login may release it with the id: a handler that runs on another connection.
    assert other.release(name, None, "package B") == 0
    assert other.release(name) == 0


# -- renew, assert_holding


def test_renew_without_a_lease(session, database, refused, name):
    first, other = session(), session()
    position = first.acquire(name, requesting_id="one").position
    heartbeat = (
        f"SELECT m.heartbeat_at FROM {database.beside('member')} AS m JOIN {{table}} AS t ON t.member_id = m.member_id "
        "WHERE t.queue_position = ?"
    )
    before = database.rows(heartbeat, position)
    assert first.call("renew", name, position, "one") == 0
    if first.tsql:
        assert database.rows(heartbeat, position) > before, "a heartbeat"
    assert other.call("renew", name, position, "one") == 0
    assert other.call("renew", name, position) == -1
    assert first.call("renew", name, position + 1, "one") == -1
    with refused("22023", 50000, "no lease to renew"):
        first.call("renew", name, position, "one", 5)
    first.die()
    until(lambda: other.call("renew", name, position, "one") == -1, "its end")


def test_assert_holding(session, database, refused, name):
    first, other = session(), session()
    position = first.acquire(name).position
    with refused("25001", 50001, "open transaction|BEGIN TRANSACTION"):
        first.run("assert_holding", name, position)
    first.rows("BEGIN TRANSACTION")
    first.run("assert_holding", name, position)
    assert first.rows("SELECT 7") == [(7,)]
    first.rows("COMMIT")

    def refuses(caller, resource, number, *requester):
        with caller.rolled_back(), refused("55000", 50004, "is not held"):
            caller.run("assert_holding", resource, number, *requester)

    for resource, number, *requester in ((name, position + 1), (name("x"), position), (name, position, "x")):
        refuses(first, resource, number, *requester)
    refuses(other, name, position)
    waiting = other.waiting(name, timeout_ms=60_000, requesting_id="me")
    refuses(first, name, database.queue(name)[-1][0], "me")
    first.release(name)
    refuses(first, name, position)
    assert waiting.result(PATIENCE).code == 1
    assert other.release(name, requesting_id="me") == 0


# -- sessions


def test_session_is_a_single_member(session, connect, database, name):
    connection, admin = session(), connect().admin
    for which in "ab":
        connection.acquire(name(which))
    (first,), (second,) = (admin.entries(name(which)) for which in "ab")
    assert first.member_id == second.member_id
    number, login = ("session_id", "ORIGINAL_LOGIN()") if connection.tsql else ("backend_pid", "session_user")
    members = f"SELECT member_id, grace_ms, pid, login FROM {database.beside('member')} WHERE {number} = ?"
    assert database.rows(members, connection.pid) == [
        (first.member_id, 0, None, connection.rows(f"SELECT {login}")[0][0])
    ]
    assert first.requesting_id == second.requesting_id
    assert first.requesting_id.startswith(f"{'spid' if connection.tsql else 'pid'} {connection.pid} 20")
    for which in "ab":
        connection.release(name(which))
    connection.acquire(name)
    assert admin.entries(name)[0].member_id == first.member_id
    connection.release(name)


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_locks_end_with_their_session(session, name, how):
    """At once: their grace is 0."""
    holder, other, operator = session(), session(), session()
    holder.acquire(name)
    waiting = other.waiting(name, timeout_ms=60_000)
    began = time.monotonic()
    if how == "closed":
        holder.close()
    else:
        operator.kill(holder)
    assert waiting.result(PATIENCE).code == 1
    assert time.monotonic() - began < slack(5)
    other.release(name)


def test_killed_waiting_session_blocks_no_client(session, name):
    holder, victim, last = session(), session(), session()
    holder.acquire(name)
    doomed = victim.waiting(name, timeout_ms=60_000)
    waiting = last.waiting(name, timeout_ms=60_000)
    holder.kill(victim)
    with pytest.raises(Exception):  # noqa: B017  (drivers differ in what they make of it)
        doomed.result(PATIENCE)
    began = time.monotonic()
    holder.release(name)
    assert waiting.result(PATIENCE).code == 1
    assert time.monotonic() - began < slack(5)
    last.release(name)


# -- operators


def test_set_limit(session, connect, name):
    connection, other, operator = session(), session(), session()

    def caps():
        return [resource.cap for resource in connect().admin.resources() if resource.resource == name]

    operator.call("set_limit", name, 1)
    assert caps() == [1]
    assert connection.acquire(name, 3).code == 0
    assert other.acquire(name, 3, routine="try").code == -1
    waiting = other.waiting(name, 3, timeout_ms=60_000)
    remains(lambda: not waiting.done(), 0.2, "it waits")
    operator.call("set_limit", resource=name, limit=None)
    assert waiting.result(PATIENCE).code == 1
    connection.release(name)
    other.release(name)
    assert caps() == []


def test_pause_and_resume(session, connect, name):
    holder, connection, operator = session(), session(), session()
    position = holder.acquire(name, 3).position
    operator.call("pause", name)
    assert holder.call("renew", name, position) == 0, "the holder keeps its lock"
    assert connection.acquire(name, 3, routine="try").code == -1
    assert connection.acquire(name, 3, timeout_ms=300).code == -1
    waiting = connection.waiting(name, 3, timeout_ms=60_000)
    attempt = Attempt(connect().mutex(name))
    assert attempt.waits(0.3)
    assert not waiting.done()
    operator.call("resume", name)
    assert waiting.result(PATIENCE).code == 1
    assert attempt.waits(0.2)
    for caller in (holder, connection):
        caller.release(name)
    attempt.leave()


def test_reap(session, connect, database, name):
    holder, operator = session(), session()
    holder.acquire(name)
    until(lambda: operator.call("reap") == 0, "the end of rows that others left")
    assert len(database.queue(name)) == 1
    holder.die()
    until(lambda: operator.call("reap") >= 1 or not database.queue(name), "the row of the dead session going")
    assert database.queue(name) == []
    assert [row.outcome for row in connect().admin.history(name)] == ["reaped"]


def test_status_of_all_and_of_a_single_resource(session, name):
    def status(*resource):
        rows = first.listed("status", *resource)
        return [(row[0], row[2], row[3]) for row in rows if row[0].startswith(name)]

    first, other = session(), session()
    first.acquire(name("a"))
    other.acquire(name("b"), access="read")
    waiting = other.waiting(name("a"), timeout_ms=60_000)
    assert sorted(status()) == [
        (name("a"), "holds", "write"),
        (name("a"), "waits", "write"),
        (name("b"), "holds", "read"),
    ]
    assert status(name("b")) == [(name("b"), "holds", "read")]
    first.release(name("a"))
    assert waiting.result(PATIENCE).code == 1
    other.release(name("a"))
    other.release(name("b"))
