"""The rule in T-SQL, compared with `Request.fits`, and polls of many rows.

The tests insert rows by hand and use few sessions: some engines take seconds to compile the routines in each.
"""

import contextlib
import random

import pytest

from sqlsem.values.locks import Request, Ticket

pytestmark = pytest.mark.engines("mssql")


def entry(request, position):
    """Return the values that `Request.fits` uses, as an entry has them."""
    return _Row(request.access, request.limit, request.weight, position)


class _Row:
    def __init__(self, access, limit, weight, position):
        self.access, self.limit, self.weight, self.position = access, limit, weight, position


@pytest.fixture
def fill(database):
    """``fill(resource, requests)`` inserts bare rows into the base table, and returns their positions."""
    with contextlib.closing(database.raw()) as connection:
        used = set()

        def fill(resource, requests, granted=0):
            used.add(resource)
            rows = [
                (
                    resource,
                    request.access,
                    request.limit,
                    request.weight,
                    f"{resource} {number}",
                    1 if number < granted else None,
                )
                for number, request in enumerate(requests)
            ]
            cursor = connection.cursor()
            cursor.executemany(
                f"INSERT INTO {database.beside('entry')} (resource_id, access_type, concurrency_limit, weight, "
                f"request_uid, requesting_id, requested_at, granted_at) "
                f"VALUES (?, ?, ?, ?, ?, N'by hand', SYSUTCDATETIME(), DATEADD(day, ?, SYSUTCDATETIME()))",
                rows,
            )
            return [row[0] for row in database.queue(resource)]

        yield fill
        for resource in used:
            connection.execute(f"DELETE FROM {database.beside('entry')} WHERE resource_id = ?", resource)


def request(seed, resource):
    kind = seed.choice(["write", "write", "write", "read", "stage:1"])
    limit = seed.choice([None, 1, 2, 3, 4, 6])
    weight = seed.randint(1, 3)
    return Request(resource, kind, limit, weight if limit is None else min(weight, limit))


@pytest.mark.parametrize("number", range(4))
def test_the_rule_is_that_of_requests(database, name, fill, number):
    seed = random.Random(number)
    with contextlib.closing(database.raw()) as connection:
        for turn in range(15):
            resource = f"{name} {turn}"
            requests = [request(seed, resource) for _ in range(seed.randint(1, 12))]
            positions = fill(resource, requests)
            rows = [entry(*pair) for pair in zip(requests, positions, strict=True)]
            cap = seed.choice([None, None, 1, 2, 5])
            connection.execute(
                f"INSERT INTO {database.beside('resource')} (resource_id, cap) VALUES (?, ?)", resource, cap
            )
            answers = connection.execute(
                f"SELECT t.queue_position, a.eligible, a.blocker, a.until FROM {database.beside('entry')} AS t "
                f"CROSS APPLY {database.schema}.eligibility(t.resource_id, t.queue_position, t.access_type, "
                f"t.concurrency_limit, t.weight, NULL) AS a WHERE t.resource_id = ? ORDER BY t.queue_position",
                resource,
            ).fetchall()
            connection.execute(f"DELETE FROM {database.beside('resource')} WHERE resource_id = ?", resource)
            assert [row[1] for row in answers] == [
                int(item.fits(rows[:before], cap)) for before, item in enumerate(requests)
            ], (requests, cap)
            for before, (_, eligible, blocker, until) in enumerate(answers):
                if eligible:
                    assert blocker is None
                    continue
                own_request = requests[before]
                conflicting = [
                    earlier.position
                    for earlier in rows[:before]
                    if not (own_request.shared and earlier.access == own_request.access)
                ]
                if conflicting:  # (else the cap alone is in the way)
                    assert until in ("leave", "grant")
                    assert blocker == conflicting[-1]  # the waiter just ahead, as no row is granted


def test_waiter_sleeps_on_the_deciding_row(database, name, fill):
    """The blocker is the last row if all must leave, the last waiter until it is granted, else the oldest holder."""
    three = [Request(name, limit=3)] * 5
    positions = fill(name, three, granted=3)
    with contextlib.closing(database.raw()) as connection:

        def ahead(position, limit=3, weight=1):
            return tuple(
                connection.execute(
                    f"SELECT eligible, blocker, until FROM {database.schema}.eligibility(?, ?, N'write', ?, ?, NULL)",
                    name,
                    position,
                    limit,
                    weight,
                ).fetchone()
            )

        assert ahead(positions[2]) == (1, None, "paused")  # as no other row blocks it
        assert ahead(positions[3]) == (0, positions[0], "any")
        assert ahead(positions[4]) == (0, positions[3], "grant")
        assert ahead(positions[4], 1) == (0, positions[3], "leave")
        assert ahead(positions[4] + 1, 3, 3) == (0, positions[4], "leave")


def test_many_looks_at_once(database, name):
    with contextlib.closing(database.session(grace=600)) as session:
        member, other = session.register_member("host", 1, "test"), session.register_member("host", 2, "test")
        numbers = iter(range(1000))

        def ask(resource, access="write", limit=1, weight=1, by=member):
            requests = [Request(resource, access, limit, weight)]
            (ticket,) = session.register(by, "test", "test", f"{name} {next(numbers)}", requests, False)
            return ticket

        limited = [ask(f"{name} limit", limit=5) for _ in range(12)]
        writer = ask(f"{name} read")
        readers = [ask(f"{name} read", "read") for _ in range(9)]
        behind = ask(f"{name} read")
        others = ask(f"{name} read", "read", by=other)
        assert [ticket.granted for ticket in limited] == [True] * 5 + [False] * 7
        tickets = [*limited, writer, *readers, behind, others, Ticket(name, 2**40, "test", False)]
        removed = {others.position: None, 2**40: None}
        before = {ticket.position: True for ticket in [*limited[:5], writer]}
        assert session.poll(member, tickets) == {**before, **removed}

        for ticket in limited[1:4]:
            session.release(ticket, "released")
        session.release(writer, "released")
        granted = {ticket.position: True for ticket in [limited[0], *limited[4:8], *readers]}
        lost = {ticket.position: None for ticket in [*limited[1:4], writer]}
        assert session.poll(member, tickets[::-1]) == {**granted, **lost, **removed}
        assert session.poll(member, tickets) == {**granted, **lost, **removed}, "what was granted is said again"
        assert session.poll(member, []) == {}

        session.set_resource(f"{name} limit", "paused", 1)
        session.release(limited[0], "released")
        assert session.poll(member, limited[8:]) == {}
        session.set_resource(f"{name} limit", "paused", 0)
        assert session.poll(member, limited[8:]) == {limited[8].position: True}
        assert session.poll(other, limited[8:9]) == {limited[8].position: None}
        session.deregister_member(member)
        session.deregister_member(other)
