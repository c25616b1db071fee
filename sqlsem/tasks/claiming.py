"""Claims and ends tasks of a queue, for programs and workers: one task or a group, in a single call.

Also polls for tasks, and recovers the tasks of dead workers. After a lost reply, a deferred call undoes the claim,
which has the call's uid; an end is looked up in the log of the task's attempts.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlsem.client.callers import this_thread
from sqlsem.client.client import DatabaseClient
from sqlsem.client.defaults import Coordinated, client_of
from sqlsem.client.held.claims import owner_name
from sqlsem.client.operations.backoff import backoff_delays
from sqlsem.engines.base import Session
from sqlsem.engines.protocol import Capability
from sqlsem.tasks.schedules import Scheduler
from sqlsem.tasks.task import Task, remember_ends, tickets_of
from sqlsem.values.locks import monotonic
from sqlsem.values.tasks import Claimed, End

log = logging.getLogger("sqlsem")
T = TypeVar("T")

#: The pause between two searches for dead workers: this part of the grace, but within the bounds of `Timing`.
RECOVER_PART = 2 / 5
#: The pause between two checks of blocked tasks is at least this multiple of a check's duration.
BLOCKED_FACTOR = 20
#: The pause before another poll if a task became ready just after a poll.
RECHECK_SECONDS = 0.01


class Claiming:
    """Claims of one queue by this process."""

    def __init__(self, queue: str, coordinator: Coordinated | None) -> None:
        self.queue = queue
        self._coordinator = coordinator
        self._recovering = threading.Lock()
        self._recovered_at = 0.0
        self._scheduler = Scheduler(queue)
        self._check_blocked_at = 0.0  # when to check the tasks that wait for their locks

    @property
    def client(self) -> DatabaseClient:
        """The client of the queue's database; without a coordinator, that of the current default one."""
        client = client_of(self._coordinator)
        if not client.engine.has(Capability.TASKS):
            client.engine.require(Capability.TASKS, f"Queue {self.queue!r}")  # raises, and names what is missing
        return client

    def poll_until(
        self,
        poll: Callable[[], T | None],
        timeout: float | None,
        *,
        stop: Callable[[], bool] | None = None,
        between: Callable[[], object] = lambda: None,
        longest: float | None = None,
    ) -> T | None:
        """Call ``poll`` after each change and from time to time, until its result is not None; return the result.

        Return None after ``timeout`` seconds, or if ``stop()`` is true. ``stop`` is called after each change.
        """
        client, pause_lengths = self.client, backoff_delays(timeout, longest=longest or self._recover_every())
        ready_version, ready_at = -1, math.inf  # when the next task becomes ready, as of that version
        polled_version, poll_at = -1, -math.inf  # the version at the last poll, and when to poll at that version again
        recheck = True  # poll once more if `next_ready` says that a task has become ready since the poll
        with client.notifications.needed():
            while stop is None or not stop():
                version = client.queue_changes.version()
                unchanged = longest is None and version == polled_version and monotonic() < min(ready_at, poll_at)
                if unchanged and client.notifications.heard:
                    self.recover()  # which notifies, if tasks are pending again
                    result = None
                else:
                    polled_version, unchanged = version, False
                    result = poll()
                    poll_at = monotonic() + client.timing.unchanged_poll
                if result is not None:
                    return result
                pause = next(pause_lengths, None)
                if pause is None:
                    return poll() if unchanged else None
                if not client.notifications.heard:
                    pause = min(pause, client.timing.unnotified_poll)
                elif version != ready_version or monotonic() >= ready_at:
                    recheck, ready_version = recheck or version != ready_version, version
                    seconds = client.member.call("look at a queue", lambda session, _: session.next_ready(self.queue))
                    if seconds == 0 and recheck:
                        # A task became ready after the poll above. (Once only: a task that may not run for another
                        # reason must not cause polls for ever.)
                        recheck, ready_at = False, monotonic() + RECHECK_SECONDS
                    else:
                        recheck, ready_at = True, monotonic() + seconds if seconds else math.inf
                client.queue_changes.wait_changed(version, max(0.0, min(pause, ready_at - monotonic())))
                between()
        return None

    def wait_for_task(self, timeout: float | None) -> Task | None:
        """Claim and return the next task; None if there was none for ``timeout`` seconds."""
        return self.poll_until(self.try_claim, timeout)

    def try_claim(self) -> Task | None:
        """Claim and return a task that may run now; None if there is none."""
        _, claimed = self.end_and_claim([], 1)
        return claimed[0] if claimed else None

    def is_blocked_check_due(self) -> bool:
        """Return True if the next claim is to check the tasks that wait for their locks."""
        return monotonic() >= self._check_blocked_at and self.client.engine.has(Capability.BLOCKED_TASKS)

    def end_and_claim(
        self, ends: Sequence[End], limit: int, *, prefetch_owner: str | None = None
    ) -> tuple[list[str | None], list[Task]]:
        """Record ends and claim up to ``limit`` tasks in one call. Return the status of each ended task, and the tasks.

        ``prefetch_owner``: the owner's name of a claim for a thread that is busy. Such a claim skips tasks with locks,
        as other requests would wait for these locks. If the call fails, a deferred call returns the tasks that it may
        have claimed; the caller has to record the ends (`end_later`).
        """
        client, queue = self.client, self.queue
        member = client.member
        uid, owner, caller = client.new_uid(), prefetch_owner or owner_name(), this_thread()
        requesting_id = client.requesting_id(caller)
        tried_members: list[int] = []
        may_claim_blocked = limit > 0 and prefetch_owner is None and client.engine.has(Capability.BLOCKED_TASKS)
        blocked_due, blocked_checked = may_claim_blocked and monotonic() >= self._check_blocked_at, False
        with_locks: list[Claimed] = []  # the task that was claimed with its locks

        def claim_blocked(session: Session, me: int, again: bool) -> list[Claimed]:
            nonlocal blocked_due, blocked_checked
            blocked_due = True  # a retry after a lost reply must come here again: other routines do not return locks
            began = monotonic()
            # (Not before this call has the main connection: until then, a heartbeat must still find orphan rows.)
            member.begin_registration(uid)
            claimed = session.claim_blocked(me, queue, owner, uid, again, requesting_id, caller.owner)
            if claimed is not None:
                with_locks[:] = [claimed]
                member.add(tickets_of(claimed, requesting_id))
            blocked_checked, now = True, monotonic()  # (Not again in a retry: the next claim has the same uid.)
            self._check_blocked_at = now if with_locks else now + self._blocked_pause(now - began)
            return with_locks

        def claim(
            session: Session, me: int, again: bool, unrecorded: Sequence[End]
        ) -> tuple[list[str | None], Sequence[Claimed | None]]:
            """Record ends and claim, by the cheapest routine for it."""
            if limit == 1 and not unrecorded:
                return [], [session.claim_task(me, queue, owner, uid, again)]
            if limit == 1 and len(unrecorded) == 1:
                status, claimed = session.next_task(me, unrecorded[0], queue, owner, uid, again)
                return [status], [claimed]
            return session.next_tasks(me, unrecorded, queue, owner, uid, again, limit)

        def step(session: Session, me: int) -> tuple[list[str | None], list[Task]]:
            again = me in tried_members
            tried_members.append(me)
            statuses: list[str | None] = []
            claimed: Sequence[Claimed | None] = with_locks
            unrecorded = ends
            if blocked_due and not blocked_checked:
                # A task that has its locks keeps other requests waiting: claim it first, and alone. Record the ends
                # before that, as the ended tasks may have blocked it.
                if ends:
                    statuses, unrecorded = session.next_tasks(me, ends, queue, owner, uid, again, 0)[0], ()
                claimed = claim_blocked(session, me, again)
            if not any(claimed):
                recorded, claimed = claim(session, me, again, unrecorded)
                statuses = statuses or recorded
            if may_claim_blocked and not blocked_checked and not any(claimed):
                claimed = claim_blocked(session, me, again)
            remember_ends(client, ends)
            return _recorded(session, ends, statuses), Task.all_of(client, queue, claimed, uid)

        try:
            if not limit:
                return member.call("end of tasks", step, member.seconds_until_loss())
            self.recover()
            statuses, tasks = member.call("claim", step, counts_as_heartbeat=True)
            for claimed in with_locks:
                tasks[0].hold(claimed, requesting_id, caller)
            return statuses, tasks
        except BaseException:
            # Interrupted, or no reply: a deferred call returns any claimed tasks.
            if tried_members and limit:
                member.defer(lambda session, me: session.return_claim(me, queue, uid))
            if with_locks:
                member.discard(tickets_of(with_locks[0], requesting_id))
            raise
        finally:
            member.end_registration(uid)

    def end_later(self, ends: Sequence[End], answer: Callable[[list[str | None]], object]) -> None:
        """Have the heartbeat record ``ends`` as soon as it can, and call ``answer`` with the tasks' statuses.

        ``answer`` is called in the heartbeat's thread; twice if the reply to the first attempt was lost.
        """
        client, queue = self.client, self.queue
        uid = client.new_uid()
        if ends:
            client.member.defer(
                lambda session, me: answer(
                    _recorded(session, ends, session.next_tasks(me, ends, queue, "", uid, True, 0)[0])
                )
            )

    def recover(self, *, now: bool = False) -> int:
        """Make tasks of dead workers pending again, and put due schedules; return how many tasks are pending again.

        Does nothing (and returns 0) if the last recovery was a moment ago, unless ``now``.
        """
        client = self.client
        with self._recovering:
            if monotonic() - self._recovered_at < self._recover_every() and not now:
                return 0
            self._recovered_at = monotonic()
        count, due = client.member.call("recovery", self._maintain)
        if due and self._scheduler.fire_due(client):
            client.queue_changes.notify()
        if count:
            log.warning("%d task%s of %r lost their worker", count, "s" if count > 1 else "", self.queue)
            client.queue_changes.notify()
        return count

    def _maintain(self, session: Session, me: int) -> tuple[int, bool]:
        if self.client.engine.has(Capability.SCHEDULES):
            return session.maintain_queue(self.queue, me)
        return session.recover_tasks(self.queue, me), False

    def _blocked_pause(self, took: float) -> float:
        """Return the pause after a check of the tasks that wait for their locks."""
        return max(self.client.timing.blocked_task_check, BLOCKED_FACTOR * took)

    def _recover_every(self) -> float:
        options = self.client.engine.options
        timing = options.timing
        return max(timing.shortest_recovery, min(timing.longest_recovery, options.grace * RECOVER_PART))


def _recorded(session: Session, ends: Sequence[End], statuses: Sequence[str | None]) -> list[str | None]:
    """Return the status of each task; None if the attempt was taken from this member.

    The database refuses an end that it has recorded before. So after a lost reply, the log of the attempt is read.
    """
    resolved = list(statuses)
    for index, end in enumerate(ends):
        if resolved[index] is None and any(
            (attempt.attempt, attempt.outcome) == (end.attempt, end.outcome)
            for attempt in session.task_attempts(end.task_id)
        ):
            resolved[index] = (
                "pending" if end.outcome == "returned" or (end.outcome == "failed" and not end.last) else end.outcome
            )
    return resolved
