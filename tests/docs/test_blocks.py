"""Run every block of every page, if this machine can run it.

`python`, `sh`, `toml`, `yaml` and `ini` blocks are run or read; `tests/tsqlcheck.py` checks T-SQL; `ELSEWHERE` names
the blocks that other tests run. A block that cannot run here has its reason right above it in the page::

    <!--- skip: next "needs a cluster" -->

A block that begins with a comment that names a file (``# load.py``) is that file: it is written, not run. Databases,
tables and scripts of the pages' readers have substitutes here.
"""

from __future__ import annotations

import ast
import asyncio
import configparser
import contextlib
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("sybil", reason="sybil is not installed, so blocks of the pages are not run")
yaml = pytest.importorskip("yaml")

from sybil import Document, Example, Sybil  # noqa: E402
from sybil.parsers.markdown import CodeBlockParser, SkipParser  # noqa: E402

import sqlsem  # noqa: E402
from sqlsem.api.default import configured  # noqa: E402
from sqlsem.cli import main  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")})
RUN = ("python", "sh", "toml", "yaml", "ini")
FILE = re.compile(r"# (?:\S*/)?([\w.-]+\.\w+)\n")
FENCE = re.compile(r"^ *```(\S*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
#: Blocks of other languages, and the tests that check them.
ELSEWHERE = {
    "csharp": "tests/clients/test_dotnet.py",
    "sql": "tests/tsqlcheck.py, tests/tsql, tests/clients",
    "text": "what programs print",
    "": "what programs print",
    "{command-help}": "Sphinx",
    "{eval-rst}": "Sphinx",
    "{sql-routines}": "Sphinx",
    "{sql-tables}": "Sphinx",
}
#: Commands of sqlsem that need no process of their own, as they start none and do not wait.
HERE = (
    *("ls", "why", "history", "put", "queues", "tasks", "schedules", "batch", "set", "pause", "resume", "revoke"),
    *("reap", "init", "sql", "config", "doctor", "timeline", "replay", "audit"),
)
#: Long or endless waits on the pages, which the tests shorten.
SHORTER = {
    r"--watch \d": "",
    r"(work \w+ --workers 4)(?! --idle)": r"\1 --idle-exit 0.2",
    r"--idle-exit 30s?": "--idle-exit 0.2",
    r"idle_exit=\d+": "idle_exit=0.2",
    r"wait=30": "wait=0.2",
    r"--timeout 6h": "--timeout 10",
    r"--seconds 20": "--seconds 3",
    r"sleep \d+": "sleep 0.2",
    r"EXEC dbo\.publish_cube": "SELECT 1",
}
#: Scripts that the pages start.
SCRIPTS = (
    *("load", "report", "extract", "publish", "heavy", "step200", "refresh", "big", "small", "train", "ask", "urgent"),
)
#: The first lines of a page's Python: names that its readers have defined.
NAMES = {
    "asyncio.md": "async def load(*args): pass",
    "deadlocks.md": "transfer = lambda: None",
    "leaders.md": "tick = lambda fence: None\nis_done = lambda: True",
    "priorities.md": "load = lambda **given: None",
    "once.md": "send_report = lambda: None",
    "python.md": "worker = None\nparts = ['customer']\nload = lambda part: None",
    "readers-writer.md": "make_report = replace_table = reload = report = lambda: None\noutdated = lambda: True",
    "transactions.md": "prepare = lambda: None\nstart_job = load = lambda *given, **named: None",
    "django.md": """
import contextlib, os, urllib.parse
import django
from django.conf import settings
from django.db import connections, transaction
place = urllib.parse.urlsplit(os.environ["SQLSEM_URL"])
if not settings.configured:
    settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.dummy"}}, USE_TZ=True)
    django.setup()
with contextlib.suppress(AttributeError):
    del connections["default"]  # made by another test, from other settings
connections.settings["default"].update(ENGINE="django.db.backends.postgresql", NAME=place.path[1:])
connections.settings["default"].update(USER=place.username, HOST=place.hostname, PORT=place.port)
make_report = lambda: None
""",
    "batches.md": """
import sqlsem
load_sales = lambda: None
for other in ("stock", "web"):
    with sqlsem.batch("nightly", ["sales", "stock", "web"], window="6h").part(other):
        pass
""",
    "queue-fairness.md": "import sqlsem",
    "task-locks.md": "import sqlsem",
    "schedules.md": "import sqlsem\nq = sqlsem.queue('nightly')",
    "queue.md": "import sqlsem\nsqlsem.queue('mails').put({'to': 'you'})",
}
#: Pages with tasks that a worker runs meanwhile, and their queue.
WORKED = {"README.md": "nightly", "docs/howto/queue.md": "nightly"}
SCHEMA = """
CREATE TABLE ledger (id int, balance int);
CREATE TABLE sales (id int, amount int);
"""
STEPS = ["customer", "product", "store", "calendar", "orders", "returns", "prices", "sales", "stock", "report"]


class Desk:
    """The folder and the database in which the blocks of a page run."""

    def __init__(self, folder: Path, database: Any) -> None:
        self.folder = folder
        self.url = url = database.url
        with contextlib.closing(database.raw()) as connection:
            connection.execute(
                SCHEMA + "".join(f"CREATE PROCEDURE load_{step}() LANGUAGE sql AS '';" for step in STEPS)
            )
            self.position = database.insert_bare(connection.cursor(), "bare", "somebody")
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SQLSEM_URL": url,
        }
        self.settings = folder / "sqlsem.toml"
        self.settings.write_text(f"[profiles.prod]\nurl = {url!r}\n")
        for name in SCRIPTS:
            script = folder / f"{name}.sh"
            script.write_text("#!/bin/sh\nexit 0\n")
            script.chmod(0o755)
        (folder / "load.py").write_text("")
        (folder / "etl.py").write_text("def load(*args, **options): pass\n")
        (folder / "mail.json").write_text("{}")

    def run(self, language: str, example: Example) -> None:
        """Run or read one block."""
        text = textwrap.dedent(str(example.parsed))
        text = text.replace("postgresql://etl@db/dwh", self.url).replace("4711", str(self.position))
        for long, short in SHORTER.items():
            text = re.sub(long, short, text)
        name = FILE.match(text)
        if name is not None:
            (self.folder / name[1]).write_text(text, encoding="utf-8")
        if language == "python":
            self.python(text, example, bool(name))
        elif language == "sh":
            self.sh(text, example)
        elif language == "toml":
            assert tomllib.loads(text)
        elif language == "yaml":
            assert all(yaml.safe_load_all(text))
        else:
            self.ini(text)

    def python(self, text: str, example: Example, is_file: bool) -> None:
        code = compile(text, f"{example.path}:{example.line}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if is_file:
            return
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(self.awaited(code, example.namespace))
        else:
            exec(code, example.namespace)

    async def awaited(self, code: CodeType, namespace: dict[str, Any]) -> None:
        await eval(code, namespace)
        await sqlsem.default().aio.close()

    def sh(self, text: str, example: Example) -> None:
        """A command may fail for a missing row (1) or a timeout (75). A wrong usage is an error."""
        lines = [shlex.split(line, comments=True) for line in text.splitlines()]
        if all(
            line[0] == "sqlsem" and line[1] in HERE and not {"|", "&&", ">", "<", "&"} & {*line}
            for line in lines
            if line
        ):
            for line in filter(None, lines):  # without a process for each
                done = CliRunner(env={"SQLSEM_URL": self.url}).invoke(main, line[1:])
                assert done.exit_code in (0, 1, 75) or "There is no batch" in done.output, f"{line}\n{done.output}"
                assert done.exit_code == 0 or isinstance(done.exception, SystemExit), done.exception
            return
        trap = "trap 'code=$?; case $code in 1|75) ;; *) echo \"$BASH_COMMAND: $code\" >&2; exit $code;; esac' ERR\n"
        done = subprocess.run(
            ["bash", "-uc", trap + text],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode in (0, 1, 75), f"{example.path}:{example.line}\n{text}\n{done.stdout}\n{done.stderr}"

    @staticmethod
    def ini(text: str) -> None:
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(text)
        assert parser.sections()


def parsed(page: Path, desk: Desk | None = None) -> Document:
    def parser(language: str) -> CodeBlockParser:
        return CodeBlockParser(language, lambda example: desk and desk.run(language, example))

    return Sybil([SkipParser(), *map(parser, RUN)]).parse(page)


@contextlib.contextmanager
def worked(desk: Desk, queue: str | None) -> Iterator[None]:
    """Run a worker that carries out the tasks of the queue."""
    if queue is None:
        yield
        return
    command = [sys.executable, "-m", "sqlsem", "work", queue, "--allow-new"]
    worker = subprocess.Popen(
        command, cwd=desk.folder, env=desk.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        worker.terminate()
        worker.wait(60)


def with_blocks() -> list[Any]:
    pages = [page for page in PAGES if any(example.region.evaluator for example in parsed(page).examples())]
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in pages]


@pytest.mark.skipif(shutil.which("bash") is None or os.name != "posix", reason="blocks are for a shell of POSIX")
@pytest.mark.parametrize("page", with_blocks())
def test_blocks(page: Path, postgres_server: Any, make_database: Any, tmp_path: Path, monkeypatch: Any) -> None:
    database = make_database(postgres_server)
    desk = Desk(tmp_path, database)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SQLSEM_URL", database.url)
    monkeypatch.setenv("SQLSEM_CONFIG", str(desk.settings))
    monkeypatch.syspath_prepend(str(tmp_path))
    document = parsed(page, desk)
    with configured(database.url), worked(desk, WORKED.get(page.relative_to(ROOT).as_posix())):
        with sqlsem.limit("etl", 3):  # a resource that is known
            exec(NAMES.get(page.name, ""), document.namespace)
        for example in document.examples():
            with contextlib.suppress(unittest.SkipTest):  # its reason is in the page
                example.evaluate()


@pytest.mark.parametrize("page", [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in PAGES])
def test_every_block_is_looked_after(page: Path) -> None:
    languages = {language for language, _ in FENCE.findall(page.read_text(encoding="utf-8"))}
    assert languages <= {*RUN, *ELSEWHERE}
