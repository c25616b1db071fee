"""Batches from psql sessions and scheduled jobs, where PostgreSQL differs (``routines`` has the rest)."""

import re

import psycopg
import pytest
from psycopg import errors
from support.databases import name_of_login

import sqlsem
from sqlsem import batches

pytestmark = pytest.mark.engines("postgresql")


def start(ask, name, part, parts="a, b", window=60.0):
    return ask.row("SELECT sqlsem.batch_part_start(%s, %s, %s, %s)", name, part, parts, window)[0]


def done(ask, name, part):
    return ask.row("SELECT is_last, outcome FROM sqlsem.batch_part_finish(%s, %s)", name, part)


def test_a_start_within_a_transaction_is_refused(session, name, database):
    """Otherwise the other parts would wait for its end."""
    ask, other = session(), session()
    database.rows(f"CREATE TABLE work_{name} (x integer)")
    start(ask, name, "b")  # (so it is a member already)
    with pytest.raises(errors.ActiveSqlTransaction, match="batch_part_start must not be called inside an open transac"):
        with ask.connection.transaction():
            ask.connection.execute(f"INSERT INTO work_{name} VALUES (1)")
            start(ask, name, "a")
    other.connection.execute("SET lock_timeout = '100ms'")
    start(other, name, "a")
    assert done(other, name, "a") == (0, "succeeded")
    assert done(ask, name, "b") == (1, "succeeded")
    ask.row("SELECT sqlsem.batch_callback_ended(%s)", name)


def test_done_within_the_callers_transaction(session, name, database):
    ask = session()
    start(ask, name, "a", "a")
    with pytest.raises(ZeroDivisionError), ask.connection.transaction():
        assert done(ask, name, "a") == (1, "succeeded")
        raise ZeroDivisionError
    assert done(ask, name, "a") == (1, "succeeded")  # that part was rolled back
    ask.row("SELECT sqlsem.batch_callback_ended(%s)", name)


def test_refusals(session, name):
    ask = session()
    with pytest.raises(errors.InvalidParameterValue, match="above 0"):
        start(ask, name, "a", window=float("nan"))
    ask.connection.execute("SET default_transaction_isolation TO 'repeatable read'")
    with pytest.raises(errors.ActiveSqlTransaction, match="READ COMMITTED"):
        start(ask, name, "b")


def test_code_of_a_plain_user_is_not_kept(user, database, connect, name):
    """Only operators may store a callback that other logins run with more rights."""
    coordinator = user.coordinator()
    drop = sqlsem.Sql("DROP SCHEMA sqlsem CASCADE")
    batch = batches.batch(name, ["a", "b"], window=60, coordinator=coordinator, on_success=drop)
    with batch.part("a"):
        pass
    entry = batch.entry()
    assert (entry.callback_kind, entry.callback_body) == ("local", None)
    with batches.batch(name, ["a", "b"], window=60, coordinator=connect()).part("b") as last:
        pass
    assert last.is_last
    assert batch.entry().callback_status == "pending"
    coordinator.close()


def test_part_of_another_login_cannot_be_ended(login, connect, name):
    """Not even by a login that knows its member and the uid of its start."""
    coordinator = connect()
    running = batches.batch(name, ["a"], window=60, coordinator=coordinator).part("a").start()
    other = login("sqlsem_user")
    member, uid = coordinator.client.member.member_id, running._uid

    def end_part(outcome):
        text = "SELECT code FROM sqlsem.end_part(?, ?, 'a', ?, ?, NULL, 'x', 'session', NULL)"
        return other.rows(text, member, name, uid, outcome)

    assert end_part("succeeded") == end_part("failed") == [("lost",)]
    with pytest.raises(psycopg.Error, match="is not known"):
        start = "SELECT * FROM sqlsem.start_part(?, ?, 'a', '[\"a\"]', 60000, 'x', ?, NULL, NULL)"
        other.rows(start, member, name, uid)
    assert running._declaration.entry().parts[0].status == "running"
    answers = []

    def then():
        entry = running._declaration.entry()
        for text, values in (
            ("SELECT sqlsem.end_callback(?, ?, ?, NULL)", (member, entry.batch_id, entry.callback_attempt)),
            ("SELECT sqlsem.return_callback(?, ?)", (member, uid)),
        ):
            answers.append(other.rows(text, *values))
        answers.append(running._declaration.entry().callback_status)

    running._declaration.declare_callback(then)
    assert running.finish()
    assert answers == [[(False,)], [(False,)], "running"]


@pytest.mark.parametrize(
    "call",
    [
        "start_part(NULL, 'x', 'a', '[\"a\"]', 1000, 'x', 'u', NULL, NULL)",
        "claim_callback(NULL, 'x', NULL, 'x', 'u', true)",
        "batch_part_finish(NULL, 'a')",
        "batch_part_finish('x', NULL)",
        "batch_part_fail(NULL, NULL, NULL)",
        "batch_resume(NULL)",
        "batch_callback_ended(NULL)",
        "end_part(1, 'x', 'a', 'u', NULL, NULL, NULL, NULL, NULL)",
    ],
)
def test_nulls_are_refused(session, call):
    with pytest.raises(psycopg.Error, match=r"NULL|is not known"):
        session().row(f"SELECT sqlsem.{call}")


@pytest.mark.parametrize(
    "call",
    [
        "(SELECT nullif(code, 'lost') FROM sqlsem.end_part(NULL, NULL, NULL, NULL, 'failed', NULL, NULL, NULL, NULL))",
        "sqlsem.end_callback(NULL, NULL, NULL, NULL)",
        "sqlsem.return_callback(NULL, NULL)",
    ],
)
def test_nulls_end_nothing(session, connect, name, call):
    ask = session()
    start(ask, name, "a", "a")
    assert ask.row(f"SELECT {call}")[0] in (False, None)
    (entry,) = batches.list_batches(connect(), name)
    assert entry.parts[0].status == "running"


def test_user_does_not_undo_an_operators_hold(user, connect, name):
    coordinator = user.coordinator()
    for client in (connect(), coordinator):
        batch = batches.batch(name, ["a", "b", "c"], window=60, coordinator=client, on_success=sqlsem.Sql("SELECT 1"))
        with batch.part("b" if client is coordinator else "a"):
            pass
    assert (batch.entry().callback_kind, batch.entry().callback_body) == ("sql", None), (
        "users may not see the SQL of a callback"
    )
    entry = batches.batch(name, ["a", "b", "c"], window=60, coordinator=connect()).entry()
    assert (entry.callback_kind, entry.callback_body) == ("sql", "SELECT 1")
    coordinator.close()


def test_roles(login, session, name):
    reader, stranger, user = (login(role) for role in ("sqlsem_reader", None, "sqlsem_user"))
    ask = session(user)
    start(ask, name, "a", "a")
    assert done(ask, name, "a") == (1, "succeeded")
    assert len(reader.rows("SELECT * FROM sqlsem.list_batches(?)", name)) == 1
    for text in ("sqlsem.batch_part_start('x', 'a', 'a', 1)", "sqlsem.batch_part_finish('x', 'a')"):
        with pytest.raises(errors.InsufficientPrivilege):
            reader.rows(f"SELECT {text}")
    with pytest.raises(errors.InsufficientPrivilege):
        stranger.rows("SELECT * FROM sqlsem.list_batches()")
    # Another login cannot end this login's part.
    member = ask.row("SELECT member_id FROM sqlsem.list_batches(%s)", name)[0]
    other = session(login("sqlsem_user"))
    with pytest.raises(psycopg.Error, match="is not known"):
        other.row("SELECT * FROM sqlsem.claim_callback(%s, %s, NULL, 'x', 'x', true)", member, name)
    assert other.row("SELECT sqlsem.end_callback(%s, 1, 1, NULL)", member) == (False,)


# -- the owner of a callback -------------------------------------------------------------------------------------

#: Roles of a login without a part in the batch; True if it may run the callback, and True if it may read it.
RIGHTS = [
    (["sqlsem_user"], False, False),
    (["sqlsem_user", "sqlsem_worker"], False, False),
    (["sqlsem_user", "sqlsem_reader"], False, True),
    (["sqlsem_user", "sqlsem_putter"], True, True),
    (["sqlsem_operator"], True, True),
]


@pytest.fixture
def login_of(login, database):
    """``login_of(roles)`` returns a login with all these roles."""

    def login_of(roles):
        new_login = login(roles[0])
        for role in roles[1:]:
            database.rows(f"GRANT {role} TO {name_of_login(new_login)}")
        return new_login

    return login_of


def leave_pending(database, name, kind, body):
    """Leave a callback that no process runs, and return the number of its batch."""
    session = database.session(grace=60)
    member = session.register_member("gone", 1, "gone")
    began = session.start_part(member, name, "a", ["a"], 60.0, "me", name, (kind, body))
    assert session.end_part(member, name, "a", name, None, "me", (kind, body)).callback is not None
    assert session.return_callback(member, name)
    session.deregister_member(member)
    session.close()
    return began.batch_id


@pytest.mark.parametrize(("roles", "may_run", "may_read"), RIGHTS)
@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("kind", ["sql", "shell", "call", "local"])
def test_callback_is_run_and_read_by_entitled_logins(login_of, name, kind, roles, may_run, may_read, by_number):
    keeper, stranger = login_of(["sqlsem_user", "sqlsem_putter"]), login_of(roles)
    body = None if kind == "local" else "SELECT 'SECRET'"
    number = leave_pending(keeper, name, kind, body)
    session = stranger.session(grace=60)
    member = session.register_member("here", 1, "test")
    (entry,) = session.list_batches(name, None, 1)
    assert (entry.callback_status, entry.callback_kept_by, entry.callback_login) == (
        "pending",
        name_of_login(keeper),
        name_of_login(keeper),
    )
    assert entry.callback_body == (body if may_read else None)
    which = (None, number) if by_number else (name, None)
    for own in (False, True):
        claimed = session.claim_callback(member, *which, "me", f"{name}{own}", own)
        assert (claimed is not None) == (may_run and (own or kind != "local"))
        if claimed is not None:
            assert claimed.body == body
            (entry,) = session.list_batches(name, None, 1)
            assert (entry.callback_status, entry.callback_login) == ("running", name_of_login(stranger))
            assert session.return_callback(member, f"{name}{own}")
    session.deregister_member(member)
    session.close()
    # The login that stored it runs it, and no other login ends it meanwhile.
    own_session = keeper.session(grace=60)
    member = own_session.register_member("here", 1, "test")
    claimed = own_session.claim_callback(member, name, None, "me", "u", True)
    other = stranger.session(grace=60)
    assert not other.end_callback(member, number, claimed.attempt, None)
    assert not other.return_callback(member, "u")
    assert own_session.end_callback(member, number, claimed.attempt, None)
    assert not other.end_callback(member, number, claimed.attempt, None), "nor is it told that it has ended it"
    own_session.deregister_member(member)
    for opened in (own_session, other):
        opened.close()


def test_participant_runs_function_of_another_login(login_of, name):
    """Every participant may run a callback known to programs alone: their logins may differ."""
    first, other = login_of(["sqlsem_user"]), login_of(["sqlsem_user"])
    ran = []
    with batches.batch(name, ["a", "b"], window=60, coordinator=first.coordinator(), on_success=list).part("a"):
        pass
    batch = batches.batch(
        name, ["a", "b"], window=60, coordinator=other.coordinator(), on_success=lambda: ran.append(1)
    )
    with batch.part("b"):
        pass
    assert ran == [1]
    assert batch.entry().callback_login == name_of_login(other)


@pytest.mark.parametrize("declares", [False, True])
def test_last_part_leaves_kept_callback_to_entitled_login(login_of, connect, name, declares):
    """A notice names the callback that it may not run, and its part has succeeded."""
    keeper, plain = login_of(["sqlsem_user", "sqlsem_putter"]), login_of(["sqlsem_user"])
    keepers_batch = batches.batch(
        name, ["a", "b"], window=60, coordinator=keeper.coordinator(), on_success=sqlsem.Sql("SELECT 1")
    )
    with keepers_batch.part("a"):
        pass
    alarms = []
    plain_batch = batches.batch(name, ["a", "b"], window=60, coordinator=plain.coordinator(), on_failed=alarms.append)
    if declares:
        plain_batch._declaration.declare_callback(lambda: pytest.fail("must not run"))
    with plain_batch.part("b") as last:
        pass
    assert last.is_last
    assert [f"login {name_of_login(keeper)} keeps it" in str(alarm) for alarm in alarms] == [True]
    entry = plain_batch.entry()
    assert (entry.status, entry.callback_status, entry.callback_body) == ("succeeded", "pending", None)
    with pytest.raises(sqlsem.ConfigurationError, match="only that login, putters and operators"):
        batches.resume(plain.coordinator(), name)
    assert batches.resume(keeper.coordinator(), name)
    assert plain_batch.entry().callback_status == "finished"


def test_session_leaves_kept_callback_to_entitled_login(login_of, session, name):
    keeper, ask = login_of(["sqlsem_user", "sqlsem_putter"]), session(login_of(["sqlsem_user"]))
    keepers_batch = batches.batch(
        name, ["a", "b"], window=60, coordinator=keeper.coordinator(), on_success=sqlsem.Sql("SELECT 1")
    )
    with keepers_batch.part("a"):
        pass
    start(ask, name, "b")
    assert done(ask, name, "b") == (0, "succeeded")
    assert [f"its callback is pending: login {name_of_login(keeper)} kept it" in text for text in ask.told] == [True]
    with pytest.raises(psycopg.Error, match="no callback"):
        ask.row("SELECT sqlsem.batch_callback_ended(%s)", name)


def test_kind_of_callback_is_checked(session, name, connect):
    ask = session()
    start(ask, name, "b")
    (member,) = ask.row("SELECT member_id FROM sqlsem.list_batches(%s) WHERE part = 'b'", name)
    with pytest.raises(errors.InvalidParameterValue, match="kind 'evil' is unknown"):
        ask.row("SELECT * FROM sqlsem.start_part(%s, %s, 'a', 'a, b', 60000, 'x', 'u', 'evil', 'x')", member, name)


@pytest.mark.parametrize("roles", [["sqlsem_user"], ["sqlsem_user", "sqlsem_putter"], ["sqlsem_reader"]])
def test_batch_is_abandoned_by_operators_alone(login_of, session, name, roles):
    ask = session()
    number = start(ask, name, "a")
    with pytest.raises(errors.InsufficientPrivilege):
        session(login_of(roles)).row("SELECT sqlsem.abandon_batch(%s)", name)
    assert session(login_of(["sqlsem_operator"])).row("SELECT sqlsem.abandon_batch(NULL, %s)", number) == (number,)
    assert ask.row("SELECT sqlsem.abandon_batch('no such batch')") == (None,)
    assert ask.row("SELECT sqlsem.abandon_batch(NULL, 0)") == (None,)


def test_another_login_does_not_shorten_the_window(login_of, session, name):
    ask, other = session(), session(login_of(["sqlsem_user"]))
    number = start(ask, name, "a", window=3600.0)
    assert done(ask, name, "a") == (0, "succeeded")
    ask.connection.execute("SELECT pg_sleep(0.05)")
    assert start(other, name, "b", window=0.001) == number


#: How a login without a part calls each routine that reads or writes batches, with all that it may know of them. Names:
#: ``open`` has a part that runs, ``pending`` and ``running`` say what their callbacks are.
STRANGERS_CALLS = {
    "start_part": [
        "(:mine, :open, 'b', '[\"a\", \"b\"]', 60000, 'x', 'new', NULL, NULL)",
        "(:theirs, :open, 'b', '[\"a\", \"b\"]', 60000, 'x', :uid, NULL, NULL)",
    ],
    "end_part": [
        "(:theirs, :open, 'b', :uid, 'succeeded', NULL, 'x', 'session', NULL)",
        "(:mine, :open, 'b', :uid, 'failed', NULL, 'x', 'session', NULL)",
    ],
    "claim_callback": [
        "(:mine, :pending, NULL, 'x', 'new', false)",
        "(:mine, :pending, NULL, 'x', 'new', true)",
        "(:mine, NULL, :pending_id, 'x', 'new', true)",
        "(:theirs, :pending, NULL, 'x', 'new', true)",
        "(:mine, :running, NULL, 'x', :running, true)",
    ],
    "return_callback": ["(:theirs, :running)", "(:mine, :running)"],
    "end_callback": ["(:theirs, :running_id, 1, NULL)", "(:mine, :running_id, 1, 'x')"],
    "recover_batches": ["(NULL, NULL)", "(:open, :mine)"],
    "list_batches": ["()", "(:pending)", "(NULL, :running_id)"],
    "overview": ["()"],
    "batch_part_start": ["(:open, 'b', 'a, b', 60)", "(:open, 'x', 'x, y', 315360000)"],
    "batch_part_finish": ["(:open, 'b')"],
    "batch_part_fail": ["(:open, 'b', 'x')"],
    "batch_resume": ["(:pending)", "(:running)"],
    "batch_callback_ended": ["(:running)", "(:pending)"],
    "session_part_start": ["(:open, 'b', 'a, b', 60, 'x')"],
    "session_part_end": ["(:open, 'b', 'succeeded', NULL, 'x')"],
    "session_batch_resume": ["(:pending, 'x')"],
}
#: The routines for users that read or write batches.
ABOUT_BATCHES = """
SELECT p.proname FROM pg_proc AS p
WHERE p.pronamespace = 'sqlsem'::regnamespace AND has_function_privilege('sqlsem_user', p.oid, 'EXECUTE')
  AND (p.prosrc ~ 'sqlsem[.](batch|batch_part)\\M'
       OR p.prosrc ~ 'sqlsem[.][a-z_]*(batch[a-z_]*|_part|_part_[a-z_]*|callback[a-z_]*)[(]')
"""


def test_each_routine_for_users_leaves_a_strangers_batches_alone(login_of, database, name):
    """A routine that is not in the table fails here, too."""
    assert {routine_name for (routine_name,) in database.rows(ABOUT_BATCHES)} == STRANGERS_CALLS.keys()
    keeper, stranger = login_of(["sqlsem_user", "sqlsem_putter"]), login_of(["sqlsem_user"])
    session, callback = keeper.session(grace=60), ("sql", "SELECT 'SECRET'")
    known = {status: f"{name}-{status}" for status in ("open", "pending", "running")}
    known["theirs"] = session.register_member("keeper", 1, "test")
    for status in ("pending", "running"):
        began = session.start_part(known["theirs"], known[status], "a", ["a"], 3600.0, "me", known[status], callback)
        assert (
            session.end_part(known["theirs"], known[status], "a", known[status], None, "me", callback).callback
            is not None
        )
        known[f"{status}_id"] = began.batch_id
    assert session.return_callback(known["theirs"], known["pending"])
    session.start_part(known["theirs"], known["open"], "b", ["a", "b"], 3600.0, "me", f"{name}-uid", callback)
    known["uid"] = f"{name}-uid"

    def rows():
        of_this_test = "starts_with(b.batch_name, ?)"  # any call may end a batch of other tests with dead parts
        return database.rows(
            f"SELECT b::text FROM sqlsem.batch AS b WHERE {of_this_test} ORDER BY b.batch_id", str(name)
        ) + database.rows(
            f"SELECT p::text FROM sqlsem.batch_part AS p JOIN sqlsem.batch AS b USING (batch_id) WHERE {of_this_test} "
            "ORDER BY p.batch_id, p.part",
            str(name),
        )

    other, before = stranger.session(grace=60), rows()
    known["mine"] = other.register_member("stranger", 2, "test")
    with stranger.raw() as connection:
        for routine, calls in STRANGERS_CALLS.items():
            for arguments in calls:
                values = re.findall(r":(\w+)", arguments)
                text = f"SELECT * FROM sqlsem.{routine}{re.sub(r':(?:[a-z_]+)', '%s', arguments)}"
                try:
                    answer = connection.execute(text, [known[value] for value in values] or None).fetchall()
                except psycopg.Error as exc:
                    answer = str(exc)
                assert "SECRET" not in str(answer), text
                assert "does not exist" not in str(answer), text
                assert rows() == before, text
    for opened, member in ((session, known["theirs"]), (other, known["mine"])):
        opened.deregister_member(member)
        opened.close()
