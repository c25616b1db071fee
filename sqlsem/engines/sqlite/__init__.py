"""SQLite, through the standard library: for several processes on one host, with nothing to install or start.

The file's write lock is the gate. A member's beacon is a lock on a file of its own beside the database. The system
frees it when the process dies. So a member whose beacon file can be locked is certainly dead, and is removed without
waiting for its grace. (A *missing* beacon file proves nothing: then the grace runs, as on the other engines.)
"""

from __future__ import annotations

from sqlsem.engines.sqlite.engine import SqliteEngine
from sqlsem.engines.sqlite.session import SqliteSession

__all__ = ["SqliteEngine", "SqliteSession", "engine"]

engine = SqliteEngine
