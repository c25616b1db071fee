"""The tables: installing them, and the doctor."""

from __future__ import annotations

import contextlib
import re

from sqlsem.engines.installed import Installed
from sqlsem.engines.mssql.connection import SqlServerConnection
from sqlsem.engines.mssql.doctor import SqlServerDoctor
from sqlsem.engines.removing import RemovalSession
from sqlsem.engines.roles import Check, Plan, Tables

_GO = re.compile(r"^[ \t]*GO[ \t]*\r?$", re.MULTILINE | re.IGNORECASE)


class SqlServerTables(SqlServerConnection, Tables, RemovalSession):
    """Settings and scripts; members that an operator removes."""

    @property
    def installed(self) -> Installed:
        return self.engine.installed

    def settings(self) -> dict[str, str] | None:
        if self.value("version") is None:
            return None
        return {str(name): str(value) for name, value in self.rows("settings")}

    def revoke_members(self, member: int | None, login: str | None, force: bool) -> int:
        return int(self.value("revoke_members", member, login, int(force)))

    def install(self, plan: Plan) -> None:
        self.rows("wait_for_locks")
        self.rows("begin")
        try:
            self.rows("install_lock")
            there: dict[str, str] = {}
            if self.value("version") is not None:
                there = {str(name): str(value) for name, value in self.rows("installed")}
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

    def diagnose(self) -> list[Check]:
        return SqlServerDoctor(self).examine()
