"""Say in words which rows block a request that was not granted: for `Timeout`, and for ``sqlsem run``."""

from __future__ import annotations

from collections.abc import Sequence

from sqlsem.insight.kept import KeptLock
from sqlsem.insight.reasons import described
from sqlsem.insight.words import by_login, process_name, seconds_in_words
from sqlsem.util.record import record
from sqlsem.values.locks import Entry, Resource
from sqlsem.values.names import RATE_PREFIX
from sqlsem.values.tasks import TaskEntry

__all__ = ["Blockers", "in_words", "tasks_in_words"]


@record
class Blockers:
    """The rows that block one request: its holders, the waiters ahead of it, the resource if that is paused, and the
    sessions that keep its gate if no row blocks it.
    """

    resource: str
    holders: tuple[Entry, ...]
    waiters: tuple[Entry, ...]
    paused: Resource | None = None
    kept: tuple[KeptLock, ...] = ()

    def __str__(self) -> str:
        """Return a short text; empty when nothing blocks the request any more.

        >>> str(blockers)  # doctest: +SKIP
        "'etl' is held by etl1:4711 (load.py) since 2026-11-25 02:58:11 (for 1m40s), and by 2 more"
        """
        if self.kept:
            return "; ".join(f"{lock.words}; end it with: {lock.remedy}" for lock in self.kept)
        if self.resource.startswith(RATE_PREFIX):
            return self._of_a_rate()
        if self.holders:
            first, others = self.holders[0], len(self.holders) - 1
            since = "" if first.granted_at is None else f" since {first.granted_at.astimezone():%Y-%m-%d %H:%M:%S}"
            more = f", and by {others} more" if others else ""
            revoked = " and was told to stop" if first.state == "revoked" else ""
            held = f" (for {seconds_in_words(first.seconds)})"
            return f"{self.resource!r} is held by {described(first)}{since}{held}{revoked}{more}"
        if self.paused is not None:
            by = by_login(self.paused.paused_by)
            at = self.paused.paused_at
            since = "" if at is None else f" since {at.astimezone():%Y-%m-%d %H:%M:%S}"
            return f"{self.resource!r} is paused{by}{since}"
        if self.waiters:
            first, others = self.waiters[0], len(self.waiters) - 1
            more = f", and {others} more" if others else ""
            waits = f"has waited for it for {seconds_in_words(first.seconds)}"
            return f"nobody holds {self.resource!r}, but {described(first)} {waits}{more}"
        return ""

    def _of_a_rate(self) -> str:
        ahead = [*self.holders, *self.waiters]
        name = self.resource.removeprefix(RATE_PREFIX)
        if not ahead:
            return f"all of rate {name!r} was used"
        more = f", and {len(ahead) - 1} more" if len(ahead) > 1 else ""
        return f"{described(ahead[0])} waits for rate {name!r} for {seconds_in_words(ahead[0].seconds)}{more}"


def in_words(blockers: Sequence[Blockers]) -> str:
    """Return the texts of all blockers in one line; empty if there are none."""
    if not blockers:
        return ""
    return "; ".join(filter(None, map(str, blockers))) or "the last row in the way has just left"


def tasks_in_words(running: Sequence[TaskEntry]) -> str:
    """Name the first of these tasks and its worker."""
    first, others = running[0], len(running) - 1
    note = f' "{first.note}"' if first.note else ""
    since = "" if first.claimed_at is None else f" since {first.claimed_at.astimezone():%Y-%m-%d %H:%M:%S}"
    more = f", and {others} more" if others else ""
    ran = "" if first.seconds is None else f" (for {seconds_in_words(first.seconds)})"
    return (
        f"task {first.task_id}{note} runs on {process_name(first.host, first.pid, first.owner or '')}{since}{ran}{more}"
    )
