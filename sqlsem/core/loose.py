"""Grants that anybody may release: those of semaphores."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

from sqlsem.core.holdings import BaseGrant, Hold

__all__ = ["LooseGrants"]

G = TypeVar("G", bound=BaseGrant)


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
        for one in list(self._grants):
            if one.holding.released or one.holding.pid != os.getpid():
                self._grants.pop(one, None)
            elif may_release(one):
                return one
        return None
