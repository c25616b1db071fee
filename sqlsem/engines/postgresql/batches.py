"""Batches on PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlsem.engines.base import here
from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.values.locks import BatchEntry, Callback, PartEnd, PartStart


class PostgresBatches(PostgresConnection):
    """Batches, their parts and callbacks."""

    def recover_batches(self, name: str | None, mine: int | None) -> list[int]:
        return [row[0] for row in self.rows("recover_batches", (name, mine))]

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
        declaration = (json.dumps(list(parts), ensure_ascii=False), round(window * 1000))
        return PartStart(*self.row("start_part", member_id, name, part, *declaration, owner, uid, *callback))

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
        outcome = "succeeded" if error is None else "failed"
        code, number, is_last, status, attempt, kind, body = self.row(
            "end_part", member_id, name, part, uid, outcome, error, owner, *callback
        )
        claimed = None if attempt is None else Callback(number, name, attempt, kind, body)
        return PartEnd(code, number, is_last, status, claimed)

    def claim_callback(
        self, member_id: int, name: str | None, batch_id: int | None, owner: str, uid: str, own: bool
    ) -> Callback | None:
        row = self.row("claim_callback", member_id, name, batch_id, owner, uid, own)
        return None if row[0] is None else Callback(*row)

    def return_callback(self, member_id: int, uid: str) -> bool:
        return bool(self.number("return_callback", member_id, uid))

    def end_callback(self, member_id: int, batch_id: int, attempt: int, error: str | None) -> bool:
        return bool(self.number("end_callback", member_id, batch_id, attempt, error))

    def abandon_batch(self, name: str | None, batch_id: int | None) -> int | None:
        number = self.row("abandon_batch", here(), name, batch_id)[1]
        return None if number is None else int(number)

    def list_batches(self, name: str | None, batch_id: int | None, maximum: int) -> list[BatchEntry]:
        return BatchEntry.of_rows(self.rows("list_batches", (name, batch_id, maximum)))
