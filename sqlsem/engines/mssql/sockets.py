"""The socket beneath a driver's connection, where the system tells: to be shut when the driver does not come back."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import NamedTuple


def open_sockets() -> dict[int, str] | None:
    """This process's sockets, number → identity, where the system tells (Linux)."""
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
    """A socket by its number, which may be another's once its owner has closed it, and by what the system calls it."""

    number: int
    identity: str

    def there(self) -> bool:
        """Whether the number is still this socket's."""
        try:
            return os.readlink(f"/proc/self/fd/{self.number}") == self.identity
        except OSError:
            return False

    def shut(self) -> None:
        """Shut it down: the server sees that, and a thread that waits for an answer which may never come wakes up."""
        if self.there():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.number)) as line:
                line.shutdown(socket.SHUT_RDWR)


def new_socket(before: dict[int, str] | None, port: int | None = None) -> Handle | None:
    """The one connected TCP socket that was not there before; None when that cannot be told. ``port``: of its peer."""
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
