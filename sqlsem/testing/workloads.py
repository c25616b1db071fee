"""Programs for `sqlsem.testing.simulate` that use features built on locks: work queues, priorities, leaders, jobs that
run once per period, release on commit. Each checks its own results; the simulation checks the locks.
"""

from __future__ import annotations

import contextlib
from typing import Any

from sqlsem.api.leader import Term
from sqlsem.client.grants import Grant
from sqlsem.tasks.queues import Queue
from sqlsem.testing.real import Row
from sqlsem.testing.world import LEFT_SECONDS, Actor
from sqlsem.values.errors import LockLost, NotHeld
from sqlsem.values.names import PRIORITY_PREFIX

__all__ = ["departing", "leading", "periodic", "queued", "ranked"]

#: Give each task this many attempts, because each crash takes one.
MAX_ATTEMPTS = 100


def queued(me: Actor) -> None:
    """Put and run tasks, some of them with locks, in all processes; check that each is finished exactly once."""
    chance = me.random
    queue = me.locks.queue("work", on_failure="continue")
    put: set[int] = me.shared.setdefault("put", set())
    for number in range(chance.randrange(1, 4)):
        kind = chance.randrange(5)
        if kind <= 1:
            put.add(queue.put({"number": number}, max_attempts=MAX_ATTEMPTS))
        elif kind == 2:
            put.add(queue.put({}, locks=[me.locks.mutex("r"), me.locks.limit("s", 2)], max_attempts=MAX_ATTEMPTS))
        elif kind == 3:
            with me.locks.mutex("r"):
                me.step("inside")
        else:
            _run_a_task(me, queue)
    while True:
        before = set(put)  # (Other processes put more tasks meanwhile.)
        counts = queue.counts()
        if counts is None or counts.pending + counts.running == 0:
            break
        if not _run_a_task(me, queue):
            me.sleep(1.0)
    statuses = {task.task_id: task.status for task in queue.tasks(maximum=1000)}
    unfinished = {task: statuses.get(task, "does not exist") for task in before if statuses.get(task) != "finished"}
    assert not unfinished, f"the queue is empty, but tasks are not finished: {unfinished}"


def _run_a_task(me: Actor, queue: Queue) -> bool:
    """Run one task; return False if there was none."""
    task = queue.try_claim()
    if task is None:
        return False
    finished: dict[int, str] = me.shared.setdefault("finished", {})
    with contextlib.suppress(LockLost, NotHeld):  # then another process runs it
        with task:
            me.step(f"runs task {task.id}")
            me.sleep(me.random.choice((0.0, 0.0, 2.0)))
        assert task.id not in finished, f"{me} has finished task {task.id}, and so has {finished[task.id]}"
        finished[task.id] = me.name
    return True


def ranked(me: Actor) -> None:
    """Acquire a lock by priority, and check that no request overtakes an earlier one of at least its priority."""
    chance = me.random
    me.locks.admin.set_priorities("p", "10s")
    for _ in range(chance.randrange(1, 4)):
        priority = chance.choice((0, 0, 5))
        lock = me.locks.mutex("p", priority=priority)
        # (Rows of this process's earlier requests may still be there; they do not belong to this request.)
        me.shared.setdefault("left", set()).update(row.position for row in _rows(me) if row.host == me.name)
        before = {position for position, other in _waiting(me).items() if other >= priority}
        me.shared[me.name] = priority
        if lock.acquire(timeout=chance.choice((0, 5.0, None))):
            passed = before & _waiting(me).keys()
            assert not passed, f"{me} has overtaken earlier requests of at least its priority: {sorted(passed)}"
            me.step("inside")
            me.sleep(chance.choice((0.0, 0.0, 3.0)))
            lock.release()


def _rows(me: Actor) -> list[Row]:
    return [row for name in (PRIORITY_PREFIX + "p", "p") for row in me.world.server.rows_on(name)]


def _waiting(me: Actor) -> dict[int, int]:
    """Return the priorities of the waiters, by position. (A row may be granted in the priority queue only.)"""
    known = [row for row in _rows(me) if row.host in me.shared and row.position not in me.shared["left"]]
    return {
        row.position: me.shared[str(row.host)]
        for row in known
        if not row.revoked and (row.resource != "p" or not row.granted)
    }


def leading(me: Actor) -> None:
    """Lead: one leader at a time, from on_started to the end of on_stopped, each with a larger fence."""

    def begins(term: Term) -> None:
        other = me.shared.get("leads")
        assert other is None or not _leads(*other), f"{me} leads, and {other[0]} has not stopped"
        me.shared["leads"] = (me, term)
        me.step("begins")

    def stops(term: Term) -> None:
        me.step("stops")
        if me.shared.get("leads") == (me, term):
            del me.shared["leads"]

    leader = me.locks.leader("scheduler", on_started=begins, on_stopped=stops, handle_sigterm=False)
    for _ in range(me.random.randrange(1, 3)):
        with leader as term:
            terms: list[int] = me.shared.setdefault("terms", [])
            assert not terms or terms[-1] < term.fence, f"fence {term.fence} after {terms[-1]}"
            terms.append(term.fence)
            me.step("leads")
            if me.random.random() < 0.3:
                term.ending.wait(9.0)
                me.step("ends its term")


def _leads(actor: Actor, term: Term) -> bool:
    """Return True if the actor believes that it leads. (A dead or stopped actor believes nothing.)"""
    return actor.runs and not term.lost and not actor.client.member.is_uncertain()


def periodic(me: Actor) -> None:
    """Run a job once a period, and check that only one process has done it."""
    done: dict[Any, str] = me.shared.setdefault("done", {})
    for _ in range(me.random.randrange(1, 4)):
        me.step("asks")
        run = me.locks.once("report", per="1d").begin()
        if run is None:
            assert "begun" in me.shared, "no process has run it, and yet it counts as done"
            continue
        me.shared["begun"] = True
        me.step("runs it")
        if me.random.random() < 0.2:
            run.fail()
            continue
        run.finish()
        assert not done, f"{me} has done it, and so has {done}"
        done["report"] = me.name


class _Undone(Exception):
    """Raised to roll a transaction back."""


def departing(me: Actor) -> None:
    """Release locks on the commit of the program's transaction (`sqlsem.Grant.release_on_commit`), and check that this
    happens soon after the commit, never before it, and not after a rollback, also to a savepoint.
    """
    locks, chance = me.locks, me.random
    for _ in range(chance.randrange(1, 3)):
        how = chance.choice(("by hand", "commit", "commit", "commit and leave", "rollback", "savepoint", "again"))
        lock = locks.mutex("r") if chance.random() < 0.7 else locks.all_of(locks.mutex("r"), locks.limit("s", 2))
        with lock as grant:
            me.step("inside")
            if how == "by hand":
                continue
            with contextlib.suppress(_Undone), me.transaction() as cursor:
                if how == "savepoint":
                    cursor.execute("SAVEPOINT here")
                grant.release_on_commit(cursor)
                me.step("writes")
                if how == "again":
                    cursor.execute("SAVEPOINT here")
                    grant.release_on_commit(cursor)
                if how in ("savepoint", "again"):
                    cursor.execute("ROLLBACK TO SAVEPOINT here")
                me.sleep(chance.choice((0.0, 0.0, 1.0)))
                _require_not_released(me, grant, "before the commit")
                if how == "rollback":
                    raise _Undone
            if how in ("rollback", "savepoint"):
                me.sleep(1.0)
                _require_not_released(me, grant, f"after a {how} that has undone the call")
            elif how != "commit and leave":
                _wait_for_release(me, grant)


def _require_not_released(me: Actor, grant: Grant, when: str) -> None:
    gone = me.world.server.released.intersection(ticket.position for ticket in grant.state.tickets)
    assert not gone, f"{me} has released the lock at {sorted(gone)}, {when}"


def _wait_for_release(me: Actor, grant: Grant) -> None:
    """Wait for the release after the commit. (The time limit begins anew while faults happen.)"""
    world, state = me.world, grant.state
    positions, since = {ticket.position for ticket in state.tickets}, world.fibers.now
    while state.why_lost is None and any(row.position in positions for row in world.server.rows()):
        since = max(since, world.calm_since) if world.calm else world.fibers.now
        assert world.fibers.now <= since + LEFT_SECONDS, (
            f"{me} still holds {state!r}, which a commit should have released"
        )
        me.sleep(0.1)
