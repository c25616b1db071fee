"""The commands show that an owner is dead, although no client has polled since its death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sqlsem import cli
from tests import support

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL")

#: The grace of the member that dies.
GRACE = 1.0
HOLDER = """
import sys, time, sqlsem
url, grace, name, options = sys.argv[1], float(sys.argv[2]), sys.argv[3], eval(sys.argv[4])
with sqlsem.connect(url, grace=grace, **options) as coordinator:
    lock = coordinator.mutex(name, note="the dead one")
    lock.acquire()
    task = coordinator.queue(name).try_claim()
    print(lock.grant.position, task.id, flush=True)
    time.sleep(600)
"""


class Bench:
    def __init__(self, database: support.Database, name: str) -> None:
        self.database, self.name = database, name

    def call(self, *arguments: str, options: tuple[str, ...] = ()) -> Result:
        schema = self.database.options.get("schema", "sqlsem")
        words = ["--url", self.database.url, "--schema", schema, *options, *arguments]
        result = CliRunner().invoke(cli.main, words, env={"COLUMNS": None})
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    def entries(self) -> list[dict[str, Any]]:
        queues = json.loads(self.call("ls", self.name, "--json").stdout)
        return queues[0]["entries"] if queues else []

    def tasks(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.call("tasks", self.name, "--json").stdout)
        return rows


@pytest.fixture
def bench(database: support.Database, name: str) -> Iterator[Bench]:
    """A client that held the lock and ran a task, and has been dead for longer than its grace."""
    bench = Bench(database, name)
    script = [sys.executable, "-c", HOLDER, database.url, str(GRACE), name, repr(database.options)]
    assert bench.call("put", name, "--call", "os:getpid").exit_code == 0
    process = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().split()
        (alive,) = bench.entries()
        assert (alive["state"], alive["missing_for"]) == ("holds", None)
        assert bench.tasks()[0]["status"] == "running"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    time.sleep(GRACE + 0.3)  # its last heartbeat was before the kill
    yield bench
    bench.call("reap")


def test_ls(bench: Bench) -> None:
    (dead,) = bench.entries()
    assert dead["state"] == "dead"
    assert dead["missing_for"] >= (0 if bench.database.engine == "sqlite" else GRACE)
    head, _, line = bench.call("ls", bench.name).stdout.splitlines()
    assert head.endswith("0 holding, 0 waiting, 1 dead")
    assert "[missing for " in line
    assert "the dead one" in line
    assert bench.entries()  # the command removes no row


def test_run_with_timeout_0(bench: Bench, tmp_path: Path) -> None:
    assert bench.call("run", "--mutex", bench.name, "--timeout", "0", "--", "touch", str(tmp_path / "x")).exit_code == 0
    assert (tmp_path / "x").exists()
    past = json.loads(bench.call("history", bench.name, "--outcome", "reaped", "--since", "1h", "--json").stdout)
    assert [row["note"] for row in past] == ["the dead one"]
    assert past[0]["host"]
    assert past[0]["held"] < GRACE + 30  # the hold ends at the last heartbeat
    assert json.loads(bench.call("history", bench.name, "--until", "1h", "--json").stdout) == []
    assert "died (found by " in bench.call("history", bench.name).stdout


def test_tasks(bench: Bench) -> None:
    (task,) = bench.tasks()
    assert task["status"] == "lost"
    assert "1 lost" in bench.call("tasks", bench.name).stdout


@pytest.mark.parametrize("command", ["cancel", "retry"])
def test_change_of_a_task(bench: Bench, command: str) -> None:
    (task,) = bench.tasks()
    result = bench.call("tasks", command, str(task["task_id"]))
    assert result.exit_code == 0, result.output
    assert bench.tasks()[0]["status"] == ("cancelled" if command == "cancel" else "pending")


def test_work_with_idle_exit(bench: Bench) -> None:
    result = bench.call("work", bench.name, "--idle-exit", "0")
    assert "1 finished, 0 failed" in result.stderr
    assert result.exit_code == 0


def test_tasks_wait(bench: Bench) -> None:
    """`tasks wait` ends by its timeout while no worker runs the dead worker's task."""
    assert bench.call("tasks", "wait", bench.name, "--timeout", "1").exit_code == 75
    assert bench.tasks()[0]["status"] in ("pending", "lost")


def test_revoke_of_a_dead_members_row(bench: Bench) -> None:
    (dead,) = bench.entries()
    result = bench.call("revoke", str(dead["position"]))
    assert result.exit_code == 0
    assert "is gone" in result.stdout
    assert bench.entries() == []
