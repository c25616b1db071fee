"""Guarded tables on both servers: the database refuses writes by a client that does not hold the lock."""

import contextlib
import json

import pytest
from click.testing import CliRunner
from support import pinned, until

import sqlsem
from sqlsem import cli

pytestmark = pytest.mark.engines("postgresql", "mssql")


def write(connection, table, value=1):
    connection.cursor().execute(f"INSERT INTO {table} VALUES ({value})")


def undo(connection):
    """Roll back, also if a trigger that throws has ended the transaction, as on SQL Server."""
    if not hasattr(connection, "info"):  # (FreeTDS rolls back a transaction that it believes to be open)
        connection.cursor().execute("IF @@TRANCOUNT = 0 BEGIN TRANSACTION")
    connection.rollback()


def values(database, table):
    return sorted(row[0] for row in database.rows(f"SELECT a FROM {table}"))


def remove(database, position):
    database.rows("DELETE FROM {table} WHERE queue_position = ?", position)


@pytest.mark.parametrize("statement", ["INSERT INTO {} VALUES (1)", "UPDATE {} SET a = 2", "DELETE FROM {}"])
def test_write_without_the_lock_is_refused(database, connect, guarded, writer, refusal, name, statement):
    for autocommit in (True, False):
        with refusal("which has asserted no", name):
            writer(autocommit=autocommit).cursor().execute(statement.format(guarded))
    with connect().mutex(name):  # the lock is held, but not asserted
        with refusal("which has asserted no"):
            writer().cursor().execute(statement.format(guarded))
    writer().cursor().execute(f"SELECT * FROM {guarded}")  # a guard allows reads
    assert values(database, guarded) == []


def test_write_after_assert_is_allowed(database, connect, guarded, writer, name):
    connection = writer()
    with connect().mutex(name) as grant:
        for value in (1, 2):
            grant.assert_held(connection.cursor())
            write(connection, guarded, value)
            write(connection, guarded, value)
            connection.commit()
    assert values(database, guarded) == [1, 1, 2, 2]


def test_the_next_transaction_asserts_for_itself(connect, guarded, writer, refusal, name):
    connection = writer()
    with connect().mutex(name) as grant:
        for end in (connection.commit, lambda: undo(connection)):
            grant.assert_held(connection.cursor())
            write(connection, guarded)
            end()
            with refusal("which has asserted no"):
                write(connection, guarded)
            undo(connection)


def test_a_lock_that_was_lost(database, connect, guarded, writer, refusal, name):
    lock = connect().mutex(name)
    lock.acquire()
    connection, standing = writer(), writer()
    with lock.grant.session(standing):
        remove(database, lock.grant.position)
        with refusal("is no grant of it that is (still) held"):
            write(standing, guarded)
        undo(standing)
    with pytest.raises(sqlsem.LockLost):
        lock.grant.assert_held(connection.cursor())
    with refusal(name):
        write(connection, guarded)
    with pytest.raises(sqlsem.LockLost):
        lock.release()


def test_revoke_waits_for_the_asserting_transaction(database, connect, guarded, writer, name, threads):
    """The transaction keeps the row until its end: its writes are valid, and no other client is granted before."""
    coordinator, operator = connect(), connect(retry=60)
    lock = coordinator.mutex(name)
    lock.acquire()
    connection, position = writer(), lock.grant.position
    lock.grant.assert_held(connection.cursor())
    threads.start(lambda: operator.admin.revoke(position, force=True))
    write(connection, guarded)
    assert len(database.queue(name)) == 1
    connection.commit()
    threads.join()
    assert values(database, guarded) == [1]
    with pytest.raises(sqlsem.LockLost):
        lock.release()


def test_the_lock_of_another_table(connect, guarded, writer, refusal, name):
    coordinator, connection = connect(), writer()
    with coordinator.mutex(name("other")) as other, coordinator.mutex(name):
        other.assert_held(connection.cursor())
        with refusal(name):
            write(connection, guarded)


def test_several_locks(database, connect, guarded, table, writer, name):
    coordinator, connection, second = connect(), writer(), table()
    coordinator.admin.guard_table(second, name("second"))
    locks = [coordinator.mutex(name), coordinator.mutex(name("second")), coordinator.read(name("r"))]
    with sqlsem.all_of(*locks) as grant:
        grant.assert_held(connection.cursor())
        write(connection, guarded)
        write(connection, second)
        connection.commit()
        with grant.session(connection):
            write(connection, second, 2)
            write(connection, guarded, 2)
            connection.commit()
    assert values(database, guarded) == values(database, second) == [1, 2]


def test_a_reader_does_not_write(database, connect, guarded, writer, refusal, name):
    coordinator = connect()
    with coordinator.read(name) as grant:
        for asserted in (lambda line: grant.assert_held(line.cursor()), None):
            connection = writer()
            with contextlib.ExitStack() as stack:
                if asserted is None:
                    stack.enter_context(grant.session(connection))
                else:
                    asserted(connection)
                with refusal(f"position {grant.position} has access read, not write"):
                    write(connection, guarded)
                undo(connection)
        connection = writer()
        grant.upgrade()
        grant.assert_held(connection.cursor())
        write(connection, guarded)
        connection.commit()
        grant.downgrade()
        grant.assert_held(connection.cursor())
        with refusal("access read"):
            write(connection, guarded)
        undo(connection)
    with coordinator.stage(name, 7) as grant:
        grant.assert_held(connection.cursor())
        with refusal("access stage:7"):
            write(connection, guarded)
        undo(connection)
    assert values(database, guarded) == [1]


def test_holder_of_a_limit_may_write(database, connect, guarded, writer, name):
    coordinator = connect()
    with coordinator.limit(name, 3), coordinator.limit(name, 3, weight=2) as grant:
        connection = writer()
        grant.assert_held(connection.cursor())
        write(connection, guarded)
        connection.commit()
    assert values(database, guarded) == [1]


def test_waiter_may_not_write(database, connect, guarded, writer, refusal, name):
    from sqlsem.values.locks import Request

    with connect().mutex(name), contextlib.closing(database.session()) as session:
        member = session.register_member("host", 1, "test")
        (ticket,) = session.register(member, "me", "me", f"{name}-uid", [Request(name)], False)
        connection = writer()
        assert not pinned(database.make_engine(), connection.cursor(), ticket)
        with refusal(name):
            write(connection, guarded)
        session.cancel(member, f"{name}-uid", "cancelled")


def test_pinned_row_outlives_its_dead_member(database, connect, guarded, writer, name):
    """A member dies between two writes and is removed: the open transaction keeps its pinned row."""
    from sqlsem.values.locks import Request

    session = database.session(grace=0.2)
    member = session.register_member("host", 1, "test")
    (ticket,) = session.register(member, "me", "me", f"{name}-uid", [Request(name)], False)
    connection = writer()
    assert pinned(database.make_engine(), connection.cursor(), ticket)
    write(connection, guarded)
    session.close()
    with contextlib.closing(database.coordinator()) as other:

        def gone():
            other.admin.reap()
            return not database.rows(f"SELECT 1 FROM {database.beside('member')} WHERE member_id = ?", member)

        until(gone, "the member is removed")
        assert len(database.queue(name)) == 1
        write(connection, guarded, 2)
        connection.commit()
        other.admin.reap()
    assert values(database, guarded) == [1, 2]
    until(lambda: database.queue(name) == [])


# -- grant.session --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_session_of_a_grant(database, connect, guarded, writer, refusal, name, autocommit):
    connection = writer(autocommit=autocommit)
    end = (lambda: None) if autocommit else connection.commit
    with connect().mutex(name) as grant:
        with grant.session(connection):
            write(connection, guarded)
            end()
            write(connection, guarded, 2)
            end()
            with grant.session(connection):  # like a called function that does not know of the outer session
                write(connection, guarded, 3)
                end()
            write(connection, guarded, 4)
            if not autocommit:
                undo(connection)
        with refusal("which has asserted no"):
            write(connection, guarded)
        if not autocommit:
            undo(connection)
    with pytest.raises(sqlsem.NotHeld), grant.session(connection):
        raise AssertionError("entered")
    assert values(database, guarded) == [1, 2, 3, 4] if autocommit else [1, 2, 3]


def test_a_session_keeps_the_lock_from_the_first_write_on(connect, guarded, writer, name, threads):
    coordinator, operator = connect(), connect(retry=60)
    lock = coordinator.mutex(name)
    lock.acquire()
    connection, position = writer(), lock.grant.position
    revoked = []
    with lock.grant.session(connection):
        write(connection, guarded)
        threads.start(lambda: revoked.append(operator.admin.revoke(position, force=True)))
        write(connection, guarded, 2)
        assert revoked == []
        connection.commit()
        threads.join()
        assert revoked == [True]
    with pytest.raises(sqlsem.LockLost):
        lock.release()


@pytest.mark.engines("postgresql")  # there the session's note would end with the transaction
def test_a_session_begins_outside_of_a_transaction(connect, guarded, writer, name):
    connection = writer()
    with connect().mutex(name) as grant:
        connection.cursor().execute(f"SELECT * FROM {guarded}")
        with pytest.raises(sqlsem.ConfigurationError, match="in the middle of a transaction"):
            with grant.session(connection):
                raise AssertionError("entered")
        undo(connection)
        for wrong in (None, "x", connection.cursor()):
            with pytest.raises(sqlsem.ConfigurationError, match="needs a connection"), grant.session(wrong):
                raise AssertionError("entered")


def test_failed_session_rolls_back_and_releases(database, connect, guarded, writer, refusal, name):
    connection = writer()
    with connect().mutex(name) as grant:
        with pytest.raises(ZeroDivisionError), grant.session(connection):
            write(connection, guarded)
            raise ZeroDivisionError
        undo(connection)
    lock = connect().mutex(name)
    lock.acquire()
    with refusal("is no grant of it that is (still) held"), lock.grant.session(connection):
        lock.release()
        write(connection, guarded)
    undo(connection)
    with pytest.raises(Exception, match=r"(?i)closed"), connect().mutex(name) as other, other.session(connection):
        connection.close()
        write(connection, guarded)
    assert values(database, guarded) == []


# -- adding and removing guards -------------------------------------------------------------------------------------


def test_guards_are_put_listed_and_taken_off(database, connect, table, writer, name):
    coordinator, text = connect(), table()
    evil = f"{name}'; DROP TABLE x; --', @@PROCID \\ “ü” %s {{0}}"
    assert coordinator.admin.guard_table(text, evil) == 1
    assert coordinator.admin.guard_table(text, evil) == 0
    (listed,) = [guard for guard in coordinator.admin.guarded_tables() if guard.table.startswith(name)]
    assert (listed.resource, listed.problem) == (evil, None)
    assert listed.table.lower() in text.lower()  # (Babelfish lowers names)
    with pytest.raises(sqlsem.ConfigurationError, match="is guarded by"):
        coordinator.admin.guard_table(text, name("another"))
    connection = writer()
    with coordinator.mutex(evil) as grant:
        grant.assert_held(connection.cursor())
        write(connection, text)
        connection.commit()
    assert coordinator.admin.unguard_table(text) == 1
    assert coordinator.admin.unguard_table(text) == 0
    write(connection, text, 2)
    connection.commit()
    assert values(database, text) == [1, 2]
    assert not [guard for guard in coordinator.admin.guarded_tables() if guard.table.startswith(name)]


@pytest.mark.parametrize("wrong", ["", " ", "a\nb", "x" * 256])
def test_bad_resources(connect, table, wrong):
    with pytest.raises(sqlsem.ConfigurationError):
        connect().admin.guard_table(table(), wrong)


def test_guard_of_unsuitable_table_is_refused(database, connect, table, name):
    coordinator, text = connect(), table()
    server = database.engine == "mssql"
    schema = "dbo" if server else "public"
    view = f"{schema}.v{name}"
    database.rows(f"CREATE VIEW {view} AS SELECT a FROM {text}")
    try:
        for wrong in (
            f"{schema}.nothing{name}",
            view,
            database.table if not server else f"{database.schema}.entry",
            "",
            "a b c",
            f"nowhere.{schema}.x",
            "x'; DROP TABLE y",
        ):
            with pytest.raises(sqlsem.ConfigurationError, match="table"):
                coordinator.admin.guard_table(wrong, name)
        with pytest.raises(sqlsem.ConfigurationError, match=r"there is no (such )?table"):
            coordinator.admin.unguard_table(f"{schema}.nothing{name}")
    finally:
        database.rows(f"DROP VIEW {view}")


def test_a_renamed_table_is_guarded_still(database, connect, table, writer, refusal, name):
    coordinator, text = connect(), table()
    coordinator.admin.guard_table(text, name)
    renamed = f"renamed{name}"
    if database.engine == "postgresql":
        database.rows(f'ALTER TABLE {text} RENAME TO "{renamed}"')
        other = f'public."{renamed}"'
    else:
        database.rows("EXEC sp_rename ?, ?, 'OBJECT'", text, renamed)
        other = f"dbo.[{renamed}]"
    try:
        with refusal(renamed):
            write(writer(), other)
        assert renamed in [guard.table for guard in coordinator.admin.guarded_tables()]
        assert coordinator.admin.guard_table(other, name) == 0
        assert coordinator.admin.unguard_table(other) == 1
    finally:
        database.rows(f"DROP TABLE {other}")


def test_a_guard_that_is_disabled(database, connect, guarded, writer, name):
    coordinator = connect()
    trigger = f"{database.schema}_guard"
    if database.engine == "postgresql":
        database.rows(f"ALTER TABLE {guarded} DISABLE TRIGGER {trigger}")
    else:
        (row,) = database.rows("SELECT name FROM sys.triggers WHERE parent_id = OBJECT_ID(?)", guarded)
        database.rows(f"ALTER TABLE {guarded} DISABLE TRIGGER [{row[0]}]")
    connection = writer()
    write(connection, guarded)
    undo(connection)

    def problem():
        (listed,) = [
            table for table in coordinator.admin.guarded_tables() if table.table.casefold() in guarded.casefold()
        ]
        return listed.problem

    assert problem() == "its trigger is disabled"
    assert coordinator.admin.guard_table(guarded, name) == 1
    assert problem() is None


def test_guard_command_guards_and_unguards(database, table, name):
    """`sqlsem guard` adds, lists and removes a guard; an unknown resource needs --allow-new, as it may be misspelt."""
    text = table()
    options = ["--schema", database.schema]

    def run(*words):
        done = CliRunner().invoke(cli.main, ["--url", database.url, *options, "guard", *words])
        return done.exit_code, done.output

    code, output = run(text, "--resource", name)
    assert (code, "--allow-new" in output) == (78, True)
    for more in ("", " already"):
        code, output = run(text, "--resource", name, "--allow-new")
        first, *warnings = output.splitlines()
        assert (code, first) == (0, f"{text} is guarded by {name}{more}.")
        assert ["OUTPUT" in line for line in warnings] == [True] * (database.engine == "mssql" and not more)
    code, output = run("--list")
    assert (code, f"guarded by {name}" in output) == (0, True)
    code, output = run("--list", "--json")
    assert [row["problem"] for row in json.loads(output) if row["resource"] == name] == [None]
    assert run(text, "--remove") == (0, f"{text} can be written without a lock again.\n")
    code, output = run(text, "--remove")
    assert (code, "is not guarded" in output) == (1, True)
    for wrong in ([], [text], [text, "--list"], ["--resource", name], [text, "--remove", "--resource", name]):
        assert run(*wrong)[0] == 64


@pytest.mark.engines("sqlite")
def test_sqlite_says_that_it_cannot(connect, database, name):
    coordinator = connect()
    with pytest.raises(sqlsem.ConfigurationError, match="cannot guard tables"):
        coordinator.admin.guard_table("t", name)
    with coordinator.mutex(name) as grant, contextlib.closing(database.raw()) as connection:
        with pytest.raises(sqlsem.ConfigurationError, match="no guarded tables"), grant.session(connection):
            raise AssertionError("entered")
