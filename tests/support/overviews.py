"""Made-up overviews, for the tests of programs that show them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from typing import Any

from sqlsem.insight.consequences import Action
from sqlsem.insight.overview import Hold, HoldTimes, MemberEntry, Overview
from sqlsem.insight.reasons import reasons
from sqlsem.ops.poller import Snapshot
from sqlsem.values.batches import BatchEntry, PartEntry
from sqlsem.values.locks import Entry, Resource
from sqlsem.values.rates import RateEntry
from sqlsem.values.tasks import QueueCounts, TaskEntry

#: The database's clock.
NOW = datetime(2026, 11, 22, 3, 12, 5, tzinfo=timezone.utc)
#: Hostile names: markup, ANSI, bidirectional overrides.
MARKUP = "<script>alert(1)</script>"
ANSI = "\x1b[2Jred\x1b[31m"
BIDI = "etl\u202egnp.exe"


def entry(position: int, state: str = "waits", resource: str = "etl", **others: Any) -> Entry:
    """Return a request; it holds or waits for ten seconds for each position before 100."""
    seconds = float(max(1, 100 - position) * 10)
    at = NOW - timedelta(seconds=seconds)
    values: dict[str, Any] = {
        **{"access": "write", "limit": 3, "weight": 1, "requesting_id": f"db1:{800 + position}:1:aa"},
        **{"member_id": position, "owner": "MainThread", "host": "db1", "pid": 800 + position, "program": "load.py"},
        **{"note": None, "requested_at": at, "granted_at": None if state == "waits" else at, "seconds": seconds},
        **{"missing_for": None, "grace": 5.0},
    }
    return Entry(resource=resource, position=position, state=state, **{**values, **others})


def task(task_id: int, status: str = "pending", **others: Any) -> TaskEntry:
    """Return a task of a work queue, in its first attempt."""
    values: dict[str, Any] = {
        **{"queue": "nightly", "order": 100, "kind": "sql", "body": "SELECT 1", "note": None, "on_failure": "stop"},
        **{"attempt": 1, "failures": 0, "losses": 0, "max_attempts": 1, "put_at": NOW, "ready_at": NOW},
        **{"claimed_at": NOW, "ended_at": None, "seconds": None, "member_id": None, "owner": None, "host": None},
        **{"pid": None, "error": None, "result": None},
    }
    return TaskEntry(task_id=task_id, status=status, **{**values, **others})


def resource(name: str = "etl", **others: Any) -> Resource:
    """Return a resource without settings."""
    values = {"cap": None, "paused": False, "stale_after": None, "holding": 0, "waiting": 0}
    return Resource(name, **{**values, **others})


def overview(entries: Iterable[Entry] = (), resources: Iterable[Resource] = (), **others: Any) -> Overview:
    """Return an overview with a resource for each name that occurs."""
    by_name = {item.resource: item for item in resources}
    listed = sorted(entries, key=lambda entry: (entry.resource, entry.position))
    for item in listed:
        by_name.setdefault(item.resource, resource(item.resource))
    values: dict[str, Any] = {"members": [], "queues": [], "batches": [], "holds": {}}
    return Overview(NOW, [by_name[name] for name in sorted(by_name)], listed, **{**values, **others})


def a_night() -> Overview:
    """Return an overview with a bit of everything."""
    entries = [
        *(entry(position, "holds", note="orders") for position in (1, 2, 3)),
        *(entry(4, note="customers"), entry(5, host="db2", pid=77, program="nightly.sh")),
        entry(6, "holds", "report", limit=1, missing_for=2.0, program="report.py"),
        entry(7, "waits", "report", access="read", limit=None),
        *(entry(8, "dead", "archive", limit=1), entry(9, "revoked", "archive", limit=1, pid=4711)),
    ]
    resources = [
        resource("report", paused=True, paused_at=NOW, paused_by="ann"),
        resource("spare", cap=2, cap_by="bob"),
    ]
    members = [
        MemberEntry(1, "db1", 801, "load.py", "etl", NOW - timedelta(hours=2), "beacon", None, 5.0, None, 1, 0),
        MemberEntry(6, "db1", 806, "report.py", "etl", NOW - timedelta(hours=1), "beacon", 2.0, 5.0, 3.0, 1, 0),
        MemberEntry(9, "web", None, None, "app", NOW - timedelta(minutes=5), "lease", None, 30.0, 21.0, 1, 0),
    ]
    queues = [
        QueueCounts("nightly", 12, 2, 30, 1, 0, 0, 754.0, 4.2, 17),
        QueueCounts("mail", 0, 0, 4000, 0, 2, 1, None, 61.0, None),
    ]
    parts = (
        PartEntry("north", "succeeded", False, 1, 1, None, "db1", 801, NOW, NOW, 60.0, None, None),
        PartEntry("south", "failed", False, 1, 1, None, "db1", 801, NOW, NOW, 61.0, "disk full", None),
    )
    batches = [
        BatchEntry(31, "close", "open", 3600.0, NOW, None, 300.0, "pending", "sql", "SELECT 1", 0, *[None] * 5, parts)
    ]
    holds = {"etl": HoldTimes(tuple(Hold(60.0 * number, float(number), None, None) for number in range(1, 12)))}
    rates = [
        RateEntry("api", 1.0, 10, 3, 0.4, 5210, 40, 31),
        RateEntry("api", 60.0, 100, 103, 0.4, 5210, 40, 31, 12.0),
        RateEntry("mail", 3600.0, 1000, 12, 754.0, 18, 0, 0),
    ]
    return overview(entries, resources, members=members, queues=queues, batches=batches, holds=holds, rates=rates)


class FakePoller:
    """A `sqlsem.ops.poller.Poller` without a database: `see` sets its overview, ``done`` collects the actions."""

    where = "PostgreSQL database dwh on db.example:5432"
    every = 2.0

    def __init__(self, data: Snapshot | Overview, rights: Iterable[str] = ("operate", "retry")) -> None:
        rights = frozenset(rights)
        self.snapshot = data if isinstance(data, Snapshot) else Snapshot(data, NOW, rights=rights, why=reasons(data))
        self.done: list[Action] = []
        self.failure: Exception | None = None
        self.stopped = threading.Event()
        self._callback: Callable[[Snapshot], None] = lambda snapshot: None

    def start(self, callback: Callable[[Snapshot], None]) -> None:
        self._callback = callback
        callback(self.snapshot)

    def stop(self) -> None:
        self.stopped.set()

    def poll_now(self) -> None:
        self._callback(self.snapshot)

    def see(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._callback(snapshot)

    def refusal(self, action: Action) -> str | None:
        if self.snapshot.rights is None or action.right in self.snapshot.rights:
            return None
        return "This login may only read"

    def perform(self, action: Action) -> str:
        if self.failure is not None:
            raise self.failure
        self.done.append(action)
        return f"done: {action.command}"
