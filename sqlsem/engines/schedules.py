"""Checks of schedules of work queues, on engines that check in the client; and their stored options."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from typing import Any

from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import MAX_NOTE, check_name
from sqlsem.values.tasks import TASK_BOUNDS

#: The messages for numbers that are out of bounds.
_MESSAGES = {
    "after_ms": "a task can wait from now to ten years from now, not {} ms",
    "backoff_ms": "the pause before the next attempt at a task is from {minimum} to {maximum} ms, not {}",
    "time_limit_ms": "the time limit of a task must be from {minimum} to {maximum} ms, not {}",
    "max_attempts": "max_attempts of a task must be from {minimum} to {maximum}, not {}",
    "priority": "the priority of a task must be from {minimum} to {maximum}, not {}",
    "order": "the order of a task must be from {minimum} to {maximum}, not {}",
}


_FIRST_DUE, _LAST_DUE = datetime(1, 1, 3, tzinfo=timezone.utc), datetime(9999, 12, 30, tzinfo=timezone.utc)


def check_due(due: datetime | None) -> None:
    """Raise `ConfigurationError` for a next time that is outside the calendar of some client."""
    if due is None or not _FIRST_DUE <= due <= _LAST_DUE:
        raise ConfigurationError(f"the next time of a schedule must be from 0001-01-03 to 9999-12-30, not {due}")


def check_times(cron: str, zone: str, due: datetime) -> None:
    """Raise `ConfigurationError` for invalid times of a schedule."""
    check_due(due)
    if not cron.strip() or len(cron) > 255:
        raise ConfigurationError(f"a cron expression has 1 to 255 characters, not {len(cron)}")
    if len(zone) > 64 or not re.fullmatch(r"[-A-Za-z0-9_+/]*[A-Za-z][-A-Za-z0-9_+/]*", zone):
        raise ConfigurationError(f"{zone[:100]!r} is no time zone; write UTC or Europe/Berlin")


def read_options(text: str) -> dict[str, Any]:
    """Return the stored options of a schedule's task; empty if the stored text is not a JSON object."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return options if isinstance(options, dict) else {}


def check_task_options(options: object) -> None:
    """Raise `ConfigurationError` for invalid options of a schedule's task, on engines that check in the client. The
    servers check in SQL, with the same messages.
    """
    if not isinstance(options, dict):
        raise ConfigurationError("the options of a schedule are a JSON object, such as {}")
    numbers = {name: options[name] for name in TASK_BOUNDS if options.get(name) is not None}
    for name, value in numbers.items():
        minimum, maximum = TASK_BOUNDS[name]
        if isinstance(value, (int, float)) and not minimum <= value <= maximum:
            raise ConfigurationError(_MESSAGES[name].format(value, minimum=minimum, maximum=maximum))
    for name in ("key", "unique", "replace"):
        if options.get(name) is not None:
            check_name("The key", options[name])
    if options.get("unique") is not None and options.get("replace") is not None:
        raise ConfigurationError(
            "a task that is unique, or replaces another one, is put alone, and has one key: unique or replace"
        )
    if (
        any(isinstance(value, bool) or not isinstance(value, int) for value in numbers.values())
        or options.get("on_failure", "stop") not in ("stop", "continue", None)
        or len(options.get("note") or "") > MAX_NOTE
    ):
        raise ConfigurationError(
            "options of a task: numbers are whole, on_failure is stop or continue, and a note has at most 1000 "
            "characters"
        )
