"""Compilation of the .NET client, and its connection strings."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sqlsem.engines.mssql.odbc import words_of_odbc, words_of_url

__all__ = ["CLIENT", "ado_of_mssql", "compile_sources", "lacks", "odbc_of_postgres"]

CLIENT = Path(__file__).resolve().parents[1] / "dotnet" / "SqlSem.cs"
#: The psqlODBC driver, as odbcinst.ini names it.
PSQLODBC = "PostgreSQL Unicode"


@functools.cache
def lacks(*, odbc: bool) -> str | None:
    """Return the missing program to compile and run C# (``odbc``: or to reach PostgreSQL by ODBC); None: none is."""
    for command, package in (("mcs", "mono-mcs"), ("mono", "mono-runtime")):
        if shutil.which(command) is None:
            return f"{command} (on Debian: apt-get install {package})"
    with tempfile.TemporaryDirectory(prefix="sqlsem-") as folder:
        empty = Path(folder, "Empty.cs")
        empty.touch()
        try:
            compile_sources([empty], Path(folder, "empty.dll"))
        except RuntimeError:
            return "Mono's System.Data (on Debian: apt-get install libmono-system-data4.0-cil)"
    if odbc:
        drivers = ""
        if shutil.which("odbcinst"):
            listing = subprocess.run(["odbcinst", "-q", "-d"], capture_output=True, text=True, check=False)  # noqa: S607
            drivers = listing.stdout
        if f"[{PSQLODBC}]" not in drivers:
            return f"the ODBC driver {PSQLODBC} (on Debian: apt-get install odbc-postgresql odbcinst)"
    return None


def compile_sources(sources: Sequence[Path], program: Path) -> None:
    """Compile C# sources to a program (or, where its name ends in ``.dll``, a library) for Mono."""
    target = "library" if program.suffix == ".dll" else "exe"
    words = ["mcs", "-warn:4", "-warnaserror", "-r:System.Data.dll", f"-target:{target}", f"-out:{program}"]
    words += map(str, sources)
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        names = ", ".join(source.name for source in sources)
        raise RuntimeError(f"mcs could not compile {names}:\n{done.stdout}{done.stderr}")


def odbc_of_postgres(url: str) -> str:
    """Return a psqlODBC connection string for a URL of PostgreSQL."""
    from psycopg import conninfo

    settings = conninfo.conninfo_to_dict(url)
    names = {"host": "Server", "port": "Port", "dbname": "Database", "user": "Uid", "password": "Pwd"}
    words = {names[key]: str(value) for key, value in settings.items() if key in names and value not in (None, "")}
    words.setdefault("Server", "localhost")
    parts = [f"Driver={{{PSQLODBC}}}"]
    for key, value in words.items():
        # The driver removes braces around a password, but not around every other value.
        braced = "{" + value.replace("}", "}}") + "}" if any(character in value for character in ";{}") else value
        parts.append(f"{key}={braced}")
    return ";".join(parts)


def ado_of_mssql(url: str) -> str:
    """Return an ADO.NET connection string for a URL or an ODBC string of SQL Server."""
    words = words_of_url(url) if "://" in url else words_of_odbc(url)
    settings = {key.lower(): value for key, value in words.items()}
    server = settings.get("server", "localhost")
    if "port" in settings:
        server += f",{settings['port']}"
    named = {"Data Source": server, "Initial Catalog": settings.get("database", "")}
    if "uid" in settings:
        named |= {"User ID": settings["uid"], "Password": settings.get("pwd", "")}
    else:
        named["Integrated Security"] = "true"
    for key in ("Encrypt", "TrustServerCertificate"):
        if key.lower() in settings:
            named[key] = "true" if settings[key.lower()].lower() in ("yes", "true", "1") else "false"
    return ";".join(f"{key}={_quoted(value)}" for key, value in named.items() if value)


def _quoted(value: str) -> str:
    return '"' + value.replace('"', '""') + '"'
