"""The socket of a driver's connection, on Linux: shut down to end a call in which the driver hangs."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import NamedTuple

from sqlsem.util import sockets


def open_sockets() -> dict[int, str] | None:
    """Return the sockets of this process by descriptor, with their identity (Linux only)."""
    found = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return None
    for name in names:
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


class Handle(NamedTuple):
    """A socket: its descriptor, which another file may get after a close, and its identity."""

    number: int
    identity: str

    def there(self) -> bool:
        """True if the descriptor still belongs to this socket."""
        try:
            return os.readlink(f"/proc/self/fd/{self.number}") == self.identity
        except OSError:
            return False

    def shut(self) -> None:
        """Shut the socket down (`sqlsem.util.sockets.shut_down`)."""
        if self.there():
            sockets.shut_down(self.number)


def new_socket(before: dict[int, str] | None, port: int | None = None) -> Handle | None:
    """Return the one connected TCP socket that is new since ``before``, or None. ``port``: the peer's."""
    after = open_sockets() if before is not None else None
    if before is None or after is None:
        return None
    new = []
    for number, target in after.items():
        if before.get(number) == target:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as line:
            if line.family in (socket.AF_INET, socket.AF_INET6) and line.type == socket.SOCK_STREAM:
                peer = line.getpeername()
                if port is None or peer[1] == port:
                    new.append(Handle(number, target))
    return new[0] if len(new) == 1 else None
