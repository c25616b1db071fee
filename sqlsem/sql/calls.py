"""Writes the client's calls of routines, from the signatures of the routines.

In client.sql a line ``-- calls: heartbeat, cancel`` stands for a statement for each of these routines, under the
routine's name. It has a mark for each parameter, and returns the routine's answer. A statement of a line
``-- operators' calls: revoke`` has one more parameter on PostgreSQL, the first: the caller's process, for the record
of operators' actions.
"""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["Routines", "expand_calls", "listed_calls"]

_CALLS = re.compile(r"^-- (operators' )?calls: (.+)\n", re.MULTILINE)
#: The beginnings of definitions, by which the search in long scripts is fast.
_FUNCTION = re.compile(r"CREATE OR REPLACE FUNCTION \{schema\}\.(\w+)")
_PROCEDURE = re.compile(r"ALTER PROCEDURE \{schema\}\.(\[?\w+\]?)")
#: Parentheses with, inside them, parentheses without others.
_PARENTHESES = r"\(([^()]*(?:\([^()]*\)[^()]*)*)\)"
_PARAMETERS = re.compile(rf"\s*{_PARENTHESES}(?:\s*RETURNS TABLE\s*{_PARENTHESES})?")
_PROCEDURE_PARAMETERS = re.compile(r"(.*?)\bAS\b", re.DOTALL)
_COMMENT_OR_TEXT = re.compile(r"--.*|'[^']*'")
#: A comma between two parameters.
_COMMA = re.compile(r",(?![^()]*\))")
#: The types of PostgreSQL whose names are keywords of its SQL. (Any other type needs its schema, see client.sql.)
_KEYWORDS = frozenset({"bigint", "boolean", "float", "integer", "varchar"})


class Routines:
    """The routines that some scripts define."""

    def __init__(self, scripts: str) -> None:
        self._scripts = scripts
        self._places: dict[str, list[re.Match[str]]] = {}
        for match in [*_FUNCTION.finditer(scripts)] or _PROCEDURE.finditer(scripts):  # (no engine has both)
            self._places.setdefault(match[1].strip("[]"), []).append(match)

    def call(self, name: str, is_operators: bool) -> str:
        """Return the statement that calls a routine. If several have the name: the one with most parameters."""
        return max((self._call(place, is_operators) for place in self._places[name]), key=_count_marks)

    def _call(self, place: re.Match[str], is_operators: bool) -> str:
        if place.re is _FUNCTION:
            definition = _PARAMETERS.match(self._scripts, place.end())
            assert definition is not None
            return _function_call(place[1], _items(definition[1]), _items(definition[2] or ""), is_operators)
        definition = _PROCEDURE_PARAMETERS.match(self._scripts, place.end())
        assert definition is not None
        return _procedure_call(place[1], _items(definition[1]))


def listed_calls(line: str) -> list[str]:
    """Return the names of the calls that a line of client.sql lists."""
    calls = _CALLS.match(line)
    return [] if calls is None else calls[2].split(", ")


def expand_calls(text: str, routines: Callable[[], Routines]) -> str:
    """Replace the lists of calls in client.sql by the statements for which they stand."""

    def statements(line: re.Match[str]) -> str:
        calls = [(name, routines().call(name, bool(line[1]))) for name in listed_calls(line[0])]
        return "\n".join(f"-- name: {name}\n{call}\n" for name, call in calls)

    return _CALLS.sub(statements, text)


def _function_call(name: str, parameters: list[list[str]], table: list[list[str]], is_operators: bool) -> str:
    """Return the call of a function of PostgreSQL. A table or several OUT parameters are read by their names."""
    columns = [words[0] for words in table] + [words[1] for words in parameters if words[0] == "OUT"]
    types = [words[1] for words in parameters if words[0] != "OUT"]
    marks = [f"%s::{'' if kind.strip('[]') in _KEYWORDS else 'pg_catalog.'}{kind}" for kind in types]
    call = f"{{schema}}.{name}({', '.join(marks)})"
    if is_operators:
        return f"SELECT pg_catalog.set_config('sqlsem.client', %s, true), {call}"
    return f"SELECT {', '.join(columns)}\nFROM {call}" if len(columns) > 1 else f"SELECT {call}"


def _procedure_call(name: str, parameters: list[list[str]]) -> str:
    """Return the call of a procedure of SQL Server. It passes the parameters before the first OUTPUT parameter, and
    asks for the answer as a result set.
    """
    values = []
    for words in parameters:
        if words[0] == "@answer" or words[-1] == "OUTPUT":
            break
        values.append("?")
    names = [words[0] for words in parameters]
    if "@answer" in names:
        values.append("1" if names.index("@answer") == len(values) else "@answer = 1")
    return f"EXEC {{schema}}.{name} {', '.join(values)}".rstrip()


def _items(text: str) -> list[list[str]]:
    """Return the words of each parameter or column in a list of SQL."""
    items = [item.split() for item in _COMMA.split(_COMMENT_OR_TEXT.sub("", text))]
    return [words for words in items if words]


def _count_marks(statement: str) -> int:
    return statement.count("%s") + statement.count("?")
