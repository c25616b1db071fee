"""PostgreSQL's table of locks has a fixed size, and all programs of the server share it."""

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


def test_crowd_of_a_process_leaves_locks_for_others(small):
    """If the crowd kept all its locks, no other client could connect."""
    number = 3000
    with small.coordinator(grace=60) as holder, small.coordinator(grace=60) as coordinator:

        async def main(grant):
            order = []

            async def enter():
                async with coordinator.mutex("crowd") as task_grant:
                    order.append(task_grant.position)

            tasks = [asyncio.create_task(enter()) for _ in range(number)]
            while len(coordinator.client.waiter_queues.waiters()) < number and not any(task.done() for task in tasks):
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
    """The refused client names the cause, and the doctor does so before that."""
    with small.coordinator() as coordinator, psycopg.connect(small.url, autocommit=True) as other:
        with coordinator.mutex("connects"):
            pass
        with contextlib.closing(coordinator.engine.connect("look")) as session:
            fill = "SELECT count(pg_advisory_lock(4711, number)) FROM generate_series(1, %s) AS number"

            def found():
                return {check.name: check for check in PostgresDoctor(session).examine()}["locks"]

            assert found().ok
            assert found().mend == ""
            other.execute(fill, (250,))  # of 300, and the server's reserve
            assert "max_locks_per_transaction" in found().mend
        with pytest.raises(psycopg.errors.OutOfMemory):
            other.execute(fill, (100_000,))
        with pytest.raises(sqlsem.Unavailable, match="max_locks_per_transaction"):
            for number in range(1000):
                coordinator.mutex(f"lock.{number}").acquire()


FILL = "SELECT count(pg_advisory_lock(4711, number)) FROM generate_series(1, 100000) AS number"


def test_a_full_table_is_named_to_new_connections(small):
    """The server is up and the address right, but it has no room for the locks of a new session."""
    with psycopg.connect(small.url, autocommit=True) as other:
        with contextlib.suppress(psycopg.errors.OutOfMemory):
            other.execute(FILL)
        for number in range(100_000):  # (an error releases the locks of its statement)
            try:
                other.execute("SELECT pg_advisory_lock(4712, %s)", (number,))
            except psycopg.errors.OutOfMemory:
                break
        with small.coordinator(retry=1) as coordinator, pytest.raises(sqlsem.Unavailable) as caught:
            coordinator.mutex("late").acquire()
        assert "its table of locks, which all its programs share, is full" in str(caught.value)
        assert "is the server up" not in str(caught.value)
    with small.coordinator() as coordinator, coordinator.mutex("later"):
        pass


def test_a_server_that_refuses_is_not_asked_whether_it_is_up(small, start_postgres):
    """Each possible answer of a server to a new connection, except a wrong password."""
    with contextlib.ExitStack() as opened, small.coordinator(retry=1) as coordinator:
        with pytest.raises(psycopg.OperationalError, match=r"too many clients|remaining connection slots"):
            for _ in range(100):
                opened.enter_context(psycopg.connect(small.url))
        with pytest.raises(sqlsem.Unavailable, match=r"too many clients|remaining connection slots") as caught:
            coordinator.mutex("late").acquire()
        assert "is the server up" not in str(caught.value)
