"""Who is in the way of a request that was not granted in time: one look at its queue, for the words of `Timeout`.

The look may fail or be impossible; then nobody is named, and the `Timeout` is raised all the same. It goes by the main
session, once and only where that is connected: so it takes no longer than any call there, and no connection more.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.core.callers import Caller
from sqlsem.core.client import DatabaseClient
from sqlsem.core.effects import Call, Effects
from sqlsem.core.threads import voice
from sqlsem.engines.base import Session
from sqlsem.engines.kept_locks import KeptLockSession
from sqlsem.events import meets
from sqlsem.insight.blockers import Blockers
from sqlsem.insight.kept import KeptLock
from sqlsem.model import Entry, Request, Resource, TaskEntry, Ticket, monotonic
from sqlsem.model_rates import RateRequest

__all__ = ["blockers", "look_for_blockers", "running_tasks"]

log = voice

#: For so many seconds a look serves others of this process that are too late for the same: a thousand of them at once
#: must not keep the heartbeat from the main session.
FRESH_SECONDS = 0.25
#: So many tasks are looked at, at the most.
MOST_TASKS = 100
#: Looks are remembered for so many resources at the most.
MOST_LOOKS = 64


def look_for_blockers(session: Session, wanted: Sequence[Request | RateRequest]) -> list[Blockers]:
    """Look who is in the way of each of these requests."""
    return [_blockers(session, one.queue_request() if isinstance(one, RateRequest) else one) for one in wanted]


def blockers(
    client: DatabaseClient, wanted: Sequence[Request | RateRequest], caller: Caller, upgrades: Ticket | None = None
) -> Effects[list[Blockers]]:
    """As `look_for_blockers`, as far as can be seen without delay; nothing is raised. ``upgrades``: the row of a reader
    that wants to write: whoever else holds is in its way.
    """
    own = client.requesting_id(caller)

    def look(session: Session, _: int) -> list[Blockers]:
        return [
            _blockers(
                _Looks(client, session), one.queue_request() if isinstance(one, RateRequest) else one, own, upgrades
            )
            for one in wanted
        ]

    if client.closed or client.member.main.session is None:
        return []
    try:
        found: list[Blockers] = yield Call("look", look, 0.0)
    except Exception as exc:
        log.info("Cannot see who is in the way: %s", exc)
        return []
    return found


def running_tasks(client: DatabaseClient, queue: str) -> Effects[list[TaskEntry]]:
    """The tasks of a queue that run, for one who waits for its end in vain; as `blockers`, nothing is raised."""
    if client.closed or client.member.main.session is None:
        return []
    try:
        found: list[TaskEntry] = yield Call(
            "look", lambda session, _: session.list_tasks(queue, "running", MOST_TASKS, 0), 0.0
        )
    except Exception as exc:
        log.info("Cannot see what runs: %s", exc)
        return []
    return found


class _Looks:
    """A session whose looks are remembered for a moment. On the main session, where one call follows the other."""

    def __init__(self, client: DatabaseClient, session: Session) -> None:
        self._looks = client.queue_cache
        self._session = session

    def entries(self, resource: str) -> list[Entry]:
        """As of the session."""
        seen = self._looks.get(resource)
        if seen is None or monotonic() - seen[0] > FRESH_SECONDS:
            while len(self._looks) >= MOST_LOOKS:
                del self._looks[next(iter(self._looks))]
            seen = self._looks[resource] = (monotonic(), self._session.entries(resource))
        return seen[1]

    def resources(self) -> list[Resource]:
        """As of the session."""
        return self._session.resources()

    def kept_locks(self, resource: str) -> list[KeptLock]:
        """As of the session, where it can tell."""
        return _kept_locks(self._session, resource)


def _kept_locks(session: Session | _Looks, resource: str) -> list[KeptLock]:
    if isinstance(session, _Looks) or (isinstance(session, KeptLockSession) and session.has_feature("operate")):
        return session.kept_locks(resource)
    return []


def _blockers(
    session: Session | _Looks, request: Request, own: str | None = None, upgrades: Ticket | None = None
) -> Blockers:
    entries = session.entries(request.resource)
    if upgrades is not None:
        others = [entry for entry in entries if entry.position != upgrades.position and entry.granted_at is not None]
        return Blockers(request.resource, tuple(others), ())
    there = [entry for entry in entries if meets(request, entry.access) and entry.state != "dead"]
    holders = tuple(one for one in there if one.state != "waits")
    # (Of one that has just left the queue itself, a look of a moment ago may have seen the row.)
    waiters = tuple(one for one in there if one.state == "waits" and not (own and one.requesting_id.startswith(own)))
    setting = None
    if not holders:
        setting = next(
            (resource for resource in session.resources() if resource.resource == request.resource and resource.paused),
            None,
        )
    kept: list[KeptLock] = []
    if not (holders or waiters or setting):
        kept = [lock for lock in _kept_locks(session, request.resource) if lock.keeps_out]
    return Blockers(request.resource, holders, waiters, setting, tuple(kept))
