"""Check rules of SQL Server, and of this project, that no parser knows, over all T-SQL of the project (`tsqlcheck`).

- hints of tables: pairs that SQL Server refuses (1047), NOLOCK on a written table (1065), READPAST without ROWLOCK and
  READCOMMITTEDLOCK, or under an isolation level that refuses it (650); indexes with page locks where READPAST is used;
- reads without locks (NOLOCK, READ UNCOMMITTED) that decide something: see `decides`;
- THROW, and `raise_error`: numbers as documented (docs/reference/errors.md), messages that begin with
  ``sqlsem: `` and have no formats, THROW alone in CATCH only (10704); no RAISERROR;
- INSERT … EXEC of a procedure with INSERT … EXEC (8164) or a ROLLBACK (3915);
- @@ROWCOUNT, @@ERROR and ERROR_NUMBER() where they report something else; @@IDENTITY;
- SET options that a routine must set for itself, and those that it would have to (QUOTED_IDENTIFIER: names in double
  quotes, filtered indexes, computed columns);
- MERGE, temporary tables, functions and collations newer than SQL Server 2016 SP1, IS_ROLEMEMBER of the caller;
- the transactions on every path: `tsqlpaths`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tsqlpaths
from tsqltree import Node, called, object_name, table_name, target_of

Found = Iterator[tuple[int, str]]
ROOT = Path(__file__).resolve().parent.parent
ROUTINES = ("AlterProcedureStatement", "CreateProcedureStatement", "CreateOrAlterProcedureStatement")
ROUTINES += ("CreateTriggerStatement", "CreateOrAlterTriggerStatement")
READING = ("CreateFunctionStatement", "CreateOrAlterFunctionStatement", "CreateViewStatement")
MODULES = (*ROUTINES, *READING)
WRITES = ("InsertStatement", "UpdateStatement", "DeleteStatement", "MergeStatement")

# -- hints ----------------------------------------------------------------------------------------------------------

#: A table takes at most one hint of each group: granularity, and duration. (The documentation has READCOMMITTEDLOCK
#: in the first group. The server takes it beside ROWLOCK, as a hint of the second.)
GROUPS = (
    {"ROWLOCK", "PAGLOCK", "TABLOCK", "TABLOCKX", "NOLOCK"},
    {"NOLOCK", "READCOMMITTED", "READCOMMITTEDLOCK", "REPEATABLEREAD", "SERIALIZABLE", "SNAPSHOT"},
)
SAME = {"READUNCOMMITTED": "NOLOCK", "HOLDLOCK": "SERIALIZABLE"}
#: Hint → the hints that it may not be combined with.
CONFLICTS = {
    "NOLOCK": {"UPDLOCK", "XLOCK", "READPAST", "NOWAIT"},
    "READPAST": {"SERIALIZABLE", "SNAPSHOT", "TABLOCK", "TABLOCKX", "PAGLOCK"},
}
#: Tables that are read with READPAST although their indexes have page locks, and why.
PAGE_LOCKS = {
    "history": "only prune passes rows here, and may wait",
    "rate_window": "only prune passes rows here, and may wait",
    "rate_slot": "only prune passes rows here, and may wait",
    "commit_marker": "a row a hand-over in its last moments: few",
    "queue_setting": "a row a queue: few",
    "queue_wait": "a row a key that waits: few, and written by one key",
    "schedule": "a row a schedule: few, and read by key",
}


def hints_of(table: Node) -> set[str]:
    words = {hint.word("HintKind").upper() for hint in table.parts("TableHints")} - {"INDEX", "FORCESEEK", "NONE"}
    return {SAME.get(word, word) for word in words}


def hints(root: Node) -> Found:
    targets = {id(target_of(statement)) for statement in root.all(*WRITES)}
    inserted = {id(target_of(statement)) for statement in root.all("InsertStatement")}
    for table in root.all("NamedTableReference"):
        words = hints_of(table)
        shown = ", ".join(sorted(words))
        for group in GROUPS:
            if len(words & group) > 1:
                yield table.line, f"these hints may not stand together (1047): {shown}"
        for hint, others in CONFLICTS.items():
            if hint in words and words & others:
                yield table.line, f"{hint} may not stand beside {', '.join(sorted(words & others))} (1047, 650)"
        if "NOLOCK" in words and id(table) in targets:
            yield table.line, "NOLOCK on the table that is written (1065)"
        if "READPAST" in words and id(table) in inserted:
            yield table.line, "READPAST on the table that INSERT writes"
        if "READPAST" in words and not {"ROWLOCK", "READCOMMITTEDLOCK"} <= words:
            yield (
                table.line,
                "READPAST without ROWLOCK and READCOMMITTEDLOCK: it passes neither pages nor versions of rows",
            )


def levels(routine: Node) -> Found:
    """Yield READPAST under a level that refuses it."""
    found = {statement.word("Level") for statement in routine.all("SetTransactionIsolationLevelStatement")}
    for table in routine.all("NamedTableReference"):
        if "READPAST" in hints_of(table) and not found <= {"ReadCommitted", "RepeatableRead"}:
            yield table.line, f"READPAST under {', '.join(sorted(found))} (650)"


def page_locks(roots: list[tuple[str, Node]]) -> Iterator[tuple[str, int, str]]:
    used = {
        table_name(table)
        for _, root in roots
        for table in root.all("NamedTableReference")
        if "READPAST" in hints_of(table)
    }
    for file, root in roots:
        if not file.startswith("sqlsem"):
            continue
        for node in root.all("CreateIndexStatement", "UniqueConstraintDefinition"):
            owner = (
                node
                if node.kind == "CreateIndexStatement"
                else next(
                    parent
                    for parent in node.above()
                    if parent.kind
                    in ("CreateTableStatement", "DeclareTableVariableBody", "AlterTableAddTableElementStatement")
                )
            )
            schema, name = object_name(owner.part("OnName") or owner.part("SchemaObjectName"))
            if schema != "sqlsem" or name not in used or name in PAGE_LOCKS:
                continue
            options = {option.word("OptionKind"): option.word("OptionState") for option in node.parts("IndexOptions")}
            if options.get("AllowPageLocks") != "Off":
                yield (
                    file,
                    node.line,
                    f"READPAST is used on {name}, and this index has locks of pages, which it does not pass",
                )


# -- reads without locks --------------------------------------------------------------------------------------------

#: Permitted reads without locks that decide something, and why: (routine, table).
MAY_DECIDE = {
    ("check_guard", "entry"): "candidates; the one that is chosen is read again under its pin",
    ("check_guard", "member"): "candidates; the one that is chosen is read again under its pin",
    ("pick_fair_task", "queue_setting"): "a guess: whatever it says is asked again with locks",
}


def is_shown(table: Node) -> bool:
    """Return True if the rows of a read go to the client."""
    for around in table.above():
        if around.kind == "SelectStatement":
            return not any(True for _ in around.all("SelectSetVariable"))
        if around.kind in (
            "SetVariableStatement",
            "DeclareVariableStatement",
            "IfStatement",
            "WhileStatement",
            *WRITES,
        ):
            return False
    return False


def writes(routine: Node) -> bool:
    """Return True if a routine writes a table, or takes a lock, by itself."""
    for statement in routine.all(*WRITES):
        target = target_of(statement)
        if target is not None and target.kind != "VariableTableReference":
            return True
    return any(called(statement)[1] == "sp_getapplock" for statement in routine.all("ExecuteStatement"))


def acting(routines: Mapping[str, Node]) -> set[str]:
    """Return the routines that do more than read: they write, take a lock, call such a routine, or are called by
    one.
    """
    calls = {
        name: {called(statement)[1] for statement in routine.all("ExecuteStatement")} & set(routines)
        for name, routine in routines.items()
    }
    found = {name for name, routine in routines.items() if writes(routine)}
    while True:
        more = {name for name in routines if calls[name] & found} | {callee for name in found for callee in calls[name]}
        if more <= found:
            return found
        found |= more


def decides(name: str, routine: Node, dirty: set[str], acts: set[str]) -> Found:
    """Yield reads without locks that decide something.

    Such a read may see rows that are never committed. So its rows may be shown: by a routine that neither writes a
    table nor takes a lock, calls no routine that does, and is called by none; or by a SELECT whose rows go to the
    client. Anywhere else they end up in a condition, a variable or a table, and decide.
    """
    if name not in acts:
        return
    everywhere = any(
        statement.word("Level") in ("ReadUncommitted", "Snapshot")
        for statement in routine.all("SetTransactionIsolationLevelStatement")
    )
    for table in routine.all("NamedTableReference", "SchemaObjectFunctionTableReference"):
        of = table_name(table)
        without = "NOLOCK" in hints_of(table) or of in dirty or (everywhere and of and not hints_of(table))
        if without and not is_shown(table) and (name, of) not in MAY_DECIDE:
            yield table.line, f"{name} reads {of} without locks, and this read decides: read committed rows"


# -- errors ---------------------------------------------------------------------------------------------------------


def documented() -> set[int]:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    return {int(number) for number in re.findall(r"\b(500\d\d)\b", text)}


def errors(root: Node, numbers: set[int]) -> Found:
    for node in root.all("RaiseErrorStatement"):
        words, severity = node.part("FirstParameter"), node.part("SecondParameter")
        low = severity is not None and severity.kind == "IntegerLiteral" and int(severity.word("Value")) <= 10
        if words is None or words.word("Value") != "%s" or not low:  # a message at once, and no error
            yield node.line, "RAISERROR goes on behind the error, and reads formats: THROW"
    for node in root.all("ThrowStatement"):
        number, message = node.part("ErrorNumber"), node.part("Message")
        if number is None:
            if not any(parent.field == "CatchStatements" for parent in node.above()):
                yield node.line, "THROW without a number, outside CATCH (10704)"
        elif number.kind == "IntegerLiteral":
            yield from _number(number, numbers)
        if message is not None and message.kind == "StringLiteral":
            yield from _message(message)
            if re.search(r"(?<!%)(%%)*%(?!%)", message.word("Value")):
                yield message.line, "a message with a % is a format: write %%"
    for node in root.all("ExecuteStatement"):
        if called(node) == ("sqlsem", "raise_error"):
            parameters = list(node.all("ExecuteParameter"))
            first = parameters[0].part("ParameterValue")
            if first is not None and first.kind == "IntegerLiteral":
                yield from _number(first, numbers)
            second = parameters[1].part("ParameterValue")
            if second is not None and second.kind == "StringLiteral":
                yield from _message(second)
    for node in root.all("SetVariableStatement"):  # @message has the text of a refusal
        variable, value = node.part("Variable"), node.part("Expression")
        if variable is None or value is None or variable.word("Name").lower() != "@message":
            continue
        first = next(value.all("StringLiteral"), None)
        if first is not None and (value.kind == "StringLiteral" or value.text().startswith("CONCAT(")):
            yield from _message(first)


def _number(node: Node, numbers: set[int]) -> Found:
    if int(node.word("Value")) not in numbers:
        yield node.line, f"error {node.word('Value')} is not in docs/reference/errors.md"


def _message(node: Node) -> Found:
    text = node.word("Value")
    if not text.startswith("sqlsem: "):
        yield node.line, f"a message of ours begins with 'sqlsem: ', not {text[:20]!r}"
    if len(text) > 2000:
        yield node.line, "a message of more than 2048 characters is cut off"


# -- statements -----------------------------------------------------------------------------------------------------

#: Functions of 2017 to 2025; `tsqlcheck.NEWER` has more of them.
NEWER_TABLES = {"generate_series", "ai_generate_chunks", "regexp_matches", "regexp_split_to_table"}
MAX_ARGUMENTS = {"LTRIM": 1, "RTRIM": 1, "ISJSON": 1, "STRING_SPLIT": 2}
#: They report on the statement before, and on no other.
TELLING = ("SelectStatement", "InsertStatement", "UpdateStatement", "DeleteStatement")


def newer(root: Node) -> Found:
    for node in root.all(
        "SchemaObjectFunctionTableReference", "GlobalFunctionTableReference", "BuiltInFunctionTableReference"
    ):
        name = node.part("Name")
        schema, word = object_name(node.part("SchemaObject")) if name is None else ("", name.word("Value").lower())
        if not schema and word in NEWER_TABLES:
            yield node.line, f"{word.upper()} is newer than SQL Server 2016"
        if len(node.parts("Parameters")) > MAX_ARGUMENTS.get(word.upper(), 99):
            yield node.line, f"{word.upper()} with so many arguments is newer than SQL Server 2016"
    for node in root.all("FunctionCall"):
        name = node.part("FunctionName")
        word = "" if name is None else name.word("Value").upper()
        if len(node.parts("Parameters")) > MAX_ARGUMENTS.get(word, 99):
            yield node.line, f"{word} with so many arguments is newer than SQL Server 2016"
    for node in root.all("Identifier"):
        if node.field == "Collation" and re.search(r"_UTF8$|_(140|160)_", node.word("Value"), re.IGNORECASE):
            yield node.line, f"collation {node.word('Value')} is newer than SQL Server 2016"


def statements(root: Node) -> Found:
    for node in root.all("MergeStatement"):
        yield node.line, "MERGE locks less than it looks, and has had faults in every version: UPDATE, then INSERT"
    for node in root.all("NamedTableReference", "CreateTableStatement"):
        name = object_name(node.part("SchemaObject") or node.part("SchemaObjectName"))[1]
        if name.startswith("#"):
            yield node.line, f"{name}: a temporary table has the collation of tempdb; use a table variable"
    for node in root.all("SelectStatement"):
        if node.part("Into") is not None:
            yield node.line, "SELECT … INTO makes a table"
    for node in root.all("Identifier", "StringLiteral"):
        if node.word("QuoteType") == "DoubleQuote":
            yield node.line, f"a name in double quotes needs QUOTED_IDENTIFIER ON: [{node.word('Value')}]"
    for node in root.all("CreateIndexStatement", "ColumnDefinition"):
        if node.part("FilterPredicate") is not None or node.part("ComputedColumnExpression") is not None:
            yield node.line, "a filtered index or a computed column refuses sessions with QUOTED_IDENTIFIER OFF (1934)"
    for node in root.all("FunctionCall"):
        name = node.part("FunctionName")
        word = "" if name is None else name.word("Value").upper()
        if word == "IS_ROLEMEMBER" and len(node.parts("Parameters")) == 1:
            yield (
                node.line,
                "IS_ROLEMEMBER asks the domain controller for a Windows login, and may be wrong without it: IS_MEMBER",
            )
        if word in ("ERROR_NUMBER", "ERROR_MESSAGE", "ERROR_LINE", "ERROR_PROCEDURE") and not any(
            parent.field == "CatchStatements" for parent in node.above()
        ):
            yield node.line, f"{word}() outside CATCH is NULL"
    for node in root.all("SetRowCountStatement"):
        rows = node.part("NumberRows")
        if rows is None or rows.word("Value") != "0":
            yield node.line, "SET ROWCOUNT of rows cuts off every statement behind it: TOP"


def tells(statement: Node) -> bool:
    """Return True if a statement leaves its own @@ROWCOUNT behind on every path."""
    if statement.kind == "IfStatement":
        then, other = statement.part("ThenStatement"), statement.part("ElseStatement")
        return then is not None and other is not None and tells(then) and tells(other)
    if statement.kind == "BeginEndBlockStatement":
        listed = next(statement.all("StatementList")).parts("Statements")
        return bool(listed) and tells(listed[-1])
    return statement.kind in TELLING


def counted(root: Node) -> Found:
    """Yield @@ROWCOUNT and its like after a statement that they do not report on."""
    for node in root.all("GlobalVariableExpression"):
        word = node.word("Name").upper()
        if word == "@@IDENTITY":
            yield node.line, "@@IDENTITY may be that of a trigger: SCOPE_IDENTITY()"
        if word not in ("@@ROWCOUNT", "@@ERROR"):
            continue
        # Find the statement that reads it, in the list of the statement before it.
        inner: Node = node
        before: Node | None = None
        for around in node.above():
            listed = around.parts("Statements") if around.kind in ("StatementList", "TSqlBatch") else []
            if listed:
                place = next(number for number, statement in enumerate(listed) if statement is inner)
                before = listed[place - 1] if place else None
                break
            if around.kind in ("IfStatement", "WhileStatement") and inner.field != "Predicate":
                break  # the condition has been evaluated since
            inner = around
        if before is not None and inner.kind == "DeclareVariableStatement" and len(inner.parts("Declarations")) > 1:
            first = next(inner.parts("Declarations")[0].all("GlobalVariableExpression"), None)
            if first is not node:
                yield node.line, f"{word} is read behind another variable of the same DECLARE, which sets it"
        if before is None and word == "@@ERROR" and inner.parent is not None and inner.parent.kind == "TSqlBatch":
            continue  # of the batch before
        if before is None or not tells(before):
            yield node.line, f"{word} is read behind a statement that sets it anew"


# -- routines -------------------------------------------------------------------------------------------------------

#: As tests/unit/test_tsql_text.py.
WITHOUT_ROWCOUNT = {"work"}
#: It reads nothing before it calls acquire, which sets it.
LEAVES_TO_ACQUIRE = {"try"}


def options(name: str, routine: Node, public: bool, for_sessions: bool) -> Found:
    """Yield SET options that a routine must not take from its caller."""
    on = {
        word
        for statement in routine.all("PredicateSetStatement")
        if statement.word("IsOn") == "True"
        for word in statement.word("Options").split(", ")
    }
    off = {
        word
        for statement in routine.all("PredicateSetStatement")
        if statement.word("IsOn") == "False"
        for word in statement.word("Options").split(", ")
    }
    if "Trigger" not in routine.kind and "NoCount" not in on:
        yield routine.line, f"{name} does not SET NOCOUNT ON: counts of rows stand before its answers"
    if public and name not in WITHOUT_ROWCOUNT and not any(True for _ in routine.all("SetRowCountStatement")):
        yield routine.line, f"{name} does not SET ROWCOUNT 0: half of its statements may be done"
    begins = any(True for _ in routine.all("BeginTransactionStatement"))
    if public and begins and "XactAbort" not in on:
        yield routine.line, f"{name} begins a transaction, and does not SET XACT_ABORT ON: errors go on in it"
    refuses = any(
        re.search("must not be called in.* open transaction", literal.word("Value"))
        for literal in routine.all("StringLiteral")
    )
    if for_sessions and refuses and name not in LEAVES_TO_ACQUIRE and "ImplicitTransactions" not in off:
        yield (
            routine.line,
            f"{name} does not SET IMPLICIT_TRANSACTIONS OFF: its first read would begin a transaction that stays open",
        )


def nested(routines: Mapping[str, Node]) -> Iterator[tuple[str, int, str]]:
    """Yield INSERT … EXEC of a routine that has one itself, or that rolls back."""
    calls = {
        name: {called(statement)[1] for statement in routine.all("ExecuteStatement", "ExecuteInsertSource")}
        for name, routine in routines.items()
    }

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        new = [name]
        while new:
            routine = new.pop()
            if routine not in seen:
                seen.add(routine)
                new += calls.get(routine, set())
        return seen & set(routines)

    for name, routine in routines.items():
        for node in routine.all("ExecuteInsertSource"):
            for callee in sorted(reached(called(node)[1])):
                if any(True for _ in routines[callee].all("ExecuteInsertSource")):
                    yield name, node.line, f"INSERT … EXEC of {callee}, which has an INSERT … EXEC itself (8164)"
                if any(True for _ in routines[callee].all("RollbackTransactionStatement")):
                    yield name, node.line, f"INSERT … EXEC of {callee}, which may ROLLBACK (3915)"


# -- everything ------------------------------------------------------------------------------------------------------


def routine_name(routine: Node) -> str:
    reference = routine.part("ProcedureReference") or routine
    name = reference.part("Name") or reference.part("SchemaObjectName")
    return object_name(name)[1]


def granted(roots: list[tuple[str, Node]]) -> set[str]:
    """The routines that some role may run: permissions.sql has (name, letters of roles)."""
    found = set()
    for file, root in roots:
        if file.endswith("permissions.sql"):
            for row in root.all("RowValue"):
                words = [column.word("Value") for column in row.parts("ColumnValues")]
                if len(words) == 2 and re.fullmatch("[upwor]+", words[1]):
                    found.add(words[0].lower())
    return found


def findings(roots: list[tuple[str, Node]], public: set[str] | None = None) -> list[tuple[str, int, str]]:
    """Return file, line and message of each finding in the trees. ``public``: procedures of logins, if not from
    there.
    """
    found: list[tuple[str, int, str]] = []
    numbers = documented()
    public = granted(roots) if public is None else public
    routines: dict[str, Node] = {}
    files: dict[str, str] = {}
    dirty: set[str] = set()
    for file, root in roots:
        if not file.startswith("sqlsem"):
            continue
        for module in root.all(*MODULES):
            name = routine_name(module)
            if module.kind in READING:
                if any("NOLOCK" in hints_of(table) for table in module.all("NamedTableReference")):
                    dirty.add(name)
            elif module.kind != "CreateProcedureStatement":
                routines[name], files[name] = module, file
    for file, root in roots:
        for rule in (hints, statements, newer, counted):
            found += [(file, line, words) for line, words in rule(root)]
        if file.startswith("sqlsem"):
            found += [(file, line, words) for line, words in errors(root, numbers)]
    acts = acting(routines)
    # Procedures that programs call, on connections that begin no transaction by themselves.
    sent = {
        called(statement)[1]
        for file, root in roots
        if file.endswith("client.sql")
        for statement in root.all("ExecuteStatement")
    }
    for name, routine in routines.items():
        own = (
            *levels(routine),
            *decides(name, routine, dirty, acts),
            *options(name, routine, name in public, name in public - sent),
        )
        found += [(files[name], line, words) for line, words in own]
    found += page_locks(roots)
    found += [(files[name], line, words) for name, line, words in nested(routines)]
    found += [(files[name], line, f"{name}: {words}") for name, line, words in tsqlpaths.findings(routines, public)]
    return found


# -- proof ----------------------------------------------------------------------------------------------------------

FAULTS = ROOT / "tests" / "support" / "tsqlrules.sql"


def unseen(checker: Any) -> Iterator[str]:
    """Yield the faults in `FAULTS` that are not found, and findings without a fault."""
    text = FAULTS.read_text(encoding="utf-8").replace("{schema}", "sqlsem")
    parts = re.split(r"(?m)^-- expect: ", text)[1:]
    if len(parts) < 50:
        yield f"proof: there are {len(parts)} faults only"
    for part in parts:
        words, _, body = part.partition("\n")
        roots = []
        for batch in re.split(r"(?m)^GO$", body):
            tree, wrong = checker.parse(batch)
            if wrong:
                yield f"proof: {words}: {wrong[0][1]}"
            roots.append(("sqlsem/fault.sql", Node(tree, source=batch)))
        names = {routine_name(routine) for _, root in roots for routine in root.all(*ROUTINES)}
        found = sorted({message for _, _, message in findings(roots, names)})
        if words == "nothing" and found:
            yield f"proof: this is no fault: {found}"
        elif words != "nothing" and not any(words in message for message in found):
            yield f"proof: {words!r} goes unnoticed; what is found there: {found}"
