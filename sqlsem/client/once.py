"""Runs once per period, as both APIs share them.

A run holds the mutex ``once:<name>``, so at most one run is active. A period is done once `Period.mark` has recorded
it. The database's clock decides when a period begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from sqlsem.client.defaults import client_of
from sqlsem.client.effects import Call, Effects
from sqlsem.client.held.registry import BaseGrant, LostCallback, ReleaseToken, release_later
from sqlsem.client.operations import terms
from sqlsem.engines.protocol import Capability
from sqlsem.values.errors import ConfigurationError, NotHeld
from sqlsem.values.locks import MAX_NAME, Duration, OnceEntry, Ticket, check_duration, check_name
from sqlsem.values.names import ONCE_PREFIX

if TYPE_CHECKING:
    from sqlsem.client.client import DatabaseClient
    from sqlsem.client.operations.terms import Terms
    from sqlsem.engines.base import Session

__all__ = ["Period", "Periodic", "once_name", "release_after_interrupt"]

SHORTEST_SECONDS = 1.0
LONGEST_SECONDS = 366 * 86400.0


def once_name(name: str) -> str:
    """Return the name of a periodic run; raise `ConfigurationError` if it is invalid."""
    return check_name("The name", name, MAX_NAME - len(ONCE_PREFIX))


class Period:
    """The name of a periodic run, and the length and offset of its period. They are checked when it is made."""

    def __init__(self, name: str, per: Duration, offset: Duration) -> None:
        self.name = once_name(name)
        seconds = check_duration("per", per, zero=False, maximum=LONGEST_SECONDS)
        if seconds < SHORTEST_SECONDS:
            raise ConfigurationError(f"per must be at least {SHORTEST_SECONDS:g} second, not {per!r}", resource=name)
        shift = check_duration("offset", offset, maximum=LONGEST_SECONDS)
        if shift >= seconds:
            raise ConfigurationError(
                f"offset must be less than per ({seconds:g} s), not {offset!r}: it moves the beginning of each period",
                resource=name,
            )
        self.per_ms = round(seconds * 1000)
        self.offset_ms = min(round(shift * 1000), self.per_ms - 1)

    @property
    def resource(self) -> str:
        """The name of the mutex that a run holds."""
        return f"{ONCE_PREFIX}{self.name}"

    def due(self, client: DatabaseClient, grant: BaseGrant | None) -> Effects[bool]:
        """Return True if the period is not done. With ``grant``, the run's mutex: raises `LockLost` if that is lost."""
        ticket = None if grant is None else self._ticket(grant)

        def read(session: Session, member_id: int) -> bool | None:
            return session.once_due(self.name, ticket, self.per_ms, self.offset_ms)

        due: bool | None = yield Call("once_due", read)
        if due is None and grant is not None:
            _mark_lost(client, grant)
        return bool(due)

    def mark(self, client: DatabaseClient, grant: BaseGrant) -> Effects[None]:
        """Record that the period is done. Raises `LockLost` if the mutex was lost: then the period is not done."""
        grant.state.require_held()
        ticket = self._ticket(grant)
        if not (yield Call("mark_once", lambda session, member_id: session.mark_once(self.name, ticket))):
            _mark_lost(client, grant)

    def _ticket(self, grant: BaseGrant) -> Ticket:
        return next(ticket for ticket in grant.state.tickets if ticket.resource == self.resource)


def _mark_lost(client: DatabaseClient, grant: BaseGrant) -> None:
    client.mark_lost_and_log(list(grant.positions.values()), "its row is no longer in the table")
    grant.state.require_held()


class Periodic:
    """The period and the mutex of a run, for either API."""

    def __init__(
        self,
        period: Period,
        note: str | None,
        timeout: Duration | None,
        on_lost: LostCallback | None,
        cancel_on_lost: bool,
        client: DatabaseClient | None,
    ) -> None:
        self.period = period
        self._given = client
        self.terms: Terms = terms.own_mutex(
            period.resource,
            {"note": note, "timeout": timeout, "on_lost": on_lost, "cancel_on_lost": cancel_on_lost},
            client,
        )

    @property
    def client(self) -> DatabaseClient:
        """The client of its coordinator, or of the default one."""
        client = self._given or client_of(None)
        client.engine.require(Capability.PERIODS, "once()")
        return client

    def last(self) -> OnceEntry | None:
        """Return the record of the last run, or None. Blocks."""
        runs = self.client.with_connection(lambda session: session.once_runs(self.period.name), Capability.PERIODS)
        return runs[0] if runs else None

    def forget(self) -> bool:
        """Delete the record of the last run. Return False if there was none. Blocks."""
        return self.client.with_connection(lambda session: session.once_forget(self.period.name), Capability.PERIODS)

    def __str__(self) -> str:
        return f"{self.period.name!r} per {self.period.per_ms / 1000:g} s"


class HasGrant(Protocol):
    """A lock of either API."""

    @property
    def grant(self) -> BaseGrant:
        """The grant of the calling thread or task. Raises `NotHeld` if it has none."""


def release_after_interrupt(lock: HasGrant) -> None:
    """Have the heartbeat release the grant of a run that was interrupted while it began."""
    try:
        grant = lock.grant
    except NotHeld:
        return
    release_later(grant, ReleaseToken())
