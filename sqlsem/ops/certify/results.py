"""The values of a certification: the findings of a check, and the report of all checks as lines and as a document."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlsem.util.printable import clean

__all__ = ["FORMAT", "STATES", "Failed", "NotPossible", "Notes", "Report", "Result"]

#: The version of the document's schema; a change of the meaning of a field makes a new one.
FORMAT = 1
#: The states in which a check can end.
STATES = ("ok", "failed", "not possible")


class Failed(Exception):
    """Raised if the server, or sqlsem on it, does not do what it must. The message says what the check has observed."""


class NotPossible(Exception):
    """Raised if a check cannot run here. The message says why, and what would make it possible."""


@dataclass
class Notes:
    """The findings of a check so far: words for people, figures for programs, and parts that were not possible."""

    words: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def note(self, words: str, **figures: Any) -> None:
        """Add a finding."""
        if words:
            self.words.append(words)
        self.figures.update(figures)

    def skip(self, why: str) -> None:
        """Record that a part of the check is not possible here."""
        self.skipped.append(why)

    def require(self, condition: object, words: str) -> None:
        """Raise `Failed` unless the condition holds."""
        if not condition:
            raise Failed(words)

    @property
    def detail(self) -> str:
        """The findings and the skipped parts in one line."""
        skipped = [f"not possible here: {part}" for part in self.skipped]
        return "; ".join([*self.words, *skipped])


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    number: int
    title: str
    state: str
    detail: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The result in one line of text."""
        state = self.state if self.state in STATES[:2] else "not possible here"
        return f"{self.number:>2} {state:<17} {self.title}" + (f": {clean(self.detail)}" if self.detail else "")


@dataclass
class Report:
    """A whole certification."""

    facts: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    #: The objects that could not be removed, with the command that removes them.
    left: str = ""
    #: Words that the document must not contain (names of hosts, of logins), and the mark that replaces each.
    hidden: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if no check has failed, and nothing was left behind."""
        return not self.left and all(result.state != "failed" for result in self.results)

    def count(self, state: str) -> int:
        """Return the number of checks that ended in a state."""
        return sum(result.state == state for result in self.results)

    @property
    def summary(self) -> str:
        """The last line of the output."""
        counts = f"{self.count('ok')} ok, {self.count('failed')} failed, {self.count('not possible')} not possible here"
        return f"{counts}. {self.left}" if self.left else counts + "."

    def head(self) -> Iterator[str]:
        """Yield the first lines of the output: versions and settings."""
        width = max(map(len, self.facts), default=0)
        for name, value in self.facts.items():
            yield f"  {name.replace('_', ' '):<{width}}  {clean(shown(value))}"

    def document(self) -> dict[str, Any]:
        """Return the report for programs, without the hidden words."""
        whole = {
            "format": FORMAT,
            "ok": self.ok,
            "facts": self.facts,
            "checks": [dataclasses.asdict(result) for result in self.results],
            "left": self.left,
        }
        hidden = sorted(((word, mark) for word, mark in self.hidden.items() if word), key=lambda pair: -len(pair[0]))

        def hide(text: str) -> str:
            for word, mark in hidden:
                text = text.replace(word, mark)
            return text

        return dict(_replaced(whole, hide))


def shown(value: Any) -> str:
    """Return a fact as text."""
    return {None: "not known", True: "on", False: "off"}.get(value, str(value)) if not isinstance(value, str) else value


def _replaced(value: Any, hide: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, dict):
        return {name: _replaced(item, hide) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, hide) for item in value]
    return value
