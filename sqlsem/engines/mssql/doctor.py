"""The checks of `sqlsem doctor` on SQL Server."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
import secrets
from datetime import timezone
from typing import Any

from sqlsem.engines.doctor import Doctor, clocks, session_locks
from sqlsem.engines.mssql.connection import SqlServerConnection
from sqlsem.engines.mssql.odbc import load_driver
from sqlsem.engines.protocol import Check
from sqlsem.values.errors import SqlsemError

#: The version of SQL Server 2016 SP1.
FIRST_VERSION = [13, 0, 4001]
#: Seconds that a failover of an availability group may take until members can reconnect.
FAILOVER_SECONDS = 30
#: Seconds that a server may take to end the session of a closed connection.
CLOSING_MS = 5000


class SqlServerDoctor(Doctor):
    """Checks of a server, a login, and pools in between."""

    def __init__(self, session: SqlServerConnection) -> None:
        super().__init__(session.engine)
        self._session = session
        self._engine = session.engine
        self._schema = session.options.schema

    def _ask(self, name: str, *parameters: Any) -> tuple[Any, ...]:
        return self._session.ask(f"doctor {name}", self.texts[name], parameters)[0]

    @functools.cached_property
    def _server(self) -> tuple[Any, ...]:
        version, *others = self._ask("server")
        return str(version).partition("\n")[0].strip(), *others

    @functools.cached_property
    def _settings(self) -> tuple[Any, ...]:
        return self._ask("settings")

    @functools.cached_property
    def _driver(self) -> str:
        connection = self._session.connection
        module = type(connection).__module__.partition(".")[0]
        detail = module
        with contextlib.suppress(Exception):
            detail = f"{module} {importlib.metadata.version(module.replace('_', '-'))}"
        if module == "pyodbc":
            with contextlib.suppress(Exception):
                info, pyodbc = connection.getinfo, load_driver("pyodbc")
                detail += f", {info(pyodbc.SQL_DRIVER_NAME)} {info(pyodbc.SQL_DRIVER_VER)}"
        return detail

    @property
    def _speaks_only(self) -> bool:
        """True if the server is not SQL Server, but another one that speaks T-SQL."""
        return "babelfish" in self._server[0].lower()

    def driver(self) -> Check:
        return Check("driver", True, self._driver)

    def server(self) -> Check:
        version, product, edition, _ = self._server
        numbers = [int(number) for number in re.findall(r"\d+", str(product))[:3]]
        ok = numbers >= FIRST_VERSION or edition in (5, 8) or self._speaks_only
        return Check("server", ok, version, "" if ok else "Use SQL Server 2016 SP1 or later, or Azure SQL.")

    def primary(self) -> Check:
        if self._server[-1] == "READ_ONLY":
            return Check(
                "primary",
                False,
                "the database is read-only here",
                "Connect to the primary replica, or: ALTER DATABASE … SET READ_WRITE.",
            )
        return Check("primary", True, "writable")

    def permission(self) -> Check | None:
        schema = self._schema
        user, there, execute, operate = self._ask("permission")
        if not there:
            return None
        if execute:
            return Check("permission", True, f"{user} may take locks{' and operate' if operate else ''}")
        mend = f"As an administrator: ALTER ROLE {schema}_user ADD MEMBER [{user}]; or, without tables: sqlsem init"
        return Check("permission", False, f"{user} may not execute {schema}.register", mend)

    def isolation(self) -> Check:
        snapshot, *_ = self._settings
        return Check("isolation", True, "read committed" + (" with row versions" if snapshot else " with locks"))

    def durability(self) -> Check:
        _, durability, _ = self._settings
        mend = "A crash of the server can undo what was granted; prefer DELAYED_DURABILITY = DISABLED or ALLOWED."
        ok = durability != "FORCED"
        return Check("durability", ok, f"delayed durability is {str(durability).lower()}", "" if ok else mend)

    def workers(self) -> Check:
        workers, maximum, detail, mend = 0, None, [], ""
        with contextlib.suppress(SqlsemError, IndexError):
            (workers,) = self._ask("workers")
            detail.append(f"the server has {workers} worker threads")
        if not workers:
            detail.append("how many worker threads the server has is not known (that takes VIEW SERVER STATE)")
        with contextlib.suppress(SqlsemError, IndexError):
            maximum, members, waiting = self._ask("waiters")
            allowed = "as many as come" if maximum is None else str(maximum)
            detail.append(f"of {members} members {waiting} wait, and {allowed} may wait in the server at a time")
            if workers and (maximum is None or maximum > workers // 2):
                mend = (
                    f"Too many may: each keeps a worker thread. Let the owner set {self._schema}.setting "
                    f"max_server_waiters to {workers // 4}."
                )
            elif maximum is not None and waiting >= maximum:
                mend = (
                    "More wait than may in the server: T-SQL sessions are refused (50002), programs look once a second."
                )
        return Check("workers", True, "; ".join(detail), mend)

    def compatibility(self) -> Check | None:
        *_, level = self._settings
        if level >= 130 or self._speaks_only:
            return None
        mend = "ALTER DATABASE … SET COMPATIBILITY_LEVEL = 130 (or later); all_of needs OPENJSON."
        return Check("compatibility", False, f"the database's compatibility level is {level}", mend)

    def failover(self) -> Check | None:
        if not self._ask("failover")[0]:
            return None
        options = self._engine.options
        name, seconds = ("grace", options.grace) if options.lease is None else ("lease", options.lease)
        mend = (
            f"Set a {name} of {FAILOVER_SECONDS} s or more, and write MultiSubnetFailover=Yes: a failover takes time."
        )
        detail = f"availability groups are enabled; a member's {name} is {seconds:g} s"
        return Check("failover", True, detail, "" if seconds >= FAILOVER_SECONDS else mend)

    def clock(self) -> Check:
        return clocks(lambda: self._ask("clock")[0].replace(tzinfo=timezone.utc).timestamp())

    def encryption(self) -> Check:
        right = "VIEW SERVER STATE, or VIEW SERVER SECURITY STATE from 2022 on"
        detail = f"whether the line is encrypted is not known (that takes {right})"
        encrypted = None
        with contextlib.suppress(SqlsemError, IndexError):
            encrypted = self._ask("encryption")[0] == "TRUE"
            detail = "the line is encrypted" if encrypted else "the line is not encrypted"
        checked = self._engine.checks_certificate(self._driver)
        if encrypted is not False and checked is not None:
            detail += f"; the server's certificate is {'' if checked else 'not '}checked"
        mend = "Over a network that you do not trust, write Encrypt=yes and TrustServerCertificate=no."
        if self._engine.here or (encrypted is not False and checked):
            mend = ""
        return Check("encryption", True, detail, mend)

    def beacon(self) -> Check:
        mend = "Turn connection pooling off, or use a lease: sqlsem --lease 30 …, connect(lease=30)."
        name = f"doctor.sqlsem.{self._schema}.{secrets.token_hex(8)}"
        session, taken = self._ask("beacon_take", name)
        with contextlib.closing(self._engine.connect("look")) as other:
            assert isinstance(other, SqlServerConnection)
            other_session, seen = other.ask("doctor", self.texts["beacon_look"], (name, 0))[0]
        session_after, given = self._ask("beacon_give", name)
        kept = session == session_after and session != other_session and taken >= 0 and seen < 0 and given
        return session_locks(kept, self._engine.options.lease, "a pool", mend)

    def closing(self) -> Check:
        mend = (
            "Set pyodbc.pooling = False before the program's first connection of all, and Pooling=No in odbcinst.ini."
        )
        name = f"doctor.sqlsem.{self._schema}.{secrets.token_hex(8)}"
        with contextlib.closing(self._engine.connect("look")) as other:
            assert isinstance(other, SqlServerConnection)
            other.ask("doctor", self.texts["beacon_take"], (name,))
        if self._ask("beacon_look", name, CLOSING_MS)[1] < 0:
            return Check("closing", False, "a pool keeps the session of a closed connection, and its locks", mend)
        return Check("closing", True, "the session of a closed connection ends, and its locks are free")
