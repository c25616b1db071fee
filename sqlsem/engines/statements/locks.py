"""Locks: registering requests, waiting for a grant, releasing.

A grant is decided and written in one transaction under the gate. Waiters poll when the database has changed, and
holders that release notify the waiters that they grant (`sqlsem.engines.statements.session.Sleeper`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from sqlsem.engines.failures import Conflict
from sqlsem.engines.priorities import priority_missing
from sqlsem.engines.statements.admission import FAR, LAST, AdmissionStatements
from sqlsem.engines.statements.session import StatementEngine
from sqlsem.engines.statements.values import as_time, named, shown
from sqlsem.insight.patterns import Patterns, no_limit_set, with_settings
from sqlsem.insight.totals import QueueTotals
from sqlsem.values import deadlocks
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import Entry, Request, Resource, Ticket, monotonic

#: Seconds between two polls of the waiter at the head of the queue, at least and at most. A waiter behind n blockers
#: pauses n times as long.
SHORTEST, LONGEST = 0.0001, 0.02
#: The shortest pause if a notification ended the last wait of the session.
SHORTEST_NOTIFIED = 0.002
#: A pause may last for this share of the time since the last change of the file, up to ``SLOWEST`` seconds.
SHARE, SLOWEST = 0.05, 0.5
#: Seconds between two liveness checks of the owners of the blockers: this time for each owner, up to the second number.
#: Only the first ``TESTED`` blockers are checked, or as many as the limit.
TEST_EVERY, TEST_SELDOM = 0.25, 8.0
TESTED = 32
#: Seconds between two checks by a waiter whether the files were replaced.
COMPARE_SECONDS = 0.1
#: The greatest number of resources whose last check a session stores.
MAX_TESTS = 1000
#: The number of rows that a scan of a queue reads at a time: at first, and at most.
FIRST_STEP, STEP = 4, 256
#: A release grants the waiters that fit, among this many first rows. Other waiters notice by polling.
LET_IN = 8
_WAITING = [field.name for field in dataclasses.fields(deadlocks.Row)]


class QueueDistance:
    """The approximate number of blockers ahead of a waiter. It is counted again when half of them have left."""

    def __init__(self) -> None:
        self.distance = 0
        self._middle: int | None = 0

    def has_changed(self, last_blocker: int | None) -> bool:
        """Return True if the first half of the counted rows has left, so that it is time to count again."""
        return self._middle is not None and (last_blocker or LAST) >= self._middle

    def count(self, rows: Sequence[Any]) -> None:
        """Count these blockers."""
        self.distance = max(1, len(rows))
        self._middle = rows[len(rows) // 2]["queue_position"] if len(rows) > 1 else None

    def pause(self, quiet: float, notified: bool) -> float:
        """Return the seconds until the next poll, ``quiet`` seconds after the last change of the file. ``notified``:
        the last grant came with a notification, so the next one probably will.
        """
        shortest = (SHORTEST_NOTIFIED if notified else SHORTEST) * self.distance
        return min(max(shortest, quiet * SHARE), LONGEST * self.distance, SLOWEST)


class LivenessChecks:
    """The times of the last liveness checks of blockers, by resource."""

    def __init__(self) -> None:
        self._done: dict[str, tuple[float, int]] = {}  # the time of the check, and the number of owners

    def due(self, resource: str, now: float) -> bool:
        """Return True if a check is due."""
        at, owners = self._done.get(resource, (-math.inf, 1))
        return now - at >= min(TEST_EVERY * owners, TEST_SELDOM)

    def note(self, resource: str, now: float, owners: int) -> None:
        """Record a check of this many owners."""
        if len(self._done) >= MAX_TESTS:
            self._done.clear()
        self._done[resource] = (now, max(1, owners))


class LockStatements(AdmissionStatements):
    """The queue of every resource."""

    def __init__(self, engine: StatementEngine) -> None:
        super().__init__(engine)
        # The state at the end of the last wait: position, the database's version, the time of its last change.
        self._last_wait: tuple[int, Any, float] | None = None
        self._tests = LivenessChecks()
        # True if there were no other rows on the resource of this session's last request, or last release. Then the
        # next one is tried in one statement.
        self._came_alone = self._left_alone = True

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        who = {"requesting_id": requesting_id, "member": member_id, "owner": owner}
        if self._came_alone and len(requests) == 1 and self.options.lease is None:
            self.touch_beacon()  # (a member with a beacon has no lease to renew)
            position = self.register_alone({**who, **columns(requests[0]), "uid": uid})
            if position is not None:
                return [Ticket(requests[0].resource, position, requesting_id, True)]
        if only_if_free:
            # A dead holder must not make this attempt fail.
            for request in requests:
                if not self.admission(request, LAST).allowed:
                    self.check_blockers(request, LAST, member_id, enough=request.limit)
        with self.forks_blocked, self.transaction():
            self.renew_lease(member_id, known=True)
            state = [
                self.row("resource_state", {"resource": request.resource, "member": member_id}) for request in requests
            ]
            if not state[0]["known"]:
                raise self.given_up_error()
            busy = [row["queued"] for row in state]
            self._came_alone = not any(busy)
            # (If the answer to an earlier call was lost, its rows exist, so the queue is not empty.)
            if any(busy) and (earlier := self.rows("find", {"member": member_id, "uid": uid})):
                return [
                    Ticket(row["resource_id"], row["queue_position"], row["requesting_id"], bool(row["granted"]))
                    for row in earlier
                ]
            for request, row in zip(requests, state, strict=True):
                if row["ageing"] is not None:
                    raise priority_missing(request.resource)
                if request.limit is None and row["cap"] is None:
                    raise ConfigurationError(no_limit_set(request.resource), resource=request.resource)
            granted = [
                not is_busy or self.admission(request, LAST).allowed
                for is_busy, request in zip(busy, requests, strict=True)
            ]
            if only_if_free and not all(granted):
                return None
            tickets = []
            for number, (request, free) in enumerate(zip(requests, granted, strict=True), 1):
                row_uid = uid if len(requests) == 1 else f"{uid}.{number}"
                position = self.insert({**who, **columns(request), "uid": row_uid, "granted": free})
                tickets.append(Ticket(request.resource, position, requesting_id, free))
        return tickets

    def release(self, ticket: Ticket, outcome: str) -> bool:
        removed = False
        if self._left_alone:
            key = {"resource": ticket.resource, "position": ticket.position, "requesting_id": ticket.requesting_id}
            removed = self._left_alone = self.leave_alone({**key, "outcome": outcome})
        if not removed:  # the resource has other rows, or the row was removed before
            with self.forks_blocked:
                with self.transaction():
                    removed, granted = self.leave(ticket, outcome)
                if granted:
                    self.sleeper.notify(granted)
        self.write_back()
        return removed

    def leave(self, ticket: Ticket, outcome: str) -> tuple[bool, list[int]]:
        """Release in a writing transaction. Return False if the row was removed before; and the positions of the
        waiters to notify after the transaction.
        """
        ready = self._ready_rows(ticket.resource, None, LET_IN, without=ticket.position)
        self._left_alone, granted = ready is None, ready or []
        if granted:
            # Other processes wake up while this process writes. (A waiting thread of this process would slow it down.)
            self.sleeper.notify(row["position"] for row in granted if row["member_id"] != self.member_id)
        removed = self.remove(ticket.resource, ticket.position, ticket.requesting_id, outcome)
        for row in granted if removed else ():
            # Written here, so that the granted waiters need no transaction of their own.
            self.run("let_in", {"position": row["position"]})
        return removed, [row["position"] for row in granted]

    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        with self.forks_blocked, self.transaction():
            rows = self.rows("find", {"member": member_id, "uid": uid})
            for row in rows:
                self.remove(row["resource_id"], row["queue_position"], row["requesting_id"], outcome)
        return len(rows)

    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        if timeout > 0:
            self.sleeper.listen(ticket.position)
        answer = self._wait(ticket, timeout, wakeup)
        self.require_in_place()
        if timeout > 0 and not answer:
            # The next slice may wait in another session, which cannot receive on this session's socket. (After a grant
            # the socket stays open until the next wait, to save time.)
            self.sleeper.stop()
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
        if self._last_wait is not None and self._last_wait[0] == ticket.position:
            _, known, quiet_since = self._last_wait  # (A long wait is a series of slices.)
        distance, notified, compared = QueueDistance(), False, quiet_since
        while True:
            if notified and self._is_let_in(key):
                self.sleeper.trusted = True
                return True
            version = self.version()
            now = monotonic()
            if version != seen or notified or wakeup.is_set():
                wakeup.clear()
                seen = version
                if version != known:
                    known, quiet_since = version, now
                admission = self.admission(request, ticket.position)
                if admission.allowed:
                    self.sleeper.trusted = notified
                    if admission.granted and self.options.lease is None:
                        return True
                    with contextlib.suppress(Conflict), self.forks_blocked, self.transaction():
                        self.renew_lease(member_id, known=True)
                        return True if self.run("grant", key).rowcount == 1 else None
                    seen = None  # after a conflict: try again
                if distance.has_changed(admission.last_blocker):
                    first = admission.last_blocker or 0
                    distance.count(self.conflicting(request, first, ticket.position, FAR, reach=FAR))
            if now >= deadline:
                self._last_wait = (ticket.position, known, quiet_since)
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
            pause = distance.pause(now - quiet_since, self.sleeper.trusted)
            pause = min(pause * random.uniform(0.8, 1.2), deadline - now)
            if self.sleeper.waits_for_rows and request.weight == request.limit and not admission.allowed:
                # (The rows ahead must all leave, so the last one of them is the one to wait for.)
                ahead = self.last_row_ahead(request, ticket.position, admission.last_blocker)
                if ahead is not None and self.sleeper.wait_for_row(ahead, deadline - now):
                    continue
            notified = self.sleeper.wait(pause, wakeup)

    def _is_let_in(self, key: dict[str, Any]) -> bool:
        """Return True if the process that sent the notification grants this row. It may be about to commit the
        grant.
        """
        if self.options.lease is not None:
            return False
        deadline = monotonic() + self.sleeper.recheck_seconds()
        while True:
            row = self.row("row", key)
            if row is not None and row["granted"] and row["revoked_at"] is None:
                return True
            if monotonic() >= deadline:
                return False

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        answers: dict[int, bool | None] = {}
        waiting: dict[str, dict[int, Request]] = {}
        for ticket in tickets:
            row = self.row("row", {"resource": ticket.resource, "position": ticket.position})
            if row is None or row["revoked_at"] is not None or row["member_id"] != member_id:
                answers[ticket.position] = None
            elif row["granted"]:
                answers[ticket.position] = True
            else:
                request = Request(ticket.resource, row["access"], row["limit"], row["weight"])
                waiting.setdefault(ticket.resource, {})[ticket.position] = request
        ready = [
            (resource, position)
            for resource, requests in waiting.items()
            for position in self._ready_positions(resource, requests)
        ]
        if ready:
            with self.forks_blocked, self.transaction():
                self.renew_lease(member_id, known=True)
                for resource, position in ready:
                    granted = self.run("grant", {"resource": resource, "position": position}).rowcount == 1
                    answers[position] = True if granted else None
        now = monotonic()
        for resource, requests in waiting.items():
            if self._tests.due(resource, now):
                limits = [request.limit or self.server_limit(resource) or 1 for request in requests.values()]
                self.check_blockers(Request(resource, limit=max(limits)), max(requests), member_id)
        return answers

    def _ready_positions(self, resource: str, requests: dict[int, Request]) -> list[int]:
        """Return the positions of those of the waiting requests that may be granted."""
        equal_requests: dict[Request, list[int]] = {}
        for position, request in sorted(requests.items()):
            equal_requests.setdefault(request, []).append(position)
        ready: list[int] = []
        others: set[int] = set()
        for request, positions in equal_requests.items():
            if request.shared and request.limit == 1:
                ready += self.ready_sharers(request, positions)
            elif self.admission(request, positions[0]).allowed:  # else none of them may be (`Request.keeps_out`)
                others.update(positions)
        if others:
            ready += [row["position"] for row in self._ready_rows(resource, others) or ()]
        return sorted(ready)

    def _ready_rows(
        self, resource: str, positions: Collection[int] | None, limit: int = LAST, *, without: int = 0
    ) -> list[Any] | None:
        """Scan the queue once, and return the waiting rows that may be granted (only at ``positions``, if given). The
        scan ends after ``limit`` rows, or when no further request can fit. Row ``without`` counts as released. Return
        None if the queue is empty.
        """
        ready: list[Any] = []
        scan: QueueTotals | None = None
        last = LAST if positions is None else max(positions)
        for row in self.rows_in_order(resource, limit, without):
            scan = scan or QueueTotals(row["cap"], bool(row["paused"]))
            shape = row["access"], row["limit"], row["weight"]
            waits = not (row["granted"] or row["revoked"]) and (positions is None or row["position"] in positions)
            if waits and scan.fits(*shape):
                ready.append(row)
            scan.add(*shape)
            if scan.closed or row["position"] >= last:
                break
        return None if scan is None else ready

    def rows_in_order(self, resource: str, limit: int = LAST, without: int = 0) -> Iterator[Any]:
        """Yield the first rows of a queue, without one of them. A caller that stops early reads only a few more."""
        position, step = 0, min(FIRST_STEP, limit)
        while step > 0:
            values = {"resource": resource, "position": position, "without": without, "maximum": step}
            rows = self.rows("pass", values)
            yield from rows
            if len(rows) < step:
                return
            limit -= len(rows)
            position, step = rows[-1]["position"], min(step * 4, STEP, limit)

    def check_blockers(self, request: Request, position: int, mine: int | None, *, enough: int | None = None) -> bool:
        """Check whether the owners of the first blockers are alive, as many as the limit. Return True if rows were
        removed. (A dead owner further back blocks no waiter until its row is among the first.) ``enough``: end when so
        many blockers remain.
        """
        most = max(TESTED, request.limit or self.server_limit(request.resource) or 0)
        rows = self.blockers(request, position, most)
        owners: dict[int, list[Any]] = {}
        for row in rows:
            owners.setdefault(row["member_id"] or -row["queue_position"], []).append(row)
        self._tests.note(request.resource, monotonic(), len(owners))
        removed, remaining = False, 0
        for first, *others in owners.values():
            if (mine is None or first["member_id"] != mine) and self.check_owner(
                request.resource, first["queue_position"], first["member_id"]
            ):
                removed = True
                continue
            remaining += 1 + len(others)
            if enough is not None and remaining >= enough:
                break
        return removed

    def find_deadlock(self, member_id: int) -> deadlocks.Found | None:
        if self.row("holds_and_waits", (member_id,)) is None:
            return None
        rows = self.rows("deadlock_candidates")
        waiting = [deadlocks.Row(**{name: row[name] for name in _WAITING}) for row in rows]
        names = sorted({row["resource"] for row in rows})
        resources = with_settings(
            [Resource(name, None, False, None, 0, 0) for name in names],
            {row[0]: row for row in self.settings_of_resources()} if names else {},
            {},
        )
        caps = {resource.resource: resource.cap for resource in resources if resource.cap is not None}
        processes = {row["member"]: (row["host"], row["pid"], None) for row in rows}
        for cycle in deadlocks.find(waiting, caps):
            members = {node[0] for node in cycle.nodes}
            # (Dead members are soon removed, so a cycle through them is no deadlock.)
            if cycle.victim.member == member_id and all(self.lives(member) for member in members - {member_id}):
                return deadlocks.steps_of(cycle, {member: processes[member] for member in members})
        return None

    def entries(self, resource: str | None) -> list[Entry]:
        result: list[Entry] = []
        settings = {row[0]: row for row in self.settings_of_resources()}
        patterns = Patterns((row[0], row[1], row[5]) for row in settings.values())
        scans = {
            name: QueueTotals(row[1] or patterns.cap_of(name), row[2] is not None) for name, row in settings.items()
        }
        liveness: dict[int, tuple[bool, float | None]] = {}
        for row in named(self.rows("entries", {"resource": resource})):
            member_id = row["member_id"]
            if member_id not in liveness:
                liveness[member_id] = self.missing(row)
            dead, missing_for = liveness[member_id]
            scan = scans.get(row["resource"])
            if scan is None:
                scan = scans[row["resource"]] = QueueTotals(patterns.cap_of(row["resource"]), False)
            known: dict[str, Any] = {"missing_for": missing_for}
            shape = row["access"], row["limit"], row["weight"]
            if dead:
                known["state"] = "dead"
            elif member_id is None and row["state"] == "waits" and scan.fits(*shape):
                known["state"] = "holds"  # a bare participant: it writes its grant nowhere
            scan.add(*shape)
            result.append(shown(Entry, row, **known))
        return result

    def resources(self) -> list[Resource]:
        holding: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for entry in self.entries(None):
            waits = entry.state == "waits" or (entry.state == "dead" and entry.granted_at is None)
            (waiting if waits else holding)[entry.resource] += 1
        names = [name for (name,) in self.rows("resources")]
        resources = [Resource(name, None, False, None, holding[name], waiting[name]) for name in names]
        return with_settings(resources, {row[0]: row for row in self.settings_of_resources()}, self.priorities())

    def priorities(self) -> dict[str, float]:
        return {name: float(ageing) for name, ageing in self.rows("priorities")}

    def settings_of_resources(self) -> list[list[Any]]:
        """Return the settings of resources and patterns: resource, cap, paused_at, stale_after, paused_by, cap_by."""
        return [[*row[:2], as_time(row[2]), *row[3:]] for row in self.rows("resource_settings")]


def columns(request: Request) -> dict[str, Any]:
    """Return the columns of a request's row."""
    return {
        "resource": request.resource,
        "access": request.access,
        "limit": request.limit,
        "weight": request.weight,
        "note": request.note,
    }
