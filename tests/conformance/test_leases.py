"""No member is granted, claims or starts anything on an expired lease, and no process trusts an expired lease.

Members of every age and kind make every call that grants something, beside all their other calls.
tests/model/test_membership.py tests the same over a model of the clock.
"""

import contextlib
import secrets
import threading
import time

import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.engines.base import Busy, Disconnected
from sqlsem.values.locks import Request, Upgrading
from sqlsem.values.tasks import End, NewTask

LEASE = 30.0


def uid():
    return secrets.token_hex(8)


class Member:
    """A session with a member by lease, of an age that the test chooses."""

    def __init__(self, database, name):
        self.database, self.name = database, name
        self.session = database.session(lease=LEASE)
        self.other = database.session(grace=5)
        self.number = self.session.register_member("host", 1, "test")
        self.beside = self.other.register_member("host", 2, "test")

    def age(self, seconds):
        """Move the member's last heartbeat so many seconds into the past."""
        now, later = self.database.now, self.database.later
        self.database.rows(
            f"UPDATE {self.database.beside('member')} SET heartbeat_at = {later(now, -seconds)}, "
            f"lease_until = {later(now, LEASE - seconds)} WHERE member_id = ?",
            self.number,
        )

    def left(self):
        """Return the seconds left of the member's lease; None if the member was removed."""
        left = self.database.seconds_until("lease_until")
        rows = self.database.rows(
            f"SELECT {left} FROM {self.database.beside('member')} WHERE member_id = ?", self.number
        )
        return float(rows[0][0]) if rows else None

    def register(self, session, number, suffix="", access="write", only_if_free=False):
        request = Request(self.name + suffix, access)
        tickets = session.register(number, f"id-{number}", "o", uid(), [request], only_if_free)
        return tickets[0] if tickets else None

    def put(self, count):
        numbers = self.other.put_tasks(self.name, uid(), [NewTask("call", "1")] * count)
        assert len(numbers) == count

    def claim(self):
        self.put(2)
        return self.session.claim_task(self.number, self.name, "o", uid(), False)

    def start(self, part):
        return self.session.start_part(self.number, self.name, part, ["a", "b"], 60.0, "o", f"u-{part}", ("call", "f"))

    def close(self):
        for session, number in ((self.session, self.number), (self.other, self.beside)):
            with contextlib.suppress(sqlsem.SqlsemError):
                session.deregister_member(number)
            session.close()


# Each prepares while the lease is fresh, and returns a call that gives the member a grant, task or part (true then).


def registers(member):
    return lambda: member.register(member.session, member.number).granted


def tries(member):
    return lambda: member.register(member.session, member.number, only_if_free=True) is not None


def registers_several(member):
    requests = [Request(member.name), Request(member.name + "-b")]
    return lambda: member.session.register(member.number, "id", "o", uid(), requests, False)


def waits(member):
    first = member.register(member.other, member.beside)
    ticket = member.register(member.session, member.number)
    assert not ticket.granted

    def wait():
        member.other.release(first, "released")
        return member.session.wait(ticket, PATIENCE, threading.Event())

    return wait


def begins_to_upgrade(member):
    ticket = member.register(member.session, member.number, access="read")
    return lambda: member.session.begin_upgrade(ticket, False) is Upgrading.DONE


def upgrades(member):
    first = member.register(member.other, member.beside, access="read")
    ticket = member.register(member.session, member.number, access="read")
    assert member.session.begin_upgrade(ticket, False) is Upgrading.BEGUN

    def upgrade():
        member.other.release(first, "released")
        return member.session.upgrade(ticket, PATIENCE, threading.Event())

    return upgrade


def claims(member):
    member.put(1)
    return lambda: member.session.claim_task(member.number, member.name, "o", uid(), False) is not None


def claims_the_next(member):
    task = member.claim()
    end = End(task.task_id, task.attempt, "finished")
    return lambda: member.session.next_task(member.number, end, member.name, "o", uid(), False)[1] is not None


def claims_a_group(member):
    member.put(3)
    return lambda: member.session.next_tasks(member.number, [], member.name, "o", uid(), False, 3)[1]


def finds_its_claim_again(member):
    claim_uid = uid()
    member.put(1)
    assert member.session.claim_task(member.number, member.name, "o", claim_uid, False)
    return lambda: member.session.claim_task(member.number, member.name, "o", claim_uid, True) is not None


def starts_a_part(member):
    return lambda: member.start("a").code == "started"


def ends_the_last_part(member):
    assert member.start("a").code == member.start("b").code == "started"
    member.session.end_part(member.number, member.name, "a", "u-a", None, "o", ("call", "f"))
    return lambda: (
        member.session.end_part(member.number, member.name, "b", "u-b", None, "o", ("call", "f")).callback is not None
        or None
    )


def claims_a_callback(member):
    assert member.start("a").code == member.start("b").code == "started"
    for part in "ab":
        then = member.session.end_part(member.number, member.name, part, f"u-{part}", None, "o", ("call", "f")).callback
    assert member.session.end_callback(member.number, then.batch_id, then.attempt, "failed")
    return lambda: member.session.claim_callback(member.number, None, then.batch_id, "o", uid(), True) is not None


HANDED = [
    registers,
    tries,
    registers_several,
    waits,
    begins_to_upgrade,
    upgrades,
    claims,
    claims_the_next,
    claims_a_group,
    finds_its_claim_again,
    starts_a_part,
    ends_the_last_part,
    claims_a_callback,
]


@pytest.fixture
def member(database, name):
    created = Member(database, str(name))
    yield created
    created.close()


def whole(member):
    """Return all that belongs to the member: its rows, tasks and parts."""
    rows = [(entry.position, entry.state) for entry in member.other.entries(None) if entry.member_id == member.number]
    tasks = [task.task_id for task in member.other.list_tasks(member.name, "running", 100)]
    batches = member.other.list_batches(member.name, None, 1)
    return rows, tasks, [(batch.callback_status, [part.status for part in batch.parts]) for batch in batches]


@pytest.mark.parametrize("seconds", [LEASE / 2, LEASE + 60], ids=["half", "over"])
@pytest.mark.parametrize("make_act", HANDED, ids=lambda make_act: make_act.__name__)
def test_grant_requires_an_unexpired_lease(member, make_act, seconds):
    act = make_act(member)
    member.age(seconds)
    assert act()
    assert member.left() > LEASE * 0.8
    before = whole(member)
    member.other.reap()
    member.other.recover_tasks(member.name, member.beside)
    member.other.recover_batches(member.name, member.beside)
    assert whole(member) == before


@pytest.mark.parametrize("make_act", HANDED, ids=lambda make_act: make_act.__name__)
def test_expired_member_is_granted_nothing(member, make_act):
    act = make_act(member)
    member.age(LEASE + 60)
    member.other.reap()
    member.other.recover_tasks(member.name, member.beside)
    member.other.recover_batches(member.name, member.beside)
    assert member.left() is None
    try:
        handed = act()
    except Disconnected:
        handed = None
    assert not handed
    assert whole(member)[:2] == ([], [])


# -- members of every kind, over the whole client


def test_suspended_members_never_hold_together(connect, name, threads):
    """Members of every kind, all idle at the same time, never hold a lock together."""
    life = 8.0  # longer than a machine under load stands still

    def rest(kind, options):
        resource = name(kind)
        first, second = connect(**options), connect(**options)
        with first.mutex(resource):
            pass
        time.sleep(1.25 * life)  # a time without any request
        with first.mutex(resource) as grant:
            lock = second.mutex(resource)
            assert not lock.acquire(timeout=1.25 * life), kind
            assert not grant.lost, kind
            grant.check()

    for kind, options in {"lease": {"lease": life}, "beacon": {"grace": life}, "grace 0": {"grace": 0.0}}.items():
        threads.start(rest, kind, options)
    threads.join(PATIENCE + 10 * life)


@pytest.mark.parametrize("age", ["fresh", "rested", "resumed"])
@pytest.mark.parametrize("kind", [{"lease": 2.0}, {"grace": 2.0}], ids=["lease", "beacon"])
def test_only_a_sign_of_life_is_proof_of_it(connect, name, kind, age, monkeypatch, threads):
    """A holder whose heartbeats alone fail learns of its loss before another client is granted."""
    first, second = connect(**kind), connect(grace=5)
    with first.mutex(name("other")):
        pass
    if age == "rested":
        time.sleep(2.5)
    elif age == "resumed":
        first.client.member.main.session.interrupt()
        with first.mutex(name("other")):
            pass
    lock = first.mutex(name)
    lock.acquire()
    grant, lost_at = lock.grant, []
    watch = threading.Thread(
        target=lambda: grant.lost_event.wait(PATIENCE) and lost_at.append(time.monotonic()), daemon=True
    )
    watch.start()
    stop = threading.Event()

    def no_ping(session, member_id):
        raise Busy("held up")

    monkeypatch.setattr(first.client.member, "_compare", no_ping)

    def chatter():
        while not stop.wait(0.02):
            with contextlib.suppress(sqlsem.SqlsemError):
                first.client.member.call("look", lambda session, _: session.resources())

    threads.start(chatter)
    try:
        if not first.client.member.trust:  # no lock is lost while this process lives
            assert not grant.lost_event.wait(3)
            grant.release()
            return
        watch.join(PATIENCE)
        assert lost_at, "it still believes, though it gave no sign of life"
        if "lease" in kind:
            with second.mutex(name, timeout=PATIENCE):
                assert lost_at[0] < time.monotonic()
    finally:
        stop.set()
        threads.join()
        monkeypatch.undo()
    with pytest.raises(sqlsem.LockLost):
        lock.release()
    until(lambda: not second.admin.entries(name))
