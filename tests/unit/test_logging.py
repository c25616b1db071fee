"""The log lines for locks, and for tasks of dead workers."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import sqlsem
from sqlsem import cli

PATIENCE = 60.0


def test_wait_log_line_names_the_holders(coordinator: sqlsem.Coordinator, caplog: pytest.LogCaptureFixture) -> None:
    def wait() -> None:
        with coordinator.limit("etl", 1):
            pass

    with caplog.at_level(logging.DEBUG, "sqlsem"):
        thread = threading.Thread(target=wait)
        with coordinator.mutex("etl") as grant:
            thread.start()
            deadline = time.monotonic() + PATIENCE
            while not any(message.startswith("Waiting for") for message in caplog.messages):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            other = threading.Thread(target=lambda: coordinator.mutex("etl").acquire(timeout=0))
            other.start()
            other.join(PATIENCE)
        thread.join(PATIENCE)
    levels = {record.message: record.levelname for record in caplog.records if record.name == "sqlsem"}
    (at_once,) = (text for text in levels if text.startswith(f"Granted write on 'etl' at {grant.position}, after "))
    assert levels[at_once] == "DEBUG"
    (waiting,) = (text for text in levels if text.startswith("Waiting for 'etl' at "))
    assert levels[waiting] == "INFO"
    assert f", behind {grant.state.tickets[0].requesting_id.rpartition(':')[0].rpartition(':')[0]}" in waiting
    assert ", which holds for " in waiting
    assert levels["Not granted within 0 s: write on 'etl'"] == "INFO"
    (released,) = (text for text in levels if text.startswith(f"Released 'etl' at {grant.position}, held for "))
    assert levels[released] == "DEBUG"
    position = int(waiting.split()[4].rstrip(","))
    (after,) = (text for text in levels if text.startswith("Granted") and f" at {position}, after" in text)
    assert levels[after] == "INFO"


def test_command_leaves_the_log_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    """Python keeps the answer to whether a level is logged, which is no during a command."""
    log = logging.getLogger("sqlsem")

    @cli.main.command("silent", hidden=True)
    def silent() -> None:
        log.error("silent")

    try:
        result = CliRunner().invoke(cli.main, ["silent"])
    finally:
        del cli.main.commands["silent"]
    assert result.exit_code == 0, result.output
    log.error("loud")
    assert [record.message for record in caplog.records if record.name == "sqlsem"] == ["loud"]


def test_failed_read_attempts_are_logged(
    coordinator: sqlsem.Coordinator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlsem.engines.base import Disconnected

    connect, failures = type(coordinator.engine).connect, [1]

    def connect_at_last(self: object, purpose: str) -> object:
        if failures:
            failures.pop()
            raise Disconnected("nobody is there")
        return connect(self, purpose)  # type: ignore[arg-type]

    monkeypatch.setattr(type(coordinator.engine), "connect", connect_at_last)
    coordinator.admin.resources()
    assert caplog.messages == ["A read failed, retrying: nobody is there"]


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_worker_about_to_leave_finds_a_dead_workers_task(coordinator: sqlsem.Coordinator, tmp_path: Path) -> None:
    """No client has polled it meanwhile."""
    queue = coordinator.queue("q")
    number = queue.put(sqlsem.Call("os:getpid"))
    script = """
import sys, time, sqlsem
with sqlsem.connect(sys.argv[1], grace=0.2) as coordinator:
    task = coordinator.queue("q").try_claim()
    print(task.id, flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, f"sqlite:///{tmp_path}/queue.db"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{number}\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    time.sleep(0.3)  # longer than its grace
    worker = sqlsem.tasks.Worker(queue, idle_exit=0)
    queue.claiming._recovered_at = float("inf")  # it polled just before the other one died
    worker.run()
    assert worker.finished == 1
