"""The grants that one lock object knows: those of each thread or task, and those that any thread may release.

A grant that another thread released, or that was handed over or lost, is removed from these lists at their next use.
The lists rely on the tokens of grants, so an interrupt cannot leave a grant counted twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

from sqlsem.client.held.registry import BaseGrant, HeldGrant

__all__ = ["HeldGrants", "UnownedGrants"]

G = TypeVar("G", bound=BaseGrant)


class HeldGrants(list[HeldGrant[G]], Generic[G]):
    """The acquisitions of one thread or task by one lock object, the latest last."""

    def __init__(self) -> None:
        super().__init__()
        #: For each block that this thread or task is in: the number of acquisitions before it, and its acquisition.
        self.blocks: list[tuple[int, HeldGrant[G]]] = []

    def enter_block(self, depth: int) -> None:
        """Enter the block of the latest acquisition; ``depth``: the number of acquisitions before it."""
        self.blocks.append((depth, self[-1]))

    def leave_block(self) -> bool:
        """Leave the innermost block. Return True if all its acquisitions have been released; False if not, or outside
        of blocks. Raises `LockLost` if the lock was lost before it was released.
        """
        if not self.blocks:
            return False
        depth, own = self.blocks.pop()
        if len(self) > depth:
            return False
        if own.grant.state.why_lost is not None:
            own.grant.state.require_held()
        return True

    def drop_blocks(self) -> None:
        """Remove the entries of blocks whose end was interrupted: they would be taken for entries of outer blocks."""
        while self.blocks and self.blocks[-1][1].ended:
            self.blocks.pop()


class UnownedGrants(Generic[G]):
    """The grants of one lock that are not bound to a ``with`` block. The caller that takes a grant must release it."""

    def __init__(self) -> None:
        self._grants: dict[G, G] = {}

    def add(self, grant: G) -> None:
        """Add a grant, which any thread or task may release from now on."""
        for known in list(self._grants):
            if known.state.released:  # through the grant itself, or at the end of its event loop
                self._grants.pop(known, None)
        grant.state.is_unowned = True
        self._grants[grant] = grant

    def last(self, stack: list[HeldGrant[G]]) -> HeldGrant[G] | None:
        """Return the latest acquisition of a stack that is not released; remove the released ones above it."""
        while stack:
            last = stack[-1]
            state = last.grant.state
            if last.token in state.acquisitions and not (state.is_unowned and last.grant not in self._grants):
                return last
            stack.pop()
        return None

    def take(self, grant: G) -> bool:
        """Claim the release of a grant. Return False if another thread or task releases it."""
        return not grant.state.is_unowned or self._grants.pop(grant, None) is not None

    def oldest(self, may_release: Callable[[G], bool] = lambda _: True) -> G | None:
        """Return the grant that was acquired first; `take` it before you release it."""
        for grant in list(self._grants):
            if grant.state.released or grant.state.pid != os.getpid():
                self._grants.pop(grant, None)
            elif may_release(grant):
                return grant
        return None
