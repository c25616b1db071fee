"""The events of locks, which `sqlsem.on` delivers and the logger writes: one object and one log line each.

An event is immutable and holds plain values, so that callbacks may keep it. The fields of all events are those of
`Event`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, ClassVar

from sqlsem.util.printable import clean
from sqlsem.util.record import record
from sqlsem.values.locks import Entry, Request

__all__ = ["EVENTS", "Behind", "Deadlocked", "Event", "Granted", "Lost", "Released", "TimedOut", "Waiting", "meets"]


def meets(request: Request, access: str) -> bool:
    """Return True if a row ahead with that access can block the request: all but rows that share the lock with it."""
    return not request.shared or request.access != access


@record
class Behind:
    """The blocker of a request: the first row ahead of it with which it cannot hold the lock together."""

    position: int
    state: str  # 'holds', 'waits', 'revoked' or 'dead'
    seconds: float  # since its grant or request
    requesting_id: str
    owner: str | None
    host: str | None
    pid: int | None
    program: str | None
    note: str | None
    others: int | None  # how many more rows are in between; None: not known

    @classmethod
    def of(cls, entries: list[Entry], request: Request, position: int) -> Behind | None:
        """Return the blocker of a request, from the queue of its resource."""
        ahead = [entry for entry in entries if entry.position < position and meets(request, entry.access)]
        return cls._first(ahead)

    @classmethod
    def other_holder(cls, entries: list[Entry], position: int) -> Behind | None:
        """Return the blocker of a reader that upgrades: another holder."""
        return cls._first([entry for entry in entries if entry.position != position and entry.granted_at is not None])

    @classmethod
    def _first(cls, entries: list[Entry]) -> Behind | None:
        if not entries:
            return None
        entry = entries[0]
        owner_fields = (entry.owner, entry.host, entry.pid, entry.program)
        identity = (entry.position, entry.state, entry.seconds, entry.requesting_id)
        return cls(*identity, *owner_fields, entry.note, others=len(entries) - 1)

    def __str__(self) -> str:
        client = self.requesting_id if self.host is None else f"{self.host}:{self.pid}"
        program = f" ({self.program})" if self.program else ""
        more = f" and {self.others} more" if self.others else ""
        return f"{client}{program}, which {self.state} for {self.seconds:.1f} s{more}"


@record
class Event:
    """An event of one request of this process. For ``all_of`` there is one event per request."""

    #: The kind, as in `sqlsem.on`.
    name: ClassVar[str] = ""
    #: The text of the log line, the attributes that it shows, and its level.
    template: ClassVar[str] = ""
    shown: ClassVar[tuple[str, ...]] = ("described",)
    level: ClassVar[int] = logging.INFO

    resource: str
    position: int | None  # None: it has no row yet
    access: str  # 'write', 'read', 'stage:…'; 'upgrade': a reader upgrades
    limit: int | None
    weight: int
    note: str | None
    database: str  # without a password
    caller: str  # the thread or task: ``MainThread#1``

    @property
    def words(self) -> tuple[object, ...]:
        """The values of the template."""
        return tuple(getattr(self, name) for name in self.shown)

    @property
    def described(self) -> str:
        """The request in a few words, for example ``limit 3 on 'etl'``."""
        if self.access == "upgrade":
            return f"upgrade on {self.resource!r}"
        return Request(self.resource, self.access, self.limit, self.weight).describe()

    @property
    def log_level(self) -> int:
        """The level of the log line."""
        return self.level

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, with the kind as ``event``; unprintable characters are replaced."""
        fields: dict[str, Any] = _cleaned({"event": self.name, **dataclasses.asdict(self)})
        return fields


@record
class Waiting(Event):
    """The request begins to wait."""

    name: ClassVar[str] = "waiting"
    template: ClassVar[str] = "Waiting for %r at %d%s"
    shown: ClassVar[tuple[str, ...]] = ("resource", "position", "behind_words")

    behind: Behind | None  # None: not known (the blocker has just left), or a pause or a cap

    @property
    def behind_words(self) -> str:
        """The blocker, as the end of the log line."""
        return "" if self.behind is None else f", behind {self.behind}"


@record
class Granted(Event):
    """The request was granted. (The log line is at DEBUG if it did not wait.)"""

    name: ClassVar[str] = "granted"
    template: ClassVar[str] = "Granted %s at %d, after %.1f s"
    shown: ClassVar[tuple[str, ...]] = ("described", "position", "waited")

    waited: float  # seconds
    at_once: bool  # it did not wait
    behind: Behind | None = None  # the blocker when the wait began

    @property
    def log_level(self) -> int:
        """The level of the log line."""
        return logging.DEBUG if self.at_once else logging.INFO


@record
class Released(Event):
    """The lock was released."""

    name: ClassVar[str] = "released"
    template: ClassVar[str] = "Released %r at %d, held for %.1f s"
    shown: ClassVar[tuple[str, ...]] = ("resource", "position", "held")
    level: ClassVar[int] = logging.DEBUG

    held: float  # seconds


@record
class Lost(Event):
    """The lock was lost without a release: others may hold it now."""

    name: ClassVar[str] = "lost"
    template: ClassVar[str] = "Lost the lock on %r at %d: %s"
    shown: ClassVar[tuple[str, ...]] = ("resource", "position", "why")
    level: ClassVar[int] = logging.ERROR

    held: float | None  # seconds; None: its row was lost while it waited
    why: str

    @property
    def log_level(self) -> int:
        """The level of the log line. (A lost waiting row is INFO: the waiter gets an exception.)"""
        return logging.INFO if self.held is None else logging.ERROR


@record
class Deadlocked(Event):
    """The request was chosen as the victim of a deadlock; its caller gets `sqlsem.Deadlock`."""

    name: ClassVar[str] = "deadlock"
    template: ClassVar[str] = "Gave up %s: %s"
    shown: ClassVar[tuple[str, ...]] = ("described", "why")

    waited: float  # seconds
    why: str


@record
class TimedOut(Event):
    """The request was not granted in time, and has left the queue."""

    name: ClassVar[str] = "timeout"
    template: ClassVar[str] = "Not granted within %g s: %s"
    shown: ClassVar[tuple[str, ...]] = ("timeout", "described")

    waited: float  # seconds
    timeout: float  # seconds; 0: the request did not wait
    behind: Behind | None = None  # the blocker when the wait began


#: The classes of events, by the kinds that `sqlsem.on` takes.
EVENTS: dict[str, type[Event]] = {
    event.name: event for event in (Waiting, Granted, Released, Lost, Deadlocked, TimedOut)
}


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    return {name: _cleaned(field) for name, field in value.items()} if isinstance(value, dict) else value
