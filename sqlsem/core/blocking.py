"""Whether a call may block the thread that it is made in."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sqlsem.errors import ConfigurationError

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["require_no_event_loop"]


def require_no_event_loop(what: object, instead: str) -> None:
    """Raise `ConfigurationError` where an event loop runs in this thread, which would stand still. ``what``, as a text,
    is what makes it (of most calls that text is never needed).
    """
    if _in_event_loop() and not _in_notebook_cell():
        raise ConfigurationError(
            f"{what} would block the event loop that runs in this thread; {instead}, or a thread (asyncio.to_thread)"
        )


def _in_event_loop() -> bool:
    """Whether one runs in this thread. None does where asyncio was never imported."""
    if "asyncio" not in sys.modules:
        return False
    return sys.modules["asyncio"]._get_running_loop() is not None


def _in_notebook_cell() -> bool:
    """Whether a cell of a notebook calls us, and not a task. IPython runs cells in its event loop, and whatever blocks
    in a cell blocks that, as everybody there knows; a task must not.
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
