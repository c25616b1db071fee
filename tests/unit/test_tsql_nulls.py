"""T-SQL writes no NULL into a column that refuses it (error 515): each INSERT … SELECT and each UPDATE is read, and
compared with the columns of tables and of table variables that may be NULL."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support.procedures import PROCEDURES
from support.sql_text import arguments, parts

from sqlsem import sql

Columns = dict[str, bool]  # column → True if it may be NULL
#: (procedure, table, column): why the value, which is made of a column that may be NULL, is not NULL there.
NEVER_NULL = {
    ("find_deadlock", "@row", "who"): "a rank",
    ("take_tokens", "@force", "rate_limit"): "the function leaves out windows without any limit",
    ("enqueue_locks", "@line", "lock_count"): "the task has rows in task_lock",
    ("next_blocked_task", "@line", "lock_count"): "the task has rows in task_lock",
    ("simulate_queue", "@hold", "kind"): "the function returns a text for NULL, too",
    ("simulate_queue", "@row", "kind"): "the function returns a text for NULL, too",
}
#: Functions that take NULL and do not return it. (The conditions in an EXISTS are no value.)
SAFE = ("COALESCE", "CONCAT", "COUNT", "EXISTS ")


def columns(definition: str) -> Columns:
    """Return the columns of a table."""
    found = [re.match(r"\[?(\w+)\]? (?!AS \()", part) for part in parts(definition)]
    return {
        match[1]: "NOT NULL" not in match.string and "PRIMARY KEY" not in match.string
        for match in found
        if match is not None and match[1] not in ("CONSTRAINT", "PRIMARY", "UNIQUE", "CHECK", "INDEX")
    }


def tables() -> dict[str, Columns]:
    text = re.sub(r"--[^\n]*", "", sql.script("mssql", "schema-1"))
    creations = re.finditer(r"CREATE TABLE (sqlsem\.\w+) \(", text.replace("[", "").replace("]", ""))
    return {match[1]: columns(arguments(match.string, match.end() - 1)) for match in creations}


TABLES = tables()
#: Names of columns that may be NULL in each table that has them.
NULLABLE = {name for table in TABLES.values() for name, nullable in table.items() if nullable} - {
    name for table in TABLES.values() for name, nullable in table.items() if not nullable
}


def may_be_null(expression: str) -> bool:
    """Return True if an expression is made of a column that may be NULL."""
    expression = re.sub(r"N?'(?:[^']|'')*'", "''", expression)
    for function in SAFE:
        while (start := re.search(rf"\b{function}\(", expression)) is not None:
            inner = arguments(expression, start.end() - 1)
            expression = expression[: start.start()] + "0" + expression[start.end() + len(inner) + 1 :]
    expression = re.sub(r"\bWHEN\b.*?\bTHEN\b| AS \w+$", "", expression)
    return not NULLABLE.isdisjoint(re.findall(r"(?<!@)\b(?:\w+\.)?(\w+)\b", expression))


def selected(query: str) -> list[str]:
    """Return the columns of a query; none if it is no SELECT."""
    query = " ".join(query.split())
    head = re.match(r"SELECT (?:DISTINCT )?", query)
    if head is None:
        return []
    query = query[head.end() :]
    if query.startswith("TOP ("):
        query = query[len("TOP (") + len(arguments(query, len("TOP "))) + 1 :]
    return before_from(query)


def before_from(statement: str) -> list[str]:
    """Return the list with which a statement begins."""
    depth = 0
    for match in re.finditer(r"[();]|\b(?:FROM|WHERE|UNION|OUTPUT|OPTION)\b", statement):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0 and match[0] not in "()":
            return parts(statement[: match.start()])
    raise AssertionError("a statement without an end")


def updated(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (table, column, value) of what the UPDATE statements set."""
    for match in re.finditer(r"UPDATE (@\w+|sqlsem\.\w+|\w+)(?: WITH \([^)]*\))? SET ", text):
        table, rest = match[1], text[match.end() :]
        alias = re.search(rf"(?:FROM|JOIN) (@\w+|sqlsem\.\w+) AS {table}\b", rest)
        for assignment in before_from(rest):
            column, _, value = re.sub(r"^@\w+ = |^\w+\.", "", assignment).partition("= ")
            yield alias[1] if alias is not None and "." not in table else table, column.strip(" +"), value


def nulls(text: str) -> Iterator[tuple[str, str]]:
    """Yield (table, column) of the values that may be NULL where the column refuses that."""
    text = "\n".join(line.rstrip() for line in text.replace("[", "").replace("]", "").splitlines())
    text = re.sub(r"[ \n]+", " ", text)
    known = dict(TABLES)
    for match in re.finditer(r"(@\w+) TABLE \(", text):
        known[match[1]] = columns(arguments(text, match.end() - 1))
    for match in re.finditer(r"INSERT INTO (@\w+|sqlsem\.\w+) \(", text):
        names = arguments(text, match.end() - 1)
        values = selected(text[match.end() + len(names) + 1 :].lstrip())
        assert len(values) in (0, len(parts(names))), (match[0], names, values)
        for name, value in zip(parts(names), values, strict=False):
            if not known[match[1]][name] and may_be_null(value):
                yield match[1], name
    for table, name, value in updated(text):
        if name[0] != "@" and not known[table][name] and may_be_null(value):
            yield table, name


@pytest.mark.parametrize("name", PROCEDURES)
def test_columns_without_null_get_no_null(name):
    expected = {(table, column) for procedure, table, column in NEVER_NULL if procedure == name}
    assert set(nulls(PROCEDURES[name])) == expected


def test_a_null_for_a_column_without_null_is_seen():
    declared = "DECLARE @a TABLE (n bigint NOT NULL PRIMARY KEY, m decimal(38, 0) NOT NULL, l int NULL);\n"
    insert = declared + "INSERT INTO @a (n, m, l) SELECT w.window_ms, {}, w.burst FROM sqlsem.rate_window AS w;"
    for value in (
        "w.rate_limit",
        "1 / w.rate_limit",
        "CASE WHEN w.used > 0 THEN w.rate_limit ELSE 0 END",
        "MAX(burst)",
    ):
        assert list(nulls(insert.format(value))) == [("@a", "m")], value
    for value in (
        "COALESCE(w.rate_limit, 0)",
        "CASE WHEN w.burst IS NULL THEN 1 ELSE 2 END",
        "w.used",
        "@burst",
        "'burst'",
    ):
        assert list(nulls(insert.format(value))) == [], value
    assert list(nulls("INSERT INTO sqlsem.history (outcome) SELECT TOP (1) t.note FROM t;")) == [
        ("sqlsem.history", "outcome")
    ]
    update = declared + "UPDATE a SET n += 1, m = {} FROM @a AS a WHERE a.l IS NULL;"
    assert list(nulls(update.format("a.n + 1"))) == []
    assert list(nulls(update.format("a.n + w.rate_limit"))) == [("@a", "m")]
    assert list(nulls("UPDATE sqlsem.history SET outcome = note;")) == [("sqlsem.history", "outcome")]
