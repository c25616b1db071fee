"""The tables of the displays: rows, words, sorting, filtering."""

import dataclasses

import pytest
from support.overviews import ANSI, BIDI, MARKUP, a_night, entry, overview, resource

from sqlsem.insight import board
from sqlsem.insight.board import ORDER, VIEWS, offered_views, summary
from sqlsem.insight.reasons import reasons
from sqlsem.values.rates import RateEntry
from sqlsem.values.tasks import QueueCounts


def listing(overview_, *rest, **others):
    return board.listing(overview_, reasons(overview_), *rest, **others)


def cells(table, *keys):
    at = [next(number for number, column in enumerate(table.columns) if column.key == key) for key in keys]
    return [tuple(row.cells[number] for number in at) for row in table.rows if not row.heading]


@pytest.mark.parametrize("view", VIEWS)
def test_views_show_full_and_empty_overviews(view):
    for sort in VIEWS[view].sorts:
        table = listing(a_night(), view, sort)
        assert table.rows
        assert table.sort == sort
        assert all(row.heading or len(row.cells) == len(table.columns) for row in table.rows)
        assert len({row.key for row in table.rows}) == len(table.rows)
        assert all(row.details for row in table.rows)
        assert listing(overview(), view, sort).rows == ()


def test_queue_view_groups_rows_by_resource():
    table = listing(a_night())
    headings = [row.cells[0] for row in table.rows if row.heading]
    assert headings == [
        "archive  1 holding, 0 waiting, 1 dead",
        "etl  3 holding, 2 waiting",
        "report  1 holding, 1 waiting  PAUSED by ann",
        "spare  0 holding, 0 waiting  limit set to 2 by bob",
    ]
    assert [column.key for column in table.columns][:2] == ["position", "state"]
    assert [position for (position,) in cells(table, "position")] == list("891234567")
    assert (table.shown, table.total) == (9, 9)


def test_row_description():
    rows = {row.position: row for row in listing(a_night()).rows if not row.heading}
    assert rows[6].cells[-4] == "process missing for 2.0s, removed in 3.0s"
    assert rows[9].cells[-4] == "asked to stop"
    assert rows[4].cells[-4], "why it waits"
    assert rows[1].details == ("1 holds etl for 16m30s: limit 3, db1:801, load.py", "Note: orders")
    assert rows[4].cells[-4] == "limit 3 full: db1:801 +2"
    assert rows[4].details[1].startswith('Why: the limit of 3 is full: db1:801 (load.py, "orders"), ')


def test_row_actions():
    rows = {row.key: row for row in listing(a_night()).rows}
    assert rows["retl"].actions == ("pause", "cap")
    assert rows["rreport"].actions == ("resume", "cap")
    assert rows["p4"].actions == ("revoke", "revoke_now", "pause", "cap")
    queues = {row.cells[0]: row for row in listing(a_night(), "tasks").rows}
    assert (queues["nightly"].actions, queues["nightly"].task_id) == (("retry",), 17)
    assert queues["mail"].actions == ()


def windows(name="api", **others):
    values = {"used": 100, "idle": 0.4, "free_in": 12.0, **others}
    return [RateEntry(name, 1.0, 10, **{**values, "used": 3, "free_in": 0.0}), RateEntry(name, 60.0, 100, **values)]


def in_line(*positions, **others):
    """Return the requests in the queue of a rate: the first one has the turn, and waits all the same."""
    values = {"limit": 1, **others}
    first, *rest = positions
    return [
        entry(first, "holds", "rate:api", **values),
        *(entry(position, "waits", "rate:api", **values) for position in rest),
    ]


def test_rate_line_shows_its_use():
    table = listing(overview([entry(1, "holds"), *in_line(5, 6, 7)], rates=windows()))
    used = "3 of 10 used in 1.0s, 100 of 100 used in 1m00s, room in 12s"
    assert [row.cells[0] for row in table.rows if row.heading] == [
        "etl  1 holding, 0 waiting",
        f"rate:api  3 waiting  {used}",
    ]
    assert cells(table, "why", "enters")[1:] == [
        (used, "00:12"),
        ("behind db1:805", "00:12"),
        ("behind db1:805, 1 before", "00:12"),
    ]
    last = table.rows[-1]
    assert last.details[1] == f"Why: rate 'api': {used}; 2 ahead of it in the queue, so it is granted in about 00:12"
    paused = listing(overview(in_line(5, 6), [resource("rate:api", paused=True)], rates=windows()))
    assert "PAUSED" in paused.rows[0].cells[0]
    assert cells(paused, "why", "enters")[1] == ("paused", ""), "the time is unknown"
    dead = [*in_line(5, 6), entry(7, "dead", "rate:api", limit=1)]
    assert "  2 waiting, 1 dead  3 of 10 used" in listing(overview(dead, rates=windows())).rows[0].cells[0]
    assert listing(overview(in_line(5, 6))).rows[0].cells[0] == "rate:api  1 holding, 1 waiting", (
        "nothing is known of it"
    )


def test_rates_show_their_waiters():
    night = overview(in_line(5, 6), [resource("rate:mail", paused=True)], rates=[*windows(), *windows("mail", taken=7)])
    table = listing(night, "rates")
    assert cells(table, "rate", "window", "limit", "used", "left", "free", "waiting", "state") == [
        ("api", "1.0s", "10", "3", "7", "", "2", ""),
        ("api", "1m00s", "100", "100", "0", "12s", "2", ""),
        ("mail", "1.0s", "10", "3", "7", "", "0", "paused"),
        ("mail", "1m00s", "100", "100", "0", "12s", "0", "paused"),
    ]
    assert [row.actions for row in table.rows] == [("pause",)] * 2 + [("resume",)] * 2
    assert {row.resource for row in table.rows} == {"rate:api", "rate:mail"}
    assert (
        table.rows[1].details[0] == "rate 'api': 100 of 100 used in 1m00s, room in 12s; 2 waiting; last used 0.4s ago"
    )
    assert "7 taken" in table.rows[3].details[1]
    assert cells(listing(night, "rates", "free"), "free") == [("12s",), ("12s",), ("",), ("",)]
    assert cells(listing(night, "rates", filter_text="rate:mail"), "rate") == [("mail",), ("mail",)]


def test_rate_view_is_offered_if_there_are_rates():
    others = [key for key in VIEWS if key != "rates"]
    assert [view.key for view in offered_views(a_night(), "queues")] == [*others, "rates"]
    assert [view.key for view in offered_views(overview(), "queues")] == others
    assert [view.key for view in offered_views(None, "queues")] == others
    assert [view.key for view in offered_views(overview(), "rates")] == [*others, "rates"], "one is there"


def test_view_sorted_by_a_column_has_no_headings():
    table = listing(a_night(), "queues", "seconds")
    assert table.columns[0].key == "resource"
    assert not any(row.heading for row in table.rows)
    seconds = [entry.seconds for entry in a_night().entries]
    assert cells(table, "position")[0] == ("1",)
    assert len(seconds) == table.shown
    assert [value for (value,) in cells(listing(a_night(), "queues", "position"), "position")] == list("123456789")


def test_unknown_values_sort_last():
    assert cells(listing(a_night(), "members", "missing"), "missing") == [("2.0s",), ("",), ("",)]
    assert cells(listing(a_night(), "members", "left"), "left") == [("21s",), ("3.0s",), ("",)]
    assert cells(listing(a_night(), "tasks", "oldest"), "queue") == [("nightly",), ("mail",)]


def test_numbers_are_sorted_as_numbers():
    queues = [QueueCounts(f"q{number}", number, 0, 0, 0, 0, 0, None, 0.0, None) for number in (9, 10, 100)]
    assert cells(listing(overview(queues=queues), "tasks", "pending"), "pending") == [("100",), ("10",), ("9",)]


def test_filter_keeps_rows_with_all_its_words():
    assert cells(listing(a_night(), filter_text="DB2"), "position") == [("5",)]
    assert cells(listing(a_night(), filter_text="etl waits"), "position") == [("4",), ("5",)]
    assert cells(listing(a_night(), filter_text="db1:802:1"), "position") == [("2",)], "the requesting id"
    headings = [row.cells[0].split()[0] for row in listing(a_night(), filter_text="limit set to").rows]
    assert headings == ["spare"], "what is set for a resource without rows"
    nothing = listing(a_night(), filter_text="no such thing")
    assert (nothing.rows, nothing.shown, nothing.total) == ((), 0, 9)


def test_unknown_choice_becomes_the_first():
    table = listing(a_night(), "no such view", "no such column")
    assert (table.view.key, table.sort) == ("queues", ORDER)


def test_summary_counts_everything_in_a_line():
    assert summary(a_night()) == (
        "3 resources, 5 holding, 3 waiting, 1 dead, 1 paused, 1 missing, 12 tasks pending, 2 running, 1 failed"
    )
    assert summary(overview()) == "0 resources, 0 holding, 0 waiting"


@pytest.mark.parametrize("name", [MARKUP, ANSI, BIDI])
def test_foreign_text_is_printable_everywhere(name):
    night = a_night()
    entries = [
        *(entry(1, "holds", name, host=name, program=name, note=name, owner=name, limit=1),),
        entry(2, "waits", name, requesting_id=name, host=None, limit=1),
    ]
    night = dataclasses.replace(
        overview(entries, [resource(name, paused=True, paused_by=name, cap=1, cap_by=name)]),
        members=[dataclasses.replace(member, host=name, program=name, login=name) for member in night.members],
        queues=[dataclasses.replace(queue, queue=name) for queue in night.queues],
        batches=[
            dataclasses.replace(
                batch, name=name, parts=tuple(dataclasses.replace(part, part=name, error=name) for part in batch.parts)
            )
            for batch in night.batches
        ],
        holds={name: night.holds["etl"]},
        rates=[dataclasses.replace(rate, name=name) for rate in night.rates],
    )
    shown = [text for view in VIEWS for row in listing(night, view).rows for text in (*row.cells, *row.details) if text]
    assert shown
    assert all(text.isprintable() for text in shown)
    assert any("script" in text or "\\x1b" in text or "\\u202e" in text for text in shown)
