"""Calls that are cancelled at any instant leave no row that blocks other requests until the session ends."""

import contextlib
import random
import threading
import time

import pytest
from support import PATIENCE, until

pytestmark = pytest.mark.engines("postgresql")
CALLS = {
    "try": ("CALL {schema}.try(?)", "{name}"),
    "once_begin": ("CALL {schema}.once_begin(?, 1)", "once:{name}"),
    "take": ("CALL {schema}.take(?, 1, 40)", "rate:{name}"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("routine", CALLS)
def test_a_cancel_at_any_instant_leaves_nothing(database, name, routine):
    """Another session cancels half of the calls, a statement_timeout the others; two sessions wait for each other."""
    text, resource = (template.format(schema=database.schema, name=name) for template in CALLS[routine])
    psycopg = pytest.importorskip("psycopg")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(contextlib.closing(database.raw())) for _ in range(2)]
        operator = stack.enter_context(contextlib.closing(database.raw()))
        pids = [connection.execute("SELECT pg_backend_pid()").fetchone()[0] for connection in sessions]
        cancelled, failed = [], []

        def call(session):
            try:
                row = session.execute(text.replace("?", "%s"), (str(name),)).fetchone()
            except psycopg.errors.QueryCanceled as exc:
                cancelled.append(exc)
                return
            except Exception as exc:
                failed.append(exc)
                return
            released = routine == "take" or row[0] not in (0, 1)
            while not released:  # (the cancel may come here)
                with contextlib.suppress(psycopg.errors.QueryCanceled):
                    session.execute(f"SELECT {database.schema}.release(%s, %s)", (resource, row[1]))
                    released = True

        number = 0
        while number < 60 or not cancelled:
            assert number < 3000, "no cancel came in time"
            number += 1
            limit = rng.randint(1, 30) if number % 2 else 0
            sessions[0].execute(f"SET statement_timeout = {limit}")
            threads = [threading.Thread(target=call, args=(connection,)) for connection in sessions]
            for thread in threads:
                thread.start()
            if not limit:
                time.sleep(rng.uniform(0, rng.choice([0.003, 0.03])))  # machines are fast and slow
                operator.execute("SELECT pg_cancel_backend(%s)", (pids[0],))
            for thread in threads:
                thread.join(PATIENCE)
            sessions[0].execute("SET statement_timeout = 0")
        assert failed == []
        # All sessions live on. Rows of cancelled waits go by themselves, as no client renews their lease.
        with database.coordinator() as coordinator:
            until(lambda: coordinator.admin.reap() is not None and database.queue(resource) == [], "no row is left")


def test_cancelled_rate_waiter_is_unattended_afterwards(database, name):
    """Between its commits, where no code could clean up after a cancel: the remaining rows go by themselves."""
    resource = f"rate:{name}"
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(contextlib.closing(database.raw()))
        session.execute(f"CALL {database.schema}.take(%s, 1, 3600000)", (str(name),))
        waiter = threading.Thread(
            target=lambda: session.execute(
                f"CALL {database.schema}.take(%s, 1, 3600000, timeout_ms => 4000)", (str(name),)
            )
        )
        waiter.start()
        ends = (
            "SELECT extract(epoch FROM waiter_lease_until - clock_timestamp()) FROM {table} "
            "WHERE resource_id = ? AND granted_at IS NOT NULL"
        )
        until(lambda: database.rows(ends, resource), "it is first")
        while rows := database.rows(ends, resource):
            assert rows[0][0] is not None, "a row without an end"
            assert 0 < rows[0][0] <= 10
        waiter.join(PATIENCE)
        assert database.queue(resource) == []
