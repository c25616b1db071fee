"""The first lines of a report: the server, the driver and this client."""

from __future__ import annotations

import contextlib
import platform
import socket
import urllib.parse
from typing import Any

import sqlsem
from sqlsem import engines
from sqlsem.ops.certify.bench import Bench
from sqlsem.ops.certify.sessions import Session

__all__ = ["facts", "hidden_words"]

#: Words that stay in a document although a server, a login or a database has that name.
NO_NAMES = frozenset({*engines.SCHEMES, "sqlsem", "master", "public", "localhost"})


def facts(bench: Bench) -> dict[str, Any]:
    """Return the facts about the server, the driver and this client."""
    found: dict[str, Any] = {"engine": bench.engine.name}
    with contextlib.closing(Session(bench.engine)) as session:
        found |= {str(name): None if value is None else _line(value) for name, value in session.rows("facts")}
    with contextlib.closing(bench.engine.connect("look")) as examined:
        checks = examined.diagnose()
    found["driver"] = next((check.detail for check in checks if check.name == "driver"), "of Python")
    found["sqlsem"] = sqlsem.__version__
    found["python"] = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()}"
    found["schema"] = bench.schema
    return found


def _line(value: object) -> str:
    return str(value).partition("\n")[0].strip()


def hidden_words(bench: Bench) -> dict[str, str]:
    """Return words that would identify the server, the login or this host, each with the mark that replaces it."""
    hidden = {socket.gethostname(): "<client>", socket.getfqdn(): "<client>"}
    if "://" in bench.url:
        hidden[urllib.parse.urlsplit(bench.url).hostname or ""] = "<server>"
    words: dict[str, str] = getattr(bench.engine, "words", {})
    for key, value in words.items():
        if key.lower() in ("server", "address", "addr", "servername", "dsn", "host"):
            hidden[value] = hidden[value.partition(",")[0]] = "<server>"
    with contextlib.closing(Session(bench.engine)) as session:
        hidden |= {str(word): str(mark) for word, mark in session.rows("hidden") if word}
    if bench.folder is not None:
        hidden[str(bench.folder.parent)] = "<folder>"
    return {word: mark for word, mark in hidden.items() if len(word) > 2 and word.lower() not in NO_NAMES}
