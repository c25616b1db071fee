"""The effects of an operation, and the functions that execute them for a thread.

An operation (acquire, upgrade, release …) is a generator that yields effects: a call of the database, a wait there, a
sleep, a verification, a wait for another thread. A driver executes each effect, and sends its result back or throws its
error into the generator. The generators do no I/O, so one implementation serves both APIs: for a thread
`DatabaseClient.execute_effect` blocks, for a task `sqlsem.aio.driver` awaits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlsem.util import shutdown
from sqlsem.util.record import record

if TYPE_CHECKING:
    from sqlsem.engines.base import Session
    from sqlsem.values.locks import Ticket

__all__ = [
    "NO_CONNECTION",
    "Call",
    "Effect",
    "Effects",
    "RevertibleOperation",
    "Sleep",
    "VerifyGrants",
    "WaitFor",
    "WaitForEvent",
    "run_generator",
    "run_operation",
]

S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True)  # (Not frozen: a frozen one takes five times as long to make, and each lock makes one.)
class Call:
    """Execute ``call(session, member_id)`` on the main connection; retry it for ``retry_timeout`` seconds (None: the
    client's default). ``what`` names the call in messages.

    ``counts_as_heartbeat``: a successful call counts as a heartbeat (see `LockSession`).
    """

    what: str
    call: Callable[[Session, int], Any]
    retry_timeout: float | None = None
    counts_as_heartbeat: bool = False


@record
class WaitFor:
    """Wait in the database until the request is granted, for at most ``timeout`` seconds, on a connection of the pool.

    The result is that of `LockSession.wait`, or `NO_CONNECTION`. Setting the event of ``waiter`` ends the wait early.
    """

    ticket: Ticket
    timeout: float
    waiter: Any
    #: True: wait until this reader is the only holder, and becomes the writer (`OptionalSession.upgrade`).
    upgrade: bool = False


@record
class Sleep:
    """Sleep until the waiter's event is set, for at most ``timeout`` seconds; then clear the event. The result is True
    if it was set.
    """

    waiter: Any
    timeout: float


@record
class VerifyGrants:
    """Ask the database whether the rows of all grants of this process still exist."""


@record
class WaitForEvent:
    """Wait until another thread has set the event (of `runtime.event`)."""

    event: threading.Event


Effect = Call | WaitFor | Sleep | VerifyGrants | WaitForEvent
#: A generator of effects with a result.
Effects = Generator[Effect, Any, T]

#: The result of `WaitFor` if no connection of the pool is free.
NO_CONNECTION = object()


class RevertibleOperation(Protocol[T_co]):
    """A call that may wait, such as an acquisition. If it fails or is interrupted, `rollback` undoes what it
    has done.
    """

    def run(self) -> Effects[T_co]:
        """Carry out the operation, and return its result."""

    def rollback(self) -> Effects[None]:
        """Undo what a failed `run` has done, or defer that to the next heartbeat. Idempotent."""

    def rollback_local(self) -> None:
        """Discard only the local state, for when no effect can be executed any more; the next heartbeat does
        the rest.
        """

    def close(self) -> None:
        """Leave the local queues. Called when `run` or `rollback` has ended. Idempotent."""


def run_generator(effects: Generator[S, Any, T], execute: Callable[[S], Any]) -> T:
    """Run a generator to its end with blocking calls. Throw each error and interrupt into it."""
    outcome: Any = None
    failure: BaseException | None = None
    while True:
        try:
            effect = effects.throw(failure) if failure is not None else effects.send(outcome)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException:
            shutdown.block_daemon_thread()
            raise
        finally:
            outcome = failure = None  # else the exception and this frame would refer to each other, and never be freed
        try:
            outcome = execute(effect)
        except BaseException as exc:
            failure = exc


def run_operation(operation: RevertibleOperation[T], execute: Callable[[Effect], Any]) -> T:
    """Run an operation with blocking calls, and roll it back if it fails."""
    try:
        return run_generator(operation.run(), execute)
    except BaseException:
        # An interrupt may arrive between any two instructions; a second rollback is harmless.
        run_generator(operation.rollback(), execute)
        raise
    finally:
        operation.close()
