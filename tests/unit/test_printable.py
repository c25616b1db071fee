"""No output and no log line contains control characters, whatever their source."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import os
import random
import re
import sqlite3
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import sqlsem
from sqlsem import bodies, cli, tasks
from sqlsem.engines.base import Disconnected
from sqlsem.engines.sqlite import SqliteEngine
from sqlsem.util.printable import CleanFilter, clean, clean_json

#: Control characters of each kind, and their possible replacements.
CONTROLS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))]
DIRECTIONS = list("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
OTHERS = list("\u2028\u2029\u200b\u2060\ufeff\ufff9\U000e0041\ue000\U0010ffff\u0378")
SEQUENCES = [
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[H",
    "\x1b[95;5m",
    "\x9b2J",
    "\x90q\x9c",
    "\r\nsqlsem: forged",
    "\nsqlsem: forged",
    "\u2028sqlsem: forged",
    "\r2026-01-01 00:00:00,000 forged",
    "%s%d%(name)s",
    "[red]markup[/red]",
]
#: The escape sequences that rich writes on a terminal: colours and weights of the library, and moves of the cursor.
OURS = re.compile(
    r"\x1b\[(?:0|1|2|3[1-6]|[12];3[1-6]|[12];9[0-7])m|\r?\x1b\[(?:1A|2K|\?25[lh])|\r(?=sqlsem: \d+ finished)"
)


def hostile(rng: random.Random, maximum: int = 24) -> str:
    pieces = []
    while sum(map(len, pieces)) < maximum - 10:
        choice = rng.random()
        pool = CONTROLS if choice < 0.4 else DIRECTIONS if choice < 0.55 else OTHERS if choice < 0.65 else SEQUENCES
        pieces.append(rng.choice(pool) if choice < 0.8 else rng.choice("abcé世 "))
    return "x" + "".join(pieces)[: maximum - 2] + "x"


def check(text: str, *, terminal: bool = False) -> None:
    if terminal:
        text = OURS.sub("", text)
    bad = {c for c in text if not c.isprintable() and c != "\n" and unicodedata.category(c) != "Zs"}
    assert not bad, (bad, [line for line in text.split("\n") if bad & set(line)][:3])
    assert not re.search(r"^(sqlsem|\d{4}-[-0-9]+ [:0-9]+,\d+)?:? ?forged", text, re.MULTILINE)


# -- the functions ----------------------------------------------------------------------------------------------------


@given(st.text(st.characters(), max_size=50))
def test_clean_removes_control_characters(text: str) -> None:
    cleaned = clean(text)
    check(cleaned)
    assert "\n" not in cleaned
    assert clean(cleaned) == cleaned
    assert all(c in cleaned for c in text if c.isprintable())


def test_clean_escapes_visibly() -> None:
    assert clean("a\x1b[2J\x7f\x9b\u202e\u2028\ud800\r\n\tb") == r"a\x1b[2J\x7f\x9b\u202e\u2028\ud800\r\n\tb"
    assert clean("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"
    assert clean("naïve\u00a0世界 😀 C:\\x1b") == "naïve\u00a0世界 😀 C:\\x1b"


@given(
    st.dictionaries(st.text(st.characters(), max_size=9), st.lists(st.text(st.characters(), max_size=9), max_size=3))
)
def test_clean_json_is_the_same_value(value: object) -> None:
    text = clean_json(value)
    check(text)
    text.encode()
    assert json.loads(text) == value


@given(st.text(st.characters(), max_size=30), st.sampled_from(["%s", "%r", "%(a)s", "no argument: "]))
def test_record_is_a_single_line_in_any_handler(text: str, template: str) -> None:
    stream = io.StringIO()
    logger = logging.Logger("other")
    logger.addFilter(CleanFilter())
    logger.addHandler(logging.StreamHandler(stream))
    if template == "%(a)s":
        logger.warning("told: %(a)s", {"a": ValueError(text)})
    elif template.startswith("%"):
        logger.warning(f"told: {template} %d", text, 3)
    else:
        logger.warning(template + text.replace("%", ""))
    output = stream.getvalue()
    check(output)
    assert output.count("\n") == 1


def test_the_librarys_logger_is_clean_in_any_handler(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("sqlsem")
    logger.addHandler(handler)
    try:
        try:
            raise ValueError("a\r\nsqlsem: forged\x1b[2J")
        except ValueError as exc:
            logger.exception("failed: %s", exc)
    finally:
        logger.removeHandler(handler)
    check(stream.getvalue())
    assert "Traceback" in stream.getvalue()
    assert r"\r" in stream.getvalue()
    assert all(line.startswith(("failed", "    ")) for line in stream.getvalue().splitlines())


@pytest.mark.parametrize("kind", [sqlsem.LockLost, sqlsem.ConfigurationError, sqlsem.TaskFailed, sqlsem.BatchFailed])
def test_errors_are_clean(kind: type[sqlsem.SqlsemError]) -> None:
    assert str(kind("a\x1b[2J\r\n\tb\u202e")) == "a\\x1b[2J\\r\n\tb\\u202e"


def test_stored_task_texts_are_clean() -> None:
    assert bodies.format_error("two\r\nlines\x1b[2J\0") == "two\nlines\\x1b[2J\\x00"
    assert bodies.format_error(ValueError("a\x9b\x7f")).startswith("ValueError: a\\x9b\\x7f")
    assert json.loads(bodies.as_json(["\x9b\u202e"])) == ["\x9b\u202e"]
    check(bodies.as_json(["\x9b\u202e"]))


def test_everything_is_printed_in_a_single_place() -> None:
    """No print, no click.echo, no stream of its own elsewhere."""
    root = Path(sqlsem.__file__).parent
    # A child process tells its parent in JSON, or in words that it makes itself.
    printers = {root / "ops" / "demo.py", root / "ops" / "certify" / "worker.py"}
    for path in root.rglob("*.py"):
        if path == root / "ops" / "terminal" / "output.py" or path in printers:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                words = ast.unparse(node.func)
                assert words not in ("print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"), (
                    f"{path.name}:{node.lineno}"
                )
                assert words != "Console", f"{path.name}:{node.lineno}"
                assert words != "logging.Formatter", f"{path.name}:{node.lineno}"


# -- over every command -----------------------------------------------------------------------------------------------


class Planted:
    """A database full of hostile words, written by plain SQL."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/hostile.db"
        self.count = 0
        self.rng = random.Random(20261122)
        with sqlsem.connect(self.url) as coordinator:
            coordinator.admin.entries()
        with contextlib.closing(sqlite3.connect(folder / "hostile.db")) as self.db:
            self.queues = [self.word() for _ in range(3)]
            self.batches = [self.word() for _ in range(3)]
            self.resources = [self.word() for _ in range(12)]
            self.fill()
            self.db.commit()

    def word(self, maximum: int = 24) -> str:
        self.count += 1
        return hostile(self.rng, maximum)

    def words(self, number: int) -> str:
        return " ".join(self.word() for _ in range(number))

    def insert(self, table: str, **values: object) -> int:
        names = ", ".join(values)
        marks = ", ".join("?" * len(values))
        number = self.db.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(values.values())).lastrowid
        assert number is not None
        return number

    def fill(self) -> None:
        rng = self.rng
        for number in range(150):
            member = self.insert(
                "sqlsem_member",
                **{"host": self.words(3), "pid": number, "program": self.words(3), "grace_ms": 3_600_000},
                **{"beacon": f"{rng.getrandbits(128):032x}"},
            )
            own = {
                **{"resource_id": rng.choice(self.resources), "requesting_id": self.words(4)},
                **{"access_type": self.word(), "owner": self.words(4), "note": self.words(20)},
            }
            self.insert("ProcessControl", **own, member_id=member, request_uid=f"{number}", concurrency_limit=3)
            self.insert(
                "sqlsem_history",
                **{**own, "note": self.words(20), "outcome": self.word(), "queue_position": number, "weight": 1},
                **{"requested_at": 1e9, "granted_at": 1e9, "member_id": member, "host": self.words(2)},
                **{"program": self.words(2), "login": self.word(), "ended_by": self.word()},
            )
            status = rng.choice(["pending", "running", "finished", "failed", "cancelled"])
            task = self.insert(
                "sqlsem_task",
                **{"queue_name": rng.choice(self.queues), "kind": rng.choice(["sql", "call", "json", "shell"])},
                **{"body": self.words(5), "note": None if number % 2 else self.words(5), "status": status},
                **{"is_open": status in ("pending", "running", "failed"), "error": self.words(5)},
                **{"result": self.words(5), "owner": self.words(3), "member_id": member, "claimed_at": 1e9},
                **{"host": self.words(2), "put_by": self.word(), "login": self.word()},
            )
            self.insert(
                "sqlsem_task_log",
                **{"task_id": task, "attempt": 1, "outcome": self.word(), "owner": self.words(3)},
                **{"host": self.words(3), "error": "\n".join(self.words(3) for _ in range(3)), "result": self.words(5)},
            )
        for name in self.resources:
            with contextlib.suppress(sqlite3.IntegrityError):
                self.insert("sqlsem_resource", resource_id=name, cap=3, paused_at=1e9)
        for number in range(30):
            name = rng.choice(self.batches)
            number_of_batch = self.insert(
                "sqlsem_batch",
                **{"batch_name": name, "window_ms": 10, "status": rng.choice(["open", "failed"])},
                **{
                    "callback_status": "failed",
                    "callback_kind": "sql",
                    "callback_body": self.words(4),
                    "callback_error": self.words(4),
                },
            )
            for _ in range(3):
                self.insert(
                    "sqlsem_batch_part",
                    **{"batch_id": number_of_batch, "part": self.words(2), "status": "failed", "host": self.words(2)},
                    **{"error": self.words(3), "owner": self.words(2), "pid": number, "started_at": 1e9},
                )


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    return Planted(tmp_path)


def call(planted: Planted, *arguments: str, terminal: bool = False) -> Result:
    environment = {"SQLSEM_URL": planted.url, "COLUMNS": "3000" if terminal else None, "TERM": "xterm-256color"}
    environment["FORCE_COLOR"] = "1" if terminal else None
    result = CliRunner().invoke(cli.main, list(arguments), env=environment)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    check(result.output, terminal=terminal)
    check(result.stdout, terminal=terminal)
    if "--json" in arguments and result.stdout:
        json.loads(result.stdout)
    return result


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "piped"])
def test_every_command_shows_hostile_words_escaped(planted: Planted, terminal: bool) -> None:
    assert planted.count >= 10_000, planted.count
    listing: list[list[str]] = [["ls"], ["history", "-n", "1000"], ["tasks", "-n", "1000"], ["batch", "-n", "100"]]
    for words in listing:
        shown = call(planted, *words, terminal=terminal)
        assert shown.exit_code == 0, shown.output + shown.stderr
        assert "\\x" in shown.stdout  # the words are there, escaped
        if not terminal:
            assert call(planted, *words, "--json").exit_code == 0
    for name in planted.resources[:3]:
        for words in (
            ["ls", name],
            ["history", name],
            ["pause", name],
            ["resume", name],
            ["set", name, "--limit", "2"],
        ):
            call(planted, *words, terminal=terminal)
    for name in planted.queues:
        for words in (["tasks", name], ["tasks", "wait", name, "--timeout", "0"], ["put", name, "--sql", name]):
            call(planted, *words, terminal=terminal)
    for name in planted.batches:
        for words in (["batch", name], ["batch", "resume", name]):
            call(planted, *words, terminal=terminal)
    for number in range(1, 150, 10):
        assert call(planted, "tasks", "log", str(number), terminal=terminal).exit_code == 0
    call(planted, "tasks", "log", "1", "--json")
    call(planted, "tasks", "retry", *map(str, range(1, 20)), terminal=terminal)
    call(planted, "tasks", "cancel", *map(str, range(1, 20)), terminal=terminal)
    for words in (["doctor"], ["init"], ["revoke", "1"], ["revoke", "2", "--force"], ["sql", "sqlite"], ["reap"]):
        call(planted, "-v", *words, terminal=terminal)
    call(planted, "doctor", "--json")


def test_arguments_are_hostile_too(planted: Planted) -> None:
    rng = random.Random(1)
    for number in range(60):
        word = hostile(rng) + ("\udc80" if number % 3 else "")
        for words in (
            ["ls", word],
            [word],
            ["ls", f"--{word}"],
            ["--url", f"postgresql://u:p@{word}", "ls"],
            ["--url", word, "doctor"],
            ["--schema", word, "ls"],
            ["run", "--mutex", word, "--", word],
            ["put", "q", "--json-body", word],
            ["put", "q", "--call", word, "--arg", word],
        )[number % 3 :: 3]:
            assert call(planted, *words).exit_code != 0 or words[0] == "ls", words


def test_errors_of_drivers_and_logs(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)

    def connect(self: SqliteEngine, purpose: str) -> object:
        raise Disconnected("".join(hostile(rng) for _ in range(40)))

    monkeypatch.setattr(SqliteEngine, "connect", connect)
    for words in (["ls"], ["doctor"], ["tasks"], ["run", "--mutex", "a", "--timeout", "0", "--", "true"], ["doctor"]):
        for verbose in ((), ("-v",), ("-vv",)):
            result = call(planted, "--retry", "0.2", *verbose, *words)
            assert result.exit_code != 0
            assert r"\x" in result.output


@pytest.mark.parametrize("verbose", [(), ("-v",), ("-vv",)], ids=["quiet", "v", "vv"])
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "piped"])
def test_workers_log_hostile_tasks(planted: Planted, tmp_path: Path, verbose: tuple[str, ...], terminal: bool) -> None:
    rng = random.Random(3)
    url = f"sqlite:///{tmp_path}/queue.db"
    (tmp_path / "sqlsem_hostile.py").write_text("def fail(word):\n    raise ValueError(word)\n")
    with sqlsem.connect(url) as coordinator, _importable(tmp_path):
        queue = coordinator.queue("nightly")
        words = [hostile(rng) for _ in range(60)]
        queue.put_many([tasks.Call("sqlsem_hostile:fail", word) for word in words[:30]], on_failure="continue")
        queue.put_many(
            [tasks.Sql(f"SELECT '{word}'; BAD".replace("\0", "")) for word in words[30:]], on_failure="continue"
        )
        with contextlib.closing(sqlite3.connect(tmp_path / "queue.db")) as db:
            db.executemany(
                "UPDATE sqlsem_task SET note = ? WHERE task_id = ?", [(hostile(rng), n) for n in range(1, 40)]
            )
            db.commit()
        planted_there = Planted.__new__(Planted)
        planted_there.url = url
        result = call(planted_there, *verbose, "work", "nightly", "--idle-exit", "0", terminal=terminal)
        assert result.exit_code == 0
        assert "60 failed" in result.output
        if not terminal:
            for line in result.stderr.splitlines():
                assert re.match(r"sqlsem: |\d{4}-\d\d-\d\d \d\d:|    ", line), line


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.append(os.fspath(folder))
    try:
        yield
    finally:
        sys.path.remove(os.fspath(folder))
        sys.modules.pop("sqlsem_hostile", None)
