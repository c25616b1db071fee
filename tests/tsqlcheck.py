"""Check all T-SQL of the project with Microsoft's own parser (ScriptDom, as of SQL Server 2016 and 2019) and model
(DacFx, for SQL Server 2016 and Azure SQL).

Checked are syntax; names of tables, columns, table variables, indexes, procedures and parameters; built-in functions
and their arguments; types and collations, in databases of every collation (`tsqltyped`); and the use of hints, errors,
SET options and transactions (`tsqlrules`). No server is needed; faults at run time are not found.

    python tests/tsqlcheck.py            prints file:line: message for each finding; exit status 1 if there are any
    python tests/tsqlcheck.py --prove    besides, breaks the texts in many ways, in memory, and says which go unnoticed

It needs what `microsoft` fetches, and pythonnet (dependency group ``tsqlcheck``).
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import microsoft
import tsqlrules
import tsqltyped
from tsqlknown import PROCEDURES
from tsqltree import Node

from sqlsem import sql
from sqlsem.sql.features import FEATURES, chosen, compose, listed

ROOT = Path(__file__).resolve().parent.parent
#: The objects of SQL Server itself that the texts use; DacFx would need master.dacpac for them, which is in no wheel.
SYSTEM = """
CREATE TABLE [tsqlcheck_sys].[databases] (name sysname, database_id int, compatibility_level tinyint,
    create_date datetime, is_read_committed_snapshot_on bit, snapshot_isolation_state tinyint,
    delayed_durability_desc nvarchar(60))
CREATE TABLE [tsqlcheck_sys].[dm_exec_sessions] (session_id smallint, login_time datetime, host_name nvarchar(128),
    program_name nvarchar(128), host_process_id int, last_request_start_time datetime, last_request_end_time datetime,
    status nvarchar(30), original_login_name nvarchar(128), login_name nvarchar(128),
    open_transaction_count int, transaction_isolation_level smallint)
CREATE TABLE [tsqlcheck_sys].[dm_exec_connections] (session_id int, encrypt_option nvarchar(40))
CREATE TABLE [tsqlcheck_sys].[dm_exec_requests] (session_id smallint, start_time datetime, status nvarchar(30))
CREATE TABLE [tsqlcheck_sys].[dm_tran_locks] (resource_type nvarchar(60), resource_database_id int,
    resource_associated_entity_id bigint, resource_description nvarchar(256), request_session_id int,
    request_status nvarchar(60))
CREATE TABLE [tsqlcheck_sys].[dm_os_performance_counters] (object_name nchar(128), counter_name nchar(128),
    instance_name nchar(128), cntr_value bigint)
CREATE TABLE [tsqlcheck_sys].[dm_exec_query_stats] (plan_handle varbinary(64), statement_start_offset int,
    statement_end_offset int, plan_generation_num bigint, execution_count bigint, sql_handle varbinary(64),
    min_grant_kb bigint, max_grant_kb bigint, last_execution_time datetime, creation_time datetime)
CREATE FUNCTION [tsqlcheck_sys].[dm_db_index_physical_stats](@database int, @object int, @index int, @part int,
    @mode nvarchar(20)) RETURNS TABLE AS RETURN (SELECT CAST(0 AS bigint) AS ghost_record_count)
CREATE FUNCTION [tsqlcheck_sys].[dm_exec_text_query_plan](@plan varbinary(64), @start int, @end int)
    RETURNS TABLE AS RETURN (SELECT CAST(0 AS smallint) AS dbid, CAST(0 AS int) AS objectid,
    CAST(N'' AS nvarchar(max)) AS query_plan)
CREATE FUNCTION [tsqlcheck_sys].[fn_helpcollations]() RETURNS TABLE AS RETURN (SELECT CAST(N'' AS sysname) AS name)
CREATE ROLE [certify_role]
CREATE USER [certify_user] WITHOUT LOGIN
CREATE TABLE [tsqlcheck_sys].[tables] (name sysname, object_id int, schema_id int)
CREATE TABLE [tsqlcheck_sys].[dm_os_sys_info] (max_workers_count int)
CREATE TABLE [tsqlcheck_sys].[database_role_members] (role_principal_id int, member_principal_id int)
CREATE TABLE [tsqlcheck_sys].[triggers] (object_id int, parent_id int, name sysname, is_disabled bit)
CREATE TABLE [tsqlcheck_sys].[sql_modules] (object_id int, definition nvarchar(max))
CREATE TABLE [tsqlcheck_sys].[database_principals] (name sysname, principal_id int, type char(1))
CREATE TABLE [tsqlcheck_sys].[database_permissions] (class tinyint, major_id int, minor_id int,
    grantee_principal_id int, type char(4), permission_name nvarchar(128), state char(1))
CREATE TABLE [tsqlcheck_sys].[key_constraints] (name sysname, object_id int, parent_object_id int, type char(2))
CREATE TABLE [tsqlcheck_sys].[schemas] (name sysname, schema_id int, principal_id int)
CREATE TABLE [tsqlcheck_sys].[user_token] (principal_id int, sid varbinary(85), name nvarchar(128), type nvarchar(128),
    usage nvarchar(128))
CREATE TABLE [tsqlcheck_sys].[all_objects] (name sysname, object_id int, schema_id int, type char(2))
CREATE TABLE [tsqlcheck_sys].[objects] (name sysname, object_id int, schema_id int, parent_object_id int, type char(2))
CREATE PROCEDURE [dbo].[sp_getapplock] @Resource nvarchar(255), @LockMode varchar(32),
    @LockOwner varchar(32) = 'Transaction', @LockTimeout int = NULL, @DbPrincipal sysname = N'dbo' AS RETURN 0
CREATE PROCEDURE [dbo].[sp_releaseapplock] @Resource nvarchar(255), @LockOwner varchar(32) = 'Transaction',
    @DbPrincipal sysname = N'dbo' AS RETURN 0
CREATE PROCEDURE [dbo].[sp_set_session_context] @key sysname, @value sql_variant, @read_only bit = 0 AS RETURN 0
CREATE PROCEDURE [dbo].[sp_refreshsqlmodule] @name nvarchar(776), @namespace nvarchar(20) = NULL AS RETURN 0
CREATE PROCEDURE [dbo].[sp_executesql] @stmt nvarchar(max), @params nvarchar(max) = NULL AS RETURN 0
"""
#: Built-in functions that SqlParser knows and SQL Server 2016 does not.
NEWER = {"APPROX_COUNT_DISTINCT", "CONCAT_WS", "STRING_AGG", "TRANSLATE", "TRIM"}
DATED = {"DATEADD", "DATEDIFF", "DATEDIFF_BIG", "DATENAME", "DATEPART"}
#: Statements that become objects of the model; all others are put into a procedure of their own.
OBJECTS = re.compile(r"(Create|Alter|CreateOrAlter)(Table|Index|Sequence|View|Function|Trigger|Procedure)Statement")
#: Statements that change objects of earlier scripts. The model gets the result of all of them.
CHANGES = {"AlterTableAddTableElementStatement", "AlterTableAlterColumnStatement", "DropIndexStatement"}
CHANGES |= {"AlterTableDropTableElementStatement"}

BLANK = {"WhiteSpace", "SingleLineComment", "MultilineComment"}

Batch = tuple[str, int, str]  # file, first line, text
Finding = tuple[str, int, str]


# -- the texts -------------------------------------------------------------------------------------------------------


def batches(root: Path, read: Callable[[Path], str]) -> Iterator[Batch]:
    """All T-SQL of a checkout, batch by batch, as `sqlsem sql` prints it."""

    def split(file: str, first: int, text: str, separator: str = r"^[ \t]*GO[ \t]*$") -> Iterator[Batch]:
        at = 0
        for match in [*re.finditer(separator, text, re.MULTILINE | re.IGNORECASE), None]:
            end = len(text) if match is None else match.start()
            if text[at:end].strip():
                yield file, first + text.count("\n", 0, at), sent(text[at:end])
            at = end if match is None else match.end()

    folder = root / "sqlsem" / "sql" / "mssql"
    order = ["schema-*", "routines", "deadlocks", "public", "tasks", "batches", "conversions", "permissions", "drop"]
    names = [path for pattern in order for path in sorted(folder.glob(f"{pattern}.sql"))]
    for path in [*names, *sorted(set(folder.glob("*.sql")) - {*names, folder / "abbreviations.sql"})]:
        separator = (
            r"^-- name: \w+$" if path.stem in ("client", "doctor", "certify", "by_hand") else r"^[ \t]*GO[ \t]*$"
        )
        yield from split(str(path.relative_to(root)), 1, sql.fill("mssql", read(path)), separator)
    # (Not its routines.sql: it has a procedure a second time, which the model does not take.)
    path = root / "tests" / "support" / "next_version" / "mssql" / "schema.sql"
    yield from split(str(path.relative_to(root)), 1, sql.fill("mssql", read(path)))
    for path in sorted((root / "clients" / "tsql").glob("*.sql")):
        yield from split(str(path.relative_to(root)), 1, read(path))
    for path in [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]:
        if path.stem == "mysql":  # its SQL is not SQL Server's
            continue
        text = read(path)
        for fence in re.finditer(r"^( *)```sql\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
            code, first = fence[2], text.count("\n", 0, fence.start()) + 2
            if "-- SQL Server" in code:  # both engines in one block: the lines that say so
                code = re.sub(r"^.*(?<!-- SQL Server)$", "", code, flags=re.MULTILINE)
            elif re.search(r"\bEXEC\b|@\w|\{.*call", code):
                code = re.sub(r"^CALL .*", "", code, flags=re.MULTILINE)
            elif re.search(r"\bCALL\b|=>|\$\$|RETURNING|\bpg_\w|\bpsql\b|\bLANGUAGE\b|\bsqlsem\.\w+\(", code):
                continue  # PostgreSQL
            yield from split(str(path.relative_to(root)), first, code)


def part(features: frozenset[str]) -> Callable[[Path], str]:
    """The scripts of a database with these features: each without the sections of other features, and no page."""

    def read(path: Path) -> str:
        feature = sql.FEATURE_OF.get(path.stem.partition("-")[0])  # (None: doctor.sql, certify.sql, by_hand.sql)
        if path.parent.name != "mssql" or "next_version" in path.parts or feature not in features:
            return ""
        return compose(path.read_text(encoding="utf-8"), features, feature)

    return read


def place(root: Path, file: str, line: int) -> str:
    """Return file and line of a finding. In a script, ``line`` counts the lines that `sqlsem sql` prints."""
    if file.startswith("sqlsem"):
        text = (root / file).read_text(encoding="utf-8").replace("{schema}", "sqlsem")
        printed = sql.fill("mssql", text).splitlines()
        blocks = difflib.SequenceMatcher(None, text.splitlines(), printed, autojunk=False).get_matching_blocks()
        first, first_printed, size = next(block for block in reversed(blocks) if block.b < line)
        line = first + min(line - first_printed, size)
    return f"{file}:{line}"


def sent(text: str) -> str:
    """Return the text as the server gets it: without the marks of drivers, of the client and of Agent."""
    text = re.sub(r"\$\((?:ESCAPE_\w+\()?\w+\)?\)", "0", text)
    text = re.sub(r"(?<=LOCK_TIMEOUT ):\w+", "0", text)
    marks = iter(range(1, 10_000))
    return re.sub(r"'(?:[^']|'')*'|--[^\n]*|\?", lambda m: f"@p{next(marks)}" if m[0] == "?" else m[0], text)


# -- Microsoft's assemblies -----------------------------------------------------------------------------------------


def prepare() -> None:
    """Start the runtime in this process; from then on its namespaces can be imported."""
    dotnet = microsoft.dotnet()
    if any(os.environ.get(name) != value for name, value in dotnet.environment.items()):
        # The search path of libraries is read when a process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **dotnet.environment})
    import pythonnet
    from clr_loader import get_coreclr

    with tempfile.TemporaryDirectory() as folder:
        config = microsoft.runtime_config(Path(folder), "tsqlcheck")
        pythonnet.set_runtime(get_coreclr(runtime_config=str(config), dotnet_root=str(dotnet.root)))
        pythonnet.load()
    from System.Reflection import Assembly

    for name in ("SqlServer.TransactSql.ScriptDom", "SqlServer.Dac.Extensions", "SqlServer.SqlParser"):
        Assembly.LoadFrom(str(microsoft.assemblies() / f"Microsoft.{name}.dll"))


def _index(table: Any, index: Any) -> tuple[str, str]:
    return table.BaseIdentifier.Value.lower(), index.Value.lower()


class Changes:
    """The changes that scripts make to objects of earlier ones."""

    def __init__(self, trees: list[Any]) -> None:
        #: Of a table, the columns that were added, as they were written.
        self.columns: dict[str, list[str]] = {}
        #: Of a column, its new type.
        self.types: dict[tuple[str, str], str] = {}
        self._indexes: dict[tuple[str, str], tuple[int, int]] = {}
        dropped: set[tuple[str, str]] = set()
        for number, (_, text, _, nodes) in enumerate(trees):

            def written(node: Any, text: str = text) -> str:
                return text[node.StartOffset : node.StartOffset + node.FragmentLength]

            for kind, node in nodes:
                if kind == "AlterTableAddTableElementStatement":
                    name = node.SchemaObjectName.BaseIdentifier.Value.lower()
                    added = self.columns.setdefault(name, [])
                    for columndefinition in node.Definition.ColumnDefinitions:
                        column = name, columndefinition.ColumnIdentifier.Value.lower()
                        if column in dropped:  # and made anew
                            self.types[column] = written(columndefinition.DataType)
                        else:
                            added.append(" ".join(written(columndefinition).split()))
                elif kind == "AlterTableDropTableElementStatement":
                    name = node.SchemaObjectName.BaseIdentifier.Value.lower()
                    dropped |= {
                        (name, altertabledroptableelement.Name.Value.lower())
                        for altertabledroptableelement in node.AlterTableDropTableElements
                    }
                elif kind == "AlterTableAlterColumnStatement":
                    name = node.SchemaObjectName.BaseIdentifier.Value.lower()
                    self.types[name, node.ColumnIdentifier.Value.lower()] = written(node.DataType)
                elif kind == "CreateIndexStatement":
                    self._indexes[_index(node.OnName, node.Name)] = (number, node.StartOffset)

    def lasts(self, number: int, index: Any) -> bool:
        """Return True unless a later script drops an index, or makes it anew."""
        return self._indexes[_index(index.OnName, index.Name)] == (number, index.StartOffset)


class Checker:
    """One check of all the batches."""

    def __init__(self) -> None:
        import Microsoft.SqlServer.TransactSql.ScriptDom as dom
        import System
        from System.Reflection import BindingFlags

        self.System, self.dom = System, dom
        self.any = BindingFlags.Instance | BindingFlags.Static | BindingFlags.Public | BindingFlags.NonPublic
        assemblies = System.AppDomain.CurrentDomain.GetAssemblies()
        parser = next(item for item in assemblies if item.GetName().Name == "Microsoft.SqlServer.SqlParser")
        space = "Microsoft.SqlServer.Management.SqlParser.MetadataProvider.Internals.BuiltInFunctionLookup"
        lookup = parser.GetType(space).GetProperty("Instance", self.any).GetValue(None)
        self.built_in = {
            str(self.get(item, "Name")).upper(): (self.get(item, "MinNumberOfArgs"), self.get(item, "MaxNumberOfArgs"))
            for item in self.get(lookup, "AllBuiltIns")
            if str(self.get(item, "Name")) not in NEWER
        }
        #: The system's own objects.
        self.system = [self.parse(script)[0] for script in re.split(r"\n(?=CREATE)", SYSTEM.strip())]
        self.date_parts = {str(self.get(item, "Name")) for item in self.get(lookup, "DateParts")}

    def get(self, thing: Any, name: str) -> Any:
        return thing.GetType().GetProperty(name, self.any).GetValue(thing)

    def array(self, kind: str, items: Any) -> Any:
        return self.System.Array[getattr(self.System, kind)](list(items))

    def parse(self, text: str, parser: str = "TSql130Parser") -> tuple[Any, list[tuple[int, str]]]:
        tree, errors = getattr(self.dom, parser)(True).Parse(self.System.IO.StringReader(text))
        return tree, [(error.Line, str(error.Message)) for error in errors]

    def walk(self, raw: Any) -> list[tuple[str, Any]]:
        """Return everything in a tree, with the names of its types."""
        return [(node.kind, node.raw) for node in Node(raw).walk()]

    # -- all batches -------------------------------------------------------------------------------------------------

    def check(self, all_batches: list[Batch], typed: bool = True) -> list[Finding]:
        findings: list[Finding] = []
        trees = []
        roots: list[tuple[str, Node]] = []
        for file, first, text in all_batches:
            text = "\n" * (first - 1) + text  # so that lines are the file's
            tree, errors = self.parse(text)
            errors += [error for error in self.parse(text, "TSql150Parser")[1] if error not in errors]
            findings += [(file, line, message) for line, message in errors]
            if not errors:
                root = Node(tree, source=text)
                roots.append((file, root))
                trees.append((file, text, tree, [(node.kind, node.raw) for node in root.walk()]))
        # Later checks would miss a text of the project that does not parse.
        whole = not any(file.startswith("sqlsem") for file, _, _ in findings)
        procedures = self.procedures(trees)
        for file, _, _, nodes in trees:
            findings += [(file, line, message) for line, message in self.calls(nodes, procedures)]
        if typed:
            findings += tsqlrules.findings(roots)
            self.typed = tsqltyped.Typed([(file, tree) for file, _, tree, _ in trees], self.system)
            findings += self.typed.findings
        if whole:
            found_there = self.model("Sql130", trees)
            findings += found_there
            for file, line, message in set(self.model("SqlAzure", trees)) - set(found_there):
                findings.append((file, line, f"Azure SQL: {message}"))
        return sorted(set(findings))

    def procedures(self, trees: list[Any]) -> dict[str, dict[str, tuple[bool, bool]]]:
        """Return procedure → parameters in order → (optional, OUTPUT)."""
        by_name = {}
        for nodes in [*(self.walk(tree) for tree in self.system), *(tree[3] for tree in trees)]:
            for kind, node in nodes:
                if kind in PROCEDURES:
                    name = node.ProcedureReference.Name.BaseIdentifier.Value.lower()
                    by_name[name] = {
                        parameter.VariableName.Value.lower(): (
                            parameter.Value is not None,
                            str(parameter.Modifier) == "Output",
                        )
                        for parameter in node.Parameters
                    }
        return by_name

    def calls(self, nodes: list[Any], procedures: dict[str, Any]) -> Iterator[tuple[int, str]]:
        """Yield wrong calls of procedures and built-in functions, and wrong texts in EXEC."""
        for kind, node in nodes:
            if kind == "ExecutableProcedureReference" and node.ProcedureReference.ProcedureReference is not None:
                name = node.ProcedureReference.ProcedureReference.Name.BaseIdentifier.Value
                known = procedures.get(name.lower())
                if known is None:
                    continue  # the model finds it
                missing_parameters, by_name = dict(known), False
                for number, argument in enumerate(node.Parameters):
                    if argument.Variable is not None:
                        by_name, parameter = True, argument.Variable.Name.lower()
                    elif by_name:
                        yield argument.StartLine, f"{name}: a value without a name after one with a name"
                        continue
                    else:
                        parameter = list(known)[number] if number < len(known) else f"number {number + 1}"
                    if parameter not in missing_parameters:
                        if name.lower() != "sp_executesql":
                            yield argument.StartLine, f"{name} has no parameter {parameter}, or is given it twice"
                    elif argument.IsOutput and not missing_parameters.pop(parameter)[1]:
                        yield argument.StartLine, f"{name}: {parameter} is no OUTPUT parameter"
                    else:
                        missing_parameters.pop(parameter, None)
                missing = [parameter for parameter, (optional, _) in missing_parameters.items() if not optional]
                if missing:
                    yield node.StartLine, f"{name} expects {', '.join(missing)}"
            elif kind == "FunctionCall" and node.CallTarget is None:
                name, count = node.FunctionName.Value.upper(), node.Parameters.Count
                if name not in self.built_in:
                    yield node.StartLine, f"there is no built-in function {name} in SQL Server 2016"
                    continue
                minimum, maximum = self.built_in[name]
                if count < minimum or count > maximum >= 0:
                    yield node.StartLine, f"{name} takes {minimum} to {maximum} arguments, not {count}"
                if name in DATED and count:
                    part = node.Parameters[0].MultiPartIdentifier.Identifiers[0].Value
                    if part.lower() not in self.date_parts:
                        yield node.StartLine, f"{name}: there is no date part {part}"
            elif kind in ("StatementList", "TSqlBatch"):
                for statement in list(node.Statements)[1:]:  # ScriptDom accepts these, the server does not
                    cte = getattr(statement, "WithCtesAndXmlNamespaces", None)
                    if statement.GetType().Name == "ThrowStatement" or (
                        cte is not None and cte.StartOffset == statement.StartOffset
                    ):
                        at = statement.FirstTokenIndex - 1
                        while statement.ScriptTokenStream[at].TokenType.ToString() in BLANK:
                            at -= 1
                        if statement.ScriptTokenStream[at].Text != ";":
                            yield statement.StartLine, "a semicolon is wanted before THROW, and WITH"
            elif kind == "ExecutableStringList":
                texts = list(node.Strings)
                if all(text.GetType().Name == "StringLiteral" for text in texts):
                    for _, message in self.parse("".join(text.Value for text in texts))[1]:
                        yield node.StartLine, f"in the text: {message}"

    # -- the model ---------------------------------------------------------------------------------------------------

    def model(self, version: str, trees: list[Any]) -> list[Finding]:
        from Microsoft.SqlServer.Dac.Model import SqlServerVersion, TSqlModel, TSqlModelOptions, TSqlObjectOptions

        findings: list[Finding] = []
        changes = Changes(trees)
        options = TSqlModelOptions()
        options.Collation = "Latin1_General_100_CS_AS"  # a text that passes here also passes where case does not matter
        model = TSqlModel(getattr(SqlServerVersion, version), options)

        service = model.GetType().GetField("_service", self.any).GetValue(model)

        def call(name: str, *arguments: Any) -> Any:
            return service.GetType().GetMethod(name, self.any).Invoke(service, self.array("Object", arguments))

        call("SetThrowOnModelErrors", False)

        def add(file: str, text: str) -> None:
            added.append(file)
            model.AddOrUpdateObjects(text, str(len(added) - 1), TSqlObjectOptions())

        added: list[str] = []
        texts = [
            node.Strings[0].Value
            for _, _, _, nodes in trees
            for kind, node in nodes
            if kind == "ExecutableStringList" and node.Strings[0].GetType().Name == "StringLiteral"
        ]
        schemas = {match[1] for text in texts for match in [re.match(r"CREATE SCHEMA (\w+)", text)] if match}
        for schema in sorted({"sqlsem", "tsqlcheck", "tsqlcheck_sys"} | schemas):
            add("tsqlcheck", f"CREATE SCHEMA [{schema}]")
        # The objects that a text makes are known by name and parameters only.
        for text in texts:
            match = re.match(r"CREATE OR ALTER PROCEDURE (sqlsem\.\w+) ((?:@\w+ \w+(?:, )?)*)", text)
            if match:
                add("tsqlcheck", f"CREATE PROCEDURE {match[1]} {match[2]} AS RETURN 0")
        for item in re.split(r"\n(?=CREATE)", SYSTEM.strip()):
            add("tsqlcheck", item)
        indexes: set[tuple[str, str]] = set()
        for number, (file, text, tree, nodes) in enumerate(trees):
            for part in self.objects(number, text, tree, nodes, changes, example=not file.startswith("sqlsem")):
                add(file, part)
            for kind, node in nodes:
                if kind == "CreateIndexStatement":
                    indexes.add(_index(node.OnName, node.Name))
                elif kind == "DropIndexStatement":
                    for dropindexclause in node.DropIndexClauses:
                        if _index(dropindexclause.Object, dropindexclause.Index) not in indexes:
                            findings.append((file, node.StartLine, f"there is no index {dropindexclause.Index.Value}"))
        for file, _, _, nodes in trees:
            for kind, node in nodes:
                if kind == "NamedTableReference":
                    for hint in node.TableHints:
                        for item in getattr(hint, "IndexValues", ()) if hint.GetType().Name == "IndexTableHint" else ():
                            if (node.SchemaObject.BaseIdentifier.Value.lower(), item.Value.lower()) not in indexes:
                                findings.append((file, node.StartLine, f"there is no index {item.Value}"))
        messages = [
            (getmodelerror.SourceName, getmodelerror.Line, getmodelerror.Message)
            for getmodelerror in model.GetModelErrors()
        ]
        for item in call("GetModelValidationErrors", self.array("String", ())):
            messages.append((self.get(item, "Document"), self.get(item, "Line"), self.get(item, "Message")))
        for source, line, message in messages:
            number = re.sub(r"\D+", "", str(source or "").rpartition("::")[2])
            file = added[int(number)] if number else "?"
            message = re.sub(r"\[tsqlcheck\]\.\[\d+(@\w+)\]", r"\1", str(message))
            message = re.sub(r"^SqlProcedure: \[tsqlcheck\]\.\[\d+\]", "it", message).replace(
                "[tsqlcheck_sys]", "[sys]"
            )
            if not file.startswith("sqlsem") and re.search(r"to object \[(dbo\]\.(?!\[sp_)|\w+\]\.$)", message):
                continue  # an example's own tables, procedures and users
            findings.append((file, int(line or 0), message))
        model.Dispose()
        return findings

    def objects(
        self, number: int, text: str, tree: Any, nodes: list[Any], changes: Changes, example: bool
    ) -> Iterator[str]:
        """Return a batch as objects of a model, on their old lines. Table variables become tables, so that the model
        checks them too.
        """
        edits: list[tuple[int, int, str]] = []

        def replace(node: Any, by: str) -> None:
            edits.append((node.StartOffset, node.StartOffset + node.FragmentLength, by))

        def blank(start: int, end: int) -> str:
            return re.sub(r"[^\n]", " ", text[start:end])

        def edited(start: int, end: int) -> str:
            result, at = "\n" * text.count("\n", 0, start), start
            for first, last, by in sorted(edits):
                if start <= first and last <= end:
                    result, at = result + text[at:first] + by, last
            return result + text[at:end]

        tables = []
        for kind, node in nodes:
            if kind == "DeclareTableVariableStatement":
                body = node.Body
                first = body.Definition.StartOffset
                columns = text[first : first + body.Definition.FragmentLength]
                name = f"[tsqlcheck].[{number}{body.VariableName.Value}]"
                tables.append("\n" * text.count("\n", 0, first) + f"CREATE TABLE {name} ({columns})")
                replace(node, blank(node.StartOffset, node.StartOffset + node.FragmentLength))
            elif kind == "VariableTableReference":
                replace(node.Variable, f"[tsqlcheck].[{number}{node.Variable.Name}]")
            elif kind in ("NamedTableReference", "SchemaObjectFunctionTableReference"):
                schema = node.SchemaObject.SchemaIdentifier
                if schema is not None and schema.Value.lower() == "sys":
                    replace(schema, "[tsqlcheck_sys]")
            elif kind == "ExecutableProcedureReference" and node.ProcedureReference.ProcedureReference is not None:
                schema = node.ProcedureReference.ProcedureReference.Name.SchemaIdentifier
                if schema is not None and schema.Value.lower() == "sys":
                    replace(schema, "[dbo]")
            elif kind == "CreateTableStatement":
                name = node.SchemaObjectName.BaseIdentifier.Value.lower()
                for column in node.Definition.ColumnDefinitions:
                    changed = changes.types.get((name, column.ColumnIdentifier.Value.lower()))
                    if changed is not None:
                        replace(column.DataType, changed)
                end = node.Definition.StartOffset + node.Definition.FragmentLength
                edits += [(end, end, f", {name_or_column}") for name_or_column in changes.columns.get(name, ())]
        yield from tables
        others = []
        for batch in tree.Batches:
            for statement in batch.Statements:
                start, end = statement.StartOffset, statement.StartOffset + statement.FragmentLength
                kind = statement.GetType().Name
                if kind in CHANGES or (kind == "CreateIndexStatement" and not changes.lasts(number, statement)):
                    continue
                if OBJECTS.fullmatch(kind):
                    # A procedure's statement may end before its last semicolon.
                    yield re.sub(r"^(\s*)(?:CREATE OR )?ALTER\b", r"\1CREATE", edited(start, end))
                else:
                    others.append((start, end))
        if others:
            used = {node.Name for kind, node in nodes if kind == "VariableReference"}
            declared = {node.VariableName.Value for kind, node in nodes if kind == "DeclareVariableElement"}
            # A driver's placeholder: "?" in the project's own text, any name in an example (ADO.NET).
            marks = sorted(
                name_or_column
                for name_or_column in used - declared
                if re.fullmatch(r"@p\d+", name_or_column) or example
            )
            start, end = others[0][0], others[-1][1]
            if len(others) < sum(batch.Statements.Count for batch in tree.Batches):
                for batch in tree.Batches:  # objects in between are done
                    for statement in batch.Statements:
                        kind = statement.GetType().Name
                        if (OBJECTS.fullmatch(kind) or kind in CHANGES) and start < statement.StartOffset < end:
                            first, last = statement.StartOffset, statement.StartOffset + statement.FragmentLength
                            edits[:] = [edit for edit in edits if not first <= edit[0] < last]
                            edits.append((first, last, blank(first, last)))
            body = edited(start, end)
            parameters = ", ".join(f"{mark} sql_variant" for mark in marks)
            head = f"CREATE PROCEDURE [tsqlcheck].[{number}] {parameters} AS BEGIN "
            yield re.sub(r"\A(\n*)", lambda match: match[1] + head, body) + "\nEND"


# -- proof ----------------------------------------------------------------------------------------------------------

Fault = tuple[str, str, str, str, str]
#: Seeded faults: a name, the file, the text and its replacement, and a word of the expected finding.
BROKEN: list[Fault] = [
    ("a column", "routines.sql", "@stale = stale_after_ms FROM", "@stale = stale_after FROM", "stale_after]"),
    ("a column, but for its case", "public.sql", "@lease = m.lease_ms", "@lease = m.Lease_ms", "[Lease_ms]"),
    ("a column of OUTPUT", "tasks.sql", "OUTPUT deleted.task_id INTO", "OUTPUT deleted.task_no INTO", "task_no"),
    ("a column that is set", "tasks.sql", "SET status = N'cancelled',", "SET state = N'cancelled',", "state"),
    ("a column that is inserted", "batches.sql", "(batch_name, window_ms,", "(batch_name, window_s,", "window_s"),
    ("a table variable's column", "deadlocks.sql", "@row SET blocked = 0", "@row SET stick = 0", "stick"),
    ("a function's column", "routines.sql", "SELECT @eligible = a.eligible", "SELECT @eligible = a.legible", "legible"),
    ("a system view's column", "public.sql", "@since = login_time", "@since = login_at", "login_at"),
    ("a table", "batches.sql", "INSERT INTO {schema}.batch_part ", "INSERT INTO {schema}.batch_parts ", "batch_parts"),
    ("an index", "tasks.sql", "WITH (INDEX (task_ended))", "WITH (INDEX (task_over))", "task_over"),
    ("a procedure", "batches.sql", "EXEC {schema}.store_callback @id", "EXEC {schema}.keep_than @id", "keep_than"),
    ("a parameter", "public.sql", "@attended_ms = 5000", "@attended = 5000", "@attended"),
    ("a system procedure's parameter", "routines.sql", "@LockOwner = ", "@LockOwnr = ", "lockownr"),
    ("a parameter too many", "client.sql", "{schema}.warm_up 1", "{schema}.warm_up 1, 1", "warm_up has no"),
    ("a parameter that is missing", "client.sql", "put_task ?, ?, ?, ?, ?, ?, ?, ?, ?", "put_task ?", "put_task exp"),
    ("OUTPUT of what is not", "public.sql", "@note, @slice, @pos", "@note, @slice OUTPUT, @pos", "no OUTPUT"),
    ("a built-in function", "routines.sql", "APPLOCK_MODE(", "APPLOCK_MOOD(", "APPLOCK_MOOD"),
    ("a built-in function's arguments", "public.sql", "HOST_NAME()", "HOST_NAME(1)", "HOST_NAME takes"),
    ("a function of 2017", "batches.sql", "LTRIM(RTRIM(COALESCE(@parts, N'')))", "TRIM(COALESCE(@parts, N''))", "TRIM"),
    ("a date part", "tasks.sql", "DATEADD(day, -@days", "DATEADD(days, -@days", "date part days"),
    ("what the client sends", "client.sql", "SET value = ?", "SET worth = ?", "worth"),
    ("what is documented", "protocol.md", "EXEC @code = sqlsem.acquire @r", "EXEC @code = sqlsem.acquire @aR", "@ar"),
    ("what SSIS is told", "ssis.md", "sqlsem.renew @resource = ?, @pos", "sqlsem.renew @resource = ?, @apos", "@apos"),
    ("a variable", "routines.sql", "SET @looked = @looked + 1", "SET @loked = @looked + 1", "@loked"),
    ("an Agent job's step", "agent-job-step.sql", "@timeout_ms = 3600000", "@timeout = 3600000", "@timeout"),
]
BROKEN_MORE: list[Fault] = [  # these hide others
    ("syntax", "public.sql", "ELSE IF @code = -2", "ELSEIF @code = -2", "Incorrect syntax"),
    ("no semicolon before THROW", "client.sql", "IDENTIFIER ON;", "IDENTIFIER ON THROW 50000, N'x', 1;", "wanted"),
    ("no semicolon before WITH", "deadlocks.sql", "@text nvarchar(4000);", "@text nvarchar(4000)", "wanted"),
    ("syntax in EXEC", "permissions.sql", "AS BEGIN RETURN N", "AS BEGIN RETRUN N", "in the text"),
]


def prove(root: Path, checker: Checker) -> Iterator[str]:
    """Yield the faults above that go unnoticed, or whose text is no longer there."""
    yield from tsqlrules.unseen(checker)
    for broken in (BROKEN, BROKEN_MORE):
        hit = set()

        def read(path: Path, broken: list[Fault] = broken, hit: set[str] = hit) -> str:
            text = path.read_text(encoding="utf-8")
            for mistake, file, old, new, _ in broken:
                if path.name == file and old in text:
                    hit.add(mistake)
                    text = text.replace(old, new, 1)
            return text

        findings = checker.check(list(batches(root, read)), typed=False)
        for mistake, file, old, _, words in broken:
            if mistake not in hit:
                yield f"proof: {mistake}: {file} has no {old!r} any more: choose something else to break"
            elif not any(finding[0].endswith(file) and words.lower() in finding[2].lower() for finding in findings):
                others = "".join(
                    f"\n    {finding[1]}: {finding[2]}" for finding in findings if finding[0].endswith(file)
                )
                yield f"proof: {mistake} goes unnoticed in {file}; what is found there:{others or ' nothing'}"


def main() -> int:
    arguments = [item for item in sys.argv[1:] if not item.startswith("-")]
    root = Path(arguments[0]).resolve() if arguments else ROOT
    sys.setrecursionlimit(20_000)
    prepare()
    checker = Checker()
    all_batches = list(batches(root, lambda path: path.read_text(encoding="utf-8")))
    wrong: Iterable[str] = [
        f"{place(root, file, line)}: {message}" for file, line, message in checker.check(all_batches)
    ]
    if "--prove" in sys.argv:
        wrong = [*wrong, *checker.typed.unnoticed(checker.parse), *prove(root, checker)]
    if "--parts" in sys.argv:
        whole = list(wrong)
        for name in FEATURES:
            features = chosen([name])
            for file, _, message in checker.check(list(batches(root, part(features))), typed=False):
                if not any(message in finding for finding in whole):
                    wrong = [*wrong, f"with {listed(features)}: {file}: {message}"]
    for item in wrong:
        print(item)
    print(f"{len(all_batches)} batches of {len({file for file, _, _ in all_batches})} files")
    return 1 if wrong or not all_batches else 0


if __name__ == "__main__":
    sys.exit(main())
