"""The tables in an SQLite file: installation, upgrade and diagnosis."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from sqlsem.engines.base import Disconnected
from sqlsem.engines.protocol import Check, Plan
from sqlsem.engines.sqlite import fork
from sqlsem.engines.sqlite.connection import SqliteConnection
from sqlsem.engines.sqlite.doctor import SqliteDoctor


class SqliteSchema(SqliteConnection):
    """Creates and upgrades the tables."""

    def prepare(self, purpose: str) -> None:
        """Create the tables if they are missing, so that nothing has to be installed by hand."""
        if self.engine.creates and self.settings() is None:
            self.install(self.engine.plan)

    def install(self, plan: Plan) -> None:
        with fork.forks_blocked, self.transaction():
            # Read under the lock: another process may have just installed the tables.
            current = self.settings()
            if current is None and self.row("is_empty")["is_empty"]:
                self._require_no_members()
            if current is None:
                self.require_own_table()
            for version, text in plan(current or {}):
                for statement in _statements(text):
                    self.run_text(statement)
                if version is not None:
                    self.run("set_version", (str(version),))

    def _require_no_members(self) -> None:
        """Raise `Disconnected` while live processes have the previous file at this path open. They hold its locks until
        their next heartbeat, which notices that the file was replaced.
        """
        held = self.engine.beacons.held()
        if held:
            number = f"{len(held)} process{'es' if len(held) > 1 else ''}"
            raise Disconnected(
                f"{self.engine.label} is empty, but {number} still use the file that was here before; it was deleted, "
                f"moved or truncated under them. They notice at their next ping; end those that do not, as paused ones "
                f"(fuser -v {self.engine.beacons.folder}/*)",
                code="sqlite-file",
            )

    def diagnose(self) -> list[Check]:
        return SqliteDoctor(self).examine()


def _statements(text: str) -> Iterator[str]:
    """Yield the statements of a script."""
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
