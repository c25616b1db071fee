"""Shows the progress of commands that take long, in a line on a terminal: until they have reached their database,
while `sqlsem run` waits for its lock (with ``-v`` as log records), and until they are done.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import sqlsem
from sqlsem.ops.terminal.status import StatusLine, status_line
from sqlsem.util import late
from sqlsem.util.process import host_name
from sqlsem.util.threads import spawn
from sqlsem.values.errors import SqlsemError
from sqlsem.values.locks import Entry

if TYPE_CHECKING:
    from sqlsem.insight.reasons import Reason

log = logging.getLogger("sqlsem")

#: Seconds after which a call or its progress is shown, and between two looks at it.
SHOWN_SECONDS, LOOK_SECONDS = 1.0, 0.25
#: Seconds between two reads of the database that only show progress.
READ_SECONDS = 2.0
#: Seconds until a waiting command reads the queue first; each pause is longer than the one before, up to the longest.
FIRST_SECONDS, GROWTH, LONGEST_SECONDS = 0.25, 1.5, 5.0
#: Seconds after which the line of a waiting command is redrawn.
REDRAW_SECONDS = 1.0


def attempts_shown(coordinator: sqlsem.Coordinator) -> AbstractContextManager[object]:
    """Return a context in which a thread shows calls that last long, until the first call has succeeded."""
    return _drawing(functools.partial(_show_attempts, coordinator), "sqlsem-trying")


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


def progress_shown(describe: Callable[[], str | None], *, reads: bool = False) -> AbstractContextManager[object]:
    """Return a context in which a thread shows what ``describe`` returns, from time to time, once the context lasts for
    a second. ``describe`` runs in that thread; None shows nothing. ``reads``: it reads the database, so it is called
    less often.
    """
    pause = READ_SECONDS if reads else LOOK_SECONDS
    return _drawing(functools.partial(_show_progress, describe, pause), "sqlsem-progress")


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
def wait_shown(coordinator: sqlsem.Coordinator, *, is_verbose: bool, is_quiet: bool) -> Iterator[Callable[[], None]]:
    """A context in which a thread shows the wait of `sqlsem run`. It gives a function to call when the wait is over."""
    if is_verbose:
        over = threading.Event()
        spawn(functools.partial(_log_wait, coordinator, over), "sqlsem-progress")
        try:
            yield over.set
        finally:
            over.set()
    elif is_quiet:
        yield lambda: None
    else:
        with _drawing(functools.partial(_show_wait, coordinator), "sqlsem-progress") as end:
            yield end


def _show_wait(coordinator: sqlsem.Coordinator, line: StatusLine, over: threading.Event) -> None:
    with late.importing:
        from sqlsem.insight.reasons import wait_in_words
    pause, read_at = FIRST_SECONDS, time.monotonic()
    waiting: tuple[Entry, Reason | None] | None = None
    while not over.wait(min(pause, REDRAW_SECONDS)):
        if time.monotonic() - read_at >= pause:
            waiting, read_at = _waiting_request(coordinator), time.monotonic()
            pause = min(pause * GROWTH, LONGEST_SECONDS)
        if waiting is None:
            line.hide()
        else:
            line.show(wait_in_words(*waiting, time.monotonic() - read_at))


def _waiting_request(coordinator: sqlsem.Coordinator) -> tuple[Entry, Reason | None] | None:
    """Return the request of this process that waits, and why it does; None if none, or the queue cannot be read."""
    with late.importing:
        from sqlsem.insight.reasons import reasons
    try:
        overview = coordinator.admin.overview()
    except SqlsemError as exc:
        log.info("cannot see the queue: %s", exc)
        return None
    entry = next(filter(_is_ours, overview.entries), None)
    return None if entry is None else (entry, reasons(overview, only=entry.position).get(entry.position))


def _log_wait(coordinator: sqlsem.Coordinator, over: threading.Event) -> None:
    """Log the waiting requests of this process with the numbers of requests ahead, whenever these change."""
    last, pause = None, FIRST_SECONDS
    while not over.wait(pause):
        pause = min(pause * GROWTH, LONGEST_SECONDS)
        try:
            entries = coordinator.admin.entries()
        except SqlsemError as exc:
            log.info("cannot see the queue: %s", exc)
            continue
        waits = []
        for entry in filter(_is_ours, entries):
            ahead = [row for row in entries if row.resource == entry.resource and row.position < entry.position]
            waits.append(f"{entry.resource!r} at {entry.position}, behind {len(ahead)}")
        if waits and waits != last and not over.is_set():
            if last is not None:  # the first wait was logged when it began
                log.info("Still waiting for %s", "; ".join(waits))
            last = waits


def _is_ours(entry: Entry) -> bool:
    return (entry.host, entry.pid, entry.state) == (host_name(), os.getpid(), "waits")


@contextlib.contextmanager
def _drawing(draw: Callable[[StatusLine, threading.Event], None], name: str) -> Iterator[Callable[[], None]]:
    """A context in which a thread draws the status line, until the event is set; without such a terminal none does. It
    gives a function that ends the drawing early.
    """
    line = status_line()
    if line is None:
        yield lambda: None
        return
    over = threading.Event()
    spawn(functools.partial(draw, line, over), name)

    def end() -> None:
        over.set()
        line.close()

    try:
        yield end
    finally:
        end()
