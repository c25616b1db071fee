"""Many waiters in one process: the number of polled waiters and of statements, and that no waiter is missed."""

import asyncio
import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
from support import PATIENCE, striking, until

import sqlsem
import sqlsem.testing
from sqlsem.client import effects
from sqlsem.client.waiters import queues
from sqlsem.client.waiters.queues import Waiter, WaiterQueues
from sqlsem.client.waiters.state import Facts, WaiterState
from sqlsem.engines.memory import MemorySession
from sqlsem.util.timing import DEFAULT
from sqlsem.values.locks import Request, Ticket


@pytest.fixture
def pair():
    """Two clients of one database in memory."""
    with sqlsem.testing.memory("lines") as first, sqlsem.testing.memory("lines") as other:
        yield first, other


@pytest.fixture
def looks(monkeypatch):
    """Record the positions of each poll. Waits without time that are no polls are among them, too."""
    polls = []
    look, wait = MemorySession.poll, MemorySession.wait

    def looking(self, member_id, tickets):
        polls.append([ticket.position for ticket in tickets])
        return look(self, member_id, tickets)

    def waiting(self, ticket, timeout, nudge):
        if timeout == 0:
            polls.append([ticket.position])
        return wait(self, ticket, timeout, nudge)

    monkeypatch.setattr(MemorySession, "poll", looking)
    monkeypatch.setattr(MemorySession, "wait", waiting)
    return polls


def without_sessions(coordinator, monkeypatch):
    monkeypatch.setattr(coordinator.client.wait_pool._permits, "size", 0)


def waiters(coordinator):
    return len(coordinator.client.waiter_queues.waiters())


@contextlib.contextmanager
def crowd(locks):
    """A thread of its own acquires each lock, and releases it at once; at the end all of them have succeeded."""

    def enter(lock):
        with lock:
            return True

    with ThreadPoolExecutor(len(locks)) as pool:
        done = [pool.submit(enter, lock) for lock in locks]
        yield done
        assert all(future.result(PATIENCE) for future in done)


@pytest.mark.parametrize(("holder", "kind"), [("mutex", "mutex"), ("write", "read"), ("read", "write")])
def test_waiter_behind_a_local_waiter_sleeps(pair, looks, monkeypatch, holder, kind):
    """Thousands may wait behind the first one; each poll would be a statement."""
    first, other = pair
    for coordinator in pair:  # each waiter polls again and again
        monkeypatch.setattr(coordinator.client, "timing", replace(DEFAULT, blocked_locally=0.05))
    assert getattr(first, holder)("a").acquire()
    with crowd([getattr(other, kind)("a") for _ in range(6)]):
        until(lambda: waiters(other) == 6, "all wait")
        time.sleep(0.3)
        assert looks == []
        first.client.close()


def test_readers_are_let_in_together(pair, looks):
    first, other = pair
    assert first.write("a").acquire()
    inside = threading.Barrier(21)

    def read():
        with other.read("a"):
            inside.wait(PATIENCE)

    with ThreadPoolExecutor(20) as pool:
        done = [pool.submit(read) for _ in range(20)]
        until(lambda: waiters(other) == 20, "all wait")
        first.client.close()
        inside.wait(PATIENCE)
        for each in done:
            each.result(PATIENCE)
    assert len(looks) <= 4, "one statement grants all readers behind the first"
    assert max(map(len, looks)) >= 15


@pytest.mark.parametrize("resources", [30, 300])
def test_waiters_without_connection_are_polled_together(pair, looks, monkeypatch, resources):
    first, other = pair
    without_sessions(other, monkeypatch)
    most_polls, together = 40, resources * 0.8
    names = [f"r{number}" for number in range(resources)]
    held = [first.mutex(name) for name in names]
    assert all(lock.acquire() for lock in held)
    grants = [lock.grant for lock in held]

    async def enter(name):
        async with other.mutex(name):
            pass

    async def main():
        monkeypatch.setattr(other.client.event_loops.permits, "size", 0)
        tasks = [asyncio.create_task(enter(name)) for name in names]
        while waiters(other) < resources:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        for _ in range(5):  # (a machine that stands still makes more of them once)
            looks.clear()
            await asyncio.sleep(2)
            number, maximum = len(looks), max(map(len, looks), default=0)
            if number <= most_polls and maximum >= together:
                break
        looks.clear()
        await asyncio.gather(*(asyncio.to_thread(grant.release) for grant in grants))
        await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
        return number, maximum

    number, maximum = asyncio.run(main())
    assert number <= most_polls, "about the twentieth part of the time for which they have stood"
    assert maximum >= together, "one statement for all"
    assert len(looks) <= 60
    assert first.admin.entries() == []


def test_ten_thousand_tasks_on_a_resource(pair, looks, monkeypatch):
    """As fast as few waiters, and none of them polls."""
    first, other = pair
    # A wait ends late while a busy machine makes the tasks; its connection would then be dropped.
    monkeypatch.setattr(other.client, "timing", replace(DEFAULT, slice=10 * PATIENCE))
    rates = {}

    async def main(number, name, grant):
        done = []

        async def enter():
            async with other.mutex(name):
                done.append(name)

        tasks = [asyncio.create_task(enter()) for _ in range(number)]
        while waiters(other) < number:
            await asyncio.sleep(0.05)
        assert looks == [], "no poll while they only wait"
        began = time.process_time()
        await asyncio.to_thread(grant.release)
        await asyncio.gather(*tasks)
        assert len(done) == number
        assert max(map(len, looks), default=0) <= 1
        assert len(looks) <= number, "at most one poll for each hand-over"
        looks.clear()
        return number / (time.process_time() - began)

    for number in (300, 10_000):
        lock = first.mutex(f"many{number}")
        assert lock.acquire()
        rates[number] = asyncio.run(main(number, f"many{number}", lock.grant))
    assert rates[10_000] > 0.2 * rates[300], rates  # code that visits all of them would cost thirty times as much


# -- one by one -------------------------------------------------------------------------------------------------------


class Room:
    """Waiter queues without a client, on a clock of the test."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(queues, "monotonic", lambda: self.now)
        self.lines = WaiterQueues(threading.Lock())
        self.granted, self.gone, self.asked = set(), set(), []

    def waiter(self, position, resource="a", access="write", limit=1, weight=1, enter=True):
        ticket = Ticket(resource, position, "me", False)
        waiter = Waiter(ticket, Request(resource, access, limit, weight), threading.Event())
        if enter:
            self.lines.add(waiter)
        return waiter

    def polled(self, number):
        """Return waiters on as many resources, for which this process polls."""
        several = [self.waiter(position, f"r{position}") for position in range(number)]
        for waiter in several:
            self.lines.poll_delay(waiter)
        return several

    def kind_of(self, waiter):
        """Return the facts of its queue about a waiter, in a word."""
        queue = self.lines.queues.get(waiter.ticket.resource)
        if waiter.answer is not False or queue is None:
            return "answered"
        if queue.is_blocked(waiter):
            return "blocked"
        if queue.can_share(waiter):
            return "sharing"
        return "head" if self.lines.is_first(waiter) else "candidate"

    def next_state(self, waiter, held=()):
        return self.lines.next_step(waiter, Facts(), self.now, DEFAULT, held).state

    def waits_locally(self, waiter, held):
        return self.next_state(waiter, held) is WaiterState.LOCAL_WAIT

    def leads(self, waiter):
        return self.lines._leader is waiter

    def poll(self, member_id, tickets):
        self.asked.append([ticket.position for ticket in tickets])
        answers = {ticket.position: True for ticket in tickets if ticket.position in self.granted}
        return answers | {ticket.position: None for ticket in tickets if ticket.position in self.gone}

    def wait(self, ticket, timeout, nudge):
        assert timeout == 0
        return self.poll(1, [ticket]).get(ticket.position, False)

    def looks_for(self, waiter, last=False):
        """Poll as this waiter, and return the positions that it polls for."""
        chosen = self.lines.begin_poll(waiter, last)
        if chosen:
            self.lines.poll_call(chosen)(self, 1)
            self.lines.end_poll()
        return [item.position for item in chosen]


@pytest.fixture
def room(monkeypatch):
    return Room(monkeypatch)


def woken(*waiters):
    positions = [waiter.position for waiter in waiters if waiter.event.is_set()]
    for waiter in waiters:
        waiter.event.clear()
    return positions


def test_poll_gives_each_waiter_its_answer(room):
    several = room.polled(10)
    room.granted, room.gone = {3, 7}, {5}
    room.now += 1
    assert sorted(room.looks_for(several[0])) == list(range(10)), "every waiter is polled for"
    answers = {waiter.position: waiter.answer for waiter in several}
    assert answers == {**dict.fromkeys(range(10), False), 3: True, 7: True, 5: None}
    assert set(woken(*several)) == {3, 5, 7}
    assert [waiting.position for waiting in room.lines.waiters()] == [0, 1, 2, 4, 6, 8, 9], (
        "an answered waiter is in no queue"
    )
    assert [room.kind_of(several[number]) for number in (3, 5, 4)] == ["answered", "answered", "head"]


def test_poll_leader_polls_for_all_at_the_needed_rate(room):
    several = [room.waiter(number, f"r{number}") for number in range(50)]
    sleeps = {waiter: room.now + room.lines.poll_delay(waiter) for waiter in several}

    def looks_within(seconds):
        looks, end = 0, room.now + seconds
        while room.now < end:
            waiter, room.now = min(sleeps.items(), key=lambda item: item[1])
            looks += bool(room.looks_for(waiter))
            sleeps[waiter] = room.now + room.lines.poll_delay(waiter)
        return looks

    assert looks_within(300) == len(room.asked) < 250
    late = [positions for positions in room.asked if len(positions) < 50]
    assert len(late) < 20
    assert looks_within(100) <= 100 / DEFAULT.longest_poll * 2.1, "one statement a slice, or little more"


def test_poll_leader_is_replaced_when_it_leaves(room):
    several = room.polled(3)
    (leader,) = [waiter for waiter in several if room.leads(waiter)]
    room.lines.remove([leader])
    rest = [waiter for waiter in several if waiter is not leader]
    (next_one,) = [waiter for waiter in rest if room.leads(waiter)]
    assert woken(*rest) == [next_one.position]
    assert room.lines.poll_delay(next_one) < 1
    room.now += 1
    assert sorted(room.looks_for(next_one)) == [waiter.position for waiter in rest]


def test_poll_leader_is_replaced_when_it_is_lost(room):
    """Its event loop is blocked, say; or it began a poll, and was interrupted before the statement."""
    several = room.polled(3)
    room.now += 1
    assert room.lines.begin_poll(several[0])
    assert room.lines.begin_poll(several[1]) == [], "one poll at a time"
    room.now += 3 * DEFAULT.longest_poll
    assert len(room.looks_for(several[1])) == 3
    room.now += 10 * DEFAULT.longest_poll
    room.lines.wake_missed()
    assert len(woken(*several)) == 3, "the heartbeat finds waiters that no one polls for"


def test_failed_poll_is_repeated_silently(room):
    several = room.polled(3)
    room.now += 1
    chosen = room.lines.begin_poll(several[0])
    assert len(chosen) == 3
    room.lines.end_poll()
    room.granted = {0, 1, 2}
    assert len(room.looks_for(several[1])) == 3
    assert all(waiter.answer for waiter in several)


def test_poll_takes_the_longest_due_waiter_first(room):
    """A waiter that is due soon is polled too, after the others."""
    old, new, soon, late = (room.waiter(number, f"r{number}") for number in range(4))
    room.lines.poll_delay(old)
    room.now += 100
    room.lines.poll_call(room.lines.begin_poll(old))(room, 1)
    room.lines.end_poll()
    room.lines.poll_delay(new)
    room.now += 4.997
    room.lines.poll_delay(soon)
    room.now += 0.003
    room.lines.poll_delay(late)
    assert room.lines.begin_poll(old) == [new, old, soon]


class Locks:
    """A session that records the dropped and restored wakeup locks."""

    def __init__(self):
        self.spared, self.kept, self.calls = set(), set(), 0

    def drop_wakeup_locks(self, member_id, tickets):
        self.calls += 1
        self.spared |= {ticket.position for ticket in tickets}

    def restore_wakeup_locks(self, member_id, tickets):
        self.calls += 1
        self.kept |= {ticket.position for ticket in tickets}


def test_middle_waiters_drop_their_wakeup_locks(room):
    locks_allowed, session = queues.MAX_WAKEUP_LOCKS, Locks()
    for number in range(locks_allowed):
        room.lines.drop_wakeup_locks("a", session, 1)
        room.waiter(number)
    assert session.calls == 0, "of a few, nobody"
    room.lines.drop_wakeup_locks("a", session, 1)
    assert session.spared == set(range(queues.FRONT, locks_allowed - 1))
    for number in range(locks_allowed, 100 * locks_allowed):
        room.waiter(number)
        room.lines.drop_wakeup_locks("a", session, 1)
    locks_kept = 100 * locks_allowed - len(session.spared)
    assert locks_kept <= locks_allowed
    assert session.calls <= 100 * locks_allowed / (locks_allowed - queues.FRONT - 1) + 1, "and only now and then"


@pytest.mark.parametrize("kinds", [({}, {"limit": 2}), ({}, {"access": "read"}), ({"access": "read"},)])
def test_wakeup_lock_is_kept_unless_the_next_excludes_it(room, kinds):
    """And the search for a candidate is not repeated again and again."""
    session, number = Locks(), 40 * queues.MAX_WAKEUP_LOCKS
    for position in range(number):
        room.waiter(position, **kinds[position % len(kinds)])
        room.lines.drop_wakeup_locks("a", session, 1)
    assert session.spared == set()
    assert session.calls < 10


def test_wakeup_lock_is_restored_near_the_head(room):
    number, session = 2 * queues.MAX_WAKEUP_LOCKS, Locks()
    several = [room.waiter(position) for position in range(number)]
    room.lines.drop_wakeup_locks("a", session, 1)
    spared, calls = set(session.spared), session.calls
    for position, waiter in enumerate(several[:-1]):
        room.lines.set_answer(waiter, True)
        room.lines.remove([waiter])
        room.lines.grant_next_local("a", session, 1)
        near = set(range(position + 1, min(position + queues.FRONT // 2, number - 1)))
        assert near & spared <= session.kept, position
    assert session.kept == spared
    assert session.calls - calls <= 2 * number / queues.FRONT + 2


@pytest.mark.parametrize("method", ["drop_wakeup_locks", "restore_wakeup_locks"])
def test_refused_wakeup_lock_change_is_retried(room, method):
    """A change may be refused: the row was just inserted, or just released."""
    session = Locks()

    def refuse(*_):
        raise sqlsem.Unavailable("no")

    setattr(session, method, refuse)
    several = [room.waiter(position) for position in range(2 * queues.MAX_WAKEUP_LOCKS)]
    room.lines.drop_wakeup_locks("a", session, 1)
    for waiter in several[: queues.FRONT]:
        room.lines.remove([waiter])
        room.lines.grant_next_local("a", session, 1)


def test_removed_waiter_wakes_the_next(room):
    first, second, third = (room.waiter(number) for number in (1, 2, 3))
    room.lines.poll_delay(first)
    room.now += 1
    chosen = room.lines.begin_poll(first)
    room.lines.remove([first])
    assert woken(first, second, third) == [2]
    room.granted = {1}
    room.lines.poll_call(chosen)(room, 1)
    room.lines.end_poll()
    assert first.answer is not True
    assert [room.kind_of(item) for item in (second, third)] == ["head", "blocked"]
    room.lines.remove([first])
    assert room.lines.waiters() == [second, third]


def test_notify_polls_for_the_resource_at_once(room):
    several = room.polled(3)
    room.now += 50
    room.looks_for(several[0])
    room.now += 0.001
    assert room.lines.begin_poll(several[1]) == []
    room.lines.notify("r1")
    assert woken(*several) == [1]
    assert room.looks_for(several[1]) == [1], "and for no other waiter"


def test_last_poll_at_the_timeout(room):
    waiter = room.waiter(1)
    room.lines.poll_delay(waiter)
    room.now += 50
    room.looks_for(waiter)
    assert room.looks_for(waiter) == []
    room.granted = {1}
    assert room.looks_for(waiter, last=True) == [1]
    assert waiter.answer is True


def test_poll_covers_a_thousand_rows_per_statement(room):
    several = room.polled(2500)
    room.now += 1
    polled = []
    while chosen := room.looks_for(several[0]):
        polled += chosen
    assert sorted(polled) == list(range(2500))
    assert {len(positions) for positions in room.asked} == {1000, 500}


@pytest.mark.parametrize("seed", range(20))
def test_candidates_are_blocked_by_no_earlier_waiter(room, seed):
    chance = random.Random(seed)
    kinds = [
        {"access": access, "limit": limit, "weight": weight}
        for access in ("write", "read", "stage:1")
        for limit in (None, 1, 2, 4)
        for weight in (1, 2)
        if limit is None or weight <= limit
    ]
    waiters = [room.waiter(position, **chance.choice(kinds), enter=False) for position in range(12)]
    for waiter in chance.sample(waiters, len(waiters)):
        room.lines.add(waiter)
    while waiters:
        exposed = [
            later
            for number, later in enumerate(waiters)
            if not any(earlier.request.keeps_out(later.request) for earlier in waiters[:number])
        ]
        candidates = [waiter for waiter in waiters if room.kind_of(waiter) != "blocked"]
        assert candidates == exposed
        assert room.kind_of(waiters[0]) == "head"
        woken(*waiters)
        gone = waiters.pop(chance.randrange(len(waiters)))
        room.lines.remove([gone])
        now_exposed = {item.position for item in waiters if room.kind_of(item) != "blocked"}
        assert set(woken(*waiters)) == now_exposed - {item.position for item in exposed}
    assert room.lines.queues == {}


def test_release_grants_local_waiters(room):
    """In the same call; if another process came first, the next waiters wait in the database."""
    held = Request("a")
    first, second = room.waiter(1), room.waiter(2)
    assert room.waits_locally(first, [held])
    room.granted = {1}
    room.lines.grant_next_local("a", room, 1)
    assert first.answer is True
    assert room.asked == [[1]]
    assert woken(first, second) == [1, 2]
    # The grant of the first one is not recorded yet: the second one waits for it all the same.
    assert room.kind_of(second) == "head"
    assert room.waits_locally(second, [])
    room.lines.remove([first])
    assert woken(second) == []
    room.lines.grant_next_local("a", room, 1)
    assert woken(second) == [2], "another process came first: to the database"
    assert not room.waits_locally(second, [held])
    for _ in range(queues.NO_LOCAL_WAITS):
        stays = room.waits_locally(second, [held])
    assert stays


def test_local_wait_lasts_a_single_slice(room):
    """The process may be wrong about its own rows, so a local wait lasts one slice at most."""
    waiter = room.waiter(1)
    assert [room.waits_locally(waiter, [Request("a")]) for _ in range(4)] == [True, False, True, False]


def test_possibly_granted_waiter_does_not_wait_locally(room):
    three = room.waiter(5, limit=3)
    assert not room.waits_locally(three, [])
    assert not room.waits_locally(three, [Request("a", limit=3)] * 2)
    assert room.waits_locally(three, [Request("a", limit=3)] * 3)
    other = room.waiter(3, "b", "read")
    assert not room.waits_locally(other, [Request("b", "read")] * 9)
    assert room.waits_locally(other, [Request("b", "read"), Request("b", "write")])


def test_failed_local_hand_off_is_harmless(room):
    waiter = room.waiter(1)
    assert room.waits_locally(waiter, [Request("a")])
    session = mock.Mock()
    session.wait.side_effect = sqlsem.Unavailable("gone")
    room.lines.grant_next_local("a", session, 1)
    assert woken(waiter) == [1]
    assert waiter.answer is False
    assert not room.waits_locally(waiter, [Request("a")])


def test_poll_interval_grows_with_the_wait(room):
    waiter, began = room.waiter(1), room.now
    room.lines.poll_delay(waiter)
    for stood in (0.05, 1.0, 20.0, 70.0, 1000.0):
        room.now = began + stood
        assert room.looks_for(waiter) == [1]
        expected = min(max(queues.FIRST_SECONDS, stood * queues.SHARE), DEFAULT.longest_poll)
        assert room.lines.poll_delay(waiter) == pytest.approx(expected)


def test_readers_beside_a_granted_reader_are_polled(room):
    """A heavy writer without a limit of its own waits first; readers behind it may pass, and do so together."""
    writer = room.waiter(1, limit=None, weight=2)
    readers = [room.waiter(number, access="read", limit=None) for number in (2, 3, 4)]
    room.lines.set_answer(readers[0], True)
    assert room.kind_of(writer) == "head"
    assert room.kind_of(readers[1]) == "sharing"
    assert room.looks_for(readers[1]) == [3, 4]


def test_head_waiter_is_more_than_a_candidate(room):
    room.waiter(1, limit=None)
    reader = room.waiter(2, access="read", limit=None)
    assert room.kind_of(reader) == "candidate"


def test_answered_waiter_neither_waits_locally_nor_sleeps(room):
    first, second = room.waiter(1), room.waiter(2)
    room.lines.set_answer(first, True)
    assert [room.kind_of(item) for item in (first, second)] == ["answered", "head"]
    assert not room.waits_locally(first, [Request("a")])
    assert room.lines.poll_delay(first) == 0
    assert room.lines.waiters() == [second]


def test_row_event_wakes_its_waiter(room):
    several = [room.waiter(number, f"r{number}") for number in (1, 2, 3)]
    room.lines.wake([2, 9])
    assert woken(*several) == [2]
    room.lines.wake([])
    assert woken(*several) == []
    room.lines.wake(None)
    assert woken(*several) == [1, 2, 3]


def test_heartbeat_wakes_unpolled_heads(room):
    """It also wakes a waiter if the poll leader is long overdue."""
    in_session, standing, at_home = (room.waiter(number, f"r{number}") for number in (1, 2, 3))
    behind = room.waiter(4, "r1")
    pause = room.lines.poll_delay(standing)
    assert room.waits_locally(at_home, [Request("r3")])
    room.lines.wake_missed()
    assert woken(in_session, standing, at_home, behind) == [1]
    room.now += pause + DEFAULT.longest_poll - 0.001
    room.lines.wake_missed()
    assert woken(in_session, standing, at_home, behind) == [1]
    room.now += 0.002
    room.lines.wake_missed()
    assert 2 in woken(in_session, standing, at_home, behind)


def test_poll_leader_of_others_takes_no_connection(room):
    first, second = (room.waiter(number, f"r{number}") for number in (1, 2))
    for waiter in (first, second):
        room.lines.poll_delay(waiter)
    assert room.leads(first)
    assert room.next_state(first) is WaiterState.POLLED
    assert room.next_state(second) is WaiterState.ON_CONNECTION
    room.now += 1
    assert room.looks_for(first) == [1]
    assert room.next_state(first) is WaiterState.ON_CONNECTION, "it polls for itself alone"
    assert not room.leads(first)


def test_next_waiters_use_the_database_after_others(room):
    waiter = room.waiter(1)
    room.lines.grant_next_local("a", room, 1)
    assert room.asked == [], "no waiter sleeps locally"
    assert room.waits_locally(waiter, [Request("a")])
    room.lines.grant_next_local("a", room, 1)
    assert room.asked == [[1]]
    stays = [room.waits_locally(waiter, [Request("a")]) for _ in range(queues.NO_LOCAL_WAITS + 1)]
    assert stays == [False] * queues.NO_LOCAL_WAITS + [True]


def test_blockers_of_a_locally_blocked_waiter(room):
    first = room.waiter(1)
    room.now += 5
    second, other = room.waiter(2), room.waiter(3, "b")
    room.now += 2
    blocker = room.lines.blocker_of(second)
    assert (blocker.position, blocker.state, blocker.seconds) == (1, "waits", 7)
    assert room.lines.blocker_of(first) is None
    assert room.lines.blocker_of(other) is None
    first.behind = blocker
    assert room.lines.blocker_of(room.waiter(4)) is blocker, "the blocker of the waiter ahead is reported"
    readers = [room.waiter(number, "c", "read", None) for number in (5, 6)]
    assert room.lines.blocker_of(readers[1]) is None, "they share: both wait for the same one"


@pytest.mark.parametrize("limit", [1, 3], ids=["of a kind that is there", "of a new kind"])
@pytest.mark.parametrize("strike", [1, 2])
def test_interrupted_entry_leaves_no_trace(room, monkeypatch, strike, limit):
    """A waiter that is not in the queue yet blocks none of the later waiters."""
    late = [room.waiter(2, limit=3), room.waiter(3, limit=3)]
    struck = room.waiter(1, limit=limit, enter=False)
    insort, calls = queues.insort, []

    def strikes(several, waiter, *, key):
        calls.append(waiter)
        if len(calls) == strike:
            raise KeyboardInterrupt
        insort(several, waiter, key=key)

    monkeypatch.setattr(queues, "insort", strikes)
    with contextlib.suppress(KeyboardInterrupt):
        room.lines.add(struck)
    room.lines.notify("a")
    room.lines.remove([struck])
    assert room.lines.waiters() == late
    assert [room.kind_of(item) for item in late] == ["head", "blocked"]


def test_interrupt_at_any_line_of_removal_is_harmless(room):
    """The other waiters of the queue each request a different mode."""
    for strike in range(1, 200):
        first, *late = (room.waiter(number, f"r{strike}", weight=number, limit=9) for number in (1, 2, 3))
        place = striking.struck(strike, lambda first=first: room.lines.remove([first]), queues.__file__)
        room.lines.notify(first.ticket.resource)  # as others do
        room.lines.remove([first])
        assert [waiting for waiting in room.lines.waiters() if waiting.ticket.resource == f"r{strike}"] == late
        assert room.kind_of(late[0]) == "head"
        room.lines.remove(late)
        if place is None:
            break
    assert strike > 11
    assert room.lines.queues == {}


def test_interrupted_entry_blocks_no_waiter(room):
    first, second = room.waiter(1), room.waiter(2)
    first.answer = True  # and then it was struck
    room.lines.wake_missed()
    assert woken(second) == [2]
    assert room.kind_of(second) == "head"


def test_half_granted_request_blocks_no_waiter(pair):
    """All or nothing: it has the first lock and waits for the second, while the first has room for others."""
    locks, other = pair
    first = locks.limit("a", 2, weight=2)
    assert first.acquire()
    assert locks.mutex("b").acquire()
    with ThreadPoolExecutor(2) as pool:
        both = other.all_of(other.limit("a", 2), other.mutex("b"))

        def have_both():
            with both:
                return True

        def have_one():
            with other.limit("a", 2):
                return True

        slow = pool.submit(have_both)
        until(lambda: waiters(other) == 1, "it waits")
        quick = pool.submit(have_one)
        until(lambda: waiters(other) == 2, "the other one waits behind it")
        first.release()
        assert quick.result(PATIENCE)
        assert not slow.done()
        locks.client.close()
        assert slow.result(PATIENCE)


def test_removed_row_wakes_its_locally_blocked_waiter(pair, monkeypatch):
    """No poll covers it: the heartbeat of its process finds the removal."""
    locks, other = pair
    assert locks.mutex("a").acquire()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(other.mutex("a").acquire, timeout=PATIENCE)
        until(lambda: waiters(other) == 1, "the first one waits")
        second = pool.submit(other.mutex("a").acquire, timeout=PATIENCE)
        until(lambda: waiters(other) == 2, "the second one waits")
        last = max(waiter.position for waiter in other.client.waiter_queues.waiters())
        (ticket,) = [candidate for candidate in other.client.member.tickets.values() if candidate.position == last]
        session = other.client.engine.connect("look")
        assert session.release(ticket, "revoked")
        session.close()
        other.client.member.heartbeat()
        with pytest.raises(sqlsem.LockLost, match="taken out of the queue"):
            second.result(5)
        locks.client.close()
        assert first.result(PATIENCE)


def test_interrupted_poll_leader_is_replaced(pair, monkeypatch):
    """After any interrupt of the poll leader, its own row is removed, and the other waiters get their answers."""
    first, other = pair
    without_sessions(other, monkeypatch)
    held = [first.mutex(f"r{number}") for number in range(4)]
    assert all(lock.acquire() for lock in held)
    client, struck = other.client, []

    class Struck(BaseException):
        pass

    perform = client.execute_effect

    def strike(operation):
        if isinstance(operation, effects.Call) and operation.what == "wait" and len(struck) < 2:
            struck.append(threading.current_thread())
            raise Struck
        return perform(operation)

    monkeypatch.setattr(client, "execute_effect", strike)
    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(other.mutex(f"r{number}").acquire) for number in range(4)]
        until(lambda: len(struck) == 2, "two were struck")
        for lock in held:
            lock.release()
        outcomes = [type(future.exception(PATIENCE)) for future in done]
    assert sorted(outcomes, key=str) == sorted([Struck, Struck, type(None), type(None)], key=str)
    assert len(client.registry.grants()) == 2
    assert not client.waiter_queues.waiters()
    rows = [entry for entry in other.admin.entries() if entry.resource.startswith("r")]
    assert len(rows) == 2
