"""The subjects: one mutex, by sqlsem and by its peers, each with ``acquire``, ``release`` and ``close``."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import sqlsem
from benchmarks.mysql_queues import connection_parameters

NAME = "bench"


class Subject(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> object: ...
    def close(self) -> object: ...


class Sqlsem:
    def __init__(self, url: str) -> None:
        self._coordinator = sqlsem.connect(url)
        lock = self._coordinator.mutex(NAME)
        self.acquire, self.release, self.close = lock.acquire, lock.release, self._coordinator.close


class RawPostgres:
    """Session-level advisory locks through psycopg."""

    def __init__(self, url: str) -> None:
        import psycopg

        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.prepare_threshold = 1
        self.close = self._connection.close

    def acquire(self) -> None:
        self._connection.execute("SELECT pg_advisory_lock(4711)").fetchone()

    def release(self) -> None:
        self._connection.execute("SELECT pg_advisory_unlock(4711)").fetchone()


class LeastRow:
    """The least cost of a row that is visible to all and on disk before the call returns: one function that takes a
    gate and inserts it, one that deletes it, without waiters. (It is no lock: no caller waits for another.)
    """

    MADE = """
        CREATE TABLE IF NOT EXISTS least_row (
            id bigint GENERATED ALWAYS AS IDENTITY, resource text, at timestamptz DEFAULT clock_timestamp(),
            PRIMARY KEY (resource, id));
        CREATE OR REPLACE FUNCTION least_insert(p_resource text) RETURNS bigint LANGUAGE plpgsql AS $$
        DECLARE v_id bigint;
        BEGIN
            PERFORM pg_advisory_xact_lock(4712);
            INSERT INTO least_row (resource) VALUES (p_resource) RETURNING id INTO v_id;
            RETURN v_id;
        END $$;
        CREATE OR REPLACE FUNCTION least_delete(p_resource text, p_id bigint) RETURNS void LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM set_config('synchronous_commit', 'off', true);
            DELETE FROM least_row WHERE resource = p_resource AND id = p_id;
        END $$
    """

    def __init__(self, url: str) -> None:
        import psycopg

        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute(self.MADE)
        self._connection.prepare_threshold = 1
        self._id: Any = None
        self.close = self._connection.close

    def acquire(self) -> None:
        row = self._connection.execute("SELECT least_insert(%s)", (NAME,)).fetchone()
        assert row is not None
        (self._id,) = row

    def release(self) -> None:
        self._connection.execute("SELECT least_delete(%s, %s)", (NAME, self._id)).fetchone()


class RawMysql:
    """GET_LOCK and RELEASE_LOCK through PyMySQL."""

    def __init__(self, url: str) -> None:
        import pymysql

        self._connection = pymysql.connect(autocommit=True, **connection_parameters(url))
        self._cursor = self._connection.cursor()
        self.close = self._connection.close

    def _call(self, statement: str) -> None:
        self._cursor.execute(statement, (NAME,))
        if self._cursor.fetchone() != (1,):
            raise RuntimeError(f"{statement} failed")

    def acquire(self) -> None:
        self._call("SELECT GET_LOCK(%s, 600)")

    def release(self) -> None:
        self._call("SELECT RELEASE_LOCK(%s)")


class LeastMysqlRow:
    """The least cost of a row that is visible to all and on disk before the call returns: one INSERT and one DELETE,
    each with its commit. (It is no lock: no caller waits for another.)
    """

    def __init__(self, url: str) -> None:
        import pymysql

        self._connection = pymysql.connect(autocommit=True, **connection_parameters(url))
        self._cursor = self._connection.cursor()
        self._cursor.execute(
            "CREATE TABLE IF NOT EXISTS least_row (id bigint PRIMARY KEY AUTO_INCREMENT, resource varchar(255), "
            "at datetime(6) DEFAULT CURRENT_TIMESTAMP(6)) ENGINE = InnoDB"
        )
        self.close = self._connection.close

    def acquire(self) -> None:
        self._cursor.execute("INSERT INTO least_row (resource) VALUES (%s)", (NAME,))

    def release(self) -> None:
        self._cursor.execute("DELETE FROM least_row WHERE id = %s", (self._cursor.lastrowid,))


class RawSqlServer:
    """sp_getapplock with the session as owner, through pyodbc."""

    def __init__(self, url: str) -> None:
        import pyodbc

        pyodbc.pooling = False
        self._cursor = pyodbc.connect(url, autocommit=True).cursor()

    def _call(self, statement: str) -> None:
        code = self._cursor.execute(f"SET NOCOUNT ON; DECLARE @code int; {statement}; SELECT @code", NAME).fetchone()[0]
        if code < 0:
            raise RuntimeError(f"{statement}: {code}")

    def acquire(self) -> None:
        self._call("EXEC @code = sp_getapplock ?, 'Exclusive', 'Session', 60000")

    def release(self) -> None:
        self._call("EXEC @code = sp_releaseapplock ?, 'Session'")

    def close(self) -> None:
        self._cursor.connection.close()


class FileLock:
    def __init__(self, url: str) -> None:
        import filelock

        # (In a folder of its own: a file that comes and goes beside a database makes sqlsem check more closely.)
        folder = Path(url.removeprefix("sqlite:///") + "-beside")
        folder.mkdir(exist_ok=True)
        lock = filelock.FileLock(folder / "lock")
        self.acquire, self.release = lock.acquire, lock.release

    def close(self) -> None:
        pass


class SqlalchemyDlock:
    def __init__(self, url: str) -> None:
        import sqlalchemy
        from sqlalchemy_dlock.factory import create_sadlock

        # Autocommit in either case, so that no transaction is measured.
        if url.startswith("postgresql"):
            address = url.replace("postgresql://", "postgresql+psycopg://", 1)
            self._engine = sqlalchemy.create_engine(address, isolation_level="AUTOCOMMIT")
        elif url.startswith("mysql"):
            address = url.replace("mysql://", "mysql+pymysql://", 1)
            self._engine = sqlalchemy.create_engine(address, isolation_level="AUTOCOMMIT")
        else:
            self._engine = sqlalchemy.create_engine("mssql+pyodbc://", creator=_odbc(url))
        self._connection = self._engine.connect()
        self._make: Callable[[], Any] = lambda: create_sadlock(self._connection, NAME)
        self._lock: Any = self._make()
        # (MariaDB does not know the negative time that stands for none.)
        self._options = {"timeout": 600} if url.startswith("mysql") else {}

    def acquire(self) -> None:
        self._lock.acquire(**self._options)

    def release(self) -> None:
        self._lock.release()

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()


def _odbc(url: str) -> Callable[[], Any]:
    def connect() -> Any:
        import pyodbc

        return pyodbc.connect(url, autocommit=True)

    return connect


#: Engine → its subjects; the first is ours, the second the base of the ratios.
SUBJECTS: dict[str, dict[str, Callable[[str], Subject]]] = {
    "postgresql": {"sqlsem": Sqlsem, "pg_advisory_lock": RawPostgres},
    "mssql": {"sqlsem": Sqlsem, "sp_getapplock": RawSqlServer},
    "sqlite": {"sqlsem": Sqlsem, "filelock": FileLock},
    "mysql": {"sqlsem": Sqlsem, "GET_LOCK": RawMysql},
}
if importlib.util.find_spec("sqlalchemy_dlock") is not None:
    SUBJECTS["postgresql"]["sqlalchemy-dlock"] = SqlalchemyDlock
    SUBJECTS["mssql"]["sqlalchemy-dlock"] = SqlalchemyDlock
    SUBJECTS["mysql"]["sqlalchemy-dlock"] = SqlalchemyDlock
#: Without contention: the base of the ratios in place of the second.
LEAST: dict[str, Callable[[str], Subject]] = {"postgresql": LeastRow, "mysql": LeastMysqlRow}
UNCONTENDED: dict[str, dict[str, Callable[[str], Subject]]] = {
    engine: {"sqlsem": Sqlsem, **({"least durable row": LEAST[engine]} if engine in LEAST else {}), **subjects}
    for engine, subjects in SUBJECTS.items()
}


def install(url: str, **options: Any) -> None:
    """Create the tables of a subject that does not do so itself."""
    with sqlsem.connect(url, **options) as coordinator:
        with contextlib.closing(coordinator.engine.connect("look")) as session:
            session.install(coordinator.engine.plan)
