"""``sqlsem run --join``: a command that runs under the lock of a parent ``sqlsem run``, and never outlives that lock.

The parent listens on a Unix socket that only its user can reach; its command finds the path in the environment. A
joined ``sqlsem run`` stays connected while its own command runs. It ends that command when the parent closes the
connection, also by dying. Before the parent releases the lock, it closes all connections, and waits until all joined
processes have gone. The database is not involved.
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

from sqlsem.util.threads import ShouldContinue, SupervisedThread, spawn
from sqlsem.values.errors import ConfigurationError, NotHeld

log = logging.getLogger("sqlsem")

#: The environment variable with the path of the parent's socket.
JOIN = "SQLSEM_JOIN"
#: How long a joining process waits for the parent's answer.
ANSWER_SECONDS = 10.0
#: How much longer than ``kill_after`` the parent waits for a joined process before it kills that.
GRACE_SECONDS = 1.0


class Joinable:
    """The parent's side. On a system without Unix sockets no process can join, and the log says so.

    ``kill_after``: seconds that a joined command has to end.
    """

    def __init__(self, kill_after: float) -> None:
        self._kill_after = kill_after
        self._folder: str | None = None
        self._listener: socket.socket | None = None
        self._accepting = SupervisedThread("sqlsem-join", self._accept)
        self._lock = threading.Lock()
        self._joined: dict[socket.socket, int] = {}  # process ids by connection
        self._gone = threading.Condition(self._lock)
        self._closed = False

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
        """Environment variables for the command."""
        return {} if self._folder is None else {JOIN: os.path.join(self._folder, "join")}

    def _accept(self, _: ShouldContinue) -> None:
        listener = self._listener
        while listener is not None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            spawn(partial(self._serve, connection), "sqlsem-joined")

    def _serve(self, connection: socket.socket) -> None:
        """Serve one joined process until it has gone."""
        with connection, contextlib.suppress(OSError, ValueError):
            pid = int(connection.recv(20))
            with self._lock:
                if self._closed:
                    return
                self._joined[connection] = pid
            try:
                connection.sendall(f"joined {self._kill_after}\n".encode())
                while connection.recv(1):
                    pass
            finally:
                with self._lock:
                    del self._joined[connection]
                    self._gone.notify_all()

    def end_joined(self) -> None:
        """Accept no more processes, and end the joined ones, without waiting for their end."""
        with self._lock:
            self._closed = True
            for connection in self._joined:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Call `end_joined` and wait until all joined processes have gone; kill those that do not go."""
        self.end_joined()
        with self._lock:
            if not self._gone.wait_for(lambda: not self._joined, self._kill_after + GRACE_SECONDS):
                for pid in self._joined.values():
                    log.warning("Process %d has joined this lock and does not end; it is killed with its command", pid)
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                self._gone.wait_for(lambda: not self._joined, GRACE_SECONDS)

    def _close(self) -> None:
        listener, self._listener = self._listener, None
        folder, self._folder = self._folder, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends accept()
            listener.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._close()


class Joined:
    """A joined process's side. ``ended`` is called, in another thread, when its command has to end.

    Raises `ConfigurationError` if there is no lock to join, and `NotHeld` if that lock has been released.
    """

    def __init__(self, environment: Mapping[str, str], ended: Callable[[], object]) -> None:
        path = environment.get(JOIN)
        if not path:
            raise ConfigurationError(
                f"There is no lock to join: ${JOIN} is not set, as this does not run under 'sqlsem run' (or the system "
                f"has no Unix sockets); take a lock of its own"
            )
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(ANSWER_SECONDS)
        try:
            self._connection.connect(path)
            self._connection.sendall(str(os.getpid()).encode())
            answer = self._connection.recv(40).decode("ascii", "replace").split()
        except OSError as exc:
            self._connection.close()
            raise NotHeld(
                f"The lock that was to be joined is held no more: its 'sqlsem run' has ended ({exc})"
            ) from exc
        if not answer or answer[0] != "joined":
            self._connection.close()
            raise NotHeld("The lock that was to be joined is being released; start this before its command ends")
        #: Seconds that the command has to end, between SIGTERM and SIGKILL.
        self.kill_after = float(answer[1])
        self._connection.settimeout(None)
        self._ended = ended
        self._listening = SupervisedThread("sqlsem-join", self._listen)
        self._listening.begin()

    def _listen(self, _: ShouldContinue) -> None:
        with contextlib.suppress(OSError):
            while self._connection.recv(1):
                pass
        self._ended()

    def leave(self) -> None:
        """Disconnect, as the command has ended."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
