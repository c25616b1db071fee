"""The output of `sqlsem sql mssql`, run batch by batch as sqlcmd runs it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from support import Database, random_name

from sqlsem import cli, sql

pytestmark = pytest.mark.engines("mssql")


@pytest.fixture
def schema(database: Database) -> Iterator[str]:
    name = random_name()
    yield name
    if row(database, f"SELECT SCHEMA_ID(N'{name}')") == (None,):
        return
    connection = database.raw()
    for batch in batches(sql.script("mssql", "drop", schema=name)):
        connection.cursor().execute(batch)
    connection.close()


def batches(text: str) -> list[str]:
    return [batch for batch in re.split(r"(?m)^GO$", text) if batch.strip()]


def printed(schema: str) -> list[str]:
    result = CliRunner().invoke(cli.main, ["--schema", schema, "sql", "mssql"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return batches(result.output)


def row(database: Database, query: str) -> tuple[Any, ...]:
    connection = database.raw()
    try:
        return tuple(connection.cursor().execute(query).fetchone())
    finally:
        connection.close()


def test_printed_scripts_install_everything(database: Database, schema: str) -> None:
    connection = database.raw()
    for batch in printed(schema):
        connection.cursor().execute(batch)
    connection.close()
    (version,) = row(database, f"SELECT value FROM {schema}.setting WHERE name = N'schema_version'")
    assert version == str(sql.LATEST)


def test_printed_scripts_leave_nothing_after_an_error(database: Database, schema: str) -> None:
    connection = database.raw()
    *batches, last = printed(schema)
    for batch in batches:
        connection.cursor().execute(batch)
    with pytest.raises(Exception, match="nothing_of_that_name"):
        connection.cursor().execute("SELECT 1 FROM nothing_of_that_name")
    assert "COMMIT" in last
    connection.close()  # as sqlcmd -b does
    (schema_id,) = row(database, f"SELECT SCHEMA_ID(N'{schema}')")
    assert schema_id is None
