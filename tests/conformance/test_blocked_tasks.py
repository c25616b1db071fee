"""Tasks with locks: on every engine, by programs and workers."""

import threading
import time

import pytest
from click.testing import CliRunner
from support import PATIENCE, until

import sqlsem
from sqlsem.cli import main
from sqlsem.engines.base import Busy
from sqlsem.engines.protocol import Capability
from sqlsem.tasks import Json, Worker
from sqlsem.values.locks import monotonic


@pytest.fixture
def patient(connect, database):
    """A coordinator with a grace long enough for an engine that compiles routines at their first run."""
    return lambda: connect(grace=30) if database.engine == "mssql" else connect()


@pytest.fixture
def queue(patient, name):
    work_queue = patient().queue(name)
    if not work_queue.claiming.client.engine.has(Capability.BLOCKED_TASKS):
        pytest.skip("this engine has no tasks with locks")
    yield work_queue
    work_queue.set_limit(None)
    work_queue.set_key_limit(None)


@pytest.fixture
def other(patient):
    """Another coordinator, which the database takes for another process."""
    return patient()


def rows(coordinator, resource):
    return [(entry.owner or "", entry.state) for entry in coordinator.admin.entries(resource)]


def takes(coordinator, resource):
    """True if the lock is free."""
    lock = coordinator.mutex(resource)
    return lock.acquire(timeout=0) and lock.release() is None


def waits_for(database, connection):
    """True if a client waits for a lock of this connection."""
    return database.rows(
        "SELECT 1 FROM pg_stat_activity WHERE ? = ANY (pg_blocking_pids(pid))", connection.info.backend_pid
    )


def test_task_with_free_locks_starts_holding_them(queue, other, name):
    customers, pg = f"{name} customers", f"{name} pg"
    number = queue.put(Json("load"), locks=[sqlsem.write(customers), sqlsem.limit(pg, 4)])
    (entry,) = queue.tasks()
    assert (entry.task_id, entry.status, entry.blocked) == (number, "pending", True)
    assert [(lock.resource, lock.access, lock.limit) for lock in entry.locks] == [
        (customers, "write", 1),
        (pg, "write", 4),
    ]
    assert rows(other, customers) == []  # no client has requested the locks yet
    with queue.try_claim() as task:
        assert task.id == number
        assert task.grant.positions.keys() == {customers, pg}
        assert not other.mutex(customers).acquire(timeout=0)
        task.grant.check()
        assert [state for _, state in rows(other, customers)] == ["holds"]
        (entry,) = queue.tasks("running")
        assert {lock.resource: lock.position for lock in entry.locks} == task.grant.positions
    assert rows(other, customers) == rows(other, pg) == []
    assert [(hold.outcome, hold.resource) for hold in other.admin.history(customers)] == [("released", customers)]
    assert queue.state().done


def test_blocked_task_queues_without_a_worker(queue, other, name, threads):
    with other.mutex(name):
        number = queue.put(Json("load"), locks=[sqlsem.mutex(name)])
        assert queue.try_claim() is None
        assert rows(other, name)[1:] == [(f"task {number} of {name}", "waits")]
        assert queue.state().pending
        after = other.mutex(name)
        waiter = threads.start(lambda: after.acquire() and after.release())
        until(lambda: len(rows(other, name)) == 3)
    until(lambda: rows(other, name)[0][1] == "waits")
    assert not [row for row in rows(other, name) if row[1] == "holds"]  # the task comes first
    with queue.try_claim() as task:
        assert task.id == number
        assert waiter.is_alive()
    threads.join()


def test_blocked_task_is_overtaken_in_its_queue(queue, other, name):
    with other.mutex(name):
        queue.put(Json("blocked"), locks=[sqlsem.mutex(name)])
        queue.put_many([Json("a"), Json("b")])
        bodies = []
        while (task := queue.try_claim()) is not None:
            with task:
                bodies.append(task.body)
        assert bodies == ["a", "b"]
    with queue.try_claim() as task:
        assert task.body == "blocked"


def test_later_order_waits_for_a_blocked_task(queue, other, name):
    with other.mutex(name):
        queue.put(Json("blocked"), locks=[sqlsem.mutex(name)])
        queue.put(Json("late"), order=1)
        assert queue.try_claim() is None
    with queue.try_claim() as task:
        assert task.body == "blocked"
        assert queue.try_claim() is None
    with queue.try_claim() as task:
        assert task.body == "late"


def test_a_later_order_does_not_stand_in_the_lines(queue, other, name):
    first = queue.put(Json("first"))
    queue.put(Json("blocked"), order=1, locks=[sqlsem.mutex(name)])
    with queue.try_claim() as task:
        assert task.id == first
        assert queue.try_claim() is None
        assert takes(other, name)
    with queue.try_claim() as task:
        assert task.body == "blocked"


def test_blocked_task_yields_to_a_lower_order(queue, other, name):
    """A blocked task leaves its queues when a lower order opens, so that no client waits behind it meanwhile."""
    held = other.mutex(name)
    assert held.acquire()
    queue.put(Json("blocked"), order=1, locks=[sqlsem.mutex(name)])
    assert queue.try_claim() is None
    assert len(rows(other, name)) == 2
    queue.put(Json("first"), order=0)
    with queue.try_claim() as task:
        assert task.body == "first"
        held.release()
        assert queue.try_claim() is None
        assert rows(other, name) == []
        assert takes(other, name)
    with queue.try_claim() as task:
        assert task.body == "blocked"


def test_a_retry_asks_again_and_holds_nothing_meanwhile(queue, other, name):
    queue.put(Json("load"), locks=[sqlsem.mutex(name)], max_attempts=3, backoff=0.2)
    with pytest.raises(ValueError), queue.try_claim() as task:
        first = task.grant.fence
        raise ValueError
    assert rows(other, name) == []
    assert takes(other, name)
    (entry,) = queue.tasks()
    assert (entry.blocked, entry.failures) == (True, 1)
    task = queue.claiming.wait_for_task(PATIENCE)
    assert task.grant.fence > first
    task.release()
    with queue.try_claim() as task:
        assert task.attempt == 3


def test_cancel_of_a_blocked_task_removes_its_rows(queue, other, name):
    with other.mutex(name):
        number = queue.put(Json("load"), locks=[sqlsem.mutex(name)])
        assert queue.try_claim() is None
        other.admin.cancel_task(number)
        assert len(rows(other, name)) == 1
    assert queue.try_claim() is None
    other.admin.retry_task(number)
    with queue.try_claim() as task:
        assert task.id == number


def test_replacing_a_blocked_task_removes_its_rows(queue, other, name):
    with other.mutex(name):
        queue.put(Json("old"), replace="k", locks=[sqlsem.mutex(name)])
        assert queue.try_claim() is None
        queue.put(Json("new"), replace="k", locks=[sqlsem.mutex(name)])
        assert queue.try_claim() is None
        assert len(rows(other, name)) == 2
    with queue.try_claim() as task:
        assert task.body == "new"
    assert queue.try_claim() is None


def test_revoked_row_of_a_blocked_task_requeues_it(queue, other, name):
    """The task requests all of its locks again, at the end of the queues."""
    second = f"{name} 2"
    with other.mutex(name):
        queue.put(Json("load"), locks=[sqlsem.mutex(name), sqlsem.mutex(second)])
        assert queue.try_claim() is None
        before = other.admin.entries(second)[0].position
        other.admin.revoke(other.admin.entries(name)[1].position)
    with until(queue.try_claim):  # (a task that nobody keeps is returned)
        assert other.admin.entries(second)[0].position > before


def test_a_paused_resource_keeps_it_waiting(queue, other, name):
    queue.put(Json("load"), locks=[sqlsem.mutex(name)])
    other.admin.pause(name)
    try:
        assert queue.try_claim() is None
    finally:
        other.admin.resume(name)
    with queue.try_claim() as task:
        assert task.grant.resource == str(name)


def test_pause_after_its_turn_keeps_task_blocked(queue, other, name):
    """A task whose turn came at one lock and later at the other checks both again: a pause keeps it blocked."""
    second = name("second")
    queue.put(Json("load"), locks=[sqlsem.mutex(name), sqlsem.mutex(second)])
    with other.mutex(second):
        assert queue.try_claim() is None
        other.admin.pause(name)
    try:
        assert queue.try_claim() is None
    finally:
        other.admin.resume(name)
    with until(queue.try_claim) as task:
        assert task.grant.positions.keys() == {str(name), second}


def test_a_lost_lock_fails_the_attempt(queue, other, name):
    queue.put(Json("load"), locks=[sqlsem.mutex(name)], on_failure="continue")
    task = queue.try_claim()
    other.admin.revoke(task.grant.position, force=True)
    with pytest.raises(sqlsem.LockLost):
        task.grant.check()
    with pytest.raises(sqlsem.LockLost), task:
        pass
    (entry,) = queue.tasks()
    assert (entry.status, "lost" in entry.error) == ("failed", True)


def test_limits_of_a_key_count_with_locks(queue, name):
    queue.set_key_limit(1)
    queue.set_limit(2)
    queue.put_many([Json("a"), Json("b")], key="k", locks=[sqlsem.read(name)])
    queue.put(Json("c"), key="l", locks=[sqlsem.read(name)])
    first, second = queue.try_claim(), queue.try_claim()
    assert {first.body, second.body} == {"a", "c"}
    assert queue.try_claim() is None
    assert len(queue.tasks("pending")) == 1
    first.finish()
    with queue.try_claim() as task:
        assert task.body == "b"
    second.finish()


def test_the_grant_may_be_handed_over_and_stays_after_the_end(queue, other, name):
    queue.put(Json("load"), locks=[sqlsem.mutex(name)])
    with queue.try_claim() as task:
        fence = task.grant.fence
        token = task.grant.hand_over()
    with other.adopt(token) as grant:
        assert grant.fence == fence


def test_invalid_task_locks_are_refused(queue, name, connect):
    lock = sqlsem.mutex(name)
    for locks in (
        ["customers"],
        [lock, lock],
        [sqlsem.all_of(lock, sqlsem.limit(f"{name} 2", 2)), lock],
        [sqlsem.mutex(name, timeout=5)],
        [sqlsem.mutex(lambda: "x")],
        7,
        [connect().mutex(name)],
        [sqlsem.rate(name, 5, per=1)],
        [sqlsem.limit(name, 5, priority=3)],
        [sqlsem.limit(f"{name} none")],  # the server has no limit for this resource
        [sqlsem.mutex(f"{name} {number}") for number in range(101)],
    ):
        with pytest.raises(sqlsem.ConfigurationError):
            queue.put(Json("x"), locks=locks)
    assert queue.tasks() == []


def test_the_command_line_puts_shows_and_tells_why(queue, other, name, database):
    def cli(*arguments):
        options = [word for option, value in database.options.items() for word in (f"--{option}", str(value))]
        result = CliRunner().invoke(main, ["--url", database.url, *options, *arguments], prog_name="sqlsem")
        assert result.exit_code == 0, result.output
        return result.output

    with other.mutex(name):
        locks = ["--lock", f"mutex:{name}", "--lock", f"limit:{name} pg=2:2"]
        number = cli("put", queue.name, *locks, "--json-body", "1").strip()
        assert queue.try_claim() is None
        assert "blocked" in cli("tasks", queue.name)
        output = cli("why", "--task", number)
        assert "it waits for its locks, without a worker" in output
        assert "has held it" in output
    with queue.try_claim() as task:
        assert task.grant.positions.keys() == {str(name), f"{name} pg"}


def test_workers_hold_the_locks_of_their_tasks(patient, queue, other, name):
    """Three workers with two threads each never exceed a mutex and a limit of two, by the history."""
    pg = f"{name} pg"
    for number in range(12):
        lock = sqlsem.mutex(name) if number % 2 else sqlsem.limit(pg, 2)
        queue.put(sqlsem.Call("time:sleep", 0.02), locks=[lock])
    workers = [Worker(patient().queue(queue.name), 2, idle_exit=1) for _ in range(3)]
    running = [threading.Thread(target=worker.run) for worker in workers]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(PATIENCE)
    assert sum(worker.finished for worker in workers) == 12
    for resource, maximum in ((name, 1), (pg, 2)):
        held = [hold for hold in other.admin.history(resource, maximum=100) if hold.granted_at is not None]
        assert len(held) == 6
        assert all(
            sum(overlapping.granted_at <= row.granted_at < overlapping.ended_at for overlapping in held) <= maximum
            for row in held
        )


@pytest.mark.leaves_rows
def test_500_of_them_cost_no_connection_and_no_row_that_holds(queue, other, name):
    with other.mutex(name):
        queue.put_many([Json("x")] * 500, locks=[sqlsem.mutex(name)])
        until(lambda: queue.try_claim() is None and len(other.admin.entries(name)) == 501)
        assert [entry.state for entry in other.admin.entries(name)].count("holds") == 1
        queue.put(Json("plain"))
        began = time.monotonic()
        with queue.try_claim() as task:
            assert task.body == "plain"
        assert time.monotonic() - began < PATIENCE


def test_upgrade_does_not_wait_for_a_blocked_task(queue, other, patient, name):
    """The blocked task holds nothing, so it stays behind the writer."""
    second = f"{name} 2"
    with other.read(name) as grant:
        with patient().mutex(second):
            queue.put(Json("load"), locks=[sqlsem.read(name), sqlsem.mutex(second)])
            assert queue.try_claim() is None
            grant.upgrade(timeout=PATIENCE)
        assert queue.try_claim() is None
        assert [state for _, state in rows(other, name)] == ["holds", "waits"]
    with queue.try_claim() as task:
        assert task.grant.positions.keys() == {name, second}


def test_lock_adopted_back_outlives_the_task(queue, patient, other, name):
    worker = patient()
    queue.put(Json("load"), locks=[sqlsem.mutex(name)])
    with worker.queue(name).try_claim() as task:
        grant = worker.adopt(task.grant.hand_over())
    with grant:
        assert not other.mutex(name).acquire(timeout=0)
        grant.check()


def test_a_key_that_is_full_keeps_no_other_key_from_asking(queue, name):
    queue.set_key_limit(1)
    queue.put_many([Json(str(number)) for number in range(120)], key="k", locks=[sqlsem.read(name)])
    queue.put(Json("other"), key="l", locks=[sqlsem.read(name)])
    with queue.try_claim() as first, queue.try_claim() as second:
        assert {first.body, second.body} == {"0", "other"}
        assert queue.try_claim() is None


@pytest.mark.engines("postgresql")  # SQLite has one writer at a time, SQL Server waits for the row
def test_a_row_that_is_taken_away_during_the_claim(queue, other, name, database, threads):
    with other.mutex(name):
        queue.put(Json("load"), locks=[sqlsem.mutex(name)])
        assert queue.try_claim() is None
    (entry,) = other.admin.entries(name)
    operator = database.raw(autocommit=False)
    operator.execute(f"SELECT {database.schema}.revoke(%s, false)", (entry.position,))
    claimed = []
    threads.start(lambda: claimed.append(queue.try_claim()))
    until(lambda: claimed or waits_for(database, operator))
    operator.commit()
    operator.close()
    threads.join()
    assert claimed == [None]
    with until(queue.try_claim) as task:
        assert rows(other, name) == [(task.grant.state.caller.owner, "holds")]


@pytest.mark.engines("postgresql")
def test_cancel_of_a_task_with_a_pinned_row(queue, other, name, database, threads):
    with other.mutex(name):
        number = queue.put(Json("load"), locks=[sqlsem.mutex(name)])
        assert queue.try_claim() is None
        operator = database.raw(autocommit=False)
        operator.execute(f"SELECT {database.schema}.revoke(%s, false)", (other.admin.entries(name)[1].position,))
        threads.start(other.admin.cancel_task, number)
        until(lambda: queue.tasks()[0].status == "cancelled" or waits_for(database, operator))
        operator.rollback()
        operator.close()
        threads.join()
        assert len(rows(other, name)) == 1


def test_queued_claim_hides_no_orphan_row_from_heartbeat(queue, monkeypatch):
    """A claim that still queues for the main session keeps no heartbeat from removing orphan rows."""
    member = queue.claiming.client.member
    queue.try_claim()  # opens the main session
    call, pending = member.call, []

    def look_and_call(*arguments, **options):
        pending.append(dict(member._pending_registrations))
        return call(*arguments, **options)

    monkeypatch.setattr(member, "call", look_and_call)
    queue.try_claim()
    assert pending
    assert not any(pending)


@pytest.mark.engines("postgresql")
def test_other_claims_do_not_read_blocked_tasks(database, name):
    def rows_read():
        count = "SELECT sum(idx_tup_fetch + seq_tup_read) FROM pg_stat_all_tables WHERE relname = 'task'"
        return int(database.rows(count)[0][0])

    def claim(number):
        before = rows_read()
        with database.coordinator() as worker:
            queue = worker.queue(name)
            queue.put_many(list(range(number)))
            for _ in range(number):
                with queue.try_claim() as task:
                    assert task.grant is None
        until(lambda: rows_read() > before, "what the session has read is counted")
        return rows_read() - before

    with database.coordinator() as holder, holder.mutex(f"{name} busy"):
        alone = claim(40)
        holder.queue(name).put_many(list(range(1000)), locks=[sqlsem.mutex(f"{name} busy")])
        claim(1)  # tasks that were just put request their locks
        # (Checks for startable tasks happen now and then, by the clock.)
        assert claim(40) < alone + 40 * 1000 / 2


@pytest.mark.parametrize("due", [False, True])
def test_retried_claim_finds_its_locks_again(patient, name, monkeypatch, due):
    """A repeated claim finds the locks of the lost answer, also if the client checked other tasks first."""
    queue = patient().queue(name)
    if not queue.claiming.client.engine.has(Capability.BLOCKED_TASKS):
        pytest.skip("this engine has no tasks with locks")
    queue.try_claim()  # opens the main session
    queue.put(Json("load"), locks=[sqlsem.mutex(name)])
    session = queue.claiming.client.member.main.session
    claim, lost = session.claim_blocked, []

    def lose_the_first_reply(*arguments):
        answer = claim(*arguments)
        if not lost:
            lost.append(answer)
            raise Busy("the reply is lost")
        return answer

    monkeypatch.setattr(session, "claim_blocked", lose_the_first_reply)
    queue.claiming._check_blocked_at = 0 if due else monotonic() + PATIENCE
    with queue.try_claim() as task:
        assert [task.id] == [claimed.task_id for claimed in lost]
        task.grant.check()


@pytest.fixture
def offered(queue):
    """``offered(locks)`` puts a task with these locks, and lets a worker poll until the task can start."""
    claimed, over = threading.Event(), threading.Event()
    workers = []

    def work():
        while not over.is_set():
            for task in queue.claim(wait=0.5):
                with task:
                    claimed.set()
                return

    def put(locks):
        queue.put(Json("x"), locks=locks)
        workers.append(threading.Thread(target=work))
        workers[0].start()
        return claimed

    yield put
    over.set()
    for worker in workers:
        worker.join(PATIENCE)


@pytest.mark.parametrize("between", [0, 1])
def test_a_task_with_locks_in_a_knot(offered, patient, queue, name, between, threads):
    """The task waits for two locks; the holder of the first waits for the second, behind the task.

    With ``between`` more waiters in the cycle. The youngest request gives up, and the task starts.
    """
    first, second, third = name("first"), name("second"), name("third")
    holder = patient()
    held = holder.mutex(second)
    assert held.acquire()
    claimed = offered([sqlsem.mutex(first), sqlsem.mutex(second)])
    until(
        lambda: len(holder.admin.entries(first)) == len(holder.admin.entries(second)) - 1 == 1,
        "the task stands in both lines",
    )
    if between:
        ended, inside = threading.Event(), threading.Event()
        gave_up = []

        def other():
            asks = patient()
            with asks.mutex(third):
                inside.set()
                until(lambda: len(holder.admin.entries(third)) == 2, "the holder waits for it")
                try:
                    asks.mutex(first).acquire(timeout=PATIENCE)
                except sqlsem.Deadlock as exc:
                    gave_up.append(exc)
            ended.set()

        threads.start(other)
        assert inside.wait(PATIENCE)
        with holder.mutex(third, timeout=PATIENCE):
            pass
        assert ended.wait(PATIENCE)
        threads.join()
        (exc,) = gave_up
    else:
        with pytest.raises(sqlsem.Deadlock) as caught:
            holder.mutex(first).acquire(timeout=PATIENCE)
        exc = caught.value
    assert first in str(exc)
    assert not claimed.is_set()  # the task has not got a lock that another client holds
    held.release()
    assert claimed.wait(PATIENCE)
    until(lambda: queue.state().done)
    assert rows(holder, first) == rows(holder, second) == []


def test_blocked_task_deleted_by_hand_leaves_its_queues(database, queue, other, name):
    """Other tasks of the queue stay blocked, so their waiter leases are renewed."""
    with other.mutex(name):
        deleted, stays = (queue.put(Json(body), locks=[sqlsem.mutex(name)]) for body in ("gone", "stays"))
        assert queue.try_claim() is None
        assert len(rows(other, name)) == 3
        database.rows(f"DELETE FROM {database.beside('task')} WHERE task_id = ?", deleted)

        def left():
            assert queue.try_claim() is None
            return [owner for owner, _ in rows(other, name)[1:]]

        until(lambda: left() == [f"task {stays} of {queue.name}"], "its row is gone")
    with next(queue.claim(wait=PATIENCE)) as task:
        assert task.id == stays
    assert rows(other, name) == []
