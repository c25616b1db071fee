"""MariaDB servers that tests start, stop, pause and kill, and connections to them by PyMySQL.

A server runs as an ordinary user, on 127.0.0.1 and on a Unix socket, in a folder of its own. Its programs are those of
Debian's package mariadb-server. ``$SQLSEM_TEST_MYSQL``, a URL, names a running server instead (MariaDB or MySQL).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import psutil

from support.addresses import ServerAddress
from support.patience import PATIENCE, until
from support.postgres import free_port

#: The user that runs the servers of root, which mariadbd refuses to be.
USER = None
if hasattr(os, "geteuid") and os.geteuid() == 0:
    import pwd

    USER = next((entry for entry in pwd.getpwall() if entry.pw_name == "mysql"), None) or pwd.getpwnam("nobody")

#: Small and fast. With ``innodb_flush_log_at_trx_commit=2`` a killed server loses no transaction: the system has its
#: log.
SETTINGS = {
    "aria_pagecache_buffer_size": "1M",
    "bind_address": "127.0.0.1",
    "innodb_buffer_pool_size": "32M",
    "innodb_flush_log_at_trx_commit": "2",
    "innodb_log_file_size": "16M",
    "key_buffer_size": "1M",
    "max_connections": "400",
    "skip_name_resolve": "ON",
    "table_open_cache": "400",
    "table_open_cache_instances": "1",
}

#: Starts a server and prints its process id; with a pipe as its input, kills the server and all that it has started as
#: soon as the other end of the pipe is closed, if only because that process was killed.
_FREE = '"$@" </dev/null >>"$OUTPUT" 2>&1 & echo $!'
_GUARDED = f"{_FREE}; exec >/dev/null; read -r _; kill -KILL 0"


@functools.cache
def binary(name: str) -> Path | None:
    """Return the path of one of MariaDB's programs, if it is installed."""
    found = shutil.which(
        name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    )
    return Path(found) if found else None


def mariadb_lacks() -> str | None:
    """Return what is missing to run tests on MariaDB; None: nothing."""
    if importlib.util.find_spec("pymysql") is None:
        return "PyMySQL"
    if os.environ.get("SQLSEM_TEST_MYSQL") or (binary("mariadbd") and binary("mariadb-install-db")):
        return None
    return "Debian's mariadb-server, or SQLSEM_TEST_MYSQL"


class MariaDBSession(NamedTuple):
    """A session as the server shows it. ``command`` is "Sleep" while it is idle."""

    id: int
    login: str
    database: str | None
    command: str
    seconds: int
    state: str | None
    statement: str | None


class MariaDBServer(ServerAddress):
    """A MariaDB server. If the tests started it (``mine``), they can restart, pause and kill it.

    Attributes:
        settings: Its variables; a change holds from the next start on.
        environment: Additions to its environment.
    """

    MAINTENANCE, PORT = "mysql", 3306

    def __init__(
        self,
        directory: Path | None,
        port: int,
        base: str | None = None,
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        guarded: bool = True,
    ) -> None:
        self.directory = directory
        self.port = port
        self.settings = {**SETTINGS, **(settings or {})}
        self.environment = dict(environment or {})
        self.mine = directory is not None
        self._base = base or f"mysql://root@127.0.0.1:{port}/mysql"
        self._guarded = guarded
        self._guard: subprocess.Popen[bytes] | None = None

    def socket_url(self, database: str = "mysql") -> str:
        """Return the URL of a database by the server's Unix socket."""
        return f"mysql://root@localhost/{database}?unix_socket={self.socket}"

    # -- as its superuser

    def rows(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run one statement; return its rows, if it gives any."""
        with contextlib.closing(connect(self._base)) as connection:
            return [tuple(row) for row in connection.execute(text, parameters or None).fetchall()]

    def create_login(self, name: str, password: str, *, database: str | None = None) -> str:
        """Create a login without rights, or with all rights in a database; return its URL."""
        self.rows(f"CREATE USER '{name}'@'%%' IDENTIFIED BY %s", password)
        if database is not None:
            self.rows(f"GRANT ALL ON `{database}`.* TO '{name}'@'%'")
        return self.url(database or "", user=name, password=password)

    def drop_login(self, name: str) -> None:
        """Remove a login, and end its sessions."""
        self.rows(f"DROP USER IF EXISTS '{name}'@'%'")
        self.end_sessions(login=name)

    def sessions(self, *, database: str | None = None, login: str | None = None) -> list[MariaDBSession]:
        """Return the sessions in a database, or of a login. (Other databases are those of other tests.)"""
        assert database or login
        rows = self.rows(
            "SELECT id, user, db, command, time, state, info FROM information_schema.processlist "
            "WHERE id <> connection_id() AND (%s IS NULL OR db = %s) AND (%s IS NULL OR user = %s) ORDER BY id",
            *(database, database, login, login),
        )
        return [MariaDBSession(*row) for row in rows]

    def waiting(self, database: str) -> list[MariaDBSession]:
        """Return the sessions in a database that wait for a lock: of a row, a table's metadata, or a name."""
        # (information_schema.innodb_trx is a copy: while somebody reads it every 0.1 s, it is not made anew.)
        ((_, _, status),) = self.rows("SHOW ENGINE INNODB STATUS")
        waits = re.compile(r"(?m)^LOCK WAIT \d+ lock struct.*\n\w+ thread id (\d+),")
        for_rows = {int(number) for number in waits.findall(status.partition("LIST OF TRANSACTIONS")[2])}
        states = re.compile(r"(?i)user lock|waiting for table .*lock")
        return [
            session
            for session in self.sessions(database=database)
            if session.id in for_rows or states.search(session.state or "")
        ]

    def end_session(self, number: int) -> None:
        """End a session, if it is still there."""
        self._kill("CONNECTION", number)

    def cancel_statement(self, number: int) -> None:
        """Cancel the statement of a session, if it runs one."""
        self._kill("QUERY", number)

    def _kill(self, kind: str, number: int) -> None:
        import pymysql
        from pymysql.constants import ER

        try:
            self.rows(f"KILL {kind} {number}")
        except pymysql.MySQLError as exc:
            if exc.args[0] != ER.NO_SUCH_THREAD:
                raise

    def end_sessions(self, number: int | None = None, *, database: str | None = None, login: str | None = None) -> int:
        """End all sessions in a database or of a login, or so many of them; return how many there were."""
        sessions = self.sessions(database=database, login=login)[:number]
        for session in sessions:
            self.end_session(session.id)
        return len(sessions)

    # -- only for a server of our own

    @classmethod
    def create(
        cls,
        directory: Path,
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        guarded: bool = True,
    ) -> MariaDBServer:
        """Install and start a server in ``directory`` (which other users must be able to reach). A ``guarded`` server
        ends with this process.
        """
        server = cls(directory, free_port(), None, settings, environment, guarded=guarded)
        server.install()
        server.start()
        return server

    def install(self) -> None:
        """Create its data folder: in a run of tests a copy of the run's first one, in a fraction of the time."""
        self.make_folders()
        run = os.environ.get("SQLSEM_TEST_SHARED_DIRECTORY")
        if run is None:
            self._install(self.data)
            return
        template = Path(run, "mariadb-installed")
        with filelock.FileLock(f"{template}.lock"):
            if not template.exists():
                draft = template.with_suffix(".draft")
                make_folder(draft)
                self._install(draft)
                draft.rename(template)
        subprocess.run(["cp", "-a", f"{template}/.", self.data], check=True)

    def make_folders(self) -> None:
        """Create its folders, which its user may write."""
        for folder in (self._own, self.data, self._own / "tmp"):
            make_folder(folder)

    def _install(self, folder: Path) -> None:
        result = subprocess.run(
            [
                *(str(binary("mariadb-install-db")), "--no-defaults", "--skip-test-db", f"--datadir={folder}"),
                # (A server that starts removes the temporary tables of all servers that share this folder.)
                f"--tmpdir={self._own / 'tmp'}",
                *("--auth-root-authentication-method=normal", "--skip-name-resolve"),
                f"--innodb-log-file-size={SETTINGS['innodb_log_file_size']}",
            ],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            **self._as_user,
        )
        assert result.returncode == 0, f"mariadb-install-db failed: {result.stdout}{result.stderr}"

    def start(self, *arguments: str) -> None:
        """Start it, and wait until it answers."""
        self.launch(*arguments)
        until(self._answers_or_fails, "the MariaDB server answers")

    def launch(self, *arguments: str) -> None:
        """Start it."""
        assert not self.runs(), "it runs already"
        self._end_guard()
        own = {
            "datadir": self.data,
            "log_error": self._own / "log.err",
            "pid_file": self._pid_file,
            "port": self.port,
            "socket": self.socket,
            "tmpdir": self._own / "tmp",
        }
        words = [f"--{name.replace('_', '-')}={value}" for name, value in {**self.settings, **own}.items()]
        self._pid_file.unlink(missing_ok=True)
        guard = subprocess.Popen(
            [
                "sh",
                "-c",
                _GUARDED if self._guarded else _FREE,
                "sh",
                binary("mariadbd"),
                "--no-defaults",
                *words,
                *arguments,
            ],
            stdin=subprocess.PIPE if self._guarded else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C does not reach it
            **self._as_user,
        )
        assert guard.stdout is not None
        with guard.stdout:
            number = int(guard.stdout.readline())
        self._pid_note.write_text(str(number))
        if self._guarded:
            self._guard = guard
        else:
            guard.wait()

    def _answers_or_fails(self) -> bool:
        assert self.runs(), f"the MariaDB server did not start: {self.log()[-4000:]}"
        return self.answers()

    def answers(self) -> bool:
        """Return True if it answers a query now."""
        import pymysql

        try:
            return self.rows("SELECT 1") == [(1,)]
        except (pymysql.MySQLError, OSError):
            return False

    @property
    def _own(self) -> Path:
        assert self.directory is not None, "this server is not ours to start or stop"
        return self.directory

    @property
    def data(self) -> Path:
        """Return its data folder."""
        return self._own / "data"

    @property
    def socket(self) -> Path:
        """Return its Unix socket."""
        return self._own / "socket"

    @property
    def _pid_file(self) -> Path:
        return self._own / "tmp" / "pid"  # (the server writes it)

    @property
    def _pid_note(self) -> Path:
        return self._own / "pid"

    @property
    def _as_user(self) -> dict[str, Any]:
        # (PATH: state transfers of a cluster are scripts, which need its programs.)
        path = f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/bin:/usr/sbin:/sbin"
        words = {**os.environ, "PATH": path, "OUTPUT": str(self._own / "output"), **self.environment}
        identity = {} if USER is None else {"user": USER.pw_uid, "group": USER.pw_gid, "extra_groups": []}
        return {"cwd": "/", "env": words, **identity}

    @property
    def pid(self) -> int:
        """Return its process id, from the last start."""
        return int(self._pid_note.read_text())

    def _process(self) -> psutil.Process | None:
        """Return its process, if it runs: one with this folder as an argument."""
        with contextlib.suppress(FileNotFoundError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(self.pid)
            words = process.cmdline()  # none for a moment: the shell's child becomes the server
            if (not words or f"--datadir={self.data}" in words) and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def _running(self) -> psutil.Process:
        process = self._process()
        assert process is not None, "the MariaDB server does not run"
        return process

    def runs(self) -> bool:
        """Return True if its process runs. (It may not accept connections yet.)"""
        return self._process() is not None

    def stop(self, mode: str = "fast") -> None:
        """Stop it. ``mode``: fast (an orderly end), immediate (as a crash)."""
        if mode == "immediate":
            self.kill()
            return
        process = self._running()
        process.terminate()
        until(lambda: not self.runs(), "the MariaDB server has stopped")
        self._end_guard()

    def restart(self, mode: str = "fast") -> None:
        """Stop, then start on the same port."""
        self.stop(mode)
        self.start()

    def kill(self) -> float:
        """Send it SIGKILL, and wait for its end; return the time of the kill."""
        process = self._running()
        process.kill()
        killed = time.monotonic()
        until(lambda: not self.runs(), "the MariaDB server has ended")
        self._end_guard()
        return killed

    def pause(self) -> None:
        """Send it SIGSTOP, and wait until it has stopped."""
        process = self._running()
        process.send_signal(signal.SIGSTOP)
        until(lambda: process.status() == psutil.STATUS_STOPPED, "the MariaDB server is paused")

    def resume(self) -> None:
        """Let it run on after `pause`."""
        self._running().send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, in whatever state it is, with all that it has started."""
        if self.runs():
            self.kill()
        self._end_guard()

    def _end_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait(PATIENCE)

    def log(self) -> str:
        """Return its log, and what it printed besides."""
        files = (self._own / "output", self._own / "log.err")
        return "".join(file.read_text(errors="replace") for file in files if file.exists())


def make_folder(folder: Path) -> None:
    """Create a folder for the servers' user."""
    folder.mkdir(parents=True, exist_ok=True)
    if USER is not None:
        os.chown(folder, USER.pw_uid, USER.pw_gid)


# -- connections ------------------------------------------------------------------------------------------------------


@functools.cache
def _connection_class() -> Any:
    from sqlsem.engines.mysql.engine import Connection as OwnConnection

    class Connection(OwnConnection):
        """PyMySQL's connection, with the shortcuts that the other drivers' connections have."""

        def execute(self, text: str, parameters: Any = None) -> Any:
            """Run a statement; return its cursor."""
            cursor = self.cursor()
            cursor.execute(text, parameters)
            return cursor

        @property
        def closed(self) -> bool:
            """Return True if it is closed."""
            return not self.open

    return Connection


def connect(url: str, **options: Any) -> Any:
    """Open a connection of PyMySQL by a URL, in autocommit unless ``options`` differ. The caller closes it. It counts
    the rows that a statement found, and takes several statements at once.
    """
    from pymysql.constants import CLIENT

    parts = urllib.parse.urlsplit(url)
    place: dict[str, Any] = {
        "host": parts.hostname or "localhost",
        "port": parts.port or 3306,
        "user": urllib.parse.unquote(parts.username or ""),
        "password": urllib.parse.unquote(parts.password or "").encode(),  # (PyMySQL would encode it as Latin-1)
        "database": urllib.parse.unquote(parts.path.lstrip("/")) or None,
        **dict(urllib.parse.parse_qsl(parts.query)),
    }
    usual = {
        "autocommit": True,
        "charset": "utf8mb4",
        "client_flag": CLIENT.FOUND_ROWS | CLIENT.MULTI_STATEMENTS,
        "connect_timeout": int(PATIENCE),
    }
    return _connection_class()(**{**place, **usual, **options})
