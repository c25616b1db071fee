"""``sqlsem why``, the column WHY of ``ls``, and operators' actions, as the command line shows them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest
from rich.console import Console
from support import PATIENCE, Attempt, until
from support.commands import call, done

import sqlsem
from sqlsem.insight.overview import Overview
from sqlsem.insight.reasons import reasons
from sqlsem.ops.terminal.queues import by_resource, render_operations, render_queues
from sqlsem.values.locks import Entry, Operation

NOW = datetime(2026, 3, 1, 3, 0, tzinfo=timezone.utc)
EVIL = "<b>\x1b[31m\u202e\n"


@pytest.fixture
def waiting(coordinator: sqlsem.Coordinator) -> Iterator[int]:
    """Return the position of a waiter for a mutex."""
    for _ in range(8):
        with coordinator.mutex("etl"):
            pass
    with coordinator.mutex("etl", note="orders"):
        late = Attempt(coordinator.mutex("etl"))
        until(lambda: len(coordinator.admin.entries()) == 2)
        yield coordinator.admin.entries()[1].position
    late.leave()


def test_why_explains_a_position(waiting: int) -> None:
    text = done("why", str(waiting))
    assert text.startswith(f"{waiting}  ")
    assert "has waited for 'etl' for" in text
    assert "it is behind " in text
    assert '"orders"), which has held it for' in text
    assert "usually " in text
    (answer,) = json.loads(done("why", str(waiting), "--json"))
    assert answer["entry"]["position"] == waiting
    assert answer["why"]["code"] == "limit"
    assert answer["why"]["enters"]["count"] == 8
    assert answer["chain"] == [{"position": waiting, "behind": waiting - 1}]


def test_why_explains_a_holder(waiting: int) -> None:
    text = done("why", str(waiting - 1))
    assert "has held 'etl' for" in text
    assert "1 waits for it, directly or behind others" in text


def test_why_explains_a_resource(waiting: int) -> None:
    lines = done("why", "etl").splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [str(waiting - 1), str(waiting)]
    assert "1 more; see them with --max" in done("why", "etl", "-n", "1")


def test_ls_has_a_column_of_reasons(waiting: int) -> None:
    head, title, *lines = (line for line in done("ls").splitlines())
    assert head.startswith("etl  1 holding, 1 waiting")
    assert title.split()[-1] == "WHY"
    assert "behind " in lines[1]
    assert "~00:0" in lines[1]
    (queue,) = json.loads(done("ls", "--json"))
    assert [entry["why"] and entry["why"]["code"] for entry in queue["entries"]] == [None, "limit"]


def test_why_of_an_unknown_position(coordinator: sqlsem.Coordinator) -> None:
    for arguments, words in {
        ("4711",): "There is no such position or task: 4711",
        ("nothing",): "No request holds or waits for 'nothing', and no work queue of that name has open tasks",
        ("--task", "1"): "There is no such task, nor a work queue with open tasks: 1",
    }.items():
        result = call("why", *arguments)
        assert (result.exit_code, result.stdout.strip()) == (1, words)


def test_why_explains_tasks(coordinator: sqlsem.Coordinator) -> None:
    queue = coordinator.queue("nightly")
    first, second = queue.put(1, order=1), queue.put(2, order=2)
    assert "the next free worker takes it" in done("why", str(first))
    assert f"order 1 is open: task {first}" in done("why", "--task", str(second))
    with pytest.raises(ZeroDivisionError), queue.try_claim():
        raise ZeroDivisionError
    lines = done("why", "nightly").splitlines()
    assert lines[0].startswith(f"task {first} of 'nightly'")
    assert f"order 1 is open because task {first} failed; retry or cancel it" in lines[-1]
    answers = json.loads(done("why", "--task", str(second), "--json"))
    assert answers[0]["why"]["behind"] == [first]


def test_why_estimates_the_start_of_a_task(coordinator: sqlsem.Coordinator) -> None:
    queue = coordinator.queue("nightly")
    for number in range(8):
        queue.put(number, note=f"load {number}")
        with queue.try_claim():
            pass
    first, second, third = (queue.put(number, note=f"load {number}") for number in (8, 9, 10))
    with queue.try_claim():
        assert "such tasks usually take about " in done("why", "--task", str(second))
        reason = json.loads(done("why", "--task", str(third), "--json"))[0]["why"]
        assert 0 <= reason["starts"]["low"] <= reason["starts"]["likely"] <= reason["starts"]["high"] < PATIENCE
        assert reason["starts"]["count"] == 8
        # The same on a page that shows only some of the tasks: not all tasks ahead, nor the ended ones.
        for more in ([], ["--max", "2"], ["--status", "pending"], ["--max", "1", "--page", "3"]):
            (task,) = [task for task in json.loads(done("tasks", *more, "--json")) if task["task_id"] >= second][-1:]
            assert task["why"]["starts"]["count"] == 8, more
        assert "~00:" in done("tasks", "nightly")
    assert first < second


def test_why_shows_the_chain_of_blockers(coordinator: sqlsem.Coordinator) -> None:
    with coordinator.mutex("a"), coordinator.mutex("c"):
        middle = Attempt(coordinator.all_of(coordinator.mutex("b"), coordinator.mutex("a")))
        until(lambda: len(coordinator.admin.entries()) == 4)
        late = Attempt(coordinator.mutex("b"))
        until(lambda: len(coordinator.admin.entries()) == 5)
        position = next(entry.position for entry in coordinator.admin.entries("b") if entry.state == "waits")
        text = done("why", str(position))
        assert "; in the end for " in text
        assert text.count(" waits for ") == 2
    middle.leave()
    late.leave()


def test_why_names_operators_actions(coordinator: sqlsem.Coordinator) -> None:
    assert done("history", "--operations") == "No operator has done anything yet.\n"
    coordinator.admin.set_limit("etl", 3)
    coordinator.admin.pause("etl")
    heads, newest, oldest = done("history", "etl", "--operations").splitlines()
    assert heads.split()[:3] == ["WHEN", "LOGIN", "WHAT"]
    assert "pause" in newest
    assert "cap none \u2192 3" in oldest
    login = coordinator.admin.operations()[0].login
    operations = json.loads(done("history", "--operations", "--who", str(login), "--json"))
    assert [entry["action"] for entry in operations] == ["pause", "cap"]
    assert done("history", "--who", "nobody") == "Nothing has finished yet.\n"
    assert call("history", "--operations", "--outcome", "lost").exit_code == 64


def entry(position: int, state: str) -> Entry:
    return Entry(
        "r" + EVIL, position, state, "write", 1, 1, "id", position, "t", EVIL * 5, 7, EVIL * 3, EVIL * 9,
        NOW, None if state == "waits" else NOW, 1.0, None, 5.0,
    )  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_why_escapes_names_with_markup(width: int) -> None:
    entries = [entry(1, "holds"), entry(2, "waits"), entry(3, "waits")]
    snapshot = Overview(NOW, [], entries, [], [], [], {})
    console = Console(width=width, force_terminal=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_queues(by_resource(entries, [], None), width, None, reasons(snapshot)))
    did = Operation(1, NOW, EVIL, EVIL, 7, EVIL, "cap", EVIL, None, None, None, EVIL, None)
    console.print(render_operations([did], width))
    text = console.export_text()
    assert "\x1b" not in text
    assert "\u202e" not in text
    if width >= 80:
        assert max(map(len, text.splitlines())) <= width
        assert "WHY" in text
        assert ("PROGRAM" in text.splitlines()[1]) == (width >= 100)


def test_why_estimates_a_rates_waiter(coordinator: sqlsem.Coordinator) -> None:
    grant = coordinator.rate("api", 2, per="1h", cost=2).take()
    assert grant is not None
    waiters = [threading.Thread(target=coordinator.rate("api", 2, per="1h").take) for _ in range(2)]
    for number, waiter in enumerate(waiters, 1):
        waiter.start()
        until(lambda number=number: len(coordinator.admin.entries("rate:api")) == number, "it waits")  # type: ignore[misc]
    output = done("why", "rate:api")
    assert (
        "rate 'api': 2 of 2 used in 1h00m, room in 1h00m; first in the queue, so it is granted in about 1:00:" in output
    )
    assert "1 ahead of it in the queue, so it is granted in about 1:00:" in output
    answers = json.loads(done("why", "rate:api", "--json"))
    # (Not before there is room: all uses were taken at once, and leave the window together.)
    for entry in answers:
        ((window,), granted_in) = entry["rate"]["windows"], entry["rate"]["granted_in"]
        assert granted_in == window["free_in"] > 3500
    grant.adjust(0)
    for waiter in waiters:
        waiter.join(60)
    assert coordinator.admin.entries("rate:api") == []
