"""Locks: taking a number, waiting for the turn, giving back."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from sqlsem import deadlocks
from sqlsem.engines.roles import DeadlockSearch
from sqlsem.engines.sqlite import fork
from sqlsem.engines.sqlite.database import SqliteDatabase
from sqlsem.engines.sqlite.members import SqliteMembers
from sqlsem.engines.sqlite.values import shown
from sqlsem.model import Entry, Request, Resource, Ticket

#: How often the next in line looks whether the file changed: at first, and at the most (seconds). Who is further back
#: looks so many times more seldom: as many must leave before, one after the other.
SHORTEST, LONGEST = 0.0001, 0.02
#: What looking seldom may cost: this share of the time for which nothing has happened at all, but no more than so long.
SHARE, SLOWEST = 0.05, 0.5
#: How often the next in line tests whether those ahead of it still live. Who is further back does so more seldom, too.
TEST_EVERY, TEST_SELDOM = 0.25, 8.0
LAST = 2**63 - 1
_WAITING = [field.name for field in dataclasses.fields(deadlocks.Row)]


class SqliteLocks(SqliteMembers, DeadlockSearch):
    """The queue of every resource."""

    def __init__(self, engine: SqliteDatabase) -> None:
        super().__init__(engine)
        # How the last wait ended: position, the file's version then, quiet since when, when the others were tested.
        self._left: tuple[int, Any, float, float] | None = None

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        if only_if_free:
            # The dead must not stand in the way of a try.
            for request in requests:
                if not self._may_enter(request):
                    self._test_ahead(request, LAST, member_id)
        with fork.held_off, self.writing():
            self.give_sign(member_id, known=True)
            state = [self.row("anybody", {"resource": one.resource, "member": member_id}) for one in requests]
            if not state[0]["known"]:
                raise self.given_up_error()
            busy = [one["queued"] for one in state]
            # A row of ours can only be there when somebody is.
            if any(busy) and (found := self.rows("find", {"member": member_id, "uid": uid})):
                return [
                    Ticket(row["resource_id"], row["queue_position"], row["requesting_id"], bool(row["granted"]))
                    for row in found
                ]
            granted = [not there or self._may_enter(request) for there, request in zip(busy, requests, strict=True)]
            if only_if_free and not all(granted):
                return None
            tickets = []
            for number, request in enumerate(requests, 1):
                position = self.run(
                    "insert",
                    {
                        "resource": request.resource,
                        "requesting_id": requesting_id,
                        "access": request.access,
                        "limit": request.limit,
                        "weight": request.weight,
                        "member": member_id,
                        "owner": owner,
                        "uid": uid if len(requests) == 1 else f"{uid}.{number}",
                        "granted": granted[number - 1],
                        "note": request.note,
                    },
                ).lastrowid
                assert position is not None
                tickets.append(Ticket(request.resource, position, requesting_id, granted[number - 1]))
        return tickets

    def _ahead(self, request: Request | Entry, position: int) -> tuple[int, bool]:
        """How many of the conflicting rows ahead must leave before one may enter (about, but at least 1 and at the most
        all), and whether one may enter now.
        """
        found = self.row(
            "ahead",
            {
                "resource": request.resource,
                "position": position,
                "access": request.access,
                "limit": request.limit,
                "weight": request.weight,
            },
        )
        number, excess = found["number"], found["excess"]
        leaving = number if found["paused"] else -(-excess * number // max(found["load"], 1))
        return max(1, min(leaving, number)), bool(found["let_in"]) or (not found["paused"] and excess <= 0)

    def _may_enter(self, request: Request) -> bool:
        return self._ahead(request, LAST)[1]

    def release(self, ticket: Ticket, outcome: str) -> bool:
        with fork.held_off, self.writing():
            return self.remove(ticket.resource, ticket.position, ticket.requesting_id, outcome)

    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        with fork.held_off, self.writing():
            rows = self.rows("find", {"member": member_id, "uid": uid})
            for row in rows:
                self.remove(row["resource_id"], row["queue_position"], row["requesting_id"], outcome)
        return len(rows)

    def wait(self, ticket: Ticket, timeout: float, nudge: threading.Event) -> bool | None:
        deadline = time.monotonic() + timeout
        key = {"resource": ticket.resource, "position": ticket.position}
        row = self.row("row", key)
        if row is None or row["revoked_at"] is not None:
            return None
        if row["granted"]:
            return True
        request, member_id = Request(ticket.resource, row["access"], row["limit"], row["weight"]), row["member_id"]
        seen, known, distance = None, None, 1
        quiet_since, tested = time.monotonic(), -TEST_SELDOM
        if self._left is not None and self._left[0] == ticket.position:
            _, known, quiet_since, tested = self._left  # one long wait comes in slices
        while True:
            version = self.version()
            now = time.monotonic()
            if version != seen or nudge.is_set():
                nudge.clear()
                seen = version
                if version != known:
                    known, quiet_since = version, now
                distance, free = self._ahead(request, ticket.position)
                if free:
                    with fork.held_off, self.writing():
                        self.give_sign(member_id, known=True)
                        return True if self.run("grant", key).rowcount == 1 else None
            if now >= deadline:
                self._left = (ticket.position, known, quiet_since, tested)
                return False
            if now - tested >= min(TEST_EVERY * distance, TEST_SELDOM):
                tested = now
                if self.row("row", key) is None:
                    return None
                if self._test_ahead(request, ticket.position, member_id):
                    seen = None
                    continue
            pause = min(max(SHORTEST * distance, (now - quiet_since) * SHARE), LONGEST * distance, SLOWEST)
            nudge.wait(min(pause * random.uniform(0.8, 1.2), deadline - now))

    def version(self) -> tuple[int, int]:
        """What changes when another connection has written."""
        return self.row("data_version")["data_version"], id(self.connection)

    def _test_ahead(self, request: Request, position: int, mine: int | None) -> bool:
        """Test whether those ahead still live; True when somebody was removed."""
        values = {"resource": request.resource, "position": position, "access": request.access}
        removed = False
        for row in self.rows("owners_ahead", values):
            if mine is None or row["member_id"] != mine:
                removed = self.suspect(request.resource, row["blocker"], row["member_id"]) or removed
        return removed

    def find_deadlock(self, member_id: int) -> deadlocks.Found | None:
        if self.row("holds_and_waits", (member_id,)) is None:
            return None
        rows = self.rows("those_who_wait")
        waiting = [deadlocks.Row(**{name: row[name] for name in _WAITING}) for row in rows]
        caps = {row["resource"]: row["cap"] for row in rows if row["cap"] is not None}
        processes = {row["member"]: (row["host"], row["pid"], None) for row in rows}
        for knot in deadlocks.find(waiting, caps):
            there = {party[0] for party in knot.parties}
            # Anyone who died holds nobody up for long.
            if knot.victim.member == member_id and all(self.lives(one) for one in there - {member_id}):
                return deadlocks.steps_of(knot, {one: processes[one] for one in there})
        return None

    def entries(self, resource: str | None) -> list[Entry]:
        found = []
        for row in self.rows("entries", {"resource": resource}):
            dead, missing_for = self.missing(row)
            entry = shown(Entry, row, missing_for=missing_for)
            if dead:
                entry = dataclasses.replace(entry, state="dead")
            elif entry.member_id is None and entry.state == "waits" and self._ahead(entry, entry.position)[1]:
                entry = dataclasses.replace(entry, state="holds")  # it has no process that would write that down
            found.append(entry)
        return found

    def resources(self) -> list[Resource]:
        waits: dict[str, list[bool]] = {}
        for entry in self.entries(None):
            waiting = entry.state == "waits" or (entry.state == "dead" and entry.granted_at is None)
            waits.setdefault(entry.resource, []).append(waiting)
        return [
            Resource(
                row["resource"],
                row["cap"],
                bool(row["paused"]),
                row["stale_after"],
                holding=waits.get(row["resource"], []).count(False),
                waiting=waits.get(row["resource"], []).count(True),
            )
            for row in self.rows("resources")
        ]
