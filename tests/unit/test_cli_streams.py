"""Standard streams that are closed, full, broken or of another encoding change nothing: every command does the same."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import command_line, free_port
from support.commands import PATIENCE, ROOT

import sqlsem
from sqlsem import cli
from sqlsem.cli.group import EXIT_IO

posix = pytest.mark.skipif(os.name != "posix", reason="needs fork, /dev/full and descriptors of POSIX")
TESTS = str(Path(__file__).resolve().parents[1])
HERE = str(Path(__file__).resolve().parent)
GOOD = "good"
BAD = ("closed", "full", "broken")


# -- every command, in processes that fork from one which has loaded everything ---------------------------------------


def ruin(number: int, fault: str) -> None:
    """Give a standard stream the condition under test."""
    if fault == "closed":
        os.close(number)
        return
    if fault == "full":
        opened = os.open("/dev/full", os.O_RDWR)
    else:
        reading, opened = os.pipe()
        os.close(reading)
    os.dup2(opened, number)
    os.close(opened)


def begin_anew() -> None:
    """Make the standard streams that Python makes when it starts."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            stream = None
        else:
            errors = "backslashreplace" if number == 2 else "strict"
            stream = open(number, mode, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def end() -> int:
    """Do the steps of Python's exit; True if all could be written."""
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError:
        return 120
    return 0


def do(arguments: list[str], fault: str, out: str) -> None:
    """Call the command line in this process, which has forked for it; does not return."""
    signal.alarm(int(PATIENCE))
    opened = os.open(out, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for number in (1, 2):
        os.dup2(opened, number)
    for number in (0, 1, 2) if fault in BAD else ():
        ruin(number, fault if number or fault == "closed" else "broken")
    begin_anew()
    code: object = 0
    try:
        cli.main(arguments, prog_name="sqlsem")
    except SystemExit as exc:
        code = exc.code
    os._exit(end() or int(code or 0))  # type: ignore[call-overload]


def end_once_it_answers(pid: int, port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)


def a_day(fault: str, folder: str) -> None:
    """Run all commands one after the other; print their exit codes and output as JSON."""
    assert all(command.callback for _, command in command_line.commands())  # their modules are loaded
    outputs = {}
    for path, arguments in command_line.examples().items():
        port = free_port()
        words = [*path, *(argument.format(folder=folder, port=port) for argument in arguments)]
        out = f"{folder}/out"
        pid = os.fork()
        if pid == 0:
            do(words, fault, out)
        if path in command_line.SERVES:
            end_once_it_answers(pid, port)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        outputs[" ".join(path)] = [code, Path(out).read_text()]
    print(json.dumps(outputs))


def day(fault: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """Return the output of each command, and the final contents of the database."""
    folder.mkdir()
    url = f"sqlite:///{folder}/queue.db"
    script = f"import test_cli_streams; test_cli_streams.a_day({fault!r}, {str(folder)!r})"
    process = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "SQLSEM_URL": url, "PYTHONPATH": os.pathsep.join([ROOT, TESTS, HERE])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert (folder / "ran").exists(), "the command of run"
    with sqlsem.connect(url) as coordinator:
        rows = (
            [(task.task_id, task.status) for task in coordinator.admin.tasks()],
            [(resource.resource, resource.cap, resource.paused) for resource in coordinator.admin.resources()],
            [(hold.resource, hold.outcome) for hold in coordinator.admin.history()],
            [(operation.resource, operation.action) for operation in coordinator.admin.operations()],
            coordinator.admin.entries(),
        )
    return json.loads(process.stdout), rows


@pytest.fixture(scope="module")
def good_day(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    return day(GOOD, tmp_path_factory.mktemp("streams") / GOOD)


@posix
def test_each_command_has_its_exit_code(good_day: tuple[dict[str, Any], Any]) -> None:
    outputs, _ = good_day
    unusual = {"why": 1, "tasks cancel": 0, "tasks retry": 0, "revoke": 1, "guard": 78, "top": 64}
    unusual |= dict.fromkeys(("schedules pause", "schedules resume", "schedules remove"), 1)
    unusual |= {
        "batch abandon": 0,
        "config allow": 78,
        "config deny": 78,
        "once forget": 1,
        "leader step-down": 1,
        "batch wait": 1,
    }
    served = {"metrics", "dashboard"}  # SIGTERM ends these
    codes = {name: code for name, (code, _) in outputs.items() if name not in served}
    assert codes == {name: unusual.get(name, 0) for name in codes}
    assert not [name for name, (_, text) in outputs.items() if "Traceback" in text]


@posix
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("fault", BAD)
def test_commands_do_the_same_without_streams(fault: str, good_day: tuple[dict[str, Any], Any], tmp_path: Path) -> None:
    outputs, rows = day(fault, tmp_path / fault)
    good, good_left = good_day
    assert rows == good_left
    allowed = {name: {code, EXIT_IO} if code == 0 and fault != "closed" else {code} for name, (code, _) in good.items()}
    assert {name: code for name, (code, _) in outputs.items() if code not in allowed[name]} == {}


# -- sqlsem run, as it is really started ------------------------------------------------------------------------------

#: A shell's redirections of the streams of ``"$@"``; for bash, where a pipe can be broken in no other way.
REDIRECTIONS = {
    "no stdin": '"$@" <&-',
    "no stdout": '"$@" >&-',
    "no stderr": '"$@" 2>&-',
    "nothing": '"$@" <&- >&- 2>&-',
    "stdout full": '"$@" >/dev/full',
    "stderr full": '"$@" 2>/dev/full',
    "both full": '"$@" >/dev/full 2>&1',
    "stdout broken": '"$@" | true; exit ${PIPESTATUS[0]}',
    "both broken": '"$@" 2>&1 | true; exit ${PIPESTATUS[0]}',
}
#: The command of `sqlsem run`: it lists the queue, writes to both streams, and exits with 7.
COMMAND = f'trap "" PIPE; "{sys.executable}" -m sqlsem ls --json > "$0"; echo said; echo said >&2; exit 7'


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "SQLSEM_URL": f"sqlite:///{tmp_path}/queue.db", "PYTHONPATH": ROOT}


@posix
@pytest.mark.parametrize("verbose", [(), ("-vv",)], ids=["plain", "verbose"])
@pytest.mark.parametrize("streams", REDIRECTIONS)
def test_run_holds_its_lock_with_any_streams(
    streams: str, verbose: tuple[str, ...], tmp_path: Path, environment: dict[str, str]
) -> None:
    words = [sys.executable, "-m", "sqlsem", *verbose, "run", "--mutex", "m", "--", "sh", "-c", COMMAND]
    process = subprocess.run(
        ["bash", "-c", REDIRECTIONS[streams], "bash", *words, f"{tmp_path}/seen"],
        env=environment,
        timeout=PATIENCE,
        check=False,
        capture_output=True,
    )
    assert process.returncode == 7, process.stderr
    (queue,) = json.loads((tmp_path / "seen").read_text())
    assert [(entry["resource"], entry["state"]) for entry in queue["entries"]] == [("m", "holds")]
    with sqlsem.connect(environment["SQLSEM_URL"]) as coordinator:
        assert [hold.outcome for hold in coordinator.admin.history("m")] == ["released"]


LOCALES = {
    "C": {"LC_ALL": "C"},
    "POSIX": {"LC_ALL": "POSIX"},
    "C as it was": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ASCII": {"PYTHONIOENCODING": "ascii"},
    "Latin-1": {"PYTHONIOENCODING": "latin-1"},
    "strict": {"PYTHONIOENCODING": "utf-8:strict"},
}


@posix
@pytest.mark.parametrize("name", LOCALES)
def test_commands_work_in_any_locale(name: str, tmp_path: Path, environment: dict[str, str]) -> None:
    """A program whose name and argument are invalid text, and names in the queue that the locale cannot show."""
    environment = {**environment, **LOCALES[name]}
    program = os.fsencode(tmp_path) + b"/b\xe4nk"
    Path(os.fsdecode(program)).write_text('#!/bin/sh\nprintf %s "$1" > "$0.told"\nexit 3\n')
    os.chmod(program, 0o755)
    with sqlsem.connect(environment["SQLSEM_URL"]) as coordinator:
        coordinator.admin.set_limit("b\xe4nk \u65e5", 3)
    words = [sys.executable, "-m", "sqlsem"]
    started: list[str | bytes] = [*words, "run", "--mutex", "m", "--", program, b"\xff\xe4"]
    process = subprocess.run(started, env=environment, timeout=PATIENCE, check=False, capture_output=True)
    assert process.returncode == 3, process.stderr
    assert Path(os.fsdecode(program + b".told")).read_bytes() == b"\xff\xe4"
    for arguments in (["ls"], ["history"], ["ls", "--json"], ["history", "--json"], ["-v", "ls"]):
        process = subprocess.run(
            [*words, *arguments], env=environment, timeout=PATIENCE, check=False, capture_output=True
        )
        assert (process.returncode, b"Traceback" in process.stderr) == (0, False), process.stderr
        if "--json" in arguments:
            queues = json.loads(process.stdout)
            assert queues[0]["resource"] == ("b\xe4nk \u65e5" if "ls" in arguments else "m")
