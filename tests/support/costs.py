"""What looks cost, counted: the same on a slow machine."""

import contextlib
import itertools


def cost_of_turns(database, queue, *, finds, times=10):
    """Of so many looks for the task whose turn it is in a queue, that find one, or none: steps of SQLite's machine; on
    PostgreSQL looks into indexes, and rows that these have found.
    """
    if database.engine == "sqlite":
        with contextlib.closing(database.session(grace=600)) as session:
            steps = itertools.count()
            session.connection.set_progress_handler(lambda: next(steps) and None, 1)
            for _ in range(times):
                assert (session.next_pending(queue) is not None) == finds
            session.connection.set_progress_handler(None, 1)
            return next(steps)
    with contextlib.closing(database.raw(autocommit=False)) as raw:
        cursor = raw.cursor()
        for _ in range(times):
            cursor.execute(f"SELECT {database.schema}.task_of_turn(%s, 1)", (queue,))
            assert (cursor.fetchone()[0] is not None) == finds
        cursor.execute(
            "SELECT sum(pg_stat_get_xact_numscans(oid) + pg_stat_get_xact_tuples_returned(oid)) FROM pg_class "
            "WHERE relkind = 'i' AND relnamespace = %s::regnamespace",
            (database.schema,),
        )
        return int(cursor.fetchone()[0])
