"""Checks the documentation for errors that a program can find.

Each link has a target, Python examples compile, and the commands, options and routines on the pages exist. Links lead
from the README to every page, a page describes every role, and the glossary has the words of the pages.

Run as ``python docs/check.py``; needs sqlsem installed.
"""

from __future__ import annotations

import functools
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from sqlsem import engines, sql
from sqlsem.cli import main

ROOT = Path(__file__).resolve().parent.parent
README, CHANGELOG = ROOT / "README.md", ROOT / "CHANGELOG.md"
PAGES = [README, CHANGELOG, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```([\w{}-]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^\s*#.*$|\s{2,}#.*$", re.MULTILINE)
#: Words that are hard to read for people with another first language than English.
AVOIDED = re.compile(r"\b(who(?:m|so)?ever|whos|lest|whence|hence|whilst|thereof|therein|wherein|ere)\b", re.IGNORECASE)


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings: lower case, without punctuation, with hyphens for blanks."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def targets(text: str) -> list[str]:
    """Return the targets of a page's links."""
    return re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))


def links(page: Path, text: str) -> Iterator[str]:
    """Yield links without a target."""
    for target in targets(text):
        if "://" in target:
            continue
        place, _, anchor = target.partition("#")
        file = page if not place else (page.parent / place).resolve()
        if not file.exists():
            yield f"link to {target}: no such file"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"link to {target}: no such heading"


def twice(text: str) -> Iterator[str]:
    """Yield headings that a page has more than once: links reach only the first of them."""
    heads = re.findall(r"^## +(.+)$", FENCE.sub("", text), re.MULTILINE)
    for head in sorted({head for head in heads if heads.count(head) > 1}):
        yield f"there are several headings {head!r}"


def examples(text: str) -> Iterator[str]:
    """Yield Python examples that do not compile."""
    for indent, language, body in FENCE.findall(text):
        if language == "python":
            code = textwrap.dedent(body) if indent else body
            try:
                compile(code, "example", "exec", flags=0x2000)  # PyCF_ALLOW_TOP_LEVEL_AWAIT
            except SyntaxError as exc:
                yield f"Python example does not compile: {exc.msg}: {exc.text}"


def commands(text: str) -> Iterator[str]:
    """Yield commands and options of ``sqlsem`` that do not exist, in examples and in sentences."""
    lines = re.findall(r"`(sqlsem [^`]+)`", FENCE.sub("", text))
    for _, language, body in FENCE.findall(text):
        if language in ("", "bash", "sh", "console"):
            lines += re.findall(r"^(?:\$ )?(sqlsem .+)$", COMMENT.sub("", body), re.MULTILINE)
    for line in lines:
        try:
            words = shlex.split(re.split(r"\s(?:[|&<>]|&&)", line)[0].replace("…", ""))
        except ValueError:  # an example with a quote that goes on
            words = line.split()
        yield from unknown(words[1:], line)


def unknown(words: list[str], line: str) -> Iterator[str]:
    """Yield the command or option of a line that sqlsem does not have. The line ends where another command begins."""
    command: click.Command = main
    waiting = False  # True before the value of an option
    for word in words:
        if word == "--":
            return
        if word.startswith("-") and len(word) > 1 and not waiting:
            name, _, value = word.partition("=")
            option = next((param for param in command.params if name in (*param.opts, *param.secondary_opts)), None)
            if option is None and name not in command.get_help_option_names(click.Context(command)):
                yield f"{line}: {command.name} has no option {name}"
                return
            waiting = isinstance(option, click.Option) and not option.is_flag and not option.count and not value
        elif waiting:
            waiting = False
        elif isinstance(command, click.Group):
            if word in command.commands:
                command = command.commands[word]
            elif command is main:
                if re.fullmatch(r"[a-z]+", word):
                    yield f"there is no command: sqlsem {word}"
                return
            else:
                return  # the name of a queue or a batch
        elif command.name == "run":
            return  # the rest is the command to run


@functools.cache
def in_schema() -> frozenset[str]:
    """Return the names in the schema sqlsem that the scripts of any engine contain."""
    scripts = [sql.script(engine, name) for engine in engines.ENGINES for name in ("schema", *sql.rerunnable(engine))]
    return frozenset(re.findall(r"\bsqlsem\.(\w+)", "".join(scripts)))


def routines(text: str) -> Iterator[str]:
    """Yield routines that SQL examples call and that no engine has."""
    calls = "".join(body for _, language, body in FENCE.findall(text) if language == "sql")
    for name in sorted(set(re.findall(r"\bsqlsem\.(\w+)", calls))):
        if name not in in_schema():
            yield f"there is no routine or table: sqlsem.{name}"


def words(text: str) -> Iterator[str]:
    """Yield words to avoid. Code blocks and quoted code are not checked."""
    prose = re.sub(r"`[^`]*`", "", FENCE.sub("", text))
    for found in AVOIDED.finditer(prose):
        line = " ".join(prose[max(0, found.start() - 30) : found.end() + 30].split())
        yield f"{found[0]!r} is hard to read: … {line} …"


def reached(text: str) -> Iterator[str]:
    """Yield pages that no chain of links from the README reaches."""
    linked = {README}
    left = [(README, text)]
    while left:
        page, text = left.pop()
        for target in targets(text):
            file = (page.parent / target.partition("#")[0]).resolve()
            if file in PAGES and file not in linked:
                linked.add(file)
                left.append((file, file.read_text(encoding="utf-8")))
    for page in PAGES:
        if page not in linked:
            yield f"no link leads to {page.relative_to(ROOT)}"


def missing(names: Iterable[str], text: str, what: str) -> Iterator[str]:
    """Yield names that a page does not have in backticks."""
    for name in names:
        if not re.search(rf"`{re.escape(name)}\b", text):
            yield f"{what} {name} is not described"


def roles() -> list[str]:
    """Return the roles that the scripts create."""
    text = "".join(sql.script(engine, "permissions") for engine in engines.ENGINES)
    return sorted(set(re.findall(r"\bsqlsem_(?:user|putter|worker|operator|reader)\b", text)))


def glossary(text: str) -> Iterator[str]:
    """Yield words that a page introduces in bold and that the glossary lacks, and an error in the glossary's order."""
    rows = re.findall(r"^\| ([^|]+?) \| ", text, re.MULTILINE)[1:]
    terms = {term for row in rows for term in row.split(", ")}
    if rows != sorted(rows, key=str.lower):
        yield "its rows are not in alphabetical order"
    for page in ("explanation/how-it-works.md", "howto/batches.md"):
        introduced = re.findall(r"\*\*([a-z][a-z ]*)\*\*", (ROOT / "docs" / page).read_text(encoding="utf-8"))
        for word in introduced:
            if not {word, word.replace("signs ", "sign "), word.removesuffix("s")} & terms:
                yield f"{page} introduces {word!r}, which is not here"


def check() -> int:
    """Print the errors; return 1 if there are any."""
    wrong = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        problems = [*links(page, text), *twice(text), *examples(text), *commands(text), *routines(text)]
        if page != CHANGELOG:
            problems += words(text)
        if page == README:
            problems += reached(text)
        elif page.name == "install.md":
            problems += missing(roles(), text, "role")
        elif page.name == "glossary.md":
            problems += glossary(text)
        for problem in problems:
            wrong += 1
            print(f"{page.relative_to(ROOT)}: {problem}")
    print(f"{len(PAGES)} pages, {wrong or 'nothing'} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(check())
