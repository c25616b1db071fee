"""Batches on SQL Server."""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.engines.mssql.connection import SqlServerConnection, aware
from sqlsem.values.locks import BatchEntry, Callback, PartEnd, PartStart


class SqlServerBatches(SqlServerConnection):
    """Batches, their parts and callbacks."""

    def recover_batches(self, name: str | None, mine: int | None) -> list[int]:
        return [int(row[0]) for row in self.rows("recover_batches", name, mine)]

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
        declaration = ("\n".join(parts), round(window * 1000))  # names contain no control characters
        return PartStart(*self.rows("start_part", member_id, name, part, *declaration, owner, uid, *callback)[0])

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
        code, number, is_last, status, attempt, kind, body = self.rows(
            "end_part", member_id, name, part, uid, outcome, error, owner, *callback
        )[0]
        claimed = None if attempt is None else Callback(number, name, attempt, kind, body)
        return PartEnd(code, number, bool(is_last), status, claimed)

    def claim_callback(
        self, member_id: int, name: str | None, batch_id: int | None, owner: str, uid: str, own: bool
    ) -> Callback | None:
        rows = self.rows("claim_callback", member_id, name, batch_id, owner, uid, int(own))
        return Callback(*rows[0]) if rows else None

    def return_callback(self, member_id: int, uid: str) -> bool:
        return bool(self.value("return_callback", member_id, uid))

    def end_callback(self, member_id: int, batch_id: int, attempt: int, error: str | None) -> bool:
        return bool(self.value("end_callback", member_id, batch_id, attempt, error))

    def abandon_batch(self, name: str | None, batch_id: int | None) -> int | None:
        number = self.value("abandon_batch", name, batch_id)
        return None if number is None else int(number)

    def list_batches(self, name: str | None, batch_id: int | None, maximum: int) -> list[BatchEntry]:
        return BatchEntry.of_rows(aware(row) for row in self.rows("list_batches", name, batch_id, maximum))
