"""MariaDB and MySQL, through PyMySQL: the statements of `sqlsem.engines.statements`, with a row as the gate.

The gate
    A row that each writing transaction changes first. The nodes of a Galera cluster certify that change. So it excludes
    the transactions of other nodes, too: the later one fails at its commit (`Busy`), and is repeated.
Beacons
    A lock by name (GET_LOCK) of a member's main session. When it is free, the member's grace begins, because a live
    member may have lost its connection. A cluster does not replicate such locks, so there members have leases.
Sleeping
    A member's main session keeps a lock by name for each of its rows. The waiter behind a row waits for that lock.
"""

from __future__ import annotations

from sqlsem.values.errors import ConfigurationError

try:
    import pymysql  # noqa: F401 - first, for a message of our own if it is missing
except ImportError as exc:
    raise ConfigurationError(
        "MariaDB and MySQL need PyMySQL, which is not installed; get it with: pip install 'sqlsem[mysql]'",
        code="driver",
    ) from exc

from sqlsem.engines.mysql.engine import MysqlEngine
from sqlsem.engines.mysql.session import MysqlSession

__all__ = ["MysqlEngine", "MysqlSession", "engine"]

engine = MysqlEngine
