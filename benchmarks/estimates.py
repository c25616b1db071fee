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
from sqlsem.values.locks import Entry, Request
from sqlsem.values.tasks import TaskEntry

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
    history_: list[Done] = []
    moment = 0.0
    while len(history_) < REQUESTS:
        burst = [make(chance, len(history_) + number) for number in range(chance.randint(3, 14))]
        for request, lasts in burst:
            history_.append(Done(len(history_) + 1, request, moment, lasts))
            moment += chance.expovariate(1 / 5)
        room = max(1, (burst[0][0].limit or 1) / burst[0][0].weight)
        moment += sum(lasts for _, lasts in burst) / room * chance.uniform(0.3, 1.2)
    holders: list[Done] = []
    coming = iter(history_)
    following = next(coming, None)
    while holders or following is not None:
        ends = min((holder.ended for holder in holders), default=float("inf"))
        if following is not None and following.asked <= ends:
            now = following.asked
            holders.append(following)
            following = next(coming, None)
        else:
            now = ends
            holders = [holder for holder in holders if holder.ended > now]
        for place, holder in enumerate(holders):
            if holder.granted is None and holder.request.fits([other.request for other in holders[:place]], None):
                holder.granted = now
    return history_


def seen(done: list[Done], now: float) -> Overview:
    """Return the overview at a moment."""
    entries = [
        Entry(
            "r", stay.position, "waits" if stay.granted is None or stay.granted > now else "holds",
            stay.request.access, stay.request.limit, stay.request.weight, "x", stay.position, "t", "h", 1, "p",
            stay.request.note, BEGIN, None,
            now - (stay.asked if stay.granted is None or stay.granted > now else stay.granted), None, 5.0,
        )
        for stay in done
        if stay.asked <= now < stay.ended
    ]  # fmt: skip
    entries = [replace(entry, granted_at=BEGIN) if entry.state == "holds" else entry for entry in entries]
    ended = sorted((stay for stay in done if stay.ended <= now), key=lambda stay: -stay.ended)[:200]
    holds = tuple(Hold(stay.lasts, (stay.granted or 0.0) - stay.asked, stay.request.note, "p") for stay in ended)
    taken_at = BEGIN + timedelta(seconds=now)
    return Overview(taken_at, [], entries, [], [], [], {"r": HoldTimes(holds)} if holds else {})


def _samples(done: list[Done], moments: int, chance: random.Random) -> Iterator[Found]:
    """Return the results at a number of moments, of one waiter each."""
    waited = [stay for stay in done[FIRST:] if stay.granted is not None and stay.granted - stay.asked > 1]
    for choice in chance.choices(waited, k=moments):
        assert choice.granted is not None
        now = chance.uniform(choice.asked, choice.granted)
        snapshot = seen(done, now)
        estimated = estimate(snapshot, (choice.position,)).get(choice.position)
        if estimated is not None:
            place = sum(other.state == "waits" and other.position <= choice.position for other in snapshot.entries)
            truth = choice.granted - now
            yield place, estimated.low <= truth <= estimated.high, estimated.high - estimated.low, truth


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
        for order in sorted({job.order for job in burst}):
            members = [job for job in burst if job.order == order]
            for member in members:
                member.worker = min(range(workers), key=free.__getitem__)
                member.started = max(free[member.worker], opens)
                free[member.worker] = member.ended
            opens = max(opens, *(member.ended for member in members))
        jobs += burst
        moment = max(job.ended for job in burst) + chance.uniform(600, 3600)
    return jobs


def listed(jobs: list[Job], now: float) -> list[TaskEntry]:
    """Return the tasks visible at a moment: the open ones, and the last ended ones."""

    def at(seconds: float) -> datetime:
        return BEGIN + timedelta(seconds=seconds)

    def entry(job: Job) -> TaskEntry:
        started, ended = job.started <= now, job.ended <= now
        return TaskEntry(
            job.number, "q", job.order, "shell", job.body, None,
            "finished" if ended else "running" if started else "pending", "stop", int(started), 0, 0, 1, at(job.put),
            at(job.put), at(job.started) if started else None, at(job.ended) if ended else None,
            job.lasts if ended else now - job.started if started else None, 1, f"q-{job.worker}", "h", 1, None, None,
        )  # fmt: skip

    known = [entry(job) for job in jobs if job.put <= now]
    done = sorted((job for job in known if job.status == "finished"), key=lambda job: str(job.ended_at))
    return [job for job in known if job.status != "finished"] + done[-MAX_ENDED:]


def _task_samples(jobs: list[Job], moments: int, chance: random.Random) -> Iterator[Found]:
    """Return the results for tasks."""
    waited = [job for job in jobs[FIRST:] if job.started - job.put > 1]
    for choice in chance.choices(waited, k=moments):
        now = chance.uniform(choice.put, choice.started)
        known = listed(jobs, now)
        estimated = task_estimates(known, BEGIN + timedelta(seconds=now)).get(choice.number)
        if estimated is not None:
            own_place = (choice.order, choice.number)
            place = sum(task.status == "pending" and (task.order, task.task_id) <= own_place for task in known)
            truth = choice.started - now
            yield place, estimated.low <= truth <= estimated.high, estimated.high - estimated.low, truth


def estimates(engine: str, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the share of ranges that contained the truth, for some kinds of histories. (The same on every engine.)"""
    moments = options["moments"] // 3
    requests = {name: partial(_of_requests, make, moments) for name, make in HISTORIES.items()}
    tasks = {name: partial(_of_tasks, make, workers, moments) for name, (workers, make) in TASKS.items()}
    return {**_judged("requests", requests), **_judged("tasks", tasks)}


def _of_requests(make: Callable[[random.Random, int], Ask], moments: int, chance: random.Random) -> Iterator[Found]:
    return _samples(history(make, chance), moments, chance)


def _of_tasks(
    make: Callable[[random.Random, int], Work], workers: int, moments: int, chance: random.Random
) -> Iterator[Found]:
    return _task_samples(worked_off(make, workers, chance), moments, chance)


def _judged(of_what: str, histories: Mapping[str, Callable[[random.Random], Iterator[Found]]]) -> dict[str, Any]:
    shown = table(
        f"sqlsem why, {of_what}: estimates that held the truth (nominal {NOMINAL:.0%}), by the place in the line",
        *("history", "all", "first", "2nd to 5th", "later", "width / wait"),
    )
    results: dict[str, Any] = {}
    for number, (name, estimated) in enumerate(histories.items()):
        chance = random.Random(number)
        samples: list[Found] = []
        for _ in range(3):
            samples += estimated(chance)
        ranges = ((1, 1), (2, 5), (6, 10**6))
        places = ([sample for sample in samples if low <= sample[0] <= high] for low, high in ranges)
        shares = [statistics.mean(held for _, held, _, _ in some) if some else None for some in (samples, *places)]
        width = statistics.median(width for _, _, width, _ in samples)
        width /= statistics.median(truth for *_, truth in samples)
        shown.add_row(name, *(judged(share, 0.7, ".0%", minimum=True) for share in shares), f"{width:.2f}")
        results[name] = {"moments": len(samples), "held": shares[0], "by_place": shares[1:], "width": width}
    console.print(shown)
    return results
