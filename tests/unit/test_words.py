"""docs/words.py counts the places that docs/words.toml lists, and raises no number."""

import re
from collections import Counter
from pathlib import Path

import pytest
from support import docs_modules

ROOT = Path(__file__).resolve().parents[2]
words = docs_modules.load("words")
LISTS, ALLOWED = words.read_list(words.LIST.read_text(encoding="utf-8"))
RULES = words.Rules(LISTS)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Whether it is held."""\n', ["docstring begins with Whether"]),
        ('"""Return True while the grant is held."""\n', []),
        ('"""Wake the waiters.\n\n    Who waits is told.\n    """\n', ["clause for a noun"]),
        ("x = 1  # What is held stays.\n", ["clause for a noun"]),
        ("x = 1  # The waiter stays in the queue.\n", []),
        ("x = 1  # the lock is had\n", ["phrase"]),
        ('x = f"{row}: nobody is let in"\n', ["word in a text for users: let in"]),
        ('x = f"{row}: nothing is granted"\n', []),
        ("for one in rows:\n    pass\n", ["variable `one`"]),
        ("for row in rows:\n    pass\n", []),
        ("def nudge(): ...\n", ["name: nudge"]),
        ("def notify(): ...\n", []),
        ("def test_who_waits(): ...\n", ["name of a test: test_who_waits"]),
        ("def test_waiter_gives_up_at_its_timeout(): ...\n", []),
        (f"def test_{'a' * 60}(): ...\n", [f"name of a test: test_{'a' * 60}"]),
    ],
)
def test_rules_count_python(source, expected):
    assert [kind for _, kind in RULES.python(source, tests=False)] == expected


def test_rules_count_comments_of_sql_and_pages():
    assert list(RULES.prose("SELECT 1 -- Who waits looks.\n", "--")) == [(1, "clause for a noun")]
    assert list(RULES.prose("SELECT 'who waits looks'\n", "--")) == []
    assert list(RULES.prose("SELECT 'it is let in', 'so'  -- 'somebody'\n", "--")) == [
        (1, "word in a text for users: let in")
    ]
    assert list(RULES.prose("A parked task.\n", public=True)) == [(1, "word of our own: parked")]
    assert list(RULES.prose("The column `parked`.\n", public=True)) == []


def test_names_in_tests_are_free():
    assert list(RULES.python("def nudge(): ...\n", tests=True)) == []


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("README.md", "."),
        ("docs/howto/cron.md", "docs"),
        ("sqlsem/__main__.py", "sqlsem"),
        ("sqlsem/client/grants.py", "sqlsem/client"),
        ("sqlsem/engines/statements/locks.py", "sqlsem/engines"),
        ("tests/unit/test_words.py", "tests/unit"),
    ],
)
def test_folder_of_a_file(name, folder):
    assert words.folder_of(name) == folder


def test_numbers_only_go_down():
    text = 'public = ["x"]\n\n[allowed]\n"a" = 3\n"b" = 2\n"c" = 1\n'
    assert words.lowered(text, Counter(a=5, b=1)) == 'public = ["x"]\n\n[allowed]\n"a" = 3\n"b" = 1\n'


def test_check_fails_over_the_number(monkeypatch, capsys):
    monkeypatch.setattr(words, "places", lambda rules: [("docs", "docs/a.md", 7, "phrase")] * (ALLOWED["docs"] + 1))
    assert words.check([]) == 1
    assert "python docs/words.py --show docs" in capsys.readouterr().out
    monkeypatch.setattr(words, "places", lambda rules: [("docs", "docs/a.md", 7, "phrase")] * ALLOWED["docs"])
    assert words.check([]) == 0


def test_every_allowed_folder_exists():
    assert [folder for folder in ALLOWED if not (ROOT / folder).is_dir()] == []


def test_words_of_the_code_are_sorted_and_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \|$", page.split("## Words of the code")[1].split("\n## ")[0], re.MULTILINE
    )[1:]
    assert [word for word, _ in rows] == sorted(word for word, _ in rows)
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "sqlsem").rglob("*.py"))
    classes = [name for _, meaning in rows for name in re.findall(r"`([A-Z]\w+)`", meaning)]
    assert [name for name in classes if not re.search(rf"^class {name}\b", code, re.MULTILINE)] == []
