"""``sqlsem put --lines``, and the times of ``--since``."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import click
import pytest
from click.testing import Result
from support import commands

import sqlsem
from sqlsem.cli import options
from sqlsem.engines.sqlite.session import SqliteSession
from sqlsem.values.errors import Unavailable


def put(text: str, *arguments: str) -> Result:
    return commands.call("put", "q", "--lines", *arguments, stdin=text)


def bodies(url: str) -> list[tuple[str, object]]:
    with sqlsem.connect(url) as coordinator:
        rows = sorted(coordinator.admin.tasks(maximum=100_000), key=lambda task: task.task_id)
    return [(row.kind, json.loads(row.body) if row.kind in ("json", "call") else row.body) for row in rows]


def test_ten_thousand_lines_are_ten_thousand_tasks(url: str) -> None:
    result = put("".join(f"{number}\n" for number in range(10_000)), "--json-body", "-", "--key", "t")
    assert result.stdout == "10,000 tasks put into q.\n"
    assert bodies(url) == [("json", number) for number in range(10_000)]


@pytest.mark.parametrize(
    ("arguments", "text", "expected"),
    [
        (["--sql", "-"], "SELECT 1\r\n\n  SELECT 2", [("sql", "SELECT 1"), ("sql", "SELECT 2")]),
        (["--shell", "-"], "./load.sh a\n./load.sh b\n", [("shell", "./load.sh a"), ("shell", "./load.sh b")]),
        (["--json-body", "-"], '\ufeff"text"\nnull\n', [("json", "text"), ("json", None)]),
    ],
)
def test_lines_are_tasks_of_each_kind(
    arguments: list[str], text: str, expected: list[tuple[str, object]], url: str
) -> None:
    assert put(text, *arguments).stdout == "2 tasks put into q.\n"
    assert bodies(url) == expected


def test_lines_are_arguments_of_a_function(url: str) -> None:
    numbers = json.loads(put('1\n[1, 2]\n{"full": true}\n"a"\n[]\n{}\n', "--call", "etl:load", "--json").stdout)
    assert [call for _, call in bodies(url)] == [
        {"function": "etl:load", "args": positional, "kwargs": by_name}
        for positional, by_name in [([1], {}), ([1, 2], {}), ([], {"full": True}), (["a"], {}), ([], {}), ([], {})]
    ]
    assert len(numbers["task_ids"]) == 6


def test_no_lines_are_no_tasks(url: str) -> None:
    assert put("\n\n", "--sql", "-").stdout == "0 tasks put into q.\n"
    assert bodies(url) == []


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("1\n2\n{3\n", ["--json-body", "-"], "Line 3 is not JSON"),
        ("1\n", ["--sql", "SELECT 1"], "Say what a line is"),
        ("1\n", ["--sql", "-", "--shell", "-"], "Say what a line is"),
        ("1\n", [], "Say what a line is"),
        ("1\n", ["--call", "no function"], "no function"),
        ("1\n", ["--json-body", "-", "--unique", "x"], "leave out --every"),
        ("1\n", ["--json-body", "-", "--every", "@daily"], "leave out --every"),
        ("1\n", ["--json-body", "-", "--", "true"], "Say what a line is"),
    ],
)
def test_wrong_lines_put_nothing(text: str, arguments: list[str], words: str, url: str) -> None:
    result = put(text, *arguments)
    assert result.exit_code == 64
    assert words in " ".join(result.stderr.split())
    assert bodies(url) == []


def test_error_names_the_tasks_before_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = SqliteSession.put_tasks
    calls = []

    def failing(self, *arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise Unavailable("no disk")
        return before(self, *arguments)

    monkeypatch.setattr(SqliteSession, "put_tasks", failing)
    result = put("1\n" * 1700, "--json-body", "-")
    assert result.exit_code == 69
    assert "the first 1,000 of 1,700 tasks were put" in result.stderr
    assert len(bodies(url)) == 1000


# -- --since ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ago", "form"),
    [
        (timedelta(minutes=1), "%H:%M:%S"),
        (timedelta(hours=23, minutes=50), "%H:%M:%S"),
        (timedelta(days=3), "%Y-%m-%d %H:%M:%S"),
        (timedelta(days=30), "%Y-%m-%dT%H:%M:%S%z"),
    ],
)
def test_since_takes_times(ago: timedelta, form: str) -> None:
    moment = datetime.now(timezone.utc).astimezone() - ago
    text = moment.strftime(form)
    if form.endswith("%z"):
        text = f"{text[:-2]}:{text[-2:]}"
    assert options.age(text) == pytest.approx(ago.total_seconds(), abs=30)


def test_since_takes_dates_and_zones() -> None:
    midnight = datetime.now().astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
    today = (datetime.now().astimezone() - midnight).total_seconds()
    assert options.age(f"{midnight:%Y-%m-%d}") == pytest.approx(today, abs=30)
    early = datetime.now(timezone.utc) - timedelta(hours=2)
    assert options.age(f"{early:%Y-%m-%dT%H:%M:%SZ}") == pytest.approx(7200, abs=30)
    assert options.age("24h") == 86400


@pytest.mark.parametrize("text", ["25:00", "2:0", "2026-13-01", "0001-01-01", "9999-01-01", "2026-01-31 99:00"])
def test_since_refuses_other_times(text: str) -> None:
    with pytest.raises(click.BadParameter):
        options.age(text)
