"""The due times of schedules, beside an oracle that walks from minute to minute.

The oracle reads the zone's local clock, and uses neither cronsim nor its conversion of local times into UTC.
"""

import zoneinfo
from datetime import datetime, timedelta, timezone

import pytest

from sqlsem.tasks.cron import NICKNAMES, last_due, next_due
from sqlsem.values.errors import ConfigurationError

UTC, MINUTE, HOUR = timezone.utc, timedelta(minutes=1), timedelta(hours=1)
YEARS = (2024, 2035)
#: The window around each transition that the tests compare; some zones move their clocks by two hours.
BEFORE, AFTER = 3 * HOUR, 5 * HOUR
#: An expression; its minutes and hours; whether what comes twice is due twice, and whether it is for every hour.
EXPRESSIONS = {
    "30 2 * * *": ({30}, {2}),
    "0 2 * * *": ({0}, {2}),
    "59 1 * * *": ({59}, {1}),
    "0 0 * * *": ({0}, {0}),
    "15 0,1,2,3 * * *": ({15}, {0, 1, 2, 3}),
    "*/30 2 * * *": ({0, 30}, {2}),
    "0 */2 * * *": ({0}, set(range(0, 24, 2))),
    "0 * * * *": ({0}, set(range(24))),
    "45 0-23 * * *": ({45}, set(range(24))),
    "*/7 * * * *": (set(range(0, 60, 7)), set(range(24))),
    "* 1-3 * * *": (set(range(60)), {1, 2, 3}),
}
#: One of each kind: an hour, half an hour and two hours; put back before midnight, at it and after it; in winter; by
#: the moon; far in the east and in the west.
SAMPLE = (
    *("Europe/Berlin", "Europe/Dublin", "America/New_York", "America/Havana", "America/Scoresbysund", "Asia/Beirut"),
    *("Australia/Lord_Howe", "Antarctica/Troll", "Africa/Casablanca", "Africa/Cairo", "Pacific/Chatham", "UTC"),
)


def transitions(zone):
    """Every moment from the first to the last of `YEARS` at which clocks are moved."""
    place = zoneinfo.ZoneInfo(zone)
    day = datetime(YEARS[0], 1, 1, tzinfo=UTC)
    while day.year <= YEARS[1]:
        low, high = day, day + 24 * HOUR
        before = low.astimezone(place).utcoffset()
        if before != high.astimezone(place).utcoffset():
            while high - low > MINUTE:
                middle = low + (high - low) // 2 // MINUTE * MINUTE
                low, high = (middle, high) if middle.astimezone(place).utcoffset() == before else (low, middle)
            yield high
        day += 24 * HOUR


def walk(zone, start, end):
    """Yield each minute in UTC, the local time, the skipped local times and whether they are whole hours, and whether
    that local time occurred before.
    """
    place = zoneinfo.ZoneInfo(zone)
    seen, known, moment = set(), None, start
    while moment < end:
        wall = moment.astimezone(place).replace(tzinfo=None)
        left_out = []
        if known is not None and wall > known + MINUTE:
            left_out = [known + MINUTE * number for number in range(1, (wall - known) // MINUTE)]
        yield moment, wall, left_out, wall in seen
        seen.add(wall)
        known, moment = wall, moment + MINUTE


def dues(cron, minutes):
    """The moments at which an expression is due."""
    its_minutes, its_hours = EXPRESSIONS[cron]
    twice = "*" in cron.split()[0] or cron.split()[1].startswith("*")
    hourly = len(its_hours) == 24

    def names(wall):
        return wall.minute in its_minutes and wall.hour in its_hours

    for moment, wall, left_out, again in minutes:
        passed = not (hourly and len(left_out) % 60 == 0) and any(map(names, left_out))
        if passed or (names(wall) and (twice or not again)):
            yield moment


def check(zone, maximum=None):
    moments = list(transitions(zone))[:maximum] or [datetime(2026, 3, 29, 1, tzinfo=UTC)]
    for transition in moments:
        start, end = transition - BEFORE, transition + AFTER
        # (From earlier on, so that the walk knows what has been on the wall.)
        minutes = list(walk(zone, start - 4 * HOUR, end))
        for cron in EXPRESSIONS:
            due = list(dues(cron, minutes))
            for number in range(int((end - start) / (7 * MINUTE))):
                at = start + 7 * number * MINUTE + timedelta(seconds=number % 60, microseconds=number % 2)
                following, last = next_due(cron, zone, at), last_due(cron, zone, at)
                case = f"{cron!r} in {zone} at {at}"
                assert last <= at < following, case
                expected = [moment for moment in due if moment > at]
                assert following == expected[0] if expected else following >= end, case
                expected = [moment for moment in due if moment <= at]
                assert last == expected[-1] if expected else last < minutes[0][0] + MINUTE, case


@pytest.mark.parametrize("zone", SAMPLE)
def test_next_due_follows_the_oracle(zone):
    check(zone, maximum=2)


def zones_of_each_kind():
    """Return one zone of each kind: zones of a kind have the same clocks in these years (many are aliases)."""
    kinds = {}
    for zone in sorted(zoneinfo.available_timezones()):
        place = zoneinfo.ZoneInfo(zone)
        moments = [datetime(YEARS[0], 1, 1, tzinfo=UTC), *transitions(zone)]
        kinds.setdefault(tuple((moment, moment.astimezone(place).utcoffset()) for moment in moments), zone)
    return list(kinds.values())


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(8))
def test_next_due_follows_the_oracle_in_every_zone(part):
    for zone in zones_of_each_kind()[part::8]:
        check(zone)


@pytest.mark.parametrize("zone", SAMPLE)
def test_a_run_of_due_times_goes_forward_and_back(zone):
    """Step by step through a transition: the next time's previous time is the last one."""
    moment = datetime(2026, 10, 24, 20, tzinfo=UTC)
    for cron in ("30 2 * * *", "*/30 * * * *", "0 */2 * * *", "0 0 29 2 *", "15 3 * * 0"):
        at = moment
        for _ in range(20):
            following = next_due(cron, zone, at)
            assert following > at
            assert last_due(cron, zone, following) == following
            assert last_due(cron, zone, following - timedelta(microseconds=1)) <= at
            at = following


def test_a_repeated_hour_does_not_look_back():
    """In the second pass of the hour the first one is past."""
    at = datetime(2027, 10, 31, 1, 5, tzinfo=UTC)
    assert next_due("30 2 * * *", "Europe/Berlin", at) == datetime(2027, 11, 1, 1, 30, tzinfo=UTC)


def test_a_time_that_is_passed_over_is_due_then():
    """Lord Howe's clocks are put forward by half an hour, from 02:00 on."""
    midnight = datetime(2026, 10, 3, 13, 30, tzinfo=UTC)
    for cron in ("*/30 2 * * *", "0 */2 * * *", "0 2 * * *"):
        due = next_due(cron, "Australia/Lord_Howe", midnight)
        due = due if due > midnight + HOUR else next_due(cron, "Australia/Lord_Howe", due)
        assert due == datetime(2026, 10, 3, 15, 30, tzinfo=UTC), cron


def test_nicknames_equal_their_expressions():
    at = datetime(2026, 2, 3, 4, 5, tzinfo=UTC)
    for name, cron in NICKNAMES.items():
        assert next_due(name, "Asia/Tokyo", at) == next_due(cron, "Asia/Tokyo", at)
        assert next_due(f" {name.upper()} ", "Asia/Tokyo", at) == next_due(cron, "Asia/Tokyo", at)


@pytest.mark.parametrize("at", [datetime.min, datetime.max])
def test_the_ends_of_the_calendar_are_told(at):
    for search in (next_due, last_due):
        for zone in ("UTC", "Asia/Tokyo", "America/New_York"):
            with pytest.raises(ConfigurationError, match="never comes"):
                search("0 0 29 2 *", zone, at.replace(tzinfo=UTC))


def test_utc_needs_no_data(monkeypatch):
    def missing(_):
        raise zoneinfo.ZoneInfoNotFoundError("no data here")

    monkeypatch.setattr("sqlsem.tasks.cron.ZoneInfo", missing)
    at = datetime(2026, 2, 3, 4, 5, tzinfo=UTC)
    assert next_due("0 5 * * *", "UTC", at) == datetime(2026, 2, 3, 5, tzinfo=UTC)
    with pytest.raises(ConfigurationError, match=r"This host knows no time zone 'Europe/Berlin'.*tzdata"):
        next_due("0 5 * * *", "Europe/Berlin", at)
