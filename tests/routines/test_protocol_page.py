"""docs/reference/protocol.md, against what is installed."""

import re

import psycopg
import pytest
from support.docs_modules import DOCS, scripts

PAGE = DOCS / "reference" / "protocol.md"


@pytest.mark.engines("postgresql")
def test_shown_roles_are_the_installed_ones(database):
    shown = scripts.installed("postgresql")
    for name in scripts.public():
        rows = database.rows(
            "SELECT substr(r.rolname::text, 8) FROM pg_roles AS r WHERE r.rolname IN "
            "('sqlsem_user', 'sqlsem_putter', 'sqlsem_worker', 'sqlsem_operator', 'sqlsem_reader') AND "
            "(SELECT bool_and(has_function_privilege(r.oid, p.oid, 'EXECUTE')) FROM pg_proc AS p "
            " WHERE p.pronamespace = 'sqlsem'::regnamespace AND p.proname = ?)",
            name,
        )
        assert {row[0] for row in rows} == set(shown[name].roles), name


@pytest.mark.engines("postgresql")
def test_psql_examples_of_the_page_run(database, name):
    """Run statement by statement, in one session; only the positions are substituted."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## PostgreSQL\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sql\n(.*?)```", section, re.DOTALL)
    position = None
    with database.raw() as connection, psycopg.ClientCursor(connection) as cursor:
        for statement in filter(None, map(str.strip, re.sub(r"--.*", "", block).split(";"))):
            if statement.startswith("UPDATE"):
                continue  # the reader's own table
            text = re.sub(r"\b81[0-9]\b", str(position), statement)
            text = re.sub(r"'(etl|dim_customer|export)'", lambda match: f"'{name(match[1])}'", text)
            cursor.execute(text)
            row = cursor.fetchone() if cursor.description else None
            if "sqlsem.acquire" in text or "sqlsem.try" in text:
                assert row is None or row[0] == 0, text
                position = row[1] if row else position
                if row and "BEGIN" not in block[:5] and "try" in text:
                    granted_position = position
            elif row is not None:
                assert row == (0,), text
            if statement == "COMMIT":
                cursor.execute(f"SELECT sqlsem.release('{name('etl')}', {granted_position})")
        cursor.execute(f"SELECT sqlsem.release('{name('dim_customer')}')")
    assert database.queue(name) == []


@pytest.mark.engines("mssql")
def test_shown_parameters_are_the_installed_ones(database):
    for name in scripts.public():
        shown = re.findall(r"@\w+(?= \w+)", scripts.installed("mssql")[name].signature)
        rows = database.rows(
            "SELECT p.name FROM sys.all_parameters AS p WHERE p.object_id = OBJECT_ID(?) AND p.name <> '' "
            "ORDER BY p.parameter_id",
            f"{database.schema}.[{name}]",
        )
        assert [row[0] for row in rows] == shown, name


@pytest.mark.engines("mssql")
def test_tsql_example_of_the_page_runs(database):
    section = PAGE.read_text(encoding="utf-8").partition("\n## T-SQL\n")[2].partition("\n## ")[0]
    (text,) = re.findall(r"```sql\n(.*?)```", section, re.DOTALL)
    connection = database.raw()
    cursor = connection.execute(text.replace("sqlsem.", f"{database.schema}."))
    while cursor.nextset():
        pass
    connection.close()
    assert database.queue("etl") == []
    (row,) = database.rows(
        f"SELECT TOP (1) outcome FROM {database.beside('history')} WHERE resource_id = N'etl' ORDER BY ended_at DESC"
    )
    assert row == ("released",)
