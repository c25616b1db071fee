"""The values of batches. Immutable; no I/O."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlsem.util.record import AsDict, plain, record

__all__ = ["BatchEntry", "Callback", "PartEnd", "PartEntry", "PartStart"]


@record
class Callback:
    """The claimed callback of a batch: the claiming process runs it and reports how it ended."""

    batch_id: int
    name: str
    attempt: int
    kind: str  # 'sql', 'shell' or 'call'; 'local': only the declaring process can run it; 'session': a session runs it
    body: str | None


@record
class PartStart:
    """The answer to the start of a part. ``code``: 'started', or why not: 'running', 'in_callback', 'differs'."""

    code: str
    batch_id: int
    attempt: int | None
    previous: int | None  # the number of an overdue batch that expired through this start


@record
class PartEnd:
    """The answer to the end of a part. ``code``: 'succeeded', 'failed', 'late' or 'lost'."""

    code: str
    batch_id: int | None
    is_last: bool
    batch_status: str | None
    callback: Callback | None  # claimed for this process, which must run it


@record
class PartEntry:
    """One part of a batch, for displays."""

    part: str
    status: str  # 'expected', 'running', 'succeeded' or 'failed'
    is_last: bool
    attempt: int
    member_id: int | None
    owner: str | None
    host: str | None
    pid: int | None
    started_at: datetime | None
    ended_at: datetime | None
    seconds: float | None  # its duration, or its duration so far
    error: str | None
    missing_for: float | None  # the seconds for which its process has been missing
    login: str | None = None


@record
class BatchEntry(AsDict):
    """One batch, for displays (``sqlsem batch``). Durations are in seconds, by the database's clock."""

    batch_id: int
    name: str
    status: str  # 'open', 'failed', 'succeeded', 'expired' or 'abandoned'
    window: float
    opened_at: datetime
    ended_at: datetime | None
    seconds: float  # from its opening to its end, or until now
    callback_status: str  # 'none', 'pending', 'running', 'finished' or 'failed'
    callback_kind: str | None
    callback_body: str | None
    callback_attempt: int
    callback_owner: str | None
    callback_started: datetime | None
    callback_ended: datetime | None
    callback_seconds: float | None
    callback_error: str | None
    parts: tuple[PartEntry, ...] = ()
    opened_by: str | None = None  # the login that opened the batch
    callback_kept_by: str | None = None  # the login that stored its callback
    callback_login: str | None = None  # the login that ran the callback last

    @classmethod
    def of_rows(cls, rows: Iterable[Sequence[Any]]) -> list[BatchEntry]:
        """Return the batches of rows: the columns of a batch, those of one part, and the logins of both."""
        batches: dict[int, BatchEntry] = {}
        for row in rows:
            batch = batches.setdefault(
                row[0],
                dataclasses.replace(
                    cls(*row[:16]), opened_by=row[29], callback_kept_by=row[31], callback_login=row[32]
                ),
            )
            part = PartEntry(row[16], row[17], bool(row[18]), *[*row[19:29], row[30]])
            batches[row[0]] = dataclasses.replace(batch, parts=(*batch.parts, part))
        return list(batches.values())

    @property
    def overdue(self) -> bool:
        """True if the batch is open although its window has ended."""
        return self.status == "open" and self.seconds > self.window

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return {**plain(self), "overdue": self.overdue}
