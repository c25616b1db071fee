"""The work queue on every engine: each task is done once, in order, and returns to the queue if its worker dies."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from datetime import timedelta

import psutil
import pytest
from support import PATIENCE, remains, until

import sqlsem
from sqlsem.api.admin import Admin
from sqlsem.bodies import END_SECONDS as ENDING
from sqlsem.tasks import Json, Task, Worker
from sqlsem.values.tasks import End, NewTask

#: Set when the late task of the reference load was put.
late = threading.Event()
#: Two tasks meet here.
both = threading.Barrier(2)
#: Filled by tasks that run in this process.
done: list[tuple[float, float, str]] = []


def note(word, seconds=0.0):
    began = time.monotonic()
    time.sleep(seconds)
    done.append((began, time.monotonic(), word))
    return {"word": word}


def meet(word):
    """Run until another task of this kind runs."""
    both.wait(PATIENCE)
    note(word)


def note_late(word):
    """Run until the late task was put."""
    assert late.wait(PATIENCE)
    return note(word, 0.2)


def fail(word):
    raise RuntimeError(f"cannot {word}")


def odd(field):
    if field == "result":
        return "half \ud800 \0"
    if field == "error":
        raise SystemExit("half \ud800 and \0")

    async def nothing():
        return 1

    return nothing()


def divide(dividend, other):
    return dividend / other


def leave():
    raise SystemExit(3)


def overlap(span, other):
    return span[0] < other[1] and other[0] < span[1]


@pytest.fixture(autouse=True)
def nothing_done():
    done.clear()
    late.clear()


@pytest.fixture
def queue(connect, name):
    return connect().queue(name)


def states(queue):
    return [(entry.task_id, entry.status) for entry in sorted(queue.tasks(), key=lambda entry: entry.task_id)]


# -- putting and claiming ---------------------------------------------------------------------------------------------


@pytest.mark.quiet
def test_first_come_first_served_within_an_order(queue):
    late = queue.put(Json("late"), order=5)
    numbers = queue.put_many([Json("a"), Json("b"), Json("c")], order=-3)
    middle = queue.put(Json("middle"))
    assert numbers == sorted(numbers)
    claimed = []
    for task in queue.claim(wait=0):
        with task:
            claimed.append((task.id, task.body, task.order))
    assert claimed == [
        *zip(numbers, "abc", [-3] * 3, strict=True),
        (middle, "middle", 0),
        (late, "late", 5),
    ]
    assert queue.state().done
    queue.wait(timeout=PATIENCE)


@pytest.mark.parametrize(
    "body",
    [None, 0, "", "täsk 'quoted' \"twice\" \\ 🐘\n\t", {"a": [1, 2.5, None, True], "b": {"c": "%s ? :x"}}, "x" * 2**20],
)
def test_any_json_value_comes_back_as_it_was_put(queue, body):
    queue.put(Json(body), note='what\'s "this"')
    with queue.try_claim() as task:
        assert task.body == body
        assert task.kind == "json"
        assert task.note == 'what\'s "this"'
        task.result = body
    (attempt,) = queue.log(task.id)
    assert attempt.outcome == "finished"


def test_queues_have_nothing_to_do_with_each_other(connect, name):
    coordinator = connect()
    first, other, twin = coordinator.queue(name("q")), coordinator.queue(name("other")), coordinator.queue(name("Q"))
    first.put(1, order=-1)
    other.put(2, order=7)
    twin.put(3)
    for queue, body in ((other, 2), (twin, 3), (first, 1)):
        with queue.try_claim() as task:
            assert task.body == body
        assert queue.try_claim() is None


def test_claim_waits_for_a_put_of_another_process(connect, name, threads):
    taker, giver = connect().queue(name), connect().queue(name)
    bodies = []

    def take():
        for task in taker.claim(wait=PATIENCE):
            with task:
                bodies.append(task.body)
            if task.body == "last":
                return

    threads.start(take)
    for body in ("first", "last"):
        giver.put(Json(body))
        until(lambda body=body: body in bodies)
    threads.join()
    assert bodies == ["first", "last"]


def test_claim_ends_when_nothing_comes(queue):
    began = time.monotonic()
    assert list(queue.claim(wait=0.3)) == []
    assert time.monotonic() - began >= 0.3


def test_delayed_task_is_claimed_when_due(queue):
    queue.put(Json("later"), after=timedelta(seconds=1.2))
    queue.put(Json("now"))
    began = time.monotonic()
    bodies = []
    for task in queue.claim(wait=PATIENCE):
        with task:
            bodies.append(task.body)
        if len(bodies) == 2:
            break
    assert bodies == ["now", "later"]
    assert time.monotonic() - began >= 1.0


def test_a_clock_that_stepped_back_holds_nothing_up(database, queue):
    """A clock that stepped back by an hour after a put delays no task."""
    queue.put(Json("at once"))
    queue.put(Json("later"), after=0.5)
    failed = queue.put(Json("failed"), order=1)
    with pytest.raises(ValueError, match="no"), queue.try_claim() as task:
        assert task.body == "at once"
        raise ValueError("no")
    Admin(queue.claiming.client).retry_task(task.id)
    move_clock(database, queue, -3600)
    with queue.try_claim() as task:
        assert task.body == "at once"
    assert queue.try_claim() is None, "what is to wait for its time waits"
    move_clock(database, queue, 3600)
    for body in ("later", "failed"):
        with next(queue.claim(wait=PATIENCE)) as task:
            assert task.body == body
    assert task.id == failed


def move_clock(database, queue, seconds):
    """Move the tasks' times, as if the clock had been moved after the put."""
    put_at, ready_at = database.later("put_at", -seconds), database.later("ready_at", -seconds)
    database.rows(
        f"UPDATE {database.beside('task')} SET put_at = {put_at}, ready_at = {ready_at} WHERE queue_name = ?",
        queue.name,
    )


def test_bulk_put_is_split_into_portions(queue):
    """A put is split, as one statement of hundreds of megabytes would block heartbeats and cost the connection."""
    queue.state()
    session = queue.claiming.client.member.main.session
    put, portions = session.put_tasks, []

    def watch(name, uid, tasks):
        portions.append([len(task.body) for task in tasks])
        return put(name, uid, tasks)

    session.put_tasks = watch
    large = queue.put_many([Json("x" * 1_500_000)] * 5 + [Json("y" * 5_000_000), Json("z")])
    assert [len(some) for some in portions] == [2, 2, 1, 1, 1]
    small = queue.put_many(range(1200))
    assert [len(some) for some in portions[5:]] == [500, 500, 200]
    assert [*large, *small] == sorted(entry.task_id for entry in queue.tasks(maximum=2000))


@pytest.mark.quiet
def test_wait_follows_the_queue(connect, queue, name, threads):
    other = connect().queue(name)
    queue.wait(0)
    queue.put(1)
    with pytest.raises(sqlsem.Timeout, match=rf"{name}.* still has work after 0.1 s; see: sqlsem tasks"):
        queue.wait(0.1)
    waited = threading.Event()
    threads.start(lambda: (queue.wait(PATIENCE), waited.set()))
    with other.try_claim():
        remains(lambda: not waited.is_set(), 0.2, "waited while it runs")
    assert waited.wait(PATIENCE)
    threads.join()


# -- how attempts end -------------------------------------------------------------------------------------------------


def test_error_is_stored_and_reraised(queue):
    number = queue.put(Json("x"))
    with pytest.raises(ZeroDivisionError), queue.try_claim():
        divide(1, 0)
    (entry,) = queue.tasks()
    assert (entry.status, entry.attempt, entry.failures) == ("failed", 1, 1)
    assert entry.error.startswith("ZeroDivisionError: division by zero")
    assert "test_tasks.py" in entry.error
    (attempt,) = queue.log(number)
    assert (attempt.outcome, attempt.error) == ("failed", entry.error)
    with pytest.raises(
        sqlsem.TaskFailed, match=rf"Task {number} .*division by zero.*sqlsem tasks log {number}"
    ) as caught:
        queue.wait(PATIENCE)
    assert caught.value.task_id == number


def test_an_interrupt_gives_the_task_back_at_once(queue):
    queue.put(Json("x"))
    with pytest.raises(KeyboardInterrupt), queue.try_claim():
        raise KeyboardInterrupt
    with queue.try_claim() as task:
        assert task.attempt == 2
    assert [attempt.outcome for attempt in queue.log(task.id)] == ["returned", "finished"]


def test_tried_again_with_growing_pauses(queue):
    number = queue.put(Json("x"), max_attempts=3, backoff=0.2)
    ends = []
    for task in queue.claim(wait=PATIENCE):
        with pytest.raises(RuntimeError), task:
            ends.append(time.monotonic())
            raise RuntimeError(f"attempt {task.attempt}")
        if len(ends) == 3:
            break
    assert ends[1] - ends[0] >= 0.09
    assert ends[2] - ends[1] >= 0.19
    assert states(queue) == [(number, "failed")]
    assert [(run.attempt, run.outcome, run.error.partition("\n")[0]) for run in queue.log(number)] == [
        (n, "failed", f"RuntimeError: attempt {n}") for n in (1, 2, 3)
    ]
    assert queue.try_claim() is None


def test_interrupted_claim_is_returned(connect, name):
    """A claim without a block is returned, as after an interrupt between the claim and its block."""
    queue = connect(grace=1).queue(name)
    queue.put(1)
    task = queue.try_claim()
    assert queue.try_claim() is None
    time.sleep(2 * queue.claiming.client.timing.cancellation_check)  # the cancellation monitor must keep no reference
    del task
    attempts = []
    for again in queue.claim(wait=PATIENCE):
        with again:
            attempts.append(again.attempt)
        break
    assert attempts == [2]


def test_a_task_that_was_never_whole_is_dropped_in_silence(queue, monkeypatch):
    """A task whose constructor was interrupted is dropped without an error."""
    struck = []
    monkeypatch.setattr(sys, "unraisablehook", struck.append)
    queue.state()
    with pytest.raises(AttributeError):
        Task(queue.claiming.client, queue.name, object(), "uid")
    Task.__new__(Task)
    assert struck == []
    assert not queue.claiming.client.member.deferred_calls


def test_task_is_ended_once(queue):
    queue.put(1)
    task = queue.try_claim()
    task.finish({"rows": 3})
    for again in (task.finish, task.release, lambda: task.fail("x")):
        with pytest.raises(sqlsem.NotHeld, match=f"Task {task.id} was ended before"):
            again()
    (attempt,) = queue.log(task.id)
    assert attempt.result == '{"rows": 3}'


def test_loop_without_ends_is_warned_of(queue):
    queue.put_many([1, 2])
    with pytest.raises(sqlsem.NotHeld, match="use 'with task:'"):
        for _ in queue.claim(wait=0):
            pass
    assert [status for _, status in states(queue)] == ["pending", "pending"]


def test_repeated_calls_change_nothing(database, connect, queue, name):
    """Calls repeated after a lost answer change nothing."""
    queue.put(1)
    coordinator = connect()
    member = coordinator.client.member
    member.heartbeat()
    with contextlib.closing(database.session()) as session:
        me = member.member_id
        twins = [
            session.put_tasks(name("twice"), "uid-of-" + name, [NewTask("json", "7"), NewTask("json", "8")])
            for _ in "ab"
        ]
        assert twins[0] == twins[1]
        assert len(coordinator.admin.tasks(name("twice"))) == 2
        first = session.claim_task(me, name, "t", "claim-1", False)
        assert session.claim_task(me, name, "t", "claim-1", True) == first
        assert session.claim_task(me, name, "t", "claim-2", False) is None
        end = End(first.task_id, first.attempt, "finished", "1")
        assert session.end_task(me, end) == "finished"
        assert session.end_task(me, end) == "finished"
        assert session.end_task(me, End(first.task_id, first.attempt, "failed")) is None
        assert session.end_task(me, End(first.task_id, first.attempt + 1, "finished")) is None
        queue.put(2)
        second = session.claim_task(me, name, "t", "claim-3", False)
        assert session.return_claim(me, name, "claim-3") == 1
        assert session.return_claim(me, name, "claim-3") == 0
        third = session.claim_task(me, name, "t", "claim-4", False)
        assert (third.task_id, third.attempt) == (second.task_id, second.attempt + 1)
        assert session.end_task(me, End(third.task_id, second.attempt, "finished")) is None, "an attempt that is over"
        assert session.end_task(me, End(third.task_id, third.attempt, "finished")) == "finished"
    assert [attempt.outcome for attempt in coordinator.admin.attempts(first.task_id)] == ["finished"]


# -- operators --------------------------------------------------------------------------------------------------------


def test_retry_and_cancel(connect, queue):
    coordinator = connect()
    failed_id, cancelled_id, three = queue.put_many([1, 2, 3])
    with pytest.raises(ValueError, match="no"), queue.try_claim():
        raise ValueError("no")
    with pytest.raises(sqlsem.NotHeld, match=f"Cannot retry task {cancelled_id}: it is not failed or cancelled"):
        coordinator.admin.retry_task(cancelled_id)
    coordinator.admin.cancel_task(cancelled_id)
    with queue.try_claim() as task:
        assert task.id == three
        with pytest.raises(sqlsem.NotHeld, match=f"Cannot retry task {three}: it runs"):
            coordinator.admin.retry_task(three)
    coordinator.admin.retry_task(failed_id)
    coordinator.admin.retry_task(cancelled_id)
    for number in (failed_id, cancelled_id):
        with queue.try_claim() as task:
            assert task.id == number
    with pytest.raises(sqlsem.NotHeld, match="there is no such task"):
        coordinator.admin.cancel_task(10**9)
    queue.wait(PATIENCE)


# -- stages -----------------------------------------------------------------------------------------------------------


def test_the_reference_load(queue, connect, name, threads):
    """Four tasks of order 100, two of 200, one of 300, two of 400, one of 500, in five threads."""
    load = {100: 4, 200: 2, 300: 1, 400: 2, 500: 1}
    for order, count in reversed(load.items()):
        call = sqlsem.Call(note_late, "100") if order == 100 else sqlsem.Call(note, str(order), 0.4)
        queue.put_many([call] * count, order=order)
    worker = Worker(queue, threads=5, idle_exit=0.5)
    threads.start(worker.run)
    until(lambda: queue.state().running)
    connect().queue(name).put(sqlsem.Call(note, "100", 0.1), order=100)  # late, to a stage that still runs
    late.set()
    threads.join()
    assert worker.finished == 11
    spans = {order: [span for span in done if span[2] == str(order)] for order in load}
    assert {order: len(of_order) for order, of_order in spans.items()} == {**load, 100: 5}
    for lower, higher in zip(load, list(load)[1:], strict=False):
        assert max(end for _, end, _ in spans[lower]) <= min(began for began, _, _ in spans[higher])
    first, second = spans[400]
    assert overlap(first, second), "tasks of one order run side by side"


def test_a_failed_task_stops_later_orders(queue):
    first = queue.put(sqlsem.Call(fail, "load"), order=100)
    queue.put(sqlsem.Call(note, "beside"), order=100)
    queue.put(sqlsem.Call(note, "after"), order=200)
    worker = Worker(queue, threads=2, idle_exit=0.3)
    worker.run()
    assert (worker.finished, worker.failed) == (1, 1)
    assert [word for _, _, word in done] == ["beside"]
    assert queue.state().stuck
    with pytest.raises(sqlsem.TaskFailed, match="cannot load"):
        queue.wait(PATIENCE)
    Admin(queue.claiming.client).cancel_task(first)
    Worker(queue, idle_exit=0).run()
    assert [word for _, _, word in done] == ["beside", "after"]
    queue.wait(PATIENCE)


def test_failed_task_with_continue_blocks_no_order(connect, name):
    queue = connect().queue(name, on_failure="continue")
    queue.put(sqlsem.Call(fail, "load"), order=100)
    queue.put(sqlsem.Call(note, "after"), order=200)
    Worker(queue, idle_exit=0).run()
    assert [word for _, _, word in done] == ["after"]
    queue.wait(PATIENCE)
    assert [status for _, status in states(queue)] == ["failed", "finished"]


def test_a_task_to_be_tried_again_holds_up_later_orders(queue):
    queue.put(1, max_attempts=2, backoff=0.5)
    queue.put(2, order=1)
    with pytest.raises(ValueError, match="once"), queue.try_claim():
        raise ValueError("once")
    assert queue.try_claim() is None
    bodies = []
    for task in queue.claim(wait=PATIENCE):
        with task:
            bodies.append(task.body)
        if len(bodies) == 2:
            break
    assert bodies == [1, 2]


def test_the_next_order_waits_for_other_processes_too(connect, name):
    queue, other = connect().queue(name), connect().queue(name)
    queue.put_many([1, 2])
    queue.put(3, order=1)
    first, second = queue.try_claim(), other.try_claim()
    first.finish()
    assert queue.try_claim() is None
    assert other.try_claim() is None
    second.finish()
    with other.try_claim() as task:
        assert task.body == 3


# -- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.quiet
def test_two_workers_and_ten_tasks(connect, name, threads):
    """The ten tasks run as five pairs that start together: each task ends when another one runs."""
    queue = connect().queue(name)
    numbers = queue.put_many([sqlsem.Call(meet, str(n)) for n in range(10)])
    workers = [Worker(connect().queue(name)) for _ in range(2)]
    for worker in workers:
        threads.start(worker.run)
    queue.wait(PATIENCE)
    for worker in workers:
        worker.stop()
    threads.join()
    assert [worker.finished for worker in workers] == [5, 5]
    assert Counter(word for _, _, word in done) == Counter(map(str, range(10)))
    members = set()
    for number in numbers:
        *earlier, attempt = queue.log(number)
        assert {run.outcome for run in earlier} <= {"returned"}, "claimed ahead, while the worker had a longer task"
        assert attempt.outcome == "finished"
        assert attempt.host
        assert attempt.pid
        assert attempt.started_at <= attempt.ended_at
        assert 0 <= attempt.seconds < PATIENCE
        members.add(attempt.member_id)
    assert len(members) == 2


def test_worker_runs_every_kind_of_task(database, connect, queue, tmp_path):
    file = tmp_path / "made"
    queue.put(sqlsem.Shell(f"echo it is made; touch '{file}'"))
    queue.put(sqlsem.Call(note, "ünïcode"))
    queue.put(note, max_attempts=1)  # the call lacks an argument
    queue.put(sqlsem.Sql("SELECT 1"))
    queue.put(sqlsem.Sql("SELECT * FROM no_such_table"))
    queue.put(sqlsem.Shell("echo bad luck; exit 7"))
    queue.put(sqlsem.Call("no_such_module:function"))
    queue.put(sqlsem.Call(leave))
    queue.put({"json": "is for those who claim"})
    worker = Worker(queue, threads=2, idle_exit=0)
    worker.run()
    assert (worker.finished, worker.failed) == (3, 6)
    assert file.exists()
    entries = {entry.task_id: entry for entry in queue.tasks()}
    ended = [entries[number] for number in sorted(entries)]
    assert [entry.status for entry in ended] == ["finished"] * 2 + ["failed", "finished"] + ["failed"] * 5
    assert ended[0].result == "it is made\n"
    assert ended[1].result == '{"word": "ünïcode"}'
    for entry, words in zip(
        [entry for entry in ended if entry.error],
        ["TypeError", "no_such_table", "status 7: bad luck", "no_such_module", "SystemExit", "kind json"],
        strict=True,
    ):
        assert words in entry.error


@pytest.fixture
def table(database, name):
    table = f"made_by_{name}"
    with database.raw() as raw:
        raw.execute(f"CREATE TABLE {table} (n integer NOT NULL)")
    yield table
    with database.raw() as raw:
        raw.execute(f"DROP TABLE {table}")


def test_sql_is_all_or_nothing(database, queue, table):
    queue.put(sqlsem.Sql(f"INSERT INTO {table} VALUES (1); INSERT INTO {table} VALUES (2);"))
    queue.put(sqlsem.Sql(f"INSERT INTO {table} VALUES (3); INSERT INTO {table} VALUES (NULL);"))
    Worker(queue, idle_exit=0).run()
    assert [status for _, status in states(queue)] == ["finished", "failed"]
    assert sorted(row[0] for row in database.rows(f"SELECT n FROM {table}")) == [1, 2]


def test_unstorable_result_does_not_end_the_worker(queue):
    queue.put(sqlsem.Call(odd, "result"))
    queue.put(sqlsem.Call(odd, "error"))
    queue.put(sqlsem.Call(odd, "coroutine"))
    queue.put(sqlsem.Call(note, "fine"))
    worker = Worker(queue, idle_exit=0)
    worker.run()
    assert (worker.finished, worker.failed) == (2, 2)
    assert [status for _, status in states(queue)] == ["finished", "failed", "failed", "finished"]


def test_lost_claim_of_a_living_member_is_returned(connect, name):
    """The worker thought its claim lost during an outage, but the database did not remove the member."""
    queue = connect(grace=2).queue(name)
    queue.put(1)
    task = queue.try_claim()
    queue.claiming.client.mark_lost(None, "nothing was heard")
    with pytest.raises(sqlsem.LockLost, match=f"task {task.id}"):
        task.finish()
    for again in queue.claim(wait=PATIENCE):
        with again:
            assert again.attempt == 2
        break


@pytest.mark.engines("sqlite", "postgresql")
def test_sql_with_transactions_of_its_own(database, queue, table):
    queue.put(sqlsem.Sql(f"BEGIN; INSERT INTO {table} VALUES (1); COMMIT;"))
    queue.put(sqlsem.Sql(f"-- why\nBEGIN; INSERT INTO {table} VALUES (2);"))
    queue.put(sqlsem.Sql(f"INSERT INTO {table} VALUES (3); COMMIT; INSERT INTO {table} VALUES (4)"))
    Worker(queue, idle_exit=0).run()
    assert [status for _, status in states(queue)] == ["finished", "failed", "finished"]
    assert sorted(row[0] for row in database.rows(f"SELECT n FROM {table}")) == [1, 3, 4]


def test_a_worker_is_stopped_in_order(queue, threads):
    queue.put_many([sqlsem.Call(note_late, str(n)) for n in range(4)])
    worker = Worker(queue, threads=2)
    threads.start(worker.run)
    until(lambda: len(worker.running) == 2)
    worker.stop()
    late.set()
    threads.join()
    assert len(done) == 2
    assert Counter(status for _, status in states(queue)) == {"finished": 2, "pending": 2}


def working(worker):
    thread = threading.Thread(target=worker.run)
    thread.start()
    return thread


def ended(pid):
    """True if the process has ended, also if no parent has collected its status."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")


def stubborn(file):
    """Return a command that ignores SIGTERM and writes its process number."""
    return f"trap '' TERM; echo $$ > {file}.new; mv {file}.new {file}; sleep 60; sleep 60"


@posix
def test_aborted_worker_ends_commands_and_returns_tasks(connect, queue, name, tmp_path):
    files = [tmp_path / str(number) for number in range(6)]
    queue.put_many([sqlsem.Shell(stubborn(file)) for file in files])
    worker = Worker(queue, threads=len(files))
    thread = working(worker)
    until(lambda: all(file.exists() for file in files))
    began = time.monotonic()
    worker.abort()
    assert time.monotonic() - began < (len(files) - 1) * ENDING, "not one after the other"
    assert all(ended(int(file.read_text())) for file in files)
    assert Counter(status for _, status in states(queue)) == {"pending": len(files)}
    with connect().queue(name).try_claim() as task:
        assert task.attempt == 2
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert [run.outcome for run in queue.log(task.id)] == ["returned", "finished"]


@posix
def test_process_that_outlives_its_shell_is_ended(queue, tmp_path):
    file = tmp_path / "pid"
    within = stubborn(file).replace("$$", "\\$\\$")
    queue.put(sqlsem.Shell(f'sh -c "{within}"; true'))
    worker = Worker(queue)
    thread = working(worker)
    until(file.exists)
    worker.abort()
    assert ended(int(file.read_text()))
    assert [status for _, status in states(queue)] == ["pending"]
    thread.join(PATIENCE)
    assert not thread.is_alive()


def interrupted(channel, url, options, name):
    try:
        Worker(sqlsem.connect(url, **options).queue(name)).run()
    except KeyboardInterrupt:
        channel.tell("interrupted")
        channel.ask()


@posix
def test_interrupt_of_run_ends_the_running_task(spawn, queue, name, tmp_path):
    """An interrupted `run` must end its task, which would go on beside its next attempt otherwise."""
    pid = tmp_path / "pid"
    number = queue.put(sqlsem.Shell(f"echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 60; sleep 60"))
    child = spawn(interrupted, name=str(name))
    until(pid.exists)
    os.kill(child.pid, signal.SIGINT)
    child.expect("interrupted")
    assert ended(int(pid.read_text()))
    assert [run.outcome for run in queue.log(number)] == ["returned"]
    child.send(go=True)
    child.rest()


@posix
def test_background_child_does_not_delay_its_command(queue, tmp_path):
    """A command ends although a background child, such as a service, keeps its output open."""
    pid = tmp_path / "pid"
    queue.put(sqlsem.Shell(f"sleep 60 & echo $! > {pid}; echo started"))
    began = time.monotonic()
    Worker(queue, idle_exit=0).run()
    assert time.monotonic() - began < 30
    (entry,) = queue.tasks()
    assert (entry.status, entry.result) == ("finished", "started\n")
    assert not ended(int(pid.read_text()))
    os.kill(int(pid.read_text()), signal.SIGKILL)


@posix
def test_last_output_of_a_command_is_stored(queue):
    queue.put(sqlsem.Shell("seq 1 100000"))
    Worker(queue, idle_exit=0).run()
    (entry,) = queue.tasks()
    assert entry.result.endswith("\n99999\n100000\n")
    assert len(entry.result) == 8000


class Work:
    """Intercepts the sessions in which the SQL of tasks runs, and calls hooks around their calls."""

    def __init__(self, coordinator):
        self.connect = coordinator.engine.connect
        self.on_connect = self.on_cancel = self.on_execute = lambda: None
        self.cancels = 0
        coordinator.engine.connect = self.open

    def open(self, purpose):
        session = self.connect(purpose)
        if purpose != "work":
            return session
        self.on_connect()
        execute, cancel = session.execute, session.cancel_running

        def executed(text):
            self.on_execute()
            return execute(text)

        def cancelled():
            self.on_cancel()
            self.cancels += 1
            cancel()

        session.execute, session.cancel_running = executed, cancelled
        return session


def test_finished_task_is_not_returned_by_abort(database, queue, table):
    """Only the thread that ran a task knows that it has finished, so abort does not return the task."""
    work, begun, cancelled = Work(queue.claiming.client), threading.Event(), threading.Event()
    connect = work.connect

    def deaf(purpose):  # a session that ignores cancellation
        session = connect(purpose)
        session.cancel_running = lambda: None
        return session

    def late():
        begun.set()
        assert cancelled.wait(PATIENCE)

    work.connect, work.on_execute, work.on_cancel = deaf, late, cancelled.set
    number = queue.put(sqlsem.Sql(f"INSERT INTO {table} VALUES (1)"))
    worker = Worker(queue)
    thread = working(worker)
    assert begun.wait(PATIENCE)
    worker.abort()
    thread.join(PATIENCE)
    assert [run.outcome for run in queue.log(number)] == ["finished"]
    assert database.rows(f"SELECT n FROM {table}") == [(1,)]


def test_task_about_to_start_does_not_start_after_abort(database, queue, table):
    work, begun = Work(queue.claiming.client), threading.Event()
    worker = Worker(queue)

    def wait():
        begun.set()
        until(lambda: worker._aborted)

    work.on_connect = wait
    number = queue.put(sqlsem.Sql(f"INSERT INTO {table} VALUES (1)"))
    thread = working(worker)
    assert begun.wait(PATIENCE)
    worker.abort()
    thread.join(PATIENCE)
    assert [run.outcome for run in queue.log(number)] == ["returned"]
    assert database.rows(f"SELECT n FROM {table}") == []


@pytest.mark.engines("sqlite", "postgresql")
def test_early_cancel_of_a_session_is_repeated(queue):
    """A cancellation between the start of the session and the start of its statement is repeated."""
    endless = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    work, begun = Work(queue.claiming.client), threading.Event()

    def wait():
        begun.set()
        until(lambda: work.cancels)

    work.on_execute = wait
    number = queue.put(sqlsem.Sql(endless))
    worker = Worker(queue)
    thread = working(worker)
    assert begun.wait(PATIENCE)
    worker.abort()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert [run.outcome for run in queue.log(number)] == ["returned"]


def test_idle_exit_waits_for_running_tasks(queue):
    """A thread without a task stays for the next stage while others of the worker work."""
    queue.put(sqlsem.Call(note, "long", 1.0))
    queue.put_many([sqlsem.Call(note, "side", 0.4)] * 2, order=1)
    Worker(queue, threads=2, idle_exit=0.2).run()
    (_, _, first), span, other = sorted(done)
    assert first == "long"
    assert span[0] < other[1]
    assert other[0] < span[1]


@pytest.mark.parametrize("idle", [0, 0.2])
def test_a_worker_stays_while_anything_runs(queue, idle):
    queue.put(sqlsem.Call(note, "long", 1.0))
    queue.put(sqlsem.Call(note, "after"), order=1)
    Worker(queue, threads=2, idle_exit=idle).run()
    assert [word for _, _, word in done] == ["long", "after"]


def test_errors_of_the_callback_are_logged(queue, caplog):
    def tell(task, outcome, error):
        raise ValueError("no terminal")

    queue.put_many([sqlsem.Call(note, "a"), sqlsem.Call(note, "b")])
    Worker(queue, idle_exit=0, on_task=tell).run()
    assert [word for _, _, word in done] == ["a", "b"]
    assert "on_task of a worker" in caplog.text


@pytest.mark.quiet
def test_many_small_tasks_in_many_workers(connect, name, threads):
    """Many workers claim each task once, and lose none."""
    count, crew = 1000, 8
    queue = connect().queue(name)
    numbers = queue.put_many(range(count))
    claimed: list[list[int]] = [[] for _ in range(crew)]

    def work(number):
        for task in connect().queue(name).claim(wait=0):
            with task:
                claimed[number].append(task.id)

    for number in range(crew):
        threads.start(work, number)
    threads.join(4 * PATIENCE)
    assert sorted(number for share in claimed for number in share) == numbers
    for share in claimed:
        assert share == sorted(share), "first come, first served"
    assert queue.state().done
    assert {entry.attempt for entry in queue.tasks(maximum=count)} == {1}


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({1, 2}, "cannot be kept as JSON"),
        (float("nan"), "cannot be kept as JSON"),
        (b"bytes", "cannot be kept as JSON"),
        (lambda: 1, "cannot be found by a worker"),
        (sqlsem.Sql("  "), "is empty"),
        (sqlsem.Shell(""), "is empty"),
        (sqlsem.Sql("a\0b"), "NUL"),
        (Json("half \ud800"), "surrogate"),
        ("CALL x()", r"A plain text is no task: 'CALL x\(\)'; put sqlsem.Sql"),
        ("", "A plain text is no task"),
    ],
)
def test_invalid_bodies_are_refused(queue, body, words):
    with pytest.raises(sqlsem.ConfigurationError, match=words):
        queue.put_many([1, body])
    assert queue.tasks() == [], "nothing was put"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": 1.5}, "whole number"),
        ({"order": True}, "whole number"),
        ({"order": 2**40}, "from -2147483648 to"),
        ({"max_attempts": 0}, "from 1 to"),
        ({"after": -1}, "at least 0"),
        ({"after": float("inf")}, "at least 0"),
        ({"backoff": "soon"}, "not a duration"),
        ({"backoff": 301}, "at most 300"),
        ({"on_failure": "ignore"}, "'stop' or 'continue'"),
        ({"note": "x" * 1001}, "at most 1000"),
    ],
)
def test_invalid_options_are_refused(queue, options, words):
    with pytest.raises(sqlsem.ConfigurationError, match=words):
        queue.put(1, **options)


def test_invalid_queue_names_are_refused(connect):
    for bad in ("", " x", "x" * 256, None, "a\nb"):
        with pytest.raises(sqlsem.ConfigurationError, match="The queue's name"):
            connect().queue(bad)
    for function in ("nothing", "a b:c", "os:", ":x"):
        with pytest.raises(sqlsem.ConfigurationError, match=r"package\.module:function"):
            sqlsem.Call(function)
    for wait in (-1, float("nan"), "soon"):
        with pytest.raises(sqlsem.ConfigurationError, match="wait"):
            next(connect().queue("q").claim(wait=wait))
    for threads in (0, True, 1.5):
        with pytest.raises(sqlsem.ConfigurationError, match="threads"):
            Worker(connect().queue("q"), threads)


def test_closed_coordinator_refuses_queue_calls(connect, name):
    coordinator = connect()
    queue = coordinator.queue(name)
    queue.put(1)
    task = queue.try_claim()
    coordinator.close()
    with pytest.raises(sqlsem.ConfigurationError, match="closed"):
        queue.put(2)
    with pytest.raises(sqlsem.SqlsemError):
        task.finish()
    with connect().queue(name).try_claim() as again:  # tasks of a closed process are pending at once
        assert again.id == task.id
