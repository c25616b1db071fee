"""Processes that a certification starts, and may kill."""

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

from sqlsem.certify.results import Failed
from sqlsem.core.threads import spawn

__all__ = ["Child"]

#: Seconds for a process to begin, on a host that is busy; and to end by itself.
START_SECONDS, END_SECONDS = 60.0, 20.0


class Child:
    """A process that does a job of `sqlsem.certify.worker`. It ends when its standard input is closed: so also when
    this process is killed.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from sqlsem.certify.worker import main; main()"],
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
        """Tell it something."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended: the next event says so
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):  # not a part of one, when it was killed
                    self._events.put(json.loads(line))
        self._events.put(None)

    def next(self, seconds: float = START_SECONDS) -> dict[str, Any] | None:
        """Return the next event of the process; None when it has ended."""
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            raise Failed(f"a process of the certification said nothing for {seconds:g} s") from None

    def expect(self, event: str, seconds: float = START_SECONDS) -> dict[str, Any]:
        """Return the next event of the process, which must be of that kind."""
        found = self.next(seconds)
        if found is None:
            raise Failed(f"a process of the certification ended before it said {event!r}")
        if found["event"] == "failed":
            raise Failed(found["words"])
        if found["event"] != event:
            raise Failed(f"a process of the certification said {found}, not {event!r}")
        return found

    def heard(self) -> list[dict[str, Any]]:
        """All that it has said and that was not read yet, without waiting."""
        found = []
        with contextlib.suppress(queue.Empty):
            while (event := self._events.get_nowait()) is not None:
                found.append(event)
        return found

    def stop(self) -> None:
        """Stop it (SIGSTOP), where the system can: it does nothing more until it is killed."""
        if os.name == "posix":
            self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it work on."""
        if os.name == "posix":
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> float:
        """Kill it (SIGKILL): no word to the server. The time just before."""
        at = time.monotonic()
        self.process.kill()
        self.process.wait(END_SECONDS)
        return at

    def close(self) -> None:
        """End it in order, or kill it."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_SECONDS)
        self._reader.join(END_SECONDS)
