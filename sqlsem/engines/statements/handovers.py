"""Hand-over of locks from one process to another. See the comments of PostgreSQL's handovers.sql."""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.engines.answers import OTHER_LOGIN, TOO_LATE, UNKNOWN, USED, hash_of, not_adopted
from sqlsem.engines.statements.conversions import ConversionStatements
from sqlsem.values.errors import SqlsemError
from sqlsem.values.locks import UPGRADE, Request, Ticket


class HandoverStatements(ConversionStatements):
    """Rows in transit. Logins are users of the system. (A user that can write the file could change any row anyway.)"""

    def hand_over(self, member_id: int, tickets: Sequence[Ticket], token: str, ttl: float, to: str | None) -> bool:
        me, digest, ttl_ms = self.login(), hash_of(token), int(ttl * 1000)
        with self.forks_blocked, self.transaction():
            known = self.row("handover", (digest,))
            if known is not None:
                return bool(known["given_by"] == me)
            self.renew_lease(member_id)
            for ticket in tickets:
                key = {"resource": ticket.resource, "position": ticket.position}
                row = self.row("granted_row", {**key, "requesting_id": ticket.requesting_id})
                if row is None or row["member_id"] != member_id or row["access"] == UPGRADE:
                    return False
            self.run("forget_handovers")
            lease_ms = ttl_ms + int(self.clock_margin * 1000)
            transit = self.run("enrol_transit", {"member": member_id, "to": to or me, "ttl": lease_ms}).lastrowid
            for ticket in tickets:
                key = {"resource": ticket.resource, "position": ticket.position}
                owner = self.row("row", key)["owner"]
                self.run("keep_one", {**key, "requesting_id": None, "outcome": "handed_over", "login": None})
                giver = f"handed over by {owner or ticket.requesting_id}"[:255]
                moved = {"requesting_id": f"in transit {transit}", "uid": f"in transit {transit}.{ticket.position}"}
                self.run("move_row", {**key, **moved, "member": transit, "owner": giver, "anew": True})
            first = min(tickets, key=lambda ticket: ticket.position)
            values = {"hash": digest, "member": transit, "count": len(tickets), "resource": first.resource}
            self.run("add_handover", {**values, "position": first.position, "by": me, "to": to or me, "ttl": ttl_ms})
        return True

    def adopt(
        self, member_id: int, requesting_id: str, owner: str, uid: str, token: str
    ) -> list[tuple[Request, Ticket]]:
        me, digest = self.login(), hash_of(token)
        with self.forks_blocked, self.transaction():
            given = self.row("handover", (digest,))
            if given is None:
                raise not_adopted(UNKNOWN, self.engine.label, None, None, None, None)

            def refusal(code: int, who: str | None = None) -> SqlsemError:
                where, resource, position = self.engine.label, given["resource_id"], given["queue_position"]
                return not_adopted(code, where, who, given["seconds"], resource, position)

            if me not in (given["given_to"], given["given_by"]):
                raise refusal(OTHER_LOGIN, given["given_to"])
            if given["adopted"] and (given["adopted_by"], given["adopted_uid"]) != (member_id, uid):
                raise refusal(USED, given["adopter"])
            self.renew_lease(member_id)
            if not given["adopted"]:
                transit = self.row("member", (given["member_id"],))
                rows = self.rows("rows_in_transit", (given["member_id"],))
                if transit is None or transit["lease_until"] < transit["now"] or len(rows) != given["row_count"]:
                    raise refusal(TOO_LATE)
                self.run("deregister_member", (given["member_id"],))
                mine = {"member": member_id, "requesting_id": requesting_id, "owner": owner, "anew": False}
                for number, row in enumerate(rows, 1):
                    key = {"resource": row["resource"], "position": row["position"]}
                    self.run("move_row", {**key, **mine, "uid": uid if len(rows) == 1 else f"{uid}.{number}"})
                self.run("note_adoption", {"member": member_id, "uid": uid, "hash": digest})
            rows = self.rows("adopted_rows", {"member": member_id, "uid": uid})
        return [
            (
                Request(row["resource"], row["access"], row["limit"], row["weight"], row["note"]),
                Ticket(row["resource"], row["position"], requesting_id, True),
            )
            for row in rows
        ]
