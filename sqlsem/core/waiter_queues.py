"""Who of this process waits: a line for each resource, and the looks at those that have no session to wait in.

Who of a line waits *exposed* is not kept out by an earlier one of ours (`Request.keeps_out`), so something has to look
for it. All others sleep until those before them have left: thousands may wait, and cost nothing.

The first of a line waits in the database, in a session of its own, as long as there are any. Where it cannot be let in
before this process itself has given something back, it waits *at home*: it sleeps, and whoever
gives that back looks for it in the same call (`WaiterQueues.hand_over`). The other exposed ones *stand*: they are
looked at together, one statement for as many as are due. One of them *leads*: it sleeps no longer than until somebody
is due, and looks then for all. The answers are handed out by whoever carries out the statement.

Invariants
    The state lock guards everything here.
    Who is answered is in no line any more, and those behind it have been woken.
    Nothing depends on the leader alone: when it leaves, another one takes its place; when it is lost, whoever wakes
    next does. What an interrupt breaks off in here is made up for by the pulse (`WaiterQueues.tend`).
"""

from __future__ import annotations

import enum
import itertools
import math
import random
import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter

from sqlsem.core.callers import ours
from sqlsem.core.threads import voice
from sqlsem.engines.base import Session
from sqlsem.errors import SqlsemError
from sqlsem.events import Behind, meets
from sqlsem.model import Request, Ticket, monotonic

__all__ = ["Waiter", "WaiterQueues", "WaiterState"]

log = voice

#: The longest pause between two looks at one that stands, and the sleep of those that do not lead.
LONGEST_SECONDS = 4.0
#: The first pause. Each further one is this share of the time that it has stood for.
FIRST_SECONDS, SHARE = 0.005, 0.05
#: Looks take no more than this share of the time.
BUSY = 0.05
#: At the most so many in one statement.
MOST_IN_A_LOOK = 1000
#: Where more of one line have what those behind them are woken by, only the first ones keep it, and those at the ends
#: of runs (`LockSession.drop_wakeup_locks`).
MOST_KEPT, FRONT = 256, 64
#: Where what was given back went to another process, the next so many of ours do not wait at home.
NOT_AT_HOME = 16

_position = attrgetter("position")


class WaiterState(enum.Enum):
    """Where somebody waits."""

    ANSWERED = "nowhere any more"
    KEPT_OUT = "behind one of ours that would be let in before it"
    FIRST = "first in its line"
    EXPOSED = "not first, yet it might be let in"
    LET_IN_TOO = "right behind one that was let in, and that it shares with"


class Waiter:
    """One of our own requests that waits. Setting ``event`` says that looking now may pay.

    ``answer``: True when it is granted, None when its row is gone; False until that is known.
    """

    __slots__ = (
        *("answer", "at_home", "began", "behind", "event", "kind"),
        *("position", "request", "since", "spared", "ticket"),
    )

    def __init__(self, ticket: Ticket, request: Request, event: threading.Event) -> None:
        self.ticket = ticket
        self.position = ticket.position
        self.request = request
        self.kind = (request.access, request.limit, request.weight)
        self.event = event
        self.answer: bool | None = False
        self.at_home = False
        self.spared = False  # nobody need be woken by its end
        self.since = math.inf  # it has stood
        self.began = monotonic()
        self.behind: Behind | None = None  # whom it waits behind, where somebody wanted to know


class _WaiterQueue:
    """Those of one resource, by position; and by what they ask, as that alone says who keeps out whom."""

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        self._kinds: dict[tuple[str, int | None, int], list[Waiter]] = {}
        #: The kind of the one that was let in last, where others of its kind may be let in with it.
        self.opened: tuple[str, int | None, int] | None = None
        #: Those that were let in, and whose grants are not in the books yet.
        self.let_in: list[Waiter] = []
        #: So many do not wait at home.
        self.strangers = 0
        #: So many are spared, and when to spare more: when so many are not.
        self.spared, self.most_kept = 0, MOST_KEPT

    def add(self, waiter: Waiter) -> None:
        insort(self.waiters, waiter, key=_position)
        kind = self._kinds.get(waiter.kind)
        if kind is None:  # (None is ever empty, wherever an interrupt strikes.)
            self._kinds[waiter.kind] = [waiter]
        else:
            insort(kind, waiter, key=_position)

    def remove(self, waiter: Waiter) -> bool:
        """Whether it was there."""
        kind = self._kinds.get(waiter.kind, [])
        there = kind == [waiter]
        if there:  # (As in `add`: none is ever empty.)
            del self._kinds[waiter.kind]
        else:
            there = _take(kind, waiter)
        there = _take(self.waiters, waiter) or there
        self.spared -= there and waiter.spared
        return there

    def exposed(self) -> list[Waiter]:
        """Those that no earlier one keeps out. Of each kind, the first one keeps out the others."""
        if len(self._kinds) <= 1:
            return self.waiters[:1]
        firsts = sorted((kind[0] for kind in self._kinds.values()), key=_position)
        return [
            later
            for number, later in enumerate(firsts)
            if not any(earlier.request.keeps_out(later.request) for earlier in firsts[:number])
        ]

    def place(self, waiter: Waiter) -> WaiterState:
        if self.waiters[0] is not waiter and waiter not in self.exposed():
            return WaiterState.KEPT_OUT
        if self.opened == waiter.kind:
            return WaiterState.LET_IN_TOO
        return WaiterState.FIRST if self.waiters[0] is waiter else WaiterState.EXPOSED

    @property
    def crowded(self) -> bool:
        """Whether so many are not spared that it pays to look whom to spare."""
        return len(self.waiters) - self.spared >= self.most_kept

    def spare(self) -> list[Waiter]:
        """Those in the middle, from now on: right behind each stands another one of ours that asks for the same."""
        if not self.crowded:
            return []
        middle = itertools.pairwise(itertools.islice(self.waiters, FRONT, None))
        chosen = [one for one, after in middle if not one.spared and one.kind == after.kind and not one.request.shared]
        for waiter in chosen:
            waiter.spared = True
        self.spared += len(chosen)
        self.most_kept = max(MOST_KEPT, 2 * (len(self.waiters) - self.spared))
        return chosen

    def keep(self) -> list[Waiter]:
        """Those whose turn is near, and that were spared."""
        if not any(one.spared for one in self.waiters[: FRONT // 2]):
            return []
        chosen = [one for one in self.waiters[:FRONT] if one.spared]
        for waiter in chosen:
            waiter.spared = False
        self.spared -= len(chosen)
        return chosen

    def like(self, waiter: Waiter) -> Iterable[Waiter]:
        """It, and those behind it that ask for the same, up to one that does not."""
        behind = itertools.islice(self.waiters, bisect_left(self.waiters, waiter.position, key=_position), None)
        return itertools.takewhile(lambda one: one.kind == waiter.kind, behind)


def _take(waiters: list[Waiter], waiter: Waiter) -> bool:
    place = bisect_left(waiters, waiter.position, key=_position)
    there = place < len(waiters) and waiters[place] is waiter
    if there:
        del waiters[place]
    return there


class WaiterQueues:
    """All who wait for their turn. (Not those who upgrade: they are inside.)"""

    def __init__(self, state_lock: threading.Lock) -> None:
        self._state_lock = state_lock
        self._lines: dict[str, _WaiterQueue] = {}
        self._standing: dict[Waiter, float] = {}  # and when each is due
        self._leader: Waiter | None = None
        self._look_at = math.inf  # when the leader wakes
        self._looking_until = -math.inf  # somebody looks, unless it was lost on the way
        self._rest_until = -math.inf  # the last look took so long that the next one has to wait

    def waiters(self) -> list[Waiter]:
        """All of them."""
        with self._state_lock:
            return [waiter for line in self._lines.values() for waiter in line.waiters]

    def enter(self, waiter: Waiter) -> None:
        """Somebody begins to wait."""
        with self._state_lock:
            self._lines.setdefault(waiter.ticket.resource, _WaiterQueue()).add(waiter)

    def leave(self, waiters: Collection[Waiter]) -> None:
        """They wait no more, and those behind them come forward. May be repeated."""
        with self._state_lock:
            woken: list[Waiter] = []
            for waiter in waiters:
                if waiter.answer is False:
                    waiter.answer = None  # from now on, should an interrupt come in between
            for waiter in waiters:
                # (Usually it has its answer, and nobody of ours stands behind it: then nothing is left to do.)
                if waiter.ticket.resource in self._lines or waiter in self._standing or self._leader is waiter:
                    woken += self._remove(waiter)
                line = self._lines.get(waiter.ticket.resource)
                if line is not None and waiter in line.let_in:
                    line.let_in.remove(waiter)
        if woken:
            _wake(woken)

    def settle(self, waiter: Waiter, answer: bool | None) -> None:
        """This is its answer, unless it has one. (From its own thread or task, which is awake.)"""
        with self._state_lock:
            woken = self._answer(waiter, answer)
        if len(woken) > 1:
            _wake(one for one in woken if one is not waiter)

    def place(self, waiter: Waiter) -> WaiterState:
        """Where one that has entered waits."""
        with self._state_lock:
            line = self._lines.get(waiter.ticket.resource)
            if waiter.answer is not False or line is None:
                return WaiterState.ANSWERED
            return line.place(waiter)

    def behind(self, waiter: Waiter) -> Behind | None:
        """Whom one waits behind that is kept out by an earlier one of ours: whom that one waits behind, else itself."""
        with self._state_lock:
            line = self._lines.get(waiter.ticket.resource)
            for one in line.waiters if line is not None else ():
                if one.position >= waiter.position:
                    break
                if one.request.keeps_out(waiter.request):
                    if one.behind is not None or not meets(waiter.request, one.request.access):
                        return one.behind
                    seconds = monotonic() - one.began
                    return ours(one.request, one.ticket, "waits", seconds)
        return None

    def nudge(self, resource: str) -> None:
        """Something left this resource: looking for those who are exposed there may pay."""
        if resource not in self._lines:
            return
        with self._state_lock:
            line = self._lines.get(resource)
            exposed = line.exposed() if line is not None else []
            for waiter in exposed:
                if waiter in self._standing:
                    self._standing[waiter] = -math.inf
        _wake(exposed)

    def wake(self, positions: Iterable[int] | None) -> None:
        """Something happened to these rows (None: to all): who waits with them shall see to it."""
        wanted = None if positions is None else set(positions)
        _wake(waiter for waiter in self.waiters() if wanted is None or waiter.position in wanted)

    def tend(self) -> None:
        """Wake those who have to see to themselves, in case that they were not told."""
        with self._state_lock:
            firsts = [line.waiters[0] for line in self._lines.values() if line.waiters]
        self.leave([first for first in firsts if first.answer is not False])
        with self._state_lock:
            late = bool(self._standing) and monotonic() > self._look_at + LONGEST_SECONDS
            woken = [first for first in firsts if late or not (first in self._standing or first.at_home)]
        _wake(woken)

    def _remove(self, waiter: Waiter) -> list[Waiter]:
        """Take one out; those that have to be woken."""
        woken = self._sit(waiter)
        line = self._lines.get(waiter.ticket.resource)
        if line is not None and line.waiters == [waiter]:  # the usual case: nobody is left behind it
            del self._lines[waiter.ticket.resource]
        elif line is not None:
            before = line.exposed()
            if line.remove(waiter):
                woken += [one for one in line.exposed() if one not in before]
            if not line.waiters:
                del self._lines[waiter.ticket.resource]
        return woken

    def _answer(self, waiter: Waiter, answer: bool | None) -> list[Waiter]:
        if waiter.answer is not False:
            return []
        waiter.answer = answer
        line = self._lines.get(waiter.ticket.resource)
        if line is not None:
            line.opened = waiter.kind if answer and waiter.request.shared else None
            if answer:
                line.let_in.append(waiter)
        return [waiter, *self._remove(waiter)]

    # -- handing over -------------------------------------------------------------------------------------------

    def stay(self, waiter: Waiter, held: Iterable[Request]) -> bool:
        """Whether it waits at home for a slice: it cannot be let in, whoever else is there, while we hold these, with
        what was just let in. Not where others came first when we gave back of late, and not for two slices on end, so
        that nobody depends on what was believed to be ours.
        """
        with self._state_lock:
            line = self._lines.get(waiter.ticket.resource)
            if waiter.answer is not False or line is None:
                return False
            if waiter.at_home or line.strangers:
                line.strangers = max(0, line.strangers - 1)
                waiter.at_home = False
                return False
            ours = [*held, *(one.request for one in line.let_in if one.position < waiter.position)]
            waiter.at_home = not waiter.request.fits(ours, None)
            return waiter.at_home

    def hand_over(self, resource: str, session: Session, member_id: int) -> None:
        """On the main session, right after something of ours has left: let those in who waited for that at home."""
        with self._state_lock:
            line = self._lines.get(resource)
            if line is None:
                return
            chosen = [one for one in line.exposed() if one.at_home]
            for waiter in chosen:
                waiter.at_home = False
        try:
            if chosen:
                self.looking(chosen)(session, member_id)
        except SqlsemError as exc:  # what has left has left; who is not let in now sees to itself
            log.debug("Could not look for the next one of %r: %s", resource, exc)
        finally:
            if not chosen or chosen[0].answer is False:
                if chosen:
                    with self._state_lock:
                        line.strangers = NOT_AT_HOME
                self.nudge(resource)
        if line.spared:
            with self._state_lock:
                near = line.keep()
            try:
                if near:
                    session.restore_wakeup_locks(member_id, [one.ticket for one in near])
            except SqlsemError as exc:  # those behind them look from time to time
                log.debug("Those of %r whose turn is near are found by looking: %s", resource, exc)

    def spare(self, resource: str, session: Session, member_id: int) -> None:
        """On the main session, after somebody of ours has got a number: of very many of one line most need nothing in
        the database by which those behind them are woken.
        """
        line = self._lines.get(resource)
        if line is None or not line.crowded:
            return
        with self._state_lock:
            chosen = line.spare()
        try:
            if chosen:
                session.drop_wakeup_locks(member_id, [one.ticket for one in chosen])
        except SqlsemError as exc:
            log.debug("Those who wait for %r keep their entry locks: %s", resource, exc)

    # -- looks at those that stand ------------------------------------------------------------------------------

    def sit(self, waiter: Waiter) -> None:
        """It waits in a session, or is about to: nobody need look for it."""
        with self._state_lock:
            woken = self._sit(waiter)
        _wake(woken)

    def _sit(self, waiter: Waiter) -> list[Waiter]:
        self._standing.pop(waiter, None)
        if self._leader is not waiter:
            return []
        self._leader = next(iter(self._standing), None)
        return [] if self._leader is None else [self._leader]

    def stand(self, waiter: Waiter) -> float:
        """It has no session to wait in. For how many seconds it may sleep."""
        with self._state_lock:
            now = monotonic()
            if waiter.answer is not False:
                return 0.0
            if waiter not in self._standing:
                waiter.since = min(waiter.since, now)
                self._standing[waiter] = now + FIRST_SECONDS
            if self._leader is waiter:
                self._look_at = max(min(self._standing.values()), self._rest_until)
            elif self._leader is None or max(self._standing[waiter], self._rest_until) < self._look_at:
                self._leader, self._look_at = waiter, max(self._standing[waiter], self._rest_until)
            else:
                return LONGEST_SECONDS * random.uniform(0.8, 1.2)
            return max(0.0, self._look_at - now)

    def leads(self, waiter: Waiter) -> bool:
        """Whether it looks for others, too, and so has to stand. (One that is alone waits in a session again, as soon
        as it may: the last one may have been lost with its connection.)
        """
        return self._leader is waiter and len(self._standing) > 1

    def begin_look(self, waiter: Waiter, last: bool = False) -> list[Waiter]:
        """Whom this one shall look for now: nobody while another one looks. ``last``: itself, for it sleeps no more.

        `end_look` comes after it, whatever happens in between.
        """
        with self._state_lock:
            now = monotonic()
            line = self._lines.get(waiter.ticket.resource)
            if waiter.answer is not False or line is None:
                return []
            if (
                line.place(waiter) is WaiterState.LET_IN_TOO
            ):  # those that share with it are let in with it, or wait with it
                line.opened = None
                return list(itertools.islice(line.like(waiter), MOST_IN_A_LOOK))
            if last:
                return [waiter]
            if now < self._looking_until:
                return []
            due = sorted((at, number, one) for number, (one, at) in enumerate(self._standing.items()) if at <= now)
            if not due:
                return []
            # Those that will be due soon come along, each by half a pause too early.
            chosen = [one for one, at in self._standing.items() if at <= now + _pause(one, now) / 2]
            chosen = [one for *_, one in due] + [one for one in chosen if self._standing[one] > now]
            self._looking_until = now + 2 * LONGEST_SECONDS
            return chosen[:MOST_IN_A_LOOK]

    def looking(self, waiters: Sequence[Waiter]) -> Callable[[Session, int], None]:
        """The call that looks for these, and hands out what it finds."""

        def look(session: Session, member_id: int) -> None:
            began = monotonic()
            if len(waiters) == 1:  # as it is after each hand-over: there is a shorter way
                (one,) = waiters
                answers = {one.position: session.wait(one.ticket, 0.0, threading.Event())}
            else:
                answers = session.poll(member_id, [waiter.ticket for waiter in waiters])
            self._hand_out(waiters, answers, began)

        return look

    def _hand_out(self, waiters: Sequence[Waiter], answers: dict[int, bool | None], began: float) -> None:
        woken = []
        with self._state_lock:
            now = monotonic()
            if self._looking_until > now:
                self._rest_until = now + min((now - began) / BUSY, LONGEST_SECONDS)
            for waiter in waiters:
                answer = answers.get(waiter.position, False)
                if answer is not False:
                    woken += self._answer(waiter, answer)
                elif waiter in self._standing:
                    self._standing[waiter] = now + _pause(waiter, now)
        _wake(woken)

    def end_look(self) -> None:
        """Nobody looks now."""
        with self._state_lock:
            self._looking_until = -math.inf


def _pause(waiter: Waiter, now: float) -> float:
    """Until the next look at one that stands."""
    return min(max(FIRST_SECONDS, (now - waiter.since) * SHARE), LONGEST_SECONDS)


def _wake(waiters: Iterable[Waiter]) -> None:
    for waiter in waiters:
        waiter.event.set()
