"""docs/reference/protocol.md, line by line, against what is installed."""

import re
from pathlib import Path

import psycopg
import pytest

pytestmark = pytest.mark.engines("postgresql")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "protocol.md"
ROW = re.compile(r"^\| `(\w+)`( \(procedure\))? \| (?:`([^`]*)` )?\| (.*) \| ([a-z, ]+) \|$", re.MULTILINE)
MODES = {"i": "", "b": "INOUT "}


def section():
    return PAGE.read_text(encoding="utf-8").partition("\n## PostgreSQL\n")[2].partition("\n## ")[0]


def signatures():
    return {
        (name, bool(procedure)): (parameters or "", roles)
        for name, procedure, parameters, _, roles in ROW.findall(section())
    }


def installed(database, name, procedure):
    """Return the parameters of a routine in the page's notation."""
    rows = database.rows(
        "SELECT p.oid::integer, p.proargmodes::text[], p.proargnames, "
        "coalesce(p.proallargtypes, p.proargtypes)::oid[]::regtype[]::text[], "
        "p.pronargs, p.prosrc FROM pg_proc p WHERE pronamespace = 'sqlsem'::regnamespace AND proname = ? "
        "AND (prokind = 'p') = ? "
        "AND (proargnames[1] IS NULL OR proargnames[1] NOT LIKE 'p\\_%%' OR proname LIKE '%%guard%%')",
        name,
        procedure,
    )
    assert len(rows) == 1, f"{name}: {len(rows)} of it"
    oid, modes, names, types, _, _ = rows[0]
    written = []
    for number, kind in enumerate(types):
        mode = modes[number] if modes else "i"
        if mode not in MODES:
            continue
        ((default,),) = database.rows("SELECT pg_get_function_arg_default(?::oid, ?)", oid, number + 1)
        text = f"{MODES[mode]}{names[number]} {kind}"
        if default is not None:
            default = re.sub(r"::[a-z ]+$", "", default).strip("()")
            default = re.sub(r"^'(-?\d+)'$", r"\1", default)
            text += f" = {default}"
        written.append(text)
    return ", ".join(written)


def test_every_signature(database):
    page = signatures()
    assert len(page) == 18, "the table was not understood"
    for (name, procedure), (parameters, _) in page.items():
        assert installed(database, name, procedure) == parameters, name


def test_every_role(database):
    for (name, procedure), (_, roles) in signatures().items():
        may = {
            role
            for role in ("user", "putter", "worker", "operator", "reader")
            if all(
                row[0]
                for row in database.rows(
                    "SELECT has_function_privilege('sqlsem_' || ?, oid, 'EXECUTE') FROM pg_proc "
                    "WHERE pronamespace = 'sqlsem'::regnamespace AND proname = ? AND (prokind = 'p') = ?",
                    role,
                    name,
                    procedure,
                )
            )
        }
        granted = {part for part in roles.split(", ") if not part.startswith("and ")}
        assert may == granted | {"operator"}, name


def test_the_columns_of_status(database):
    text = re.search(r"`status` has the columns (.*?)\.\n\n", section(), re.DOTALL).group(1)
    names = re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", text, flags=re.DOTALL))
    with database.raw() as connection:
        columns = [column.name for column in connection.execute("SELECT * FROM sqlsem.status()").description]
    assert names == columns


def test_the_examples_run(database, name):
    """Run statement by statement, in one session; only the positions are substituted."""
    blocks = re.findall(r"```sql\n(.*?)```", section(), re.DOTALL)
    assert len(blocks) == 2
    position = None
    with database.raw() as connection, psycopg.ClientCursor(connection) as cursor:
        for block in blocks:
            whole = [block] if block.startswith("DO") else re.sub(r"--.*", "", block).split(";")
            for statement in filter(None, map(str.strip, whole)):
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
