"""The MariaDB servers of the tests: they start, end and fail as tests need it, and leave no process behind."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pymysql
import pytest
from proxy import Proxy
from support import TESTS, MariaDBServer, random_name, until
from support.mariadb import connect

pytestmark = pytest.mark.engines("mysql")


@pytest.fixture(autouse=True)
def _on_mariadb(engine_name):
    """Run where MariaDB's tests run."""


@pytest.fixture
def numbers(mariadb_server):
    """The URL of a database with a table ``numbers``."""
    name = random_name()
    mariadb_server.rows(f"CREATE DATABASE {name}")
    mariadb_server.rows(f"CREATE TABLE {name}.numbers (number integer PRIMARY KEY) ENGINE = InnoDB")
    yield name
    mariadb_server.end_sessions(database=name)
    mariadb_server.rows(f"DROP DATABASE {name}")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_committed_rows_survive_a_restart(own_mariadb_server, mode):
    server, name = own_mariadb_server, random_name()
    server.rows(f"CREATE DATABASE {name}")
    server.rows(f"CREATE TABLE {name}.numbers (number integer PRIMARY KEY) ENGINE = InnoDB")
    url, before = server.url(name), server.pid
    open_transaction = connect(url, autocommit=False)
    open_transaction.execute("INSERT INTO numbers VALUES (1)")
    server.rows(f"INSERT INTO {name}.numbers VALUES (2)")
    server.restart(mode)
    assert server.pid != before
    assert server.rows(f"SELECT number FROM {name}.numbers") == [(2,)]
    with pytest.raises(pymysql.OperationalError):
        open_transaction.execute("SELECT 1")


def test_settings_and_environment_reach_a_server(start_mariadb):
    server = start_mariadb(settings={"innodb_flush_log_at_trx_commit": "1"}, environment={"TZ": "Asia/Tokyo"})
    assert server.rows("SELECT @@innodb_flush_log_at_trx_commit, @@system_time_zone") == [(1, "JST")]
    server.settings["max_connections"] = "77"
    server.restart()
    assert server.rows("SELECT @@max_connections") == [(77,)]


def test_server_listens_on_loopback_alone(mariadb_server):
    if not mariadb_server.mine:
        pytest.skip("not a server of ours")
    listening = psutil.Process(mariadb_server.pid).net_connections("tcp")
    assert {end.laddr for end in listening if end.status == psutil.CONN_LISTEN} == {mariadb_server.address}
    assert mariadb_server.rows("SELECT user()")[0][0].startswith("root@127.0.0.1")
    with connect(mariadb_server.socket_url()) as connection:
        assert connection.execute("SELECT user()").fetchone() == ("root@localhost",)
    assert not os.geteuid() or psutil.Process(mariadb_server.pid).username() != "root"


def test_paused_server_answers_after_the_pause(own_mariadb_server):
    server = own_mariadb_server
    server.pause()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(server.rows("SELECT 1")))
    asking.start()
    asking.join(0.5)
    assert not answers
    server.resume()
    until(lambda: answers == [[(1,)]], "it answers")
    asking.join()


def test_login_with_password_sees_its_database_alone(mariadb_server, numbers):
    login, password = random_name(), "p'ä:/%s@"
    url = mariadb_server.create_login(login, password, database=numbers)
    with connect(url) as connection:
        connection.execute("INSERT INTO numbers VALUES (1)")
        assert connection.execute("SHOW DATABASES LIKE 'mysql'").fetchall() == ()
        (session,) = mariadb_server.sessions(login=login)
        assert (session.database, session.command) == (numbers, "Sleep")
        mariadb_server.drop_login(login)
        with pytest.raises(pymysql.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(pymysql.OperationalError, match="Access denied"):
        connect(url)


def test_waiting_sessions_are_seen_and_ended(mariadb_server, numbers):
    url = mariadb_server.url(numbers)
    holder = connect(url, autocommit=False)
    holder.execute("INSERT INTO numbers VALUES (1)")
    holder.execute("SELECT GET_LOCK(%s, 0)", (numbers,))
    failures = []

    def wait(text, *parameters):
        def run():
            try:
                connect(url).execute(text, parameters)
            except pymysql.MySQLError as exc:
                failures.append(exc.args[0])

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    assert mariadb_server.waiting(numbers) == []  # (an answer that a poll soon after must not get again)
    row, name = wait("INSERT INTO numbers VALUES (1)"), wait("SELECT GET_LOCK(%s, 60)", numbers)
    waiting = until(lambda: len(found := mariadb_server.waiting(numbers)) == 2 and found, "two sessions wait")
    for session in waiting:
        mariadb_server.end_session(session.id)
        mariadb_server.end_session(session.id)  # it may be gone already
    for thread in (row, name):
        thread.join()
    assert len(failures) == 2
    assert mariadb_server.waiting(numbers) == []
    cancelled = wait("SELECT SLEEP(%s)", 60)
    busy = until(
        lambda: [
            session for session in mariadb_server.sessions(database=numbers) if "SLEEP" in (session.statement or "")
        ],
        "a session sleeps",
    )
    mariadb_server.cancel_statement(busy[0].id)
    cancelled.join()
    assert mariadb_server.end_sessions(database=numbers) >= 1  # the holder's
    until(lambda: not mariadb_server.sessions(database=numbers), "all sessions have ended")


def test_proxy_cuts_and_swallows(mariadb_server, numbers):
    proxy = Proxy(mariadb_server.address)
    url = mariadb_server.url(numbers).replace(f":{mariadb_server.address[1]}/", f":{proxy.port}/")
    first = connect(url)
    assert first.execute("SELECT 1").fetchall() == ((1,),)
    proxy.cut()
    with pytest.raises(pymysql.OperationalError):
        first.execute("SELECT 1")
    with pytest.raises((pymysql.MySQLError, OSError)):
        connect(url)
    proxy.forward()
    silent = connect(url, read_timeout=1)
    proxy.hole()
    with pytest.raises(pymysql.OperationalError):
        silent.execute("SELECT 1")
    proxy.close()
    until(lambda: not mariadb_server.sessions(database=numbers), "the server has noticed")


STARTS = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
from support import MariaDBServer
print(MariaDBServer.create(pathlib.Path(sys.argv[2])).pid, flush=True)
time.sleep(600)
"""


def test_server_ends_with_a_killed_test_process(start_mariadb):
    server = start_mariadb()  # (its folder may be reached by the server's user)
    folder = server.directory / "another"
    words = [sys.executable, "-c", STARTS, str(TESTS), str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        number = int(process.stdout.readline())
        assert MariaDBServer(folder, 0).pid == number
        assert MariaDBServer(folder, 0).runs()
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: not MariaDBServer(folder, 0).runs(), "the server has ended, too")
    assert server.runs()


def test_foreign_process_with_the_same_number_is_spared(own_mariadb_server):
    server = own_mariadb_server
    server.stop()
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            until(
                lambda: psutil.Process(other.pid).cmdline() == ["sleep", "600"],
                "it is no copy of this process any more",
            )
            (server.directory / "pid").write_text(str(other.pid))
            assert not server.runs()
            server.close()
            with pytest.raises(AssertionError, match="does not run"):
                server.kill()
            assert other.poll() is None
        finally:
            other.kill()


def test_failed_start_raises_with_the_log(own_mariadb_server):
    own_mariadb_server.stop()
    with pytest.raises(AssertionError, match="unknown variable 'no_such_setting=1'"):
        own_mariadb_server.start("--no_such_setting=1")
