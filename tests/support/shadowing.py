"""Find names in PostgreSQL's SQL that do not say their schema, by the server's own parser (pglast).

A routine without a search_path of its own runs with its caller's. Any operator, function, type or table in it that
names no schema may then be another login's.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import pglast
from pglast import ast
from pglast.enums import A_Expr_Kind
from pglast.parser import ParseError, parse_plpgsql_json

#: Expressions of the grammar that use an operator by name, whatever they look like.
HIDDEN = {
    A_Expr_Kind.AEXPR_DISTINCT: "IS DISTINCT FROM",
    A_Expr_Kind.AEXPR_NOT_DISTINCT: "IS NOT DISTINCT FROM",
    A_Expr_Kind.AEXPR_NULLIF: "NULLIF",
    A_Expr_Kind.AEXPR_IN: "IN",
    A_Expr_Kind.AEXPR_BETWEEN: "BETWEEN",
    A_Expr_Kind.AEXPR_NOT_BETWEEN: "NOT BETWEEN",
    A_Expr_Kind.AEXPR_BETWEEN_SYM: "BETWEEN SYMMETRIC",
    A_Expr_Kind.AEXPR_NOT_BETWEEN_SYM: "NOT BETWEEN SYMMETRIC",
    A_Expr_Kind.AEXPR_LIKE: "LIKE",
    A_Expr_Kind.AEXPR_ILIKE: "ILIKE",
    A_Expr_Kind.AEXPR_SIMILAR: "SIMILAR TO",
}


@dataclasses.dataclass(frozen=True)
class Routine:
    """A function or procedure that a script creates."""

    name: str
    language: str
    body: str
    statement: str  # the whole CREATE
    pins_path: bool


@functools.cache
def routines(text: str) -> tuple[Routine, ...]:
    """Return the routines that a script creates."""
    routines_found = []
    for raw in pglast.parse_sql(text):
        statement = raw.stmt
        if not isinstance(statement, ast.CreateFunctionStmt):
            continue
        options = {option.defname: option.arg for option in statement.options if option.defname != "set"}
        settings = {option.arg.name for option in statement.options if option.defname == "set"}
        assert statement.sql_body is None, (
            "a body that is bound at its creation needs no look, but has none written yet"
        )
        start = raw.stmt_location
        whole = text[start : start + raw.stmt_len] if raw.stmt_len else text[start:]
        routines_found.append(
            Routine(
                statement.funcname[-1].sval,
                options["language"].sval,
                options["as"][0].sval,
                whole,
                "search_path" in settings,
            )
        )
    return tuple(routines_found)


def nodes(node):
    """Yield every node of a parsed statement."""
    if isinstance(node, ast.Node):
        yield node
        for field in node:
            yield from nodes(getattr(node, field))
    elif isinstance(node, (tuple, list)):
        for child in node:
            yield from nodes(child)


def unqualified(text: str) -> list[str]:
    """Return the names that a statement of SQL, or several, finds by the search_path."""
    tree = pglast.parse_sql(text)
    known = {node.ctename for node in nodes(tree) if isinstance(node, ast.CommonTableExpr)}
    names = []
    for node in nodes(tree):
        if isinstance(node, ast.A_Expr):
            if node.kind in HIDDEN:
                names.append(HIDDEN[node.kind])
            elif len(node.name) == 1:
                names.append(f"operator {node.name[0].sval}")
        elif isinstance(node, ast.SubLink) and node.testexpr is not None and len(node.operName or ()) < 2:
            names.append("IN (SELECT …)" if not node.operName else f"operator {node.operName[0].sval} ANY (SELECT …)")
        elif isinstance(node, ast.CaseExpr) and node.arg is not None:
            names.append("CASE … WHEN")
        elif isinstance(node, ast.FuncCall) and len(node.funcname) == 1:
            names.append(f"function {node.funcname[0].sval}")
        elif isinstance(node, ast.TypeName) and node.names and len(node.names) == 1:
            names.append(f"type {node.names[0].sval}")
        elif isinstance(node, ast.RangeVar) and node.schemaname is None and node.relname not in known:
            names.append(f"table {node.relname}")
        elif isinstance(node, ast.JoinExpr) and (node.usingClause or node.isNatural):
            names.append("JOIN … USING")
        elif isinstance(node, ast.SortBy) and node.useOp and len(node.useOp) == 1:
            names.append(f"operator {node.useOp[0].sval} (ORDER BY)")
        elif isinstance(node, ast.CollateClause) and len(node.collname) == 1:
            names.append(f"collation {node.collname[0].sval}")
    return names


def plpgsql_parts(node):
    """Yield the expressions, and the names of what uses an operator without showing it, of a PL/pgSQL parse tree."""
    if isinstance(node, dict):
        for kind, value in node.items():
            if kind == "PLpgSQL_expr":
                yield "expression", (value["query"], value["parseMode"])
            elif kind == "PLpgSQL_stmt_case" and "t_expr" in value:
                yield "hidden", "CASE … WHEN (statement)"
            elif kind == "PLpgSQL_type":
                yield "type", value["typname"]
            yield from plpgsql_parts(value)
    elif isinstance(node, list):
        for child in node:
            yield from plpgsql_parts(child)


#: How PL/pgSQL has an expression parsed (RawParseMode): a statement, an expression, and from here on assignments.
STATEMENT, EXPRESSION, ASSIGNMENT = 0, 2, 3


def in_expression(query: str, mode: int) -> list[str]:
    """Return the names that an expression or statement in PL/pgSQL finds by the search_path."""
    if mode == STATEMENT:
        return unqualified(query)
    if mode >= ASSIGNMENT:
        query = re.split(r":?=", query, maxsplit=1)[1]
    else:
        assert mode == EXPRESSION, mode
    return unqualified(f"SELECT {query}")


#: The types that the grammar spells: these words mean pg_catalog's types.
GRAMMAR_TYPES = frozenset(
    (
        *("bigint", "bit", "boolean", "char", "character", "dec", "decimal", "double", "float", "int", "integer"),
        *("interval", "national", "nchar", "numeric", "real", "smallint", "time", "timestamp", "varchar"),
    )
)


def declared_types(body: str) -> list[str]:
    """Return the types of a PL/pgSQL routine's variables that name no schema (the parse tree forgets that)."""
    declared = re.match(r"\s*(?:<<\w+>>\s*)?DECLARE\b(.*?)\bBEGIN\b", body, re.DOTALL)
    if not declared:
        return []
    types = []
    without_comments = re.sub(r"--[^\n]*", "", declared.group(1))
    for line in without_comments.split(";"):
        match = re.match(r"\s*\w+\s+(?:CONSTANT\s+)?([\w.{}]+)", line, re.IGNORECASE)
        if match and "." not in match.group(1) and match.group(1).lower() not in GRAMMAR_TYPES:
            types.append(f"type {match.group(1)}")
    return types


def in_routine(routine: Routine) -> list[str]:
    """Return the names that the body of a routine finds by the search_path of its caller."""
    if routine.language == "sql":
        return unqualified(routine.body)
    assert routine.language == "plpgsql", routine.language
    names = declared_types(routine.body)
    for kind, value in plpgsql_parts(json.loads(parse_plpgsql_json(routine.statement))):
        if kind == "expression":
            names += in_expression(*value)
        elif kind == "hidden":
            names.append(value)
    return names


#: The path under which names mean the system's objects.
SAFE_PATH = ("pg_catalog", "pg_temp")


def pins_path_first(script: str) -> bool:
    """Return True if a script sets a safe search_path before all else, and no other afterwards."""
    paths = []
    for number, raw in enumerate(pglast.parse_sql(script)):
        if isinstance(raw.stmt, ast.VariableSetStmt) and raw.stmt.name in ("search_path", None):
            path = tuple(word.val.sval for word in raw.stmt.args or ())
            paths.append((number, path))
    return paths == [(0, SAFE_PATH)]


def in_block(text: str) -> list[str]:
    """Return the names that a DO block finds by the search_path before it sets one of its own."""
    body = pglast.parse_sql(text)[0].stmt.args[0].arg.sval
    names = declared_types(body)
    for kind, value in plpgsql_parts(json.loads(parse_plpgsql_json(text))):
        if kind == "expression":
            if re.fullmatch(r"SELECT pg_catalog\.set_config\('search_path', 'pg_catalog, pg_temp', true\)", value[0]):
                return names
            names += in_expression(*value)
        elif kind == "hidden":
            names.append(value)
    return names


def in_fragment(text: str) -> list[str]:
    """Return the names that a text finds by the search_path if it is a statement; prose that begins like one is
    none.
    """
    try:
        return unqualified(text)
    except ParseError:
        return []
