"""Tells the program's code from that of this package in the stack of a thread."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["program_location"]

#: Packages, beside the standard library and this one, in which our threads wait. All other code is the program's.
DRIVERS = frozenset(
    {"gevent", "greenlet", "mssql_python", "psycopg", "psycopg_binary", "psycopg_c", "pymysql", "pyodbc"}
)


def program_location(frame: FrameType) -> str | None:
    """Return the line of the program's code that the thread with this frame executes; None if it executes none. (The
    thread is one of this package, which may call the program.)
    """
    step: FrameType | None = frame
    while step is not None:
        package = str(step.f_globals.get("__name__", "")).partition(".")[0]
        if package == "sqlsem":
            return None
        if package == "logging" or not (package in DRIVERS or package in sys.stdlib_module_names):
            return f"{step.f_code.co_filename}:{step.f_lineno} ({step.f_code.co_name})"
        step = step.f_back
    return None
