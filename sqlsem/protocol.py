"""How a lock is had and given back, as generators: no I/O, no sleep, no threads, no clock of their own.

A generator yields a step, whoever drives it carries the step out (threads in `sqlsem.coordinator`) and sends the result
back, or throws the error in. Whatever happens between two steps, a `KeyboardInterrupt` or a cancellation included, the
generator answers with the step that leaves no row behind. The same logic so serves every face.

>>> steps = acquire((Request("etl"),), "uid-1", timeout=0)
>>> next(steps)
Now()
>>> steps.send(0.0).only_if_free
True
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlsem.engines.base import Busy
from sqlsem.errors import LockLost
from sqlsem.model import Request, Ticket

__all__ = ["SLICE", "Acquisition", "Cancel", "Now", "Register", "Step", "Wait", "acquire", "drive"]

#: The longest single wait in the database, seconds. Long enough that waiting costs less than a statement a second and
#: waiter, pings included; short enough that an operator's change of a limit is felt soon, wherever no event tells it.
SLICE = 4.0


@dataclass(frozen=True, slots=True)
class Now:
    """Wants the time of a monotonic clock, in seconds."""


@dataclass(frozen=True, slots=True)
class Register:
    """Wants a number for each request, all at once: the tickets, or None when ``only_if_free`` and one was not."""

    requests: tuple[Request, ...]
    uid: str
    only_if_free: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Wants to wait for a ticket's turn: True granted, False not yet, None when the row is gone."""

    ticket: Ticket
    timeout: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Wants every row of this acquisition gone. Must not fail: what cannot be done now is done later."""

    uid: str
    outcome: str


Step = Now | Register | Wait | Cancel
Acquisition = Generator[Step, Any, "list[Ticket] | None"]
T = TypeVar("T")


def acquire(requests: Sequence[Request], uid: str, timeout: float | None) -> Acquisition:
    """Take a number for every request in one go and wait until all are granted.

    Returns the tickets, or None when that took longer than ``timeout`` seconds (None: for ever; 0: only if nobody is
    in the way). Since a grant, once due, stays due, the tickets can be waited for one after the other.

    Raises `LockLost` when a row was taken out of the queue while it waited.
    """
    began = yield Now()
    register = Register(tuple(requests), uid, only_if_free=timeout == 0)
    left: float
    try:
        while True:
            try:
                tickets = yield register
                break
            except Busy:
                # Somebody keeps the gate in an open transaction. That is waiting too, and the driver has logged it.
                if timeout is not None and (yield Now()) - began >= timeout:
                    yield Cancel(uid, "timeout")
                    return None
        if tickets is None:
            return None
        for ticket in tickets:
            granted: bool | None = ticket.granted
            while not granted:
                left = SLICE if timeout is None else timeout - ((yield Now()) - began)
                if left <= 0:
                    yield Cancel(uid, "timeout")
                    return None
                granted = yield Wait(ticket, min(left, SLICE))
                if granted is None:
                    raise LockLost(
                        f"The request for {ticket.resource!r} at position {ticket.position} was taken out of the queue "
                        f"while it waited (by an operator, or because the database was out of reach for too long); "
                        f"ask again",
                        resource=ticket.resource,
                    )
        return list(tickets)
    except GeneratorExit:
        raise  # dropped by its driver, who cleans up
    except BaseException:
        yield Cancel(uid, "cancelled")
        raise


class _StepClosed(BaseException):
    """A GeneratorExit out of a step, under another name: a generator that meets its own must not yield any more."""


def drive(steps: Generator[Step, Any, T], perform: Callable[[Step], Any]) -> T:
    """Run a generator to its end with blocking calls; errors and interrupts of any kind reach it."""
    outcome: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = steps.throw(failure) if failure is not None else steps.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result
        except _StepClosed:
            raise GeneratorExit from None
        finally:
            outcome = failure = None  # an exception that its own frame refers to would live on, with all it holds
        try:
            outcome = perform(step)
        except GeneratorExit:
            failure = _StepClosed()
        except BaseException as exc:
            failure = exc
