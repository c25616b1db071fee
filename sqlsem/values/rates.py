"""The values of rates: windows, requests, answers, and entries for displays. No I/O."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlsem.util.record import AsDict, record
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import (
    MAX_NAME,
    MAX_SECONDS,
    Duration,
    Request,
    check_count,
    check_duration,
    check_name,
)
from sqlsem.values.names import RATE_PREFIX

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

#: The maximum number of windows of a rate.
MAX_WINDOWS = 10
#: The maximum number of windows of one rate that all programs together may declare.
MAX_KNOWN_WINDOWS = 40
#: The number of slots of a window. The use in a slot counts until the whole slot is out of the window.
PARTS = 100
#: Waiters of one process form a batch, with one row in the queue. A batch takes at most the use of this time at once.
BATCH_MS = 50
#: The longest wait for a reserved slot. A request that must wait longer waits in the queue.
AHEAD_MS = 500


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A window of a rate: the cost may be at most ``limit`` in any ``ms`` milliseconds."""

    ms: int
    limit: int

    @property
    def slot_ms(self) -> int:
        """The length of the window's slots in ms."""
        return -(-self.ms // PARTS)

    def __str__(self) -> str:
        return f"{self.limit}/{_words(self.ms)}"


def _words(ms: int) -> str:
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


def windows_of(limit: object, per: object) -> tuple[Window, ...]:
    """Return the windows of ``rate(name, limit, per=…)``; ``limit`` may map windows to limits. Without both arguments
    there is no window. Raises `ConfigurationError`.

    >>> [str(window) for window in windows_of({"1s": 10, "1m": 100}, None)]
    ['10/1s', '100/1m']
    """
    if isinstance(limit, Mapping):
        if per is not None:
            raise ConfigurationError("A rate takes either a limit and per=…, or windows with their limits")
        pairs = list(limit.items())
    elif limit is None and per is None:
        return ()  # the operator's limits count
    elif per is None:
        raise ConfigurationError("A rate needs the time in which its limit may be used: rate('api', 100, per='1m')")
    else:
        pairs = [(per, limit)]
    if not 1 <= len(pairs) <= MAX_WINDOWS:
        raise ConfigurationError(f"A rate has from 1 to {MAX_WINDOWS} windows, not {len(pairs)}")
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


@record
class RateRequest:
    """A request for a cost of one rate.

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
                code="rate",
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
            check_count(f"The burst of rate {self.name!r}", self.burst, maximum=lowest)
            if self.cost > self.burst:
                raise ConfigurationError(
                    f"A cost of {self.cost} can never fit into the burst of {self.burst} of rate {self.name!r}",
                    resource=self.resource,
                )
        self.queue_request()  # refuses an invalid note at once

    @property
    def resource(self) -> str:
        """The resource in whose queue requests for this rate wait."""
        return RATE_PREFIX + self.name

    @property
    def batch(self) -> int:
        """The greatest cost that a process takes at once for a batch of its waiters: the use of `BATCH_MS`."""
        at_once = min((window.limit * BATCH_MS // window.ms for window in self.windows), default=0)
        return at_once if self.burst is None else min(at_once, self.burst)

    def queue_request(self) -> Request:
        """Return the request of a waiter in the rate's queue: a mutex, because waiters take one after the other."""
        return Request(self.resource, note=self.note)

    def describe(self) -> str:
        """Return a description for messages."""
        if not self.windows:
            return f"rate on {self.name!r}"
        return f"rate {' and '.join(map(str, self.windows))} on {self.name!r}"


@record
class RateDemand:
    """The demand of one waiter of a batch: its cost, and the longest time (ms) until a reserved slot that it accepts
    instead of a wait in the queue.
    """

    cost: int
    ahead_ms: int = 0


class RateStatus(enum.Enum):
    """The result of taking from a rate."""

    TAKEN = 0
    TOO_EARLY = 1
    OTHERS_FIRST = -1  # other requests wait, or the rate is paused
    GONE = -2  # the row in the queue was removed


@record
class RateAnswer:
    """A database's answer to `take_rate`. ``seconds``: if it is too early, the shortest wait; else the time until the
    reserved slot of the first demand. ``times``: the reserved slots of the served demands, in ms by the database's
    clock, for `adjust_rate`.
    """

    status: RateStatus
    seconds: float = 0.0
    times: tuple[int, ...] = ()

    @property
    def taken_ms(self) -> int:
        """The reserved slot of the first demand."""
        return self.times[0]

    def due_in(self, number: int) -> float:
        """Return the seconds until the reserved slot of demand ``number``."""
        return self.seconds + (self.times[number] - self.times[0]) / 1000

    @classmethod
    def of_row(cls, code: int, wait_ms: int | None, times: Sequence[int]) -> RateAnswer:
        """Return the answer from the row of routine `take_rate`."""
        return cls(RateStatus(code), (wait_ms or 0) / 1000, tuple(times))


@record
class RateEntry(AsDict):
    """One window of a rate, for displays.

    Attributes:
        name: The name of the rate.
        window: Its length in seconds.
        limit: The limit in force: the lowest of the operator's limit and those of the programs that use the rate.
        used: The use that counts now, as a sum of costs.
        idle: Seconds since the last use.
        taken: The sum of all use since the window is known, including upward adjustments. It is deleted with the
            window, a day after the last use.
        returned: The sum of downward adjustments.
        waits: The number of requests that had to wait.
        free_in: Seconds until there is room for a cost of 1, also in the bucket of a burst; 0 if there is room now.
            (Waiting requests come first.)
        cap: The operator's limit for windows of this length, or None.
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
        """The resource in whose queue requests wait, as `Admin.entries` names it."""
        return RATE_PREFIX + self.name

    @classmethod
    def of_row(cls, resource: str, window_ms: int, *numbers: Any) -> RateEntry:
        """Return the entry from a row of routine `rates`."""
        limit, used, idle, taken, returned, waits, free_in, *cap = numbers
        name = str(resource).removeprefix(RATE_PREFIX)
        return cls(name, window_ms / 1000, limit, used, float(idle), taken, returned, waits, float(free_in), *cap)


#: The windows of a rate, as programs write them: durations and their limits.
Windows = Mapping[Duration, int]
