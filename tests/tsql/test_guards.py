"""Guarded tables of SQL Server, from T-SQL sessions."""

import pytest

from sqlsem import sql

pytestmark = pytest.mark.engines("mssql")


def write(session, table, more=""):
    session.rows(f"INSERT INTO {table} VALUES (1){more}")


def test_a_session_that_asserts(session, database, guarded, name, refused):
    first, other = session(), session()
    position = first.acquire(name).position
    for text in ("INSERT INTO {} VALUES (1)", "UPDATE {} SET a = 2", "DELETE FROM {}"):
        for connection in (first, other):
            with refused(50004, "which has asserted no grant of it"):
                connection.rows(text.format(guarded))
    with refused(50004, name):  # the transaction is over: a trigger that throws ends it
        first.rows(f"BEGIN TRANSACTION; INSERT INTO {guarded} VALUES (1)")
    assert first.rows("SELECT @@TRANCOUNT") == [(0,)]
    first.rows(f"BEGIN TRANSACTION; EXEC {{s}}.assert_holding ?, ?; INSERT INTO {guarded} VALUES (1)", name, position)
    write(first, guarded)
    first.rows("COMMIT TRANSACTION")
    with refused(50004, name):
        write(first, guarded)
    first.release(name)
    assert database.rows(f"SELECT COUNT(*) FROM {guarded}") == [(2,)]


def test_savepoints(session, guarded, name):
    connection = session()
    position = connection.acquire(name).position
    connection.rows("BEGIN TRANSACTION; EXEC {s}.assert_holding ?, ?; SAVE TRANSACTION p", name, position)
    write(connection, guarded)
    connection.rows("ROLLBACK TRANSACTION p")
    write(connection, guarded)
    connection.rows("ROLLBACK TRANSACTION")
    connection.release(name)


@pytest.mark.parametrize("level", ["READ UNCOMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_isolation(session, guarded, name, level):
    connection = session()
    position = connection.acquire(name).position
    try:
        connection.rows(f"SET TRANSACTION ISOLATION LEVEL {level}")
    except Exception as exc:
        if "not currently supported" not in str(exc):
            raise
        connection.release(name)
        pytest.skip(f"this server does not know that level: {exc}")
    connection.rows("BEGIN TRANSACTION")
    connection.rows("EXEC {s}.assert_holding ?, ?", name, position)
    write(connection, guarded)
    connection.rows("COMMIT TRANSACTION; SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    connection.release(name)


def test_guarded_write_does_not_wait_for_registrations(session, database, guarded, name):
    """An uncommitted row in the queue of the resource does not block the holder's write."""
    connection, bare = session(), database.raw(autocommit=False)
    try:
        position = connection.acquire(name).position
        database.insert_bare(bare.cursor(), name, "bare")
        connection.rows("SET LOCK_TIMEOUT 5000; BEGIN TRANSACTION; EXEC {s}.assert_holding ?, ?", name, position)
        write(connection, guarded)
        connection.rows("COMMIT TRANSACTION; SET LOCK_TIMEOUT -1")
        connection.release(name)
        bare.rollback()
    finally:
        bare.close()


@pytest.mark.parametrize("text", ["x", "{position}", "{position}:0", "0:0 {position}:{member} 1:1", "%"])
def test_words_of_the_sessions_own(session, database, guarded, name, refused, text):
    """Whatever settings it makes, it uses a grant of its own login, by position and member, or is refused."""
    first, other = session(), session()
    position = first.acquire(name).position
    ((member,),) = database.rows("SELECT member_id FROM {table} WHERE queue_position = ?", position)
    set_it = "EXEC sp_set_session_context ?, ?"
    word = f"sqlsem.{database.schema}.grants"
    other.rows(set_it, word, text.format(position=position, member=member))
    try:
        if "{member}" in text:  # as grant.session does, which is allowed
            write(other, guarded)
        else:
            with refused(50004, "is no grant of it that is (still) held"):
                write(other, guarded)
        first.release(name)
        with refused(50004, "is no grant of it that is (still) held"):
            write(other, guarded)
    finally:
        other.rows(set_it, word, None)
        first.release(name)


def test_routines(session, table, name, refused):
    connection, text = session(), table()
    assert connection.call("guard_table", text, name) == 1
    assert connection.call("guard_table", text, name) == 0
    assert connection.rows("EXEC {s}.guard_table ?, ?, 1", text, name) == [(0,)]
    with refused(50000, "already"):
        connection.call("guard_table", text, name("other"))
    rows = connection.rows("EXEC {s}.guarded_tables")
    assert [row[2:] for row in rows if row[1].casefold() in text.casefold()] == [(name, None)]
    with refused(50000, "white space"):
        connection.call("guard_table", text, " x")
    with refused(50000, "there is no table"):
        connection.call("guard_table", "dbo.[nothing here]", name)
    with refused(50000, "there is no table"):
        connection.call("unguard_table", "elsewhere.dbo.x")
    assert connection.call("unguard_table", text) == 1
    assert connection.call("unguard_table", text) == 0


def test_guard_does_not_see_truncate_and_bulk(session, guarded):
    connection = session()
    connection.rows(f"TRUNCATE TABLE {guarded}")


def test_a_table_that_moves_to_another_schema(session, database, guarded, name, refused):
    connection, word = session(), guarded.removeprefix("dbo.")
    schema = f"s{name}"
    connection.rows(f"EXEC (N'CREATE SCHEMA {schema}')")
    try:
        try:
            connection.rows(f"ALTER SCHEMA {schema} TRANSFER {guarded}")
        except Exception as exc:
            pytest.skip(f"this server moves no tables: {exc}")
        with refused(50004, schema):
            write(connection, f"{schema}.{word}")
        connection.rows(f"DROP TABLE {schema}.{word}")
    finally:
        connection.rows(f"DROP SCHEMA {schema}")


def test_drop_takes_the_guards_off(session, database, guarded):
    """The script drops the guards first: no login could write into the tables without the triggers' routines."""
    connection = session()
    first = sql.script("mssql", "drop", schema=database.schema).partition("DROP TRIGGER IF EXISTS")[0]
    connection.rows(first)
    assert connection.rows("EXEC {s}.guarded_tables") == []
    write(connection, guarded)
