"""How a night goes: what is done in it, for how long one is inside, how often something happens to the crowd."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Of a night.

    Attributes:
        kinds: The jobs; None: all that the engine has. One that stands there twice is done by twice as many threads.
        stay: For how long one is inside, at most, seconds.
        resources: So many of each kind: what a dead one keeps for its grace leaves others.
        pause: Seconds between two faults, at least and at most.
    """

    kinds: tuple[str, ...] | None = None
    stay: float = 0.004
    resources: int = 16
    pause: tuple[float, float] = (0.2, 2.0)


#: Everything, and something happens all the time.
USUAL = Pace()
#: For many grants: jobs that wait for nothing but locks, little time inside, and time to work between two faults.
DENSE = Pace(
    kinds=(
        *("mutex", "mutex", "limit", "table", "several", "tasks_of_a_loop"),
        *("work", "shared", "travel", "departure", "rush", "bare", "routine"),
    ),
    stay=0.0005,
    resources=32,
    pause=(2.0, 8.0),
)
