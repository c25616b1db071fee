"""A database in memory that can go wrong: the queue of `sqlsem.engines.memory`, with members that can die.

`sqlsem.testing.store` has its contents, this module its sessions. Each call is one transaction. Other actors may run
before the call, and between its effect and its answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from sqlsem.engines.base import Disconnected, Engine, Options
from sqlsem.engines.memory import MemorySession
from sqlsem.insight.audit import Finding, audit
from sqlsem.testing.calling import Calling
from sqlsem.testing.conversions import Conversions
from sqlsem.testing.faults import Trouble
from sqlsem.testing.handovers import Handovers
from sqlsem.testing.store import Member, Tables
from sqlsem.values.locks import Heartbeat, Request, Ticket
from sqlsem.values.rates import RateAnswer, RateDemand, RateRequest

__all__ = ["Server", "ServerEngine", "ServerSession"]


class Server(Tables):
    """The server: the interface that `World` uses, as does `sqlsem.testing.real.RealServer`."""

    def reap(self) -> None:
        """Remove dead members."""
        for resource in list(self.queues):
            self.reap_dead_members(resource, 0)

    def reap_all(self) -> None:
        """Remove dead members, as an operator does."""
        self.reap()
        for number in list(self.member_rows):
            self.check_if_dead(number, 0)

    def set_clock(self, seconds: float) -> None:
        """Set the clock. Raises `Trouble` if the change would count as time that has passed."""
        if seconds > 0 and any(
            member.lease is not None or not member.beacon.lives or self.revoked for member in self.member_rows.values()
        ):
            raise Trouble("it would count as time that has passed")
        self.skew += seconds

    def stall(self, seconds: float) -> None:
        """Stop the server for so many seconds."""
        self.stalled_until = self.fibers.now + seconds

    def moves(self) -> bool:
        """Return False: no fiber goes on without an event of the simulation."""
        return False

    def engine(self, options: Options, owner: str) -> ServerEngine:
        """Return the engine of one process."""
        return ServerEngine(self, options, owner)

    def notice(self) -> None:
        """Do nothing: the callbacks have reported everything during the step."""

    def resources(self) -> list[str]:
        """Return the resources with rows."""
        return sorted(self.queues)

    def findings(self) -> Iterable[Finding]:
        """Return the findings of the audit of the history."""
        return audit(reversed(self.past)).findings

    def close(self) -> None:
        """End the simulation."""


class ServerSession(Calling, Handovers, Conversions, MemorySession):
    """A session of an actor. ``lives``: True as long as the server has it; the client may have lost it before."""

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
        """Wake the fiber that is in a call, where `require_connection` then raises."""
        self.wake_caller()
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
        """Begin a call: other actors may run before its effect."""
        self.require_connection()
        self._step(what)

    def answer(self, what: str) -> None:
        """End a call: other actors may run before the client has its answer."""
        self._step(what)

    def _step(self, what: str) -> None:
        self.yield_to_others(what)
        self.require_connection()

    def as_beacon(self) -> ServerSession:
        return self

    def require_member(self, member_id: int) -> None:
        if not self._server.touch_member(member_id):
            self._interrupted = True
            raise Disconnected(f"Member {member_id} was given up")

    # -- membership -------------------------------------------------------------------------------------------------

    def register_member(self, host: str, pid: int, program: str) -> int:
        self.ask("register member")
        server, options = self._server, self.options
        number = server.next_number()
        member = Member(number, self.owner, options.grace, options.lease, self)
        server.member_rows[number] = member
        server.members[number] = (self.owner, pid, program)
        server.record_heartbeat(member)
        server.mark_durable()
        self.answer(f"register member: {number}")
        return number

    def reattach_member(self, member_id: int) -> bool:
        self.ask("reattach member")
        server = self._server
        member = server.member_rows.get(member_id)
        if member is not None:
            # (If the server still has the old session, that no longer counts.)
            member.beacon = self
            server.record_heartbeat(member)
        self.answer(f"reattach member: {'known' if member else 'unknown'}")
        return member is not None

    def heartbeat(self, member_id: int) -> Heartbeat:
        self.ask("heartbeat")
        server = self._server
        member = server.member_rows.get(member_id)
        if member is not None:
            server.record_heartbeat(member)
        positions = frozenset(position for position, (owner, _) in server.calls.items() if owner == member_id)
        heartbeat = Heartbeat(member is not None, positions, positions & frozenset(server.revoked))
        self.answer("heartbeat" if member else "heartbeat: unknown")
        return heartbeat

    def deregister_member(self, member_id: int) -> None:
        self.ask("deregister member")
        if self._server.member_rows.pop(member_id, None) is not None:
            super().deregister_member(member_id)
            self._server.mark_durable()
        self.answer("deregister member")

    # -- requests ---------------------------------------------------------------------------------------------------

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        what = "register " + ", ".join(request.describe() for request in requests)
        self.ask(what)
        self.require_member(member_id)
        if only_if_free:
            for request in requests:
                if not self._server.may_enter(request):
                    self._server.reap_dead_members(request.resource, member_id)
        tickets = super().register(member_id, requesting_id, owner, uid, requests, only_if_free)
        result = "not free" if tickets is None else ", ".join(_described(ticket) for ticket in tickets)
        self.answer(f"{what}: {result}")
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
                    remaining = deadline - fibers.now
                    if remaining > 0:
                        wakeup.wait(min(remaining, server.seconds_until_next_check(ticket.resource)))
                        continue
                break
        finally:
            server.waiting.discard(wakeup)
        self.answer(f"wait {ticket.position}: {_words(state)}")
        return state

    def poll(self, member_id: int, tickets: Sequence[Ticket]) -> dict[int, bool | None]:
        self.ask("poll")
        states = {ticket.position: self._poll(ticket) for ticket in tickets}
        for ticket in tickets:
            if states[ticket.position] is False and self._server.reap_dead_members(ticket.resource, member_id):
                states[ticket.position] = self._poll(ticket)
        answers: dict[int, bool | None] = {position: state for position, state in states.items() if state is not False}
        self.answer(f"poll: {answers}")
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
