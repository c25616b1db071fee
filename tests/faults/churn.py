"""Processes that lock and work until they are told to stop, and their journal."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import Channel, Child, Stay, check_history, until
from support.journals import Journal, records

import sqlsem

LIMIT = 3


# -- in the child ---------------------------------------------------------------------------------------------------


def churn(
    channel: Channel, url: str, options: dict[str, Any], name: str, journal: str, seed: int, jobs: list[str]
) -> None:
    """Run a thread for each of ``jobs``: 'mutex', 'limit', or 'work', which runs the tasks of that queue."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(threadName)s %(levelname)s %(message)s")
    rng, book = random.Random(seed), Journal(journal)
    coordinator = sqlsem.connect(url, **options)
    ending = threading.Event()

    def lock(kind: str) -> None:
        resource = f"{name}-{kind}"
        churn_lock = coordinator.mutex(resource) if kind == "mutex" else coordinator.limit(resource, LIMIT)
        with churn_lock as grant:
            entered = time.monotonic()
            grant.lost_event.wait(rng.uniform(0, 0.03))
            left_at = time.monotonic()  # the time of its release, or the time when its loss was known
            book.note(kind=kind, position=grant.position, entered=entered, left=left_at, lost=grant.lost_event.is_set())

    def work() -> None:
        task = coordinator.queue(name).try_claim()
        if task is None:
            ending.wait(0.05)
            return
        with task:
            entered = time.monotonic()
            task.lost_event.wait(rng.uniform(0, 0.05))
            left_at = time.monotonic()
            book.note(kind="work", task=task.id, attempt=task.attempt, entered=entered, left=left_at)

    def go_on(job: str) -> None:
        while not ending.is_set():
            try:
                work() if job == "work" else lock(job)
            except (sqlsem.LockLost, sqlsem.Unavailable) as exc:
                channel.tell("trouble", error=f"{type(exc).__name__}: {exc}")
            except BaseException as exc:
                channel.tell("failed", error=f"{type(exc).__name__}: {exc}")
                return

    threads = [
        threading.Thread(target=go_on, args=(job,), name=f"{job}-{n}", daemon=True) for n, job in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    channel.tell("ready")
    channel.ask()
    ending.set()
    for thread in threads:
        thread.join()
    coordinator.close()


# -- in the test ----------------------------------------------------------------------------------------------------


class Crowd:
    """Processes that run `churn` beside a test."""

    def __init__(self, spawn: Callable[..., Child], journal: Path, **arguments: Any) -> None:
        self.journal = journal
        self._spawn, self._arguments, self._seeds = spawn, arguments, iter(range(10**6))
        self.children: list[Child] = []
        self.trouble: list[str] = []

    def add(self, jobs: list[str], **options: Any) -> None:
        self.children.append(
            self._spawn(
                churn,
                jobs=jobs,
                journal=str(self.journal),
                seed=next(self._seeds),
                options=options,
                **self._arguments,
            )
        )

    def ready(self) -> None:
        for child in self.children:
            child.expect("ready")

    def words(self) -> list[dict[str, Any]]:
        return records(self.journal)

    def counts(self, since: float = 0.0) -> dict[str, int]:
        """Return the number of entries of each kind since then."""
        counts: dict[str, int] = defaultdict(int)
        for words in self.words():
            counts[words["kind"]] += words["entered"] > since
        return counts

    def until_busy(self, queue: sqlsem.Queue, since: float, description: str) -> int:
        """Wait until every kind made progress since then, and return the number of tasks that were put for that.

        Earlier tasks may all have ended by then, so new ones are put: something is always left to do.
        """
        put = 0

        def busy() -> bool:
            nonlocal put
            if not queue.state().pending:
                put += len(queue.put_many(range(20)))
            counts = self.counts(since)
            return all(counts[kind] >= 5 for kind in ("mutex", "limit", "work"))

        until(busy, description)
        return put

    def end(self) -> None:
        """Let all processes finish their current work, and end."""
        for child in self.children:
            child.send(end=True)
        for child in self.children:
            for event in child.rest():
                assert event["event"] in ("trouble", "end"), (event, child.errors())
                if event["event"] == "trouble":
                    self.trouble.append(event["error"])

    def stays(self, name: str, *, lost: bool = True) -> list[Stay]:
        """Read the stays from the journal; with ``lost``, also stays that ended with a known loss."""
        limits = {"mutex": 1, "limit": LIMIT}
        return [
            Stay(
                f"{name}-{words['kind']}",
                words["position"],
                words["entered"],
                words["left"],
                limit=limits[words["kind"]],
                who=str(words["pid"]),
            )
            for words in self.words()
            if words["kind"] != "work" and (lost or not words["lost"])
        ]

    def check(self, name: str, *, forgetful: bool = False) -> None:
        """Check that no stays overlap, no request is overtaken, no number comes twice, no task runs twice at a time.

        ``forgetful``: the server may forget a grant, and its holder learns of the loss; it may forget a claim, and the
        attempt is repeated under its number.
        """
        check_history(self.stays(name, lost=not forgetful))
        tasks: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
        for words in self.words():
            if words["kind"] == "work":
                tasks[words["task"]].append((words["entered"], words["left"], words["attempt"]))
        for number, attempts in tasks.items():
            attempts.sort()
            for earlier, next_ in itertools.pairwise(attempts):
                assert earlier[1] <= next_[0], f"task {number} was in two hands: {attempts}"
                assert earlier[2] < next_[2] or forgetful, f"an attempt at task {number} came twice: {attempts}"
