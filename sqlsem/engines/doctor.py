"""``sqlsem doctor``: one checklist, and the checks of an engine under its names."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlsem import sql
from sqlsem.engines.base import Engine
from sqlsem.engines.protocol import Check

__all__ = ["Doctor", "clocks", "session_locks"]

#: What is looked at, in this order, as far as an engine has such a thing.
CHECKLIST = (
    *("driver", "server", "file_system", "primary", "permission", "journal", "writable", "access", "isolation"),
    *("durability", "locks", "workers", "kept", "compatibility", "replication", "failover", "tls", "keepalive"),
    *("clock", "encryption", "beacon", "closing", "disk"),
)
#: Seconds that the clocks of a database and of its client may be apart without a word.
CLOCK_SECONDS = 60


class Doctor:
    """Looks at one database through one session. An engine's doctor has a method for each check of `CHECKLIST` that it
    knows, which returns the line (None: there is nothing to say).
    """

    def __init__(self, engine: Engine) -> None:
        #: The statements of doctor.sql.
        self.texts = sql.queries(engine.name, engine.options.schema, engine.options.table, "doctor")

    def examine(self) -> list[Check]:
        """Go through the list."""
        looks: list[Callable[[], Check | None]] = [getattr(self, one) for one in CHECKLIST if hasattr(self, one)]
        return [found for look in looks if (found := look()) is not None]


def clocks(ask: Callable[[], float]) -> Check:
    """How far the database's clock, which ``ask`` tells in seconds since 1970, is from ours."""
    before = time.time()
    clock = ask()
    after = time.time()
    apart = max(0.0, before - clock, clock - after)
    mend = "Harmless here, as only the database's clock counts; but set one of them right."
    told = f"the database's and ours are {apart:.1f} s apart"
    return Check("clock", True, told, "" if apart <= CLOCK_SECONDS else mend)


def session_locks(kept: bool, lease: float | None, sharer: str, mend: str, told: str = "") -> Check:
    """Whether a lock of one session outlives its statement there, and keeps another one out; ``sharer``: what lends
    sessions to several where it does not.
    """
    if kept:
        return Check("beacon", True, f"a session's lock outlives its statement, and excludes others{told}")
    if lease is not None:
        return Check("beacon", True, f"connections are shared by {sharer}; the lease stands in for the beacon")
    return Check("beacon", False, f"a session's lock does not stay with its connection: {sharer} shares it", mend)
