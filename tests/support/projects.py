"""Write a user's and a project's configuration files; the fixture ``home`` of tests/unit makes the folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import Result

from sqlsem.config import allowing, reading
from support import commands

#: A password, which no output may show.
SECRET = "correct/horse@battery"
posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes")
#: Only the administrator can give files away.
as_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="makes files of another user: needs root")
#: The number of a user that does not exist.
STRANGER = 12345


def user(home: Path, text: str, mode: int = 0o600) -> Path:
    """Write the user's own file."""
    return write(home / "config" / "sqlsem.toml", text, mode)


def project(home: Path, text: str, mode: int = 0o644, name: str = "sqlsem.toml") -> Path:
    """Write the project's file, in the folder above the current one."""
    return write(home / "project" / name, text, mode)


def write(path: Path, text: str, mode: int) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def allow(path: Path) -> Path:
    """Allow a folder, as ``sqlsem config allow`` does."""
    allowing.allow(reading.project_file(path))
    return path


def call(*arguments: str) -> Result:
    """Run a command in this process."""
    result = commands.call(*arguments)
    assert SECRET not in result.output
    return result
