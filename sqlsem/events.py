"""What happens to locks, as `sqlsem.on` tells it and the logger writes it: one object, one line."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlsem.model import Entry, Request
from sqlsem.printable import clean

__all__ = ["EVENTS", "Behind", "Deadlocked", "Event", "Granted", "Lost", "Released", "TimedOut", "Waiting", "meets"]


def meets(request: Request, access: str) -> bool:
    """Whether one ahead with that label counts for a request: all do but those that it shares with."""
    return not request.shared or request.access != access


@dataclass(frozen=True, slots=True)
class Behind:
    """Whom a request waits behind: of those ahead that it cannot be inside with, the first one."""

    position: int
    state: str  # 'holds', 'waits', 'revoked' or 'dead'
    seconds: float  # for which it has held or waited
    requesting_id: str
    owner: str | None
    host: str | None
    pid: int | None
    program: str | None
    note: str | None
    others: int | None  # how many more are between them; None: nobody has looked

    @classmethod
    def of(cls, entries: list[Entry], request: Request, position: int) -> Behind | None:
        """From the queue of its resource."""
        ahead = [entry for entry in entries if entry.position < position and meets(request, entry.access)]
        return cls._first(ahead)

    @classmethod
    def inside(cls, entries: list[Entry], position: int) -> Behind | None:
        """For a reader that becomes the writer: who else is inside."""
        return cls._first([entry for entry in entries if entry.position != position and entry.granted_at is not None])

    @classmethod
    def _first(cls, entries: list[Entry]) -> Behind | None:
        if not entries:
            return None
        entry = entries[0]
        return cls(
            position=entry.position,
            state=entry.state,
            seconds=entry.seconds,
            requesting_id=entry.requesting_id,
            owner=entry.owner,
            host=entry.host,
            pid=entry.pid,
            program=entry.program,
            note=entry.note,
            others=len(entries) - 1,
        )

    def __str__(self) -> str:
        who = self.requesting_id if self.host is None else f"{self.host}:{self.pid}"
        program = f" ({self.program})" if self.program else ""
        more = f" and {self.others} more" if self.others else ""
        return f"{who}{program}, which {self.state} for {self.seconds:.1f} s{more}"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to one request of this process; of several had at once (``all_of``), to each."""

    #: What `sqlsem.on` calls it.
    name: ClassVar[str] = ""
    #: The logger's line, and at what level.
    template: ClassVar[str] = ""
    level: ClassVar[int] = logging.INFO

    resource: str
    position: int | None  # None: it had no number yet
    access: str  # 'write', 'read', 'stage:…'; 'upgrade': a reader becomes the writer
    limit: int | None
    weight: int
    note: str | None
    database: str  # without a password
    caller: str  # the thread or the task: ``MainThread#1``

    @property
    def words(self) -> tuple[object, ...]:
        """What goes into the line."""
        return (self.described,)

    @property
    def described(self) -> str:
        """The request in a few words, as ``limit 3 on 'etl'``."""
        if self.access == "upgrade":
            return f"upgrade on {self.resource!r}"
        return Request(self.resource, self.access, self.limit, self.weight).describe()

    @property
    def log_level(self) -> int:
        """At which the logger tells it."""
        return self.level

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values, ``event`` being its name; with nothing unprintable in it."""
        found: dict[str, Any] = _cleaned({"event": self.name, **dataclasses.asdict(self)})
        return found


@dataclass(frozen=True, slots=True)
class Waiting(Event):
    """It begins to wait."""

    name: ClassVar[str] = "waiting"
    template: ClassVar[str] = "Waiting for %r at %d%s"

    behind: Behind | None  # None: nobody is known (somebody who has just left, a pause, a cap)

    @property
    def words(self) -> tuple[object, ...]:
        """What goes into the line."""
        return self.resource, self.position, "" if self.behind is None else f", behind {self.behind}"


@dataclass(frozen=True, slots=True)
class Granted(Event):
    """It was let in. (At once: the logger tells that at DEBUG.)"""

    name: ClassVar[str] = "granted"
    template: ClassVar[str] = "Granted %s at %d, after %.1f s"

    waited: float  # seconds
    at_once: bool  # nobody was in the way
    behind: Behind | None = None  # as it was told when the wait began

    @property
    def words(self) -> tuple[object, ...]:
        """What goes into the line."""
        return self.described, self.position, self.waited

    @property
    def log_level(self) -> int:
        """At which the logger tells it."""
        return logging.DEBUG if self.at_once else logging.INFO


@dataclass(frozen=True, slots=True)
class Released(Event):
    """It was given back."""

    name: ClassVar[str] = "released"
    template: ClassVar[str] = "Released %r at %d, held for %.1f s"
    level: ClassVar[int] = logging.DEBUG

    held: float  # seconds

    @property
    def words(self) -> tuple[object, ...]:
        """What goes into the line."""
        return self.resource, self.position, self.held


@dataclass(frozen=True, slots=True)
class Lost(Event):
    """It is ours no more, and was not given back: others may be inside."""

    name: ClassVar[str] = "lost"
    template: ClassVar[str] = "Lost the lock on %r at %d: %s"
    level: ClassVar[int] = logging.ERROR

    held: float | None  # seconds; None: its place was lost while it waited
    why: str

    @property
    def words(self) -> tuple[object, ...]:
        """What goes into the line."""
        return self.resource, self.position, self.why

    @property
    def log_level(self) -> int:
        """At which the logger tells it. (Of a place in the queue the one who waits is told by an error.)"""
        return logging.INFO if self.held is None else logging.ERROR


@dataclass(frozen=True, slots=True)
class Deadlocked(Event):
    """It was given up, as it would have waited for ever; who asked is told by `sqlsem.Deadlock`."""

    name: ClassVar[str] = "deadlock"
    template: ClassVar[str] = "Gave up %s: %s"

    waited: float  # seconds
    why: str

    @property
    def words(self) -> tuple[object, ...]:
        """What goes into the line."""
        return self.described, self.why


@dataclass(frozen=True, slots=True)
class TimedOut(Event):
    """It was not had in time, and is in the queue no more."""

    name: ClassVar[str] = "timeout"
    template: ClassVar[str] = "Not had within %g s: %s"

    waited: float  # seconds
    timeout: float  # seconds; 0: it was only wanted if it was free
    behind: Behind | None = None  # as it was told when the wait began

    @property
    def words(self) -> tuple[object, ...]:
        """What goes into the line."""
        return self.timeout, self.described


#: All of them, by the names that `sqlsem.on` takes.
EVENTS: dict[str, type[Event]] = {one.name: one for one in (Waiting, Granted, Released, Lost, Deadlocked, TimedOut)}


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    return {name: _cleaned(one) for name, one in value.items()} if isinstance(value, dict) else value
