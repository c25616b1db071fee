"""Locks under ``sqlsem run``: what a command asks for while `sqlsem run` holds something until that command ends.

The command finds in its environment what those above it hold. So the same lock again is refused at once, in words, and
not waited for in vain. And those who wait below name, in their row's ``owner``, the row above that will stay until they
have ended (``MainThread#1 under 4711``). With these as one more kind of waiting the search for deadlocks finds commands
that take their locks in opposite orders. It is made here, by those who wait below, from what the queue shows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlsem import deadlocks
from sqlsem.core.effects import Call, Effects
from sqlsem.core.grant_registry import GrantState
from sqlsem.core.threads import voice
from sqlsem.deadlocks import Edge, Found, Row, Step
from sqlsem.engines.base import Session
from sqlsem.errors import Deadlock, Unavailable
from sqlsem.model import Entry, Request

__all__ = ["HELD", "Held", "ParentLocks", "find_deadlock", "inherited", "refuse", "tell"]

log = voice

#: The environment variable by which a command knows what those above it hold, the innermost last.
HELD = "SQLSEM_HELD"
_UNDER = re.compile(r"#\d+ under (\d+)$")


@dataclass(frozen=True, slots=True)
class Held:
    """A row that stays until this process has ended."""

    resource: str
    access: str
    limit: int | None
    weight: int
    position: int
    requesting_id: str

    @property
    def request(self) -> Request:
        """What was asked."""
        return Request(self.resource, self.access, self.limit, self.weight)


def tell(state: GrantState, environment: Mapping[str, str]) -> str:
    """What a command that runs under these shall find in its environment, which is this one so far."""
    held = [
        Held(request.resource, request.access, request.limit, request.weight, ticket.position, ticket.requesting_id)
        for request, ticket in zip(state.requests, state.tickets, strict=True)
    ]
    return json.dumps([dataclasses.astuple(one) for one in (*inherited(environment), *held)])


def inherited(environment: Mapping[str, str] = os.environ) -> tuple[Held, ...]:
    """What those above this process hold, in whatever databases."""
    text = environment.get(HELD)
    if not text:
        return ()
    try:
        found = tuple(Held(*one) for one in json.loads(text))
        for one in found:
            one.request  # noqa: B018 - checks what it is made of
    except (ValueError, TypeError) as exc:
        log.warning("$%s is not what sqlsem run puts there, and is left aside: %s", HELD, exc)
        return ()
    return found


class ParentLocks:
    """What those above this process hold in one database; looked up once. (Their rows tell which database it is.)"""

    def __init__(self) -> None:
        self.held: tuple[Held, ...] | None = None  # None: not looked up yet; (): nothing, as nearly always

    def find(self) -> Effects[tuple[Held, ...]]:
        """Look it up."""
        if self.held is None:
            try:
                self.held = yield from _still_held(inherited())
            except Unavailable:
                raise
            except Exception as exc:  # the login may not look at the queue, and need not
                log.warning("Locks taken under sqlsem run are not looked after: %s", exc)
                self.held = ()
        return self.held


def _still_held(held: Sequence[Held]) -> Effects[tuple[Held, ...]]:
    def look(session: Session, _: int) -> tuple[Held, ...]:
        rows = {
            (row.position, row.requesting_id)
            for resource in {one.resource for one in held}
            for row in session.entries(resource)
        }
        return tuple(one for one in held if (one.position, one.requesting_id) in rows)

    if not held:
        return ()
    found: tuple[Held, ...] = yield Call("look", look)
    return found


def refuse(held: Sequence[Held], requests: Iterable[Request], timeout: float | None) -> Effects[bool]:
    """Whether a request cannot be had before this process has ended. Raises `Deadlock` rather than have it wait."""
    for request in requests:
        blocking = [one for one in held if one.resource == request.resource and one.request.excludes(request)]
        # (It may have been given back: a process may outlive the command that it was started by.)
        for one in (yield from _still_held(blocking)):
            if timeout == 0:
                return True
            raise Deadlock(
                f"This process runs under 'sqlsem run', which holds {one.request.describe()} (position {one.position}) "
                f"until it ends, and would wait for itself; take the lock in one of the two places only",
                resource=request.resource,
            )
    return False


def find_deadlock(session: Session, member: int) -> Found | None:
    """A deadlock through rows that stay until somebody below has ended, which this member is to give up."""
    found = _search(session, member)
    # The rows of a queue may be read while others change it; what is no deadlock does not look like one twice.
    return found if found is not None and _search(session, member) == found else None


def _search(session: Session, member: int) -> Found | None:
    entries = [entry for entry in session.entries(None) if _counts(entry)]
    caps = {resource.resource: resource.cap for resource in session.resources() if resource.cap is not None}
    rows = [
        Row(
            entry.position,
            entry.resource,
            entry.member_id,
            entry.owner,
            entry.access,
            entry.limit,
            entry.weight,
            entry.granted_at is not None,
        )
        for entry in entries
    ]
    plain = {node for cycle in deadlocks.find(rows, caps) for node in cycle.nodes}
    for cycle in deadlocks.find([*rows, *_until_they_end(rows)], caps):
        below = [row for row in cycle.blocked if row.position > 0 and _parent(row) is not None]
        if not below or plain & cycle.nodes:  # the usual search finds it, and tells somebody
            continue
        # The youngest of those who can find it.
        victim = max(below, key=lambda row: row.position)
        if victim.member == member:
            return Found(_steps(cycle.path(victim), entries), len(cycle.nodes))
    return None


def _counts(entry: Entry) -> bool:
    """Whether a row stays as long as its owner likes: not of somebody bare, nor of who may be dead."""
    return entry.member_id is not None and entry.state not in ("revoked", "dead") and entry.missing_for is None


def _parent(row: Row) -> int | None:
    match = _UNDER.search(row.owner or "")
    return None if match is None else int(match[1])


def _until_they_end(rows: Sequence[Row]) -> list[Row]:
    """That those above wait for those below, as rows: each node that is below has a resource of its own, for which its
    parent waits. (Their positions are negative, and never a victim's.)
    """
    by_position = {row.position: row for row in rows}
    found: list[Row] = []
    seen = set()
    for row in rows:
        parent = by_position.get(_parent(row) or 0)
        if parent is None or parent.node == row.node or row.node in seen:
            continue
        seen.add(row.node)
        resource = f"end of {row.node}"
        for position, one in ((-2, row), (-1, parent)):
            found.append(
                Row(position - len(found) // 2 * 2, resource, one.member, one.owner, "write", 1, 1, one is row)
            )
    return found


def _steps(cycle: Sequence[Edge], entries: Sequence[Entry]) -> tuple[Step, ...]:
    """The cycle in terms of people: who is below stands for those above, too."""
    people = {entry.member_id: entry for entry in entries}
    steps = []
    for number, (row, behind) in enumerate(cycle):
        if row.position < 0:
            continue
        before = number - 1
        while cycle[before][1].position < 0:
            before -= 1
        person = people[row.member]
        steps.append(Step.of(cycle[before][1], row, behind, (person.host, person.pid, None)))
    return tuple(steps)
