"""Locks that are taken in opposite orders, told before they ever wait for each other. For debugging; no I/O.

When somebody who holds ``a`` asks for ``b``, that order is remembered with its stack. Those who ask the other way
round, or close a longer circle (a before b, b before c, c before a), are told by a `LockOrderWarning`, once for each
circle, whether or not anybody waits. What is always done under one and the same exclusive lock cannot meet, and is no
fault.

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
from dataclasses import dataclass

from sqlsem.errors import LockOrderWarning

__all__ = ["LockOrder", "configure", "current"]

#: Orders that are remembered; names may be many (``load:{table}``), so the oldest are forgotten.
MOST = 10_000
#: Frames of a stack that are kept.
DEPTH = 30
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

#: A resource in its database.
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where one lock was asked for while another was held."""

    guards: frozenset[Key]  # exclusive locks that were held too, each time
    thread: str
    stack: traceback.StackSummary


class LockOrder:
    """What is known about the orders in which this process takes its locks. Safe to use from several threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._seen: OrderedDict[tuple[Key, Key], _Seen] = OrderedDict()
        self._after: dict[Key, dict[Key, None]] = {}
        self._told: set[frozenset[tuple[Key, Key]]] = set()

    def entering(self, where: str, held: Sequence[tuple[str, bool]], wanted: Iterable[str]) -> None:
        """Somebody who holds these (each with: does it exclude all others?) is about to wait for those.

        ``where`` tells databases apart. Call it before anything is asked of the database.
        """
        if not held:
            return
        stack: traceback.StackSummary | None = None
        texts = []
        for name in wanted:
            for other, _ in held:
                if other == name:
                    continue
                edge = (where, other), (where, name)
                guards = frozenset((where, one) for one, alone in held if alone and one != other)
                with self._guard:
                    known = self._seen.get(edge)
                    if known is not None and known.guards <= guards:
                        continue  # nothing new; the usual case
                    stack = stack or _stack()
                    if known is not None:
                        guards &= known.guards
                    self._remember(edge, _Seen(guards, threading.current_thread().name, stack))
                    circle = self._circle(*edge)
                    if circle:
                        texts.append(self._tell(circle))
        for text in texts:
            warnings.warn(LockOrderWarning(text), stacklevel=_level())

    def _remember(self, edge: tuple[Key, Key], seen: _Seen) -> None:
        first, then = edge
        self._seen[edge] = seen
        self._seen.move_to_end(edge)
        self._after.setdefault(first, {})[then] = None
        if len(self._seen) > MOST:
            (first, then), _ = self._seen.popitem(last=False)
            del self._after[first][then]
            if not self._after[first]:
                del self._after[first]

    def _circle(self, first: Key, then: Key) -> list[tuple[Key, Key]]:
        """The shortest circle that this order closes and nobody has been told of; empty when there is none."""
        came: dict[Key, Key] = {}
        frontier = [then]
        while frontier and first not in came:
            reached = []
            for one in frontier:
                for other in self._after.get(one, ()):
                    if other not in came and other != then:
                        came[other] = one
                        reached.append(other)
            frontier = reached
        if first not in came:
            return []
        edges, at = [(first, then)], first
        way = []
        while at != then:
            way.append((came[at], at))
            at = came[at]
        edges += reversed(way)
        if frozenset(edges) in self._told or frozenset.intersection(*(self._seen[edge].guards for edge in edges)):
            return []
        self._told.add(frozenset(edges))
        if len(self._told) > MOST:
            self._told = {frozenset(edges)}
        return edges

    def _tell(self, circle: list[tuple[Key, Key]]) -> str:
        (before, after), *rest = ((first[1], then[1]) for first, then in circle)
        elsewhere = ", and ".join(f"elsewhere {then!r} is while {first!r} is held" for first, then in rest)
        parts = [
            f"{after!r} is asked for here while {before!r} is held, and {elsewhere}: at the same time they would wait "
            f"for each other. Take them in the same order everywhere, or at once (all_of)."
        ]
        for edge in circle:
            seen = self._seen[edge]
            parts.append(
                f"\n{edge[1][1]!r} was asked for while {edge[0][1]!r} was held, in thread {seen.thread}, here:\n"
                + "".join(seen.stack.format()).rstrip()
            )
        return "\n".join(parts)


def _stack() -> traceback.StackSummary:
    """The caller's stack, without our own frames."""
    frames = traceback.StackSummary.extract(traceback.walk_stack(sys._getframe(1)), limit=None, lookup_lines=False)
    frames.reverse()
    found = [frame for frame in frames if not os.path.abspath(frame.filename).startswith(_PACKAGE)]
    return traceback.StackSummary.from_list((found or frames)[-DEPTH:])


def _level() -> int:
    """The stacklevel for a warning from `LockOrder.entering`: the first frame that is not ours."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


#: What is remembered; None while nobody debugs, and then nothing is looked at.
current: LockOrder | None = None


def configure(debug: bool) -> None:
    """Start anew, or stop."""
    global current
    current = LockOrder() if debug else None


def _after_fork_in_child() -> None:
    # Another thread may have been in the middle of something.
    if current is not None:
        configure(True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
