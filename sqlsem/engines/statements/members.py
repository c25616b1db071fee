"""Members: registration, beacons and leases, and the removal of dead members."""

from __future__ import annotations

import os
import socket
from typing import Any

from sqlsem.engines.base import Disconnected
from sqlsem.engines.statements.session import StatementSession
from sqlsem.util.process import program_name
from sqlsem.values.locks import Heartbeat

#: A lease is fresh for this share of the time that its member relies on; a fresh lease is not renewed. (The member
#: takes it into account: see `sqlsem.client.connection.membership`.)
FRESH = 1 / 8


class MemberStatements(StatementSession):
    """The members of one database. All capabilities are based on this class."""

    def register_member(self, host: str, pid: int, program: str) -> int:
        lease = self.options.lease
        values = {
            "beacon": self.create_beacon(),
            "host": host,
            "pid": pid,
            "program": program,
            "login": self.login(),
            "grace": int(self.options.grace * 1000),
            "lease": None if lease is None else int((lease + self.clock_margin) * 1000),
        }
        with self.forks_blocked, self.transaction():
            number = self.run("register_member", values).lastrowid
            self.follow_member()
        assert number is not None
        self.member_id = number
        return number

    def reattach_member(self, member_id: int) -> bool:
        beacon = self.create_beacon()
        self.member_id = member_id
        with self.forks_blocked, self.transaction():
            exists = self.run("reattach_member", {"beacon": beacon, "member": member_id}).rowcount == 1
            # (In another database the number may be that of another member, and this member has no rows.)
            is_same = self.follow_member()
        return exists and is_same

    def heartbeat(self, member_id: int) -> Heartbeat:
        if not self.keep_beacon(member_id):
            return Heartbeat(False)
        member = self.row("member", (member_id,))
        if member is None:
            return Heartbeat(False)
        is_written = self.writes_heartbeats or member["lease_until"] is not None or member["missing_since"] is not None
        if is_written and not self.renew_alone(member_id):
            return Heartbeat(False)
        self.write_back(at_once=True)
        rows = self.rows("positions", (member_id,))
        return Heartbeat(
            True,
            frozenset(row["queue_position"] for row in rows),
            frozenset(row["queue_position"] for row in rows if row["revoked"]),
        )

    def renew_alone(self, member_id: int) -> bool:
        """Renew the lease in a transaction of its own; return False if the member was removed."""
        with self.forks_blocked, self.transaction():
            return self.run("renew", (member_id,)).rowcount == 1

    def deregister_member(self, member_id: int) -> None:
        with self.forks_blocked, self.transaction():
            self.end_all_rows(member_id, "released")
            self.run("deregister_member", (member_id,))
        self.remove_beacon()

    def require_member(self, member_id: int) -> None:
        """Raise `Disconnected` if the member was removed."""
        if self.row("member", (member_id,)) is None:
            raise self.given_up_error()

    def given_up_error(self) -> Disconnected:
        """Return the error for a call of a member that was removed."""
        # Any process may remove the rows of a missing member, so this member must not rely on them. The owner of this
        # session registers as a new member.
        self.given_up = True
        return Disconnected(f"{self.engine.label} has given this process up while it was out of reach")

    def renew_lease(self, member_id: int, *, known: bool = False) -> None:
        """Renew the lease, in the transaction that grants, claims or starts something (see `LockSession`). Raises
        `Disconnected` if the member was removed. ``known``: the caller's next statement checks that the member exists.
        (A beacon needs no renewal.)
        """
        if self.options.lease is None:
            self.touch_beacon()
            if known:
                return
        elif self.run("renew_old", {"member": member_id, "fresh": self.options.lease * FRESH}).rowcount == 1:
            return
        self.require_member(member_id)

    def note_operation(self, action: str, **what: Any) -> None:
        """Record an operator's action, in the current transaction."""
        operator = {"login": self.login(), "host": socket.gethostname(), "pid": os.getpid(), "program": program_name()}
        defaults = dict.fromkeys(("resource", "position", "queue", "task", "old", "new"))
        self.run("note_operation", {**operator, **defaults, "action": action, **what})

    def remove(self, resource: str, position: int, requesting_id: str | None, outcome: str) -> bool:
        """Move one row to the history; return False if it was removed before."""
        values = {"resource": resource, "position": position, "requesting_id": requesting_id}
        login = self.login() if outcome == "reaped" else None  # the login that found it dead
        self.run("keep_one", {**values, "outcome": outcome, "login": login})
        return self.run("delete_one", values).rowcount == 1

    def end_all_rows(self, member_id: int, outcome: str, seen: float | None = None) -> int:
        """Move all rows of a member to the history. Call this before the member itself is removed."""
        self.run("keep_all", {"member": member_id, "outcome": outcome, "login": self.login(), "seen": seen})
        return self.run("delete_all", {"member": member_id}).rowcount

    def check_owner(self, resource: str, position: int, member_id: int | None) -> bool:
        """Check the owner of one row; return True if rows were removed."""
        key = {"resource": resource, "position": position}
        if member_id is None:
            stale = self.row("stale", key)
            if stale is None or not stale["stale"]:
                return False
            with self.forks_blocked, self.transaction():
                return self.remove(resource, position, None, "reaped")
        member = self.row("member", (member_id,))
        if member is None:
            with self.forks_blocked, self.transaction():
                return self.end_all_rows(member_id, "reaped") > 0
        row = self.row("row", key)
        revoked_at = None if row is None else row["revoked_at"]
        if revoked_at is not None and revoked_at + member["grace_ms"] / 1000 + self.clock_margin <= member["now"]:
            with self.forks_blocked, self.transaction():
                return self.remove(resource, position, None, "revoked")
        return self.check_member(member_id)

    def check_member(self, member_id: int) -> bool:
        """Check whether a member is alive; return True if it was dead and removed, with its rows."""
        member = self.row("member", (member_id,))
        if member is None:
            return False
        key = {"member": member_id, "beacon": member["beacon"]}
        with self.beacons.probe(member["beacon"]) as probe:
            dead = False
            if member["lease_until"] is None:
                if probe.held:
                    return False
                dead = probe.held is False
                if not dead and member["missing_since"] is None:
                    seen = max(member["heartbeat_at"], probe.seen or 0.0) if self.writes_heartbeats else None
                    with self.forks_blocked, self.transaction():
                        self.run("miss", {**key, "seen": seen})
            elif member["lease_until"] >= member["now"]:
                return False
            with self.forks_blocked, self.transaction():
                if self.row("given_up", {**key, "dead": dead}) is None:
                    return False
                self.end_all_rows(
                    member_id, "reaped", min(member["now"], max(member["heartbeat_at"], probe.seen or 0.0))
                )
                self.run("deregister_member", (member_id,))
            probe.remove()
        return True

    def missing(self, row: Any) -> tuple[bool, float | None]:
        """Return True if the member of a row (see `entries` in client.sql) is dead and may be removed, and the seconds
        for which it has been missing. Writes nothing.
        """
        grace, now, lease_until, since = row["grace"], row["now"], row["lease_until"], row["missing_since"]
        if not row["owned"]:
            return False, None
        if grace is None:  # the member was removed: any process may remove its row
            return True, None
        if lease_until is not None:
            return lease_until < now, now - row["heartbeat_at"] if lease_until < now else None
        with self.beacons.probe(row["beacon"]) as probe:
            if probe.held:
                return False, None
            seen = min(now, max(row["heartbeat_at"], probe.seen or 0.0))
            if since is None and self.writes_heartbeats:
                since = seen
            dead = probe.held is False or (since is not None and since + grace <= now)
            if since is None:
                since = seen
        return dead, max(0.0, now - since)

    def lives(self, member_id: int) -> bool:
        """Return True if a member is alive; remove a dead one."""
        self.check_member(member_id)
        member = self.row("member", (member_id,))
        if member is None or member["missing_since"] is not None:
            return False
        return member["lease_until"] is None or bool(member["lease_until"] >= member["now"])
