"""As test_interleavings.py, for requests with priorities: in every order of steps, no request is granted beside a
holder, nor before a waiter of higher priority.
"""

import secrets

import pytest
from model.test_interleavings import NoForks, World
from support.interleavings import Actor, cutter, explore

from sqlsem.engines.priorities import priority_queue
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import Request

AGEING_MS = 3_600_000


class RankedWorld(World):
    """A world with priorities on its resources."""

    def begin(self):
        super().begin()
        self.line = {}  # by uid, the priorities of the entries in the queue
        self.operator.set_resource(self.resource, "ageing", AGEING_MS)

    def drain(self, actors):
        """At the end: grant and release each waiter, the highest priority first."""
        for actor in actors:
            if isinstance(actor, Ranked) and actor.uid not in self.line:
                actor.session.cancel(actor.member, actor.uid, "released")
        self.believed.clear()
        waiting = {actor.uid: actor for actor in actors if isinstance(actor, Ranked)}
        for uid, _ in sorted(self.line.items(), key=lambda item: -item[1]):
            turn = waiting[uid].ask()
            assert turn.granted, f"{waiting[uid].name} is first, and is not let in"
            assert waiting[uid].session.release(turn.ticket, "released")
        for name in (self.resource, priority_queue(self.resource)):
            assert self.rows("SELECT queue_position FROM {table} WHERE resource_id = ?", name) == []
        self.operator.set_resource(self.resource, "ageing", None)


class Ranked(Actor):
    """An actor that requests with a priority, polls for its grant, and releases it."""

    def __init__(self, world, name, priority, *words, uid=None):
        session, self.member = world.member(name)
        super().__init__(name, session, [])
        self.world, self.uid, self.place, self.held = world, uid or secrets.token_hex(8), None, None
        self.request = Request(world.resource, priority=priority)
        self.calls = [(word, getattr(self, f"_{word}")) for word in words]
        self.done = self._done

    def now(self):
        """Act before the schedule begins."""
        self._done("enter", self.ask())
        return self

    def ask(self, only_if_free=False):
        return self.session.acquire_by_priority(
            self.member, f"id {self.uid}", "o", self.uid, self.request, only_if_free, self.place
        )

    def _done(self, word, answer):
        """Record the answer after its commit."""
        if word not in ("enter", "look", "try"):
            return
        if answer.granted:
            self.world.line.pop(self.uid, None)
            higher = [other for other in self.world.line.values() if other > self.request.priority]
            assert not higher, f"{self.name} is let in before one of {higher}"
            self.held = answer.ticket
            self.world.believed[self.held.position] = self.name
        elif answer.ticket is not None:
            self.place = answer.ticket
            self.world.line[self.uid] = self.request.priority

    def _enter(self, session):
        return self.ask()

    def _look(self, session):
        return self.ask()

    def _try(self, session):
        return self.ask(only_if_free=True)

    def _release(self, session):
        self.world.believed.pop(self.held.position, None)
        return session.release(self.held, "released")

    def _cancel(self, session):
        self.world.line.pop(self.uid, None)
        if self.held is not None:
            self.world.believed.pop(self.held.position, None)
        return session.cancel(self.member, self.uid, "cancelled")


def two_come_at_once(world):
    """Two clients request a free resource; each polls afterwards."""
    return [Ranked(world, "a", 1, "enter"), Ranked(world, "b", 2, "enter")]


def a_low_and_a_high_one_look(world):
    """The holder releases; two waiters poll in any order."""
    return [
        Ranked(world, "h", 0, "release").now(),
        Ranked(world, "a", 1, "look").now(),
        Ranked(world, "b", 2, "look").now(),
    ]


def a_high_one_comes(world):
    """The holder releases, the first waiter polls, and a request of higher priority comes."""
    return [Ranked(world, "h", 0, "release").now(), Ranked(world, "a", 1, "look").now(), Ranked(world, "b", 2, "enter")]


def a_try(world):
    """A client tries while the holder releases, and a waiter of lower priority polls."""
    return [Ranked(world, "h", 0, "release").now(), Ranked(world, "a", 1, "look").now(), Ranked(world, "t", 2, "try")]


def the_first_one_gives_up(world):
    """The higher waiter cancels as it becomes grantable; the lower one polls."""
    return [
        Ranked(world, "h", 0, "release").now(),
        Ranked(world, "a", 1, "look").now(),
        Ranked(world, "b", 2, "cancel").now(),
    ]


def one_without_a_priority(world):
    """A program without priorities requests while the holder releases, and a waiter polls."""
    holder = Ranked(world, "h", 0, "release").now()
    session, member = world.member("old")

    def register(session):
        with pytest.raises(ConfigurationError):
            session.register(member, "old", "o", "old", [Request(world.resource)], False)

    return [holder, Ranked(world, "a", 1, "look").now(), Actor("old", session, [("register", register)])]


SCENARIOS = [
    *(two_come_at_once, a_low_and_a_high_one_look, a_high_one_comes, a_try, the_first_one_gives_up),
    one_without_a_priority,
]


@pytest.fixture
def world(database, name, monkeypatch):
    if database.engine == "sqlite":
        monkeypatch.setattr("sqlsem.engines.sqlite.fork.forks_blocked", NoForks())
    new_world = RankedWorld(database, name)
    yield new_world
    new_world.close()


@pytest.mark.kept
@pytest.mark.engines("sqlite", "postgresql", "mysql")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda value: value.__name__)
def test_every_order_of_steps(world, scenario, database):
    def make():
        world.begin()
        actors = scenario(world)

        def finish():
            world.check()
            world.drain(actors)

        return actors, world.check, finish

    assert explore(make, cutter(database)) > 1
