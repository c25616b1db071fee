"""Run one search in several processes in parallel."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from sqlsem.values.errors import ConfigurationError

__all__ = ["Part", "search_beside"]

#: The result of a part: the numbers of schedules and steps, and the seed of the schedule that failed, if any did.
Part = tuple[int, int, int | None]


def search_beside(search: Callable[[Sequence[int]], Part], seeds: range, jobs: int) -> Part:
    """Search with these seeds in ``jobs`` processes, until all seeds are done or a schedule has failed. The processes
    are forked, as a program may not be picklable; raises `ConfigurationError` if the system cannot fork.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigurationError("jobs= needs fork(), which this system lacks; start several searches by hand")
    context = multiprocessing.get_context("fork")
    children = {}
    for job in range(min(jobs, len(seeds))):
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_search, args=(search, seeds[job::jobs], sender), daemon=True)
        child.start()
        sender.close()
        children[receiver] = child
    done = steps = 0
    failed: int | None = None
    running = list(children)
    try:
        while running and failed is None:
            for receiver in [connection for connection in running if connection in wait(running)]:
                running.remove(receiver)
                try:
                    part = receiver.recv()
                except EOFError:
                    raise RuntimeError("A process of the search ended without a result; see its output") from None
                done, steps, failed = done + part[0], steps + part[1], part[2] if failed is None else failed
    finally:
        for receiver, child in children.items():
            if receiver in running:
                child.terminate()
            child.join()
            receiver.close()
    return done, steps, failed


def _search(search: Callable[[Sequence[int]], Part], seeds: Sequence[int], sender: Connection) -> None:
    sender.send(search(seeds))
    sender.close()
