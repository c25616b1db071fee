"""Upgrade a reader to the writer, and downgrade the writer to a reader, without releasing the lock in between.

A failed or interrupted upgrade leaves a reader: `rollback` downgrades it at once, or the next heartbeat does. It relies
on the holder's row, which stays in the queue and only changes its access.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sqlsem.client.effects import NO_CONNECTION, Call, Effects, Sleep
from sqlsem.client.operations.backoff import backoff_delays
from sqlsem.client.operations.timeout_details import timeout_error
from sqlsem.client.operations.waiting import WaitingOperation
from sqlsem.client.waiters.queues import Waiter
from sqlsem.client.waiters.state import WaiterState
from sqlsem.engines.failures import Busy
from sqlsem.engines.protocol import Capability
from sqlsem.util.threads import log
from sqlsem.values.errors import ConfigurationError, Deadlock, SqlsemError, Timeout
from sqlsem.values.events import Behind, Deadlocked, Event, Granted, TimedOut, Waiting
from sqlsem.values.locks import READ, UPGRADE, WRITE, Duration, Upgrading, check_duration

if TYPE_CHECKING:
    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.held.registry import GrantState
    from sqlsem.engines.base import Session
    from sqlsem.values import deadlocks

__all__ = ["Upgrade", "downgrade"]


class Upgrade(WaitingOperation):
    """The upgrade of a reader to the writer; a `RevertibleOperation`. Unless `run` returns, the grant is a reader
    afterwards.

    ``event`` wakes the waiter: a `threading.Event`, or one like it that wakes an asyncio task.
    """

    upgrade = True

    def __init__(
        self, client: DatabaseClient, state: GrantState, timeout: Duration | None, event: threading.Event
    ) -> None:
        state.require_held()
        client.engine.require(Capability.CONVERSIONS, "This")
        super().__init__(client, state.caller, None if timeout is None else check_duration("timeout", timeout))
        self._state = state
        self._ticket = state.tickets[0]
        self._waiter = Waiter(self._ticket, state.requests[0], event)
        self._pauses = backoff_delays()  # between polls, if no wait connection is free
        self._conversion = contextlib.ExitStack()  # ends the block of `_only_conversion`
        self._begun = False  # True: the database may no longer have the row as a reader's
        self._rolled_back = False  # True: a call still running in another thread must change nothing
        self._has_waited = False

    def run(self) -> Effects[None]:
        """Upgrade, and wait for the other readers. Raises `Timeout`, `Deadlock`, `LockLost` (its row was removed)."""
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
        self._conversion.enter_context(_only_conversion(self.client, self._state))
        self._state.conversions += 1
        self.client.deadlock_monitor.add(self.choose_as_victim, (self._ticket,), self.caller.number)
        self._begun = True
        while True:
            progress = yield from self._begin()
            is_writer: bool | None = progress is Upgrading.DONE
            left = self.remaining()
            if not is_writer and left <= 0 and progress is not Upgrading.GONE:
                # (Its message names the readers that remain.)
                message = (
                    f"The reader of {self._ticket.resource!r} at position {self._ticket.position} did not become the "
                    f"writer within {self.timeout:g} s, and reads on"
                )
                requests = self._state.requests
                raise (yield from timeout_error(self.client, requests, self.caller, message, self._ticket))
            if progress in (Upgrading.BEGUN, Upgrading.NOT_YET) and not self._has_waited:
                self._has_waited = True
                self.client.contention_monitor.request_arrived(
                    self._ticket.resource, self._ticket.position, upgrades=True
                )
                yield from self._publish_waiting()
            if progress is Upgrading.BEGUN:  # (`_begin` is called again after each slice; it is idempotent)
                is_writer = yield from self._wait()
            if is_writer is None or progress is Upgrading.GONE:
                _mark_lost(self.client, self._state)
            if is_writer:
                self._begun = False
                self._state.set_access(WRITE)
                self._state.require_held()
                return

    def rollback(self) -> Effects[None]:
        """Downgrade to a reader again, at once or with the next heartbeat."""
        self._rolled_back = True
        if not self._begun:
            return
        self._state.set_access(READ)
        try:
            yield Call("downgrade", _downgrade_call(self._state), min(1.0, self.retry_timeout))
        except SqlsemError as exc:
            if not self.client.closed:
                log.warning(
                    "Could not roll back the upgrade of %r at once; the next heartbeat does: %s", self._state, exc
                )
                self.rollback_local()
        except BaseException:  # a second interrupt: the call may not have been made
            self.rollback_local()
            raise
        self.client.notify_waiters(self._ticket.resource)

    def rollback_local(self) -> None:
        """Let the next heartbeat downgrade to a reader."""
        self._rolled_back = True
        if self._begun:
            _downgrade_later(self.client, self._state)

    def close(self) -> None:
        """Leave the deadlock monitor, and permit other conversions of this grant."""
        self.client.deadlock_monitor.remove((self._ticket,))
        self._conversion.close()

    def choose_as_victim(self, deadlock: deadlocks.Found) -> None:
        """Have this request raise `Deadlock`. Called by another thread."""
        super().choose_as_victim(deadlock)
        self._waiter.event.set()

    def _publish(self, event: type[Event], **more: Any) -> None:
        bus = self.client.event_bus
        if bus.has_subscribers(event.name, logging.INFO):
            fields = bus.common_fields(self._state.requests[0], self._ticket.position, self.caller)
            bus.publish(event(**{**fields, "access": UPGRADE, **more}), self._state.trace)

    def _publish_waiting(self) -> Effects[None]:
        if self.client.event_bus.has_subscribers(Waiting.name, logging.INFO):
            entries = yield from self.read_entries(self._ticket.resource, "readers remain")
            self._publish(Waiting, behind=Behind.other_holder(entries, self._ticket.position))

    def _begin(self) -> Effects[Upgrading]:
        """Begin the upgrade (with timeout 0: only if there is no other reader). Return its state."""
        only_if_free = self.timeout == 0
        self.client.require_open()

        def begin(session: Session, _: int) -> Upgrading:
            if self._rolled_back:  # (The downgrade of the rollback waits for this call's end, or has been made.)
                return Upgrading.NOT_YET
            return session.begin_upgrade(self._ticket, only_if_free)

        try:
            progress: Upgrading = yield Call("upgrade", begin, self.retry_timeout)
        except Busy:
            # Another session holds the gate in an open transaction; that counts as waiting.
            return Upgrading.NOT_YET
        if only_if_free and progress is not Upgrading.DONE:
            self._begun = False  # the database has changed nothing
        if progress is Upgrading.BEGUN:
            self.client.notify_waiters(self._ticket.resource)  # the upgrade may let another waiter be granted
        elif progress is Upgrading.NOT_YET and not only_if_free:
            yield Sleep(self._waiter, next(self._pauses))
        return progress

    def _wait(self) -> Effects[bool | None]:
        """Wait for one slice: True (granted), False (not yet), None (the row is gone)."""
        client, waiter = self.client, self._waiter
        client.require_open()
        facts = self.facts(self._ticket, is_suspect=True)
        answer: Any = NO_CONNECTION
        while answer is NO_CONNECTION:
            step = self.next_step(waiter, facts)
            if step.state is WaiterState.GONE:  # lost while we waited
                answer = None
            elif step.state is WaiterState.VICTIM:
                answer = yield from self.poll_or_give_up(waiter)
            elif step.state is WaiterState.ON_CONNECTION:
                answer = yield from self.wait(waiter, step.seconds)
                facts.has_connection = answer is not NO_CONNECTION
            elif step.state is WaiterState.POLLED:
                yield Sleep(waiter, min(step.seconds, next(self._pauses)))
                answer = yield from self.poll_once(waiter)
            else:
                answer = False  # the time is up
        granted: bool | None = answer
        return granted


def downgrade(client: DatabaseClient, state: GrantState) -> Effects[None]:
    """Downgrade the writer to a reader; if that fails, the next heartbeat does it."""
    state.require_held()
    client.engine.require(Capability.CONVERSIONS, "This")
    _require_convertible(state, WRITE, "downgraded")
    if state.depth > 1:
        raise ConfigurationError(
            f"{state!r} is held {state.depth} times (reentrant=True), and the blocks that acquired it "
            f"before rely on writing; downgrade it where it is held once",
            resource=state.resource,
        )
    with _only_conversion(client, state):
        state.conversions += 1
        state.set_access(READ)  # the grant counts as a reader from now on, even if the call fails
        try:
            exists = yield Call("downgrade", _downgrade_call(state))
        except Busy as exc:
            log.warning("%r is downgraded when the transaction that asserted it ends (%s)", state, exc)
            _downgrade_later(client, state)
            return
        except BaseException:
            _downgrade_later(client, state)
            raise
        if not exists:
            _mark_lost(client, state)
        client.notify_waiters(state.resource)


def _downgrade_call(state: GrantState) -> Callable[[Session, int], bool]:
    def downgrade(session: Session, _: int) -> bool:
        return session.downgrade(state.tickets[0])

    return downgrade


def _downgrade_later(client: DatabaseClient, state: GrantState) -> None:
    """Defer the downgrade to the next heartbeat."""
    state.set_access(READ)
    conversions = state.conversions

    def downgrade(session: Session, _: int) -> None:
        # Not if the grant was released or converted since. (Those calls use the main connection, as this one.)
        if state.conversions == conversions and not state.released and state.why_lost is None:
            session.downgrade(state.tickets[0])

    client.member.defer(downgrade)


def _require_convertible(state: GrantState, access: str, conversion: str) -> None:
    """Raise `ConfigurationError` unless the grant is of one resource, with this access. (``conversion``: a word.)"""
    request = state.requests[0]
    if len(state.requests) > 1:
        raise ConfigurationError(
            f"{state!r} is of several resources, and cannot be {conversion}; acquire the one to convert by itself",
            resource=state.resource,
        )
    if request.access != access or request.limit != 1:
        use = "read(…)" if access == READ else "write(…) or mutex(…)"
        raise ConfigurationError(
            f"{state!r} is {request.describe()}, which cannot be {conversion}; only a lock of {use} can",
            resource=state.resource,
        )


@contextlib.contextmanager
def _only_conversion(client: DatabaseClient, state: GrantState) -> Iterator[None]:
    """Raise `ConfigurationError` if another conversion of the grant runs: several threads may use the grant."""
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


def _mark_lost(client: DatabaseClient, state: GrantState) -> None:
    client.mark_lost_and_log([state.tickets[0].position], "its row was removed, perhaps by an operator")
    state.require_held()
