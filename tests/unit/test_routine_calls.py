"""The client's calls of routines, as they are written from the routines' signatures."""

import pytest

from sqlsem import sql
from sqlsem.sql.calls import Routines, expand_calls, listed_calls

FUNCTIONS = """
-- The body of a routine may name another one: SELECT {schema}.other(1).
CREATE OR REPLACE FUNCTION {schema}.add(p_name varchar, p_body text DEFAULT lower('A, b'), p_list bigint[])
    RETURNS bigint
AS $$ SELECT 1 $$;
CREATE OR REPLACE FUNCTION {schema}.read(
    p_position bigint,  -- of a row, or NULL
    OUT position bigint, OUT words text) {plpgsql}
CREATE OR REPLACE FUNCTION {schema}.all_rows() RETURNS TABLE (name varchar, seconds float) AS $$ SELECT $$;
CREATE OR REPLACE FUNCTION {schema}.past(p_name varchar, p_since float DEFAULT NULL) RETURNS SETOF bigint AS $$ $$;
CREATE OR REPLACE FUNCTION {schema}.past(p_name varchar) RETURNS SETOF bigint AS $$ $$;
"""
PROCEDURES = """
CREATE OR ALTER PROCEDURE {schema}.[revoke] @position bigint, @force bit = 0, @answer bit = 0 AS {begin}
CREATE OR ALTER PROCEDURE {schema}.add
    @name nvarchar(400) = N'a, b', @cost numeric(10, 2) = 1,  -- a comment
    @added bigint = NULL OUTPUT, @answer bit = 0, @later int = 0
AS
CREATE OR ALTER PROCEDURE {schema}.reap @answer bit = 0 AS {begin}
CREATE OR ALTER PROCEDURE {schema}.settings AS {begin}
"""


@pytest.mark.parametrize(
    ("name", "is_operators", "statement"),
    [
        ("add", False, "SELECT {schema}.add(%s::varchar, %s::pg_catalog.text, %s::bigint[])"),
        (
            "add",
            True,
            "SELECT pg_catalog.set_config('sqlsem.client', %s, true), "
            "{schema}.add(%s::varchar, %s::pg_catalog.text, %s::bigint[])",
        ),
        ("read", False, "SELECT position, words\nFROM {schema}.read(%s::bigint)"),
        ("all_rows", False, "SELECT name, seconds\nFROM {schema}.all_rows()"),
        ("past", False, "SELECT {schema}.past(%s::varchar, %s::float)"),
    ],
)
def test_call_of_a_function_has_types_and_columns(name, is_operators, statement):
    assert Routines(FUNCTIONS).call(name, is_operators) == statement


@pytest.mark.parametrize(
    ("name", "statement"),
    [
        ("revoke", "EXEC {schema}.[revoke] ?, ?, 1"),
        ("add", "EXEC {schema}.add ?, ?, @answer = 1"),
        ("reap", "EXEC {schema}.reap 1"),
        ("settings", "EXEC {schema}.settings"),
    ],
)
def test_call_of_a_procedure_asks_for_its_answer(name, statement):
    assert Routines(PROCEDURES).call(name, False) == statement


def test_list_of_calls_is_replaced_by_statements():
    text = "-- calls: past, all_rows\n-- operators' calls: past\n\n-- name: clock\nSELECT 1\n"
    assert expand_calls(text, lambda: Routines(FUNCTIONS)).splitlines() == [
        *("-- name: past", "SELECT {schema}.past(%s::varchar, %s::float)", ""),
        *("-- name: all_rows", "SELECT name, seconds", "FROM {schema}.all_rows()"),
        "-- name: past",
        "SELECT pg_catalog.set_config('sqlsem.client', %s, true), {schema}.past(%s::varchar, %s::float)",
        *("", "-- name: clock", "SELECT 1"),
    ]
    assert listed_calls("-- calls: past, all_rows\n") == ["past", "all_rows"]
    assert listed_calls("-- name: past\n") == []


@pytest.mark.parametrize("engine", ["postgresql", "mssql"])
def test_call_belongs_to_the_feature_of_its_section(engine):
    features = sql.query_features(engine)
    assert features.keys() == sql.queries(engine).keys()
    assert (features["heartbeat"], features["claim_task"], features["revoke"]) == ("locks", "queue", "operate")
