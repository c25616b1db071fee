"""The write-ahead log of an SQLite file: when it is written back into the file, and a bug of SQLite to avoid then."""

from __future__ import annotations

import sqlite3

#: After this many pages SQLite itself writes the log back, at the end of any transaction. If that is switched off, a
#: connection writes it back after it has changed this many rows.
MAX_PAGES, MAX_ROWS = 16_000, 8_000
#: The log's file is truncated to this many bytes when the log begins again, in case a long read has made it grow.
MAX_BYTES = 32 * 2**20


def may_miss_a_reset(version: tuple[int, int, int]) -> bool:
    """Return True if this SQLite can lose commits, when one connection resets the log at the moment at which another
    one begins to write it back. The second connection then takes the new log for the old one, which was written back.
    Fixed in 3.51.3, 3.50.7 and 3.44.6 (sqlite.org/wal.html, "The WAL-Reset Bug").
    """
    return not (version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45))


#: True if a connection must exclude writers while it writes the log back, so that none may do so automatically.
MUST_BE_ALONE = may_miss_a_reset(sqlite3.sqlite_version_info)
#: The log is written back after this many transactions of a connection, when no waiter depends on it. Less often if
#: writers have to wait for that: otherwise more than one writer in a hundred would wait.
EVERY = 1024 if MUST_BE_ALONE else 256
