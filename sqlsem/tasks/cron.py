"""Times of cron expressions in time zones. Reads the time zone data of this host; no other I/O.

cronsim parses expressions and steps through local times, as a wall clock shows them. This module converts them to UTC,
by these rules. A local time that

    comes once      is due then.
    never comes     (clocks are put forward over it) is due when clocks are put forward. But if the expression is for
                    every hour and clocks move by whole hours, it is left out.
    comes twice     (clocks are put back over it) is due the first time. If minutes or hours begin with ``*``, it is
                    due both times.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from sqlsem.values.errors import ConfigurationError

UTC = timezone.utc
FIELDS = 5
MAX_CRON = 255
NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)
#: The greatest difference between two offsets from UTC, in hours.
MAX_OFFSET_DIFFERENCE = 26


def check_cron(cron: str, zone: str) -> None:
    """Raise `ConfigurationError` if a cron expression is invalid or never due, or this host does not know the zone."""
    next_due(cron, zone, datetime.now(UTC))


def next_due(cron: str, zone: str, after: datetime) -> datetime:
    """Return the first due time after ``after``, in UTC. Errors as for `check_cron`.

    >>> next_due("0 2 * * *", "Europe/Berlin", datetime(2026, 1, 1, tzinfo=timezone.utc)).isoformat()
    '2026-01-01T01:00:00+00:00'
    """
    return _search(cron, zone, after.astimezone(UTC), back=False)


def last_due(cron: str, zone: str, at: datetime) -> datetime:
    """Return the last due time that is not after ``at``, in UTC. Errors as for `check_cron`."""
    return _search(cron, zone, at.astimezone(UTC), back=True)


def _search(cron: str, zone: str, start: datetime, *, back: bool) -> datetime:
    times = _Times(cron, zone)
    due: datetime | None = None
    try:
        minimum, greatest = times.offsets_near(start)
        for local in times.local_times(start.replace(tzinfo=None) + (greatest if back else minimum), back):
            for moment in times.moments(local):
                if back and moment <= start:
                    due = moment if due is None else max(due, moment)
                elif not back and moment > start:
                    due = moment if due is None else min(due, moment)
            if due is not None:
                # Around a change of clocks a later local time may be an earlier moment: go on until that is impossible.
                minimum, greatest = times.offsets_near(due)
                end = due.replace(tzinfo=None)
                if local - minimum <= end if back else local - greatest >= end:
                    break
    except OverflowError:
        pass  # beyond the calendar
    if due is None:
        raise ConfigurationError(f"{cron!r} never comes")
    return due


class _Times:
    """The times of one expression in one zone."""

    def __init__(self, cron: str, zone: str) -> None:
        fields = NICKNAMES.get(cron.strip().lower(), cron).split() if isinstance(cron, str) else []
        if len(fields) != FIELDS or len(cron) > MAX_CRON:
            raise ConfigurationError(
                f"{cron!r} is no cron expression; write minute, hour, day of month, month, day of week: '0 2 * * *', "
                f"or @hourly, @daily, @weekly, @monthly, @yearly"
            )
        self._cron = " ".join(fields)
        self._zone = _zone(zone)
        self._due_twice = fields[0].startswith("*") or fields[1].startswith("*")
        try:
            self._hourly = len(CronSim(self._cron, datetime(2000, 1, 1)).hours) == 24
        except CronSimError as exc:
            raise ConfigurationError(f"{cron!r} is no cron expression: {exc}") from exc

    def local_times(self, start: datetime, back: bool) -> Iterator[datetime]:
        """Iterate over the expression's local times, from ``start`` on (excluded) or back (included)."""
        try:
            yield from CronSim(self._cron, start + SECOND if back else start, reverse=back)
        except ValueError:  # the calendar's end
            return

    def moments(self, local: datetime) -> list[datetime]:
        """Return when a local time is due, in UTC: never, once or twice."""
        first = local.replace(tzinfo=self._zone, fold=0).astimezone(UTC)
        second = local.replace(tzinfo=self._zone, fold=1).astimezone(UTC)
        if first == second:
            return [first]
        if first < second:
            return [first, second] if self._due_twice else [first]
        # Clocks are put forward between the two. Search for the moment at which the offset changes.
        if self._hourly and not (first - second) % HOUR:
            return []
        after = self._offset(first)
        while first - second > SECOND:
            middle = second + (first - second) // 2 // SECOND * SECOND
            if self._offset(middle) == after:
                first = middle
            else:
                second = middle
        return [first]

    def offsets_near(self, moment: datetime) -> tuple[timedelta, timedelta]:
        """Return the least and the greatest offset from UTC within `MAX_OFFSET_DIFFERENCE` hours of a moment."""
        hours = range(-MAX_OFFSET_DIFFERENCE, MAX_OFFSET_DIFFERENCE + 1)
        offsets = [self._offset(moment + number * HOUR) for number in hours]
        return min(offsets), max(offsets)

    def _offset(self, moment: datetime) -> timedelta:
        offset = moment.astimezone(self._zone).utcoffset()
        assert offset is not None
        return offset


def _zone(name: str) -> tzinfo:
    """Return a time zone. UTC needs no data."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, TypeError, OSError) as exc:
        raise ConfigurationError(
            f"This host knows no time zone {name!r}; write UTC or Europe/Berlin, or bring its zones up to date with: "
            f"pip install -U tzdata"
        ) from exc
