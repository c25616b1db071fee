"""Upgrades of readers and downgrades of writers. See the comments of PostgreSQL's conversions.sql."""

from __future__ import annotations

import random
import threading
from typing import Any

from sqlsem.engines.answers import already_upgrading
from sqlsem.engines.statements.locks import LONGEST, SHARE, SHORTEST, TEST_EVERY, LockStatements
from sqlsem.insight.totals import QueueTotals
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import READ, UPGRADE, WRITE, Ticket, Upgrading, monotonic


class ConversionStatements(LockStatements):
    """Conversions of granted rows."""

    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        key = {"resource": ticket.resource, "position": ticket.position}
        mine = {**key, "requesting_id": ticket.requesting_id}
        # First remove dead holders: they must not block the upgrade.
        row = self.row("granted_row", mine)
        if row is not None and row["access"] == READ:
            self._check_other_holders(ticket, row["member_id"])
        with self.forks_blocked, self.transaction():
            row = self.row("granted_row", mine)
            if row is None:
                return Upgrading.GONE
            self.renew_lease(row["member_id"], known=True)
            self._require_convertible(ticket, row["access"], row["limit"])
            if row["access"] != READ:
                return Upgrading.DONE if row["access"] == WRITE else Upgrading.BEGUN
            other = self.row("other_upgrading", key)
            if other is not None:
                if other["lives"]:
                    raise already_upgrading(self.entries(ticket.resource), ticket)
                return Upgrading.NOT_YET  # the row of the dead reader is removed soon
            free = self._free_readers(ticket)
            if not free and not self.rows("others_inside", key):
                self._convert(key, WRITE, "upgraded")
                return Upgrading.DONE
            # Readers that only an operator's pause or cap blocks may not be granted; nor may they be blocked, because
            # they may be about to be granted.
            if only_if_free or not all(free.values()):
                return Upgrading.NOT_YET
            for position in free:
                self.run("grant", {"resource": ticket.resource, "position": position})
            self.run("set_access", {**key, "access": UPGRADE})
            self.run("note_upgrade", key)
        return Upgrading.BEGUN

    def upgrade(self, ticket: Ticket, timeout: float, wakeup: threading.Event) -> bool | None:
        deadline = monotonic() + timeout
        key = {"resource": ticket.resource, "position": ticket.position}
        mine = {**key, "requesting_id": ticket.requesting_id}
        seen, changed, tested = None, monotonic(), -TEST_EVERY
        while True:
            version = self.version()
            now = monotonic()
            if version != seen or wakeup.is_set():
                wakeup.clear()
                seen, changed = version, now
                row = self.row("granted_row", mine)
                if row is None:
                    return None
                if row["access"] != UPGRADE:
                    return bool(row["access"] == WRITE)
                if not self.rows("others_inside", key):
                    with self.forks_blocked, self.transaction():
                        row = self.row("granted_row", mine)
                        if row is not None and row["access"] == UPGRADE:
                            self.renew_lease(row["member_id"], known=True)
                            self._convert(key, WRITE, "upgraded")
                    if row is not None and row["access"] == UPGRADE:
                        self.require_in_place()
                        return True
                    seen = None
                    continue
            if now >= deadline:
                return False
            if now - tested >= TEST_EVERY:
                tested = now
                self.require_in_place()
                if self._check_other_holders(ticket, row["member_id"]):
                    seen = None
                    continue
            pause = min(max(SHORTEST, (now - changed) * SHARE), LONGEST)
            wakeup.wait(min(pause * random.uniform(0.8, 1.2), deadline - now))

    def _free_readers(self, ticket: Ticket) -> dict[int, bool]:
        """Return the positions of the waiting readers behind a row for which the declared limits leave room; False for
        a reader that an operator's pause or cap blocks.
        """
        free: dict[int, bool] = {}
        proxies = {row["member_id"] for row in self.rows("proxies")}
        declared, allowed = QueueTotals(None, False), None
        for row in self.rows_in_order(ticket.resource):
            allowed = allowed or QueueTotals(row["cap"], bool(row["paused"]))
            shape = row["access"], row["limit"], row["weight"]
            waits = row["access"] == READ and not (row["granted"] or row["revoked"] or row["member_id"] in proxies)
            if waits and row["position"] > ticket.position and declared.fits(*shape):
                free[row["position"]] = allowed.fits(*shape)
            for totals in (declared, allowed):
                totals.add(*shape)
            if declared.closed:
                break
        return free

    def _check_other_holders(self, ticket: Ticket, mine: int) -> bool:
        """Check whether the other holders are alive; return True if rows were removed."""
        key = {"resource": ticket.resource, "position": ticket.position}
        removed = False
        for row in self.rows("others_inside", key):
            if row["member_id"] != mine:
                removed = self.check_owner(ticket.resource, row["queue_position"], row["member_id"]) or removed
        return removed

    def _convert(self, key: dict[str, Any], access: str, outcome: str) -> None:
        """Change the access of a row, and write its previous access to the history."""
        if outcome == "upgraded":
            self.run("set_access", {**key, "access": READ})
            self.run("forget_upgrade", {"resource": key["resource"]})
        self.run("keep_one", {**key, "requesting_id": None, "outcome": outcome, "login": None})
        self.run("set_access", {**key, "access": access})
        self.run("grant", key)

    def _require_convertible(self, ticket: Ticket, access: str, limit: int | None) -> None:
        if access not in (READ, UPGRADE, WRITE) or limit != 1:
            raise ConfigurationError(
                f"{ticket.resource!r} at {ticket.position} is neither reader nor writer (but {access!r} with a limit "
                f"of {limit}) and cannot be converted; use read(…), write(…) or mutex(…)",
                resource=ticket.resource,
            )

    def downgrade(self, ticket: Ticket) -> bool:
        key = {"resource": ticket.resource, "position": ticket.position}
        with self.forks_blocked, self.transaction():
            row = self.row("granted_row", {**key, "requesting_id": ticket.requesting_id})
            if row is None:
                return False
            self._require_convertible(ticket, row["access"], row["limit"])
            if row["access"] == WRITE:
                self._convert(key, READ, "downgraded")
            elif row["access"] == UPGRADE:
                self.run("set_access", {**key, "access": READ})
                self.run("forget_upgrade", {"resource": ticket.resource})
        return True
