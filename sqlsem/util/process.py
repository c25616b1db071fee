"""The names by which displays know this process."""

from __future__ import annotations

import os
import sys

from sqlsem.util import late

__all__ = ["here", "host_name", "program_name"]


def host_name() -> str:
    """Return the name of this host."""
    with late.importing:
        import socket  # drivers need it, most programs that only import sqlsem do not
    return socket.gethostname()


def program_name() -> str:
    """Return the name of this program for displays."""
    return os.path.basename(sys.argv[0] or sys.executable)[:255] or "python"


def here() -> str:
    """Return this host, process id and program, one a line, for the record of an operator's action."""
    return f"{host_name()}\n{os.getpid()}\n{program_name()}"
