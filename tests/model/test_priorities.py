"""Requests with priorities, checked against a model of them: a poll grants a waiter if it is the first of its priority
queue and the rule allows it, and never otherwise. So the order of polls does not matter, and no holder is overtaken.
"""

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from support.state_machines import DatabaseMachine, run_in_database

from sqlsem.engines.priorities import priority_queue
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import Request, Ticket

#: In milliseconds: so long that within an example only priorities decide, and between equal ones the order of requests.
AGEING_MS = 20_000_000


@dataclass
class Asked:
    request: Request
    uid: str
    number: int  # in the order of requests
    member: int
    place: Ticket | None = None  # while it waits
    held: Ticket | None = None

    @property
    def rank(self) -> tuple[int, int]:
        return (-self.request.priority, self.number)


@dataclass
class Model:
    """The expected state: the holders by number, with earlier plain requests among them, and the priority queue."""

    inside: list[Asked] = field(default_factory=list)
    line: list[Asked] = field(default_factory=list)
    paused: bool = False

    def is_next(self, waiter: Asked) -> bool:
        return all(waiter.rank <= other.rank for other in self.line)

    def lets_in(self, waiter: Asked) -> bool:
        """True if a poll grants it now."""
        ahead = [other.request for other in self.inside]
        return self.is_next(waiter) and not self.paused and waiter.request.fits(ahead, None)


class Machine(DatabaseMachine):
    kinds = st.sampled_from(
        [("write", 1, 1), ("write", 1, 1), ("read", 1, 1), ("write", 3, 1), ("write", 3, 2), ("write", None, 1)]
    )
    priorities = st.sampled_from([0, 0, 1, 5, 99])

    @initialize()
    def begin(self):
        self.resource = f"{self.name}-{next(self.examples)}"
        self.model = Model()
        self.numbers = itertools.count(1)
        self.fences = []
        self.sessions = [self.database.session(grace=60) for _ in range(2)]
        self.members = [session.register_member("host", 1, "model") for session in self.sessions]
        self.sessions[0].set_resource(self.resource, "ageing", AGEING_MS)
        self.sessions[0].set_resource(self.resource, "cap", 4)
        self.gone = []

    def teardown(self):
        if hasattr(self, "sessions"):
            for session, member in zip(self.sessions, self.members, strict=True):
                session.deregister_member(member)
            assert self.sessions[0].entries(self.resource) == []
            assert self.sessions[0].entries(priority_queue(self.resource)) == []
            for setting in ("ageing", "cap"):
                self.sessions[0].set_resource(self.resource, setting, None)
            self.sessions[0].set_resource(self.resource, "paused", 0)
            for session in self.sessions:
                session.close()

    def ask(self, caller, only_if_free=False):
        session, member = self.sessions[caller.member], self.members[caller.member]
        return session.acquire_by_priority(
            member, f"id {caller.uid}", "me", caller.uid, caller.request, only_if_free, caller.place
        )

    def let_in(self, caller, turn):
        assert turn.granted
        assert turn.ticket.resource == self.resource
        assert all(turn.ticket.position > fence for fence in self.fences), "fences grow"
        self.fences.append(turn.ticket.position)
        caller.held, caller.place = turn.ticket, None
        if caller in self.model.line:
            self.model.line.remove(caller)
        self.model.inside.append(caller)

    def new(self, kind, priority, member):
        access, limit, weight = kind
        number = next(self.numbers)
        request = Request(self.resource, access, limit, weight, priority=priority)
        return Asked(request, f"{self.resource}.{number}", number, member)

    @rule(kind=kinds, priority=priorities, member=st.integers(0, 1))
    def enter(self, kind, priority, member):
        caller = self.new(kind, priority, member)
        expected = self.model.lets_in(caller)
        turn = self.ask(caller)
        assert turn.granted == expected
        if turn.granted:
            self.let_in(caller, turn)
        else:
            assert turn.ticket.resource == priority_queue(self.resource)
            caller.place = turn.ticket
            self.model.line.append(caller)
            self.check_before(caller, turn)

    @rule(kind=kinds, priority=priorities, member=st.integers(0, 1))
    def try_(self, kind, priority, member):
        caller = self.new(kind, priority, member)
        expected = self.model.lets_in(caller)
        turn = self.ask(caller, only_if_free=True)
        assert turn.granted == expected
        if turn.granted:
            self.let_in(caller, turn)
        else:
            assert turn.ticket is None

    @precondition(lambda self: self.model.line)
    @rule(data=st.data())
    def look(self, data):
        caller = data.draw(st.sampled_from(self.model.line))
        expected = self.model.lets_in(caller)
        turn = self.ask(caller)
        assert turn.granted == expected
        if turn.granted:
            self.let_in(caller, turn)
        else:
            assert turn.ticket.position == caller.place.position
            self.check_before(caller, turn)

    def check_before(self, caller, turn):
        """Check that the answer names the entry ahead: the waiter need not poll before that entry has left."""
        ahead = [other for other in self.model.line if other.rank < caller.rank]
        assert turn.ahead == len(ahead)
        last = max(ahead, key=lambda other: other.rank, default=None)
        assert turn.before == (None if last is None else last.place.position)

    @precondition(lambda self: self.model.line or self.model.inside)
    @rule(data=st.data())
    def repeat_a_lost_first_call(self, data):
        caller = data.draw(st.sampled_from(self.model.line + self.model.inside))
        expected = caller.held is not None or self.model.lets_in(caller)
        place, caller.place = caller.place, None
        turn = self.ask(caller)
        caller.place = place
        assert turn.granted == expected
        if caller.held is not None:
            assert turn.ticket.position == caller.held.position
        elif turn.granted:
            self.let_in(caller, turn)
        else:
            assert turn.ticket.position == place.position

    @precondition(lambda self: self.model.inside)
    @rule(data=st.data())
    def release(self, data):
        caller = data.draw(st.sampled_from(self.model.inside))
        assert self.sessions[caller.member].release(caller.held, "released")
        self.model.inside.remove(caller)

    @precondition(lambda self: self.model.line)
    @rule(data=st.data())
    def give_up(self, data):
        caller = data.draw(st.sampled_from(self.model.line))
        assert self.sessions[caller.member].cancel(self.members[caller.member], caller.uid, "cancelled") == 1
        self.model.line.remove(caller)
        turn = self.ask(caller)
        assert turn.ticket is None
        assert not turn.granted

    @rule(member=st.integers(0, 1))
    def a_client_that_knows_of_no_priorities(self, member):
        request = Request(self.resource)
        for only_if_free in (True, False):
            with pytest.raises(ConfigurationError, match="granted by priority"):
                self.sessions[member].register(self.members[member], "old", "me", "old", [request], only_if_free)

    @rule(paused=st.booleans())
    def pause(self, paused):
        self.sessions[0].set_resource(self.resource, "paused", int(paused))
        self.model.paused = paused

    @invariant()
    def what_is_there_is_what_the_model_says(self):
        entries = self.sessions[0].entries(self.resource)
        assert [entry.position for entry in entries] == [caller.held.position for caller in self.model.inside]
        assert all(entry.granted_at is not None for entry in entries), "a row on the resource is a holder's"
        places = self.sessions[0].entries(priority_queue(self.resource))
        assert {place.position for place in places} == {caller.place.position for caller in self.model.line}


@pytest.mark.engines("sqlite", "postgresql", "mssql", "mysql")
def test_priority_queue_follows_the_model(database, name):
    count, steps = {"sqlite": (40, 30), "postgresql": (15, 30), "mysql": (15, 30), "mssql": (2, 12)}[database.engine]
    same_each_time = {"derandomize": True, "phases": [Phase.generate]}
    run_in_database(Machine, database, name, max_examples=count, stateful_step_count=steps, **same_each_time)
