"""Locks under ``sqlsem run``: its command requests locks, while `sqlsem run`, the *parent*, holds some until the
command ends.

The command finds the locks of its parents in its environment, so a request for the same lock is refused at once. The
row of a waiter in the command names the parent's row in ``owner`` (``MainThread#1 under 4711``). The parent's row stays
until the command ends, so the parent in effect waits for the command. The deadlock search here includes this kind of
waiting, and so finds commands that take locks in opposite orders. It reads the rows of the queues, and runs in the
processes that wait.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sqlsem.client.effects import Call, Effects
from sqlsem.util.record import record
from sqlsem.util.threads import log
from sqlsem.values import deadlocks
from sqlsem.values.deadlocks import Found, Row
from sqlsem.values.errors import Deadlock, Unavailable
from sqlsem.values.locks import WRITE, Entry, Request

if TYPE_CHECKING:
    from sqlsem.client.held.registry import GrantState
    from sqlsem.engines.base import Session

__all__ = ["HELD", "Held", "ParentLocks", "environment_value", "find_deadlock", "inherited", "refuse"]

#: The environment variable with the locks of the parents, the innermost last.
HELD = "SQLSEM_HELD"
_UNDER = re.compile(r"#\d+ under (\d+)$")


@record
class Held:
    """A row of a parent that stays until this process has ended."""

    resource: str
    access: str
    limit: int | None
    weight: int
    position: int
    requesting_id: str

    @property
    def request(self) -> Request:
        """The request of the row."""
        return Request(self.resource, self.access, self.limit, self.weight)


def environment_value(state: GrantState, environment: Mapping[str, str]) -> str:
    """Return the value of `HELD` for a command under ``state``; ``environment``: that of this process."""
    held = [
        Held(request.resource, request.access, request.limit, request.weight, ticket.position, ticket.requesting_id)
        for request, ticket in zip(state.requests, state.tickets, strict=True)
    ]
    return json.dumps([dataclasses.astuple(lock) for lock in (*inherited(environment), *held)])


def inherited(environment: Mapping[str, str] = os.environ) -> tuple[Held, ...]:
    """Return the locks of the parents, in any database."""
    text = environment.get(HELD)
    if not text:
        return ()
    try:
        locks = tuple(Held(*fields) for fields in json.loads(text))
        for lock in locks:
            lock.request  # noqa: B018 - checks the fields
    except (ValueError, TypeError) as exc:
        log.warning("$%s does not have the format of sqlsem run, and is ignored: %s", HELD, exc)
        return ()
    return locks


class ParentLocks:
    """The locks that the parents hold in one database, read once. (A lock counts if its row is in that database.)"""

    def __init__(self) -> None:
        self.held: tuple[Held, ...] | None = None  # None: not read yet; (): no lock, the usual case

    def find(self) -> Effects[tuple[Held, ...]]:
        """Return the locks; the first call reads them."""
        if self.held is None:
            try:
                self.held = yield from _still_held(inherited())
            except Unavailable:
                raise
            except Exception as exc:  # the login may not read the queue, and need not
                log.warning("Cannot read the locks of a parent sqlsem run, and ignore them: %s", exc)
                self.held = ()
        return self.held


def _still_held(held: Sequence[Held]) -> Effects[tuple[Held, ...]]:
    def read(session: Session, _: int) -> tuple[Held, ...]:
        rows = {
            (row.position, row.requesting_id)
            for resource in {lock.resource for lock in held}
            for row in session.entries(resource)
        }
        return tuple(lock for lock in held if (lock.position, lock.requesting_id) in rows)

    if not held:
        return ()
    still_held: tuple[Held, ...] = yield Call("read", read)
    return still_held


def refuse(held: Sequence[Held], requests: Iterable[Request], timeout: float | None) -> Effects[bool]:
    """Return True if a parent's lock blocks a request and ``timeout`` is 0; raise `Deadlock` if it is not 0."""
    for request in requests:
        blocking = [lock for lock in held if lock.resource == request.resource and lock.request.excludes(request)]
        # (The parent may have released the lock: a process may outlive the command that started it.)
        for lock in (yield from _still_held(blocking)):
            if timeout == 0:
                return True
            raise Deadlock(
                f"This process runs under 'sqlsem run', which holds {lock.request.describe()} (position "
                f"{lock.position}) until it ends, and would wait for itself; take the lock in one of the two places "
                f"only",
                resource=request.resource,
            )
    return False


def find_deadlock(session: Session, member: int) -> Found | None:
    """Return a deadlock through parents' rows whose victim is a request of this member, or None."""
    found = _search(session, member)
    # The rows may change while they are read, but two searches do not find the same false deadlock.
    return found if found is not None and _search(session, member) == found else None


def _search(session: Session, member: int) -> Found | None:
    entries = [entry for entry in session.entries(None) if _counts(entry)]
    caps = {resource.resource: resource.cap for resource in session.resources() if resource.cap is not None}
    rows = [Row.of(entry) for entry in entries]
    plain = {node for cycle in deadlocks.find(rows, caps) for node in cycle.nodes}
    for cycle in deadlocks.find([*rows, *_child_rows(rows)], caps):
        below = [row for row in cycle.blocked if row.position > 0 and _parent(row) is not None]
        if not below or plain & cycle.nodes:  # the usual search finds this cycle, and chooses a victim
            continue
        # The youngest of the requests whose process can find this deadlock.
        victim = max(below, key=lambda row: row.position)
        if victim.member == member:
            # (The artificial rows are left out of the steps, so a child also stands for its parents.)
            members = {
                entry.member_id: (entry.host, entry.pid, None) for entry in entries if entry.member_id is not None
            }
            return deadlocks.steps_of(cycle, members, victim)
    return None


def _counts(entry: Entry) -> bool:
    """Return True if only the owner ends the row: the row has a member, which is not suspected to be dead."""
    return entry.member_id is not None and entry.state not in ("revoked", "dead") and entry.missing_for is None


def _parent(row: Row) -> int | None:
    match = _UNDER.search(row.owner or "")
    return None if match is None else int(match[1])


def _child_rows(rows: Sequence[Row]) -> list[Row]:
    """Return artificial rows which say that parents wait for their children: each child holds a resource of its own,
    for which its parent waits. (Their positions are negative, so none of them can be the victim.)
    """
    by_position = {row.position: row for row in rows}
    artificial: list[Row] = []
    seen = set()
    for row in rows:
        parent = by_position.get(_parent(row) or 0)
        if parent is None or parent.node == row.node or row.node in seen:
            continue
        seen.add(row.node)
        resource = f"end of {row.node}"
        first = -2 - len(artificial)
        artificial += [
            Row(first + number, resource, waiter.member, waiter.owner, WRITE, 1, 1, waiter is row)
            for number, waiter in enumerate((row, parent))
        ]
    return artificial
