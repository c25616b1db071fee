"""Looks through what a crowd wrote down, and says what cannot have been. Each check gives its findings as words.

The times are those of one host's monotonic clock. A process that was stopped (SIGSTOP) cannot know what became of its
locks meanwhile: when it says itself that one was lost, its stay counts up to the instant at which it was stopped.
(What it does in the moment of its waking is what fences are for, and is checked there.)
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from support.histories import Stay, check_history

Words = dict[str, Any]
#: For so long after its waking a process may not know yet what it has lost. The library looks each second at its clock.
WAKING_SECONDS = 2.0


@dataclass
class Happened:
    """What was done to the crowd.

    Attributes:
        sleeps: Process, from when to when it was stopped.
        killed: When a process was killed.
        cuts: When sessions were ended, or hidden from the server.
    """

    sleeps: list[tuple[int, float, float]] = field(default_factory=list)
    killed: dict[int, float] = field(default_factory=dict)
    cuts: list[float] = field(default_factory=list)

    def settled(self, stays: Iterable[Words]) -> list[Words]:
        """Stays as they count: what was lost in a sleep ended there; what was lost before it was entered is none."""
        found = []
        for stay in stays:
            left = stay["left"]
            if stay["lost"]:
                asleep = [
                    since
                    for pid, since, until in self.sleeps
                    if pid == stay["pid"] and since <= left and until + WAKING_SECONDS >= stay["entered"]
                ]
                left = min([left, *asleep])
            if left > stay["entered"] or not stay["lost"]:
                found.append({**stay, "left": left})
        return found

    def told_of(self, pids: set[int]) -> str:
        """What was done to these, to find out why."""
        sleeps = [sleep for sleep in self.sleeps if sleep[0] in pids]
        return f"stopped: {sleeps}, killed: { {pid: at for pid, at in self.killed.items() if pid in pids} }"

    def slept(self, pids: set[int] | None, at: float) -> bool:
        """Whether one of these (None: anybody) was asleep then, or has just woken."""
        return any(
            (pids is None or pid in pids) and since <= at <= until + WAKING_SECONDS for pid, since, until in self.sleeps
        )


def _of(words: Sequence[Words], *kinds: str) -> list[Words]:
    return [word for word in words if word["what"] in kinds]


def told(words: Sequence[Words], happened: Happened) -> list[str]:
    """What the processes found out themselves."""
    return [f"told by {one['pid']}: {one['words']}" for one in _of(words, "wrong")]


def doors(words: Sequence[Words], happened: Happened) -> list[str]:
    """The kernel's judgement: nobody is refused at a door, but by one who slept and does not know yet, or who was told
    before that it has lost its lock, and waits for the database before it can leave.
    """
    found = []
    # By process and resource: when it was told. By position: when it had left. (Who is refused writes that down later
    # than it happens.)
    told: dict[tuple[int, str], list[Words]] = defaultdict(list)
    left = {one["position"]: one["at"] for one in _of(words, "releasing")}
    for one in _of(words, "told"):
        told[one["pid"], one["resource"]].append(one)

    def is_leaving(pid: int, refused: Words) -> bool:
        return any(
            one["at"] <= refused["at"] and left.get(one["position"], float("inf")) >= refused["tried"]
            for one in told[pid, refused["resource"]]
        )

    for one in _of(words, "refused"):
        if one["holders"] and all(is_leaving(pid, one) for pid in one["holders"]):
            continue
        suspects = {one["pid"], *one["holders"]} if one["holders"] else None
        # Whoever has a session and not the library is not told when that is ended: it finds out by its next statement.
        cut = "-sql-" in one["resource"] and any(at <= one["at"] <= at + WAKING_SECONDS for at in happened.cuts)
        if not cut and not happened.slept(suspects, one["at"]):
            found.append(f"flock: {one['pid']} found {one['holders'] or 'somebody'} inside {one['resource']}")
    return found


def stays(words: Sequence[Words], happened: Happened) -> list[str]:
    """Nobody overlaps beyond the limit, nobody is overtaken, no number comes twice."""
    every = [
        Stay(
            one["resource"],
            one["position"],
            one["entered"],
            one["left"],
            one["access"],
            limit=one["limit"],
            who=str(one["pid"]),
        )
        for one in happened.settled(_of(words, "stay"))
    ]
    try:
        check_history(every)
    except AssertionError as exc:
        return [f"history: {exc}"]
    return []


def travels(words: Sequence[Words], happened: Happened) -> list[str]:
    """Along a chain of those who hand a lock over: the same fence, one owner at any moment, nobody in between."""
    found = []
    chains: dict[tuple[str, int], list[Words]] = defaultdict(list)
    for one in happened.settled(_of(words, "hop")):
        chains[one["resource"], one["position"]].append(one)
    whole = []
    for (resource, position), hops in chains.items():
        hops.sort(key=lambda hop: hop["entered"])
        for one, after in itertools.pairwise(hops):
            if after["entered"] < one["left"]:
                found.append(f"{resource} at {position} had two owners: {one} and {after}")
            if after["fence"] != one["fence"]:
                found.append(f"{resource} at {position} changed its fence on its way: {one} and {after}")
            if after["hop"] <= one["hop"]:
                found.append(f"{resource} at {position} was adopted twice by one token: {one} and {after}")
        whole.append({**hops[0], "what": "stay", "left": max(hop["left"] for hop in hops), "lost": False})
    return found + stays(whole, replace(happened, sleeps=[]))


def leaders(words: Sequence[Words], happened: Happened) -> list[str]:
    """Callbacks come once for each term; no two terms overlap; a later one's fence is larger."""
    found = []
    terms: dict[tuple[str, int], dict[str, list[Words]]] = defaultdict(lambda: defaultdict(list))
    for one in _of(words, "started", "stopped"):
        terms[one["resource"], one["fence"]][one["what"]].append(one)
    spans: dict[str, list[tuple[float, float, int, int]]] = defaultdict(list)
    for (resource, fence), of in terms.items():
        started, stopped = of["started"], of["stopped"]
        if len(started) != 1 or len(stopped) > 1:
            found.append(f"the term {fence} of {resource} began {len(started)} times and ended {len(stopped)} times")
            continue
        pid, end = started[0]["pid"], float("inf")
        if stopped:
            term = happened.settled([{**stopped[0], "entered": started[0]["at"], "left": stopped[0]["at"]}])
            if not term:  # lost before it began
                continue
            end = term[0]["left"]
        elif pid in happened.killed:
            # A term of one that was stopped when it was killed may have been over since.
            asleep = [since for who, since, until in happened.sleeps if who == pid and until >= happened.killed[pid]]
            end = min([happened.killed[pid], *asleep])
        else:
            found.append(f"the term {fence} of {resource} never ended, and {pid} was not killed")
        spans[resource].append((started[0]["at"], end, fence, pid))
    for resource, several in spans.items():
        several.sort()
        for one, after in itertools.pairwise(several):
            if after[0] < one[1]:
                what = [word for fence in (one[2], after[2]) for word in terms[resource, fence].values()]
                found.append(f"two led {resource} at a time: {what}; {happened.told_of({one[3], after[3]})}")
            if after[2] <= one[2]:
                found.append(f"the fences of {resource} went back: {one} and {after}")
    return found


def departures(words: Sequence[Words], happened: Happened, done: set[int], released: set[int]) -> list[str]:
    """Locks that go with a transaction: their row has gone as a release exactly where the transaction has committed.

    ``done``: positions that transactions have written down, as the database has them; ``released``: whose row ended as
    a release, by the database's history.
    """
    found = []
    ends: dict[int, dict[str, Words]] = defaultdict(dict)
    for one in _of(words, "leaving", "committed", "rolled back", "releasing"):
        ends[one["position"]][one["what"]] = one
    for position, how in ends.items():
        if "committed" in how and position not in done:
            found.append(f"what {position} committed is not there")
        if "rolled back" in how and position in done:
            found.append(f"what {position} rolled back is there")
        if position in released and position not in done and "releasing" not in how:
            found.append(f"the lock at {position} went, though its transaction did not commit")
    return found


def writes(rows: Sequence[tuple[int, str, int, int]], happened: Happened) -> list[str]:
    """Rows that only who holds the lock may write: (number, resource, fence, process), in the order of writing.

    Fences never go back, and each is one process's.
    """
    found = []
    last: dict[str, tuple[int, str, int, int]] = {}
    for row in sorted(rows):
        before = last.get(row[1])
        if before is not None and row[2] < before[2]:
            found.append(f"a zombie wrote {row} after {before}")
        if before is not None and row[2] == before[2] and row[3] != before[3]:
            found.append(f"two wrote under one fence: {before} and {row}")
        last[row[1]] = row
    return found


def rates(words: Sequence[Words], happened: Happened, limit: int, window: float) -> list[str]:
    """In no window more than the limit. What surely was taken within it is counted."""
    takes = sorted((one["entered"], one["left"]) for one in _of(words, "take"))
    for since, _ in takes:
        sure = sum(since <= first and last <= since + window for first, last in takes)
        if sure > limit:
            return [f"{sure} were taken within {window} s of a rate of {limit}"]
    return []


def attempts(words: Sequence[Words], happened: Happened) -> list[str]:
    """A task is in one worker's hands at a time, and no attempt comes twice."""
    found = []
    tasks: dict[int, list[Words]] = defaultdict(list)
    for one in happened.settled(_of(words, "attempt")):
        tasks[one["task"]].append(one)
    for number, several in tasks.items():
        several.sort(key=lambda one: one["entered"])
        for one, after in itertools.pairwise(several):
            if after["entered"] < one["left"] or after["attempt"] <= one["attempt"]:
                found.append(f"task {number} was in two hands: {one} and {after}")
    return found


#: What needs nothing but the book.
CHECKS: tuple[Callable[[Sequence[Words], Happened], list[str]], ...] = (
    told,
    doors,
    stays,
    travels,
    leaders,
    attempts,
)
