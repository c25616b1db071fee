"""The displays of a queue, checked against the rule, and the cost of their reads, counted."""

import contextlib
import io
import itertools
import sys
from datetime import datetime, timezone

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from support import random_name

from sqlsem.ops.terminal.queues import by_resource, render_queues
from sqlsem.values.locks import Entry, Request

ROWS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "read", "stage:1"]),
        st.one_of(st.none(), st.integers(1, 5)),  # the limit
        st.integers(1, 3),  # the weight
    ),
    max_size=8,
)


@pytest.mark.engines("sqlite", "postgresql", "mssql")
@pytest.mark.timeout(600)
def test_bare_participants_are_shown_as_the_rule_has_it(database):
    with contextlib.closing(database.raw()) as connection, contextlib.closing(database.session()) as operator:

        @settings(max_examples=40)
        @example(words=[("read", 1, 1), ("read", 5, 2), ("write", 2, 1)], cap=None, paused=False)
        @example(words=[("stage:1", 4, 1), ("read", 5, 3), ("stage:1", 4, 2), ("read", 5, 2)], cap=None, paused=False)
        @given(words=ROWS, cap=st.one_of(st.none(), st.integers(1, 5)), paused=st.booleans())
        def compare(words, cap, paused):
            look_at_bare_ones(database, connection.cursor(), operator, words, cap, paused)

        compare()


def look_at_bare_ones(database, cursor, operator, words, cap, paused):
    resource = random_name()
    operator.set_resource(resource, "cap", cap)
    operator.set_resource(resource, "paused", int(paused))
    requests = []
    for access, limit, weight in words:
        weighing = weight if limit is None else min(weight, limit)
        requests.append(Request(resource, access, limit, weighing))
        columns = {"access_type": access, "weight": weighing}
        if limit is not None:
            columns["concurrency_limit"] = limit
        database.insert_bare(cursor, resource, "bare", **columns)
    entries = operator.entries(resource)
    states = [entry.state for entry in entries]
    expected = [
        "holds" if request.fits(entries[:number], cap) and not paused else "waits"
        for number, request in enumerate(requests)
    ]
    assert states == expected
    shown = next((listed for listed in operator.resources() if listed.resource == resource), None)
    assert (shown is None) == (not words and cap is None and not paused)
    if shown is not None:
        assert (shown.holding, shown.waiting) == (expected.count("holds"), expected.count("waits"))
    operator.set_resource(resource, "cap", None)
    operator.set_resource(resource, "paused", 0)
    cursor.execute(database.sql("DELETE FROM {table} WHERE resource_id = ?"), (resource,))


@pytest.mark.engines("postgresql")
def test_a_page_of_history_is_found_by_an_index(make_database, postgres_server):
    """For each filter, the query reads the rows that it shows, and no others."""
    database = make_database(postgres_server)  # a new one, without rows of other tests
    database.rows(
        "INSERT INTO sqlsem.history (resource_id, queue_position, requesting_id, access_type, weight, requested_at, "
        "ended_at, outcome) SELECT CASE WHEN mod(g, 500) = 0 THEN 'rare' ELSE 'usual' END, g, 'x', 'write', 1, now(), "
        "now() - g * interval '1 second', CASE WHEN mod(g, 7) = 0 THEN 'timeout' ELSE 'released' END "
        "FROM generate_series(1, 20000) AS g"
    )
    database.rows("ANALYZE sqlsem.history")  # as autovacuum does, sooner or later
    with contextlib.closing(database.raw(autocommit=False)) as connection:

        def entries_read():
            # (Of this session alone: the server may report other sessions' reads late.)
            return connection.execute(
                "SELECT sum(pg_stat_get_xact_tuples_returned(oid)) FROM pg_class "
                "WHERE oid = 'sqlsem.history'::regclass "
                "OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = 'sqlsem.history'::regclass)"
            ).fetchone()[0]

        for resource, outcome, since in itertools.product((None, "rare", "usual"), (None, "timeout"), (None, 15000.0)):
            before = entries_read()
            rows = connection.execute(
                "SELECT * FROM sqlsem.past(%s, 10, %s, NULL, %s)", (resource, since, outcome)
            ).fetchall()
            assert rows
            assert len(rows) <= entries_read() - before <= 20, (resource, outcome, since)


def calls_of(function):
    """Return the number of calls of Python functions that it makes."""
    count = 0

    def counted(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_row_costs_the_same_in_long_and_short_lists():
    moment = datetime.now(timezone.utc)
    waiting = [
        Entry("a", n, "waits", "write", 3, 1, "x", 1, "t", "host", 7, "p", None, moment, None, 1.0, None, 5.0)
        for n in range(2000)
    ]

    def show(number):
        Console(file=io.StringIO(), width=120).print(render_queues(by_resource(waiting[:number], [], None), 120))

    show(10)  # fill the caches
    calls_of_short, calls_of_long = (calls_of(lambda n=n: show(n)) for n in (500, 2000))
    assert calls_of_long / 2000 <= 1.1 * calls_of_short / 500
    assert calls_of_long / 2000 <= 150
