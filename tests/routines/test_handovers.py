"""Hand-overs between sessions, and from Python to them and back."""

import contextlib

import pytest

from sqlsem.values.errors import NotHeld

pytestmark = pytest.mark.engines("postgresql", "mssql")


def give(session, resource, **named):
    """Return the token of a lock that a session hands over."""
    return session.outputs("hand_over", {"token": "nvarchar(200)"}, resource, **named)[0]


def adopt(session, token):
    """Return (resource, position, fence)."""
    return session.outputs("adopt", {"resource": "nvarchar(255)", "position": "bigint", "fence": "bigint"}, token)


def test_from_session_to_session(session, refused, name):
    giver, taker = session(), session()
    granted = giver.acquire(name)
    token = give(giver, name)
    assert len(token) > 40
    assert taker.acquire(name, timeout_ms=0).code == -1
    assert giver.release(name) == -1
    assert adopt(taker, token) == (name, granted.position, granted.fence)
    with refused("55000", 50004, "was used"):
        adopt(giver, token)
    with refused("55000", 50004, "nothing is held"):
        give(giver, name)
    assert taker.release(name) == 0
    with refused("55000", 50004, "not known"):
        adopt(taker, "sqlsem-0")


def test_from_python_to_a_session_and_back(session, database, refused, name):
    connection = session()
    with contextlib.closing(database.coordinator()) as coordinator:
        with coordinator.mutex(name) as grant:
            token = grant.hand_over()
        assert adopt(connection, token) == (name, grant.position, grant.fence)
        assert not coordinator.mutex(name).acquire(blocking=False)
        with connection.rolled_back():
            connection.run("assert_holding", name, grant.position)
        with pytest.raises(NotHeld, match="was used"):
            coordinator.adopt(token)
        token = give(connection, name, ttl_seconds=30)
        with coordinator.adopt(token) as adopted:
            assert adopted.fence == grant.fence
            with refused("55000", 50004, "was used"):
                adopt(connection, token)


@pytest.mark.parametrize("call", [give, adopt])
def test_not_in_a_transaction(session, refused, name, call):
    connection = session()
    connection.acquire(name)
    with connection.rolled_back(), refused("25001", 50001, "open transaction"):
        call(connection, name)
    assert connection.release(name) == 0
