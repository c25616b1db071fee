"""Wakes an event loop when a signal arrives.

Python runs a signal handler between two instructions of the main thread. A signal that arrives after the last
instruction before the loop blocks in its selector interrupts nothing: the handler would run when something else wakes
the loop, which may be never. Therefore each signal also writes its number into a socket that the loop reads
(`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys


class SignalWakeup:
    """Wakes the running loop of the main thread at each signal, from `begin` until its last user has called `end`.

    There is one wakeup descriptor in a process, so the loop's own (`asyncio.loop.add_signal_handler`) or another one
    may be set already. It gets all that arrives here, and is set again at the end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._users = 0
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous = -1

    @classmethod
    def begin(cls) -> SignalWakeup | None:
        """Return the running loop's wakeup with one more user. Return None if the loop cannot read a socket, or if
        another loop has a wakeup.
        """
        global _current
        if sys.platform == "win32":  # no other process can send SIGTERM there
            return None
        loop = asyncio.get_running_loop()
        if _current is not None and _current._loop.is_closed():
            _current._close()
        if _current is None:
            wakeup = cls(loop)
            try:
                loop.add_reader(wakeup._reader, wakeup._read)
            except NotImplementedError:
                wakeup._close_sockets()
                return None
            _current = wakeup
            wakeup._previous = signal.set_wakeup_fd(wakeup._writer.fileno(), warn_on_full_buffer=False)
        if _current._loop is not loop:
            return None
        _current._users += 1
        return _current

    def end(self) -> None:
        """Remove one user; after the last one signals wake the loop no more."""
        self._users -= 1
        if self._users == 0 and _current is self:
            self._close()

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = self._reader.recv(4096)
            if self._previous != -1:
                with contextlib.suppress(OSError):  # it is full, so its reader wakes, or it was closed
                    os.write(self._previous, numbers)

    def _close(self) -> None:
        global _current
        _current = None
        # Only setting one tells which one was set. It is this one again, as no signal may be missed meanwhile.
        mine = self._writer.fileno()
        found = signal.set_wakeup_fd(mine, warn_on_full_buffer=False)
        if found != mine:  # the program has set another one since
            self._previous = found
        try:
            signal.set_wakeup_fd(self._previous)
        except (OSError, ValueError):  # it was closed
            signal.set_wakeup_fd(-1)
        self._read()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._reader)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._reader.close()
        self._writer.close()


_current: SignalWakeup | None = None
