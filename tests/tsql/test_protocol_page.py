"""docs/reference/protocol.md: the table of procedures, against what is installed."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.engines("mssql")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "protocol.md"
ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| `([^`]*)`[^|]* \| ([a-z, ]+) \|$", re.MULTILINE)
#: Further parameters of procedures that only sqlsem's own calls use, behind the parameters on the page.
OWN = {"@outcome", "@answer", "@own"}


def test_the_parameters(database):
    section = PAGE.read_text(encoding="utf-8").partition("\n## T-SQL\n")[2].partition("\n## ")[0]
    found = {name: row[1] for row in ROW.findall(section) for name in re.findall(r"\w+", row[0])}
    assert {"acquire", "try", "release", "renew", "assert_holding", "may_enter", "status", "reap", "pause"} <= set(
        found
    )
    found["unguard_table"] = "@table"  # which shares its row with guard_table
    for name, parameters in found.items():
        rows = database.rows(
            "SELECT p.name FROM sys.all_parameters AS p WHERE p.object_id = OBJECT_ID(?) AND p.name <> '' "
            "ORDER BY p.parameter_id",
            f"{database.schema}.[{name}]",
        )
        installed, documented = [row[0] for row in rows], re.findall(r"@\w+", parameters)
        assert installed[: len(documented)] == documented, name
        assert set(installed[len(documented) :]) <= OWN - set(documented), name


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
