"""The wakeup locks of a session: advisory locks on which the waiters behind its rows sleep.

The server's lock table has a fixed size, which all programs share; and a session goes through all its locks at the end
of each transaction. So a member drops the wakeup locks of most of its waiting rows (`sqlsem.client.waiters.queues`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.engines.postgresql.database import PostgresDatabase
from sqlsem.engines.postgresql.psycopg_connection import Connection
from sqlsem.values.errors import ConfigurationError, SchemaError
from sqlsem.values.locks import Ticket


class PostgresWakeupLocks(PostgresConnection):
    """The wakeup locks of a session.

    Invariant: ``_dropped`` contains each row of the member that has no wakeup lock. So a release frees only locks that
    exist. (The server logs a warning for each attempt to free a missing lock.)
    """

    def __init__(self, engine: PostgresDatabase, connection: Connection) -> None:
        super().__init__(engine, connection)
        self._dropped: dict[int, int] = {}  # the member, by the position of its row

    def note_dropped(self, member_id: int) -> None:
        """Read which rows have no wakeup lock, after a member was reattached to this session."""
        if self.options.lease is None:
            # (With older routines, or without the right, no lock is dropped.)
            with contextlib.suppress(SchemaError, ConfigurationError):
                rows = self.rows("missing_wakeup_locks", member_id, None)
                self._dropped = {position: member_id for (position,) in rows}

    def drop_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        if tickets and self.options.lease is None:
            positions = [ticket.position for ticket in tickets]
            self._dropped.update(dict.fromkeys(positions, member_id))  # first, because the answer may be lost
            try:
                self.rows("drop_wakeup_locks", member_id, tickets[0].resource, positions)
            except (SchemaError, ConfigurationError):  # older routines, or rights
                self._dropped.clear()
                raise

    def restore_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        dropped = [ticket.position for ticket in tickets if ticket.position in self._dropped] if self._dropped else []
        if dropped:
            self.rows("restore_wakeup_locks", member_id, dropped)
            for position in dropped:
                self._dropped.pop(position, None)

    def restore_wakeup_lock(self, ticket: Ticket) -> None:
        member_id = self._dropped.get(ticket.position)
        if member_id is not None:
            self.restore_wakeup_locks(member_id, [ticket])
