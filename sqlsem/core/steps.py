"""What any verb of ours comes to: four operations, and who carries them out, blocking.

A verb (to acquire, to upgrade, to give back) is a generator: it yields operations; a driver carries them out and sends
the result back, or throws the error in. It does no I/O, and so serves every face: threads block for the
operations (`DatabaseClient.execute_effect`), `sqlsem.aio` awaits them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sqlsem.engines.base import Session
from sqlsem.model import Ticket

__all__ = ["NO_ROOM", "Call", "Operation", "Operations", "Sleep", "Verb", "Verify", "WaitFor", "carry_out", "drive"]

S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True)  # (Not frozen: that takes five times as long to make, and one is made at every lock.)
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


class Verb(Protocol[T_co]):
    """What may take long, and leaves nothing behind when it fails, whatever strikes it and where."""

    def run(self) -> Operations[T_co]:
        """Do it."""

    def withdraw(self) -> Operations[None]:
        """Undo what a `run` that failed may have left; where that cannot be done now, see to it that it is done later.
        May be repeated.
        """

    def drop(self) -> None:
        """As `withdraw`, where nothing can be carried out any more."""

    def done(self) -> None:
        """It is over, well or not. May be repeated."""


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
        finally:
            outcome = failure = None  # an exception that its own frame refers to would live on, with all it holds
        try:
            outcome = perform(step)
        except BaseException as exc:
            failure = exc


def carry_out(verb: Verb[T], perform: Callable[[Operation], Any]) -> T:
    """Carry out a verb with blocking calls."""
    try:
        return drive(verb.run(), perform)
    except BaseException:
        # An interrupt may strike between any two instructions; withdrawing twice is harmless.
        drive(verb.withdraw(), perform)
        raise
    finally:
        verb.done()
