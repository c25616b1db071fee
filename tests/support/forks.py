"""Fork child processes from a server that has everything loaded: a fork takes milliseconds, a new Python most
of a second. Each process that runs tests has one such server, which only forks, and ends with that process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

#: The modules that children would import first.
LOADED = (
    "pytest",
    "psycopg",
    "sqlsem.aio",
    "sqlsem.engines.postgresql",
    "sqlsem.engines.sqlite",
    "sqlsem.batches",
    "sqlsem.tasks",
    "support",
)
TESTS = Path(__file__).resolve().parent.parent
_SERVER = "import sys; from support import forks; forks.serve(int(sys.argv.pop()))"


# -- in the server --------------------------------------------------------------------------------------------------


def serve(control: int) -> None:
    """Fork on request; return in the children."""
    for name in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    line = socket.socket(fileno=control)
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's SIGINT is meant for the test run
    signal.signal(signal.SIGCHLD, lambda *_: None)
    awake, wake = os.pipe()
    for end in (awake, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    children: dict[int, int] = {}  # pid → where to report the exit status
    while True:
        ready, _, _ = select.select([line, awake], [], [])
        if awake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(awake, 4096)
            _report_exits(children)
        if line not in ready:
            continue
        request, received, _, _ = socket.recv_fds(line, 1 << 20, 4)
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupted)
            line.close()
            for descriptor in (awake, wake, received.pop(), *children.values()):
                os.close(descriptor)
            for number, descriptor in enumerate(received):
                os.dup2(descriptor, number)
                os.close(descriptor)
            folder, env = json.loads(request)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(env)
            sys.path[1:1] = [path for path in env["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
            return
        children[pid] = received.pop()
        for descriptor in received:
            os.close(descriptor)
        line.send(str(pid).encode())


def _report_exits(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = children.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(pipe)


# -- in the tests ---------------------------------------------------------------------------------------------------


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process, which finds the package and the tests' modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), **more}


class Server:
    """The fork server of this process; its children are used like `subprocess.Popen`."""

    def __init__(self) -> None:
        self._line, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._guard = threading.Lock()
        words = [sys.executable, "-c", f"{_SERVER}; import support; support.child_main()", str(server_end.fileno())]
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, pass_fds=[server_end.fileno()], env=environment({})
        )
        server_end.close()

    def fork(self, env: dict[str, str], errors: IO[bytes]) -> Forked:
        stdin, stdin_writer = os.pipe()
        stdout_reader, stdout = os.pipe()
        status_reader, status_writer = os.pipe()
        with self._guard:
            request = json.dumps([os.getcwd(), env]).encode()
            socket.send_fds(self._line, [request], [stdin, stdout, errors.fileno(), status_writer])
            pid = int(self._line.recv(64))
        for end in (stdin, stdout, status_writer):
            os.close(end)
        return Forked(
            pid,
            os.fdopen(stdin_writer, "w", encoding="utf-8"),
            os.fdopen(stdout_reader, encoding="utf-8"),
            status_reader,
        )


class Forked:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str], status_reader: int) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | None = None
        self._told = os.fdopen(status_reader, "rb", buffering=0)
        self._guard = threading.Lock()

    def wait(self, timeout: float | None = None) -> int:
        with self._guard:
            if self.returncode is None:
                poller = select.poll()  # (select takes no descriptor above 1023, and long tests have many children)
                poller.register(self._told, select.POLLIN)
                if not poller.poll(None if timeout is None else 1000 * timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
                self.returncode = int(self._told.read(64) or b"-9")
                self._told.close()
            return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def server() -> Server:
    """Return the fork server of this process, and start it at the first call."""
    return Server()
