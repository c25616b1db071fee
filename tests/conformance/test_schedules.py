"""Schedules put one task for each due time, whichever processes watch them or die."""

import re
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.tasks import Json, Worker, check_cron, next_due
from sqlsem.util.timing import DEFAULT, use


@pytest.fixture
def queue(connect, name):
    return connect().queue(name)


def nothing():
    """The function of the tasks here."""


def make_due(database, name, ago=0.0):
    """Move the schedule's next due time to ``ago`` seconds in the past."""
    due = database.later(database.now, -ago)
    if database.engine in ("sqlite", "mysql"):  # there, due times are whole numbers
        due = f"round({due} - 0.5)"
    database.rows(f"UPDATE {database.beside('schedule')} SET next_due = {due} WHERE schedule_name = ?", name)


def watch(channel, url, options, name):
    """A process that works on the queue without pauses."""
    with use(replace(DEFAULT, shortest_recovery=0.0, longest_recovery=0.0)):
        queue = sqlsem.connect(url, **options, grace=0.5).queue(name)
    channel.tell("ready")
    for task in queue.claim():
        task.finish()


def test_due_task_is_put_once_by_many_processes(database, connect, queue, name, threads):
    schedule = queue.schedule(
        "0 2 * * *", nothing, name=str(name), note="daily", max_attempts=3, time_limit=60, order=4
    )
    assert (schedule.name, schedule.cron, schedule.time_zone, schedule.last_due) == (name, "0 2 * * *", "UTC", None)
    assert schedule.next_due == next_due("0 2 * * *", "UTC", schedule.taken_at)
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
    tasks = queue.tasks()
    assert len(tasks) == 3
    for task in tasks:
        assert (task.kind, task.note, task.max_attempts, task.time_limit, task.order) == ("call", "daily", 3, 60.0, 4)
        assert task.put_by == schedule.put_by
    (after,) = connect().admin.schedules(str(name))
    assert after.next_due == next_due("0 2 * * *", "UTC", after.taken_at)
    assert after.last_due < after.taken_at


@pytest.mark.parametrize("given", [{}, {"on_failure": None}, {"on_failure": "stop"}])
def test_on_failure_left_out_is_the_default_of_the_queue(connect, name, given):
    """Also as None; alike for schedules and tasks."""
    queue = connect().queue(name, on_failure="continue")
    queue.put({}, **given)
    (task,) = queue.tasks()
    schedule = queue.schedule("0 2 * * *", {}, **given)
    assert task.on_failure == schedule.options.get("on_failure", "stop") == (given.get("on_failure") or "continue")


@pytest.mark.parametrize(("missed", "ago", "count"), [("one", 86400 * 3, 1), ("skip", 86400 * 3, 0), ("skip", 5, 1)])
def test_missed_runs_are_put_once_or_skipped(database, queue, name, missed, ago, count):
    """Missed runs give one task or none; a run that is only a little late is not missed."""
    queue.schedule("0 0 1 1 *", nothing, name=str(name), missed=missed)
    make_due(database, name, ago)
    Worker(queue, idle_exit=0).run()
    assert len(queue.tasks()) == count
    (after,) = queue.claiming.client.with_connection(lambda session: session.list_schedules(str(name), None))
    assert after.next_due > after.taken_at
    assert (after.last_due is not None) == bool(count)


def test_paused_and_removed(database, connect, queue, name):
    coordinator = connect()
    queue.schedule("0 2 * * *", nothing, name=str(name))
    coordinator.admin.pause_schedule(name)
    make_due(database, name)
    Worker(queue, idle_exit=0).run()
    assert queue.tasks() == []
    (paused,) = coordinator.admin.schedules(str(name))
    assert paused.paused_by is not None
    coordinator.admin.resume_schedule(name)
    Worker(queue, idle_exit=0).run()
    assert queue.tasks() == [], "what was due meanwhile is left out"
    (resumed,) = coordinator.admin.schedules(str(name))
    assert resumed.paused_at is None
    assert resumed.next_due > resumed.taken_at
    coordinator.admin.remove_schedule(name)
    assert coordinator.admin.schedules(str(name)) == []
    for call in (
        coordinator.admin.pause_schedule,
        coordinator.admin.resume_schedule,
        coordinator.admin.remove_schedule,
    ):
        with pytest.raises(sqlsem.NotHeld, match=f"There is no schedule '{name}'"):
            call(name)


def test_schedule_of_the_same_name_is_replaced(database, queue, name):
    queue.schedule("0 2 * * *", nothing, name=str(name))
    make_due(database, name)
    again = queue.schedule("0 2 * * *", nothing, name=str(name), note="new")
    assert again.next_due <= again.taken_at, "what is due is not forgotten"
    other = queue.schedule("0 3 * * *", nothing, name=str(name), time_zone="Asia/Tokyo")
    assert other.next_due > other.taken_at
    unnamed = queue.schedule("0 2 * * *", nothing)
    assert unnamed.name.startswith(f"{name}-")
    assert queue.schedule("0 4 * * *", nothing).name == unnamed.name, "of the same body"


def test_broken_schedule_does_not_stop_others(database, connect, queue, name, caplog):
    """With any broken schedule, the queue's other schedules put tasks, and its workers go on."""
    bad = name("a-bad-one")
    queue.schedule("0 2 * * *", nothing, name=bad)
    queue.schedule("0 2 * * *", nothing, name=str(name), note="good")
    database.rows(
        f"UPDATE {database.beside('schedule')} SET options = ? WHERE schedule_name = ?", '{"on_failure": "never"}', bad
    )
    for schedule_name in (bad, name):
        make_due(database, schedule_name)
    Worker(queue, idle_exit=0).run()
    assert [(task.note, task.status) for task in queue.tasks()] == [("good", "finished")]
    assert f"Schedule '{bad}' of " in caplog.text
    assert f"sqlsem schedules pause {bad}" in caplog.text
    (schedule_left,) = [schedule for schedule in connect().admin.schedules(str(name)) if schedule.name == bad]
    assert schedule_left.next_due <= schedule_left.taken_at, "it is tried again"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": 1e30}, "the priority of a task must be from -2147483648 to 2147483647, not 1"),
        ({"order": -(2**31) - 1}, "the order of a task must be from -2147483648 to 2147483647, not -2147483649"),
        ({"after_ms": -1}, "a task can wait from now to ten years from now, not -1 ms"),
        (
            {"backoff_ms": 300_001},
            "the pause before the next attempt at a task is from 0 to 300000 ms, not 300001",
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
    # (SQL Server uses one error number for every refusal of a routine.)
    with pytest.raises((sqlsem.ConfigurationError, sqlsem.Unavailable), match=re.escape(words)):
        session.save_schedule(str(name), str(name), "* * * * *", "UTC", "sql", "x", options, datetime.now(timezone.utc))
    session.close()
    assert connect().admin.schedules(str(name)) == []


def test_unique_tasks_do_not_pile_up(database, queue, name):
    queue.schedule("0 2 * * *", Json("x"), name=str(name), unique="k")
    other = name("replacing")
    queue.schedule("0 2 * * *", Json("y"), name=other, replace="r")
    for times in range(1, 4):
        make_due(database, name, 1000 * times)
        make_due(database, other, 1000 * times)
        queue.claiming.recover(now=True)
    assert len(queue.tasks("pending")) == 2
    assert len(queue.tasks("cancelled")) == 2


@pytest.mark.timeout(300)
def test_killed_scheduler_puts_all_or_nothing(spawn, database, queue, name):
    """After many kills each due time has one task."""
    queue.schedule("0 2 * * *", Json("x"), name=str(name))
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


@pytest.mark.parametrize("cron", ["", "x", "* * * *", "60 * * * *", "@never", "* * * * * *", "0 0 31 2 *", None, 5])
def test_invalid_cron_expression_is_refused(queue, cron):
    with pytest.raises(sqlsem.ConfigurationError, match=r"cron expression|never comes"):
        queue.schedule(cron, nothing)


def test_invalid_schedule_is_refused(queue):
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


UTC = timezone.utc
#: Next due times that a session refuses to save, and the message of the refusal.
NEVER_DUE = {
    "nothing": (None, "the next time of a schedule must be from 0001-01-03 to 9999-12-30"),
    "the first day": (datetime(1, 1, 1, 1, tzinfo=UTC), "the next time of a schedule must be from 0001-01-03"),
    "the last day": (datetime(9999, 12, 31, 1, tzinfo=UTC), "the next time of a schedule must be from 0001-01-03"),
}


def refused(call, words):
    """Expect a refusal. (SQL Server uses one error number for every refusal of a routine.)"""
    with pytest.raises((sqlsem.ConfigurationError, sqlsem.Unavailable), match=re.escape(words)):
        call()


@pytest.fixture
def session(database):
    session = database.session(grace=600)
    yield session
    session.close()


@pytest.mark.parametrize("case", NEVER_DUE)
def test_schedule_refuses_times_beyond_the_calendar(database, queue, session, name, case):
    due, words = NEVER_DUE[case]
    queue.schedule("0 2 * * *", nothing, name=str(name))
    make_due(database, name, 60)
    (before,) = session.list_schedules(str(name), None)
    refused(lambda: session.save_schedule(str(name), str(name), "* * * * *", "UTC", "sql", "x", {}, due), words)
    refused(lambda: session.set_schedule(str(name), "resume", due), words)
    refused(lambda: session.fire_schedule(str(name), before.next_due, before.next_due, due, True), words)
    (after,) = session.list_schedules(str(name), None)
    assert (after.next_due, after.last_due) == (before.next_due, before.last_due)


@pytest.mark.parametrize("text", ["infinity", "-infinity", "4000-01-01 BC", "20000-01-01"])
def test_schedule_refuses_times_of_postgresql_alone(database, queue, name, text, connect):
    """Clients can read such a time if a DBA wrote it into the row, and workers go on."""
    if database.engine != "postgresql":
        pytest.skip("other engines have no such times")
    other = name("other")
    with database.raw() as raw:
        for call in (
            "SELECT sqlsem.save_schedule(%(name)s, %(name)s, '* * * * *', 'UTC', 'sql', 'select 1', '{}', %(due)s)",
            "SELECT sqlsem.set_schedule(%(name)s, 'resume', %(due)s)",
            "SELECT sqlsem.fire_schedule(%(name)s, clock_timestamp(), clock_timestamp(), %(due)s, true)",
        ):
            queue.schedule("0 2 * * *", nothing, name=str(name))
            with pytest.raises(Exception, match="the next time of a schedule must be from 0001-01-03 to 9999-12-30"):
                raw.execute(call, {"name": str(name), "due": text})
        queue.schedule("0 2 * * *", nothing, name=other)
        make_due(database, other, 60)
        raw.execute("UPDATE sqlsem.schedule SET next_due = %s WHERE schedule_name = %s", (text, str(name)))
    Worker(queue, idle_exit=0).run()
    assert queue.counts().finished == 1, "the other one's"
    coordinator = connect()
    assert {schedule.name for schedule in coordinator.admin.schedules(str(name))} == {name, other}
    coordinator.admin.remove_schedule(str(name))


@pytest.mark.parametrize(
    ("cron", "zone", "words"),
    [
        ("* " * 128, "UTC", "a cron expression has 1 to 255 characters"),
        (" ", "UTC", "a cron expression has 1 to 255 characters"),
        ("* * * * *", "Mars/Olympus" * 8, "time zone"),
        ("* * * * *", "", "time zone"),
        ("* * * * *", "Europe/Berlin\n", "time zone"),
        ("* * * * *", "'; --", "time zone"),
    ],
)
def test_session_refuses_malformed_times_of_schedules(session, name, cron, zone, words):
    due = datetime.now(UTC)
    refused(lambda: session.save_schedule(str(name), str(name), cron, zone, "sql", "x", {}, due), words)
    assert session.list_schedules(str(name), None) == []


def test_schedule_refuses_a_zone_unknown_to_the_server(database, session, name):
    if database.engine != "postgresql":
        pytest.skip("other engines do not know the zones of the IANA database")
    words = "the database knows no time zone Mars/Olympus"
    due = datetime.now(UTC)
    refused(
        lambda: session.save_schedule(str(name), str(name), "* * * * *", "Mars/Olympus", "sql", "x", {}, due), words
    )


def test_schedule_refuses_a_next_time_that_has_passed(database, session, queue, name):
    """A client's wrong next due time must not put a task at every poll."""
    queue.schedule("0 2 * * *", nothing, name=str(name))
    make_due(database, name, 60)
    (schedule,) = session.list_schedules(str(name), None)
    for ago in (0.01, 1, 3600):
        following = schedule.taken_at - timedelta(seconds=ago)
        assert session.fire_schedule(str(name), schedule.next_due, schedule.next_due, following, True) == (False, None)
    assert queue.tasks() == []
    assert session.fire_schedule(
        str(name), schedule.next_due, schedule.next_due, schedule.taken_at + timedelta(hours=1), True
    )[0]
    assert len(queue.tasks()) == 1


def test_schedule_puts_no_task_when_a_library_looks_back(database, queue, name, monkeypatch, caplog):
    """The database asks whether the next time is later than its clock."""
    queue.schedule("0 2 * * *", nothing, name=str(name))
    make_due(database, name, 60)
    with monkeypatch.context() as patched:
        patched.setattr("sqlsem.tasks.schedules.next_due", lambda cron, zone, after: after - timedelta(minutes=35))
        for _ in range(5):
            queue.claiming.recover(now=True)
    assert queue.tasks() == []
    assert caplog.text.count("is not later than the database's clock") == 1
    queue.claiming.recover(now=True)
    assert len(queue.tasks()) == 1


def test_schedule_merges_a_time_that_comes_while_it_fires(database, queue, name, monkeypatch):
    """One task covers both due times, and the due time after them is saved."""
    queue.schedule("0 2 * * *", nothing, name=str(name))
    make_due(database, name, 60)
    passed = iter([datetime.now(UTC) - timedelta(minutes=1)])
    monkeypatch.setattr(
        "sqlsem.tasks.schedules.next_due", lambda *arguments: next(passed, None) or next_due(*arguments)
    )
    queue.claiming.recover(now=True)
    assert len(queue.tasks()) == 1
    (after,) = queue.claiming.client.with_connection(lambda session: session.list_schedules(str(name), None))
    assert after.next_due > after.taken_at


def test_worker_leaves_schedules_of_unknown_zones_to_others(database, connect, queue, name, monkeypatch, caplog):
    """The worker logs the unknown zone once, changes nothing and goes on; another host puts the task."""
    queue.schedule("0 2 * * *", nothing, name=str(name), time_zone="Europe/Berlin", note="zoned")
    other = name("other")
    queue.schedule("0 2 * * *", nothing, name=other, note="in UTC")
    for schedule_name in (name, other):
        make_due(database, schedule_name, 60)

    def missing(zone):
        raise KeyError(zone)

    with monkeypatch.context() as patched:
        patched.setattr("sqlsem.tasks.cron.ZoneInfo", missing)
        for _ in range(3):
            Worker(queue, idle_exit=0).run()
    assert [task.note for task in queue.tasks()] == ["in UTC"]
    assert caplog.text.count(f"Schedule '{name}' of ") == 1
    assert "is not understood by this host, which leaves it to others" in caplog.text
    Worker(connect().queue(name), idle_exit=0).run()
    assert sorted(task.note for task in queue.tasks()) == ["in UTC", "zoned"]


def test_schedule_notes_times_left_out_as_operations(database, connect, session, queue, name):
    """Skips and postponements by over a year are recorded as operations; only missed="skip" allows a skip."""
    queue.schedule("0 2 * * *", nothing, name=str(name))
    skipping = name("skipping")
    queue.schedule("0 2 * * *", nothing, name=skipping, missed="skip")
    for schedule_name, put, done, noted in (
        (name, False, False, []),
        (skipping, False, True, ["skip"]),
        (name, True, True, ["postpone", "skip"]),
    ):
        make_due(database, schedule_name, 60)
        (schedule,) = session.list_schedules(str(schedule_name), None)
        following = schedule.taken_at + timedelta(days=400 if put else 1)
        assert (
            session.fire_schedule(str(schedule_name), schedule.next_due, schedule.next_due, following, put)[0] == done
        )
        assert [each.action for each in connect().admin.operations(str(name))] == noted


def test_schedule_is_removed_without_a_look(database, connect, queue, name, monkeypatch):
    queue.schedule("0 2 * * *", nothing, name=str(name))
    coordinator = connect()
    with monkeypatch.context() as patched:
        module = f"sqlsem.engines.{'statements.tasks' if database.engine in ('sqlite', 'mysql') else 'routines'}"
        patched.setattr(f"{module}.read_options", lambda _: pytest.fail("it was listed"))
        coordinator.admin.pause_schedule(str(name))
        coordinator.admin.remove_schedule(str(name))
    assert coordinator.admin.schedules(str(name)) == []


@pytest.mark.parametrize("options", ["nonsense", "[]", "{" * 5000])
def test_worker_survives_schedule_options_that_are_no_json(database, connect, queue, name, options):
    if database.engine not in ("sqlite", "mysql"):
        pytest.skip("these servers keep JSON")
    queue.schedule("0 2 * * *", nothing, name=str(name))
    other = name("other")
    queue.schedule("0 2 * * *", nothing, name=other)
    database.rows("UPDATE sqlsem_schedule SET options = ? WHERE schedule_name = ?", options, str(name))
    for schedule_name in (name, other):
        make_due(database, schedule_name, 60)
    Worker(queue, idle_exit=0).run()
    assert queue.counts().finished >= 1, "the other one's"
    assert len(connect().admin.schedules(str(name))) == 2
    connect().admin.remove_schedule(str(name))


def test_zones_and_their_clocks():
    """A local time that does not exist is due when clocks go forward; a repeated one is due once."""
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
