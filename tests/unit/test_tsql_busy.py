"""The errors that T-SQL procedures report as busy (50002): a caller that may retry gets one number for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import scripts
from support.procedures import PROCEDURES, granted

from sqlsem import sql

#: A scan over moved rows, no memory for locks, a deadlock between row locks, a lock wait that timed out.
NUMBERS = {601, 1204, 1205, 1222}
MAPPING = re.compile(r"IF (?:ERROR_NUMBER\(\)|@number) IN \(601, 1204, 1205, 1222\)\s+THROW 50002, N'sqlsem: busy: ")
#: Answers of the server to the caller's own text, or to a table of the caller's.
OF_THE_CALLER = {
    "work": "records the error of a task",
    "guard_table": "waits for the caller's table",
    **dict.fromkeys(
        ("list_batches", "queue_counts", "rates", "revoke", "set_task", "cancel_task"),
        "clients call it, too, and see the server's own numbers, as docs/reference/errors.md says",
    ),
    "unguard_table": "same",
}
DOCS = Path(sql.__file__).parents[2] / "docs"


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


def for_sessions() -> set[str]:
    """Return the procedures that the pages recommend."""
    called = {
        name
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"EXEC (?:@\w+ = )?sqlsem\.\[?(\w+)", page.read_text(encoding="utf-8"))
    }
    return (called | set(scripts.public())) & set(PROCEDURES) & set(granted())


def reads_outside(name: str, visited: frozenset[str] = frozenset()) -> list[str]:
    """Return the paths from a procedure to a table without a CATCH that maps the errors."""
    text = PROCEDURES[name]
    for block, _, catch in blocks(text):
        if MAPPING.search(catch) or "NOT IN (601, 1204, 1205, 1222" in catch:
            text = text.replace(block, "")
    text = re.sub(r"'[^']*'", "''", text)
    called = set(re.findall(r"EXEC (?:@\w+ = )?sqlsem\.\[?(\w+)", text)) - visited - {name}
    tables = set(re.findall(r"(?:FROM|JOIN|INTO|UPDATE|APPLY) sqlsem\.\[?(\w+)", text))
    ways = [f"{name} reads {', '.join(sorted(tables))}"] if tables else []
    return ways + [f"{name}: {way}" for callee in sorted(called) for way in reads_outside(callee, visited | {name})]


def test_procedures_for_sessions_are_found():
    assert {
        "acquire",
        "try",
        "release",
        "renew",
        "take",
        "put",
        "work",
        "hand_over",
        "batch_part_finish",
    } <= for_sessions()


@pytest.mark.parametrize("name", sorted(for_sessions() - set(OF_THE_CALLER)))
def test_session_procedures_map_busy_errors(name):
    assert reads_outside(name) == []
