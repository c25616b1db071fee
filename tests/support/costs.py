"""What looks cost, counted: the same on a slow machine."""

import contextlib
import gc
import itertools
import time


@contextlib.contextmanager
def without_collector():
    """Without the garbage collector, after it has taken what there was."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def processor_seconds(call, times):
    """The least processor time of so many calls. (Without the garbage collector, which walks through all that other
    tests have left in this process, too.)
    """
    took = []
    for _ in range(times):
        with without_collector():
            began = time.process_time()
            call()
            took.append(time.process_time() - began)
    return min(took)


def pages(connection, statement, *parameters, times=6):
    """Pages that PostgreSQL looks at for a statement, and for the functions that it calls: a dead row is a look at one.

    What the statement does is undone. It is the least of several times: a session reads the catalogue and plans anew
    whenever other sessions, or autovacuum, make it forget what it knew, and pages are looked at for that as well.
    """
    found = []
    for _ in range(times):
        with connection.transaction(force_rollback=True):
            ((plan,),) = connection.execute(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters
            ).fetchall()
        found.append(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])
    return min(found)


def cost_of_turns(database, queue, *, finds, times=10):
    """Of so many looks for the task whose turn it is in a queue, that find one, or none."""

    def look(session):
        assert (session.next_pending(queue) is not None) == finds

    def found(row):
        assert (row[0] is not None) == finds

    return _cost(database, look, f"SELECT {database.schema}.task_of_turn(%s, 1)", queue, found, times)


def cost_of_next_ready(database, queue, between, *, times=10):
    """Of so many questions when the next task of a queue may run: so many seconds from now, or None."""

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
    """Of so many looks: steps of SQLite's machine; on PostgreSQL looks into indexes, and rows that these have found."""
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
