"""What one lock object knows of its grants: the holds of each thread or task, and those that anybody may release."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

from sqlsem.core.holdings import BaseGrant, Hold

__all__ = ["Holds", "LooseGrants"]

G = TypeVar("G", bound=BaseGrant)


class Holds(list[Hold[G]], Generic[G]):
    """The holds of one thread or task by one lock object, the latest last."""

    def __init__(self) -> None:
        super().__init__()
        #: For each block of the lock that this thread or task is in: how many holds there were before it, and its own.
        self.blocks: list[tuple[int, Hold[G]]] = []

    def mark(self) -> tuple[int, int]:
        """Return how many holds and blocks there are."""
        return len(self), len(self.blocks)

    def enter_block(self, depth: int) -> None:
        """A block begins, whose hold is the last one; before it there were so many."""
        self.blocks.append((depth, self[-1]))

    def leave_block(self) -> bool:
        """The innermost block ends. Return True when all that was acquired in it has been released; not so outside of
        blocks. Raises `LockLost` when the lock was lost before it was released.
        """
        if not self.blocks:
            return False
        depth, own = self.blocks.pop()
        if len(self) > depth:
            return False
        if own.grant.holding.why_lost is not None:
            own.grant.holding.require()
        return True

    def drop_blocks(self) -> None:
        """The end of a block was interrupted, and its hold has ended: its entry must not be taken for that of the block
        around it.
        """
        while self.blocks and self.blocks[-1][1].ended:
            self.blocks.pop()


class LooseGrants(Generic[G]):
    """Of one lock, those that no block holds. Who pops a grant from the dictionary releases it."""

    def __init__(self) -> None:
        self._grants: dict[G, G] = {}

    def add(self, grant: G) -> None:
        """From now on, anybody may release it."""
        for one in list(self._grants):
            if one.holding.released:  # through the grant itself, or at the end of its loop
                self._grants.pop(one, None)
        grant.holding.is_loose = True
        self._grants[grant] = grant

    def last(self, stack: list[Hold[G]]) -> Hold[G] | None:
        """What was acquired last of that stack, and neither its owner nor another one has given back; the rest goes."""
        while stack:
            last = stack[-1]
            holding = last.grant.holding
            if holding.has(last.token) and not (holding.is_loose and last.grant not in self._grants):
                return last
            stack.pop()
        return None

    def take(self, grant: G) -> bool:
        """Whether it may be released by the one who acquired it, and from now on by nobody else."""
        return not grant.holding.is_loose or self._grants.pop(grant, None) is not None

    def oldest(self, may_release: Callable[[G], bool] = lambda _: True) -> G | None:
        """What was acquired longest ago; who `take`s it releases it."""
        for grant in list(self._grants):
            if grant.holding.released or grant.holding.pid != os.getpid():
                self._grants.pop(grant, None)
            elif may_release(grant):
                return grant
        return None
