"""The errors that T-SQL procedures report as busy (50002): a caller that may retry gets one number for them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from support.docs_modules import scripts
from support.procedures import PROCEDURES, granted

#: A scan over moved rows, no memory for locks, a deadlock between row locks, a lock wait that timed out.
NUMBERS = {601, 1204, 1205, 1222}
MAPPING = re.compile(r"IF (?:ERROR_NUMBER\(\)|@number) IN \(601, 1204, 1205, 1222\)\s+THROW 50002, N'sqlsem: busy: ")
BUSY = "601, 1204, 1205, 1222"
CALLED = re.compile(r"EXEC (?:@\w+ = )?sqlsem\.\[?(\w+)")
#: A statement that returns rows, up to its end.
RESULT = re.compile(r"^ *SELECT (?!@|(?:TOP \(\d+\) )?@)[^;]*;", re.MULTILINE)
GRANTED = sorted(set(PROCEDURES) & set(granted()))
#: A reference to a table.
SOURCE = re.compile(r"(?:FROM|JOIN|INTO|UPDATE|APPLY) (sqlsem\.\[?\w+\b(?!\()\]?(?: AS \w+)?(?: WITH \([^)]*\))?)")
#: The numbers that a CATCH block must know if it goes on after them.
GOES_ON = re.compile(rf"NOT IN \({BUSY}")
#: Procedures that put the state of others in order: they may be repeated, and are no effect of their caller.
UPKEEP = {"recover_batches", "session_member", "check_liveness", "touch_member"}
#: Procedures for sessions that may wait for a lock after their effect, in which tables, and why that is right.
WAIT_AFTER_EFFECT = {
    "batch_part_start": (
        ["batch_part", "batch", "batch", "batch_part"],
        "only if the start is refused, without an effect",
    ),
    "cancel_task": (["task", "operation", "task"], "may be repeated: then the task is ended already"),
    "reap": (None, "may be repeated: it goes on with the rest"),
    "release": (["entry"], "only if nothing was released"),
    "set_task": (["task"], "may be repeated: then the task has its new state already"),
}


def blocks(text: str) -> list[tuple[str, str, str]]:
    """Yield the outermost TRY blocks of a text: the whole block, its first part, and its CATCH without inner blocks."""
    blocks_found: list[tuple[str, str, str]] = []
    depth, start, caught = 0, 0, 0
    for match in re.finditer(r"\bBEGIN TRY\b|\bBEGIN CATCH\b|\bEND CATCH\b", text):
        if match[0] == "BEGIN TRY":
            start = match.start() if depth == 0 else start
            depth += 1
        elif match[0] == "BEGIN CATCH":
            caught = match.start() if depth == 1 else caught
        else:
            depth -= 1
            if depth == 0:
                catch = text[caught : match.end()]
                for inner, _, _ in blocks(catch[len("BEGIN CATCH") :]):
                    catch = catch.replace(inner, "")
                blocks_found.append((text[start : match.end()], text[start + len("BEGIN TRY") : caught], catch))
    return blocks_found


def tries(text: str) -> Iterator[tuple[str, str]]:
    """Yield the first part and the CATCH of each TRY block, of the inner ones, too."""
    for _, tried, catch in blocks(text):
        yield tried, catch
        yield from tries(tried)


def catches(text: str, caught: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the CATCH blocks of a procedure, and True if another block catches their errors."""
    for _, tried, catch in blocks(text):
        yield catch, caught
        yield from catches(tried, caught=True)


def faults(catch: str, caught: bool = False) -> list[str]:
    """Return the faults of a CATCH block with the errors that mean busy."""
    wrong = []
    for numbers in re.findall(r"(?:ERROR_NUMBER\(\)|@number) (?:NOT )?IN \(([\d, ]+)\)", catch):
        named = {int(number) for number in numbers.split(",")}
        if named & NUMBERS and not named >= NUMBERS and named != {601, 1205}:  # (those two are tried again at once)
            wrong.append(f"names only {numbers}")
    wrong += [
        f"looks for {number} alone"
        for number in re.findall(r"(?:ERROR_NUMBER\(\)|@number) (?:=|<>) (\d+)", catch)
        if int(number) in NUMBERS
    ]
    if rethrows := re.findall(r"([^\n]*)\n\s*THROW;", catch):
        guarded = all("NOT IN (601, 1204, 1205, 1222" in line or "@inside > 0" in line for line in rethrows)
        if not guarded and not caught and not MAPPING.search(catch):
            wrong.append("raises them as they are")
    return wrong


@pytest.mark.parametrize("name", sorted(PROCEDURES))
def test_catch_blocks_treat_busy_errors_alike(name):
    assert [fault for catch, caught in catches(PROCEDURES[name]) for fault in faults(catch, caught)] == []


def test_fault_finder_sees_each_kind():
    assert faults("IF ERROR_NUMBER() <> 1205\n    THROW;") == ["looks for 1205 alone", "raises them as they are"]
    assert faults("IF ERROR_NUMBER() NOT IN (1205, 1222)\n    THROW;") == [
        "names only 1205, 1222",
        "raises them as they are",
    ]
    assert faults("ROLLBACK TRANSACTION;\n    THROW;") == ["raises them as they are"]
    assert faults("IF ERROR_NUMBER() NOT IN (601, 1204, 1205, 1222, 50005)\n    THROW;") == []
    first = "BEGIN TRY a BEGIN TRY b END TRY BEGIN CATCH x END CATCH; END TRY "
    assert list(catches(f"{first}BEGIN CATCH y BEGIN TRY c END TRY BEGIN CATCH z END CATCH; END CATCH;")) == [
        ("BEGIN CATCH y ; END CATCH", False),
        ("BEGIN CATCH x END CATCH", True),
    ]


def outside(name: str, what: str, guard: re.Pattern[str], visited: frozenset[str] = frozenset()) -> list[str]:
    """Return the paths from a procedure to what it does outside of the TRY blocks whose CATCH matches the guard."""
    text = PROCEDURES[name]
    for block, _, catch in blocks(text):
        if guard.search(catch):
            text = text.replace(block, "")
    text = re.sub(r"'[^']*'", "''", text)
    found = sorted({match[1] for match in re.finditer(what, text)})
    ways = [f"{name}: {', '.join(found)}"] if found else []
    called = set(CALLED.findall(text)) - visited - {name}
    return ways + [
        f"{name}: {way}" for callee in sorted(called) for way in outside(callee, what, guard, visited | {name})
    ]


def reached(text: str, visited: set[str]) -> set[str]:
    """Return the procedures with rights of their own that a text calls, and its other procedures call."""
    found = set()
    for name in CALLED.findall(re.sub(r"'[^']*'", "''", text)):
        if name in GRANTED:
            found.add(name)
        elif name in PROCEDURES and name not in visited:
            visited.add(name)
            found |= reached(PROCEDURES[name], visited)
    return found


def for_sessions() -> list[str]:
    """Return the procedures that the reference recommends, and those that they call."""
    found: set[str] = set()
    to_read = set(scripts.public()) & set(PROCEDURES)
    while to_read:
        found |= to_read
        to_read = {callee for name in to_read for callee in CALLED.findall(PROCEDURES[name])} & set(PROCEDURES) - found
    return sorted(found)


def waiting_results(text: str) -> list[str]:
    """Return the statements that return rows and wait for locks while they read the rows."""
    found = []
    text = re.sub(r"'[^']*'", "''", text)
    for match in RESULT.finditer(text):
        before = re.split(r";|\bBEGIN\b|\bTRY\b|\bAS\n", text[: match.start()])[-1]
        if (
            re.search(r"\b(?:INSERT|UPDATE|DELETE|SET|EXISTS|FROM|WITH)\b|@answer = 1", before)
            or "READ UNCOMMITTED" in text
        ):
            continue  # a part of another statement; only for clients; or all reads of the procedure are without locks
        found += [
            " ".join(source.split())
            for source in re.findall(r"(?:FROM|JOIN) (sqlsem\.\w+\b(?!\()(?: AS \w+)?(?:\s+WITH \([^\n]*)?)", match[0])
            if "READPAST" not in source and "NOLOCK" not in source
        ]
    return found


@pytest.mark.parametrize("name", GRANTED)
def test_procedures_of_roles_map_busy_errors(name):
    maps = re.compile(f"{MAPPING.pattern}|NOT IN \\({BUSY}")
    assert outside(name, r"(?:FROM|JOIN|INTO|UPDATE|APPLY) (sqlsem\.\[?\w+)", maps) == []


@pytest.mark.parametrize("name", GRANTED)
def test_procedures_of_roles_end_their_transaction(name):
    """A CATCH without ROLLBACK would leave the procedure's transaction open, and its locks held."""
    rolls_back = re.compile(r"ROLLBACK TRANSACTION")
    assert outside(name, r"\b(BEGIN TRANSACTION)\b", rolls_back) == []


@pytest.mark.parametrize("name", sorted(PROCEDURES))
def test_procedures_that_try_again_know_the_mapped_error(name):
    """A CATCH that goes on after the server's numbers must go on after 50002, if it calls such a procedure."""
    wrong = []
    for tried, catch in tries(PROCEDURES[name]):
        goes_on = re.search(rf"NOT IN \(({BUSY}[\d, ]*)\)", catch)
        if goes_on and "50002" not in catch and (mapped := reached(tried, set())):
            wrong.append(f"{goes_on[0]}, and calls {', '.join(sorted(mapped))}")
    assert wrong == []


@pytest.mark.parametrize("name", for_sessions())
def test_procedures_for_sessions_return_all_rows_or_an_error(name):
    """A caught error ends a result without a trace: a caller that reads no further takes a part for the whole."""
    assert waiting_results(PROCEDURES[name]) == []


def test_a_result_that_waits_for_locks_is_seen():
    assert waiting_results("BEGIN TRY\n    SELECT a FROM sqlsem.entry AS e;\nEND TRY") == ["sqlsem.entry AS e"]
    assert waiting_results("    SET @a = 1;\n    SELECT a FROM sqlsem.entry WITH (NOLOCK);") == []
    assert waiting_results("    INSERT INTO @rows (a)\n    SELECT a FROM sqlsem.entry;\n    SELECT a FROM @rows;") == []
    assert waiting_results("    SELECT @a = a FROM sqlsem.entry;") == []


def without_guarded(text: str) -> str:
    """Return a text without the TRY blocks whose CATCH goes on after the errors that mean busy."""
    for block, tried, catch in blocks(text):
        text = text.replace(block, "" if GOES_ON.search(catch) else without_guarded(tried))
    return re.sub(r"'[^']*'", "''", text)


def commits(name: str, visited: frozenset[str] = frozenset()) -> bool:
    """Return True if a procedure, or one that it calls, commits."""
    text = PROCEDURES[name]
    called = (set(CALLED.findall(text)) & set(PROCEDURES)) - visited - UPKEEP - {name}
    return "COMMIT TRANSACTION" in text or any(commits(callee, visited | {name}) for callee in called)


def waits(text: str, visited: frozenset[str] = frozenset()) -> list[str]:
    """Return the tables whose rows a text, and the procedures that it calls, may wait for."""
    found = [source for source in SOURCE.findall(text) if "READPAST" not in source and "NOLOCK" not in source]
    tables = [re.match(r"sqlsem\.\[?(\w+)", source)[1] for source in found]  # type: ignore[index]
    for callee in CALLED.findall(text):
        if callee in PROCEDURES and callee not in visited:
            tables += waits(without_guarded(PROCEDURES[callee]), visited | {callee})
    return tables


def waits_after_effect(text: str) -> list[str]:
    """Return the tables whose rows a text may wait for after its last commit, or the last call that commits."""
    text = without_guarded(text)
    ends = [match.end() for match in re.finditer(r"COMMIT TRANSACTION", text)]
    ends += [
        match.end()
        for match in CALLED.finditer(text)
        if match[1] in PROCEDURES and match[1] not in UPKEEP and commits(match[1])
    ]
    return waits(text[max(ends) :]) if ends else []


@pytest.mark.parametrize(
    "name",
    sorted((set(scripts.public()) | {name for name in PROCEDURES if name.startswith("session_")}) & set(PROCEDURES)),
)
def test_procedures_do_not_fail_after_their_effect(name):
    """Busy (50002) says that nothing was done. A session that repeats the call gets a wrong answer, or loses one."""
    tables, _ = WAIT_AFTER_EFFECT.get(name, ([], ""))
    if tables is not None:
        assert waits_after_effect(PROCEDURES[name]) == tables


def test_a_wait_after_the_effect_is_seen():
    effect, read = "BEGIN TRANSACTION; COMMIT TRANSACTION;\n", "SELECT @a = a FROM sqlsem.entry;\n"
    guarded = f"BEGIN TRY {read} END TRY BEGIN CATCH IF ERROR_NUMBER() NOT IN ({BUSY}) THROW; END CATCH;\n"
    assert waits_after_effect(read + effect) == []
    assert waits_after_effect(effect + read) == ["entry"]
    assert waits_after_effect(effect + guarded) == []
    assert waits_after_effect(f"EXEC sqlsem.end_part 1;\n{read}") == ["entry"]
    assert waits_after_effect("EXEC sqlsem.end_part 1;\nEXEC sqlsem.parts_in 1;\n") == ["batch_part"]
    assert waits_after_effect(f"EXEC sqlsem.recover_batches;\n{read}") == []
