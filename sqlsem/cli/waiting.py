"""Shows the wait of `sqlsem run`: on a terminal a line that is redrawn; with ``-v`` log records."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
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

__all__ = ["Waiting"]

log = logging.getLogger("sqlsem")

#: Seconds until the queue is read first; each pause is longer than the one before, up to the longest.
FIRST_SECONDS, GROWTH, LONGEST_SECONDS = 0.25, 1.5, 5.0
#: Seconds after which the line is redrawn.
REDRAW_SECONDS = 1.0


class Waiting:
    """The wait of one command. A thread reads the queue from time to time, until `end`."""

    def __init__(self, coordinator: sqlsem.Coordinator, program: str, *, is_verbose: bool, is_quiet: bool) -> None:
        self._coordinator = coordinator
        self._program = program
        self._over = threading.Event()
        self._line = None if is_verbose or is_quiet else status_line()
        if is_verbose:
            spawn(self._log_progress, "sqlsem-progress")
        elif self._line is not None:
            spawn(functools.partial(self._show_progress, self._line), "sqlsem-progress")

    def end(self) -> None:
        """End the display: the wait is over. Idempotent."""
        self._over.set()
        if self._line is not None:
            self._line.close()

    def log_start(self, grant: sqlsem.Grant, pid: int) -> None:
        """Log the start of the command."""
        positions = ", ".join(f"{name!r} at {position}" for name, position in grant.positions.items())
        log.info("Started %s as process %d under %s", self._program, pid, positions)

    # -- on a terminal ------------------------------------------------------------------------------------------

    def _show_progress(self, line: StatusLine) -> None:
        with late.importing:
            from sqlsem.insight.reasons import wait_in_words
        pause, read_at = FIRST_SECONDS, time.monotonic()
        waiting: tuple[Entry, Reason | None] | None = None
        while not self._over.wait(min(pause, REDRAW_SECONDS)):
            if time.monotonic() - read_at >= pause:
                waiting, read_at = self._read(), time.monotonic()
                pause = min(pause * GROWTH, LONGEST_SECONDS)
            if waiting is None:
                line.hide()
            else:
                line.show(wait_in_words(*waiting, time.monotonic() - read_at))

    def _read(self) -> tuple[Entry, Reason | None] | None:
        """Return the request of this process that waits, and why it does; None if none, or the queue cannot be read."""
        with late.importing:
            from sqlsem.insight.reasons import reasons
        try:
            overview = self._coordinator.admin.overview()
        except SqlsemError as exc:
            log.info("cannot see the queue: %s", exc)
            return None
        for entry in overview.entries:
            if _is_ours(entry):
                return entry, reasons(overview, only=entry.position).get(entry.position)
        return None

    # -- with -v ------------------------------------------------------------------------------------------------

    def _log_progress(self) -> None:
        """Log how many requests are ahead, whenever that changes."""
        last, pause = None, FIRST_SECONDS
        while not self._over.wait(pause):
            pause = min(pause * GROWTH, LONGEST_SECONDS)
            try:
                text = self._describe_position()
            except SqlsemError as exc:
                log.info("cannot see the queue: %s", exc)
                continue
            if text and text != last and not self._over.is_set():
                if last is not None:  # the first text was logged when the wait began
                    log.info("Still waiting for %s", text)
                last = text

    def _describe_position(self) -> str:
        """Return our waiting requests, each with the number of requests ahead, as text."""
        waits = []
        entries = self._coordinator.admin.entries()
        for entry in entries:
            if _is_ours(entry):
                ahead = [e for e in entries if e.resource == entry.resource and e.position < entry.position]
                waits.append(f"{entry.resource!r} at {entry.position}, behind {len(ahead)}")
        return "; ".join(waits)


def _is_ours(entry: Entry) -> bool:
    return (entry.host, entry.pid, entry.state) == (host_name(), os.getpid(), "waits")
