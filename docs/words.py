"""Counts puzzling wording: in docstrings, comments, names of tests, texts for users, SQL and pages.

docs/words.toml has the allowed number of places for each folder. The check fails for a folder with more places.
``python docs/words.py --lower`` lowers the number of a folder with fewer, so that rewritten text stays readable. The
numbers never go up by themselves. A counted place is only a sign: a clear sentence may stay.

Run as ``python docs/words.py``; ``--show FOLDER`` prints each place.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "docs" / "words.toml"
#: The greatest length of a test's name, in characters.
TEST_NAME = 60
#: Pronouns in names of tests: they hide the actor.
PRONOUN = re.compile(r"_(?:who|whom|whose|those|one|nobody|somebody|what|whoever|whatever)(?:_|$)")
#: A text in SQL.
TEXT = re.compile(r"'((?:[^']|'')*)'")


def read_list(text: str) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the lists of words and the allowed numbers."""
    content = tomllib.loads(text)
    return content.get("words", {}), content["allowed"]


class Rules:
    """The rules, made from the lists of words in docs/words.toml."""

    def __init__(self, lists: dict[str, list[str]]) -> None:
        self.openers = frozenset(lists["openers"])
        self.names = frozenset(lists["names"])
        self.clause = re.compile(
            rf"(?:^|[.;:!?(]\s+|, )(?:{'|'.join(lists['clauses'])})\s+(?!(?:if|is this|kind)\b)\w+[^?\n]*$",
            re.IGNORECASE,
        )
        self.phrases = re.compile(rf"\b(?:{'|'.join(lists['phrases'])})\b", re.IGNORECASE)
        self.texts = re.compile(rf"\b(?:{'|'.join(lists['texts'])})\b", re.IGNORECASE)
        self.public = re.compile(rf"\b(?:{'|'.join(lists['public'])})\b", re.IGNORECASE)

    def sentence(self, text: str) -> Iterator[str]:
        """Yield the kind of each puzzling place in a line of prose: a clause for a noun, an old phrase."""
        if self.clause.search(text):
            yield "clause for a noun"
        if self.phrases.search(text):
            yield "phrase"

    def text(self, text: str) -> Iterator[str]:
        """Yield the kind of a place in a text for users, if it has one."""
        if found := self.texts.search(text):
            yield f"word in a text for users: {found[0]}"

    def python(self, source: str, *, tests: bool) -> Iterator[tuple[int, str]]:
        """Yield line and kind of each place in a module."""
        for node in ast.walk(ast.parse(source)):
            yield from self._docstring(node)
            if not tests and isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from ((node.lineno, kind) for kind in self.text(node.value))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("test_"):
                    if PRONOUN.search(node.name) or len(node.name) > TEST_NAME:
                        yield node.lineno, f"name of a test: {node.name}"
                elif not tests and node.name.strip("_") in self.names:
                    yield node.lineno, f"name: {node.name}"
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == "one":
                yield node.lineno, "variable `one`"
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield from ((token.start[0], kind) for kind in self.sentence(token.string.lstrip("#: ")))

    def _docstring(self, node: ast.AST) -> Iterator[tuple[int, str]]:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            return
        text = ast.get_docstring(node)
        if not text:
            return
        line = getattr(node, "lineno", 1)
        first = re.match(r"[\W_]*([A-Za-z']+)", text)
        if first and first[1].lower() in self.openers:
            yield line, f"docstring begins with {first[1]}"
        for sentence in text.splitlines():
            yield from ((line, kind) for kind in self.sentence(sentence))

    def prose(self, source: str, comment: str = "", *, public: bool = False) -> Iterator[tuple[int, str]]:
        """Yield line and kind of each place in a page, or in the comments of SQL or C#."""
        for number, line in enumerate(source.splitlines(), 1):
            text = line.strip()
            if comment == "--":
                yield from ((number, kind) for words in TEXT.findall(text.split("-- ")[0]) for kind in self.text(words))
            if comment:
                if comment not in text:
                    continue
                text = text.split(comment, 1)[1].strip()
            yield from ((number, kind) for kind in self.sentence(text))
            if public and (found := self.public.search(re.sub(r"`[^`]*`", "", text))):
                yield number, f"word of our own: {found[0]}"


def folder_of(name: str) -> str:
    """Return the folder that counts a file: each package and each kind of test by itself, else the top folder."""
    parts = name.split("/")
    if len(parts) == 1:
        return "."
    return "/".join(parts[:2]) if parts[0] in ("sqlsem", "tests") and len(parts) > 2 else parts[0]


def places(rules: Rules) -> Iterator[tuple[str, str, int, str]]:
    """Yield folder, file, line and kind of each place in the repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - a fixed command
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix not in (".py", ".sql", ".md", ".cs") or not path.is_file() or path.is_symlink():
            continue
        source = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            found = rules.python(source, tests=name.startswith("tests/"))
        else:
            comment = {".sql": "--", ".cs": "//", ".md": ""}[path.suffix]
            found = rules.prose(source, comment, public=name.startswith("docs/") or name == "README.md")
        for line, kind in found:
            yield folder_of(name), name, line, kind


def lowered(text: str, counts: Counter[str]) -> str:
    """Return the file's text with the numbers lowered to today's counts, without folders that have no place."""
    _, allowed = read_list(text)
    now = {folder: min(number, counts[folder]) for folder, number in allowed.items()}
    head = text.split("[allowed]", 1)[0]
    return head + "[allowed]\n" + "".join(f'"{name}" = {number}\n' for name, number in sorted(now.items()) if number)


def check(arguments: list[str] | None = None) -> int:
    """Print the folders that have more places than allowed; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", metavar="FOLDER", help="print each place of this folder ('all': of each)")
    parser.add_argument("--lower", action="store_true", help="lower the numbers of docs/words.toml to those of now")
    options = parser.parse_args(arguments)
    text = LIST.read_text(encoding="utf-8")
    lists, allowed = read_list(text)
    counts: Counter[str] = Counter()
    for folder, name, line, kind in places(Rules(lists)):
        counts[folder] += 1
        if options.show in (folder, "all"):
            print(f"{name}:{line}: {kind}")
    if options.lower:
        LIST.write_text(lowered(text, counts), encoding="utf-8")
    wrong = {folder: number for folder, number in counts.items() if number > allowed.get(folder, 0)}
    for folder, number in sorted(wrong.items()):
        print(f"{folder}: {number} places, {allowed.get(folder, 0)} allowed; see: python docs/words.py --show {folder}")
    print(f"{counts.total()} places in {len(counts)} folders, {len(wrong) or 'no'} folders over their number")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(check())
