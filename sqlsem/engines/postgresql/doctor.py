"""The checks of `sqlsem doctor` on PostgreSQL."""

from __future__ import annotations

import contextlib
import functools
import random
from typing import Any

import psycopg

from sqlsem.engines.doctor import Doctor, clocks, session_locks
from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.engines.protocol import Check
from sqlsem.insight.kept import KeptLock

#: The rights of a login, by the routine that each needs.
RIGHTS = {"register": "take locks", "put_tasks": "put tasks", "claim_task": "run tasks", "revoke": "operate"}


class PostgresDoctor(Doctor):
    """Checks of a server, a login, and poolers in between."""

    def __init__(self, session: PostgresConnection) -> None:
        super().__init__(session.engine)
        self._session = session
        self._engine = session.engine
        self._schema = session.options.schema
        host = session.connection.info.host
        self._local = host.startswith(("/", "@")) or not host

    def _ask(self, name: str, *, on: PostgresConnection | None = None, **parameters: Any) -> tuple[Any, ...]:
        session = on or self._session
        with session.translated():
            row = session.cursor.execute(self.texts[name], parameters or None).fetchone()
        assert row is not None
        return row

    @functools.cached_property
    def _server(self) -> tuple[Any, ...]:
        return self._ask("server")

    @functools.cached_property
    def _settings(self) -> tuple[Any, ...]:
        return self._ask("settings")

    def driver(self) -> Check:
        libpq = psycopg.pq.version() // 10000
        return Check("driver", True, f"psycopg {psycopg.__version__} ({psycopg.pq.__impl__}), libpq {libpq}")

    def server(self) -> Check:
        number, version, *_ = self._server
        return Check("server", number >= 130000, version, "" if number >= 130000 else "Use PostgreSQL 13 or later.")

    def primary(self) -> Check:
        *_, standby, read_only = self._server
        mend = "Connect to the primary (add target_session_attrs=read-write to the URL)."
        if standby or read_only:
            detail = "a standby" if standby else "transactions are read-only by default"
            return Check("primary", False, detail, mend)
        return Check("primary", True, "not a standby, and writable")

    def permission(self) -> Check | None:
        schema = self._schema
        user, there, usage, routines, allowed = self._ask("permission")
        if not there:
            return None
        if not routines:
            return Check("permission", False, f"the routines are not in schema {schema}", "Run: sqlsem init")
        may = [words for name, words in RIGHTS.items() if name in (allowed or ())]
        if not may and "entries" in (allowed or ()):
            may = ["look"]
        if usage and may:
            return Check("permission", True, f"{user} may {', '.join(may)}")
        roles = f"(roles {schema}_user, {schema}_putter, {schema}_worker, {schema}_operator, {schema}_reader)"
        mend = f'As an administrator: GRANT {schema}_user TO "{user}"; {roles}'
        return Check("permission", False, f"{user} may not execute the routines of schema {schema}", mend)

    def isolation(self) -> Check:
        default, *_ = self._settings
        detail = f"the server's default is {default}; sqlsem's own connections use read committed"
        mend = "For other clients: ALTER ROLE … SET default_transaction_isolation = …"
        return Check("isolation", True, detail, "" if default == "read committed" else mend)

    def durability(self) -> Check:
        _, synchronous, *_ = self._settings
        mend = "A crash of the server can undo what was granted; prefer synchronous_commit = on."
        return Check("durability", True, f"synchronous_commit is {synchronous}", mend if synchronous == "off" else "")

    def locks(self) -> Check:
        room, taken = self._ask("locks")
        mend = "Raise max_locks_per_transaction: a server without room for a lock refuses statements, and connections."
        detail = f"{taken} in the server's table, which has room for {room} and some"
        return Check("locks", True, detail, mend if 2 * taken > room else "")

    def kept(self) -> Check | None:
        *_, allowed = self._ask("permission")
        if "kept_locks" not in (allowed or ()):
            return None
        with self._session.translated():
            rows = self._session.cursor.execute(self._session.queries["kept_locks"], (None,)).fetchall()
        kept = [lock for lock in (KeptLock(*row) for row in rows) if lock.holds_up]
        if not kept:
            return Check("kept", True, "no session keeps a lock that others wait for")
        mend = "; ".join(dict.fromkeys(lock.remedy for lock in kept))
        return Check("kept", False, "; ".join(lock.words for lock in kept), f"End these sessions: {mend}")

    def replication(self) -> Check | None:
        line, names, standbys, in_step = self._ask("replication")
        if line is None:
            return None
        detail = f"timeline {int(line, 16)}"
        if names:
            detail += f"; commits wait for standbys ({names})"
        elif standbys:
            detail += "; standbys follow without commits waiting for them"
        if standbys is not None:
            detail += f"; {standbys} connected, {in_step} of them in step"
        mend = ""
        if names and not in_step and standbys is not None:
            mend = "No synchronous standby is connected: every grant waits until one is."
        elif standbys and not names:
            mend = (
                "After a failover grants may be forgotten, and fences repeat: see docs/explanation/guarantees.md, and "
                "synchronous_standby_names."
            )
        return Check("replication", True, detail, mend)

    def tls(self) -> Check:
        mode = self._engine.tls_mode
        encrypted, version, cipher = self._ask("tls")
        if encrypted:
            strict = mode in ("verify-ca", "verify-full")
            mend = "" if strict else "The server's identity is not verified: add sslmode=verify-full to the URL."
            return Check("tls", True, f"{version}, {cipher}; sslmode={mode}", mend)
        if self._local:
            return Check("tls", True, "a socket of this host; none needed")
        mend = "Notes can be read on the way: add sslmode=verify-full to the URL (and set ssl = on on the server)."
        return Check("tls", True, f"not encrypted; sslmode={mode}", mend)

    def keepalive(self) -> Check:
        if self._local:
            return Check("keepalive", True, "a socket of this host; none needed")
        *_, idle, interval, count, user_timeout = self._settings
        detail = f"server: {idle} s, then {count} times every {interval} s"
        if user_timeout != "0":
            detail += f"; tcp_user_timeout {user_timeout} ms"
        return Check("keepalive", True, detail)

    def clock(self) -> Check:
        return clocks(lambda: self._ask("clock")[0])

    def beacon(self) -> Check:
        mend = "Connect past the pooler, have it pool sessions, or use a lease: sqlsem --lease 30 …, connect(lease=30)."
        key = random.getrandbits(62)
        pid, taken = self._ask("beacon_take", key=key)
        with contextlib.closing(self._engine.connect("look")) as other:
            assert isinstance(other, PostgresConnection)
            other_pid, seen, blocked = self._ask("beacon_look", on=other, key=key, pid=pid)
        pid_after, given = self._ask("beacon_give", key=key)
        kept = pid == pid_after and pid != other_pid and taken and seen and blocked and given
        pooled = " (through a pooler)" if pid != self._session.connection.info.backend_pid else ""
        return session_locks(kept, self._engine.options.lease, "a pooler", mend, pooled)
