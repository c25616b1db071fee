"""Draws docs/ls.svg and docs/top.svg: what ``sqlsem ls`` shows of a real queue, and ``sqlsem top`` of a made-up night.

Run as ``python docs/pictures.py``. Hosts, programs and durations are made up, so the pictures always say the same. A
test compares what they say, not how it is drawn, with what is shown now. docs/night.py draws the timeline.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

from rich.terminal_theme import MONOKAI

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.overviews import FakeLive, a_night

import sqlsem
from sqlsem import cli
from sqlsem.core.operators import Operators
from sqlsem.insight.overview import Overview
from sqlsem.model import Entry
from sqlsem.terminal import output
from sqlsem.tui.app import Top

FOLDER = Path(__file__).resolve().parent
WIDTH = 90
SVG = "{http://www.w3.org/2000/svg}"
#: What each request says of itself: its note, its host and process, its program, for how long it has been there.
WHO = {
    "customer": ("etl01", 4321, "load.py", 754.0),
    "product": ("etl02", 977, "load.py", 611.0),
    "sales": ("etl01", 4377, "sqlsem run", 95.0),
    "stock": ("etl03", 1210, "SQLAgent", 41.0),
    "sales report": ("bi01", 3003, "report.py", 1320.0),
    "nightly load": ("etl02", 1004, "load.py", 12.0),
}


def stand_in_line(first: sqlsem.Coordinator, second: sqlsem.Coordinator, leave: threading.Event) -> None:
    """Four loads of which three may be in, and a report that a load waits for; in this order."""
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
        while len(first.entries()) < number:
            time.sleep(0.01)


def made_up(entry: Entry) -> Entry:
    """The same row with a host, a program and a duration that stay the same."""
    host, pid, program, seconds = WHO[entry.note or ""]
    return dataclasses.replace(entry, host=host, pid=pid, program=program, owner=None, seconds=seconds)


def ls() -> str:
    """``sqlsem ls``, as SVG."""
    leave = threading.Event()
    console = output.CleanConsole(width=WIDTH, record=True, force_terminal=True, file=io.StringIO(), highlight=False)
    real = Operators.overview

    def overview(self: Operators) -> Overview:
        found = real(self)
        return dataclasses.replace(found, entries=[made_up(entry) for entry in found.entries])

    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/locks.db"
        with sqlsem.connect(url) as first, sqlsem.connect(url) as second:
            stand_in_line(first, second, leave)
            with (
                mock.patch.object(Operators, "overview", overview),
                mock.patch.object(output, "console", return_value=console),
            ):
                cli.main(["--url", url, "ls"], standalone_mode=False)
            leave.set()
            while first.entries():
                time.sleep(0.01)
    return console.export_svg(title="$ sqlsem ls", theme=MONOKAI, unique_id="ls")


def top() -> str:
    """``sqlsem top``, as SVG."""

    async def draw() -> str:
        app = Top(FakeLive(a_night()))
        async with app.run_test(size=(110, 28)) as pilot:
            await pilot.pause()
            return app.export_screenshot(title="$ sqlsem top")

    return asyncio.run(draw())


PICTURES = {"ls": ls, "top": top}


def words(svg: str) -> list[str]:
    """What a picture of ours says."""
    tree = ElementTree.fromstring(svg)  # noqa: S314  # nobody else's
    found = [" ".join("".join(node.itertext()).split()) for node in tree.iter(f"{SVG}text")]
    return [text for text in found if text]


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"  # the night is of nowhere in particular
    if hasattr(time, "tzset"):
        time.tzset()
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
