"""The host names by which the dashboard and the exporter may be requested: a guard against DNS rebinding.

A page of another site can let its own name lead to this host, and then read the responses of these servers. Its
requests carry that name, so a request is accepted only if it names a host of this server.
"""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Collection, Sequence

__all__ = ["LOOPBACK", "Hosts", "is_address", "is_loopback"]

#: The names of this host for itself.
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def is_address(host: str) -> bool:
    """Return True if a host is given by its address, not by a name, which could lead elsewhere."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return True if only this host can reach a server that listens there."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


class Hosts:
    """The names of a server.

    Args:
        names: The host names that requests may use, without ports.
        addresses: Accept any address, too. (A page of another site can only use a name.)
    """

    def __init__(self, names: Collection[str], *, addresses: bool = False) -> None:
        self._names = frozenset(name.lower() for name in names)
        self._addresses = addresses

    def accept(self, named: Sequence[str]) -> bool:
        """Return True if a request has exactly one ``Host`` header, and that names this server."""
        host = _host_of(named[0]) if len(named) == 1 else None
        return host is not None and (host in self._names or (self._addresses and is_address(host)))


def _host_of(named: str) -> str | None:
    """Return the name in a ``Host`` header, without the port."""
    try:
        parts = urllib.parse.urlsplit(f"//{named}")
        plain = parts.hostname if not (parts.username or parts.path or parts.query or parts.fragment) else None
        return plain if parts.port is None or parts.port else None
    except ValueError:  # an invalid port, for example
        return None
