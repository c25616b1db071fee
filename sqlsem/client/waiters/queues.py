"""The waiters of this process: one FIFO queue per resource, and the polling for waiters without a connection.

A waiter is a *candidate* if no earlier waiter of this process blocks it (`Request.keeps_out`). Only candidates ask the
database. The others sleep until the waiters before them have left, so thousands of them cost nothing.

The head of a queue blocks on a connection of its own, as long as there is a free one. If it cannot be granted before
this process releases something, it waits *locally*: it sleeps without a connection, and the call that releases polls
it (`WaiterQueues.grant_next_local`). All other candidates are *polled* together, in one statement for all that are due.
One of them is the *poll leader*: it sleeps until the next waiter is due, and then polls for all.

Invariants
    The state lock guards all data of this module.
    A waiter that has its answer is in no queue, and the waiters behind it have been woken.
    No waiter depends on the poll leader alone. When it leaves, another waiter becomes the leader; if an interrupt ends
    it, the next waiter that wakes does. The heartbeat wakes waiters that missed their notification through an interrupt
    (`WaiterQueues.wake_missed`).
"""

from __future__ import annotations

import itertools
import math
import random
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from sqlsem.client.callers import ours
from sqlsem.client.waiters.state import Facts, Step, WaiterState, next_step
from sqlsem.util.threads import log
from sqlsem.util.timing import DEFAULT, Timing
from sqlsem.values.errors import SqlsemError
from sqlsem.values.events import Behind, meets
from sqlsem.values.locks import Request, Ticket, monotonic

if TYPE_CHECKING:
    from sqlsem.engines.base import Session

__all__ = ["Waiter", "WaiterQueues", "wake_all"]

#: The first pause between polls. Each further pause is this share of the time since the first poll.
FIRST_SECONDS, SHARE = 0.005, 0.05
#: Polls take at most this share of the time: a slow poll is followed by a longer rest.
BUSY = 0.05
#: The most waiters in one statement.
MAX_POLLED = 1000
#: If more than `MAX_WAKEUP_LOCKS` waiters of a queue have a wakeup lock, only the first `FRONT` keep it, and the last
#: waiter of each sequence of equal requests (`LockSession.drop_wakeup_locks`).
MAX_WAKEUP_LOCKS, FRONT = 256, 64
#: After another process was granted a lock that this process released, this many next waiters do not wait locally.
NO_LOCAL_WAITS = 16

_position = attrgetter("position")


class Waiter:
    """A waiting request of this process. Its ``event`` is set when polling may succeed.

    ``answer``: True if granted, None if its row is gone, False until either is known.
    """

    __slots__ = (
        *("answer", "began", "behind", "event", "has_wakeup_lock", "kind", "position"),
        *("request", "since", "state", "ticket"),
    )

    def __init__(self, ticket: Ticket, request: Request, event: threading.Event) -> None:
        self.ticket = ticket
        self.position = ticket.position
        self.request = request
        self.kind = (request.access, request.limit, request.weight)
        self.event = event
        self.answer: bool | None = False
        self.state = WaiterState.REGISTERED
        self.has_wakeup_lock = True  # a lock in the database, on which a waiter behind it may sleep
        self.since = math.inf  # when it was first polled
        self.began = monotonic()
        self.behind: Behind | None = None  # its blocker, if the `waiting` event was published


class _WaiterQueue:
    """The waiters of one resource, by position and by kind. The kind alone decides which requests block each other."""

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self._kinds: dict[tuple[str, int | None, int], list[Waiter]] = {}
        #: The kind of the waiter granted last, if further waiters of that kind may share its lock.
        self.shared_kind: tuple[str, int | None, int] | None = None
        #: Granted waiters whose grants are not registered yet.
        self.granted: list[Waiter] = []
        #: The number of next waiters that must not wait locally.
        self.no_local_waits = 0
        #: The number of waiters without a wakeup lock; and the number with one from which more are dropped.
        self.without_lock, self.drop_at = 0, MAX_WAKEUP_LOCKS

    def add(self, waiter: Waiter) -> None:
        insort(self.waiters, waiter, key=_position)
        kind = self._kinds.get(waiter.kind)
        if kind is None:  # (Not `setdefault`: an interrupt after it would leave an empty list.)
            self._kinds[waiter.kind] = [waiter]
        else:
            insort(kind, waiter, key=_position)

    def remove(self, waiter: Waiter) -> bool:
        """Return True if the waiter was in this queue."""
        kind = self._kinds.get(waiter.kind, [])
        removed = kind == [waiter]
        if removed:  # (As in `add`: an interrupt leaves no empty list.)
            del self._kinds[waiter.kind]
        else:
            removed = _remove(kind, waiter)
        removed = _remove(self.waiters, waiter) or removed
        self.without_lock -= removed and not waiter.has_wakeup_lock
        return removed

    def candidates(self) -> list[Waiter]:
        """Return the waiters that no earlier waiter blocks. (The first of each kind blocks the others of that kind.)"""
        if len(self._kinds) <= 1:
            return self.waiters[:1]
        firsts = sorted((kind[0] for kind in self._kinds.values()), key=_position)
        return [
            later
            for number, later in enumerate(firsts)
            if not any(earlier.request.keeps_out(later.request) for earlier in firsts[:number])
        ]

    def is_blocked(self, waiter: Waiter) -> bool:
        """Return True if an earlier waiter must be granted before this one."""
        return self.waiters[0] is not waiter and waiter not in self.candidates()

    def can_share(self, waiter: Waiter) -> bool:
        """Return True if a waiter of its kind was just granted, and it can share the lock."""
        return self.shared_kind == waiter.kind and not self.is_blocked(waiter)

    @property
    def has_many_locks(self) -> bool:
        """True if so many waiters have a wakeup lock that dropping some is worth a call."""
        return len(self.waiters) - self.without_lock >= self.drop_at

    def drop_wakeup_locks(self) -> list[Waiter]:
        """Mark and return the waiters that need no wakeup lock: those behind the front whose next waiter is also ours
        and of the same kind.
        """
        if not self.has_many_locks:
            return []
        middle = itertools.pairwise(itertools.islice(self.waiters, FRONT, None))
        chosen = [
            waiter
            for waiter, after in middle
            if waiter.has_wakeup_lock and waiter.kind == after.kind and not waiter.request.shared
        ]
        for waiter in chosen:
            waiter.has_wakeup_lock = False
        self.without_lock += len(chosen)
        self.drop_at = max(MAX_WAKEUP_LOCKS, 2 * (len(self.waiters) - self.without_lock))
        return chosen

    def restore_wakeup_locks(self) -> list[Waiter]:
        """Mark and return the waiters near the front that have no wakeup lock."""
        if all(waiter.has_wakeup_lock for waiter in self.waiters[: FRONT // 2]):
            return []
        chosen = [waiter for waiter in self.waiters[:FRONT] if not waiter.has_wakeup_lock]
        for waiter in chosen:
            waiter.has_wakeup_lock = True
        self.without_lock -= len(chosen)
        return chosen

    def run_of(self, waiter: Waiter) -> Iterable[Waiter]:
        """Yield this waiter and its successors until the kind differs."""
        successors = itertools.islice(self.waiters, bisect_left(self.waiters, waiter.position, key=_position), None)
        return itertools.takewhile(lambda successor: successor.kind == waiter.kind, successors)


def _remove(waiters: list[Waiter], waiter: Waiter) -> bool:
    index = bisect_left(waiters, waiter.position, key=_position)
    exists = index < len(waiters) and waiters[index] is waiter
    if exists:
        del waiters[index]
    return exists


class WaiterQueues:
    """All waiters of this process, except readers that upgrade: these hold their lock already."""

    def __init__(self, state_lock: threading.Lock, longest_poll: float = DEFAULT.longest_poll) -> None:
        self._state_lock = state_lock
        self._longest_poll = longest_poll
        self.queues: dict[str, _WaiterQueue] = {}
        self._polled: dict[Waiter, float] = {}  # polled waiters, and when each is due
        self._leader: Waiter | None = None
        self._poll_at = math.inf  # when the poll leader wakes
        self._polling_until = -math.inf  # until then a waiter polls for all, and no other does
        self._rest_until = -math.inf  # no poll before then, because the last one took long

    def waiters(self) -> list[Waiter]:
        """Return all waiters."""
        with self._state_lock:
            return [waiter for queue in self.queues.values() for waiter in queue.waiters]

    def add(self, waiter: Waiter) -> None:
        """Put a waiter into the queue of its resource."""
        with self._state_lock:
            self.queues.setdefault(waiter.ticket.resource, _WaiterQueue()).add(waiter)

    def remove(self, waiters: Collection[Waiter]) -> None:
        """Take waiters out, and wake the waiters that have become candidates. Idempotent."""
        with self._state_lock:
            woken: list[Waiter] = []
            for waiter in waiters:
                if waiter.answer is False:
                    waiter.answer = None  # first, in case of an interrupt
            for waiter in waiters:
                # (Usually the waiter has its answer, and none of our waiters is behind it: nothing is left to do.)
                if waiter.ticket.resource in self.queues or waiter in self._polled or self._leader is waiter:
                    woken += self._remove(waiter)
                queue = self.queues.get(waiter.ticket.resource)
                if queue is not None and waiter in queue.granted:
                    queue.granted.remove(waiter)
        if woken:
            wake_all(woken)

    def set_answer(self, waiter: Waiter, answer: bool | None) -> None:
        """Set the waiter's answer, unless it has one. Called by the waiter's own thread or task, which is awake."""
        with self._state_lock:
            woken = self._answer(waiter, answer)
        if len(woken) > 1:
            wake_all(other for other in woken if other is not waiter)

    def is_first(self, waiter: Waiter) -> bool:
        """Return True if the waiter is the first of its queue."""
        queue = self.queues.get(waiter.ticket.resource)
        return queue is not None and queue.waiters[:1] == [waiter]

    def next_step(self, waiter: Waiter, facts: Facts, now: float, timing: Timing, held: Iterable[Request] = ()) -> Step:
        """Choose the next step of a waiter that was added (`state.next_step`), and record the state that it enters.

        Args:
            waiter: The waiter.
            facts: The facts that the operation knows. Those of the queues are filled in.
            now: The time (`monotonic`).
            timing: The times of the client.
            held: The requests that this process holds ahead of the waiter, if it is the first of its queue.
        """
        with self._state_lock:
            queue = self.queues.get(waiter.ticket.resource)
            facts.answer = waiter.answer
            if facts.answer is False and queue is not None:
                facts.is_first = queue.waiters[0] is waiter
                facts.is_blocked, facts.can_share = queue.is_blocked(waiter), queue.can_share(waiter)
                facts.polls_for_others = self._leader is waiter and len(self._polled) > 1
                # (Not asked again for a waiter that has just found no connection.)
                facts.is_held = facts.is_first and facts.has_connection and self._is_held(queue, waiter, held)
            step = next_step(waiter.state, facts, now, timing)
            waiter.state = step.state
            woken = self._stop_polling(waiter) if step.state is WaiterState.ON_CONNECTION else []
        wake_all(woken)
        return step

    def _is_held(self, queue: _WaiterQueue, waiter: Waiter, held: Iterable[Request]) -> bool:
        """Return True if requests that this process holds, or was just granted, block the first waiter of a queue
        whatever other processes do. Return False for some time after another process was granted the lock that this
        process had released.
        """
        if waiter.state is WaiterState.LOCAL_WAIT or queue.no_local_waits:
            queue.no_local_waits = max(0, queue.no_local_waits - 1)
            return False
        granted = (earlier.request for earlier in queue.granted if earlier.position < waiter.position)
        return not waiter.request.fits([*held, *granted], None)

    def blocker_of(self, waiter: Waiter) -> Behind | None:
        """Return the blocker of the first earlier waiter of this process that blocks this one, or that waiter."""
        with self._state_lock:
            queue = self.queues.get(waiter.ticket.resource)
            for earlier in queue.waiters if queue is not None else ():
                if earlier.position >= waiter.position:
                    break
                if earlier.request.keeps_out(waiter.request):
                    if earlier.behind is not None or not meets(waiter.request, earlier.request.access):
                        return earlier.behind
                    seconds = monotonic() - earlier.began
                    return ours(earlier.request, earlier.ticket, "waits", seconds)
        return None

    def notify(self, resource: str) -> None:
        """Wake the candidates of a resource to poll: one of its rows was removed."""
        if resource not in self.queues:
            return
        with self._state_lock:
            queue = self.queues.get(resource)
            candidates = queue.candidates() if queue is not None else []
            for waiter in candidates:
                if waiter in self._polled:
                    self._polled[waiter] = -math.inf
        wake_all(candidates)

    def wake(self, positions: Iterable[int] | None) -> None:
        """Wake the waiters with these rows (None: all), so that they check their rows."""
        chosen = None if positions is None else set(positions)
        wake_all(waiter for waiter in self.waiters() if chosen is None or waiter.position in chosen)

    def wake_missed(self) -> None:
        """Wake heads and the poll leader if an interrupt kept them from being notified."""
        with self._state_lock:
            heads = [queue.waiters[0] for queue in self.queues.values() if queue.waiters]
        self.remove([head for head in heads if head.answer is not False])
        with self._state_lock:
            late = bool(self._polled) and monotonic() > self._poll_at + self._longest_poll
            woken = [
                head for head in heads if late or not (head in self._polled or head.state is WaiterState.LOCAL_WAIT)
            ]
        wake_all(woken)

    def _remove(self, waiter: Waiter) -> list[Waiter]:
        """Take one waiter out; return the waiters to wake."""
        woken = self._stop_polling(waiter)
        queue = self.queues.get(waiter.ticket.resource)
        if queue is not None and queue.waiters == [waiter]:  # the usual case: no waiter is left behind it
            del self.queues[waiter.ticket.resource]
        elif queue is not None:
            before = queue.candidates()
            if queue.remove(waiter):
                woken += [candidate for candidate in queue.candidates() if candidate not in before]
            if not queue.waiters:
                del self.queues[waiter.ticket.resource]
        return woken

    def _answer(self, waiter: Waiter, answer: bool | None) -> list[Waiter]:
        if waiter.answer is not False:
            return []
        waiter.answer = answer
        queue = self.queues.get(waiter.ticket.resource)
        if queue is not None:
            queue.shared_kind = waiter.kind if answer and waiter.request.shared else None
            if answer:
                queue.granted.append(waiter)
        return [waiter, *self._remove(waiter)]

    # -- local waits and wakeup locks ---------------------------------------------------------------------------

    def grant_next_local(self, resource: str, session: Session, member_id: int) -> None:
        """Poll for the waiters that wait locally: a call on the main connection, right after a row was removed."""
        with self._state_lock:
            queue = self.queues.get(resource)
            if queue is None:
                return
            chosen = [waiter for waiter in queue.candidates() if waiter.state is WaiterState.LOCAL_WAIT]
            for waiter in chosen:
                waiter.state = WaiterState.REGISTERED
        try:
            if chosen:
                self.poll_call(chosen)(session, member_id)
        except SqlsemError as exc:  # the release has succeeded; a waiter that is not granted now polls itself
            log.debug("Cannot poll the next waiter of %r: %s", resource, exc)
        finally:
            if not chosen or chosen[0].answer is False:
                if chosen:
                    with self._state_lock:
                        queue.no_local_waits = NO_LOCAL_WAITS
                self.notify(resource)
        if queue.without_lock:
            with self._state_lock:
                near = queue.restore_wakeup_locks()
            try:
                if near:
                    session.restore_wakeup_locks(member_id, [waiter.ticket for waiter in near])
            except SqlsemError as exc:  # the waiters behind them poll from time to time
                log.debug("Cannot restore the wakeup locks of %r, its waiters poll: %s", resource, exc)

    def drop_wakeup_locks(self, resource: str, session: Session, member_id: int) -> None:
        """Drop wakeup locks of a long queue that a request has joined. A call on the main connection."""
        queue = self.queues.get(resource)
        if queue is None or not queue.has_many_locks:
            return
        with self._state_lock:
            chosen = queue.drop_wakeup_locks()
        try:
            if chosen:
                session.drop_wakeup_locks(member_id, [waiter.ticket for waiter in chosen])
        except SqlsemError as exc:
            log.debug("Cannot drop wakeup locks of the waiters for %r: %s", resource, exc)

    # -- polling ------------------------------------------------------------------------------------------------

    def _stop_polling(self, waiter: Waiter) -> list[Waiter]:
        self._polled.pop(waiter, None)
        if self._leader is not waiter:
            return []
        self._leader = next(iter(self._polled), None)
        return [] if self._leader is None else [self._leader]

    def poll_delay(self, waiter: Waiter) -> float:
        """Include a waiter without connection in the polling. Return the seconds for which it may sleep."""
        with self._state_lock:
            now = monotonic()
            if waiter.answer is not False:
                return 0.0
            if waiter not in self._polled:
                waiter.since = min(waiter.since, now)
                self._polled[waiter] = now + FIRST_SECONDS
            if self._leader is waiter:
                self._poll_at = max(min(self._polled.values()), self._rest_until)
            elif self._leader is None or max(self._polled[waiter], self._rest_until) < self._poll_at:
                self._leader, self._poll_at = waiter, max(self._polled[waiter], self._rest_until)
            else:
                return self._longest_poll * random.uniform(0.8, 1.2)
            return max(0.0, self._poll_at - now)

    def begin_poll(self, waiter: Waiter, last: bool = False) -> list[Waiter]:
        """Return the waiters for which this one must poll now: none while another waiter polls. ``last``: only
        itself, as it does not sleep again.

        Call `end_poll` afterwards, also after an error.
        """
        with self._state_lock:
            now = monotonic()
            queue = self.queues.get(waiter.ticket.resource)
            if waiter.answer is not False or queue is None:
                return []
            if queue.can_share(waiter):  # poll for the following waiters of its kind, too
                queue.shared_kind = None
                return list(itertools.islice(queue.run_of(waiter), MAX_POLLED))
            if last:
                return [waiter]
            if now < self._polling_until:
                return []
            if all(at > now for at in self._polled.values()):
                return []
            # Include waiters that are due soon, after the others: each at most half a pause too early.
            chosen = [other for other, at in self._polled.items() if at <= now + self._pause(other, now) / 2]
            self._polling_until = now + 2 * self._longest_poll
            return sorted(chosen, key=lambda other: min(self._polled[other], now))[:MAX_POLLED]

    def poll_call(self, waiters: Sequence[Waiter]) -> Callable[[Session, int], None]:
        """Return the call that polls for these waiters and sets their answers."""

        def poll(session: Session, member_id: int) -> None:
            began = monotonic()
            if len(waiters) == 1:  # the usual case after a local release; a single wait is cheaper
                (waiter,) = waiters
                answers = {waiter.position: session.wait(waiter.ticket, 0.0, threading.Event())}
            else:
                answers = session.poll(member_id, [waiter.ticket for waiter in waiters])
            self._set_answers(waiters, answers, began)

        return poll

    def _set_answers(self, waiters: Sequence[Waiter], answers: dict[int, bool | None], began: float) -> None:
        woken = []
        with self._state_lock:
            now = monotonic()
            if self._polling_until > now:
                self._rest_until = now + min((now - began) / BUSY, self._longest_poll)
            for waiter in waiters:
                answer = answers.get(waiter.position, False)
                if answer is not False:
                    woken += self._answer(waiter, answer)
                elif waiter in self._polled:
                    self._polled[waiter] = now + self._pause(waiter, now)
        wake_all(woken)

    def end_poll(self) -> None:
        """Allow other waiters to poll."""
        with self._state_lock:
            self._polling_until = -math.inf

    def _pause(self, waiter: Waiter, now: float) -> float:
        """Return the seconds until the next poll of a waiter, by the time since its first poll."""
        return min(max(FIRST_SECONDS, (now - waiter.since) * SHARE), self._longest_poll)


def wake_all(waiters: Iterable[Waiter]) -> None:
    """Wake these waiters."""
    for waiter in waiters:
        waiter.event.set()
