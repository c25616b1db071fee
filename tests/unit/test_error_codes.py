"""docs/reference/errors.md has a section for the code of every error, and a line for the number of every routine's."""

import ast
import re
from pathlib import Path

import pytest

from sqlsem.cli import group
from sqlsem.engines import answers, failures
from sqlsem.values import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
CLASSES = {
    name: value
    for module in (errors, failures)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, errors.SqlsemError) and value is not errors.SqlsemError
}


#: The codes of errors of servers' routines.
OF_ROUTINES = {*answers._CODES.values(), *(code for code, _ in answers._CODES_BY_TEXT)}


def is_constant_code(keyword):
    """True for the argument ``code="…"``. (Other values come from `OF_ROUTINES`.)"""
    return keyword.arg == "code" and isinstance(keyword.value, ast.Constant)


def raised():
    """Yield the class and the own code, or None, of each error that the package makes."""
    for path in sorted((ROOT / "sqlsem").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(node, "func", None), "id", None)
            if isinstance(node, ast.Call) and name in CLASSES:
                own = [keyword.value.value for keyword in node.keywords if is_constant_code(keyword)]
                yield name, own[0] if own else None


@pytest.mark.kept
def test_each_code_has_a_section_and_each_section_a_code():
    codes = {value.code for value in CLASSES.values()} | {code for _, code in raised() if code is not None}
    assert codes >= OF_ROUTINES
    sections = re.findall(r"^## `([a-z-]+)`$", PAGE, re.MULTILINE)
    assert sorted(codes) == sorted(sections)


@pytest.mark.kept
def test_each_class_has_a_code_of_its_own_or_its_base():
    assert "error" not in {value.code for value in CLASSES.values()}
    assert len([name for name, code in raised() if code is not None]) > 50


def test_exit_codes_match_the_command_line():
    rows = re.findall(r"^\| ([\d, ]+) \|.*\| ([^|]*)\|$", PAGE[: PAGE.index("\n## `timeout`")], re.MULTILINE)
    documented = {int(number) for numbers, _ in rows for number in numbers.split(",")}
    assert {number for _, number in group.EXIT_CODES} | {group.EXIT_USAGE, group.EXIT_IO} <= documented
    by_code = {
        code: int(numbers) for numbers, codes in rows if numbers.isdigit() for code in re.findall(r"`(.+?)`", codes)
    }
    for value in CLASSES.values():
        exit_code = next(number for kind, number in group.EXIT_CODES if issubclass(value, kind))
        assert by_code.get(value.code, group.EXIT_CONFIG) == exit_code, value.code


# -- errors of the routines in the database ----------------------------------------------------------------------------

#: SQLSTATEs and numbers of messages about an argument, and of messages that only pass on another.
ABOUT_AN_ARGUMENT = {"22023", "50000"}
TEXT = r"'((?:[^']|'')*)'"
#: (A text may have a semicolon, which ends the statement elsewhere.)
RAISED = re.compile(
    rf"RAISE EXCEPTION\s+{TEXT}(?:(?:[^;']|'(?:[^']|'')*')*?ERRCODE = '(\w+)')?|THROW\s+(\d+),\s*N{TEXT}"
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


def sql_codes():
    """Return the numbers and SQLSTATEs in the page's table of errors of routines."""
    table = PAGE[PAGE.index("## Calls in SQL") :]
    rows = re.findall(r"^\| ([\w', ]*)\| ([\w, ]*)\|", table, re.MULTILINE)
    return {code for row in rows for cell in row for code in cell.replace(",", " ").split()}


def test_every_error_of_a_routine_is_there():
    assert {number for _, number, _ in sql_messages()} <= sql_codes()


def test_the_messages_of_the_routines_are_found():
    numbers = {number for _, number, _ in sql_messages()}
    assert {"25001", "42501", "55000", "55P03", "57014", "50001", "50002", "50005", "50006"} <= numbers
    assert len(list(sql_messages())) > 80
