"""Reads the blockers of a request that was not granted in time, for the message of `Timeout`.

The read may fail or be impossible. The message then names no blocker, and `Timeout` is raised all the same. The read
uses the main connection, once and only if that is connected. So it takes no longer than any call there, and opens no
connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sqlsem.client.effects import Call, Effects
from sqlsem.engines.protocol import Capability
from sqlsem.util import late
from sqlsem.util.threads import log
from sqlsem.values.errors import Timeout
from sqlsem.values.events import meets
from sqlsem.values.locks import Entry, Request, Ticket, monotonic
from sqlsem.values.rates import RateRequest

if TYPE_CHECKING:
    from sqlsem.client.callers import Caller
    from sqlsem.client.client import DatabaseClient
    from sqlsem.engines.base import Session
    from sqlsem.insight.blockers import Blockers
    from sqlsem.insight.kept import KeptLock
    from sqlsem.values.tasks import TaskEntry

__all__ = ["blockers_in_words", "read_blockers", "running_tasks", "timeout_error"]

T = TypeVar("T")

#: For this time the entries of a queue are kept for other requests of this process that time out in the same queue. If
#: a thousand of them time out at once, they must not keep the heartbeat from the main connection.
FRESH_SECONDS = 0.25
#: At most this many tasks are read.
MAX_TASKS = 100
#: Entries are kept for at most this many resources.
MAX_CACHED = 64


def read_blockers(session: Session, requests: Sequence[Request | RateRequest]) -> list[Blockers]:
    """Return the blockers of each of these requests."""
    return [_blockers(session, request, session.entries) for request in requests]


def timeout_error(
    client: DatabaseClient,
    requests: Sequence[Request | RateRequest],
    caller: Caller,
    message: str,
    upgrades: Ticket | None = None,
) -> Effects[Timeout]:
    """Return the error to raise for requests that were not granted in time: ``message``, and the blockers of each
    request, as far as they can be read without delay. ``upgrades``: the row of a reader that asks to upgrade; all other
    holders block it.
    """
    own = client.requesting_id(caller)

    def read(session: Session, _: int) -> list[Blockers]:
        entries = partial(_cached_entries, client.queue_cache, session)
        return [_blockers(session, request, entries, own, upgrades) for request in requests]

    blocking = yield from _read(client, read, "which requests block this one")
    words = blockers_in_words(blocking)
    return Timeout(
        f"{message}{f': {words}' if words else ''}; see the queue with: sqlsem ls",
        resource=requests[0].resource,
        holders=[holder for blocker in blocking for holder in blocker.holders],
    )


def blockers_in_words(blocking: Sequence[Blockers]) -> str:
    """Return the texts of all blockers in one line; empty if there are none."""
    if not blocking:
        return ""
    with late.importing:
        from sqlsem.insight.blockers import in_words
    return in_words(blocking)


def running_tasks(client: DatabaseClient, queue: str) -> Effects[list[TaskEntry]]:
    """Return the running tasks of a queue, for a caller that waited in vain for their end; none after an error."""

    def read(session: Session, _: int) -> list[TaskEntry]:
        return session.list_tasks(queue, "running", MAX_TASKS, 0)

    return (yield from _read(client, read, "the running tasks"))


def _read(client: DatabaseClient, call: Callable[[Session, int], list[T]], what: str) -> Effects[list[T]]:
    """Return what the call reads; an empty list after an error, or without a connection."""
    if client.closed or client.member.main.session is None:
        return []
    try:
        result: list[T] = yield Call("read", call, 0.0)
    except Exception as exc:
        log.info("Cannot read %s: %s", what, exc)
        return []
    return result


def _cached_entries(cache: dict[str, tuple[float, list[Entry]]], session: Session, resource: str) -> list[Entry]:
    """Return the entries of a resource, at most `FRESH_SECONDS` old. (The cache needs no lock: on the main connection
    one call follows the other.)
    """
    cached = cache.get(resource)
    if cached is None or monotonic() - cached[0] > FRESH_SECONDS:
        while len(cache) >= MAX_CACHED:
            del cache[next(iter(cache))]
        cached = cache[resource] = (monotonic(), session.entries(resource))
    return cached[1]


def _blockers(
    session: Session,
    asked: Request | RateRequest,
    read_entries: Callable[[str], list[Entry]],
    own: str | None = None,
    upgrades: Ticket | None = None,
) -> Blockers:
    with late.importing:
        from sqlsem.insight.blockers import Blockers
    request = asked.queue_request() if isinstance(asked, RateRequest) else asked
    entries = read_entries(request.resource)
    if upgrades is not None:
        others = [entry for entry in entries if entry.position != upgrades.position and entry.granted_at is not None]
        return Blockers(request.resource, tuple(others), ())
    blocking = [entry for entry in entries if meets(request, entry.access) and entry.state != "dead"]
    holders = tuple(row for row in blocking if row.state != "waits")
    # (The request's own row has just left the queue, but may still be in the cache.)
    waiters = tuple(row for row in blocking if row.state == "waits" and not (own and row.requesting_id.startswith(own)))
    setting = None
    if not holders:
        setting = next(
            (resource for resource in session.resources() if resource.resource == request.resource and resource.paused),
            None,
        )
    kept: list[KeptLock] = []
    if not (holders or waiters or setting) and session.offers(Capability.KEPT_LOCKS) and session.has_feature("operate"):
        kept = [lock for lock in session.kept_locks(request.resource) if lock.keeps_out]
    return Blockers(request.resource, holders, waiters, setting, tuple(kept))
