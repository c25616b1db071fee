"""Hands a grant over, and adopts it in the process that presents its token.

The lock keeps its row, so no other request is granted in between. If a client cannot know whether its hand-over
succeeded, it counts the lock as lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from sqlsem.client.effects import Call, Effects
from sqlsem.client.held.registry import BaseGrant, GrantState, LostCallback
from sqlsem.engines.failures import Busy
from sqlsem.engines.protocol import Capability
from sqlsem.util import runtime
from sqlsem.util.threads import log
from sqlsem.values.errors import ConfigurationError, LockLost, SqlsemError
from sqlsem.values.locks import Duration, Request, Ticket, check_duration, check_name, monotonic

if TYPE_CHECKING:
    from sqlsem.client.callers import Caller
    from sqlsem.client.client import DatabaseClient
    from sqlsem.engines.base import Session

__all__ = ["LONGEST_TOKEN", "TTL_SECONDS", "Adoption", "check_token", "handing_over"]

G = TypeVar("G", bound=BaseGrant)

#: The default time for which a lock waits to be adopted.
TTL_SECONDS = 60.0
#: The shortest such time, because the token must reach its receiver.
SHORTEST_SECONDS = 1.0
#: The reason of the loss if a hand-over takes too long.
OVERDUE = (
    "the hand-over took so long that its token may soon expire, and it is not known whether the hand-over succeeded"
)
#: The reason of the loss if a hand-over was interrupted.
INTERRUPTED = "the hand-over was interrupted, and it is not known whether it succeeded"
#: The greatest length of a token.
LONGEST_TOKEN = 200


def check_token(token: object) -> str:
    """Return the token if its format is valid; else raise `ConfigurationError`, without the token in the message."""
    if (
        not isinstance(token, str)
        or not token.isascii()
        or not token.isprintable()
        or not 0 < len(token) <= LONGEST_TOKEN
    ):
        raise ConfigurationError("This is not a token; pass the text that grant.hand_over() returned, unchanged")
    return token


def handing_over(client: DatabaseClient, grant: BaseGrant, ttl: Duration, to: str | None) -> Effects[str]:
    """Hand a grant over, and return the token for its adoption. See `Grant.hand_over`."""
    state = grant.state
    client.engine.require(Capability.HANDOVERS, "hand_over()")
    seconds = _check_ttl(ttl)
    if to is not None:
        check_name("to", to, 128)
    state.require_held()
    if state.depth > 1:
        raise ConfigurationError(
            f"{state!r} is held {state.depth} times (reentrant=True); hand it over from the outermost block",
            resource=state.resource,
        )
    if state.converting:
        raise ConfigurationError(
            f"{state!r} is being upgraded or downgraded; hand it over after that has ended", resource=state.resource
        )
    token = f"sqlsem-{os.urandom(24).hex()}"
    member, uid = client.member, client.new_uid()
    sent = transferred = kept = overdue = False
    decision_lock = threading.Lock()  # guards the last three

    def hand_over(session: Session, member_id: int) -> bool:
        nonlocal sent, transferred
        if not sent:
            sent = True
            timer.start()
            # Until the outcome is known, these rows must count neither as lost nor as orphans: a heartbeat between two
            # attempts must not mark a grant as lost that the first attempt handed over.
            member.begin_registration(uid)
            member.discard(state.tickets)
        exists = session.hand_over(member_id, state.tickets, token, seconds, to)
        with decision_lock:
            transferred = exists and not overdue
        if transferred:
            client.registry.transfer(grant)
        return transferred

    def give_up() -> None:
        nonlocal overdue
        with decision_lock:
            overdue = not (transferred or kept)
        if overdue:
            _mark_lost(client, state, OVERDUE)

    # The timer ends every attempt, even one that waits for an answer or a connection: when the token expires, another
    # request is granted the lock. (The server counts from the hand-over, which is no earlier than the call.)
    timer = runtime.current().timer(seconds / 2, give_up)

    try:
        # No attempt begins after half of the time: this client must know of its loss before the lock is free.
        succeeded: bool = yield Call("hand_over", hand_over, min(client.retry, seconds / 2))
    except (ConfigurationError, Busy):
        if sent:
            yield from _verify_refusal(client, state)
            with decision_lock:
                kept = not overdue
            if overdue:
                _mark_lost(client, state, OVERDUE)
            state.require_held()
        raise
    except BaseException:
        if sent and not state.handed_over:
            _mark_lost(client, state, INTERRUPTED)
        raise
    finally:
        timer.cancel()
        member.end_registration(uid)
    if overdue:
        _mark_lost(client, state, OVERDUE)
        state.require_held()
    if not succeeded:
        _mark_lost(client, state, "its row was removed, or an operator revoked it, before the hand-over")
        state.require_held()
    client.registry.publish_released(state)
    for ticket in state.tickets:  # local waiters now wait for a holder in another process
        client.notify_waiters(ticket.resource)
    return token


def _check_ttl(ttl: Duration) -> float:
    seconds = check_duration("ttl", ttl, zero=False)
    if seconds < SHORTEST_SECONDS:
        raise ConfigurationError(f"ttl must be at least {SHORTEST_SECONDS:g} second, not {ttl!r}")
    return seconds


def _verify_refusal(client: DatabaseClient, state: GrantState) -> Effects[None]:
    """Send a heartbeat after a refusal: it shows if an earlier attempt, whose answer was lost, had succeeded."""
    client.member.add(state.tickets)
    try:
        yield from client.member.heartbeat_effects()
    except BaseException as exc:
        _mark_lost(client, state, INTERRUPTED)
        if not isinstance(exc, SqlsemError):
            raise


def _mark_lost(client: DatabaseClient, state: GrantState, why: str) -> None:
    client.member.discard(state.tickets)
    client.mark_lost_and_log([ticket.position for ticket in state.tickets], why)
    client.member.request_cleanup()  # removes the row if it is still ours


class Adoption(Generic[G]):
    """The adoption of a lock that was handed over; a `RevertibleOperation`. For its arguments see `Acquisition`."""

    def __init__(
        self,
        client: DatabaseClient,
        token: str,
        on_lost: LostCallback | None,
        caller: Caller,
        make_grant: Callable[[DatabaseClient, GrantState, float], G],
    ) -> None:
        client.require_open()
        client.engine.require(Capability.HANDOVERS, "adopt()")
        self._client = client
        self._member = client.member
        self._token = check_token(token)
        self._on_lost = on_lost
        self._caller = caller
        self._make_grant = make_grant
        self._uid = client.new_uid()
        self._tickets: list[Ticket] = []
        self._grant: G | None = None
        self._sent = False
        self._rolled_back = False  # as in `Acquisition`

    def run(self) -> Effects[G]:
        """Adopt the lock that was handed over under the token. Raises `NotHeld`, `ConfigurationError`, `LockLost`."""
        began = monotonic()
        adopted: list[tuple[Request, Ticket]] = yield Call("adopt", self._adopt, counts_as_heartbeat=True)
        requests: Sequence[Request] = [request for request, _ in adopted]
        if not self._tickets:
            raise LockLost("An operator revoked the lock at the moment of its adoption; acquire it again")
        client, registry = self._client, self._client.registry
        state = GrantState(registry, requests, self._tickets, self._caller, self._on_lost, monotonic())
        self._grant = grant = self._make_grant(client, state, monotonic() - began)
        registry.add(grant)
        missing = [ticket.position for ticket in self._tickets if not self._member.has_ticket(ticket)]
        if missing:  # the main connection was lost meanwhile, and these rows with it
            client.mark_lost_and_log(missing, "its row was removed before it could be used")
            state.require_held()
        state.is_published = True
        registry.publish_granted(state, grant.waited, {})
        return grant

    def _adopt(self, session: Session, member_id: int) -> list[tuple[Request, Ticket]]:
        self._sent = True
        if self._rolled_back:
            return []
        self._member.begin_registration(self._uid)
        caller, requesting_id = self._caller, self._client.requesting_id(self._caller)
        adopted = session.adopt(member_id, requesting_id, caller.owner, self._uid, self._token)
        self._tickets = [ticket for _, ticket in adopted]
        self._member.add(self._tickets)
        if self._rolled_back:
            self._discard_rows()
        return adopted

    def rollback(self) -> Effects[None]:
        """Release the lock if it was adopted. If that fails now, the next successful heartbeat does it. Idempotent."""
        uid = self._uid
        self._discard_grant()
        try:
            if self._sent:
                yield Call("cancel", lambda session, me: session.cancel(me, uid, "cancelled"), 1.0)
                self._sent = False
        except SqlsemError as exc:
            if not self._client.closed:
                log.warning("Could not release an adopted lock at once; the next heartbeat does: %s", exc)
        finally:
            self._discard_rows()

    def rollback_local(self) -> None:
        """Roll back in this process only, for when no effect can be executed any more."""
        self._discard_grant()
        self._discard_rows()

    def _discard_grant(self) -> None:
        self._rolled_back = True
        if self._grant is not None and not self._grant.state.released:
            self._client.registry.discard(self._grant)
            self._client.registry.publish_released(self._grant.state)

    def _discard_rows(self) -> None:
        self._member.discard(self._tickets)
        if self._sent:
            self._member.request_cleanup()

    def close(self) -> None:
        """End the pending registration: its outcome is known. Idempotent."""
        self._member.end_registration(self._uid)
