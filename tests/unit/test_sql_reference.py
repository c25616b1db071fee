"""docs/scripts.py: the reference has every routine that logins call themselves, and the tables.

A routine that a role may call is public (in the table of docs/reference/protocol.md), or a client or another routine
calls it.
"""

import re

import pytest
from support.docs_modules import scripts

from sqlsem import sql

ENGINES = ("postgresql", "mssql")
SENTENCE = re.compile(r"[A-Z].{10,}?[.:]")


def called(engine):
    """Return the names that the Python client and the routines call."""
    text = "".join(sql.script(engine, name) for name in ("client", *sql.rerunnable(engine)))
    text = re.sub(r"CREATE OR (?:REPLACE|ALTER) \w+ sqlsem\.\[?\w+|--.*", "", text)
    return set(re.findall(r"sqlsem\.\[?(\w+)", text))


def test_each_public_routine_is_named_once():
    assert len(scripts.public()) == len(set(scripts.public())) > 30


@pytest.mark.parametrize("engine", ENGINES)
def test_public_routines_have_a_signature_and_roles(engine):
    found = scripts.installed(engine)
    assert len(found) > 150
    for name in scripts.public():
        assert found[name].roles, name
        assert re.match(rf"(FUNCTION|PROCEDURE) sqlsem\.\[?{name}\b", found[name].signature)
        assert not re.search(r"\$\$|\b(BEGIN|LANGUAGE|DECLARE)\b", found[name].signature), found[name].signature


@pytest.mark.parametrize("engine", ENGINES)
def test_executable_routines_are_public_or_called(engine):
    left = scripts.granted(engine).keys() - called(engine) - set(scripts.public())
    assert left & scripts.installed(engine).keys() == set()


@pytest.mark.parametrize("engine", ENGINES)
def test_executable_routines_have_a_comment(engine):
    found = scripts.installed(engine)
    without = [
        name
        for name in scripts.granted(engine)
        if name in found and not (found[name].comment and SENTENCE.match(found[name].comment[0]))
    ]
    assert without == []


def test_both_engines_have_the_same_rights():
    found = [scripts.granted(engine) for engine in ENGINES]
    both = found[0].keys() & found[1].keys() - {"check_guard"}  # on SQL Server the triggers of guarded tables call it
    assert len(both) > 90
    assert {name: found[0][name] for name in both} == {name: found[1][name] for name in both}


def test_the_last_of_several_routines_is_for_sessions():
    assert "queue_position bigint" in scripts.installed("postgresql")["release"].signature


def test_comments_end_at_an_empty_line():
    text = "-- Return 1:\n--   0 no\n--   1 yes\n-- Changes\n-- nothing.\n--\n-- Why.\n"
    assert scripts.parse_comment(text) == ["Return 1:", ["0 no", "1 yes"], "Changes nothing."]


def columns(definition):
    return set(re.findall(r"^    (?!PRIMARY|CONSTRAINT|CHECK|UNIQUE)\W?(\w+)", definition, re.MULTILINE))


def test_tables_of_the_page_are_shown_with_their_columns():
    found = scripts.tables()
    assert len(found) > 20
    assert {"queue_position", "note"} < columns(found["ProcessControl"])
    assert [text for text in found.values() if text.count("CREATE") > 1] == []


@pytest.mark.parametrize("engine", ["mssql", "mysql", "sqlite"])
def test_other_engines_have_the_columns_that_are_shown(engine):
    schema = sql.script(engine, "schema")
    missing = set()
    for name, text in scripts.tables().items():
        own = "entry" if (engine, name) == ("mssql", "ProcessControl") else name
        match = re.search(
            rf"CREATE TABLE (?:IF NOT EXISTS )?(?:sqlsem[._])?{own} \(\n(.*?)^\)", schema, re.MULTILINE | re.DOTALL
        )
        assert match is not None, name
        missing |= {(name, column) for column in columns(text) - columns(match[1])}
    assert missing <= {
        ("ProcessControl", "waiter_lease_until"),
        ("member", "backend_pid"),
        ("rate_window", "promised_ms"),
        ("task", "signalled_attempt"),
        ("task_log", "session_id"),
        ("rate_slot", "login"),
        ("commit_marker", "login"),
    }
