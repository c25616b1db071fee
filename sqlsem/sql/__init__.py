"""The SQL of every engine, as files that a DBA can read, print (``sqlsem sql``) and diff.

Each engine's folder holds the same scripts:

``schema-<n>.sql``
    creates version n from version n-1 (from nothing, for 1). Frozen once released. For the engines without routines
    the tables are in folder ``statements``.
``routines.sql``
    functions and procedures; may be run again at any time, also while locks are held ("rerunnable" below).
``public.sql``
    the routines for sessions (T-SQL, psql), built on the above; rerunnable. Not for SQLite, which has no routines.
``priorities.sql``
    requests that wait by priority; rerunnable. Not for SQLite, where the client orders them.
``deadlocks.sql``
    finds owners that wait for each other; rerunnable. Not for SQLite, where the client finds them.
``rates.sql``
    rates: limits of use in a window of time; rerunnable. Not for SQLite, where the client counts the use.
``tasks.sql``, ``batches.sql``
    the work queue and the batches; rerunnable. Not for SQLite.
``blocked_tasks.sql``
    tasks with locks, which wait for these without a process; rerunnable. Not for SQLite, where the client does it.
``conversions.sql``
    upgrades of readers to writers, and downgrades; rerunnable. Not for SQLite.
``handovers.sql``
    locks that a process hands over to another one; rerunnable. Not for SQLite.
``overview.sql``
    the whole state at one instant, for displays, and estimates; rerunnable. Not for SQLite.
``guards.sql``
    tables that can be written only under a lock; rerunnable. Not for SQLite.
``once.sql``
    runs once per period; rerunnable. Not for SQLite.
``features.sql``
    records the installed features, for `sqlsem init`; rerunnable. Not for SQLite, where all are installed.
``permissions.sql``
    roles and grants; may be run again.
``drop.sql``
    removes all tables and routines. For the engines without routines it is in folder ``statements``, too.
``client.sql``
    the statements that the Python client sends, each under a line ``-- name: …``. Where there are routines, most
    statements call the routine of the same name, and so have the same names on every such engine: these are written
    from the routines' signatures (`sqlsem.sql.calls`). SQLite has none: there the client builds a call from smaller
    statements, and a name that other engines have does the same. Most of these are in folder ``statements``, for every
    engine without routines.
``dialect.sql``
    the words of an engine without routines, in the statements of folder ``statements``.
``doctor.sql``
    the statements of ``sqlsem doctor``, in the same form.
``by_hand.sql``
    only for SQL Server: the statements before and after all scripts, if a person runs them.
``abbreviations.sql``
    lines that routines or statements have in common, by name.
``certify.sql``
    the statements of ``sqlsem certify``, in a schema that it creates and drops; in the same form. For the engines
    without routines most are in folder ``statements``.
``simulated.sql``
    only for PostgreSQL: turns a database into one for simulations (`sqlsem.testing.simulate`). Run it in no other.

Two words are filled in: ``{schema}`` and ``{table}``, after a check that both are plain identifiers. A file may also
define abbreviations: after a line ``-- where {clock} is …`` the word ``{clock}`` stands for the text in that line, and
after ``-- where {index:x} is …`` the word ``{index:name}`` for the text with ``name`` in place of ``{x}``. Such lines
of ``abbreviations.sql`` and ``dialect.sql`` count for every script of that engine. So do the names in
``abbreviations.sql``, which stand for several lines. In scripts for SQL Server, GO follows each routine that begins
with CREATE OR ALTER. All other values are bound parameters.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection

from sqlsem.sql.calls import Routines, expand_calls, listed_calls
from sqlsem.sql.features import CORE, FEATURES, compose, sections, to_setting
from sqlsem.values.errors import ConfigurationError

__all__ = [
    "ALL",
    "FEATURE_OF",
    "LATEST",
    "SCRIPTS",
    "by_hand",
    "fill",
    "has_features",
    "migrations",
    "queries",
    "query_features",
    "rerunnable",
    "script",
]

#: The version of the schema that this client brings.
LATEST = 1
#: The scripts that ``sqlsem sql`` can print, in the order in which a DBA would run them, each with its feature.
FEATURE_OF = {
    "schema": CORE,
    "routines": CORE,
    "priorities": "priorities",
    "deadlocks": CORE,
    "public": CORE,
    "rates": "rates",
    "tasks": "queue",
    "blocked_tasks": "queue",
    "batches": "batches",
    "conversions": "conversions",
    "handovers": "handovers",
    "overview": "operate",
    "guards": "guards",
    "once": "once",
    "features": CORE,
    "permissions": CORE,
    "drop": CORE,
    "client": CORE,
}
SCRIPTS = tuple(FEATURE_OF)
#: The scripts that follow the schema's at every `sqlsem init`.
RERUNNABLE = SCRIPTS[1:-2]
ALL = frozenset(FEATURES)

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,47}")
_WHERE_LINE = re.compile(r"^-- where \{(\w+)(:x)?\} is ?(.*)\n", re.MULTILINE)
#: Comments behind a statement: they are about the next statements. (An engine's file follows that of folder
#: ``statements``.)
_LAST_COMMENTS = re.compile(r"(?:\n(?:--[^\n]*)?)+\Z")
_NAME_LINE = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)
#: A routine of SQL Server: up to the first line without indentation that is followed by an empty line, or by none.
_BATCH = re.compile(r"^CREATE OR ALTER .*?^\S[^\n]*\n(?=\n|\Z)", re.MULTILINE | re.DOTALL)
#: Settings of a session on SQL Server that hold for the routines that it creates.
_CREATION_SETTINGS = "SET QUOTED_IDENTIFIER ON;\nSET ANSI_NULLS ON;\nGO\n\n"


def check_identifier(label: str, value: str) -> str:
    """Return ``value`` if the SQL of every engine takes it unquoted, else raise `ConfigurationError`."""
    if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
        raise ConfigurationError(
            f"{label} must be a plain identifier (a letter or _, then letters, digits or _; at most 48), not {value!r}"
        )
    return value


@functools.cache
def _read(engine: str, file: str) -> str | None:
    dialect = _text(engine, "dialect.sql")
    # (A statement of the engine replaces the one of the same name.)
    texts = (None if dialect is None else _text("statements", file), _text(engine, file))
    parts = [text for text in texts if text is not None]
    return "\n".join(parts) if parts else None


def _text(folder: str, file: str) -> str | None:
    """Return the text of a file of this package, also if that is in a zip archive; None if there is no such file."""
    try:
        # (`importlib.resources` could do this, and takes a tenth of the time of ``import sqlsem`` to load.)
        data: bytes = __loader__.get_data(os.path.join(os.path.dirname(__file__), folder, file))  # type: ignore[name-defined]
    except OSError:
        return None
    return data.decode().replace("\r\n", "\n")


def fill(engine: str, text: str, schema: str = "sqlsem", table: str = "ProcessControl") -> str:
    """Return the text of a script, ready to run: with names in place of ``{schema}`` and ``{table}``, the lines that
    abbreviations and lists of calls stand for, and GO between the batches of SQL Server.
    """
    check_identifier("The schema's name", schema)
    check_identifier("The table's name", table)
    definitions = _WHERE_LINE.findall(text)
    for file in ("abbreviations.sql", "dialect.sql"):  # (A word may be explained by the words of a later file.)
        definitions += _WHERE_LINE.findall(_read(engine, file) or "")
    text = _expand(expand_calls(_WHERE_LINE.sub("", text), lambda: _routines(engine)), _abbreviations(engine))
    for word, argument, meaning in definitions:
        text = _expand_word(text, word, meaning) if argument else text.replace(f"{{{word}}}", meaning)
    return _separate_batches(text).replace("{schema}", schema).replace("{table}", table)


def _expand_word(text: str, word: str, meaning: str) -> str:
    """Replace a word with an argument, as ``{word:x}``, by its meaning. In that, ``{x1}`` is the first of several
    columns.
    """

    def mean(match: re.Match[str]) -> str:
        return meaning.replace("{x1}", match[1].partition(",")[0]).replace("{x}", match[1])

    return re.sub(rf"\{{{word}:([^{{}}]+)\}}", mean, text)


@functools.cache
def _routines(engine: str) -> Routines:
    return Routines("\n".join(filter(None, (_read(engine, f"{name}.sql") for name in RERUNNABLE))))


def _abbreviations(engine: str) -> dict[str, str]:
    """Return the lines of abbreviations.sql by their names. They may contain earlier abbreviations."""
    parts = _NAME_LINE.split(_read(engine, "abbreviations.sql") or "")
    result: dict[str, str] = {}
    for name, lines in zip(parts[1::2], parts[2::2], strict=True):
        result[name] = _expand(lines.strip("\n"), result)
    return result


def _expand(text: str, abbreviations: dict[str, str]) -> str:
    """Replace abbreviations by their lines, in which ``{x}`` is the argument (or with ``{y}`` the first of two). The
    lines begin below the line that ends with the abbreviation, or have the indentation of an abbreviation that stands
    alone.
    """

    def lines(match: re.Match[str]) -> str:
        space, name, argument = match.groups()
        before = match.string[match.string.rfind("\n", 0, match.start()) + 1 : match.end(1)]
        lines = abbreviations[name]
        if "{y}" in lines:
            argument, _, second = argument.partition(",")
            lines = lines.replace("{y}", second)
        lines = lines.replace("{x}", argument or "")
        return f"\n{lines}" if before.strip() else space + lines.replace("\n", f"\n{before}")

    return re.sub(rf"( ?)\{{({'|'.join(abbreviations)})(?::([^{{}}]+))?\}}", lines, text) if abbreviations else text


def _separate_batches(text: str) -> str:
    """Put GO behind each routine of SQL Server, and the settings under which routines are created before the first."""
    text, routines = _BATCH.subn(r"\g<0>GO\n", text)
    return text.replace("\n\n", f"\n\n{_CREATION_SETTINGS}", 1) if routines else text


def script(
    engine: str,
    name: str,
    *,
    schema: str = "sqlsem",
    table: str = "ProcessControl",
    features: Collection[str] = ALL,
) -> str:
    """Return the text of one script, ready to run, without the lines of features that are not in ``features``.

    ``script(engine, "schema")`` is the scripts of all schema versions, one after the other.

    Raises `ConfigurationError` for an engine or script that does not exist.
    """
    if name == "schema":
        return "\n".join(text for _, text in migrations(engine, 0, schema=schema, table=table, features=features))
    text = _read(engine, f"{name}.sql")
    if text is None:
        scripts = [script for script in SCRIPTS if script == "schema" or _read(engine, f"{script}.sql") is not None]
        raise ConfigurationError(f"There is no script {name!r} for engine {engine!r}; scripts: {', '.join(scripts)}")
    text = compose(text, features, FEATURE_OF.get(name, CORE)).replace("{features}", to_setting(features))
    return fill(engine, text, schema, table)


def rerunnable(engine: str, features: Collection[str] = ALL) -> list[str]:
    """Return the scripts that follow the schema's at every `sqlsem init`, in order; not every engine has all."""
    return [name for name in RERUNNABLE if FEATURE_OF[name] in features and _read(engine, f"{name}.sql") is not None]


def migrations(
    engine: str,
    version: int,
    *,
    schema: str = "sqlsem",
    table: str = "ProcessControl",
    features: Collection[str] = ALL,
) -> list[tuple[int, str]]:
    """Return number and text of each schema script after ``version``, without the lines of other features."""
    scripts = []
    for number in range(version + 1, LATEST + 1):
        text = _read(engine, f"schema-{number}.sql")
        if text is None:
            raise ConfigurationError(f"There is no schema script {number} for engine {engine!r}")
        scripts.append((number, fill(engine, compose(text, features), schema, table)))
    return scripts


@functools.cache
def queries(engine: str, schema: str = "sqlsem", table: str = "ProcessControl", file: str = "client") -> dict[str, str]:
    """Return the statements of a file by name: of client.sql, or with ``file="doctor"`` of doctor.sql, and so on."""
    parts = _NAME_LINE.split(script(engine, file, schema=schema, table=table))
    bodies = (_LAST_COMMENTS.sub("", body).strip().rstrip(";") for body in parts[2::2])
    return dict(zip(parts[1::2], bodies, strict=True))


@functools.cache
def query_features(engine: str) -> dict[str, str]:
    """Return the feature of each of the client's statements."""
    result = {}
    for line, needed, _ in sections(_read(engine, "client.sql") or ""):
        for name in _NAME_LINE.findall(line) or listed_calls(line):
            (result[name],) = needed
    return result


def by_hand(engine: str) -> dict[str, str] | None:
    """Return the statements ``begin`` and ``commit`` for a person that runs all scripts; None if there are none."""
    return None if _read(engine, "by_hand.sql") is None else queries(engine, file="by_hand")


def has_features(engine: str) -> bool:
    """Return True if a database of this engine can have a part of the features only."""
    return bool(set(query_features(engine).values()) - {CORE})
