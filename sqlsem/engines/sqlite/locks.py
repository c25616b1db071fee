"""Locks: taking a number, waiting for the turn, giving back."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from sqlsem import deadlocks
from sqlsem.engines.priorities import priority_missing
from sqlsem.engines.protocol import DeadlockSession
from sqlsem.engines.sqlite import fork
from sqlsem.engines.sqlite.database import SqliteDatabase
from sqlsem.engines.sqlite.members import SqliteMembers
from sqlsem.engines.sqlite.notifier import UnixSocketNotifier
from sqlsem.engines.sqlite.values import as_time, named, shown
from sqlsem.errors import ConfigurationError
from sqlsem.insight.patterns import Patterns, no_limit_set, with_settings
from sqlsem.insight.totals import QueueTotals
from sqlsem.model import Entry, Request, Resource, Ticket, monotonic

#: How often the next in line looks whether the file changed: at first, and at the most (seconds). Who is further back
#: looks so many times more seldom: as many must leave before, one after the other.
SHORTEST, LONGEST = 0.0001, 0.02
#: The same at first, where the last wait of the session was ended by a ring.
SHORTEST_RUNG = 0.002
#: What looking seldom may cost: this share of the time for which nothing has happened at all, but no more than so long.
SHARE, SLOWEST = 0.05, 0.5
#: How far a waiter counts those before it; further back makes no difference.
FAR = 256
#: How often those ahead are tested, for each owner among them, and how seldom at the most. The first rows,
#: or as many as may be inside.
TEST_EVERY, TEST_SELDOM = 0.25, 8.0
TESTED = 32
#: How often a waiter looks whether its files are still those of others.
COMPARE_SECONDS = 0.1
#: So many resources a session remembers as tested.
MOST_TESTS = 1000
#: So many rows of a queue are read at a time, at first and at the most.
FIRST_STEP, STEP = 4, 256
#: Who leaves lets in those that may go among so many rows that come first; the others find that out themselves.
LET_IN = 8
LAST = 2**63 - 1
_WAITING = [field.name for field in dataclasses.fields(deadlocks.Row)]


class Admission(NamedTuple):
    """Whether a request may enter, and is in already; the last one of those ahead that alone keep it out, if any."""

    come: bool
    let_in: bool
    edge: int | None


class QueueDistance:
    """About how many must leave before a waiter may enter; counted again when half of them have left."""

    def __init__(self) -> None:
        self.distance = 0
        self._middle: int | None = 0

    def has_changed(self, edge: int | None) -> bool:
        """Whether to count again, now that those from ``edge`` on have to leave."""
        return self._middle is not None and (edge or LAST) >= self._middle

    def count(self, rows: Sequence[Any]) -> None:
        """These have to leave, or more."""
        self.distance = max(1, len(rows))
        self._middle = rows[len(rows) // 2]["queue_position"] if len(rows) > 1 else None

    def pause(self, quiet: float, rung: bool) -> float:
        """Until the next look, where nothing has happened for so long; ``rung``: who lets it in will ring, it seems."""
        shortest = (SHORTEST_RUNG if rung else SHORTEST) * self.distance
        return min(max(shortest, quiet * SHARE), LONGEST * self.distance, SLOWEST)


class LivenessChecks:
    """When the owners of those ahead were tested last, by resource."""

    def __init__(self) -> None:
        self._done: dict[str, tuple[float, int]] = {}  # when, and how many there were

    def due(self, resource: str, now: float) -> bool:
        """Whether it is time to test again."""
        at, owners = self._done.get(resource, (-math.inf, 1))
        return now - at >= min(TEST_EVERY * owners, TEST_SELDOM)

    def note(self, resource: str, now: float, owners: int) -> None:
        """So many owners are tested now."""
        if len(self._done) >= MOST_TESTS:
            self._done.clear()
        self._done[resource] = (now, max(1, owners))


class SqliteLocks(SqliteMembers, DeadlockSession):
    """The queue of every resource."""

    def __init__(self, engine: SqliteDatabase) -> None:
        super().__init__(engine)
        # How the last wait ended: position, the file's version then, quiet since when.
        self._left: tuple[int, Any, float] | None = None
        self._tests = LivenessChecks()
        # Whether the last one that came, and that left, by this session was alone on its resource: what is done in one
        # statement then is not tried where others are.
        self._came_alone = self._left_alone = True
        self.rings = UnixSocketNotifier(engine.path, f"{engine.options.schema}.{engine.options.table}")

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        who = {"requesting_id": requesting_id, "member": member_id, "owner": owner}
        if self._came_alone and len(requests) == 1 and self.options.lease is None:
            self.renew_lease(member_id, known=True)
            with fork.held_off:
                self.roll_back()
                done = self.run("insert_first", {**who, **columns(requests[0]), "uid": uid})
                if done.rowcount == 1 and done.lastrowid is not None:
                    return [Ticket(requests[0].resource, done.lastrowid, requesting_id, True)]
        if only_if_free:
            # The dead must not stand in the way of a try.
            for request in requests:
                if not self.admission(request, LAST).come:
                    self.check_blockers(request, LAST, member_id)
        with fork.held_off, self.writing():
            self.renew_lease(member_id, known=True)
            state = [self.row("anybody", {"resource": one.resource, "member": member_id}) for one in requests]
            if not state[0]["known"]:
                raise self.given_up_error()
            busy = [one["queued"] for one in state]
            self._came_alone = not any(busy)
            # A row of ours can only be there when somebody is.
            if any(busy) and (found := self.rows("find", {"member": member_id, "uid": uid})):
                return [
                    Ticket(row["resource_id"], row["queue_position"], row["requesting_id"], bool(row["granted"]))
                    for row in found
                ]
            for request, there in zip(requests, state, strict=True):
                if there["ageing"] is not None:
                    raise priority_missing(request.resource)
                if request.limit is None and there["cap"] is None:
                    raise ConfigurationError(no_limit_set(request.resource), resource=request.resource)
            granted = [
                not there or self.admission(request, LAST).come for there, request in zip(busy, requests, strict=True)
            ]
            if only_if_free and not all(granted):
                return None
            tickets = []
            for number, (request, free) in enumerate(zip(requests, granted, strict=True), 1):
                its = uid if len(requests) == 1 else f"{uid}.{number}"
                position = self.run("insert", {**who, **columns(request), "uid": its, "granted": free}).lastrowid
                assert position is not None
                tickets.append(Ticket(request.resource, position, requesting_id, free))
        return tickets

    def admission(self, request: Request, position: int) -> Admission:
        """Whether a request at that position may enter now."""
        values = {"resource": request.resource, "position": position, "access": request.access}
        places = request.limit or self.row("places", values)["places"]
        found = self.row("fits", {**values, "weight": request.weight, "places": places})
        there = bool(found["let_in"])
        return Admission(there or bool(found["fits"] and not found["paused"]), there, found["edge"])

    def release(self, ticket: Ticket, outcome: str) -> bool:
        with fork.held_off:
            there = self._left_alone and self._leave_alone(ticket, outcome)
            if not there:
                with self.writing():
                    there, come = self.leave(ticket, outcome)
                if come:
                    self.rings.ring(come)
            self.write_back()
        return there

    def _leave_alone(self, ticket: Ticket, outcome: str) -> bool:
        """Leave in one statement; False when others are on the resource, or the row is not there."""
        self.roll_back()
        key = {"resource": ticket.resource, "position": ticket.position, "requesting_id": ticket.requesting_id}
        self._left_alone = self.run_routine("leave_alone", {**key, "outcome": outcome}) > 0
        if self._left_alone:
            self.wrote()
        return self._left_alone

    def leave(self, ticket: Ticket, outcome: str) -> tuple[bool, list[int]]:
        """In a transaction that writes: whether the row was there, and who is to be rung when that has ended."""
        found = self._come(ticket.resource, None, LET_IN, without=ticket.position)
        self._left_alone, come = found is None, found or []
        if come:
            # Another process wakes up while this one writes; a thread of ours would only be in the way.
            self.rings.ring(row["position"] for row in come if row["member_id"] != self.member_id)
        there = self.remove(ticket.resource, ticket.position, ticket.requesting_id, outcome)
        for row in come if there else ():
            # Those who may go now need not write that themselves.
            self.run("let_in", {"position": row["position"]})
        return there, [row["position"] for row in come]

    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        with fork.held_off, self.writing():
            rows = self.rows("find", {"member": member_id, "uid": uid})
            for row in rows:
                self.remove(row["resource_id"], row["queue_position"], row["requesting_id"], outcome)
        return len(rows)

    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        if timeout > 0:
            self.rings.listen(ticket.position)
        answer = self._wait(ticket, timeout, wakeup)
        self.require_in_place()
        if timeout > 0 and not answer:
            # The next slice may be waited for in another session, which cannot hear what this one does. (Who is let in
            # does not wait for a socket to be closed: that goes with the next wait.)
            self.rings.stop()
        return answer

    def _wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        deadline = monotonic() + timeout
        key = {"resource": ticket.resource, "position": ticket.position}
        row = self.row("row", key)
        if row is None or row["revoked_at"] is not None:
            return None
        if row["granted"]:
            return True
        request, member_id = Request(ticket.resource, row["access"], row["limit"], row["weight"]), row["member_id"]
        seen, known, quiet_since = None, None, monotonic()
        if self._left is not None and self._left[0] == ticket.position:
            _, known, quiet_since = self._left  # one long wait comes in slices
        place, rung, compared = QueueDistance(), False, quiet_since
        while True:
            if rung and self._is_let_in(key):
                self.rings.trusted = True
                return True
            version = self.version()
            now = monotonic()
            if version != seen or rung or wakeup.is_set():
                wakeup.clear()
                seen = version
                if version != known:
                    known, quiet_since = version, now
                turn = self.admission(request, ticket.position)
                if turn.come:
                    self.rings.trusted = rung
                    if turn.let_in and self.options.lease is None:
                        return True
                    with fork.held_off, self.writing():
                        self.renew_lease(member_id, known=True)
                        return True if self.run("grant", key).rowcount == 1 else None
                if place.has_changed(turn.edge):
                    place.count(self._conflicting(request, turn.edge or 0, ticket.position, FAR))
            if now >= deadline:
                self._left = (ticket.position, known, quiet_since)
                return False
            if now - compared > COMPARE_SECONDS:
                compared = now
                self.require_in_place()
            if self._tests.due(ticket.resource, now):
                if self.row("row", key) is None:
                    return None
                if self.check_blockers(request, ticket.position, member_id):
                    seen = None
                    continue
            pause = place.pause(now - quiet_since, self.rings.trusted)
            rung = self.rings.wait(min(pause * random.uniform(0.8, 1.2), deadline - now), wakeup)

    def _is_let_in(self, key: dict[str, Any]) -> bool:
        """Whether who has rung lets this row in, which it may be just about to write."""
        if self.options.lease is not None:
            return False
        until = monotonic() + self.rings.patience()
        while True:
            row = self.row("row", key)
            if row is not None and row["granted"] and row["revoked_at"] is None:
                return True
            if monotonic() >= until:
                return False

    def interrupt(self) -> None:
        super().interrupt()
        self.rings.wake()

    def abandon(self) -> None:
        self.rings.close()

    def close(self) -> None:
        super().close()
        self.rings.close()

    def version(self) -> tuple[int, int]:
        """What changes when another connection has written."""
        return self.row("data_version")["data_version"], id(self.connection)

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        found: dict[int, bool | None] = {}
        waiting: dict[str, dict[int, int]] = {}  # the limits
        for ticket in tickets:
            row = self.row("row", {"resource": ticket.resource, "position": ticket.position})
            if row is None or row["revoked_at"] is not None or row["member_id"] != member_id:
                found[ticket.position] = None
            elif row["granted"]:
                found[ticket.position] = True
            else:
                limit = row["limit"] or self.server_limit(ticket.resource) or 1
                waiting.setdefault(ticket.resource, {})[ticket.position] = limit
        come = [
            (resource, row["position"])
            for resource, positions in waiting.items()
            for row in self._come(resource, positions) or ()
        ]
        if come:
            with fork.held_off, self.writing():
                self.renew_lease(member_id, known=True)
                for resource, position in come:
                    there = self.run("grant", {"resource": resource, "position": position}).rowcount == 1
                    found[position] = True if there else None
        now = monotonic()
        for resource, positions in waiting.items():
            if self._tests.due(resource, now):
                everybody = Request(resource, limit=max(positions.values()))
                self.check_blockers(everybody, max(positions), member_id)
        return found

    def _come(
        self, resource: str, wanted: Collection[int] | None, most: int = LAST, *, without: int = 0
    ) -> list[Any] | None:
        """The rows whose turn has come, of those at these positions or of all: one pass along the queue, as far as
        anybody can be let in, over so many rows at the most, and as if one of them had left. None: nobody is there.
        """
        come: list[Any] = []
        line: QueueTotals | None = None
        last, position, step = LAST if wanted is None else max(wanted), 0, min(FIRST_STEP, most)
        while position < last:
            rows = self.rows("pass", {"resource": resource, "position": position, "without": without, "most": step})
            for row in rows:
                line = line or QueueTotals(row["cap"], bool(row["paused"]))
                if line.closed or position >= last:
                    return come
                position = row["position"]
                asked = row["access"], row["limit"], row["weight"]
                asks = not (row["granted"] or row["revoked"]) and (wanted is None or position in wanted)
                if asks and line.fits(*asked):
                    come.append(row)
                line.add(*asked)
            most -= len(rows)
            if len(rows) < step or most <= 0 or (line is not None and line.closed):
                break
            step = min(step * 4, STEP, most)
        return None if line is None else come

    def server_limit(self, resource: str) -> int | None:
        """The limit that an operator has set for it."""
        found: int | None = self.row("cap", {"resource": resource})["cap"]
        return found

    def _conflicting(self, request: Request, first: int, position: int, most: int) -> list[Any]:
        """The first rows from one position on, and before another one, that this request does not share with."""
        values = {"resource": request.resource, "first": first, "position": position, "access": request.access}
        return self.rows("rows_between", {**values, "most": most})

    def check_blockers(self, request: Request, position: int, mine: int | None) -> bool:
        """Test whether the first of those ahead still live, as many as there may be inside; True when somebody was
        removed. Who died further back keeps nobody out before it is among the first.
        """
        rows = self._conflicting(
            request, 0, position, max(TESTED, request.limit or self.server_limit(request.resource) or 0)
        )
        owners = {row["member_id"] or -row["queue_position"]: row for row in reversed(rows)}
        self._tests.note(request.resource, monotonic(), len(owners))
        removed = False
        for row in owners.values():
            if mine is None or row["member_id"] != mine:
                removed = self.check_owner(request.resource, row["queue_position"], row["member_id"]) or removed
        return removed

    def find_deadlock(self, member_id: int) -> deadlocks.Found | None:
        if self.row("holds_and_waits", (member_id,)) is None:
            return None
        rows = self.rows("those_who_wait")
        waiting = [deadlocks.Row(**{name: row[name] for name in _WAITING}) for row in rows]
        caps = (
            {resource.resource: resource.cap for resource in self.resources() if resource.cap is not None}
            if rows
            else {}
        )
        processes = {row["member"]: (row["host"], row["pid"], None) for row in rows}
        for cycle in deadlocks.find(waiting, caps):
            there = {node[0] for node in cycle.nodes}
            # Anyone who died holds nobody up for long.
            if cycle.victim.member == member_id and all(self.lives(one) for one in there - {member_id}):
                return deadlocks.steps_of(cycle, {one: processes[one] for one in there})
        return None

    def entries(self, resource: str | None) -> list[Entry]:
        found: list[Entry] = []
        settings = {row[0]: row for row in self.settings_of_resources()}
        patterns = Patterns((row[0], row[1], row[5]) for row in settings.values())
        lines = {
            name: QueueTotals(row[1] or patterns.cap_of(name), row[2] is not None) for name, row in settings.items()
        }
        tested: dict[int, tuple[bool, float | None]] = {}
        for row in named(self.rows("entries", {"resource": resource})):
            member_id = row["member_id"]
            if member_id not in tested:
                tested[member_id] = self.missing(row)
            dead, missing_for = tested[member_id]
            line = lines.get(row["resource"])
            if line is None:
                line = lines[row["resource"]] = QueueTotals(patterns.cap_of(row["resource"]), False)
            known: dict[str, Any] = {"missing_for": missing_for}
            if dead:
                known["state"] = "dead"
            elif (
                member_id is None and row["state"] == "waits" and line.fits(row["access"], row["limit"], row["weight"])
            ):
                known["state"] = "holds"  # it has no process that would write that down
            line.add(row["access"], row["limit"], row["weight"])
            found.append(shown(Entry, row, **known))
        return found

    def resources(self) -> list[Resource]:
        holding: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for entry in self.entries(None):
            waits = entry.state == "waits" or (entry.state == "dead" and entry.granted_at is None)
            (waiting if waits else holding)[entry.resource] += 1
        found = [Resource(name, None, False, None, holding[name], waiting[name]) for (name,) in self.rows("resources")]
        return with_settings(found, {row[0]: row for row in self.settings_of_resources()}, self.priorities())

    def priorities(self) -> dict[str, float]:
        """As `PrioritySession.priorities`."""
        return {name: float(ageing) for name, ageing in self.rows("priorities")}

    def settings_of_resources(self) -> list[list[Any]]:
        """What is set, by whom; patterns among them: resource, cap, paused_at, stale_after, paused_by, cap_by."""
        return [[*row[:2], as_time(row[2]), *row[3:]] for row in self.rows("resource_settings")]


def columns(request: Request) -> dict[str, Any]:
    """What a request says of itself."""
    return {
        "resource": request.resource,
        "access": request.access,
        "limit": request.limit,
        "weight": request.weight,
        "note": request.note,
    }
