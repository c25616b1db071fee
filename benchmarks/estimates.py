"""Measure how often the truth lies in the range that `sqlsem why` estimates, for requests and tasks. Histories are
replayed; at many moments of each, the estimate from the data of that moment is compared with what followed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from benchmarks.printed import console, judged, table
from sqlsem.insight.estimates import estimates as estimate
from sqlsem.insight.overview import Hold, HoldTimes, Overview
from sqlsem.insight.task_estimates import MAX_ENDED, task_estimates
from sqlsem.model import Entry, Request, TaskEntry

__all__ = ["estimates"]

#: The share of ranges that should contain the truth.
NOMINAL = 0.8
#: Requests of each history, and the number of first ones without an estimate.
REQUESTS, FIRST = 600, 150
BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)
Ask = tuple[Request, float]
#: Of one waiter: its place, True if the truth was in the range, the width of the range, the truth.
Found = tuple[int, bool, float, float]


@dataclass(slots=True)
class Done:
    """A request of a history; seconds from its beginning."""

    position: int
    request: Request
    asked: float
    lasts: float
    granted: float | None = None

    @property
    def ended(self) -> float:
        return float("inf") if self.granted is None else self.granted + self.lasts


def _lognormal(chance: random.Random, median: float, spread: float) -> float:
    return median * chance.lognormvariate(0.0, spread)


def _steady(chance: random.Random, _: int) -> Ask:
    return Request("r"), _lognormal(chance, 60, 0.25)


def _varied(chance: random.Random, _: int) -> Ask:
    return Request("r", limit=3), _lognormal(chance, 60, 1.0)


def _exponential(chance: random.Random, _: int) -> Ask:
    return Request("r", limit=4), chance.expovariate(1 / 60)


def _kinds(chance: random.Random, number: int) -> Ask:
    kind = chance.randrange(8)
    return Request("r", note=f"{'abcdefgh'[kind]} of day {number}"), _lognormal(chance, 8 * 2**kind, 0.2)


def _nameless(chance: random.Random, number: int) -> Ask:
    request, lasts = _kinds(chance, number)
    return replace(request, note=None), lasts


def _readers(chance: random.Random, _: int) -> Ask:
    if chance.random() < 0.3:
        return Request("r"), _lognormal(chance, 90, 0.4)
    return Request("r", "read"), _lognormal(chance, 30, 0.4)


def _weights(chance: random.Random, _: int) -> Ask:
    return Request("r", limit=10, weight=chance.randint(1, 5)), _lognormal(chance, 60, 0.5)


def _drifting(chance: random.Random, number: int) -> Ask:
    return Request("r"), _lognormal(chance, 60 * 2 ** (number / REQUESTS), 0.25)


HISTORIES: dict[str, Callable[[random.Random, int], Ask]] = {
    "mutex, holds alike": _steady,
    "limit 3, holds that vary widely": _varied,
    "limit 4, exponential holds": _exponential,
    "mutex, eight kinds of jobs, with notes": _kinds,
    "the same without notes": _nameless,
    "readers and writers": _readers,
    "limit 10, weights of 1 to 5": _weights,
    "mutex, holds that double meanwhile": _drifting,
}


def history(make: Callable[[random.Random, int], Ask], chance: random.Random) -> list[Done]:
    """Return requests that come in bursts, as jobs of a night do, and are granted by the rule."""
    asked: list[Done] = []
    moment = 0.0
    while len(asked) < REQUESTS:
        burst = [make(chance, len(asked) + number) for number in range(chance.randint(3, 14))]
        for request, lasts in burst:
            asked.append(Done(len(asked) + 1, request, moment, lasts))
            moment += chance.expovariate(1 / 5)
        room = max(1, (burst[0][0].limit or 1) / burst[0][0].weight)
        moment += sum(lasts for _, lasts in burst) / room * chance.uniform(0.3, 1.2)
    there: list[Done] = []
    coming = iter(asked)
    following = next(coming, None)
    while there or following is not None:
        ends = min((one.ended for one in there), default=float("inf"))
        if following is not None and following.asked <= ends:
            now = following.asked
            there.append(following)
            following = next(coming, None)
        else:
            now = ends
            there = [one for one in there if one.ended > now]
        for place, one in enumerate(there):
            if one.granted is None and one.request.fits([other.request for other in there[:place]], None):
                one.granted = now
    return asked


def seen(done: list[Done], now: float) -> Overview:
    """Return the overview at a moment."""
    entries = [
        Entry(
            "r", one.position, "waits" if one.granted is None or one.granted > now else "holds", one.request.access,
            one.request.limit, one.request.weight, "x", one.position, "t", "h", 1, "p", one.request.note, BEGIN, None,
            now - (one.asked if one.granted is None or one.granted > now else one.granted), None, 5.0,
        )
        for one in done
        if one.asked <= now < one.ended
    ]  # fmt: skip
    entries = [replace(entry, granted_at=BEGIN) if entry.state == "holds" else entry for entry in entries]
    ended = sorted((one for one in done if one.ended <= now), key=lambda one: -one.ended)[:200]
    holds = tuple(Hold(one.lasts, (one.granted or 0.0) - one.asked, one.request.note, "p") for one in ended)
    taken_at = BEGIN + timedelta(seconds=now)
    return Overview(taken_at, [], entries, [], [], [], {"r": HoldTimes(holds)} if holds else {})


def _told(done: list[Done], moments: int, chance: random.Random) -> Iterator[Found]:
    """Return the results at so many moments, of one waiter each."""
    asked = [one for one in done[FIRST:] if one.granted is not None and one.granted - one.asked > 1]
    for choice in chance.choices(asked, k=moments):
        assert choice.granted is not None
        now = chance.uniform(choice.asked, choice.granted)
        found = seen(done, now)
        told = estimate(found, (choice.position,)).get(choice.position)
        if told is not None:
            place = sum(other.state == "waits" and other.position <= choice.position for other in found.entries)
            truth = choice.granted - now
            yield place, told.low <= truth <= told.high, told.high - told.low, truth


# -- tasks


@dataclass(slots=True)
class Job:
    """A task of a history; seconds from its beginning."""

    number: int
    order: int
    body: str
    put: float
    lasts: float
    worker: int = 0
    started: float = float("inf")

    @property
    def ended(self) -> float:
        return self.started + self.lasts


Work = tuple[int, str, float]


def _alike(chance: random.Random, _: int) -> Work:
    return 0, "CALL load()", _lognormal(chance, 60, 0.25)


def _exponential_tasks(chance: random.Random, _: int) -> Work:
    return 0, "CALL load()", chance.expovariate(1 / 60)


def _eight_kinds(chance: random.Random, number: int) -> Work:
    kind = chance.randrange(8)
    return 0, f"python load.py --table {'abcdefgh'[kind]} --day {number}", _lognormal(chance, 8 * 2**kind, 0.2)


def _without_kinds(chance: random.Random, number: int) -> Work:
    return 0, "CALL load()", _eight_kinds(chance, number)[2]


def _stages(chance: random.Random, _: int) -> Work:
    order = chance.choice((100, 100, 200, 300))
    return order, f"CALL stage_{order}()", _lognormal(chance, order / 2, 0.5)


TASKS: dict[str, tuple[int, Callable[[random.Random, int], Work]]] = {
    "1 worker, tasks alike": (1, _alike),
    "4 workers, tasks alike": (4, _alike),
    "4 workers, exponential": (4, _exponential_tasks),
    "4 workers, eight kinds of commands": (4, _eight_kinds),
    "the same, all called alike": (4, _without_kinds),
    "4 workers, three orders": (4, _stages),
}


def worked_off(make: Callable[[random.Random, int], Work], workers: int, chance: random.Random) -> list[Job]:
    """Return tasks that are put in bursts, as those of a night are; the next burst comes when the one before it is
    done.
    """
    jobs: list[Job] = []
    moment = 0.0
    while len(jobs) < REQUESTS:
        burst: list[Job] = []
        for _ in range(chance.randint(10, 60)):
            order, body, lasts = make(chance, len(jobs) + len(burst))
            burst.append(Job(len(jobs) + len(burst) + 1, order, body, moment, lasts))
        free = [moment] * workers
        opens = moment
        for order in sorted({one.order for one in burst}):
            members = [one for one in burst if one.order == order]
            for member in members:
                member.worker = min(range(workers), key=free.__getitem__)
                member.started = max(free[member.worker], opens)
                free[member.worker] = member.ended
            opens = max(opens, *(member.ended for member in members))
        jobs += burst
        moment = max(one.ended for one in burst) + chance.uniform(600, 3600)
    return jobs


def listed(jobs: list[Job], now: float) -> list[TaskEntry]:
    """Return the tasks visible at a moment: the open ones, and the last ended ones."""

    def at(seconds: float) -> datetime:
        return BEGIN + timedelta(seconds=seconds)

    def entry(one: Job) -> TaskEntry:
        started, ended = one.started <= now, one.ended <= now
        return TaskEntry(
            one.number, "q", one.order, "shell", one.body, None,
            "finished" if ended else "running" if started else "pending", "stop", int(started), 0, 0, 1, at(one.put),
            at(one.put), at(one.started) if started else None, at(one.ended) if ended else None,
            one.lasts if ended else now - one.started if started else None, 1, f"q-{one.worker}", "h", 1, None, None,
        )  # fmt: skip

    seen = [entry(job) for job in jobs if job.put <= now]
    done = sorted((one for one in seen if one.status == "finished"), key=lambda one: str(one.ended_at))
    return [one for one in seen if one.status != "finished"] + done[-MAX_ENDED:]


def _told_of_tasks(jobs: list[Job], moments: int, chance: random.Random) -> Iterator[Found]:
    """Return the results for tasks."""
    asked = [job for job in jobs[FIRST:] if job.started - job.put > 1]
    for choice in chance.choices(asked, k=moments):
        now = chance.uniform(choice.put, choice.started)
        known = listed(jobs, now)
        told = task_estimates(known, BEGIN + timedelta(seconds=now)).get(choice.number)
        if told is not None:
            mine = (choice.order, choice.number)
            place = sum(task.status == "pending" and (task.order, task.task_id) <= mine for task in known)
            truth = choice.started - now
            yield place, told.low <= truth <= told.high, told.high - told.low, truth


def estimates(engine: str, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the share of ranges that contained the truth, for some kinds of histories. (The same on every engine.)"""
    moments = options["moments"] // 3
    requests = {name: partial(_of_requests, make, moments) for name, make in HISTORIES.items()}
    tasks = {name: partial(_of_tasks, make, workers, moments) for name, (workers, make) in TASKS.items()}
    return {**_judged("requests", requests), **_judged("tasks", tasks)}


def _of_requests(make: Callable[[random.Random, int], Ask], moments: int, chance: random.Random) -> Iterator[Found]:
    return _told(history(make, chance), moments, chance)


def _of_tasks(
    make: Callable[[random.Random, int], Work], workers: int, moments: int, chance: random.Random
) -> Iterator[Found]:
    return _told_of_tasks(worked_off(make, workers, chance), moments, chance)


def _judged(of_what: str, histories: Mapping[str, Callable[[random.Random], Iterator[Found]]]) -> dict[str, Any]:
    shown = table(
        f"sqlsem why, {of_what}: estimates that held the truth (nominal {NOMINAL:.0%}), by the place in the line",
        *("history", "all", "first", "2nd to 5th", "later", "width / wait"),
    )
    results: dict[str, Any] = {}
    for number, (name, told) in enumerate(histories.items()):
        chance = random.Random(number)
        found: list[Found] = []
        for _ in range(3):
            found += told(chance)
        places = ([one for one in found if low <= one[0] <= high] for low, high in ((1, 1), (2, 5), (6, 10**6)))
        shares = [statistics.mean(held for _, held, _, _ in some) if some else None for some in (found, *places)]
        width = statistics.median(width for _, _, width, _ in found) / statistics.median(truth for *_, truth in found)
        shown.add_row(name, *(judged(share, 0.7, ".0%", least=True) for share in shares), f"{width:.2f}")
        results[name] = {"moments": len(found), "held": shares[0], "by_place": shares[1:], "width": width}
    console.print(shown)
    return results
