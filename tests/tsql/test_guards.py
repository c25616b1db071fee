"""Guarded tables of SQL Server, as T-SQL sessions meet them."""

import pytest

from sqlsem import sql

pytestmark = pytest.mark.engines("mssql")


def write(session, table, more=""):
    session.rows(f"INSERT INTO {table} VALUES (1){more}")


def test_a_session_that_asserts(session, database, guarded, name, refused):
    one, other = session(), session()
    position = one.acquire(name).position
    for text in ("INSERT INTO {} VALUES (1)", "UPDATE {} SET a = 2", "DELETE FROM {}"):
        for who in (one, other):
            with refused(50004, "which has asserted no grant of it"):
                who.rows(text.format(guarded))
    with refused(50004, name):  # what was begun is over: a trigger that throws ends the transaction
        one.rows(f"BEGIN TRANSACTION; INSERT INTO {guarded} VALUES (1)")
    assert one.rows("SELECT @@TRANCOUNT") == [(0,)]
    one.rows(f"BEGIN TRANSACTION; EXEC {{s}}.assert_holding ?, ?; INSERT INTO {guarded} VALUES (1)", name, position)
    write(one, guarded)
    one.rows("COMMIT TRANSACTION")
    with refused(50004, name):
        write(one, guarded)
    one.release(name)
    assert database.rows(f"SELECT COUNT(*) FROM {guarded}") == [(2,)]


def test_savepoints(session, guarded, name):
    one = session()
    position = one.acquire(name).position
    one.rows("BEGIN TRANSACTION; EXEC {s}.assert_holding ?, ?; SAVE TRANSACTION p", name, position)
    write(one, guarded)
    one.rows("ROLLBACK TRANSACTION p")
    write(one, guarded)
    one.rows("ROLLBACK TRANSACTION")
    one.release(name)


@pytest.mark.parametrize("level", ["READ UNCOMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_isolation(session, guarded, name, level):
    one = session()
    position = one.acquire(name).position
    try:
        one.rows(f"SET TRANSACTION ISOLATION LEVEL {level}")
    except Exception as exc:
        if "not currently supported" not in str(exc):
            raise
        one.release(name)
        pytest.skip(f"this server does not know that level: {exc}")
    one.rows("BEGIN TRANSACTION")
    one.rows("EXEC {s}.assert_holding ?, ?", name, position)
    write(one, guarded)
    one.rows("COMMIT TRANSACTION; SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    one.release(name)


def test_somebody_who_registers_is_not_waited_for(session, database, guarded, name):
    """A row that is not committed yet stands in the queue of the resource: whoever holds the lock writes past it."""
    one, bare = session(), database.raw(autocommit=False)
    try:
        position = one.acquire(name).position
        database.insert_bare(bare.cursor(), name, "bare")
        one.rows("SET LOCK_TIMEOUT 5000; BEGIN TRANSACTION; EXEC {s}.assert_holding ?, ?", name, position)
        write(one, guarded)
        one.rows("COMMIT TRANSACTION; SET LOCK_TIMEOUT -1")
        one.release(name)
        bare.rollback()
    finally:
        bare.close()


@pytest.mark.parametrize("text", ["x", "{position}", "{position}:0", "0:0 {position}:{member} 1:1", "%"])
def test_words_of_the_sessions_own(session, database, guarded, name, refused, text):
    """Whatever it sets: it leans on a grant of its own login, by its position and member, or is refused."""
    one, other = session(), session()
    position = one.acquire(name).position
    ((member,),) = database.rows("SELECT member_id FROM {table} WHERE queue_position = ?", position)
    set_it = "EXEC sp_set_session_context ?, ?"
    word = f"sqlsem.{database.schema}.grants"
    other.rows(set_it, word, text.format(position=position, member=member))
    try:
        if "{member}" in text:  # that is what grant.session does, and may
            write(other, guarded)
        else:
            with refused(50004, "is no grant of it that is (still) held"):
                write(other, guarded)
        one.release(name)
        with refused(50004, "is no grant of it that is (still) held"):
            write(other, guarded)
    finally:
        other.rows(set_it, word, None)
        one.release(name)


def test_routines(session, table, name, refused):
    one, text = session(), table()
    assert one.call("guard_table", text, name) == 1
    assert one.call("guard_table", text, name) == 0
    assert one.rows("EXEC {s}.guard_table ?, ?, 1", text, name) == [(0,)]
    with refused(50000, "already"):
        one.call("guard_table", text, name("other"))
    rows = one.rows("EXEC {s}.guarded_tables")
    assert [row[2:] for row in rows if row[1].casefold() in text.casefold()] == [(name, None)]
    with refused(50000, "white space"):
        one.call("guard_table", text, " x")
    with refused(50000, "there is no table"):
        one.call("guard_table", "dbo.[nothing here]", name)
    with refused(50000, "there is no table"):
        one.call("unguard_table", "elsewhere.dbo.x")
    assert one.call("unguard_table", text) == 1
    assert one.call("unguard_table", text) == 0


def test_what_it_cannot_see(session, guarded):
    one = session()
    one.rows(f"TRUNCATE TABLE {guarded}")


def test_a_table_that_moves_to_another_schema(session, database, guarded, name, refused):
    one, word = session(), guarded.removeprefix("dbo.")
    schema = f"s{name}"
    one.rows(f"EXEC (N'CREATE SCHEMA {schema}')")
    try:
        try:
            one.rows(f"ALTER SCHEMA {schema} TRANSFER {guarded}")
        except Exception as exc:
            pytest.skip(f"this server moves no tables: {exc}")
        with refused(50004, schema):
            write(one, f"{schema}.{word}")
        one.rows(f"DROP TABLE {schema}.{word}")
    finally:
        one.rows(f"DROP SCHEMA {schema}")


def test_drop_takes_the_guards_off(session, database, guarded):
    """First of all: without what their triggers call nobody could write into the tables."""
    one = session()
    first = sql.script("mssql", "drop", schema=database.schema).partition("DROP TRIGGER IF EXISTS")[0]
    one.rows(first)
    assert one.rows("EXEC {s}.guarded_tables") == []
    write(one, guarded)
