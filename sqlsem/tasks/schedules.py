"""Schedules: tasks that any worker of the queue puts at the times of a cron expression, once for each time.

The database keeps each schedule's next due time. A worker that finds it past, by the database's clock, puts the task
and writes the next time, in one transaction that succeeds for only one of the workers. If that worker dies, both have
happened or nothing.

`sqlsem.tasks.cron` computes the next time; the database accepts it only if it is later than now by its own clock. A
host may be unable to compute it: it lacks time zone data, or a newer host wrote the expression. It logs that and
changes nothing, and other hosts put the tasks.
"""

from __future__ import annotations

import logging
import shlex
import threading
from datetime import timedelta

from sqlsem.client.client import DatabaseClient
from sqlsem.tasks.cron import last_due, next_due
from sqlsem.values.errors import ConfigurationError, SqlsemError
from sqlsem.values.tasks import Schedule

log = logging.getLogger("sqlsem")

#: How to treat missed times: put one task for all of them, or none.
MISSED = ("one", "skip")
#: With 'skip', a time that is later than this counts as missed.
LATE = timedelta(seconds=60)
#: How many times a schedule is tried, if its next time has passed before each try ends.
ATTEMPTS = 3


class Scheduler:
    """Puts the due tasks of a queue's schedules. An error of one schedule is logged once, and affects neither the
    other schedules nor the workers.
    """

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._logged: dict[str, object] = {}  # by schedule: the due time and the kind of the last logged error

    def fire_due(self, client: DatabaseClient) -> int:
        """Put all tasks that are due now; return their number."""
        rows = client.member.call("look at schedules", lambda session, _: session.list_schedules(None, self._queue))
        return sum(self._try_to_fire(client, schedule) for schedule in rows if _is_due(schedule))

    def _try_to_fire(self, client: DatabaseClient, schedule: Schedule) -> int:
        try:
            count = _fire(client, schedule)
        except Exception as exc:
            client.require_open()
            problem = (
                "is not understood by this host, which leaves it to others"
                if isinstance(exc, _NotComputable)
                else "could not put its task, and will be tried again; if this persists, save it with other options, "
                f"or: sqlsem schedules pause {shlex.quote(schedule.name)}"
            )
            error = schedule.next_due, type(exc)
            with self._lock:
                last_error = self._logged.get(schedule.name)
                self._logged[schedule.name] = error
            if last_error != error:
                traced = None if isinstance(exc, SqlsemError) else exc
                log.error("Schedule %r of %s %s: %s", schedule.name, schedule.put_by, problem, exc, exc_info=traced)
            return 0
        with self._lock:
            self._logged.pop(schedule.name, None)
        return count


class _NotComputable(ConfigurationError):
    """This host cannot compute the next time of a schedule."""


def _is_due(schedule: Schedule) -> bool:
    return schedule.next_due is not None and schedule.paused_at is None and schedule.next_due <= schedule.taken_at


def _fire(client: DatabaseClient, schedule: Schedule) -> int:
    for _ in range(ATTEMPTS):
        due = schedule.next_due
        assert due is not None
        try:
            following = next_due(schedule.cron, schedule.time_zone, schedule.taken_at)
            last = max(due, last_due(schedule.cron, schedule.time_zone, schedule.taken_at))
        except ConfigurationError as exc:
            raise _NotComputable(str(exc)) from exc
        put = schedule.options.get("missed") != "skip" or schedule.taken_at - last <= LATE
        done, task_id = client.member.call(
            "put of a schedule",
            lambda session, _, args=(schedule.name, due, last, following, put): session.fire_schedule(*args),  # type: ignore[misc]
        )
        if done:
            result = f"task {task_id}" if put else "left out, as it is late"
            log.info("Schedule %r was due at %s: %s", schedule.name, last, result)
            return int(put)
        # Another process was faster, or `following` has passed meanwhile: read the schedule again.
        rows = client.member.call(
            "look at schedules",
            lambda session, _, name=schedule.name: session.list_schedules(name, None),  # type: ignore[misc]
        )
        if not rows or not _is_due(rows[0]):
            return 0
        (schedule,) = rows
    raise _NotComputable(
        f"the next time as computed here, {following}, is not later than the database's clock, {schedule.taken_at}"
    )
