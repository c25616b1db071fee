"""Refused input and its messages; names that look dangerous and are valid."""

import contextlib
import importlib
import logging
import os
import sqlite3
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
from support import Database, PostgresServer, forget_engine, free_port, keep_to_the_permissions, random_name

import sqlsem
from sqlsem.engines import of_url

# -- names and options (tests/unit/test_values.py has the values that a request refuses)


def test_order_of_a_stage_must_be_a_whole_number(database):
    for bad in ("100", 1.0, None, True):
        with pytest.raises(sqlsem.ConfigurationError):
            database.coordinator().stage("a", bad)


@pytest.mark.parametrize(
    "options",
    [
        {"grace": -1},
        {"grace": "5 s"},
        {"grace": True},
        {"retry": float("nan")},
        {"lease": 0},
        {"lease": "x"},
        {"schema": "a b"},
        {"schema": "a;drop"},
        {"schema": ""},
        {"table": "x'y"},
        {"table": "é"},
        {"schema": "x" * 60},
    ],
    ids=str,
)
def test_options_that_cannot_be(database, options):
    with pytest.raises(sqlsem.ConfigurationError):
        database.coordinator(**{**database.options, **options})


NAMES = {
    "emoji": "bänk 😀 日本語",
    "quotes": """it's "quoted" `so` [so] \\ or """ + "'\"",
    "statement": "x'); DROP TABLE ProcessControl;--",
    "marks": "%s %(a)s ? :name @name $1 {table} {0} %",
    "patterns": "100%_*[a-z]",
    "one": "x",
    "right to left": "\u202eabc\u200f",
    "combining": "e\u0301\u0302\u0303",
    "json": '{"a": ["\\u0041", null]}',
}


@pytest.mark.parametrize("label", NAMES)
def test_names_that_look_dangerous(connect, database, name, label):
    coordinator = connect()
    resource = f"{name}:{NAMES[label]}:end"
    with coordinator.mutex(resource, note=NAMES[label]) as grant:
        (entry,) = coordinator.admin.entries(resource)
        assert (entry.resource, entry.note, entry.position) == (resource, NAMES[label], grant.position)
        assert not connect().mutex(resource).acquire(timeout=0.1)
        coordinator.admin.set_limit(resource, 3)
        assert resource in [row.resource for row in coordinator.admin.resources()]
        coordinator.admin.set_limit(resource, None)
    assert coordinator.admin.history(resource)[-1].outcome in ("released", "timeout")
    both = sqlsem.all_of(coordinator.mutex(resource), coordinator.mutex(name(NAMES[label])))
    with both as grant:
        assert set(grant.positions) == {resource, name(NAMES[label])}


def test_the_longest_names(connect, name):
    coordinator = connect()
    for resource in (f"{name}{'x' * 255}"[:255], str(name) + "😀" * ((255 - len(name)) // 2)):
        with coordinator.mutex(resource):
            assert [entry.resource for entry in coordinator.admin.entries(resource)] == [resource]
            assert not connect().mutex(resource).acquire(blocking=False)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("etl", "ETL"),
        ("etl", "Etl"),
        ("é", "e"),
        ("é", "e\u0301"),
        ("ß", "ss"),
        ("ß", "\u1e9e"),
        ("ﾊ", "ハ"),
        ("ﬁ", "fi"),
        ("a", "\u0430"),
        ("ab", "a\u200bb"),
        ("a\u00adb", "ab"),
        ("😀", "😁"),
        ("i", "\u0131"),
        ("a b", "a  b"),
        ("²", "2"),
    ],
    ids=ascii,
)
def test_names_that_differ_are_different(connect, name, first, other):
    coordinator = connect()
    with coordinator.mutex(name(first)), coordinator.mutex(name(other), timeout=0):
        assert [entry.resource for entry in coordinator.admin.entries(name(first))] == [name(first)]
    coordinator.admin.pause(name(first))
    with coordinator.mutex(name(other), timeout=0):
        pass
    coordinator.admin.resume(name(first))


# -- URLs and drivers


@pytest.mark.parametrize(
    "url",
    ["", "etl", "/tmp/etl.db", "oracle://root:geheim@host/db", "ftp://me:geheim@x", "sqlite", "://geheim", "host=x"],
    ids=ascii,
)
def test_urls_that_cannot_be(url):
    with pytest.raises(sqlsem.ConfigurationError) as caught:
        sqlsem.connect(url)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_sqlite_needs_a_file(url):
    with pytest.raises(sqlsem.ConfigurationError, match="file"):
        sqlsem.connect(url)


@pytest.mark.parametrize(
    ("url", "module", "drivers", "extra"),
    [
        ("postgresql://host/db", "postgresql", ["psycopg"], "postgres"),
        ("mssql://host/db", "mssql", ["pyodbc", "mssql_python"], "mssql"),
    ],
)
def test_a_missing_driver_names_the_extra(monkeypatch, url, module, drivers, extra):
    if importlib.util.find_spec(f"sqlsem.engines.{module}") is None:
        pytest.skip("no such engine here")
    for driver in drivers:
        for loaded in [
            module_name for module_name in sys.modules if module_name == driver or module_name.startswith(f"{driver}.")
        ]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, driver, None)
    forget_engine(monkeypatch, module)
    with pytest.raises(sqlsem.ConfigurationError, match=rf"sqlsem\[{extra}\]"):
        coordinator = sqlsem.connect(url)
        coordinator.admin.entries()


def everything_said(exc, caplog):
    """Return every text of an error that a user may see, also in a log or a debugger."""
    texts = ["".join(traceback.format_exception(type(exc), exc, exc.__traceback__)), caplog.text]
    while exc is not None:
        texts += [str(exc), repr(exc), repr(exc.args)]
        exc = exc.__cause__ or (None if exc.__suppress_context__ else exc.__context__)
    return "\n".join(texts)


@pytest.fixture
def careful_server(postgres_server):
    """A server with a role that needs its password."""
    import psycopg

    if not postgres_server.mine:
        pytest.skip("needs a server of our own")
    with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
        connection.execute(f"DROP ROLE IF EXISTS {PostgresServer.CAREFUL}")
        connection.execute(f"CREATE ROLE {PostgresServer.CAREFUL} LOGIN SUPERUSER PASSWORD 'richtig-geheim'")
    return postgres_server


@pytest.mark.engines("postgresql")
def test_a_wrong_password_is_not_repeated(engine_name, careful_server, caplog):
    caplog.set_level(logging.DEBUG)
    url = careful_server.url("postgres", user=PostgresServer.CAREFUL, password="falsch-geheim")
    with sqlsem.connect(url, retry=1) as coordinator:
        for call in (coordinator.admin.entries, coordinator.mutex("a").acquire):
            with pytest.raises(sqlsem.SqlsemError) as caught:
                call()
            assert isinstance(caught.value, sqlsem.ConfigurationError), "trying again is of no use"
            assert "geheim" not in everything_said(caught.value, caplog)
            assert "password" in str(caught.value)
        assert "geheim" not in repr(coordinator)
        assert "geheim" not in repr(coordinator.engine)
        assert "geheim" not in repr(coordinator.mutex("a"))


@pytest.mark.engines("postgresql")
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:sehr-geheim@[::1/db",
        "postgresql://me:sehr-geheim@host:notaport/db",
        "postgresql://me:sehr-geheim@host/db?nonsense=1",
        "postgresql://me:sehr%zzgeheim@host/db",
        "postgresql://me:sehr-geheim@127.0.0.1:1/db?connect_timeout=1",
    ],
)
def test_a_password_in_a_url_that_cannot_be_is_not_repeated(engine_name, url, caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(sqlsem.SqlsemError) as caught, sqlsem.connect(url, retry=0.2) as coordinator:
        coordinator.mutex("a").acquire(timeout=1)
    assert "geheim" not in everything_said(caught.value, caplog)


@pytest.mark.engines("postgresql")
def test_a_database_that_is_not_there(engine_name, postgres_server):
    with sqlsem.connect(postgres_server.url(random_name()), retry=1) as coordinator:
        with pytest.raises(sqlsem.ConfigurationError, match="does not exist"):
            coordinator.admin.entries()


@pytest.mark.engines("postgresql")
def test_a_server_that_is_not_there(engine_name):
    with sqlsem.connect(f"postgresql://postgres@127.0.0.1:{free_port()}/postgres", retry=0.3) as coordinator:
        for call in (coordinator.admin.entries, coordinator.mutex("a").acquire):
            with pytest.raises(sqlsem.Unavailable) as caught:
                call()
            assert isinstance(caught.value, ConnectionError)
            assert "127.0.0.1" in str(caught.value)


# -- the tables


@pytest.mark.engines("postgresql", "mssql")
def test_missing_tables(database):
    with database.coordinator(schema="not_there", retry=1) as coordinator:
        for call in (coordinator.admin.entries, coordinator.mutex("a").acquire, coordinator.admin.reap):
            with pytest.raises(sqlsem.SchemaError, match="sqlsem init"):
                call()


def test_tables_newer_than_the_client(database, name):
    setting = database.beside("setting")
    change = f"UPDATE {setting} SET value = ? WHERE name = ?"
    before = dict(database.rows(f"SELECT name, value FROM {setting}"))
    try:
        database.rows(change, "99", "schema_version")
        with database.coordinator() as coordinator, coordinator.mutex(name):
            pass  # newer tables that still allow this client
        database.rows(change, "99", "oldest_client")
        with database.coordinator(retry=1) as coordinator:
            for call in (coordinator.admin.entries, coordinator.mutex(name).acquire):
                with pytest.raises(sqlsem.SchemaError, match="upgrade"):
                    call()
        with pytest.raises(sqlsem.SchemaError, match="newer"):
            database.install()
        database.rows(change, "0", "schema_version")
        with database.coordinator(retry=1) as coordinator, pytest.raises(sqlsem.SchemaError, match="sqlsem init"):
            coordinator.admin.entries()
    finally:
        for setting_name, value in before.items():
            database.rows(change, value, setting_name)


def test_installing_again_changes_nothing(connect, database, name):
    with connect().mutex(name) as grant:
        database.install()
        grant.check()
        assert [row[0] for row in database.queue(name)] == [grant.position]


def test_a_schema_and_a_table_of_other_names(database, name, threads):
    other = Database(database.engine, database.url, {"schema": f"other_{name}", "table": "Queue"}, database.server)
    for _ in range(4):
        threads.start(other.install)  # concurrent installations do no harm
    threads.join()
    with other.coordinator() as first, database.coordinator() as second, other.coordinator() as three:
        with first.mutex(name), second.mutex(name, timeout=0):
            assert not three.mutex(name).acquire(blocking=False)


# -- SQLite and its file


@pytest.fixture
def file(tmp_path):
    return Database("sqlite", f"sqlite:///{tmp_path / 'more' / 'locks.db'}")


def test_sqlite_makes_its_file_and_tables(file):
    with file.coordinator() as coordinator, coordinator.mutex("a") as grant:
        assert grant.position == 1


def test_sqlite_locked_by_another_program(file):
    with file.coordinator(retry=0.5) as coordinator, coordinator.mutex("warm"):
        pass
    other = file.raw()
    other.execute("BEGIN IMMEDIATE")
    with file.coordinator(retry=0.5) as coordinator:
        assert coordinator.mutex("a").acquire(timeout=0.5) is False
        with pytest.raises(sqlsem.Unavailable, match="locked by another program"):
            coordinator.admin.set_limit("a", 3)
        other.execute("ROLLBACK")
        other.close()
        with coordinator.mutex("a", timeout=60):
            pass


def test_sqlite_file_that_is_something_else(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to look like one\n" * 100)
    with sqlsem.connect(f"sqlite:///{path}", retry=0.3) as coordinator:
        with pytest.raises(sqlsem.ConfigurationError, match="not an SQLite database"):
            coordinator.mutex("a").acquire(timeout=1)
    assert path.read_text().startswith("not a database")


@pytest.mark.parametrize("place", ["a folder", "below a file"])
def test_sqlite_file_that_cannot_be_opened(tmp_path, place):
    (tmp_path / "file").write_text("x")
    path = tmp_path if place == "a folder" else tmp_path / "file" / "locks.db"
    with sqlsem.connect(f"sqlite:///{path}", retry=0.3) as coordinator:
        error, words = {
            "a folder": (sqlsem.ConfigurationError, "is a folder, not an SQLite database"),
            "below a file": (sqlsem.Unavailable, "(?i)cannot open"),
        }[place]
        with pytest.raises(error, match=words) as caught:
            coordinator.mutex("a").acquire(timeout=1)
    assert str(path) in str(caught.value)


def test_sqlite_disk_full(file):
    with file.coordinator() as coordinator, coordinator.mutex("warm"):
        pass
    from sqlsem.values.locks import Request

    with contextlib.closing(file.session()) as session:
        member = session.register_member("host", 1, "test")
        connection: sqlite3.Connection = session.connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(sqlsem.Unavailable, match="disk is full"):
            for number in range(1000):
                session.register(member, "me" * 100, "me", f"uid{number}", [Request("a", note="x" * 1000)], False)
        connection.execute("PRAGMA max_page_count = 1000000")
        assert session.register(member, "me", "me", "uid", [Request("b")], False)[0].granted
        session.deregister_member(member)
        assert file.queue("") == []


def read_only(channel, url, options):
    """A user that may read the file and not write it."""
    keep_to_the_permissions()
    coordinator = sqlsem.connect(url, **options, retry=0.5)
    try:
        coordinator.mutex("a").acquire(timeout=1)
    except sqlsem.SqlsemError as exc:
        channel.tell("refused", error=type(exc).__name__, message=str(exc))


@pytest.mark.engines("sqlite")
@pytest.mark.skipif(os.name != "posix", reason="needs the permissions of POSIX")
def test_sqlite_read_only(spawn):
    with tempfile.TemporaryDirectory() as folder:
        file = Database("sqlite", f"sqlite:///{folder}/locks.db")
        with file.coordinator() as coordinator, coordinator.mutex("a"):
            pass
        os.chmod(f"{folder}/locks.db", 0o444)
        for path in Path(folder).iterdir():
            path.chmod(0o555 if path.is_dir() else 0o444)
        os.chmod(folder, 0o555)
        child = spawn(read_only, url=file.url)
        refused = child.expect("refused")
        os.chmod(folder, 0o755)
        assert refused["error"] == "Unavailable"
        assert "read-only" in refused["message"] or "permission" in refused["message"]


# -- after the end


def test_after_close(database, name):
    coordinator = database.coordinator()
    lock = coordinator.mutex(name)
    lock.acquire()
    grant = lock.grant
    coordinator.close()
    coordinator.close()
    assert coordinator.closed
    assert "closed" in repr(coordinator)
    assert database.queue(name) == [], "the held lock is released"
    with pytest.raises(sqlsem.LockLost):
        grant.check()
    with pytest.raises(sqlsem.LockLost):
        lock.release()
    for call in (
        lock.acquire,
        coordinator.admin.entries,
        coordinator.admin.reap,
        lambda: coordinator.admin.set_limit(name, 1),
    ):
        with pytest.raises(sqlsem.ConfigurationError, match="closed"):
            call()


def test_closing_ends_a_wait(database, name):
    from support import Attempt, until

    holder, other = database.coordinator(), database.coordinator()
    with holder.mutex(name):
        waiting = Attempt(other.mutex(name), timeout=None)
        until(lambda: len(database.queue(name)) == 2)
        other.close()
        assert isinstance(waiting.failed(), sqlsem.SqlsemError)
        assert len(database.queue(name)) == 1
    holder.close()


def test_a_coordinator_that_was_never_used(database):
    with database.coordinator():
        pass
    assert not database.coordinator().closed


def test_of_url_knows_odbc_strings():
    if importlib.util.find_spec("sqlsem.engines.mssql") is None:
        pytest.skip("no such engine here")
    assert of_url("Driver={ODBC Driver 18 for SQL Server};Server=tcp:host,1433;Database=x").name == "mssql"
