"""What this process has claimed, and has to end: tasks, parts of batches, callbacks. They share one life.

States
    open    Ours, as far as the database knows, or may be: nobody else can have it while this process lives.
    ended   Its end has been recorded, or left to the pulse, which records it as soon as the database can be reached.
    lost    (Tasks only.) Others may have it, as nothing was heard of the database for too long. It is still to be
            ended: our member may outlive the outage, and would then keep others from it.

Invariant
    As long as a claim is open, ``_closing`` is a call that ends it: one that may be repeated, and made by another
    member of ours. Whatever parts the claim from who would have ended it (an interrupt at any line, a caller who drops
    it), leaves that call to the pulse. This process knows its claims weakly, so that a claim that is dropped finds out.
    In a forked child a claim is its parent's: it can end nothing there.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar, TypeVar

from sqlsem.core.membership import Membership
from sqlsem.core.threads import voice
from sqlsem.engines.base import Session
from sqlsem.errors import LockLost, NotHeld, SqlsemError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Claim", "Claims", "Ending", "owner_name"]

log = voice
T = TypeVar("T")

#: A call of the main session, and the number of our member.
Ending = Callable[[Session, int], object]


class Claim:
    """One task, part or callback that is ours. A context manager, whose block is what it was claimed for.

    Attributes:
        title: What messages call it.
        why_lost: Why it was lost, if it was.
    """

    #: Whether it is lost with the membership. (Others learn at their end what became of them.)
    can_be_lost: ClassVar[bool] = False
    title = "It"
    why_lost: str | None = None
    _ended = True  # until it is open: an interrupt can strike before

    def opened(self, claims: Claims, closing: Ending, *, known: bool = True) -> None:
        """The database has it as ours, or may have from now on. Unless ``known``, the caller adds it to ``claims``,
        with others. (For the package.)
        """
        self._claims = claims
        self._closing = closing
        self._pid = os.getpid()
        self._ended = False
        if known:
            claims.add([self])

    def close_by(self, closing: Ending) -> None:
        """What ends it from now on, where nobody else does. (For the package.)"""
        self._closing = closing

    @property
    def is_open(self) -> bool:
        """Whether it is still to be ended."""
        return not self._ended

    @property
    def lost(self) -> bool:
        """Whether the claim was lost, as the database was out of reach for too long, and others may have it."""
        return self.why_lost is not None

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, and the claim its parent's."""
        return self._pid != os.getpid()

    def lose(self, why: str) -> None:
        """Others may have it. (For the package.)"""
        self.why_lost = self.why_lost or why

    def settle(self) -> None:
        """Its end has been recorded. (For the package.)"""
        self._claims.settle([self])

    def leave(self) -> None:
        """Unless it has ended, leave its end to the pulse. (For the package.)"""
        if not self._ended and not self.is_inherited:
            self._claims.member.defer(self._closing)
            self.settle()  # afterwards: what is said twice does no harm

    def __del__(self) -> None:
        if not self._ended and not self.is_inherited:
            self._claims.member.deferred_calls.append(self._closing)  # no lock here, and so no more than this

    def require_open(self) -> None:
        """Raise `NotHeld` or `LockLost` unless it is ours to end. (For the package.)"""
        if not self._ended and self.is_inherited:
            raise NotHeld(f"{self.title} belongs to the process that this one was forked from")
        if self.why_lost is not None:
            what = self.title[0].lower() + self.title[1:]
            raise LockLost(f"The claim of {what} was lost: {self.why_lost}; it will be run again")
        if self._ended:
            raise NotHeld(f"{self.title} was ended before")

    def end_by(
        self,
        what: str,
        call: Callable[[Session, int], T],
        *,
        otherwise: Ending | None = None,
        budget: float | None = None,
    ) -> T:
        """Record its end. What is not known to be recorded is left to the pulse, ``otherwise`` in another way.
        (For the package.)
        """
        self._closing = otherwise or call
        try:
            answer = self._claims.member.call(what, call, budget)
        except BaseException:
            self.leave()
            raise
        self.settle()
        return answer

    # -- its block ----------------------------------------------------------------------------------------------

    def _succeed(self) -> object:
        """Its block was left well."""
        raise NotImplementedError

    def _fail(self, error: BaseException) -> object:
        """Its block was left with an error."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.require_open()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        try:
            if self._ended:  # by hand
                return
            if exc is None:
                self._succeed()
                return
            try:
                self._fail(exc)
            except SqlsemError as struck:
                log.warning("%s: %s", self.title, struck)  # what went wrong inside matters more
        except BaseException:
            self.leave()
            raise

    def __repr__(self) -> str:
        return f"<{self.title}{', lost' if self.why_lost else ''}>"


class Claims:
    """All that this process has claimed and not ended. Weakly: see above."""

    def __init__(self, member: Membership) -> None:
        self.member = member
        self._lock = threading.Lock()
        self._known: weakref.WeakSet[Claim] = weakref.WeakSet()

    def add(self, claims: Iterable[Claim]) -> None:
        """They are open, and the pulse must not rest."""
        with self._lock:
            self._known.update(claims)
        self.member.add(())

    def settle(self, claims: Iterable[Claim]) -> None:
        """Their ends have been recorded."""
        with self._lock:
            for claim in claims:
                claim._ended = True
                self._known.discard(claim)

    def lose(self, why: str) -> list[Claim]:
        """Declare all of them lost that can be; which those are."""
        with self._lock:
            lost = [claim for claim in self._known if claim.can_be_lost]
            self._known.difference_update(lost)
        for claim in lost:
            claim.lose(why)
        return lost

    def all(self) -> list[Claim]:
        """Those that are open."""
        with self._lock:
            return list(self._known)

    def __bool__(self) -> bool:
        return len(self._known) > 0


def owner_name() -> str:
    """The thread that claims, as any database can keep it."""
    name = threading.current_thread().name[:255]
    return name.replace("\0", "?").encode(errors="replace").decode()
