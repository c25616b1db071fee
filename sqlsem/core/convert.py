"""Upgrade a reader to the writer, and downgrade the writer to a reader, without releasing the lock in between.

A failed or interrupted upgrade leaves a reader: `rollback` downgrades it at once, or the next heartbeat does. It relies
on the holder's row, which stays in the queue and only changes its access.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from sqlsem import deadlocks
from sqlsem.core.backoff import backoff_delays
from sqlsem.core.client import DatabaseClient
from sqlsem.core.effects import NO_CONNECTION, Call, Effects, Sleep
from sqlsem.core.grant_registry import GrantState
from sqlsem.core.operations import SUSPECT_SLICE_SECONDS, WaitingOperation
from sqlsem.core.threads import voice
from sqlsem.core.timeout_details import blockers
from sqlsem.core.waiter_queues import Waiter
from sqlsem.engines.base import Busy, Session
from sqlsem.engines.protocol import ConversionSession
from sqlsem.errors import ConfigurationError, Deadlock, SqlsemError, Timeout
from sqlsem.events import Behind, Deadlocked, Event, Granted, TimedOut, Waiting
from sqlsem.insight.blockers import in_words
from sqlsem.model import READ, UPGRADE, WRITE, Duration, Upgrading, check_duration

__all__ = ["Upgrade", "downgrade"]

log = voice


class Upgrade(WaitingOperation):
    """The upgrade of a reader to the writer; an `Operation`. Unless `run` returns, the grant is a reader afterwards.

    ``event`` wakes the waiter; threads and tasks have events of their own kinds.
    """

    upgrade = True

    def __init__(
        self, client: DatabaseClient, state: GrantState, timeout: Duration | None, event: threading.Event
    ) -> None:
        state.require_held()
        client.engine.require(ConversionSession, "This")
        super().__init__(client, state.caller, None if timeout is None else check_duration("timeout", timeout))
        self._state = state
        self._ticket = state.tickets[0]
        self._waiter = Waiter(self._ticket, state.requests[0], event)
        self._pauses = backoff_delays()  # between polls, if it has no wait connection
        self._alone = contextlib.ExitStack()
        self._begun = False  # True: the row may no longer be a reader's
        self._has_waited = False

    def run(self) -> Effects[None]:
        """Upgrade, and wait until all other readers have released. Raises `Timeout`, `Deadlock`, and `LockLost` if its
        row is gone.
        """
        _require_convertible(self._state, READ, "upgraded")
        try:
            yield from self._become_writer()
        except Timeout:
            self._publish(TimedOut, waited=self.waited(), timeout=self.timeout)
            raise
        except Deadlock as exc:
            self._publish(Deadlocked, waited=self.waited(), why=str(exc))
            raise
        self._publish(Granted, waited=self.waited(), at_once=not self._has_waited)

    def _become_writer(self) -> Effects[None]:
        self._alone.enter_context(_alone(self.client, self._state))
        self.client.deadlock_monitor.add(self, (self._ticket,), self.caller.number)
        self._begun = True
        while True:
            begun = yield from self._begin()
            writes: bool | None = begun is Upgrading.DONE
            left = self.remaining()
            if not writes and left <= 0 and begun is not Upgrading.GONE:
                raise (yield from self._too_late())
            if begun in (Upgrading.BEGUN, Upgrading.NOT_YET) and not self._has_waited:
                self._has_waited = True
                self.client.contention_monitor.request_arrived(
                    self._ticket.resource, self._ticket.position, upgrades=True
                )
                yield from self._publish_waiting()
            if begun is Upgrading.BEGUN:  # (called again after each slice; idempotent)
                writes = yield from self._wait(left)
            if writes is None or begun is Upgrading.GONE:
                _lose(self.client, self._state)
            if writes:
                self._begun = False
                self._state.set_access(WRITE)
                self._state.require_held()
                return

    def _too_late(self) -> Effects[Timeout]:
        found = yield from blockers(self.client, self._state.requests, self.caller, self._ticket)
        words = in_words(found)
        return Timeout(
            f"The reader of {self._ticket.resource!r} at position {self._ticket.position} did not become the writer "
            f"within {self.timeout:g} s, and reads on{f': {words}' if words else ''}; see the queue with: sqlsem ls",
            resource=self._ticket.resource,
            holders=[holder for blocker in found for holder in blocker.holders],
        )

    def rollback(self) -> Effects[None]:
        """Downgrade to a reader again, at once or with the next heartbeat."""
        if not self._begun:
            return
        self._state.set_access(READ)
        try:
            yield Call("downgrade", _to_reader(self._state), min(1.0, self.retry_timeout))
        except SqlsemError as exc:
            if not self.client.closed:
                log.warning("Could not rollback the upgrade of %r at once: %s", self._state, exc)
                self.rollback_local()
        self.client.notify_waiters(self._ticket.resource)

    def rollback_local(self) -> None:
        """Let the next heartbeat downgrade to a reader."""
        if self._begun:
            _read_later(self.client, self._state)

    def close(self) -> None:
        """Stop waiting, and permit other conversions of this grant."""
        self.client.deadlock_monitor.remove((self._ticket,))
        self._alone.close()

    def choose_as_victim(self, deadlock: deadlocks.Found) -> None:
        """Have this request raise `Deadlock`. Called by another thread."""
        super().choose_as_victim(deadlock)
        self._waiter.event.set()

    def _publish(self, event: type[Event], **more: Any) -> None:
        bus = self.client.event_bus
        if bus.has_subscribers(event.name, logging.INFO):
            about = bus.common_fields(self._state.requests[0], self._ticket.position, self.caller)
            bus.publish(event(**{**about, "access": UPGRADE, **more}), self._state.trace)

    def _publish_waiting(self) -> Effects[None]:
        if self.client.event_bus.has_subscribers(Waiting.name, logging.INFO):
            behind = None
            try:
                entries = yield Call("look", lambda session, _: session.entries(self._ticket.resource), 0.0)
                behind = Behind.other_holder(entries, self._ticket.position)
            except SqlsemError as exc:
                log.debug("Cannot read which readers remain: %s", exc)
            self._publish(Waiting, behind=behind)

    def _begin(self) -> Effects[Upgrading]:
        """Begin the upgrade, or only try it with timeout 0. Return its state."""
        only_if_free = self.timeout == 0
        self.client.require_open()

        def begin(session: Session, _: int) -> Upgrading:
            self._state.conversions += 1
            return session.begin_upgrade(self._ticket, only_if_free)

        try:
            begun: Upgrading = yield Call("upgrade", begin, self.retry_timeout)
        except Busy:
            # Another transaction holds the gate open; that counts as waiting.
            return Upgrading.NOT_YET
        if only_if_free and begun is not Upgrading.DONE:
            self._begun = False  # nothing was changed
        if begun is Upgrading.BEGUN:
            self.client.notify_waiters(self._ticket.resource)  # may have granted another waiter
        elif begun is Upgrading.NOT_YET and not only_if_free:
            yield Sleep(self._waiter, next(self._pauses))
        return begun

    def _wait(self, timeout: float) -> Effects[bool | None]:
        self.client.require_open()
        if not self.member.has_ticket(self._ticket):
            return None  # lost while we waited
        if self.deadlock is not None:
            return (yield from self.poll_or_give_up(self._waiter))
        answer = yield from self.wait(self._waiter, min(timeout, SUSPECT_SLICE_SECONDS))
        if answer is NO_CONNECTION:
            yield Sleep(self._waiter, min(timeout, next(self._pauses)))
            answer = yield from self.poll_once(self._waiter)
        granted: bool | None = answer
        return granted


def downgrade(client: DatabaseClient, state: GrantState) -> Effects[None]:
    """Downgrade the writer to a reader; if that fails, the next heartbeat does it."""
    state.require_held()
    client.engine.require(ConversionSession, "This")
    _require_convertible(state, WRITE, "downgraded")
    if state.depth > 1:
        raise ConfigurationError(
            f"{state!r} is held {state.depth} times (reentrant=True), and anyone who acquired it first "
            f"relies on writing; downgrade it where it is held once",
            resource=state.resource,
        )
    with _alone(client, state):
        state.set_access(READ)  # it counts as a reader from now on, even if the call fails
        try:
            exists = yield Call("downgrade", _to_reader(state))
        except Busy as exc:
            log.warning("%r is downgraded when the transaction that asserted it ends (%s)", state, exc)
            _read_later(client, state)
            return
        except BaseException:
            _read_later(client, state)
            raise
        if not exists:
            _lose(client, state)
        client.notify_waiters(state.resource)


def _to_reader(state: GrantState) -> Callable[[Session, int], bool]:
    def downgrade(session: Session, _: int) -> bool:
        state.conversions += 1
        return session.downgrade(state.tickets[0])

    return downgrade


def _read_later(client: DatabaseClient, state: GrantState) -> None:
    """Defer the downgrade to the next heartbeat."""
    state.set_access(READ)
    conversions = state.conversions

    def put_back(session: Session, _: int) -> None:
        # Skip it if the grant was released or converted since. Conversions use the main connection, as this call does.
        if state.conversions == conversions and not state.released and state.why_lost is None:
            session.downgrade(state.tickets[0])

    client.member.defer(put_back)


def _require_convertible(state: GrantState, access: str, what: str) -> None:
    request = state.requests[0]
    if len(state.requests) > 1:
        raise ConfigurationError(
            f"{state!r} is of several resources, and cannot be {what}; acquire the one to convert by itself",
            resource=state.resource,
        )
    if request.access != access or request.limit != 1:
        use = "read(…)" if access == READ else "write(…) or mutex(…)"
        raise ConfigurationError(
            f"{state!r} is {request.describe()}, which cannot be {what}; what {use} gives can, once",
            resource=state.resource,
        )


@contextlib.contextmanager
def _alone(client: DatabaseClient, state: GrantState) -> Iterator[None]:
    """Refuse a second conversion at the same time: several threads may use the grant."""
    with client.state_lock:
        if state.converting:
            raise ConfigurationError(
                f"{state!r} is being upgraded or downgraded by another thread; wait for that to end",
                resource=state.resource,
            )
        state.converting = True
    try:
        yield
    finally:
        state.converting = False


def _lose(client: DatabaseClient, state: GrantState) -> None:
    client.mark_lost_and_log([state.tickets[0].position], "its row was removed, perhaps by an operator")
    state.require_held()
