"""ScriptDom's trees as Python objects that know their place in the text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

#: Kind of fragment → its properties that hold fragments, and True for those that hold several.
PROPERTIES: dict[str, dict[str, bool]] = {}


def _properties(kind: Any) -> dict[str, bool]:
    """Return the properties of a type of ScriptDom's that hold fragments."""
    if kind.Name not in PROPERTIES:
        fragment = kind
        while fragment.Name != "TSqlFragment":
            fragment = fragment.BaseType
        PROPERTIES[kind.Name] = {
            str(member.Name): not fragment.IsAssignableFrom(member.PropertyType)
            for member in kind.GetProperties()
            if not member.GetIndexParameters().Length
            and fragment.IsAssignableFrom(next(iter(member.PropertyType.GetGenericArguments()), member.PropertyType))
        }
    return PROPERTIES[kind.Name]


class Node:
    """A fragment of T-SQL: its kind, its parts by name, and its parent. Reads each of ScriptDom's properties once.

    ``node.Expression`` is the part of that name, a list of parts, a value, or None; `get` also returns None for a
    property that the kind does not have.
    """

    def __init__(self, raw: Any, parent: Node | None = None, field: str = "", source: str = "") -> None:
        self.raw, self.parent, self.field, self.source = raw, parent, field, source
        kind = raw.GetType()
        self.kind = str(kind.Name)
        self.line = int(raw.StartLine)
        self._properties = _properties(kind)
        self._words: dict[str, str] = {}
        self._walked: list[Node] = []

    def __repr__(self) -> str:
        return f"<{self.kind} in line {self.line}>"

    def __getattr__(self, name: str) -> Any:
        value = self._wrapped(getattr(self.raw, name), name)
        setattr(self, name, value)
        return value

    def _wrapped(self, value: Any, name: str) -> Any:
        if value is None or isinstance(value, str | int | bool | float):
            return value
        if hasattr(value, "StartLine"):
            return Node(value, self, name, self.source)
        if hasattr(value, "Count"):
            return [self._wrapped(item, name) for item in value]
        return str(value)

    def get(self, name: str) -> Any:
        """Return the property of that name; None if the kind has none."""
        return getattr(self, name) if hasattr(self.raw, name) else None

    def part(self, name: str) -> Node | None:
        """Return the part of that name; None if it is left out."""
        value = getattr(self, name) if self._properties.get(name) is False else None
        return value if isinstance(value, Node) else None

    def parts(self, name: str) -> list[Node]:
        """Return the parts of that name."""
        if name not in self._properties:
            return []
        value = getattr(self, name)
        return value if isinstance(value, list) else [] if value is None else [value]

    def word(self, name: str) -> str:
        """Return a property that is not a fragment: a name, a value, a kind."""
        if name not in self._words:
            value = getattr(self.raw, name, None)
            self._words[name] = "" if value is None else str(value)
        return self._words[name]

    def children(self) -> Iterator[Node]:
        """Yield the parts of this fragment, in the order of the properties."""
        for name in self._properties:
            yield from self.parts(name)

    def walk(self) -> Sequence[Node]:
        """Return this fragment and all beneath it, in the order of the text."""
        if not self._walked:
            self._walked = [self, *(node for child in self.children() for node in child.walk())]
        return self._walked

    def all(self, *kinds: str) -> Iterator[Node]:
        for node in self.walk():
            if node.kind in kinds:
                yield node

    def above(self) -> Iterator[Node]:
        """Yield the fragments around this one, the nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def text(self) -> str:
        """Return the fragment as it is written, in one line."""
        start = self.raw.StartOffset
        text = re.sub(r"--[^\n]*|/\*.*?\*/", " ", self.source[start : start + self.raw.FragmentLength], flags=re.DOTALL)
        return " ".join(text.split())


def object_name(node: Node | None) -> tuple[str, str]:
    """Return schema and name, in small letters, of a SchemaObjectName."""
    if node is None:
        return "", ""
    schema, base = node.part("SchemaIdentifier"), node.part("BaseIdentifier")
    return (schema.word("Value").lower() if schema else "", base.word("Value").lower() if base else "")


def called(node: Node) -> tuple[str, str]:
    """Return schema and name of the procedure that an EXEC of any kind runs; empty for a text or a variable."""
    for reference in node.all("ProcedureReference"):
        return object_name(reference.part("Name"))
    return "", ""


def table_name(node: Node | None) -> str:
    """Return the name of a reference to a table of sqlsem, in small letters; '' for other references."""
    if node is None or node.kind not in ("NamedTableReference", "SchemaObjectFunctionTableReference"):
        return ""
    schema, name = object_name(node.part("SchemaObject"))
    return name if schema == "sqlsem" else ""


def target_of(statement: Node) -> Node | None:
    """Return the table reference that INSERT, UPDATE or DELETE writes; in FROM it is found by its alias."""
    specification = next(statement.all("InsertSpecification", "UpdateSpecification", "DeleteSpecification"), None)
    target = specification.part("Target") if specification else None
    if specification is None or target is None or target.kind != "NamedTableReference":
        return target
    schema, name = object_name(target.part("SchemaObject"))
    clause = specification.part("FromClause")
    if not schema and clause is not None:
        for reference in clause.all("NamedTableReference"):
            alias = reference.part("Alias")
            if alias is not None and alias.word("Value").lower() == name:
                return reference
    return target
