"""Databases with sqlsem's tables, on any engine."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sqlite3
import sys
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import sqlsem
from sqlsem import engines
from sqlsem.client.effects import run_generator
from sqlsem.engines import of_url
from sqlsem.engines.base import Engine, Options, Session
from sqlsem.engines.installed import FeatureSelection
from sqlsem.values.locks import Ticket
from support import mariadb
from support.mariadb import MariaDBServer
from support.patience import PATIENCE, STEADY
from support.postgres import PostgresServer


@dataclass
class Database:
    """A database with the sqlsem tables in it.

    Attributes:
        engine: ``sqlite``, ``postgresql``, ``mssql`` or ``mysql``.
        url: The URL for `sqlsem.connect`.
        options: Further options for `sqlsem.connect` (a schema, for instance).
        server: The PostgreSQL or MariaDB server, if it is on one.
    """

    engine: str
    url: str
    options: dict[str, Any] = field(default_factory=dict)
    server: PostgresServer | MariaDBServer | None = None

    def coordinator(self, **options: Any) -> sqlsem.Coordinator:
        usual = {} if "lease" in options else {"grace": STEADY}
        return sqlsem.connect(self.url, **{**self.options, **usual, **options})

    def make_engine(self, **options: Any) -> Engine:
        return of_url(self.url)(self.url, Options(**{**self.options, **options}))

    def session(self, **options: Any) -> Session:
        """Open a bare engine session, for tests of the protocol below the coordinator. The caller closes it."""
        return self.make_engine(**options).connect("main")

    def install(self, *, only: tuple[str, ...] = (), add: tuple[str, ...] = ()) -> None:
        """Create the tables as ``sqlsem init`` does. $SQLSEM_TEST_FEATURES names the features of new tables, to run a
        suite on a part.
        """
        chosen = tuple(filter(None, os.environ.get("SQLSEM_TEST_FEATURES", "").split(",")))
        engine = self.make_engine()
        session = engine.connect("main")
        try:
            session.install(
                lambda installed: engine.plan(
                    installed, FeatureSelection(only or (() if installed or add else chosen), add)
                )
            )
        finally:
            session.close()

    # -- bare SQL

    @property
    def schema(self) -> str:
        return str(self.options.get("schema", "sqlsem"))

    @property
    def table(self) -> str:
        """Return the queue's table as a statement names it."""
        return "ProcessControl" if self.engine in ("sqlite", "mysql") else f"{self.schema}.ProcessControl"

    def beside(self, table: str) -> str:
        """Return another table: member, resource, history, setting."""
        return f"{self.schema}{'_' if self.engine in ('sqlite', 'mysql') else '.'}{table}"

    def raw(self, *, autocommit: bool = True) -> Any:
        """Open a DB-API connection of the driver (psycopg, sqlite3, pyodbc, PyMySQL). The caller closes it."""
        if self.engine == "sqlite":
            path = self.url.removeprefix("sqlite:///")
            isolation = None if autocommit else "IMMEDIATE"
            connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=isolation, check_same_thread=False)
            # The guarantees advise this to programs with an SQLite before 3.51.3.
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            return connection
        if self.engine == "postgresql":
            import psycopg

            return psycopg.connect(self.url, autocommit=autocommit)
        if self.engine == "mysql":
            return mariadb.connect(self.url, autocommit=autocommit)
        import pyodbc

        pyodbc.pooling = False
        engine = self.make_engine()
        text = self.url if "://" not in self.url else getattr(engine, "odbc_string", None) or odbc_of_url(self.url)
        return pyodbc.connect(text, autocommit=autocommit)

    def sql(self, text: str) -> str:
        """Translate ``?`` to the driver's parameter mark, and fill in ``{table}``."""
        text = text.replace("{table}", self.table)
        return text.replace("?", "%s") if self.engine in ("postgresql", "mysql") else text

    def rows(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own; return its rows, if it gives any."""
        connection = self.raw()
        try:
            cursor = connection.cursor()
            # (PyMySQL would fill in even no parameters, and so read each percent sign as the beginning of one.)
            cursor.execute(self.sql(text), parameters or (None if self.engine == "mysql" else ()))
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []
        finally:
            connection.close()

    # -- times in SQL, as the tables store them

    @property
    def now(self) -> str:
        """Return an expression of the present time."""
        return {
            "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
            "postgresql": "clock_timestamp()",
            "mssql": "SYSUTCDATETIME()",
            "mysql": "(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) / 1e6)",
        }[self.engine]

    def later(self, time: str, seconds: float) -> str:
        """Return an expression of a time that is so many seconds after another one (negative: before it)."""
        if self.engine == "postgresql":
            return f"({time} + interval '{seconds} seconds')"
        if self.engine == "mssql":
            # (DATEADD takes whole numbers of 32 bits.)
            return f"DATEADD(millisecond, {round(seconds % 1 * 1000)}, DATEADD(second, {int(seconds // 1)}, {time}))"
        return f"({time} + {seconds})"

    def seconds_until(self, time: str) -> str:
        """Return an expression of the seconds from now until a time."""
        if self.engine == "postgresql":
            return f"extract(epoch FROM {time} - {self.now})::float"
        if self.engine == "mssql":
            return f"(DATEDIFF(millisecond, {self.now}, {time}) / 1000.0)"
        return f"({time} - {self.now})"

    # -- the queue's rows

    def queue(self, prefix: str) -> list[tuple[Any, ...]]:
        """Return (queue_position, resource_id, requesting_id) of the rows whose resource begins with a prefix."""
        rows = self.rows("SELECT queue_position, resource_id, requesting_id FROM {table} ORDER BY queue_position")
        return [row for row in rows if row[1].startswith(prefix)]

    def waiting_for(self, lock: str) -> list[tuple[Any, ...]]:
        """Return the sessions of PostgreSQL that wait for a lock ("advisory", "relation", "transactionid"), in this
        database only: in the others, tests of other workers run. On MariaDB: the sessions that wait for any lock.
        """
        if isinstance(self.server, MariaDBServer):
            return [(session.id,) for session in self.server.waiting(name_of_database(self))]
        return self.rows(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
            "AND wait_event = ?",
            lock,
        )

    def connections(self) -> int:
        """Return the number of connections of sqlsem's clients (PostgreSQL)."""
        ((number,),) = self.rows(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND starts_with(application_name, 'sqlsem')"
        )
        return int(number)

    def insert_bare(self, cursor: Any, resource: str, requesting_id: str, **columns: Any) -> int:
        """Insert a row by bare SQL (S1 of docs/reference/protocol.md); return its position."""
        names = ["resource_id", "requesting_id", *columns]
        marks = ", ".join("?" * len(names))
        text = f"INSERT INTO {{table}} ({', '.join(names)}) VALUES ({marks})"
        cursor.execute(self.sql(text), (resource, requesting_id, *columns.values()))
        cursor.execute(
            self.sql("SELECT max(queue_position) FROM {table} WHERE resource_id = ? AND requesting_id = ?"),
            (resource, requesting_id),
        )
        return int(cursor.fetchone()[0])


class MemoryDatabase(Database):
    """A database in the memory of this process, without SQL."""

    def __init__(self) -> None:
        super().__init__("memory", f"memory://{random_name()}")
        self._kept = self.make_engine()  # keeps the contents when the last coordinator closes

    def raw(self, *, autocommit: bool = True) -> Any:
        import pytest

        pytest.skip("needs SQL")

    def queue(self, prefix: str) -> list[tuple[Any, ...]]:
        rows = sorted((row.position, row.resource, row.requesting_id) for row in self.session().entries(None))
        return [row for row in rows if row[1].startswith(prefix)]


def forget_engine(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Make the next use of an engine import its package anew. The test's end puts the known one back."""
    monkeypatch.delitem(sys.modules, f"sqlsem.engines.{module}", raising=False)
    monkeypatch.delattr(engines, module, raising=False)


def odbc_of_url(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    values = {
        "Driver": "FreeTDS",
        **dict(urllib.parse.parse_qsl(parts.query)),
        "Server": parts.hostname or "localhost",
        "Port": str(parts.port or 1433),
        "UID": urllib.parse.unquote(parts.username or ""),
        "PWD": urllib.parse.unquote(parts.password or ""),
        "Database": parts.path.lstrip("/") or "master",
    }
    return ";".join(f"{name}={value}" for name, value in values.items())


def with_database(url: str, database: str) -> str:
    """Return the URL or ODBC string of another database of the same server."""
    if "://" in url:
        return urllib.parse.urlunsplit(urllib.parse.urlsplit(url)._replace(path=f"/{database}"))
    if re.search(r"(?i)(^|;)\s*database\s*=", url):
        return re.sub(r"(?i)((?:^|;)\s*database\s*=)[^;]*", rf"\g<1>{database}", url)
    return f"{url.rstrip(';')};Database={database}"


def random_name() -> str:
    return f"sqlsem_test_{secrets.token_hex(5)}"


@contextlib.contextmanager
def empty_database(server: PostgresServer, login: str | None = None) -> Iterator[Database]:
    """Yield an empty PostgreSQL database; `through` it is seen by a new login without rights."""
    import psycopg

    name = random_name()
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        if login is not None:
            connection.execute(f"CREATE ROLE {name}_{login} LOGIN")
    yield Database("postgresql", server.url(name), {}, server)
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        if login is not None:
            connection.execute(f"DROP ROLE {name}_{login}")


def name_of_database(database: Database) -> str:
    """Return the name of a PostgreSQL or MariaDB database."""
    if database.engine == "mysql":
        return urllib.parse.urlsplit(database.url).path.lstrip("/")
    from psycopg import conninfo

    return str(conninfo.conninfo_to_dict(database.url)["dbname"])


def name_of_login(database: Database) -> str:
    """Return the login through which a PostgreSQL database is seen."""
    from psycopg import conninfo

    return str(conninfo.conninfo_to_dict(database.url)["user"])


def through(database: Database, login: str) -> Database:
    """Return an `empty_database` as its login sees it."""
    assert database.server is not None
    name = name_of_database(database)
    return Database("postgresql", database.server.url(name, user=f"{name}_{login}"), {}, database.server)


def pinned(engine: Engine, cursor: Any, ticket: Ticket) -> bool:
    """Pin a row until the cursor's transaction ends; return False if the row was removed."""
    return run_generator(engine.pin_steps(cursor, ticket), lambda answer: answer)
