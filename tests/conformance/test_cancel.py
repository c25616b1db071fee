"""A worker cancels its own running tasks, and ends a task at its time limit."""

import contextlib
import os
import threading
import time

import pytest
from support import PATIENCE, drained, remains, until

import sqlsem
from sqlsem.api.admin import Admin
from sqlsem.tasks import Json, Worker
from sqlsem.values.tasks import End

pytestmark = pytest.mark.timing(0.2)
#: Reports of the functions that run in this process.
told: list[str] = []
may_go = threading.Event()

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")


@pytest.fixture(autouse=True)
def nothing_told():
    told.clear()
    may_go.clear()


@pytest.fixture
def queue(connect, name):
    return connect().queue(name)


def compute():
    """Run until interrupted."""
    try:
        told.append("began")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            sum(range(100))
    except TimeoutError:
        told.append("an Exception")
    finally:
        told.append("cleaned up")


def swallow():
    """Swallow the interrupt and end without an error."""
    with contextlib.suppress(sqlsem.TaskInterrupted):
        told.append("began")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            sum(range(100))
    return "done"


def deaf():
    """Block in a system call, which no interrupt reaches."""
    told.append("began")
    may_go.wait(PATIENCE)
    time.sleep(0)
    told.append("went on")


def quick(number):
    told.append(f"quick {number}")


def endless(queue, *, writes=False):
    """Return SQL that does not end by itself. (On SQLite it keeps the write lock unless it begins a transaction.)"""
    engine = queue.claiming.client.engine.name
    if engine == "postgresql":
        return sqlsem.Sql("SELECT pg_sleep(600)")
    if engine == "mysql":
        return sqlsem.Sql("SELECT SLEEP(600)")
    if engine == "mssql":
        return sqlsem.Sql("WAITFOR DELAY '00:10:00'")
    text = "WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT count(*) FROM c"
    return sqlsem.Sql(text if writes else f"BEGIN; {text}; COMMIT")


@pytest.fixture
def running(queue, threads):
    """A worker that runs during the test."""
    worker = Worker(queue, threads=2)
    threads.start(worker.run)
    yield worker
    worker.stop()
    threads.join()


def status(queue, number):
    return {task.task_id: task.status for task in queue.tasks(maximum=1000)}[number]


def cancel(connect, number):
    """Cancel from another client; the call reports that the task still runs."""
    assert connect().admin.cancel_task(number) is False


def end_of(queue, number, outcome="cancelled"):
    until(lambda: status(queue, number) not in ("pending", "running"))
    (attempt,) = queue.log(number)
    assert (status(queue, number), attempt.outcome) == (outcome, outcome)
    return attempt.error


def test_cli_reports_the_outcome_of_cancel(database, queue):
    from click.testing import CliRunner

    from sqlsem import cli

    waits, runs = queue.put(1, order=1), queue.put(2)
    with queue.try_claim():
        arguments = ["--url", database.url, *schema(database), "tasks", "cancel", str(waits), str(runs)]
        result = CliRunner().invoke(cli.main, arguments, prog_name="sqlsem")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Task {waits} was cancelled.\nTask {runs} runs; its worker was notified to end it.\n"
    assert status(queue, runs) == "finished"


def schema(database):
    return [word for name, value in database.options.items() for word in (f"--{name}", str(value))]


def me(queue):
    (entry,) = queue.tasks("cancelled")
    assert entry.cancel_asked_by
    assert entry.cancel_asked_at is not None
    return entry.cancel_asked_by


def test_sql_is_ended(connect, queue, running):
    number = queue.put(endless(queue), max_attempts=3)
    until(lambda: status(queue, number) == "running")
    time.sleep(0.3)
    cancel(connect, number)
    error = end_of(queue, number)
    assert error.startswith(f"cancelled by {me(queue)}\n"), "the log names the login that cancelled"
    queue.wait(PATIENCE)
    after = queue.put(sqlsem.Call(quick, 1))
    until(lambda: status(queue, after) == "finished")


@posix
def test_cancelled_command_ends_with_its_children(connect, queue, running, tmp_path):
    file = tmp_path / "pid"
    number = queue.put(sqlsem.Shell(f"(echo $$ > {file}.new; mv {file}.new {file}; sleep 600); true"))
    until(file.exists)
    cancel(connect, number)
    assert f"cancelled by {me_of(queue, number)}" in end_of(queue, number)
    with pytest.raises(ProcessLookupError):
        until(lambda: os.killpg(int(file.read_text()), 0), "the end of its group")


def me_of(queue, number):
    until(lambda: status(queue, number) == "cancelled")
    return me(queue)


@pytest.mark.timing(1.0)
def test_a_function_is_interrupted(connect, queue, running):
    number = queue.put(compute)
    until(lambda: told == ["began"])
    cancel(connect, number)
    error = end_of(queue, number)
    assert "TaskInterrupted" in error
    assert told == ["began", "cleaned up"]
    for n in range(20):
        queue.put(sqlsem.Call(quick, n))
    queue.wait(PATIENCE)
    assert len(told) == 22, "nothing strikes what comes next"


def test_cancelled_function_may_still_finish(connect, queue, running):
    number = queue.put(swallow)
    until(lambda: told == ["began"])
    cancel(connect, number)
    end_of(queue, number, "finished")


def test_a_function_in_a_call_to_the_system_runs_on(connect, queue, running):
    """The worker keeps a cancelled task for as long as its function runs."""
    number = queue.put(deaf)
    until(lambda: told == ["began"])
    cancel(connect, number)
    cancel(connect, number)
    other = connect().queue(queue.name)
    remains(lambda: status(queue, number) == "running" and other.try_claim() is None, 0.6, "it is the worker's")
    may_go.set()
    end_of(queue, number)
    assert told == ["began"]


def test_claiming_program_is_notified_of_cancel(connect, queue):
    number = queue.put(Json("x"), max_attempts=5)
    task = queue.try_claim()
    cancel(connect, number)
    assert task.stop_event.wait(PATIENCE)
    assert task.why_stopped.startswith("cancelled by ")
    remains(lambda: status(queue, number) == "running", 0.5, "the task is not taken away")
    with pytest.raises(RuntimeError), task:
        raise RuntimeError("I stop")
    error = end_of(queue, number)
    assert error.startswith(f"cancelled by {me(queue)}\nRuntimeError: I stop")


@pytest.mark.parametrize("outcome", ["failed", "returned", "finished"])
def test_cancel_ends_task_of_worker_that_never_polls(connect, queue, outcome):
    """A cancelled task ends as cancelled, unless its worker has finished it."""
    number = queue.put(Json("x"), max_attempts=5)
    task = queue.try_claim()
    cancel(connect, number)
    call = queue.claiming.client.member.call
    end = End(number, 1, outcome, None, "no" if outcome == "failed" else None)
    answer = call("end", lambda session, member: session.end_task(member, end))
    assert answer == ("finished" if outcome == "finished" else "cancelled")
    again = End(number, 1, outcome)
    assert call("end", lambda session, member: session.end_task(member, again)) == answer, "may be repeated"
    assert queue.try_claim() is None
    task.mark_ended()


def hold(channel, url, options, name):
    task = sqlsem.connect(url, **options, grace=0.3).queue(name).try_claim()
    channel.tell("claimed", id=task.id)
    channel.ask()


def test_cancelled_task_of_dead_worker_is_not_rerun(spawn, connect, queue, name):
    number = queue.put(Json("x"))
    child = spawn(hold, name=str(name))
    child.expect("claimed")
    child.pause()
    cancel(connect, number)
    remains(lambda: status(queue, number) in ("running", "lost"), 1, "a worker that sleeps, lives")
    child.kill()
    until(lambda: drained(queue, 0.1) and status(queue, number) == "cancelled")
    (attempt,) = queue.log(number)
    assert attempt.outcome == "lost"
    assert queue.tasks()[0].error == f"cancelled by {me(queue)}\nits worker died"
    Admin(queue.claiming.client).retry_task(number)
    assert queue.tasks()[0].cancel_asked_by is None
    with queue.try_claim() as task:
        assert task.attempt == 2
        time.sleep(0.5)
        assert not task.stop_event.is_set(), "what was asked of the last attempt is not asked of this one"


def test_pending_task_is_cancelled_at_once(connect, queue):
    coordinator = connect()
    pending, failed = queue.put(1, order=1), queue.put(2)
    queue.try_claim().fail("no")
    assert coordinator.admin.cancel_task(pending) is True
    assert coordinator.admin.cancel_task(failed) is True
    assert [task.cancel_asked_by is not None for task in queue.tasks("cancelled")] == [True, True]
    for number, why in ((pending, "it is not pending, running or failed"), (10**9, "there is no such task")):
        with pytest.raises(sqlsem.NotHeld, match=f"Cannot cancel task {number}: {why}"):
            coordinator.admin.cancel_task(number)


# -- limits in time ---------------------------------------------------------------------------------------------------


def test_sql_over_its_time_limit_fails(queue, running):
    number = queue.put(endless(queue, writes=True), time_limit=1, max_attempts=2, backoff=0)
    until(lambda: status(queue, number) == "failed")
    first, second = queue.log(number)
    assert (first.outcome, second.outcome) == ("failed", "failed"), "it is tried again as any other"
    for attempt in (first, second):
        assert attempt.error.startswith("It ran for longer than its time limit of 1 s, and was ended\n")
        assert 0.9 < attempt.seconds < 1 + PATIENCE
    with pytest.raises(sqlsem.TaskFailed, match="time limit of 1 s"):
        queue.wait(PATIENCE)


@posix
def test_command_over_its_time_limit_fails(queue, running):
    number = queue.put(sqlsem.Shell("sleep 600"), time_limit="1s", on_failure="continue")
    error = end_of(queue, number, "failed")
    assert error.startswith(
        "It ran for longer than its time limit of 1 s, and was ended\nThe command ended with status"
    )


def test_function_over_its_time_limit_fails(queue, running):
    number = queue.put(compute, time_limit=6, on_failure="continue")  # long enough for the function to begin
    assert "time limit of 6 s" in end_of(queue, number, "failed")
    assert told == ["began", "cleaned up"]


def test_a_limit_counts_from_the_beginning_of_each_attempt(queue, running):
    """Tasks that stay below their time limit are not interrupted."""
    queue.put(sqlsem.Call(time.sleep, 1.6), time_limit=30)
    numbers = queue.put_many([sqlsem.Call(quick, n) for n in range(50)], time_limit=60)
    queue.wait(PATIENCE)
    assert {status(queue, number) for number in numbers} == {"finished"}
    assert {task.time_limit for task in queue.tasks("finished")} == {30.0, 60.0}


def test_claiming_program_is_notified_of_its_time_limit(queue):
    queue.put(Json("x"), time_limit=0.7)
    with queue.try_claim() as task:
        assert task.stop_event.wait(PATIENCE)
        assert task.why_stopped == "it ran for longer than its time limit of 0.7 s"
    assert status(queue, task.id) == "finished"


def test_invalid_time_limit_is_refused(queue):
    for limit in (0, -1, "soon", float("nan"), 3e7):
        with pytest.raises(sqlsem.ConfigurationError, match="time_limit"):
            queue.put(1, time_limit=limit)


@pytest.mark.engines("sqlite", "postgresql")
def test_cancel_poll_costs_a_statement_per_second(queue):
    """Short tasks and an idle worker cost no statement."""
    client = queue.claiming.client
    polled = []
    client.member.call("look", lambda session, _: None)
    session = client.member.main.session
    look, times = session.task_controls, queue.claiming.client.timing

    def watched(member, numbers):
        polled.append(sorted(numbers))
        return look(member, numbers)

    session.task_controls = watched

    def were_short():
        """Run two tasks; return False if a slow machine made them long."""
        polled.clear()
        queue.put_many(range(2))
        began = time.monotonic()
        for _ in range(2):
            queue.try_claim().finish()
        if time.monotonic() - began > times.uncancelled_run / 2:
            return False
        time.sleep(2 * times.cancellation_check)
        assert polled == []
        return True

    until(were_short, "two short tasks")
    queue.put_many(range(3))
    began = time.monotonic()
    tasks = [queue.try_claim() for _ in range(3)]
    time.sleep(4 * times.cancellation_check)
    until(lambda: polled and polled[-1] == sorted(task.id for task in tasks), "all of them are asked about at a time")
    assert len(polled) <= 1 + (time.monotonic() - began) / times.cancellation_check
    for task in tasks:
        task.finish()
    count = len(polled)
    time.sleep(5 * times.cancellation_check)
    assert len(polled) <= count + 1, "a look may have been on its way"
    del session.task_controls
