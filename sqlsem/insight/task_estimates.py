"""Estimate when a task will be started, as a range, from the history of such tasks and the workers of the queue.

The queue is simulated many times, as in `sqlsem.insight.estimates`. A running task lasts as long as one of the ended
tasks that lasted longer than it has run already. Then its worker starts the first task that may be started. (`python -m
benchmarks estimates` measures how often the truth is in the range.)
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import groupby, zip_longest

from sqlsem.insight.estimates import MIN_HOLDS, MIN_OF_KIND, Durations, Estimate, run_count, without_numbers
from sqlsem.values.tasks import TaskEntry

__all__ = ["MAX_ENDED", "MAX_OPEN", "task_estimates"]

#: For each queue: how many ended tasks are read, and how many open tasks are simulated, at most.
MAX_ENDED, MAX_OPEN = 1000, 1000
#: A worker without a task counts as idle if it ended one less than RESTS_SECONDS ago. But there is no idle worker if a
#: task has been due for IDLE_SECONDS.
RESTS_SECONDS, IDLE_SECONDS = 60.0, 5.0
#: The kind of a task is taken from this many characters of its body.
KIND_CHARACTERS = 1000

Worker = tuple[str | None, int | None, str | None]


def kinds_of(task: TaskEntry) -> Iterator[tuple[str, str]]:
    """Yield the kinds of a task, the narrowest first: the note; the note without its numbers; the body; the body
    without its numbers; the first two words of the body; its first word (a function, a program or a statement).
    """
    if task.note:
        yield "note", task.note
        yield "note", without_numbers(task.note)
    body = task.body[:KIND_CHARACTERS]
    yield task.kind, body
    body = without_numbers(body)
    yield task.kind, body
    words = body.split(maxsplit=2)[:2]
    yield f"{task.kind} begins", " ".join(words)
    yield f"{task.kind} begins", " ".join(words[:1])


def _worker(task: TaskEntry) -> Worker:
    return task.host, task.pid, task.owner


class TaskHistory:
    """The durations of the ended tasks of one queue, and its recent workers."""

    def __init__(self, ended: Iterable[TaskEntry]) -> None:
        #: When each recent worker last ended a task.
        self.active: dict[Worker, datetime] = {}
        by_worker: dict[Worker, list[tuple[datetime, datetime, TaskEntry]]] = {}
        for task in ended:
            if task.claimed_at is not None and task.ended_at is not None:
                by_worker.setdefault(_worker(task), []).append((task.ended_at, task.claimed_at, task))
        durations: list[tuple[datetime, float, TaskEntry]] = []
        for worker, tasks in by_worker.items():
            tasks.sort(key=lambda item: (item[0], item[2].task_id))
            self.active[worker] = tasks[-1][0]
            # Short tasks are claimed and ended in groups: each has the times of its group, so they share its duration.
            group: list[tuple[datetime, datetime, TaskEntry]] = []
            for item, following in zip_longest(tasks, tasks[1:]):
                group.append(item)
                if following is None or following[1] >= item[0]:
                    seconds_each = max(0.0, (item[0] - min(claimed for _, claimed, _ in group)).total_seconds()) / len(
                        group
                    )
                    durations += [(at, seconds_each, task) for at, _, task in group]
                    group = []
        durations.sort(key=lambda item: (item[0], item[2].task_id))
        durations.reverse()  # newest first
        self.count = len(durations)
        by_kind: dict[tuple[str, str], list[float]] = {}
        for _, seconds, task in durations:
            for kind in set(kinds_of(task)):
                by_kind.setdefault(kind, []).append(seconds)
        self._kinds = {kind: Durations(tasks) for kind, tasks in by_kind.items() if len(tasks) >= MIN_OF_KIND}
        self._all = Durations([seconds for _, seconds, _ in durations]) if self.count >= MIN_HOLDS else None

    def of(self, task: TaskEntry) -> Durations | None:
        """Return the durations for a task: of its narrowest kind with enough tasks; None if too few tasks are known."""
        return next((self._kinds[kind] for kind in kinds_of(task) if kind in self._kinds), self._all)


def task_estimates(tasks: Iterable[TaskEntry], taken_at: datetime) -> dict[int, Estimate]:
    """Estimate when the pending tasks will be started, by task number.

    Args:
        tasks: The first open tasks of one queue or several, at least up to those to estimate, and the last ended ones.
            There is no estimate for a queue if fewer than five tasks have ended, if no worker is active, or if a failed
            task blocks it.
        taken_at: When they were read, by the database's clock.
    """
    results: dict[int, Estimate] = {}
    for _, of_queue in groupby(sorted(tasks, key=lambda task: task.queue), key=lambda task: task.queue):
        queue_tasks = list(of_queue)
        history = TaskHistory(task for task in queue_tasks if task.status in ("finished", "failed"))
        opened = sorted(
            (task for task in queue_tasks if task.status in ("pending", "running", "lost") or _holds_up(task)),
            key=lambda task: (task.order, -task.priority, task.task_id),
        )
        results.update(WorkQueue(opened[:MAX_OPEN], history, taken_at).estimates())
    return results


def _holds_up(task: TaskEntry) -> bool:
    return task.status == "failed" and task.on_failure == "stop"


class WorkQueue:
    """The open tasks of a queue, and its workers."""

    def __init__(self, opened: Sequence[TaskEntry], history: TaskHistory, taken_at: datetime) -> None:
        self._history = history
        self._orders = _up_to_a_failure(opened)
        self._due = {
            task.task_id: (task.ready_at - taken_at).total_seconds() if task.status == "pending" else 0.0
            for order in self._orders
            for task in order
        }
        #: The tasks that each worker runs, in order.
        self._running: dict[Worker, list[TaskEntry]] = {}
        for task in opened:
            if task.status == "running":
                self._running.setdefault(_worker(task), []).append(task)
        self._resting = sum(
            worker not in self._running and (taken_at - ended).total_seconds() <= RESTS_SECONDS
            for worker, ended in history.active.items()
        )
        first = next((order for order in self._orders if order), [])
        if any(task.status == "pending" and self._due[task.task_id] < -IDLE_SECONDS for task in first):
            self._resting = 0  # an idle worker would have taken that task

    def estimates(self) -> dict[int, Estimate]:
        """Return an estimate for each pending task."""
        rows = [task for order in self._orders for task in order]
        rows += [task for tasks in self._running.values() for task in tasks if task.task_id not in self._due]
        durations = {row.task_id: known for row in rows if (known := self._history.of(row)) is not None}
        pending = [row for row in rows if row.status == "pending"]
        if not pending or not (self._running or self._resting) or any(row.task_id not in durations for row in rows):
            return {}
        runs = run_count(len(rows))
        rng = random.Random(len(rows))  # the same each time, so that the display does not jump
        shares = [(index + 0.5) / runs for index in range(runs)]
        durations_of: dict[int, list[float]] = {}
        already = self._already()
        deviation = [rng.gauss(0.0, 1.0) for _ in range(runs)]
        for task in rows:
            rng.shuffle(shares)
            known = durations[task.task_id]
            since = already.get(task.task_id)
            durations_of[task.task_id] = (
                [
                    known.at(share) * math.exp(factor * known.standard_error)
                    for share, factor in zip(shares, deviation, strict=True)
                ]
                if since is None
                else [known.at(share, since) for share in shares]
            )
        started: dict[int, list[float]] = {task.task_id: [] for task in pending}
        for number in range(runs):
            for task_id, moment in self.simulate({task_id: tasks[number] for task_id, tasks in durations_of.items()}):
                if task_id in started:
                    started[task_id].append(moment)
        return {
            task.task_id: Estimate.of(sorted(started[task.task_id]), durations[task.task_id].held, self._history.count)
            for task in pending
        }

    def _already(self) -> dict[int, float]:
        """Return how long each worker's first task has run, in seconds. (Its other tasks begin after that one.)"""
        seconds_by_task = {}
        for worker, (first, *_) in self._running.items():
            seconds = first.seconds or 0.0
            ended = self._history.active.get(worker)
            if ended is not None and first.claimed_at is not None:
                seconds -= max(0.0, (ended - first.claimed_at).total_seconds())
            seconds_by_task[first.task_id] = max(0.0, seconds)
        return seconds_by_task

    def simulate(self, durations_of: dict[int, float]) -> Iterator[tuple[int, float]]:
        """Run one simulation: yield each task that is not running, and the time of its start."""
        ends: dict[int, float] = {}
        free = [0.0] * self._resting
        for tasks in self._running.values():
            until = 0.0
            for task in tasks:
                until += durations_of[task.task_id]
                ends[task.task_id] = until
            free.append(until)
        heapq.heapify(free)
        open_at = 0.0  # when the tasks of an order may be started: all earlier orders have ended
        for order in self._orders:
            rank = {task.task_id: number for number, task in enumerate(order)}
            upcoming = sorted(
                (self._due[task.task_id], rank[task.task_id], task.task_id)
                for task in order
                if task.status != "running"
            )
            upcoming.reverse()
            ready: list[tuple[int, int]] = []  # rank and task number
            moment = open_at
            while upcoming or ready:
                moment = max(moment, free[0])
                if not ready:
                    moment = max(moment, upcoming[-1][0])
                while upcoming and upcoming[-1][0] <= moment:
                    heapq.heappush(ready, upcoming.pop()[1:])
                _, task_id = heapq.heappop(ready)
                ends[task_id] = moment + durations_of[task_id]
                heapq.heapreplace(free, ends[task_id])
                yield task_id, moment
            open_at = max([open_at, *(ends[task.task_id] for task in order)])


def _up_to_a_failure(opened: Iterable[TaskEntry]) -> list[list[TaskEntry]]:
    """Return the tasks of each order, up to the first order with a failed task."""
    orders: list[list[TaskEntry]] = []
    for _, members in groupby(opened, key=lambda task: task.order):
        order = list(members)
        orders.append([task for task in order if task.status != "failed"])
        if len(orders[-1]) < len(order):
            break
    return orders
