"""Shows the progress of commands that take long, in a line on a terminal: until they have reached their database, and
until they are done.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator

import sqlsem
from sqlsem.ops.terminal.status import StatusLine, status_line
from sqlsem.util.threads import spawn
from sqlsem.values.errors import SqlsemError

__all__ = ["attempts_shown", "progress_shown"]

log = logging.getLogger("sqlsem")

#: Seconds after which a call or its progress is shown, and between two looks at it.
SHOWN_SECONDS, LOOK_SECONDS = 1.0, 0.25
#: Seconds between two reads of the database that only show progress.
READ_SECONDS = 2.0


@contextlib.contextmanager
def attempts_shown(coordinator: sqlsem.Coordinator) -> Iterator[None]:
    """A context in which a thread shows calls that last long, until the first call has succeeded."""
    with _drawing(functools.partial(_show_attempts, coordinator), "sqlsem-trying"):
        yield


def _show_attempts(coordinator: sqlsem.Coordinator, line: StatusLine, over: threading.Event) -> None:
    main, has_begun, is_shown = coordinator.client.member.main, False, False
    while not over.wait(LOOK_SECONDS):
        attempts = max(main.trying.copy(), key=lambda retries: retries.elapsed, default=None)
        if attempts is None and has_begun:
            break
        has_begun = has_begun or attempts is not None
        if attempts is not None and attempts.elapsed >= SHOWN_SECONDS:
            line.show(f"trying ({attempts.remaining:.0f} s left): no connection to {coordinator.engine.label} yet")
            is_shown = True
    if is_shown:
        line.hide()


@contextlib.contextmanager
def progress_shown(describe: Callable[[], str | None], *, reads: bool = False) -> Iterator[None]:
    """A context in which a thread shows what ``describe`` returns, from time to time, once the context lasts for a
    second. ``describe`` runs in that thread; None shows nothing. ``reads``: it reads the database, so it is called less
    often.
    """
    pause = READ_SECONDS if reads else LOOK_SECONDS
    with _drawing(functools.partial(_show_progress, describe, pause), "sqlsem-progress"):
        yield


def _show_progress(describe: Callable[[], str | None], pause: float, line: StatusLine, over: threading.Event) -> None:
    begun, next_pause = time.monotonic(), SHOWN_SECONDS
    while not over.wait(next_pause):
        next_pause = pause
        try:
            text = describe()
        except SqlsemError as exc:  # the command itself goes on, and raises what is wrong
            log.info("The progress cannot be read: %s", exc)
            text = None
        if text is None:
            line.hide()
        else:
            line.show(f"{text} ({time.monotonic() - begun:.0f} s)")


@contextlib.contextmanager
def _drawing(draw: Callable[[StatusLine, threading.Event], None], name: str) -> Iterator[None]:
    """A context in which a thread draws the status line, until the event is set; without such a terminal none does."""
    line = status_line()
    if line is None:
        yield
        return
    over = threading.Event()
    spawn(functools.partial(draw, line, over), name)
    try:
        yield
    finally:
        over.set()
        line.close()
