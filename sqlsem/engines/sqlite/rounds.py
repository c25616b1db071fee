"""Rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sqlsem.engines.roles import RoundSession
from sqlsem.engines.sqlite import fork
from sqlsem.engines.sqlite.members import SqliteMembers
from sqlsem.engines.sqlite.values import as_time, shown, user_name
from sqlsem.model import Continuation, PartEnd, PartEntry, PartStart, RoundEntry


class SqliteRounds(SqliteMembers, RoundSession):
    """Rounds, their parts and continuations."""

    def recover_rounds(self, name: str | None, mine: int | None) -> list[int]:
        members = [one for (one,) in self.rows("round_members", {"name": name}) if one != mine]
        for member_id in members:
            self.test_member(member_id)
        if all(self.row("member", (member_id,)) for member_id in members):
            return []
        with fork.held_off, self.writing():
            self.run("recover_then", {"name": name})
            found = [round_id for (round_id,) in self.rows("orphaned_rounds", {"name": name})]
            for round_id in found:
                self.run("recover_parts", (round_id,))
                self.run("fail_round", {"round": round_id})
        return found

    def start_part(
        self,
        member_id: int,
        name: str,
        part: str,
        parts: Sequence[str],
        window: float,
        owner: str,
        uid: str,
        then: tuple[str | None, str | None],
    ) -> PartStart:
        with fork.held_off, self.writing():
            self.give_sign(member_id)
            now, asked = self.row("clock")["now"], window
            latest = self.row("latest_round", (name,))
            round_id, opened = (0, now) if latest is None else (latest["round_id"], latest["opened_at"])
            there = {row["part"]: row for row in self.rows("round_parts", (round_id,))}
            old = there.get(part)
            repeated = old is not None and (old["start_uid"], old["status"], old["member_id"]) == (
                uid,
                "running",
                member_id,
            )
            attempt, started = (old["attempt"], old["started_at"]) if old is not None else (0, None)
            if not repeated:  # else a reply was lost
                same = set(there) == set(parts)
                if latest is not None and latest["opened_by"] != user_name():
                    window = latest["window"]  # of the login that opened it: another one must not end it early
                code = None if latest is None else self._joins(latest, old, same, opened + window <= now)
                if code in ("differs", "running", "continuing"):
                    return PartStart(code, round_id, None, None)
                if code == "expired":
                    self.run("expire_round", {"now": now, "round": round_id})
                if code == "joins":
                    if now == opened:  # the clock ticks in milliseconds, but only one part begins with its round
                        now += 1e-6
                    self.run("reopen_round", {"round": round_id, "window": round(window * 1000)})
                else:
                    values = {"name": name, "window": round(asked * 1000), "now": now}
                    self.run("open_round", {**values, "login": user_name()})
                    round_id, opened, attempt = self.row("latest_round", (name,))["round_id"], now, 0
                    for one in parts:
                        self.run("open_part", (round_id, one))
                    self.run("prune_round_parts", {"name": name, "now": now})
                    self.run("prune_rounds", {"name": name, "now": now})
                key = {"round": round_id, "part": part}
                self.run("start_part", {**key, "uid": uid, "member": member_id, "owner": owner, "now": now})
                self._keep_then(round_id, then)
                attempt, started = attempt + 1, now
            opening = attempt == 1 and started == opened
            previous = self.row("expired_by", {"name": name, "round": round_id}) if opening else None
            return PartStart("started", round_id, attempt, previous["round_id"] if previous else None)

    def _joins(self, latest: Any, part: Any, same: bool, over: bool) -> str | None:
        """Return what a start does with the newest round of its name: 'joins' it, finds it 'expired', None (a new one
        begins), or why it is refused, as in `PartStart`.
        """
        if latest["status"] == "succeeded":
            if part is None or not part["is_last"] or not same or over:
                return None
            if latest["then_status"] == "running" and latest["grace"] is not None:
                return "continuing" if self.missing(latest)[1] is not None else None
            return "joins" if latest["then_status"] in ("pending", "running", "failed") else None
        if latest["status"] not in ("open", "failed"):
            return None
        if over:
            return "expired"
        if not same:
            return "differs"
        if part["status"] == "running" and self.row("member", (part["member_id"],)) is not None:
            return "running"
        return "joins"

    def _keep_then(self, round_id: int, then: tuple[str | None, str | None]) -> None:
        if then[0] is not None:
            self.run("keep_then", {"round": round_id, "kind": then[0], "body": then[1], "login": user_name()})

    def end_part(
        self,
        member_id: int,
        name: str,
        part: str,
        uid: str,
        error: str | None,
        owner: str,
        then: tuple[str | None, str | None],
    ) -> PartEnd:
        with fork.held_off, self.writing():
            now = self.row("clock")["now"]
            found = self.row("started_part", {"name": name, "part": part, "uid": uid})
            if found is None:
                return PartEnd("lost", None, False, None, None)
            round_id, status, until, part_status, part_member, part_error = found
            there = part_member == member_id and self.row("member", (member_id,)) is not None
            if not there or (part_status == "failed" and part_error == "its process died"):
                return PartEnd("lost", round_id, False, status, None)
            self.give_sign(member_id, known=True)  # the continuation may come with it
            key = {"round": round_id, "part": part}
            mine = {"round": round_id, "member": member_id, "uid": uid}
            if part_status == "running":
                code = "succeeded" if error is None else "failed"
                if error is None and (status != "open" or until < now):
                    over = "the round was abandoned" if status == "abandoned" else "the window"
                    code, error = "late", f"ended after {over}"
                part_status = "succeeded" if error is None else "failed"
                self.run("end_part", {**key, "status": part_status, "error": error, "now": now})
                self._keep_then(round_id, then)
                self.run("fail_round", {"round": round_id})
                if self.run("succeed_round", {"round": round_id, "now": now}).rowcount == 1:
                    self.run("mark_last", key)
                    begun = {**mine, "own": then[0] is not None, "owner": owner, "login": user_name(), "now": now}
                    self.run("begin_then", begun)
            else:
                code = "late" if (part_error or "").startswith("ended after the ") else part_status
                if part_status == "succeeded" and error is not None:
                    self.run("return_then", {"member": member_id, "uid": uid})
            status, is_last = self.row("ended_part", key)
            return PartEnd(code, round_id, bool(is_last), status, self._claimed_then(member_id, uid))

    def _claimed_then(self, member_id: int, uid: str) -> Continuation | None:
        row = self.row("claimed_then", {"member": member_id, "uid": uid})
        return None if row is None else Continuation(*row)

    def claim_then(
        self, member_id: int, name: str | None, round_id: int | None, owner: str, uid: str, own: bool
    ) -> Continuation | None:
        with fork.held_off, self.writing():
            self.give_sign(member_id)
            found = self._claimed_then(member_id, uid)
            if found is None:
                mine = {"member": member_id, "uid": uid, "owner": owner, "own": own, "login": user_name()}
                self.run("claim_then", {**mine, "name": name, "round": round_id})
                found = self._claimed_then(member_id, uid)
        return found

    def return_then(self, member_id: int, uid: str) -> bool:
        with fork.held_off, self.writing():
            return self.run("return_then", {"member": member_id, "uid": uid}).rowcount == 1

    def end_then(self, member_id: int, round_id: int, attempt: int, error: str | None) -> bool:
        key = {"round": round_id, "attempt": attempt, "member": member_id}
        with fork.held_off, self.writing():
            if self.run("end_then", {**key, "error": error}).rowcount == 1:
                return True
            return self.row("ended_then", key) is not None

    def abandon_round(self, name: str | None, round_id: int | None) -> int | None:
        with fork.held_off, self.writing():
            found = self.row("round_to_abandon", {"name": name, "round": round_id})
            if found is None:
                return None
            self.run("abandon_round", {"round": found["round_id"]})
            was = f"round {found['round_id']}, {found['status']}"
            self.note_operation("abandon", resource=found["round_name"], old=was)
        return int(found["round_id"])

    def list_rounds(self, name: str | None, round_id: int | None, most: int) -> list[RoundEntry]:
        found: dict[int, RoundEntry] = {}
        for row in self.rows("list_rounds", {"name": name, "round": round_id, "most": most}):
            one = found.get(row["round_id"]) or shown(RoundEntry, row, parts=())
            part = shown(
                PartEntry,
                row,
                status=row["part_status"],
                is_last=bool(row["is_last"]),
                ended_at=as_time(row["part_ended_at"]),
                seconds=row["part_seconds"],
                missing_for=self.missing(row)[1],
            )
            found[one.round_id] = dataclasses.replace(one, parts=(*one.parts, part))
        return list(found.values())
