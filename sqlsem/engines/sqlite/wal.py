"""The write-ahead log of an SQLite file: when it is written back into the file, and what has to be minded there."""

from __future__ import annotations

import sqlite3

__all__ = ["EVERY", "MOST_BYTES", "MOST_PAGES", "MOST_ROWS", "MUST_BE_ALONE", "may_miss_a_reset"]

#: After so many pages SQLite does that by itself, at the end of whatever transaction it is. Where it must not, we do
#: after so many rows that a connection has changed.
MOST_PAGES, MOST_ROWS = 16_000, 8_000
#: The log's file is cut to so many bytes when it begins anew, should somebody's long look have made it grow.
MOST_BYTES = 32 * 2**20


def may_miss_a_reset(version: tuple[int, int, int]) -> bool:
    """Whether this SQLite loses commits where one connection begins the log anew in the instant in which another one
    begins to write it back: that one takes the new log for the old one, and for written back already. Mended in 3.51.3,
    and in 3.44.6 and 3.50.7 (sqlite.org/wal.html, "The WAL-Reset Bug").
    """
    return not (version >= (3, 51, 3) or (3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45))


#: Whoever writes the log back must keep others from writing meanwhile, so no connection may do it at its own time.
MUST_BE_ALONE = may_miss_a_reset(sqlite3.sqlite_version_info)
#: After so many transactions of a connection the log is written back, when nobody waits for it: less often where others
#: have to wait for that, who would be more than one in a hundred.
EVERY = 1024 if MUST_BE_ALONE else 256
