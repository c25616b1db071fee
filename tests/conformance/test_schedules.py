"""Tasks that are put again and again: once for each time that is due, whoever watches and whoever dies."""

import re
import time
from datetime import datetime, timezone

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.tasks import Worker, check_cron, next_due


@pytest.fixture
def queue(connect, name):
    return connect().queue(name)


def nothing():
    """What a task does here."""


def make_due(database, name, ago=0.0):
    """As if the schedule's next time had been so many seconds ago."""
    with database.raw() as raw:
        if database.engine == "sqlite":
            raw.execute(
                "UPDATE sqlsem_schedule SET next_due = CAST((julianday('now') - 2440587.5) * 86400 AS INTEGER) - ? "
                "WHERE schedule_name = ?",
                (ago, name),
            )
        elif database.engine == "mssql":
            raw.execute(
                f"UPDATE {database.schema}.schedule SET next_due = DATEADD(second, -CAST(? AS int), SYSUTCDATETIME()) "
                "WHERE schedule_name = ?",
                (ago, name),
            )
        else:
            raw.execute(
                "UPDATE sqlsem.schedule SET next_due = clock_timestamp() - %s * interval '1 second' "
                "WHERE schedule_name = %s",
                (ago, name),
            )


def watch(channel, url, options, name):
    """A process that works on the queue, as fast as it can."""
    from sqlsem.tasks import claiming

    claiming.RECOVER_SECONDS = (0.0, 0.0)
    queue = sqlsem.connect(url, **options, grace=0.5).queue(name)
    channel.tell("ready")
    for task in queue.claim():
        task.finish()


def test_what_is_due_is_put_once_by_one_of_many(database, connect, queue, name, threads):
    made = queue.schedule("0 2 * * *", nothing, name=str(name), note="daily", max_attempts=3, time_limit=60, order=4)
    assert (made.name, made.cron, made.time_zone, made.last_due) == (name, "0 2 * * *", "UTC", None)
    assert made.next_due == next_due("0 2 * * *", "UTC", made.taken_at)
    workers = [Worker(connect().queue(name)) for _ in range(4)]
    for worker in workers:
        threads.start(worker.run)
    for times in range(1, 4):
        make_due(database, name, 1000 * times)
        until(lambda times=times: len(queue.tasks("finished")) == times)
        time.sleep(0.5)
    for worker in workers:
        worker.stop()
    threads.join()
    found = queue.tasks()
    assert len(found) == 3
    for one in found:
        assert (one.kind, one.note, one.max_attempts, one.time_limit, one.order) == ("call", "daily", 3, 60.0, 4)
        assert one.put_by == made.put_by
    (after,) = connect().schedules(str(name))
    assert after.next_due == next_due("0 2 * * *", "UTC", after.taken_at)
    assert after.last_due < after.taken_at


@pytest.mark.parametrize(("missed", "ago", "count"), [("one", 86400 * 3, 1), ("skip", 86400 * 3, 0), ("skip", 5, 1)])
def test_what_was_missed(database, queue, name, missed, ago, count):
    """One task for all of it, or none; and what is only a little late is not missed."""
    queue.schedule("0 0 1 1 *", nothing, name=str(name), missed=missed)
    make_due(database, name, ago)
    Worker(queue, idle_exit=0).run()
    assert len(queue.tasks()) == count
    (after,) = queue.claiming.process.look(lambda session: session.list_schedules(str(name), None))
    assert after.next_due > after.taken_at
    assert (after.last_due is not None) == bool(count)


def test_paused_and_removed(database, connect, queue, name):
    coordinator = connect()
    queue.schedule("0 2 * * *", nothing, name=str(name))
    coordinator.pause_schedule(name)
    make_due(database, name)
    Worker(queue, idle_exit=0).run()
    assert queue.tasks() == []
    (paused,) = coordinator.schedules(str(name))
    assert paused.paused_by is not None
    coordinator.resume_schedule(name)
    Worker(queue, idle_exit=0).run()
    assert queue.tasks() == [], "what was due meanwhile is left out"
    (resumed,) = coordinator.schedules(str(name))
    assert resumed.paused_at is None
    assert resumed.next_due > resumed.taken_at
    coordinator.remove_schedule(name)
    assert coordinator.schedules(str(name)) == []
    for call in (coordinator.pause_schedule, coordinator.resume_schedule, coordinator.remove_schedule):
        with pytest.raises(sqlsem.NotHeld, match=f"There is no schedule '{name}'"):
            call(name)


def test_one_of_the_same_name_is_replaced(database, queue, name):
    queue.schedule("0 2 * * *", nothing, name=str(name))
    make_due(database, name)
    again = queue.schedule("0 2 * * *", nothing, name=str(name), note="new")
    assert again.next_due <= again.taken_at, "what is due is not forgotten"
    other = queue.schedule("0 3 * * *", nothing, name=str(name), time_zone="Asia/Tokyo")
    assert other.next_due > other.taken_at
    unnamed = queue.schedule("0 2 * * *", nothing)
    assert unnamed.name.startswith(f"{name}-")
    assert queue.schedule("0 4 * * *", nothing).name == unnamed.name, "of the same body"


def test_one_that_cannot_be_put_stops_nobody(database, connect, queue, name, caplog):
    """Whatever stands there: others of the queue are put, and its workers work on."""
    bad = name("a-bad-one")
    queue.schedule("0 2 * * *", nothing, name=bad)
    queue.schedule("0 2 * * *", nothing, name=str(name), note="good")
    table = "sqlsem_schedule" if database.engine == "sqlite" else f"{database.schema}.schedule"
    database.rows(f"UPDATE {table} SET options = ? WHERE schedule_name = ?", '{"on_failure": "never"}', bad)
    for one in (bad, name):
        make_due(database, one)
    Worker(queue, idle_exit=0).run()
    assert [(task.note, task.status) for task in queue.tasks()] == [("good", "finished")]
    assert f"Schedule '{bad}' of " in caplog.text
    assert f"sqlsem schedules pause {bad}" in caplog.text
    (left,) = [one for one in connect().schedules(str(name)) if one.name == bad]
    assert left.next_due <= left.taken_at, "it is tried again"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": 1e30}, "the priority of a task must be from -2147483648 to 2147483647, not 1"),
        ({"order": -(2**31) - 1}, "the order of a task must be from -2147483648 to 2147483647, not -2147483649"),
        ({"after_ms": -1}, "a task can wait from now to ten years from now, not -1 ms"),
        (
            {"backoff_ms": 2**31},
            "the pause before the next attempt at a task is from 0 to 2147483647 ms, not 2147483648",
        ),
        ({"time_limit_ms": 0}, "the time limit of a task must be from 1 to 2147483647 ms, not 0"),
        ({"max_attempts": 0}, "max_attempts of a task must be from 1 to 2147483647, not 0"),
        ({"order": 1.5}, "options of a task: numbers are whole, on_failure is stop or continue"),
        ({"on_failure": "never"}, "options of a task: numbers are whole, on_failure is stop or continue"),
        ({"note": "x" * 1001}, "a note has at most 1000 characters"),
        ({"unique": "a", "replace": "b"}, "has one key: unique or replace"),
        ({"key": ""}, "key"),
        ([], "the options of a schedule are a JSON object, such as {}"),
        (None, "the options of a schedule are a JSON object, such as {}"),
    ],
)
def test_options_that_cannot_be_are_refused_when_they_are_saved(database, connect, name, options, words):
    session = database.session(grace=600)
    # (SQL Server has one number for whatever a routine refuses.)
    with pytest.raises((sqlsem.ConfigurationError, sqlsem.Unavailable), match=re.escape(words)):
        session.save_schedule(str(name), str(name), "* * * * *", "UTC", "sql", "x", options, datetime.now(timezone.utc))
    session.close()
    assert connect().schedules(str(name)) == []


def test_unique_tasks_do_not_pile_up(database, queue, name):
    queue.schedule("0 2 * * *", "x", name=str(name), unique="k")
    other = name("replacing")
    queue.schedule("0 2 * * *", "y", name=other, replace="r")
    for times in range(1, 4):
        make_due(database, name, 1000 * times)
        make_due(database, other, 1000 * times)
        queue.claiming.recover(now=True)
    assert len(queue.tasks("pending")) == 2
    assert len(queue.tasks("cancelled")) == 2


@pytest.mark.timeout(300)
def test_who_is_killed_in_between_has_done_all_of_it_or_nothing(spawn, database, queue, name):
    """However often: each time that was due has one task."""
    queue.schedule("0 2 * * *", "x", name=str(name))
    children = [spawn(watch, name=str(name)) for _ in range(2)]
    for child in children:
        child.expect("ready")
    for times in range(1, 7):
        make_due(database, name, 1000 * times)
        if times % 2:
            victim = times // 2 % 2
            children[victim].kill()
            children[victim] = spawn(watch, name=str(name))
            children[victim].expect("ready")
        until(lambda times=times: queue.counts() and queue.counts().finished == times, timeout=2 * PATIENCE)
    time.sleep(1)
    assert queue.counts().finished == 6
    assert queue.counts().pending == 0
    for child in children:
        child.kill()


@pytest.mark.parametrize("cron", ["", "x", "* * * *", "60 * * * *", "@daily", "* * * * * *", "0 0 31 2 *", None, 5])
def test_what_is_no_cron_expression(queue, cron):
    with pytest.raises(sqlsem.ConfigurationError, match=r"cron expression|never comes"):
        queue.schedule(cron, nothing)


def test_what_else_cannot_be_scheduled(queue):
    for options, words in (
        ({"time_zone": "Mars/Olympus"}, "no time zone"),
        ({"time_zone": "../etc/passwd"}, "no time zone"),
        ({"missed": "all"}, "missed is"),
        ({"name": ""}, "schedule's name is empty"),
        ({"order": "x"}, "order"),
        ({"nonsense": 1}, "no option"),
    ):
        with pytest.raises(sqlsem.ConfigurationError, match=words):
            queue.schedule("0 2 * * *", nothing, **options)


def test_zones_and_their_clocks():
    """Where clocks are put forward a time that does not come is due then; what comes twice is due once."""
    berlin = "Europe/Berlin"

    def dues(cron, start, count):
        moment = datetime.fromisoformat(start).replace(tzinfo=timezone.utc)
        for _ in range(count):
            moment = next_due(cron, berlin, moment)
            yield moment.strftime("%m-%d %H:%M")

    assert list(dues("30 2 * * *", "2026-03-28T12:00", 3)) == ["03-29 01:00", "03-30 00:30", "03-31 00:30"]
    assert list(dues("30 2 * * *", "2026-10-24T12:00", 3)) == ["10-25 00:30", "10-26 01:30", "10-27 01:30"]
    check_cron("*/5 * * * 1-5", "UTC")
    assert next_due("0 0 * * *", "UTC", datetime(2026, 1, 1, tzinfo=timezone.utc)) == datetime(
        2026, 1, 2, tzinfo=timezone.utc
    ), "after it, and not at it"
