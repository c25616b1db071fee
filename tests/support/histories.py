"""Record the holders of a lock with their times, and check the recorded holds against the rule."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sqlsem
from support.patience import PATIENCE


@dataclass(frozen=True)
class Stay:
    """One hold, as its holder saw it.

    ``entered`` is read *after* the grant, ``left`` *before* the release, so an overlap of two records was a real one.
    ``left`` is None if the holder did not release.
    """

    resource: str
    position: int
    entered: float
    left: float | None
    access: str = "write"
    weight: int = 1
    limit: int | None = 1
    who: str = ""

    def conflicts(self, other: Stay) -> bool:
        return self.access == "write" or self.access != other.access


def check_history(stays: Iterable[Stay], caps: Mapping[str, int] | None = None) -> int:
    """Check guarantees G1 and G2 (docs/explanation/guarantees.md) for recorded stays; return the number of stays.

    At each grant, the conflicting stays ahead of it that have not ended must leave room for it, *granted or not*.
    That is the rule: no overlap beyond the limit, a writer alone, stages not mixed, and no request overtaken by a
    conflicting one.
    """
    queues: dict[str, list[Stay]] = defaultdict(list)
    for stay in stays:
        queues[stay.resource].append(stay)
    for resource, stays_of_resource in queues.items():
        stays_of_resource.sort(key=lambda stay: stay.position)
        numbers = [stay.position for stay in stays_of_resource]
        assert len(set(numbers)) == len(numbers), f"a position was assigned twice on {resource}: {numbers}"
        for stay in stays_of_resource:
            assert stay.left is None or stay.left >= stay.entered, stay
        for number, stay in enumerate(stays_of_resource):
            ahead = [
                other
                for other in stays_of_resource[max(0, number - 2000) : number]
                if stay.conflicts(other) and (other.left is None or other.left > stay.entered)
            ]
            limits = [other.limit for other in [*ahead, stay] if other.limit is not None]
            if caps and resource in caps:
                limits.append(caps[resource])
            load = sum(other.weight for other in ahead) + stay.weight
            if limits and ahead and load > min(limits):
                raise AssertionError(
                    f"{stay} entered though {load} > {min(limits)} with the stays ahead of it:\n"
                    + "\n".join(map(repr, ahead))
                )
    return sum(map(len, queues.values()))


def overlap(stays: Sequence[Stay]) -> int:
    """Return the largest number of stays at the same time."""
    marks = sorted(
        [(stay.entered, 1) for stay in stays] + [(stay.left, -1) for stay in stays if stay.left is not None],
    )
    maximum = now = 0
    for _, change in marks:
        now += change
        maximum = max(maximum, now)
    return maximum


class Recorder:
    """Collects stays from many threads."""

    def __init__(self) -> None:
        self.stays: list[Stay] = []
        self._guard = threading.Lock()

    def add(self, stay: Stay) -> None:
        with self._guard:
            self.stays.append(stay)

    @contextlib.contextmanager
    def stay(self, lock: sqlsem.Lock, timeout: float | None = PATIENCE) -> Iterator[sqlsem.Grant]:
        """Hold ``lock``, and record the stay."""
        assert lock.acquire(timeout=timeout), f"{lock} was not granted within {timeout} s"
        grant = lock.grant
        entered = time.monotonic()
        try:
            yield grant
        finally:
            left_at = time.monotonic()
            lock.release()
            with self._guard:
                for request in grant.state.requests:
                    self.stays.append(
                        Stay(
                            request.resource,
                            grant.positions[request.resource],
                            entered,
                            left_at,
                            request.access,
                            request.weight,
                            request.limit,
                            threading.current_thread().name,
                        )
                    )
