"""A real PgBouncer before a server, where there is one (on Debian: apt-get install pgbouncer)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import urllib.parse
from pathlib import Path

import support
from support import until

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])


def program() -> str | None:
    return shutil.which("pgbouncer", path=PATH)


class Bouncer:
    """A PgBouncer. ``mode``: session, transaction or statement. ``size``: the number of its server connections."""

    def __init__(self, server: support.PostgresServer, mode: str, size: int = 20) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="sqlsem-test-"))
        self._directory.chmod(0o755)
        self.port = support.free_port()
        host, port = server.address
        (self._directory / "users").write_text('"postgres" ""\n')
        (self._directory / "ini").write_text(
            f"[databases]\n* = host={host} port={port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {self.port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {self._directory}/users\nadmin_users = postgres\n"
            f"pool_mode = {mode}\ndefault_pool_size = {size}\nmax_client_conn = 200\nserver_login_retry = 1\n"
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        path = program()
        assert path is not None
        self._process = subprocess.Popen(
            [path, str(self._directory / "ini")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=support.postgres.USER,  # PgBouncer refuses to run as root, as the server does
            cwd="/",
        )
        until(self._answers, "PgBouncer answers")

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(support.PATIENCE)

    def restart(self) -> None:
        self.stop()
        self.start()

    def before(self, database: support.Database) -> support.Database:
        """Return the database, connected through it."""
        parts = urllib.parse.urlsplit(database.url)
        place = f"postgres@127.0.0.1:{self.port}"
        return support.Database("postgresql", urllib.parse.urlunsplit(parts._replace(netloc=place)), database.options)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)
