"""Reads the blockers of a request that was not granted in time, for the message of `Timeout`.

The read may fail or be impossible. The message then names no blocker, and `Timeout` is raised all the same. The main
connection makes the read, once and only if it is connected: so it takes no longer than any call there, and opens no
further connection.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.core.callers import Caller
from sqlsem.core.client import DatabaseClient
from sqlsem.core.effects import Call, Effects
from sqlsem.core.threads import safe_logger
from sqlsem.engines.base import Session
from sqlsem.engines.kept_locks import KeptLockSession
from sqlsem.events import meets
from sqlsem.insight.blockers import Blockers
from sqlsem.insight.kept import KeptLock
from sqlsem.model import Entry, Request, Resource, TaskEntry, Ticket, monotonic
from sqlsem.model_rates import RateRequest

__all__ = ["blockers", "look_for_blockers", "running_tasks"]

log = safe_logger

#: Seconds for which the entries of a queue also serve other requests of this process that time out in that queue: a
#: thousand of them at once must not keep the heartbeat from the main connection.
FRESH_SECONDS = 0.25
#: At most this many tasks are read.
MAX_TASKS = 100
#: Entries are kept for at most this many resources.
MAX_LOOKS = 64


def look_for_blockers(session: Session, wanted: Sequence[Request | RateRequest]) -> list[Blockers]:
    """Return the blockers of each of these requests."""
    return [
        _blockers(session, request.queue_request() if isinstance(request, RateRequest) else request)
        for request in wanted
    ]


def blockers(
    client: DatabaseClient, wanted: Sequence[Request | RateRequest], caller: Caller, upgrades: Ticket | None = None
) -> Effects[list[Blockers]]:
    """Return the blockers of each request, as far as they can be read without delay; an empty list after an error.
    ``upgrades``: the row of a reader that asks to upgrade; all other holders block it.
    """
    own = client.requesting_id(caller)

    def look(session: Session, _: int) -> list[Blockers]:
        return [
            _blockers(
                _Looks(client, session),
                request.queue_request() if isinstance(request, RateRequest) else request,
                own,
                upgrades,
            )
            for request in wanted
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
    """Return the running tasks of a queue, for a caller that waited for its end in vain; an empty list on an error."""
    if client.closed or client.member.main.session is None:
        return []
    try:
        found: list[TaskEntry] = yield Call(
            "look", lambda session, _: session.list_tasks(queue, "running", MAX_TASKS, 0), 0.0
        )
    except Exception as exc:
        log.info("Cannot see what runs: %s", exc)
        return []
    return found


class _Looks:
    """A session that keeps entries for a moment. (No lock: on the main connection one call follows the other.)"""

    def __init__(self, client: DatabaseClient, session: Session) -> None:
        self._looks = client.queue_cache
        self._session = session

    def entries(self, resource: str) -> list[Entry]:
        """Return the entries of a resource, at most `FRESH_SECONDS` old."""
        seen = self._looks.get(resource)
        if seen is None or monotonic() - seen[0] > FRESH_SECONDS:
            while len(self._looks) >= MAX_LOOKS:
                del self._looks[next(iter(self._looks))]
            seen = self._looks[resource] = (monotonic(), self._session.entries(resource))
        return seen[1]

    def resources(self) -> list[Resource]:
        """Return the resources that the session reads."""
        return self._session.resources()

    def kept_locks(self, resource: str) -> list[KeptLock]:
        """Return the kept locks that the session reads; none if it cannot."""
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
    holders = tuple(row for row in there if row.state != "waits")
    # (The request's own row has just left the queue, but may still be among the kept entries.)
    waiters = tuple(row for row in there if row.state == "waits" and not (own and row.requesting_id.startswith(own)))
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
