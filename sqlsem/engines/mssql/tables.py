"""Installation and diagnosis of the tables on SQL Server, and guards of other tables."""

from __future__ import annotations

import contextlib
import re

from sqlsem import sql
from sqlsem.engines.answers import name_sessions
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.engines.installed import setting_number
from sqlsem.engines.mssql.connection import SqlServerConnection
from sqlsem.engines.mssql.doctor import SqlServerDoctor
from sqlsem.engines.protocol import Check, Plan
from sqlsem.util import runtime
from sqlsem.values.errors import ConfigurationError, SqlsemError, Unavailable

#: Seconds after which an installation is not retried.
INSTALL_SECONDS = 60.0
#: Seconds between two attempts: first and at most. In between the installation blocks no other session.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 5.0
_GO = re.compile(r"^[ \t]*GO[ \t]*\r?$", re.MULTILINE | re.IGNORECASE)


class SqlServerTables(SqlServerConnection):
    """The scripts of the tables, and the tables that only a transaction with an asserted grant can write."""

    def change_guard(self, name: str, table: str, *parameters: str) -> int:
        try:
            return int(self.value(name, table, *parameters))
        except (Busy, Disconnected):
            raise
        except Unavailable as exc:  # the server's answer for this table or this login: a retry cannot change it
            raise ConfigurationError(str(exc)) from exc

    def install(self, plan: Plan) -> None:
        until = runtime.monotonic() + INSTALL_SECONDS
        pause = FIRST_PAUSE_SECONDS
        never = runtime.event()
        while True:
            try:
                return self._install(plan)
            except Busy as exc:
                blockers = self._blockers()
                if runtime.monotonic() + pause >= until:
                    raise Unavailable(
                        f"{self.engine.label}: others kept the sqlsem tables for {INSTALL_SECONDS:g} s; nothing was "
                        f"changed: {blockers}; try again when that has ended, or end it (KILL)"
                    ) from exc
            never.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _install(self, plan: Plan) -> None:
        """Install in one transaction. Raises `Busy`, without any change, if a lock was not granted in time."""
        self.rows("begin")
        try:
            self._take_install_lock()
            there: dict[str, str] = {}
            if self.value("version") is not None:
                there = {str(name): str(value) for name, value in self.rows("installed")}
            if there and setting_number(there, "schema_version") < sql.LATEST:
                self.rows("lock_tables")
            self.rows("script_patience")
            for version, text in plan(there):
                for batch in _GO.split(text):
                    if batch.strip():
                        self.ask("install", batch, ())
                if version is not None:
                    self.rows("set_version", str(version))
            self.rows("commit")
        except BaseException:
            with contextlib.suppress(Exception):
                self.rows("rollback")
            raise

    def _take_install_lock(self) -> None:
        """Lock other installers out until the transaction ends."""
        try:
            self.rows("install_lock")
        except Busy as exc:
            raise Unavailable(str(exc)) from exc  # a retry would only wait again

    def _blockers(self) -> str:
        """Name the sessions that have locks on the tables, as far as this login may see them."""
        try:
            rows = self.rows("blockers")
        except SqlsemError:
            return "who that is, is only told with the right VIEW SERVER STATE (on Azure SQL: VIEW DATABASE STATE)"
        return name_sessions(rows)

    def diagnose(self) -> list[Check]:
        return SqlServerDoctor(self).examine()
