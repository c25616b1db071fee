"""The engines: this is the one place that names them, and each is a module or package that is loaded when asked for.

What an engine is stands in `sqlsem.engines.base`, what it may offer in `sqlsem.engines.protocol`; the smallest one is
`sqlsem.engines.memory`.
"""

from __future__ import annotations

import importlib
import os
import unicodedata
import urllib.parse
from typing import Any, Protocol

from sqlsem.engines.base import Creator, Engine
from sqlsem.errors import ConfigurationError


class SqlalchemyEngine(Protocol):
    """What we use of an engine of SQLAlchemy."""

    @property
    def url(self) -> Any:
        """Where it connects to."""

    @property
    def dialect(self) -> Any:
        """What it speaks, and by which driver."""

    def raw_connection(self) -> Any:
        """A connection out of its pool."""


#: What a database may be named by.
Database = str | os.PathLike[str] | SqlalchemyEngine

#: URL scheme → module, whose ``engine`` is a subclass of `Engine`.
SCHEMES = {
    "sqlite": "sqlite",
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mssql": "mssql",
    "sqlserver": "mssql",
    "memory": "memory",
}
#: Those with tables, as ``sqlsem sql ENGINE`` takes them.
ENGINES = ("sqlite", "postgresql", "mssql")
#: Those that other hosts cannot reach, in words.
LOCAL = {"sqlite": "an SQLite file, which is this host's only", "memory": "the memory of this process"}


def load(name: str) -> type[Engine]:
    """The engine class of that name (one that `SCHEMES` leads to)."""
    if name not in SCHEMES.values():
        raise ConfigurationError(f"There is no engine {name!r}; there are {', '.join(dict.fromkeys(SCHEMES.values()))}")
    engine: type[Engine] = importlib.import_module(f"sqlsem.engines.{name}").engine
    return engine


def of_url(url: str) -> type[Engine]:
    """The engine class that a URL or an ODBC connection string asks for; raises as `name_of_url`."""
    return load(name_of_url(url))


def name_of_url(url: str) -> str:
    """The name of the engine that a URL or an ODBC connection string asks for; its driver need not be there.

    Raises `ConfigurationError` for a scheme that no engine knows. Never repeats the URL: it may hold a password.
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
        "mssql://user@host/database, or an ODBC string (Driver=…;Server=…)"
    )


def _require_text(url: str) -> None:
    """Refuse what drivers would stumble over, each in its own way."""
    try:
        whole = urllib.parse.unquote(url, errors="strict")
        whole.encode()
        unsound = any(unicodedata.category(character) == "Cc" for character in whole)
    except UnicodeError:
        unsound = True
    if unsound:
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
    """The URL of what somebody calls a database, and what makes its connections, if it brings that along.

    Raises `ConfigurationError` for what is none.
    """
    if isinstance(database, str):
        return plain(database), None
    if isinstance(database, os.PathLike):
        return f"sqlite:///{urllib.parse.quote(os.fspath(database))}", None
    if hasattr(database, "raw_connection") and hasattr(database, "dialect"):
        return _of_sqlalchemy(database)
    raise ConfigurationError(
        f"A database is named by a URL (sqlite:///file.db, postgresql://user@host/database, mssql://…), a pathlib.Path "
        f"of an SQLite file, or an engine of SQLAlchemy, not by {type(database).__name__}"
    )


def plain(url: str) -> str:
    """A URL without what only SQLAlchemy reads: ``postgresql+psycopg://…`` is ``postgresql://…``."""
    scheme, separator, rest = url.partition("://")
    kind, plus, _ = scheme.partition("+")
    if not separator or not plus or kind.lower() not in SCHEMES:
        return url
    if SCHEMES[kind.lower()] == "mssql":
        given = urllib.parse.parse_qs(rest.partition("?")[2]).get("odbc_connect")
        if given:
            return given[0]
    return f"{kind}://{rest}"


def _of_sqlalchemy(given: Any) -> tuple[str, Creator | None]:
    kind, driver = given.dialect.name, given.dialect.driver
    if kind == "sqlite":
        return f"sqlite:///{urllib.parse.quote(given.url.database or '')}", None
    awaited = hasattr(given, "sync_engine")
    if (kind, driver) in (("postgresql", "psycopg"), ("mssql", "pyodbc")) and not awaited:
        return f"{kind}://", given.raw_connection
    if kind == "postgresql":  # by a driver that is not ours, or asyncio: on connections of our own
        return plain(given.url.render_as_string(hide_password=False)), None
    raise ConfigurationError(
        f"An engine of SQLAlchemy for {kind}+{driver} cannot be used; there are sqlite, postgresql and mssql+pyodbc"
    )


def unpooled(creator: Creator) -> Creator:
    """The same, but what a pool of SQLAlchemy lends (``creator=engine.raw_connection``) is taken out of it for good, as
    our connections live as long as the process.
    """

    def create() -> Any:
        connection = creator()
        if not hasattr(connection, "dbapi_connection") or not hasattr(connection, "detach"):
            return connection
        found = connection.dbapi_connection
        connection.detach()
        return found

    return create
