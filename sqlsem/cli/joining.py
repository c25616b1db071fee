"""``sqlsem run --join``: a command that works under the lock of the ``sqlsem run`` above it, and never outlives it.

The one above listens on a socket that only its user can reach, and tells where in the environment of its command. Who
joins connects, and stays connected for as long as its own command runs. It ends that when it is told to, or when the
connection breaks, in whatever way the one above has died. Before that gives the lock back it tells all, and waits until
the last one has gone. So the connection is the whole of it: no row, no poll, and the database is not asked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType

from sqlsem.core.threads import GoesOn, Kept, spawn
from sqlsem.errors import ConfigurationError, NotHeld

__all__ = ["JOIN", "Joinable", "Joined"]

log = logging.getLogger("sqlsem")

#: The environment variable that tells where to join.
JOIN = "SQLSEM_JOIN"
#: Seconds for the answer of the one above, which is a line.
ANSWER_SECONDS = 10.0
#: Seconds beyond its own patience that somebody who has joined gets to go, before it is made to.
GRACE_SECONDS = 1.0


class Joinable:
    """The side of the one above, while it lasts. Where there are no such sockets nobody can join, and the log says so.

    ``polite``: seconds for which a command may go on once it has been told to end.
    """

    def __init__(self, polite: float) -> None:
        self._polite = polite
        self._folder: str | None = None
        self._listener: socket.socket | None = None
        self._accepting = Kept("sqlsem-join", self._accept)
        self._lock = threading.Lock()
        self._joined: dict[socket.socket, int] = {}  # and their process numbers
        self._gone = threading.Condition(self._lock)
        self._over = False

    def __enter__(self) -> Joinable:
        try:
            self._folder = tempfile.mkdtemp(prefix="sqlsem-")  # for this user alone
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(os.path.join(self._folder, "join"))
            self._listener.listen()
            self._accepting.begin()
        except (OSError, AttributeError) as exc:
            log.info("Nothing can join this lock (--join): %s", exc)
            self._close()
        return self

    @property
    def environment(self) -> Mapping[str, str]:
        """What the command is told."""
        return {} if self._folder is None else {JOIN: os.path.join(self._folder, "join")}

    def _accept(self, _: GoesOn) -> None:
        listener = self._listener
        while listener is not None:
            try:
                line, _ = listener.accept()
            except OSError:
                return  # closed
            spawn(partial(self._serve, line), "sqlsem-joined")

    def _serve(self, line: socket.socket) -> None:
        """Until whoever has joined is gone."""
        with line, contextlib.suppress(OSError, ValueError):
            pid = int(line.recv(20))
            with self._lock:
                if self._over:
                    return
                self._joined[line] = pid
            try:
                line.sendall(f"joined {self._polite}\n".encode())
                while line.recv(1):
                    pass
            finally:
                with self._lock:
                    del self._joined[line]
                    self._gone.notify_all()

    def tell(self) -> None:
        """Nobody may join any more, and who has shall end. Does not wait."""
        with self._lock:
            self._over = True
            for line in self._joined:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """`tell`, and wait until they are gone; those that do not go are made to."""
        self.tell()
        with self._lock:
            if not self._gone.wait_for(lambda: not self._joined, self._polite + GRACE_SECONDS):
                for pid in self._joined.values():
                    log.warning("Process %d has joined this lock and does not end; it is killed, and its command", pid)
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                self._gone.wait_for(lambda: not self._joined, GRACE_SECONDS)

    def _close(self) -> None:
        listener, self._listener = self._listener, None
        folder, self._folder = self._folder, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the one who accepts
            listener.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._close()


class Joined:
    """The side of the one below. ``ended`` is called, from another thread, when its command has to end.

    Raises `ConfigurationError` where there is nothing to join, and `NotHeld` when that has ended.
    """

    def __init__(self, environment: Mapping[str, str], ended: Callable[[], object]) -> None:
        path = environment.get(JOIN)
        if not path:
            raise ConfigurationError(
                f"There is no lock to join: ${JOIN} is not set, as this does not run under 'sqlsem run' (or the system "
                f"has no Unix sockets); take a lock of its own"
            )
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.settimeout(ANSWER_SECONDS)
        try:
            self._line.connect(path)
            self._line.sendall(str(os.getpid()).encode())
            answer = self._line.recv(40).decode("ascii", "replace").split()
        except OSError as exc:
            self._line.close()
            raise NotHeld(
                f"The lock that was to be joined is held no more: its 'sqlsem run' has ended ({exc})"
            ) from exc
        if not answer or answer[0] != "joined":
            self._line.close()
            raise NotHeld("The lock that was to be joined is being given back; start this before its command ends")
        #: Seconds for which the command may go on once it has to end.
        self.polite = float(answer[1])
        self._line.settimeout(None)
        self._ended = ended
        self._listening = Kept("sqlsem-join", self._listen)
        self._listening.begin()

    def _listen(self, _: GoesOn) -> None:
        with contextlib.suppress(OSError):
            while self._line.recv(1):
                pass
        self._ended()

    def leave(self) -> None:
        """The command has ended."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._line.close()
