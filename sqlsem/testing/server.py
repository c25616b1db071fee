"""A database in memory that can go wrong: the queue of `sqlsem.engines.memory`, with members that can die.

Its contents are in `sqlsem.testing.store`; its sessions are here. Each call is one transaction; between its effect and
its answer other actors run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from sqlsem.engines.base import Disconnected, Engine, Options
from sqlsem.engines.memory import MemorySession
from sqlsem.insight.audit import Finding, audit
from sqlsem.model import Heartbeat, Request, Ticket
from sqlsem.model_rates import RateAnswer, RateDemand, RateRequest
from sqlsem.testing.calling import Calling
from sqlsem.testing.conversions import Conversions
from sqlsem.testing.faults import Trouble
from sqlsem.testing.handovers import Handovers
from sqlsem.testing.store import Member, Tables

__all__ = ["Server", "ServerEngine", "ServerSession"]


class Server(Tables):
    """The server, as a simulation sees it."""

    def reap(self) -> None:
        """Remove dead members."""
        for resource in list(self.queues):
            self.reap_dead_members(resource, 0)

    def reap_all(self) -> None:
        """Remove dead members, as an operator does."""
        self.reap()
        for number in list(self.people):
            self.check_if_dead(number, 0)

    def set_clock(self, seconds: float) -> None:
        """Set the clock. Raises `Trouble` if the change would count as time that has passed."""
        if seconds > 0 and any(
            person.lease is not None or not person.beacon.lives or self.revoked for person in self.people.values()
        ):
            raise Trouble("it would count as time that has passed")
        self.skew += seconds

    def stall(self, seconds: float) -> None:
        """Stop the server for so many seconds."""
        self.stalled_until = self.fibers.now + seconds

    def moves(self) -> bool:
        """Return False: no fiber goes on without an event of ours."""
        return False

    def engine(self, options: Options, owner: str) -> ServerEngine:
        """Return the engine of one process."""
        return ServerEngine(self, options, owner)

    def notice(self) -> None:
        """Do nothing after a step: the callbacks have reported everything already."""

    def resources(self) -> list[str]:
        """Return the resources with rows."""
        return sorted(self.queues)

    def findings(self) -> Iterable[Finding]:
        """Return the findings of the audit of the history."""
        return audit(reversed(self.past)).findings

    def close(self) -> None:
        """End the simulation."""


class ServerSession(Calling, Handovers, Conversions, MemorySession):
    """A connection. ``lives``: the server has the session; the client may have lost it before."""

    _server: Server

    def __init__(self, server: Server, options: Options, owner: str) -> None:
        super().__init__(server, options)
        self._server = server
        self._fibers = server.fibers
        self.owner = owner
        self.lives = True
        self.cut = False
        server.sessions.append(self)

    def end(self) -> None:
        """End the session in the server, or let the server notice that the process is gone."""
        if self.lives:
            self.lives = False
            self.cut = True
            self._server.sessions.remove(self)
            self._fail()

    def drop(self) -> None:
        """Let the server notice that the connection is broken."""
        self.end()

    def lose(self) -> None:
        """Break the connection; the server does not notice yet."""
        self.cut = True
        self._fail()

    def _fail(self) -> None:
        """Raise in the fiber that is in a call."""
        self.rouse()
        self._server.wake()

    def close(self) -> None:
        if self._fibers.ended:
            return
        self._interrupted = True
        if not self.cut:
            self.end()

    def interrupt(self) -> None:
        self.close()
        self._fail()

    @property
    def usable(self) -> bool:
        return not (self._interrupted or self.cut)

    def require_connection(self) -> None:
        if self._interrupted or self.cut:
            raise Disconnected("The connection is broken")

    def ask(self, what: str) -> None:
        """Begin a call."""
        self.require_connection()
        self._step(what)

    def answer(self, what: str) -> None:
        """End a call; its answer is under way."""
        self._step(what)

    def _step(self, what: str) -> None:
        self.let_others_in(what)
        self.require_connection()

    def as_beacon(self) -> ServerSession:
        return self

    def give_up(self, member_id: int) -> None:
        if not self._server.touch_member(member_id):
            self._interrupted = True
            raise Disconnected(f"Member {member_id} was given up")

    # -- membership -------------------------------------------------------------------------------------------------

    def register_member(self, host: str, pid: int, program: str) -> int:
        self.ask("register member")
        server, options = self._server, self.options
        number = server.next_number()
        member = Member(number, self.owner, options.grace, options.lease, self)
        server.people[number] = member
        server.members[number] = (self.owner, pid, program)
        server.record_heartbeat(member)
        server.durable()
        self.answer(f"register member: {number}")
        return number

    def reattach_member(self, member_id: int) -> bool:
        self.ask("reattach member")
        server = self._server
        member = server.people.get(member_id)
        if member is not None:
            # (The old session, if it lingers, no longer counts.)
            member.beacon = self
            server.record_heartbeat(member)
        self.answer(f"reattach member: {'known' if member else 'unknown'}")
        return member is not None

    def heartbeat(self, member_id: int) -> Heartbeat:
        self.ask("heartbeat")
        server = self._server
        member = server.people.get(member_id)
        if member is not None:
            server.record_heartbeat(member)
        mine = frozenset(position for position, (owner, _) in server.calls.items() if owner == member_id)
        pulse = Heartbeat(member is not None, mine, mine & frozenset(server.revoked))
        self.answer("heartbeat" if member else "heartbeat: unknown")
        return pulse

    def deregister_member(self, member_id: int) -> None:
        self.ask("deregister member")
        if self._server.people.pop(member_id, None) is not None:
            super().deregister_member(member_id)
            self._server.durable()
        self.answer("deregister member")

    # -- requests ---------------------------------------------------------------------------------------------------

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        what = "register " + ", ".join(request.describe() for request in requests)
        self.ask(what)
        self.give_up(member_id)
        if only_if_free:
            for request in requests:
                if not self._server.may_enter(request):
                    self._server.reap_dead_members(request.resource, member_id)
        tickets = super().register(member_id, requesting_id, owner, uid, requests, only_if_free)
        came = "not free" if tickets is None else ", ".join(_described(ticket) for ticket in tickets)
        self.answer(f"{what}: {came}")
        return tickets

    def release(self, ticket: Ticket, outcome: str) -> bool:
        self.ask(f"release {ticket.position}")
        released = super().release(ticket, outcome)
        self.answer(f"release {ticket.position}: {'done' if released else 'gone'}")
        return released

    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        self.ask("cancel")
        number = super().cancel(member_id, uid, outcome)
        self.answer(f"cancel: {number}")
        return number

    # -- rates ------------------------------------------------------------------------------------------------------

    def take_rate(
        self, request: RateRequest, ticket: Ticket | None, ahead_ms: int = 0, more: Sequence[RateDemand] = ()
    ) -> RateAnswer:
        what = f"take_rate {request.name}"
        self.ask(what)
        answer = super().take_rate(request, ticket, ahead_ms, more)
        self.answer(f"{what}: {answer.status.value}")
        return answer

    def adjust_rate(self, resource: str, taken_ms: int, more: int) -> None:
        self.ask(f"adjust_rate {resource} {more}")
        super().adjust_rate(resource, taken_ms, more)
        self.answer(f"adjust_rate {resource}: done")

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _poll(self, ticket: Ticket) -> bool | None:
        """Grant a row as soon as it may be; return True if it is granted, None if it is gone."""
        server = self._server
        row = server.row(ticket)
        if row is None or row.position in server.revoked:
            return None
        assert row.member_id is not None
        request = Request(row.resource, row.access, row.limit, row.weight)
        if row.granted_at is None and not server.may_enter(request, row.position):
            return False
        if not server.touch_member(row.member_id):
            return None
        return server.grant(row)

    def wait(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        fibers, server = self._fibers, self._server
        deadline = fibers.now + timeout
        self.ask(f"wait {ticket.position}")
        server.waiting.add(wakeup)
        try:
            while True:
                wakeup.clear()  # before the check, so that later changes are seen
                self.require_connection()
                state = self._poll(ticket)
                if state is False:
                    row = server.row(ticket)
                    assert row is not None
                    if server.reap_dead_members(ticket.resource, row.member_id or 0):
                        continue
                    left = deadline - fibers.now
                    if left > 0:
                        wakeup.wait(min(left, server.next_test(ticket.resource)))
                        continue
                break
        finally:
            server.waiting.discard(wakeup)
        self.answer(f"wait {ticket.position}: {_words(state)}")
        return state

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        self.ask("look")
        states = {ticket.position: self._poll(ticket) for ticket in tickets}
        for ticket in tickets:
            if states[ticket.position] is False and self._server.reap_dead_members(ticket.resource, member_id):
                states[ticket.position] = self._poll(ticket)
        answers: dict[int, bool | None] = {position: state for position, state in states.items() if state is not False}
        self.answer(f"look: {answers}")
        return answers


class ServerEngine(Engine):
    """The engine of one process."""

    name = "simulated"
    session_class = ServerSession
    setup_timeout = None

    def __init__(self, server: Server, options: Options, owner: str) -> None:
        super().__init__("simulated://", options)
        self._server = server
        self._owner = owner

    @property
    def label(self) -> str:
        return "the simulated database"

    def open_session(self, purpose: str) -> ServerSession:
        server = self._server
        server.fibers.step(f"connect to {purpose}")
        if server.fibers.now < server.down_until:
            raise Disconnected("The server is down")
        return ServerSession(server, self.options, self._owner)


def _described(ticket: Ticket) -> str:
    return f"{ticket.position} {'granted' if ticket.granted else 'waits'}"


def _words(state: bool | None) -> str:
    return "gone" if state is None else "granted" if state else "not yet"
