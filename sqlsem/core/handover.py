"""Hands a grant over, and adopts it in the process that presents its token."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sqlsem import runtime
from sqlsem.core.callers import Caller
from sqlsem.core.client import DatabaseClient
from sqlsem.core.effects import Call, Effects
from sqlsem.core.grant_registry import BaseGrant, GrantState, LostCallback
from sqlsem.core.threads import safe_logger
from sqlsem.engines.base import Busy, Session
from sqlsem.engines.transfers import TransferSession
from sqlsem.errors import ConfigurationError, LockLost, SqlsemError
from sqlsem.model import Duration, Request, Ticket, check_duration, check_name, monotonic

__all__ = ["LONGEST_TOKEN", "TTL_SECONDS", "Adoption", "check_token", "handing_over"]

log = safe_logger
G = TypeVar("G", bound=BaseGrant)

#: The default time for which a lock waits to be adopted.
TTL_SECONDS = 60.0
#: The shortest such time: the token must reach its receiver.
SHORTEST_SECONDS = 1.0
#: The reason of the loss if a hand-over takes too long.
OVERDUE = (
    "it was being handed over for so long that the time of its token may soon be up, and nobody knows whether it was"
)
#: The reason of the loss if a hand-over was interrupted.
BROKEN_OFF = "it was being handed over when that was broken off, and nobody knows whether it was"
#: No token is longer.
LONGEST_TOKEN = 200


def check_token(token: object) -> str:
    """Return the token if its form is valid; raise `ConfigurationError` otherwise, without the token in the message."""
    if (
        not isinstance(token, str)
        or not token.isascii()
        or not token.isprintable()
        or not 0 < len(token) <= LONGEST_TOKEN
    ):
        raise ConfigurationError("This is no token; pass on what grant.hand_over() has returned, as it is")
    return token


def handing_over(client: DatabaseClient, grant: BaseGrant, ttl: Duration, to: str | None) -> Effects[str]:
    """Hand a grant over, and return the token for its adoption. See `Grant.hand_over`."""
    state = grant.state
    client.engine.require(TransferSession, "hand_over()")
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
            f"{state!r} is being upgraded or downgraded; hand it over when that has ended", resource=state.resource
        )
    token = f"sqlsem-{secrets.token_hex(24)}"
    member, uid = client.member, client.new_uid()
    sent = given = kept = too_late = False
    deciding = threading.Lock()

    def give(session: Session, member_id: int) -> bool:
        nonlocal sent, given
        if not sent:
            sent = True
            timer.start()
            # Until the outcome is known, these rows count neither as lost nor as orphans: a heartbeat between two
            # attempts must not mark a grant as lost that was handed over.
            member.begin_registration(uid)
            member.discard(state.tickets)
        there = session.hand_over(member_id, state.tickets, token, seconds, to)
        with deciding:
            given = there and not too_late
        if given:
            client.registry.transfer(grant)
        return given

    def be_too_late() -> None:
        nonlocal too_late
        with deciding:
            too_late = not (given or kept)
        if too_late:
            _lose(client, state, OVERDUE)

    # This limits any attempt, also one that waits for an answer or a connection: when the token expires, the lock is
    # free, and another request is granted. (The server counts from the hand-over, which is no earlier than the call.)
    timer = runtime.current().timer(seconds / 2, be_too_late)

    try:
        # The giver must know that it no longer holds the lock before it is free: no attempt begins after half the time.
        there: bool = yield Call("hand_over", give, min(client.retry, seconds / 2))
    except (ConfigurationError, Busy):
        if sent:
            yield from _refused(client, state)
            with deciding:
                kept = not too_late
            if too_late:
                _lose(client, state, OVERDUE)
            state.require_held()
        raise
    except BaseException:
        if sent and not state.handed_over:
            _lose(client, state, BROKEN_OFF)
        raise
    finally:
        timer.cancel()
        member.end_registration(uid)
    if too_late:
        _lose(client, state, OVERDUE)
        state.require_held()
    if not there:
        _lose(client, state, "its row was removed, or taken away by an operator, before it was handed over")
        state.require_held()
    client.registry.publish_released(state)
    for ticket in state.tickets:  # its local waiters now wait for a holder elsewhere
        client.notify_waiters(ticket.resource)
    return token


def _check_ttl(ttl: Duration) -> float:
    seconds = check_duration("ttl", ttl, zero=False)
    if seconds < SHORTEST_SECONDS:
        raise ConfigurationError(f"ttl must be at least {SHORTEST_SECONDS:g} second, not {ttl!r}")
    return seconds


def _refused(client: DatabaseClient, state: GrantState) -> Effects[None]:
    """Send a heartbeat after a refusal: it shows if an earlier attempt, without an answer, was carried out."""
    client.member.add(state.tickets)
    try:
        yield from client.member.heartbeat_effects()
    except BaseException as exc:
        _lose(client, state, BROKEN_OFF)
        if not isinstance(exc, SqlsemError):
            raise


def _lose(client: DatabaseClient, state: GrantState, why: str) -> None:
    client.member.discard(state.tickets)
    client.mark_lost_and_log([ticket.position for ticket in state.tickets], why)
    client.member.request_cleanup()  # removes the row if it is still ours


class Adoption(Generic[G]):
    """One adoption; a `RevertibleOperation`. For its arguments see `Acquisition`."""

    def __init__(
        self,
        client: DatabaseClient,
        token: str,
        on_lost: LostCallback | None,
        caller: Caller,
        make_grant: Callable[[GrantState, float], G],
    ) -> None:
        client.require_open()
        client.engine.require(TransferSession, "adopt()")
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
        found: list[tuple[Request, Ticket]] = yield Call("adopt", self._adopt, counts_as_heartbeat=True)
        requests: Sequence[Request] = [request for request, _ in found]
        if not self._tickets:
            raise LockLost("What was adopted was taken away the same instant, by an operator; acquire it anew")
        client, registry = self._client, self._client.registry
        state = GrantState(registry, requests, self._tickets, self._caller, self._on_lost, monotonic())
        self._grant = grant = self._make_grant(state, monotonic() - began)
        registry.add(grant)
        missing = [ticket.position for ticket in self._tickets if not self._member.has_ticket(ticket)]
        if missing:  # the main connection was lost in between, and these rows with it
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
        found = session.adopt(member_id, requesting_id, caller.owner, self._uid, self._token)
        self._tickets = [ticket for _, ticket in found]
        self._member.add(self._tickets)
        if self._rolled_back:
            self._forget()
        return found

    def rollback(self) -> Effects[None]:
        """Release what this adoption acquired; if that fails now, the next successful heartbeat does it. Idempotent."""
        uid = self._uid
        self._discard_grant()
        try:
            if self._sent:
                yield Call("cancel", lambda session, me: session.cancel(me, uid, "cancelled"), 1.0)
                self._sent = False
        except SqlsemError as exc:
            if not self._client.closed:
                log.warning("Could not give back at once what was being adopted: %s", exc)
        finally:
            self._forget()

    def rollback_local(self) -> None:
        """Roll back in this process only, when no effect can be executed any more."""
        self._discard_grant()
        self._forget()

    def _discard_grant(self) -> None:
        self._rolled_back = True
        if self._grant is not None and not self._grant.state.released:
            self._client.registry.discard(self._grant)
            self._client.registry.publish_released(self._grant.state)

    def _forget(self) -> None:
        self._member.discard(self._tickets)
        if self._sent:
            self._member.request_cleanup()

    def close(self) -> None:
        """End the registration, as its outcome is known. Idempotent."""
        self._member.end_registration(self._uid)
