"""Rates: how something is taken from one, at its turn; and locks that are had together with rates."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from sqlsem import runtime
from sqlsem.core import terms
from sqlsem.core.acquire import Acquisition
from sqlsem.core.callers import Caller
from sqlsem.core.client import DatabaseClient
from sqlsem.core.effects import Call, Effects, Sleep
from sqlsem.core.grant_registry import BaseGrant, GrantState, HeldGrant, ReleaseToken
from sqlsem.core.rate_grants import BaseRateGrant, giving_back
from sqlsem.core.threads import voice
from sqlsem.engines.base import Busy, Disconnected, Session
from sqlsem.engines.rates import RateSession
from sqlsem.errors import LockLost, SqlsemError
from sqlsem.events import TimedOut
from sqlsem.model import Request, monotonic
from sqlsem.model_rates import AHEAD_MS, RateAnswer, RateDemand, RateRequest, RateStatus

__all__ = ["RateAcquisition", "RateGroupAcquisition", "split"]

log = voice
G = TypeVar("G", bound=BaseGrant)
R = TypeVar("R", bound=BaseRateGrant)

#: Who is first in the queue looks again after so many seconds at the latest: somebody may have given something back.
LOOK_SECONDS = 4.0
#: The same while the rate is paused, or its clock has not reached the next millisecond.
PAUSED_SECONDS, LEAST_SECONDS = 0.5, 0.001


class _Sleeper:
    """What `Sleep` wakes."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event


class _Batch:
    """Those of this process that wait together for one rate: one takes for all of them, in their order."""

    def __init__(self, first: RateAcquisition[Any], room: int) -> None:
        self.riders = [first]
        self.driver = first
        self.room = room  # for so much more


def _kind(request: RateRequest) -> object:
    """Who asks for the same may ride together."""
    return request.name, request.windows, request.burst


class _BatchRegistry:
    """Those that others may still join. ``lock`` guards them and their riders, and is never held during I/O."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._open: dict[Any, _Batch] = {}

    def enter(self, taking: RateAcquisition[Any], request: RateRequest, batches: bool, drives: bool) -> _Batch:
        """The car that one rides in; its own where it is the first, or ``drives``."""
        with self.lock:
            car = self._open.get(_kind(request))
            if car is not None and car.room >= request.cost and not drives:
                car.riders.append(taking)
                car.room -= request.cost
                return car
            car = _Batch(taking, request.batch - request.cost)
            if batches and car.room > 0:
                self._open[_kind(request)] = car
            return car

    def reopen(self, car: _Batch, request: RateRequest) -> None:
        """Others may join it again, as it has to wait; unless they join another one by now."""
        with self.lock:
            if car.room > 0:
                self._open.setdefault(_kind(request), car)

    def close(self, car: _Batch) -> None:
        """Nobody joins it any more. Repeatable."""
        with self.lock:
            for key, one in list(self._open.items()):
                if one is car:
                    del self._open[key]


_all_cars: weakref.WeakKeyDictionary[DatabaseClient, tuple[str, _BatchRegistry]] = weakref.WeakKeyDictionary()
_all_cars_lock = threading.Lock()


def _cars_of(client: DatabaseClient) -> _BatchRegistry:
    with _all_cars_lock:
        secret, cars = _all_cars.get(client, ("", None))
        if cars is None or secret != client.nonce:  # in a forked child nobody rides with its parent's
            cars = _BatchRegistry()
            _all_cars[client] = (client.nonce, cars)
        return cars


class RateAcquisition(Generic[R]):
    """Something is taken from one rate; an `Operation`.

    Those of a process that ask at one time ride together: while the first one's call stands in line for the main
    session others join it, and it takes for all. Each is promised its share for a moment soon, and sleeps until then.
    Where that is too far ahead the car waits in the rate's line as one, with the first one's row, and others may join
    it as long as it waits. Who drives leaves as soon as it has what it wants, and the next one drives on with that row:
    what the others want may be long in coming. Where it leaves otherwise (its time is up, it is interrupted), those
    that have nothing yet enter anew.

    Args:
        process: Where.
        request: What.
        timeout: For how long, in seconds (None: for ever; 0: only if it is there, and nobody waits).
        caller: Who asks.
        make_grant: Makes the face's grant of what was taken (by the database's clock) after so many seconds.
        new_event: Makes what wakes a waiter.
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
        client.engine.require(RateSession, "A rate")
        self._client = client
        self._request = request
        self._timeout = timeout
        self._retry_timeout = client.retry if timeout is None else min(client.retry, max(timeout, 1.0))
        self._caller = caller
        self._make_grant = make_grant
        self._new_event = new_event
        self._began = monotonic()
        self._car: _Batch | None = None
        self._line: Acquisition[BaseGrant] | None = None
        self._place: BaseGrant | None = None  # first in the queue
        self._unsure = False  # whether it was taken with that: the answer was lost
        self._gone: GrantState | None = None  # that place, when its row has gone
        self._told = False  # that it was not had in time
        self._sleeper = _Sleeper(new_event())
        self._cars = _cars_of(client)
        # Guarded by the lock of the cars:
        self._taken_ms: int | None = None
        self._due = 0.0  # when that may be used, which is soon
        self._put_down = False  # whoever drove has left
        self._out = False  # it wants nothing any more

    def run(self) -> Effects[R | None]:
        """Take it, or None when the time is up. Raises `LockLost` when its place in the line was lost."""
        taken = False
        if self._timeout == 0:
            yield from self._take(_Batch(self, 0), None)
            taken = self._taken_ms is not None
        else:
            rides, again = True, False
            while rides:
                # (Who was put down drives: it shall not lose its place by others a second time.)
                self._car = car = self._cars.enter(self, self._request, _batches(self._client), drives=again)
                again = True
                taken = yield from (self._lead(car) if car.driver is self else self._ride(car))
                self._get_off()
                rides = not taken and self._remaining() > 0
        if not taken:
            self._tell_late()
            return None
        while (left := self._due - monotonic()) > 0:
            self._client.require_open()
            yield Sleep(self._sleeper, left)
        assert self._taken_ms is not None
        return self._make_grant(self._request, self._taken_ms, monotonic() - self._began)

    def _tell_late(self) -> None:
        """That it was not had in time; once, as its place in the line may have told it."""
        bus = self._client.event_bus
        if self._timeout is not None and not self._told and bus.has_subscribers(TimedOut.name, TimedOut.level):
            about = bus.common_fields(self._request.queue_request(), None, self._caller)
            bus.publish(TimedOut(**about, waited=monotonic() - self._began, timeout=self._timeout))

    def rollback(self, outcome: str = "cancelled") -> Effects[None]:
        """Leave the line, and give back what was taken. Repeatable. What cannot be given back now counts as used."""
        taken_ms = self._leave()
        resource, cost = self._request.resource, self._request.cost
        if self._line is not None:
            yield from self._line.rollback(outcome)
        if taken_ms is not None:
            try:
                yield Call("adjust", giving_back(resource, taken_ms, cost), 1.0)
            except SqlsemError as exc:
                if not self._client.closed:
                    log.warning("What was taken of %r, and not used, counts as used: %s", resource, exc)

    def rollback_local(self) -> None:
        """As `rollback`, where nothing can be carried out any more."""
        self._leave()
        if self._line is not None:
            self._line.rollback_local()

    def close(self) -> None:
        """It is over. Repeatable."""
        if self._line is not None:
            self._line.close()
        self._get_off()
        self._car = None  # which refers to us: so both are freed now, without the garbage collector

    def _leave(self) -> int | None:
        """Want nothing any more; when something was taken, if it was."""
        if self._gone is not None:
            self._client.registry.publish_released(self._gone)
        with self._cars.lock:
            self._out = True
            taken_ms, self._taken_ms = self._taken_ms, None
        self._get_off()  # (nobody has it run_generator on any more)
        return taken_ms

    def _remaining(self) -> float:
        return LOOK_SECONDS if self._timeout is None else self._timeout - (monotonic() - self._began)

    # -- riding, and driving ------------------------------------------------------------------------------------

    def _ride(self, car: _Batch) -> Effects[bool]:
        """Whether who drives has taken it for us, or we have, driving on. Where not, enter anew, or it is over."""
        while True:
            self._client.require_open()
            with self._cars.lock:
                if self._taken_ms is not None:
                    return True
                if car.driver is self:
                    break
                left = self._remaining()
                if self._put_down or left <= 0:
                    self._out = left <= 0
                    self._put_down = False
                    return False
            yield Sleep(self._sleeper, min(left, LOOK_SECONDS))
        assert self._place is not None
        yield from self._take_first(car, self._place)
        return self._taken_ms is not None

    def _lead(self, car: _Batch) -> Effects[bool]:
        """Whether we have it, at our turn, in time. Who of the others has not by then enters anew."""
        yield from self._take(car, None)
        if self._taken_ms is None:
            self._gone = None
            if _batches(self._client):
                self._cars.reopen(car, self._request)
            grant = yield from self._wait_in_line()
            if grant is not None:
                yield from self._take_first(car, grant)
        return self._taken_ms is not None

    def _pass_on(self, car: _Batch, grant: BaseGrant) -> bool:
        """Have the next one that has nothing yet run_generator on, with our row. False where there is none."""
        state = grant.state
        with self._cars.lock:
            following = next((rider for rider in car.riders if rider._taken_ms is None and not rider._out), None)
            line = self._line
            if following is None or line is None:
                return False
            # From here on it is the other one's to give back, whatever strikes it.
            self._client.registry.reassign(grant, following._caller)
            line.caller = following._caller
            following._line, following._place, self._line = line, grant, None
            car.driver = following
            state.loss_callbacks.append(following._sleeper.event.set)
        following._sleeper.event.set()
        return True

    def _get_off(self) -> None:
        """Who drives leaves: those of the others that have nothing yet enter anew. Repeatable."""
        car = self._car
        if car is None:
            return
        with self._cars.lock:
            if car.driver is not self:
                return
            left = [rider for rider in car.riders if rider is not self and rider._taken_ms is None]
            for one in left:
                one._put_down = True
        self._cars.close(car)
        for one in left:
            one._sleeper.event.set()

    def _take(self, car: _Batch, place: BaseGrant | None) -> Effects[RateAnswer]:
        try:
            answer: RateAnswer = yield Call("rate", partial(self._take_for, car, place), self._retry_timeout)
        except Busy:  # somebody keeps the gate in an open transaction
            answer = RateAnswer(RateStatus.OTHERS_FIRST)
        return answer

    def _take_for(self, car: _Batch, place: BaseGrant | None, session: Session, member_id: int) -> RateAnswer:
        """On the main session: take for all of the car that have nothing yet, one after the other."""
        self._cars.close(car)
        with self._cars.lock:
            if self._out:  # in another thread, while this call stood in its line
                return RateAnswer(RateStatus.GONE)
            waiting = [rider for rider in car.riders if rider._taken_ms is None and not rider._out]
        if not waiting:
            return RateAnswer(RateStatus.OTHERS_FIRST)
        ticket = None if place is None else place.state.tickets[0]
        first, *others = (one._wish() for one in waiting)
        request = replace(self._request, cost=first.cost)
        try:
            answer = session.take_rate(request, ticket, first.ahead_ms, others)
        except Disconnected:
            self._unsure = True
            raise
        unsure, self._unsure = self._unsure, False
        if answer.status is RateStatus.GONE and unsure and place is not None and ticket is not None:
            self._row_went(place)  # by the call before: what that took counts as used
            self._client.notify_waiters(ticket.resource)
        if answer.status is RateStatus.TAKEN:
            now, late = monotonic(), []
            with self._cars.lock:
                served = waiting[: len(answer.times)]
                for number, one in enumerate(served):
                    one._due = now + answer.due_in(number)
                    if one._out:  # has left meanwhile
                        late.append((answer.times[number], one._request.cost))
                    else:
                        one._taken_ms = answer.times[number]
            for one in served:
                if one is not self:
                    one._sleeper.event.set()
            if place is not None and ticket is not None and len(served) == len(waiting):
                # The row is gone with it, and the next one of ours may come forward.
                self._row_went(place)
                self._client.handle_release(ticket, session, member_id)
            for taken_ms, cost in late:
                session.adjust_rate(request.resource, taken_ms, -cost)
        return answer

    def _row_went(self, place: BaseGrant) -> None:
        """It is in no book any more when others of ours are told so: they sleep behind what they find there."""
        self._gone = place.state
        self._client.registry.discard(place)
        self._client.member.forget(place.state.tickets)

    def _wish(self) -> RateDemand:
        """What it wants, and for how long it would sleep for that: not beyond its time."""
        ahead = 0.0 if self._timeout == 0 else min(AHEAD_MS / 1000, self._remaining())
        return RateDemand(self._request.cost, max(0, int(ahead * 1000)))

    def _all_served(self, car: _Batch) -> bool:
        with self._cars.lock:
            return all(rider._taken_ms is not None or rider._out for rider in car.riders)

    def _wait_in_line(self) -> Effects[BaseGrant | None]:
        """Wait for the car's turn; None when our time is up."""
        request, client = self._request.queue_request(), self._client
        timeout = None if self._timeout is None else max(0.001, self._remaining())
        keep: list[HeldGrant[BaseGrant]] = []
        self._line = line = Acquisition(
            client,
            terms.own_mutex(request.resource, {}, client),
            [request],
            timeout,
            self._caller,
            BaseGrant,
            keep,
            self._new_event,
        )
        grant = yield from line.run()
        self._told = grant is None
        if grant is not None:
            line.close()
            grant.state.loss_callbacks.append(self._sleeper.event.set)
        return grant

    def _take_first(self, car: _Batch, grant: BaseGrant) -> Effects[None]:
        """As the first in the queue, take until we have what we asked for or our time is up."""
        client, state = self._client, grant.state
        while True:
            state.require_held()
            left = self._remaining()
            answer = yield from self._take(car, grant)
            if self._gone is not None:
                client.registry.publish_released(state)
                return
            if self._all_served(car):  # some have left
                yield from client.registry.release(grant, ReleaseToken())
                return
            if self._taken_ms is not None and self._pass_on(car, grant):
                return
            if answer.status is RateStatus.GONE:
                client.mark_lost_and_log([grant.position], "its row was removed while it waited")
                raise LockLost(
                    f"The place in the line of rate {self._request.name!r} was lost (by an operator, or because the "
                    f"database was out of reach for too long); ask again",
                    resource=self._request.resource,
                )
            if left <= 0 and self._line is not None:
                yield from self._line.rollback("timeout")
                return
            pause = answer.seconds if answer.status is not RateStatus.OTHERS_FIRST else PAUSED_SECONDS
            yield Sleep(self._sleeper, min(max(pause, LEAST_SECONDS), left, LOOK_SECONDS))


def _batches(client: DatabaseClient) -> bool:
    """Whether its engine takes for several at once."""
    kind = client.engine.session_class
    return issubclass(kind, RateSession) and kind.batches


class RateGroupAcquisition(Generic[G, R]):
    """Locks, and then, while they are held, rates; an `Operation`. All or nothing: what was had is given back when the
    time is up before all is. (A request that is first in a rate's queue never waits for a lock, so no deadlock arises.)
    """

    def __init__(
        self,
        acquisition: Acquisition[G],
        takings: Callable[[RateRequest, float | None], RateAcquisition[R]],
        rates: Sequence[RateRequest],
        timeout: float | None,
    ) -> None:
        self._acquisition = acquisition
        self._new_taking = takings
        self._rates = tuple(rates)
        self._timeout = timeout
        self._began = monotonic()
        self._takings: list[RateAcquisition[R]] = []

    def run(self) -> Effects[G | None]:
        """Have it all, or None when the time is up."""
        grant = yield from self._acquisition.run()
        if grant is None:
            return None
        self._acquisition.close()  # whoever else of ours waits for these locks comes forward
        taken: dict[str, Any] = {}
        for rate in self._rates:
            left = self._timeout
            if self._timeout:
                left = max(0.001, self._timeout - (monotonic() - self._began))
            taking = self._new_taking(rate, left)
            self._takings.append(taking)
            had = yield from taking.run()
            if had is None:
                yield from self.rollback("timeout")
                return None
            grant.state.require_held()
            taken[rate.name] = had
        grant.rates = taken
        return grant

    def rollback(self, outcome: str = "cancelled") -> Effects[None]:
        """Undo what was done. Repeatable."""
        for taking in self._takings:
            yield from taking.rollback(outcome)
        yield from self._acquisition.rollback(outcome)

    def rollback_local(self) -> None:
        """As `rollback`, where nothing can be carried out any more."""
        for taking in self._takings:
            taking.rollback_local()
        self._acquisition.rollback_local()

    def close(self) -> None:
        """It is over. Repeatable."""
        for taking in self._takings:
            taking.close()
        self._acquisition.close()


def split(asked: Sequence[Request | RateRequest]) -> tuple[list[Request], list[RateRequest]]:
    """The locks among these, and the rates."""
    locks: list[Request] = []
    rates: list[RateRequest] = []
    for one in asked:  # (At every lock: a loop is faster than two comprehensions.)
        if isinstance(one, Request):
            locks.append(one)
        else:
            rates.append(one)
    return locks, rates
