"""Who lets a waiter in rings it, so that it need not look all the time.

Only where the system has sockets whose names are no files, as Linux does; elsewhere, and where somebody leaves without
ringing, waiters look as often as before. A ring says only that looking now may pay: anybody on the host may ring, which
lets nobody in.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["UnixSocketNotifier"]

#: For how long who was rung looks again and again, as the other one may be about to write what it rang for.
RECHECK_SECONDS = 0.0005
#: How often a listener looks for a wakeup of its own process.
WAKEUP_SECONDS = 0.1


class UnixSocketNotifier:
    """What one session hears and rings. Waiters are known by their positions, which are given out once."""

    def __init__(self, database: Path, table: str) -> None:
        self._database, self._table = database, table
        self._prefix: str | None = None
        self._receiver: socket.socket | None = None
        self._sender: socket.socket | None = None
        self._received = 0  # since it began to listen
        #: Whether the last wait that came to its end was ended by a ring.
        self.trusted = False

    def listen(self, position: int) -> None:
        """From now on, hear what is rung for this position, until the next one, or `stop`."""
        self.stop()
        self._received = 0
        with contextlib.suppress(OSError):
            receiver = _socket()
            if receiver is not None:
                try:
                    receiver.bind(self._name(position))
                except BaseException:
                    receiver.close()
                    raise
                self._receiver = receiver

    def recheck_seconds(self) -> float:
        """For how long to look after a ring: only where it is not one of many, with which somebody plays."""
        self._received += 1
        return RECHECK_SECONDS if self._received <= 2 else 0.0

    def stop(self) -> None:
        """Hear nothing more."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def wait(self, seconds: float, wakeup: threading.Event) -> bool:
        """Sleep for so long, or until there is a wakeup or a ring; True when it was a ring."""
        if self._receiver is None:
            wakeup.wait(seconds)
            return False
        end = time.monotonic() + seconds
        while seconds > 0 and not wakeup.is_set():
            try:
                self._receiver.settimeout(min(seconds, WAKEUP_SECONDS))
                self._receiver.recv(1)
                return True
            except TimeoutError:
                seconds = end - time.monotonic()
        return False

    def interrupt(self) -> None:
        """From another thread: end a wait that is under way."""
        receiver = self._receiver
        if receiver is not None:
            with contextlib.suppress(OSError):
                receiver.shutdown(socket.SHUT_RDWR)

    def notify(self, positions: Iterable[int]) -> None:
        """Tell who waits there. Never raises, never waits."""
        for position in positions:
            with contextlib.suppress(OSError):  # nobody listens there
                try:
                    self._send(position)
                except BlockingIOError:
                    # What those have not read who wait no more counts against the socket that sent it.
                    self._close_sender()
                    self._send(position)

    def _send(self, position: int) -> None:
        if self._sender is None:
            self._sender = _socket()
            if self._sender is None:
                return
            self._sender.setblocking(False)
        self._sender.sendto(b"!", self._name(position))

    def _close_sender(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()

    def close(self) -> None:
        """Let go of both."""
        self.stop()
        self._close_sender()

    def _name(self, position: int) -> str:
        if self._prefix is None:
            # By whatever path the file is known.
            found = os.stat(self._database)
            place = f"{found.st_dev}.{found.st_ino}.{self._table}"
            self._prefix = hashlib.sha256(place.encode()).hexdigest()[:24]
        return f"\0sqlsem.{self._prefix}.{position}"


def _socket() -> socket.socket | None:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if sys.platform == "linux" else None
