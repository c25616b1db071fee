"""PostgreSQL sessions of an event loop, on which tasks wait for grants without a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import generators, waiting

from sqlsem.engines.postgresql.connection import AsyncConnection, PsycopgConnection
from sqlsem.engines.protocol import AsyncSession
from sqlsem.values.locks import Ticket

if TYPE_CHECKING:
    from sqlsem.engines.postgresql.engine import PostgresEngine

T = TypeVar("T")


class AsyncPostgresSession(PsycopgConnection, AsyncSession):
    """One psycopg connection of an event loop, on which tasks wait."""

    def __init__(self, engine: PostgresEngine, connection: AsyncConnection) -> None:
        super().__init__(engine, connection)
        self.connection = connection
        connection.prepare_threshold = None  # (See `PostgresConnection`.)

    async def prepare(self, purpose: str) -> None:
        """Prepare a new connection."""
        try:
            if self.options.lease is not None:
                cursor = await self.connection.execute(self.queries["backend"])
                if await cursor.fetchone() != (self.connection.info.backend_pid,):
                    return  # see PostgresConnection
            await self.connection.execute(self.queries["session"], self.setup(purpose))
        except psycopg.Error as exc:
            raise self.translate(exc) from exc

    async def wait(self, ticket: Ticket, timeout: float) -> bool | None:
        return await self._wait("wait", (ticket.resource, ticket.position), timeout)

    async def upgrade(self, ticket: Ticket, timeout: float) -> bool | None:
        return await self._wait("upgrade", (ticket.resource, ticket.position, ticket.requesting_id), timeout)

    async def _wait(self, name: str, key: tuple[Any, ...], timeout: float) -> bool | None:
        deadline = monotonic() + timeout
        while True:
            steps = self.statement_steps(name, *key, int(timeout * 1000))
            answer = None
            try:
                while True:
                    answer = await self._answer(steps.send(answer))
            except StopIteration as done:
                code = int(done.value[-1])
            except psycopg.Error as exc:
                raise self.translate(exc) from exc
            except asyncio.CancelledError:
                await self._end_query()
                raise
            if code != 1:
                return {0: True, -1: False}.get(code)
            timeout = max(0.0, deadline - monotonic())

    async def _answer(self, steps: Generator[int, int, T]) -> T:
        """Run a generator of psycopg to its end. (psycopg's own driver polls ten times a second.)"""
        loop, number = asyncio.get_running_loop(), self.connection.pgconn.socket
        try:
            wait_for = next(steps)
            while True:
                ready: asyncio.Future[int] = loop.create_future()
                if wait_for & waiting.WAIT_R:
                    loop.add_reader(number, _ready, ready, waiting.READY_R)
                if wait_for & waiting.WAIT_W:
                    loop.add_writer(number, _ready, ready, waiting.READY_W)
                try:
                    state = await ready
                finally:
                    if wait_for & waiting.WAIT_R:
                        loop.remove_reader(number)
                    if wait_for & waiting.WAIT_W:
                        loop.remove_writer(number)
                wait_for = steps.send(state)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _end_query(self) -> None:
        """End the wait on the server after the task was cancelled, so that the connection can be used again."""
        pgconn = self.connection.pgconn
        overdue = asyncio.get_running_loop().call_later(1.0, self.interrupt)
        try:
            await self.connection.cancel_safe(timeout=1.0)
            await self._answer(generators.execute(pgconn))
        except psycopg.Error:
            self.close()
        finally:
            overdue.cancel()

    @property
    def usable(self) -> bool:
        return self.connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE

    def close(self) -> None:
        # (Without await, which would fail in a closed loop or a cancelled task.)
        self.connection.pgconn.finish()


def _ready(ready: asyncio.Future[int], state: int) -> None:
    if not ready.done():
        ready.set_result(state)
