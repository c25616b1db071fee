"""The lines of `sqlsem doctor` on MariaDB: each finding is brought about on a real server."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import Database, MariaDBServer

from sqlsem.engines.mysql import doctor
from sqlsem.engines.mysql.engine import MysqlEngine
from sqlsem.engines.protocol import Check

pytestmark = pytest.mark.engines("mysql")


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDBServer]:
    """A server with a binary log, for all tests of this module."""
    if os.environ.get("SQLSEM_TEST_MYSQL"):
        pytest.skip("needs a MariaDB server of its own: unset SQLSEM_TEST_MYSQL")
    with tempfile.TemporaryDirectory(prefix="sqlsem-test-", ignore_cleanup_errors=True) as folder:
        directory = Path(folder)
        directory.chmod(0o755)
        settings = {"log_bin": "log", "server_id": "1", "binlog_format": "ROW", "sync_binlog": "1"}
        server = MariaDBServer.create(directory, settings)
        try:
            yield server
        finally:
            server.close()


@pytest.fixture
def place(server: MariaDBServer) -> Database:
    server.rows("CREATE DATABASE IF NOT EXISTS locks")
    place = Database("mysql", server.url("locks"), {}, server)
    place.install()
    return place


@contextlib.contextmanager
def variables(server: MariaDBServer, **values: object) -> Iterator[None]:
    """A context in which global variables of the server have these values."""
    before = {name: server.rows(f"SELECT @@global.{name}")[0][0] for name in values}
    try:
        for name, value in values.items():
            server.rows(f"SET GLOBAL {name} = {value}")
        yield
    finally:
        for name, value in before.items():
            server.rows(f"SET GLOBAL {name} = {value!r}")


def check(place: Database, name: str) -> Check:
    with contextlib.closing(place.make_engine().connect("look")) as session:
        (found,) = [check for check in session.diagnose() if check.name == name]
    return found


def test_a_healthy_server_has_no_findings(place: Database) -> None:
    with variables(place.server, innodb_flush_log_at_trx_commit=1), contextlib.closing(place.session()) as session:
        assert [found for found in session.diagnose() if not found.ok] == []
        assert [found for found in session.diagnose() if found.name == "durability" and found.mend] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("innodb_flush_log_at_trx_commit", 0), ("innodb_flush_log_at_trx_commit", 2), ("sync_binlog", 0)],
)
def test_commits_that_are_not_flushed_are_named(place: Database, name: str, value: int) -> None:
    with variables(place.server, **{"innodb_flush_log_at_trx_commit": 1, name: value}):
        found = check(place, "durability")
    assert found.ok
    assert f"{name} is {value}" in found.detail
    assert "can undo what was granted" in found.mend


def test_replication_by_statements_is_refused(place: Database) -> None:
    with variables(place.server, binlog_format="'STATEMENT'"):
        found = check(place, "primary")
    assert (found.ok, found.detail) == (False, "binlog_format is STATEMENT")
    assert "ROW" in found.mend
    assert check(place, "primary").ok


def test_a_replica_is_refused(place: Database) -> None:
    with variables(place.server, read_only=1):
        found = check(place, "primary")
    assert not found.ok
    assert "read-only" in found.detail


def test_probes_of_silent_connections_are_counted(place: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(place, "keepalive").mend == "", "no host can vanish"
    monkeypatch.setattr(MysqlEngine, "is_local", False)
    found = check(place, "keepalive")
    assert found.ok
    assert "tcp_keepalive_time = 10" in found.mend
    with variables(place.server, tcp_keepalive_time=10, tcp_keepalive_interval=5, tcp_keepalive_probes=3):
        found = check(place, "keepalive")
    assert found.detail.endswith("and those of a vanished host after 25 s")
    assert found.mend == ""


def test_a_server_that_is_nearly_full_is_named(place: Database) -> None:
    with variables(place.server, max_connections=10), contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(contextlib.closing(place.session()))
        assert "Raise max_connections" in check(place, "locks").mend
    assert check(place, "locks").mend == ""


@pytest.mark.parametrize(
    ("version", "is_new"),
    [
        ("10.5.21-MariaDB", False),
        ("10.6.0-MariaDB", True),
        ("11.4.2-MariaDB", True),
        ("8.0.18", False),
        ("8.0.19", True),
    ],
)
def test_old_servers_are_refused(place: Database, monkeypatch: pytest.MonkeyPatch, version: str, is_new: bool) -> None:
    with contextlib.closing(place.session()) as session:
        doctor_of = doctor.MysqlDoctor(session)
        monkeypatch.setattr(doctor_of, "_server", (version, *doctor_of._server[1:]))
        assert doctor_of.server().ok is is_new


def test_a_proxy_that_shares_connections_is_found(place: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statements of the second session go to the connection of the first, as through such a proxy."""
    assert check(place, "beacon").ok
    with contextlib.closing(place.session()) as session:
        shared = session.connection
        real = MysqlEngine.connect

        def connect(self: MysqlEngine, purpose: str) -> Any:
            other = real(self, purpose)
            other.connection.close()
            other.connection = shared
            monkeypatch.setattr(other, "close", lambda: None)
            return other

        monkeypatch.setattr(MysqlEngine, "connect", connect)
        found = doctor.MysqlDoctor(session).beacon()
    assert not found.ok
    assert "lease" in found.mend
