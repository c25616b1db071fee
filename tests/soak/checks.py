"""Check the records of a crowd. Each check returns its findings as words.

The times are those of one host's monotonic clock. A process that was stopped (SIGSTOP) cannot know what became of its
locks meanwhile: if it reports itself that one was lost, its stay counts up to the stop. (Fences protect the moment of
its waking, and are checked here.)
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from support.histories import Stay, check_history

Words = dict[str, Any]
#: Seconds after its waking in which a process may not know yet what it has lost. The library checks its clock each
#: second.
WAKING_SECONDS = 2.0
#: Seconds in which the kernel ends a process that was killed.
ENDING_SECONDS = 2.0


@dataclass
class Happened:
    """The faults of a night.

    Attributes:
        sleeps: Process, from when to when it was stopped.
        killed: When a process was killed.
        cuts: When sessions were ended, or hidden from the server.
    """

    sleeps: list[tuple[int, float, float]] = field(default_factory=list)
    killed: dict[int, float] = field(default_factory=dict)
    cuts: list[float] = field(default_factory=list)

    def settled(self, stays: Iterable[Words]) -> list[Words]:
        """Return the effective stays: a lock lost during a sleep ended at its beginning; a lock lost before its stay
        has none.
        """
        stays_left = []
        for stay in stays:
            left_at = stay["left"]
            if stay["lost"]:
                asleep = [
                    since
                    for pid, since, until in self.sleeps
                    if pid == stay["pid"] and since <= left_at and until + WAKING_SECONDS >= stay["entered"]
                ]
                left_at = min([left_at, *asleep])
            if left_at > stay["entered"] or not stay["lost"]:
                stays_left.append({**stay, "left": left_at})
        return stays_left

    def told_of(self, pids: set[int]) -> str:
        """Describe the faults of these processes, for the reader of a finding."""
        sleeps = [sleep for sleep in self.sleeps if sleep[0] in pids]
        return f"stopped: {sleeps}, killed: { {pid: at for pid, at in self.killed.items() if pid in pids} }"

    def slept(self, pids: set[int] | None, at: float) -> bool:
        """Return True if one of these processes (None: any) was asleep then, or had just woken."""
        return any(
            (pids is None or pid in pids) and since <= at <= until + WAKING_SECONDS for pid, since, until in self.sleeps
        )


def _of(words: Sequence[Words], *kinds: str) -> list[Words]:
    return [word for word in words if word["what"] in kinds]


def told(words: Sequence[Words], happened: Happened) -> list[str]:
    """Return the findings of the processes themselves."""
    return [f"told by {event['pid']}: {event['words']}" for event in _of(words, "wrong")]


def holders_of(refused: Words, words: Sequence[Words]) -> set[int]:
    """Return the processes that held the refused lock: by the kernel's list or, if they released it before that was
    read, by the recorded stays.
    """
    return set(refused["holders"]) or {
        stay["pid"]
        for stay in _of(words, "stay")
        if stay["resource"] == refused["resource"]
        and stay["entered"] <= refused["at"]
        and stay["left"] >= refused["tried"]
    }


def kernel_lock_refusals(words: Sequence[Words], happened: Happened) -> list[str]:
    """Return the refusals at kernel locks, except for three reasons: the other holder slept and does not know yet that
    it lost its lock; it has been notified and waits for the database before it can leave; or it was killed right then:
    the kernel may close its connection before it removes its lock on the file.
    """
    findings = []
    # By process and resource: when it was notified. By position: when it had left. (A refusal is recorded later than it
    # happens.)
    notices: dict[tuple[int, str], list[Words]] = defaultdict(list)
    released = {event["position"]: event["at"] for event in _of(words, "releasing")}
    for event in _of(words, "told"):
        notices[event["pid"], event["resource"]].append(event)

    def is_leaving(pid: int, refused: Words) -> bool:
        return any(
            event["at"] <= refused["at"] and released.get(event["position"], float("inf")) >= refused["tried"]
            for event in notices[pid, refused["resource"]]
        )

    for event in _of(words, "refused"):
        if event["holders"] and all(is_leaving(pid, event) for pid in event["holders"]):
            continue
        ending = {pid for pid, at in happened.killed.items() if event["tried"] - ENDING_SECONDS <= at <= event["at"]}
        # (A killed process leaves no record of its stay.)
        if ending and holders_of(event, words) - {event["pid"]} <= ending:
            continue
        suspects = {event["pid"], *event["holders"]} if event["holders"] else None
        # A bare session is not notified when it is ended: it finds out by its next statement.
        cut = "-sql-" in event["resource"] and any(at <= event["at"] <= at + WAKING_SECONDS for at in happened.cuts)
        if not cut and not happened.slept(suspects, event["at"]):
            findings.append(f"flock: {event['pid']} found {event['holders'] or 'somebody'} inside {event['resource']}")
    return findings


def stays(words: Sequence[Words], happened: Happened) -> list[str]:
    """Check that no stays overlap beyond the limit, none is overtaken, and no position comes twice."""
    every = [
        Stay(
            stay["resource"],
            stay["position"],
            stay["entered"],
            stay["left"],
            stay["access"],
            limit=stay["limit"],
            who=str(stay["pid"]),
        )
        for stay in happened.settled(_of(words, "stay"))
    ]
    try:
        check_history(every)
    except AssertionError as exc:
        return [f"history: {exc}"]
    return []


def travels(words: Sequence[Words], happened: Happened) -> list[str]:
    """Check a chain of hand-overs: the same fence, one owner at any moment, no other holder in between."""
    findings = []
    chains: dict[tuple[str, int], list[Words]] = defaultdict(list)
    for hop in happened.settled(_of(words, "hop")):
        chains[hop["resource"], hop["position"]].append(hop)
    whole = []
    for (resource, position), hops in chains.items():
        hops.sort(key=lambda hop: hop["entered"])
        for hop, after in itertools.pairwise(hops):
            if after["entered"] < hop["left"]:
                findings.append(f"{resource} at {position} had two owners: {hop} and {after}")
            if after["fence"] != hop["fence"]:
                findings.append(f"{resource} at {position} changed its fence on its way: {hop} and {after}")
            if after["hop"] <= hop["hop"]:
                findings.append(f"{resource} at {position} was adopted twice by one token: {hop} and {after}")
        whole.append({**hops[0], "what": "stay", "left": max(hop["left"] for hop in hops), "lost": False})
    return findings + stays(whole, replace(happened, sleeps=[]))


def leaders(words: Sequence[Words], happened: Happened) -> list[str]:
    """Check that callbacks come once for each term, no two terms overlap, and a later term has a larger fence."""
    findings = []
    terms: dict[tuple[str, int], dict[str, list[Words]]] = defaultdict(lambda: defaultdict(list))
    for event in _of(words, "started", "stopped"):
        terms[event["resource"], event["fence"]][event["what"]].append(event)
    spans: dict[str, list[tuple[float, float, int, int]]] = defaultdict(list)
    for (resource, fence), of in terms.items():
        started, stopped = of["started"], of["stopped"]
        if len(started) != 1 or len(stopped) > 1:
            findings.append(f"the term {fence} of {resource} began {len(started)} times and ended {len(stopped)} times")
            continue
        pid, end = started[0]["pid"], float("inf")
        if stopped:
            term = happened.settled([{**stopped[0], "entered": started[0]["at"], "left": stopped[0]["at"]}])
            if not term:  # lost before it began
                continue
            end = term[0]["left"]
        elif pid in happened.killed:
            # The term of a process that was stopped when it was killed may have ended since.
            asleep = [since for who, since, until in happened.sleeps if who == pid and until >= happened.killed[pid]]
            end = min([happened.killed[pid], *asleep])
        else:
            findings.append(f"the term {fence} of {resource} never ended, and {pid} was not killed")
        spans[resource].append((started[0]["at"], end, fence, pid))
    for resource, several in spans.items():
        several.sort()
        for event, after in itertools.pairwise(several):
            if after[0] < event[1]:
                events = [word for fence in (event[2], after[2]) for word in terms[resource, fence].values()]
                findings.append(f"two led {resource} at a time: {events}; {happened.told_of({event[3], after[3]})}")
            if after[2] <= event[2]:
                findings.append(f"the fences of {resource} went back: {event} and {after}")
    return findings


def departures(words: Sequence[Words], happened: Happened, done: set[int], released: set[int]) -> list[str]:
    """Check locks that go with a transaction: a row ended as a release exactly if its transaction committed.

    ``done``: positions that transactions have recorded, as the database has them; ``released``: positions whose row
    ended as a release, by the database's history.
    """
    findings = []
    ends: dict[int, dict[str, Words]] = defaultdict(dict)
    for event in _of(words, "leaving", "committed", "rolled back", "releasing"):
        ends[event["position"]][event["what"]] = event
    for position, words_of in ends.items():
        if "committed" in words_of and position not in done:
            findings.append(f"what {position} committed is not there")
        if "rolled back" in words_of and position in done:
            findings.append(f"what {position} rolled back is there")
        if position in released and position not in done and "releasing" not in words_of:
            findings.append(f"the lock at {position} went, though its transaction did not commit")
    return findings


def writes(rows: Sequence[tuple[int, str, int, int]], happened: Happened) -> list[str]:
    """Check rows that only the lock's holder may write: (number, resource, fence, process), in the order of writing.

    Fences never decrease, and each belongs to one process.
    """
    findings = []
    last: dict[str, tuple[int, str, int, int]] = {}
    for row in sorted(rows):
        before = last.get(row[1])
        if before is not None and row[2] < before[2]:
            findings.append(f"a zombie wrote {row} after {before}")
        if before is not None and row[2] == before[2] and row[3] != before[3]:
            findings.append(f"two wrote under one fence: {before} and {row}")
        last[row[1]] = row
    return findings


def rates(words: Sequence[Words], happened: Happened, limit: int, window: float) -> list[str]:
    """Check that no window has more than the limit. Counts what was certainly taken within it."""
    takes = sorted((take["entered"], take["left"]) for take in _of(words, "take"))
    for since, _ in takes:
        sure = sum(since <= first and last <= since + window for first, last in takes)
        if sure > limit:
            return [f"{sure} were taken within {window} s of a rate of {limit}"]
    return []


def attempts(words: Sequence[Words], happened: Happened) -> list[str]:
    """Check that a task is run by one worker at a time, and that no attempt comes twice."""
    findings = []
    tasks: dict[int, list[Words]] = defaultdict(list)
    for attempt in happened.settled(_of(words, "attempt")):
        tasks[attempt["task"]].append(attempt)
    for number, several in tasks.items():
        several.sort(key=lambda attempt: attempt["entered"])
        for attempt, after in itertools.pairwise(several):
            if after["entered"] < attempt["left"] or after["attempt"] <= attempt["attempt"]:
                findings.append(f"task {number} was in two hands: {attempt} and {after}")
    return findings


#: The checks that need only the book.
CHECKS: tuple[Callable[[Sequence[Words], Happened], list[str]], ...] = (
    told,
    kernel_lock_refusals,
    stays,
    travels,
    leaders,
    attempts,
)
