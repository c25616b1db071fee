"""Requests that wait by priority. See the comments of PostgreSQL's priorities.sql."""

from __future__ import annotations

from typing import Any

from sqlsem.engines.priorities import (
    PRIORITY_LEVELS,
    PriorityAnswer,
    priorities_not_set,
    priority_entry,
    priority_queue,
)
from sqlsem.engines.statements.admission import LAST
from sqlsem.engines.statements.locks import LockStatements, columns
from sqlsem.insight.patterns import no_limit_set
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import Request, Ticket


class PriorityStatements(LockStatements):
    """Priority queues. The file's write lock is the gate of all."""

    def acquire_by_priority(
        self,
        member_id: int,
        requesting_id: str,
        owner: str,
        uid: str,
        request: Request,
        only_if_free: bool,
        place: Ticket | None,
    ) -> PriorityAnswer:
        # First read without the gate: the removal of a dead owner is a transaction of its own.
        own = self._own_entry(request, member_id, uid)
        before = self._before(request, own)
        is_foreign = before is not None and before["member_id"] != member_id
        if is_foreign and self.check_owner(
            priority_queue(request.resource), before["queue_position"], before["member_id"]
        ):
            before = self._before(request, own)
        may_try = before is None and self.admission(request, LAST).allowed
        if before is None and not may_try:
            may_try = self.check_blockers(request, LAST, member_id)
        if place is not None and own is not None and not may_try:
            return self._waiting_answer(own["queue_position"], requesting_id, request, before)
        who = {"requesting_id": requesting_id, "member": member_id, "owner": owner}
        with self.forks_blocked, self.transaction():
            self.renew_lease(member_id)
            for row in self.rows("find", {"member": member_id, "uid": uid}):
                if row["resource_id"] == request.resource:
                    if not row["granted"]:  # the row was revoked since
                        return PriorityAnswer(None, False)
                    return PriorityAnswer(
                        Ticket(request.resource, row["queue_position"], row["requesting_id"], True), True
                    )
            own = self._own_entry(request, member_id, uid)
            if own is None and place is not None:
                return PriorityAnswer(None, False)
            state = self.row("resource_state", {"resource": request.resource, "member": member_id})
            if state["ageing"] is None:
                raise priorities_not_set(request.resource)
            if request.limit is None and state["cap"] is None:
                raise ConfigurationError(no_limit_set(request.resource), resource=request.resource)
            before = self._before(request, own)
            if before is None and self.admission(request, LAST).allowed:
                position = self.insert({**who, **columns(request), "uid": uid, "granted": True})
                if own is not None:
                    self.remove(priority_queue(request.resource), own["queue_position"], requesting_id, "released")
                return PriorityAnswer(Ticket(request.resource, position, requesting_id, True), True)
            if only_if_free:
                return PriorityAnswer(None, False)
            if own is not None:
                return self._waiting_answer(own["queue_position"], requesting_id, request, before)
            values = {**who, **columns(priority_entry(request)), "uid": f"{uid}.1", "granted": True}
            position = self.insert(values)
            return self._waiting_answer(position, requesting_id, request, before)

    @staticmethod
    def _waiting_answer(position: int, requesting_id: str, request: Request, before: Any) -> PriorityAnswer:
        ticket = Ticket(priority_queue(request.resource), position, requesting_id, True)
        return PriorityAnswer(ticket, False, before and before["queue_position"], before["ahead"] if before else 0)

    def _own_entry(self, request: Request, member_id: int, uid: str) -> Any:
        return self.row("own_place", {"line": priority_queue(request.resource), "member": member_id, "uid": uid})

    def _before(self, request: Request, own: Any) -> Any:
        """Return the priority entry right before this request, if any. Raises `ConfigurationError` if no priorities are
        set.
        """
        ageing = self.row("ageing", (request.resource,))
        if ageing is None:
            raise priorities_not_set(request.resource)
        values = {
            "line": priority_queue(request.resource),
            "places": PRIORITY_LEVELS,
            "ageing": ageing["ageing"],
            "priority": request.priority,
            "position": own and own["queue_position"],
            "at": own and own["requested_at"],
        }
        return self.row("preceding_request", values)
