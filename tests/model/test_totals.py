"""The rule on SQLite reads a few rows, or all in one scan: on random queues both must agree with `Request.fits`."""

import contextlib
import dataclasses
import threading
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import random_name

from sqlsem.engines.statements import locks
from sqlsem.insight.totals import QueueTotals
from sqlsem.values.locks import Request, Ticket

NEVER = threading.Event()
WORDS = st.tuples(
    st.sampled_from(["write", "write", "read", "read", "stage:1", "stage:2"]),
    st.one_of(st.none(), st.integers(1, 5)),  # the limit
    st.integers(1, 4),  # the weight
)
CAPS = st.one_of(st.none(), st.none(), st.integers(1, 5))


def request(resource, words):
    access, limit, weight = words
    return Request(resource, access, limit, weight if limit is None else min(weight, limit))


@settings(max_examples=500)
@given(words=st.lists(WORDS, max_size=12), cap=CAPS, asked=WORDS)
def test_single_scan_matches_the_rule_for_each_row(words, cap, asked):
    line, ahead = QueueTotals(cap, False), []
    for word in [*words, asked]:
        wanted = request("x", word)
        fits = wanted.fits(ahead, cap)
        assert line.fits(wanted.access, wanted.limit, wanted.weight) == fits
        assert not (line.closed and fits), "a row behind would never be polled"
        assert not QueueTotals(cap, True).fits(wanted.access, wanted.limit, wanted.weight)
        line.add(wanted.access, wanted.limit, wanted.weight)
        ahead.append(wanted)


def test_scan_ends_at_the_last_grantable_row():
    line = QueueTotals(None, False)
    for _ in range(3):
        assert not line.closed
        line.add("write", 3, 1)
    assert line.closed
    line = QueueTotals(None, False)
    for _ in range(9):
        line.add("read", 1, 1)
        assert not line.closed, "another reader may come"
    line.add("write", 1, 1)
    assert line.closed
    assert QueueTotals(None, True).closed


@pytest.mark.kept
@pytest.mark.engines("sqlite")
@pytest.mark.parametrize(("step", "let_in"), [(1, 0), (1, locks.LET_IN), (locks.FIRST_STEP, locks.LET_IN)])
def test_granted_rows_match_the_rule(database, monkeypatch, step, let_in):
    """Poll single rows, and many rows in one call, from any part of the queue."""
    monkeypatch.setattr(locks, "FIRST_STEP", step)  # also a scan in many parts
    monkeypatch.setattr(locks, "LET_IN", let_in)  # and releases that grant no row
    with contextlib.closing(database.session()) as session, contextlib.closing(database.session()) as other:
        own_member, other_member = session.register_member("h", 1, "p"), other.register_member("h", 1, "p")

        @settings(max_examples=100, suppress_health_check=list(HealthCheck))
        @given(
            rows=st.lists(st.tuples(WORDS, st.sampled_from(["ours", "ours", "theirs", "bare"])), max_size=10),
            cap=CAPS,
            paused=st.sampled_from([0, 0, 0, 1]),
            leaving=st.sets(st.integers(0, 9), max_size=6),
            polled=st.sets(st.integers(0, 9)),
        )
        @example(
            rows=[(("write", 1, 1), "ours"), (("read", 1, 1), "ours"), (("read", 1, 1), "ours")],
            cap=None,
            paused=0,
            leaving={0},
            polled={0, 1},
        )
        def check(rows, cap, paused, leaving, polled):
            resource = random_name()
            queue = []
            for number, (words, owner) in enumerate(rows):
                wanted = request(resource, words)
                if owner != "bare" and wanted.limit is None:  # the routines register such a row only where a cap is set
                    wanted = dataclasses.replace(wanted, limit=wanted.weight)
                if owner == "bare":
                    with contextlib.closing(database.raw()) as raw:
                        columns = {"access_type": wanted.access, "weight": wanted.weight}
                        if wanted.limit is not None:
                            columns["concurrency_limit"] = wanted.limit
                        database.insert_bare(raw.cursor(), resource, "bare", **columns)
                        (position,) = raw.execute("SELECT max(queue_position) FROM ProcessControl").fetchone()
                    ticket = Ticket(resource, position, "bare", False)
                else:
                    by, member = (session, own_member) if owner == "ours" else (other, other_member)
                    (ticket,) = by.register(member, "r", "o", f"{resource}.{number}", [wanted], False)
                    assert ticket.granted == wanted.fits([earlier.wanted for earlier in queue], None)
                queue.append(SimpleNamespace(wanted=wanted, ticket=ticket, owner=owner, granted=ticket.granted))
            removed = [row for number, row in enumerate(queue) if number in leaving]

            def fits(row, cap):
                return row.wanted.fits([ahead.wanted for ahead in queue[: queue.index(row)]], cap)

            def may_enter(row):
                return row.granted or (not paused and fits(row, cap))

            for row in removed:
                session.release(row.ticket, "released")
                queue.remove(row)
                inside = {entry.position for entry in session.entries(resource) if entry.state == "holds"}
                for behind in queue:
                    # A release grants the next rows that may proceed, up to a number.
                    entered = behind.ticket.position in inside and not behind.granted
                    assert not entered or fits(behind, None)
                    behind.granted = behind.granted or (entered and behind.owner != "bare")
            if removed and len(queue) <= locks.LET_IN:
                first = next((row for row in queue if row.owner != "bare"), None)
                assert first is None or first.granted or not fits(first, None)
            session.set_resource(resource, "cap", cap)
            session.set_resource(resource, "paused", paused)

            chosen = [row for number, row in enumerate([*queue, *removed]) if number in polled and row.owner == "ours"]
            answers = session.poll(own_member, [row.ticket for row in chosen])
            expected = {
                row.ticket.position: None if row in removed else True
                for row in chosen
                if row in removed or may_enter(row)
            }
            assert answers == expected
            states = {shown.position: shown.state for shown in session.entries(resource)}
            for row in queue:
                holds = may_enter(row) if row.owner == "bare" or row in chosen else row.granted
                assert states[row.ticket.position] == ("holds" if holds else "waits")
                if row.owner != "bare":
                    assert session.wait(row.ticket, 0, NEVER) is may_enter(row)
            for row in queue:
                assert session.release(row.ticket, "released")
            session.set_resource(resource, "cap", None)
            session.set_resource(resource, "paused", 0)

        check()
        session.deregister_member(own_member)
        other.deregister_member(other_member)
