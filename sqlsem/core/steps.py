"""How a lock is had and given back, as generators: no I/O, no sleep, no threads, no clock of their own.

A generator yields a step, whoever drives it carries the step out (threads in `core.process`) and sends the result
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

from sqlsem.engines.base import Busy, Session
from sqlsem.errors import LockLost
from sqlsem.model import Request, Ticket, Upgrading

__all__ = [
    "NO_ROOM",
    "SLICE",
    "Acquisition",
    "Alone",
    "Begin",
    "Call",
    "Cancel",
    "Conversion",
    "Now",
    "Operation",
    "Operations",
    "PutBack",
    "Register",
    "Sleep",
    "Step",
    "Verify",
    "Wait",
    "WaitFor",
    "acquire",
    "drive",
    "refine",
    "upgrade",
]

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
S = TypeVar("S")
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


# -- conversions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Wants a reader to begin to become the writer, or only to try: what has come of it. May take its time over
    `Upgrading.NOT_YET`.
    """

    ticket: Ticket
    only_if_free: bool


@dataclass(frozen=True, slots=True)
class Alone:
    """Wants to wait until the reader is alone and the writer: True when it is, False not yet, None the row is gone."""

    ticket: Ticket
    timeout: float


@dataclass(frozen=True, slots=True)
class PutBack:
    """Wants a reader that began to upgrade, or has just succeeded, to be a reader again. Must not fail: what cannot be
    done now is done later.
    """

    ticket: Ticket


Conversion = Now | Begin | Alone | PutBack


def upgrade(ticket: Ticket, timeout: float | None) -> Generator[Conversion, Any, bool]:
    """Have a reader become the writer without letting go: True when it is, False when that took longer than ``timeout``
    seconds (None: for ever; 0: only if it is alone), and it is a reader as before.

    Raises `LockLost` when its row is gone. Whatever else happens in between, it is a reader afterwards.
    """
    began = yield Now()
    try:
        while True:
            untouched = timeout == 0
            try:
                begun = yield Begin(ticket, only_if_free=timeout == 0)
            except Busy:
                # Somebody keeps the gate in an open transaction: that is waiting too.
                begun, untouched = Upgrading.NOT_YET, False
            if begun is Upgrading.DONE:
                return True
            left = SLICE if timeout is None else timeout - ((yield Now()) - began)
            if left <= 0 and begun is not Upgrading.GONE:
                if not untouched:
                    yield PutBack(ticket)
                return False
            written: bool | None = False
            if begun is Upgrading.BEGUN:  # (after each slice again, which changes nothing as long as that stands)
                written = yield Alone(ticket, min(left, SLICE))
            if written:
                return True
            if written is None or begun is Upgrading.GONE:
                raise LockLost(
                    f"The reader of {ticket.resource!r} at position {ticket.position} was taken away while it waited "
                    f"to be the writer (by an operator, or because the database was out of reach for too long)",
                    resource=ticket.resource,
                )
    except GeneratorExit:
        raise  # dropped by its driver, who cleans up
    except BaseException:
        yield PutBack(ticket)
        raise


# -- from steps to operations ---------------------------------------------------------------------------------------
# What a step comes to in this process is logic too, and the same for all faces (`sqlsem.acquisition`). It ends in these
# four, which is all that a face has to be able to do: `sqlsem.coordinator` blocks for them, `sqlsem.aio` awaits them.


@dataclass(frozen=True, slots=True)
class Call:
    """Wants ``call(session, member_id)`` done on the main session, tried for ``budget`` seconds (None: as usual).

    ``sign``: when it succeeds, it has given a sign of life (see `Session`).
    """

    what: str
    call: Callable[[Session, int], Any]
    budget: float | None = None
    sign: bool = False


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Wants to wait in the database, on a session of its own: what `Session.wait` says, or `NO_ROOM`. ``waiter`` is
    the face's own, whose event may be set to say that looking now may pay.
    """

    ticket: Ticket
    timeout: float
    waiter: Any
    #: Not for the row's turn, but until it is alone and writes (`Session.upgrade`).
    upgrade: bool = False


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wants to sleep until the waiter's event is set (True; it is cleared), or for so many seconds (False)."""

    waiter: Any
    timeout: float


@dataclass(frozen=True, slots=True)
class Verify:
    """Wants the database asked whether what we believe to hold is still ours."""


Operation = Call | WaitFor | Sleep | Verify
Operations = Generator[Operation, Any, T]

#: The answer to `WaitFor` when as many of us wait in the database as may.
NO_ROOM = object()


class _StepClosed(BaseException):
    """A GeneratorExit out of a step, under another name: a generator that meets its own must not yield any more."""


def refine(steps: Generator[S, Any, T], perform: Callable[[S], Operations[Any]]) -> Operations[T]:
    """The same generator in terms of operations: ``perform`` says what each of its steps comes to."""
    outcome: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = steps.throw(failure) if failure is not None else steps.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            outcome = failure = None
        try:
            outcome = yield from perform(step)
        except GeneratorExit:
            raise  # dropped by our driver, who cleans up
        except BaseException as exc:
            failure = exc


def drive(steps: Generator[S, Any, T], perform: Callable[[S], Any]) -> T:
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
