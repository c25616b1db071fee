"""Which rows of a member do without the lock on which those behind them sleep.

The server's table of locks is of one size, and all its programs share it; and a session walks through its own locks at
the end of every transaction. So a member has few of them, however many of its requests wait
(`sqlsem.core.waiter_queues`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from sqlsem.engines.postgresql.connection import PostgresConnection
from sqlsem.engines.postgresql.database import PostgresDatabase
from sqlsem.engines.postgresql.psycopg_connection import Connection
from sqlsem.errors import ConfigurationError, SchemaError
from sqlsem.model import Ticket


class PostgresWakeupLocks(PostgresConnection):
    """The entry locks of a session.

    Invariant: a row of this session's member that has no entry lock is among those spared. So what is not, frees a lock
    when it leaves that is there. (The server writes each one that is not there into its log.)
    """

    def __init__(self, engine: PostgresDatabase, connection: Connection) -> None:
        super().__init__(engine, connection)
        self._spared: dict[int, int] = {}  # by position: its member

    def came_back(self, member_id: int) -> None:
        """This session is a member's from now on, and has taken the locks of its rows again, or not of all."""
        if self.options.lease is None:
            with contextlib.suppress(SchemaError, ConfigurationError):  # older routines or rights, and none is spared
                self._spared = {position: member_id for (position,) in self.rows("missing_wakeup_locks", (member_id,))}

    def drop_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        if tickets and self.options.lease is None:
            positions = [ticket.position for ticket in tickets]
            self._spared.update(dict.fromkeys(positions, member_id))  # first, as the answer may be lost
            try:
                self.rows("drop_wakeup_locks", (member_id, tickets[0].resource, positions))
            except (SchemaError, ConfigurationError):  # older routines, or rights
                self._spared.clear()
                raise

    def restore_wakeup_locks(self, member_id: int, tickets: Sequence[Ticket]) -> None:
        spared = [ticket.position for ticket in tickets if ticket.position in self._spared] if self._spared else []
        if spared:
            self.rows("restore_wakeup_locks", (member_id, spared))
            for position in spared:
                self._spared.pop(position, None)

    def keep_entry(self, ticket: Ticket) -> None:
        """One that is about to leave."""
        member_id = self._spared.get(ticket.position)
        if member_id is not None:
            self.restore_wakeup_locks(member_id, [ticket])
