"""The PostgreSQL engine, as `sqlsem.engines` loads it."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg

from sqlsem.engines.base import Session
from sqlsem.engines.postgresql.aio import AsyncPostgresSession
from sqlsem.engines.postgresql.database import PostgresDatabase
from sqlsem.engines.postgresql.session import BorrowedPostgresSession, PostgresSession


class PostgresEngine(PostgresDatabase):
    """A PostgreSQL database, version 13 or later, and sessions on it."""

    session_class = PostgresSession

    def open_session(self, purpose: str) -> PostgresSession:
        try:
            if self.creator is not None:
                connection = self.creator()
                connection.autocommit = True
            else:
                connection = psycopg.connect(**self.connect_parameters(purpose))
        except psycopg.Error as exc:
            raise self.unreachable(exc) from exc
        return PostgresSession(self, connection)

    def session_on(self, cursor: Any) -> Session:
        return BorrowedPostgresSession(self, cursor)

    @property
    def supports_async(self) -> bool:
        # psycopg cannot wait in the default event loop of Windows.
        return self.creator is None and not isinstance(asyncio.get_running_loop(), _loops_without_sockets)

    async def connect_async(self, purpose: str) -> AsyncPostgresSession:
        # (In a task of its own: older versions of psycopg may miss a cancellation.)
        opening = asyncio.get_running_loop().create_task(self._open(purpose))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.cancel()
            opening.add_done_callback(_close_opened)
            raise

    async def _open(self, purpose: str) -> AsyncPostgresSession:
        try:
            connection = await psycopg.AsyncConnection.connect(**self.connect_parameters(purpose))
        except psycopg.Error as exc:
            raise self.unreachable(exc) from exc
        session = AsyncPostgresSession(self, connection)
        overdue = asyncio.get_running_loop().call_later(self.setup_timeout or 0.0, session.interrupt)
        try:
            await session.prepare(purpose)
        except BaseException:
            session.close()
            raise
        finally:
            overdue.cancel()
        return session


def _close_opened(opening: asyncio.Task[AsyncPostgresSession]) -> None:
    """Close a connection that was opened although its caller was cancelled."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


#: The event loops in which psycopg cannot wait: none, except on Windows.
_loops_without_sockets: tuple[type, ...] = tuple(filter(None, [getattr(asyncio, "ProactorEventLoop", None)]))
