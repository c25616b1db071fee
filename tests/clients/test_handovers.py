"""Locks that travel between logins and languages, on PostgreSQL."""

import contextlib

import pytest
from psycopg import errors
from support.databases import name_of_login

from sqlsem.engines.answers import hash_of
from sqlsem.values.errors import ConfigurationError, NotHeld

pytestmark = pytest.mark.engines("postgresql")


@pytest.fixture
def three(user, login):
    """The giver's coordinator, and two logins with the same role."""
    with contextlib.closing(user.coordinator()) as giver:
        yield giver, login("sqlsem_user"), login("sqlsem_user")


def test_token_is_valid_for_a_single_login(three, name):
    giver, meant, other = three
    with giver.mutex(name) as grant:
        token = grant.hand_over(to=name_of_login(meant))
    with contextlib.closing(other.coordinator()) as stranger:
        with pytest.raises(ConfigurationError, match=f"handed over to login {name_of_login(meant)}"):
            stranger.adopt(token)
        with pytest.raises(NotHeld):
            stranger.adopt(token[:-1] + "x")
    with contextlib.closing(meant.coordinator()) as taker:
        adopted = taker.adopt(token)
        assert adopted.fence == grant.fence
        with pytest.raises(NotHeld, match="was used"):  # the giver's login may adopt it only while the giver is there
            giver.adopt(token)
        adopted.check()
        adopted.release()
        assert [past.outcome for past in taker.admin.history(name)] == ["released", "handed_over"]
        last, first = (past.login for past in taker.admin.history(name))
        assert last == name_of_login(meant)
        assert first not in (name_of_login(meant), None)


def test_left_out_it_is_for_the_givers_own(three, name):
    giver, _, other = three
    with giver.mutex(name) as grant:
        token = grant.hand_over()
    with contextlib.closing(other.coordinator()) as stranger, pytest.raises(ConfigurationError, match="login"):
        stranger.adopt(token)
    giver.adopt(token).release()


def test_token_for_a_role_is_valid_for_its_members(three, name):
    giver, meant, _ = three
    with giver.mutex(name) as grant:
        token = grant.hand_over(to="sqlsem_user")
    with contextlib.closing(meant.coordinator()) as taker:
        taker.adopt(token).release()


def test_tables_do_not_reveal_tokens(three, login, name):
    """The displays show the hash of a token, and no token."""
    giver, _, other = three
    with giver.mutex(name) as grant:
        token = grant.hand_over(to=name_of_login(other))
    with login("sqlsem_reader").raw() as connection:
        (stored,) = connection.execute(
            "SELECT token_hash FROM sqlsem.handover WHERE queue_position = %s", (grant.position,)
        ).fetchall()
        assert stored == (hash_of(token),)
        assert connection.execute(
            "SELECT count(*) FROM sqlsem.handover AS h WHERE h::text LIKE %s", (f"%{token}%",)
        ).fetchone() == (0,)
    with contextlib.closing(other.coordinator()) as taker:
        with pytest.raises(NotHeld, match="not known"):
            taker.adopt(stored[0])
        taker.adopt(token).release()


def test_handover_of_another_logins_lock_is_refused(three, name):
    giver, _, other = three
    with giver.mutex(name) as grant, other.raw() as connection:
        (row,) = giver.admin.entries(name)
        code = connection.execute(
            "SELECT sqlsem.hand_over_rows(%s, ARRAY[%s]::bigint[], %s, 60000, NULL)",
            (row.member_id, row.position, hash_of("x")),
        ).fetchone()
        assert code == (-1,)
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="nothing is held"):
            connection.execute("CALL sqlsem.hand_over(%s, requesting_id => %s)", (name, row.requesting_id))
        grant.check()


def test_psql_with_a_lease(user, name):
    with contextlib.closing(user.coordinator()) as giver, user.raw() as connection:
        with giver.mutex(name) as grant:
            token = grant.hand_over()
        _, position, _ = connection.execute(
            "CALL sqlsem.adopt(%s, requesting_id => 'job 7', lease_seconds => 20)", (token,)
        ).fetchone()
        assert position == grant.position
        assert connection.execute("SELECT sqlsem.renew(%s, %s, 'job 7', 30)", (name, position)).fetchone() == (0,)
        (token,) = connection.execute("CALL sqlsem.hand_over(%s, requesting_id => 'job 7')", (name,)).fetchone()
        giver.adopt(token).release()


@pytest.mark.parametrize("seconds", [0.5, -1, float("nan"), 1e9])
def test_times_that_cannot_be(user, name, seconds):
    with user.raw() as connection:
        connection.execute("CALL sqlsem.acquire(%s)", (name,))
        with pytest.raises(errors.InvalidParameterValue, match="ttl_seconds"):
            connection.execute("CALL sqlsem.hand_over(%s, ttl_seconds => %s)", (name, seconds))
        assert connection.execute("SELECT sqlsem.release(%s)", (name,)).fetchone() == (0,)


def test_adopted_row_below_the_mark_is_seen(user, name):
    """The adopter has higher numbers, and low-water marks above the number that it adopts."""
    with contextlib.closing(user.coordinator()) as giver, contextlib.closing(user.coordinator()) as taker:
        with giver.mutex(name) as grant:
            for _ in range(300):  # each writes a mark with a chance of one in forty
                with taker.mutex(name("other")):
                    pass
            token = grant.hand_over()
        with taker.adopt(token) as adopted:
            adopted.check()  # a heartbeat, which lists the member's rows from its marks on
            for _ in range(300):
                with taker.mutex(name("other")):
                    pass
            adopted.check()


def test_row_in_transit_needs_its_token(three, database, name):
    """Not even the login that may adopt it can use it before: it can neither acquire, nor release, nor renew it."""
    giver, meant, _ = three
    with giver.mutex(name) as grant:
        token = grant.hand_over(to=name_of_login(meant), ttl=30)
    member, transit = database.rows(
        "SELECT member_id, requesting_id FROM sqlsem.ProcessControl WHERE resource_id = ?", str(name)
    )[0]
    before = database.rows("SELECT lease_until FROM sqlsem.member WHERE member_id = ?", member)
    with meant.raw() as thief:

        def value(text, *parameters):
            return thief.execute(f"SELECT {text}", parameters).fetchone()[0]

        with pytest.raises(errors.ObjectNotInPrerequisiteState):
            thief.execute("CALL sqlsem.hand_over(%s, requesting_id => %s)", (name, transit))
        with pytest.raises(errors.InsufficientPrivilege):
            value("sqlsem.pin(%s, %s, %s)", name, grant.position, transit)
        assert value("sqlsem.hand_over_rows(%s, ARRAY[%s], %s, 1000, NULL)", member, grant.position, "0" * 64) == -1
        assert value("sqlsem.release(%s, %s, %s)", name, grant.position, transit) == -1
        assert value("sqlsem.reattach_member(%s)", member) is False
        assert value("known FROM sqlsem.heartbeat(%s)", member) is False
    assert database.rows("SELECT lease_until FROM sqlsem.member WHERE member_id = ?", member) == before
    with contextlib.closing(meant.coordinator()) as taker:
        adopted = taker.adopt(token)
        assert adopted.position == grant.position
        adopted.release()
