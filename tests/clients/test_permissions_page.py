"""The table of roles and routines in docs/reference/tables.md, cell by cell, against what is installed."""

import re
from pathlib import Path

import pytest

from sqlsem import sql

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "tables.md"
T_SQL_ONLY = {"put_task", "claim_tasks"}
MAY = {"": False, "yes": True, "own": True}


def table():
    """Return the roles' rights to each routine on the page."""
    text = PAGE.read_text(encoding="utf-8").partition("\n| routines | ")[2].partition("\n\n")[0].splitlines()
    roles = [role.strip() for role in text[0].strip("|").split("|")]
    rows_by_routine = {}
    for line in text[2:]:
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert len(cells) == len(roles), line
        for name in re.findall(r"`(\w+)`", names):
            rows_by_routine[name] = {role: MAY[cell] for role, cell in zip(roles, cells, strict=True)}
    return rows_by_routine


@pytest.mark.engines("postgresql")
def test_the_table_of_routines(database):
    page = {name: may for name, may in table().items() if name not in T_SQL_ONLY}
    assert len(page) > 30, "the table was not understood"
    installed = {name: {} for name in page}
    for name, role, may in database.rows(
        "SELECT p.proname::text, substr(r.rolname::text, 8), has_function_privilege(r.oid, p.oid, 'EXECUTE') "
        "FROM pg_proc AS p CROSS JOIN pg_roles AS r "
        "WHERE p.pronamespace = 'sqlsem'::regnamespace AND r.rolname IN "
        "('sqlsem_user', 'sqlsem_putter', 'sqlsem_worker', 'sqlsem_operator', 'sqlsem_reader')"
    ):
        if name in page:
            installed[name][role] = may
    assert installed == page


def test_the_table_and_t_sql():
    """The rights in the T-SQL script, read without a server. The script lacks some routines of PostgreSQL."""
    script = sql.script("mssql", "permissions").partition("INSERT INTO @right")[2].partition("UNION ALL")[0]
    granted = dict(re.findall(r"\(N'(\w+)', N'([upwor]+)'\)", script))
    page = table()
    assert len(page.keys() & granted) > 30, "the script was not understood"
    for name in page.keys() & granted:
        assert granted[name] == "".join(role[0] for role, may in page[name].items() if may), name
