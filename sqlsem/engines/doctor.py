"""The checklist of ``sqlsem doctor``, and the checks that the engines share."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlsem import sql
from sqlsem.engines.base import Engine
from sqlsem.engines.protocol import Check

#: The names of all checks, in order; each engine has some of them.
CHECKLIST = (
    "driver",  # its version
    "server",  # its version
    "file_system",  # does it lock files?
    "primary",  # is the server a writable primary?
    "permission",  # the rights of this login
    "journal",  # can readers and a writer work at the same time?
    "writable",  # may this user write the file?
    "access",  # the other users that may use the file
    "isolation",  # the isolation level of sessions
    "durability",  # can a crash of the server undo grants?
    "locks",  # the free room for locks or connections, which all programs share
    "workers",  # do waiting sessions leave the server enough of its worker threads?
    "kept",  # the sessions that keep a lock for which other sessions wait
    "compatibility",  # does the database's level have the features that sqlsem's routines use?
    "replication",  # the commits that a failover may lose; the clocks of the nodes of a cluster
    "failover",  # do members outlast the failover of an availability group?
    "tls",  # is the connection encrypted, and the server's identity verified?
    "keepalive",  # when does the server notice that a client has vanished?
    "clock",  # the database's, beside this host's
    "encryption",  # as "tls"
    "beacon",  # does a member's lock exclude others, and stay with its connection, which a pool may break?
    "closing",  # does a closed connection end its session and free the locks, which a pool may prevent?
    "disk",  # the free space
)
#: The doctor reports a greater difference between the clocks of the database and of the client, in seconds.
CLOCK_SECONDS = 60


class Doctor:
    """Checks one database through one session. The subclass of an engine has a method for each check of `CHECKLIST`
    that the engine supports. A method returns the result; None: nothing to report.
    """

    def __init__(self, engine: Engine) -> None:
        #: The statements of doctor.sql.
        self.texts = sql.queries(engine.name, engine.options.schema, engine.options.table, "doctor")

    def examine(self) -> list[Check]:
        """Run all checks."""
        checks: list[Callable[[], Check | None]] = [getattr(self, name) for name in CHECKLIST if hasattr(self, name)]
        return [line for check in checks if (line := check()) is not None]


def clocks(ask: Callable[[], float]) -> Check:
    """Compare the database's clock (``ask`` reads it, in seconds since 1970) with this host's clock."""
    before = time.time()
    clock = ask()
    after = time.time()
    apart = max(0.0, before - clock, clock - after)
    mend = "Harmless here, as only the database's clock counts; but set one of them right."
    detail = f"the database's and ours are {apart:.1f} s apart"
    return Check("clock", True, detail, "" if apart <= CLOCK_SECONDS else mend)


def session_locks(kept: bool, lease: float | None, sharer: str, mend: str, told: str = "") -> Check:
    """Return the result of a check: does a session keep its lock after the statement, against other sessions
    (``kept``)? ``sharer``: the component that shares sessions if not. ``told``: a further detail.
    """
    if kept:
        return Check("beacon", True, f"a session's lock outlives its statement, and excludes others{told}")
    if lease is not None:
        return Check("beacon", True, f"connections are shared by {sharer}; the lease stands in for the beacon")
    return Check("beacon", False, f"a session's lock does not stay with its connection: {sharer} shares it", mend)
