"""Batches: the last part to succeed, and only that one, starts what comes next."""

import contextlib
import functools
import gc
import os
import pickle
import random
import sys
import threading
import time
from datetime import timedelta

import pytest
from support import PATIENCE, remains, until

import sqlsem
from sqlsem import batches
from sqlsem.api.admin import Admin
from sqlsem.client.held import claims
from sqlsem.engines import sqlite
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.values.errors import BatchFailed, ConfigurationError, NotHeld, Timeout, Unavailable

GRACE = 1.0
NOTHING = (None, None)


@pytest.fixture
def make(connect, name):
    """Make batches of the test's name, each on its own coordinator by default; ``.alarms`` lists the failures."""

    def make(*parts, window="1h", coordinator=None, **options):
        alarms = []
        options.setdefault("on_failed", alarms.append)
        batch = batches.batch(name, parts, window=window, coordinator=coordinator or connect(grace=GRACE), **options)
        batch.alarms = alarms
        return batch

    return make


@pytest.fixture
def ledger(database, name):
    """Create a table, and return a function that counts its rows."""
    database.rows(f"CREATE TABLE ledger_{name} (who varchar(40))")

    def count():
        return len(database.rows(f"SELECT who FROM ledger_{name}"))

    count.insert = f"INSERT INTO ledger_{name} (who) VALUES ('x')"
    return count


def run(batch, part, *, fail=None):
    with batch.part(part) as part_run:
        if fail is not None:
            raise fail
    return part_run


def intercept(monkeypatch, batch, call, replacement):
    """Replace a call of the batch's session by ``replacement(call, *arguments)``."""
    batch.entry()  # connects
    kind = type(batch._declaration.client.member.main.session)
    right = getattr(kind, call)
    monkeypatch.setattr(kind, call, lambda self, *arguments: replacement(functools.partial(right, self), *arguments))


# -- the scenario -----------------------------------------------------------------------------------------------------


def many_batches(connect, name, number):
    """Batches of eight parts with random ends, in as many threads on three coordinators."""
    parts = [f"part {index}" for index in range(8)]
    coordinators = [connect() for _ in range(3)]
    gather = threading.Barrier(len(parts), timeout=PATIENCE)
    ran, last, problems = [], [0] * number, []

    def work(which, part):
        batch = batches.batch(name, parts, window="1h", coordinator=coordinators[which % 3], on_failed=problems.append)
        batch._declaration.declare_callback(lambda: ran.append(part))
        chance = random.Random(which)
        for turn in range(number):
            gather.wait()
            with batch.part(part) as part_run:
                if turn % 3:  # in every third batch all parts end at nearly the same time
                    time.sleep(chance.uniform(0, 0.004))
            if part_run.is_last:
                last[turn] += 1

    return parts, work, ran, last, problems


def check_many_batches(connect, name, threads, database, number):
    parts, work, ran, last, problems = many_batches(connect, name, number)
    for which, part in enumerate(parts):
        threads.start(work, which, part)
    threads.join(1800)
    assert last == [1] * number
    assert len(ran) == number
    assert problems == []
    entries = batches.list_batches(connect(), name, number + 1)
    assert len(entries) == number
    for entry in entries:
        assert (entry.status, entry.callback_status, entry.callback_attempt) == ("succeeded", "finished", 1)
        assert sum(part.is_last for part in entry.parts) == 1
        assert max(part.ended_at for part in entry.parts) == entry.ended_at


def test_random_ends_start_a_single_callback(connect, name, threads, database):
    check_many_batches(connect, name, threads, database, 60)


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_a_thousand_batches_give_a_thousand_starts(connect, name, threads, database):
    check_many_batches(connect, name, threads, database, 1000)


@pytest.mark.quiet
def test_parts_ending_together_start_a_single_callback(make, threads):
    both = threading.Barrier(2, timeout=PATIENCE)
    ran, last = [], []
    first, second = make("a", "b"), make("a", "b")

    def work(batch, part):
        batch._declaration.declare_callback(lambda: ran.append(part))
        for turn in range(100):
            part_run = batch.part(part).start()
            both.wait()
            last.append((turn, part_run.finish()))
            both.wait()

    threads.start(work, first, "a")
    threads.start(work, second, "b")
    threads.join()
    assert sorted(last) == sorted((turn, is_last) for turn in range(100) for is_last in (False, True))
    assert len(ran) == 100
    assert first.alarms == second.alarms == []


def test_parts_run_in_several_processes(make, spawn, name, ledger):
    parts = ["a", "b", "c", "d"]
    children = {part: spawn(child_part, name=name, parts=parts, part=part, sql=ledger.insert) for part in parts}
    for child in children.values():
        child.expect("started")
    assert ledger() == 0
    for child in children.values():
        child.send(end=True)
    last = [child.expect("ended")["is_last"] for child in children.values()]
    assert sorted(last) == [False, False, False, True]
    entry = make(*parts).wait(PATIENCE)
    assert ledger() == 1
    assert entry.callback_kind == "sql"
    assert {part.pid for part in entry.parts} == {child.pid for child in children.values()}
    assert all(part.host and part.seconds >= 0 for part in entry.parts)


def child_part(channel, url, options, name, parts, part, sql=None, window="1h", wait_in_callback=False):
    coordinator = sqlsem.connect(url, **{"grace": GRACE, **options})
    batch = batches.batch(name, parts, window=window, coordinator=coordinator)
    if sql is not None:
        batch._declaration.declare_callback(sqlsem.Sql(sql))
    if wait_in_callback:

        def then():
            channel.tell("in_callback")
            channel.ask()

        batch._declaration.declare_callback(then)
    with batch.part(part) as part_run:
        channel.tell("started", batch_id=part_run.batch_id)
        channel.ask()
    channel.tell("ended", is_last=part_run.is_last)


# -- parts that fail --------------------------------------------------------------------------------------------------


def test_a_failed_part_keeps_the_next_from_starting(make):
    ran = []
    failing, other = (
        make("a", "b", on_success=lambda: ran.append("a")),
        make("a", "b", on_success=lambda: ran.append("b")),
    )
    with pytest.raises(ZeroDivisionError):
        run(failing, "a", fail=ZeroDivisionError("no rows"))
    (alarm,) = failing.alarms
    assert isinstance(alarm, BatchFailed)
    assert isinstance(alarm.__cause__, ZeroDivisionError)
    assert list(alarm.failed) == ["a"]
    assert "'a'" in str(alarm)
    assert "no rows" in str(alarm)
    assert run(other, "b").is_last is False  # the part itself succeeds
    (alarm,) = other.alarms
    assert "a (ZeroDivisionError: no rows" in str(alarm)
    assert (list(alarm.failed), alarm.resource) == (["a"], other.name)
    assert ran == []
    assert other.entry().status == "failed"
    with pytest.raises(BatchFailed, match="run these parts again"):
        other.wait(PATIENCE)
    # After the repair only the failed part runs again, and it is the last one now.
    again = run(failing, "a")
    assert (again.is_last, again.attempt, again.batch_id) == (True, 2, alarm.batch_id)
    assert ran == ["a"]
    assert other.wait(PATIENCE).status == "succeeded"


def test_last_part_may_be_the_failed_part(make):
    batch = make("a", "b", on_success=lambda: pytest.fail("must not run"))
    run(batch, "a")
    with pytest.raises(KeyboardInterrupt):
        run(batch, "b", fail=KeyboardInterrupt())
    assert len(batch.alarms) == 1
    entry = batch.entry()
    assert (entry.status, entry.callback_status) == ("failed", "none")
    assert "KeyboardInterrupt" in {part.part: part.error for part in entry.parts}["b"]


def test_error_in_hook_hides_no_other_error(make, caplog):
    def hook(failure):
        raise OSError("the pager is out of order")

    batch = make("a", on_failed=hook)
    with pytest.raises(ZeroDivisionError):
        run(batch, "a", fail=ZeroDivisionError())
    assert "the pager is out of order" in caplog.text
    assert batch.entry().status == "failed"


@pytest.mark.parametrize("state", ["open", "failed"])
def test_part_that_succeeded_is_repeated_in_its_batch(make, connect, state):
    """A scheduler may repeat a part whose exit status it lost: no state is lost, and no new batch begins."""
    ran = []
    batch = make("a", "b", "c", on_success=lambda: ran.append(1))
    with pytest.raises(ValueError):
        run(batch, "a", fail=ValueError())
    first = run(batch, "b")
    if state == "failed":
        run(batch, "c")
        assert batch.entry().status == "failed"
    again = run(batch, "b")
    assert (again.batch_id, again.attempt, again.is_last) == (first.batch_id, 2, False)
    if state == "open":
        run(batch, "c")
    assert run(batch, "a").is_last
    assert ran == [1]
    assert [entry.status for entry in batches.list_batches(connect(), batch.name)] == ["succeeded"]


def test_batch_waits_for_part_that_is_repeated(make):
    """The callback never runs beside a running part."""
    ran = []
    batch = make("a", "b", on_success=lambda: ran.append(1))
    run(batch, "a")
    again = batch.part("a").start()
    assert run(batch, "b").is_last is False
    assert ran == []
    assert again.finish() is True
    assert ran == [1]


@pytest.mark.parametrize("outcome", ["fails", "ends the program", "its process dies"])
def test_last_part_is_repeated_when_callback_has_not_ended(make, spawn, name, outcome):
    """A failed callback fails the process of the last part, so a scheduler repeats that part."""
    ran = []
    if outcome == "its process dies":
        child = spawn(child_part, name=name, parts=["a", "b"], part="a", wait_in_callback=True)
        child.expect("started")
        run(make("a", "b"), "b")
        child.call("in_callback", end=True)
        child.kill()
    else:
        failing = make("a", "b")
        error = ZeroDivisionError if outcome == "fails" else SystemExit

        def then():
            raise error

        failing._declaration.declare_callback(then)
        run(failing, "b")
        with pytest.raises((BatchFailed, SystemExit)):
            run(failing, "a")
    batch = make("a", "b", on_success=lambda: ran.append(1))
    first = batch.entry()
    again = run(batch, "a")  # starts at once, and waits for proof that the first process is dead
    assert (again.batch_id, again.attempt, again.is_last) == (first.batch_id, 2, True)
    assert ran == [1]
    entry = batch.wait(PATIENCE)
    assert (entry.batch_id, entry.callback_status, entry.callback_attempt) == (first.batch_id, "finished", 2)
    assert run(batch, "a").batch_id > first.batch_id, "of the next batch"


def test_other_part_takes_callback_over_and_begins_anew(make, database, name):
    """Only the last part's process can have failed with the callback."""
    ran = []
    failing = make("a", "b", on_success=sqlsem.Sql(f"INSERT INTO late_{name} (who) VALUES ('x')"))
    run(failing, "b")
    with pytest.raises(BatchFailed):
        run(failing, "a")
    first = failing.entry().batch_id
    batch = make("a", "b", on_success=lambda: ran.append(1))
    assert run(batch, "b").batch_id > first
    assert failing._declaration.entry(first).callback_status == "failed"


def test_failed_batch_with_other_parts_is_not_lost(make):
    batch = make("a", "b")
    with pytest.raises(ValueError):
        run(batch, "a", fail=ValueError())
    run(batch, "b")
    with pytest.raises(ConfigurationError, match=r"it lacks c; login .* opened it at .*sqlsem batch abandon"):
        make("a", "b", "c").part("c").start()
    assert run(batch, "a").is_last


# -- abandoned batches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("state", ["open", "failed", "callback failed", "callback pending"])
def test_batch_is_abandoned_by_operator(make, connect, state, by_number):
    operator, batch = connect(), make("a", "b")
    run(batch, "a")
    if state == "failed":
        with pytest.raises(ValueError):
            run(batch, "b", fail=ValueError())
    elif state == "callback failed":
        with pytest.raises(BatchFailed):
            run(make("a", "b", on_success=lambda: 1 / 0), "b")
    elif state == "callback pending":
        run(make("a", "b", on_success=lambda: None), "a")
        run(batch, "b")
    old = batch.entry().batch_id
    assert batches.abandon(operator, old if by_number else batch.name) == old
    assert batches.abandon(operator, old if by_number else batch.name) is None
    entry = batch.entry()
    assert (entry.status, entry.callback_status in ("none", "failed")) == ("abandoned", True)
    (operation,) = operator.admin.operations(batch.name)
    assert (operation.action, operation.resource) == ("abandon", batch.name)
    assert operation.old.startswith(f"batch {old}, ")
    with pytest.raises(BatchFailed, match="was abandoned"):
        batch.wait(PATIENCE)
    assert batches.resume(operator, old) is False
    assert run(batch, "b").batch_id > old
    assert batches.abandon(operator, "nowhere") is None


def test_running_callback_keeps_batch_open(make, connect):
    operator, outcomes = connect(), []
    batch = make("a", on_success=lambda: outcomes.append(batches.abandon(operator, batch.name)))
    run(batch, "a")
    assert (outcomes, batches.abandon(operator, batch.name)) == ([None], None)
    assert batch.entry().status == "succeeded"


def test_part_that_ends_after_batch_was_abandoned(make, connect):
    batch = make("a", "b", on_success=lambda: pytest.fail("must not run"))
    run(batch, "a")
    slow = batch.part("b").start()
    batches.abandon(connect(), batch.name)
    with pytest.raises(BatchFailed, match="was abandoned before part 'b' ended") as caught:
        slow.finish()
    assert caught.value.failed == {"b": "ended after the batch was abandoned"}
    assert batch.alarms == [caught.value]


def test_pending_callback_of_last_part_gives_the_alarm(make):
    knows, last = make("a", "b", on_success=lambda: None), make("a", "b")
    run(knows, "a")
    assert run(last, "b").is_last
    assert ["its callback is pending" in str(alarm) for alarm in last.alarms] == [True]


def test_part_is_ended_by_hand_once(make):
    batch = make("a", "b")
    with batch.part("a") as part_run:
        part_run.fail("the file has not come")
    assert {part.part: part.error for part in batch.entry().parts}["a"] == "the file has not come"
    part_run = batch.part("a").start()
    with pytest.raises(NotHeld, match="started before"):
        part_run.start()
    assert part_run.finish() is False
    with pytest.raises(NotHeld, match="ended before"):
        part_run.finish()
    with pytest.raises(NotHeld, match="not started"):
        batch.part("b").finish()


# -- stale, late, twice, missing --------------------------------------------------------------------------------------


def test_yesterdays_success_does_not_count(make):
    ran = []
    batch = make("a", "b", on_success=lambda: ran.append(1))
    run(batch, "a")
    assert run(batch, "b").is_last
    assert run(batch, "a").is_last is False  # of a new batch
    assert ran == [1]
    entry = batch.entry()
    assert {part.part: part.status for part in entry.parts} == {"a": "succeeded", "b": "expected"}


def grow_older(database, number, seconds, connection=None):
    """Move the start of a batch into the past by so many seconds."""
    table = database.beside("batch")
    text = f"UPDATE {table} SET opened_at = {database.later('opened_at', -seconds)} WHERE batch_id = {number}"
    if connection is None:
        database.rows(text)
    else:
        connection.cursor().execute(text)


def test_a_success_older_than_the_window_does_not_count(make, database):
    ran = []
    batch = make("a", "b", window="6h", on_success=lambda: ran.append(1))
    old = run(batch, "a")
    grow_older(database, old.batch_id, 6 * 3600)
    with pytest.raises(BatchFailed, match=r"b \(never started"):
        batch.wait(PATIENCE)
    assert batch.alarms == []
    other = make("a", "b", window="6h", on_success=lambda: ran.append(2))
    assert run(other, "b").is_last is False
    (alarm,) = other.alarms
    assert alarm.batch_id == old.batch_id
    assert alarm.failed == {"b": "never started"}
    assert other._declaration.entry(old.batch_id).status == "expired"
    assert ran == []
    assert run(batch, "a").is_last
    assert ran == [1]


def test_expired_batch_is_reported_once(database, name):
    last = None
    with contextlib.closing(database.session()) as session:
        member = session.register_member("here", 1, "test")
        for number in range(30):

            def start(part, number=number):
                parts = ["a", "b", "c"]
                return session.start_part(member, name, part, parts, 60.0, "me", f"{number}{part}", NOTHING)

            began = [start(part) for part in ("a", "b", "a", "c")]
            assert {started.batch_id for started in began} == {began[0].batch_id}
            assert began[2] == began[0]  # (repeated after a lost reply)
            assert [started.previous for started in began] == [last, None, last, None]
            last = began[0].batch_id
            grow_older(database, last, 60)
        session.deregister_member(member)


def test_a_part_that_takes_longer_than_the_window_fails(make):
    batch = make("a", window=timedelta(seconds=0.2), on_success=lambda: pytest.fail("must not run"))
    with pytest.raises(BatchFailed, match="does not count") as caught:
        with batch.part("a"):
            until(lambda: batch.entry().overdue)
    assert caught.value.failed == {"a": "ended after the window"}
    assert batch.alarms == [caught.value]
    entry = batch.entry()
    assert (entry.status, entry.parts[0].status, entry.parts[0].error) == ("failed", "failed", "ended after the window")


def test_end_of_a_part_of_a_finished_batch_is_refused(make):
    batch = make("a", "b", window=0.2)
    slow = batch.part("a").start()
    until(lambda: batch.entry().overdue)
    batch.window = 3600.0
    mended = make("a", "b", window=0.2)
    other = mended.part("b").start()
    assert other.batch_id > slow.batch_id
    assert mended.alarms[0].failed == {"a": "still running", "b": "never started"}
    with pytest.raises(BatchFailed, match="does not count"):
        slow.finish()
    other.fail("enough")


def test_a_part_that_runs_already(make):
    first, second = make("a", "b"), make("a", "b")
    part = first.part("a").start()
    with pytest.raises(ConfigurationError, match=r"'a' of batch .* runs already \(.*:\d+ since .*, login "):
        second.part("a").start()
    with pytest.raises(ConfigurationError, match="runs already"):
        first.part("a").start()
    assert part.finish() is False
    assert run(second, "b").is_last


def test_other_parts_than_the_open_batch(make):
    part = make("a", "b").part("a").start()
    with pytest.raises(ConfigurationError, match="it also has b and it lacks c, d"):
        make("a", "c", "d").part("c").start()
    assert part.finish() is False
    assert run(make("b", "a"), "b").is_last  # the order of the part names does not matter
    assert run(make("a", "c"), "c").batch_id > part.batch_id


def test_batches_of_different_names_are_independent(connect, name):
    coordinator = connect()
    first, other = (batches.batch(name(suffix), ["a", "b"], window=60, coordinator=coordinator) for suffix in "xy")
    run(first, "a")
    assert not run(other, "b").is_last
    assert run(first, "b").is_last


def test_old_batches_are_removed(make, database):
    batch = make("a")
    history_days = database.rows(f"SELECT value FROM {database.beside('setting')} WHERE name = 'history_days'")[0][0]
    run(batch, "a")
    first = batch.entry().batch_id
    database.rows(f"UPDATE {database.beside('setting')} SET value = '-1' WHERE name = 'history_days'")
    try:
        run(batch, "a")
    finally:
        database.rows(f"UPDATE {database.beside('setting')} SET value = ? WHERE name = 'history_days'", history_days)
    assert batch._declaration.entry(first) is None
    assert batch.entry().status == "succeeded"


# -- processes that die -----------------------------------------------------------------------------------------------


def test_part_of_dead_process_counts_as_failed(make, spawn, name):
    batch = make("a", "b", on_success=list)
    child = spawn(child_part, name=name, parts=["a", "b"], part="a")
    child.expect("started")
    assert run(batch, "b").is_last is False
    child.kill()
    with pytest.raises(BatchFailed, match=r"a \(its process died"):
        batch.wait(PATIENCE)
    (alarm,) = batch.alarms
    assert alarm.failed == {"a": "its process died"}
    again = run(batch, "a")
    assert (again.attempt, again.is_last) == (2, True)
    assert len(batch.alarms) == 1


def test_a_part_of_the_dead_is_taken_over(make, spawn, name):
    batch = make("a")
    child = spawn(child_part, name=name, parts=["a"], part="a")
    child.expect("started")
    with pytest.raises(ConfigurationError, match="runs already"):
        batch.part("a").start()
    child.kill()
    again = run(batch, "a")  # starts at once, and waits for proof of death
    assert (again.attempt, again.is_last) == (2, True)


def test_reap_looks_after_batches(make, spawn, name, connect):
    batch, operator = make("a", "b"), connect()
    alive = batch.part("b").start()
    child = spawn(child_part, name=name, parts=["a", "b"], part="a")
    child.expect("started")
    operator.admin.reap()
    assert {part.status for part in batch.entry().parts} == {"running"}
    child.kill()
    until(lambda: operator.admin.reap() or {part.status for part in batch.entry().parts} == {"failed", "running"})
    assert alive.finish() is False
    assert ["a (its process died)" in str(alarm) for alarm in batch.alarms] == [True]


def test_a_paused_process_keeps_its_part(make, spawn, name, database):
    batch = make("a")
    child = spawn(child_part, name=name, parts=["a"], part="a")
    child.expect("started")
    child.pause()
    try:
        time.sleep(2 * GRACE)
        batch._declaration.recover()
        with pytest.raises(ConfigurationError, match="runs already"):
            batch.part("a").start()
    finally:
        child.resume()
    assert child.call("ended", end=True)["is_last"]


def test_callback_of_dead_process_is_taken_over(make, spawn, name, threads):
    ran, resumed = [], []
    child = spawn(child_part, name=name, parts=["a"], part="a", wait_in_callback=True)
    child.expect("started")
    child.call("in_callback", end=True)
    watching = make("a", on_success=lambda: ran.append("w"))
    entry = watching.wait(PATIENCE, started=True)
    assert (entry.status, entry.callback_status) == ("succeeded", "running")
    assert watching.resume() is False
    with pytest.raises(Timeout, match=r"callback of batch .* is still running"):
        watching.wait(0.05)
    child.kill()

    def work(batch):
        # Two threads compete until the callback of one of them has finished.
        while batch.entry().callback_status != "finished":
            resumed.append(batch.resume())

    for label in "xy":
        threads.start(work, make("a", on_success=lambda label=label: ran.append(label)))
    threads.join()
    assert len(ran) == resumed.count(True) == 1
    entry = watching.wait(PATIENCE)
    assert (entry.callback_status, entry.callback_attempt) == ("finished", 2)


def test_the_next_start_takes_a_callback_over(make, spawn, name):
    ran = []
    child = spawn(child_part, name=name, parts=["a", "b"], part="a", wait_in_callback=True)
    child.expect("started")
    batch = make("a", "b", on_success=lambda: ran.append(batch.entry().batch_id))
    run(batch, "b")
    child.call("in_callback", end=True)
    first = batch.entry().batch_id
    child.kill()
    until(lambda: batch._declaration.recover() or batch.entry().callback_status == "pending")
    assert run(batch, "b").batch_id > first
    assert ran == [first]


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_a_paused_process_keeps_its_callback(make, spawn, name):
    child = spawn(child_part, name=name, parts=["a"], part="a", wait_in_callback=True)
    child.expect("started")
    child.call("in_callback", end=True)
    batch = make("a", on_success=lambda: pytest.fail("must not run"))
    child.pause()
    try:
        remains(lambda: batch.resume() is False, 2.5 * GRACE, "no process takes over the part of a living one")
    finally:
        child.resume()
    assert child.call("ended", end=True)["is_last"]
    assert (batch.entry().callback_status, batch.entry().callback_attempt) == ("finished", 1)


@pytest.mark.engines("postgresql")
def test_a_lost_connection_does_not_lose_a_callback(make, spawn, name, database):
    child = spawn(child_part, name=name, parts=["a"], part="a", wait_in_callback=True, options={"grace": 3.0})
    child.expect("started")
    child.call("in_callback", end=True)
    batch = make("a", on_success=lambda: pytest.fail("must not run"))

    def backend():
        return database.rows("SELECT backend_pid FROM sqlsem.member WHERE pid = ?", child.pid)

    for _ in range(3):
        before = backend()
        assert len(before) == 1
        database.rows("SELECT pg_terminate_backend(?)", before[0][0])
        until(lambda before=before: batch.resume() is False and backend() not in ([], before), "it is back")
    assert child.call("ended", end=True)["is_last"]
    assert (batch.entry().callback_status, batch.entry().callback_attempt) == ("finished", 1)


def test_concurrent_resumes_run_a_callback_once(database, connect, name, threads, ledger):
    number = leave_a_callback(database, name, "sql", ledger.insert)
    batch = batches.batch(name, ["a"], window=60, coordinator=connect())
    gather, resumed = threading.Barrier(6, timeout=PATIENCE), []
    until(lambda: batch._declaration.recover() or batch.entry().callback_status == "pending")

    def work(coordinator):
        coordinator.client.member.heartbeat()
        gather.wait()
        resumed.append(batches.resume(coordinator, number))

    for _ in range(6):
        threads.start(work, connect())
    threads.join()
    assert resumed.count(True) == 1
    assert ledger() == 1


def leave_a_callback(database, name, kind, body, grace=0.0):
    """Return the number of a batch whose last part ended in a process that died before the callback."""
    session = database.session(grace=grace)
    member = session.register_member("gone", 1, "gone")
    began = session.start_part(member, name, "a", ["a"], 60.0, "me", name + kind, (kind, body))
    ended = session.end_part(member, name, "a", name + kind, None, "me", (kind, body))
    assert ended.is_last
    assert ended.callback is not None
    assert (ended.callback.kind, ended.callback.body, ended.callback.attempt) == (kind, body, 1)
    session.close()
    return began.batch_id


def test_stored_callback_is_run_by_any_process(database, connect, name, ledger):
    coordinator = connect()
    number = leave_a_callback(database, name, "sql", ledger.insert)
    assert until(lambda: batches.resume(coordinator, name))
    assert ledger() == 1
    assert batches.resume(coordinator, number) is False
    (entry,) = batches.list_batches(coordinator, name)
    assert (entry.callback_status, entry.callback_attempt, entry.batch_id) == ("finished", 2, number)
    assert entry.as_dict()["parts"][0]["part"] == "a"
    with pytest.raises(ConfigurationError, match="no batch 'nowhere'"):
        batches.resume(coordinator, "nowhere")


def test_unstored_callback_waits_for_its_declarer(database, connect, make, name):
    ran = []
    number = leave_a_callback(database, name, "local", None)
    coordinator = connect()

    def told():
        try:
            return batches.resume(coordinator, number)
        except ConfigurationError as exc:
            return str(exc)

    assert "a process that declares it" in until(told)
    assert make("a").resume() is False
    assert make("a", on_success=lambda: ran.append(1)).wait(PATIENCE).callback_status == "finished"
    assert ran == [1]


def test_part_without_callback_runs_the_declared_callback(make, ledger):
    run(make("a", "b", on_success=sqlsem.Sql(ledger.insert)), "a")
    assert run(make("a", "b"), "b").is_last
    assert ledger() == 1


def test_a_local_callback_waits_where_the_last_does_not_know_it(make):
    ran = []
    knows, last = make("a", "b", on_success=lambda: ran.append(1)), make("a", "b")
    run(knows, "a")
    assert run(last, "b").is_last
    assert last.entry().callback_status == "pending"
    with pytest.raises(Timeout, match="still pending"):
        last.wait(0.05)
    assert knows.wait(PATIENCE).callback_status == "finished"
    assert ran == [1]


# -- callbacks ----------------------------------------------------------------------------------------------------


def test_a_callback_that_fails(make, database, connect, name):
    batch = make("a", on_success=sqlsem.Sql(f"INSERT INTO late_{name} (who) VALUES ('x')"))
    with pytest.raises(BatchFailed, match="sqlsem batch resume") as caught:
        run(batch, "a")
    assert caught.value.__cause__ is not None
    assert batch.alarms == [caught.value]
    entry = batch.entry()
    assert (entry.status, entry.callback_status) == ("succeeded", "failed")
    assert f"late_{name}" in entry.callback_error
    with pytest.raises(BatchFailed, match="callback failed"):
        batch.wait(PATIENCE)
    assert batch.resume() is False  # a failed callback is not retried by itself
    database.rows(f"CREATE TABLE late_{name} (who varchar(40))")
    assert batches.resume(connect(), entry.batch_id)
    assert batch.wait(PATIENCE).callback_attempt == 2
    assert len(database.rows(f"SELECT who FROM late_{name}")) == 1


def test_the_kinds_of_callbacks(make, tmp_path):
    file = tmp_path / "made"
    assert run(make("a", on_success=sqlsem.Shell(f"echo x >> '{file}'")), "a").is_last
    assert file.read_text() == "x\n"
    assert run(make("a", on_success=sqlsem.Call("os:unlink", str(file))), "a").is_last
    assert not file.exists()
    batch = make("a", on_success=time.monotonic)
    run(batch, "a")
    entry = batch.entry()
    assert (entry.callback_kind, entry.callback_status) == ("call", "finished")
    assert '"time:monotonic"' in entry.callback_body


def test_without_callback(make):
    batch = make("a", "b")
    run(batch, "a")
    assert run(batch, "b").is_last
    entry = batch.wait(PATIENCE)
    assert (entry.callback_status, entry.callback_kind) == ("none", None)
    assert batch.resume() is False


def test_wait_goes_on_until_the_first_batch_is_done(make, threads):
    watching, working = make("a", "b"), make("a", "b", on_success=lambda: ran.append(1))
    ran, results = [], []
    with pytest.raises(Timeout, match="No part"):
        watching.wait("10ms")
    threads.start(lambda: results.append((watching.wait(PATIENCE), list(ran))))
    run(working, "a")
    with pytest.raises(Timeout, match=r"waits for b \(expected\)"):
        watching.wait(0.02)
    run(working, "b")
    threads.join()
    ((entry, then),) = results
    assert entry.callback_status == "finished"
    assert then == [1]


# -- lost replies, interrupts, lost membership ------------------------------------------------------------------------


def test_repeated_calls_give_the_same_answers(database, name):
    with contextlib.closing(database.session()) as session:
        member = session.register_member("here", 1, "test")
        start = (member, name, "a", ["a", "b"], 60.0, "me")
        began = session.start_part(*start, "u1", NOTHING)
        assert began.code == "started"
        assert session.start_part(*start, "u1", NOTHING) == began
        assert session.start_part(*start, "u2", NOTHING).code == "running"
        ended = session.end_part(member, name, "a", "u1", None, "me", NOTHING)
        assert (ended.code, ended.is_last, ended.callback) == ("succeeded", False, None)
        assert session.end_part(member, name, "a", "u1", None, "me", NOTHING) == ended
        session.start_part(member, name, "b", ["b", "a"], 60.0, "me", "u4", ("local", None))
        last = session.end_part(member, name, "b", "u4", None, "me", ("local", None))
        assert (last.code, last.is_last, last.batch_status) == ("succeeded", True, "succeeded")
        assert last.callback is not None
        assert session.end_part(member, name, "b", "u4", None, "me", ("local", None)) == last
        # A repeated end with an error returns the callback, and changes nothing else.
        undone = session.end_part(member, name, "b", "u4", "interrupted", "me", ("local", None))
        assert (undone.code, undone.is_last, undone.callback) == ("succeeded", True, None)
        assert session.claim_callback(member, name, None, "me", "u5", False) is None
        claimed = session.claim_callback(member, name, None, "me", "u5", True)
        assert claimed is not None
        assert claimed.attempt == 2
        assert session.claim_callback(member, name, None, "me", "u5", True) == claimed
        assert session.claim_callback(member, name, None, "me", "u6", True) is None
        assert session.return_callback(member, "u5")
        assert not session.return_callback(member, "u5")
        claimed = session.claim_callback(member, None, began.batch_id, "me", "u7", True)
        assert claimed is not None
        assert not session.end_callback(member, began.batch_id, claimed.attempt - 1, None)
        assert session.end_callback(member, began.batch_id, claimed.attempt, None)
        assert session.end_callback(member, began.batch_id, claimed.attempt, None)
        assert session.end_part(member, name, "b", "nobody's", None, "me", NOTHING).code == "lost"
        session.deregister_member(member)


@pytest.mark.parametrize("call", ["start_part", "end_part", "end_callback"])
def test_a_lost_reply_changes_nothing(make, database, monkeypatch, call):
    ran, calls = [], []
    batch = make("a", on_success=lambda: ran.append(1))

    def wrong(right, *arguments):
        calls.append(right(*arguments))
        if len(calls) == 1:
            raise Disconnected("the reply was lost")
        return calls[-1]

    intercept(monkeypatch, batch, call, wrong)
    assert run(batch, "a").is_last
    assert len(calls) == 2
    assert calls[0] == calls[1]
    assert ran == [1]
    assert batch.entry().callback_status == "finished"
    assert batch.entry().parts[0].attempt == 1


def test_a_call_that_falls_to_a_deadlock_is_repeated(make, monkeypatch):
    batch, calls = make("a"), []

    def wrong(right, *arguments):
        calls.append(arguments)
        if len(calls) < 3:
            raise Busy("chosen as deadlock victim")  # the engines' error for a deadlock inside the database
        return right(*arguments)

    intercept(monkeypatch, batch, "end_part", wrong)
    assert run(batch, "a").is_last
    assert len(calls) == 3


@pytest.mark.parametrize("call", ["start_part", "end_part", "claim_callback"])
def test_an_interrupt_leaves_nothing_behind_that_blocks(make, database, name, monkeypatch, call):
    if call == "claim_callback":
        leave_a_callback(database, name, "local", None)
    batch = make("a", on_success=lambda: None)
    until(
        lambda: batch._declaration.recover() or call != "claim_callback" or batch.entry().callback_status == "pending"
    )

    def wrong(right, *arguments):
        right(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    intercept(monkeypatch, batch, call, wrong)
    with pytest.raises(KeyboardInterrupt):
        if call == "claim_callback":
            batch.resume()
        run(batch, "a")
    if call == "start_part":
        until(lambda: batch.entry().parts[0].status == "failed")
    else:
        until(lambda: batch.entry().callback_status == "pending")
        assert batch.wait(PATIENCE).callback_status == "finished"
    assert run(batch, "a").is_last


def test_a_part_of_a_process_that_was_given_up_does_not_count(make, database):
    batch = make("a", on_success=lambda: pytest.fail("must not run"))
    with pytest.raises(BatchFailed, match="given up part 'a'") as caught:
        with batch.part("a"):
            member = batch._declaration.client.member.member_id
            database.rows(f"DELETE FROM {database.beside('member')} WHERE member_id = ?", member)
    assert batch.alarms[-1] is caught.value
    until(lambda: batch._declaration.recover() or batch.entry().status == "failed")
    assert batch.entry().parts[0].error == "its process died"


def test_a_callback_of_a_process_that_was_given_up(make, database):
    def then():
        member = batch._declaration.client.member.member_id
        database.rows(f"DELETE FROM {database.beside('member')} WHERE member_id = ?", member)

    batch = make("a", on_success=then)
    with pytest.raises(BatchFailed, match="another may have run it too"):
        run(batch, "a")


#: The source files of batches: the package, and the module of claims.
STRUCK = (os.path.dirname(batches.__file__), claims.__file__)


class Stop(BaseException):
    """The exception that interrupts."""


def strike(number, body):
    """Run ``body`` with an exception at the ``number``-th line of the batch code; False if fewer lines ran."""
    lines_seen = 0

    def local(frame, event, _):
        nonlocal lines_seen
        if event in ("line", "return"):
            lines_seen += 1
            if lines_seen == number:
                raise Stop
        return local

    def tracer(frame, event, _):
        # (Python drops an exception in a finalizer. The register uses `with` on its locks, and no interrupt can
        # come between such a block and its __exit__.)
        code = frame.f_code
        struck = code.co_filename.startswith(STRUCK) and code.co_name != "__del__"
        return local if struck and not isinstance(frame.f_locals.get("self"), claims.Claims) else None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        body()
    except (Stop, BatchFailed):  # BatchFailed: a part that ended by Stop reports so
        pass
    finally:
        sys.settrace(before)
    return lines_seen >= number


@pytest.mark.engines("sqlite", "postgresql")
@pytest.mark.parametrize("subject", ["part", "last part", "failing part", "callback", "expired batch"])
def test_an_exception_at_any_line_leaves_nothing_running(connect, name, database, subject):
    """No part or callback stays recorded as running in this process if the process does not know of it.

    The process lives, so no other process would ever be allowed to take it over.
    """
    coordinator, raw = connect(grace=GRACE), database.raw()
    ran, number = [], 0
    batches.list_batches(coordinator)

    def prepare(batch):
        if subject == "callback":
            knows_nothing = batches.batch(batch.name, ["a"], window=60, coordinator=coordinator)
            coordinator.client.member.call("keep", lambda session, me: leave_behind(session, me, batch.name))
            assert knows_nothing.resume() is False
        elif subject == "expired batch":
            early = batches.batch(batch.name, ["a", "b"], window=60, coordinator=coordinator)
            run(early, "a")
            grow_older(database, early.entry().batch_id, 60, raw)

    def body(batch):
        if subject == "callback":
            batch.resume()
        else:
            with batch.part("b" if subject == "expired batch" else "a"):
                if subject == "failing part":
                    raise BatchFailed("x")

    while True:
        number += 1
        parts = ["a", "b"] if subject in ("part", "expired batch") else ["a"]
        batch = batches.batch(name(str(number)), parts, window=60, coordinator=coordinator)
        batch._declaration.declare_callback(lambda: ran.append(1))
        prepare(batch)
        if not strike(number, lambda batch=batch: body(batch)):
            break
    raw.close()
    assert number > (50 if subject == "callback" else 100)
    gc.collect()

    def running():
        return [
            entry.name.rpartition("-")[2]
            for entry in batches.list_batches(coordinator, maximum=2 * number)
            if entry.name.startswith(name)
            and (entry.callback_status == "running" or any(part.status == "running" for part in entry.parts))
        ]

    until(lambda: running() == [], "all have ended, or were given back", 30)
    # The next client that calls resume() runs a returned callback.
    for entry in batches.list_batches(coordinator, maximum=2 * number):
        if entry.callback_status == "pending" and entry.name.startswith(name):
            assert batches.batch(entry.name, parts, window=60, on_success=list, coordinator=coordinator).resume()


def leave_behind(session, member, name):
    """Make a batch whose callback is pending."""
    session.start_part(member, name, "a", ["a"], 60.0, "me", name, ("local", None))
    assert session.end_part(member, name, "a", name, None, "me", ("local", None)).callback is not None
    assert session.return_callback(member, name)


def test_a_part_that_is_dropped_has_failed(make):
    batch = make("a")
    batch.part("a").start()
    until(lambda: (gc.collect(), batch.entry().parts[0].status == "failed")[1])
    assert batch.entry().parts[0].error == "it was dropped without an end"
    assert run(batch, "a").is_last


def test_a_hook_that_ends_the_program_leaves_no_part_running(make, database):
    batch = make("a", "b", on_failed=lambda failure: sys.exit(3))
    grow_older(database, run(batch, "a").batch_id, 3600)
    with pytest.raises(SystemExit):
        run(batch, "b")
    until(lambda: batch.entry().parts[1].status == "failed")
    assert run(batch, "b").attempt == 2


def deaf(monkeypatch, batch, after):
    """Make `list_batches` fail from the moment that the call ``after`` has returned."""
    away = []

    def call(right, *arguments):
        answer = right(*arguments)
        away.append(1)
        return answer

    def look(right, *arguments):
        if away:
            raise Unavailable("the line is dead")
        return right(*arguments)

    intercept(monkeypatch, batch, after, call)
    intercept(monkeypatch, batch, "list_batches", look)


def test_failures_are_reported_beside_unreadable_parts(make, monkeypatch, database):
    batch = make("a", "b")
    with pytest.raises(ValueError):
        run(batch, "a", fail=ValueError())
    batch.alarms.clear()
    deaf(monkeypatch, batch, "end_part")
    run(batch, "b")
    assert ["has failed, though part 'b' has succeeded" in str(alarm) for alarm in batch.alarms] == [True]
    monkeypatch.undo()

    grow_older(database, batch.entry().batch_id, 3600)
    batch.alarms.clear()
    deaf(monkeypatch, batch, "start_part")
    part = batch.part("a").start()
    assert part.attempt == 1
    assert ["has expired" in str(alarm) for alarm in batch.alarms] == [True]
    monkeypatch.undo()
    part.finish()


def test_unrecorded_end_calls_the_failure_hook(make, monkeypatch):
    batch = make("a", on_success=lambda: pytest.fail("must not run"))

    def wrong(right, *arguments):
        raise Unavailable("the line is dead")

    with pytest.raises(Unavailable), batch.part("a"):
        intercept(monkeypatch, batch, "end_part", wrong)
    assert ["the line is dead" in str(alarm) for alarm in batch.alarms] == [True]
    assert batch.alarms[0].failed == {"a": "its end could not be recorded"}
    monkeypatch.undo()
    # (The deferred call may have been tried and dropped while the error lasted.)
    until(lambda: batch.entry().status == "failed" or not batch._declaration.client.member.deferred_calls)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_callback_that_ends_the_program_has_failed(make, error):
    def then():
        raise error

    batch = make("a", on_success=then)
    with pytest.raises(type(error)):
        run(batch, "a")
    assert ["has failed: " + type(error).__name__ in str(alarm) for alarm in batch.alarms] == [True]
    entry = batch.entry()
    assert (entry.callback_status, entry.status) == ("failed", "succeeded")


# -- forks ------------------------------------------------------------------------------------------------------------

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def forked(work):
    """Return the result of ``work()`` in a forked child, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(work()).encode()[:4000])
        except BaseException as exc:
            os.write(write, f"{type(exc).__name__}: {exc}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        answer = file.read().decode()
    os.waitpid(child, 0)
    return answer


@needs_fork
def test_a_connection_that_was_interrupted_is_replaced(connect, name):
    """An interrupted connection is replaced; the watchdog interrupts one that does not answer."""
    coordinator = connect(lease=30, retry=2)
    batch = batches.batch(name, ["a"], window=60, coordinator=coordinator)
    with batch.part("a") as part:
        coordinator.client.member.main.session.interrupt()
        forked(lambda: None)  # (a fork closes the connections first on engines that need it)
    assert part.is_last
    assert batch.entry().status == "succeeded"


@needs_fork
def test_forked_child_does_not_own_its_parents_part(make, tmp_path):
    answer = []

    def leave(part):
        with part:
            return forked(lambda: part.__exit__(None, None, None))

    batch = make("a", "b", on_failed=lambda failure: (tmp_path / "alarm").write_text(str(failure)))
    answer = leave(batch.part("a"))
    assert "NotHeld: " in answer
    assert "forked from" in answer
    part = batch.part("b").start()
    assert forked(lambda: part.__exit__(ZeroDivisionError, ZeroDivisionError(), None)) == "None"
    assert forked(lambda: part.__del__()) == "None"
    assert part.finish() is True
    assert not (tmp_path / "alarm").exists()
    assert {entry.status for entry in batch.entry().parts} == {"succeeded"}


@needs_fork
@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_a_child_that_is_forked_in_a_callback_does_not_end_it(make, tmp_path, ending):
    read, write = os.pipe()

    def then():
        if os.fork() == 0 and ending == "raises":
            raise SystemExit(3)

    parent = os.getpid()
    batch = make("a", on_failed=lambda failure: (tmp_path / "alarm").write_text(str(failure)))
    batch._declaration.declare_callback(then)
    part = batch.part("a").start()
    answer = "nothing"
    try:
        part.finish()
    except BaseException as exc:
        answer = f"{type(exc).__name__}: {exc}"
    finally:
        if os.getpid() != parent:
            os.write(write, answer.encode())
            os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        assert ("forked from" if ending == "returns" else "SystemExit: 3") in file.read().decode()
    assert answer == "nothing"
    assert batch.entry().callback_status == "finished"
    assert not (tmp_path / "alarm").exists()


#: A statement that runs for seconds and holds the file's write lock.
LONG = (
    "INSERT INTO {table} (who) SELECT 'x' FROM (WITH RECURSIVE a (n) AS"
    " (SELECT 1 UNION ALL SELECT n + 1 FROM a WHERE n < {maximum}) SELECT count(*) FROM a)"
)


@needs_fork
@pytest.mark.engines("sqlite")
def test_a_fork_waits_for_the_sql_of_a_callback(make, threads, database, ledger, name, caplog):
    """A fork during the SQL would leave the child with a file lock that never ends."""
    batch = make("a", on_success=sqlsem.Sql(LONG.format(table=f"ledger_{name}", maximum=6_000_000)))
    threads.start(run, batch, "a")

    def locked():
        connection = database.raw()
        try:
            connection.execute("PRAGMA busy_timeout = 0")
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        except Exception as exc:
            return "locked" in str(exc)
        finally:
            connection.close()
        return False

    def locked_out():
        """True if the file stays locked for longer than any other holder could keep it locked."""
        deadline = time.monotonic() + 10
        while locked():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.01)
        return False

    until(lambda: sqlite.fork.executing and locked(), "the SQL runs")
    assert forked(locked_out) == "False"
    assert ledger() == 1
    threads.join()
    with make("b", coordinator=Admin(batch._declaration.client)).part("b"):  # no other SQL has to wait
        pass
    assert run(batch, "a").is_last
    assert ledger() == 2


@pytest.mark.engines("sqlite")
@pytest.mark.parametrize("moment", ["before", "waiting", "running", "between", "alone"])
def test_sql_can_be_ended(database, threads, ledger, name, moment):
    engine = database.make_engine()
    session, errors = engine.connect("work"), []
    table = f"ledger_{name}"
    text = {
        "between": f"INSERT INTO {table} (who) VALUES ('x');" * 20000,
        "alone": "PRAGMA user_version; BEGIN; " + LONG.format(table=table, maximum=10**9) + "; COMMIT",
    }.get(moment, LONG.format(table=table, maximum=10**9))
    holder = database.raw()
    if moment == "waiting":
        holder.execute("BEGIN IMMEDIATE")

    def work():
        try:
            session.execute(text)
        except Unavailable as exc:
            errors.append(str(exc))
        finally:
            session.close()

    if moment == "before":
        session.cancel_running()
    threads.start(work)
    if moment != "before":
        until(lambda: session._working is not None or errors)
        if moment == "waiting":
            remains(lambda: not errors, 0.2, "it waits for the lock")
        session.cancel_running()
        assert errors or session._working is None
    threads.join()
    holder.close()
    assert "ended before its time" in errors[0]
    assert ledger() == 0


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "batch's name"),
        ({"name": " x"}, "white space"),
        ({"parts": []}, "no parts"),
        ({"parts": "ab"}, "list of names"),
        ({"parts": 3}, "list of names"),
        ({"parts": ["a", "b", "a"]}, "twice: a"),
        ({"parts": ["a", ""]}, "empty"),
        ({"parts": ["a", "b\n"]}, "white space"),
        ({"parts": ["a", 7]}, "must be a string"),
        ({"parts": ["a" * 256]}, "at most 255"),
        ({"parts": [str(index) for index in range(10_001)]}, "at most 10000"),
        ({"window": 315_360_001}, "at most 2147483 "),
        ({"window": "3651d"}, "at most 2147483 "),
        ({"window": 0}, "above 0"),
        ({"window": -1}, "above 0"),
        ({"window": "0h"}, "above 0"),
        ({"window": timedelta(0)}, "above 0"),
        ({"window": float("nan")}, "above 0"),
        ({"window": 0.0001}, "millisecond"),
        ({"window": "soon"}, "not a duration"),
        ({"window": "6 h"}, "not a duration"),
        ({"window": None}, "number of seconds"),
        ({"on_failed": 3}, "on_failed"),
    ],
)
def test_bad_batches(change, message):
    with pytest.raises(ConfigurationError, match=message):
        batches.batch(**{"name": "x", "parts": ["a"], "window": "6h", **change})


def test_window_accepts_durations():
    def window(value):
        return batches.batch("x", ["a"], window=value).window

    assert window("6h") == window(timedelta(hours=6)) == window(21600) == 21600.0
    assert (window("90m"), window("2d"), window("1h30m"), window("500ms"), window("7")) == (5400, 172800, 5400, 0.5, 7)


async def coroutine():
    """A coroutine function that must not be called."""


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (7, "cannot continue with 7"),
        ("SELECT 1", "cannot continue with 'SELECT 1'"),
        (coroutine, "plain function"),
        (lambda: sqlsem.Call("no.such.module:function"), "no function"),
        (lambda: sqlsem.Call("os:no_such_function"), "no function"),
        (lambda: sqlsem.Call("os:name"), "plain function"),
        (lambda: sqlsem.Call("os:unlink", object()), "JSON"),
        (lambda: sqlsem.Sql(" "), "empty"),
        (lambda: sqlsem.Shell(""), "empty"),
    ],
)
def test_bad_callbacks(callback, message):
    batch = batches.batch("x", ["a"], window=1)
    with pytest.raises(ConfigurationError, match=message):
        batch._declaration.declare_callback(callback() if getattr(callback, "__name__", "") == "<lambda>" else callback)


def test_an_unknown_part():
    with pytest.raises(ConfigurationError, match="has no part 'c'; it has a, b"):
        batches.batch("x", ["a", "b"], window=1).part("c")


def test_the_error_survives_pickling():
    error = BatchFailed("it failed", resource="x", batch_id=7, failed={"a": "why"})
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.resource, copy.batch_id, copy.failed) == ("it failed", "x", 7, {"a": "why"})
    assert isinstance(copy, RuntimeError)


def test_part_may_be_ended_by_any_thread(make, threads):
    batch = make("a")
    thread = threading.Thread(target=run, args=(batch, "a"), name="a\0b\ud800c")
    thread.start()
    thread.join()
    assert (batch.entry().status, batch.entry().parts[0].owner) == ("succeeded", "a?b?c")


def test_batch_and_parts_may_have_any_names(connect, name):
    parts = ["Übung, 1", "it's", '"b"', "日本", "a%s?:x"]
    batch = batches.batch(name("ä'\"%s"), parts, window=60, coordinator=connect())
    for part in parts[:-1]:
        assert not run(batch, part).is_last
    assert run(batch, parts[-1]).is_last
    assert {part.part for part in batch.entry().parts} == set(parts)
