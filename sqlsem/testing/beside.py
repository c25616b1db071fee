"""Run one search in several processes in parallel."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from sqlsem.errors import ConfigurationError

__all__ = ["Part", "search_beside"]

#: The result of a part: the numbers of schedules and steps, and the seed of the schedule that failed, if any did.
Part = tuple[int, int, int | None]


def search_beside(search: Callable[[Sequence[int]], Part], seeds: range, jobs: int) -> Part:
    """Search with these seeds in ``jobs`` processes, until all are done or one has failed. Raises `ConfigurationError`
    where the system cannot fork: a program need not be picklable.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigurationError("jobs= needs fork(), which this system has not; start several searches by hand")
    context = multiprocessing.get_context("fork")
    children = {}
    for job in range(min(jobs, len(seeds))):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_search, args=(search, seeds[job::jobs], theirs), daemon=True)
        child.start()
        theirs.close()
        children[ours] = child
    done = steps = 0
    failed: int | None = None
    left = list(children)
    try:
        while left and failed is None:
            for ours in [connection for connection in left if connection in wait(left)]:
                left.remove(ours)
                try:
                    part = ours.recv()
                except EOFError:
                    raise RuntimeError("A process that searched has ended without a word; see its output") from None
                done, steps, failed = done + part[0], steps + part[1], part[2] if failed is None else failed
    finally:
        for ours, child in children.items():
            if ours in left:
                child.terminate()
            child.join()
            ours.close()
    return done, steps, failed


def _search(search: Callable[[Sequence[int]], Part], seeds: Sequence[int], answer: Connection) -> None:
    answer.send(search(seeds))
    answer.close()
