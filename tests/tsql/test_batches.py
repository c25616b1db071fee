"""Batches from T-SQL, as in Agent jobs, where SQL Server differs (``routines`` has the rest)."""

import contextlib

import pytest
from support import PATIENCE, remains

import sqlsem
from sqlsem import batches, sql

pytestmark = pytest.mark.engines("mssql")

START = "EXEC {s}.batch_part_start ?, ?, ?, ?"


def start(session, name, part, parts="a, b", window=60.0):
    ((number,),) = session.rows(START, name, part, parts, window)
    return number


def done(session, name, part):
    ((is_last, outcome),) = session.rows("EXEC {s}.batch_part_finish ?, ?", name, part)
    return is_last, outcome


def test_answers_by_output_parameters(session, name):
    connection = session()
    start(connection, name, "a", "a")
    rows = connection.rows(
        "DECLARE @last bit; DECLARE @o nvarchar(16); EXEC {s}.batch_part_finish ?, 'a', @last OUTPUT, @o OUTPUT; "
        "SELECT CAST(@last AS int), @o; EXEC {s}.batch_callback_ended ?",
        *(name, name),
    )
    assert rows[:2] == [(1, "succeeded"), (1, "succeeded")]


def test_refused_in_a_transaction(session, name, refused):
    connection = session()
    connection.rows("BEGIN TRANSACTION")
    with refused(50001, "open transaction"):
        start(connection, name, "b")


def test_recovery_leaves_a_reclaimed_callback(session, new_session, database, name, connect, held_member):
    """The recovery has to wait between its read of the batches and its decision."""
    victim, connection, live = new_session(), session(), session()
    start(victim, name, "a")
    start(live, name, "b")
    row = f"SELECT member_id FROM {database.beside('batch_part')} WHERE part = ? AND batch_id = ?"
    (entry,) = batches.list_batches(connect(), name)
    ((dead,),), ((member,),) = (database.rows(row, part, entry.batch_id) for part in ("a", "b"))
    with held_member(dead):
        victim.die()
        recovering = connection.later(connection.call, "recover_batches", name, None)
        remains(lambda: not recovering.done(), 1, "the recovery waits for the member's row")
        database.rows(
            f"UPDATE {database.beside('batch_part')} SET attempt = 2, member_id = ? WHERE part = 'a' AND batch_id = ?",
            *(member, entry.batch_id),
        )
    recovering.result(PATIENCE)
    connection.call("recover_batches", name, None)
    (entry,) = batches.list_batches(connect(), name)
    assert [(part.status, part.attempt) for part in entry.parts] == [("running", 2), ("running", 1)]
    assert [done(live, name, part) for part in ("a", "b")] == [(0, "succeeded"), (1, "succeeded")]
    live.rows("EXEC {s}.batch_callback_ended ?", name)


@pytest.mark.parametrize("settings", ["IMPLICIT_TRANSACTIONS", "ROWCOUNT"])
def test_the_sessions_own_settings_do_no_harm(new_session, session, name, connect, settings):
    """The settings of a driver in manual commit, or of a script that limits its rows."""
    first, other = new_session(), session()
    set_them, undo = {
        "IMPLICIT_TRANSACTIONS": ("SET IMPLICIT_TRANSACTIONS ON", "SET IMPLICIT_TRANSACTIONS OFF"),
        "ROWCOUNT": ("SET ROWCOUNT 1", "SET ROWCOUNT 0"),
    }[settings]
    first.rows(set_them)
    start(first, name, "a", "a, b, c")
    (entry,) = batches.list_batches(connect(), name)
    assert [part.part for part in entry.parts] == ["a", "b", "c"], "all of them"
    assert first.rows("EXEC {s}.batch_part_fail ?, 'a', 'no file'", name) == [(0, "failed")]
    start(first, name, "a", "a, b, c")
    start(first, name, "b", "a, b, c")
    start(other, name, "c", "a, b, c")
    assert [done(first, name, part) for part in "ab"] == [(0, "succeeded")] * 2
    assert done(other, name, "c") == (1, "succeeded")
    assert first.rows("EXEC {s}.batch_resume ?", name) == [(0,)]
    other.rows("EXEC {s}.batch_callback_ended ?, 'no'", name)
    assert first.rows("SELECT @@TRANCOUNT") == [(0,)]
    first.rows(undo)
    (entry,) = batches.list_batches(connect(), name)
    assert (entry.status, entry.callback_status) == ("succeeded", "failed")


def test_sql_as_callback(database, session, connect, name):
    database.rows(f"CREATE TABLE made_{name} (n int)")
    batch = batches.batch(name, ["a", "b"], window=60, coordinator=connect())
    batch._declaration.declare_callback(sqlsem.Sql(f"INSERT INTO made_{name} (n) VALUES (1)"))
    connection = session()
    start(connection, name, "b")
    with batch.part("a"):
        pass
    start_again = batches.list_batches(connect(), name)[0]
    assert start_again.callback_kind == "sql"
    connection.rows("EXEC {s}.batch_part_fail ?, 'b'", name)
    with batch.part("b") as last:
        pass
    assert last.is_last
    assert database.rows(f"SELECT n FROM made_{name}") == [(1,)]


def test_an_end_that_is_neither_ends_nothing(session, name, connect, refused):
    connection = session()
    number = start(connection, name, "a", "a")
    ((member, uid),) = connection.rows("SELECT member_id, start_uid FROM {s}.batch_part WHERE batch_id = ?", number)
    for outcome in (None, "", "late"):
        with refused(50000, "ends as succeeded or failed"):
            connection.rows("EXEC {s}.end_part ?, ?, 'a', ?, ?, NULL, 'me'", member, name, uid, outcome)
    assert batches.list_batches(connect(), name)[0].parts[0].status == "running"
    connection.rows("EXEC {s}.batch_part_fail ?, 'a'", name)


class Clock:
    """A copy of start_part whose clock stands still."""

    def __init__(self, session, name):
        self.session, self.name = session, name
        self.table, self.routine = f"clock_{name}", f"start_part_{name}"
        script = sql.script("mssql", "batches", schema=session.database.schema)
        before = f"CREATE OR ALTER PROCEDURE {session.database.schema}.start_part\n"
        (batch,) = (part for part in script.split("\nGO\n") if before in part)
        assert batch.count("SYSUTCDATETIME()") == 2  # (and of a lease)
        batch = batch.replace("SYSUTCDATETIME()", f"(SELECT now FROM {session.database.schema}.{self.table})")
        session.rows(f"CREATE TABLE {{s}}.{self.table} (now datetime2(6) NOT NULL)")
        # (A day ahead, so that ends by the real clock are in time.)
        session.rows(f"INSERT INTO {{s}}.{self.table} (now) VALUES (DATEADD(day, 1, SYSUTCDATETIME()))")
        session.rows(batch.replace(before, f"CREATE PROCEDURE {session.database.schema}.{self.routine}\n"))
        ((self.member,),) = session.rows("EXEC {s}.register_member N'host', 1, N'program', 60000, @answer = 1")

    def step(self, seconds):
        self.session.rows(f"UPDATE {{s}}.{self.table} SET now = DATEADD(second, ?, now)", seconds)

    def start(self, part, uid, parts="abc"):
        ((code, number, _, previous),) = self.session.rows(
            f"EXEC {{s}}.{self.routine} ?, ?, ?, ?, 60000, N'me', ?, @answer = 1",
            *(self.member, self.name, part, "\n".join(parts), uid),
        )
        assert code == "started"
        return number, previous

    def end(self, part, uid):
        ((code, *_),) = self.session.rows(
            "EXEC {s}.end_part ?, ?, ?, ?, N'succeeded', NULL, N'me', @answer = 1", self.member, self.name, part, uid
        )
        assert code == "succeeded"

    def close(self):
        self.session.rows("EXEC {s}.deregister_member ?", self.member)
        self.session.rows(f"DROP PROCEDURE {{s}}.{self.routine}; DROP TABLE {{s}}.{self.table}")


def test_expired_batch_is_reported_once_per_clock_tick(new_session, name):
    """All starts in one tick have the same time, as on a clock with ticks of milliseconds."""
    with contextlib.closing(Clock(new_session(), name)) as clock:
        old, previous = clock.start("a", "1")
        assert previous is None
        clock.step(60)
        new, previous = clock.start("b", "2")
        assert new > old
        assert previous == old
        assert clock.start("a", "3") == (new, None)
        assert clock.start("b", "2") == (new, old)  # (a lost reply)
        assert clock.start("a", "3") == (new, None)
        assert clock.start("c", "4") == (new, None)
        for part, uid in (("b", "2"), ("a", "3"), ("c", "4")):
            clock.end(part, uid)
        newest, previous = clock.start("a", "5")
        assert newest > new
        assert previous is None, "the one before has succeeded, and what expired has been told"
