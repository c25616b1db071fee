"""Hold the data of `tsqlflow`: the objects of the scripts, and facts about variables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import tsqlfunctions
from tsqltypes import CATALOG, DATABASE, MAX, STRINGS, Label, Type, Value

Finding = tuple[str, int, str]
Columns = dict[str, Value]
PROCEDURES = ("CreateProcedureStatement", "AlterProcedureStatement", "CreateOrAlterProcedureStatement")
FUNCTIONS = ("CreateFunctionStatement", "CreateOrAlterFunctionStatement")
#: The tables of a FROM: alias → columns; None: an unknown table.
Frame = dict[str, Columns | None]


def named(identifier: Any) -> str:
    return str(identifier.Value).lower()


def base(name: Any) -> tuple[str, str]:
    """Schema and name of an object."""
    schema = name.SchemaIdentifier
    return named(schema) if schema is not None else "", named(name.BaseIdentifier)


def type_of(node: Any, cast: bool = False) -> Type | None:
    if node.kind == "UserDataTypeReference":
        return Type("nvarchar", 128) if named(node.Name.BaseIdentifier) == "sysname" else None
    if node.kind != "SqlDataTypeReference":
        return None
    name = str(node.SqlDataTypeOption).lower()
    name = {"numeric": "decimal", "integer": "int", "rowversion": "timestamp"}.get(name, name)
    sizes = [MAX if parameter.kind == "MaxLiteral" else int(parameter.Value) for parameter in node.Parameters]
    if name in STRINGS or "binary" in name:
        return Type(name, sizes[0] if sizes else 30 if cast else 1)
    if name == "decimal":
        return Type(name, *(sizes or [18]))
    if name in ("datetime2", "time", "datetimeoffset"):
        return Type(name, 0, sizes[0] if sizes else 7)
    return Type(name)


@dataclass(frozen=True)
class Bound:
    """The values of a variable that a procedure accepts: characters, numbers from low to high. None: no bound."""

    size: int | None = None
    low: int | None = None
    high: int | None = None

    def joined(self, other: Bound) -> Bound:
        def both(first: int | None, second: int | None, choose: Any) -> int | None:
            return second if first is None else first if second is None else choose(first, second)

        return Bound(both(self.size, other.size, min), both(self.low, other.low, min), both(self.high, other.high, max))


@dataclass
class Facts:
    """The findings of an earlier pass about the variables of a procedure."""

    #: Variable → the union of its values.
    assigned: dict[str, Value] = field(default_factory=dict)
    #: Variable → the bound that a comparison sets.
    bounds: dict[str, Bound] = field(default_factory=dict)
    looked: bool = False


class Known:
    """The objects of the scripts: tables, views, functions, procedures."""

    def __init__(self) -> None:
        self.facts: dict[str, Facts] = {}
        #: Procedure and parameter → the value of the first call; a deadline, if all calls give one.
        self.given: dict[str, Value] = {}
        self.given_before: dict[str, Value] = {}
        self.tables: dict[str, Columns] = {}
        self.catalog: dict[str, Columns] = {}
        self.views: dict[str, Any] = {}  # and inline functions
        self.scalars: dict[str, Value] = {}
        #: Procedure or function → parameter → its type, True if it is OUTPUT, its name as it is written.
        self.parameters: dict[str, dict[str, tuple[Type | None, bool, str]]] = {}
        self.found: dict[str, Columns | None] = {}
        self.clustered: set[str] = set()

    def add(self, statement: Any, catalog: bool = False) -> None:
        kind = statement.kind
        if kind == "CreateTableStatement":
            schema, name = base(statement.SchemaObjectName)
            columns = declared(statement.Definition, DATABASE)
            if catalog:
                self.catalog[name] = {
                    column: tsqlfunctions.of_catalog(name, column, value.type)
                    for column, value in columns.items()
                    if value.type is not None
                }
            elif schema == "sqlsem":
                self.tables.setdefault(name, columns)
        elif kind == "AlterTableAddTableElementStatement":
            self.tables.setdefault(base(statement.SchemaObjectName)[1], {}).update(
                declared(statement.Definition, DATABASE)
            )
        elif kind == "CreateViewStatement":
            self.views[base(statement.SchemaObjectName)[1]] = statement
        elif kind in FUNCTIONS:
            name = base(statement.Name)[1]
            self.parameters[name] = parameters(statement)
            if statement.ReturnType.kind == "SelectFunctionReturnType":
                self.views[name] = statement
            elif statement.ReturnType.kind == "ScalarFunctionReturnType":
                result = type_of(statement.ReturnType.DataType)
                self.scalars[name] = Value(result, Label(1, DATABASE) if result is not None and result.string else None)
        elif kind in PROCEDURES:
            self.parameters[base(statement.ProcedureReference.Name)[1]] = parameters(statement)
        elif kind == "CreateIndexStatement" and statement.Clustered:
            self.clustered.add(base(statement.OnName)[1])


def parameters(statement: Any) -> dict[str, tuple[Type | None, bool, str]]:
    return {
        named(parameter.VariableName): (
            type_of(parameter.DataType),
            str(parameter.Modifier) == "Output",
            parameter.VariableName.Value,
        )
        for parameter in statement.Parameters
    }


def declared(definition: Any, default: str) -> Columns:
    """The columns of a table that a script makes, or of a table variable."""
    columns: Columns = {}
    for column in definition.ColumnDefinitions:
        kind = type_of(column.DataType) if column.DataType is not None else None
        label = None
        if kind is not None and kind.string:
            label = Label(1, column.Collation.Value if column.Collation is not None else default)
        columns[named(column.ColumnIdentifier)] = Value(kind, label, column=True)
    return columns


def number(node: Any) -> int | None:
    if node.kind == "UnaryExpression" and "Negative" in node.UnaryExpressionType:
        inner = number(node.Expression)
        return -inner if inner is not None else None
    if node.kind == "RealLiteral" or node.kind == "NumericLiteral":
        return int(float(node.Value))
    return int(node.Value) if node.kind == "IntegerLiteral" else None


def measure(node: Any) -> tuple[Any, int, int] | None:
    """A variable; the bytes of a character if its length is meant, or 0; and the number added to it."""
    if node.kind == "VariableReference":
        return node, 0, 0
    if node.kind == "CoalesceExpression":
        return measure(node.Expressions[0])
    if node.kind != "FunctionCall" or not node.Parameters:
        return None
    name, first = node.FunctionName.Value.upper(), node.Parameters[0]
    if name == "ABS":
        return measure(first)
    if name not in ("LEN", "DATALENGTH"):
        return None
    unit = 1 if name == "LEN" else 2
    if first.kind == "FunctionCall" and first.FunctionName.Value.upper() == "CONCAT":
        first = first.Parameters[0]
        return (first, unit, 1) if first.kind == "VariableReference" else None
    return (first, unit, 0) if first.kind == "VariableReference" else None


def mentions(node: Any, name: str) -> bool:
    if node is None:
        return False
    if node.kind == "VariableReference":
        return bool(node.Name.lower() == name.lower())
    return any(mentions(child, name) for child in node.children())


def over(node: Any) -> tuple[str, Bound, Bound] | None:
    """Return the variable of a condition, its bound where the condition is true, and its bound elsewhere."""
    if node.kind == "BooleanParenthesisExpression":
        return over(node.Expression)
    if node.kind != "BooleanComparisonExpression" or node.FirstExpression.kind != "VariableReference":
        return None
    limit, how = number(node.SecondExpression), node.ComparisonType
    if limit is None or how not in ("GreaterThan", "GreaterThanOrEqualTo", "LessThan", "LessThanOrEqualTo"):
        return None
    first, second = (Bound(low=limit), Bound(high=limit)) if "Greater" in how else (Bound(high=limit), Bound(low=limit))
    return node.FirstExpression.Name.lower(), first, second


def narrowed(value: Value, bound: Bound) -> Value:
    kind = value.type
    if kind is None:
        return value
    if kind.string:
        return value if bound.size is None else replace(value, type=replace(kind, size=min(kind.size, bound.size)))
    if kind.name in ("float", "real"):
        return replace(value, low=bound.low, high=bound.high)
    limits = value.range
    if limits is None:
        return value
    low = limits[0] if bound.low is None else max(limits[0], bound.low)
    high = limits[1] if bound.high is None else min(limits[1], bound.high)
    if bound.low is None and bound.high is not None and low < -high <= 0:
        low = -high  # code that tests for a too large number expects no huge negative number
    return replace(value, low=low, high=high) if low <= high else value


def collated(name: str) -> str:
    return {"database_default": DATABASE, "catalog_default": CATALOG}.get(name.lower(), name)


def calculated(sign: str, first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int] | None:
    """The range of an expression."""
    pairs = [(a, b) for a in first for b in second]
    if sign == "+":
        return first[0] + second[0], first[1] + second[1]
    if sign == "-":
        return first[0] - second[1], first[1] - second[0]
    if sign == "*":
        return min(a * b for a, b in pairs), max(a * b for a, b in pairs)
    if sign == "/" and second[0] > 0:
        return min(int(a / b) for a, b in pairs), max(int(a / b) for a, b in pairs)
    if sign == "%" and second[0] > 0:
        top = second[1] - 1
        return (0 if first[0] >= 0 else -top), top
    return None


def large(limits: tuple[int, int]) -> bool:
    return max(abs(limit) for limit in limits) >= 2**30
