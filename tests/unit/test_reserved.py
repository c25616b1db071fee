"""The reserved names: one table has them all, and clients cannot lock them."""

import re
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

import sqlsem
import sqlsem.testing
from sqlsem.cli import main
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.names import RESERVED, check_free

ROOT = Path(sqlsem.__file__).parent
#: Prefixes in the source that begin no name of a resource, with their meaning.
NO_NAMES = {
    "stage:": "an access type",
    "upgrade:": "an access type",
    "file:": "a URL",
    "https:": "a URL",
    "postgres:": "a URL",
    "postgresql:": "a URL",
    "tcp:": "a server's address",
    "socket:": "a link in /proc",
}
TAKEN = [prefix + "x" for prefix in RESERVED] + ["tenant:*", "*"]


def prefixes(text, suffix):
    """Yield words that end with a colon, as the prefix of a composed name does."""
    if suffix == ".py":
        text = re.sub(r"(?m)^\s*>>> .*", "", text)  # examples
        yield from re.findall(r"""(?<![\w{])f?["']([a-z]+:)(?:["']|\{)""", text)
    else:
        text = re.sub(r"--.*", "", text)
        yield from re.findall(r"'([a-z]+:)'\s*(?:\|\||\+|,|\))", text)  # 'once:' || name, CONCAT(N'once:', @name)
        yield from re.findall(r"'([a-z]+:)'\s+(?:AND|OPERATOR)\b", text)
        yield from re.findall(r"(?:LIKE|GLOB)\s+N?'([a-z]+:)_?[%*]", text)
        for words in re.findall(r"\^\(([a-z|]+)\):", text):
            yield from (f"{word}:" for word in words.split("|"))


def found_in_source():
    for path in sorted(ROOT.rglob("*")):
        if path.suffix in (".py", ".sql"):
            for prefix in prefixes(path.read_text(encoding="utf-8"), path.suffix):
                yield prefix, path.relative_to(ROOT).as_posix()


def test_reserved_names_match_the_source():
    """Each prefix is either reserved or in the list above."""
    places = {}
    for prefix, place in found_in_source():
        places.setdefault(prefix, set()).add(place)
    unknown = {prefix: place for prefix, place in places.items() if prefix not in {**RESERVED, **NO_NAMES}}
    assert unknown == {}
    assert set(RESERVED) <= set(places), "the scan misses a reserved prefix"


@pytest.mark.parametrize(
    ("text", "suffix"),
    [
        ('PREFIX = "batch:"', ".py"),
        ('name = f"batch:{name}"', ".py"),
        ("SELECT 'batch:' || p_name", ".sql"),
        ("CONCAT(N'batch:', @name)", ".sql"),
        ("SET @line = N'batch:' + @name", ".sql"),
        ("WHERE resource_id LIKE 'batch:%'", ".sql"),
        ("WHERE resource_id GLOB 'batch:*'", ".sql"),
        ("IF p_name ~ '^(rate|batch):'", ".sql"),
    ],
)
def test_scan_finds_a_new_prefix(text, suffix):
    assert "batch:" in set(prefixes(text, suffix))


@pytest.mark.parametrize("engine", ["postgresql", "mssql"])
@pytest.mark.parametrize("file", ["public.sql", "routines.sql"])
def test_sql_reserves_the_same_names(engine, file):
    """Checked by `check_not_reserved`, by the INSERT of a bare row, and when priorities are set."""
    text = (ROOT / "sql" / engine / file).read_text(encoding="utf-8")
    if engine == "postgresql":
        lists = [{f"{word}:" for word in words.split("|")} for words in re.findall(r"\^\(([a-z|]+)\):", text)]
        assert lists
        assert all(list == set(RESERVED) for list in lists)
    else:
        for prefix in RESERVED:
            counted = text.count(f"WHEN N'{prefix}' THEN") + text.count(f"LIKE N'{prefix}%'")
            assert counted == (1 if file == "public.sql" else 2), prefix


def test_sqlite_reserves_the_same_names(tmp_path):
    """Checked by the INSERT of a bare row: SQLite has no routines."""
    with sqlsem.connect(f"sqlite:///{tmp_path}/x.db") as coordinator:
        coordinator.mutex("free").acquire()
        connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
        for name in TAKEN:
            with pytest.raises(sqlite3.IntegrityError, match="choose another name"):
                connection.execute("INSERT INTO ProcessControl (resource_id, requesting_id) VALUES (?, 'me')", (name,))
        connection.execute("INSERT INTO ProcessControl (resource_id, requesting_id) VALUES ('Rate:x', 'me')")
        connection.close()
        assert [entry.resource for entry in coordinator.admin.entries()] == ["Rate:x", "free"]
        with coordinator.once("x", "1h") as run:
            assert run is not None


@pytest.fixture
def locks():
    with sqlsem.testing.memory() as coordinator:
        yield coordinator


MAKERS = {
    "mutex": lambda faces, name: faces.mutex(name),
    "limit": lambda faces, name: faces.limit(name, 2),
    "read": lambda faces, name: faces.read(name),
    "write": lambda faces, name: faces.write(name),
    "stage": lambda faces, name: faces.stage(name, 1),
    "leader": lambda faces, name: faces.leader(name),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("kind", MAKERS)
def test_lock_of_a_reserved_name_is_refused(locks, kind, name):
    for faces in (locks, locks.aio, sqlsem, sqlsem.aio):
        with pytest.raises(ConfigurationError, match="choose another name") as raised:
            MAKERS[kind](faces, name)
        assert raised.value.resource == name
    assert sorted(MAKERS) == sorted({*MAKERS} & {*sqlsem.__all__})


@pytest.mark.parametrize("name", TAKEN)
def test_computed_name_that_is_reserved_is_refused(locks, name):
    called = []
    lock = locks.mutex(lambda argument: argument)
    lock(called.append)(f"x{name[:-1]}")
    with pytest.raises(ConfigurationError, match="choose another name"):
        lock(called.append)(name)
    assert len(called) == 1


def test_names_that_only_look_alike_are_free():
    for name in ("rates:api", "rate", "my-rate:x", "Rate:x", "leader:x", "a*b", "once"):
        check_free(name)


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize(
    "option", [["--mutex", "{}"], ["--limit", "{}=2"], ["--read", "{}"], ["--write", "{}"], ["--stage", "{}=1"]]
)
def test_run_of_a_reserved_name_is_refused(tmp_path, option, name):
    words = [word.format(name) for word in option]
    result = CliRunner().invoke(main, ["--url", f"sqlite:///{tmp_path}/x.db", "run", *words, "--", "true"])
    assert result.exit_code == 64
    assert "choose another name" in " ".join(result.output.split())


def test_own_features_lock_their_names(locks):
    """The library's own calls are not refused."""
    with locks.rate("x", 1, per="1h") as grant:
        assert grant.name == "x"
