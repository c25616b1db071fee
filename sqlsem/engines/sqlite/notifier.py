"""Notifications from holders to waiters on one host: a release notifies the waiters that it grants.

They go through Unix sockets in the abstract namespace (Linux). Waiters also poll: on other systems, and because a
release may come without a notification. A notification is only a hint to poll now. Any process of the host can send
one, so it grants nothing.
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

from sqlsem.engines.statements.session import Sleeper

#: Seconds for which a notified waiter polls for its grant, because the sender may be about to commit it.
RECHECK_SECONDS = 0.0005
#: Seconds between two checks of ``wakeup`` during a wait.
WAKEUP_SECONDS = 0.1


class UnixSocketNotifier(Sleeper):
    """The sending and the receiving socket of one session. A waiter is addressed by its position, which is unique."""

    def __init__(self, database: Path, table: str) -> None:
        self._database, self._table = database, table
        self._prefix: str | None = None
        self._receiver: socket.socket | None = None
        self._sender: socket.socket | None = None
        self._received = 0  # notifications since `listen`

    def listen(self, position: int) -> None:
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
        # (From the third notification without a grant on, it may be forged.)
        self._received += 1
        return RECHECK_SECONDS if self._received <= 2 else 0.0

    def stop(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def wait(self, seconds: float, wakeup: threading.Event) -> bool:
        if self._receiver is None:
            return super().wait(seconds, wakeup)
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
        """End a running wait; called from another thread."""
        receiver = self._receiver
        if receiver is not None:
            with contextlib.suppress(OSError):
                receiver.shutdown(socket.SHUT_RDWR)

    def notify(self, positions: Iterable[int]) -> None:
        for position in positions:
            with contextlib.suppress(OSError):  # no waiter listens there
                try:
                    self._send(position)
                except BlockingIOError:
                    # Messages that former waiters have not read fill the sending socket. So take a new one.
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
        """Close both sockets."""
        self.stop()
        self._close_sender()

    def _name(self, position: int) -> str:
        if self._prefix is None:
            # (The same for each path by which the file is opened.)
            status = os.stat(self._database)
            identity = f"{status.st_dev}.{status.st_ino}.{self._table}"
            self._prefix = hashlib.sha256(identity.encode()).hexdigest()[:24]
        return f"\0sqlsem.{self._prefix}.{position}"


def _socket() -> socket.socket | None:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if sys.platform == "linux" else None
