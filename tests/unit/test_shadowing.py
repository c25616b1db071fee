"""No routine or statement finds a name by its caller's search_path, as PostgreSQL's own parser reads them.

tests/clients/test_traps.py runs them amid objects of other logins.
"""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

from sqlsem import sql

if sys.platform != "linux" or sys.implementation.name != "cpython":
    pytest.skip("pglast comes for CPython on Linux", allow_module_level=True)

from support import shadowing

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("schema", *sql.rerunnable("postgresql"))
#: Modules with SQL for other servers, or for the databases of simulations.
OTHER_ENGINES = ("sqlsem/engines/mssql", "sqlsem/engines/sqlite", "sqlsem/testing")


@functools.cache
def routines():
    """Return the routines of all scripts, by script, name and number."""
    return {
        (script, routine.name, number): routine
        for script in SCRIPTS
        for number, routine in enumerate(shadowing.routines(sql.script("postgresql", script)))
    }


def without_path():
    """Return the routines that have their caller's search_path."""
    return {key: routine for key, routine in routines().items() if not routine.pins_path}


def statements():
    """Return the statements of the client and of commands, by file and name."""
    return {
        (file, name): text
        for file in ("client", "doctor", "certify")
        for name, text in sql.queries("postgresql", file=file).items()
    }


def parsable(text):
    """Return a statement of the client with a parameter in place of each placeholder."""
    return re.sub(r"%(\(\w+\))?s", "$1", text)


def found_in_statement(text):
    if text.lstrip().startswith("DO "):
        return shadowing.in_block(text)
    return shadowing.unqualified(parsable(text))


def test_routines_without_path_are_the_ones_that_must():
    """A fixed search_path forbids COMMIT, and inlining."""
    assert len(routines()) > 250
    assert len(without_path()) > 30
    for (script, name, _), routine in without_path().items():
        commits = re.search(r"\bCOMMIT;|\bCALL ", routine.body)
        assert routine.language == "sql" or commits, f"{script}.sql: {name} can have SET search_path, and has none"


def test_backslashes_stand_in_strings_that_say_so():
    """Without E'…' their meaning depends on the session: standard_conforming_strings."""
    for script in (*SCRIPTS, "client", "doctor", "certify", "drop"):
        text = re.sub(r"--.*", "", sql.script("postgresql", script))
        literals = [match[0] for match in re.finditer(r"\bE?'(?:[^']|'')*'|'(?:[^']|'')*'", text) if "\\" in match[0]]
        assert [literal for literal in literals if not literal.startswith("E'")] == [], script


def test_routine_without_path_qualifies_each_name():
    names = {key: shadowing.in_routine(routine) for key, routine in without_path().items()}
    assert {key: unqualified for key, unqualified in names.items() if unqualified} == {}


def test_client_statement_qualifies_each_name():
    names = {key: found_in_statement(text) for key, text in statements().items()}
    assert {key: unqualified for key, unqualified in names.items() if unqualified} == {}


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_pins_the_path_before_its_first_name(script):
    """Defaults, checks, views, WHEN of triggers and DO blocks are bound while the script runs."""
    text = sql.script("postgresql", script)
    assert shadowing.pins_path_first(text), script


def inline_statements():
    """Yield (place, text) for the SQL in Python's strings."""
    for path in sorted((ROOT / "sqlsem").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(OTHER_ENGINES):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = None
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "1" for part in node.values)
            if text and re.match(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE|CALL|DO|LOCK|SET)\s", text):
                yield f"{name}:{node.lineno}", text


def test_inline_statement_qualifies_each_name():
    statements = list(inline_statements())
    assert any(name.startswith("sqlsem/engines/postgresql") for name, _ in statements), "the scan sees nothing"
    for place, text in statements:
        assert shadowing.in_fragment(parsable(text)) == [], (place, text)


HEAD = "CREATE FUNCTION s.f(a integer, t text) RETURNS integer LANGUAGE"
#: A fault of each kind, with the name that the scan gives it.
SEEDED = {
    "operator": ("SELECT a / 2", "operator /"),
    "prefix": ("SELECT - a", "operator -"),
    "in": ("SELECT 1 WHERE a IN (1, 2)", "IN"),
    "not in": ("SELECT 1 WHERE a NOT IN (1, 2)", "IN"),
    "in a query": ("SELECT 1 WHERE a IN (SELECT 1)", "IN (SELECT …)"),
    "any": ("SELECT 1 WHERE a = ANY (ARRAY[1])", "operator ="),
    "any of a query": ("SELECT 1 WHERE a = ANY (SELECT 1)", "operator = ANY (SELECT …)"),
    "between": ("SELECT 1 WHERE a BETWEEN 1 AND 2", "BETWEEN"),
    "like": ("SELECT 1 WHERE t LIKE 'x'", "LIKE"),
    "ilike": ("SELECT 1 WHERE t NOT ILIKE 'x'", "ILIKE"),
    "similar": ("SELECT 1 WHERE t SIMILAR TO 'x'", "SIMILAR TO"),
    "distinct": ("SELECT 1 WHERE a IS DISTINCT FROM 1", "IS DISTINCT FROM"),
    "not distinct": ("SELECT 1 WHERE a IS NOT DISTINCT FROM 1", "IS NOT DISTINCT FROM"),
    "nullif": ("SELECT NULLIF(a, 1)", "NULLIF"),
    "case": ("SELECT CASE a WHEN 1 THEN 2 END", "CASE … WHEN"),
    "rows": ("SELECT 1 WHERE (a, 1) < (2, 3)", "operator <"),
    "using": ("SELECT 1 FROM s.t AS x JOIN s.t AS y USING (z)", "JOIN … USING"),
    "order": ("SELECT z FROM s.t ORDER BY z USING <", "operator < (ORDER BY)"),
    "function": ("SELECT abs(a)", "function abs"),
    "table function": ("SELECT 1 FROM generate_series(1, 2)", "function generate_series"),
    "cast": ("SELECT t::text", "type text"),
    "cast to a type of the grammar's look": ("SELECT t::timestamptz", "type timestamptz"),
    "typed text": ("SELECT text 'x'", "type text"),
    "table": ("SELECT z FROM t", "table t"),
    "collation": ('SELECT t COLLATE "C"', "collation C"),
}


@pytest.mark.parametrize("fault", SEEDED)
@pytest.mark.parametrize("language", ["sql", "plpgsql"])
def test_seeded_fault_is_found(fault, language):
    query, name = SEEDED[fault]
    body = query if language == "sql" else f"BEGIN RETURN QUERY {query}; END"
    head = HEAD.replace("RETURNS", "RETURNS SETOF")
    (routine,) = shadowing.routines(f"{head} {language} AS $$ {body} $$")
    assert shadowing.in_routine(routine).count(name) == 1
    assert not routine.pins_path


#: The same in statements of PL/pgSQL.
SEEDED_BLOCKS = {
    "declaration": ("DECLARE v text; BEGIN NULL; END", "type text"),
    "declaration with a comment": ("DECLARE v bigint; -- one\n w record; BEGIN NULL; END", "type record"),
    "default": ("DECLARE v integer := a + 1; BEGIN NULL; END", "operator +"),
    "assignment": ("BEGIN a := a + 1; END", "operator +"),
    "assignment to an element": ("DECLARE v integer[]; BEGIN v[1] := a + 1; END", "operator +"),
    "if": ("BEGIN IF a = 0 THEN NULL; END IF; END", "operator ="),
    "elsif": ("BEGIN IF false THEN NULL; ELSIF a = 0 THEN NULL; END IF; END", "operator ="),
    "while": ("BEGIN WHILE a < 0 LOOP NULL; END LOOP; END", "operator <"),
    "exit": ("BEGIN LOOP EXIT WHEN a > 3; END LOOP; END", "operator >"),
    "case": ("BEGIN CASE a WHEN 1 THEN NULL; ELSE NULL; END CASE; END", "CASE … WHEN (statement)"),
    "return": ("BEGIN RETURN a * 2; END", "operator *"),
    "perform": ("BEGIN PERFORM now(); END", "function now"),
    "raise": ("BEGIN RAISE NOTICE '%', t || 'x'; END", "operator ||"),
    "raise using": ("BEGIN RAISE EXCEPTION 'x' USING HINT = t || 'x'; END", "operator ||"),
    "call": ("BEGIN CALL p(1); END", "function p"),
    "for": ("BEGIN FOR i IN 1..a + 1 LOOP NULL; END LOOP; END", "operator +"),
    "handler": ("BEGIN NULL; EXCEPTION WHEN OTHERS THEN a := a + 1; END", "operator +"),
    "execute": ("BEGIN EXECUTE t || 'x'; END", "operator ||"),
}


@pytest.mark.parametrize("fault", SEEDED_BLOCKS)
def test_seeded_fault_in_a_block_is_found(fault):
    body, name = SEEDED_BLOCKS[fault]
    (routine,) = shadowing.routines(f"{HEAD} plpgsql AS $$ {body} $$")
    assert name in shadowing.in_routine(routine)


def test_script_that_pins_its_path_late_is_found():
    pins = "SET search_path = pg_catalog, pg_temp;"
    assert shadowing.pins_path_first(f"-- words\n{pins} SELECT 1")
    for late in (
        "SELECT 1;" + pins,
        "SET search_path = public, pg_catalog; SELECT 1",
        "SET search_path = pg_catalog; SELECT 1",
    ):
        assert not shadowing.pins_path_first(late)
    assert not shadowing.pins_path_first(f"{pins} SET search_path = public")
    assert not shadowing.pins_path_first(f"{pins} RESET search_path")


def test_block_that_pins_its_path_late_is_found():
    pins = "PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);"
    assert shadowing.in_block(f"DO $$ BEGIN {pins} PERFORM now(); END $$") == []
    assert shadowing.in_block(f"DO $$ BEGIN PERFORM now(); {pins} END $$") == ["function now"]
    assert shadowing.in_block(f"DO $$ DECLARE v text; BEGIN {pins} END $$") == ["type text"]
