"""PostgreSQL's table of locks is of one size, and all programs of the server share it."""

import asyncio
import contextlib

import psycopg
import pytest
from support import PATIENCE

import sqlsem
from sqlsem.engines.postgresql.doctor import PostgresDoctor

pytestmark = [pytest.mark.engines("postgresql"), pytest.mark.timeout(300)]


@pytest.fixture
def small(start_postgres, make_database):
    """A database on a server with room for some thousand locks."""
    server = start_postgres(settings={"max_locks_per_transaction": "10", "max_connections": "30"})
    return make_database(server)


def test_a_crowd_of_one_process_leaves_room_for_others(small):
    """Without it, nobody can connect any more."""
    number = 3000
    with small.coordinator(grace=60) as holder, small.coordinator(grace=60) as coordinator:

        async def main(grant):
            order = []

            async def enter():
                async with coordinator.mutex("crowd") as had:
                    order.append(had.position)

            tasks = [asyncio.create_task(enter()) for _ in range(number)]
            while len(coordinator.process.lines.waiters()) < number and not any(task.done() for task in tasks):
                await asyncio.sleep(0.05)
            with psycopg.connect(small.url) as connection:
                connection.execute("CREATE TABLE public.somebodys (number integer)")
            await asyncio.to_thread(grant.release)
            await asyncio.wait_for(asyncio.gather(*tasks), 10 * PATIENCE)
            assert len(order) == number
            assert order == sorted(order)

        lock = holder.mutex("crowd")
        assert lock.acquire()
        asyncio.run(main(lock.grant))


def test_a_full_table_is_named(small):
    """By who is refused a lock, and by the doctor before that."""
    with small.coordinator() as coordinator, psycopg.connect(small.url, autocommit=True) as other:
        with coordinator.mutex("connects"):
            pass
        with contextlib.closing(coordinator.engine.connect("look")) as session:
            fill = "SELECT count(pg_advisory_lock(4711, number)) FROM generate_series(1, %s) AS number"

            def found():
                return {check.name: check for check in PostgresDoctor(session).examine()}["locks"]

            assert found().ok
            assert found().mend == ""
            other.execute(fill, (250,))  # of 300, and what the server adds to that
            assert "max_locks_per_transaction" in found().mend
        with pytest.raises(psycopg.errors.OutOfMemory):
            other.execute(fill, (100_000,))
        with pytest.raises(sqlsem.Unavailable, match="max_locks_per_transaction"):
            for number in range(1000):
                coordinator.mutex(f"lock.{number}").acquire()
