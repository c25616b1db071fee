"""Rounds from psql sessions and scheduled jobs: what is special to PostgreSQL (the rest is in ``routines``)."""

import psycopg
import pytest
from psycopg import errors

import sqlsem
from sqlsem import rounds

pytestmark = pytest.mark.engines("postgresql")


@pytest.fixture
def session(database):
    """Sessions in autocommit mode: ``session()("SELECT …", …)`` gives the row."""
    made = []

    def session(of=database):
        connection = of.raw()
        made.append(connection)

        def ask(text, *parameters):
            return connection.execute(text, parameters).fetchone()

        ask.connection = connection
        return ask

    yield session
    for connection in made:
        connection.close()


def start(ask, name, part, parts="a, b", window=60.0):
    return ask("SELECT sqlsem.round_part_start(%s, %s, %s, %s)", name, part, parts, window)[0]


def done(ask, name, part):
    return ask("SELECT is_last, outcome FROM sqlsem.round_part_done(%s, %s)", name, part)


def test_a_start_within_a_transaction_is_refused(session, name, database):
    """The other parts would wait for its end."""
    ask, other = session(), session()
    database.rows(f"CREATE TABLE work_{name} (x integer)")
    start(ask, name, "b")  # (so it is a member already)
    with pytest.raises(errors.ActiveSqlTransaction, match="round_part_start must not be called inside an open transac"):
        with ask.connection.transaction():
            ask.connection.execute(f"INSERT INTO work_{name} VALUES (1)")
            start(ask, name, "a")
    other.connection.execute("SET lock_timeout = '100ms'")
    start(other, name, "a")
    assert done(other, name, "a") == (0, "succeeded")
    assert done(ask, name, "b") == (1, "succeeded")
    ask("SELECT sqlsem.round_continued(%s)", name)


def test_done_within_the_callers_transaction(session, name, database):
    ask = session()
    start(ask, name, "a", "a")
    with pytest.raises(ZeroDivisionError), ask.connection.transaction():
        assert done(ask, name, "a") == (1, "succeeded")
        raise ZeroDivisionError
    assert done(ask, name, "a") == (1, "succeeded")  # that one was rolled back
    ask("SELECT sqlsem.round_continued(%s)", name)


def test_refusals(session, name):
    ask = session()
    with pytest.raises(errors.InvalidParameterValue, match="above 0"):
        start(ask, name, "a", window=float("nan"))
    ask.connection.execute("SET default_transaction_isolation TO 'repeatable read'")
    with pytest.raises(errors.ActiveSqlTransaction, match="READ COMMITTED"):
        start(ask, name, "b")


def test_code_of_a_plain_user_is_not_kept(user, database, connect, name):
    """What others may run with more rights, operators alone may leave behind."""
    coordinator = user.coordinator()
    made = rounds.round(name, ["a", "b"], window=60, coordinator=coordinator)
    with made.then(sqlsem.Sql("DROP SCHEMA sqlsem CASCADE")).part("a"):
        pass
    entry = made.entry()
    assert (entry.then_kind, entry.then_body) == ("local", None)
    with rounds.round(name, ["a", "b"], window=60, coordinator=connect()).part("b") as last:
        pass
    assert last.is_last
    assert made.entry().then_status == "pending"
    coordinator.close()


def test_what_is_another_logins_cannot_be_ended(login, connect, name):
    """Not even by one that knows its member and the uid of its start."""
    coordinator = connect()
    running = rounds.round(name, ["a"], window=60, coordinator=coordinator).part("a").start()
    other = login("sqlsem_user")
    member, uid = coordinator.process.member.member_id, running._uid

    def end_part(outcome):
        text = "SELECT code FROM sqlsem.end_part(?, ?, 'a', ?, ?, NULL, 'x', 'session', NULL)"
        return other.rows(text, member, name, uid, outcome)

    assert end_part("succeeded") == end_part("failed") == [("lost",)]
    with pytest.raises(psycopg.Error, match="not there"):
        start = "SELECT * FROM sqlsem.start_part(?, ?, 'a', '[\"a\"]', 60000, 'x', ?, NULL, NULL)"
        other.rows(start, member, name, uid)
    assert running._declaration.entry().parts[0].status == "running"
    told = []

    def then():
        entry = running._declaration.entry()
        for text, values in (
            ("SELECT sqlsem.end_then(?, ?, ?, NULL)", (member, entry.round_id, entry.then_attempt)),
            ("SELECT sqlsem.return_then(?, ?)", (member, uid)),
        ):
            told.append(other.rows(text, *values))
        told.append(running._declaration.entry().then_status)

    running._declaration.declare_continuation(then)
    assert running.done()
    assert told == [[(False,)], [(False,)], "running"]


@pytest.mark.parametrize(
    "call",
    [
        "start_part(NULL, 'x', 'a', '[\"a\"]', 1000, 'x', 'u', NULL, NULL)",
        "claim_then(NULL, 'x', NULL, 'x', 'u', true)",
        "round_part_done(NULL, 'a')",
        "round_part_done('x', NULL)",
        "round_part_failed(NULL, NULL, NULL)",
        "round_resume(NULL)",
        "round_continued(NULL)",
        "end_part(1, 'x', 'a', 'u', NULL, NULL, NULL, NULL, NULL)",
    ],
)
def test_nulls_are_refused(session, call):
    with pytest.raises(psycopg.Error, match=r"NULL|not there"):
        session()(f"SELECT sqlsem.{call}")


@pytest.mark.parametrize(
    "call",
    [
        "(SELECT nullif(code, 'lost') FROM sqlsem.end_part(NULL, NULL, NULL, NULL, 'failed', NULL, NULL, NULL, NULL))",
        "sqlsem.end_then(NULL, NULL, NULL, NULL)",
        "sqlsem.return_then(NULL, NULL)",
    ],
)
def test_nulls_end_nothing(session, connect, name, call):
    ask = session()
    start(ask, name, "a", "a")
    assert ask(f"SELECT {call}")[0] in (False, None)
    (entry,) = rounds.list_rounds(connect(), name)
    assert entry.parts[0].status == "running"


def test_a_plain_user_does_not_undo_what_an_operator_has_kept(user, connect, name):
    coordinator = user.coordinator()
    for one in (connect(), coordinator):
        made = rounds.round(name, ["a", "b", "c"], window=60, coordinator=one)
        with made.then(sqlsem.Sql("SELECT 1")).part("b" if one is coordinator else "a"):
            pass
    assert (made.entry().then_kind, made.entry().then_body) == ("sql", None), "what it runs is not a user's to see"
    entry = rounds.round(name, ["a", "b", "c"], window=60, coordinator=connect()).entry()
    assert (entry.then_kind, entry.then_body) == ("sql", "SELECT 1")
    coordinator.close()


def test_roles(login, session, name):
    reader, stranger, user = (login(role) for role in ("sqlsem_reader", None, "sqlsem_user"))
    ask = session(user)
    start(ask, name, "a", "a")
    assert done(ask, name, "a") == (1, "succeeded")
    assert len(reader.rows("SELECT * FROM sqlsem.list_rounds(?)", name)) == 1
    for text in ("sqlsem.round_part_start('x', 'a', 'a', 1)", "sqlsem.round_part_done('x', 'a')"):
        with pytest.raises(errors.InsufficientPrivilege):
            reader.rows(f"SELECT {text}")
    with pytest.raises(errors.InsufficientPrivilege):
        stranger.rows("SELECT * FROM sqlsem.list_rounds()")
    # Another login cannot end what this one runs.
    member = ask("SELECT member_id FROM sqlsem.list_rounds(%s)", name)[0]
    other = session(login("sqlsem_user"))
    with pytest.raises(psycopg.Error, match="not there"):
        other("SELECT * FROM sqlsem.claim_then(%s, %s, NULL, 'x', 'x', true)", member, name)
    assert other("SELECT sqlsem.end_then(%s, 1, 1, NULL)", member) == (False,)
