"""The library's threads end or hang in every possible way; every loss is reported all the same."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import pytest
from support import PATIENCE, Attempt, until

from sqlsem import Call
from sqlsem.tasks import Json, Worker
from sqlsem.util import runtime
from sqlsem.util import threads as ours
from sqlsem.values.errors import BatchFailed, LockLost, NotHeld

GRACE = 2
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.sampled(6),
]
both_faces = pytest.mark.faces("sync", "aio")


class Odd(BaseException):
    """No `Exception`."""


#: The exceptions that a program's code may raise in a thread of the library.
RAISED = [Odd, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, MemoryError, ZeroDivisionError]


def remove(database, *positions):
    for position in positions:
        database.rows("DELETE FROM {table} WHERE queue_position = ?", position)


@pytest.fixture
def said(caplog):
    """``said("words")`` is True if the words were logged at ERROR."""
    caplog.set_level(logging.ERROR, "sqlsem")
    return lambda words: any(words in record.getMessage() for record in caplog.records)


# -- what can be lost --------------------------------------------------------------------------------------------------


class Had(NamedTuple):
    """A grant of this process.

    Attributes:     take_away: Revoke it in the database.     is_told: Whether this process knows of the loss.
    ends_well: End it, and check that the end counts.
    """

    take_away: Callable[[], object]
    is_told: Callable[[], bool]
    ends_well: Callable[[], object]


def take_membership(coordinator, database):
    """Revoke it as if the process had been unreachable for longer than its grace."""
    member = coordinator.client.member.member_id
    database.rows(f"DELETE FROM {database.beside('member')} WHERE member_id = ?", member)


@contextlib.contextmanager
def a_lock(coordinator, database, name):
    lock = coordinator.mutex(name)
    assert lock.acquire()
    grant = lock.grant
    yield Had(
        partial(remove, database, *grant.positions.values()),
        lambda: grant.state.why_lost is not None and grant.lost_event.is_set(),
        lock.release,
    )
    with contextlib.suppress(LockLost, NotHeld):
        lock.release()


@contextlib.contextmanager
def one_of_a_limit(coordinator, database, name):
    with contextlib.suppress(LockLost), coordinator.limit(name, 3) as grant:
        yield Had(
            partial(remove, database, grant.position),
            lambda: grant.state.why_lost is not None,
            grant.release,
        )


@contextlib.contextmanager
def a_term(coordinator, database, name):
    with contextlib.suppress(LockLost), coordinator.leader(name, handle_sigterm=False) as term:
        yield Had(
            partial(remove, database, term.fence),
            lambda: term.grant.state.why_lost is not None and term.ending.is_set(),
            term.check,
        )


@contextlib.contextmanager
def a_run_of_once(coordinator, database, name):
    once = coordinator.once(str(name), "1h")

    def ends_well():
        run.finish()
        assert once.last() is not None

    with contextlib.suppress(LockLost), once as run:
        yield Had(partial(remove, database, run.fence), lambda: run.grant.state.why_lost is not None, ends_well)


@contextlib.contextmanager
def a_wait(coordinator, database, name):
    """Its loss ends the wait."""
    ahead = coordinator.mutex(name)
    assert ahead.acquire()
    waiting = Attempt(coordinator.mutex(name))
    until(lambda: len(coordinator.admin.entries(name)) == 2, "it waits")
    _, last = coordinator.admin.entries(name)

    def ends_well():
        assert not waiting.settled
        ahead.release()
        waiting.granted().check()

    yield Had(partial(remove, database, last.position), lambda: waiting.settled, ends_well)
    with contextlib.suppress(LockLost, NotHeld):
        ahead.release()
    if waiting.settled and waiting.grant is None:
        assert isinstance(waiting.error, LockLost)
    else:
        waiting.leave()


@contextlib.contextmanager
def a_task(coordinator, database, name):
    queue = coordinator.queue(name)
    number = queue.put(Json("x"))
    task = queue.try_claim()

    def ends_well():
        task.finish()
        assert [run.outcome for run in queue.log(number)] == ["finished"]

    yield Had(
        partial(take_membership, coordinator, database),
        lambda: task.why_lost is not None and task.lost_event.is_set(),
        ends_well,
    )
    if task.is_open:
        with contextlib.suppress(LockLost):
            task.release()


#: The events that tasks wait for, by a word of their test.
_leave = {}


def stay(word):
    """Run as a task until the test sets its event."""
    assert _leave[word].wait(PATIENCE)


@contextlib.contextmanager
def a_task_of_a_worker(coordinator, database, name):
    """The worker reports the recorded end of its task."""
    queue, word, outcomes = coordinator.queue(name), str(name), []
    leave = _leave[word] = threading.Event()
    number = queue.put(Call(stay, word))
    worker = Worker(queue, on_task=lambda task, outcome, error: outcomes.append(outcome))
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    until(lambda: outcomes == [None], "it runs")
    helper = f"{queue.name}-helper"  # begun last; without it, the worker ends
    until(lambda: helper in {other.name for other in threading.enumerate()}, "all threads of the worker run")
    (task,) = worker.running

    def ends():
        worker.stop()
        leave.set()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        recorded = [run.outcome for run in queue.log(number) if run.attempt == 1]
        assert outcomes == [None, "finished" if recorded == ["finished"] else "lost"]
        return worker.finished

    def ends_well():
        assert ends() == 1

    try:
        yield Had(
            partial(take_membership, coordinator, database),
            lambda: task.why_lost is not None and task.lost_event.is_set(),
            ends_well,
        )
        ends()
    finally:
        leave.set()
        del _leave[word]


def a_batch(coordinator, name):
    """A batch of one part, and its alarms."""
    alarms = []
    return coordinator.batch(name, ["a"], window="1h", on_failed=alarms.append), alarms


@contextlib.contextmanager
def a_part(coordinator, database, name):
    """Its loss is reported at its end, with the member that this process is by then."""
    batch, alarms = a_batch(coordinator, name)
    part, member = batch.part("a").start(), coordinator.client.member
    before, runs = member.member_id, []

    def is_told():
        if not runs and member.member_id != before:
            with pytest.raises(BatchFailed, match="given up part 'a'") as caught:
                part.finish()
            assert alarms[-1] is caught.value
            runs.append(True)
        return bool(runs)

    def ends_well():
        assert part.finish()
        assert (batch.entry().status, alarms) == ("succeeded", [])

    yield Had(partial(take_membership, coordinator, database), is_told, ends_well)
    if part.is_open:
        part.fail("the test is over")


@contextlib.contextmanager
def a_dropped_part(coordinator, database, name):
    """Only the heartbeat thread is left to end it."""
    batch, _ = a_batch(coordinator, name)
    parts = [batch.part("a").start()]

    def take_away():
        parts.clear()
        gc.collect()

    def is_told():
        (part,) = batch.entry().parts
        return (part.status, part.error) == ("failed", "it was dropped without an end")

    def ends_well():
        assert parts[0].finish()

    yield Had(take_away, is_told, ends_well)
    if parts and parts[0].is_open:
        parts[0].fail("the test is over")


#: The grants of both APIs, and the grants of threads alone.
OF_BOTH = (a_lock, one_of_a_limit, a_term, a_run_of_once, a_wait)
OF_THREADS = (a_task, a_task_of_a_worker, a_part, a_dropped_part)
STATES = [("sync", state) for state in (*OF_BOTH, *OF_THREADS)] + [("aio", state) for state in OF_BOTH]
#: Grants that are not lost with the others: their end is recorded, or not.
ENDED_LATER = (a_part, a_dropped_part)


def states(*but):
    """Run a test with each of them, and the API that it needs."""
    cases = [pytest.param(face, state, id=f"{face}-{state.__name__}") for face, state in STATES if state not in but]
    return pytest.mark.parametrize(("face", "state"), cases)


#: Each exception for a lock; for all other grants, the exception that ends a thread silently.
states_and_raised = pytest.mark.parametrize(
    ("face", "state", "raised"),
    [
        pytest.param(face, state, raised, id=f"{face}-{state.__name__}-{raised.__name__}")
        for face, state in STATES
        for raised in (RAISED if state is a_lock else [SystemExit])
    ],
)


# -- callbacks ---------------------------------------------------------------------------------------------------------


@states_and_raised
def test_loss_is_told_after_a_callback_raised(connect, database, name, said, state, raised):
    def fails(grant):
        raise raised

    coordinator = connect(grace=GRACE)
    first = coordinator.mutex(name("first"), on_lost=fails)
    assert first.acquire()
    with state(coordinator, database, name("second")) as holding:
        remove(database, first.grant.position)
        until(lambda: said("on_lost of"), "the failure is logged")
        assert coordinator.client.member.heartbeat_thread.runs
        assert not holding.is_told(), "only one was lost"
        holding.take_away()
        until(holding.is_told, "the second loss is told")
    with pytest.raises(LockLost):
        first.release()


@states()
@pytest.mark.parametrize("number", [1, 40])
def test_loss_is_told_while_callbacks_block(connect, database, name, state, number):
    """Also with more callbacks than the library calls at a time."""
    coordinator, leave = connect(grace=GRACE), threading.Event()
    locks = [coordinator.limit(name("first"), 100, on_lost=lambda grant: leave.wait()) for _ in range(number)]
    try:
        for lock in locks:
            assert lock.acquire()
        with state(coordinator, database, name("second")) as holding:
            remove(database, *(lock.grant.position for lock in locks))
            until(lambda: all(lock.grant.state.why_lost for lock in locks), "the first are told")
            holding.take_away()
            until(holding.is_told, "the second loss is told")
    finally:
        leave.set()
    for lock in locks:
        with pytest.raises(LockLost):
            lock.release()


@both_faces
def test_on_lost_may_use_the_coordinator(connect, database, name):
    coordinator, used = connect(grace=GRACE), Future()

    def use(grant):
        with coordinator.mutex(name("another")) as another:
            used.set_result(another.position > grant.position)

    lock = coordinator.mutex(name, on_lost=use)
    assert lock.acquire()
    remove(database, lock.grant.position)
    assert used.result(PATIENCE)
    with pytest.raises(LockLost):
        lock.release()


@pytest.mark.parametrize("raised", RAISED)
def test_listener_is_called_again_after_it_raised(connect, name, said, raised):
    coordinator, called = connect(), []

    def listen(event):
        called.append(event)
        raise raised

    with coordinator.on("granted", listen):
        for number in (1, 2):
            with coordinator.mutex(name):
                pass
            until(lambda number=number: len(called) == number, "it is called")
    until(lambda: said("The subscriber to 'granted'"), "the failure is logged")


# -- the log -----------------------------------------------------------------------------------------------------------


class Handler(logging.Handler):
    """A program's own handler, which raises, or blocks until the test sets its event."""

    def __init__(self, raised=None):
        super().__init__()
        self.raised, self.called, self.leave = raised, threading.Event(), threading.Event()

    def handle(self, record):
        self.called.set()
        if self.raised is not None:
            raise self.raised
        self.leave.wait()


@pytest.mark.parametrize("raised", [None, *RAISED])
def test_loss_is_reported_despite_a_broken_log_handler(connect, database, name, raised):
    """A full pipe behind standard error does that, for example."""
    coordinator, handler = connect(grace=GRACE), Handler(raised)
    first = coordinator.mutex(name("first"))
    assert first.acquire()
    with a_lock(coordinator, database, name("second")) as holding:
        logger = logging.getLogger("sqlsem")
        logger.addHandler(handler)
        try:
            remove(database, first.grant.position)
            assert handler.called.wait(PATIENCE), "the loss is logged"
            until(lambda: first.grant.state.why_lost is not None, "the first loss is told")
            holding.take_away()
            until(holding.is_told, "the second loss is told")
        finally:
            logger.removeHandler(handler)
            handler.leave.set()
    with pytest.raises(LockLost):
        first.release()


# -- the threads themselves --------------------------------------------------------------------------------------------


def strike(thread, raised):
    """Raise it in a thread, as a debugger, or a watchdog of the program's, may."""
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(raised)) == 1


def kept(coordinator):
    member = coordinator.client.member
    return {"heartbeat": member.heartbeat_thread, "watchdog": member.watchdog}


@states_and_raised
@pytest.mark.parametrize("which", ["heartbeat", "watchdog"])
def test_loss_is_told_after_a_thread_was_struck(connect, database, name, state, said, which, raised):
    coordinator = connect(grace=GRACE)
    with state(coordinator, database, name) as holding:
        strike(kept(coordinator)[which].thread, raised)
        if raised is not ZeroDivisionError:  # the heartbeat thread takes it for a failed heartbeat
            until(lambda: said(f"sqlsem-{which} failed"), "that is logged")
        until(lambda: kept(coordinator)[which].runs, "it goes on")
        assert not holding.is_told(), "nothing was lost"
        holding.take_away()
        until(holding.is_told, "the loss is told")


def end(supervised, monkeypatch):
    """End a thread for good, as an exception can that strikes while the one before is handled."""
    thread, report = supervised.thread, ours._report

    def struck(*words, **options):
        if threading.current_thread() is thread:
            raise SystemExit
        report(*words, **options)

    with monkeypatch.context() as broken:
        broken.setattr(ours, "_report", struck)
        strike(thread, Odd)
        until(lambda: not thread.is_alive(), "it has ended")


@states()
@pytest.mark.parametrize("which", ["heartbeat", "watchdog"])
def test_loss_is_told_after_a_thread_was_ended(connect, database, name, state, said, monkeypatch, which):
    coordinator = connect(grace=GRACE)
    with state(coordinator, database, name) as holding:
        end(kept(coordinator)[which], monkeypatch)
        until(lambda: kept(coordinator)[which].runs, "another one goes on")
        assert not holding.is_told(), "nothing was lost"
        holding.take_away()
        until(holding.is_told, "the loss is told")


@states()
@pytest.mark.parametrize("which", ["heartbeat", "watchdog"])
def test_all_goes_on_with_a_new_thread(connect, database, name, state, monkeypatch, which):
    coordinator = connect(grace=3 * GRACE)
    with state(coordinator, database, name) as holding:
        member = coordinator.client.member
        end(kept(coordinator)[which], monkeypatch)
        until(lambda: kept(coordinator)[which].runs, "another one goes on")
        begun = time.monotonic()
        until(lambda: member._last_heartbeat > begun or holding.is_told(), "it pings")
        assert not holding.is_told(), "nothing was lost"
        holding.ends_well()


@both_faces
@pytest.mark.parametrize("asks", ["the grant", "another lock"])
def test_both_threads_are_begun_again_when_asked(connect, database, name, monkeypatch, asks):
    """Neither thread watches the other any more; the next use of a lock in this process does."""
    coordinator = connect(grace=GRACE)
    with a_lock(coordinator, database, name) as holding:
        member, (grant,) = coordinator.client.member, coordinator.client.registry.grants()
        with monkeypatch.context() as alone:
            alone.setattr(ours, "restart_ended", lambda: None)
            alone.setattr(member.watchdog, "restart_ended", lambda: None)
            alone.setattr(member.heartbeat_thread, "restart_ended", lambda: None)
            end(member.watchdog, monkeypatch)
            end(member.heartbeat_thread, monkeypatch)
        if asks == "the grant":
            until(lambda: grant.lost or member.heartbeat_thread.runs, "the grant knows, or asks")
        else:
            for _ in range(40):
                # (A machine that takes the grace for this loses both locks, and rightly so.)
                with contextlib.suppress(LockLost), coordinator.mutex(name("another")):
                    pass
        until(lambda: member.heartbeat_thread.runs and member.watchdog.runs, "both are there again")
        holding.take_away()
        until(holding.is_told, "the loss is told")


@states(*ENDED_LATER)
def test_all_is_lost_when_no_thread_can_be_started(connect, database, name, said, state, monkeypatch):
    coordinator = connect(grace=GRACE)
    with state(coordinator, database, name) as holding:

        def none_left(self):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as full:
            heartbeat = kept(coordinator)["heartbeat"]
            full.setattr(threading.Thread, "start", none_left)
            end(heartbeat, monkeypatch)
            until(holding.is_told, "all is lost")
        until(lambda: heartbeat.runs, "it goes on as soon as it can")
    with coordinator.mutex(name("next")) as grant:
        grant.check()


def test_part_counts_or_is_told_when_no_thread_can_be_started(connect, name, monkeypatch):
    """The result at its end is the recorded result."""
    coordinator = connect(grace=GRACE)
    batch, alarms = a_batch(coordinator, name)
    part, heartbeat = batch.part("a").start(), kept(coordinator)["heartbeat"]

    def none_left(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none_left)
        end(heartbeat, monkeypatch)
        until(lambda: not heartbeat.runs)
    failure = None
    try:
        part.finish()
    except BatchFailed as exc:
        failure = exc
    until(lambda: batch._declaration.recover() or batch.entry().status != "open", "its end is recorded")
    assert batch.entry().status == ("succeeded" if failure is None else "failed")
    assert alarms == ([] if failure is None else [failure])


class Slow:
    """A program's object with a finalizer that blocks the thread that collects it."""

    def __init__(self, entered, leave):
        self.entered, self.leave, self.me = entered, leave, self

    def stand(self):
        self.entered.set()
        self.leave.wait()


@states()
def test_loss_is_told_though_a_thread_is_stuck(connect, database, name, state, said):
    """It hangs in a program's code, and no event ends that."""
    coordinator, entered, leave = connect(grace=GRACE), threading.Event(), threading.Event()
    slow = Slow(entered, leave)
    with state(coordinator, database, name) as holding:
        heartbeat = kept(coordinator)["heartbeat"]
        before = heartbeat.thread
        coordinator.client.event_loops.discard_closed_loops, tidy = (
            _once(slow.stand, coordinator.client.event_loops.discard_closed_loops),
            None,
        )
        try:
            assert entered.wait(PATIENCE)
            del tidy
            holding.take_away()
            until(holding.is_told, "the loss is told")
            # (A slow machine tells the loss before: no heartbeat was answered in time.)
            until(lambda: heartbeat.thread is not before, "another thread replaces it")
            until(lambda: said("sqlsem-heartbeat is stuck at"), "that is logged")
        finally:
            leave.set()
    until(lambda: not before.is_alive(), "the stuck thread ends when it can")
    del coordinator.client.event_loops.discard_closed_loops


def _once(call, then):
    calls = [call]

    def step():
        if calls:
            calls.pop()()
        return then()

    return step


@pytest.mark.engines("sqlite")  # on other databases no grant is trusted after such a long silence
def test_slow_database_is_not_taken_for_a_stuck_thread(connect, name, said):
    coordinator = connect(grace=GRACE)
    with coordinator.mutex(name):
        member = coordinator.client.member
        thread, session = member.heartbeat_thread.thread, member.main.session
        session_ping, began = type(session).heartbeat, threading.Event()
        blocked = threading.Event()

        def late(self, member_id):
            began.set()
            blocked.wait(3 * GRACE)
            return session_ping(self, member_id)

        late.__module__ = "sqlsem.engines.slow"
        globals_of = dict(globals(), __name__="sqlsem.engines.slow")
        slow = type(late)(late.__code__, globals_of, "late", late.__defaults__, late.__closure__)
        patch = pytest.MonkeyPatch()
        patch.setattr(type(session), "heartbeat", slow)
        try:
            assert began.wait(PATIENCE)
            time.sleep(GRACE)
            assert member.heartbeat_thread.thread is thread
        finally:
            blocked.set()
            patch.undo()
    assert not said("is stuck at")


# -- other threads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", RAISED)
def test_pooled_thread_survives_an_error_of_its_job(said, raised):
    done, closing = [], threading.Event()

    def job(goes_on):
        done.append(1)
        if len(done) < 3:
            raise raised
        while goes_on():
            closing.wait(0.01)

    thread = ours.SupervisedThread("a-job", job, closing)
    thread.begin()
    until(lambda: len(done) == 3, "it goes on")
    closing.set()
    until(lambda: not thread.runs, "it ends")
    assert said("a-job failed; it begins again")


def test_kept_thread_that_has_died_is_begun_again(said, monkeypatch):
    closing, ran = threading.Event(), []

    def job(goes_on):
        ran.append(threading.current_thread())
        closing.wait()

    thread = ours.SupervisedThread("a-job", job, closing)
    thread.begin()
    until(lambda: ran)
    assert thread.runs
    monkeypatch.setattr(thread, "thread", threading.Thread())  # as an ended thread
    ours.restart_ended()
    until(lambda: len(ran) == 2, "another one does it")
    assert said("a-job ended unexpectedly")
    closing.set()


def test_pool_reports_the_job_of_an_ended_thread():
    pool = ours.Pool("a-pool", 1)
    began, leave = threading.Event(), threading.Event()

    def job():
        began.set()
        leave.wait()

    future = pool.submit(job)
    assert began.wait(PATIENCE)
    (worker,) = pool._workers
    worker.supervised.thread = threading.Thread()  # as an ended thread
    ours.restart_ended()
    with pytest.raises(RuntimeError, match="ended during this call"):
        future.result(PATIENCE)
    assert pool.submit(lambda: 7).result(PATIENCE) == 7
    leave.set()
    pool.close(PATIENCE)


def test_pool_refuses_where_no_thread_can_be_started(monkeypatch):
    pool, patient = ours.Pool("a-pool", 1), ours.Pool("a-patient-pool", 1, patient=True)

    def none_left(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(lambda: 1)
        later = patient.submit(lambda: 2)
    ours.restart_ended()
    assert later.result(PATIENCE) == 2
    assert pool.submit(lambda: 3).result(PATIENCE) == 3
    for open_pool in (pool, patient):
        open_pool.close(PATIENCE)
    gc.collect()
    assert runtime.current() is runtime.THREADS
