"""Routines of PostgreSQL read few rows, whatever the statistics of the tables say.

The statistics are of a time when the tables were nearly empty, and their indexes large: by them a scan looks cheaper
than an index, and the pairs of two long lists look few. Routines come from the catalogue, with the arguments of
`support.routine_calls`; tables have the rows of `support.many_rows`.
"""

from __future__ import annotations

import re
import time
from typing import NamedTuple

import pytest
from support import many_rows, routine_calls

from sqlsem import sql

pytestmark = [pytest.mark.engines("postgresql"), pytest.mark.leaves_rows]

TABLES = """
SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'sqlsem'::regnamespace ORDER BY oid"""
READ = """
SELECT sum(CASE WHEN relkind = 'i' THEN pg_stat_get{0}_numscans(oid) ELSE 0 END
           + pg_stat_get{0}_tuples_returned(oid))::bigint
FROM pg_class WHERE relkind IN ('r', 'i') AND relnamespace = 'sqlsem'::regnamespace"""
SETTINGS = "SET jit = off; SET max_parallel_workers_per_gather = 0; SET statement_timeout = '60s'"
#: Routines about one object that read more rows when other objects have more, and why.
LINEAR = {
    **dict.fromkeys(("release_on_commit", "delete_commit_marker"), "markers stay for a moment"),
    **dict.fromkeys(("list_tasks", "show_tasks"), "no index has the ended tasks of a queue"),
    "queue_counts": "reads all tasks that are kept, as it says",
    "operations": "reads the newest calls of operators, and leaves out those that do not match",
    "past": "filters have different indexes: the statistics say which is the best",
    **dict.fromkeys(("estimate", "revoke", "why"), "no index has positions alone"),
    **dict.fromkeys(
        [
            "batch_part_start",
            "batch_resume",
            "recover_batches",
            "session_batch_resume",
            "session_part_start",
            "session_recover_batches",
        ],
        "reads the parts that run, of all batches",
    ),
}


class Cost(NamedTuple):
    """The rows that a call read, in tables and indexes, and its seconds. ``rows`` None: it took too long."""

    rows: int | None
    seconds: float


class Bench:
    """A database whose tables have old statistics. Routines that commit run on a connection of their own."""

    def __init__(self, database, most):
        self.database = database
        database.rows("CREATE TABLE public.guarded (id integer)")
        self.connection = database.raw()
        tables = {table for (table,) in self.connection.execute(TABLES)}
        unknown = tables - many_rows.SMALL - set(many_rows.MANY)
        assert not unknown, f"add rows of {sorted(unknown)} to MANY in {many_rows.__file__}"
        for table in tables:
            self.connection.execute(f"ALTER TABLE sqlsem.{table} SET (autovacuum_enabled = false)")
        self.connection.execute("UPDATE sqlsem.setting SET value = 1000000 WHERE name = 'max_members'")
        register = "SELECT sqlsem.register_member('host', 1, 'me', 600000, NULL)"
        (self.member,) = self.connection.execute(register).fetchone()
        many_rows.insert_few(self.connection, self.member)
        many_rows.insert(self.connection, 1, most)
        many_rows.delete_many(self.connection)
        for table in tables:
            self.connection.execute(f"VACUUM (ANALYZE) sqlsem.{table}")
        many_rows.advance_numbers(self.connection)
        self.calls = [
            call
            for call in routine_calls.calls(self.connection, self.member)
            if call.routine not in routine_calls.RAISES_IN_AUTOCOMMIT
        ]
        self.rows = 0

    def grow(self, rows):
        """Let the tables have this many rows, and use a new session: plans of the smaller tables are not measured."""
        many_rows.insert(self.connection, self.rows + 1, rows)
        self.rows = rows
        self.connection.close()
        self.connection, self.committing = self.database.raw(), self.database.raw()
        self.connection.execute(SETTINGS)
        self.committing.execute(SETTINGS)
        for session in (self.connection, self.committing):  # both have a member, as a session does after its first call
            session.execute("SELECT sqlsem.session_member(NULL)")
        self.connection.execute("SELECT sqlsem.reattach_member(%s)", (self.member,))

    def cost(self, call, times):
        costs = [(self._cost_of_procedure if call.is_procedure else self._cost)(call) for _ in range(times)]
        return Cost(
            None if any(cost.rows is None for cost in costs) else min(cost.rows for cost in costs),
            min(cost.seconds for cost in costs),
        )

    def _cost(self, call):
        import psycopg

        with self.connection.transaction(force_rollback=True):
            if not call.is_public:  # as in its callers
                self.connection.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
            (before,) = self.connection.execute(READ.format("_xact")).fetchone()
            began = time.monotonic()
            try:
                with self.connection.transaction():
                    self.connection.execute(call.statement)
            except psycopg.errors.QueryCanceled:
                return Cost(None, time.monotonic() - began)
            except psycopg.Error as error:
                if call.routine not in routine_calls.RAISES:
                    pytest.fail(f"{call.statement}: {error}\nChange its example in {routine_calls.__file__}.")
            seconds = time.monotonic() - began
            (after,) = self.connection.execute(READ.format("_xact")).fetchone()
            return Cost(after - before, seconds)

    def _cost_of_procedure(self, call):
        import psycopg

        self.committing.execute("SELECT pg_stat_force_next_flush()")
        (before,) = self.committing.execute(READ.format("")).fetchone()
        began = time.monotonic()
        try:
            self.committing.execute(call.statement)
        except psycopg.Error as error:
            if call.routine not in routine_calls.RAISES:
                pytest.fail(f"{call.statement}: {error}\nChange its example in {routine_calls.__file__}.")
        seconds = time.monotonic() - began
        self.committing.execute("SELECT pg_stat_force_next_flush()")
        (after,) = self.committing.execute(READ.format("")).fetchone()
        return Cost(after - before, seconds)


def faults(bench, small, large, is_chosen, times):
    """Return the calls that cost too much with ``large`` rows in each table, beside their costs with ``small``."""
    costs = {}
    chosen = sorted(filter(is_chosen, bench.calls), key=lambda call: (call.is_procedure, not call.about_few))
    for rows in (small, large):
        bench.grow(rows)
        for call in chosen:
            costs[call, rows] = bench.cost(call, times)
    growth = large / small
    found = []
    for call in chosen:
        before, after = costs[call, small], costs[call, large]
        if after.rows is None or before.rows is None:
            what = "takes too long"
        elif after.rows > max(2 * growth * before.rows, 60 * large):
            what = "reads rows of one list for each row of another"
        elif after.seconds > 4 * growth * max(before.seconds, 0.02):
            what = "compares each row of one list with each of another"
        elif call.about_few and after.rows > 2 * before.rows + 60 and call.routine not in LINEAR:
            what = "reads the rows of other objects"
        else:
            continue
        found.append(f"{what}: {before} {after} {call.statement}")
    return found


@pytest.mark.kept
def test_routines_read_few_rows(make_database, postgres_server):
    """The quick form: routines that a role may run, about objects with few rows, and about all objects."""
    bench = Bench(make_database(postgres_server), 400)
    found = faults(bench, 40, 400, lambda call: call.is_public and call.variant in (0, 4), 1)
    assert not found, "\n".join(found)


def test_routines_read_few_rows_of_many(make_database, postgres_server):
    """The long form: all routines, also about objects with many rows, and lists that are long enough to be slow."""
    bench = Bench(make_database(postgres_server), 2000)
    found = faults(bench, 200, 2000, lambda call: True, 2)
    assert not found, "\n".join(found)


def test_statements_of_client_read_tables_by_routines():
    """A statement of the client that reads a table itself is not measured above, and so reads a small one only."""
    statements = sql.queries("postgresql", schema="sqlsem", table="ProcessControl")
    tables = {table.lower() for table in many_rows.MANY}
    read = {
        name: found
        for name, text in statements.items()
        if (found := {word.lower() for word in re.findall(r"sqlsem\.(\w+)(?!\w*\()", text)} & tables)
    }
    assert set(read) <= {"lock_tables"}  # which only locks them
