"""The search for deadlocks of PostgreSQL's routines takes a number of steps that grows with the rows, and no faster."""

from __future__ import annotations

import contextlib
import re

import pytest
import wait_graphs

from sqlsem.values import deadlocks

pytestmark = pytest.mark.engines("postgresql")

FEW, MANY = 60, 600
#: Ten times as many rows. (A search that goes through all rows for each row takes a hundred times as many steps.)
LINEAR = 12
INSERT = """
INSERT INTO sqlsem.ProcessControl (queue_position, resource_id, requesting_id, access_type, owner, member_id,
                                   request_uid, concurrency_limit, weight, granted_at) OVERRIDING SYSTEM VALUE
SELECT p, r, 'crowd', a, o, %s, p::text, l, w, CASE WHEN g THEN clock_timestamp() END
FROM unnest(%s::bigint[], %s::text[], %s::text[], %s::text[], %s::integer[], %s::integer[], %s::boolean[])
    AS t (p, r, a, o, l, w, g)"""


@pytest.fixture
def search(make_database, postgres_server):
    """Return a function that searches among rows, and returns the deadlock and the number of steps: of loops that the
    routine goes through.
    """
    database = make_database(postgres_server)
    with contextlib.closing(database.raw()) as connection:
        (member,) = connection.execute("SELECT sqlsem.register_member('host', 1, 'crowd', 600000, NULL)").fetchone()
        connection.execute("CREATE SEQUENCE public.step")
        (text,) = connection.execute("SELECT pg_get_functiondef('sqlsem.find_deadlock'::regproc)").fetchone()
        connection.execute(re.sub(r"(?<!END )\bLOOP\b", "LOOP PERFORM nextval('public.step');", text))

        def search(rows):
            columns = (
                [getattr(row, name) for row in rows]
                for name in ("position", "resource", "access", "owner", "limit", "weight", "granted")
            )
            connection.execute("TRUNCATE sqlsem.ProcessControl")
            connection.execute(INSERT, (member, *columns))
            connection.execute("ALTER SEQUENCE public.step RESTART")
            found = connection.execute("SELECT * FROM sqlsem.find_deadlock(%s)", (member,)).fetchall()
            (steps,) = connection.execute("SELECT last_value FROM public.step").fetchone()
            return deadlocks.Found.of_rows([row[1:] for row in found]), steps

        yield search


@pytest.mark.parametrize("number", range(9))
def test_deadlock_search_of_sessions_grows_linearly(search, number):
    steps = {}
    for size in (FEW, MANY):
        _, expected, rows = list(wait_graphs.crowds(size))[number]
        found, steps[size] = search(rows)
        victims = {cycle.victim.position: cycle for cycle in deadlocks.find(rows)}
        assert len(victims) == expected
        assert (found is None) == (not victims)
        if found is not None:
            path = victims[found.victim].path()
            assert [(step.position, step.behind) for step in found.steps] == [
                (row.position, behind.position) for row, behind in path
            ]
    assert steps[MANY] <= LINEAR * steps[FEW], steps
