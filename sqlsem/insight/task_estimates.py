"""When a task will be started, as a range: from the history of such tasks, and who works on the queue now.

The queue is played forward many times, as in `sqlsem.insight.estimates`: whoever works on it ends what it runs, which
lasts as long as one of the history that was longer than this has been running, and then takes the first task that may
be started. (`python -m benchmarks estimates` measures how often the truth lies in the range.)
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby, zip_longest

from sqlsem.insight.estimates import LEAST_HOLDS, LEAST_OF_KIND, Durations, Estimate, plays_of, without_numbers
from sqlsem.model import TaskEntry

__all__ = ["MOST_ENDED", "MOST_OPEN", "task_estimates"]

#: Tasks of each queue that have ended, which is looked at; and open ones that are played.
MOST_ENDED, MOST_OPEN = 1000, 1000
#: Whoever ended a task so few seconds ago may be at rest, if no task could have been started for so long.
RESTS_SECONDS, IDLE_SECONDS = 60.0, 5.0
#: So much of a body tells its kind, characters.
TELLING = 1000

Worker = tuple[str | None, int | None, str | None]


def kinds_of(task: TaskEntry) -> Iterator[tuple[str, str]]:
    """What tasks of one kind have in common, the closest first: the note, with and without its numbers; what is done,
    with and without; its first two words, or the first, which are a function, a program, a statement.
    """
    if task.note:
        yield "note", task.note
        yield "note", without_numbers(task.note)
    body = task.body[:TELLING]
    yield task.kind, body
    body = without_numbers(body)
    yield task.kind, body
    words = body.split(maxsplit=2)[:2]
    yield f"{task.kind} begins", " ".join(words)
    yield f"{task.kind} begins", " ".join(words[:1])


def _worker(task: TaskEntry) -> Worker:
    return task.host, task.pid, task.owner


class Ended:
    """What the tasks of one queue that have ended tell."""

    def __init__(self, ended: Iterable[TaskEntry]) -> None:
        #: When each of those who worked last ended a task.
        self.active: dict[Worker, datetime] = {}
        by_worker: dict[Worker, list[tuple[datetime, datetime, TaskEntry]]] = {}
        for task in ended:
            if task.claimed_at is not None and task.ended_at is not None:
                by_worker.setdefault(_worker(task), []).append((task.ended_at, task.claimed_at, task))
        lasted: list[tuple[datetime, float, TaskEntry]] = []
        for worker, some in by_worker.items():
            some.sort(key=lambda one: (one[0], one[2].task_id))
            self.active[worker] = some[-1][0]
            # Short tasks are claimed and ended in groups, and have the times of these.
            group: list[tuple[datetime, datetime, TaskEntry]] = []
            for one, following in zip_longest(some, some[1:]):
                group.append(one)
                if following is None or following[1] >= one[0]:
                    each = max(0.0, (one[0] - min(claimed for _, claimed, _ in group)).total_seconds()) / len(group)
                    lasted += [(at, each, task) for at, _, task in group]
                    group = []
        lasted.sort(key=lambda one: (one[0], one[2].task_id))
        lasted.reverse()  # the newest first
        self.count = len(lasted)
        by_kind: dict[tuple[str, str], list[float]] = {}
        for _, seconds, task in lasted:
            for kind in set(kinds_of(task)):
                by_kind.setdefault(kind, []).append(seconds)
        self._kinds = {kind: Durations(some) for kind, some in by_kind.items() if len(some) >= LEAST_OF_KIND}
        self._all = Durations([seconds for _, seconds, _ in lasted]) if self.count >= LEAST_HOLDS else None

    def of(self, task: TaskEntry) -> Durations | None:
        """How long such tasks take, of the closest kind of which enough are known; None where too little is."""
        return next((self._kinds[kind] for kind in kinds_of(task) if kind in self._kinds), self._all)


def task_estimates(tasks: Iterable[TaskEntry], taken_at: datetime) -> dict[int, Estimate]:
    """When the pending ones of these tasks will be started, by number.

    Args:
        tasks: The first open ones of a queue or several, at least up to those that are asked for, and those that have
            ended last. Where fewer than five have ended, nobody works on a queue, or a failed task holds it up, nothing
            is told.
        taken_at: When they were looked at, by the database's clock.
    """
    found: dict[int, Estimate] = {}
    for _, of_queue in groupby(sorted(tasks, key=lambda task: task.queue), key=lambda task: task.queue):
        known = list(of_queue)
        history = Ended(one for one in known if one.status in ("finished", "failed"))
        opened = sorted(
            (one for one in known if one.status in ("pending", "running", "lost") or _holds_up(one)),
            key=lambda one: (one.order, -one.priority, one.task_id),
        )
        found.update(WorkQueue(opened[:MOST_OPEN], history, taken_at).play())
    return found


def _holds_up(task: TaskEntry) -> bool:
    return task.status == "failed" and task.on_failure == "stop"


class WorkQueue:
    """The open tasks of a queue, and who works on them."""

    def __init__(self, opened: Sequence[TaskEntry], history: Ended, taken_at: datetime) -> None:
        self._history = history
        self._orders = _up_to_a_failure(opened)
        self._due = {
            one.task_id: (one.ready_at - taken_at).total_seconds() if one.status == "pending" else 0.0
            for order in self._orders
            for one in order
        }
        #: What each worker runs, in the order in which it does.
        self._running: dict[Worker, list[TaskEntry]] = {}
        for one in opened:
            if one.status == "running":
                self._running.setdefault(_worker(one), []).append(one)
        self._resting = sum(
            worker not in self._running and (taken_at - ended).total_seconds() <= RESTS_SECONDS
            for worker, ended in history.active.items()
        )
        first = next((order for order in self._orders if order), [])
        if any(one.status == "pending" and self._due[one.task_id] < -IDLE_SECONDS for one in first):
            self._resting = 0  # they would have taken it

    def play(self) -> dict[int, Estimate]:
        """When each pending task is started."""
        rows = [one for order in self._orders for one in order]
        rows += [one for some in self._running.values() for one in some if one.task_id not in self._due]
        durations = {row.task_id: self._history.of(row) for row in rows}
        pending = [row for row in rows if row.status == "pending"]
        if not pending or not (self._running or self._resting) or None in durations.values():
            return {}
        number_of = plays_of(len(rows))
        chance = random.Random(len(rows))  # the same each time: what is shown should not jump about
        shares = [(place + 0.5) / number_of for place in range(number_of)]
        lasting: dict[int, list[float]] = {}
        already = self._already()
        luck = [chance.gauss(0.0, 1.0) for _ in range(number_of)]
        for one in rows:
            chance.shuffle(shares)
            its = durations[one.task_id]
            assert its is not None
            since = already.get(one.task_id)
            lasting[one.task_id] = (
                [its.at(share) * math.exp(how * its.doubt) for share, how in zip(shares, luck, strict=True)]
                if since is None
                else [its.at(share, since) for share in shares]
            )
        started: dict[int, list[float]] = {one.task_id: [] for one in pending}
        for number in range(number_of):
            for task_id, moment in self.once({task_id: some[number] for task_id, some in lasting.items()}):
                if task_id in started:
                    started[task_id].append(moment)
        found = {}
        for one in pending:
            its = durations[one.task_id]
            assert its is not None
            found[one.task_id] = Estimate.of(sorted(started[one.task_id]), its.held, self._history.count)
        return found

    def _already(self) -> dict[int, float]:
        """For how long those have been running that are, in seconds; the others of a worker wait for its first."""
        found = {}
        for worker, (first, *_) in self._running.items():
            seconds = first.seconds or 0.0
            ended = self._history.active.get(worker)
            if ended is not None and first.claimed_at is not None:
                seconds -= max(0.0, (ended - first.claimed_at).total_seconds())
            found[first.task_id] = max(0.0, seconds)
        return found

    def once(self, lasting: dict[int, float]) -> Iterator[tuple[int, float]]:
        """One play: when each task is started that is not running."""
        ends: dict[int, float] = {}
        free = [0.0] * self._resting
        for some in self._running.values():
            until = 0.0
            for one in some:
                until += lasting[one.task_id]
                ends[one.task_id] = until
            free.append(until)
        heapq.heapify(free)
        opens = 0.0  # when the tasks of an order may be started: those of the orders before it have ended
        for order in self._orders:
            rank = {one.task_id: number for number, one in enumerate(order)}
            to_come = sorted(
                (self._due[one.task_id], rank[one.task_id], one.task_id) for one in order if one.status != "running"
            )
            to_come.reverse()
            ready: list[tuple[int, int]] = []  # rank and number
            moment = opens
            while to_come or ready:
                moment = max(moment, free[0])
                if not ready:
                    moment = max(moment, to_come[-1][0])
                while to_come and to_come[-1][0] <= moment:
                    heapq.heappush(ready, to_come.pop()[1:])
                _, task_id = heapq.heappop(ready)
                ends[task_id] = moment + lasting[task_id]
                heapq.heapreplace(free, ends[task_id])
                yield task_id, moment
            opens = max([opens, *(ends[one.task_id] for one in order)])


def _up_to_a_failure(opened: Iterable[TaskEntry]) -> list[list[TaskEntry]]:
    """The tasks by their orders, but for those of orders behind a failed task."""
    found: list[list[TaskEntry]] = []
    for _, members in groupby(opened, key=lambda one: one.order):
        order = list(members)
        found.append([one for one in order if one.status != "failed"])
        if len(found[-1]) < len(order):
            break
    return found
