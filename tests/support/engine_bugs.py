"""Bugs in SQLite's engine, which the simulations in memory and on a file have to find."""

import pytest

from sqlsem.engines.sqlite.session import SqliteSession
from sqlsem.engines.statements import locks
from sqlsem.engines.statements.admission import LAST, Admission
from sqlsem.engines.statements.handovers import HandoverStatements
from sqlsem.engines.statements.locks import LockStatements
from sqlsem.engines.statements.members import MemberStatements
from sqlsem.values.locks import Ticket


def no_gate(patch):
    """Read the queue before the transaction of the registration."""
    real = LockStatements.register

    def register(self, member_id, requesting_id, owner, uid, requests, only_if_free):
        turns = {request.resource: self.admission(request, LAST).allowed for request in requests}
        self._fibers.step("has looked")
        with pytest.MonkeyPatch.context() as patching:
            patching.setattr(
                self, "admission", lambda request, position: Admission(turns[request.resource], False, None)
            )
            return real(self, member_id, requesting_id, owner, uid, requests, only_if_free)

    patch.setattr(LockStatements, "register", register)
    run = SqliteSession.run

    def slow(self, name, parameters=()):
        if name == "insert_first":  # as if there were other rows
            return type("Nothing", (), {"rowcount": 0, "lastrowid": None})
        return run(self, name, parameters)

    patch.setattr(SqliteSession, "run", slow)
    rows = SqliteSession.row
    patch.setattr(
        SqliteSession,
        "row",
        lambda self, name, parameters=(): (
            {**dict(rows(self, name, parameters)), "queued": True}
            if name == "resource_state"
            else rows(self, name, parameters)
        ),
    )


def barging(patch):
    """Overtake waiters."""
    real = SqliteSession.row

    def row(self, name, parameters=()):
        if name != "fits":
            return real(self, name, parameters)
        text = self.queries["fits"].replace(
            "queue_position < :position AND", "queue_position < :position AND granted_at IS NOT NULL AND"
        )
        return self.rows_of_text(text, parameters)[0]

    patch.setattr(SqliteSession, "row", row)


def not_alone(patch):
    """Let a reader become the writer beside others."""
    real = SqliteSession.rows
    patch.setattr(
        SqliteSession,
        "rows",
        lambda self, name, parameters=(): [] if name == "others_inside" else real(self, name, parameters),
    )


def dead_without_a_look(patch):
    """Treat the members ahead of the request as dead."""

    def check_owner(self, resource, position, member_id):
        with self.forks_blocked, self.transaction():
            return self.remove(resource, position, None, "reaped")

    patch.setattr(MemberStatements, "check_owner", check_owner)


def token_good_twice(patch):
    """Let every holder of the token adopt it."""
    real = HandoverStatements.adopt
    adopted = {}

    def adopt(self, member_id, requesting_id, owner, uid, token):
        if (self._server, token) not in adopted:
            adopted[self._server, token] = real(self, member_id, requesting_id, owner, uid, token)
        return [
            (request, Ticket(ticket.resource, ticket.position, requesting_id, True))
            for request, ticket in adopted[self._server, token]
        ]

    patch.setattr(HandoverStatements, "adopt", adopt)


def weights_dropped(patch):
    """Count each weight as 1."""
    real = locks.columns
    patch.setattr(locks, "columns", lambda request: {**real(request), "weight": 1})
