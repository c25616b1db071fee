"""Leaders, for asyncio tasks: one of many candidates leads for a term, which is the grant of a mutex. At the end of a
term its leader stops first; then the next one can lead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sqlsem.aio.driver import awaited, call_in_thread, this_task
from sqlsem.aio.grants import Grant
from sqlsem.aio.locks import Lock
from sqlsem.aio.wakeup import SignalWakeup
from sqlsem.client.leader import (
    TERMINATED,
    ElectionRetries,
    LeaderElection,
    LeaderEntry,
    SigtermScope,
    watch_sigterm,
)
from sqlsem.values.errors import SqlsemError
from sqlsem.values.locks import check_call

log = logging.getLogger("sqlsem")
T = TypeVar("T")
#: A callback, which gets the term: a plain function or a coroutine function.
Callback = Callable[["Term"], object]


class Term:
    """The time for which this task is the leader; see `sqlsem.Term`. Calls to the database are awaited.

    Attributes:
        name: The name of the mutex.
        ending: An `asyncio.Event` that is set when the term is over or must end, as that of `sqlsem.Term`.
    """

    def __init__(self, name: str, on_stopped: Callback | None) -> None:
        self.name = name
        self.ending = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._on_stopped = on_stopped
        self._grant: Grant | None = None
        self._leads = False
        self._released = False
        self._stopping: asyncio.Task[None] | None = None

    @property
    def grant(self) -> Grant:
        """The grant of the term's mutex."""
        assert self._grant is not None
        return self._grant

    @property
    def fence(self) -> int:
        """See `sqlsem.Term.fence`."""
        return self.grant.fence

    @property
    def lost(self) -> bool:
        """True if the term was lost; see `Grant.lost`."""
        return self.grant.lost

    async def check(self) -> None:
        """See `sqlsem.Term.check`."""
        await self.grant.check()

    async def assert_held(self, cursor: Any) -> None:
        """Assert the term in a transaction, as `Grant.assert_held`."""
        await self.grant.assert_held(cursor)

    async def step_down(self) -> None:
        """See `sqlsem.Term.step_down`; from any task of the loop."""
        await self._stop()
        if self.grant.state.why_lost is None and not self._released:
            self._released = True
            await self.grant.release()

    def _begin(self, grant: Grant) -> None:
        self._grant = grant
        grant.state.loss_callbacks.append(self._was_lost)
        self._leads = grant.state.why_lost is None
        grant.state.require_held()

    def _soon(self, call: Callable[[], object]) -> None:
        """Schedule a call in the loop, from any thread or from a signal handler."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing there can wait for this call
            self._loop.call_soon_threadsafe(call)

    def _was_lost(self) -> None:
        """Schedule the end of the lost term. Called in any thread, under the state lock."""
        self._soon(self._begin_stopping)

    def _notify_ending(self) -> None:
        self._soon(self.ending.set)

    def _begin_stopping(self) -> None:
        self.ending.set()
        if self._leads:
            self._leads = False
            self._stopping = self._loop.create_task(self._call_on_stopped())

    async def _call_on_stopped(self) -> None:
        if self._on_stopped is None:
            return
        try:
            await awaited(self._on_stopped(self))
        except Exception:
            if self.grant.state.why_lost is None:
                raise
            log.exception("on_stopped of the leader %r failed", self.name)

    async def _stop(self) -> None:
        """End the term. No leader runs here when this returns or is cancelled; a cancellation also cancels
        ``on_stopped``.
        """
        self._begin_stopping()
        stopping, cancelled = self._stopping, None
        if stopping is None or stopping is asyncio.current_task():
            return
        while not stopping.done():
            try:
                await asyncio.wait([stopping])
            except asyncio.CancelledError as exc:
                stopping.cancel()
                cancelled = exc
        if cancelled is not None:
            raise cancelled
        stopping.result()

    def __repr__(self) -> str:
        state = "leads" if self._leads else "over"
        return f"<aio.Term {self.name!r}{'' if self._grant is None else f' at {self._grant.position}'}, {state}>"


class _Block:
    """The block of one task: from the request for its term to the end of the term."""

    def __init__(self, term: Term, lock: Lock) -> None:
        self.term, self.lock = term, lock
        self._task = this_task()
        self._terminated = False
        self.scope = SigtermScope(term._notify_ending, lambda: term._soon(self._terminate))
        self._wakeup: SignalWakeup | None = None

    def begin(self) -> None:
        """Handle SIGTERM, also while the loop is idle, until `end`."""
        if watch_sigterm(self.scope):
            self._wakeup = SignalWakeup.begin()

    def _terminate(self) -> None:
        if not self._terminated:
            self._terminated = True
            if not self.scope.leaving:
                self._task.cancel("SIGTERM")

    async def leave(self, exc: BaseException | None) -> None:
        """Stop leading, and then release the mutex, so that the next leader starts only when this one has stopped."""
        self.scope.leaving = True
        term = self.term
        try:
            await term._stop()
        finally:
            if not term._released:
                term._released = True
                await self.lock.__aexit__(None if exc is None else type(exc), exc, None)

    def end(self, exc: BaseException | None) -> None:
        """Stop handling SIGTERM. Raises `SystemExit` if SIGTERM has ended the block."""
        self.scope.leaving = True
        self.scope.end()
        if self._wakeup is not None:
            self._wakeup.end()
        if self._terminated and (exc is None or isinstance(exc, asyncio.CancelledError)):
            raise SystemExit(TERMINATED)


class Leader:
    """A candidate for leadership, as `sqlsem.Leader`; made by `leader`. Each task is a candidate of its own."""

    def __init__(self, election: LeaderElection) -> None:
        self._election = election
        self._blocks: weakref.WeakKeyDictionary[asyncio.Task[Any], list[_Block]] = weakref.WeakKeyDictionary()

    async def current(self) -> LeaderEntry | None:
        """See `sqlsem.Leader.current`."""
        return await call_in_thread(self._election.terms(None).client, self._election.current)

    async def run(self, function: Callable[[Term], Awaitable[T]]) -> T:
        """See `sqlsem.Leader.run`. ``function`` is a coroutine function; it is cancelled when the term is lost."""
        check_call("The function of a leader", function)
        await self.current()
        retries = ElectionRetries(self._election.name)
        while True:
            term = None
            try:
                async with self as term:
                    return await function(term)
            except SqlsemError as exc:
                pause = retries.pause_after(exc, None if term is None else term.grant)
                if pause is None:
                    raise
            await asyncio.sleep(pause)

    async def __aenter__(self) -> Term:
        term = Term(self._election.name, self._election.on_stopped)
        block = _Block(term, Lock(self._election.terms(None)))
        try:
            if self._election.handle_sigterm:
                block.begin()
            grant = await block.lock.__aenter__()
            try:
                term._begin(grant)
                if self._election.on_started is not None:
                    await awaited(self._election.on_started(term))
            except BaseException as exc:
                await block.leave(exc)
                raise
        except BaseException as exc:
            block.end(exc)
            raise
        self._blocks.setdefault(this_task(), []).append(block)
        return term

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object
    ) -> None:
        block = self._blocks[this_task()].pop()
        try:
            await block.leave(exc)
        finally:
            block.end(exc)

    def __repr__(self) -> str:
        return f"<aio.Leader {self._election.name!r}>"
