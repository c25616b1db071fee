"""docs/reference/protocol.md: the T-SQL example and the parameters, against what is installed."""

import re

import pytest
from support.docs_modules import DOCS, scripts

pytestmark = pytest.mark.engines("mssql")

PAGE = DOCS / "reference" / "protocol.md"


def test_shown_parameters_are_the_installed_ones(database):
    for name in scripts.public():
        shown = re.findall(r"@\w+(?= \w+)", scripts.installed("mssql")[name].signature)
        rows = database.rows(
            "SELECT p.name FROM sys.all_parameters AS p WHERE p.object_id = OBJECT_ID(?) AND p.name <> '' "
            "ORDER BY p.parameter_id",
            f"{database.schema}.[{name}]",
        )
        assert [row[0] for row in rows] == shown, name


def test_the_example_runs(database):
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
