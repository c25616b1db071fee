"""Shows for how long a command goes on trying to reach its database, in a line on a terminal."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import sqlsem
from sqlsem.ops.terminal.status import StatusLine, status_line
from sqlsem.util.threads import spawn

__all__ = ["attempts_shown"]

#: Seconds after which an attempt is shown, and between two looks at it.
SHOWN_SECONDS, LOOK_SECONDS = 1.0, 0.25


@contextlib.contextmanager
def attempts_shown(coordinator: sqlsem.Coordinator) -> Iterator[None]:
    """A context in which a thread shows calls that last long, until the first call has succeeded."""
    line = status_line()
    if line is None:
        yield
        return
    over = threading.Event()
    spawn(functools.partial(_show, coordinator, line, over), "sqlsem-trying")
    try:
        yield
    finally:
        over.set()
        line.close()


def _show(coordinator: sqlsem.Coordinator, line: StatusLine, over: threading.Event) -> None:
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
