"""The rule, checked against a model of it: after any actions of members, the engine and the model grant the same rows.

A state machine drives engine sessions directly (no threads, no waiting), so that every answer is determined.
"""

import itertools
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, consumes, initialize, invariant, multiple, precondition, rule
from support import until
from support.state_machines import DatabaseMachine, run_in_database

from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import Request, Ticket

NEVER = threading.Event()


@dataclass
class Row:
    request: Request
    position: int
    member: int | None
    ticket: Ticket
    uid: str
    granted: bool = False


@dataclass
class Model:
    """The expected queue."""

    rows: list[Row] = field(default_factory=list)
    caps: dict[str, int] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)

    def free(self, request: Request, position: int | None = None) -> bool:
        """True if a request at that position (None: at the end) may proceed."""
        ahead = [
            row.request
            for row in self.rows
            if row.request.resource == request.resource
            and (position is None or row.position < position)
            and (request.access == "write" or row.request.access != request.access)
        ]
        limits = [demand.limit for demand in [*ahead, request] if demand.limit is not None]
        cap = self.cap(request.resource)
        if cap is not None:
            limits.append(cap)
        load = sum(demand.weight for demand in ahead) + request.weight
        return request.resource not in self.paused and (not limits or load <= min(limits))

    def cap(self, resource: str) -> int | None:
        """Return the cap of the resource, or of the longest pattern that matches."""
        matching = [name for name in self.caps if name.endswith("*") and resource.startswith(name[:-1])]
        return self.caps.get(resource, self.caps[max(matching, key=len)] if matching else None)

    @property
    def countless(self) -> bool:
        """True if a request relies on a limit of the server that does not exist."""
        return any(row.request.limit is None and self.cap(row.request.resource) is None for row in self.rows)

    def add(self, row: Row) -> None:
        row.granted = self.free(row.request)
        self.rows.append(row)


class Machine(DatabaseMachine):
    requests_ = st.builds(
        lambda resource, kind, limit, weight: (resource, kind, limit, min(weight, limit or weight)),
        st.sampled_from("ab"),
        st.sampled_from(["limit", "limit", "mutex", "read", "read", "stage:1", "stage:2"]),
        st.one_of(st.integers(1, 4), st.none()),  # None: the server's
        st.integers(1, 3),
    )
    members = Bundle("members")
    tickets = Bundle("tickets")

    @initialize()
    def begin(self):
        self.prefix = f"{self.name}-{next(self.examples)}"
        self.model = Model()
        self.asked = []  # all rows, also removed ones
        self.sessions = {}
        self.uids = itertools.count()
        self.operator = self.database.session(grace=0)

    def teardown(self):
        if not hasattr(self, "operator"):
            return
        for member, session in self.sessions.items():
            session.deregister_member(member)
            session.close()
        for resource in ("a", "b"):
            self.operator.set_resource(f"{self.prefix}-{resource}", "paused", 0)
        for full in list(self.model.caps):
            self.operator.set_resource(full, "cap", None)
        assert self.database.queue(self.prefix) == []
        self.operator.close()

    def request(self, words):
        resource, kind, limit, weight = words
        full = f"{self.prefix}-{resource}"
        if kind == "limit":
            return Request(full, limit=limit, weight=weight)
        return Request(full, "write" if kind == "mutex" else kind)

    # -- members

    @rule(target=members)
    @precondition(lambda self: len(self.sessions) < 4)
    def join(self):
        session = self.database.session(grace=0)
        member = session.register_member("host", 1, "model")
        self.sessions[member] = session
        return member

    @rule(member=consumes(members))
    def die(self, member):
        self.sessions.pop(member).close()
        positions = {row.position for row in self.model.rows if row.member == member}
        self.model.rows = [row for row in self.model.rows if row.member != member]

        def buried():
            self.operator.reap()
            return not positions & {row[0] for row in self.database.queue(self.prefix)}

        until(buried, "the dead removed")

    @rule(member=consumes(members))
    def leave(self, member):
        session = self.sessions.pop(member)
        session.deregister_member(member)
        session.close()
        self.model.rows = [row for row in self.model.rows if row.member != member]

    # -- requests

    @rule(target=tickets, member=members, words=requests_, trying=st.booleans(), again=st.booleans())
    def register(self, member, words, trying, again):
        return self.take(member, [self.request(words)], trying, again)

    @rule(target=tickets, member=members, one=requests_, other=requests_, trying=st.booleans(), again=st.booleans())
    def register_two(self, member, one, other, trying, again):
        requests = [self.request(("a", *one[1:])), self.request(("b", *other[1:]))]
        if one[0] == "b":
            requests.reverse()
        return self.take(member, requests, trying, again)

    def take(self, member, requests, trying, again):
        session, uid = self.sessions[member], f"{self.prefix}.{next(self.uids)}x"
        expected = all(self.model.free(request) for request in requests)
        if any(demand.limit is None and self.model.cap(demand.resource) is None for demand in requests):
            with pytest.raises(ConfigurationError, match=r"[Nn]o limit is set"):
                session.register(member, "same for all", "model", uid, requests, trying)
            return multiple()
        tickets = session.register(member, "same for all", "model", uid, requests, trying)
        if trying and not expected:
            assert tickets is None
            return multiple()
        assert len(tickets) == len(requests)
        if again:
            registered = session.register(member, "same for all", "model", uid, requests, trying)
            assert {ticket.position for ticket in registered} == {ticket.position for ticket in tickets}
        by_resource = {ticket.resource: ticket for ticket in tickets}
        for request in requests:
            ticket = by_resource[request.resource]
            row = Row(request, ticket.position, member, ticket, uid)
            assert all(
                other.position < ticket.position
                for other in self.model.rows
                if other.request.resource == ticket.resource
            )
            self.model.add(row)
            self.asked.append(row)
            assert ticket.granted == row.granted
        return multiple(*[row for row in self.model.rows if row.uid == uid])

    @rule(row=tickets, elsewhere=st.booleans())
    def ask(self, row, elsewhere):
        """Poll for a row on a random connection."""
        session = self.operator if elsewhere else self.sessions.get(row.member, self.operator)
        answer = session.wait(row.ticket, 0, NEVER)
        if row not in self.model.rows:
            assert answer is None
            return
        row.granted = row.granted or self.model.free(row.request, row.position)
        assert answer is row.granted

    @rule(member=members, seed=st.randoms(use_true_random=False))
    def look(self, member, seed):
        """Poll many rows in one call, removed ones among them: the answers equal those of `wait`."""
        self.asked = [row for row in self.asked if row.member in self.sessions]
        rows = [row for row in self.asked if row.member == member]
        rows = seed.sample(rows, seed.randint(0, len(rows)))
        answers = self.sessions[member].poll(member, [row.ticket for row in rows])
        for row in rows:
            if row not in self.model.rows:
                assert answers[row.position] is None
                continue
            row.granted = row.granted or self.model.free(row.request, row.position)
            assert answers.get(row.position) is (True if row.granted else None)
            assert (row.position in answers) is row.granted
        assert set(answers) <= {row.position for row in rows}

    @rule(row=consumes(tickets), member=members)
    def release(self, row, member):
        present = row in self.model.rows
        assert self.sessions[member].release(row.ticket, "released") is present
        assert self.sessions[member].release(row.ticket, "released") is False
        if present:
            self.model.rows.remove(row)

    @rule(row=consumes(tickets))
    def cancel(self, row):
        if row.member in self.sessions:
            cancelled = [entry for entry in self.model.rows if entry.uid == row.uid]
            assert self.sessions[row.member].cancel(row.member, row.uid, "cancelled") == len(cancelled)
            self.model.rows = [entry for entry in self.model.rows if entry.uid != row.uid]

    # -- operators

    @rule(row=tickets)
    def revoke(self, row):
        answer = self.operator.revoke(row.position, True)
        assert answer == (0 if row in self.model.rows else -1)
        if row in self.model.rows:
            self.model.rows.remove(row)

    @rule(resource=st.sampled_from(["a", "b", "*", "a*"]), cap=st.one_of(st.none(), st.integers(1, 4)))
    def cap(self, resource, cap):
        full = f"{self.prefix}-{resource}"
        before = dict(self.model.caps)
        self.model.caps.pop(full, None)
        if cap is not None:
            self.model.caps[full] = cap
        if self.model.countless:
            self.model.caps = before
            with pytest.raises(ConfigurationError, match="changed, not lifted"):
                self.operator.set_resource(full, "cap", cap)
        else:
            self.operator.set_resource(full, "cap", cap)

    @rule(resource=st.sampled_from("ab"), paused=st.booleans())
    def pause(self, resource, paused):
        full = f"{self.prefix}-{resource}"
        self.operator.set_resource(full, "paused", int(paused))
        self.model.paused.discard(full)
        if paused:
            self.model.paused.add(full)

    # -- invariants

    @invariant()
    def the_queue_is_the_models(self):
        for resource in ("a", "b"):
            full = f"{self.prefix}-{resource}"
            expected = [row for row in self.model.rows if row.request.resource == full]
            entries = self.operator.entries(full)
            inside = {shown.position for shown in entries if shown.state == "holds"}
            for row in expected:
                # A release may grant the rows that now fit.
                row.granted = row.granted or (row.position in inside and self.model.free(row.request, row.position))
            assert [(shown.position, shown.state) for shown in entries] == [
                (row.position, "holds" if row.granted else "waits") for row in expected
            ]

    @invariant()
    def nobody_is_inside_who_must_not_be(self):
        for full in {row.request.resource for row in self.model.rows}:
            inside = [row.request for row in self.model.rows if row.granted and row.request.resource == full]
            labels = {held.access for held in inside}
            assert len(labels) <= 1, "a writer beside readers, or two stages"
            if labels == {"write"}:
                limits = [held.limit for held in inside if held.limit is not None]
                assert not limits or sum(held.weight for held in inside) <= min(limits)


@pytest.mark.kept
@pytest.mark.timeout(600)
def test_the_engine_follows_the_rule(database, name):
    run_in_database(Machine, database, name, max_examples=25, stateful_step_count=30)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_engine_follows_the_rule_for_long(database, name):
    run_in_database(Machine, database, name, max_examples=2000, stateful_step_count=60, phases=list(Phase))
