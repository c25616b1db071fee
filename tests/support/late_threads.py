"""Delays the threads of sqlsem (``./test.sh --late``): a test or code that relies on a quick thread fails then.

A thread of the package (heartbeat, polls, callbacks) pauses at random before and after its calls of the database, in
the processes of pytest and in those of ``spawn``. The threads of tests do not.
"""

from __future__ import annotations

import functools
import random
import threading
from time import sleep
from typing import Any

from sqlsem.client.connection.main import MainConnection

__all__ = ["MOST_SECONDS", "SHARE", "delay_threads", "is_late"]

#: The share of calls with a pause, and the longest pause.
SHARE, MOST_SECONDS = 0.3, 0.1


def is_late() -> bool:
    """Return True if threads are delayed."""
    return hasattr(MainConnection.try_once, "__wrapped__")


def delay_threads() -> None:
    """Delay the threads of this process from now on."""
    once = MainConnection.try_once

    @functools.wraps(once)
    def late(*arguments: Any, **options: Any) -> Any:
        _pause()
        try:
            return once(*arguments, **options)
        finally:
            _pause()

    MainConnection.try_once = late  # type: ignore[method-assign]


def _pause() -> None:
    if threading.current_thread().name.startswith("sqlsem") and random.random() < SHARE:
        sleep(random.uniform(0, MOST_SECONDS))
