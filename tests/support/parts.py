"""Read the names that the SQL scripts of features make and use from their text."""

from __future__ import annotations

import functools
import re

from sqlsem import sql

MADE = re.compile(
    r"^[ \t]*(?:CREATE(?: OR (?:REPLACE|ALTER))?|ALTER) (?:TABLE|VIEW|SEQUENCE|FUNCTION|PROCEDURE|TRIGGER)"
    r" (?:sqlsem\.)?\[?(\w+)",
    re.MULTILINE,
)


@functools.cache
def names_in(text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the tables and routines that a script creates, and all names that it uses.

    Comments and sentences in strings do not count: they may advise features that are not installed.
    """
    text = re.sub(
        r"--[^\n]*|'(?:[^']|'')*'",
        lambda match: match[0] if match[0][0] == "'" and " " not in match[0] else "",
        text,
    )
    return frozenset(MADE.findall(text)), frozenset(re.findall(r"\bsqlsem\.\[?(\w+)", text))


@functools.cache
def made_and_named(engine: str, features: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return `names_in` of all scripts of these features."""
    scripts = ("schema", *sql.rerunnable(engine, features))
    pairs = [names_in(sql.script(engine, script, features=features)) for script in scripts]
    return frozenset().union(*(made for made, _ in pairs)), frozenset().union(*(named for _, named in pairs))
