"""Run ``sqlsem top`` without a database: the contents of the screen, and the effects of the keys.

The screen is compared with snapshots/*.txt; SQLSEM_SNAPSHOTS=write writes them anew.
"""

import contextlib
import dataclasses
import os
from datetime import timedelta
from pathlib import Path

import pytest
from rich.cells import cell_len
from support.overviews import ANSI, BIDI, MARKUP, NOW, FakePoller, a_night, entry, overview, resource

import sqlsem
from sqlsem.insight.board import VIEWS
from sqlsem.insight.consequences import Action
from sqlsem.ops.poller import Snapshot
from sqlsem.ops.tui.app import Top
from sqlsem.ops.tui.grid import Grid

pytestmark = pytest.mark.usefixtures("in_utc")

SNAPSHOTS = Path(__file__).parent / "snapshots"
NARROW, WIDE = (80, 24), (200, 50)


def strips(app):
    return app.screen._compositor.render_strips()


def screen(app):
    return "\n".join("".join(part.text for part in strip).rstrip() for strip in strips(app)) + "\n"


@contextlib.asynccontextmanager
async def driven(live, size=NARROW):
    """Give the running application, and ``press``: ``await press(…)`` presses keys, and returns the screen then."""
    app = Top(live)
    async with app.run_test(size=size) as pilot:

        async def press(*keys):
            await pilot.press(*keys)
            await pilot.pause()
            await app.workers.wait_for_complete()
            await pilot.pause()
            return screen(app)

        await pilot.pause()
        yield app, press


async def shown(live, *keys, size=NARROW):
    """Return the screen after some keys."""
    async with driven(live, size) as (_, press):
        return await press(*keys)


def said(app):
    return [notification.message for notification in app._notifications]


def row(text):
    """Return the line under the cursor, without the mark."""
    return next(line for line in text.splitlines() if line.startswith("> ")).removeprefix("> ")


# -- screens


@pytest.mark.parametrize("size", [NARROW, WIDE], ids=["80", "200"])
@pytest.mark.parametrize("view", VIEWS)
async def test_view_matches_its_snapshot(view, size):
    text = await shown(FakePoller(a_night()), str(list(VIEWS).index(view) + 1), size=size)
    lines = text.splitlines()
    assert len(lines) <= size[1]
    assert max(map(cell_len, lines)) <= size[0]
    file = SNAPSHOTS / f"{view}-{size[0]}.txt"
    if os.environ.get("SQLSEM_SNAPSHOTS") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


async def test_screen_without_colour_has_the_same_text(monkeypatch):
    text = await shown(FakePoller(a_night()), "j", "j")
    assert "> " in text
    monkeypatch.setenv("NO_COLOR", "1")
    async with driven(FakePoller(a_night())) as (app, press):
        assert await press("j", "j") == text
        colours = {
            colour.triplet
            for strip in strips(app)
            for part in strip
            if part.style
            for colour in (part.style.color, part.style.bgcolor)
            if colour is not None
        }
        assert len(colours) > 1
        assert all(colour.red == colour.green == colour.blue for colour in colours if colour is not None), colours
    # Each colour also has a word on the screen, and the cursor has a mark.
    assert row(text).split()[:2] == ["9", "revoked"]
    assert all(word in text for word in ("holds", "waits", "dead", "PAUSED"))


async def test_long_queue_draws_only_visible_rows():
    live = FakePoller(overview(entry(position) for position in range(1, 10_001)))
    async with driven(live) as (app, press):
        assert row(await press("end")).split()[0] == "10000"
        assert row(await press("pageup")).split()[0] == str(10_000 - app.query_one(Grid).size.height + 1)
        top = await press("home")
        assert row(top).startswith("etl  0 holding, 10000 waiting")
        assert "POS" in top


@pytest.mark.parametrize("name", [MARKUP, ANSI, BIDI, "[red]x[/red]"])
async def test_screen_escapes_control_characters(name):
    entries = [entry(1, "holds", name, host=name, note=name, limit=1), entry(2, "waits", name, limit=1)]
    live = FakePoller(overview(entries, [resource(name, paused=True, paused_by=name)]))
    async with driven(live) as (app, press):
        for keys in (["j"], ["x"], ["n", "r"], ["n", "2"], ["slash", *"zz"]):
            text = await press(*keys)
            assert all(line.isprintable() for line in text.splitlines())
        live.failure = sqlsem.NotHeld(name)
        await press("escape", "1", "r", "y")
        assert all(message.isprintable() for message in said(app))
    assert "[red]x" in await shown(FakePoller(overview([entry(1, "holds", "[red]x[/red]")])))


# -- navigation


async def test_cursor_stays_on_its_row():
    live = FakePoller(overview([entry(1, "holds"), entry(2), entry(3)]))
    async with driven(live) as (_, press):
        assert row(await press("j", "j", "j")).split()[:2] == ["3", "waits"]
        # Other requests come and go ahead of it, and it is granted.
        live.see(Snapshot(overview([entry(0, "holds", "a"), entry(3, "holds"), entry(4)]), NOW))
        assert row(await press()).split()[:2] == ["3", "holds"]
        live.see(Snapshot(overview([entry(0, "holds", "a")]), NOW))
        assert row(await press()).split()[:2] == ["0", "holds"], "its row is gone"
        live.see(Snapshot(overview(), NOW))
        assert "No request holds or waits." in await press()


async def test_filter_applies_during_and_after_typing():
    async with driven(FakePoller(a_night())) as (_, press):
        text = await press("slash", *"db2")
        assert row(text).startswith("etl")
        assert "1 of 9" in text
        # Keys are letters there.
        assert "No row" not in await press("enter")
        assert "/db2" in await press("3", "1")
        assert "1 of 9" not in await press("escape")
    assert "No row has these words in it." in await shown(FakePoller(a_night()), "slash", *"qqq")


async def test_sort_key_cycles_through_the_columns():
    async with driven(FakePoller(a_night())) as (_, press):
        assert "by RESOURCE" in await press("s")
        text = await press("s", "s", "s")
        assert "by FOR" in text
        assert "RESOURCE" in text
        assert "by STATE" in await press("S")
        assert "by " not in (await press("3")).splitlines()[3], "each view is sorted by itself"


async def test_keys_switch_views():
    async with driven(FakePoller(a_night())) as (_, press):
        assert "[2 Blockers]" in await press("tab")
        assert "[7 Rates]" in await press("shift+tab", "shift+tab")


async def test_rates_view_appears_with_rates():
    live = FakePoller(overview([entry(1, "holds")]))
    waiting = [entry(5, "holds", "rate:api", limit=1), entry(6, "waits", "rate:api", limit=1)]
    async with driven(live) as (_, press):
        text = await press()
        assert "6 Times" in text
        assert "7 Rates" not in text
        assert "[6 Times]" in await press("shift+tab"), "it is not gone to"
        assert "No rate has been used of late." in await press("7")
        live.see(Snapshot(dataclasses.replace(overview(waiting), rates=a_night().rates), NOW))
        text = await press()
        assert row(text).split()[:6] == ["api", "1.0s", "10", "3", "7", "2"]
        assert "103 of 100 used in 1m00s, room in 12s" in await press("1")
        await press("7", "p", "y")
        assert live.done == [Action("pause", resource="rate:api")]


async def test_frozen_view_shows_nothing_new():
    live = FakePoller(overview([entry(1, "holds")]))
    async with driven(live) as (_, press):
        assert "FROZEN" in await press("space")
        live.see(Snapshot(overview([entry(7, "holds")]), NOW))
        assert "db1:801" in await press()
        assert "db1:807" in await press("space")


async def test_help_explains_the_keys():
    async with driven(FakePoller(a_night())) as (_, press):
        assert "pause the resource" in await press("question_mark")
        assert "pause the resource" not in await press("p")


async def test_quit_stops_polling():
    live = FakePoller(a_night())
    async with driven(live) as (_, press):
        await press("q")
    assert live.stopped.is_set()


# -- changes

#: On `a_night`: the keys that lead to a row, the key of the action, and the resulting action.
ACTIONS = {
    "pause": (["j", "j", "j"], "p", "Pause 'etl'?", Action("pause", resource="etl")),
    "resume": (["end", "k"], "r", "Resume 'report'?", Action("resume", resource="report", position=7)),
    "revoke": (["j", "j", "j", "j"], "x", "Revoke 1 of 'etl'", Action("revoke", resource="etl", position=1)),
    "revoke_now": (
        ["j", "j", "j", "j"],
        "X",
        "Revoke at once 1 of 'etl'",
        Action("revoke_now", resource="etl", position=1),
    ),
    "retry": (["4"], "t", "Retry task 17?", Action("retry", task_id=17)),
}


@pytest.mark.parametrize("name", ACTIONS)
async def test_action_shows_its_consequence_and_asks(name):
    way, key, question, action = ACTIONS[name]
    live = FakePoller(a_night())
    async with driven(live) as (app, press):
        await press(*way)
        for no in ("n", "enter", "escape"):
            text = await press(key)
            assert question in text
            assert "The same as: sqlsem " in text
            assert question not in await press(no)
        assert live.done == []
        await press(key, "y")
        assert live.done == [action]
        assert said(app) == [f"done: {action.command}"]


async def test_cap_dialog_updates_its_consequence():
    live = FakePoller(overview([entry(1, "holds", limit=9), entry(2, limit=9), entry(3, limit=9)], [resource(cap=1)]))
    async with driven(live) as (_, press):
        text = await press("c")
        assert "'etl' has the limit 1 already" in text
        text = await press("backspace", "2")
        assert "Grants 2 (db1:802), then 3." in text
        assert "A cap is a whole number from 1" in await press("x")
        assert "A cap is a whole number from 1" in await press("backspace", "backspace", "0")
        assert "A cap is" in await press("enter"), "it is not gone on with"
        assert "Remove the limit of 'etl' (now 1)?" in await press("backspace")
        await press("2", "enter")
        assert live.done == [], "it is asked"
        await press("y")
        assert live.done == [Action("cap", resource="etl", cap=2)]
        await press("c", "backspace", "enter", "y")
        assert live.done[-1] == Action("uncap", resource="etl")
        await press("c", "escape")
        assert len(live.done) == 2


async def test_question_follows_the_overview():
    live = FakePoller(overview([entry(1, "holds", limit=1), entry(2, limit=1)]))
    async with driven(live) as (_, press):
        assert "Grants 2 (db1:802); no request waits behind." in await press("j", "x")
        live.see(Snapshot(overview([entry(1, "holds", limit=1), entry(5, limit=1)]), NOW))
        assert "Grants 5 (db1:805)" in await press()
        live.see(Snapshot(overview([entry(5, "holds", limit=1)]), NOW))
        text = await press()
        assert "Position 1 is gone already" in text
        assert "yes, do it" not in text
        await press("y")
        assert live.done == []


@pytest.mark.parametrize("key", list("prcxXt"))
async def test_inapplicable_key_says_so(key):
    async with driven(FakePoller(a_night())) as (app, press):
        await press("5", key)
        assert len(said(app)) == 1
        assert said(app)[0].startswith("There is no ")


async def test_failed_action_shows_its_error():
    live = FakePoller(a_night())
    live.failure = sqlsem.NotHeld("There is no row at position 1;\nsee: sqlsem ls")
    async with driven(live) as (app, press):
        await press("j", "j", "j", "j", "x", "y")
        assert said(app) == ["There is no row at position 1; see: sqlsem ls"]


async def test_reader_sees_missing_rights_before_the_question():
    live = FakePoller(a_night(), rights=())
    async with driven(live) as (app, press):
        assert "READ-ONLY" in (await press("j")).splitlines()[0]
        for key in "pxXc":
            text = await press(key)
            assert "yes" not in text
        assert said(app) == ["This login may only read"] * 4


# -- outages


async def test_top_survives_an_outage():
    live = FakePoller(a_night())
    async with driven(live) as (_, press):
        down = dataclasses.replace(
            live.snapshot, down_since=NOW + timedelta(seconds=3), trouble="Cannot reach it: connection refused"
        )
        live.see(down)
        text = await press()
        shown_text = " ".join(text.split())
        assert "NO ANSWER since 03:12:08; trying again every 2.0s. The data below is of 03:12:05." in shown_text
        assert "connection refused" in shown_text
        assert "db1:801" in text, "what was seen last"
        live.see(Snapshot(overview([entry(7, "holds")]), NOW))
        text = await press()
        assert "NO ANSWER" not in text
        assert "db1:807" in text


async def test_start_during_an_outage():
    live = FakePoller(Snapshot(down_since=NOW, trouble="Cannot reach it"))
    async with driven(live) as (_, press):
        assert "NO ANSWER since 03:12:05" in await press()
        await press("x", "p", "c", "slash", "a", "enter", "s", "3")
        live.see(Snapshot(a_night(), NOW))
        assert "lives" in await press("escape")
