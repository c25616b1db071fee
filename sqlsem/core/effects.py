"""The effects of an operation, and the functions that execute them for a thread.

An operation (acquire, upgrade, release …) is a generator that yields effects: a call to the database, a wait there, a
sleep, a verification. A driver executes each effect and sends the result back, or throws the error into the generator.
The generators do no I/O, so one implementation serves both APIs: a thread blocks (`DatabaseClient.execute_effect`), a
task awaits (`sqlsem.aio.driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sqlsem.engines.base import Session
from sqlsem.model import Ticket

__all__ = [
    "NO_CONNECTION",
    "Call",
    "Effect",
    "Effects",
    "Operation",
    "Sleep",
    "VerifyGrants",
    "WaitFor",
    "run_generator",
    "run_operation",
]

S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True)  # (Not frozen: a frozen one takes five times as long to make, and each lock makes one.)
class Call:
    """Execute ``call(session, member_id)`` on the main connection; retry it for ``retry_timeout`` seconds (None: the
    client's default).

    ``counts_as_heartbeat``: a successful call counts as a heartbeat (see `Session`).
    """

    what: str
    call: Callable[[Session, int], Any]
    retry_timeout: float | None = None
    counts_as_heartbeat: bool = False


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Wait in the database for at most ``timeout`` seconds, on a connection of the pool.

    The result is that of `Session.wait`, or `NO_CONNECTION`. Setting the event of ``waiter`` ends the wait early.
    """

    ticket: Ticket
    timeout: float
    waiter: Any
    #: True waits until this reader is alone and becomes the writer (`Session.upgrade`).
    upgrade: bool = False


@dataclass(frozen=True, slots=True)
class Sleep:
    """Sleep until the waiter's event is set, and clear it (result True), or for ``timeout`` seconds (result False)."""

    waiter: Any
    timeout: float


@dataclass(frozen=True, slots=True)
class VerifyGrants:
    """Ask the database whether the rows of all grants of this process still exist."""


Effect = Call | WaitFor | Sleep | VerifyGrants
#: A generator of effects with a result.
Effects = Generator[Effect, Any, T]

#: The result of `WaitFor` when this process has no connection free to wait on.
NO_CONNECTION = object()


class Operation(Protocol[T_co]):
    """A call that may wait, such as an acquisition. When it fails or is interrupted, it leaves nothing behind."""

    def run(self) -> Effects[T_co]:
        """Do it."""

    def rollback(self) -> Effects[None]:
        """Undo the part that a failed `run` has done, or defer that to the next heartbeat. Idempotent."""

    def rollback_local(self) -> None:
        """Discard the local state only, when no effect can be executed any more; the next heartbeat does the rest."""

    def close(self) -> None:
        """Leave the local queues; called once the outcome is known, good or bad. Idempotent."""


def run_generator(effects: Generator[S, Any, T], execute: Callable[[S], Any]) -> T:
    """Run a generator to its end with blocking calls; errors and interrupts of any kind reach it."""
    outcome: Any = None
    failure: BaseException | None = None
    while True:
        try:
            effect = effects.throw(failure) if failure is not None else effects.send(outcome)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            outcome = failure = None  # an exception that its own frame refers to would live on, with all it holds
        try:
            outcome = execute(effect)
        except BaseException as exc:
            failure = exc


def run_operation(operation: Operation[T], execute: Callable[[Effect], Any]) -> T:
    """Run an operation with blocking calls, and roll it back if it fails."""
    try:
        return run_generator(operation.run(), execute)
    except BaseException:
        # An interrupt may arrive between any two instructions; a second rollback is harmless.
        run_generator(operation.rollback(), execute)
        raise
    finally:
        operation.close()
