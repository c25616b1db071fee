"""The default coordinator, for both APIs.

This module cannot import `Coordinator`, which imports the APIs. So `sqlsem` registers the function that returns it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from sqlsem.util import runtime
from sqlsem.values.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlsem.client.client import DatabaseClient

__all__ = ["Coordinated", "client_of", "provide", "provide_here"]


class Coordinated(Protocol):
    """The part of `sqlsem.Coordinator` that the client and the APIs use."""

    @property
    def client(self) -> DatabaseClient:
        """The coordinator's database client."""


def _not_provided() -> Coordinated:
    raise LookupError("import sqlsem, which provides the default coordinator")


_default: Callable[[], Coordinated] = _not_provided
_threads = threading.local()


def provide(default: Callable[[], Coordinated]) -> None:
    """Register the function that returns the default coordinator, and makes it at the first use."""
    global _default
    _default = default


def provide_here(coordinator: Coordinated) -> None:
    """Set the default coordinator of the calling thread. (For simulations, in which a thread stands for a process.)"""
    runtime.namespace(_threads)["coordinator"] = coordinator


def client_of(coordinator: Coordinated | None) -> DatabaseClient:
    """Return the client of a coordinator; None: of the default one."""
    chosen = coordinator if coordinator is not None else runtime.namespace(_threads).get("coordinator") or _default()
    client = getattr(chosen, "client", None)
    if client is None:
        raise ConfigurationError(f"coordinator must be a result of sqlsem.connect(), not {type(chosen).__name__}")
    return cast("DatabaseClient", client)
