"""The registry of engines: maps a URL to the module or package of its engine, which is imported at its first use.

`sqlsem.engines.base` defines an engine, `sqlsem.engines.protocol` the capabilities of its sessions, and
`sqlsem.engines.memory` is the smallest example.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Protocol

from sqlsem.util import late
from sqlsem.values.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlsem.engines.base import Creator, Engine


class SqlalchemyEngine(Protocol):
    """The part of an SQLAlchemy engine that sqlsem uses."""

    @property
    def url(self) -> Any:
        """The URL to connect to."""

    @property
    def dialect(self) -> Any:
        """The SQL dialect, with the name of the driver."""

    def raw_connection(self) -> Any:
        """Return a connection of the engine's pool."""


#: The types that name a database.
Database = str | os.PathLike[str] | SqlalchemyEngine

#: URL scheme → module, whose ``engine`` is a subclass of `Engine`.
SCHEMES = {
    "sqlite": "sqlite",
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mssql": "mssql",
    "sqlserver": "mssql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "memory": "memory",
}
#: The engines with tables, as ``sqlsem sql ENGINE`` accepts them.
ENGINES = ("sqlite", "postgresql", "mssql", "mysql")
#: The engines that other hosts cannot reach, with descriptions for messages.
LOCAL = {"sqlite": "an SQLite file, which is this host's only", "memory": "the memory of this process"}


def load(name: str) -> type[Engine]:
    """Return the engine class with this name (a value of `SCHEMES`)."""
    if name not in SCHEMES.values():
        raise ConfigurationError(f"There is no engine {name!r}; there are {', '.join(dict.fromkeys(SCHEMES.values()))}")
    with late.importing:
        engine: type[Engine] = importlib.import_module(f"sqlsem.engines.{name}").engine
    return engine


def of_url(url: str) -> type[Engine]:
    """Return the engine class for a URL or an ODBC connection string. Raises as `name_of_url` does."""
    return load(name_of_url(url))


def name_of_url(url: str) -> str:
    """Return the name of the engine for a URL or an ODBC connection string. Its driver need not be installed.

    Raises `ConfigurationError` for an unknown scheme. The message never repeats the URL, which may hold a password.
    """
    _require_text(url)
    scheme, separator, _ = url.partition("://")
    if separator:
        if scheme.lower() not in SCHEMES:
            raise ConfigurationError(
                f"Unknown scheme {scheme[:40]!r} in the database URL; known are {', '.join(sorted(SCHEMES))}"
            )
        return SCHEMES[scheme.lower()]
    if "=" in url and ("driver" in url.lower() or "dsn" in url.lower() or "server" in url.lower()):
        return "mssql"
    raise ConfigurationError(
        "The database URL has no scheme; write sqlite:///file.db, postgresql://user@host/database, "
        "mysql://user@host/database, mssql://user@host/database, or an ODBC string (Driver=…;Server=…)"
    )


def _require_text(url: str) -> None:
    """Raise `ConfigurationError` for text that every driver rejects, but each with another error."""
    with late.importing:
        import unicodedata
        import urllib.parse
    try:
        text = urllib.parse.unquote(url, errors="strict")
        text.encode()
        is_invalid = any(unicodedata.category(character) == "Cc" for character in text)
    except UnicodeError:
        is_invalid = True
    if is_invalid:
        raise ConfigurationError(
            "The database URL contains a control character (perhaps as %00) or is not valid UTF-8; write it anew"
        )
    netloc = url.partition("://")[2].partition("/")[0].partition("?")[0].rpartition("@")[2]
    try:
        for host in netloc.split(","):
            host.rpartition(":")[0 if ":" in host else 2].strip("[]").encode("idna")
    except UnicodeError:
        raise ConfigurationError("The host in the database URL can be no host's name; correct it") from None


def locate(database: object) -> tuple[str, Creator | None]:
    """Return the URL of a database that a caller named, and its connection factory, if it has one.

    Raises `ConfigurationError` if ``database`` names no database.
    """
    if isinstance(database, str):
        return plain(database), None
    if isinstance(database, os.PathLike):
        return _file_url(os.fspath(database)), None
    if hasattr(database, "raw_connection") and hasattr(database, "dialect"):
        return _of_sqlalchemy(database)
    raise ConfigurationError(
        f"A database is named by a URL (sqlite:///file.db, postgresql://user@host/database, mysql://…, mssql://…), a "
        f"pathlib.Path of an SQLite file, or an engine of SQLAlchemy, not by {type(database).__name__}"
    )


def _file_url(path: str) -> str:
    with late.importing:
        import urllib.parse
    return f"sqlite:///{urllib.parse.quote(path)}"


def plain(url: str) -> str:
    """Return a URL without the driver that only SQLAlchemy reads: ``postgresql://…`` for ``postgresql+psycopg://…``."""
    scheme, separator, rest = url.partition("://")
    kind, plus, _ = scheme.partition("+")
    if not separator or not plus or kind.lower() not in SCHEMES:
        return url
    if SCHEMES[kind.lower()] == "mssql":
        with late.importing:
            import urllib.parse
        given = urllib.parse.parse_qs(rest.partition("?")[2]).get("odbc_connect")
        if given:
            return given[0]
    return f"{kind}://{rest}"


def _of_sqlalchemy(given: Any) -> tuple[str, Creator | None]:
    kind, driver = given.dialect.name, given.dialect.driver
    if kind == "sqlite":
        return _file_url(given.url.database or ""), None
    is_async = hasattr(given, "sync_engine")
    if (kind, driver) in (("postgresql", "psycopg"), ("mssql", "pyodbc")) and not is_async:
        return f"{kind}://", given.raw_connection
    if kind in ("postgresql", "mysql", "mariadb"):
        # With another driver, in asyncio, or without the flags that sqlsem's sessions need: they open their own.
        return plain(given.url.render_as_string(hide_password=False)), None
    raise ConfigurationError(
        f"An engine of SQLAlchemy for {kind}+{driver} cannot be used; there are sqlite, postgresql, mysql, mariadb and "
        f"mssql+pyodbc",
        code="driver",
    )


def unpooled(creator: Creator) -> Creator:
    """Return a factory that detaches each connection from its SQLAlchemy pool (``creator=engine.raw_connection``):
    sqlsem's connections live as long as the process, and would use up the pool.
    """

    def create() -> Any:
        connection = creator()
        if not hasattr(connection, "dbapi_connection") or not hasattr(connection, "detach"):
            return connection
        driver_connection = connection.dbapi_connection
        connection.detach()
        return driver_connection

    return create
