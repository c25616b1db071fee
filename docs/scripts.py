"""Reads the scripts of SQL for the reference: the signatures, comments and roles of routines, and the tables.

The table "Routines" of docs/reference/protocol.md names the public routines; the directive ``sql-routines`` renders
them. All other routines are internal, or for clients (docs/contributing/write-a-client.md). The table "Tables" of
docs/reference/tables.md names the tables that the directive ``sql-tables`` renders.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from sqlsem import sql

REFERENCE = Path(__file__).resolve().parent / "reference"
ROLES = {"u": "user", "p": "putter", "w": "worker", "o": "operator", "r": "reader"}
#: The comment of a routine, and its definition up to its options or its body.
_ROUTINE = re.compile(
    r"(?P<comment>(?:^--.*\n)*)^CREATE OR (?:REPLACE|ALTER) "
    r"(?P<signature>(?:PROCEDURE|FUNCTION) sqlsem\.\[?(?P<name>\w+)\]?(?!\S*\$)[^;]*?)"
    r"(?=\s+(?:LANGUAGE|AS|WITH EXECUTE)\b)",
    re.MULTILINE,
)
_TABLE = re.compile(r"^CREATE TABLE sqlsem\.(\w+) \(\n.*?^\)", re.MULTILINE | re.DOTALL)
_RIGHTS = {
    "postgresql": re.compile(r"jsonb_build_array\('([upwor]+)', ARRAY\[([^]]*)\]"),
    "mssql": re.compile(r"\(N'(\w+)', N'([upwor]+)'\)"),
}


class Routine(NamedTuple):
    """A routine of one engine."""

    name: str
    #: From its kind to its result, as the script has it.
    signature: str
    #: The paragraphs and lists of the comment above it.
    comment: list[str | list[str]]
    #: The roles that may call it, without the schema's name.
    roles: tuple[str, ...]


def _section(page: str, heading: str) -> str:
    """Return the text under a heading of a page of the reference."""
    text = (REFERENCE / page).read_text(encoding="utf-8")
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def public() -> list[str]:
    """Return the names of the public routines."""
    rows = re.findall(r"^\| .*? \| (.*) \|$", _section("protocol.md", "Routines"), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def tables() -> dict[str, str]:
    """Return the definitions of the tables that the page names, for PostgreSQL; other engines have the same columns."""
    found = {match[1]: match[0] for match in _TABLE.finditer(sql.script("postgresql", "schema"))}
    return {name: found[name] for name in re.findall(r"^\| `(\w+)` \|", _section("tables.md", "Tables"), re.MULTILINE)}


def installed(engine: str) -> dict[str, Routine]:
    """Return the routines of an engine. Of several with one name: the last, which is the one for sessions."""
    rights = granted(engine)
    routines = {}
    for script in sql.rerunnable(engine):
        for match in _ROUTINE.finditer(sql.script(engine, script)):
            name = match["name"]
            signature = re.sub(r" *--.*", "", match["signature"])
            routines[name] = Routine(name, signature, parse_comment(match["comment"]), rights.get(name, ()))
    return routines


def granted(engine: str) -> dict[str, tuple[str, ...]]:
    """Return the roles that may call each routine, by the script of permissions."""
    found: dict[str, tuple[str, ...]] = {}
    text = sql.script(engine, "permissions").partition("SELECT N'SELECT'")[0]
    for first, second in _RIGHTS[engine].findall(text):
        letters, names = (first, re.findall(r"'(\w+)'", second)) if engine == "postgresql" else (second, [first])
        found |= {name: tuple(ROLES[letter] for letter in letters) for name in names}
    return found


def parse_comment(text: str) -> list[str | list[str]]:
    """Return the paragraphs of a comment up to its first empty line. Indented lines are the items of a list."""
    blocks: list[str | list[str]] = []
    for line in text.splitlines():
        words = line.removeprefix("--")
        if not words:
            break
        last = blocks[-1] if blocks else None
        if words.startswith("   "):
            if not isinstance(last, list):
                blocks.append(last := [])
            last.append(words.strip())
        elif isinstance(last, str):
            blocks[-1] = last + words
        else:
            blocks.append(words.strip())
    return blocks
