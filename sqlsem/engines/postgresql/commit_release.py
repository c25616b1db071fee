"""Locks that go with a transaction of the caller's."""

from __future__ import annotations

from sqlsem.engines.commit_release import CommitReleaseSession
from sqlsem.engines.postgresql.connection import PostgresConnection


class PostgresCommitRelease(PostgresConnection, CommitReleaseSession):
    """What those transactions leave."""

    def whereabouts(self) -> str:
        return str(self.row("whereabouts")[0])

    def has_left(self, word: str) -> bool:
        return bool(self.row("has_left", word)[0])

    def forget_left(self, word: str) -> None:
        self.rows("forget_left", (word,))
