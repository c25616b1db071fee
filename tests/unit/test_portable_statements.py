"""The statements of databases without routines mean the same on each of these."""

from __future__ import annotations

import re

import pytest

from sqlsem import sql

ENGINES = ("sqlite", "mysql")
#: Words that MySQL 8 or MariaDB reserves, and SQLite does not. (A name in double quotes may be one of them.)
RESERVED = set(
    re.findall(
        r"\w+",
        """
        array cube cume_dist dense_rank describe empty except explain fetch first_value force function get
        grouping groups int intersect json_table key keys kill lag last_value lateral lead left leave like
        limit lines linear load lock long loop manual match mod nth_value ntile of optimize order out over
        parallel percent_rank purge qualify range rank read recursive references release rename repeat
        require restrict return right row_number rows schema schemas separator show signal sql ssl starting
        stored system tablesample terminated to trigger undo union unique unlock unsigned update usage use
        using values virtual when where while window with write
        """,
    )
)


def statements(engine):
    if engine == "mysql":
        pytest.importorskip("pymysql")
    return sql.queries(engine)


def without_comments(text):
    return re.sub(r"--[^\n]*", "", text)


def split(text, separator=","):
    """Split at the commas outside of brackets and quotes."""
    parts, depth, quoted = [""], 0, False
    for character in text:
        quoted ^= character == "'"
        depth += 0 if quoted else (character == "(") - (character == ")")
        if character == separator and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def assignments(text):
    """Return the (column, expression) pairs of an UPDATE, or of an INSERT that updates an existing row."""
    match = re.search(r"\bUPDATE\s+\S+\s+SET\b(.*)|\bDO UPDATE SET\b(.*)|\bDUPLICATE KEY UPDATE\b(.*)", text, re.DOTALL)
    if match is None:
        return []
    found = next(filter(None, match.groups()))
    depth = 0
    for position, character in enumerate(found):  # up to WHERE, outside of brackets
        depth += (character == "(") - (character == ")")
        if depth == 0 and re.match(r"\bWHERE\b", found[position:]) and not found[position - 1].isalnum():
            found = found[:position]
            break
    return [tuple(part.strip() for part in pair.split("=", 1)) for pair in split(found)]


def late_reads(text):
    """Return the columns that an assignment reads after an earlier one has set them: MySQL would read the new value."""
    found, assigned = [], []
    for column, expression in (
        pair for statement in split(without_comments(text), ";") for pair in assignments(statement)
    ):
        # (Not parameters, texts, values of the row to insert, or columns of other tables.)
        expression = re.sub(
            r":\w+|'[^']*'|\bVALUES\(\w+\)|\bexcluded\.\w+|\(\s*SELECT (?:[^()]|\([^()]*\))*\)", "", expression
        )
        found += [earlier for earlier in assigned if re.search(rf"(?<![\w.]){earlier}\b", expression)]
        assigned.append(column)
    return found


def test_late_reads_are_found():
    assert late_reads("UPDATE t SET a = a + 1, b = CASE WHEN a > 1 THEN 'a' END WHERE c = 1") == ["a"]
    assert late_reads("UPDATE t SET a = a + 1, b = coalesce(x, (SELECT max(y) FROM u)) WHERE a = 1") == []
    assert late_reads("INSERT INTO t VALUES (1) ON DUPLICATE KEY UPDATE a = VALUES(a), b = VALUES(a) + a") == ["a"]


@pytest.mark.parametrize("engine", ENGINES)
def test_no_assignment_reads_a_column_that_is_set_before(engine):
    texts = statements(engine)
    assert sum(len(assignments(without_comments(text))) > 1 for text in texts.values()) > 15
    assert {name: found for name, text in texts.items() if (found := late_reads(text))} == {}


@pytest.mark.parametrize("engine", ENGINES)
def test_names_of_columns_are_not_reserved(engine):
    """A server of the other kind refuses such a name without quotes."""
    for name, text in statements(engine).items():
        words = {word.lower() for word in re.findall(r"\bAS (\w+)", without_comments(text))}
        assert not words & (RESERVED - {"signed", "double"}), name


@pytest.mark.parametrize("engine", ENGINES)
def test_derived_tables_have_names(engine):
    """MySQL refuses a subquery in FROM without one."""
    for name, text in statements(engine).items():
        text = re.sub(r"'[^']*'", "''", without_comments(text))
        for match in re.finditer(r"(?:FROM|JOIN)\s*\((?=\s*SELECT)", text):
            end, depth = match.end(), 1
            while depth:
                depth += (text[end] == "(") - (text[end] == ")")
                end += 1
            assert re.match(r"\s+AS \w+", text[end:]), f"{name}: {text[match.start() : end + 20]}"


def test_parameters_are_written_for_pymysql():
    pytest.importorskip("pymysql")
    from sqlsem.engines.mysql.connection import for_driver

    text = """SELECT ':a', ?, x -- a comment: with ? and :c
    FROM "t:d" WHERE a = :a AND b LIKE 'rate:%' AND c % 2 = 0"""
    assert re.sub(r"\s+", " ", for_driver(text)) == (
        """SELECT ':a', %s, x FROM "t:d" WHERE a = %(a)s AND b LIKE 'rate:%%' AND c %% 2 = 0"""
    )
