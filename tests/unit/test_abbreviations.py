"""The lines that routines share (abbreviations.sql), and GO in the scripts for SQL Server: see `sqlsem.sql.fill`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sqlsem import sql

FOLDER = Path(sql.__file__).parent
SERVERS = ("mssql", "postgresql")
FILES = [file for engine in SERVERS for file in sorted((FOLDER / engine).glob("*.sql"))]
SCRIPT = """\
-- Words about the script.

UPDATE {schema}.setting SET value = N'1';
GO

-- Why.
CREATE OR ALTER PROCEDURE {schema}.example AS {begin_inner}
    BEGIN TRY
        SELECT 1;

        SELECT 2;
    {end_try}
END;

-- Another one.
CREATE OR ALTER FUNCTION {schema}.other() RETURNS TABLE AS RETURN (
    SELECT 3 AS value
);
"""
PRINTED = """\
-- Words about the script.

SET QUOTED_IDENTIFIER ON;
SET ANSI_NULLS ON;
GO

UPDATE sqlsem.setting SET value = N'1';
GO

-- Why.
CREATE OR ALTER PROCEDURE sqlsem.example AS
BEGIN
    SET NOCOUNT ON;
    BEGIN TRY
        SELECT 1;

        SELECT 2;
    END TRY
    BEGIN CATCH
        IF ERROR_NUMBER() IN (601, 1204, 1205, 1222)
            THROW 50002, N'sqlsem: busy: other sessions have locked what this call needs; try again', 1;
        THROW;
    END CATCH;
END;
GO

-- Another one.
CREATE OR ALTER FUNCTION sqlsem.other() RETURNS TABLE AS RETURN (
    SELECT 3 AS value
);
GO
"""


def abbreviations(engine: str) -> dict[str, str]:
    """Return the lines of each abbreviation."""
    parts = re.split(r"(?m)^-- name: (\w+)\n", (FOLDER / engine / "abbreviations.sql").read_text(encoding="utf-8"))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_script_is_printed_with_lines_for_abbreviations() -> None:
    assert sql.fill("mssql", SCRIPT) == PRINTED


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_no_abbreviation_is_left_in_a_script(file: Path) -> None:
    text = re.sub(r"--[^\n]*", "", sql.fill(file.parent.name, file.read_text(encoding="utf-8")))
    assert set(re.findall(r"\{[a-z_]+(?::[^{}\n]*)?\}", text)) <= {"{features}", "{x}", "{y}"}


@pytest.mark.parametrize("engine", SERVERS)
def test_each_abbreviation_is_used(engine: str) -> None:
    texts = "".join((FOLDER / engine / f"{name}.sql").read_text(encoding="utf-8") for name in sql.rerunnable(engine))
    assert set(abbreviations(engine)) <= set(re.findall(r"\{(\w+)(?::[^{}]*)?\}", texts))


@pytest.mark.parametrize(
    ("name", "lines"), [item for item in abbreviations("postgresql").items() if item[0] != "lock_timeout"]
)
def test_abbreviation_of_postgresql_says_its_properties(name: str, lines: str) -> None:
    """The reader of a routine sees by the name alone whose rights it has; every search_path is pinned."""
    language, *properties = name.split("_")
    words = f" {' '.join(lines.split())} "
    assert f" LANGUAGE {language} " in words
    assert " SET search_path = pg_catalog, pg_temp " in words
    assert (" SECURITY DEFINER " in words) == ("definer" in properties)
    volatility = {"stable": "STABLE", "immutable": "IMMUTABLE"}
    expected = [volatility[word] for word in properties if word in volatility] or ["VOLATILE"]
    assert re.findall(r" (VOLATILE|STABLE|IMMUTABLE) ", words) == expected
    assert (" SET enable_seqscan = off " in words) == bool({"indexed", "generic"} & set(properties))
    assert (" SET plan_cache_mode = force_generic_plan " in words) == ("generic" in properties)


@pytest.mark.parametrize("file", sorted((FOLDER / "postgresql").glob("*.sql")), ids=lambda file: file.stem)
def test_routine_that_avoids_scans_is_not_compiled(file: Path) -> None:
    """A scan that cannot be avoided counts as very expensive there, and expensive plans are compiled, for seconds."""
    text = file.read_text(encoding="utf-8")
    assert re.findall(r"SET enable_seqscan = off SET enable_bitmapscan = off(?! SET jit = off)", text) == []
    assert len(re.findall(r"SET enable_\w+ = off SET jit", text)) == len(re.findall("SET enable_seqscan", text))
