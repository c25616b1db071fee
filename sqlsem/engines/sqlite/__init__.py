"""SQLite, through the standard library: several processes on one host, nothing to install or start.

The file's write lock is the gate. A member's beacon is a lock on a file of its own beside the database; the system
frees it the moment the process dies, so a member whose file can be locked is dead for certain and is removed without
waiting for its grace. (A beacon file that is *not there* proves nothing; then grace runs, as on the other engines.)
"""

from __future__ import annotations

from sqlsem.engines.sqlite.engine import SqliteEngine, SqliteSession

__all__ = ["SqliteEngine", "SqliteSession", "engine"]

engine = SqliteEngine
