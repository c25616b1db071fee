"""Schedules: tasks that are put at the times of a cron expression, once for each, however many processes watch.

The next time that is due is written in the database. Whoever finds it past, by the database's clock, puts the task and
writes down the time after that, in one transaction that only succeeds for one of them. So what dies in between has done
all of it, or nothing.

The next time is later than the database's now, or it is not written: `sqlsem.tasks.cron` computes it so, and the
database asks again. A host that cannot compute it (it lacks time zone data, or a newer host wrote the expression)
changes nothing and says so: other hosts put the tasks.
"""

from __future__ import annotations

import logging
import shlex
import threading
from datetime import timedelta

from sqlsem.core.process import Process
from sqlsem.errors import ConfigurationError, SqlsemError
from sqlsem.model import Schedule
from sqlsem.tasks.cron import last_due, next_due

__all__ = ["MISSED", "Scheduler"]

log = logging.getLogger("sqlsem")

#: What becomes of times that nobody saw: one task for all of them, or none.
MISSED = ("one", "skip")
#: So late may a task be put that is left out when it was missed.
LATE = timedelta(seconds=60)
#: How often a schedule is looked at in a row, where its next time has come meanwhile.
LOOKS = 3


class Scheduler:
    """Puts what is due of a queue's schedules. What one of them cannot do does not keep the others from their times,
    nor the workers from their tasks, and is logged once.
    """

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._told: dict[str, object] = {}  # by schedule: what was logged last: of which time, and which error

    def fire_due(self, process: Process) -> int:
        """Put what is due now; return the number of tasks."""
        found = process.member.call("look at schedules", lambda session, _: session.list_schedules(None, self._queue))
        return sum(self._try_to_fire(process, one) for one in found if _is_due(one))

    def _try_to_fire(self, process: Process, one: Schedule) -> int:
        try:
            count = _fire(process, one)
        except Exception as exc:
            process.require_open()
            words = (
                "is not understood by this host, which leaves it to others"
                if isinstance(exc, _Unknown)
                else "could not put its task, and is tried again; if it stays so, save it anew with other options, or: "
                f"sqlsem schedules pause {shlex.quote(one.name)}"
            )
            with self._lock:
                known = self._told.get(one.name)
                self._told[one.name] = what = one.next_due, type(exc)
            if known != what:
                traced = None if isinstance(exc, SqlsemError) else exc
                log.error("Schedule %r of %s %s: %s", one.name, one.put_by, words, exc, exc_info=traced)
            return 0
        with self._lock:
            self._told.pop(one.name, None)
        return count


class _Unknown(ConfigurationError):
    """This host cannot compute the next time of a schedule."""


def _is_due(one: Schedule) -> bool:
    return one.next_due is not None and one.paused_at is None and one.next_due <= one.taken_at


def _fire(process: Process, one: Schedule) -> int:
    for _ in range(LOOKS):
        due = one.next_due
        assert due is not None
        try:
            following = next_due(one.cron, one.time_zone, one.taken_at)
            last = max(due, last_due(one.cron, one.time_zone, one.taken_at))
        except ConfigurationError as exc:
            raise _Unknown(str(exc)) from exc
        put = one.options.get("missed") != "skip" or one.taken_at - last <= LATE
        done, task_id = process.member.call(
            "put of a schedule",
            lambda session, _, now=(one.name, due, last, following, put): session.fire_schedule(*now),  # type: ignore[misc]
        )
        if done:
            what = f"task {task_id}" if put else "left out, as it is late"
            log.info("Schedule %r was due at %s: %s", one.name, last, what)
            return int(put)
        # Another process was faster; or the next time has come meanwhile, and the one after it is looked for.
        found = process.member.call(
            "look at schedules",
            lambda session, _, name=one.name: session.list_schedules(name, None),  # type: ignore[misc]
        )
        if not found or not _is_due(found[0]):
            return 0
        (one,) = found
    raise _Unknown(
        f"the next time as computed here, {following}, is not later than the database's clock, {one.taken_at}"
    )
