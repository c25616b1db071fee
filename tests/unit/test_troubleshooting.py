"""docs/troubleshooting.md has the words of every error, but for those that are about an argument or a file."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ERRORS = {
    *("Timeout", "LockLost", "Deadlock", "NotHeld", "TaskFailed", "RoundFailed", "SchemaError", "Unavailable"),
    "ConfigurationError",
}
#: Modules whose `ConfigurationError`s are about what somebody wrote: an argument, an option, a file, a URL.
ABOUT_WHAT_IS_WRITTEN = (
    *("adapters/", "aio/__init__.py", "bodies/", "cli/", "config.py", "coordinator.py", "core/convert.py"),
    *(
        "core/decorated.py",
        "core/signals.py",
        "core/terms.py",
        "dashboard/guarding.py",
        "engines/__init__.py",
        "engines/memory.py",
        "engines/mssql/odbc.py",
    ),
    *("engines/sqlite/conversions.py", "insight/", "model.py", "model_tasks.py", "rounds/", "sql/", "tasks/"),
)
#: Pieces of messages whose page would say no more than they do.
PLAIN = (
    " has no rows that a transaction could keep: ask check() instead",  # an engine without tables
    " is not known in the URL of an SQLite file",
    "SQLite takes a file, not creator=",
    "The path of the SQLite file has a NUL character",
)


def pieces(text):
    """The fixed parts of a message, in order."""
    if isinstance(text, ast.Constant):
        return [text.value]
    if isinstance(text, ast.JoinedStr):
        return [one.value for one in text.values if isinstance(one, ast.Constant)]
    if isinstance(text, ast.BinOp):
        return pieces(text.left) + pieces(text.right)
    return []


def messages():
    """Module, class and words of every error that has words of its own: its first part that says something."""
    for path in sorted((ROOT / "sqlsem").rglob("*.py")):
        where = path.relative_to(ROOT / "sqlsem").as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(node, "func", None), "id", None)
            if isinstance(node, ast.Call) and name in ERRORS and node.args:
                found = [piece for piece in pieces(node.args[0]) if len(re.findall(r"\w+", piece)) > 1]
                if found:
                    yield where, name, next((piece for piece in found if len(piece) > 15), max(found, key=len))


def lacking(page):
    """Messages without a line on the page: it has the first 24 characters of their words."""
    for where, name, words in messages():
        if name == "ConfigurationError" and where.startswith(ABOUT_WHAT_IS_WRITTEN):
            continue
        if not any(plain in words for plain in PLAIN) and part(words) not in page.lower():
            yield f"{where}: {name}: {words}"


def part(piece):
    """What is looked for: the beginning, without what joins it to a value."""
    return piece.strip(" :;(|'\"").removeprefix("(")[:24].rstrip().lower()


def test_every_error_is_there():
    assert list(lacking(PAGE)) == []


@pytest.mark.parametrize("words", ["The request for", "is not held by this task", "its owner could do"])
def test_one_that_is_not_there_is_found(words):
    assert list(lacking(PAGE.replace(words, "")))


def test_the_messages_are_found():
    assert len(list(messages())) > 100
