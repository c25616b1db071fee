"""The default coordinator, for both APIs. The package's head provides it, because it imports them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, cast

from sqlsem import runtime
from sqlsem.core.client import DatabaseClient
from sqlsem.errors import ConfigurationError

__all__ = ["Coordinated", "client_of", "provide", "provide_here"]


class Coordinated(Protocol):
    """The part of `sqlsem.Coordinator` that the core and the APIs use."""

    @property
    def client(self) -> DatabaseClient:
        """Its database client."""


def _nobody() -> Coordinated:
    raise LookupError("import sqlsem, which provides the default coordinator")


_default: Callable[[], Coordinated] = _nobody
_threads = threading.local()


def provide(default: Callable[[], Coordinated]) -> None:
    """Register the function that returns the default coordinator, and makes it at the first use."""
    global _default
    _default = default


def provide_here(coordinator: Coordinated) -> None:
    """Set the default coordinator of the calling thread (a simulated one, which stands for a process)."""
    runtime.namespace(_threads)["coordinator"] = coordinator


def client_of(coordinator: Coordinated | None) -> DatabaseClient:
    """Return the client of a coordinator; None: of the default one."""
    found = coordinator if coordinator is not None else runtime.namespace(_threads).get("coordinator") or _default()
    client = getattr(found, "client", None)
    if client is None:
        raise ConfigurationError(f"coordinator must be what sqlsem.connect() gives, not {type(found).__name__}")
    return cast("DatabaseClient", client)
