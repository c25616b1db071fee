"""One module an engine, each behind the small protocol of `sqlsem.engines.base`."""

from __future__ import annotations

import importlib
import unicodedata
import urllib.parse
from typing import TYPE_CHECKING

from sqlsem.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlsem.engines.base import Engine

#: URL scheme → module. A new engine is one line here, one module and one folder of SQL.
SCHEMES = {
    "sqlite": "sqlite",
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mssql": "mssql",
    "sqlserver": "mssql",
}
#: The engines' names, as ``sqlsem sql ENGINE`` takes them.
ENGINES = ("sqlite", "postgresql", "mssql")


def load(name: str) -> type[Engine]:
    """The engine class of that name (one of `ENGINES`)."""
    if name not in ENGINES:
        raise ConfigurationError(f"There is no engine {name!r}; there are {', '.join(ENGINES)}")
    engine: type[Engine] = importlib.import_module(f"sqlsem.engines.{name}").engine
    return engine


def of_url(url: str) -> type[Engine]:
    """The engine class that a URL or an ODBC connection string asks for.

    Raises `ConfigurationError` for a scheme that no engine knows. Never repeats the URL: it may hold a password.
    """
    _require_text(url)
    scheme, separator, _ = url.partition("://")
    if separator:
        if scheme.lower() not in SCHEMES:
            raise ConfigurationError(
                f"Unknown scheme {scheme[:40]!r} in the database URL; known are {', '.join(sorted(SCHEMES))}"
            )
        return load(SCHEMES[scheme.lower()])
    if "=" in url and ("driver" in url.lower() or "dsn" in url.lower() or "server" in url.lower()):
        return load("mssql")
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
