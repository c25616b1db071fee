"""The SQL of every engine, as files that a DBA can read, print (``sqlsem sql``) and diff.

Each engine's folder holds the same scripts:

``schema-<n>.sql``
    creates version n from version n-1 (from nothing, for 1). Frozen once released.
``routines.sql``
    functions and procedures; may be run again at any time, also while locks are held.
``public.sql``
    the routines for sessions (T-SQL, psql), built on the above; rerunnable too. Not for SQLite, which has none.
``priorities.sql``
    requests that wait by priority; rerunnable. Not for SQLite, where the client does.
``deadlocks.sql``
    finds those who wait for each other; rerunnable. Not for SQLite, where the client does.
``rates.sql``
    so much in so long; rerunnable. Not for SQLite, where the client does.
``tasks.sql``, ``batches.sql``
    the same for the work queue and the batches.
``parked.sql``
    tasks with locks, which wait for these without a process; rerunnable. Not for SQLite, where the client does.
``conversions.sql``
    readers that become writers and writers that become readers; rerunnable.
``handovers.sql``
    locks that go from one process to another; rerunnable. Not for SQLite.
``overview.sql``
    all that is there at one instant, and what operators did; rerunnable. Not for SQLite.
``guards.sql``
    tables that can be written only under a lock; rerunnable. Not for SQLite.
``once.sql``
    what runs once per period; rerunnable. Not for SQLite.
``features.sql``
    writes down what is installed, for `sqlsem init`; rerunnable. Not for SQLite, where everything is.
``permissions.sql``
    roles and grants; may be run again.
``drop.sql``
    removes everything.
``client.sql``
    the statements that the Python client sends, each under a line ``-- name: …``. Where there are routines, most
    statements call the routine of the same name, and so have the same names on every such engine. SQLite has none:
    there the client puts a call together from smaller statements, and a name that others have does the same as there.
``doctor.sql``
    what ``sqlsem doctor`` asks; the same.
``by_hand.sql``
    only SQL Server: the statements before and after all scripts, where a person runs them.
``certify.sql``
    what ``sqlsem certify`` asks, in a schema that it makes and drops; the same.
``simulated.sql``
    only PostgreSQL: what makes a database one for simulations (`sqlsem.testing.simulate`). Never run in any other.

Two words are filled in: ``{schema}`` and ``{table}``. Both are checked to be plain identifiers first; nothing
else is ever put into a statement except as a bound parameter, and what the file itself abbreviates: after a line
``-- where {clock} is …`` the word ``{clock}`` stands for what follows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from importlib import resources

from sqlsem.errors import ConfigurationError
from sqlsem.sql.features import CORE, FEATURES, compose, sections, to_setting

__all__ = [
    "ALL",
    "FEATURE_OF",
    "LATEST",
    "SCRIPTS",
    "by_hand",
    "has_features",
    "migrations",
    "queries",
    "query_features",
    "rerunnable",
    "script",
]

#: The version of the schema that this client brings.
LATEST = 1
#: What ``sqlsem sql`` can print, in the order in which a DBA would run it, and the feature that each script belongs to.
FEATURE_OF = {
    "schema": CORE,
    "routines": CORE,
    "priorities": "priorities",
    "deadlocks": CORE,
    "public": CORE,
    "rates": "rates",
    "tasks": "queue",
    "parked": "queue",
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
#: Those that follow the schema's at every `sqlsem init`.
RERUNNABLE = SCRIPTS[1:-2]
ALL = frozenset(FEATURES)

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,47}")
_WHERE_LINE = re.compile(r"^-- where (\{\w+\}) is (.+)\n", re.MULTILINE)
_NAME_LINE = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


def check_identifier(what: str, value: str) -> str:
    """Return ``value`` when it can stand unquoted in SQL of every engine, else raise `ConfigurationError`."""
    if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value):
        raise ConfigurationError(
            f"{what} must be a plain identifier (a letter or _, then letters, digits or _; at most 48), not {value!r}"
        )
    return value


@functools.cache
def _read(engine: str, file: str) -> str | None:
    path = resources.files(__name__) / engine / file
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _fill(text: str, schema: str, table: str) -> str:
    check_identifier("The schema's name", schema)
    check_identifier("The table's name", table)
    for word, meaning in _WHERE_LINE.findall(text):
        text = _WHERE_LINE.sub("", text).replace(word, meaning)
    return text.replace("{schema}", schema).replace("{table}", table)


def script(
    engine: str,
    name: str,
    *,
    schema: str = "sqlsem",
    table: str = "ProcessControl",
    features: Collection[str] = ALL,
) -> str:
    """The text of one script, ready to run, without what belongs to other features than these.

    ``schema`` stands for all schema versions after one another.

    Raises `ConfigurationError` for an engine or script that does not exist.
    """
    if name == "schema":
        return "\n".join(text for _, text in migrations(engine, 0, schema=schema, table=table, features=features))
    text = _read(engine, f"{name}.sql")
    if text is None:
        there = [one for one in SCRIPTS if one == "schema" or _read(engine, f"{one}.sql") is not None]
        raise ConfigurationError(f"There is no script {name!r} for engine {engine!r}; scripts: {', '.join(there)}")
    text = compose(text, features, FEATURE_OF.get(name, CORE)).replace("{features}", to_setting(features))
    return _fill(text, schema, table)


def rerunnable(engine: str, features: Collection[str] = ALL) -> list[str]:
    """The scripts that follow the schema's at every `sqlsem init`, in order; not every engine has all."""
    return [name for name in RERUNNABLE if FEATURE_OF[name] in features and _read(engine, f"{name}.sql") is not None]


def migrations(
    engine: str,
    version: int,
    *,
    schema: str = "sqlsem",
    table: str = "ProcessControl",
    features: Collection[str] = ALL,
) -> list[tuple[int, str]]:
    """The parts of these features of the schema scripts that lead from ``version`` to `LATEST`, oldest first."""
    found = []
    for number in range(version + 1, LATEST + 1):
        text = _read(engine, f"schema-{number}.sql")
        if text is None:
            raise ConfigurationError(f"There is no schema script {number} for engine {engine!r}")
        found.append((number, _fill(compose(text, features), schema, table)))
    return found


@functools.cache
def queries(engine: str, schema: str = "sqlsem", table: str = "ProcessControl", file: str = "client") -> dict[str, str]:
    """The client's statements by name; ``file="doctor"`` has those of ``sqlsem doctor``, and ``"certify"`` those of
    ``sqlsem certify``."""
    parts = _NAME_LINE.split(script(engine, file, schema=schema, table=table))
    return {name: body.strip().rstrip(";") for name, body in zip(parts[1::2], parts[2::2], strict=True)}


@functools.cache
def query_features(engine: str) -> dict[str, str]:
    """The feature of each of the client's statements."""
    found = {}
    for line, needed, _ in sections(_read(engine, "client.sql") or ""):
        name = _NAME_LINE.match(line)
        if name is not None:
            (found[name[1]],) = needed
    return found


def by_hand(engine: str) -> dict[str, str] | None:
    """Return the statements ``begin`` and ``commit`` around all scripts that a person runs, or None without any."""
    return None if _read(engine, "by_hand.sql") is None else queries(engine, file="by_hand")


def has_features(engine: str) -> bool:
    """Return True if the tables of an engine can be made in part."""
    return bool(set(query_features(engine).values()) - {CORE})
