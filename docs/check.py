"""Checks the documentation: links lead somewhere, Python examples compile, commands and routines named exist.

Run as ``python docs/check.py``; needs sqlsem installed.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from sqlsem import engines, sql
from sqlsem.cli import main

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """The names that headings get: lower case, punctuation gone, blanks to hyphens."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def links(page: Path, text: str) -> Iterator[str]:
    """Links that lead nowhere."""
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
        if "://" in target:
            continue
        place, _, anchor = target.partition("#")
        file = page if not place else (page.parent / place).resolve()
        if not file.exists():
            yield f"link to {target}: no such file"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"link to {target}: no such heading"


def examples(text: str) -> Iterator[str]:
    """Python that does not compile, commands that do not exist."""
    for indent, language, body in FENCE.findall(text):
        code = textwrap.dedent(body) if indent else body
        if language == "python":
            try:
                compile(code, "example", "exec", flags=0x2000)  # PyCF_ALLOW_TOP_LEVEL_AWAIT
            except SyntaxError as exc:
                yield f"Python example does not compile: {exc.msg}: {exc.text}"
        for command in re.findall(r"^(?:\$ )?sqlsem(?: --\w+ \S+)* ([a-z]+)\b", code, re.MULTILINE):
            if language in ("", "bash", "sh", "console") and command not in main.commands:
                yield f"there is no command: sqlsem {command}"


def routines(text: str) -> Iterator[str]:
    """Routines that SQL examples call and that no engine has."""
    known = "".join(
        sql.script(engine, name) for engine in engines.ENGINES for name in ("schema", *sql.rerunnable(engine))
    )
    examples = "".join(body for _, language, body in FENCE.findall(text) if language == "sql")
    for name in sorted(set(re.findall(r"\bsqlsem\.(\w+)", examples))):
        if not re.search(rf"\bsqlsem\.{name}\b", known):
            yield f"there is no routine or table: sqlsem.{name}"


def check() -> int:
    """Print what is wrong; 1 when anything is."""
    wrong = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for problem in (*links(page, text), *examples(text), *routines(text)):
            wrong += 1
            print(f"{page.relative_to(ROOT)}: {problem}")
    print(f"{len(PAGES)} pages, {wrong or 'nothing'} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(check())
