"""ODBC connection strings, drivers, and the declaration of parameters."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import threading
import urllib.parse
from typing import Any

from sqlsem.values.errors import ConfigurationError

#: The declaration of texts of up to this many UTF-16 units (pyodbc.SQL_WVARCHAR).
_TEXT, _SQL_WVARCHAR = 4000, -9
_DRIVER_NUMBER = re.compile(r"ODBC Driver (\d+) for SQL Server")

_loading = threading.Lock()


def _unlock_in_child() -> None:
    """Replace the lock in a forked child: the thread that held it does not exist there."""
    global _loading
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


def words_of_url(url: str) -> dict[str, str]:
    """Return ``mssql://…`` as the keywords of an ODBC string."""
    bad = "This is not a URL for SQL Server; write mssql://user:password@host:1433/database"
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
        query = urllib.parse.parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ConfigurationError(bad) from None  # the message may repeat parts of the URL
    words: dict[str, str] = {}
    names = {"driver": "Driver", "encrypt": "Encrypt", "trustservercertificate": "TrustServerCertificate", "app": "APP"}
    for key, value in query:
        words[names.get(key.lower(), key)] = value
    lower = {key.lower() for key in words}
    if host and "server" not in lower:
        words["Server"] = host
        if port:
            words["Port"] = str(port)
    if parts.path.strip("/"):
        words["Database"] = urllib.parse.unquote(parts.path.strip("/"))
    if parts.username:
        words["UID"] = urllib.parse.unquote(parts.username)
        words["PWD"] = urllib.parse.unquote(parts.password or "")
    elif not lower & {"authentication", "trusted_connection", "uid"}:
        words["Trusted_Connection"] = "yes"
    return words


def words_of_odbc(text: str) -> dict[str, str]:
    """Parse ``Driver={…};Server=…``; a brace in a braced value is doubled."""
    words: dict[str, str] = {}
    at = 0
    while at < len(text):
        key, separator, _ = text[at:].partition("=")
        if not separator:
            if text[at:].strip(" ;\t\r\n"):
                raise ConfigurationError("This ODBC string has a part without '='; write Key=value;Key=value")
            break
        at += len(key) + 1
        if text.startswith("{", at):
            match = re.compile(r"\{((?:[^}]|\}\})*)\}\s*(?:;|$)").match(text, at)
            if match is None:
                raise ConfigurationError("This ODBC string has a '{' without its '}'; a '}' inside is written '}}'")
            value, at = match.group(1).replace("}}", "}"), match.end()
        else:
            value = text[at:].partition(";")[0]
            at += len(value) + 1
            value = value.strip()
        words[key.strip(" ;\t\r\n")] = value
    return words


def join(words: dict[str, str]) -> str:
    """Return the ODBC string of these keywords."""
    return ";".join(f"{key}={_escaped(value)}" for key, value in words.items())


def _escaped(value: str) -> str:
    if re.fullmatch(r"[^;{}\[\]()?*!@=\s](?:[^;{}\[\]()?*!@=]*[^;{}\[\]()?*!@=\s])?", value):
        return value
    return "{" + value.replace("}", "}}") + "}" if value else value


def choose_driver() -> str:
    """Return the name of the best installed ODBC driver."""
    pyodbc = load_driver("pyodbc")
    there = list(pyodbc.drivers()) if pyodbc is not None else []
    numbered = [(int(match[1]), name) for name in there if (match := _DRIVER_NUMBER.fullmatch(name))]
    if numbered:
        return str(max(numbered)[1])
    for name in there:
        if "freetds" in name.lower():
            return str(name)
    raise ConfigurationError(
        "No ODBC driver for SQL Server is installed; install Microsoft's ODBC Driver 18 for SQL Server or FreeTDS, or: "
        "pip install 'sqlsem[mssql]' mssql-python (and driver=mssql-python in the URL)",
        code="driver",
    )


def load_driver(name: str) -> Any:
    """Return the driver module with its pool off; None if it is not installed."""

    with _loading:
        try:
            module = importlib.import_module(name)
        except ImportError:
            return None
        if name == "pyodbc":
            vars(module)["pooling"] = False  # a pool would keep the session and its locks after close()
        else:
            with contextlib.suppress(Exception):
                module.pooling(enabled=False)
        return module


@functools.lru_cache(maxsize=256)
def with_nulls(text: str, nulls: tuple[bool, ...]) -> str:
    """Replace some of the marks by NULL: the driver would ask the server for the type of a NULL parameter, in a round
    trip of its own.
    """
    first, *others = text.split("?")
    return first + "".join(f"{'NULL' if null else '?'}{rest}" for null, rest in zip(nulls, others, strict=True))


def is_microsofts(connection: Any) -> bool:
    """Return True for a pyodbc connection through Microsoft's driver."""
    if type(connection).__module__ != "pyodbc":
        return False
    pyodbc = load_driver("pyodbc")
    try:
        return "msodbcsql" in str(connection.getinfo(pyodbc.SQL_DRIVER_NAME)).lower()
    except pyodbc.Error:  # unknown: only costs a little speed
        return False


def declared_size(value: Any) -> Any:
    """Return the declaration of a parameter. Some drivers declare each text by its length: the server would then take
    the same statement for a new one, and keep a plan for each length.
    """
    if isinstance(value, str) and len(value.encode("utf-16-le", "surrogatepass")) <= 2 * _TEXT:
        return _SQL_WVARCHAR, _TEXT, 0
    return None
