"""The tables in a MariaDB or MySQL database: installation, upgrade and diagnosis; and the SQL of tasks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pymysql
from pymysql.constants import ER

from sqlsem.engines.base import Busy
from sqlsem.engines.mysql.connection import MysqlConnection, for_driver
from sqlsem.engines.mysql.doctor import MysqlDoctor
from sqlsem.engines.protocol import Check, Plan
from sqlsem.util.printable import first_line
from sqlsem.values.errors import Unavailable

#: Seconds for which an installation waits for another one.
INSTALLATION_SECONDS = 60
#: The errors of ALTER TABLE for a column or an index that exists.
ADDED_BEFORE = (ER.DUP_FIELDNAME, ER.DUP_KEYNAME)


class MysqlTables(MysqlConnection):
    """Creates and upgrades the tables, and runs the SQL of tasks."""

    _working: Any = None  # the connection of the SQL of a task

    def settings(self) -> dict[str, str] | None:
        return super().settings() or None

    def install(self, plan: Plan) -> None:
        if self.row("lock_installation", {"seconds": INSTALLATION_SECONDS})[0] != 1:
            raise Busy(f"{self.engine.label}: another program installs the tables; try again")
        # (A statement that changes tables commits by itself. The lock ends with this session.)
        settings = self.settings()
        if settings is None:
            self.require_own_table()
        for version, text in plan(settings or {}):
            for statement in statements_of(text):
                self._run_statement(for_driver(statement))
            if version is not None:
                self.run("set_version", (str(version),))
        self.follow_origin()  # The first session has nothing to write then; another transaction may keep the settings.

    def _run_statement(self, statement: str) -> None:
        """Run a statement of a script. (An interrupted installation may have added its columns and indexes.)"""
        try:
            self.execute_text(statement)
        except Unavailable as exc:
            if not isinstance(exc.__cause__, pymysql.MySQLError) or exc.__cause__.args[0] not in ADDED_BEFORE:
                raise

    def diagnose(self) -> list[Check]:
        return MysqlDoctor(self).examine()

    # -- the SQL of tasks ---------------------------------------------------------------------------------------

    def execute(self, text: str) -> str | None:
        # It gets a connection of its own, with the server's settings, because it may manage transactions itself.
        self._working = connection = self.engine.open_connection()
        try:
            with connection.cursor() as cursor:
                cursor.execute("START TRANSACTION")
                cursor.execute(text)
                while cursor.nextset():
                    pass
            connection.commit()
        except (pymysql.MySQLError, OSError) as exc:
            if isinstance(exc, pymysql.MySQLError) and connection.open:
                raise Unavailable(f"{self.engine.label}: {first_line(exc.args[-1] if exc.args else exc)}") from exc
            raise self.translate(exc) from exc
        finally:
            self._working = None
            with contextlib.suppress(pymysql.MySQLError, OSError):
                connection.close()
        return None

    def cancel_running(self) -> None:
        working = self._working
        if working is not None:
            with contextlib.closing(self.engine.open_connection()) as killer, killer.cursor() as cursor:
                cursor.execute(self.queries["kill"], (working.thread_id(),))


def statements_of(text: str) -> Iterator[str]:
    """Yield the statements of a script, without comments. ``DELIMITER`` lines set their end, as in other tools."""
    delimiter, statement = ";", ""
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("--"):
            continue
        change = re.match(r"DELIMITER (\S+)\s*$", line)
        if change:
            delimiter = change[1]
            continue
        statement += line
        if line.rstrip().endswith(delimiter):
            body = statement.rstrip().removesuffix(delimiter)
            statement = ""
            if body.strip():
                yield body
