"""The statements of a pair and of a hand-off on SQL Server, counted in the text.

Each statement costs something, and on other engines that speak T-SQL a call costs as much as an access to a table. A
walk follows a procedure as the usual case does: the named IFs and WHILEs hold, and no others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from support.procedures import PROCEDURES, text_of

#: The first words of a statement behind a condition, on a line of its own.
WORDS = "SET SELECT EXEC BEGIN THROW BREAK CONTINUE RETURN INSERT UPDATE DELETE COMMIT ROLLBACK DECLARE PRINT IF WHILE"
BEGINS = rf"(?:{'|'.join(WORDS.split())})\b"


# -- reading --------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A statement; for an IF or a WHILE, its condition and its branches."""

    text: str
    then: list[Step] = field(default_factory=list)
    otherwise: list[Step] = field(default_factory=list)


class Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, words: str) -> bool:
        match = re.compile(rf"\s*(?:{words})").match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match is not None

    def until(self, end: str) -> str:
        """Return the text before ``end`` outside of parentheses and texts."""
        depth, first = 0, self.at
        while depth or not re.compile(end).match(self.text, self.at):
            assert self.at < len(self.text), f"no end of {self.text[first : first + 80]!r}"
            if self.text[self.at] == "'":
                self.at = self.text.index("'", self.at + 1)
            depth += {"(": 1, ")": -1}.get(self.text[self.at], 0)
            self.at += 1
        return " ".join(self.text[first : self.at].split())

    def block(self, end: str) -> list[Step]:
        steps: list[Step] = []
        while not self.take(end):
            steps += self.steps()
        return steps

    def steps(self) -> list[Step]:
        if self.take(r"BEGIN TRY\b"):
            steps = self.block(r"END TRY\b")
            assert self.take(r"BEGIN CATCH\b")
            self.block(r"END CATCH;?")
            return steps
        if self.take(r"BEGIN\b(?! TRANSACTION)"):
            return self.block(r"END;?(?!\w)")
        if self.take(r"(?=(?:IF|WHILE)\b)"):
            step = Step(self.until(rf"(?<=\n)\s*{BEGINS}"))
            step.then = self.steps()
            if step.text.startswith("IF ") and self.take(r"ELSE\b"):
                step.otherwise = self.steps()
        else:
            step = Step(self.until(";"))
            self.take(";")
        return [step]


def read(name: str) -> list[Step]:
    reader = Reader(PROCEDURES[name])
    reader.until(r"(?<=\bAS)\nBEGIN\b")
    if reader.take(r"(?=BEGIN TRY\b)"):
        return reader.steps()
    reader.take("BEGIN")
    return reader.block(r"END;\s*$")


# -- walking --------------------------------------------------------------------------------------------------------

Holds = dict[str, Iterable[bool]]
ALWAYS = (True,) * 99


class Walk:
    """``holds``: of each procedure, how its conditions begin that hold: always, or one time after another."""

    def __init__(self, **holds: Holds) -> None:
        self.says = {name: {words: iter(answers) for words, answers in found.items()} for name, found in holds.items()}
        self.met: set[tuple[str, str]] = set()
        self.ran: list[str] = []

    def holds(self, name: str, condition: str) -> bool:
        for words, says in self.says.get(name, {}).items():
            if condition.partition(" ")[2].startswith(words):
                self.met.add((name, words))
                return next(says)
        return condition == "WHILE 1 = 1"

    def run(self, name: str, steps: list[Step]) -> str:
        """The word that ended it before its end."""
        for step in steps:
            word = step.text.split()[0]
            self.ran.append(step.text)
            assert word != "THROW", step.text
            assert len(self.ran) < 1000, "a loop without an end"
            if word in ("BREAK", "CONTINUE", "RETURN"):
                return word
            ended = ""
            if word == "IF":
                ended = self.run(name, step.then if self.holds(name, step.text) else step.otherwise)
            elif word == "WHILE":
                ended = self.loop(name, step)
            elif called := re.match(r"EXEC (?:@\w+ = )?sqlsem\.\[?(\w+)", step.text):
                self.run(called[1], read(called[1]))
            if ended:
                return ended
        return ""

    def loop(self, name: str, step: Step) -> str:
        while self.holds(name, step.text):
            ended = self.run(name, step.then)
            if ended in ("BREAK", "RETURN"):
                return ended.replace("BREAK", "")
            self.ran.append(step.text)
        return ""

    def counted(self) -> Counter[str]:
        assert self.met == {(name, words) for name, branches in self.says.items() for words in branches}
        return Counter(kind for text in self.ran for kind in kinds(text))


def kinds(text: str) -> Iterator[str]:
    yield "statements"
    if re.match(r"EXEC\b", text):
        yield "calls"
    if re.match(r"EXEC (@\w+ = )?sys\.sp_(get|release)applock\b", text):
        yield "locks"
    if re.match(r"BEGIN TRANSACTION\b", text):
        yield "transactions"
    if re.search(r"\bsqlsem\.(entry|member|history|resource|ahead)\b", re.sub(r"'[^']*'", "", text)):
        yield "tables"


def counted(*names: str, **holds: Holds) -> Counter[str]:
    walk = Walk(**holds)
    for name in names:
        walk.run(name, read(name))
    return walk.counted()


#: Procedures without a condition that holds.
REGISTER: Holds = {}
RELEASE: Holds = {"@next IS NULL AND @mark": ALWAYS, "@code = 0 AND APPLOCK_MODE": ALWAYS}
ANSWERED: Holds = {"@answer = 1": ALWAYS}


def test_steps_of_a_programs_pair() -> None:
    """At most 30 statements."""
    counts = counted("register", "release", register=REGISTER | ANSWERED, release=RELEASE)
    assert counts == {"statements": 30, "calls": 4, "locks": 4, "transactions": 2, "tables": 4}


def test_steps_of_a_sessions_pair() -> None:
    """A later hand-off: the session has a member and a name. At most 60 statements."""
    counts = counted(
        *("acquire", "release"),
        acquire={"@result IS NULL": ALWAYS, "@granted = 1 AND": ALWAYS},
        register=REGISTER,
        release={
            "@@TRANCOUNT > 0 OR @position IS NULL": (True, False),
            "@position IS NULL OR @requesting_id IS NULL": (True,),
            "@answer = 0": ALWAYS,
            **RELEASE,
        },
        release_rows={"@current IS NOT NULL": (True, False)},
    )
    assert counts == {"statements": 60, "calls": 7, "locks": 4, "transactions": 2, "tables": 6}


def woken(**conditions: Iterable[bool]) -> Counter[str]:
    """Return the steps of a wait from its sleep to its answer."""
    usual: Holds = {
        "@code >= 0 AND @until = N'leave'": ALWAYS,
        "@result = 0 AND @@VERSION": ALWAYS,
        "@answer = 1": ALWAYS,
    }
    walk = Walk(wait=usual | {words.replace("_", " "): found for words, found in conditions.items()})
    walk.run("wait", read("wait"))
    (asleep,) = [at for at, text in enumerate(walk.ran) if "sp_getapplock @name" in text]
    walk.ran = walk.ran[asleep + 1 :]
    return walk.counted()


def test_steps_of_a_hand_off() -> None:
    """The release grants the next row as well, in its transaction; the waiter reads that when it wakes up."""
    grants: Holds = {"@code = 0 AND @next": ALWAYS, "@@VERSION LIKE": ALWAYS, "@code = 0 AND APPLOCK_MODE": ALWAYS}
    counts = counted("release", release=grants)
    assert counts == {"statements": 20, "calls": 2, "locks": 2, "transactions": 1, "tables": 3}
    counts = woken(**{"@result IS NULL": (True, False), "@result = 0": (True, False)})
    assert counts == {"statements": 12, "tables": 1}


def test_steps_of_a_hand_off_to_a_polling_waiter() -> None:
    """As a session does, or a program behind a removed row."""
    counts = woken(**{"@result IS NULL": ALWAYS, "@@ROWCOUNT > 0": ALWAYS, "@result = 0": (True, False)})
    assert counts == {"statements": 15, "tables": 2}


#: Procedures that every pair, hand-off and heartbeat runs through.
HOT = ("register", "release", "wait", "heartbeat")


@pytest.mark.parametrize("name", HOT)
def test_hot_procedure_is_not_compiled_again(name: str) -> None:
    """The rows of a table variable, a hint or changed statistics would do that, and all callers would wait for it."""
    text = re.sub(r"N'[^']*'", "''", PROCEDURES[name])
    assert not re.search(r"\bTABLE \(|\bRECOMPILE\b|#\w|\bsp_executesql\b|\bEXEC \(", text)
    statements = re.findall(r"(?m)^ *((?:UPDATE|DELETE|SELECT)\b[^;]*\bsqlsem\.[^;]*);", text)
    assert statements
    assert [statement for statement in statements if not statement.endswith("OPTION (KEEPFIXED PLAN)")] == []


def test_index_of_a_hot_table_has_no_new_statistics() -> None:
    text = text_of("schema")
    for table, number in (("entry", 4), ("member", 2)):
        statements = re.findall(
            rf"CREATE TABLE sqlsem\.{table} \(.*?\n\);|CREATE[^;]* INDEX \w+ ON sqlsem\.{table} [^;]*;", text, re.DOTALL
        )
        keys = re.findall(r"PRIMARY KEY|\bUNIQUE\b(?! CLUSTERED)|\bINDEX\b", "".join(statements))
        assert (len(keys), "".join(statements).count("STATISTICS_NORECOMPUTE = ON")) == (number, number)


def test_walk_sees_an_added_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    def pair() -> Counter[str]:
        return counted("release", release=RELEASE)

    before, text = pair(), PROCEDURES["release"]
    monkeypatch.setitem(PROCEDURES, "release", text.replace("DELETE", "SET @tries = 4;\n        DELETE", 1))
    assert pair() - before == {"statements": 1}
    monkeypatch.setitem(
        PROCEDURES, "release", text.replace("DELETE", "EXEC sqlsem.release_session_lock @name;\n        DELETE", 1)
    )
    assert (pair() - before)["calls"] == 1
