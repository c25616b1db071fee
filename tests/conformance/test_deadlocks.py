"""The search in an engine's tables finds the same deadlocks as the reference search; and the waiters' outcomes."""

import asyncio
import itertools
import os
import random
import threading
import time

import pytest
import wait_graphs
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from support import PATIENCE, remains, until

import sqlsem
from sqlsem.values import deadlocks
from sqlsem.values.deadlocks import Row, find
from sqlsem.values.locks import Request

pytestmark = pytest.mark.timing(0.2)
NEVER = threading.Event()
EXAMPLES = {"sqlite": 100, "postgresql": 75, "mssql": 25, "mysql": 25}

#: The search for sessions, on PostgreSQL.
ROUTINE = """
SELECT member_id, host, pid, session_id, owner, ahead_resource, ahead_position, ahead_granted,
       resource_id, queue_position, upgrade, behind_position, whos
FROM sqlsem.find_deadlock(%s) ORDER BY step
"""


class Mirror:
    """Repeats the moves of a `wait_graphs.World` with one real session per member."""

    def __init__(self, database, sessions, prefix, caps):
        self.database, self.prefix, self.world = database, prefix, wait_graphs.World(caps)
        self.sessions = sessions
        self.members = {
            number: session.register_member(f"host{number}", 1000 + number, "test")
            for number, session in self.sessions.items()
        }
        self.rows = {}  # number in the world: the ticket, or the position of a bare row
        self.uids = itertools.count()
        self.raw = database.raw()
        for resource, cap in caps.items():
            self.sessions[1].set_resource(self.full(resource), "cap", cap)

    def full(self, resource):
        return f"{self.prefix}-{resource}"

    def move(self, kind, node, argument):
        before = list(self.world.rows)
        member, owner = self.world.owner(node)
        if not self.world.move(kind, node, argument):
            return
        after = {row.position for row in self.world.rows}
        if kind == "ask":
            new = [row for row in self.world.rows if row.position not in {row.position for row in before}]
            if member is None:
                (row,) = new
                columns = {"access_type": row.access, "concurrency_limit": row.limit, "weight": row.weight}
                self.rows[row.position] = self.database.insert_bare(
                    self.raw.cursor(), self.full(row.resource), "bare", **columns
                )
            else:
                requests = [Request(self.full(row.resource), row.access, row.limit, row.weight) for row in new]
                tickets = self.sessions[member].register(
                    self.members[member], f"who {node}", owner, f"{self.prefix}.{next(self.uids)}", requests, False
                )
                for row, ticket in zip(new, tickets, strict=True):
                    self.rows[row.position] = ticket
        for row in before:
            if row.position not in after:
                position = self.rows.pop(row.position)
                if member is None:
                    self.raw.cursor().execute(
                        self.database.sql("DELETE FROM {table} WHERE queue_position = ?"), (position,)
                    )
                else:
                    assert self.sessions[member].release(position, "released")
        labels = {row.position: row.access for row in before}
        for row in self.world.rows:
            if labels.get(row.position, row.access) != row.access:
                self.label(self.rows[row.position].position, row.access)
        for row in sorted(self.world.rows, key=lambda row: row.position):
            if row.granted and row.member is not None:
                self.sessions[row.member].wait(self.rows[row.position], 0.0, NEVER)

    def label(self, position, access):
        change = self.database.sql("UPDATE {table} SET access_type = ? WHERE queue_position = ?")
        self.raw.cursor().execute(change, (access, position))

    def read(self):
        """Return the rows from the database."""
        table_rows = self.database.rows(
            "SELECT queue_position, resource_id, member_id, owner, access_type, concurrency_limit, weight, granted_at "
            "FROM {table}"
        )
        rows = [Row(*row[:7], row[7] is not None) for row in table_rows if row[1].startswith(self.prefix)]
        assert len(rows) == len(self.world.rows)
        return rows

    def close(self):
        for resource in self.world.caps:
            self.sessions[1].set_resource(self.full(resource), "cap", None)
        for number, session in self.sessions.items():
            session.deregister_member(self.members[number])
        self.raw.cursor().execute(self.database.sql("DELETE FROM {table} WHERE requesting_id = 'bare'"))
        self.raw.close()
        assert self.database.queue(self.prefix) == []


def test_deadlock_search_follows_the_model(database, name):
    number = itertools.count()
    numbers = []

    @settings(
        max_examples=EXAMPLES[database.engine] * int(os.environ.get("SQLSEM_TEST_SCALE", "1")),
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(wait_graphs.caps, st.lists(wait_graphs.moves(), min_size=12, max_size=40))
    def check(caps, moves):
        mirror = Mirror(database, sessions, name(next(number)), caps)
        try:
            for move in moves:
                mirror.move(*move)
            compare(mirror)
        finally:
            mirror.close()

    def compare(mirror):
        caps = {mirror.full(resource): cap for resource, cap in mirror.world.caps.items()}
        cycles = find(mirror.read(), caps)
        expected = find(mirror.world.rows, mirror.world.caps)
        assert len(cycles) == len(expected), "the rows are not what the moves lead to"
        event(f"{len(cycles)} cycles")
        numbers.append(len(cycles))
        people = {member: (f"host{number}", 1000 + number, None) for number, member in mirror.members.items()}
        for number, member in mirror.members.items():
            own_cycles = {cycle.victim.position: cycle for cycle in cycles if cycle.victim.member == member}
            answers = [mirror.sessions[number].find_deadlock(member)]
            if database.engine == "postgresql":  # and the function that sessions use
                rows = mirror.sessions[number].connection.execute(ROUTINE, (member,)).fetchall()
                answers.append(deadlocks.Found.of_rows(rows))
            for answer in answers:
                assert (answer is None) == (not own_cycles)
                if answer is not None:
                    assert answer == deadlocks.steps_of(own_cycles[answer.victim], people)
                    assert str(answer.victim) in deadlocks.message(answer)

    sessions = {number: database.session() for number in (1, 2, 3, 4)}
    try:
        check()
    finally:
        for session in sessions.values():
            session.close()
    assert sum(numbers) > len(numbers) / 10, "hardly any deadlock among the examples"


@pytest.fixture
def ring(database, name):
    """``ring(size)`` returns sessions and numbers of members that each hold a resource and wait for the next one's."""
    sessions = []

    def ring(size, **options):
        members = []
        for number in range(size):
            session = database.session(**options)
            sessions.append(session)
            members.append((session, session.register_member(f"host{number}", number, "test")))
        for step in (0, 1):
            for number, (session, member) in enumerate(members):
                request = Request(name((number + step) % size))
                (ticket,) = session.register(member, f"r{number}", "main", f"{name}.{number}.{step}", [request], False)
                assert ticket.granted == (step == 0)
        return members

    yield ring
    for session in sessions:
        session.close()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_youngest_request_is_the_only_victim(database, ring, name, size):
    members = ring(size)
    answers = [session.find_deadlock(member) for session, member in members]
    assert [answer is not None for answer in answers] == [False] * (size - 1) + [True]
    assert len(answers[-1].steps) == answers[-1].nodes == size
    last = max(row[0] for row in database.queue(name))
    assert answers[-1].victim == last
    session, member = members[-1]
    assert session.cancel(member, f"{name}.{size - 1}.1", "cancelled") == 1
    assert [session.find_deadlock(member) for session, member in members] == [None] * size
    for session, member in members:
        session.deregister_member(member)


def test_rows_of_dead_members_are_no_deadlock(ring, database, name):
    """The rows of dead members will be removed, so no waiter has to give up."""
    (dead, first), (survivor, second) = ring(2, grace=300)
    dead.close()
    answer = survivor.find_deadlock(second)
    if database.engine == "sqlite":
        assert answer is None  # dead for certain, and removed on the spot
    else:
        until(lambda: survivor.find_deadlock(second) is None, "the dead noticed")
    survivor.deregister_member(second)
    database.rows(f"DELETE FROM {database.beside('member')} WHERE member_id = ?", first)
    reaper = database.session()
    reaper.reap()
    reaper.close()
    assert database.queue(name) == []


def test_revoked_row_is_no_deadlock(ring, database, name):
    (first_session, first), (second_session, second) = ring(2)
    holds = min(row[0] for row in database.queue(name))
    assert first_session.revoke(holds, False) == 1
    assert second_session.find_deadlock(second) is None
    first_session.deregister_member(first)
    second_session.deregister_member(second)


# -- the outcomes of waiters ----------------------------------------------------------------------------------------


class Holder:
    """A thread that holds one lock and then acquires another."""

    def __init__(self, database, threads, first, then, **options):
        self.database, self.first, self.then, self.options = database, first, then, options
        self.may_want, self.may_leave, self.holds = threading.Event(), threading.Event(), threading.Event()
        self.outcome, self.wanted_at, self.ended_at = None, None, None
        self.ended = threading.Event()
        threads.start(self.run)
        assert self.holds.wait(PATIENCE)

    def run(self):
        with self.first as grant:
            self.grant = grant
            self.holds.set()
            assert self.may_want.wait(PATIENCE)
            self.wanted_at = time.monotonic()
            try:
                with self.then as grant:
                    self.outcome = grant
            except sqlsem.SqlsemError as exc:
                self.outcome = exc
            self.ended_at = time.monotonic()
            self.ended.set()
            if isinstance(self.outcome, sqlsem.Deadlock):
                assert self.may_leave.wait(PATIENCE)

    def want(self, name):
        """Let the thread acquire its second lock; return once the request is in the queue."""
        before = set(self.database.queue(name))  # (the victim of another cycle may leave meanwhile)
        self.may_want.set()
        until(lambda: self.ended.is_set() or {*self.database.queue(name)} - before, "the request in the queue")
        return self

    def done(self):
        assert self.ended.wait(PATIENCE), "it still waits"
        return self.outcome


#: Seconds in which a deadlock must be found: sqlsem promises two, and slow machines need more.
SOON = 45.0


@pytest.mark.timing(1.0)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_threads_in_a_ring(database, connect, name, threads, size):
    coordinators = [connect(), connect()]  # so one part of the cycle is inside a process, the other between two
    locks = [[coordinator.mutex(name(number)) for number in range(size)] for coordinator in coordinators]
    holders = [
        Holder(database, threads, locks[number % 2][number], locks[number % 2][(number + 1) % size])
        for number in range(size)
    ]
    for holder in holders:
        holder.want(name)
    *others, victim = holders
    error = victim.done()
    assert isinstance(error, sqlsem.Deadlock)
    assert victim.ended_at - victim.wanted_at < SOON
    assert error.resource == name(0)
    for number, holder in enumerate(holders):
        held, behind = holder.grant.position, holders[(number + 1) % size].grant.position
        assert f"holds '{name(number)}' at {held}, waits for '{name((number + 1) % size)}' at " in str(error)
        assert f" behind {behind}" in str(error)
    assert str(error).count(f":{os.getpid()} (") == size
    # The victim's request has left the queue; it still holds its own lock, and the others wait for that lock.
    assert len(database.queue(name)) == 2 * size - 1
    assert not victim.grant.lost
    assert not any(holder.ended.is_set() for holder in others)
    victim.may_leave.set()
    assert all(isinstance(holder.done(), sqlsem.Grant) for holder in others)
    threads.join()


def test_several_deadlocks_at_once(database, connect, name, threads):
    coordinator = connect()
    pairs = []
    for pair in range(4):
        first, other = coordinator.mutex(name(f"{pair}a")), coordinator.mutex(name(f"{pair}b"))
        pairs.append((Holder(database, threads, first, other), Holder(database, threads, other, first)))
    for survivor, other in pairs:
        survivor.want(name)
        other.want(name)
    for survivor, other in pairs:
        assert isinstance(other.done(), sqlsem.Deadlock)
        other.may_leave.set()
        assert isinstance(survivor.done(), sqlsem.Grant)
    threads.join()
    assert max(other.ended_at for _, other in pairs) - pairs[-1][1].wanted_at < SOON


def test_readers_and_limits(database, connect, name, threads):
    """A limit of two is part of a deadlock only if both of its holders are."""
    coordinator = connect()
    book, pool = name("book"), name("pool")
    reader = Holder(database, threads, coordinator.read(book), coordinator.limit(pool, 2))
    holder = Holder(database, threads, coordinator.limit(pool, 2), coordinator.write(book))
    second = Holder(database, threads, coordinator.limit(pool, 2), coordinator.write(book))
    holder.want(name)
    reader.want(name)
    remains(lambda: not (holder.ended.is_set() or reader.ended.is_set()), 0.6, "no deadlock while one of two can leave")
    second.want(name)
    assert isinstance(second.done(), sqlsem.Deadlock)
    assert f"'{pool}'" in str(second.outcome)
    assert f"'{book}'" in str(second.outcome)
    second.may_leave.set()
    assert isinstance(reader.done(), sqlsem.Grant)
    assert isinstance(holder.done(), sqlsem.Grant)
    threads.join()


def test_shorter_timeout_precedes_the_deadlock(database, connect, name, threads):
    coordinator = connect()
    holder = Holder(database, threads, coordinator.mutex(name("a")), coordinator.mutex(name("b"), timeout=0.05))
    second = Holder(database, threads, coordinator.mutex(name("b")), coordinator.mutex(name("a")))
    holder.want(name)
    second.want(name)
    assert isinstance(holder.done(), sqlsem.Timeout)
    assert isinstance(second.done(), sqlsem.Grant)
    threads.join()


def test_all_of_deadlocks_with_sequential_acquires(database, connect, name, threads):
    """An all_of that has got one of two locks deadlocks with a client that acquires them one after the other."""
    coordinator = connect()
    other = Holder(database, threads, coordinator.mutex(name("a")), coordinator.mutex(name("b")))
    both = sqlsem.all_of(coordinator.mutex(name("b")), coordinator.mutex(name("a")))
    everything = Holder(database, threads, coordinator.mutex(name("apart")), both)
    everything.want(name("a"))
    other.want(name)
    assert isinstance(other.done(), sqlsem.Deadlock)
    other.may_leave.set()
    assert isinstance(everything.done(), sqlsem.Grant)
    threads.join()


def test_all_of_never_deadlocks(database, connect, name, threads):
    """Many threads acquire random sets of locks of all kinds in random order: none ever gets Deadlock."""
    coordinators = [connect() for _ in range(2)]
    rounds, done = (4, 6) if database.engine == "mssql" else (25, 12), []

    def work(coordinator, seed):
        chance = random.Random(seed)
        for _ in range(rounds[0]):
            names = chance.sample("abcde", chance.randint(1, 4))
            kinds = [
                chance.choice(
                    [
                        coordinator.mutex,
                        coordinator.read,
                        coordinator.write,
                        lambda resource: coordinator.limit(resource, 3, weight=chance.randint(1, 3)),
                        lambda resource: coordinator.stage(resource, chance.randint(1, 2)),
                    ]
                )
                for _ in names
            ]
            with sqlsem.all_of(*(kind(name(resource)) for kind, resource in zip(kinds, names, strict=True))):
                done.append(names)

    for seed in range(rounds[1]):
        threads.start(work, coordinators[seed % 2], seed)
    threads.join()
    assert len(done) == rounds[0] * rounds[1]


def hold_and_want(channel, url, options, first, then):
    coordinator = sqlsem.connect(url, **options)
    with coordinator.mutex(first) as grant:
        channel.tell("holds", position=grant.position)
        channel.ask()
        try:
            with coordinator.mutex(then):
                channel.tell("done", outcome="had")
        except sqlsem.Deadlock as exc:
            channel.tell("done", outcome=str(exc))
            channel.ask()
    coordinator.close()


def test_deadlock_between_processes_is_found(database, connect, name, spawn):
    children = [
        spawn(hold_and_want, first=name(held), then=name(other)) for held, other in (("a", "b"), ("b", "c"), ("c", "a"))
    ]
    positions = [child.next()["position"] for child in children]
    for number, child in enumerate(children):
        child.send(go=True)
        until(lambda number=number: len(database.queue(name)) > 3 + number, "the request in the queue")
        began = time.monotonic()
    outcome = children[-1].next()["outcome"]
    assert time.monotonic() - began < SOON
    for child, position in zip(children, positions, strict=True):
        assert f"{child.pid} (MainThread#1) holds '{name}" in outcome
        assert f" at {position}, waits for" in outcome
    children[-1].send(leave=True)
    for child in children[-2::-1]:
        assert child.next()["outcome"] == "had"
    for child in children:
        child.rest()


def test_deadlock_between_tasks_and_threads_is_found(database, connect, name, threads):
    """A deadlock between two tasks of one loop and a thread is found."""
    coordinator = connect()
    holder = Holder(database, threads, coordinator.mutex(name("c")), coordinator.mutex(name("a")))

    async def take(first, then, holds, go):
        async with coordinator.mutex(name(first)):
            holds.set()
            await go.wait()
            async with coordinator.mutex(name(then)):
                return "had"

    async def main():
        events = [asyncio.Event() for _ in range(4)]
        first_task = asyncio.create_task(take("a", "b", events[0], events[1]), name="one")
        second_task = asyncio.create_task(take("b", "c", events[2], events[3]), name="two")
        await events[0].wait()
        await events[2].wait()
        events[1].set()
        await asyncio.to_thread(until, lambda: len(database.queue(name)) == 4)
        await asyncio.to_thread(holder.want, name)
        began = time.monotonic()
        events[3].set()
        with pytest.raises(sqlsem.Deadlock) as caught:
            await second_task
        assert time.monotonic() - began < SOON
        for words in ("(one#", "(two#", f" holds '{name('c')}' at {holder.grant.position}, waits for '{name('a')}'"):
            assert words in str(caught.value)
        assert await first_task == "had"

    asyncio.run(main())
    assert isinstance(holder.done(), sqlsem.Grant)
    threads.join()


def test_no_search_without_possible_deadlock(database, connect, name, threads):
    """The search never includes a waiter that holds nothing else, however long it waits."""
    coordinator = connect(grace=1)
    with coordinator.mutex(name("a")):

        def wait():
            assert not coordinator.mutex(name("a")).acquire(timeout=0.6)

        threads.start(wait)
        until(lambda: len(database.queue(name)) == 2, "the request in the queue")
        assert not coordinator.client.deadlock_monitor.thread.runs
        threads.join()


def test_search_ends_with_the_last_waiter(database, connect, name, threads):
    coordinator, other = connect(), connect()
    with other.mutex(name("b")):
        holder = Holder(database, threads, coordinator.mutex(name("a")), coordinator.mutex(name("b")))
        holder.want(name)
        lookout = coordinator.client.deadlock_monitor.thread
        until(lambda: lookout.runs, "the deadlock monitor runs")
    assert isinstance(holder.done(), sqlsem.Grant)
    lookout.thread.join(PATIENCE)
    assert not lookout.runs
    threads.join()


def test_random_lock_order_completes_by_retry(database, connect, name, threads):
    """Threads of two coordinators nest locks at random; a victim releases its locks and retries. All end."""
    coordinators = [connect(), connect()]
    rounds = 2
    done, deadlocks, never_set = [], [], threading.Event()

    def nest(locks):
        if not locks:
            return
        with locks[0]:
            never_set.wait(0.02)  # so that other threads acquire in between
            nest(locks[1:])

    def work(coordinator, seed):
        chance = random.Random(seed)
        for _ in range(rounds):
            locks = [
                chance.choice(
                    [
                        coordinator.mutex,
                        coordinator.read,
                        coordinator.write,
                        lambda resource: coordinator.limit(resource, 2, weight=chance.randint(1, 2)),
                    ]
                )(name(resource))
                for resource in chance.sample("abc", chance.randint(2, 3))
            ]
            while True:
                try:
                    nest(locks)
                    break
                except sqlsem.Deadlock as exc:
                    deadlocks.append(str(exc))
            done.append(seed)

    seeds = itertools.count()

    def met():
        done.clear()
        own_seeds = list(itertools.islice(seeds, 4))
        for seed in own_seeds:
            threads.start(work, coordinators[seed % 2], seed)
        threads.join()
        assert sorted(done) == sorted(own_seeds * rounds)
        return deadlocks

    until(met, "two of them meet")
    assert all(text.startswith("Deadlock: ") for text in deadlocks)


def test_orphan_row_is_no_deadlock(database, connect, name):
    """A broken-off call of this thread left a row: a heartbeat removes it, and the waiter behind it goes on."""
    coordinator = connect(grace=1800)  # no heartbeat comes by itself during the test
    with coordinator.mutex(name("before")):
        (entry,) = coordinator.admin.entries(name("before"))
    session = database.session()
    session.register(entry.member_id, entry.requesting_id, entry.owner, "left.1", [Request(name)], False)
    session.close()
    with sqlsem.all_of(coordinator.mutex(name), coordinator.mutex(name("other")), timeout=PATIENCE):
        pass
