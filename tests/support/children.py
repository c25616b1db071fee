"""Child processes that run a function of a test's module and talk with the test."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import importlib.util
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import sqlsem
from sqlsem.util.timing import Timing, current, use
from support import forks, late_threads
from support.patience import PATIENCE

#: The signals by which a faulty process ends itself. (SIGABRT is also sent by `Child.next`, which fails then.)
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


class Channel:
    """The child's end: JSON lines on standard output and input."""

    def __init__(self, output: IO[str], commands: IO[str]) -> None:
        self._output = output
        self._commands = commands
        self._guard = threading.Lock()

    def tell(self, event: str, **data: Any) -> None:
        """Send an event. ``at`` is the time on a clock that all processes of this host share."""
        line = json.dumps({"event": event, "at": time.monotonic(), **data})
        with self._guard:
            self._output.write(line + "\n")
            self._output.flush()

    def ask(self) -> dict[str, Any]:
        """Wait for the next command. End the process if the parent has ended."""
        line = self._commands.readline()
        if not line:
            os._exit(3)
        command: dict[str, Any] = json.loads(line)
        return command


def _start(env: dict[str, str], errors: IO[bytes]) -> subprocess.Popen[str] | forks.Forked:
    if sys.platform == "linux" and "LD_PRELOAD" not in env:  # only a newly started program loads it
        return forks.server().fork(env, errors)
    words = [sys.executable, "-c", "import support; support.child_main()"]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=errors, text=True, encoding="utf-8", env=env)


def child_main() -> None:
    """Run in a child process: call the function that the first line names, with a `Channel` and its arguments."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints go to standard error
    faulthandler.enable()  # see `Child.next`
    channel = Channel(output, sys.stdin)
    order = channel.ask()
    spec = importlib.util.spec_from_file_location("child_code", order["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["child_code"] = module
    spec.loader.exec_module(module)
    if order["late"]:
        late_threads.delay_threads()
    with use(Timing(**order["timing"])):
        getattr(module, order["function"])(channel, **order["arguments"])
    channel.tell("end")


class Child:
    """The parent's end of a child process."""

    def __init__(self, function: Callable[..., None], arguments: dict[str, Any], env: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115  (closed in `close`)
        self.process = _start(forks.environment(env), self._errors)
        self.function = function.__name__
        self.crash = ""  #: after `close`: the report of a crash
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        file = inspect.getsourcefile(function)
        times = dataclasses.asdict(current())
        order = {"file": str(Path(str(file)).resolve()), "function": function.__name__, "arguments": arguments}
        self.send(**order, timing=times, late=late_threads.is_late())

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # a killed process may leave part of a line
                self._events.put(json.loads(line))
        self._events.put(None)

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def next(self, timeout: float = PATIENCE) -> dict[str, Any] | None:
        """Return the next event; None when the process has ended. Without one, abort the process, and fail with the
        stacks of its threads.
        """
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            self.process.send_signal(signal.SIGABRT)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may be stopped
                self.process.wait(5)
            raise AssertionError(
                f"{self.function} (process {self.pid}) sent no event for {timeout:g} s\n{self.errors()}"
            ) from None

    def expect(self, event: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """Return the next event; fail if it is of another kind."""
        received = self.next(timeout)
        assert received is not None, (
            f"{self.function} ended (code {self.process.wait()}) before {event!r}\n{self.errors()}"
        )
        assert received["event"] == event, f"{self.function} sent {received}, not {event!r}\n{self.errors()}"
        return received

    def call(self, event: str, **command: Any) -> dict[str, Any]:
        """Send a command, and return the next event, as `expect` does."""
        self.send(**command)
        return self.expect(event)

    def quiet(self, seconds: float) -> bool:
        """Return True if no event comes within ``seconds``. Each call takes that long, so keep it small."""
        with contextlib.suppress(queue.Empty):
            received = self._events.get(timeout=seconds)
            raise AssertionError(f"{self.function} sent {received}, but should wait\n{self.errors()}")
        return True

    def rest(self, timeout: float = PATIENCE) -> list[dict[str, Any]]:
        """Return all events until the process ends; fail unless its exit status is 0."""
        deadline = time.monotonic() + timeout
        events = []
        while (event := self.next(max(0.1, deadline - time.monotonic()))) is not None:
            events.append(event)
        code = self.process.wait(PATIENCE)
        assert code == 0, f"{self.function} ended with code {code}\n{self.errors()}"
        return events

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-8000:]

    def kill(self) -> float:
        """Send SIGKILL; return the time just before it."""
        at = time.monotonic()
        self.process.kill()
        self.process.wait(PATIENCE)
        return at

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        if (code := self.process.returncode) is not None and -code in CRASHES:
            self.crash = f"{self.function} (process {self.pid}) ended by {signal.Signals(-code).name}\n{self.errors()}"
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError, ValueError):
                if stream is not None:
                    stream.close()


def require_no_crash(children: Iterable[Child]) -> None:
    """Fail if one of these closed children crashed, with what it wrote: also in tests that expect no exit code."""
    crashes = [child.crash for child in children if child.crash]
    assert not crashes, "\n".join(crashes)


def keep_to_the_permissions() -> None:
    """In a child that runs as root: drop root's right to bypass permissions of files. (Not another user: if Python is
    in root's closed home, no other user can import anything.)
    """
    if os.geteuid() != 0:
        return
    assert sys.platform == "linux", "run the tests as an ordinary user on this system"
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the 64-bit version, this thread
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    for capability_set in (0, 1):  # effective, permitted
        sets[capability_set] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


def make_lock(coordinator: sqlsem.Coordinator, spec: Mapping[str, Any]) -> sqlsem.Lock:
    """Build a lock from JSON-ready words: ``{"kind": "limit", "name": "etl", "limit": 3}``; a list makes an
    ``all_of``.
    """
    if isinstance(spec, (list, tuple)):
        return sqlsem.all_of(*[make_lock(coordinator, part) for part in spec])
    words = dict(spec)
    lock: sqlsem.Lock = getattr(coordinator, words.pop("kind"))(words.pop("name"), **words)
    return lock


def session(channel: Channel, url: str, options: dict[str, Any], grace: float = 5.0, face: str = "sync") -> None:
    """Follow commands in a child process, one lock at a time. ``acquire`` is answered when granted.

    ``{"do": "acquire", "lock": …, "timeout": …}``, ``{"do": "release"}``, ``{"do": "work", "lock": …, "seconds": …}``
    (acquire, hold, release), ``{"do": "end"}``.
    """
    coordinator: Any = sqlsem.connect(url, **options, grace=grace)
    coordinator.admin.entries("none")  # loads the driver, and waits for the server
    if face == "aio":
        from face import Face, Loop

        coordinator = Face(Loop(), coordinator)
    channel.tell("ready", pid=os.getpid())
    lock = None
    while (command := channel.ask())["do"] != "end":
        if command["do"] == "release":
            assert lock is not None
            left_at = time.monotonic()
            try:
                lock.release()
            except sqlsem.LockLost as exc:
                channel.tell("lost", message=str(exc))
                continue
            channel.tell("released", left=left_at)
            continue
        lock = make_lock(coordinator, command["lock"])
        try:
            granted = lock.acquire(timeout=command.get("timeout"))
        except sqlsem.SqlsemError as exc:
            channel.tell("failed", error=type(exc).__name__, message=str(exc))
            continue
        if not granted:
            channel.tell("timeout")
            continue
        grant = lock.grant
        channel.tell("granted", position=grant.position, positions=grant.positions)
        if command["do"] == "work":
            time.sleep(command["seconds"])
            left_at = time.monotonic()
            lock.release()
            channel.tell("released", left=left_at)
    coordinator.close()
