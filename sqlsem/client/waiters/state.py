"""The states of a waiter, and its next step: one pure function, without I/O, locks and clock.

A waiter is a request in a queue of the database that is not granted yet. Each state but the last three has one action,
which its operation carries out before it asks for the next step:

    BLOCKED_LOCALLY  sleep, until a waiter of this process that goes first wakes it
    LOCAL_WAIT       sleep, until a call of this process that releases has polled for it
    ON_CONNECTION    sleep in the database, on a connection of its own
    POLLED           sleep until the next poll is due, then poll
    SHARED_WAKEUP    poll at once
    VICTIM           poll once more, and raise `Deadlock` if that does not grant it

A state is left only by its next step, so each action is bounded by `Step.seconds`. The database grants
the request, in the same way from each state (``Poll`` and ``Grant`` of proof/Queues.tla); the states only decide which
waiter asks, and when.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlsem.util.record import record

if TYPE_CHECKING:
    from sqlsem.util.timing import Timing

__all__ = ["FINAL", "Facts", "Step", "WaiterState", "next_step"]


class WaiterState(enum.Enum):
    """The states of a waiter."""

    REGISTERED = "it has not waited yet, or another thread has polled for it"
    BLOCKED_LOCALLY = "an earlier waiter of this process must be granted first"
    LOCAL_WAIT = "this process holds what it waits for"
    ON_CONNECTION = "it waits on a connection of its own"
    POLLED = "it has no connection, and polls from time to time"
    SHARED_WAKEUP = "a waiter of its kind was just granted, and it can share the lock"
    VICTIM = "it was chosen to end a deadlock"
    GRANTED = "it is granted"
    GONE = "its row was removed"
    TIMED_OUT = "its time is up"


#: The states without a next step.
FINAL = frozenset({WaiterState.GRANTED, WaiterState.GONE, WaiterState.TIMED_OUT})


@dataclass(slots=True)
class Facts:
    """The facts that decide the next step. The defaults are those of a request alone in this process."""

    #: True if the request is granted, None if its row is gone, False until either is known.
    answer: bool | None = False
    #: False if this process knows that the row was removed.
    has_row: bool = True
    #: When the time is up (`monotonic`).
    deadline: float = math.inf
    #: The deadlock monitor has chosen it as a victim.
    is_victim: bool = False
    #: It may be in a deadlock: a victim cannot be interrupted while it waits in the database.
    is_suspect: bool = False
    #: Another waiter of this process goes first, and wakes it.
    is_blocked: bool = False
    #: A waiter of its kind was just granted, and it can share the lock.
    can_share: bool = False
    #: It is the first of its queue in this process; only such a waiter may have a connection.
    is_first: bool = True
    #: Requests that this process holds, or was just granted, block it whatever other processes do.
    is_held: bool = False
    #: It polls for other waiters, too.
    polls_for_others: bool = False
    #: False if no connection was free just now.
    has_connection: bool = True


@record
class Step:
    """The state that a waiter enters, and how long it may stay there at most."""

    state: WaiterState
    seconds: float = 0.0


def next_step(state: WaiterState, facts: Facts, now: float, timing: Timing) -> Step:
    """Return the next step of a waiter in this state."""
    left = facts.deadline - now
    if facts.answer is not False:
        step = Step(WaiterState.GRANTED if facts.answer else WaiterState.GONE)
    elif not facts.has_row:
        step = Step(WaiterState.GONE)
    elif left <= 0:
        step = Step(WaiterState.TIMED_OUT)
    elif facts.is_victim:
        step = Step(WaiterState.VICTIM)
    elif facts.is_blocked:
        step = Step(WaiterState.BLOCKED_LOCALLY, min(left, timing.blocked_locally))
    elif facts.can_share:
        step = Step(WaiterState.SHARED_WAKEUP)
    elif facts.is_first and facts.is_held and state is not WaiterState.LOCAL_WAIT:
        # (Not for two slices on end: if the local copy of the state is wrong, the waiter loses one slice at most.)
        step = Step(WaiterState.LOCAL_WAIT, min(left, timing.slice))
    elif facts.is_first and facts.has_connection and not facts.polls_for_others:
        step = Step(WaiterState.ON_CONNECTION, min(left, timing.suspect_slice if facts.is_suspect else timing.slice))
    else:
        step = Step(WaiterState.POLLED, left)
    return step
