"""The version of the tables after this one, which exists in tests only, and `sqlsem init` of a client that brings it.

``schema.sql`` of each engine's folder is its schema script; ``routines.sql``, if there is one, follows the script of
that name. ``python -m support.next_version init`` is the command of such a client.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sqlsem import sql
from sqlsem.cli import main

if TYPE_CHECKING:
    from support.databases import Database

#: This client's version, and the later one.
THIS, NEXT = sql.LATEST, sql.LATEST + 1
FOLDER = Path(__file__).resolve().parent
_read = sql._read.__wrapped__


def script(engine: str, file: str) -> str:
    """Return the text of a script that only that version has; empty if it has none."""
    path = FOLDER / engine / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def bring(patch: pytest.MonkeyPatch, *, ending: str = "") -> None:
    """Make this client bring the next version; ``ending`` follows its schema script."""

    def read_next(engine: str, file: str) -> str | None:
        if file == f"schema-{NEXT}.sql":
            return script(engine, "schema.sql") + ending
        text = _read(engine, file)
        return text + script(engine, file) if text is not None and file == "routines.sql" else text

    patch.setattr(sql, "LATEST", NEXT)
    patch.setattr(sql, "_read", read_next)


def start_upgrade(database: Database) -> subprocess.Popen[str]:
    """Start ``sqlsem init`` of that client in a process of its own; this process keeps its version."""
    return subprocess.Popen(
        [sys.executable, "-m", "support.next_version", "--schema", database.schema, "init"],
        env={**os.environ, "SQLSEM_URL": database.url, "PYTHONPATH": str(FOLDER.parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run() -> None:
    """Run the command line of that client."""
    bring(pytest.MonkeyPatch())
    main(prog_name="sqlsem")
