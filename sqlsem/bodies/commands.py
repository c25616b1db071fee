"""Runs commands of tasks: keeps the end of their output, and ends them on request or when this process dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from time import sleep
from typing import IO

from sqlsem.bodies.kinds import MAX_KEPT_CHARACTERS, keepable
from sqlsem.client.operations.backoff import backoff_delays
from sqlsem.util import tree_killer
from sqlsem.util.threads import spawn
from sqlsem.values.errors import TaskFailed

#: The time between a command's SIGTERM and its SIGKILL.
END_SECONDS = 5.0
#: How long to read the remaining output of a command that has ended.
LAST_OUTPUT_SECONDS = 1.0
#: The pause between two checks whether a command has ended after SIGTERM: the first one, and the longest.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.001, 0.05

#: Ends the commands of this process if it dies.
command_killer = tree_killer.TreeKiller()


def run_command(command: str | list[str], started: Callable[[Callable[[], None]], None], kill_after: float) -> str:
    """Run a command, by a shell if it is one text, and return the end of its output.

    Raises `TaskFailed` if its status is not 0. If this process dies, the command gets SIGTERM, and SIGKILL after
    ``kill_after`` seconds.
    """
    with command_killer:
        return _run_command(command, started, kill_after)


def _run_command(command: str | list[str], started: Callable[[Callable[[], None]], None], kill_after: float) -> str:
    if os.name == "nt" and not isinstance(command, str):
        _require_program(command[0])
    mark = os.urandom(8).hex()
    marks = ":".join([*filter(None, [os.environ.get(tree_killer.MARKS)]), mark])
    # In a session of its own: Ctrl-C must reach only the worker, which lets the task end.
    try:
        process = subprocess.Popen(  # noqa: S603 - the task names the command, and whether a shell runs it
            command,
            shell=isinstance(command, str),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=tree_killer.POSIX,
            env={**os.environ, tree_killer.MARKS: marks},
        )
    except OSError as exc:
        program = command if isinstance(command, str) else command[0]
        raise TaskFailed(f"{program[:200]!r} cannot be started: {exc.strerror or exc}") from exc
    ending = threading.Lock()

    def stop() -> None:
        with ending:
            _end(process)

    tree = tree_killer.ProcessTree(process.pid, tree_killer.POSIX, mark, None)
    try:
        command_killer.watch(tree, kill_after)
        started(stop)
        assert process.stdout is not None
        output = _Output(process.stdout)
        status = process.wait()
        with ending:  # wait for a `stop` that still ends the command's descendants
            pass
    except BaseException:
        _end(process)
        raise
    finally:
        command_killer.dismiss(tree)
    text = output.end()
    if status != 0:
        lines = text.strip()
        # Commands print the cause last. It goes into the first line of the error, which lists show.
        last = lines.rpartition("\n")[2].strip() or "it said nothing"
        raise TaskFailed(f"The command ended with status {status}: {last}" + (f"\n{lines}" if "\n" in lines else ""))
    return text


def _require_program(name: str) -> None:
    """Raise `TaskFailed` for a batch file of Windows: cmd.exe would run part of an argument such as ``a & calc``."""
    path = shutil.which(name) or name
    if path.lower().endswith((".bat", ".cmd")):
        raise TaskFailed(
            f"{name!r} is a batch file, whose arguments cmd.exe would read as commands; put it with --shell, quoted "
            f"for cmd.exe",
            code="task",
        )


class _Output:
    """The end of a command's output, read by a thread.

    The command may leave a service behind that keeps the pipe open: the task ends with the command, and the thread
    still reads what the service writes.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._last_bytes = b""
        self._reader = spawn(self._read, "sqlsem-output")

    def _read(self) -> None:
        with self._pipe:
            while chunk := self._pipe.read1(65536):  # type: ignore[attr-defined]
                self._last_bytes = (self._last_bytes + chunk)[-4 * MAX_KEPT_CHARACTERS :]

    def end(self) -> str:
        """Return the output, after the command has ended."""
        self._reader.join(LAST_OUTPUT_SECONDS)
        return keepable(self._last_bytes.decode(errors="replace"))[-MAX_KEPT_CHARACTERS:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and all processes that it has started."""
    if process.returncode is not None:
        return  # its background processes stay; and its pid may belong to another process now
    if os.name == "posix":
        _signal(process, signal.SIGTERM)
        # Wait for the whole group: the shell may end before the program that it runs.
        for pause in backoff_delays(END_SECONDS, first=FIRST_PAUSE_SECONDS, longest=MAX_PAUSE_SECONDS):
            process.poll()
            if not _signal(process, 0):
                break
            sleep(pause)
        _signal(process, signal.SIGKILL)
    else:
        process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to a command's process group; return False if that is empty."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
