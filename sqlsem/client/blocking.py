"""Refuses blocking calls in a thread that runs an event loop: they would block all tasks of that loop."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sqlsem.values.errors import ConfigurationError

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["require_no_event_loop"]


def require_no_event_loop(what: object, instead: str) -> None:
    """Raise `ConfigurationError` if an event loop runs in this thread, as the call would block it. ``what`` describes
    the call; it is converted to text only for the message.
    """
    if _in_event_loop() and not _in_notebook_cell():
        raise ConfigurationError(
            f"{what} would block the event loop that runs in this thread; {instead}, or a thread (asyncio.to_thread)"
        )


def _in_event_loop() -> bool:
    """Return True if an event loop runs in this thread. (None runs if asyncio was never imported.)"""
    if "asyncio" not in sys.modules:
        return False
    return sys.modules["asyncio"]._get_running_loop() is not None


def _in_notebook_cell() -> bool:
    """Return True if a cell of a notebook makes the call, and not a task. IPython runs cells in its event loop. A cell
    may block that loop, and users of notebooks expect it; a task may not.
    """
    if "IPython" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "IPython.core.interactiveshell":
            return True
        if module.startswith("asyncio."):
            return False
        frame = frame.f_back
    return False
