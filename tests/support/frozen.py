"""Databases as a released version of sqlsem left them, to be upgraded by tests.

``tests/frozen/<version>/<engine>.sql.gz`` has the scripts that ``sqlsem init`` of that version ran, and
``<engine>-rows.sql`` the rows of a database that its client used. (No SQL Server was at hand: mssql has scripts alone.)
A frozen version never changes: `digest` is compared with the one in tests/clients/test_frozen_upgrades.py.

``PYTHONPATH=.:tests python -m support.frozen`` freezes the version that is about to be released, and prints its digest.
With ``--check`` it only compares; the workflow of a release does so.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlsem
from sqlsem import sql
from sqlsem.engines.mysql.session import statements_of
from support.databases import Database, random_name
from support.mariadb import MariaDBServer
from support.postgres import PostgresServer

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).resolve().parents[1] / "frozen"
ENGINES = ("sqlite", "postgresql", "mysql", "mssql")
HOST = socket.gethostname()
#: Settings that belong to one database, and are made anew in another one.
OWN_SETTINGS = ("origin", "started")
_DIVIDER = "-- sqlsem init: next script\n"


def digest(version: str) -> str:
    """Return the hash of all files of a frozen version."""
    total = hashlib.sha256()
    for path in sorted((FOLDER / version).iterdir()):
        total.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def scripts(version: str, engine: str) -> list[str]:
    """Return the scripts that ``sqlsem init`` of that version ran, the schema's first."""
    return gzip.decompress((FOLDER / version / f"{engine}.sql.gz").read_bytes()).decode().split(_DIVIDER)


def present_scripts(engine: str) -> list[str]:
    """Return the scripts that ``sqlsem init`` of this client runs in an empty database."""
    return [sql.script(engine, name) for name in ("schema", *sql.rerunnable(engine))]


def tables(database: Database) -> list[str]:
    """Return sqlsem's tables, as statements name them."""
    if database.engine == "sqlite":
        text = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
    elif database.engine == "postgresql":
        text = "SELECT 'sqlsem.' || relname FROM pg_class WHERE relnamespace = 'sqlsem'::regnamespace AND relkind = 'r'"
    else:
        text = "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
    return sorted(str(name) for (name,) in database.rows(text))


def contents(database: Database) -> dict[str, list[dict[str, Any]]]:
    """Return all rows of all tables: by column, as the driver gives them."""
    result = {}
    with contextlib.closing(database.raw()) as connection:
        cursor = connection.cursor()
        for table in tables(database):
            cursor.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in cursor.description]
            rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
            result[table] = sorted(rows, key=repr)
    return result


def missing_rows(
    before: dict[str, list[dict[str, Any]]], after: dict[str, list[dict[str, Any]]]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows that an upgrade lost or changed, with their tables. New columns and new rows are no loss."""
    lost = []
    for table, rows in before.items():
        if table.endswith("_gate"):  # (counters, which only grow)
            continue
        if table.endswith("setting") and "queue" not in table:
            rows = [row for row in rows if row["name"] not in (*OWN_SETTINGS, "schema_version", "oldest_client")]
        present = after.get(table, [])
        columns = rows[0].keys() if rows else ()
        kept = [{column: row.get(column) for column in columns} for row in present]
        lost += [(table, row) for row in rows if row not in kept]
    return lost


# -- loading ----------------------------------------------------------------------------------------------------------


def load(version: str, database: Database) -> None:
    """Make an empty database what that version left."""
    rows = (FOLDER / version / f"{database.engine}-rows.sql").read_text(encoding="utf-8")
    texts = scripts(version, database.engine)
    with contextlib.closing(database.raw()) as connection:
        if database.engine == "sqlite":
            connection.executescript(texts[0])
            with _without_triggers(connection):
                connection.executescript(rows)
        elif database.engine == "postgresql":
            for text in texts:
                connection.execute(text)
            # (Without triggers and foreign keys.)
            connection.execute(f"SET session_replication_role = replica; {rows}")
        else:
            statements = [statement for text in texts for statement in statements_of(text)]
            triggers = [statement for statement in statements if "CREATE TRIGGER" in statement]
            cursor = connection.cursor()
            cursor.execute("SET foreign_key_checks = 0")
            for statement in (*(text for text in statements if text not in triggers), *statements_of(rows), *triggers):
                cursor.execute(statement)


@contextlib.contextmanager
def _without_triggers(connection: Any) -> Iterator[None]:
    """Leave out the triggers of SQLite's tables in the block."""
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    yield
    for _, text in triggers:
        connection.execute(text)


# -- freezing ---------------------------------------------------------------------------------------------------------


def use(database: Database) -> None:
    """Leave rows in the tables: of locks, limits, rates, runs, tasks, schedules and batches."""
    with database.coordinator() as coordinator:
        admin = coordinator.admin
        with coordinator.mutex("frozen.finished", note="a note with an ö"):
            pass
        with coordinator.read("frozen.shared"), coordinator.limit("frozen.limited", 3, weight=2):
            pass
        admin.set_limit("frozen.limited", 2)
        admin.set_limit("frozen.*", 5)
        admin.pause("frozen.paused")
        admin.set_priorities("frozen.urgent", 30)
        admin.set_stale_after("frozen.stale", 86400)
        admin.set_rate("frozen.rate", 100, "1h")
        coordinator.rate("frozen.rate", cost=7).take()
        with coordinator.once("frozen.once", "1d") as run:
            assert run
        queue = coordinator.queue("frozen.queue")
        queue.put({"number": 1}, note="finished")
        with queue.try_claim() as task:
            assert task is not None
        failed = queue.put({"number": 2}, on_failure="continue")
        with contextlib.suppress(ValueError), queue.try_claim() as task:
            raise ValueError("a failure of a released version")
        assert admin.task(failed).status == "failed"
        queue.put({"number": 3, "text": "it's \\ “quoted”"}, max_attempts=3, unique="three", priority=5)
        queue.put({"number": 4}, locks=[coordinator.write("frozen.bare")])
        queue.put({"number": 5}, key="tenant", order=10)
        cancelled = queue.put({"number": 6}, order=20)
        assert admin.cancel_task(cancelled)
        queue.set_limit(4)
        queue.set_limit(1, key="tenant")
        queue.set_weight("tenant", 3)
        timed = coordinator.queue("frozen.timed")
        timed.schedule("0 2 * * *", sqlsem.Sql("SELECT 1"), name="frozen.nightly", time_zone="Europe/Berlin")
        timed.schedule("@hourly", sqlsem.Shell("true"), name="frozen.paused")
        admin.pause_schedule("frozen.paused")
        batch = coordinator.batch("frozen.batch", ["a", "b"], window="20d", on_success=sqlsem.Sql("SELECT 2"))
        with batch.part("a"):
            pass
    # Two bare participants: no process has to live for their rows.
    with contextlib.closing(database.raw()) as connection:
        cursor = connection.cursor()
        first = database.insert_bare(cursor, "frozen.bare", "HOST:1", note="holds")
        second = database.insert_bare(cursor, "frozen.bare", "HOST:2", note="waits")
        assert first < second
    # The tests run for years.
    database.rows(f"UPDATE {database.beside('setting')} SET value = '36500' WHERE name = 'history_days'")


def insertions(database: Database) -> Iterator[str]:
    """Yield the statements that insert the rows of a database into an empty one."""
    for table, rows in contents(database).items():
        name = table.removeprefix("sqlsem.").removeprefix("sqlsem_")
        if name in ("guard_key", "installer"):
            continue
        yield f"DELETE FROM {table};\n"
        own = "OVERRIDING SYSTEM VALUE " if database.engine == "postgresql" else ""
        computed = _computed_columns(database, table)
        for row in rows:
            if name == "setting" and row["name"] in OWN_SETTINGS:
                continue
            values = {
                column: _literal(value, database.engine) for column, value in row.items() if column not in computed
            }
            yield f"INSERT INTO {table} ({', '.join(values)}) {own}VALUES ({', '.join(values.values())});\n"
    if database.engine == "postgresql":
        columns = database.rows(
            "SELECT c.relname::text, a.attname::text FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid "
            "WHERE c.relnamespace = 'sqlsem'::regnamespace AND a.attidentity <> '' AND c.relname <> 'installer' "
            "ORDER BY 1, 2"
        )
        for table, column in columns:
            yield (
                f"SELECT setval(pg_get_serial_sequence('sqlsem.\"{table}\"', '{column}'), "
                f"{_last(database, table, column)}, true);\n"
            )


def _computed_columns(database: Database, table: str) -> list[str]:
    if database.engine != "mysql":
        return []
    text = (
        "SELECT column_name FROM information_schema.columns "
        "WHERE table_schema = DATABASE() AND table_name = ? AND generation_expression <> ''"
    )
    return [str(name) for (name,) in database.rows(text, table)]


def _last(database: Database, table: str, column: str) -> int:
    sequence = database.rows("SELECT pg_get_serial_sequence(?, ?)", f'sqlsem."{table}"', column)[0][0]
    return int(database.rows(f"SELECT last_value FROM {sequence}")[0][0])


def _literal(value: Any, engine: str) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, dict | list):
        if engine == "postgresql" and isinstance(value, list):
            return "'{" + ",".join(map(str, value)) + "}'"
        value = json.dumps(value)
    text = str(value).replace("'", "''")
    return "'" + (text.replace("\\", "\\\\") if engine == "mysql" else text) + "'"


def freeze(version: str) -> None:
    """Write the files of a version."""
    folder = FOLDER / version
    folder.mkdir(parents=True, exist_ok=True)
    for engine in ENGINES:
        text = _DIVIDER.join(present_scripts(engine))
        (folder / f"{engine}.sql.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    with tempfile.TemporaryDirectory(prefix="sqlsem-frozen-") as directory:
        place = Path(directory)
        place.chmod(0o755)
        _freeze_rows(folder, Database("sqlite", f"sqlite:///{place / 'used.db'}"))
        postgres = PostgresServer.create(place / "postgres")
        try:
            _freeze_rows(folder, Database("postgresql", postgres.url(), {}, postgres))
        finally:
            postgres.stop("immediate")
        mariadb = MariaDBServer.create(place / "mariadb")
        try:
            name = random_name()
            mariadb.rows(f"CREATE DATABASE {name}")
            _freeze_rows(folder, Database("mysql", mariadb.url(name), {}, mariadb))
        finally:
            mariadb.close()


def _freeze_rows(folder: Path, database: Database) -> None:
    database.install()
    use(database)
    text = "".join(insertions(database)).replace(str(FOLDER.parents[1]), "/srv/etl").replace(f"'{HOST}", "'etl-host")
    (folder / f"{database.engine}-rows.sql").write_text(text, encoding="utf-8")


def changed_engines(version: str) -> list[str]:
    """Return the engines whose scripts are no longer those of the frozen version."""
    return [engine for engine in ENGINES if scripts(version, engine) != present_scripts(engine)]


def main() -> None:
    """Freeze this version, unless it is released. ``--check``: only fail if the frozen copy is of other scripts."""
    version = sqlsem.__version__
    if sys.argv[1:] == ["--check"]:
        changed = changed_engines(version)
        sys.exit(f"tests/frozen/{version} has other scripts of {', '.join(changed)}" if changed else 0)
    command = ["git", "tag", "--list", f"v{version}"]
    if subprocess.run(command, cwd=FOLDER, check=True, stdout=subprocess.PIPE).stdout:
        sys.exit(f"v{version} is released, and so does not change")
    freeze(version)
    print(f"{version}: {digest(version)}")


if __name__ == "__main__":
    main()
