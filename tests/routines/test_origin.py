"""The database on another or a restarted server: by the tables, another server wrote them last.

No time by the other server's clock ends a lock: graces, leases and notices of revocation begin anew with the first
session. Numbers go on above all numbers that the other server may have assigned.
"""

import pytest
from support import until

from sqlsem.values.locks import Request

pytestmark = pytest.mark.engines("postgresql", "mssql")

#: The facts that another server has stored about itself, and the changes by a restart of this server.
MOVED, RESTARTED = ("origin", "started"), ("started",)


def take_over(database, settings=MOVED):
    """Change the tables as if another server had written them last."""
    for name in settings:
        database.rows(f"UPDATE {database.beside('setting')} SET value = 'another' WHERE name = ?", name)


def known(database):
    """Return True if the tables name this server."""
    return database.rows(f"SELECT COUNT(*) FROM {database.beside('setting')} WHERE value = 'another'") == [(0,)]


def seconds(database, expression):
    """Return the time ``expression`` seconds from now, as SQL of this engine."""
    if database.engine == "mssql":
        return f"DATEADD(second, {expression}, SYSUTCDATETIME())"
    return f"clock_timestamp() + {expression} * interval '1 second'"


def change(database, number, **columns):
    """Write times, in seconds from now, into a member's row."""
    for column, offset in columns.items():
        database.rows(
            f"UPDATE {database.beside('member')} SET {column} = {seconds(database, offset)} WHERE member_id = ?", number
        )


def left(database, number, column):
    """Return the seconds until the time in a member's row; None if there is no such member."""
    table = database.beside("member")
    if database.engine == "mssql":
        text = f"SELECT DATEDIFF(second, SYSUTCDATETIME(), {column}) FROM {table} WHERE member_id = ?"
    else:
        text = f"SELECT extract(epoch FROM {column} - clock_timestamp())::integer FROM {table} WHERE member_id = ?"
    rows = database.rows(text, number)
    return rows[0][0] if rows else None


def join(database):
    """Register a new member for a moment."""
    session = database.session(grace=5)
    session.deregister_member(session.register_member("host", 2, "test"))
    session.close()


@pytest.fixture
def holder(database, name):
    """Return a function that starts a process's member, which holds the resource; ``dead``: its session has ended."""
    opened = []

    def holder(dead=False, **options):
        session = database.session(**options)
        opened.append(session)
        number = session.register_member("host", 1, "test")
        (ticket,) = session.register(number, "me", "owner", f"{name}.1", [Request(name)], False)
        assert ticket.granted
        if dead:
            session.close()
        return session, number, ticket

    yield holder
    take_over(database, RESTARTED)  # whatever is left of a test begins anew, and ends soon
    for session in opened:
        session.close()


@pytest.fixture
def one(session):
    return session()


@pytest.mark.parametrize("settings", [MOVED, RESTARTED])
def test_grace_begins_anew_on_another_server(database, holder, one, settings):
    _, number, _ = holder(dead=True, grace=600)
    until(
        lambda: one.call("reap") == 0 and left(database, number, "missing_since") is not None, "its session has ended"
    )
    change(database, number, heartbeat_at=-700, missing_since=-700)
    take_over(database, settings)
    one.call("reap")
    assert known(database)
    assert left(database, number, "heartbeat_at") > -60
    one.call("reap")
    assert left(database, number, "heartbeat_at") is not None
    change(database, number, heartbeat_at=-700, missing_since=-700)
    assert one.call("reap") == 1
    assert left(database, number, "heartbeat_at") is None


def test_members_return_to_another_server(database, holder):
    _, number, ticket = holder(dead=True, grace=600)
    change(database, number, heartbeat_at=-700)
    take_over(database)
    other = database.session(grace=600)
    try:
        assert other.reattach_member(number)
        assert known(database)
        assert other.heartbeat(number).positions == {ticket.position}
        assert other.release(ticket, "released")
        other.deregister_member(number)
    finally:
        other.close()


def test_new_sessions_find_a_dead_holder_with_a_new_grace(database, holder, one, name):
    _, number, _ = holder(dead=True, grace=600)
    change(database, number, heartbeat_at=-700)
    take_over(database)
    assert one.acquire(name, routine="try")[0] == -1
    assert known(database)
    assert left(database, number, "heartbeat_at") > -60


@pytest.mark.parametrize("offset", [-100, 100_000])
def test_leases_carry_on_from_now_on_another_server(database, holder, one, offset):
    """Leases do not depend on the clock of the other server."""
    session, number, ticket = holder(lease=300)
    change(database, number, lease_until=offset)
    take_over(database)
    join(database)
    assert 240 < left(database, number, "lease_until") <= 300
    assert one.call("reap") == 0
    assert session.release(ticket, "released")
    session.deregister_member(number)


def test_leases_of_sessions_carry_on_from_now(database, one, session, name):
    code, position, _ = one.acquire(name, lease_seconds=300, requesting_id="job 7")
    assert code == 0
    number = database.rows(
        f"SELECT member_id FROM {database.beside('entry' if one.tsql else 'ProcessControl')} WHERE queue_position = ?",
        position,
    )[0][0]
    change(database, number, lease_until=-100)
    take_over(database)
    other = session()
    assert other.acquire(name, routine="try")[0] == -1
    assert left(database, number, "lease_until") > 240
    assert other.call("renew", name, position, "job 7") == 0
    change(database, number, lease_until=-1)
    assert other.acquire(name, routine="try")[0] == 0
    assert one.call("renew", name, position, "job 7") == -1
    other.call("release", name)


def test_revoked_holders_are_told_before_their_row_goes(database, holder, one, name):
    session, number, ticket = holder(grace=600)
    table = database.beside("entry") if one.tsql else database.beside("ProcessControl")
    database.rows(
        f"UPDATE {table} SET revoked_at = {seconds(database, -700)} WHERE resource_id = ? AND queue_position = ?",
        *(name, ticket.position),
    )
    take_over(database)
    assert one.call("reap") == 0  # (an operator is no new member)
    assert one.acquire(name, routine="try")[0] == -1
    assert session.heartbeat(number).revoked == {ticket.position}
    assert session.release(ticket, "revoked")
    session.deregister_member(number)


def test_numbers_go_on_above_the_numbers_of_another_server(database, session, one, name):
    before = one.acquire(name)[1]
    one.call("release", name)
    take_over(database)
    fences = []
    for other in (session(), session()):
        join(database)
        fences.append(other.acquire(name)[2])
        other.call("release", name)
    assert fences[0] >= 10**10
    assert fences[0] >= before + 10**9
    assert fences[0] < fences[1] < fences[0] + 10**9, "set forward once"


def test_numbers_go_on_after_a_restart(database, session, one, name):
    before = one.acquire(name)[1]
    one.call("release", name)
    take_over(database, RESTARTED)
    other = session()
    join(database)
    after = other.acquire(name)[1]
    other.call("release", name)
    assert before < after < before + 10**6


def test_many_members_on_another_server_set_numbers_forward_once(database, connect, name):
    take_over(database)
    fences = []
    for coordinator in [connect(grace=60) for _ in range(5)]:
        with coordinator.mutex(name) as grant:
            fences.append(grant.fence)
    assert fences == sorted(set(fences))
    assert fences[-1] - fences[0] < 10**9
    assert known(database)
