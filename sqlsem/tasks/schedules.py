"""Schedules: tasks that are put at the times of a cron expression, once for each, however many processes watch.

The next time that is due is written in the database. Whoever finds it past, by the database's clock, puts the task and
writes down the time after that, in one transaction that only succeeds for one of them. So what dies in between has done
all of it, or nothing.
"""

from __future__ import annotations

import logging
import shlex
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from sqlsem.core.process import Process
from sqlsem.errors import ConfigurationError, SqlsemError
from sqlsem.model import Schedule

__all__ = ["MISSED", "check_cron", "fire_due", "next_due"]

log = logging.getLogger("sqlsem")

#: What becomes of times that nobody saw: one task for all of them, or none.
MISSED = ("one", "skip")
#: So late may a task be put that is left out when it was missed, seconds.
LATE_SECONDS = 60.0
FIELDS = 5


def check_cron(cron: str, zone: str) -> None:
    """Raise `ConfigurationError` for what is no cron expression that ever comes, or no time zone."""
    next_due(cron, zone, datetime.now(timezone.utc))


def next_due(cron: str, zone: str, after: datetime) -> datetime:
    """The first time after this one, in UTC. Errors as for `check_cron`.

    Where clocks are put forward, a time that does not come is due when they are; where they are put back, one that
    comes twice is due once (unless hours or minutes are ``*``).

    >>> next_due("0 2 * * *", "Europe/Berlin", datetime(2026, 1, 1, tzinfo=timezone.utc)).isoformat()
    '2026-01-01T01:00:00+00:00'
    """
    return _search(cron, zone, after, back=False)


def _search(cron: str, zone: str, start: datetime, *, back: bool) -> datetime:
    if not isinstance(cron, str) or len(cron.split()) != FIELDS or len(cron) > 255:
        raise ConfigurationError(
            f"{cron!r} is no cron expression; write minute, hour, day of month, month, day of week: '0 2 * * *'"
        )
    try:
        place = ZoneInfo(zone)
    except (KeyError, ValueError, TypeError, OSError) as exc:
        raise ConfigurationError(f"{zone!r} is no time zone of the IANA database; write UTC or Europe/Berlin") from exc
    try:
        found = next(CronSim(cron, start.astimezone(place), reverse=back))
    except CronSimError as exc:
        raise ConfigurationError(f"{cron!r} is no cron expression: {exc}") from exc
    except StopIteration:
        raise ConfigurationError(f"{cron!r} never comes") from None
    return found.astimezone(timezone.utc)


def fire_due(process: Process, queue: str) -> int:
    """Put what is due now of a queue's schedules; how many tasks."""
    found = process.member.call("look at schedules", lambda session, _: session.list_schedules(None, queue))
    return sum(_try_to_fire(process, one) for one in found)


def _try_to_fire(process: Process, one: Schedule) -> int:
    """`_fire`; one that cannot be put does not keep the queue's other schedules from their times, nor its workers."""
    try:
        return _fire(process, one)
    except SqlsemError as exc:
        process.require_open()
        log.error(
            "Schedule %r of %s could not put its task, and is tried again; if it stays so, save it anew with other "
            "options, or: sqlsem schedules pause %s: %s",
            *(one.name, one.put_by, shlex.quote(one.name), exc),
        )
        return 0


def _fire(process: Process, one: Schedule) -> int:
    due = one.next_due
    if due is None or one.paused_at is not None or due > one.taken_at:
        return 0
    put, last = True, due
    following: datetime | None = None
    try:
        following = next_due(one.cron, one.time_zone, one.taken_at)
        last = max(due, _search(one.cron, one.time_zone, one.taken_at + timedelta(seconds=1), back=True))
        put = one.options.get("missed") != "skip" or one.taken_at - last <= timedelta(seconds=LATE_SECONDS)
    except ConfigurationError as exc:
        put = False
        log.error("Schedule %r is not due any more, as nobody knows when: %s", one.name, exc)
    done, task_id = process.member.call(
        "put of a schedule", lambda session, _: session.fire_schedule(one.name, due, last, following, put)
    )
    if done:
        log.info(
            "Schedule %r was due at %s: %s", one.name, last, f"task {task_id}" if put else "left out, as it is late"
        )
    return int(done and put)
