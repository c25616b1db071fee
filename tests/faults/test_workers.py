"""Workers that die, sleep or lose the database: their tasks return to the queue, but never a living worker's."""

import os
import random
import threading
import time
from collections import Counter

import pytest
from support import PATIENCE, drained, remains, until
from support.journals import Journal, records

import sqlsem
from sqlsem.tasks import Json, Worker, claim_buffer
from sqlsem.values.tasks import End

GRACE = 1.5
#: The settings of workers that must lose no task while others are killed, on a busy machine.
LONG_GRACE = 8.0


def hold(channel, url, options, name, grace):
    """Claim one task and keep it."""
    queue = sqlsem.connect(url, **options, grace=grace).queue(name)
    for task in queue.claim(wait=60):
        channel.tell("claimed", id=task.id, attempt=task.attempt)
        channel.ask()
        try:
            with task:
                pass
        except sqlsem.LockLost:
            channel.tell("lost")
        else:
            channel.tell("finished")
        return


def test_a_killed_worker_gives_its_task_back(spawn, connect, name):
    queue = connect().queue(name)
    number = queue.put(Json("x"))
    child = spawn(hold, name=str(name), grace=GRACE)
    assert child.expect("claimed")["id"] == number
    killed = child.kill()
    for task in queue.claim(wait=PATIENCE):
        got = time.monotonic()
        with task:
            assert (task.id, task.attempt) == (number, 2)
        break
    if queue.claiming.client.engine.name == "postgresql":
        assert got >= killed + GRACE, "without a beacon, a dead process and a disconnected one look alike"
    assert got < killed + GRACE + 20
    assert [run.outcome for run in queue.log(number)] == ["lost", "finished"]


def test_join_recovers_tasks_of_dead_workers(spawn, connect, name):
    queue = connect().queue(name)
    queue.put(Json("x"))
    child = spawn(hold, name=str(name), grace=0.5)
    child.expect("claimed")
    child.kill()
    until(lambda: not drained(queue, 0.2) and not queue.state().running, "the task is pending again")
    with queue.try_claim():
        pass


def test_a_paused_worker_keeps_its_task(spawn, connect, name):
    queue = connect().queue(name)
    number = queue.put(Json("x"))
    child = spawn(hold, name=str(name), grace=0.5)
    child.expect("claimed")
    child.pause()
    try:
        remains(lambda: queue.try_claim() is None, 3, "no worker takes a task from a living one")
    finally:
        child.resume()
    child.call("finished", go=True)
    assert [run.outcome for run in queue.log(number)] == ["finished"]


def asks(channel, url, options, name, lease):
    """Claim one task, and on command check whether it is lost."""
    queue = sqlsem.connect(url, **options, lease=lease).queue(name)
    for task in queue.claim(wait=60):
        channel.tell("claimed")
        channel.ask()
        channel.tell("asked", lost=task.lost)
        return


def test_stopped_worker_learns_of_lost_tasks_at_once(spawn, connect, name):
    """Its lease has expired, and other workers have its task; when it wakes, its memory does not show that."""
    queue = connect().queue(name)
    queue.put(Json("x"))
    child = spawn(asks, name=str(name), lease=GRACE)
    child.expect("claimed")
    child.pause()
    try:
        for task in queue.claim(wait=PATIENCE):
            with task:
                child.send(go=True)  # its first check after it wakes
            break
    finally:
        child.resume()
    assert child.expect("asked")["lost"]


def test_task_that_kills_its_workers_fails_in_the_end(spawn, connect, name):
    queue = connect().queue(name)
    number = queue.put(Json("poison"), max_attempts=3)
    for attempt in range(1, 6):
        child = spawn(hold, name=str(name), grace=0)
        assert child.expect("claimed")["attempt"] == attempt
        child.kill()
    until(lambda: drained(queue, 0.2) and queue.tasks()[0].status == "failed")
    with pytest.raises(sqlsem.TaskFailed, match="its worker died five times"):
        queue.wait()
    assert Counter(run.outcome for run in queue.log(number)) == {"lost": 5}


@pytest.mark.engines("postgresql")
def test_disconnected_worker_learns_of_the_loss_first(agents, spawn, connect, database, name):
    """Its session is ended and cannot come back in time."""
    queue = connect().queue(name)
    queue.put(Json("x"))
    coordinator = sqlsem.connect(database.url, **database.options, grace=1.0, retry=30)
    try:
        task = coordinator.queue(name).try_claim()
        # No connection succeeds any more.
        coordinator.engine.open_session = lambda purpose: (_ for _ in ()).throw(sqlsem.engines.base.Disconnected("cut"))
        coordinator.client.member.main.session.interrupt()
        assert task.lost_event.wait(PATIENCE)
        lost = time.monotonic()
        for other in queue.claim(wait=PATIENCE):
            assert time.monotonic() >= lost
            with other:
                assert other.attempt == 2
            break
        with pytest.raises(sqlsem.LockLost, match=f"task {task.id}"):
            task.finish()
    finally:
        del coordinator.engine.open_session
        coordinator.close()


def churn(channel, url, options, name, journal):
    queue = sqlsem.connect(url, **options, grace=LONG_GRACE).queue(name)
    book = Journal(journal)

    def note(event, task):
        book.note(what=event, at=time.monotonic(), task=task.id, attempt=task.attempt)

    def work():
        try:
            for task in queue.claim():
                with task:
                    note("began", task)
                    note("ended", task)
        except BaseException as exc:
            channel.tell("failed", error=f"{type(exc).__name__}: {exc}")

    for _ in range(2):
        threading.Thread(target=work, daemon=True).start()
    channel.tell("ready")
    channel.ask()
    os._exit(0)


def check_killed_at_random(spawn, connect, name, tmp_path, count, kills):
    queue = connect(grace=LONG_GRACE).queue(name)
    numbers = queue.put_many(range(count))
    journal = tmp_path / "journal"
    children = [spawn(churn, name=str(name), journal=str(journal)) for _ in range(4)]
    for child in children:
        child.expect("ready")
    killed: dict[int, float] = {}
    for kill in range(kills):
        # Spread over the work.
        until(lambda kill=kill: len(records(journal)) > 2 * count * (kill + 1) / (kills + 2), timeout=4 * PATIENCE)
        victim = random.randrange(len(children))
        killed[children[victim].pid] = children[victim].kill()
        children[victim] = spawn(churn, name=str(name), journal=str(journal))
    assert drained(queue, 8 * PATIENCE)
    assert queue.state().done
    for child in children:
        child.send(stop=True)
        failed = [event for event in child.rest() if event["event"] != "ready"]
        assert failed == [], "no deadlock, and no other error"
    entries = {entry.task_id: entry for entry in queue.tasks(maximum=count + 1)}
    assert sorted(entries) == numbers
    assert {entry.status for entry in entries.values()} == {"finished"}
    began = Counter()
    for words in records(journal):
        if words["what"] == "began":
            began[words["task"]] += 1
            if words["attempt"] > 1:
                lost = [run for run in queue.log(words["task"]) if run.attempt == words["attempt"] - 1]
                assert [lost_run.outcome for lost_run in lost] == ["lost"]
                assert words["at"] >= min(killed.values())
    assert set(began) == set(numbers), "none lost"
    assert sum(began.values()) - count <= 2 * len(killed), "only what a killed worker had is done again"
    return killed


def lines(journal):
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


@pytest.mark.timeout(400)
def test_workers_killed_at_random(spawn, connect, name, tmp_path):
    killed = check_killed_at_random(spawn, connect, name, tmp_path, 1500, 3)
    assert len(killed) == 3


def jot(journal, number):
    """Write a line into the journal: the function of the tasks."""
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{number}\n".encode())
    os.close(file)


def poison(journal, number):
    jot(journal, number)
    os._exit(1)


def pause(journal, number):
    jot(journal, number)
    time.sleep(PATIENCE)


def crew(channel, url, options, name, threads=1, grace=GRACE, idle=0.3, eager=True):
    """Work until no task is left, or until the process dies."""
    if eager:  # every group is as large as possible
        claim_buffer.ClaimSizer.next_size = lambda sizer: sizer._limit
    queue = sqlsem.connect(url, **options, grace=grace).queue(name)
    channel.tell("ready")
    Worker(queue, threads=threads, idle_exit=idle).run()
    channel.tell("left")


def test_killed_workers_group_is_returned(spawn, connect, name, tmp_path):
    """All unfinished tasks return; finished ones are not run again."""
    queue, journal = connect(grace=0.5).queue(name), str(tmp_path / "journal")
    numbers = queue.put_many([sqlsem.Call(f"{__name__}:jot", journal, number) for number in range(120)])
    child = spawn(crew, name=str(name), grace=0.5)
    child.expect("ready")
    # (In the second group: 1, 100, 19.)
    other = connect(grace=0.5).queue(name)
    other.put(sqlsem.Call(f"{__name__}:pause", journal, 120), order=1)
    until(lambda: lines(tmp_path / "journal") == 121)
    child.kill()
    until(lambda: drained(queue, 0.2) or not queue.state().running, "it is pending again")
    assert [run.outcome for run in queue.log(numbers[0])] == ["finished"]
    (entry,) = queue.tasks("pending")
    assert (entry.attempt, entry.losses) == (1, 1)


@pytest.mark.engines("sqlite", "postgresql")
def test_a_worker_killed_in_the_middle_of_a_group(spawn, connect, name, tmp_path):
    queue, journal = connect(grace=0.5).queue(name), str(tmp_path / "journal")
    bodies = [sqlsem.Call(f"{__name__}:jot", journal, number) for number in range(30)]
    bodies[11] = sqlsem.Call(f"{__name__}:poison", journal, 11)
    numbers = queue.put_many(bodies)
    spawn(crew, name=str(name), grace=0.5).expect("ready")
    until(lambda: lines(tmp_path / "journal") == 12)
    until(lambda: drained(queue, 0.2) or not queue.state().running, "all of them are pending again")
    assert [run.outcome for run in queue.log(numbers[0])] == ["finished"], "alone, and ended before the group"
    for number in numbers[1:]:
        assert [run.outcome for run in queue.log(number)] == ["lost"]
    # Again and again, but never with others.
    for _ in range(4):
        child = spawn(crew, name=str(name), grace=0)
        child.expect("ready")
        assert child.next() is None, "it died"
    until(lambda: drained(queue, 0.2) or not queue.state().running)
    Worker(queue, idle_exit=0).run()
    entries = sorted(queue.tasks(), key=lambda entry: entry.task_id)
    assert [(entry.status, entry.losses) for entry in entries] == [
        *[("finished", 0)],
        *[("finished", 1)] * 10,
        *[("failed", 5)],
        *[("finished", 1)] * 18,
    ]
    assert Counter(map(int, (tmp_path / "journal").read_text().split())) == {
        **{0: 1, 11: 5},
        **dict.fromkeys(range(1, 11), 2),  # done, but not recorded
        **dict.fromkeys(range(12, 30), 1),
    }


@pytest.mark.timeout(400)
def test_workers_of_groups_killed_at_random(spawn, connect, name, tmp_path):
    count, threads = 6000, 2
    queue, journal = connect(grace=GRACE).queue(name), tmp_path / "journal"
    numbers = queue.put_many([sqlsem.Call(f"{__name__}:jot", str(journal), number) for number in range(count)])
    # They stay until the tasks of the killed worker are pending again.
    settings = {"name": str(name), "threads": threads, "idle": 3 * GRACE, "eager": False}
    children = [spawn(crew, **settings) for _ in range(2)]
    for child in children:
        child.expect("ready")
    kills = 3
    for kill in range(kills):
        until(lambda kill=kill: lines(journal) > count * (kill + 1) / (kills + 2), timeout=4 * PATIENCE)
        victim = kill % len(children)
        children[victim].kill()
        children[victim] = spawn(crew, **settings)
    assert drained(queue, 2 * PATIENCE)
    for child in children:
        assert "left" in [event["event"] for event in child.rest()], "in order"
    entries = {entry.task_id: entry for entry in queue.tasks(maximum=count + 1)}
    assert sorted(entries) == numbers
    assert {entry.status for entry in entries.values()} == {"finished"}
    ran = Counter(map(int, journal.read_text().split()))
    assert set(ran) == set(range(count)), "none lost"
    again = sum(ran.values()) - count
    assert again <= kills * threads * claim_buffer.MAX_GROUP_SIZE, (
        "only what a killed worker had in its groups is done again"
    )
    lost = sum(entries[number].losses for number in numbers)
    # A killed worker loses the groups of its threads, and the group that it had claimed ahead and not started.
    assert again <= lost <= kills * (threads + 1) * claim_buffer.MAX_GROUP_SIZE


@pytest.mark.engines("postgresql")
def test_deferred_calls_run_before_the_next_heartbeat(connect, name):
    """At once, and not at the next heartbeat, which may be far off."""
    queue = connect(grace=90, retry=0.5).queue(name)
    number = queue.put(1)
    task = queue.try_claim()
    engine, member = queue.claiming.client.engine, queue.claiming.client.member
    ping, failed = member.heartbeat, threading.Event()

    def watched():
        try:
            ping()
        except sqlsem.Unavailable:
            failed.set()
            raise

    engine.open_session = lambda purpose: (_ for _ in ()).throw(sqlsem.engines.base.Disconnected("cut"))
    member.main.session.interrupt()
    member.heartbeat = watched
    end = End(number, task.attempt, "finished")
    member.defer(lambda session, me: session.end_task(me, end))
    task.mark_ended()
    assert failed.wait(PATIENCE)
    del engine.open_session
    until(lambda: not member.deferred_calls, timeout=25)  # a heartbeat is due every 30 s
    assert [run.outcome for run in queue.log(number)] == ["finished"]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_twenty_thousand_tasks_and_workers_killed_at_random(spawn, connect, name, tmp_path):
    check_killed_at_random(spawn, connect, name, tmp_path, 20000, 12)
