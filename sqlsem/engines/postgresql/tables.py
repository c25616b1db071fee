"""Installation and diagnosis of the tables on PostgreSQL, and guards of other tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psycopg
from psycopg import errors

from sqlsem import sql
from sqlsem.engines.answers import name_sessions
from sqlsem.engines.installed import setting_number
from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.engines.postgresql.doctor import PostgresDoctor
from sqlsem.engines.protocol import Check, Plan
from sqlsem.util.printable import first_line
from sqlsem.values.errors import ConfigurationError, Unavailable

#: Seconds that `install` waits for a table lock, while all other sessions wait behind it.
INSTALL_PATIENCE_SECONDS = 5
#: Seconds that `install` waits for another installer.
INSTALLER_PATIENCE_SECONDS = 120
#: The errors of the second of two concurrent installers on a database without tables.
MADE_BY_ANOTHER = (errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateSchema, errors.DuplicateFunction)


class PostgresTables(PostgresConnection):
    """The scripts of the tables, and the tables that only a transaction with an asserted grant can write."""

    def change_guard(self, name: str, table: str, *parameters: str) -> int:
        try:
            row = self.cursor.execute(self.queries[name], (table, *parameters)).fetchone()
        except psycopg.Error as exc:
            text = first_line(exc)
            is_own = text.startswith("sqlsem: ")
            if not is_own and isinstance(exc, (errors.UndefinedFunction, errors.InvalidSchemaName)):
                raise self.translate(exc) from exc
            # PostgreSQL's own errors: a missing right, an invalid name, a table of another database.
            if is_own or (exc.sqlstate or "")[:2] in ("42", "0A"):
                detail = "; ".join(filter(None, (text, exc.diag.message_hint)))
                raise ConfigurationError(f"{self.engine.label}: table {table!r}: {detail}") from exc
            raise self.translate(exc) from exc
        assert row is not None
        return int(row[0] or 0)

    def install(self, plan: Plan) -> None:
        # Wait for another installer; but only briefly for a table lock, because all other sessions wait behind it.
        with self._refusing():
            try:
                try:
                    self._install(plan)
                except MADE_BY_ANOTHER:
                    self._install(plan)  # another installer has created the tables at the same time
            except psycopg.Error:
                with contextlib.suppress(psycopg.Error):
                    self._end_install()  # (While an installation is recorded, every wait reads the server's locks.)
                raise

    def _install(self, plan: Plan) -> None:
        self.cursor.execute(f"SET lock_timeout = '{INSTALLER_PATIENCE_SECONDS}s'")
        with self.connection.transaction():
            locked = self._take_install_lock()
            settings = self._installed_settings()
            if settings and not locked:
                self._take_install_lock()
                settings = self._installed_settings()
            if settings and setting_number(settings, "schema_version") < sql.LATEST:
                self.cursor.execute(self.queries["lock_tables"])
            if settings:
                self.cursor.execute(f"SET LOCAL lock_timeout = '{INSTALL_PATIENCE_SECONDS}s'")
            for version, text in plan(settings):
                self.cursor.execute(text.encode())
                if version is not None:
                    self.cursor.execute(self.queries["set_version"], (str(version),))
            self._end_install()

    def _take_install_lock(self) -> bool:
        """Exclude other installers until the transaction ends. Return False if the tables are missing."""
        if self.cursor.execute(self.queries["is_installed"]).fetchone() != (True,):
            return False
        try:
            with self.connection.transaction():
                self.cursor.execute(self.queries["install_lock"])
        except errors.LockNotAvailable as exc:
            raise Unavailable(
                f"{self.engine.label}: another installer has been at it for {INSTALLER_PATIENCE_SECONDS} s: "
                f"{self._installers()}; nothing was changed, try again when that has ended, or end it"
            ) from exc
        self.cursor.execute(self.queries["install_begin"])
        return True

    def _installers(self) -> str:
        rows = self.cursor.execute(self.queries["installers"]).fetchall()
        descriptions = [
            f"session {pid} of login {login} (SELECT pg_catalog.pg_terminate_backend({pid}))" for pid, login in rows
        ]
        return ", ".join(descriptions) or "a session that has just ended"

    def _end_install(self) -> None:
        if self.cursor.execute(self.queries["is_installed"]).fetchone() == (True,):
            self.cursor.execute(self.queries["install_end"])

    def _installed_settings(self) -> dict[str, str]:
        """Return the rows of table ``setting`` about the installed features; empty if nothing is installed."""
        if self.cursor.execute(self.queries["version"]).fetchone() == (None,):
            return {}
        # (A table without a version is not sqlsem's; `plan` raises for it.)
        return {"schema_version": ""} | dict(self.cursor.execute(self.queries["installed"]).fetchall())

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Translate errors in the block, during `install`, into sqlsem's errors with a remedy."""
        try:
            yield
        except errors.InsufficientPrivilege as exc:
            text, hint = first_line(exc), exc.diag.message_hint
            if not text.startswith("sqlsem: "):
                hint = (
                    f"sqlsem init creates schema {self.options.schema}, or changes it: the first time it needs CREATE "
                    "on the database (GRANT CREATE ON DATABASE … TO …), later it is for the owner of that schema"
                )
            raise ConfigurationError(f"{self.engine.label}: {'; '.join(filter(None, (text, hint)))}") from exc
        except errors.LockNotAvailable as exc:
            text = first_line(exc)
            hint = exc.diag.message_hint or (
                f"another session has kept a lock on the sqlsem tables for {INSTALL_PATIENCE_SECONDS} s (a dump, "
                f"VACUUM FULL, an open transaction?); nothing was changed, try again later."
            )
            with contextlib.suppress(psycopg.Error):  # (A login without the right to see the blockers gets no list.)
                blockers = self.cursor.execute(self.queries["blockers"]).fetchall()
                hint += f" They were kept by {name_sessions(blockers)}."
            raise Unavailable(f"{self.engine.label}: {text}; {hint}") from exc
        except psycopg.Error as exc:
            raise self.translate(exc) from exc

    def diagnose(self) -> list[Check]:
        return PostgresDoctor(self).examine()
