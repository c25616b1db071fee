"""A call reads as many rows beside many waiters of its resource as beside few; a search reads the queue once."""

import contextlib
import threading

import pytest
from support import costs

from sqlsem.engines.statements.locks import columns
from sqlsem.values.locks import Request, Ticket, Upgrading

pytestmark = pytest.mark.engines("sqlite", "mysql")

FEW, MANY = 100, 1000
#: Bounds of the growth from FEW to MANY: a factor, for deeper trees; and a number of rows, as a waiter counts its
#: blockers up to 256. (Code that reads all rows would read ten times as much.)
FLAT, COUNTED = 1.5, 256 - FEW
#: The steps of SQLite's machine for a row.
STEPS = 10
#: A search that reads all rows reads this many times as much at most. (Code that reads all of them for each row: a
#: hundred times.)
LINEAR = 15


class Crowd:
    """Rows on one resource, all of one member: the first is granted. Another session works beside them."""

    def __init__(self, database, stack, resource, number, request, *, owners=False):
        self.owner, self.session = (stack.enter_context(contextlib.closing(database.session())) for _ in range(2))
        member = self.owner.register_member("host", 1, "crowd")
        stack.callback(self.owner.deregister_member, member)
        self.member = self.session.register_member("host", 2, "beside")
        stack.callback(self.session.deregister_member, self.member)
        self.request, self.uids = request, iter(range(MANY))
        with self.owner.forks_blocked, self.owner.transaction():
            for index in range(number):
                row = {"requesting_id": "crowd", "member": member, "owner": f"owner {index}"}
                if owners:  # each holds another resource, too
                    held = columns(Request(f"{resource} {index}"))
                    self.owner.insert({**row, **held, "uid": f"h{index}", "granted": True})
                position = self.owner.insert({**row, **columns(request), "uid": f"{index}", "granted": index == 0})
                self.first = self.first if index else position
        self.crowd = member

    def register(self, only_if_free=False):
        uid = f"u{next(self.uids)}"
        return self.session.register(self.member, "beside", "beside", uid, [self.request], only_if_free)

    def reads(self, call):
        """Return the number of rows that a call reads. (An earlier call has read the tables' definitions.)"""
        call()
        return costs.reads_of(self.session, call)


def of_calls(crowd):
    """Return the number of rows that each call of a program reads while it acquires, waits and releases."""
    (last,) = crowd.register()
    session, now = crowd.session, threading.Event()

    def leave():
        session.cancel(crowd.member, uid, "cancelled")

    reads = {
        "try": crowd.reads(lambda: crowd.register(only_if_free=True)),
        "register": crowd.reads(crowd.register),
        "wait": crowd.reads(lambda: session.wait(last, 0.001, now)),
        "poll": crowd.reads(lambda: session.poll(crowd.member, [last])),
        "heartbeat": crowd.reads(lambda: session.heartbeat(crowd.member)),
        "blockers": crowd.reads(lambda: session.check_blockers(crowd.request, last.position, crowd.member)),
    }
    uid = "u0"
    reads["cancel"] = costs.reads_of(session, leave)
    positions = iter([crowd.first, *sorted(crowd.owner.heartbeat(crowd.crowd).positions)[1:]])

    def release():
        assert session.release(Ticket(crowd.request.resource, next(positions), "crowd", True), "released")

    reads["release"] = crowd.reads(release)
    return reads


@pytest.mark.parametrize("access", ["write", "limit"])
@pytest.mark.parametrize("fresh", [False, True], ids=["old statistics", "fresh statistics"])
def test_calls_read_the_same_beside_many_waiters(database, name, access, fresh):
    if fresh and database.engine == "sqlite":
        pytest.skip("a file has statistics only after ANALYZE, which the library never runs")
    reads = {}
    for number in (FEW, MANY):
        request = Request(name(number), limit=3 if access == "limit" else 1)
        with contextlib.ExitStack() as stack:
            crowd = Crowd(database, stack, request.resource, number, request)
            if fresh:
                database.rows("ANALYZE TABLE {table}")
            reads[number] = of_calls(crowd)
    counted = COUNTED * (STEPS if database.engine == "sqlite" else 1)
    for call, few in reads[FEW].items():
        assert reads[MANY][call] <= FLAT * few + (counted if call == "wait" else 0), (call, reads)


def test_an_upgrade_reads_the_queue_once(database, name):
    """Behind a reader, many writers, and between these no room."""
    reads = {}
    for number in (FEW, MANY):
        request = Request(name(number), "read", 1)
        with contextlib.ExitStack() as stack:
            crowd = Crowd(database, stack, request.resource, number, request)
            (ticket,) = crowd.register()
            assert ticket.granted
            reads[number] = crowd.reads(
                lambda crowd=crowd, ticket=ticket: crowd.session.begin_upgrade(ticket, True) is Upgrading.NOT_YET
            )
    assert reads[MANY] <= LINEAR * reads[FEW], reads


@pytest.mark.parametrize("shape", ["one resource", "one owner"])
def test_a_search_for_deadlocks_reads_the_queue_once(database, name, shape):
    reads = {}
    for number in (FEW, MANY):
        with contextlib.ExitStack() as stack:
            request = Request(name(number))
            crowd = Crowd(database, stack, request.resource, number, request, owners=True)
            if shape == "one owner":
                database.rows("UPDATE {table} SET owner = 'all' WHERE member_id = ?", crowd.crowd)
            crowd.owner.find_deadlock(crowd.crowd)  # (the first one reads the tables' definitions as well)
            reads[number] = costs.reads_of(crowd.owner, lambda crowd=crowd: crowd.owner.find_deadlock(crowd.crowd))
    assert reads[MANY] <= LINEAR * reads[FEW], reads


@pytest.mark.parametrize("limit", [1, 3])
def test_attempt_tests_as_many_owners_as_its_limit(database, name, monkeypatch, limit):
    """Any further owner changes nothing for the attempt: it fails because of the first ones."""
    request, tested = Request(name, limit=limit), []
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(contextlib.closing(database.session())) for _ in range(9)]
        members = []
        for session in sessions:
            members.append(session.register_member("host", 1, "program"))
            stack.callback(session.deregister_member, members[-1])
        for owner, member in zip(sessions[1:], members[1:], strict=True):
            owner.register(member, "owner", "owner", "uid", [request], False)
        attempting, check_owner = sessions[0], sessions[0].check_owner
        monkeypatch.setattr(attempting, "check_owner", lambda *row: tested.append(row[2]) or check_owner(*row))
        assert attempting.register(members[0], "attempt", "attempt", "uid", [request], True) is None
        assert tested == members[1 : 1 + limit]
