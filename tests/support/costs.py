"""Count the cost of reads in units that do not depend on the machine's speed."""

import contextlib
import gc
import itertools
import time


@contextlib.contextmanager
def without_collector():
    """Collect garbage, then run without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def processor_seconds(call, times):
    """Return the least processor time of several calls. (Without the garbage collector, which would also scan the
    leftovers of other tests in this process.)
    """
    took = []
    for _ in range(times):
        with without_collector():
            began = time.process_time()
            call()
            took.append(time.process_time() - began)
    return min(took)


def pages(connection, statement, *parameters, times=6):
    """Count the pages that PostgreSQL reads for a statement, and for the functions that it calls. Dead rows count too.

    The statement is rolled back. The result is the least of several runs: a session reads the catalogue and plans again
    when other sessions, or autovacuum, invalidate its caches, and that reads pages as well.
    """
    numbers = []
    for _ in range(times):
        with connection.transaction(force_rollback=True):
            ((plan,),) = connection.execute(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters
            ).fetchall()
        numbers.append(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])
    return min(numbers)


def cost_of_turns(database, queue, *, finds, times=10):
    """Return the cost of ``times`` searches for the next task of a queue. ``finds``: True if each finds a task."""

    def look(session):
        assert (session.next_pending(queue) is not None) == finds

    def found(row):
        assert (row[0] is not None) == finds

    return _cost(database, look, f"SELECT {database.schema}.pick_fair_task(%s, 1)", queue, found, times)


def cost_of_next_ready(database, queue, between, *, times=10):
    """Return the cost of ``times`` queries for the seconds until the next task of a queue may run."""

    def check(seconds):
        assert seconds is None if between is None else between[0] <= seconds <= between[1], seconds

    return _cost(
        database,
        lambda session: check(session.next_ready(queue)),
        f"SELECT {database.schema}.next_ready(%s)",
        queue,
        lambda row: check(row[0]),
        times,
    )


def _cost(database, look, query, queue, found, times):
    """Return the cost of ``times`` reads: steps of SQLite's virtual machine; on PostgreSQL the number of index searches
    and of the rows that they returned.
    """
    if database.engine == "sqlite":
        with contextlib.closing(database.session(grace=600)) as session:
            steps = itertools.count()
            session.connection.set_progress_handler(lambda: next(steps) and None, 1)
            for _ in range(times):
                look(session)
            session.connection.set_progress_handler(None, 1)
            return next(steps)
    with contextlib.closing(database.raw(autocommit=False)) as raw:
        cursor = raw.cursor()
        for _ in range(times):
            cursor.execute(query, (queue,))
            found(cursor.fetchone())
        cursor.execute(
            "SELECT sum(pg_stat_get_xact_numscans(oid) + pg_stat_get_xact_tuples_returned(oid)) FROM pg_class "
            "WHERE relkind = 'i' AND relnamespace = %s::regnamespace",
            (database.schema,),
        )
        return int(cursor.fetchone()[0])


def reads_of(session, call):
    """Return the rows that a call reads in tables and indexes; on SQLite the steps of its virtual machine."""
    if session.engine.name == "sqlite":
        steps = itertools.count()
        session.connection.set_progress_handler(lambda: next(steps) and None, 1)
        try:
            call()
        finally:
            session.connection.set_progress_handler(None, 1)
        return next(steps)

    def read():
        # (The server also counts what this statement itself reads: the first two calls tell how much.)
        with session.connection.cursor() as cursor:
            cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
            return sum(int(number) for _, number in cursor.fetchall())

    own = -read() + read()
    before = read()
    call()
    return read() - before - own
