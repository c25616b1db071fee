"""Follow types and collation labels (`tsqltypes`) through all T-SQL of the project, over ScriptDom's trees.

Every column, variable, parameter, literal and function result has its type, its label and, for a number, its range. The
findings: two collations in a place that takes one (468, 457, 451), implicit conversions that can fail or lose data,
text that is longer than its target, sums and products that overflow int, DATEDIFF and DATEADD that overflow (535,
8115), index keys over 900 or 1,700 bytes (1946), and names of variables in another case.

The collations of a database are names here that stand for those of each kind of database (`tsqltypes.DATABASES`): one
walk serves all of them, and a conflict names the databases that have it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tsqlfunctions
from tsqlknown import (
    Bound,
    Columns,
    Facts,
    Finding,
    Frame,
    Known,
    calculated,
    collated,
    large,
    measure,
    mentions,
    named,
    narrowed,
    number,
    over,
    type_of,
)
from tsqltypes import (
    BOUNDS,
    DATES,
    LITERAL,
    MAX,
    NATIONAL,
    NUMBERS,
    STRINGS,
    UNKNOWN,
    Label,
    Type,
    Value,
    combined,
    lossy,
    merged,
    of,
    shown,
)


class Expressions:
    """One batch."""

    def __init__(self, known: Known, file: str, facts: Facts | None = None, name: str = "") -> None:
        self.known, self.file, self.name = known, file, name
        #: The facts of the pass before, and of this pass.
        self.before, self.now = facts or Facts(), Facts()
        self.local: set[str] = set()
        #: The bounds of variables in a branch of CASE.
        self.branch: dict[str, Bound] = {}
        self.loops = 0
        self.findings: list[Finding] = []
        self.variables: dict[str, Value] = {}
        self.written: dict[str, str] = {}
        #: Table variables: by their contents, and as they are declared; and what an alias stands for.
        self.tables: dict[str, Columns] = {}
        self.written_tables: dict[str, Columns] = {}
        self.aliases: dict[str, str] = {}
        self.result: Type | None = Type("int")
        self.trigger: Columns | None = None
        self.ctes: dict[str, Columns | None] = {}

    def say(self, node: Any, message: str) -> None:
        self.findings.append((self.file, node.line, message))

    def query(self, node: Any, scopes: list[Frame]) -> list[tuple[str, Value]] | None:
        raise NotImplementedError

    def selected(self, statement: Any, scopes: list[Frame]) -> list[tuple[str, Value]] | None:
        raise NotImplementedError

    # -- rules ---------------------------------------------------------------------------------------------------------

    def together(self, node: Any, what: str, values: list[Value]) -> Label | None:
        """Return the label of texts that meet; None if they must not."""
        labels = [value.label for value in values if value.label is not None and (value.string or value.type is None)]
        label, wrong = combined(labels)
        if wrong:
            self.say(node, f"collation conflict in {what}: {wrong}")
            return None
        return label

    def compare(self, node: Any, what: str, values: list[Value]) -> None:
        self.together(node, what, values)
        target = merged(values).type
        if target is None:
            return
        for value in values:
            wrong = (
                ""
                if value.type is not None and not target.string and value.type.name in NUMBERS
                else lossy(value, target)
            )
            if wrong:
                self.say(node, f"in {what}, {wrong}")
            elif (
                value.column
                and value.string
                and value.type is not None
                and value.type.name not in NATIONAL
                and target.name in NATIONAL
            ):
                self.say(
                    node,
                    f"in {what}, the column is converted to {target}, and its indexes are of no use: give {value.type}",
                )

    def one_type(self, node: Any, what: str, values: list[Value]) -> Value:
        """Return the type of CASE, COALESCE, UNION, VALUES: each branch becomes the type of all."""
        label = self.together(node, what, values)
        result = merged(values)
        if result.type is not None:
            for value in values:
                wrong = lossy(value, result.type)
                if wrong:
                    self.say(node, f"in {what}, {wrong}")
        return replace(result, label=label if result.string else None)

    def assign(self, node: Any, what: str, value: Value, target: Type | None, bound: Bound | None = None) -> None:
        if target is None or value.type is None or value.null:
            return
        if bound is not None and bound.size is not None and target.string and bound.size < target.size:
            value = replace(value, text=None, type=Type(value.type.name)) if value.string else value
            # (A text that is cut is still too long, and refused.)
        wrong = lossy(value, target)
        if wrong:
            self.say(node, f"{what}: {wrong}")
        elif target.string and (value.string or "binary" in value.type.name) and shown(value) > target.size:
            self.say(
                node, f"{what}: up to {shown(value) if shown(value) < MAX else 'max'} characters are cut to {target}"
            )
        elif target.name not in STRINGS and "binary" in target.name and value.type.size > target.size:
            self.say(node, f"{what}: {value.type} is cut to {target}")

    # -- names ---------------------------------------------------------------------------------------------------------

    def variable(self, node: Any, name: str) -> Value:
        written = self.written.setdefault(name.lower(), name)
        if written != name:
            self.say(node, f"{name} is declared as {written}: another name where case counts")
        value = self.variables.get(name.lower(), UNKNOWN)
        if name.lower() in self.local:
            value = self.learnt(name.lower(), value)
        for bound in (self.before.bounds.get(name.lower()), self.branch.get(name.lower())):
            if bound is not None:
                value = narrowed(value, bound)
        return value

    def learnt(self, name: str, value: Value) -> Value:
        """Return the value of a variable, or a column of a table variable, from the pass before."""
        known = self.before.assigned.get(name)
        if known is None or known.type is None:
            # (In the first pass no text is known yet: texts grow from one pass to the next.)
            empty = value.string and not self.before.looked and value.type is not None
            return replace(value, type=Type(value.type.name)) if empty and value.type is not None else value
        return replace(
            narrowed(value, Bound(shown(known), *(known.range or (None, None)))),
            deadline=known.deadline,
            ascii=known.ascii,
        )

    def table(self, schema: str, name: str) -> Columns | None:
        if schema == "sys":
            return self.known.catalog.get(name)
        if schema not in ("sqlsem", ""):
            return None
        if name in self.known.views:
            if name not in self.known.found:
                self.known.found[name] = None
                statement = self.known.views[name]
                inner = type(self)(self.known, self.file)
                if statement.kind != "CreateViewStatement":
                    inner.declare(statement.Parameters)
                    query = statement.ReturnType.SelectStatement
                else:
                    query = statement.SelectStatement
                self.known.found[name] = inner.columns(inner.selected(query, []))
            return self.known.found[name]
        return self.known.tables.get(name) if schema == "sqlsem" else None

    @staticmethod
    def columns(selected: list[tuple[str, Value]] | None) -> Columns | None:
        return None if selected is None else {name: value.as_column() for name, value in selected}

    def column(self, node: Any, scopes: list[Frame]) -> Value:
        if node.MultiPartIdentifier is None:
            return UNKNOWN
        parts = [named(identifier) for identifier in node.MultiPartIdentifier.Identifiers]
        for frame in reversed(scopes):
            if len(parts) > 1:
                if parts[-2] in frame:
                    there = frame[parts[-2]]
                    return UNKNOWN if there is None else there.get(parts[-1], UNKNOWN)
            else:
                for there in frame.values():
                    if there is not None and parts[0] in there:
                        return there[parts[0]]
                if None in frame.values():
                    return UNKNOWN
        return UNKNOWN

    # -- expressions ---------------------------------------------------------------------------------------------------

    def value(self, node: Any, scopes: list[Frame]) -> Value:
        if node is None:
            return UNKNOWN
        method = getattr(self, f"of_{node.kind}", None)
        if method is None:
            for child in node.children():
                self.any(child, scopes)
            return UNKNOWN
        result: Value = method(node, scopes)
        collation = node.get("Collation")
        if collation is not None:
            result = replace(result, label=Label(3, collated(collation.Value)))
        return result

    def of_ColumnReferenceExpression(self, node: Any, scopes: list[Frame]) -> Value:
        return self.column(node, scopes)

    def of_IntegerLiteral(self, node: Any, scopes: list[Frame]) -> Value:
        number = int(node.Value)
        name = "int" if number < 2**31 else "bigint" if number < 2**63 else "decimal"
        return of(name, low=number, high=number) if name != "decimal" else of(name, len(node.Value))

    def of_NumericLiteral(self, node: Any, scopes: list[Frame]) -> Value:
        whole, _, rest = node.Value.partition(".")
        exact = int(whole) if not rest else None
        return of("decimal", len(whole + rest), len(rest), exact, exact)

    def of_RealLiteral(self, node: Any, scopes: list[Frame]) -> Value:
        return of("float")

    def of_StringLiteral(self, node: Any, scopes: list[Frame]) -> Value:
        if not node.IsNational and not node.Value.isascii():
            self.say(node, "a literal without N is of the database's code page: other characters become ?")
        kind = Type("nvarchar" if node.IsNational else "varchar", max(1, len(node.Value)))
        return Value(kind, LITERAL, text=node.Value, ascii=node.Value.isascii())

    def of_BinaryLiteral(self, node: Any, scopes: list[Frame]) -> Value:
        return of("varbinary", max(1, (len(node.Value) - 1) // 2))

    def of_NullLiteral(self, node: Any, scopes: list[Frame]) -> Value:
        return Value(Type("int"), null=True)

    def of_VariableReference(self, node: Any, scopes: list[Frame]) -> Value:
        return self.variable(node, node.Name)

    def of_GlobalVariableExpression(self, node: Any, scopes: list[Frame]) -> Value:
        return tsqlfunctions.GLOBALS.get(node.Name.upper(), UNKNOWN)

    def of_ParameterlessCall(self, node: Any, scopes: list[Frame]) -> Value:
        return of("datetime") if "Timestamp" in node.ParameterlessCallType else tsqlfunctions.NAME

    def of_ParenthesisExpression(self, node: Any, scopes: list[Frame]) -> Value:
        return self.value(node.Expression, scopes)

    def of_NextValueForExpression(self, node: Any, scopes: list[Frame]) -> Value:
        return UNKNOWN

    def of_UnaryExpression(self, node: Any, scopes: list[Frame]) -> Value:
        inner = self.value(node.Expression, scopes)
        limits = inner.range
        if "Negative" in node.UnaryExpressionType and limits is not None and inner.type is not None:
            name = inner.type.name
            if name == "bigint" and limits == (2**31, 2**31):
                name = "int"
            top = min(-limits[0], BOUNDS[name][1])
            return Value(Type(name), None, -limits[1], top)
        return replace(inner, column=False)

    def of_BinaryExpression(self, node: Any, scopes: list[Frame]) -> Value:
        values = [self.value(node.FirstExpression, scopes), self.value(node.SecondExpression, scopes)]
        sign = {"Add": "+", "Subtract": "-", "Multiply": "*", "Divide": "/", "Modulo": "%"}.get(
            node.BinaryExpressionType, "&"
        )
        if any(value.type is None for value in values):
            return UNKNOWN
        if (
            all(value.string or value.null for value in values)
            and sign == "+"
            and any(value.string for value in values)
        ):
            label = self.together(node, "+", values)
            size = sum(shown(value) for value in values if value.string)
            result = tsqlfunctions.text(size, [value for value in values if value.string])
            kind = result.type
            if kind is not None and size < MAX and kind.size < size:
                self.say(node, f"+ makes {kind} of {size} characters: what is longer is cut")
            return replace(result, label=label)
        result = merged(values)
        if result.type is None:
            return UNKNOWN
        kinds = [value.type.name for value in values if value.type is not None and not value.null]
        if any(kind in DATES - {"datetime", "smalldatetime"} for kind in kinds):
            self.say(node, f"{kinds[0]} {sign} {kinds[-1]} is refused (206): use DATEADD or DATEDIFF_BIG")
            return UNKNOWN
        for value in values:
            wrong = lossy(value, result.type) if value.string else ""
            if wrong:
                self.say(node, f"in {sign}, {wrong}")
        result = replace(result, text=None, column=False, null=False, low=None, high=None)
        first, second = (value.range for value in values)
        if result.type is not None and result.type.name == "float":
            known = [
                (value.low, value.high) if value.low is not None and value.high is not None else value.range
                for value in values
            ]
            if known[0] is not None and known[1] is not None:
                limits = calculated(sign, known[0], known[1])
                return result if limits is None else replace(result, low=limits[0], high=limits[1])
        if result.type is None or result.type.name not in BOUNDS or first is None or second is None:
            return result
        limits = calculated(sign, first, second)
        if limits is None:
            return result
        low, high = BOUNDS[result.type.name]
        leaves = (limits[0] < low or limits[1] > high) and result.type.name == "int"
        # (The difference of two positions or times is never larger than the whole.)
        if leaves and (sign == "*" or (sign == "+" and large(first) and large(second))):
            self.say(node, f"{sign} of int may leave int (8115): cast one side to bigint")
        return replace(result, low=max(limits[0], low), high=min(limits[1], high))

    def of_CastCall(self, node: Any, scopes: list[Frame]) -> Value:
        inner = self.value(node.Parameter, scopes)
        kind = type_of(node.DataType, cast=True)
        if kind is None:
            return UNKNOWN
        label = None
        if kind.string:
            label = inner.label if inner.string else LITERAL
        limits = inner.range
        if kind.name in BOUNDS and limits is not None:
            low, high = BOUNDS[kind.name]
            return Value(kind, None, max(low, min(limits[0], high)), min(high, max(limits[1], low)))
        if kind.string and inner.type is not None and not inner.null:
            return Value(replace(kind, size=min(kind.size, shown(inner) or kind.size)), label)
        return Value(kind, label)

    of_ConvertCall = of_TryCastCall = of_TryConvertCall = of_CastCall

    def of_ScalarSubquery(self, node: Any, scopes: list[Frame]) -> Value:
        selected = self.query(node.QueryExpression, scopes)
        return selected[0][1] if selected else UNKNOWN

    def of_CoalesceExpression(self, node: Any, scopes: list[Frame]) -> Value:
        return self.one_type(node, "COALESCE", [self.value(value, scopes) for value in node.Expressions])

    def of_NullIfExpression(self, node: Any, scopes: list[Frame]) -> Value:
        values = [self.value(node.FirstExpression, scopes), self.value(node.SecondExpression, scopes)]
        self.compare(node, "NULLIF", values)
        return replace(values[0], column=False)

    def of_IIfCall(self, node: Any, scopes: list[Frame]) -> Value:
        self.any(node.Predicate, scopes)
        return self.one_type(
            node, "IIF", [self.value(branch, scopes) for branch in (node.ThenExpression, node.ElseExpression)]
        )

    def of_SearchedCaseExpression(self, node: Any, scopes: list[Frame]) -> Value:
        values, before = [], self.branch
        for clause in node.WhenClauses:
            self.any(clause.WhenExpression, scopes)
            compared = over(clause.WhenExpression)
            outside = self.branch
            if compared is not None:
                self.branch = {**outside, compared[0]: compared[1]}
            values.append(self.value(clause.ThenExpression, scopes))
            self.branch = outside
            if compared is not None:
                self.branch = {**outside, compared[0]: compared[2]}
        result = self.cases(node, values, scopes)
        self.branch = before
        return result

    def of_SimpleCaseExpression(self, node: Any, scopes: list[Frame]) -> Value:
        whens = [
            self.value(node.InputExpression, scopes),
            *(self.value(clause.WhenExpression, scopes) for clause in node.WhenClauses),
        ]
        self.compare(node, "CASE", whens)
        return self.cases(node, [self.value(clause.ThenExpression, scopes) for clause in node.WhenClauses], scopes)

    def cases(self, node: Any, values: list[Value], scopes: list[Frame]) -> Value:
        if node.ElseExpression is not None:
            values.append(self.value(node.ElseExpression, scopes))
        return self.one_type(node, "CASE", values)

    def of_LeftFunctionCall(self, node: Any, scopes: list[Frame]) -> Value:
        return self.called(node, "LEFT", node.Parameters, scopes)

    def of_RightFunctionCall(self, node: Any, scopes: list[Frame]) -> Value:
        return self.called(node, "RIGHT", node.Parameters, scopes)

    def of_FunctionCall(self, node: Any, scopes: list[Frame]) -> Value:
        name = node.FunctionName.Value
        if node.OverClause is not None:
            self.any(node.OverClause, scopes)
        if node.CallTarget is not None:
            values = [self.value(parameter, scopes) for parameter in node.Parameters]
            self.arguments(node, name, [(None, value) for value in values])
            return self.known.scalars.get(name.lower(), UNKNOWN)
        return self.called(node, name.upper(), node.Parameters, scopes)

    def called(self, node: Any, name: str, given: list[Any], scopes: list[Frame]) -> Value:
        dated = name in ("DATEADD", "DATEDIFF", "DATEDIFF_BIG", "DATEPART", "DATENAME")
        part = named(given[0].MultiPartIdentifier.Identifiers[0]) if dated and given else ""
        values = [self.value(value, scopes) for value in (given[1:] if dated else given)]
        fine = ("millisecond", "ms", "microsecond", "mcs", "nanosecond", "ns")
        # (A deadline of this very call, set by a number of type int, is that close.)
        if name == "DATEDIFF" and part in fine and not (part in ("millisecond", "ms") and values[-1].deadline):
            self.say(node, f"DATEDIFF({part}) overflows (535) after 24 days or less: use DATEDIFF_BIG")
        elif name == "DATEDIFF" and part in ("second", "ss", "s") and any(value.text is not None for value in values):
            self.say(node, "DATEDIFF(second) from a fixed day overflows (535) after 68 years: use DATEDIFF_BIG")
        elif name == "DATEADD" and values[0].type is not None and values[0].type.name != "int":
            self.assign(node, "the number of DATEADD is int", values[0], Type("int"))
        if name in ("APPLOCK_MODE", "APPLOCK_TEST"):
            self.assign(node, f"the resource of {name}", values[1], Type("nvarchar", 255))
        if name in ("SUM", "MIN", "MAX", "AVG") and values and values[0].type is not None:
            if values[0].type.name == "bit":
                self.say(node, f"{name} of bit is refused (8117)")
            if name == "SUM" and values[0].type.name in ("int", "smallint") and large(values[0].range or (0, 0)):
                self.say(node, "SUM of int is int, and may overflow (8115): cast to bigint")
        label: Label | None = LITERAL
        if name in tsqlfunctions.SENSITIVE or name in ("ISNULL", "STRING_AGG"):
            label = self.together(node, name, [value for value in values if value.string])
        if name == "ISNULL":
            self.assign(
                node, "ISNULL has the type of what it asks", values[1], values[0].type if not values[0].null else None
            )
        result = tsqlfunctions.returned(name, values)
        if name == "DATEADD" and part in ("millisecond", "ms"):
            result = replace(
                result, deadline=given[2].kind == "FunctionCall" and values[1].type == Type("datetime2", 0, 7)
            )
        return replace(result, label=None) if label is None else result

    def arguments(self, node: Any, name: str, given: list[tuple[str | None, Value]]) -> None:
        known = self.known.parameters.get(name.lower(), {})
        for place, (parameter, value) in enumerate(given):
            if parameter is None:
                parameter = list(known)[place] if place < len(known) else None
            if parameter is not None and parameter in known:
                facts = self.known.facts.get(name.lower()) or Facts()
                self.assign(
                    node, f"parameter {parameter} of {name}", value, known[parameter][0], facts.bounds.get(parameter)
                )
                there = self.known.given.setdefault(f"{name.lower()} {parameter}", value)
                self.known.given[f"{name.lower()} {parameter}"] = replace(
                    there, deadline=there.deadline and value.deadline
                )

    # -- conditions, and all else --------------------------------------------------------------------------------------

    def any(self, node: Any, scopes: list[Frame]) -> None:
        """Visit a node: its expressions, conditions and queries."""
        if node is None:
            return
        kind = node.kind
        if kind in ("BooleanComparisonExpression", "BooleanTernaryExpression", "InPredicate"):
            self.looks(node)
        if kind == "BooleanComparisonExpression":
            self.compare(
                node,
                "a comparison",
                [self.value(node.FirstExpression, scopes), self.value(node.SecondExpression, scopes)],
            )
        elif kind == "LikePredicate":
            self.compare(
                node, "LIKE", [self.value(node.FirstExpression, scopes), self.value(node.SecondExpression, scopes)]
            )
        elif kind == "BooleanTernaryExpression":
            values = [
                self.value(operand, scopes)
                for operand in (node.FirstExpression, node.SecondExpression, node.ThirdExpression)
            ]
            self.compare(node, "BETWEEN", values)
        elif kind == "InPredicate":
            first = self.value(node.Expression, scopes)
            others = [self.value(value, scopes) for value in node.Values]
            if node.Subquery is not None:
                others.append(self.value(node.Subquery, scopes))
            for value in others:
                self.compare(node, "IN", [first, value])
        elif kind == "SubqueryComparisonPredicate":
            self.compare(node, "a comparison", [self.value(node.Expression, scopes), self.value(node.Subquery, scopes)])
        elif kind == "OverClause":
            for partition in node.Partitions:
                self.sorted(partition, "PARTITION BY", scopes)
            for element in node.OrderByClause.OrderByElements if node.OrderByClause is not None else ():
                self.sorted(element.Expression, "ORDER BY", scopes)
        elif kind == "ScalarSubquery" or hasattr(self, f"of_{kind}"):
            self.value(node, scopes)
        elif kind in ("QuerySpecification", "BinaryQueryExpression", "QueryParenthesisExpression"):
            self.query(node, scopes)
        else:
            for child in node.children():
                self.any(child, scopes)

    def sorted(self, node: Any, what: str, scopes: list[Frame]) -> None:
        self.together(node, what, [self.value(node, scopes)])

    def declare(self, elements: list[Any], local: bool = False) -> None:
        for element in elements:
            kind = type_of(element.DataType) if element.DataType is not None else None
            name = element.VariableName.Value
            value = Value(kind, LITERAL if kind is not None and kind.string else None)
            if not local and self.known.given_before.get(f"{self.name} {name.lower()}", UNKNOWN).deadline:
                value = replace(value, deadline=True)
            first = self.value(element.Value, []) if element.Value is not None else UNKNOWN
            self.assign(element, name, first, kind)
            self.variables[name.lower()] = value
            self.written[name.lower()] = name
            if local:
                self.local.add(name.lower())
                if element.Value is not None:
                    self.keep(name, first, value)

    def set_variable(self, node: Any, name: str, value: Value, how: str = "Equals") -> None:
        self.variable(node, name)
        target = self.variables.get(name.lower(), UNKNOWN)
        if how != "Equals" and value.type is not None and target.string and not value.string:
            self.say(node, f"{name}: a text and {value.type} are added as numbers (245)")
        elif how == "Equals" or target.string:
            self.assign(node, name, value, target.type, self.before.bounds.get(name.lower()))
        expression = node.get("Expression")
        grows = (
            self.loops
            and target.string
            and expression is not None
            and expression.kind != "LeftFunctionCall"
            and mentions(expression, name)
        )
        if (
            grows
            and target.type is not None
            and target.type.size < MAX
            and shown(value) > shown(self.variable(node, name))
        ):
            self.say(node, f"{name} grows in a loop: what is longer than {target.type} is cut")
        self.keep(name, value if how == "Equals" else target, target)

    def keep(self, name: str, value: Value, target: Value) -> None:
        """Record the values of a variable, or a column of a table variable."""
        if value.null or target.type is None:
            return
        if value.type is None:
            value = target
        size = min(shown(value), target.type.size) if target.string else target.type.size
        low, high = value.range if value.range is not None and target.range is not None else (None, None)
        there = Value(
            replace(target.type, size=size), target.label, low, high, deadline=value.deadline, ascii=value.ascii
        )
        other = self.now.assigned.get(name.lower())
        if other is not None:
            there = replace(merged([other, there]), label=target.label)
        self.now.assigned[name.lower()] = there

    def bound(self, node: Any, bound: Bound) -> None:
        """Record the values of a variable that are refused."""
        name = node.Name.lower()
        there = self.now.bounds.get(name)
        self.now.bounds[name] = bound if there is None else there.joined(bound)

    def looks(self, node: Any) -> None:
        """Record the bound that a comparison of a variable, or of its length, with a number sets."""
        if node.kind == "InPredicate":
            words = [literal.Value for literal in node.Values if literal.kind == "StringLiteral"]
            if node.Expression.kind == "VariableReference" and words and len(words) == len(node.Values):
                self.bound(node.Expression, Bound(size=max(len(word) for word in words)))
            return
        if node.kind == "BooleanTernaryExpression":
            low, high = number(node.SecondExpression), number(node.ThirdExpression)
            first = node.FirstExpression
        else:
            how, low, high = node.ComparisonType, None, number(node.SecondExpression)
            first = node.FirstExpression
            if high is None or ("Greater" not in how and how not in ("LessThan", "NotEqualToBrackets")):
                return
            if how == "LessThan":
                low, high = high, None
        measured = measure(first)
        if measured is None:
            return
        variable, unit, more = measured
        if unit:
            if high is not None and low is None and high >= 8:
                self.bound(variable, Bound(size=high // unit - more))
        elif low is not None or (high is not None and high >= 100):
            if first.kind == "FunctionCall" and high is not None:
                low = -high  # ABS
            self.bound(variable, Bound(low=low, high=high))
