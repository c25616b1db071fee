"""docs/check.py finds each kind of fault, and finds none in the pages now."""

import doctest
import importlib.util
import pkgutil
import re
import subprocess
from pathlib import Path

import pytest
from support import docs_modules

import sqlsem
from sqlsem import sql
from sqlsem.cli import main
from sqlsem.cli.connecting import DEFAULTS
from sqlsem.config import reading

ROOT = Path(__file__).resolve().parents[2]
#: Files with the names of environment variables.
SOURCES = (".py", ".sql", ".html", ".js")
check = docs_modules.load("check")


def fenced(language, body):
    return f"```{language}\n{body}\n```\n"


def test_nothing_is_wrong(capsys):
    assert check.check() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("find", "text", "words"),
    [
        (check.commands, fenced("sh", "sqlsem lock etl"), "no command: sqlsem lock"),
        (check.commands, "Say `sqlsem lock etl`.", "no command: sqlsem lock"),
        (check.commands, fenced("sh", "sqlsem --url x ls --wach 1"), "ls has no option --wach"),
        (check.commands, fenced("", "$ sqlsem tasks cancel --al 17"), "cancel has no option --al"),
        (check.twice, "## Azure\n\n## More\n\n## Azure\n", "several headings 'Azure'"),
        (check.examples, fenced("python", "with sqlsem.mutex('a') as:\n    pass"), "does not compile"),
        (check.routines, fenced("sql", "SELECT sqlsem.unlock('etl');"), "sqlsem.unlock"),
        (check.words, "Whoever waits looks.", "'Whoever'"),
        (lambda text: check.links(check.README, text), "[a](docs/nowhere.md)", "no such file"),
        (
            lambda text: check.links(check.README, text),
            "[a](docs/explanation/how-it-works.md#nowhere)",
            "no such heading",
        ),
        (check.reached, "[a](LICENSE)", "no link leads to docs/explanation/glossary.md"),
        (lambda text: check.missing(["batches.sql"], text, "script"), "`tasks.sql`", "script batches.sql"),
        (check.glossary, "| word | |\n| gate | a |\n| beacon | b |\n", "alphabetical"),
        (check.glossary, "| word | |\n| gate | a |\n", "'beacon'"),
    ],
)
def test_faults_are_found(find, text, words):
    findings = list(find(text))
    assert any(words in finding for finding in findings), findings


@pytest.mark.parametrize(
    "text",
    [
        fenced("sh", "sqlsem run --limit etl=3 -- python load.py --fast"),
        fenced("sh", "sqlsem --schema locks sql postgresql permissions > file  # --everything"),
        fenced("sh", 'sqlsem put nightly --sql "CALL a()" --order 100 && sqlsem tasks wait nightly --timeout 0'),
        "`sqlsem tasks nightly --status failed`, `sqlsem ls [NAME]`, `sqlsem run --limit etl=3 …`",
    ],
)
def test_check_accepts_correct_pages(text):
    assert list(check.commands(text)) == []


def test_commits_that_pages_name_are_there():
    """Also after commits were rewritten on the way to the main branch."""
    top = Path(__file__).parents[2]

    def git(*words):
        return subprocess.run(["git", *words], cwd=top, capture_output=True, text=True)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("not a clone with its whole history")
    pages = [*(top / "docs").rglob("*.md"), *(top / "proof").glob("*.md"), top / "README.md"]
    named = {
        commit_name
        for page in pages
        for commit_name in re.findall(r"`([0-9a-f]{7})`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    missing = {commit for commit in named if git("merge-base", "--is-ancestor", commit, "HEAD").returncode}
    assert missing == set()


def test_roles_are_known():
    assert "sqlsem_user" in check.roles()


def test_help_names_every_script():
    words = set(re.findall(r"\w+", main.commands["sql"].help))
    assert set(sql.SCRIPTS) <= words


def with_examples():
    for module in pkgutil.walk_packages(sqlsem.__path__, "sqlsem."):
        path = Path(importlib.util.find_spec(module.name).origin)
        if not module.name.endswith("__main__") and ">>> " in path.read_text(encoding="utf-8"):
            yield module.name


@pytest.mark.parametrize("module", ["sqlsem", *with_examples()])
def test_examples_in_docstrings(module):
    """Examples that need a database have ``doctest: +SKIP``."""
    try:
        module_object = importlib.import_module(module)
    except ModuleNotFoundError as exc:  # an adapter's package may be missing
        assert module.startswith("sqlsem.adapters.")
        pytest.skip(f"{exc.name} is not installed")
    assert doctest.testmod(module_object, extraglobs={"sqlsem": sqlsem}).failed == 0


def test_environment_variables_are_in_a_single_table():
    """Every variable that the source knows is in the table of docs/reference/configuration.md, and no other."""
    sources = (ROOT / "sqlsem").rglob("*")
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in sources if path.suffix in SOURCES]
    known = {name for text in texts for name in re.findall(r"SQLSEM_[A-Z]+(?:_[A-Z]+)*", text)}
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("\n## Environment variables\n")[2].partition("\n## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert known == set(re.findall(r"`(SQLSEM_\w+)`", " ".join(first)))
    pages = {path: path.read_text(encoding="utf-8") for path in check.PAGES if path.name != "CONTRIBUTING.md"}
    named = {(path.name, name) for path, text in pages.items() for name in re.findall(r"SQLSEM_[A-Z_]+[A-Z]", text)}
    assert {(page, name) for page, name in named if name not in known and "_TEST_" not in name} == set()


def test_settings_are_in_a_single_table():
    """The table has each key of a file, its flag and default, and says which keys a project's file may set."""
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("\n## Settings\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]
    rows = {row[0].strip("`"): row for row in cells}
    assert set(rows) == set(reading.SETTINGS)
    flags = {option for param in main.params for option in param.opts}
    for key, (_, variable, flag, default, _, project) in rows.items():
        assert flag == (f"`--{key}`" if f"--{key}" in flags else ""), key
        assert variable in ("", f"`SQLSEM_{key.upper()}`"), key
        if key in DEFAULTS:
            value = DEFAULTS[key]
            assert default.strip("`") == ("none" if value is None else f"{value:g}" if type(value) is float else value)
        assert (project == "yes") == (reading.SETTINGS[key].harm is None and key != "profile"), key


def test_environment_variables_have_names_that_are_found():
    """No name is built from parts, as the scan would miss it."""
    for path in (ROOT / "sqlsem").rglob("*.py"):
        assert not re.search(r"SQLSEM_[\"'{%]", path.read_text(encoding="utf-8")), path


def test_ssis_page_maps_no_output_that_may_be_null():
    """SSIS cannot assign NULL to a variable of a number, and @position is NULL if the lock was not granted."""
    page = (ROOT / "docs" / "howto" / "ssis.md").read_text(encoding="utf-8")
    mapped = re.findall(r"SELECT \? = (\w+)", page)
    assert "? OUTPUT" not in page
    assert mapped == ["COALESCE"] * page.count("SELECT ?") != []
