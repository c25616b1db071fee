"""Bare participants (three plain statements) beside each other, beside CALL acquire and beside Python: attacks on the
instant between the assignment of a number and the commit of its row, and abandoned rows.
"""

import contextlib
import os
import random
import subprocess
import sys
import time

import psycopg
import pytest
from support import Attempt, Recorder, Stay, check_history, overlap, until
from support.bare import bare_worker, delete_bare, member_worker
from support.callers import Caller

pytestmark = pytest.mark.engines("postgresql")


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("level", [psycopg.IsolationLevel.READ_COMMITTED, psycopg.IsolationLevel.REPEATABLE_READ])
def test_acquire_waits_for_a_bare_row_not_committed_yet(database, two, session, name, end, level):
    slow, _ = two
    slow.isolation_level = level
    slow.execute("SELECT 1 FROM sqlsem.setting")  # its snapshot is old by then
    bare = database.insert_bare(slow.cursor(), name, "bare", concurrency_limit=1)
    late = session().start(name)
    assert late.waits(0.4), "entered beside a number that was given out and not seen"
    getattr(slow, end)()
    if end == "commit":
        assert late.waits(0.4)
        with database.raw() as other:
            delete_bare(database, other, bare)
    assert late.granted() > bare


def test_bare_row_waits_behind_routine_and_python_holders(connect, database, two, name):
    _, quick = two
    with contextlib.closing(Caller(database)) as caller:
        code, position, _ = caller.acquire(name, concurrency_limit=3)
        assert code == 0
        with connect().limit(name, 3) as grant:
            bare = database.insert_bare(quick.cursor(), name, "bare", concurrency_limit=2)
            assert position < grant.position < bare
            assert [
                row[0] for row in caller.connection.execute("SELECT state FROM sqlsem.status(%s)", (str(name),))
            ] == [
                "holds",
                "holds",
                "waits",
            ]
        states = caller.connection.execute("SELECT state FROM sqlsem.status(%s)", (str(name),))
        assert [row[0] for row in states] == ["holds", "holds"]
    delete_bare(database, quick, bare)
    until(lambda: database.rows("SELECT sqlsem.reap()") and database.queue(name) == [])


def call_worker(database, resource, rounds, seed, recorder):
    chance = random.Random(seed)
    with contextlib.closing(Caller(database)) as caller:
        for _ in range(rounds):
            code, position, _ = caller.acquire(resource, timeout_ms=60_000)
            entered = time.monotonic()
            assert code in (0, 1)
            time.sleep(chance.random() * 0.002)
            left_at = time.monotonic()
            assert caller.release(resource, position) == 0
            recorder.add(Stay(resource, position, entered, left_at, who=f"call-{seed}"))


@pytest.mark.parametrize("others", ["bare", "call", "python", "all"])
def test_never_two_inside(connect, database, name, threads, others):
    recorder, rounds = Recorder(), 12
    workers = 0
    for seed in range(2):
        threads.start(bare_worker, database, str(name), rounds, seed, recorder, seed == 0)
        workers += 1
        if others == "bare":
            threads.start(bare_worker, database, str(name), rounds, 10 + seed, recorder, False)
            workers += 1
        if others in ("call", "all"):
            threads.start(call_worker, database, str(name), rounds, 20 + seed, recorder)
            workers += 1
        if others in ("python", "all"):
            threads.start(member_worker, connect(), str(name), rounds, 30 + seed, recorder)
            workers += 1
    threads.join()
    assert check_history(recorder.stays) == workers * rounds
    assert overlap(recorder.stays) == 1
    until(lambda: database.queue(name) == [])


def test_stale_rows_go_where_an_operator_said_so(connect, database, two, session, name):
    """Off by default; the clock is the database's."""
    _, quick = two
    age = database.sql("UPDATE {table} SET requested_at = clock_timestamp() - ?::interval WHERE queue_position = ?")
    old = database.insert_bare(quick.cursor(), name, "crashed", concurrency_limit=1)
    quick.execute(age, ("3 hours", old))
    assert session().acquire(name, timeout_ms=300)[0] == -1, "never by itself"
    subprocess.run(
        [sys.executable, "-m", "sqlsem", "set", str(name), "--stale-after", "2h"],
        check=True,
        env={**os.environ, "SQLSEM_URL": database.url},
        capture_output=True,
    )
    young = database.insert_bare(quick.cursor(), name, "at work", concurrency_limit=1)
    quick.execute(age, ("1 hour", young))
    assert session().acquire(name, timeout_ms=500)[0] == -1
    assert [row[0] for row in database.queue(name)] == [young], "what is younger stays"
    late = Attempt(connect().mutex(name))
    assert late.waits()
    quick.execute(age, ("121 minutes", young))
    assert late.granted().position > young
    late.leave()
    assert (
        database.rows("SELECT outcome FROM sqlsem.history WHERE queue_position IN (?, ?)", old, young)
        == [("reaped",)] * 2
    )
