"""A call reads as many rows behind many holders and waiters as behind few: each kind of lock behind each other kind.

The exceptions are named here, each with its reason. Searches read the queue once.
"""

import contextlib
import itertools
import threading

import pytest
from support import costs

from sqlsem.engines.statements.locks import columns
from sqlsem.values.locks import Request, Ticket, Upgrading

pytestmark = pytest.mark.engines("sqlite", "mysql")

FEW, MANY = 300, 2000
#: (A waiter counts its blockers among the first 256 rows, so FEW is more than that.)
#: Bounds of the growth from FEW to MANY: a factor, for deeper trees; and one for a call that reads all rows once. (A
#: call that reads them for each row would read 44 times as many.)
FLAT, LINEAR = 1.5, 10
#: A request of each kind, beside this number of holders.
KINDS = {
    "mutex": lambda resource, number: Request(resource),
    "limit": lambda resource, number: Request(resource, limit=number),
    "limit 3": lambda resource, number: Request(resource, limit=3),
    "read": lambda resource, number: Request(resource, "read"),
    "stage": lambda resource, number: Request(resource, "stage:1"),
    "next stage": lambda resource, number: Request(resource, "stage:2"),
}
HOLDERS = ["mutex", "limit", "read", "stage", "upgrading"]
#: The kinds of the waiters, again and again; the last one is repeated to the end.
WAITERS = {
    "none": [],
    "mutex": ["mutex"],
    "limit": ["limit"],
    "read": ["read"],
    "next stage": ["next stage"],
    "both": ["mutex", "read"] * MANY,
    "readers behind a writer": ["mutex", "read"],
}
#: Calls that read more behind more rows: (holders, waiters, kind of the request, call), None for any.
LINEAR_CALLS = {
    (None, None, "limit", None): "a request with a limit of n reads n rows: each may weigh 1",
    (None, None, None, "first"): (
        "behind holders that share with it, and then waiters, a session finds the first waiter once"
    ),
}


class Crowd:
    """Holders and waiters of one resource, all of one member. Another session works beside them.

    ``alone``: only the first row holds. ``owners``: each owner holds another resource, too.
    """

    def __init__(self, database, stack, resource, number, holders, waiters, *, alone=False, owners=False):
        self.owner, self.session = (stack.enter_context(contextlib.closing(database.session())) for _ in range(2))
        self.crowd = self.owner.register_member("host", 1, "crowd")
        stack.callback(self.owner.deregister_member, self.crowd)
        self.member = self.session.register_member("host", 2, "beside")
        stack.callback(self.session.deregister_member, self.member)
        self.resource, self.number, self.uids = resource, number, itertools.count()
        held = ["read" if holders == "upgrading" else holders] * (1 if alone or holders == "mutex" else number)
        kinds = [*held, *itertools.islice([*waiters, *waiters[-1:] * number], number)]
        with self.owner.forks_blocked, self.owner.transaction():
            positions = [self.insert(index, kind, index < len(held)) for index, kind in enumerate(kinds)]
            for index in range(len(kinds) if owners else 0):
                other = columns(Request(f"{resource} {index}"))
                self.owner.insert({**self.row(index), **other, "uid": f"h{index}", "granted": True})
        self.held = positions[: len(held)]
        if holders == "upgrading":
            middle = Ticket(resource, self.held.pop(number // 8), "crowd", True)
            assert self.owner.begin_upgrade(middle, False) is Upgrading.BEGUN

    def row(self, index):
        return {"requesting_id": "crowd", "member": self.crowd, "owner": f"owner {index}", "uid": f"{index}"}

    def insert(self, index, kind, granted):
        request = KINDS[kind](self.resource, self.number)
        return self.owner.insert({**self.row(index), **columns(request), "granted": granted})

    def reads(self, call):
        """Return the number of rows that a call reads. (An earlier call has read the tables' definitions.)"""
        call()
        return costs.reads_of(self.session, call)

    def reads_of_request(self, kind):
        """Return the number of rows that each call of a program reads while it acquires and waits."""
        request, session, wakeup = KINDS[kind](self.resource, self.number), self.session, threading.Event()
        uids = []

        def register(only_if_free=False):
            uids.append(f"u{next(self.uids)}x")
            return session.register(self.member, "beside", "beside", uids[-1], [request], only_if_free)

        def checked(call):  # a check of the owners is due
            session._tests._done.clear()
            return call()

        register()
        session._blockers.clear()
        reads = {"first": costs.reads_of(session, register), "register": costs.reads_of(session, register)}
        (last,) = register()
        reads |= {
            "try": self.reads(lambda: register(only_if_free=True)),
            "wait": self.reads(lambda: checked(lambda: session.wait(last, 0, wakeup))),
            "poll": self.reads(lambda: checked(lambda: session.poll(self.member, [last]))),
            "heartbeat": self.reads(lambda: session.heartbeat(self.member)),
            "blockers": self.reads(lambda: session.check_blockers(request, last.position, self.member)),
            "cancel": self.reads(lambda: session.cancel(self.member, uids.pop(0), "cancelled")),
        }
        for uid in uids:
            session.cancel(self.member, uid, "cancelled")
        return reads

    def reads_of_releases(self):
        """Return the number of rows that releases of the first, the last and a middle holder read."""
        ends = {"first": 0, "last": -1, "middle": len(self.held) // 2} if len(self.held) > 2 else {"only": 0}
        return {
            f"release of the {which}": costs.reads_of(self.session, lambda index=index: self.release(self.held[index]))
            for which, index in ends.items()
        }

    def release(self, position):
        assert self.session.release(Ticket(self.resource, position, "crowd", True), "released")


def reason(*case):
    """Return why a call may read more rows behind more, if it may."""
    return next(
        (
            why
            for named, why in LINEAR_CALLS.items()
            if all(want in (None, is_) for want, is_ in zip(named, case, strict=True))
        ),
        None,
    )


def steep_calls(database, name, holders, waiters, *, fresh=False):
    """Return the calls that read more behind more rows, without a reason. ``fresh``: with statistics of the table."""
    reads = {}
    for number in (FEW, MANY):
        with contextlib.ExitStack() as stack:
            crowd = Crowd(database, stack, name(number), number, holders, WAITERS[waiters])
            if fresh:
                database.rows("ANALYZE TABLE {table}")
            for kind in KINDS:
                for call, count in crowd.reads_of_request(kind).items():
                    reads.setdefault((kind, call), []).append(count)
            for call, count in crowd.reads_of_releases().items():
                reads.setdefault(("holder", call), []).append(count)
    steep = {}
    for (kind, call), (few, many) in reads.items():
        factor = LINEAR if reason(holders, waiters, kind, call) else FLAT
        if many > factor * few:
            steep[kind, call] = few, many
    return steep


@pytest.mark.parametrize("waiters", WAITERS)
@pytest.mark.parametrize("holders", HOLDERS)
@pytest.mark.timeout(600)
def test_calls_read_the_same_behind_many_rows(database, name, holders, waiters):
    assert steep_calls(database, name, holders, waiters) == {}


@pytest.mark.engines("mysql")  # (A file has statistics only after ANALYZE, which the library never runs.)
@pytest.mark.parametrize("kind", ["mutex", "limit"])
def test_calls_read_the_same_with_fresh_statistics(database, name, kind):
    assert steep_calls(database, name, kind, kind, fresh=True) == {}


def test_requests_by_priority_read_the_queue_once(database, name):
    """A poll sorts the priority queue, as the order changes with the time."""
    reads = {}
    for number in (FEW // 10, MANY // 10):
        with contextlib.ExitStack() as stack:
            crowd = Crowd(database, stack, name(number), number, "read", [])
            latest = f"u{number - 1}x"
            crowd.session.set_resource(crowd.resource, "ageing", 1000)
            stack.callback(crowd.session.set_resource, crowd.resource, "ageing", None)
            request = Request(crowd.resource, priority=5)

            def ask(uid, place, crowd=crowd, request=request):
                return crowd.session.acquire_by_priority(crowd.member, "a", "b", uid, request, False, place)

            for index in range(number):
                place = ask(f"u{index}x", None).ticket
            reads[number] = {
                "register": costs.reads_of(crowd.session, lambda ask=ask: ask("last", None)),
                "poll": costs.reads_of(crowd.session, lambda ask=ask, uid=latest, place=place: ask(uid, place)),
            }
    for call, few in reads[FEW // 10].items():
        assert reads[MANY // 10][call] <= LINEAR * few, reads


def test_an_upgrade_reads_the_queue_once(database, name):
    """Behind a reader, many readers that wait."""
    reads = {}
    for number in (FEW, MANY):
        with contextlib.ExitStack() as stack:
            crowd = Crowd(database, stack, name(number), number, "read", ["read"], alone=True)
            request = KINDS["read"](crowd.resource, number)
            (ticket,) = crowd.session.register(crowd.member, "beside", "beside", "u", [request], False)
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
            crowd = Crowd(database, stack, name(number), number, "mutex", ["mutex"], owners=True)
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
