"""The routines of PostgreSQL and SQL Server: a table in sqlsem/sql/README.md lists the routines of only one server."""

import re
from pathlib import Path

import pytest

import sqlsem.sql

FOLDER = Path(sqlsem.sql.__file__).parent
#: Scripts without routines, or with routines that no user's database has.
OTHERS = {"simulated", "certify", "client"}
ROUTINE = re.compile(
    r"^CREATE(?: OR (?:REPLACE|ALTER))? (?:FUNCTION|PROCEDURE|TRIGGER) \{schema\}\.\[?(\w+)", re.MULTILINE
)


def routines(engine: str) -> set[str]:
    files = [file for file in (FOLDER / engine).glob("*.sql") if file.stem not in OTHERS]
    return {name for file in files for name in ROUTINE.findall(file.read_text(encoding="utf-8"))}


def listed(server: str) -> list[str]:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| {server} \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


@pytest.mark.parametrize(
    ("server", "engine", "other"), [("PostgreSQL", "postgresql", "mssql"), ("SQL Server", "mssql", "postgresql")]
)
def test_routines_of_a_single_server_are_listed_with_a_reason(server: str, engine: str, other: str) -> None:
    assert sorted(listed(server)) == sorted(routines(engine) - routines(other))


def test_servers_share_routines_by_name() -> None:
    assert len(routines("postgresql") & routines("mssql")) > 160


def test_dotnet_client_calls_existing_routines() -> None:
    """The client builds its calls of texts, which no compiler checks: ``prefix + "name…"`` and ``".name(…"``."""
    text = (Path(__file__).resolve().parents[2] / "clients" / "dotnet" / "SqlSem.cs").read_text(encoding="utf-8")
    called = set(re.findall(r'(?:prefix \+ "|"\.)([a-z_]+)(?:\(| \{)', text))
    assert {"register", "register_member", "heartbeat", "wait", "release", "cancel"} <= called
    assert called <= routines("postgresql") | routines("mssql")
