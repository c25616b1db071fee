"""Sessions of actors whose calls are cut into steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from sqlsem.testing.fibers import Fiber, Fibers

__all__ = ["Calling"]


class _Server(Protocol):
    stalled_until: float


class Calling:
    """A session whose calls let other actors run in between, and whose connection may break meanwhile (``cut``)."""

    cut: bool
    _fibers: Fibers
    _server: _Server
    _caller: Fiber | None = None  # the fiber that is in a call

    def let_others_in(self, what: str) -> None:
        """Let other actors run here; no one runs while the server is stalled."""
        with self.in_a_call():
            self._fibers.step(what)
            while not self.cut and self._fibers.now < self._server.stalled_until:
                self._fibers.block("the server stands still", self._server.stalled_until - self._fibers.now)

    @contextlib.contextmanager
    def in_a_call(self) -> Iterator[None]:
        self._caller = self._fibers.running
        try:
            yield
        finally:
            self._caller = None

    def rouse(self) -> None:
        """Wake the fiber that is in a call, so that it sees what has happened."""
        if self._caller is not None:
            self._caller.ready = True
