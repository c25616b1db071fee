"""Draws docs/ls.svg, docs/top.svg and docs/dashboard.png: ``sqlsem ls`` of a real queue, ``sqlsem top`` and ``sqlsem
dashboard`` of a made-up night.

Run as ``python docs/pictures.py``, or with the names of the pictures to draw; the dashboard needs the dependency group
``browser`` and a Chromium. Hosts, programs and durations are made up, so the words of the pictures never change. A test
compares these words, not the drawing, with the present output. docs/night.py draws the timeline.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import struct
import sys
import tempfile
import threading
import time
import zlib
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

from rich.terminal_theme import MONOKAI

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.browsers import chromium
from support.overviews import FakePoller, a_night

import sqlsem
from sqlsem import cli
from sqlsem.api.admin import Admin
from sqlsem.insight.overview import Overview
from sqlsem.ops.dashboard import server
from sqlsem.ops.dashboard.app import Dashboard
from sqlsem.ops.dashboard.pages import PageQuery, Pages
from sqlsem.ops.hosts import LOOPBACK, Hosts
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.tables import CleanConsole
from sqlsem.ops.tui.app import Top
from sqlsem.values.locks import Entry

FOLDER = Path(__file__).resolve().parent
WIDTH = 90
SVG = "{http://www.w3.org/2000/svg}"
#: By the note of a request: its host, process and program, and for how many seconds it waits or holds.
WHO = {
    "customer": ("etl01", 4321, "load.py", 754.0),
    "product": ("etl02", 977, "load.py", 611.0),
    "sales": ("etl01", 4377, "sqlsem run", 95.0),
    "stock": ("etl03", 1210, "SQLAgent", 41.0),
    "sales report": ("bi01", 3003, "report.py", 1320.0),
    "nightly load": ("etl02", 1004, "load.py", 12.0),
}


def stand_in_line(first: sqlsem.Coordinator, second: sqlsem.Coordinator, leave: threading.Event) -> None:
    """Start threads for four loads of which three may hold, a report, and a load that waits for it; in this order."""
    locks = [
        first.limit("etl", 3, note="customer"),
        second.limit("etl", 3, note="product"),
        first.limit("etl", 3, note="sales"),
        second.limit("etl", 3, note="stock"),
        first.read("dim_customer", note="sales report"),
        second.write("dim_customer", note="nightly load"),
    ]

    def hold(lock: sqlsem.Lock) -> None:
        with lock:
            leave.wait()

    for number, lock in enumerate(locks, 1):
        threading.Thread(target=hold, args=(lock,)).start()
        while len(first.admin.entries()) < number:
            time.sleep(0.01)


def made_up(entry: Entry) -> Entry:
    """Return the row with a made-up host, program and duration."""
    host, pid, program, seconds = WHO[entry.note or ""]
    return dataclasses.replace(entry, host=host, pid=pid, program=program, owner=None, seconds=seconds)


def ls() -> str:
    """Return ``sqlsem ls`` as SVG."""
    leave = threading.Event()
    console = CleanConsole(width=WIDTH, record=True, force_terminal=True, file=io.StringIO(), highlight=False)
    real = Admin.overview

    def overview(self: Admin) -> Overview:
        found = real(self)
        return dataclasses.replace(found, entries=[made_up(entry) for entry in found.entries])

    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/locks.db"
        with sqlsem.connect(url) as first, sqlsem.connect(url) as second:
            stand_in_line(first, second, leave)
            with (
                mock.patch.object(Admin, "overview", overview),
                mock.patch.object(output, "console", return_value=console),
            ):
                cli.main(["--url", url, "ls"], standalone_mode=False)
            leave.set()
            while first.admin.entries():
                time.sleep(0.01)
    return console.export_svg(title="$ sqlsem ls", theme=MONOKAI, unique_id="ls")


def top() -> str:
    """Return ``sqlsem top`` as SVG."""

    async def draw() -> str:
        app = Top(FakePoller(a_night()))
        async with app.run_test(size=(110, 28)) as pilot:
            await pilot.pause()
            return app.export_screenshot(title="$ sqlsem top")

    return asyncio.run(draw())


def page() -> str:
    """Return the dashboard's page as HTML."""
    live = FakePoller(a_night())
    pages = Pages(live.where, live.every)
    values = {"notice": "", "can_change": False, "logged_in": False, "private": False, "csrf_token": ""}
    return pages.draw("page.html", **values, **pages.values(live.snapshot, PageQuery.of({})))


class _Said(HTMLParser):
    """The words of a page, in its order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._hidden = 0
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style", "title")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "title")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words += data.split()


def words_of_page(html: str) -> str:
    """Return the words of a page, with single spaces."""
    return " ".join(_Said(html).words)


def dashboard() -> bytes:
    """Return the dashboard in a browser as PNG, with its words in a chunk of text."""
    from playwright.sync_api import sync_playwright

    shown = Dashboard(FakePoller(a_night()), Hosts(LOOPBACK))
    place = server.listen("127.0.0.1", 0)
    running = server.Server(shown, lambda: None)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [place]})
    thread.start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium())
            opened = browser.new_page(viewport={"width": 1200, "height": 480}, timezone_id="UTC", locale="en-GB")
            opened.goto(f"http://127.0.0.1:{place.getsockname()[1]}/")
            opened.get_by_text("limit 3 full").first.wait_for()
            drawn = opened.screenshot(full_page=True)
            browser.close()
    finally:
        running.should_exit = True
        thread.join()
    return with_words(drawn, words_of_page(page()))


#: The offsets in a PNG at which the first chunk, the size of the picture, begins and ends.
PNG_FIRST, PNG_SECOND = 8, 33


def with_words(png: bytes, words: str) -> bytes:
    """Return the picture with its words in a chunk of text."""
    chunk = b"iTXtsqlsem\0\0\0\0\0" + words.encode()
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return png[:PNG_SECOND] + chunk + png[PNG_SECOND:]


def words_in(png: bytes) -> str:
    """Return the words of a picture: the text that `with_words` has put into it."""
    at = PNG_FIRST
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        chunk = png[at + 4 : at + 8 + length]
        if chunk.startswith(b"iTXtsqlsem\0"):
            return chunk.rpartition(b"\0")[2].decode()
        at += 12 + length
    raise ValueError("The picture says nothing")


PICTURES = {"ls": ls, "top": top}


def words(svg: str) -> list[str]:
    """Return the words of an SVG that this module has drawn."""
    tree = ElementTree.fromstring(svg)  # noqa: S314  # drawn by this module
    found = [" ".join("".join(node.itertext()).split()) for node in tree.iter(f"{SVG}text")]
    return [text for text in found if text]


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"  # the same times on every host
    if hasattr(time, "tzset"):
        time.tzset()
    wanted = sys.argv[1:] or [*PICTURES, "dashboard"]
    for name, draw in PICTURES.items():
        if name in wanted:
            (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
    if "dashboard" in wanted:
        (FOLDER / "dashboard.png").write_bytes(dashboard())
