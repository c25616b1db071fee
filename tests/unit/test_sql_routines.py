"""docs/routines.py: the reference has every routine that logins call themselves, from the comment above it.

A routine that a role may call is public (in the table of docs/reference/protocol.md), or a client or another routine
calls it.
"""

import re

import pytest
from support.pages import routines

from sqlsem import sql

ENGINES = ("postgresql", "mssql")
SENTENCE = re.compile(r"[A-Z].{10,}?[.:]")


def called(engine):
    """Return the names that the Python client and the routines call."""
    text = "".join(sql.script(engine, name) for name in ("client", *sql.rerunnable(engine)))
    text = re.sub(r"CREATE OR (?:REPLACE|ALTER) \w+ sqlsem\.\[?\w+|--.*", "", text)
    return set(re.findall(r"sqlsem\.\[?(\w+)", text))


def test_each_public_routine_is_named_once():
    assert len(routines.public()) == len(set(routines.public())) > 30


@pytest.mark.parametrize("engine", ENGINES)
def test_public_routines_have_a_signature_and_roles(engine):
    found = routines.installed(engine)
    assert len(found) > 150
    for name in routines.public():
        assert found[name].roles, name
        assert re.match(rf"(FUNCTION|PROCEDURE) sqlsem\.\[?{name}\b", found[name].signature)
        assert not re.search(r"\$\$|\b(BEGIN|LANGUAGE|DECLARE)\b", found[name].signature), found[name].signature


@pytest.mark.parametrize("engine", ENGINES)
def test_executable_routines_are_public_or_called(engine):
    left = routines.granted(engine).keys() - called(engine) - set(routines.public())
    assert left & routines.installed(engine).keys() == set()


@pytest.mark.parametrize("engine", ENGINES)
def test_executable_routines_have_a_comment(engine):
    found = routines.installed(engine)
    without = [
        name
        for name in routines.granted(engine)
        if name in found and not (found[name].comment and SENTENCE.match(found[name].comment[0]))
    ]
    assert without == []


def test_both_engines_have_the_same_rights():
    found = [routines.granted(engine) for engine in ENGINES]
    both = found[0].keys() & found[1].keys() - {"check_guard"}  # on SQL Server the triggers of guarded tables call it
    assert len(both) > 90
    assert {name: found[0][name] for name in both} == {name: found[1][name] for name in both}


def test_the_last_of_several_routines_is_for_sessions():
    assert "queue_position bigint" in routines.installed("postgresql")["release"].signature


def test_comments_end_at_an_empty_line():
    text = "-- Return 1:\n--   0 no\n--   1 yes\n-- Changes\n-- nothing.\n--\n-- Why.\n"
    assert routines.parse_comment(text) == ["Return 1:", ["0 no", "1 yes"], "Changes nothing."]
