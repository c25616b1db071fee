"""``sqlsem put``, ``work``, ``tasks`` and ``batches``; in this process where that will do."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.commands import PATIENCE, ROOT, Bench, alive, call, done, drawn, lines, until
from support.overviews import NOW, task

import sqlsem
from sqlsem import bodies, config
from sqlsem.bodies import commands
from sqlsem.cli import here
from sqlsem.cli.work import Crew, render_worker
from sqlsem.client import admin
from sqlsem.insight.reasons import task_reasons
from sqlsem.ops.terminal.batches import render_batches
from sqlsem.ops.terminal.tasks import counted, render_counts, render_tasks, shortened
from sqlsem.tasks.claiming import Claiming
from sqlsem.values.batches import BatchEntry, PartEntry

#: The functions of tasks. They report their start, and wait for a file before they end.
JOBS = """
import os, time
from pathlib import Path

def lock():
    import sqlsem
    with sqlsem.mutex("ours") as grant:
        return len(sqlsem.default().admin.entries("ours"))

def note(text):
    with open("told", "a") as file:
        file.write(text + "\\n")

def add(a, b=0):
    return {"sum": a + b}

def bad(words="no"):
    raise ValueError(words)

def gated(name):
    note(f"start {name} {os.getpid()}")
    deadline = time.monotonic() + 120
    while not os.path.exists(f"open-{name}"):
        assert time.monotonic() < deadline, "nobody opened the gate"
        time.sleep(0.01)
    note(f"end {name}")

def where():
    return os.environ.get("SQLSEM_URL")
"""
posix = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture
def url(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "jobs_of_ours.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "jobs_of_ours", raising=False)
    return url


def put(*arguments: str) -> int:
    return int(done("put", "q", *arguments))


def work(*arguments: str) -> Result:
    result = call("work", "q", "--idle-exit", "300ms", *arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def bench(bench: Bench, url: str) -> Bench:
    return bench


def told(bench: Bench, prefix: str) -> int:
    """Return how often a job has reported something."""
    return sum(line.startswith(prefix) for line in lines(bench.told))


def open_gate(bench: Bench, name: str) -> None:
    (bench.folder / f"open-{name}").touch()


# -- put --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "body"),
    [
        (["--sql", "SELECT 1"], "sql", "SELECT 1"),
        (["--shell", "a | b"], "shell", "a | b"),
        (["--", "echo", "a b", "--note", "--", "$x"], "shell", '["echo", "a b", "--note", "--", "$x"]'),
        (["--json-body", '{"a": [1, "ü"]}'], "json", {"a": [1, "ü"]}),
        (["--json-body", "null"], "json", None),
        (["--call", "m.n:f"], "call", {"function": "m.n:f", "args": [], "kwargs": {}}),
        (
            ["--call", "m:f", "--arg", "1", "--arg", '"a=b"', "--arg", "full=true", "--arg", 'x={"y": null}'],
            "call",
            {"function": "m:f", "args": [1, "a=b"], "kwargs": {"full": True, "x": {"y": None}}},
        ),
    ],
)
def test_put_of_every_kind(coordinator: sqlsem.Coordinator, arguments: list[str], kind: str, body: object) -> None:
    number = put(*arguments)
    (task,) = coordinator.admin.tasks("q")
    assert (task.task_id, task.kind) == (number, kind)
    assert (task.body if kind in ("sql", "shell") else json.loads(task.body)) == body
    assert (task.order, task.max_attempts, task.on_failure, task.note) == (0, 1, "stop", None)


@pytest.mark.parametrize(("option", "kind"), [("--sql", "sql"), ("--shell", "shell"), ("--json-body", "json")])
def test_put_from_standard_input(coordinator: sqlsem.Coordinator, option: str, kind: str) -> None:
    done("put", "q", option, "-", stdin="[1,\n2]")
    (task,) = coordinator.admin.tasks("q")
    assert (task.kind, task.body) == (kind, "[1, 2]" if kind == "json" else "[1,\n2]")


def test_put_accepts_every_option(coordinator: sqlsem.Coordinator) -> None:
    text = done(
        *("put", "q", "--sql", "x", "--order", "-7", "--after", "10m", "--max-attempts", "3", "--backoff", "5s"),
        *("--on-failure", "continue", "--note", "daily", "--json"),
    )
    (task,) = coordinator.admin.tasks("q")
    assert json.loads(text) == {"queue": "q", "task_id": task.task_id}
    assert (task.order, task.max_attempts, task.on_failure, task.note) == (-7, 3, "continue", "daily")
    assert (task.ready_at - task.put_at).total_seconds() == pytest.approx(600, abs=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Say what to do"),
        (["--sql", "a", "--shell", "b"], "Say what to do"),
        (["--sql", "a", "--", "b"], "Say what to do"),
        (["a"], "unexpected extra argument"),
        (["--sql", " "], "is empty"),
        (["--shell", ""], "is empty"),
        (["--"], "a program and its arguments"),
        (["--call", "f"], "package.module:function"),
        (["--call", "m:f", "--arg", "customers"], "a text needs its quotes"),
        (["--call", "m:f", "--arg", "a=1", "--arg", "a=2"], "twice"),
        (["--sql", "a", "--arg", "1"], "--arg goes with --call"),
        (["--json-body", "{"], "not JSON"),
        (["--json-body", "NaN"], "JSON"),
        (["--sql", "a\0b"], "NUL"),
        (["--sql", "a", "--order", "x"], "whole number"),
        (["--sql", "a", "--order", "2147483648"], "whole number"),
        (["--sql", "a", "--max-attempts", "0"], "from 1 on"),
        (["--sql", "a", "--after", "soon"], "not a duration"),
        (["--sql", "a", "--backoff", "301"], "300 seconds"),
        (["--sql", "a", "--on-failure", "shrug"], "shrug"),
        (["--sql", "a", "--note", "x" * 1001], "note"),
    ],
)
def test_invalid_put_is_refused(coordinator: sqlsem.Coordinator, arguments: list[str], words: str) -> None:
    result = call("put", "q", *arguments)
    assert result.exit_code == 64
    assert words in result.stderr
    assert coordinator.admin.tasks() == []


@pytest.mark.parametrize("command", [["put", "", "--sql", "a"], ["work", " x"], ["tasks", "x" * 256]])
def test_unknown_queue_is_reported(url: str, command: list[str]) -> None:
    result = call(*command)
    assert result.exit_code == 64
    assert "queue's name" in result.stderr


def test_schedules_are_saved_listed_and_removed(coordinator: sqlsem.Coordinator) -> None:
    assert done("schedules") == "There are no schedules.\n"
    every = ["put", "q", "--every", "0 2 * * *", "--sql", "SELECT 1", "--note", "with [bold]"]
    name = done(*every).strip()
    assert done(*every).strip() == name, "the same again"
    assert name.startswith("q-")
    assert done(*every, "--name", "mine", "--time-zone", "Europe/Berlin", "--missed", "skip") == "mine\n"
    heads, *lines = done("schedules").splitlines()
    assert heads.split() == ["NAME", "QUEUE", "EVERY", "ZONE", "NEXT", "LAST", "WHAT"]
    assert [line.split()[0] for line in lines] == ["mine", name]
    assert "with [bold]" in lines[0]
    assert done("schedules", "pause", "mine") == "Schedule mine is paused.\n"
    assert json.loads(done("schedules", "--json"))[0]["paused_by"]
    assert "paused by" in done("schedules")
    assert done("schedules", "resume", "mine") == "Schedule mine goes on.\n"
    assert done("schedules", "remove", "mine") == "Schedule mine was removed.\n"
    result = call("schedules", "remove", "mine")
    assert (result.exit_code, "There is no schedule 'mine'" in result.stderr) == (1, True)
    assert coordinator.admin.tasks("q") == []
    for wrong in (
        ["--every", "x"],
        ["--every", "0 2 * * *", "--time-zone", "Mars"],
        ["--name", "x"],
        ["--missed", "skip"],
    ):
        assert call("put", "q", "--sql", "x", *wrong).exit_code == 64


def test_doctor_names_schedules_that_this_host_cannot_compute(
    coordinator: sqlsem.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "of which this host knows" not in done("doctor")
    coordinator.queue("q").schedule("@daily", sqlsem.Sql("SELECT 1"), name="daily", time_zone="Asia/Tokyo")
    assert "1, of which this host knows when they are due" in done("doctor")

    def missing(zone: str) -> None:
        raise KeyError(zone)

    monkeypatch.setattr("sqlsem.tasks.cron.ZoneInfo", missing)
    (check,) = [item for item in json.loads(done("doctor", "--json"))["checks"] if item["name"] == "schedules"]
    assert "'daily': This host knows no time zone 'Asia/Tokyo'" in check["detail"]
    assert "pip install -U tzdata" in check["mend"]


def test_put_and_work_respect_keys(coordinator: sqlsem.Coordinator) -> None:
    number = put("--sql", "1", "--unique", "k")
    assert put("--sql", "2", "--unique", "k") == number
    other = put("--sql", "3", "--replace", "k")
    assert {task.task_id: task.status for task in coordinator.admin.tasks("q")} == {
        number: "cancelled",
        other: "pending",
    }
    assert f"{number}: replaced by task {other}" in done("tasks", "q")
    for wrong in (["--unique", "k", "--replace", "k"], ["--unique", ""], ["--replace", "a\nb"]):
        assert call("put", "q", "--sql", "x", *wrong).exit_code == 64


def test_large_body_is_put_and_run(coordinator: sqlsem.Coordinator) -> None:
    body = "x" * 1_000_000
    done("put", "q", "--json-body", "-", stdin=json.dumps(body))
    (task,) = coordinator.admin.tasks("q")
    assert json.loads(task.body) == body
    assert len(done("tasks", "q")) < 2000


# -- work -------------------------------------------------------------------------------------------------------------


def test_worker_runs_every_kind(coordinator: sqlsem.Coordinator) -> None:
    sql = put("--sql", "CREATE TABLE made (n integer)")
    shell = put("--shell", "echo hello")
    function = put("--call", "jobs_of_ours:add", "--arg", "2", "--arg", "b=3")
    bad = put("--call", "jobs_of_ours:bad", "--note", "fails")
    missing = put("--call", "nowhere_at_all:f")
    claims = put("--json-body", "1")
    result = work("--workers", "2")
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "sqlsem: 3 finished, 3 failed"
    tasks = {task.task_id: task for task in coordinator.admin.tasks("q")}
    assert [tasks[n].status for n in (sql, shell, function)] == ["finished"] * 3
    assert [tasks[n].status for n in (bad, missing, claims)] == ["failed"] * 3
    assert tasks[shell].result == "hello\n"
    assert json.loads(tasks[function].result or "") == {"sum": 5}
    assert "ValueError: no" in (tasks[bad].error or "")
    assert "nowhere_at_all" in (tasks[missing].error or "")
    assert "claim" in (tasks[claims].error or "")


@pytest.mark.parametrize(
    ("shell", "attempts", "code", "words"),
    [
        ("true", 1, 0, "1 finished, 0 failed"),
        ("[ -f again ] || { touch again; exit 3; }", 2, 0, "1 finished, 0 failed, 1 tried again"),
        ("exit 3", 1, 1, "0 finished, 1 failed"),
        ("exit 3", 2, 1, "0 finished, 1 failed, 1 tried again"),
    ],
)
def test_worker_exits_with_1_on_failed_tasks(url: str, shell: str, attempts: int, code: int, words: str) -> None:
    """It counts tasks, and not attempts."""
    put("--shell", shell, "--max-attempts", str(attempts), "--backoff", "0", "--on-failure", "continue")
    result = call("work", "q", "--idle-exit", "0.5", "--fail-on-error")
    assert result.exit_code == code
    assert result.stderr.rstrip().endswith(f"sqlsem: {words}")
    assert call("work", "q", "--idle-exit", "0").exit_code == 0


def test_worker_log_lines(url: str) -> None:
    good, bad = put("--shell", "echo"), put("--call", "jobs_of_ours:bad", "--note", "fails")
    lines = work().stderr.splitlines()
    for text in (
        f"Task {good} started: $ echo",
        f"Task {good} finished after ",
        f"Task {bad} started: fails",
        f"Task {bad} of 'q' failed after ",
        "ValueError: no",
    ):
        assert sum(text in line for line in lines) == 1, text
    assert sum("failed" in line for line in lines[:-1]) == 1  # told once


def test_worker_picture_fits_80_columns(coordinator: sqlsem.Coordinator) -> None:
    for number in range(8):
        put("--order", str(number), "--note", f"number {number} {'x' * 100}", "--shell", "true")
    put("--order", "-1", "--on-failure", "stop", "--shell", "exit 1")
    crew = Crew(coordinator, "q", 4, 0.0)
    with coordinator.queue("q").try_claim() as claimed:
        crew._on_task(claimed, None, None)
        threading.Thread(target=crew.poll_queue, daemon=True).start()
        until(lambda: crew.view.pending, "a look")
        lines = drawn(render_worker(crew, 80), 80)
        claimed.fail("no\nmore")
    crew._on_task(claimed, "failed", "no")
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("q  1 of 4 busy, 0 finished, 0 failed, more than 5 pending")
    assert [line.split()[1] for line in lines[2:]] == ["running", *["pending"] * 5]
    assert lines[2].endswith("$ exit 1")
    until(lambda: crew.view.held_up, "being held up")
    crew.ended.set()
    lines = drawn(render_worker(crew, 80, leaving=True), 80)
    assert f"Held up by task {claimed.id}" in lines[-1]
    assert lines[0].endswith("LEAVING")


def test_verbose_worker_logs_each_task(url: str) -> None:
    number = put("--shell", "echo")
    result = call("-v", "work", "q", "--idle-exit", "0")
    assert result.exit_code == 0
    assert sum(f"Task {number} finished" in line for line in result.stderr.splitlines()) == 1


def test_tasks_find_the_database_of_the_worker(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    done("--url", other, "put", "q", "--call", "jobs_of_ours:where")
    done("--url", other, "put", "q", "--shell", 'echo "$SQLSEM_URL"')
    assert call("--url", other, "work", "q", "--idle-exit", "0").exit_code == 0
    with sqlsem.connect(other) as coordinator:
        shell, function = coordinator.admin.tasks("q")
    assert json.loads(function.result or "") == other
    assert shell.result == f"{other}\n"


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_finishes_running_tasks(
    bench: Bench, coordinator: sqlsem.Coordinator, number: signal.Signals
) -> None:
    first, second = (put("--call", "jobs_of_ours:gated", "--arg", f'"{name}"') for name in "ab")
    process = bench.start("work", "q")
    until(lambda: told(bench, "start a"), "the start")
    process.send_signal(number)
    assert process.stderr is not None
    until(lambda: "finishing 1 task, then leaving" in process.stderr.readline(), "an answer")  # type: ignore[union-attr]
    assert [task.status for task in coordinator.admin.tasks("q")] == ["running", "pending"]
    open_gate(bench, "a")
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err.splitlines()[-1]) == (0, "sqlsem: 1 finished, 0 failed")
    assert {task.task_id: task.status for task in coordinator.admin.tasks("q")} == {
        first: "finished",
        second: "pending",
    }
    assert (told(bench, "end a"), told(bench, "start b")) == (1, 0)


@posix
def test_first_signal_ends_an_idle_worker(bench: Bench) -> None:
    process = bench.start("work", "q")
    put("--shell", "touch seen")
    until((bench.folder / "seen").exists, "work")
    until(lambda: '"finished"' in done("tasks", "q", "--json"), "the task's end")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "sqlsem: leaving" in err
    assert err.splitlines()[-1] == "sqlsem: 1 finished, 0 failed"


@posix
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_second_signal_returns_all_tasks(
    bench: Bench, coordinator: sqlsem.Coordinator, number: signal.Signals, code: int
) -> None:
    function = put("--call", "jobs_of_ours:gated", "--arg", '"a"')
    shell = put("--", "sh", "-c", "echo start b $$ >> told; exec sleep 600")
    process = bench.start("--grace", "600", "work", "q", "--workers", "2")
    until(lambda: told(bench, "start") == 2, "the start")
    (child,) = (int(line.split()[2]) for line in lines(bench.told) if line.startswith("start b"))
    process.send_signal(number)
    assert process.stderr is not None
    until(lambda: "finishing 2 tasks" in process.stderr.readline(), "an answer")  # type: ignore[union-attr]
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert "sqlsem: 0 finished, 0 failed, 2 given back" in err
    # No client had to find the worker dead, which would have taken ten minutes on a server.
    assert [(t.task_id, t.status, t.losses) for t in coordinator.admin.tasks("q")] == [
        (function, "pending", 0),
        (shell, "pending", 0),
    ]
    assert coordinator.admin.attempts(function)[0].outcome == "returned"
    with pytest.raises(ProcessLookupError):  # ended, and collected or not ours
        until(lambda: os.kill(child, 0), "the command's end")


@posix
def test_hangup_returns_all_tasks(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    put("--call", "jobs_of_ours:gated", "--arg", '"a"')
    process = bench.start("work", "q")
    until(lambda: told(bench, "start a"), "the start")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGHUP
    assert [task.status for task in coordinator.admin.tasks("q")] == ["pending"]


#: A command that says which process it is, and starts another one that leaves its group: where there is /proc both end.
FAMILY = (
    "echo $$ >> pids; {setsid} sh -c 'echo $$ >> pids; trap \"\" TERM; while :; do sleep 0.1; done' & "
    "while :; do sleep 0.1; done"
)


@posix
@pytest.mark.parametrize(
    "setsid", ["", pytest.param("setsid", marks=pytest.mark.skipif(sys.platform != "linux", reason="/proc"))]
)
def test_commands_end_with_their_killed_worker(
    bench: Bench, coordinator: sqlsem.Coordinator, tmp_path: Path, setsid: str
) -> None:
    """Both commands are ended with the processes that they started. An earlier command with the same killer goes on."""
    put("--shell", "echo $PPID > worker; sleep 300 > /dev/null 2>&1 & echo $! > service")
    for _ in range(2):
        put("--shell", FAMILY.format(setsid=setsid))
    process = bench.start("work", "q", "--workers", "2")
    pids = tmp_path / "pids"
    until(lambda: pids.exists() and len(pids.read_text().split()) == 4, "the start of both commands")
    commands = [int(pid) for pid in pids.read_text().split()]
    service = int((tmp_path / "service").read_text())
    try:
        if sys.platform == "linux":
            killers = [
                pid for pid in children_of(process.pid) if "tree_killer.py" in Path(f"/proc/{pid}/cmdline").read_text()
            ]
            assert len(killers) == 1
        process.kill()
        process.wait(PATIENCE)
        until(lambda: not any(map(alive, commands)), "the end of the commands")
        assert alive(service), "its task had ended: the killer leaves the process alone"
    finally:
        for pid in (*commands, service):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children_of(parent: int) -> list[int]:
    children = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[1] == str(parent):
                children.append(int(path.parent.name))
    return children


@posix
def test_killer_ends_commands_beside_a_forked_child(bench: Bench, tmp_path: Path) -> None:
    """Neither a worker that leaves nor what a function forked keeps it, or it keeps anything from ending."""
    (tmp_path / "jobs_of_ours.py").write_text(
        JOBS + "\ndef fork():\n    pid = os.fork()\n    if pid == 0:\n        time.sleep(300)\n    return pid\n"
    )
    put("--shell", "true")
    number = put("--call", "jobs_of_ours:fork", "--order", "1")
    put("--shell", "echo $$ > pids; sleep 300", "--order", "2")
    process = bench.start("work", "q")
    pids = tmp_path / "pids"
    until(lambda: pids.exists() and pids.read_text().strip(), "the start of the command")
    forked = int(json.loads(done("tasks", "log", str(number), "--json"))[0]["result"])
    command = int(pids.read_text())
    try:
        process.kill()
        process.wait(PATIENCE)
        until(lambda: not alive(command), "the end of the command")
        assert alive(forked)
    finally:
        for pid in (forked, command):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@posix
def test_worker_on_a_terminal_shows_a_picture(bench: Bench) -> None:
    put("--call", "jobs_of_ours:gated", "--arg", '"a"')
    bad = put("--call", "jobs_of_ours:bad", "--order", "7", "--note", "comes later")
    bench.environment.update({"TERM": "xterm", "COLUMNS": "80", "LINES": "24"})
    with bench.on_terminal("work", "q", "--workers", "2") as (process, screen):

        def shows(*several: str) -> None:
            for words in several:
                until(lambda words=words: words in screen.read(), words)  # type: ignore[misc]

        shows("1 of 2 busy, 0 finished, 0 failed, 1 pending", "jobs_of_ours:gated", "q-", "comes later")
        open_gate(bench, "a")
        shows(f"Task {bad} of 'q' failed after 0.0 s: ValueError: no", "0 of 2 busy, 1 finished, 1 failed")
        process.send_signal(signal.SIGTERM)
        shows("sqlsem: 1 finished, 1 failed")
        assert process.wait(PATIENCE) == 0
        shows("\x1b[?25h")  # the cursor is shown again
        assert "Task 1 started" not in screen.read()


@posix
def test_work_goes_on_when_the_terminal_is_gone(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    import pty

    put("--call", "jobs_of_ours:gated", "--arg", '"a"')
    controller, terminal = pty.openpty()
    process = bench.start("work", "q", stdout=terminal, stderr=terminal, stdin=terminal)
    os.close(terminal)
    try:
        until(lambda: b"1 of 1 busy" in os.read(controller, 65536), "a picture")
    finally:
        os.close(controller)
    put("--shell", "touch seen")
    open_gate(bench, "a")
    until(lambda: len(coordinator.admin.tasks("q", "finished")) == 2, "the work")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0


#: Prints something that stays in a buffer, and more when everything else is over.
LAST_WORDS = """
import atexit, sys
from sqlsem.ops.terminal import output
if sys.argv[1] == "let go": output.open_streams()
atexit.register(lambda: sys.stderr.write("the very last words"))
sys.stdin.readline()
if sys.argv[2] == "before": sys.stdout.write("last words")
"""


@posix
@pytest.mark.parametrize("written", ["before", "after"])
@pytest.mark.parametrize(("ending", "code"), [("as ever", 120), ("let go", 0)])
def test_output_to_a_closed_terminal_changes_no_exit_code(ending: str, code: int, written: str) -> None:
    import pty

    controller, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": ROOT, "PYTHONUNBUFFERED": ""}
    words = [sys.executable, "-c", LAST_WORDS, ending, written]
    process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=terminal, stderr=terminal)
    os.close(terminal)
    os.close(controller)
    process.communicate(b"go\n", timeout=PATIENCE)
    assert process.returncode == code


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_task_table_fits_80_columns() -> None:
    tasks = [
        task(
            1, "running", seconds=75.0, host="a-host-with-a-long-name.example.org", pid=4321, attempt=2, max_attempts=3
        ),
        task(2, ready_at=datetime.now(timezone.utc) + timedelta(minutes=10, seconds=30), attempt=0, body="x " * 1000),
        task(12345, "failed", ended_at=NOW, seconds=0.2, error="\n ValueError: no\x1b such thing\nmore", kind="shell"),
    ]
    for width in (80, 120):
        why = task_reasons(tasks[:2], datetime.now(timezone.utc))
        lines = drawn(render_tasks(tasks, width, "nightly", why), width)
        assert max(map(len, lines)) <= width
        head, first, second, third, empty, error = lines
        assert head.split() == ["ID", "ORDER", "STATE", "TRIES", "FOR", "WHEN", "WHY", "WHO", "WHAT"]
        assert first.split()[:5] == ["1", "100", "running", "2/3", "1m15s"]
        assert "a-host" in first
        assert first.endswith("SELECT 1")
        assert second.split()[:4] == ["2", "100", "pending", "0"]
        assert "in 10m" in second
        assert third.split()[:5] == ["12345", "100", "failed", "1", "0.2s"]
        assert "$ SELECT" in third
        assert empty == ""
        assert error == "12345: ValueError: no\\x1b such thing"


def test_tasks_lists_all_queues() -> None:
    tasks = [task(1), task(2, queue="mails\x1b", order=-2147483647)]
    lines = drawn(render_tasks(tasks, 80), 80)
    assert max(map(len, lines)) <= 80
    assert "QUEUE" in lines[0]
    assert "nightly" in lines[1]
    assert "mails\\x1b" in lines[2]


@pytest.mark.parametrize(
    ("kind", "body", "note", "words"),
    [
        ("sql", "SELECT\n   1", None, "SELECT 1"),
        ("sql", "SELECT 1", "daily", "daily"),
        ("shell", "make all", None, "$ make all"),
        ("call", '{"function": "m:f", "args": [1, "a"], "kwargs": {"b": null}}', None, 'm:f(1, "a", b=null)'),
        ("call", "nonsense", None, "nonsense"),
        ("call", "[1]", None, "[1]"),
        ("json", '{"a": 1}', None, '{"a": 1}'),
        ("json", "x" * 5000, None, "x" * 199 + "…"),
    ],
)
def test_task_description_is_shortened(kind: str, body: str, note: str | None, words: str) -> None:
    assert shortened(kind, body, note) == words


def test_tasks_command_filters_its_list(coordinator: sqlsem.Coordinator) -> None:
    assert done("tasks") == "There are no such tasks.\n"
    assert done("tasks", "q") == "There are no such tasks in 'q'.\n"
    good, later = put("--shell", "echo hi"), put("--sql", "later", "--after", "1h")
    bad = put("--call", "jobs_of_ours:bad", "--on-failure", "continue")
    done("put", "log", "--sql", "in a queue named log")
    work()
    assert [line.split()[0] for line in done("tasks", "q").splitlines()[1:4]] == [str(n) for n in (later, bad, good)]
    assert f"{bad}: ValueError: no" in done("tasks", "q")
    assert [t["task_id"] for t in json.loads(done("tasks", "q", "--status", "finished", "--json"))] == [good]
    assert [t["task_id"] for t in json.loads(done("tasks", "-n", "1", "q", "--json"))] == [later]
    assert "There are more than these 2" in done("tasks", "q", "--max", "2")
    assert "There are more" not in done("tasks", "q", "--max", "3")
    assert "--page 2" in done("tasks", "q", "--max", "2")
    paged = done("tasks", "q", "--max", "2", "--page", "2")
    assert [line.split()[0] for line in paged.splitlines()[1:2]] == [str(good)]
    assert "q: at least 1 finished" in paged
    assert "There are more" not in paged
    assert "in a queue named log" in done("tasks")
    assert "in a queue named log" not in done("tasks", "q")
    assert "in a queue named log" in done("tasks", "--queue", "log")
    assert call("tasks", "q", "--queue", "q").exit_code == 64
    assert call("tasks", "q", "--status", "odd").exit_code == 64
    assert call("tasks", "q", "--max", "0").exit_code == 64


def test_queues_command_shows_counts(coordinator: sqlsem.Coordinator) -> None:
    nothing = call("queues")
    assert (nothing.exit_code, nothing.stdout) == (0, "There are no tasks.\n")
    assert "There are no tasks in 'q'." in call("queues", "q").stdout
    bad = put("--shell", "exit 3")
    put("--shell", "true", "--order", "1")
    done("put", "with \x1b[31m markup [bold]".replace("\x1b", ""), "--sql", "x")
    work()
    heads, *lines = done("queues").splitlines()
    assert heads.split()[:3] == ["QUEUE", "PENDING", "RUNNING"]
    assert [line.split()[:7] for line in lines if line.startswith("q ")] == [["q", "1", "0", "0", "0", "1", "0"]]
    assert any("[31m markup [bold]" in line for line in lines), "unchanged, and without colour"
    assert f"held up by task {bad}, which has failed; see it with: sqlsem tasks log {bad}" in done("queues", "q")
    (counts,) = json.loads(done("queues", "q", "--json"))
    assert (counts["pending"], counts["failed"], counts["blocked_by"]) == (1, 1, bad)
    queues = coordinator.admin.queues()
    assert all(len(line) <= 80 for line in drawn(render_counts(queues, 80), 80))


def test_queue_settings_are_shown(coordinator: sqlsem.Coordinator) -> None:
    output = done("queues", "set", "q", "--limit", "9", "--per-key", "2", "--rate", "1000/1m", "--rate-per-key", "1/1h")
    assert output.startswith(
        "'q': at most 9 running, at most 2 of each key, at most 1000/1m started, at most 1/1h started"
    )
    output = done("queues", "set", "q", "--key", "b", "--rate", "3/1s", "--weight", "2")
    assert "key 'b' of 'q': at most 3/1s started, weight 2 (set by" in output
    first, second = put("--shell", "true", "--key", "a"), put("--shell", "true", "--key", "a")
    work()
    text = done("queues")
    assert "LIMIT" in text.splitlines()[0]
    assert "1/1h a key" in text
    assert "key 'b' of 'q': at most 3/1s started" in text
    (limits, _) = json.loads(done("queues", "--json"))[0]["limits"]
    assert (limits["task_rate"], limits["task_per"], limits["key_rate"], limits["key_per"]) == (1000, 60, 1, 3600)
    assert {task.task_id: task.status for task in coordinator.admin.tasks("q")} == {
        first: "finished",
        second: "pending",
    }
    assert "rate, in" in done("tasks", "q")
    assert "the rate of its key 'a', 1/1h, is used up; there is room in" in done("why", "--task", str(second))
    done("queues", "set", "q", "--no-rate", "--no-rate-per-key", "--no-limit", "--no-per-key")
    assert done("queues", "set", "q", "--key", "b", "--no-rate", "--weight", "1") == "Nothing is set of 'q' any more.\n"
    for wrong in (
        ["--rate", "0/1m"],
        ["--rate", "5"],
        ["--rate", "5/nan"],
        ["--rate", "5/1m", "--no-rate"],
        ["--rate-per-key", "5/1m", "--key", "a"],
        ["--rate", "99999999999/1m"],
        [],
    ):
        assert call("queues", "set", "q", *wrong).exit_code == 64, wrong


def test_queue_blockers_are_shown(coordinator: sqlsem.Coordinator) -> None:
    bad = put("--shell", "echo a long way " + "x" * 100 + "; echo the cause; exit 3", "--order", "1")
    others = [put("--shell", "true", "--order", str(order)) for order in (2, 3)]
    work()
    for words in (["tasks", "q"], ["tasks", "q", "--status", "pending"]):
        text = done(*words)
        assert text.count(f"task {bad} failed") == 2
        assert f"2 pending tasks wait for {bad}, which has failed" in text
    text = done("tasks", "q")
    assert text.rstrip().endswith("q: 2 pending, 1 failed")
    tasks = coordinator.admin.tasks("q")
    narrow = drawn(render_tasks(tasks, 60), 60)
    assert any("the cause" in line for line in narrow)
    assert len(others) == 2
    cut = call("tasks", "q", "-n", "2", "--json")
    assert "There are more than these 2" in cut.stderr
    assert len(json.loads(cut.stdout)) == 2
    assert "q: at least" in done("tasks", "q", "-n", "2")


def test_priorities_are_shown_where_there_are_any() -> None:
    lines = drawn(render_tasks([task(1, priority=12), task(2)], 100, "nightly"), 100)
    assert lines[0].split()[:4] == ["ID", "ORDER", "PRIORITY", "STATE"]
    assert lines[1].split()[:4] == ["1", "100", "12", "pending"]
    assert lines[2].split()[:4] == ["2", "100", "0", "pending"]
    assert "PRIORITY" not in drawn(render_tasks([task(1), task(2)], 100, "nightly"), 100)[0]
    assert max(map(len, drawn(render_tasks([task(1, priority=-(2**31) + 1)], 80), 80))) <= 80


def test_tasks_shows_a_lost_task() -> None:
    lines = drawn(render_tasks([task(1, status="lost", claimed_at=NOW, seconds=3.0)], 100), 100)
    assert "lost" in lines[1].split()
    assert counted([task(1, status="lost"), task(2)], at_least=False) == ["nightly: 1 lost, 1 pending"]


def test_tasks_log_shows_attempts(url: str) -> None:
    number = put("--max-attempts", "2", "--backoff", "0", "--", "sh", "-c", "echo one; echo two; exit 4")
    assert f"Task {number} has no attempt yet" in call("tasks", "log", str(number)).stderr
    work()
    lines = done("tasks", "log", str(number)).splitlines()
    assert [line for line in lines if line.startswith(" ")] == [
        "    The command ended with status 4: two",  # the cause comes last
        "    one",
        "    two",
    ] * 2
    heads = [line for line in lines if not line.startswith(" ")]
    assert [head.split()[:3] for head in heads] == [["Attempt", "1:", "failed"], ["Attempt", "2:", "failed"]]
    assert f":{os.getpid()} (q-1)" in heads[0]
    logged = json.loads(done("tasks", "log", str(number), "--json"))
    assert [(attempt["task_id"], attempt["attempt"], attempt["outcome"]) for attempt in logged] == [
        (number, 1, "failed"),
        (number, 2, "failed"),
    ]
    for wrong in (["tasks", "log"], ["tasks", "log", "x"], ["tasks", "log", "0"]):
        result = call(*wrong)
        assert result.exit_code == 64
        assert "Usage: sqlsem tasks log [OPTIONS] ID" in result.stderr


def test_retry_and_cancel(coordinator: sqlsem.Coordinator, tmp_path: Path) -> None:
    failed = put("--", "test", "-e", "mended")
    held_up = put("--order", "5", "--shell", "true")
    work()
    assert [t.status for t in coordinator.admin.tasks("q")] == ["failed", "pending"]
    (tmp_path / "mended").touch()
    assert done("tasks", "retry", str(failed)) == f"Task {failed} is pending again.\n"
    work()
    assert {t.task_id: t.status for t in coordinator.admin.tasks("q")} == {failed: "finished", held_up: "finished"}
    # The command reports the tasks that it cannot cancel, and cancels the others.
    waits = put("--sql", "x")
    result = call("tasks", "cancel", str(failed), str(waits), "987654")
    assert result.exit_code == 1
    assert result.stdout == f"Task {waits} was cancelled.\n"
    assert f"Cannot cancel task {failed}" in result.stderr
    assert "there is no such task" in result.stderr
    assert coordinator.admin.tasks("q", "cancelled")[0].task_id == waits
    assert call("tasks", "retry", str(held_up)).exit_code == 1
    for wrong in (["tasks", "retry"], ["tasks", "cancel", "x"]):
        assert call(*wrong).exit_code == 64


def test_tasks_wait_waits_for_the_queue(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    assert done("tasks", "wait", "q", "--allow-new") == ""
    number = put("--shell", "exit 1")
    result = call("tasks", "wait", "q", "--timeout", "10ms")
    assert result.exit_code == 75
    assert "still has work" in result.stderr
    waiting = bench.start("tasks", "wait", "q")
    work()
    _, err = waiting.communicate(timeout=PATIENCE)
    assert waiting.returncode == 1
    assert f"sqlsem tasks log {number}" in err
    done("tasks", "cancel", str(number))
    assert done("tasks", "wait", "q", "--timeout", "1h") == ""


def test_misspelt_queue_is_refused(url: str) -> None:
    put("--shell", "true")
    result = call("tasks", "wait", "qq")
    assert result.exit_code == 78
    assert "Nothing is known of a queue 'qq' (is it 'q'?); there are q" in result.stderr
    assert done("tasks", "wait", "qq", "--allow-new") == ""
    result = call("work", "qq", "--idle-exit", "0")
    assert result.exit_code == 0
    assert "warning: Nothing is known of a queue 'qq' (is it 'q'?)" in result.stderr
    assert "warning" not in call("work", "qq", "--idle-exit", "0", "--allow-new").stderr
    assert "warning" not in work().stderr


def test_commands_without_a_shell(coordinator: sqlsem.Coordinator, tmp_path: Path) -> None:
    """As on Windows a shell would take ``a & calc`` for two commands."""
    script = "import json, sys; print(json.dumps(sys.argv[1:]))"
    words = ["a & touch injected", "$HOME", "`id`", "'", '"', "%PATH%", "ü\n"]
    number = put("--", sys.executable, "-c", script, *words)
    missing = put("--on-failure", "continue", "--", "./no-such-program", "x")
    assert f"$ {sys.executable} -c " in done("tasks", "q")
    work()
    tasks = {task.task_id: task for task in coordinator.admin.tasks("q")}
    assert json.loads(tasks[number].result or "") == words
    assert not (tmp_path / "injected").exists()
    assert tasks[missing].error == "'./no-such-program' cannot be started: No such file or directory"


def test_batch_files_are_refused_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands.os, "name", "nt")
    with pytest.raises(sqlsem.TaskFailed, match="batch file"):
        commands.run_command(["report.BAT", "a & calc"], lambda _: None, 0.0)


@pytest.mark.parametrize("text", ["[ -f x ] && y", "[1]", "[]", '["a", 1]', "[[[[", '{"a": 1}', ' ["a"]'])
def test_shell_words_are_quoted(text: str) -> None:
    assert bodies.arguments(text) is None


def test_worker_runs_allowed_kinds(coordinator: sqlsem.Coordinator, tmp_path: Path) -> None:
    more = ["--on-failure", "continue"]
    sql, shell = put("--sql", "SELECT 1", *more), put("--shell", "touch done", *more)
    own = put("--call", "jobs_of_ours:add", "--arg", "1", *more)
    result = work("--kinds", "sql,call", "--modules", "jobs_of_ours,json")
    assert "2 finished, 1 failed" in result.stderr
    others = [
        put("--call", name, *more)
        for name in (
            "os:getcwd",
            "jobs_of_ours:os.getcwd",
            "jobs_of_ours:Path",
            "jobs_of_oursx:f",
            "json:decoder.scanner.re.compile",
        )
    ]
    good = put("--call", "json.decoder:JSONDecoder.__init__", *more)
    work("--kinds", "sql,call", "--modules", "jobs_of_ours,json")
    tasks = {task.task_id: task for task in coordinator.admin.tasks("q")}
    assert (tasks[sql].status, tasks[own].status, tasks[shell].status) == ("finished", "finished", "failed")
    assert "runs sql, call only, no task of kind shell" in (tasks[shell].error or "")
    assert not (tmp_path / "done").exists()
    for number in others:
        assert "calls functions of jobs_of_ours, json only" in (tasks[number].error or ""), tasks[number]
    assert "missing 1 required" in (tasks[good].error or "")
    for wrong in (["--kinds", "sql,lies"], ["--kinds", ""], ["--modules", "a b"], ["--path", "/no/such/folder"]):
        assert call("work", "q", *wrong).exit_code == 64


def test_current_folder_is_last_in_the_import_path(bench: Bench, tmp_path: Path) -> None:
    """A module of the name of a driver or of the standard library, in whatever folder a worker is started.

    The command is an installed one: Python first imports from the folder of its file, not from the current one.
    """
    for name in ("sqlite3", "psycopg", "pyodbc", "decimal", "colorsys", "wrapt"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'a').write({name!r})\n")
    put("--call", "colorsys:rgb_to_hsv", "--arg", "1", "--arg", "1", "--arg", "1")
    number = put("--call", "jobs_of_ours:add", "--arg", "1")
    script = tmp_path / "bin" / "sqlsem_command.py"
    script.parent.mkdir()
    script.write_text("import sys\nfrom sqlsem.cli import main\nmain(sys.argv[1:])\n")

    def worked(**options: Any) -> str:
        process = subprocess.run(
            [sys.executable, script, "work", "q", "--idle-exit", "0", "--shared", *options.pop("arguments", [])],
            **{"env": bench.environment, "cwd": tmp_path, "check": True, "timeout": PATIENCE, "text": True, **options},
            capture_output=True,
        )
        return process.stderr

    assert "2 finished, 0 failed" in worked()
    assert not (tmp_path / "sprung").exists()
    if os.name != "posix":
        return
    # A folder that others can write to is never searched, not even last.
    tmp_path.chmod(0o777)
    put("--call", "jobs_of_ours:add", "--arg", "1")
    errors = worked()
    assert "everybody can write to" in errors
    assert "0 finished, 1 failed" in errors
    done("tasks", "retry", str(number + 1))
    assert "1 finished, 0 failed" in worked(arguments=["--path", str(tmp_path)])
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("pass_url", [False, True])
def test_tasks_get_no_password_unless_asked(url: str, monkeypatch: pytest.MonkeyPatch, pass_url: bool) -> None:
    monkeypatch.setenv("SQLSEM_URL", "postgresql://u:correct-horse@nowhere/x")
    numbers = [
        int(done("--url", url, "put", "q", *arguments))
        for arguments in (
            ["--call", "jobs_of_ours:where"],
            ["--shell", 'echo "$SQLSEM_URL"'],
            ["--call", "jobs_of_ours:lock"],
        )
    ]
    # (The URL has no password, so tasks would get it: pretend that it has one.)
    monkeypatch.setattr(config, "has_secret", lambda url: bool(url))
    monkeypatch.setattr(here, "has_secret", lambda url: bool(url))
    option = ["--pass-url"] if pass_url else []
    result = call("--url", url, "work", "q", "--idle-exit", "0", *option)
    assert "3 finished" in result.stderr, result.stderr  # and Python code that takes locks finds our database
    with sqlsem.connect(url) as coordinator:
        results = {task.task_id: task.result or "" for task in coordinator.admin.tasks("q")}
    for number in numbers[:2]:
        assert (url in results[number]) is pass_url
        assert ("withheld" in results[number]) is not pass_url
    assert os.environ["SQLSEM_URL"].startswith("postgresql:")


def test_sql_errors_keep_the_servers_message(coordinator: sqlsem.Coordinator) -> None:
    number = put("--sql", "SELECT 1; SELECT * FROM nowhere_at_all")
    work()
    (task,) = coordinator.admin.tasks("q")
    assert task.task_id == number
    assert re.fullmatch(r"The SQL failed: (SQLITE_ERROR: )?no such table: nowhere_at_all", task.error or "")
    assert "no such table: nowhere_at_all" in done("tasks", "q")


def test_worker_survives_an_outage(
    coordinator: sqlsem.Coordinator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = coordinator.queue("q")
    away, calls = threading.Event(), []
    reach = Claiming.end_and_claim

    def unreachable(self: Claiming, ends: Sequence[Any], maximum: int, **given: Any) -> Any:
        if away.is_set():
            calls.append(maximum)
            raise sqlsem.Unavailable("out of reach")
        return reach(self, ends, maximum, **given)

    monkeypatch.setattr(Claiming, "end_and_claim", unreachable)
    client = queue.claiming.client
    monkeypatch.setattr(client, "timing", replace(client.timing, reconnect=0.01))
    with caplog.at_level("INFO", "sqlsem"):
        # A queue that never had a task is a mistake, and reported at once.
        away.set()
        with pytest.raises(sqlsem.Unavailable):
            sqlsem.tasks.Worker(queue, outlast=True).run()
        away.clear()
        worker = sqlsem.tasks.Worker(queue, 2, outlast=True)
        running = threading.Thread(target=worker.run)
        running.start()
        done("put", "q", "--shell", "true")
        until(lambda: worker.finished == 1, "the first task")
        away.set()
        calls.clear()
        until(lambda: len(calls) > 10, "attempts")
        assert running.is_alive()
        done("put", "q", "--shell", "true")
        away.clear()
        until(lambda: worker.finished == 2, "the second task")
        worker.stop()
        running.join(PATIENCE)
    assert sum("going on as soon as the database is back" in message for message in caplog.messages) == 1
    assert sum("The database is back" in message for message in caplog.messages) == 1
    # With idle_exit, and without outlast, it ends.
    for options in ({"outlast": True, "idle_exit": 3}, {}):
        worker = sqlsem.tasks.Worker(queue, **options)  # type: ignore[arg-type]
        running = threading.Thread(target=_raises_unavailable, args=(worker,))
        running.start()
        until(lambda worker=worker: worker._reached, "the start")
        away.set()
        running.join(PATIENCE)
        assert not running.is_alive()
        away.clear()


def _raises_unavailable(worker: sqlsem.tasks.Worker) -> None:
    with pytest.raises(sqlsem.Unavailable):
        worker.run()


# -- batches -----------------------------------------------------------------------------------------------------------


def part(name: str, status: str = "succeeded", **other: object) -> PartEntry:
    plain = PartEntry(name, status, False, 1, 1, "x", "etl01", 7, NOW, NOW, 90.0, None, None)
    return replace(plain, **other)  # type: ignore[arg-type]


A_BATCH = BatchEntry(
    *(42, "nightly", "succeeded", 3600.0, NOW, NOW, 125.0, "running", "shell", "./next.sh --all", 1, "x", NOW, None),
    *(3.0, None, (part("a"), part("b", is_last=True))),
)


def test_batch_table_fits_80_columns() -> None:
    failed = replace(
        A_BATCH,
        batch_id=41,
        status="open",
        seconds=7200.0,
        callback_status="none",
        parts=(
            part("a-part-with-a-long-name-" * 3, "failed", error="ValueError: no\x1b\nmore"),
            part("b", "running", missing_for=2.0, host="a-long-host-name.example.org"),
            part("c", "expected", attempt=0, started_at=None, seconds=None, host=None),
        ),
    )
    lines = drawn(render_batches([A_BATCH, failed], 80), 80)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("42  nightly  succeeded  2m05s of 1h00m  opened ")
    assert lines[2].split()[:4] == ["a", "succeeded", "1", "1m30s"]
    assert lines[3].endswith("the last")
    assert lines[4] == "  callback $ ./next.sh --all: running for 3.0s"
    assert lines[6].startswith("41  nightly  open  2h00m of 1h00m  OVERDUE")
    text = "\n".join(drawn(render_batches([failed], 160), 160))
    assert "ValueError: no" in text
    assert "[missing for 2.0s]" in text
    assert "\x1b" not in text
    ended = replace(A_BATCH, callback_status="failed", callback_error="OSError: full\nmore")
    assert drawn(render_batches([ended], 80), 80)[4] == (
        "  callback $ ./next.sh --all: failed after 3.0s: OSError: full"
    )


def test_batches_command_shows_parts(coordinator: sqlsem.Coordinator) -> None:
    assert done("batch") == "There are no batches.\n"
    assert done("batch", "nightly") == "There are no batches 'nightly'.\n"
    nightly = sqlsem.batch("nightly", ["a", "b"], window="1h", coordinator=coordinator)
    with nightly.part("a"):
        pass
    text = done("batch", "nightly")
    assert "nightly  open" in text
    assert f" by {getpass.getuser()}" in text
    assert "expected" in text
    with nightly.part("b"):
        pass
    (batch,) = json.loads(done("batch", "--json"))
    assert (batch["name"], batch["status"]) == ("nightly", "succeeded")
    assert [(p["part"], p["is_last"]) for p in batch["parts"]] == [("a", False), ("b", True)]
    assert json.loads(done("batch", "other", "--json")) == []
    assert done("batch", "--name", "nightly", "-n", "1") == done("batch")


def test_resuming_batches(coordinator: sqlsem.Coordinator, tmp_path: Path) -> None:
    assert done("batch", "resume") == "Nothing was left to do.\n"
    assert call("batch", "resume", "nightly").exit_code == 78
    assert call("batch", "resume", "7", "--name", "7").exit_code == 64
    publish = sqlsem.Shell(f"test -e {tmp_path}/mended && touch {tmp_path}/continued")
    nightly = sqlsem.batch("nightly", ["a"], window="1h", on_success=publish, coordinator=coordinator)
    with pytest.raises(sqlsem.BatchFailed):
        with nightly.part("a"):
            pass
    (batch,) = json.loads(done("batch", "--json"))
    number = str(batch["batch_id"])
    assert batch["callback_status"] == "failed"
    assert done("batch", "resume", "nightly") == "Nothing was left to do.\n"
    failing = call("batch", "resume", number)
    assert failing.exit_code == 1
    assert "status 1" in failing.stderr
    (tmp_path / "mended").touch()
    assert "Done" in done("batch", "resume", number)
    assert (tmp_path / "continued").exists()
    assert done("batch", "resume", number) == "Nothing was left to do.\n"
    assert "finished" in done("batch")


def test_batch_is_abandoned_by_command(coordinator: sqlsem.Coordinator) -> None:
    assert call("batch", "abandon").exit_code == 64
    assert call("batch", "abandon", "7", "--name", "7").exit_code == 64
    for which in ("nightly", "17"):
        assert call("batch", "abandon", which).exit_code == 78
    nightly = sqlsem.batch("nightly", ["a", "b"], window="1h", coordinator=coordinator)
    for which in ("nightly", "2"):
        with nightly.part("a"):
            pass
        number = nightly.entry().batch_id  # type: ignore[union-attr]
        assert done("batch", "abandon", which) == f"Abandoned: batch {number}.\n"
        again = call("batch", "abandon", which)
        assert again.exit_code == 1
        assert f"Nothing to abandon: batch {number} of 'nightly' has ended, it is abandoned." in again.stdout
    assert "nightly  abandoned" in done("batch")
    assert "abandon" in done("history", "--operations")


@posix
def test_callback_of_a_dead_process_is_resumed(bench: Bench) -> None:
    script = """
import sqlsem
r = sqlsem.batch("nightly", ["a"], window="1h", on_success=sqlsem.Call("jobs_of_ours:gated", "x"))
with r.part("a"): pass
"""
    process = subprocess.Popen([sys.executable, "-c", script], env=bench.environment, cwd=bench.folder, text=True)
    try:
        until(lambda: told(bench, "start x"), "the callback's start")
    finally:
        process.kill()
        process.wait(PATIENCE)
    open_gate(bench, "x")

    def resumed() -> bool:
        return "Done: the callback of batch 'nightly'" in done("--grace", "0.5", "batch", "resume")

    until(resumed, "taking it over")
    assert (told(bench, "start x"), told(bench, "end x")) == (2, 1)


def test_tasks_show_has_body_and_options(url: str) -> None:
    text = "SELECT 1;\n  SELECT 'later'"
    lock = ["--lock", "limit:pg=3", "--lock", "mutex:a"]
    number = done("put", "q", "--sql", text, "--key", "t7", "--note", "daily", "--max-attempts", "3", *lock).strip()
    other = done("put", "q", "--json-body", "{}").strip()
    shown = [line.rstrip() for line in done("tasks", "show", number).splitlines()]
    fields = dict(line.split(maxsplit=1) for line in shown[:-1])
    assert fields["task"] == f"{number} of queue q"
    assert fields["locks"] == "limit 3 of pg, write of a"
    assert (fields["note"], fields["key"], fields["attempts"]) == ("daily", "t7", "0 of 3")
    assert shown[-2:] == ["sql         SELECT 1;", "              SELECT 'later'"]
    plain = json.loads(done("tasks", "show", number, "--json"))
    assert (plain["task_id"], plain["body"], plain["max_attempts"]) == (int(number), text, 3)
    assert plain["why"]["code"]
    assert done("tasks", "show", other).splitlines()[-1].split() == ["json", "{}"]
    assert call("tasks", "show", "999").exit_code == 1


def test_tasks_show_finds_a_task_on_any_page(coordinator: sqlsem.Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "TASKS_OF_A_PAGE", 3)
    numbers = coordinator.queue("q").put_many([{"number": number} for number in range(8)])
    for number in numbers[::2]:
        coordinator.admin.cancel_task(number)
    found = [coordinator.admin.task(number) for number in numbers]
    assert [task.task_id for task in found if task is not None] == numbers
    assert coordinator.admin.task(max(numbers) + 1) is None
