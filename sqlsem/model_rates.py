"""The values of rates: so much in so long."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlsem.errors import ConfigurationError
from sqlsem.model import (
    MAX_NAME,
    MAX_SECONDS,
    Duration,
    Request,
    check_count,
    check_duration,
    check_name,
)
from sqlsem.names import RATE_PREFIX

__all__ = [
    "AHEAD_MS",
    "RateAnswer",
    "RateDemand",
    "RateEntry",
    "RateRequest",
    "RateStatus",
    "Window",
    "windows_of",
]

#: So many windows a rate may have.
MOST_WINDOWS = 10
#: So many windows of one rate are known at a time, of all programs.
MOST_KNOWN_WINDOWS = 40
#: A window is kept in so many parts (slots); a part counts until all of it is out of the window.
PARTS = 100
#: Those of a process that wait together, with one row in the line, want no more than may be used in so long.
BATCH_MS = 50
#: Who would have to wait for no longer than that does not stand in the line, where the engine can promise it its share.
AHEAD_MS = 500


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """At most ``limit`` in any ``ms`` milliseconds."""

    ms: int
    limit: int

    @property
    def slot_ms(self) -> int:
        """The length of its slots."""
        return -(-self.ms // PARTS)

    def __str__(self) -> str:
        return f"{self.limit}/{_words(self.ms)}"


def _words(ms: int) -> str:
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


def windows_of(limit: object, per: object) -> tuple[Window, ...]:
    """What ``rate(name, limit, per=…)`` means; ``limit`` may be a mapping of windows to limits, and no window where
    neither is given. Raises `ConfigurationError`.

    >>> [str(window) for window in windows_of({"1s": 10, "1m": 100}, None)]
    ['10/1s', '100/1m']
    """
    if isinstance(limit, Mapping):
        if per is not None:
            raise ConfigurationError("A rate takes either a limit and per=…, or windows with their limits")
        pairs = list(limit.items())
    elif limit is None and per is None:
        return ()  # an operator's limits
    elif per is None:
        raise ConfigurationError("A rate needs the time in which so much may be used: rate('api', 100, per='1m')")
    else:
        pairs = [(per, limit)]
    if not 1 <= len(pairs) <= MOST_WINDOWS:
        raise ConfigurationError(f"A rate has from 1 to {MOST_WINDOWS} windows, not {len(pairs)}")
    windows = [
        Window(math.ceil(check_duration("The window of a rate", length, zero=False) * 1000), number)
        for length, number in pairs
    ]
    if len({window.ms for window in windows}) < len(windows):
        raise ConfigurationError("A rate names one window twice; give each its own length")
    for window in windows:
        check_count("The limit of a rate", window.limit)
        if window.ms > MAX_SECONDS * 1000:
            raise ConfigurationError(f"The window of a rate must be at most {MAX_SECONDS} seconds long")
    return tuple(sorted(windows))


@dataclass(frozen=True, slots=True)
class RateRequest:
    """What is asked of one rate.

    >>> RateRequest("api", windows_of(100, "1m"), cost=7).describe()
    "rate 100/1m on 'api'"
    """

    name: str
    windows: tuple[Window, ...]
    cost: int = 1
    burst: int | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        check_name("The name of a rate", self.name, MAX_NAME - len(RATE_PREFIX))
        check_count(f"The cost asked of rate {self.name!r}", self.cost)
        lowest = min((window.limit for window in self.windows), default=None)
        if lowest is not None and self.cost > lowest:
            raise ConfigurationError(
                f"A cost of {self.cost} can never fit into the rate {self.name!r}, which allows {lowest} at once; "
                f"lower the cost or raise the limit",
                resource=self.resource,
            )
        if self.burst is not None:
            if lowest is None:
                raise ConfigurationError(
                    f"A burst goes with a limit and a window, and rate {self.name!r} leaves these to an operator"
                )
            if len(self.windows) > 1:
                raise ConfigurationError(
                    f"A burst goes with one window, and rate {self.name!r} has {len(self.windows)}; leave it out, or "
                    f"name a shorter window with the limit of the burst"
                )
            check_count(f"The burst of rate {self.name!r}", self.burst, most=lowest)
            if self.cost > self.burst:
                raise ConfigurationError(
                    f"A cost of {self.cost} can never fit into the burst of {self.burst} of rate {self.name!r}",
                    resource=self.resource,
                )
        self.queue_request()  # what cannot be a note is told at once

    @property
    def resource(self) -> str:
        """Where those who wait for it wait."""
        return RATE_PREFIX + self.name

    @property
    def batch(self) -> int:
        """How much a process takes at once for those of it that wait together: what may be used in `BATCH_MS`."""
        at_once = min((window.limit * BATCH_MS // window.ms for window in self.windows), default=0)
        return at_once if self.burst is None else min(at_once, self.burst)

    def queue_request(self) -> Request:
        """The request of one who waits: a mutex, as one after the other takes."""
        return Request(self.resource, note=self.note)

    def describe(self) -> str:
        """A few words for messages."""
        if not self.windows:
            return f"rate on {self.name!r}"
        return f"rate {' and '.join(map(str, self.windows))} on {self.name!r}"


@dataclass(frozen=True, slots=True)
class RateDemand:
    """What one wants that asks together with others: so much, and for how many ms it would rather sleep than wait in
    the line.
    """

    cost: int
    ahead_ms: int = 0


class RateStatus(enum.Enum):
    """What has come of taking from a rate."""

    TAKEN = 0
    TOO_EARLY = 1
    OTHERS_FIRST = -1  # others wait, or it is paused
    GONE = -2  # the row in the queue is not there any more


@dataclass(frozen=True, slots=True)
class RateAnswer:
    """What a database says. ``seconds``: to wait at the least, where it is too early; else until the moment for which
    it was taken, which is promised and may lie ahead. ``times``: that moment, in ms by the database's clock, for each
    of those that want it together and have it: what `adjust_rate` wants to know.
    """

    status: RateStatus
    seconds: float = 0.0
    times: tuple[int, ...] = ()

    @property
    def taken_ms(self) -> int:
        """For when it was taken, by whoever was first."""
        return self.times[0]

    def due_in(self, number: int) -> float:
        """In how many seconds the moment comes for which that one has it."""
        return self.seconds + (self.times[number] - self.times[0]) / 1000

    @classmethod
    def of_row(cls, code: int, wait_ms: int | None, times: Sequence[int]) -> RateAnswer:
        """As the routine `take_rate` says it."""
        return cls(RateStatus(code), (wait_ms or 0) / 1000, tuple(times))


@dataclass(frozen=True, slots=True)
class RateEntry:
    """One window of a rate as people see it.

    Attributes:
        name: The rate's.
        window: Its length, in seconds.
        limit: How much may be used in it: the lowest limit that counts, of programs that use it and of an operator.
        used: How much counts just now.
        idle: Seconds since it was last used.
        taken: How much was ever taken while this window was known, also by adjusting more. It is forgotten with the
            window, a day after that was last used.
        returned: How much of that was given back, by adjusting less.
        waits: How often it was not there at once.
        free_in: Seconds until there is room in it for 1 more, also in the bucket of a burst; 0 where there is now.
            Requests that wait have that first.
        cap: The limit that an operator has set for windows of this length, or None.
    """

    name: str
    window: float
    limit: int
    used: int
    idle: float
    taken: int = 0
    returned: int = 0
    waits: int = 0
    free_in: float = 0.0
    cap: int | None = None

    @property
    def resource(self) -> str:
        """The resource in whose queue those stand who have to wait, as `Admin.entries` names it."""
        return RATE_PREFIX + self.name

    @classmethod
    def of_row(
        cls,
        resource: str,
        window_ms: int,
        limit: int,
        used: int,
        idle: float,
        taken: int,
        returned: int,
        waits: int,
        free_in: float,
        cap: int | None = None,
    ) -> RateEntry:
        """As the routine `rates` says it."""
        name = str(resource).removeprefix(RATE_PREFIX)
        return cls(name, window_ms / 1000, limit, used, float(idle), taken, returned, waits, float(free_in), cap)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-ready values."""
        return asdict(self)


#: A window, as programs write it: durations and limits.
Windows = Mapping[Duration, int]
