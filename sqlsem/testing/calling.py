"""The base of the actors' sessions: a call consists of steps, and other actors run between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sqlsem.testing.fibers import Fiber, Fibers
from sqlsem.testing.real import RealServer

__all__ = ["Calling"]


class Calling:
    """A session whose calls let other actors run in between, and whose connection may break meanwhile (``cut``)."""

    cut: bool
    _fibers: Fibers
    _server: RealServer
    _caller: Fiber | None = None  # the fiber that is in a call

    def require_connection(self) -> None:
        """Raise the engine's error if the connection is broken, unless the run has ended."""
        raise NotImplementedError

    def step(self, what: str) -> None:
        """Let other actors run before the call goes on. The connection may break before that, and meanwhile."""
        self.require_connection()
        self.yield_to_others(what)
        self.require_connection()

    def yield_to_others(self, what: str) -> None:
        """Let other actors run before the call goes on; wait while the server is stalled."""
        with self.calling():
            self._fibers.step(what)
            while not self.cut and self._fibers.now < self._server.stalled_until:
                self._fibers.block("the server is stalled", self._server.stalled_until - self._fibers.now)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Note until the block ends that the running fiber is in a call of this session."""
        self._caller = self._fibers.running
        try:
            yield
        finally:
            self._caller = None

    def wake_caller(self) -> None:
        """Wake the fiber that is in a call, so that it sees what has happened."""
        if self._caller is not None:
            self._caller.ready = True
