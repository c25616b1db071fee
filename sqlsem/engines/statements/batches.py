"""Batches. See the comments of PostgreSQL's batches.sql."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sqlsem.engines.statements.members import MemberStatements
from sqlsem.engines.statements.values import as_time, shown
from sqlsem.values.batches import BatchEntry, Callback, PartEnd, PartEntry, PartStart


class BatchStatements(MemberStatements):
    """Batches, their parts and callbacks."""

    def recover_batches(self, name: str | None, mine: int | None) -> list[int]:
        members = [member for (member,) in self.rows("batch_members", {"name": name}) if member != mine]
        for member_id in members:
            self.check_member(member_id)
        if all(self.row("member", (member_id,)) for member_id in members):
            return []
        with self.forks_blocked, self.transaction():
            self.run("recover_callback", {"name": name})
            orphaned = [batch_id for (batch_id,) in self.rows("orphaned_batches", {"name": name})]
            for batch_id in orphaned:
                self.run("recover_parts", (batch_id,))
                self.run("fail_batch", {"batch": batch_id})
        return orphaned

    def start_part(
        self,
        member_id: int,
        name: str,
        part: str,
        parts: Sequence[str],
        window: float,
        owner: str,
        uid: str,
        callback: tuple[str | None, str | None],
    ) -> PartStart:
        with self.forks_blocked, self.transaction():
            self.renew_lease(member_id)
            now, requested_window = self.row("clock")["now"], window
            latest = self.row("latest_batch", (name,))
            batch_id, opened = (0, now) if latest is None else (latest["batch_id"], latest["opened_at"])
            known_parts = {row["part"]: row for row in self.rows("batch_parts", (batch_id,))}
            old = known_parts.get(part)
            mine = (uid, "running", member_id)
            repeated = old is not None and (old["start_uid"], old["status"], old["member_id"]) == mine
            attempt, started = (old["attempt"], old["started_at"]) if old is not None else (0, None)
            if not repeated:  # (A repeated call follows a lost answer.)
                same = set(known_parts) == set(parts)
                if latest is not None and latest["opened_by"] != self.login():
                    window = latest["window"]  # another login must not end the batch early
                code = None if latest is None else self._joins(latest, old, same, opened + window <= now)
                if code in ("differs", "running", "in_callback"):
                    return PartStart(code, batch_id, None, None)
                if code == "expired":
                    self.run("expire_batch", {"now": now, "batch": batch_id})
                if code == "joins":
                    # (The clock counts milliseconds, but only the first part may begin with its batch.)
                    if now == opened:
                        now += 1e-6
                    self.run("reopen_batch", {"batch": batch_id, "window": round(window * 1000)})
                else:
                    values = {"name": name, "window": round(requested_window * 1000), "now": now}
                    self.run("open_batch", {**values, "login": self.login()})
                    batch_id, opened, attempt = self.row("latest_batch", (name,))["batch_id"], now, 0
                    for declared in parts:
                        self.run("open_part", (batch_id, declared))
                    self.run("prune_batch_parts", {"name": name, "now": now})
                    self.run("prune_batches", {"name": name, "now": now})
                key = {"batch": batch_id, "part": part}
                self.run("start_part", {**key, "uid": uid, "member": member_id, "owner": owner, "now": now})
                self._keep_callback(batch_id, callback)
                attempt, started = attempt + 1, now
            opening = attempt == 1 and started == opened
            previous = self.row("expired_by", {"name": name, "batch": batch_id}) if opening else None
            return PartStart("started", batch_id, attempt, previous["batch_id"] if previous else None)

    def _joins(self, latest: Any, part: Any, same: bool, over: bool) -> str | None:
        """Return what a start does with the newest batch of its name: 'joins' (it), 'expired' (so a new one begins),
        None (a new one begins), or the reason of a refusal, as in `PartStart`.
        """
        if latest["status"] == "succeeded":
            if part is None or not part["is_last"] or not same or over:
                return None
            if latest["callback_status"] == "running" and latest["grace"] is not None:
                return "in_callback" if self.missing(latest)[1] is not None else None
            return "joins" if latest["callback_status"] in ("pending", "running", "failed") else None
        if latest["status"] not in ("open", "failed"):
            return None
        if over:
            return "expired"
        if not same:
            return "differs"
        if part["status"] == "running" and self.row("member", (part["member_id"],)) is not None:
            return "running"
        return "joins"

    def _keep_callback(self, batch_id: int, callback: tuple[str | None, str | None]) -> None:
        if callback[0] is not None:
            self.run(
                "store_callback", {"batch": batch_id, "kind": callback[0], "body": callback[1], "login": self.login()}
            )

    def end_part(
        self,
        member_id: int,
        name: str,
        part: str,
        uid: str,
        error: str | None,
        owner: str,
        callback: tuple[str | None, str | None],
    ) -> PartEnd:
        with self.forks_blocked, self.transaction():
            now = self.row("clock")["now"]
            started = self.row("started_part", {"name": name, "part": part, "uid": uid})
            if started is None:
                return PartEnd("lost", None, False, None, None)
            batch_id, status, until, part_status, part_member, part_error = started
            is_ours = part_member == member_id and self.row("member", (member_id,)) is not None
            if not is_ours or (part_status == "failed" and part_error == "its process died"):
                return PartEnd("lost", batch_id, False, status, None)
            self.renew_lease(member_id, known=True)  # the call may claim the callback, too
            key = {"batch": batch_id, "part": part}
            mine = {"batch": batch_id, "member": member_id, "uid": uid}
            if part_status == "running":
                code = "succeeded" if error is None else "failed"
                if error is None and (status != "open" or until < now):
                    over = "the batch was abandoned" if status == "abandoned" else "the window"
                    code, error = "late", f"ended after {over}"
                part_status = "succeeded" if error is None else "failed"
                self.run("end_part", {**key, "status": part_status, "error": error, "now": now})
                self._keep_callback(batch_id, callback)
                self.run("fail_batch", {"batch": batch_id})
                if self.run("succeed_batch", {"batch": batch_id, "now": now}).rowcount == 1:
                    self.run("mark_last", key)
                    begun = {**mine, "own": callback[0] is not None, "owner": owner, "login": self.login(), "now": now}
                    self.run("begin_callback", begun)
            else:
                code = "late" if (part_error or "").startswith("ended after the ") else part_status
                if part_status == "succeeded" and error is not None:
                    self.run("return_callback", {"member": member_id, "uid": uid})
            status, is_last = self.row("ended_part", key)
            return PartEnd(code, batch_id, bool(is_last), status, self._claimed_callback(member_id, uid))

    def _claimed_callback(self, member_id: int, uid: str) -> Callback | None:
        row = self.row("claimed_callback", {"member": member_id, "uid": uid})
        return None if row is None else Callback(*row)

    def claim_callback(
        self, member_id: int, name: str | None, batch_id: int | None, owner: str, uid: str, own: bool
    ) -> Callback | None:
        with self.forks_blocked, self.transaction():
            self.renew_lease(member_id)
            callback = self._claimed_callback(member_id, uid)
            if callback is None:
                mine = {"member": member_id, "uid": uid, "owner": owner, "own": own, "login": self.login()}
                self.run("claim_callback", {**mine, "name": name, "batch": batch_id})
                callback = self._claimed_callback(member_id, uid)
        return callback

    def return_callback(self, member_id: int, uid: str) -> bool:
        with self.forks_blocked, self.transaction():
            return self.run("return_callback", {"member": member_id, "uid": uid}).rowcount == 1

    def end_callback(self, member_id: int, batch_id: int, attempt: int, error: str | None) -> bool:
        key = {"batch": batch_id, "attempt": attempt, "member": member_id}
        with self.forks_blocked, self.transaction():
            if self.run("end_callback", {**key, "error": error}).rowcount == 1:
                return True
            return self.row("ended_callback", key) is not None

    def abandon_batch(self, name: str | None, batch_id: int | None) -> int | None:
        with self.forks_blocked, self.transaction():
            batch = self.row("batch_to_abandon", {"name": name, "batch": batch_id})
            if batch is None:
                return None
            self.run("abandon_batch", {"batch": batch["batch_id"]})
            previous = f"batch {batch['batch_id']}, {batch['status']}"
            self.note_operation("abandon", resource=batch["batch_name"], old=previous)
        return int(batch["batch_id"])

    def list_batches(self, name: str | None, batch_id: int | None, maximum: int) -> list[BatchEntry]:
        batches: dict[int, BatchEntry] = {}
        for row in self.rows("list_batches", {"name": name, "batch": batch_id, "maximum": maximum}):
            batch = batches.get(row["batch_id"]) or shown(BatchEntry, row, parts=())
            part = shown(
                PartEntry,
                row,
                status=row["part_status"],
                is_last=bool(row["is_last"]),
                ended_at=as_time(row["part_ended_at"]),
                seconds=row["part_seconds"],
                missing_for=self.missing(row)[1],
            )
            batches[batch.batch_id] = dataclasses.replace(batch, parts=(*batch.parts, part))
        return list(batches.values())
