"""The claims of this process: tasks, parts of batches, callbacks. The process must end each of them.

States
    open    The database records the claim for this process, or may soon do so. No other process can make the same
            claim while this one lives.
    ended   The end is recorded, or deferred: the heartbeat thread records it as soon as the database is in reach.
    lost    (Tasks only.) The database was out of reach for too long, so another process may have claimed the task.
            This process must still end its claim: its member may survive the outage, and the claim would then block
            other workers. Or the coordinator was closed, which returns the task to the queue.

Invariant
    While a claim is open, ``_ending_call`` is a call that ends it. The call may be repeated, and another member of this
    process may make it. If no code is left that would end the claim (after an interrupt at any line, or if the caller
    drops the claim), the heartbeat thread makes that call. `Claims` has weak references only, so that a dropped claim
    is finalized. A forked child inherits its parent's claims, and can end none of them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, ClassVar, TypeVar

from sqlsem.client.callers import Caller, this_thread
from sqlsem.engines.base import Session
from sqlsem.util import shutdown
from sqlsem.util.threads import log
from sqlsem.values.errors import LockLost, NotHeld, SqlsemError

if TYPE_CHECKING:
    from typing_extensions import Self

    from sqlsem.client.connection.membership import Membership

__all__ = ["Claim", "Claims", "Ending", "owner_name"]

T = TypeVar("T")

#: A call that ends a claim. Its arguments are the session of the main connection and the number of our member.
Ending = Callable[[Session, int], object]


class Claim:
    """One task, part or callback that this process has claimed. As a context manager it ends with its block.

    Attributes:
        title: Its name in messages.
        why_lost: Why it was lost; None if it was not.
    """

    #: True if the claim counts as lost when the membership is lost. (Other claims notice it only when they end.)
    can_be_lost: ClassVar[bool] = False
    title = "It"
    why_lost: str | None = None
    #: The thread that made the claim.
    caller: Caller
    _ended = True  # until `opened` is called: an interrupt may come before

    def opened(self, claims: Claims, ending: Ending, *, known: bool = True) -> None:
        """Open the claim: from now on the database records it for this process, or may do so. ``ending`` is the call
        that ends it. With ``known=False`` the caller adds the claim to ``claims``, together with others. (For the
        package.)
        """
        self._claims = claims
        self._ending_call = ending
        self._pid = os.getpid()
        self._ended = False
        if known:
            claims.add([self])

    def close_by(self, ending: Ending) -> None:
        """Replace the call that ends the claim if its owner does not. (For the package.)"""
        self._ending_call = ending

    @property
    def is_open(self) -> bool:
        """True until the claim has ended."""
        return not self._ended

    @property
    def lost(self) -> bool:
        """True if the database was out of reach for too long, so another process may have made the same claim."""
        return self.why_lost is not None

    @property
    def is_inherited(self) -> bool:
        """True in a forked child of the process that made the claim."""
        return self._pid != os.getpid()

    def lose(self, why: str) -> None:
        """Mark the claim as lost. (For the package.)"""
        self.why_lost = self.why_lost or why

    def mark_ended(self) -> None:
        """Mark the claim as ended: its end is recorded or deferred. (For the package.)"""
        self._claims.mark_ended([self])

    def leave(self) -> None:
        """Defer the end of the claim to the heartbeat thread, unless the claim has ended. (For the package.)"""
        if not self._ended and not self.is_inherited:
            self._claims.member.defer(self._ending_call)
            self.mark_ended()  # last: after an interrupt between the two lines, deferring again does no harm

    def __del__(self) -> None:
        if not self._ended and not self.is_inherited:
            # (Only an append: a finalizer must take no lock.)
            self._claims.member.deferred_calls.append(self._ending_call)

    def require_open(self) -> None:
        """Raise `NotHeld` or `LockLost` unless this process may end the claim. (For the package.)"""
        if not self._ended and self.is_inherited:
            raise NotHeld(f"{self.title} belongs to the process that this one was forked from", code="other-process")
        if self.why_lost is not None:
            title = self.title[0].lower() + self.title[1:]
            shutdown.block_daemon_thread()
            raise LockLost(f"The claim of {title} was lost: {self.why_lost}; it will be run again")
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
        """Record the end of the claim by ``call``, and return its result. If it fails, the heartbeat thread makes the
        call ``otherwise`` (default: ``call`` again). ``budget``: the seconds to retry. (For the package.)
        """
        self._ending_call = otherwise or call
        try:
            answer = self._claims.member.call(what, call, budget)
        except BaseException:
            self.leave()
            raise
        self.mark_ended()
        return answer

    # -- its block ----------------------------------------------------------------------------------------------

    def _succeed(self) -> object:
        """End the claim after a block that raised nothing."""
        raise NotImplementedError

    def _fail(self, error: BaseException) -> object:
        """End the claim after a block that raised an error."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.require_open()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        try:
            if self._ended:  # the block has ended it
                return
            if exc is not None and self._claims.are_given_back:
                self.leave()
                return
            if exc is None:
                self._succeed()
                return
            try:
                self._fail(exc)
            except SqlsemError as failure:
                log.warning("%s: %s", self.title, failure)  # the error of the block takes precedence
        except BaseException:
            self.leave()
            raise

    def __repr__(self) -> str:
        return f"<{self.title}{', lost' if self.why_lost else ''}>"


class Claims:
    """The claims that this process has not ended, as weak references (see above)."""

    def __init__(self, member: Membership) -> None:
        self.member = member
        self._lock = threading.Lock()
        self._known: weakref.WeakSet[Claim] = weakref.WeakSet()
        member.held.append(self._known)

    def add(self, claims: Collection[Claim]) -> None:
        """Add open claims, which the calling thread has made, and keep the heartbeat thread awake."""
        caller = this_thread()
        for claim in claims:
            claim.caller = caller
        with self._lock:
            self._known.update(claims)
        self.member.add(())

    def mark_ended(self, claims: Iterable[Claim]) -> None:
        """Mark these claims as ended."""
        with self._lock:
            for claim in claims:
                claim._ended = True
                self._known.discard(claim)

    def lose(self, why: str) -> list[Claim]:
        """Mark the claims that can be lost as lost, and return them."""
        with self._lock:
            lost = [claim for claim in self._known if claim.can_be_lost]
            self._known.difference_update(lost)
        for claim in lost:
            claim.lose(why)
        return lost

    def endings(self) -> list[Ending]:
        """Return the calls that end the open claims, for the end of the member."""
        return [claim._ending_call for claim in self.all()]

    def close(self, why: str) -> list[Claim]:
        """Mark the claims that can be lost as lost, because the coordinator is closed. Return those that another thread
        has made, as its code may run on. At the end of the interpreter no code does.
        """
        lost = self.lose(why)
        caller = None if shutdown.has_begun() else this_thread()
        others = [claim for claim in lost if caller not in (None, claim.caller)]
        for claim in lost:
            if claim not in others:
                log.info("%s is returned: %s", claim.title, why)
        return others

    @property
    def are_given_back(self) -> bool:
        """True if the end of the interpreter has closed the coordinator: no end can be recorded any more. (Then Python
        also ends the generators that a program has left suspended in a block.)
        """
        return shutdown.has_begun() and self.member.closing.is_set()

    def all(self) -> list[Claim]:
        """Return the open claims."""
        with self._lock:
            return list(self._known)

    def __bool__(self) -> bool:
        return len(self._known) > 0


def owner_name() -> str:
    """Return the name of the calling thread, as any database can store it."""
    name = threading.current_thread().name[:255]
    return name.replace("\0", "?").encode(errors="replace").decode()
