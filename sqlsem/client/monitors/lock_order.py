"""Detects locks that are taken in opposite orders, before two callers ever wait for each other. For debugging; no I/O.

When a holder of ``a`` requests ``b``, that order is stored with its stack. A request in the opposite order gives a
`LockOrderWarning`, and so does one that closes a longer cycle (a before b, b before c, c before a): once for each
cycle, even if no caller waits. Orders that are always taken under the same exclusive lock give no warning, because they
cannot be taken at the same time.

>>> orders = LockOrder()
>>> orders.entering("db", [("a", True)], ["b"])
>>> with warnings.catch_warnings(record=True) as caught:
...     warnings.simplefilter("always")
...     orders.entering("db", [("b", True)], ["a"])
>>> str(caught[0].message).splitlines()[0][:61]
"'a' is asked for here while 'b' is held, and elsewhere 'b' is"
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sqlsem.util.record import record
from sqlsem.values.errors import LockOrderWarning

__all__ = ["LockOrder", "configure", "current"]

#: The number of orders that are stored. There may be many names (``load:{table}``), so the oldest are dropped.
MAX_ORDERS = 10_000
#: The number of frames of each stack that are stored.
DEPTH = 30
_PACKAGE = os.path.realpath(__file__).rsplit(os.sep, 3)[0] + os.sep

#: A resource: its database and its name.
Key = tuple[str, str]


@record
class _Seen:
    """The code location at which one lock was requested while another lock was held."""

    guards: frozenset[Key]  # the exclusive locks that were also held, each time
    thread: str
    stack: traceback.StackSummary


class LockOrder:
    """The orders in which this process takes its locks. Safe to use from several threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._seen: OrderedDict[tuple[Key, Key], _Seen] = OrderedDict()
        self._after: dict[Key, dict[Key, None]] = {}
        self._reported: set[frozenset[tuple[Key, Key]]] = set()

    def entering(self, database: str, held: Sequence[tuple[str, bool]], requested: Iterable[str]) -> None:
        """Record that a caller that holds ``held`` [(name, exclusive)] is about to request ``requested``.

        Call this before the first call of the database.
        """
        if not held:
            return
        stack: traceback.StackSummary | None = None
        texts = []
        for name in requested:
            for other, _ in held:
                if other == name:
                    continue
                edge = (database, other), (database, name)
                guards = frozenset((database, lock) for lock, exclusive in held if exclusive and lock != other)
                with self._guard:
                    known = self._seen.get(edge)
                    if known is not None and known.guards <= guards:
                        continue  # nothing new; the usual case
                    stack = stack or _stack()
                    if known is not None:
                        guards &= known.guards
                    self._store(edge, _Seen(guards, threading.current_thread().name, stack))
                    cycle = self._cycle(*edge)
                    if cycle:
                        texts.append(self._describe(cycle))
        for text in texts:
            warnings.warn(LockOrderWarning(text), stacklevel=_level())

    def _store(self, edge: tuple[Key, Key], seen: _Seen) -> None:
        first, then = edge
        self._seen[edge] = seen
        self._seen.move_to_end(edge)
        self._after.setdefault(first, {})[then] = None
        if len(self._seen) > MAX_ORDERS:
            (first, then), _ = self._seen.popitem(last=False)
            del self._after[first][then]
            if not self._after[first]:
                del self._after[first]

    def _cycle(self, first: Key, then: Key) -> list[tuple[Key, Key]]:
        """Return the shortest cycle that this order closes and no warning has reported; empty if there is none."""
        predecessors: dict[Key, Key] = {}
        frontier = [then]
        while frontier and first not in predecessors:
            reached = []
            for key in frontier:
                for other in self._after.get(key, ()):
                    if other not in predecessors and other != then:
                        predecessors[other] = key
                        reached.append(other)
            frontier = reached
        if first not in predecessors:
            return []
        edges, key = [(first, then)], first
        path = []
        while key != then:
            path.append((predecessors[key], key))
            key = predecessors[key]
        edges += reversed(path)
        if frozenset(edges) in self._reported or frozenset.intersection(*(self._seen[edge].guards for edge in edges)):
            return []
        self._reported.add(frozenset(edges))
        if len(self._reported) > MAX_ORDERS:
            self._reported = {frozenset(edges)}
        return edges

    def _describe(self, cycle: list[tuple[Key, Key]]) -> str:
        (before, after), *rest = ((first[1], then[1]) for first, then in cycle)
        elsewhere = ", and ".join(f"elsewhere {then!r} is while {first!r} is held" for first, then in rest)
        parts = [
            f"{after!r} is asked for here while {before!r} is held, and {elsewhere}: at the same time they would wait "
            f"for each other. Take them in the same order everywhere, or at once (all_of)."
        ]
        for edge in cycle:
            seen = self._seen[edge]
            parts.append(
                f"\n{edge[1][1]!r} was asked for while {edge[0][1]!r} was held, in thread {seen.thread}, here:\n"
                + "".join(seen.stack.format()).rstrip()
            )
        return "\n".join(parts)


def _stack() -> traceback.StackSummary:
    """Return the caller's stack, without our own frames."""
    frames = traceback.StackSummary.extract(traceback.walk_stack(sys._getframe(1)), limit=None, lookup_lines=False)
    frames.reverse()
    foreign = [frame for frame in frames if not os.path.abspath(frame.filename).startswith(_PACKAGE)]
    return traceback.StackSummary.from_list((foreign or frames)[-DEPTH:])


def _level() -> int:
    """Return the stacklevel for a warning from `LockOrder.entering`: of the first frame that is not our own."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


#: The orders seen so far; None without ``debug``, and then nothing is recorded.
current: LockOrder | None = None


def configure(debug: bool) -> None:
    """Start to record orders, or stop and discard them."""
    global current
    current = LockOrder() if debug else None


def _after_fork_in_child() -> None:
    # Another thread may have held the lock during the fork.
    if current is not None:
        configure(True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
