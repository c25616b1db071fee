"""The heartbeat of a member: it runs as long as the member has grants or waiters, and pauses when it has none."""

import contextlib
import threading
import time

import pytest
from support import until

import sqlsem.testing
from sqlsem.engines.base import Busy
from sqlsem.engines.memory import MemorySession
from sqlsem.util.timing import DEFAULT
from sqlsem.values.locks import monotonic

#: The grace or lease of the members here, in seconds: they send three heartbeats in that time.
GRACE, LEASE = 0.6, 1.0


@pytest.fixture
def pings(timing, monkeypatch):
    """Give one item for each heartbeat. An idle heartbeat pauses for longer than any test takes."""
    timing(idle_heartbeat=1e6)
    members, ping = [], MemorySession.heartbeat

    def counted(self, member_id):
        members.append(member_id)
        return ping(self, member_id)

    monkeypatch.setattr(MemorySession, "heartbeat", counted)
    return members


@pytest.fixture
def locks(timing):
    timing(0.1, idle_heartbeat=1e6)  # a heartbeat every 0.02 s
    with sqlsem.testing.memory("pulse", grace=GRACE) as locks:
        yield locks


def goes_on(pings):
    """Wait for more heartbeats than a thread sends before it idles."""
    before = len(pings)
    until(lambda: len(pings) >= before + 5, "heartbeats continue")


def rests(pings):
    def quiet():
        before = len(pings)
        time.sleep(0.5)  # longer than any pause of a client that does not rest
        return len(pings) == before

    until(quiet, "it rests")


@contextlib.contextmanager
def a_lock(locks):
    with locks.mutex("a"):
        yield


@contextlib.contextmanager
def a_place_in_a_queue(locks):
    def acquire():
        with locks.mutex("a"):
            granted.set()

    granted = threading.Event()
    with sqlsem.testing.memory("pulse") as other:
        assert other.mutex("a").acquire()
        waiting = threading.Thread(target=acquire)
        waiting.start()
        until(locks.client.waiter_queues.waiters, "it waits")
        yield
    waiting.join()
    assert granted.is_set()


@contextlib.contextmanager
def an_answer_on_its_way(locks):
    member = locks.client.member
    member.begin_registration("a")
    yield
    member.end_registration("a")


HELD = {function.__name__: function for function in (a_lock, a_place_in_a_queue, an_answer_on_its_way)}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_heartbeat_never_idles_while_rows_are_held(locks, pings, held):
    with locks.mutex("before"):  # registered
        pass
    with held(locks):
        goes_on(pings)
    rests(pings)


def test_idle_heartbeat_wakes_for_a_new_grant(locks, pings):
    for _ in range(2):
        with locks.mutex("a"):
            goes_on(pings)
        rests(pings)


def test_idle_heartbeat_wakes_for_deferred_calls(locks, pings):
    with locks.mutex("a"):
        pass
    rests(pings)
    done = threading.Event()
    locks.client.member.defer(lambda session, member_id: done.set())
    until(done.is_set, "it is done")
    rests(pings)


def test_replaced_heartbeat_thread_sends_at_once(pings):
    """The thread may have ended just as a heartbeat was due: after another pause, no grant is trusted."""
    with sqlsem.testing.memory("pulse", grace=3000) as locks, locks.mutex("a"):  # a heartbeat every 1000 s
        pulse = locks.client.member.heartbeat_thread
        until(lambda: 1000 < pulse.due - monotonic() < 2000, "it waits for its next ping")
        before = len(pings)
        pulse.replace()
        until(lambda: len(pings) > before, "it pings")


def test_heartbeat_with_a_lease_never_idles(pings):
    """No other client renews the lease."""
    with sqlsem.testing.memory(lease=LEASE) as locks:
        with locks.mutex("before"):  # registered
            pass
        goes_on(pings)


@pytest.mark.parametrize(
    ("options", "every", "rest"),
    [
        ({"grace": 6.0}, 2.0, DEFAULT.idle_heartbeat),
        ({"grace": 0.3}, 0.2, DEFAULT.idle_heartbeat),
        ({"grace": 0.0}, 0.5, DEFAULT.idle_heartbeat),
        ({"grace": 6.0, "lease": 30.0}, 10.0, 10.0),
        ({"lease": 3.0}, 1.0, 1.0),
    ],
)
def test_heartbeat_interval_follows_grace_and_lease(options, every, rest):
    """Three heartbeats in each lease; and no heartbeat lasts until the next one."""
    with sqlsem.testing.memory(retry=3.0, **options) as locks:
        member = locks.client.member
        assert member._heartbeat_interval == pytest.approx(every)
        assert member._heartbeat_timeout == pytest.approx(min(every, 3.0))
        assert member._idle_interval == pytest.approx(rest)
        assert not member._resting
        assert not member._heartbeat_now
        assert not member._cleanup_requested


@pytest.mark.parametrize(("lease", "trust"), [(30.0, 29.0), (5.0, 4.0), (3.0, 2.4)])
def test_grant_expires_a_margin_before_its_lease(lease, trust):
    with sqlsem.testing.memory(lease=lease) as locks, locks.mutex("a"):
        assert locks.client.member.trust == pytest.approx(trust)
        assert locks.client.member.seconds_until_loss() <= trust


def test_grant_without_expiry_is_trusted_for_ever(locks):
    with locks.mutex("a"):
        assert locks.client.member.seconds_until_loss() is None


@pytest.mark.parametrize("change", ["removed", "revoked"])
def test_check_after_a_pause_waits_for_verification(tmp_path, monkeypatch, change):
    """The check waits for the verification of the grants, not only for an answer of the database."""
    holder, answered = threading.current_thread(), threading.Event()
    url = f"sqlite:///{tmp_path / 'locks.db'}"
    with sqlsem.connect(url) as locks, sqlsem.connect(url) as operator:
        member = locks.client.member
        prove = member.record_heartbeat

        def proving(since):
            prove(since)
            if threading.current_thread() is not holder:
                assert answered.wait(10), "an uncertain caller gets its answer"

        grant = locks.mutex("a").acquire() and locks.client.registry.grants()[0]
        with member.main._lock:  # no heartbeat comes between
            operator.admin.revoke(grant.position, force=change == "removed")
            monkeypatch.setattr(member, "record_heartbeat", proving)
            member._last_heartbeat -= 100
        lost = grant.lost
        answered.set()
        assert lost


@pytest.mark.parametrize(("late", "minimum", "maximum"), [(0.3, 0.3, 0.35), (0.9, 0.0, 0.05), (5.0, 1.0, 1.0)])
def test_late_check_is_bounded_by_the_lease(monkeypatch, late, minimum, maximum):
    """A busy machine is no pause: the lease of 10 s, which is trusted for 9, is not over yet."""
    with sqlsem.testing.memory(lease=10.0, retry=1.0) as locks:
        assert locks.mutex("a").acquire()
        (grant,) = locks.client.registry.grants()
        member, timeouts = locks.client.member, []
        with member.main._lock:  # no heartbeat is answered
            member._last_heartbeat = time.monotonic() - 9 - late
            monkeypatch.setattr(member._heartbeat_recorded, "wait_for", lambda known, timeout: timeouts.append(timeout))
            assert grant.lost
        assert minimum <= timeouts[0] <= maximum


def test_revoked_row_is_dropped_despite_failed_release(tmp_path, monkeypatch):
    """An acquisition checks that its row is still known here before it returns the grant."""
    url = f"sqlite:///{tmp_path / 'locks.db'}"
    with sqlsem.connect(url) as locks, sqlsem.connect(url) as operator:
        assert locks.mutex("a").acquire()
        member = locks.client.member
        (ticket,) = member.tickets.values()
        session = member.main.session
        with member.main._lock:  # no ping comes between
            operator.admin.revoke(ticket.position)
            with monkeypatch.context() as broken:
                broken.setattr(type(session), "release", lambda *_: (_ for _ in ()).throw(Busy("locked")))
                with pytest.raises(Busy):
                    member._compare(session, member.member_id)
            assert not member.has_ticket(ticket)
        until(lambda: operator.admin.entries("a") == [], "the next ping gives it back")
        assert operator.admin.history("a")[0].outcome == "revoked"
