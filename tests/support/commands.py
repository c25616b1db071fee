"""Run `sqlsem`, in this process or in others, and read its output."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from rich.console import Console

import sqlsem
from sqlsem import cli
from sqlsem.values.locks import Entry
from support.patience import PATIENCE, until

#: Erases the line of a terminal; and the same as a pattern.
RAW_ERASE = "\r\x1b[K"
ERASE = re.escape(RAW_ERASE)
ROOT = str(Path(sqlsem.__file__).resolve().parents[1])
#: Writes its process id, then each signal that it gets; ends at SIGTERM with status 5, at the third SIGINT with 6.
LISTENER = """
import os, signal, sys, time
file = os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_WRONLY)  # file objects are not reentrant
names = []
def caught(number, frame):
    names.append(signal.Signals(number).name)
    os.write(file, names[-1].encode() + b"\\n")
    if names[-1] == "SIGTERM": os._exit(5)
    if names.count("SIGINT") == 3: os._exit(6)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1"):
    signal.signal(getattr(signal, name), caught)
os.write(file, f"pid {os.getpid()}\\n".encode())
while True: time.sleep(0.05)  # not pause(), which would sleep through a signal that came just before it
"""


def call(*arguments: str, stdin: str | None = None) -> Result:
    """Run a command in this process. Only with -vv may it print where an error was raised."""
    result = CliRunner().invoke(cli.main, list(arguments), input=stdin, prog_name="sqlsem")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "-vv" in arguments or "Traceback" not in result.output
    return result


def done(*arguments: str, stdin: str | None = None) -> str:
    """Run a command in this process, which must succeed, and return its standard output."""
    result = call(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def drawn(renderable: object, width: int) -> list[str]:
    """Return the lines of a table or other output for people, on a terminal of this width."""
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system=None, legacy_windows=False).print(renderable)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def pids(file: Path) -> list[int]:
    return [int(line.split()[1]) for line in lines(file) if line.startswith("pid ")]


def alive(pid: int) -> bool:
    """Return True if the process runs. Zombies do not count: some containers never collect them."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return sys.platform != "linux"


def output_of(url: str, *arguments: str) -> tuple[int, str]:
    """Run `sqlsem` on a database that it cannot use, and return the exit code and the output in one line."""
    child = subprocess.run(
        [sys.executable, "-m", "sqlsem", "--retry", "0.5", *arguments],
        env={**os.environ, "SQLSEM_URL": url, "SQLSEM_CONFIG": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    output = " ".join((child.stdout + child.stderr).split())
    assert "Traceback" not in output, output
    return child.returncode, output


class Screen:
    """All that was written to a terminal so far."""

    def __init__(self, controller: int) -> None:
        self._controller = controller
        self._written = b""
        os.set_blocking(controller, False)

    def read(self) -> str:
        with contextlib.suppress(OSError):  # nothing more to read, for now or for good
            while more := os.read(self._controller, 10_000):
                self._written += more
        return self._written.decode(errors="replace")

    def close(self) -> None:
        os.close(self._controller)


class Bench:
    """A database of the test, and `sqlsem` processes that are all ended afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/queue.db"
        self.environment = {**os.environ, "SQLSEM_URL": self.url, "PYTHONPATH": ROOT, "PYTHONWARNINGS": "ignore"}
        self.started: list[subprocess.Popen[str]] = []
        self.told = folder / "told"

    def start(self, *arguments: str | Path, prefix: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True, **options}
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "sqlsem", *map(str, arguments)], env=self.environment, text=True, **options
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str | Path, **options: Any) -> tuple[int, str, str]:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    @contextlib.contextmanager
    def on_terminal(self, *arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], Screen]]:
        """Start a command whose streams are a terminal."""
        controller, terminal = os.openpty()
        process = self.start(*arguments, stdin=terminal, stdout=terminal, stderr=terminal)
        os.close(terminal)
        screen = Screen(controller)
        try:
            yield process, screen
        finally:
            process.kill()
            screen.close()

    def hold(self, *arguments: str, command: Sequence[str | Path]) -> subprocess.Popen[str]:
        """Start `sqlsem run` with a command that has written its process id."""
        before = len(pids(self.told))
        process = self.start(*arguments, "--", *command)
        until(lambda: len(pids(self.told)) > before or process.poll() is not None, "the command's start")
        return process

    def listen(self, *arguments: str) -> subprocess.Popen[str]:
        return self.hold(*arguments, command=[sys.executable, "-c", LISTENER, self.told])

    def entries(self) -> list[Entry]:
        with sqlsem.connect(self.url) as coordinator:
            return coordinator.admin.entries()

    def close(self) -> None:
        for pid in pids(self.told):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.kill()
            process.communicate()
