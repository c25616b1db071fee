"""Follow queries and statements for `tsqlflow`. `Typed` is the interface for `tsqlcheck`: it yields the findings in all
trees, and the faults in `tests/support/tsqlfaults.sql` that go unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tsqlflow import Expressions
from tsqlknown import (
    PROCEDURES,
    Bound,
    Columns,
    Facts,
    Finding,
    Frame,
    Known,
    base,
    declared,
    named,
    narrowed,
    type_of,
)
from tsqltree import Node
from tsqltypes import DATABASE, LITERAL, MAX, UNKNOWN, Label, Type, Value, shown

FAULTS = Path(__file__).resolve().parent / "support" / "tsqlfaults.sql"
#: Procedures whose OUTPUT is as long as their input, which no flow of types shows.
SAME_SIZE = {"escape_control_chars": "puts a question mark in the place of one character"}
Selected = list[tuple[str, Value]] | None
#: A frame in which any name may be anything.
ANY: Frame = {"": None}


class Batch(Expressions):
    # -- queries -------------------------------------------------------------------------------------------------------

    def selected(self, statement: Any, scopes: list[Frame]) -> Selected:
        """Return the columns of a SELECT statement."""
        self.with_ctes(statement, scopes)
        return self.query(statement.QueryExpression, scopes)

    def with_ctes(self, statement: Any, scopes: list[Frame]) -> None:
        ctes = statement.get("WithCtesAndXmlNamespaces")
        for cte in ctes.CommonTableExpressions if ctes is not None else ():
            columns = self.query(cte.QueryExpression, scopes)
            self.ctes[named(cte.ExpressionName)] = self.renamed(columns, cte.Columns)

    @staticmethod
    def renamed(selected: Selected, names: list[Any]) -> Columns | None:
        if selected is None:
            return None
        if names:
            selected = [(named(name), value) for name, (_, value) in zip(names, selected, strict=False)]
        return {name: value.as_column() for name, value in selected}

    def query(self, node: Any, scopes: list[Frame]) -> Selected:
        if node.kind == "QueryParenthesisExpression":
            return self.query(node.QueryExpression, scopes)
        if node.kind == "BinaryQueryExpression":
            first, second = (
                self.query(node.FirstQueryExpression, scopes),
                self.query(node.SecondQueryExpression, scopes),
            )
            if first is None or second is None:
                return None
            return [
                (
                    name,
                    self.one_type(
                        node, f"{node.BinaryQueryExpressionType.upper()}, column {name or number}", [value, other]
                    ),
                )
                for number, ((name, value), (_, other)) in enumerate(zip(first, second, strict=False), 1)
            ]
        frame: Frame = {}
        inner = [*scopes, frame]
        for table in node.FromClause.TableReferences if node.FromClause is not None else ():
            self.source(table, frame, scopes)
        if node.TopRowFilter is not None:
            self.any(node.TopRowFilter, inner)
        for clause in (node.WhereClause, node.HavingClause):
            self.any(clause, inner)
        for group in node.GroupByClause.GroupingSpecifications if node.GroupByClause is not None else ():
            for child in group.children():
                self.sorted(child, "GROUP BY", inner)
        columns: Selected = []
        for element in node.SelectElements:
            if element.kind == "SelectSetVariable":
                self.set_variable(
                    element, element.Variable.Name, self.value(element.Expression, inner), element.AssignmentKind
                )
            elif element.kind == "SelectStarExpression":
                for there in frame.values():
                    columns = None if there is None or columns is None else columns + list(there.items())
            else:
                value = self.value(element.Expression, inner)
                name = str(element.ColumnName.Value).lower() if element.ColumnName is not None else ""
                if (
                    not name
                    and element.Expression.kind == "ColumnReferenceExpression"
                    and element.Expression.MultiPartIdentifier
                ):
                    name = named(element.Expression.MultiPartIdentifier.Identifiers[-1])
                if node.UniqueRowFilter == "Distinct":
                    self.together(element, "DISTINCT", [value])
                columns = None if columns is None else [*columns, (name, value)]
        for order in node.OrderByClause.OrderByElements if node.OrderByClause is not None else ():
            alias = order.Expression.get("MultiPartIdentifier")
            made = dict(columns or ())
            if alias is not None and len(alias.Identifiers) == 1 and named(alias.Identifiers[0]) in made:
                self.together(order, "ORDER BY", [made[named(alias.Identifiers[0])]])
            else:
                self.sorted(order.Expression, "ORDER BY", inner)
        return columns

    def source(self, node: Any, frame: Frame, scopes: list[Frame]) -> None:
        """A table of FROM, and the join between two of them."""
        inner = [*scopes, frame]
        kind, alias = node.kind, node.get("Alias")
        name = named(alias) if alias is not None else ""
        if kind == "NamedTableReference":
            schema, own = base(node.SchemaObject)
            if schema == "" and own in self.ctes:
                columns = self.ctes[own]
            elif schema == "" and own in ("inserted", "deleted") and self.trigger is not None:
                columns = self.trigger
            else:
                columns = self.table(schema, own)
            frame[name or own] = columns
        elif kind == "VariableTableReference":
            own = node.Variable.Name.lower()
            frame[name or own] = self.tables.get(own)
            self.aliases[name or own] = own
        elif kind == "QueryDerivedTable":
            frame[name] = self.renamed(self.query(node.QueryExpression, inner), node.Columns)
        elif kind == "InlineDerivedTable":
            rows = [[self.value(value, inner) for value in row.ColumnValues] for row in node.RowValues]
            values = [self.one_type(node, "VALUES", list(column)) for column in zip(*rows, strict=False)]
            frame[name] = self.renamed([("", value) for value in values], node.Columns)
        elif kind == "SchemaObjectFunctionTableReference":
            schema, own = base(node.SchemaObject)
            self.arguments(node, own, [(None, self.value(parameter, inner)) for parameter in node.Parameters])
            columns = self.table(schema, own)
            if columns is not None and node.Columns:
                columns = self.renamed(list(columns.items()), node.Columns)
            frame[name or own] = columns
        elif kind == "OpenJsonTableReference":
            text = self.value(node.Variable, inner)
            default = text.label.collation if text.label is not None else DATABASE
            columns = {}
            for element in node.SchemaDeclarationItems:
                columns |= declared_column(element.ColumnDefinition, default)
            columns = columns or {
                "key": Value(Type("nvarchar", 4000), Label(1, "Latin1_General_BIN2"), column=True),
                "value": Value(Type("nvarchar", MAX), Label(1, default), column=True),
                "type": Value(Type("tinyint"), column=True),
            }
            frame[name] = columns
        elif kind in ("QualifiedJoin", "UnqualifiedJoin"):
            self.source(node.FirstTableReference, frame, scopes)
            self.source(node.SecondTableReference, frame, scopes)
            if kind == "QualifiedJoin":
                self.any(node.SearchCondition, inner)
        elif kind == "JoinParenthesisTableReference":
            self.source(node.Join, frame, scopes)
        else:
            for parameter in node.get("Parameters") or ():
                self.value(parameter, inner)
            frame[name] = None

    # -- statements ----------------------------------------------------------------------------------------------------

    def statement(self, node: Any) -> None:
        method = getattr(self, f"do_{node.kind}", None)
        if method is not None:
            method(node)
            return
        for child in node.children():
            if child.kind.endswith(("Statement", "StatementList", "TSqlBatch")):
                self.statement(child)
            else:
                self.any(child, [ANY])

    def do_DeclareVariableStatement(self, node: Any) -> None:
        self.declare(node.Declarations, local=True)

    def do_DeclareTableVariableStatement(self, node: Any) -> None:
        body = node.Body
        name = body.VariableName.Value.lower()
        self.tables[name] = {
            column: self.learnt(f"{name}.{column}", value)
            for column, value in declared(body.Definition, DATABASE).items()
        }
        self.written_tables[name] = declared(body.Definition, DATABASE)
        self.definition(body.VariableName.Value, body.Definition, set())

    def do_WhileStatement(self, node: Any) -> None:
        self.any(node.Predicate, [])
        self.loops += 1
        self.statement(node.Statement)
        self.loops -= 1

    def do_SetVariableStatement(self, node: Any) -> None:
        if node.Expression is not None:
            self.set_variable(node, node.Variable.Name, self.value(node.Expression, []), node.AssignmentKind)

    def do_SelectStatement(self, node: Any) -> None:
        self.selected(node, [])

    def do_InsertStatement(self, node: Any) -> None:
        self.with_ctes(node, [])
        insert = node.InsertSpecification
        target, name = self.target(insert.Target)
        names = [named(column.MultiPartIdentifier.Identifiers[-1]) for column in insert.Columns] or list(target or ())
        source = insert.InsertSource
        rows: list[list[Value]] = []
        if source.kind == "ValuesInsertSource":
            rows = [[self.value(value, []) for value in row.ColumnValues] for row in source.RowValues]
        elif source.kind == "SelectInsertSource":
            rows = [[value for _, value in self.query(source.Select, []) or ()]]
        else:
            self.statement(source)
            rows = [[Value(there.type) for there in (target or {}).values()]]
        for row in rows:
            self.into(insert, name, target, names, row)
        self.output(insert, target, [])

    def do_UpdateStatement(self, node: Any) -> None:
        self.with_ctes(node, [])
        update = node.UpdateSpecification
        frame, target, name = self.changed(update)
        for clause in update.SetClauses:
            if clause.kind != "AssignmentSetClause":
                self.any(clause, [frame])
                continue
            value = self.value(clause.NewValue, [frame])
            if clause.Variable is not None:
                self.set_variable(clause, clause.Variable.Name, value, clause.AssignmentKind)
            if clause.Column is not None:
                self.into(clause, name, target, [named(clause.Column.MultiPartIdentifier.Identifiers[-1])], [value])
        self.any(update.WhereClause, [frame])
        self.output(update, target, [frame])

    def do_DeleteStatement(self, node: Any) -> None:
        self.with_ctes(node, [])
        delete = node.DeleteSpecification
        frame, target, _ = self.changed(delete)
        self.any(delete.WhereClause, [frame])
        self.output(delete, target, [frame])

    def do_MergeStatement(self, node: Any) -> None:
        self.any(node.MergeSpecification, [ANY])

    def changed(self, node: Any) -> tuple[Frame, Columns | None, str]:
        """Return the tables that an UPDATE or DELETE reads, and the table that it writes."""
        frame: Frame = {}
        for table in node.FromClause.TableReferences if node.FromClause is not None else ():
            self.source(table, frame, [])
        if node.Target.kind == "NamedTableReference" and named(node.Target.SchemaObject.BaseIdentifier) in frame:
            name = named(node.Target.SchemaObject.BaseIdentifier)
            target = frame[name]
            name = self.aliases.get(name, name)
        else:
            target, name = self.target(node.Target)
            if not frame:
                frame[name] = target
        if node.TopRowFilter is not None:
            self.any(node.TopRowFilter, [frame])
        return frame, target, name

    def target(self, node: Any) -> tuple[Columns | None, str]:
        frame: Frame = {}
        self.source(node, frame, [])
        name = next(iter(frame))
        return frame[name], name

    def into(self, node: Any, table: str, target: Columns | None, names: list[str], row: list[Value]) -> None:
        target = self.written_tables.get(table, target)
        for name, value in zip(names, row, strict=False):
            if target is not None and name in target:
                self.assign(node, f"{table}.{name}", value, target[name].type)
                if table in self.written_tables:
                    self.keep(f"{table}.{name}", value, target[name])

    def output(self, node: Any, target: Columns | None, scopes: list[Frame]) -> None:
        inner = [*scopes, {"inserted": target, "deleted": target}]
        for clause in (node.OutputClause, node.OutputIntoClause):
            if clause is None:
                continue
            row = [
                self.value(column.Expression, inner)
                for column in clause.SelectColumns
                if column.kind == "SelectScalarExpression"
            ]
            if clause.kind == "OutputIntoClause":
                there, name = self.target(clause.IntoTable)
                names = [named(column.MultiPartIdentifier.Identifiers[-1]) for column in clause.IntoTableColumns]
                self.into(clause, name, there, names or list(there or ()), row)

    def do_ExecuteStatement(self, node: Any) -> None:
        self.executed(node.ExecuteSpecification)

    def do_ExecuteInsertSource(self, node: Any) -> None:
        self.executed(node.Execute)

    def executed(self, node: Any) -> None:
        entity = node.ExecutableEntity
        if node.Variable is not None:
            self.set_variable(node, node.Variable.Name, Value(Type("int")))
        if entity.kind != "ExecutableProcedureReference" or entity.ProcedureReference.ProcedureReference is None:
            for child in entity.children():
                self.any(child, [])
            return
        name = named(entity.ProcedureReference.ProcedureReference.Name.BaseIdentifier)
        known = self.known.parameters.get(name, {})
        facts = self.known.facts.get(name) or Facts()
        given: list[tuple[str | None, Value]] = []
        for number, argument in enumerate(entity.Parameters):
            value = self.value(argument.ParameterValue, []) if argument.ParameterValue is not None else UNKNOWN
            parameter = argument.Variable.Name if argument.Variable is not None else None
            written = known.get(parameter.lower()) if parameter is not None else None
            if written is not None and written[2] != parameter:
                self.say(argument, f"parameter {parameter} of {name} is {written[2]}: another name where case counts")
            given.append((parameter.lower() if parameter is not None else None, value))
            place = (
                parameter.lower() if parameter is not None else (list(known)[number] if number < len(known) else None)
            )
            if (
                place not in known
                or argument.ParameterValue is None
                or argument.ParameterValue.kind != "VariableReference"
            ):
                continue
            if name in SAME_SIZE:
                continue
            if place in facts.bounds:
                self.bound(argument.ParameterValue, facts.bounds[place])
            if argument.IsOutput:
                kind = known[place][0]
                back = Value(kind, LITERAL if kind is not None and kind.string else None)
                there = facts.assigned.get(place)
                if there is not None:
                    back = narrowed(back, Bound(shown(there), *(there.range or (None, None))))
                    if there.string:
                        self.bound(argument.ParameterValue, Bound(shown(there)))
                self.set_variable(argument, argument.ParameterValue.Name, back)
        self.arguments(entity, name, given)

    def do_ReturnStatement(self, node: Any) -> None:
        if node.Expression is not None:
            self.assign(node, "RETURN", self.value(node.Expression, []), self.result)

    def do_ThrowStatement(self, node: Any) -> None:
        if node.Message is not None:
            self.assign(node, "the message of THROW", self.value(node.Message, []), Type("nvarchar", 2048))

    # -- objects -------------------------------------------------------------------------------------------------------

    def body(self, node: Any) -> None:
        self.declare(node.get("Parameters") or [])
        if node.StatementList is not None:
            self.statement(node.StatementList)

    do_CreateProcedureStatement = do_AlterProcedureStatement = do_CreateOrAlterProcedureStatement = body

    def do_CreateTriggerStatement(self, node: Any) -> None:
        if node.TriggerObject.Name is not None:
            self.trigger = self.table(*base(node.TriggerObject.Name))
        self.body(node)

    do_CreateOrAlterTriggerStatement = do_CreateTriggerStatement

    def do_CreateFunctionStatement(self, node: Any) -> None:
        kind = node.ReturnType.kind
        if kind == "SelectFunctionReturnType":
            self.declare(node.Parameters)
            self.selected(node.ReturnType.SelectStatement, [])
            return
        if kind == "ScalarFunctionReturnType":
            self.result = type_of(node.ReturnType.DataType)
        self.body(node)

    do_CreateOrAlterFunctionStatement = do_CreateFunctionStatement

    def do_CreateViewStatement(self, node: Any) -> None:
        self.selected(node.SelectStatement, [])

    def do_CreateTableStatement(self, node: Any) -> None:
        if node.Definition is not None:
            name = base(node.SchemaObjectName)[1]
            self.definition(name, node.Definition, self.known.clustered)

    def do_AlterTableAddTableElementStatement(self, node: Any) -> None:
        self.definition(base(node.SchemaObjectName)[1], node.Definition, self.known.clustered)

    def definition(self, table: str, node: Any, clustered: set[str]) -> None:
        columns = {**(self.known.tables.get(table) or {}), **declared(node, DATABASE)}
        inner: list[Frame] = [{table: columns}]
        for column in node.ColumnDefinitions:
            own = columns[named(column.ColumnIdentifier)]
            for constraint in [
                *column.Constraints,
                *([column.DefaultConstraint] if column.DefaultConstraint is not None else []),
            ]:
                if constraint.kind == "UniqueConstraintDefinition":
                    self.keys(constraint, table, [own], in_clusters(constraint, table, clustered))
                elif constraint.kind == "DefaultConstraintDefinition":
                    self.assign(
                        constraint,
                        f"{table}.{named(column.ColumnIdentifier)}",
                        self.value(constraint.Expression, inner),
                        own.type,
                    )
                else:
                    self.any(constraint, inner)
        for constraint in node.TableConstraints:
            if constraint.kind == "UniqueConstraintDefinition":
                names = [named(column.Column.MultiPartIdentifier.Identifiers[-1]) for column in constraint.Columns]
                self.keys(
                    constraint,
                    table,
                    [columns.get(name, UNKNOWN) for name in names],
                    in_clusters(constraint, table, clustered),
                )
            else:
                self.any(constraint, inner)

    def do_CreateIndexStatement(self, node: Any) -> None:
        table = base(node.OnName)[1]
        columns = self.table(*base(node.OnName)) or {}
        names = [named(column.Column.MultiPartIdentifier.Identifiers[-1]) for column in node.Columns]
        self.keys(node, table, [columns.get(name, UNKNOWN) for name in names], bool(node.Clustered))

    def keys(self, node: Any, table: str, columns: list[Value], clustered: bool) -> None:
        size = sum(column.type.bytes for column in columns if column.type is not None)
        maximum = 900 if clustered else 1700
        if size > maximum:
            kind = "clustered" if clustered else "nonclustered"
            self.say(node, f"the key of a {kind} index of {table} has up to {size} bytes, more than {maximum} (1946)")


def declared_column(node: Any, default: str) -> Columns:
    kind = type_of(node.DataType)
    collation = node.Collation.Value if node.Collation is not None else default
    label = Label(1, collation) if kind is not None and kind.string else None
    return {named(node.ColumnIdentifier): Value(kind, label, column=True)}


def in_clusters(constraint: Any, table: str, clustered: set[str]) -> bool:
    kind = str(constraint.IndexType.IndexTypeKind) if constraint.IndexType is not None else "None"
    if kind != "None":
        return kind == "Clustered"
    if constraint.Clustered is not None and (constraint.Clustered or not constraint.IsPrimaryKey):
        return bool(constraint.Clustered)
    return bool(constraint.IsPrimaryKey) and table not in clustered


# -- everything ------------------------------------------------------------------------------------------------------


def looked_at(known: Known, file: str, script: Node) -> list[Finding]:
    """Return the findings in a batch; the facts about a procedure's variables are kept for the next pass."""
    found: list[Finding] = []
    for batch in script.Batches:
        where = f"{file}:{batch.line}"
        for statement in batch.Statements:
            if statement.kind in PROCEDURES:
                where = base(statement.ProcedureReference.Name)[1]
        look = Batch(known, file, known.facts.get(where), where)
        for statement in batch.Statements:
            look.statement(statement)
        look.now.looked = True
        known.facts[where] = look.now
        found += look.findings
    return found


class Typed:
    """Collect the objects of the scripts, and SQL Server's own, from their trees."""

    def __init__(self, trees: list[tuple[str, Any]], system: list[Any]) -> None:
        self.known = Known()
        self.scripts = [(file, Node(tree)) for file, tree in trees]
        for tree in system:
            self.add(Node(tree), catalog=True)
        for _, script in self.scripts:
            self.add(script)
        #: The findings of the last of several passes: the bounds of a procedure's parameters propagate to its callers.
        self.findings: list[Finding] = []
        for _ in range(4):
            self.known.given, self.known.given_before = {}, self.known.given
            self.findings = [
                finding for file, script in self.scripts for finding in looked_at(self.known, file, script)
            ]

    def add(self, script: Node, catalog: bool = False) -> None:
        for batch in script.Batches:
            for statement in batch.Statements:
                self.known.add(statement, catalog)

    def unnoticed(self, parse: Callable[[str], tuple[Any, list[Any]]]) -> Iterator[str]:
        """Yield the faults without a finding, and the findings in texts without a fault. A batch says which it is: `--
        fault: a part of the message`, or `-- right`.
        """
        text = FAULTS.read_text(encoding="utf-8").replace("{schema}", "sqlsem").replace("{table}", "ProcessControl")
        count = 0
        for number, batch in enumerate(re.split(r"^GO$", text, flags=re.MULTILINE)):
            marks = re.findall(r"^-- (fault|right)(?:: (.*))?$", batch, re.MULTILINE)
            tree, errors = parse(batch)
            if errors or not marks:
                yield f"proof: neither a fault nor right, or no T-SQL: {errors} {batch.strip()}"
                continue
            script = Node(tree)
            self.add(script)
            found: list[Finding] = []
            for _ in range(3):
                found = looked_at(self.known, f"fault {number}", script)
            told = "; ".join(finding[2] for finding in found) or "nothing"
            for kind, words in marks:
                count += kind == "fault"
                if kind == "fault" and not any(words.lower() in finding[2].lower() for finding in found):
                    yield f"proof: {words!r} goes unnoticed in {batch.strip()}\n    found: {told}"
                elif kind == "right" and found:
                    yield f"proof: {told}: is said of what is right: {batch.strip()}"
        if count < 25:
            yield f"proof: there are {count} faults only"
