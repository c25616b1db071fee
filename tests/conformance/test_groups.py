"""Workers claim and end short tasks in groups; apart from the time saved, the effect is that of single claims."""

import contextlib
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.engines.base import Disconnected
from sqlsem.tasks import Worker, claim_buffer, claiming
from sqlsem.tasks import worker as worker_module
from sqlsem.values.errors import Unavailable
from sqlsem.values.tasks import End, NewTask

pytestmark = pytest.mark.engines("sqlite", "postgresql")

#: Numbers of the tasks that ran in this process, and the events that hold one of them up.
done: list[int] = []
reached, go = threading.Event(), threading.Event()


def note(number):
    done.append(number)


def hold(number):
    reached.set()
    assert go.wait(PATIENCE)
    done.append(number)


def fail(number):
    done.append(number)
    raise ValueError(number)


@pytest.fixture(autouse=True)
def no_blocked_tasks(timing):
    """Keep workers from checking for blocked tasks: these tests count calls, and the checks go by the clock."""
    timing(blocked_task_check=3600.0)


@pytest.fixture(autouse=True)
def nothing_done():
    done.clear()
    reached.clear()
    go.clear()
    yield
    go.set()


@pytest.fixture
def queue(connect, name):
    return connect().queue(name)


@pytest.fixture
def eager(monkeypatch):
    """Make every group as large as possible, however long the tasks take."""
    monkeypatch.setattr(claim_buffer.ClaimSizer, "next_size", lambda sizer: sizer._limit)


@pytest.fixture
def unhurried(monkeypatch):
    """Let no group be late, however slow the machine is."""
    monkeypatch.setattr(claim_buffer, "GROUP_LATE_SECONDS", PATIENCE)


def put(queue, count, **options):
    return queue.put_many([sqlsem.Call(note, number) for number in range(count)], **options)


def statuses(queue):
    return [entry.status for entry in sorted(queue.tasks(maximum=1000), key=lambda entry: entry.task_id)]


def outcomes(queue, number):
    return [run.outcome for run in queue.log(number)]


def working(worker):
    thread = threading.Thread(target=worker.run)
    thread.start()
    return thread


class Calls:
    """Counts the calls on the main session; ``before`` and ``after`` run around each call, with its name."""

    def __init__(self, queue):
        queue.state()  # connects
        self.made, self.answered = Counter(), Counter()
        self.groups = 0  # number of groups that were requested
        self.before = self.after = lambda name: None
        session = queue.claiming.client.member.main.session
        for name in ("claim_task", "next_task", "next_tasks", "end_task"):
            setattr(session, name, self.watched(name, getattr(session, name)))

    def watched(self, name, call):
        def made(*arguments):
            self.made[name] += 1
            self.groups += name == "next_tasks" and arguments[-1] > 0
            self.before(name)
            answer = call(*arguments)
            self.after(name)
            self.answered[name] += 1
            return answer

        return made


# -- what a worker does -----------------------------------------------------------------------------------------------


def test_short_tasks_are_done_in_few_calls_and_in_order(queue):
    numbers = put(queue, 500)
    calls, reports = Calls(queue), []
    worker = Worker(queue, idle_exit=0, on_task=lambda task, outcome, error: reports.append((task.id, outcome)))
    worker.run()
    assert done == list(range(500))
    assert (worker.finished, worker.failed, worker.running) == (500, 0, set())
    assert sum(calls.made.values()) < 100
    assert set(statuses(queue)) == {"finished"}
    assert sorted(reports, key=lambda report: report[0]) == [
        (key, expected_outcome) for key in numbers for expected_outcome in (None, "finished")
    ]
    for number in (numbers[0], numbers[-1]):
        (attempt,) = queue.log(number)
        assert (attempt.attempt, attempt.outcome) == (1, "finished")
        assert attempt.host
        assert attempt.pid
        assert attempt.started_at <= attempt.ended_at


def test_long_tasks_are_claimed_singly(queue):
    queue.put_many([sqlsem.Call("time:sleep", 0.03)] * 10)
    calls = Calls(queue)
    Worker(queue, idle_exit=0).run()
    assert calls.made["next_task"] == 10
    assert calls.made["next_tasks"] == 0


def test_groups_may_be_refused(queue):
    put(queue, 20)
    calls = Calls(queue)
    Worker(queue, idle_exit=0, group=False).run()
    assert calls.made["next_task"] == 20
    assert calls.made["next_tasks"] == 0
    assert done == list(range(20))


def test_results_and_errors_are_each_tasks_own(queue, eager):
    put(queue, 2)
    queue.put(sqlsem.Call(fail, 2), on_failure="continue")
    queue.put(sqlsem.Call(fail, 3), max_attempts=2, backoff=0)
    queue.put(sqlsem.Call("math:sqrt", 16))
    queue.put(sqlsem.Sql("SELECT 1"))
    queue.put(sqlsem.Call("math:sqrt", -1), on_failure="continue")
    worker = Worker(queue, idle_exit=0.2)
    worker.run()
    assert statuses(queue) == ["finished"] * 2 + ["failed"] * 2 + ["finished"] * 2 + ["failed"]
    assert (worker.finished, worker.failed, worker.retried) == (4, 3, 1)
    entries = sorted(queue.tasks(), key=lambda entry: entry.task_id)
    assert entries[4].result == "4.0"
    assert [entry.error.partition("\n")[0] for entry in entries if entry.error] == [
        "ValueError: 2",
        "ValueError: 3",
        "ValueError: math domain error",
    ]
    assert [(entry.attempt, entry.failures) for entry in entries[2:4]] == [(1, 1), (2, 2)]


def test_orders_stay_barriers(connect, name, eager):
    queue = connect().queue(name)
    for order in (3, 1, 2):
        queue.put_many([sqlsem.Call(note, order)] * 50, order=order)
    crew = [working(Worker(connect().queue(name), threads=2, idle_exit=0.2)) for _ in range(2)]
    for thread in crew:
        thread.join(PATIENCE)
    assert done == sorted(done)
    assert Counter(done) == {1: 50, 2: 50, 3: 50}


def test_a_failure_holds_up_later_orders(queue, eager):
    put(queue, 5)
    queue.put(sqlsem.Call(fail, 5))
    put(queue, 5, order=1)
    Worker(queue, idle_exit=0).run()
    assert done == [0, 1, 2, 3, 4, 5]
    assert queue.state().stuck


def test_task_that_is_no_call_keeps_its_order(queue, eager, tmp_path):
    file = tmp_path / "file"
    put(queue, 3)
    queue.put(sqlsem.Shell(f"touch {file}"))
    queue.put(sqlsem.Call("os:rename", str(file), str(file) + ".seen"))
    Worker(queue, idle_exit=0).run()
    assert set(statuses(queue)) == {"finished"}


def test_a_group_is_no_larger_than_a_megabyte(database, connect, queue):
    coordinator = connect()
    coordinator.client.member.heartbeat()
    me = coordinator.client.member.member_id
    with contextlib.closing(database.session()) as session:
        session.put_tasks(queue.name, "large" + queue.name, [NewTask("sql", "x" * 400_000) for _ in range(8)])
        sizes = [len(session.next_tasks(me, [], queue.name, "w", f"u{n}", False, 100)[1]) for n in range(4)]
        assert sizes == [3, 3, 2, 0]


def test_group_size_follows_task_duration():
    """The size of a claim doubles each time, while the tasks fit into the time for a group."""
    sizer = claim_buffer.ClaimSizer(100)
    assert sizer.next_size() == 2, "nothing is known"
    for seconds, maximum in ((0.0, 4), (0.0, 8), (0.1, 1), (0.1, 1)):
        for _ in range(10):
            sizer.record_duration(seconds)
        assert sizer.next_size() == maximum
    for _ in range(100):
        sizer.record_duration(0.0)
    assert [sizer.next_size() for _ in range(7)] == [2, 4, 8, 16, 32, 64, 100]
    sizer.record_duration(0.04)
    assert sizer.next_size() > 50, "it may have waited for others"
    sizer.record_duration(0.06)
    assert sizer.next_size() == 1, "too long for a group"


def test_prefetch_shrinks_claims_of_long_tasks():
    """With prefetch two groups take no longer than one group without it; long tasks are not prefetched."""
    for seconds, maximum, ahead in ((0.0001, 50, True), (0.0009, 5, True), (0.002, 5, False)):
        sizer = claim_buffer.ClaimSizer(100, prefetch=True)
        for _ in range(100):
            sizer.record_duration(seconds)
            sizer.next_size()
        assert (sizer.next_size(), sizer.may_prefetch()) == (maximum, ahead)
    assert not claim_buffer.ClaimSizer(1, prefetch=True).may_prefetch(), "one by one"


# -- threads -----------------------------------------------------------------------------------------------------------

together = threading.Barrier(8)
by: list[int] = []


def meet(number):
    together.wait(PATIENCE)
    done.append(number)


def sign(number):
    done.append(number)
    by.append(threading.get_ident())


def test_short_tasks_run_in_a_single_thread(queue, unhurried, monkeypatch):
    """A second thread would only wait for the first one."""
    monkeypatch.setattr(worker_module, "CLAIMING_SECONDS", PATIENCE)
    monkeypatch.setattr(claim_buffer, "LONG_SECONDS", PATIENCE)
    by.clear()
    queue.put_many([sqlsem.Call(sign, number) for number in range(300)])
    Worker(queue, threads=8, idle_exit=0).run()
    assert done == list(range(300))
    assert len(set(by)) == 1


@pytest.mark.parametrize("group", [True, False])
def test_long_tasks_are_run_by_all_threads(queue, group):
    queue.put_many([sqlsem.Call(meet, number) for number in range(32)])
    worker = Worker(queue, threads=8, idle_exit=0, group=group)
    worker.run()
    assert sorted(done) == list(range(32))
    assert worker.finished == 32


def test_the_next_thread_goes_on_with_the_group(queue, eager, unhurried):
    """Another thread runs the rest of a slow task's group and records its results."""
    numbers = with_a_slow_one(queue)
    thread = working(Worker(queue, threads=2, idle_exit=0))
    assert reached.wait(PATIENCE)
    until(lambda: Counter(statuses(queue)) == {"finished": 9, "running": 1})
    assert done == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    go.set()
    thread.join(PATIENCE)
    assert [outcomes(queue, number) for number in numbers] == [["finished"]] * 10


def test_result_is_recorded_while_other_threads_are_idle(queue):
    """A client that waits for the task sees its end at once, not at the end of the worker's idle time."""
    client = queue.claiming.client
    client.timing = replace(
        client.timing, maintenance=4 * PATIENCE, shortest_recovery=4 * PATIENCE, longest_recovery=4 * PATIENCE
    )
    queue.put(sqlsem.Call(hold, 1))
    queue.put(sqlsem.Call(note, 2), order=1)
    thread = working(Worker(queue, threads=3, idle_exit=0))
    assert reached.wait(PATIENCE)
    time.sleep(0.3)
    assert done == []
    go.set()
    until(lambda: done == [1, 2])
    thread.join(PATIENCE)
    assert set(statuses(queue)) == {"finished"}


# -- slow tasks in a group, and workers that must leave --------------------------------------------------------------


def with_a_slow_one(queue):
    """Put ten tasks, the third of which blocks until the test lets it go on."""
    return queue.put_many([sqlsem.Call(hold if number == 2 else note, number) for number in range(10)])


def test_a_slow_task_does_not_keep_its_neighbours(connect, queue, name, eager):
    """Beside a slow task, ended tasks of its group are recorded and unstarted ones run in another worker."""
    numbers = with_a_slow_one(queue)
    first = queue.put(sqlsem.Call(note, 99), order=-1)  # runs alone, and first
    thread = working(Worker(queue, idle_exit=0))
    assert reached.wait(PATIENCE)
    until(lambda: Counter(statuses(queue)) == {"finished": 3, "running": 1, "pending": 7})
    Worker(connect().queue(name), idle_exit=0).run()
    assert done == [99, 0, 1, 3, 4, 5, 6, 7, 8, 9]
    go.set()
    thread.join(PATIENCE)
    assert [outcomes(queue, number) for number in (first, *numbers)] == [
        ["finished"],
        ["finished"],
        ["finished"],
        ["finished"],
        *[["returned", "finished"]] * 7,
    ]


def test_stopped_worker_returns_unstarted_tasks(queue, eager):
    put(queue, 1, order=-1)
    numbers = with_a_slow_one(queue)
    worker = Worker(queue)
    thread = working(worker)
    assert reached.wait(PATIENCE)
    worker.stop()
    until(lambda: Counter(statuses(queue)) == {"finished": 3, "running": 1, "pending": 7})
    go.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert worker.finished == 4
    assert [outcomes(queue, number) for number in numbers] == [["finished"]] * 3 + [["returned"]] * 7


def test_aborted_worker_returns_all_unfinished_tasks(queue, eager):
    put(queue, 1, order=-1)
    numbers = with_a_slow_one(queue)
    worker = Worker(queue)
    thread = working(worker)
    assert reached.wait(PATIENCE)
    worker.abort()
    assert Counter(statuses(queue)) == {"finished": 3, "pending": 8}
    assert [outcomes(queue, number) for number in numbers] == [["finished"]] * 2 + [["returned"]] * 8
    go.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert outcomes(queue, numbers[2]) == ["returned"], "the result that came late is not reported"


def test_lost_task_does_not_start(connect, queue, name, eager):
    put(queue, 1, order=-1)
    numbers = with_a_slow_one(queue)
    worker = Worker(queue, idle_exit=0)
    relieved = threading.Event()
    worker._return_unstarted = lambda: relieved.wait(PATIENCE)  # waits until the claim is lost
    thread = working(worker)
    assert reached.wait(PATIENCE)
    queue.claiming.client.mark_lost(None, "nothing was heard")
    assert done == [0, 0, 1]
    go.set()
    relieved.set()
    thread.join(PATIENCE)
    Worker(connect().queue(name), idle_exit=2).run()
    # The started task is recorded, as the database still has this worker's claim.
    assert Counter(done) == {0: 1 + 1, **dict.fromkeys(range(1, 10), 1)}
    assert {entry.status for entry in queue.tasks()} == {"finished"}
    assert [outcomes(queue, number) for number in numbers] == [["finished"]] * 3 + [["returned", "finished"]] * 7


# -- prefetch of the next group during a run --------------------------------------------------------------------------

postgresql = pytest.mark.engines("postgresql")
#: The `Calls` object that tasks read.
calls: list["Calls"] = []


@pytest.fixture
def watched(queue):
    """Return the counted calls of a queue, and show them to its tasks."""
    calls[:] = [Calls(queue)]
    yield calls[0]
    calls.clear()


def see_claim(number):
    """As a task of the first group, return only after the second group was claimed."""
    until(lambda: calls[0].answered["next_tasks"] >= 2)
    done.append(number)


@postgresql
def test_next_group_is_prefetched_during_a_run(queue, watched, eager, unhurried, monkeypatch):
    """The prefetching call claims in the claiming thread's name and reports the ends of the previous group."""
    monkeypatch.setattr(worker_module, "CLAIMING_SECONDS", PATIENCE)
    monkeypatch.setattr(claim_buffer.ClaimSizer, "may_prefetch", lambda sizer: True)  # on a slow machine, too
    bodies = [sqlsem.Call(see_claim if number == 5 else note, number) for number in range(350)]
    numbers = queue.put_many(bodies)
    calls = []
    watched.before = lambda name: calls.append((name, threading.current_thread().name.rpartition("-")[2]))
    Worker(queue, idle_exit=0).run()
    assert done == list(range(350))
    # First a single claim, then groups. The call that ends the last group is no prefetch, as that group was not full.
    assert calls == [
        ("claim_task", "1"),
        ("next_tasks", "1"),
        *[("next_tasks", "prefetch")] * 3,
        ("next_tasks", "1"),
        *[(calls[-1])] * (len(calls) - 6),
    ]
    assert {queue.log(numbers[which])[0].owner for which in (0, 50, 150, -1)} == {f"{queue.name}-1"}
    assert {entry.attempt for entry in queue.tasks(maximum=1000)} == {1}


@postgresql
def test_nothing_is_kept_behind_a_slow_task(connect, queue, name, watched, eager):
    """A slow task keeps no task of its own or the next group, and its worker claims no more."""
    numbers = queue.put_many([sqlsem.Call(hold if number == 120 else note, number) for number in range(400)])
    thread = working(Worker(queue, idle_exit=0))
    assert reached.wait(PATIENCE)
    expected = watched.groups + 1  # one claim may be under way
    time.sleep(4 * claim_buffer.GROUP_LATE_SECONDS)
    until(lambda: Counter(statuses(queue)) == {"finished": 120, "running": 1, "pending": 279})
    assert watched.groups <= expected
    Worker(connect().queue(name), idle_exit=0).run()
    assert Counter(statuses(queue)) == {"finished": 399, "running": 1}
    go.set()
    thread.join(PATIENCE)
    assert sorted(done) == list(range(400))
    assert outcomes(queue, numbers[120]) == ["finished"]


@postgresql
def test_late_claim_behind_slow_task_is_returned(queue, watched, eager):
    """A prefetch that began before the slow task was known is returned on arrival."""
    queue.put_many([sqlsem.Call(hold if number == 5 else note, number) for number in range(400)])

    def wait(name):
        if watched.made["next_tasks"] == 2:
            assert reached.wait(PATIENCE)
            time.sleep(3 * claim_buffer.GROUP_LATE_SECONDS)

    watched.before = wait
    thread = working(Worker(queue, idle_exit=0))
    assert reached.wait(PATIENCE)
    until(lambda: watched.answered["next_tasks"] >= 2)
    until(lambda: Counter(statuses(queue)) == {"finished": 5, "running": 1, "pending": 394})
    time.sleep(4 * claim_buffer.GROUP_LATE_SECONDS)
    assert watched.groups == 2, "no other one"
    go.set()
    thread.join(PATIENCE)
    assert sorted(done) == list(range(400))


@postgresql
@pytest.mark.parametrize("aborts", [False, True])
def test_leaving_thread_returns_its_new_claim(queue, watched, eager, unhurried, aborts):
    queue.put_many([sqlsem.Call(hold if number == 5 else note, number) for number in range(400)])
    worker = Worker(queue)

    def leave(name):
        if watched.made["next_tasks"] == 2:
            assert reached.wait(PATIENCE)
            worker.stop()
            if aborts:
                leaving.start()
                until(lambda: worker._aborted)

    leaving = threading.Thread(target=worker.abort)
    watched.after = leave
    thread = working(worker)
    assert reached.wait(PATIENCE)
    if aborts:
        until(lambda: Counter(statuses(queue)) == {"finished": 5, "pending": 395})
        leaving.join(PATIENCE)
    until(worker._stopping.is_set)
    go.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert Counter(statuses(queue)) == ({"finished": 5, "pending": 395} if aborts else {"finished": 6, "pending": 394})
    assert {entry.attempt for entry in queue.tasks(maximum=1000) if entry.status == "pending"} <= {0, 1}


@postgresql
def test_exclusive_task_starts_after_earlier_results_are_stored(queue, eager, unhurried):
    """A task that kills its worker must not make earlier tasks run again."""
    put(queue, 101)
    queue.put(sqlsem.Shell("true"))
    put(queue, 3)
    stored = []

    def tell(task, outcome, error):
        if task.kind == "shell" and outcome is None:
            stored.extend(statuses(queue))

    Worker(queue, idle_exit=0, on_task=tell).run()
    assert stored == ["finished"] * 101 + ["running"] + ["pending"] * 3


@postgresql
def test_task_with_locks_is_not_prefetched(queue, eager, unhurried):
    """A prefetched task would keep other clients from its locks while earlier tasks run."""
    looks = polls_for_blocked_tasks(queue)
    put(queue, 201)  # the last prefetch finds no task, and does not check for blocked ones
    Worker(queue, idle_exit=0).run()
    assert done == list(range(201))
    assert {name for name, _ in looks} == {f"{queue.name}-1"}


@postgresql
def test_tasks_with_locks_are_claimed_beside_a_backlog(queue, unhurried, monkeypatch):
    queue.claiming.client.timing = replace(queue.claiming.client.timing, blocked_task_check=0.01)
    monkeypatch.setattr(claiming, "BLOCKED_FACTOR", 0)
    looks = polls_for_blocked_tasks(queue)
    put(queue, 3000)
    Worker(queue, idle_exit=0).run()
    assert done == list(range(3000))
    assert len([number for _, number in looks if 100 < number < 2900]) >= 2


def polls_for_blocked_tasks(queue):
    """Return a list of the checks for blocked tasks: the thread, and the number of tasks done by then."""
    queue.state()
    looks, session = [], queue.claiming.client.member.main.session
    look = session.claim_blocked

    def looked(*arguments):
        looks.append((threading.current_thread().name, len(done)))
        return look(*arguments)

    session.claim_blocked = looked
    return looks


@postgresql
def test_prefetch_survives_an_outage(queue, watched, eager, unhurried):
    """Claimed tasks run, their results are recorded at the worker's end, and another worker goes on."""
    put(queue, 400)

    def cut(name):
        if watched.made["next_tasks"] == 3:
            until(lambda: len(done) == 101)
            watched.made["next_tasks"] += 1
            raise Unavailable(f"{name} was cut for good")

    watched.before = cut
    with pytest.raises(Unavailable, match="for good"):
        Worker(queue, idle_exit=0).run()
    assert len(done) == 201
    until(lambda: Counter(statuses(queue)) == {"finished": 201, "pending": 199})
    Worker(queue, idle_exit=0).run()
    assert done == list(range(400))


# -- lost answers -----------------------------------------------------------------------------------------------------


def test_lost_answers_change_nothing(connect, name, eager, unhurried):
    """Every task runs once, whichever answer is lost, and whether or not the server received the call."""
    queue = connect(retry=PATIENCE).queue(name)
    numbers = put(queue, 450)
    calls, chance = Calls(queue), iter(["asked", "answered", "lost", "unasked"] * 1000)

    def cut(moment):
        def maybe(name):
            if name.startswith("next") and next(chance) == moment:
                raise Disconnected(f"{name} was cut")

        return maybe

    calls.before, calls.after = cut("unasked"), cut("lost")
    worker = Worker(queue, threads=3, idle_exit=0)
    worker.run()
    assert sorted(done) == list(range(450))
    assert worker.finished == 450
    assert set(statuses(queue)) == {"finished"}
    assert {entry.attempt for entry in queue.tasks(maximum=1000)} == {1}
    assert outcomes(queue, numbers[-1]) == ["finished"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_unanswered_calls_change_nothing(connect, name, eager, unhurried, moment):
    """The worker ends, its results are recorded once, and tasks that it may have claimed are returned."""
    queue = connect(grace=10).queue(name)
    put(queue, 301)
    calls = Calls(queue)

    def cut(name):
        if calls.made["next_tasks"] == 3:
            calls.made["next_tasks"] += 1  # cuts only once
            raise Unavailable(f"{name} was cut for good")

    setattr(calls, moment, cut)
    with pytest.raises(Unavailable, match="for good"):
        Worker(queue, idle_exit=0).run()
    assert len(done) == 201
    until(lambda: Counter(statuses(queue)) == {"finished": 201, "pending": 100})
    Worker(queue, idle_exit=0).run()
    assert done == list(range(301))


def test_repeated_calls_change_nothing(database, connect, queue):
    numbers = put(queue, 6)
    coordinator = connect()
    coordinator.client.member.heartbeat()
    me = coordinator.client.member.member_id
    with contextlib.closing(database.session()) as session:
        _, first = session.next_tasks(me, [], queue.name, "w", "one", False, 3)
        assert [task.task_id for task in first] == numbers[:3]
        assert session.next_tasks(me, [], queue.name, "w", "one", True, 3) == ([], first)
        ended = zip(numbers[:3], ("finished", "returned", "failed"), strict=True)
        ends = [End(number, 1, outcome) for number, outcome in ended]
        stranger = End(numbers[5], 1, "finished")
        states, second = session.next_tasks(me, [*ends, stranger], queue.name, "w", "two", False, 2)
        assert states == ["finished", "pending", "failed", None]
        assert [(task.task_id, task.attempt) for task in second] == [(numbers[1], 2), (numbers[3], 1)]
        states, again = session.next_tasks(me, [*ends, stranger], queue.name, "w", "two", True, 2)
        assert states == ["finished", "running", "failed", None], "as it is by now"
        assert again == second
        assert session.next_tasks(me, ends[:1], queue.name, "w", "three", False, 0) == (["finished"], [])
        assert session.return_claim(me, queue.name, "two") == 2
    assert Counter(statuses(queue)) == {"pending": 4, "finished": 1, "failed": 1}
    assert outcomes(queue, numbers[1]) == ["returned", "returned"]
