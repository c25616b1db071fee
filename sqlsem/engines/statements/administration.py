"""Administration: history, settings, and revocation."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

from sqlsem.engines.answers import RIGHTS, granted_rights
from sqlsem.engines.statements.batches import BatchStatements
from sqlsem.engines.statements.values import shown
from sqlsem.insight.patterns import counted_on, is_pattern
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import Operation, Past


class AdministrationStatements(BatchStatements):
    """History, settings of resources, and the removal of dead members."""

    def history(self, resource: str | None, maximum: int, *, outcome: str | None = None, **criteria: Any) -> list[Past]:
        # (The indexes begin with the outcome. So read the newest rows of each outcome, and merge them.)
        outcomes = [row["outcome"] for row in self.rows("outcomes")] if outcome is None else [outcome]
        name = "past" if resource is None else "past_of_resource"
        values = _criteria(**criteria) | {"maximum": maximum}
        values |= {} if resource is None else {"resource": resource}
        pages = [self.rows(name, values | {"outcome": outcome}) for outcome in outcomes]
        newest = heapq.merge(*pages, key=_when_ended, reverse=True)
        return [shown(Past, row) for row in itertools.islice(newest, maximum)]

    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        with self.forks_blocked, self.transaction():
            if what == "cap" and is_pattern(resource):
                self._set_pattern(resource, value)
                return
            before = self._setting_of(resource)
            self.run("set_resource", {"resource": resource, "what": what, "value": value, "login": self.login()})
            after = self._setting_of(resource)
            self.run("delete_empty_settings", {"resource": resource})
            if before[what] != after[what]:
                if what == "paused":
                    self.note_operation("pause" if value else "resume", resource=resource)
                else:
                    self.note_operation(what, resource=resource, old=_text(before[what]), new=_text(value))
            if what == "cap" and value is None:
                self._check_counted_on(resource, None)

    def _set_pattern(self, pattern: str, cap: int | None) -> None:
        prefix = pattern[:-1]
        row = self.row("pattern", (prefix,))
        before = None if row is None else row["cap"]
        if before == cap:
            return
        if cap is None:
            self.run("drop_pattern", (prefix,))
            self._check_counted_on(None, prefix)
        else:
            self.run("set_pattern", {"prefix": prefix, "cap": cap, "login": self.login()})
        self.note_operation("cap", resource=pattern, old=_text(before), new=_text(cap))

    def _check_counted_on(self, resource: str | None, prefix: str | None) -> None:
        """Raise `ConfigurationError` if a request without a limit of its own has lost its cap."""
        unlimited = self.row("without_limit", {"resource": resource, "prefix": prefix})
        if unlimited["number"]:
            raise ConfigurationError(counted_on(unlimited["number"], unlimited["resource"]))

    def _setting_of(self, resource: str) -> dict[str, Any]:
        row = self.row("setting_of", (resource,))
        return {"cap": None, "stale_after": None, "ageing": None, "paused": 0} if row is None else dict(row)

    def rights(self) -> frozenset[str]:
        return granted_rights([self.engine.writable] * len(RIGHTS))

    def revoke(self, position: int, force: bool) -> int:
        with self.forks_blocked, self.transaction():
            self.run("revoke", {"position": position, "login": self.login()})
            row = self.row("revoked_row", (position,))
            if row is None:
                return -1
            change = {"old": "holds" if row["granted"] else "waits", "new": "force" if force else None}
            self.note_operation("revoke", resource=row["resource_id"], position=position, **change)
            if force or not row["granted"] or row["member_id"] is None:
                self.remove(row["resource_id"], position, None, "revoked")
                return 0
        return 1

    def revoke_members(self, member: int | None, login: str | None, force: bool) -> int:
        gone = rows = 0
        for (number,) in self.rows("members_of", {"member": member, "login": login}):
            for (position,) in self.rows("positions_of", (number,)):
                rows += self.revoke(position, force) >= 0
            with self.forks_blocked, self.transaction():
                gone += self.run("drop_member_without_rows", {"member": number}).rowcount
        if gone or rows:
            with self.forks_blocked, self.transaction():
                summary = f"{gone} members, {rows} rows{', force' if force else ''}"
                self.note_operation(
                    "revoke_members", old=f"member {member}" if login is None else f"login {login}", new=summary
                )
        return gone

    def reap(self) -> int:
        before = self._positions()
        for resource, position in before:
            row = self.row("row", {"resource": resource, "position": position})
            if row is not None:
                self.check_owner(resource, position, row["member_id"])
        self.recover_batches(None, None)
        for member in self.rows("idle_members"):
            with self.beacons.probe(member["beacon"]) as probe:
                if not probe.held:
                    with self.forks_blocked, self.transaction():
                        self.run("deregister_member", (member["member_id"],))
                    probe.remove()
        self.sweep_beacons()
        gone = len(before - self._positions())
        if gone:
            with self.forks_blocked, self.transaction():
                self.note_operation("reap", new=str(gone))
        return gone

    def operations(
        self, name: str | None, maximum: int, *, action: str | None = None, **criteria: Any
    ) -> list[Operation]:
        values = _criteria(**criteria) | {"action": action, "name": name, "maximum": maximum}
        return [shown(Operation, row) for row in self.rows("operations", values)]

    def _positions(self) -> set[tuple[str, int]]:
        return {(row["resource_id"], row["queue_position"]) for row in self.rows("all_rows")}

    def prune(self, maximum: int) -> int:
        with self.forks_blocked, self.transaction():
            self.run("prune_rate_slots")
            self.run("prune_rate_windows")
            self.run("prune_upgrades")
            return max(self.run("prune", (maximum,)).rowcount, self.run("prune_operations", (maximum,)).rowcount)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _criteria(*, since: float | None = None, until: float | None = None, who: str | None = None) -> dict[str, Any]:
    return {"since": since, "until": until, "who": who}


def _when_ended(row: Any) -> tuple[bool, float, int]:
    when = row["ended_at"]
    is_time = isinstance(when, float)
    return not is_time, when if is_time else 0.0, row["rowid"]
