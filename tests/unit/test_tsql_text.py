"""Rules for the text of T-SQL that no engine in the tests checks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import next_version
from support.procedures import PROCEDURES, SCRIPTS, granted, text_of
from support.sql_text import arguments

from sqlsem import sql

#: Columns and expressions in aggregates that cannot be NULL where they stand.
NEVER_NULL = frozenset(
    {"*", "gate", "g.gate", "queue_position", "w.task_id", "e.holds", "1 - e.holds", "n.alone", "n.size", "many"}
    | {
        "CAST(weight AS bigint)",
        "CAST(t.weight AS bigint)",
        "used",
        "o.used",
        "s.used",
        "f.used",
        "u.wait_ms",
        "seen_ms",
    }
    | {"held", "enters"}
    | {"w.seen_ms", "position"}
    | {"n", "f.n", "b.bound", "CAST(b.weight AS bigint)"}  # of @row in deadlocks.sql
)
#: `work` leaves a task the settings of its session; the routines that it calls set ROWCOUNT.
WITHOUT_ROWCOUNT = frozenset({"work"})
#: Table variables without a key that are joined all the same, with the reason why that is harmless.
WITHOUT_KEY = {
    "@role": "the five roles",
    "@right": "an installation",
}


def may_be_null(argument: str) -> bool:
    if argument in NEVER_NULL:
        return False
    if argument.startswith("CASE "):
        return not re.search(r" ELSE ([01]|[0-9]{9,}) END$", argument)
    return not re.fullmatch(r"(?:DISTINCT )?(COALESCE|LEFT\(CONCAT)\(.*\).*", argument)


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_aggregate_meets_null(name):
    """The warning about it (8153) would precede a later error, and drivers report the first message."""
    text = text_of(name)
    places = [
        argument
        for match in re.finditer(r"\b(?:MIN|MAX|SUM|AVG|COUNT|COUNT_BIG)\(", text)
        if may_be_null(argument := arguments(text, match.end() - 1))
    ]
    assert places == []


def test_search_for_null_aggregates_finds_a_fault():
    assert may_be_null("CASE WHEN conflict = 1 THEN weight END")
    assert may_be_null("o.cap")
    assert not may_be_null("CASE WHEN conflict = 1 THEN weight ELSE 0 END")


def test_messages_made_of_names_are_no_formats():
    """THROW reads a per cent sign as the beginning of a format."""
    throwing = {name for name, text in PROCEDURES.items() if re.search(r"\bTHROW\s+(?:@|\w+\s*,\s*@)", text)}
    assert throwing == {"raise_error"}
    assert "REPLACE(@message, N'%', N'%%')" in PROCEDURES["raise_error"]
    literals = [match for text in PROCEDURES.values() for match in re.findall(r"THROW \d+, (N'(?:[^']|'')*')", text)]
    assert literals
    assert not [literal for literal in literals if "%" in literal]


def test_public_procedures_reset_rowcount():
    called = {name for name in granted() if name in PROCEDURES}
    assert len(called) > 50
    without = {name for name in called if "SET ROWCOUNT 0;" not in PROCEDURES[name]}
    assert without == WITHOUT_ROWCOUNT


def test_rows_of_a_member_are_found_by_the_index_of_members():
    """Another index would be scanned, and each row that other sessions have locked would block the scan."""
    for name, text in PROCEDURES.items():
        for match in re.finditer(r"SELECT TOP \(1\) [^;]*?FROM sqlsem\.entry\b([^;]*);", text):
            if re.search(r"WHERE member_id = @\w+ AND", match[1]):
                assert "INDEX (entry_member)" in match[1], name


def test_application_locks_belong_to_a_single_principal():
    for name, text in PROCEDURES.items():
        for call in re.findall(r"@DbPrincipal = ([^,;\s)]+)|\b(?:APPLOCK_MODE|APPLOCK_TEST)\(([^,]+),", text):
            assert "".join(call) in ("@principal", "sqlsem.lock_principal()"), name
        if "@principal" in text:
            assert re.search(r"DECLARE @principal nvarchar\(128\) = sqlsem\.lock_principal\(\)[,;]", text), name


def test_system_procedures_are_called_in_their_schema():
    """Some engines look for them in other schemas first, and change a search path for that at each call."""
    for name, text in PROCEDURES.items():
        assert not re.search(r"EXEC (?:@\w+ = )?sp_(?!executesql)\w+", text), name


def test_numbers_of_members_are_big():
    for name, text in PROCEDURES.items():
        assert not re.search(r"@(member|mine|old|member_before|part_member)\s+int\b|\bmember_id int\b", text), name


def test_a_row_is_taken_by_the_key_that_others_take_it_by():
    """A row is searched by its number alone only to read its name: that takes the locks in the other order."""
    for name, text in PROCEDURES.items():
        for statement in re.findall(r"(?:UPDATE|DELETE FROM) sqlsem\.entry\b[^;]*;", text):
            text = " ".join(statement.split())
            assert re.search("WHERE resource_id = @(resource|line) AND queue_position = @", text), name


def test_liveness_is_not_tested_under_the_gate():
    for name in ("register", "register_all", "acquire_by_priority"):
        text = PROCEDURES[name]
        inside = re.findall(r"BEGIN TRANSACTION;(.*?)(?:COMMIT|ROLLBACK) TRANSACTION;", text, re.DOTALL)
        assert all("check_if_dead" not in section for section in inside), name
    assert "reap_dead_members" in PROCEDURES["register"]


def test_display_routines_wait_for_no_lock():
    settings = text_of("routines").partition("CREATE OR ALTER FUNCTION sqlsem.all_settings()")[2].partition("\nGO\n")[0]
    for name, body in (("entries", PROCEDURES["entries"]), ("all_settings", settings)):
        tables = re.findall(r"(?:FROM|JOIN) sqlsem\.(\w+) AS \w+( WITH \(NOLOCK\))?", body)
        assert tables
        assert all(hint for _, hint in tables), name


def test_bare_participants_decide_on_committed_rows():
    """may_enter and its rule: a row that an open transaction has deleted may come back."""
    rule = text_of("routines").partition("CREATE OR ALTER FUNCTION sqlsem.eligibility (")[2].partition("\nGO\n")[0]
    for text in (PROCEDURES["may_enter"], rule):
        reads = re.findall(r"(?:FROM|JOIN) sqlsem\.entry\b(?: AS \w+)?([^\n]*)", text)
        assert reads
        assert all("WITH (READCOMMITTEDLOCK" in read for read in reads), reads
        assert "NOLOCK" not in text
        assert "READPAST" not in text
    assert not re.search(r"sqlsem\.(entries|standing|status)\b", PROCEDURES["may_enter"])


def test_every_created_object_is_dropped():
    """Procedures and functions are by their kind."""
    statements = re.findall(r"DROP \w+ IF EXISTS (sqlsem\.[^;]+);", text_of("drop"))
    dropped = {name for statement in statements for name in re.findall(r"sqlsem\.\[?(\w+)", statement)}
    created = set(re.findall(r"CREATE OR ALTER TRIGGER sqlsem\.(\w+)", text_of("routines")))
    created |= set(re.findall(r"CREATE (?:TABLE|SEQUENCE) sqlsem\.\[?(\w+)", text_of("schema")))
    assert created <= dropped


def test_every_created_role_is_dropped():
    created = set(re.findall(r"N'sqlsem_(\w+)', N'[upwor]'", text_of("permissions"))) | {"locks"}
    assert len(created) == 6
    assert created == set(re.findall(r"DROP ROLE IF EXISTS sqlsem_(\w+)", text_of("drop")))


def constraints_of(text: str) -> Iterator[tuple[str, str]]:
    """Each constraint of a script's tables: its table, and its name, empty where the server would make one up."""
    kinds = r"PRIMARY KEY|UNIQUE(?! CLUSTERED| INDEX)|CHECK \(|DEFAULT (?!VALUES)|REFERENCES"
    for part in re.split(r"(?m)^(?=CREATE TABLE |ALTER TABLE )", text)[1:]:
        table = re.match(r"(?:CREATE|ALTER) TABLE sqlsem\.\[?(\w+)", part)
        assert table is not None
        for match in re.finditer(rf"(?:CONSTRAINT (\w+)\s+)?(?:{kinds})", part.partition(";\n")[0]):
            yield table[1], match[1] or ""


def test_constraints_of_tables_have_names_of_their_own():
    """A name that the server made up is another one in each database: no later script could drop the constraint."""
    later = re.sub(r"--[^\n]*", "", next_version.script("mssql", "schema.sql"))
    text = text_of("schema") + later.replace("{schema}", "sqlsem")
    constraints = list(constraints_of(text))
    assert len(constraints) > 100
    names = [name for _, name in constraints]
    assert [table for table, name in constraints if not name.startswith(f"{table}_")] == []
    assert len(names) == len(set(names))
    objects = set(PROCEDURES) | set(re.findall(r"CREATE (?:TABLE|VIEW|SEQUENCE|FUNCTION) sqlsem\.\[?(\w+)", text))
    assert objects & set(names) == set(), "they are objects of the schema as well"


def table_variables(text: str) -> Iterator[tuple[str, str]]:
    for match in re.finditer(r"DECLARE (@\w+) TABLE \(", text):
        yield match[1], arguments(text, match.end() - 1)


@pytest.mark.parametrize("name", SCRIPTS)
def test_table_variables_have_keys_for_lookups(name):
    """Without a key, each lookup reads all of it, so the cost grows with the square of its rows."""
    for part in re.split(r"(?m)^GO$", text_of(name)):
        for variable, columns in table_variables(part):
            compared = re.search(rf"(IN|EXISTS|ANY) \(SELECT [^()]* FROM {variable}\b|JOIN {variable}\b", part)
            if compared and variable not in WITHOUT_KEY:
                assert "PRIMARY KEY" in columns, f"{variable}: {compared[0]}"


def test_a_function_is_never_missing():
    """Scripts change routines in place: they drop one only in the transaction that creates it again. A function whose
    values are stored does not change.
    """
    dropped = {name: re.findall(r"DROP (?:FUNCTION|PROCEDURE|TRIGGER) ([\w. ]+)", text_of(name)) for name in SCRIPTS}
    assert {name: routines for name, routines in dropped.items() if routines} == {
        "permissions": ["sqlsem.lock_principal"]
    }
    last = text_of("permissions").rpartition("BEGIN TRANSACTION;")[2].partition("COMMIT TRANSACTION;")[0]
    assert "CREATE FUNCTION sqlsem.lock_principal" in last
    made = {name for script in SCRIPTS for name in re.findall(r"FUNCTION sqlsem\.(\w+) ?\(", text_of(script))}
    assert "clock_us" in made
    assert "key_hash" not in made


def test_each_routine_is_a_batch_of_its_own():
    """GO separates it from the statements around it, and the settings hold under which routines are created."""
    for name in SCRIPTS:
        batches = re.split(r"(?m)^GO$", sql.script("mssql", name))
        created = [batch for batch in batches if re.search(r"(?m)^CREATE OR ALTER ", batch)]
        for batch in created:
            assert re.fullmatch(r"(?s)(?:--[^\n]*\n|\n)*CREATE OR ALTER (?:(?!\nCREATE OR ALTER ).)*\n", batch), batch
        assert not created or "SET QUOTED_IDENTIFIER ON;\nSET ANSI_NULLS ON;" in batches[0], name
        assert not batches[-1].strip(), name


#: Kinds of application locks. A name begins with its kind, and the first two characters tell the kinds apart: the
#: server knows a lock by those two and a hash of 32 bits (docs/reference/tables.md).
APPLICATION_LOCKS = frozenset(
    {"beacon", "entry", "gate", "key", "limits", "batch", "pin", "put", "schedules", "set_resource", "slot", "waiting"}
    | {"install", "doctor", "origin"}
)
#: Routines that get the name of a lock from their caller.
NAMED_BY_CALLER = frozenset({("release_session_lock", "@name"), ("wait_until_lock_free", "@name")})


def lock_calls() -> Iterator[tuple[str, str]]:
    """Yield (script, arguments) of each call of sp_getapplock."""
    for script in (*SCRIPTS, "client", "doctor"):
        text = "\n".join(sql.queries("mssql", file=script).values()) if script == "doctor" else text_of(script)
        for call in re.finditer(r"sys\.sp_getapplock ([^;]*);", text):
            yield script, " ".join(call[1].split())


def test_application_lock_belongs_to_our_role() -> None:
    """Only members of the role can take it (except installers, which may come before the role, and the doctor)."""
    calls = list(lock_calls())
    assert len(calls) > 35
    for script, call in calls:
        expected = "N'public'" if script in ("client", "doctor") else "@principal"
        assert call.endswith(expected), (script, call)


def test_application_lock_is_not_waited_for_without_end() -> None:
    """But for pins, for which the session's own LOCK_TIMEOUT counts: only the row's own login can keep one."""
    for script, call in lock_calls():
        named = re.search(r"@LockTimeout = (@?\w+)", call)
        by_place = re.match(r"@\w+, N'\w+', (?:N'\w+'|@lock_owner), (@?\w+), @principal", call)
        timeout = (named or by_place or [None, None])[1]
        if timeout is None:
            assert re.match(r"(@Resource = )?@(pin|name)\b", call), (script, call)
        else:
            assert timeout != "-1", (script, call)


def lock_users() -> Iterator[tuple[str, str]]:
    """Yield (routine or statement, text) of all T-SQL that may name an application lock."""
    yield from PROCEDURES.items()
    for file in ("client", "doctor"):
        yield from sql.queries("mssql", file=file).items()


def lock_arguments(text: str) -> list[str]:
    """Return what ``text`` passes as the names of application locks."""
    calls = re.findall(r"sys\.sp_(?:get|release)applock (?:@Resource = )?(N'[^']*'|@\w+)", text)
    routines = "|".join(sorted(routine for routine, _ in NAMED_BY_CALLER))
    calls += re.findall(rf"sqlsem\.(?:{routines}) (?:@name = )?(N'[^']*'|@\w+)", text)
    for match in re.finditer(r"\bAPPLOCK_(?:MODE|TEST)\(", text):
        calls.append(re.split(r", N'(?:Session|Transaction|Shared|Exclusive)'", arguments(text, match.end() - 1))[0])
    return [call.partition("@principal, ")[2] or call for call in calls]


def kinds_of(text: str, name: str) -> set[str]:
    """Return the kinds with which the values of a lock's name begin."""
    values = [name]
    if name.startswith("@"):
        values = re.findall(rf"(?<![\w@]){name}\b(?: nvarchar\(255\))? = ([^;]*)", text)
        values += [PROCEDURES[callee] for callee in re.findall(rf"EXEC sqlsem\.(take_beacon) [^;]*{name} OUTPUT", text)]
        for table in {table for value in values for table in re.findall(r"FROM (@\w+)", value)}:
            values += re.findall(rf"INSERT INTO {table}\b[^;]*;", text)
    return {kind for value in values for kind in re.findall(r"N'(\w+)\.sqlsem\.sqlsem[.']", value)}


def test_application_lock_name_begins_with_its_kind() -> None:
    used: set[str] = set()
    for routine, text in lock_users():
        for name in lock_arguments(text):
            if (routine, name) in NAMED_BY_CALLER:
                continue
            if routine.startswith("beacon_"):  # doctor.py gives these names
                assert name in ("@name", "N'public', @name"), (routine, name)
                continue
            kinds = kinds_of(text, name)
            assert kinds, (routine, name)
            used |= kinds
    source = (Path(sql.__file__).parents[1] / "engines" / "mssql" / "doctor.py").read_text(encoding="utf-8")
    used |= set(re.findall(r"f\"(\w+)\.sqlsem\.\{self\._schema\}", source))
    assert used == APPLICATION_LOCKS


def test_no_application_lock_is_named_elsewhere() -> None:
    """The scan finds a name built in another way, and a lock's name that is not in the table."""
    for script in SCRIPTS:
        for literal in re.findall(r"N'(\w+\.sqlsem\.sqlsem[^']*|sqlsem\.sqlsem\.[^']*)'", text_of(script)):
            kind = literal.partition(".sqlsem.")[0]
            assert kind in APPLICATION_LOCKS or literal in ("sqlsem.sqlsem.grants", "sqlsem.sqlsem.session"), literal


def test_kinds_of_application_locks_differ_in_two_characters() -> None:
    assert len({kind[:2] for kind in APPLICATION_LOCKS}) == len(APPLICATION_LOCKS)


def test_look_from_the_head_begins_at_the_mark() -> None:
    """A scan from the first position would pass the ghosts of all removed rows."""
    rule = text_of("routines").partition("CREATE OR ALTER FUNCTION sqlsem.eligibility (")[2].partition("\nGO\n")[0]
    looks = re.findall(r"sqlsem\.entry\b.*?(?:WHERE|ORDER BY)", rule, re.DOTALL)
    assert [look for look in looks if "queue_position > f.mark" not in look] == looks[-1:], (
        "the last one is by request_uid"
    )
    assert len(looks) == 3
    for name in ("register", "wait", "reap_dead_members", "advance_low_water_mark", "take_rate"):
        assert "sqlsem.low_water_mark(@resource)" in PROCEDURES[name], name
    # NULL as the second of two answers would hide all rows.
    lowest = text_of("routines").partition("CREATE OR ALTER FUNCTION sqlsem.low_water_mark (")[2].partition("\nGO\n")[0]
    assert "SELECT ISNULL((SELECT w.mark" in lowest


def test_tests_of_tsql_run_on_sql_server_alone() -> None:
    files = sorted((Path(__file__).resolve().parents[1] / "tsql").glob("test_*.py"))
    assert files
    mark = '\npytestmark = pytest.mark.engines("mssql")\n'
    assert [path.name for path in files if mark not in path.read_text(encoding="utf-8")] == []


#: The tests of a variable that has a number of rows, and the values in place of NULL and of numbers below 0.
CHECKED = r"\bIF @{0} (?:>|BETWEEN)|\bSET @{0} = CASE WHEN @{0} [<>] 0 THEN "


def unchecked_rows(text: str) -> list[str]:
    """Return the variables with a number of rows that may be NULL or below 0, for which the server raises an error."""
    found = []
    for match in re.finditer(r"\bTOP \(|\b(?:OFFSET|FETCH NEXT) (@\w+)", text):
        number = match[1] or arguments(text, match.end() - 1)
        for name in [] if number.startswith("COALESCE(") else re.findall(r"@(\w+)", number):
            if not re.search(CHECKED.format(name), text[: match.start()]):
                found.append(name)
    return found


@pytest.mark.parametrize("name", sorted(PROCEDURES))
def test_number_of_rows_is_neither_null_nor_negative(name):
    assert unchecked_rows(PROCEDURES[name]) == []


def test_finder_of_numbers_of_rows_sees_each_kind():
    assert unchecked_rows("SELECT TOP (@n) a FROM b") == ["n"]
    assert unchecked_rows("DELETE TOP (CAST(@k AS bigint) + @n) FROM b") == ["k", "n"]
    assert unchecked_rows("ORDER BY a OFFSET @n ROWS FETCH NEXT @k ROWS ONLY") == ["n", "k"]
    assert unchecked_rows("SET @n = CASE WHEN @n < 0 THEN 0 ELSE COALESCE(@n, 9) END; SELECT TOP (@n) a FROM b") == []
    assert unchecked_rows("IF @n BETWEEN 1 AND 9 SELECT TOP (@n) a FROM b") == []
    assert unchecked_rows("SELECT TOP (COALESCE(@n, 0)) a FROM b") == []


#: A TRY block up to its isolation level.
LEVEL = re.compile(
    r"\bBEGIN TRY\b((?:(?!\bBEGIN TRY\b).)*?)\bSET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED\b", re.DOTALL
)


@pytest.mark.parametrize("name", sorted(PROCEDURES))
def test_try_block_sets_its_isolation_level_before_it_reads(name):
    """Some engines run a TRY block as one transaction, which keeps the level under which it has read first."""
    for before in LEVEL.findall(PROCEDURES[name]):
        assert not re.search(r"\bFROM sqlsem\.", before)
        # (Some also keep it for the procedures that the session calls next.)
        assert PROCEDURES[name].rstrip().endswith("SET TRANSACTION ISOLATION LEVEL READ COMMITTED;")


def unnamed_constraints(text: str) -> list[str]:
    """Return the conditions for the error of a CHECK or FOREIGN KEY (547) that do not look which constraint it is."""
    return [
        condition
        for condition in re.findall(r"\bIF ([^\n]*(?:ERROR_NUMBER\(\)|@number)[^\n]*\b547\b[^\n]*)", text)
        if not re.search(r"ERROR_MESSAGE\(\)(?: NOT)? LIKE N'%\w+_check%'", condition)
    ]


@pytest.mark.parametrize("name", sorted(PROCEDURES))
def test_catch_of_a_constraint_names_it(name):
    """Another constraint of the same statement is a bad argument, which no retry makes good."""
    assert unnamed_constraints(PROCEDURES[name]) == []


def test_finder_of_constraints_sees_each_kind():
    assert len(unnamed_constraints("IF ERROR_NUMBER() <> 547\n THROW;\nIF @number IN (547, 2627)\n THROW;")) == 2
    assert unnamed_constraints("IF ERROR_NUMBER() <> 547 OR ERROR_MESSAGE() NOT LIKE N'%a_check%'\n THROW;") == []
