"""The end of sockets of drivers, by their descriptors."""

from __future__ import annotations

import contextlib
import os
import socket

__all__ = ["discard", "shut_down"]


def shut_down(number: int) -> None:
    """Shut a socket down: the server notices, and a thread that waits for an answer, which may never come, wakes up."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
        copy.shutdown(socket.SHUT_RDWR)


def discard(number: int) -> None:
    """Close a socket that a forked child has inherited, or the server would not see the parent die. /dev/null takes its
    place, so that no file of the child gets the descriptor's number.
    """
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, number)
        os.close(null)
