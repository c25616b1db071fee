"""Commands: how they are run, what is kept of what they say, and how they are ended."""

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

from sqlsem import guard
from sqlsem.bodies.texts import MOST_KEPT_CHARACTERS, keepable
from sqlsem.core.pauses import pauses
from sqlsem.core.threads import spawn
from sqlsem.errors import TaskFailed

__all__ = ["END_SECONDS", "guarded", "run_command"]

#: For a command to end after it was told to.
END_SECONDS = 5.0
#: For what is left of a command's output when it has ended.
LAST_OUTPUT_SECONDS = 1.0
#: Between two looks whether a command has ended that was told to: at first, and at the most.
FIRST_LOOK_SECONDS, LOOK_SECONDS = 0.001, 0.05

#: Ends the commands of this process when that dies.
guarded = guard.Guard()


def run_command(command: str | list[str], started: Callable[[Callable[[], None]], None], patience: float) -> str:
    """Run a command, with a shell if it is one text; return the end of what it says. Raises `TaskFailed` when its
    status is not 0. Should this process die, it is told to end, and ended after ``patience`` seconds.
    """
    with guarded:
        return _run_command(command, started, patience)


def _run_command(command: str | list[str], started: Callable[[Callable[[], None]], None], patience: float) -> str:
    if os.name == "nt" and not isinstance(command, str):
        _require_program(command[0])
    mark = os.urandom(8).hex()
    marks = ":".join([*filter(None, [os.environ.get(guard.MARKS)]), mark])
    # A session of its own: a Ctrl-C is for the worker, which lets the task end.
    try:
        process = subprocess.Popen(  # noqa: S603 - what the task wants, with a shell or without
            command,
            shell=isinstance(command, str),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=guard.POSIX,
            env={**os.environ, guard.MARKS: marks},
        )
    except OSError as exc:
        what = command if isinstance(command, str) else command[0]
        raise TaskFailed(f"{what[:200]!r} cannot be started: {exc.strerror or exc}") from exc
    ending = threading.Lock()

    def stop() -> None:
        with ending:
            _end(process)

    tree = guard.Tree(process.pid, guard.POSIX, mark, None)
    try:
        guarded.watch(tree, patience)
        started(stop)
        assert process.stdout is not None
        output = _Output(process.stdout)
        status = process.wait()
        with ending:  # what it has started may take longer
            pass
    except BaseException:
        _end(process)
        raise
    finally:
        guarded.dismiss(tree)
    words = output.end()
    if status != 0:
        said = words.strip()
        # The cause comes last, and its first line is what people see.
        last = said.rpartition("\n")[2].strip() or "it said nothing"
        raise TaskFailed(f"The command ended with status {status}: {last}" + (f"\n{said}" if "\n" in said else ""))
    return words


def _require_program(name: str) -> None:
    """On Windows, batch files are handed to cmd.exe, which takes arguments for more than they are: ``a & calc``."""
    found = shutil.which(name) or name
    if found.lower().endswith((".bat", ".cmd")):
        raise TaskFailed(
            f"{name!r} is a batch file, whose arguments cmd.exe would read as commands; put it with --shell, quoted "
            f"for cmd.exe"
        )


class _Output:
    """The end of what a command says.

    Read by a thread, as the command may leave behind a service that has the pipe open: the task ends with the command,
    and the service may still write, to nobody.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._kept = b""
        self._reader = spawn(self._read, "sqlsem-output")

    def _read(self) -> None:
        with self._pipe:
            while chunk := self._pipe.read1(65536):  # type: ignore[attr-defined]
                self._kept = (self._kept + chunk)[-4 * MOST_KEPT_CHARACTERS :]

    def end(self) -> str:
        """What was said by now, when the command has ended."""
        self._reader.join(LAST_OUTPUT_SECONDS)
        return keepable(self._kept.decode(errors="replace"))[-MOST_KEPT_CHARACTERS:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command, and what it has started."""
    if process.returncode is not None:
        return  # what it left behind shall stay, and its number may be another's by now
    if os.name == "posix":
        _signal(process, signal.SIGTERM)
        # The shell may be gone before what it runs; of that nothing tells us.
        for pause in pauses(END_SECONDS, first=FIRST_LOOK_SECONDS, longest=LOOK_SECONDS):
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
    """Whether there was anybody of its group to get the signal."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
