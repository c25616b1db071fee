"""The progress that long commands show on a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterator

import pytest
from support.commands import ERASE, PATIENCE, RAW_ERASE, Bench, done, until

import sqlsem
from sqlsem.cli import connecting

pytestmark = pytest.mark.skipif(os.name != "posix", reason="terminals")


def test_tasks_wait_shows_the_work_that_is_left(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    first, second = (coordinator.queue("nightly").put({"number": number}) for number in range(2))
    with bench.on_terminal("tasks", "wait", "nightly") as (process, screen):
        until(lambda: f"{RAW_ERASE}sqlsem: queue 'nightly': 0 running, 2 pending (" in screen.read(), "two tasks")
        assert coordinator.admin.cancel_task(first)
        until(lambda: f"{RAW_ERASE}sqlsem: queue 'nightly': 0 running, 1 pending (" in screen.read(), "one task")
        assert coordinator.admin.cancel_task(second)
        assert process.wait(PATIENCE) == 0
        until(lambda: screen.read().endswith(RAW_ERASE), "the end of the line")


def test_batch_wait_shows_the_parts_that_are_left(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    batch = coordinator.batch("nightly", ["a", "b"], window="1h")
    with batch.part("a"), bench.on_terminal("batch", "wait", "nightly") as (process, screen):
        left = r"batch \d+ of 'nightly': 2 of 2 parts left: a \(running\), b \(expected\) \("
        until(lambda: re.search(ERASE + "sqlsem: " + left, screen.read()), "the parts")
        with batch.part("b"):
            pass
        left = r"batch \d+ of 'nightly': 1 of 2 parts left: a \(running\) \("
        until(lambda: re.search(ERASE + "sqlsem: " + left, screen.read()), "the part")
    with bench.on_terminal("batch", "wait", "nightly") as (process, screen):
        assert process.wait(PATIENCE) == 0
        until(lambda: re.search(r"Done: batch \d+ of 'nightly'", screen.read()), "the end")


def test_batch_wait_reports_failures_and_timeouts(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    code, _, error = bench.run("batch", "wait", "nightly")
    assert (code, "There is no batch 'nightly'" in error) == (78, True)
    batch = coordinator.batch("nightly", ["a", "b"], window="1h")
    with contextlib.suppress(ZeroDivisionError), batch.part("a"):
        code, _, error = bench.run("batch", "wait", "nightly", "--timeout", "0.1")
        assert (code, "still waits for a (running), b (expected)" in error) == (75, True)
        raise ZeroDivisionError
    with contextlib.suppress(sqlsem.BatchFailed), batch.part("b"):
        pass
    code, _, error = bench.run("batch", "wait", "nightly")
    assert (code, "has failed: a (ZeroDivisionError" in error) == (1, True)


def test_init_shows_that_it_waits(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    with contextlib.closing(sqlite3.connect(bench.folder / "queue.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with bench.on_terminal("init") as (process, screen):
            until(lambda: f"{RAW_ERASE}sqlsem: waiting for other installers (" in screen.read(), "the wait")
            other.execute("ROLLBACK")
            assert process.wait(PATIENCE) == 0, screen.read()
            until(lambda: f"{RAW_ERASE}Done." in screen.read(), "the end")


@pytest.mark.parametrize(
    ("command", "progress"),
    [
        (["audit"], ["read 3 finished requests"]),
        (["replay"], ["read 3 finished requests", "replaying 3 finished requests"]),
        (["init"], ["committing"]),
    ],
    ids=lambda value: value[0],
)
def test_long_commands_have_a_progress(
    bench: Bench,
    coordinator: sqlsem.Coordinator,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    progress: list[str],
) -> None:
    """At its end the progress says what has been done, so it was counted meanwhile."""
    for _ in range(3):
        with coordinator.mutex("x"):
            pass
    shown: list[str | None] = []

    @contextlib.contextmanager
    def show(describe: Callable[[], str | None], *, reads: bool = False) -> Iterator[None]:
        yield
        shown.append(describe())

    monkeypatch.setattr(connecting, "progress_shown", show)
    for options in ([], ["-q"]):
        done("--url", bench.url, *options, *command)
    assert shown == progress
