"""Take from rates, alone or together with locks.

Concurrent requests of one process for one rate form a batch, and one call takes for all of them. A request that times
out or is interrupted returns what it took. It relies on the database's clock, which decides when a slot is due.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlsem.client.effects import Call, Effects, Sleep
from sqlsem.client.held.registry import BaseGrant, GrantState, HeldGrant, ReleaseToken
from sqlsem.client.operations import terms
from sqlsem.client.operations.acquire import Acquisition
from sqlsem.client.operations.rate_grants import BaseRateGrant, adjusting
from sqlsem.client.operations.waiting import row_removed
from sqlsem.engines.answers import naming_resource
from sqlsem.engines.failures import Busy, Disconnected
from sqlsem.engines.protocol import Capability
from sqlsem.util import runtime
from sqlsem.util.threads import log
from sqlsem.values.errors import SqlsemError
from sqlsem.values.events import TimedOut
from sqlsem.values.locks import Request, monotonic
from sqlsem.values.rates import AHEAD_MS, RateAnswer, RateDemand, RateRequest, RateStatus

if TYPE_CHECKING:
    from sqlsem.client.callers import Caller
    from sqlsem.client.client import DatabaseClient
    from sqlsem.engines.base import Session

__all__ = ["RateAcquisition", "RateGroupAcquisition", "split"]

G = TypeVar("G", bound=BaseGrant)
R = TypeVar("R", bound=BaseRateGrant)

#: The shortest pause between two calls.
LEAST_SECONDS = 0.001


class _Batch:
    """The requests of this process that wait together for one rate; the leader takes for all, in their order."""

    def __init__(self, first: RateAcquisition[Any], room: int) -> None:
        self.members = [first]
        self.leader = first
        self.room = room  # the cost that may still join
        self.kind = first.kind


class _BatchRegistry:
    """The batches that other requests may still join. ``lock`` guards them and their members; not held in I/O."""

    def __init__(self, client: DatabaseClient) -> None:
        self.lock = threading.Lock()
        self._takes_batches = client.engine.session_class.batches_rates  # True: one call takes for several requests
        self._open: dict[Any, _Batch] = {}

    def enter(self, acquisition: RateAcquisition[Any], request: RateRequest, as_leader: bool) -> _Batch:
        """Add a request to an open batch with room, or to a new batch (always with ``as_leader``)."""
        with self.lock:
            batch = self._open.get(acquisition.kind)
            if batch is not None and batch.room >= request.cost and not as_leader:
                batch.members.append(acquisition)
                batch.room -= request.cost
                return batch
            batch = _Batch(acquisition, request.batch - request.cost)
            if self._takes_batches and batch.room > 0:
                self._open[batch.kind] = batch
            return batch

    def reopen(self, batch: _Batch) -> None:
        """Let requests join a batch again, because it has to wait. No-op if a newer batch is open."""
        with self.lock:
            if self._takes_batches and batch.room > 0:
                self._open.setdefault(batch.kind, batch)

    def close(self, batch: _Batch) -> None:
        """Let no further request join a batch. Idempotent."""
        with self.lock:
            if self._open.get(batch.kind) is batch:
                del self._open[batch.kind]


def _batches_of(client: DatabaseClient) -> _BatchRegistry:
    with client.state_lock:
        if client.rate_batches is None:
            client.rate_batches = _BatchRegistry(client)
        batches: _BatchRegistry = client.rate_batches
        return batches


class RateAcquisition(Generic[R]):
    """One take from a rate; a `RevertibleOperation`.

    Concurrent requests of one process for one rate form a batch. While the leader's call waits for the main connection,
    further requests join; the call takes for all of them. Each member gets a slot in the near future, and sleeps until
    then. If the slot is too far away, the batch waits in the rate's queue with one row, that of its leader. A served
    leader leaves, and the next member takes over that row. If the leader leaves unserved, the others join a new batch.

    Args:
        client: The database.
        request: The rate and the cost.
        timeout: Seconds to wait (None: for ever; 0: take only if there is room and no request waits).
        caller: The thread or task that takes.
        make_grant: Makes the grant of the API in use, from the slot (by the database's clock) and the seconds waited.
        new_event: Makes the event that wakes a waiter.
    """

    def __init__(
        self,
        client: DatabaseClient,
        request: RateRequest,
        timeout: float | None,
        caller: Caller,
        make_grant: Callable[[RateRequest, int, float], R],
        new_event: Callable[[], threading.Event] = runtime.event,
    ) -> None:
        client.require_open()
        client.engine.require(Capability.RATES, "A rate")
        self._client = client
        self._request = request
        self.kind = request.name, request.windows, request.burst  # the same for all requests of a batch
        self._timeout = timeout
        self._retry_timeout = client.retry if timeout is None else min(client.retry, max(timeout, 1.0))
        self._caller = caller
        self._make_grant = make_grant
        self._new_event = new_event
        self._began = monotonic()
        self._batch: _Batch | None = None
        self._queue_acquisition: Acquisition[BaseGrant] | None = None
        self._queue_grant: BaseGrant | None = None  # its row, once that is first in the queue
        self._answer_lost = False  # True: the call may have taken, but its answer was lost
        self._ended: GrantState | None = None  # the state of that grant, once its row was removed
        self._is_published = False  # the event `timed_out`
        self.event = new_event()  # wakes it from a `Sleep`
        self._batches = _batches_of(client)
        # Guarded by the lock of the batches:
        self._taken_ms: int | None = None
        self._due = 0.0  # when the slot may be used (`monotonic`)
        self._batch_ended = False  # its batch ended without a slot for it
        self._has_left = False  # True: it needs no slot any more

    def run(self) -> Effects[R | None]:
        """Return the grant, or None after the timeout. Raises `LockLost` if its row in the queue was removed."""
        taken = False
        if self._timeout == 0:
            yield from self._take(_Batch(self, 0), None)
            taken = self._taken_ms is not None
        else:
            joins, as_leader = True, False
            while joins:
                # (If its batch ends, a request leads the next one: it must not lose its position in the queue twice.)
                self._batch = batch = self._batches.enter(self, self._request, as_leader)
                as_leader = True
                taken = yield from (self._lead(batch) if batch.leader is self else self._follow(batch))
                self._leave_batch()
                joins = not taken and self._remaining() > 0
        if not taken:
            self._publish_timeout()
            return None
        while (left := self._due - monotonic()) > 0:
            self._client.require_open()
            yield Sleep(self, left)
        assert self._taken_ms is not None
        return self._make_grant(self._request, self._taken_ms, monotonic() - self._began)

    def _publish_timeout(self) -> None:
        """Publish `timed_out`, unless the acquisition of the row in the queue has published it."""
        bus = self._client.event_bus
        if self._timeout is not None and not self._is_published and bus.has_subscribers(TimedOut.name, TimedOut.level):
            fields = bus.common_fields(self._request.queue_request(), None, self._caller)
            bus.publish(TimedOut(**fields, waited=monotonic() - self._began, timeout=self._timeout))

    def rollback(self, outcome: str = "cancelled") -> Effects[None]:
        """Leave the queue, and return the slot; without a database in reach it counts as used. Idempotent."""
        taken_ms = self._leave()
        if self._queue_acquisition is not None:
            yield from self._queue_acquisition.rollback(outcome)
        if taken_ms is not None:
            try:
                yield from adjusting(BaseRateGrant(self._client, self._request, taken_ms, 0.0), 0, 1.0)
            except SqlsemError as exc:
                if not self._client.closed:
                    resource = self._request.resource
                    log.warning("Could not return unused cost to %r, so it counts as used: %s", resource, exc)

    def rollback_local(self) -> None:
        """Roll back in this process only, when no effect can be executed any more."""
        self._leave()
        if self._queue_acquisition is not None:
            self._queue_acquisition.rollback_local()

    def close(self) -> None:
        """Leave the batch at the end of the operation. Idempotent."""
        if self._queue_acquisition is not None:
            self._queue_acquisition.close()
        self._leave_batch()
        self._batch = None  # breaks the reference cycle, so that both are freed at once

    def _leave(self) -> int | None:
        """Leave the batch. Return the slot if one was taken."""
        if self._ended is not None:
            self._client.registry.publish_released(self._ended)
        with self._batches.lock:
            self._has_left = True
            taken_ms, self._taken_ms = self._taken_ms, None
        self._leave_batch()
        return taken_ms

    def _remaining(self) -> float:
        return self._client.timing.rate_poll if self._timeout is None else self._timeout - (monotonic() - self._began)

    # -- members and leaders of batches -------------------------------------------------------------------------

    def _follow(self, batch: _Batch) -> Effects[bool]:
        """Wait as a member, and perhaps lead. Return True with a slot; False after the timeout or the batch's end."""
        while True:
            self._client.require_open()
            with self._batches.lock:
                if self._taken_ms is not None:
                    return True
                if batch.leader is self:
                    break
                left = self._remaining()
                if self._batch_ended or left <= 0:
                    self._has_left = left <= 0
                    self._batch_ended = False
                    return False
            yield Sleep(self, min(left, self._client.timing.rate_poll))
        assert self._queue_grant is not None
        yield from self._take_as_first(batch, self._queue_grant)
        return self._taken_ms is not None

    def _lead(self, batch: _Batch) -> Effects[bool]:
        """Take as the leader, for all members. Return True if the leader's own request got its slot."""
        yield from self._take(batch, None)
        if self._taken_ms is None:
            self._ended = None
            self._batches.reopen(batch)
            grant = yield from self._wait_in_queue()
            if grant is not None:
                yield from self._take_as_first(batch, grant)
        return self._taken_ms is not None

    def _hand_off(self, batch: _Batch, grant: BaseGrant) -> bool:
        """Make the next unserved member the leader, and give it our row. Return False if there is none."""
        state = grant.state
        with self._batches.lock:
            following = next(
                (member for member in batch.members if member._taken_ms is None and not member._has_left), None
            )
            acquisition = self._queue_acquisition
            if following is None or acquisition is None:
                return False
            # From here on the next leader must release the grant, also after an interrupt.
            self._client.registry.reassign(grant, following._caller)
            acquisition.caller = following._caller
            following._queue_acquisition, following._queue_grant, self._queue_acquisition = acquisition, grant, None
            batch.leader = following
            state.loss_callbacks.append(following.event.set)
        following.event.set()
        return True

    def _leave_batch(self) -> None:
        """Leave the batch as its leader; unserved members join a new batch. Idempotent."""
        batch = self._batch
        if batch is None:
            return
        with self._batches.lock:
            if batch.leader is not self:
                return
            unserved = [member for member in batch.members if member is not self and member._taken_ms is None]
            for member in unserved:
                member._batch_ended = True
        self._batches.close(batch)
        for member in unserved:
            member.event.set()

    def _take(self, batch: _Batch, queue_grant: BaseGrant | None) -> Effects[RateAnswer]:
        try:
            answer: RateAnswer = yield Call("rate", partial(self._take_for, batch, queue_grant), self._retry_timeout)
        except Busy:  # another session keeps the gate in an open transaction
            answer = RateAnswer(RateStatus.OTHERS_FIRST)
        return answer

    def _take_for(self, batch: _Batch, queue_grant: BaseGrant | None, session: Session, member_id: int) -> RateAnswer:
        """Take for all unserved members of the batch, in their order. Runs on the main connection."""
        self._batches.close(batch)
        with self._batches.lock:
            if self._has_left:  # another thread rolled back while this call waited for the main connection
                return RateAnswer(RateStatus.GONE)
            waiting = [member for member in batch.members if member._taken_ms is None and not member._has_left]
        if not waiting:
            return RateAnswer(RateStatus.OTHERS_FIRST)
        ticket = None if queue_grant is None else queue_grant.state.tickets[0]
        first, *others = (member._demand() for member in waiting)
        request = replace(self._request, cost=first.cost)
        try:
            with naming_resource(request.resource):
                answer = session.take_rate(request, ticket, first.ahead_ms, others)
        except Disconnected:
            self._answer_lost = True
            raise
        was_lost, self._answer_lost = self._answer_lost, False
        if answer.status is RateStatus.GONE and was_lost and queue_grant is not None and ticket is not None:
            self._discard_row(queue_grant)  # the call whose answer was lost removed the row; its slot counts as used
            self._client.notify_waiters(ticket.resource)
        if answer.status is RateStatus.TAKEN:
            now, unneeded = monotonic(), []
            with self._batches.lock:
                served = waiting[: len(answer.times)]
                for number, member in enumerate(served):
                    member._due = now + answer.due_in(number)
                    if member._has_left:  # during the call
                        unneeded.append((answer.times[number], member._request.cost))
                    else:
                        member._taken_ms = answer.times[number]
            for member in served:
                if member is not self:
                    member.event.set()
            if queue_grant is not None and ticket is not None and len(served) == len(waiting):
                # The call has removed the row, so the next waiter of this process becomes the first.
                self._discard_row(queue_grant)
                self._client.handle_release(ticket, session, member_id)
            for taken_ms, cost in unneeded:
                session.adjust_rate(request.resource, taken_ms, -cost)
        return answer

    def _discard_row(self, queue_grant: BaseGrant) -> None:
        """Discard a removed row here, before other waiters of this process are notified and check the registry."""
        self._ended = queue_grant.state
        self._client.registry.discard(queue_grant)
        self._client.member.discard(queue_grant.state.tickets)

    def _demand(self) -> RateDemand:
        """Return the demand: the cost, and the longest sleep until the slot."""
        ahead = 0.0 if self._timeout == 0 else min(AHEAD_MS / 1000, self._remaining())
        return RateDemand(self._request.cost, max(0, int(ahead * 1000)))

    def _all_served(self, batch: _Batch) -> bool:
        with self._batches.lock:
            return all(member._taken_ms is not None or member._has_left for member in batch.members)

    def _wait_in_queue(self) -> Effects[BaseGrant | None]:
        """Wait in the rate's queue until the batch is first; None after the timeout."""
        request, client = self._request.queue_request(), self._client
        timeout = None if self._timeout is None else max(0.001, self._remaining())
        keep: list[HeldGrant[BaseGrant]] = []
        self._queue_acquisition = acquisition = Acquisition(
            client,
            terms.own_mutex(request.resource, {}, client),
            [request],
            timeout,
            self._caller,
            BaseGrant,
            keep,
            self._new_event,
        )
        grant = yield from acquisition.run()
        self._is_published = grant is None
        if grant is not None:
            acquisition.close()
            grant.state.loss_callbacks.append(self.event.set)
        return grant

    def _take_as_first(self, batch: _Batch, grant: BaseGrant) -> Effects[None]:
        """Take as the first in the queue, until this request is served or its timeout has passed."""
        client, state = self._client, grant.state
        while True:
            state.require_held()
            left = self._remaining()
            answer = yield from self._take(batch, grant)
            if self._ended is not None:
                client.registry.publish_released(state)
                return
            if self._all_served(batch):  # members that have left needed no slot
                yield from client.release(grant, ReleaseToken())
                return
            if self._taken_ms is not None and self._hand_off(batch, grant):
                return
            if answer.status is RateStatus.GONE:
                client.mark_lost_and_log([grant.position], "its row was removed while it waited")
                raise row_removed(f"rate {self._request.name!r}", self._request.resource)
            if left <= 0 and self._queue_acquisition is not None:
                yield from self._queue_acquisition.rollback("timeout")
                return
            timing = self._client.timing
            pause = answer.seconds if answer.status is not RateStatus.OTHERS_FIRST else timing.paused_rate_poll
            yield Sleep(self, min(max(pause, LEAST_SECONDS), left, timing.rate_poll))


class RateGroupAcquisition(Generic[G, R]):
    """The acquisition of locks and then, while they are held, of rates; a `RevertibleOperation`. If the time is up
    before everything is acquired, all of it is released. (A request that is first in a rate's queue never waits for a
    lock, so no deadlock arises.)
    """

    def __init__(
        self,
        acquisition: Acquisition[G],
        make_rate_acquisition: Callable[[RateRequest, float | None], RateAcquisition[R]],
        rates: Sequence[RateRequest],
        timeout: float | None,
    ) -> None:
        self._acquisition = acquisition
        self._make_rate_acquisition = make_rate_acquisition
        self._rates = tuple(rates)
        self._timeout = timeout
        self._began = monotonic()
        self._rate_acquisitions: list[RateAcquisition[R]] = []

    def run(self) -> Effects[G | None]:
        """Return the grant with all locks and rates, or None after the timeout."""
        grant = yield from self._acquisition.run()
        if grant is None:
            return None
        self._acquisition.close()  # the next waiter of this process for these locks becomes the first
        taken: dict[str, Any] = {}
        for rate in self._rates:
            left = self._timeout
            if self._timeout:
                left = max(0.001, self._timeout - (monotonic() - self._began))
            rate_acquisition = self._make_rate_acquisition(rate, left)
            self._rate_acquisitions.append(rate_acquisition)
            rate_grant = yield from rate_acquisition.run()
            if rate_grant is None:
                yield from self.rollback("timeout")
                return None
            grant.state.require_held()
            taken[rate.name] = rate_grant
        grant.rates = taken
        return grant

    def rollback(self, outcome: str = "cancelled") -> Effects[None]:
        """Roll back all acquisitions of the group. Idempotent."""
        try:
            for rate_acquisition in self._rate_acquisitions:
                yield from rate_acquisition.rollback(outcome)
            yield from self._acquisition.rollback(outcome)
        except BaseException:  # a second interrupt: the rollbacks that have not begun must not be left out
            self.rollback_local()
            raise

    def rollback_local(self) -> None:
        """Roll back in this process only, when no effect can be executed any more."""
        for rate_acquisition in self._rate_acquisitions:
            rate_acquisition.rollback_local()
        self._acquisition.rollback_local()

    def close(self) -> None:
        """Close all acquisitions of the group. Idempotent."""
        for rate_acquisition in self._rate_acquisitions:
            rate_acquisition.close()
        self._acquisition.close()


def split(requests: Sequence[Request | RateRequest]) -> tuple[list[Request], list[RateRequest]]:
    """Split requests into locks and rates."""
    locks: list[Request] = []
    rates: list[RateRequest] = []
    for request in requests:  # (Runs at every lock: a loop is faster than two comprehensions.)
        if isinstance(request, Request):
            locks.append(request)
        else:
            rates.append(request)
    return locks, rates
