"""One line on the standard error of a terminal, which says what a command waits for. It is drawn again in place, and
removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TextIO

from sqlsem.util.printable import clean

__all__ = ["StatusLine", "hide_status", "status_line"]

#: Moves to the beginning of the line, and erases the rest of it.
ERASE = "\r\x1b[K"
#: The width of a terminal that does not say it.
DEFAULT_WIDTH = 80

_current: StatusLine | None = None


class StatusLine:
    """The line. Safe to use from several threads; after `close` nothing more is drawn."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._is_drawn = False
        self._is_closed = False

    def show(self, text: str) -> None:
        """Draw the line, cut to the width of the terminal."""
        from rich.cells import set_cell_size  # only commands that wait need it

        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone, or a stream that is closed
            width = os.get_terminal_size(self._stream.fileno()).columns or DEFAULT_WIDTH
            words = set_cell_size(clean(f"sqlsem: {text}"), width - 1).rstrip()
            with self._lock:
                if not self._is_closed:
                    self._is_drawn = True
                    self._write(f"{ERASE}{words}")

    def hide(self) -> None:
        """Remove the line, so that another one can be printed; the next `show` draws it again."""
        with self._lock:
            if self._is_drawn:
                self._is_drawn = False
                with contextlib.suppress(OSError, ValueError):
                    self._write(ERASE)

    def close(self) -> None:
        """Remove the line for good. Idempotent."""
        global _current
        with self._lock:
            self._is_closed = True
        self.hide()
        if _current is self:
            _current = None

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def status_line() -> StatusLine | None:
    """Return the status line of this command; None if standard error is no terminal that can redraw a line. The parts
    of a command share it until one of them closes it.
    """
    global _current
    if _current is not None:
        return _current
    stream = sys.stderr
    if stream is None or not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return None
    _current = StatusLine(stream)
    return _current


def hide_status() -> None:
    """Remove the line, if there is one, before other output."""
    if _current is not None:
        _current.hide()
