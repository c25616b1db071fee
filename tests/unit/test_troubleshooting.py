"""docs/reference/errors.md has the words of every error, in Python and in SQL, except errors about an argument or a
file.
"""

import ast
import re
from pathlib import Path

import pytest

from sqlsem.engines import failures
from sqlsem.values import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
ERRORS = {
    *("Timeout", "LockLost", "Deadlock", "NotHeld", "TaskFailed", "BatchFailed", "SchemaError", "Unavailable"),
    "ConfigurationError",
}
#: Modules whose `ConfigurationError`s are about input: an argument, an option, a file, a URL.
ABOUT_WHAT_IS_WRITTEN = (
    *(
        "adapters/",
        "aio/locks.py",
        "aio/once.py",
        "aio/rates.py",
        "bodies/",
        "ops/certify/",
        "values/checks.py",
        "cli/",
        "config/",
        "api/coordinator.py",
    ),
    *(
        "client/operations/convert.py",
        "client/decorated.py",
        "client/operations/handover.py",
        "client/operations/release_on_commit.py",
        "client/once.py",
        "client/operations/rate_grants.py",
        "client/event_bus.py",
        "client/operations/terms.py",
        "ops/dashboard/access.py",
        "engines/__init__.py",
        "engines/memory.py",
        "engines/mssql/odbc.py",
    ),
    *(
        "engines/schedules.py",
        "engines/statements/conversions.py",
        "insight/",
        "values/locks.py",
        "values/rates.py",
        "values/tasks.py",
        "batches/",
        "sql/",
        "tasks/",
        "testing/",
    ),
)
#: Pieces of messages that need no explanation.
PLAIN = (
    " takes a cursor of the same database, not ",
    "coordinator must be a result of sqlsem.connect(), not ",
    " has no rows that a transaction could pin: call check() instead",  # an engine without tables
    " is not known in the URL of an SQLite file",
    "SQLite takes a file, not creator=",
    "The path of the SQLite file has a NUL character",
)


def pieces(text):
    """The fixed parts of a message, in order."""
    if isinstance(text, ast.Constant):
        return [text.value]
    if isinstance(text, ast.JoinedStr):
        return [value.value for value in text.values if isinstance(value, ast.Constant)]
    if isinstance(text, ast.BinOp):
        return pieces(text.left) + pieces(text.right)
    return []


def messages():
    """Yield module, class, first meaningful words and code of every error with a message of its own."""
    for path in sorted((ROOT / "sqlsem").rglob("*.py")):
        place = path.relative_to(ROOT / "sqlsem").as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(node, "func", None), "id", None)
            if isinstance(node, ast.Call) and name in ERRORS and node.args:
                texts = [piece for piece in pieces(node.args[0]) if len(re.findall(r"\w+", piece)) > 1]
                if texts:
                    words = next((piece for piece in texts if len(piece) > 15), max(texts, key=len))
                    yield place, name, words, code_of(node, name)


def code_of(call, name):
    """Return the code that a call gives to an error: its own, or that of the class."""
    own = [keyword.value.value for keyword in call.keywords if keyword.arg == "code"]
    return own[0] if own else getattr(errors, name).code


def lacking(page):
    """Return the messages whose first 24 characters are on no line of the page."""
    for place, name, words, _ in messages():
        if name == "ConfigurationError" and place.startswith(ABOUT_WHAT_IS_WRITTEN):
            continue
        if not any(plain in words for plain in PLAIN) and part(words) not in page.lower():
            yield f"{place}: {name}: {words}"


def part(piece):
    """Return the text to look for: the beginning, up to the first value."""
    return piece.strip(" :;(|'\"").removeprefix("(")[:24].rstrip().lower()


def sections():
    """Return the text of each section of the page whose heading is a code."""
    found = re.split(r"^## `([a-z-]+)`\n", PAGE.partition("\n## Calls in SQL")[0], flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def test_each_error_is_in_the_section_of_its_code():
    by_code, wrong = sections(), []
    for place, name, words, code in messages():
        if name == "ConfigurationError" and place.startswith(ABOUT_WHAT_IS_WRITTEN) and code == "configuration":
            continue
        if part(words) in PAGE.partition("\n## Calls in SQL")[0].lower():
            holding = [section for section, text in by_code.items() if part(words) in text.lower()]
            wrong += [] if code in holding else [f"{place}: {name}: {words}: {code}, not {holding}"]
    assert wrong == []


def test_each_code_has_a_section_and_each_section_a_code():
    codes = {code for *_, code in messages()}
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    classes += [value for value in vars(failures).values() if isinstance(value, type)]
    codes |= {value.code for value in classes if issubclass(value, errors.SqlsemError)} - {"error"}
    assert codes == set(sections())


def test_every_error_is_on_the_page():
    assert list(lacking(PAGE)) == []


@pytest.mark.parametrize("words", ["The request for", "is not held by this task", "its owner could do"])
def test_missing_error_is_found(words):
    assert list(lacking(PAGE.replace(words, "")))


def test_the_messages_are_found():
    assert len(list(messages())) > 100


# -- errors of the routines in the database ----------------------------------------------------------------------------

#: SQLSTATEs and numbers of messages about an argument, and of messages that only pass on another.
ABOUT_AN_ARGUMENT = {"22023", "50000"}
RAISED = re.compile(
    r"RAISE EXCEPTION\s+'((?:[^']|'')*)'(?:[^;]*?ERRCODE = '(\w+)')?|THROW\s+(\d+),\s*N'((?:[^']|'')*)'"
)


def sql_messages():
    """Yield file, number and words of every error of a routine, with X for each value.

    In a simulation, the substitute of the server raises the server's messages.
    """
    for path in sorted(
        {*(ROOT / "sqlsem" / "sql").glob("*/*.sql")} - {*(ROOT / "sqlsem" / "sql").glob("*/simulated.sql")}
    ):
        for words, state, number, text in RAISED.findall(path.read_text(encoding="utf-8")):
            if (state or number) not in ABOUT_AN_ARGUMENT:
                message = re.sub(r"%|\{\w+\}", "X", (words or text).replace("''", "'"))
                yield f"{path.parent.name}/{path.name}", state or number, message.removeprefix("sqlsem: ")


def sql_lacking(page):
    """Yield the messages that match no cell of the page; … matches anything."""
    cells = re.findall(r"`([^`]+)`", page[page.index("## Calls in SQL") :])
    patterns = [re.compile(".*".join(map(re.escape, cell.split("…")))) for cell in cells]
    for place, number, words in sql_messages():
        if not any(pattern.match(words) for pattern in patterns):
            yield f"{place}: {number}: {words}"


def test_every_error_of_a_routine_is_there():
    assert list(sql_lacking(PAGE)) == []


@pytest.mark.parametrize("words", ["busy: …", "… was cancelled", "this token …"])
def test_missing_error_of_a_routine_is_found(words):
    assert list(sql_lacking(PAGE.replace(words, "")))


def test_the_messages_of_the_routines_are_found():
    numbers = {number for _, number, _ in sql_messages()}
    assert {"25001", "42501", "55000", "55P03", "57014", "50001", "50002", "50005", "50006"} <= numbers
    assert len(list(sql_messages())) > 80
