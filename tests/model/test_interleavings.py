"""All orders of the steps of a few sessions, each one run and compared with the rule.

Each scenario's docstring says its subject. `support.interleavings` defines a step, and finds all orders.
"""

import itertools
import secrets

import pytest
from support.interleavings import Actor, Seen, against_the_rule, cutter, explore

import sqlsem
from sqlsem.engines.base import Disconnected
from sqlsem.values.locks import Request, Upgrading
from sqlsem.values.rates import RateRequest, RateStatus, windows_of
from sqlsem.values.tasks import End, NewTask

LEASE = 30.0


class World:
    """A database with some sessions, shared by all schedules, and with new names for each schedule."""

    def __init__(self, database, name):
        self.database, self.name = database, name
        self._numbers = itertools.count()
        self._sessions = {}
        self._members = {}
        self.operator = database.session(grace=0, gate_timeout=60)
        self._look = database.raw()
        self.bare = Bare(database)
        self.resource = str(name)
        self.believed = {}  # the positions whose owners know of the grant: by position, the actor's name
        self.crowded = False  # see _remember

    def begin(self):
        """Begin a new schedule."""
        self.resource = f"{self.name}-{next(self._numbers)}"
        self.believed = {}
        self.appeared = set()  # all positions seen so far

    def member(self, name, lease=None):
        """Return a session with a new member for each schedule where ``lease`` is given."""
        key = (name, lease)
        if key not in self._sessions:
            self._sessions[key] = self.database.session(grace=0 if lease is None else 5, lease=lease, gate_timeout=60)
        session = self._sessions[key]
        if lease is not None or key not in self._members:
            self._members[key] = session.register_member("host", 1, name)
        if self.database.engine == "sqlite":
            self._remember(session, self._members[key])
        return session, self._members[key]

    def _remember(self, session, member):
        """Store whether others were present when a session took and released its last lock, in each schedule."""
        place = f"{self.name}-{next(self._numbers)}"  # no name of the library's, which a scenario may have
        if self.crowded:
            self.bare.insert(place)
        (ticket,) = session.register(member, "last", "last", place, [Request(place, limit=1)], False)
        assert session.release(ticket, "cancelled")
        if self.crowded:
            self.rows("DELETE FROM {table} WHERE resource_id = ?", place)

    def forget(self, session):
        """Close a broken session and remove it from the shared ones."""
        session.close()
        key = next(key for key, opened in self._sessions.items() if opened is session)
        del self._sessions[key], self._members[key]

    def over(self, member):
        """Let a member's lease have expired a second ago."""
        ago = self.database.later(self.database.now, -1)
        self.rows(f"UPDATE {self.database.beside('member')} SET lease_until = {ago} WHERE member_id = ?", member)

    def rows(self, text, *parameters):
        cursor = self._look.cursor()
        cursor.execute(self.database.sql(text), parameters)
        return [tuple(row) for row in cursor.fetchall()] if cursor.description else []

    def seen(self):
        """Return the rows of the resource."""
        records = self.rows(
            "SELECT queue_position, access_type, concurrency_limit, weight, granted_at, revoked_at, member_id, "
            "CASE WHEN granted_at > revoked_at THEN 1 ELSE 0 END "
            "FROM {table} WHERE resource_id = ? ORDER BY queue_position",
            self.resource,
        )
        assert not any(row[7] for row in records), "granted after an operator took it away"
        return [Seen(row[0], row[1], row[2], row[3], row[4] is not None, row[5] is not None, row[6]) for row in records]

    def check(self):
        """Check the invariants after each step."""
        rows = self.seen()
        wrong = against_the_rule(rows)
        assert wrong is None, wrong
        new = {row.position for row in rows} - self.appeared
        assert not new or min(new) > max(self.appeared, default=0), "a number appeared after a higher one"
        self.appeared |= new
        inside = {row.position for row in rows if row.granted}
        missing = set(self.believed) - inside
        assert not missing, f"{[self.believed[number] for number in missing]} was told to be in, and is not"

    def drain(self):
        """At the end: grant each remaining waiter, one after the other, until none is left."""
        self.believed.clear()
        for row in self.seen():
            ticket = sqlsem.values.locks.Ticket(self.resource, row.position, self.id_of(row.position), False)
            session = next((self._sessions[key] for key, member in self._members.items() if member == row.member), None)
            if session is None:
                self.rows(
                    "DELETE FROM {table} WHERE resource_id = ? AND queue_position = ?", self.resource, row.position
                )
                continue
            if row.revoked:
                assert session.release(ticket, "revoked")
                continue
            assert session.wait(ticket, 0, NEVER) is True, f"{row} is first, and is not let in"
            self.check()
            assert session.release(ticket, "released")
        assert self.seen() == []

    def id_of(self, position):
        return self.rows("SELECT requesting_id FROM {table} WHERE queue_position = ?", position)[0][0]

    def close(self):
        for key, session in self._sessions.items():
            if key in self._members:
                session.deregister_member(self._members[key])
            session.close()
        self.operator.close()
        self.bare.close()
        self._look.close()


class Never:
    def is_set(self):
        return False

    def wait(self, seconds):
        return False

    def clear(self):
        pass


NEVER = Never()


class Requester(Actor):
    """An actor that requests the resource, polls for its grant, and releases it."""

    def __init__(self, world, name, *words, access="write", limit=1, weight=1, lease=None, row=None, uid=None):
        session, self.member = world.member(name, lease)
        super().__init__(name, session, [])
        self.world = world
        self.request = Request(world.resource, access, limit if access == "write" else 1, weight)
        self.uid = uid or secrets.token_hex(8)
        self.ticket = row
        self.calls = [(word, getattr(self, f"_{word}")) for word in words]
        self.done = self._done

    def register_now(self):
        """Register before the schedule begins."""
        self.ticket = self._register(self.session)
        if self.ticket.granted:
            self.world.believed[self.ticket.position] = self.name
        return self

    def _done(self, word, answer):
        """Return the committed result."""
        if word in ("register", "try") and answer is not None and answer.granted:
            self.world.believed[answer.position] = self.name
        elif word in ("look", "look_again") and answer is True:
            self.world.believed[self.ticket.position] = self.name

    def _register(self, session):
        self.ticket = session.register(self.member, self.name, "o", self.uid, [self.request], False)[0]
        return self.ticket

    def _try(self, session):
        tickets = session.register(self.member, self.name, "o", self.uid, [self.request], True)
        self.ticket = tickets[0] if tickets else None
        return self.ticket

    def _look(self, session):
        try:
            return None if self.ticket is None else session.wait(self.ticket, 0, NEVER)
        except Disconnected:  # its member was reaped, and this call says so
            self.world.forget(session)
            return None

    _look_again = _look

    def _release(self, session):
        if self.ticket is None:
            return None
        self.world.believed.pop(self.ticket.position, None)  # a row is gone before its release returns
        return session.release(self.ticket, "released")

    def _cancel(self, session):
        if self.ticket is not None:
            self.world.believed.pop(self.ticket.position, None)
        return session.cancel(self.member, self.uid, "cancelled")

    def _ping(self, session):
        pulse = session.heartbeat(self.member)
        if not pulse.known:
            self.world.believed = {
                position: name for position, name in self.world.believed.items() if name != self.name
            }
        return pulse

    def _begin(self, session):
        return session.begin_upgrade(self.ticket, False)

    def _upgrade(self, session):
        return session.upgrade(self.ticket, 0, NEVER)


def queued(world, **words):
    """Return actors that have registered one after the other: for each name the words of its calls."""
    return [Requester(world, name, *calls.split()).register_now() for name, calls in words.items()]


def handed_over(world, giver):
    """Let an actor hand over its lock, and return the token."""
    token = secrets.token_hex(16)
    assert giver.session.hand_over(giver.member, [giver.ticket], token, 60.0, None)
    world.believed.clear()
    return token


def adopter(world, name, token, done=None):
    """An actor that adopts a lock. Its answer is None if it is refused."""
    session, member = world.member(name)

    def adopt(session):
        try:
            return session.adopt(member, name, "o", secrets.token_hex(8), token)
        except sqlsem.SqlsemError:
            return None

    return Actor(name, session, [("adopt", adopt)], done=done)


def operator(world, name, call):
    """An operator with a session of its own and a single call."""
    session, _ = world.member(name)
    return Actor(name, session, [(name, call)])


def nothing_else():
    """Return a check for scenarios that need none of their own."""


# -- the scenarios: each gives its actors, and what must hold at the end ---------------------------------------------


def two_at_once(world):
    """Two clients register at once; each polls afterwards."""
    return [Requester(world, name, "register", "look") for name in "ab"], nothing_else


def three_kinds(world):
    """A reader, a writer and a stage register at once."""
    kinds = {"r": "read", "w": "write", "s": "stage:1"}
    return [Requester(world, name, "register", access=access) for name, access in kinds.items()], nothing_else


def weights(world):
    """Three clients register at once, with too much weight together: 2 and 1 of 2, and 1 of 3."""
    return [
        Requester(world, "a", "register", limit=2, weight=2),
        Requester(world, "b", "register", limit=2),
        Requester(world, "c", "register", limit=3),
    ], nothing_else


def a_free_place(world):
    """The holder leaves; two wait behind it and poll in any order."""
    return queued(world, h="release", a="look", b="look"), nothing_else


def readers_behind(world):
    """A writer leaves before a reader and another writer."""
    holder = Requester(world, "h", "release").register_now()
    reader = Requester(world, "r", "look", access="read").register_now()
    writer = Requester(world, "w", "look").register_now()
    return [holder, reader, writer], nothing_else


def a_try(world):
    """A try while the holder leaves, and another client waits."""
    return [*queued(world, h="release", w="look"), Requester(world, "t", "try")], nothing_else


def late_loss(world):
    """A holder with an expired lease sends a heartbeat as the next polls: it keeps its row, or learns of the loss."""
    holder = Requester(world, "h", "ping", lease=LEASE).register_now()
    waiter = Requester(world, "w", "look").register_now()
    world.over(holder.member)
    # From now on it trusts no grant before it has sent a heartbeat.
    world.believed.clear()

    def told(word, answer):
        if answer.known:
            world.believed[holder.ticket.position] = "h"
            assert answer.positions == {holder.ticket.position}

    holder.done = told

    def end():
        looked = waiter.answers["look"] is True
        if not looked and world.database.engine == "mssql":
            # Its routine, without time left, reports a removed row, and grants at the next call.
            looked = waiter._look(waiter.session) is True
        assert holder.answers["ping"].known is not looked

    return [holder, waiter], end


def granted_to_the_dead(world):
    """A waiter with an expired lease is next in the queue: it polls while another client tests it."""
    holder = Requester(world, "h").register_now()
    waiter = Requester(world, "w", "look", lease=LEASE).register_now()
    world.over(waiter.member)
    holder._release(holder.session)
    tester = Requester(world, "t", "try")
    return [waiter, tester], nothing_else


def revoked_while_it_waits(world):
    """An operator revokes the row of a waiter as it is granted."""
    holder, waiter = queued(world, h="release", w="look")
    position = waiter.ticket.position

    def revoke(session):
        answer = session.revoke(position, True)
        world.believed.pop(position, None)  # by force: the owner gets no notice
        return answer

    revoker = operator(world, "o", revoke)
    waiter.done = None

    def end():
        assert revoker.answers["o"] == 0
        assert all(row.position != position for row in world.seen())

    return [holder, waiter, revoker], end


def told_before(world):
    """An operator revokes a row as it is being granted: no grant follows the revocation."""
    holder, waiter = queued(world, h="release", w="look")
    position = waiter.ticket.position
    revoker = operator(world, "o", lambda session: session.revoke(position, False))
    revoked = []
    revoker.done = lambda word, answer: revoked.append(answer)

    def told(word, answer):
        # (Elsewhere a commit may come later than its decision: there the check compares the times.)
        late = revoked and answer is True and world.database.engine == "sqlite"
        assert not late, "granted after it was revoked"

    waiter.done = told  # it trusts no grant: its heartbeat reports the loss
    other = holder  # on SQLite a release grants the next row; elsewhere any connection may poll for a row
    if world.database.engine != "sqlite":
        holder._release(holder.session)
        other = Requester(world, "e", "look", row=waiter.ticket)
        other.done = told

    def end():
        if waiter.answers["look"] is True:
            assert revoker.answers["o"] == 1

    return [waiter, other, revoker], end


def cancelled(world):
    """A waiter cancels, by its uid, as it becomes grantable."""
    holder, waiter = queued(world, h="release", w="look cancel")

    def end():
        assert waiter.answers["cancel"] == 1

    return [holder, waiter], end


def a_lost_reply(world):
    """One registration, sent on two sessions of one member: its first reply was lost."""
    first = Requester(world, "a", "register")
    again = Requester(world, "b", "register", uid=first.uid)
    again.member = first.member

    def end():
        assert [row.position for row in world.seen()] == [first.ticket.position] == [again.ticket.position]

    first.name = again.name = "same"
    return [first, again], end


def an_upgrade(world):
    """A reader upgrades while another reader releases, and a third client registers."""
    first = Requester(world, "a", "begin", access="read").register_now()
    other = Requester(world, "b", "release", access="read").register_now()
    late = Requester(world, "c", "register", access="read")

    def end():
        while first.session.upgrade(first.ticket, 0, NEVER) is not True:
            for requester in (late,):
                if requester.ticket is not None and requester.ticket.position in world.believed:
                    world.believed.pop(requester.ticket.position)
                    assert requester.session.release(requester.ticket, "released")
            assert first.session.begin_upgrade(first.ticket, False) in (Upgrading.BEGUN, Upgrading.DONE)
        world.check()

    return [first, other, late], end


def two_upgrades(world):
    """Two readers upgrade at once: one of them is refused."""
    first, other = (Requester(world, name, access="read").register_now() for name in "ab")

    def begin(actor):
        def call(session):
            try:
                return session.begin_upgrade(actor.ticket, False)
            except sqlsem.Deadlock:
                return None

        return call

    for actor in (first, other):
        actor.calls = [("begin", begin(actor))]

    def end():
        assert sorted(str(actor.answers["begin"]) for actor in (first, other)) == ["None", str(Upgrading.BEGUN)]
        loser, winner = (first, other) if first.answers["begin"] is None else (other, first)
        world.believed.pop(loser.ticket.position)
        assert loser.session.release(loser.ticket, "released")
        assert winner.session.upgrade(winner.ticket, 0, NEVER) is True

    return [first, other], end


def adopted(world):
    """Two clients adopt the same handed-over lock: one gets it, the other is refused."""
    (giver,) = queued(world, h="")
    token = handed_over(world, giver)
    actors = [adopter(world, name, token) for name in "ab"]

    def end():
        assert sum(actor.answers["adopt"] is not None for actor in actors) == 1

    return actors, end


def adopted_too_late(world):
    """A lock in transit is adopted just after its time, while the next waiter polls: one of them gets it."""
    giver, waiter = queued(world, h="", w="look")
    late = adopter(world, "a", handed_over(world, giver))
    world.over(world.seen()[0].member)

    def end():
        assert late.answers["adopt"] is None

    return [late, waiter], end


def a_pause(world):
    """An operator pauses the resource while the holder releases, and another client polls."""
    stopper = operator(world, "o", lambda session: session.set_resource(world.resource, "paused", 1))

    def end():
        world.operator.set_resource(world.resource, "paused", 0)

    return [*queued(world, h="release", w="look"), stopper], end


def claims(world):
    """Two workers claim from a queue of two tasks at once: they get both tasks."""
    world.operator.put_tasks(world.resource, secrets.token_hex(8), [NewTask("call", "1")] * 2)
    return _claims(world, 2)


def claims_of_a_limit(world):
    """The same with a limit of one running task: one worker gets a task."""
    world.operator.put_tasks(world.resource, secrets.token_hex(8), [NewTask("call", "1")] * 2)
    world.operator.set_queue(world.resource, None, "limit", 1)
    return _claims(world, 1)


def _claims(world, maximum):
    actors = []
    for name in "ab":
        session, member = world.member(name)

        def claim(session, member=member):
            return session.claim_task(member, world.resource, "o", secrets.token_hex(8), False)

        actors.append(Actor(name, session, [("claim", claim)]))

    def end():
        claims = [(actor, actor.answers["claim"]) for actor in actors if actor.answers["claim"] is not None]
        numbers = [claimed.task_id for _, claimed in claims]
        assert len(set(numbers)) == len(numbers) <= maximum
        assert numbers or maximum < 2, "neither got anything"
        for actor, claimed in claims:
            _, member = world.member(actor.name)
            ended = End(claimed.task_id, claimed.attempt, "finished")
            assert actor.session.end_task(member, ended) == "finished"

    return actors, end


def registers_as_one_leaves(world):
    """A registration while the holder leaves, and another client polls."""
    return [*queued(world, h="release", w="look"), Requester(world, "n", "register")], nothing_else


def registers_as_one_is_removed(world):
    """A registration and a poll while another client finds that the holder is dead."""
    holder = Requester(world, "h", lease=LEASE).register_now()
    waiter = Requester(world, "w", "look").register_now()
    world.over(holder.member)
    world.believed.clear()
    return [waiter, Requester(world, "n", "register", "look")], nothing_else


def registers_as_one_is_revoked(world):
    """A registration while an operator revokes the row before it, and the holder leaves."""
    holder, waiter = queued(world, h="release", w="")
    revoker = operator(world, "o", lambda session: session.revoke(waiter.ticket.position, True))

    def end():
        assert revoker.answers["o"] == 0
        assert all(row.position != waiter.ticket.position for row in world.seen())

    return [holder, revoker, Requester(world, "n", "register")], end


def registers_as_one_cancels(world):
    """A registration while the one before it cancels, by its uid, and the holder leaves."""
    holder, waiter = queued(world, h="release", w="cancel")

    def end():
        assert waiter.answers["cancel"] == 1

    return [holder, waiter, Requester(world, "n", "register")], end


def registers_as_one_upgrades(world):
    """A reader and a writer register while the only reader inside becomes the writer."""
    first = Requester(world, "a", "begin", "upgrade", access="read").register_now()
    others = [Requester(world, name, "register", access=access) for name, access in (("r", "read"), ("w", "write"))]

    def end():
        # An earlier reader holds the resource too, and releases first.
        reader = others[0].ticket
        if reader.position in world.believed:
            world.believed.pop(reader.position)
            assert others[0].session.release(reader, "released")
        assert first.answers["upgrade"] is True or first.session.upgrade(first.ticket, 0, NEVER) is True
        world.check()

    return [first, *others], end


def registers_as_one_hands_over(world):
    """A registration and a poll while the holder hands over: the row stays before it, in transit."""
    giver = Requester(world, "h").register_now()
    position, token = giver.ticket.position, secrets.token_hex(16)
    newcomer = Requester(world, "n", "register", "look")

    def hand_over(session):
        world.believed.pop(position)  # the giver holds the lock no more before its call returns
        return session.hand_over(giver.member, [giver.ticket], token, 60.0, None)

    giver.calls = [("hand over", hand_over)]

    def end():
        assert giver.answers["hand over"] is True
        assert newcomer.answers["look"] is False
        assert [row.position for row in world.seen() if row.granted] == [position]

    return [giver, newcomer], end


def registers_as_one_adopts(world):
    """A client registers while a lock in transit is adopted, and another client polls: only the adopter holds it."""
    giver, waiter = queued(world, h="", w="look")
    position = giver.ticket.position

    def told(word, answer):
        world.believed[position] = "a"

    receiver = adopter(world, "a", handed_over(world, giver), done=told)

    def end():
        assert [ticket.position for _, ticket in receiver.answers["adopt"]] == [position], "another fence"
        assert waiter.answers["look"] is False

    return [receiver, waiter, Requester(world, "n", "register")], end


def rates(world):
    """Three clients take from a rate of two an hour at once: two of them succeed."""
    rate = RateRequest(world.resource, windows_of(2, "1h"))
    actors = []
    for name in "abc":
        session, _ = world.member(name)
        actors.append(Actor(name, session, [("take", lambda session: session.take_rate(rate, None))]))

    def end():
        turns = [actor.answers["take"].status for actor in actors]
        assert sorted(turn.name for turn in turns) == ["TAKEN", "TAKEN", "TOO_EARLY"]

    return actors, end


def a_rate_with_a_line(world):
    """Two clients wait in the queue of a rate, and a third tries: no client takes before the waiters ahead of it."""
    rate = RateRequest(world.resource, windows_of(10, "1h"))
    world.resource = rate.resource
    takers = []
    first, second = (Requester(world, name).register_now() for name in "ab")
    third = Requester(world, "c")

    def takes(actor):
        def take(session):
            if actor.ticket is not None:
                world.believed.pop(actor.ticket.position, None)  # a client that takes leaves the queue
            return session.take_rate(rate, actor.ticket)

        def told(word, answer):
            if answer.status is RateStatus.TAKEN:
                takers.append(actor.name)

        actor.calls, actor.done = [("take", take)], told

    for actor in (first, second, third):
        takes(actor)

    def end():
        assert takers[0] == "a"
        assert takers == sorted(takers), "a request was overtaken"
        assert second.answers["take"].status in (RateStatus.TAKEN, RateStatus.OTHERS_FIRST)
        assert "c" not in takers or "b" in takers, "taken past the line"

    return [first, second, third], end


def a_bare_row(world):
    """A plain INSERT and a registration: the first to commit holds the resource, and the other waits behind it."""
    bare = Actor("b", world.bare, [("insert", lambda session: session.insert(world.resource))])
    member = Requester(world, "a", "register", "look")

    def end():
        positions = {row.position: row.member for row in world.seen()}
        assert member.answers["look"] is (member.ticket.position == min(positions))

    return [bare, member], end


def bare_among_others(world):
    """The same with two registrations: one may wait for the gate before the INSERT, and the other after it."""
    bare = Actor("b", world.bare, [("insert", lambda session: session.insert(world.resource))])
    return [bare, Requester(world, "a", "register"), Requester(world, "c", "register")], nothing_else


class Bare:
    """A plain connection in the place of a session."""

    def __init__(self, database):
        self.database = database
        self.connection = database.raw()

    def _execute(self, statement, parameters):
        self.connection.cursor().execute(statement, parameters)

    def insert(self, resource):
        insert = self.database.sql(
            "INSERT INTO {table} (resource_id, requesting_id, concurrency_limit) VALUES (?, ?, 1)"
        )
        self._execute(insert, (resource, "bare"))

    def close(self):
        self.connection.close()


SCENARIOS = [
    *(two_at_once, three_kinds, weights, a_free_place, readers_behind, a_try, late_loss, granted_to_the_dead),
    *(revoked_while_it_waits, told_before, cancelled, a_lost_reply, an_upgrade, two_upgrades, adopted),
    *(adopted_too_late, a_pause, claims, claims_of_a_limit, registers_as_one_leaves, registers_as_one_is_removed),
    *(registers_as_one_is_revoked, registers_as_one_cancels, registers_as_one_upgrades, registers_as_one_hands_over),
    *(registers_as_one_adopts, rates, a_rate_with_a_line, a_bare_row, bare_among_others),
]


@pytest.fixture
def world(database, name, monkeypatch):
    if database.engine == "sqlite":
        # Each thread stands for a process here, but the lock for forks is shared by all threads of a process.
        monkeypatch.setattr("sqlsem.engines.sqlite.fork.forks_blocked", NoForks())
    new_world = World(database, name)
    yield new_world
    new_world.close()


class NoForks:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.kept
@pytest.mark.leaves_rows
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda value: value.__name__)
def test_every_order_of_steps(world, scenario, database, record_property):
    def make():
        world.begin()
        actors, end = scenario(world)

        def finish():
            end()
            world.check()
            world.drain()

        return actors, world.check, finish

    for world.crowded in (False, True) if database.engine == "sqlite" else (False,):
        count = explore(make, cutter(database))
        record_property("schedules", count)
        print(count, "schedules")
        assert count > 1
