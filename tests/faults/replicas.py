"""A PostgreSQL server and its standby, with failover and failback."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import psycopg
from support import Database, PostgresServer, random_name, until


class Pair:
    """A primary with one standby. With ``synchronous``, a commit returns only when the standby has it on its disk."""

    def __init__(self, directory: Path, *, synchronous: bool) -> None:
        self.synchronous = synchronous
        self.servers: list[PostgresServer] = []
        # They notice quickly that the other server is gone, and keep all log that the standby still needs.
        settings = {"wal_sender_timeout": "5s", "wal_keep_size": "256MB", "wal_log_hints": "on"}
        self.primary = self._keep(PostgresServer.create(directory / "a", settings))
        self.standby = self._keep(self.primary.create_standby(directory / "b"))
        self.name = random_name()
        self.run(f"CREATE DATABASE {self.name}")
        self.streaming()
        if synchronous:
            self.set("synchronous_standby_names", "*")
            until(lambda: self.states() == ["sync"], "the standby is a synchronous one")
        self.database.install()

    def _keep(self, server: PostgresServer) -> PostgresServer:
        self.servers.append(server)
        return server

    @property
    def database(self) -> Database:
        """Return the database with a URL of both hosts, which leads to the primary."""
        first, second = self.servers
        place = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        url = f"postgresql://postgres@{place}/{self.name}?target_session_attrs=read-write"
        return Database("postgresql", url, {}, first)

    def on(self, server: PostgresServer) -> Database:
        """Return the database on that server, primary or standby."""
        return dataclasses.replace(self.database, url=server.url(self.name), server=server)

    def run(self, statement: str, server: PostgresServer | None = None) -> list[tuple[Any, ...]]:
        """Run a statement as the administrator, and return its rows, if any."""
        with psycopg.connect((server or self.primary).url(), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def set(self, name: str, value: str, server: PostgresServer | None = None) -> None:
        """Change a setting of the server. (ALTER SYSTEM commits nothing: it does not wait for the standby.)"""
        self.run(f"ALTER SYSTEM SET {name} = '{value}'", server)
        self.run("SELECT pg_reload_conf()", server)

    def states(self) -> list[str]:
        """Return sync or async for each streaming standby."""
        rows = self.run("SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming'")
        return [row[0] for row in rows]

    def streaming(self) -> None:
        """Wait until the standby has replayed all changes."""
        until(self.states, "the standby streams")
        (position,) = self.run("SELECT pg_current_wal_flush_lsn()")[0]
        until(
            lambda: self.run(f"SELECT pg_last_wal_replay_lsn() >= '{position}'", self.standby)[0][0],
            "the standby has everything",
        )

    def cut(self) -> None:
        """Stop the replication: the standby receives nothing more. (Asynchronous standbys only.)"""
        self.set("primary_conninfo", "", self.standby)
        until(lambda: not self.states(), "the standby receives nothing")

    def kill(self) -> float:
        """Kill the primary with all its processes, and return the time."""
        return self.primary.kill(everybody=True)

    def promote(self) -> float:
        """Promote the standby, and return the time when it accepted writes."""
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary
        return time.monotonic()

    def rejoin(self) -> None:
        """Start the old primary as a standby of the new one."""
        self.standby.rewind(self.primary)
        if self.synchronous:  # where settings differ, the settings of the new primary count
            self.run("ALTER SYSTEM RESET synchronous_standby_names")
            self.run("SELECT pg_reload_conf()")
        self.standby.start()
        self.streaming()
        if self.synchronous:
            self.set("synchronous_standby_names", "*")
            until(lambda: self.states() == ["sync"], "the standby is a synchronous one")

    def stop(self) -> None:
        for server in self.servers:
            with contextlib.suppress(AssertionError):  # it may be down already
                server.stop("immediate")
