"""Processes that a certification starts, and may kill: each does a job of `sqlsem.ops.certify.worker`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sqlsem.ops.certify.results import Failed
from sqlsem.util.threads import spawn

__all__ = ["Child"]

#: How long a process may take to begin on a busy host, and to end by itself, in seconds.
START_SECONDS, END_SECONDS = 60.0, 20.0


class Child:
    """A process that does a job of `sqlsem.ops.certify.worker`. It ends when its standard input is closed, and
    therefore also when this process is killed.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from sqlsem.ops.certify.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path, "SQLSEM_CONFIG": ""},
            start_new_session=True,  # Ctrl-C is for the certification, which ends its processes in order
        )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = spawn(self._read, f"reader-{self.process.pid}")
        self.send(**order)  # not in its arguments, which others can read: there may be a password in the URL

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self.process.pid

    def send(self, **command: Any) -> None:
        """Send a command to the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, as `next` will show
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # (a killed process may have written a part of a line)
                    self._events.put(json.loads(line))
        self._events.put(None)

    def next(self, seconds: float = START_SECONDS) -> dict[str, Any] | None:
        """Return the next event of the process; None if it has ended."""
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            raise Failed(f"a process of the certification said nothing for {seconds:g} s") from None

    def expect(self, event: str, seconds: float = START_SECONDS) -> dict[str, Any]:
        """Return the next event of the process, which must be of that kind."""
        received = self.next(seconds)
        if received is None:
            raise Failed(f"a process of the certification ended before it said {event!r}")
        if received["event"] == "failed":
            raise Failed(received["words"])
        if received["event"] != event:
            raise Failed(f"a process of the certification said {received}, not {event!r}")
        return received

    def heard(self) -> list[dict[str, Any]]:
        """Return the events that were not read yet, without waiting."""
        events = []
        with contextlib.suppress(queue.Empty):
            while (event := self._events.get_nowait()) is not None:
                events.append(event)
        return events

    def stop(self) -> None:
        """Stop the process (SIGSTOP) if the system can do that."""
        if os.name == "posix":
            self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue the stopped process (SIGCONT)."""
        if os.name == "posix":
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> float:
        """Kill the process (SIGKILL), without notice to the server. Return the time just before."""
        at = time.monotonic()
        self.process.kill()
        self.process.wait(END_SECONDS)
        return at

    def close(self) -> None:
        """End the process by closing its input; kill it if it does not end in time."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
