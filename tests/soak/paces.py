"""The paces of a night: its jobs, how long they hold, and how often a fault happens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """The pace of a night.

    Attributes:
        kinds: The jobs; None: all that the engine has. A job that is listed twice is done by twice as many threads.
        stay: The longest hold, seconds.
        resources: So many of each kind: while a dead process keeps some for its grace, others are free.
        pause: Seconds between two faults, at least and at most.
    """

    kinds: tuple[str, ...] | None = None
    stay: float = 0.004
    resources: int = 16
    pause: tuple[float, float] = (0.2, 2.0)


#: All jobs, with a fault at any time.
USUAL = Pace()
#: For many grants: jobs that wait for locks only, short holds, and time to work between two faults.
DENSE = Pace(
    kinds=(
        *("mutex", "mutex", "limit", "table", "several", "tasks_of_a_loop"),
        *("work", "shared", "travel", "departure", "rush", "bare", "routine"),
    ),
    stay=0.0005,
    resources=32,
    pause=(2.0, 8.0),
)
