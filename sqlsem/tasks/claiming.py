"""Claiming tasks of a queue, for programs and workers: one, or those of a group, ending others in the same call."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from sqlsem.core.callers import this_thread
from sqlsem.core.claims import owner_name
from sqlsem.core.defaults import Coordinated, process_of
from sqlsem.core.pauses import pauses
from sqlsem.core.process import Process
from sqlsem.engines.base import Session
from sqlsem.engines.parking import ParkingSession
from sqlsem.engines.roles import TaskSession
from sqlsem.engines.scheduling import ScheduleSession
from sqlsem.model import Claimed, End, monotonic
from sqlsem.tasks.schedules import Scheduler
from sqlsem.tasks.task import Task, remember_ends, tickets_of

__all__ = ["Claiming"]

log = logging.getLogger("sqlsem")
T = TypeVar("T")

#: Between two looks for workers that died: a part of the grace, from so many seconds to so many.
RECOVER_PART, RECOVER_SECONDS = 2 / 5, (0.25, 2.0)
#: The longest pause between two looks for something to do where nothing is heard of other processes; and where nothing
#: has happened of which one would have heard.
UNHEARD_SECONDS, UNCHANGED_SECONDS = 1.0, 4.0
#: Between two looks at the tasks that wait for their locks: so many seconds, and as many times the last look's.
PARKED_SECONDS, PARKED_TIMES = 0.2, 20
#: And so soon where a task's time came just after a look.
EARLY_SECONDS = 0.01


class Claiming:
    """What is claimed of one queue, by the one who is in this process."""

    def __init__(self, queue: str, coordinator: Coordinated | None) -> None:
        self.queue = queue
        self._given = coordinator
        self._recovering = threading.Lock()
        self._recovered_at = 0.0
        self._scheduler = Scheduler(queue)
        self._parked_at = 0.0  # when to look at the tasks that wait for their locks

    @property
    def process(self) -> Process:
        """In which database; without a coordinator the default one, as it is now."""
        process = process_of(self._given)
        if not process.engine.has(TaskSession):
            process.engine.require(TaskSession, f"Queue {self.queue!r}")  # which says what is missing
        return process

    def look_until(
        self,
        look: Callable[[], T | None],
        timeout: float | None,
        *,
        stop: Callable[[], bool] | None = None,
        between: Callable[[], object] = lambda: None,
        longest: float | None = None,
    ) -> T | None:
        """What ``look`` gives, looking again whenever something has changed, and from time to time. None when it gave
        nothing for so many seconds, or ``stop`` says so (which is asked whenever the bell has rung).
        """
        process, left = self.process, pauses(timeout, longest=longest or self._recover_every())
        asked, ready = -1, math.inf  # of which version, and when the next task's time comes
        looked, look_at = -1, -math.inf  # at which version, and when to look though that is still so
        doubtful = True  # whether a time that has just come was not looked at once more
        with process.news.wanted():
            while stop is None or not stop():
                version = process.bell.version()
                rests = longest is None and version == looked and monotonic() < min(ready, look_at)
                if rests and process.news.heard:
                    self.recover()  # of which everybody hears
                    found = None
                else:
                    looked, rests = version, False
                    found = look()
                    look_at = monotonic() + UNCHANGED_SECONDS
                if found is not None:
                    return found
                pause = next(left, None)
                if pause is None:
                    return look() if rests else None
                if not process.news.heard:
                    pause = min(pause, UNHEARD_SECONDS)
                elif version != asked or monotonic() >= ready:
                    doubtful, asked = doubtful or version != asked, version
                    seconds = process.member.call("look at a queue", lambda session, _: session.next_ready(self.queue))
                    if seconds == 0 and doubtful:
                        # It has come since the look above. (But what may not run for another reason is not looked at
                        # for ever.)
                        doubtful, ready = False, monotonic() + EARLY_SECONDS
                    else:
                        doubtful, ready = True, monotonic() + seconds if seconds else math.inf
                process.bell.wait_changed(version, max(0.0, min(pause, ready - monotonic())))
                between()
        return None

    def wait_for_task(self, timeout: float | None) -> Task | None:
        """The next task that may run; None when there was none for so long."""
        return self.look_until(self.try_claim, timeout)

    def try_claim(self) -> Task | None:
        """A task that may run now, if there is one."""
        _, claimed = self.end_and_claim([], 1)
        return claimed[0] if claimed else None

    def is_parked_due(self) -> bool:
        """Whether the next claim is to look at the tasks that wait for their locks."""
        return monotonic() >= self._parked_at and self.process.engine.has(ParkingSession)

    def end_and_claim(
        self, ends: Sequence[End], most: int, *, ahead_of: str | None = None
    ) -> tuple[list[str | None], list[Task]]:
        """End what was done, and claim up to ``most`` in the same call: what has become of each, and what was claimed.

        ``ahead_of``: for the owner of that name, who is busy; then nothing that has locks, as others would wait for it.
        What is not known to have been claimed in time is given back as soon as that can be; what is not known to have
        ended is left to the caller (`end_later`).
        """
        process, queue = self.process, self.queue
        member = process.member
        uid, owner, caller = process.new_uid(), ahead_of or owner_name(), this_thread()
        requesting_id = process.requesting_id(caller)
        tried: list[int] = []  # as which members
        parks = most > 0 and ahead_of is None and process.engine.has(ParkingSession)
        due, asked = parks and monotonic() >= self._parked_at, False
        held: list[Claimed] = []  # what was claimed with its locks

        def park(session: Session, me: int, again: bool) -> list[Claimed]:
            nonlocal due, asked
            due = True  # should the reply be lost: another claim would find this one, without its locks
            began = monotonic()
            # (Not before: while workers of ours queue for the main session, a ping must find the strangers.)
            member.registering(uid)
            one = session.claim_parked(me, queue, owner, uid, again, requesting_id, caller.owner)
            if one is not None:
                held[:] = [one]
                member.add(tickets_of(one, requesting_id))
            # Known, and not asked again: what is claimed next has the same uid.
            asked, now = True, monotonic()
            self._parked_at = now if held else now + max(PARKED_SECONDS, PARKED_TIMES * (now - began))
            return held

        def claim(
            session: Session, me: int, again: bool, left: Sequence[End]
        ) -> tuple[list[str | None], Sequence[Claimed | None]]:
            """By the cheapest call that there is for it."""
            if most == 1 and not left:
                return [], [session.claim_task(me, queue, owner, uid, again)]
            if most == 1 and len(left) == 1:
                status, one = session.next_task(me, left[0], queue, owner, uid, again)
                return [status], [one]
            return session.next_tasks(me, left, queue, owner, uid, again, most)

        def step(session: Session, me: int) -> tuple[list[str | None], list[Task]]:
            again = me in tried
            tried.append(me)
            statuses: list[str | None] = []
            claimed: Sequence[Claimed | None] = held
            left = ends
            if due and not asked:
                # What has its locks keeps others waiting: first, and alone. What has ended may have been in its way.
                if ends:
                    statuses, left = session.next_tasks(me, ends, queue, owner, uid, again, 0)[0], ()
                claimed = park(session, me, again)
            if not any(claimed):
                ended, claimed = claim(session, me, again, left)
                statuses = statuses or ended
            if parks and not asked and not any(claimed):
                claimed = park(session, me, again)
            remember_ends(process, ends)
            return _recorded(session, ends, statuses), Task.all_of(process, queue, claimed, uid)

        try:
            if not most:
                return member.call("end of tasks", step, member.seconds_left())
            self.recover()
            statuses, tasks = member.call("claim", step, sign=True)
            for one in held:
                tasks[0].hold(one, requesting_id, caller)
            return statuses, tasks
        except BaseException:
            # Interrupted, or the answer never came.
            if tried and most:
                member.later(lambda session, me: session.return_claim(me, queue, uid))
            if held:
                member.forget(tickets_of(held[0], requesting_id))
            raise
        finally:
            member.settled(uid)

    def end_later(self, ends: Sequence[End], answer: Callable[[list[str | None]], object]) -> None:
        """End these as soon as that can be, and tell ``answer`` then what has become of each. (In the heartbeat's
        thread, and again where the answer to that was lost.)
        """
        process, queue = self.process, self.queue
        uid = process.new_uid()
        if ends:
            process.member.later(
                lambda session, me: answer(
                    _recorded(session, ends, session.next_tasks(me, ends, queue, "", uid, True, 0)[0])
                )
            )

    def recover(self, *, now: bool = False) -> int:
        """Now and then, or now, look after tasks whose workers died; how many are pending again."""
        process = self.process
        with self._recovering:
            if monotonic() - self._recovered_at < self._recover_every() and not now:
                return 0
            self._recovered_at = monotonic()
        count, due = process.member.call("recovery", self._tend)
        if due and self._scheduler.fire_due(process):
            process.bell.notify()
        if count:
            log.warning("%d task%s of %r lost their worker", count, "s" if count > 1 else "", self.queue)
            process.bell.notify()
        return count

    def _tend(self, session: Session, me: int) -> tuple[int, bool]:
        if self.process.engine.has(ScheduleSession):
            return session.tend_queue(self.queue, me)
        return session.recover_tasks(self.queue, me), False

    def _recover_every(self) -> float:
        least, most = RECOVER_SECONDS
        return max(least, min(most, self.process.engine.options.grace * RECOVER_PART))


def _recorded(session: Session, ends: Sequence[End], statuses: Sequence[str | None]) -> list[str | None]:
    """What has become of each: where the end was not taken from this member, as an earlier call recorded it and the
    answer to that was lost, the log of the attempt says so. None: the attempt was taken away.
    """
    found = list(statuses)
    for number, end in enumerate(ends):
        if found[number] is None and any(
            (attempt.attempt, attempt.outcome) == (end.attempt, end.outcome)
            for attempt in session.task_attempts(end.task_id)
        ):
            found[number] = (
                "pending" if end.outcome == "returned" or (end.outcome == "failed" and not end.last) else end.outcome
            )
    return found
