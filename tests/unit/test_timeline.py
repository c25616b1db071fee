"""The picture of a night, which no text in names and notes can break."""

from __future__ import annotations

import html
import html.parser
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support import nights
from support.nights import Ask, at, entry, past

import sqlsem
from sqlsem import cli
from sqlsem.insight.timeline import STRETCHES, timeline
from sqlsem.ops.terminal.timeline import picture

ODD = "</script><script>document.title='harm'</script><b>&amp;\x1b[31m\u202ex\u2028"
KINDS = [("write", 1, 1), ("write", 3, 1), ("write", 3, 2), ("read", 1, 1), ("stage:1", 1, 1)]
asks = st.builds(
    lambda when, kind, hold, patience: Ask(when, "a", *kind, hold, patience),
    st.integers(0, 12),
    st.sampled_from(KINDS),
    st.integers(0, 6),
    st.none() | st.integers(0, 9),
)


def drawn(rows, entries=(), until=1000, **more):
    return timeline(nights.newest_first(rows), entries, at(0), at(until), **more)


@settings(max_examples=60)
@given(st.lists(asks, min_size=1, max_size=12))
def test_use_equals_the_weight_inside(some):
    rows = nights.lived(some)
    (panel,) = drawn(rows).panels
    use = {nights.seconds(moment): weight for moment, weight in panel.use}
    weight = 0
    assert STRETCHES == 1000
    for second in range(100):
        weight = use.get(second, weight)
        # A step of this timeline is a second, and shows all rows that were inside at any moment of it.
        inside = [row for row in rows if row.granted_at and row.granted_at <= at(second) and row.ended_at > at(second)]
        labels = {holder.access for holder in inside if holder.access != "write"}
        assert weight >= sum(holder.weight for holder in inside if holder.access == "write") + len(labels)
        touching = [
            row for row in rows if row.granted_at and row.granted_at < at(second + 1) and row.ended_at >= at(second)
        ]
        assert weight <= sum(holder.weight for holder in touching)


@settings(max_examples=60)
@given(st.lists(asks, min_size=1, max_size=12))
def test_bars_do_not_overlap(some):
    rows = nights.lived(some)
    (panel,) = drawn(rows).panels
    assert len(panel.bars) == panel.requests == len(rows)
    for lane in range(panel.lanes):
        own = [bar for bar in panel.bars if bar.lane == lane]
        for earlier, other in itertools.pairwise(own):
            assert earlier.ended <= other.asked
    maximum = max(
        sum(earlier.asked <= bar.asked < earlier.ended or earlier is bar for earlier in panel.bars)
        for bar in panel.bars
    )
    assert panel.lanes <= max(1, maximum)


def test_timeline_draws_every_kind_of_row():
    rows = [
        past("etl", 1, 0, 0, 100, limit=3),
        past("etl", 2, 10, 10, 120, limit=3, weight=2),
        past("etl", 3, 20, 100, 130, limit=3),
        past("etl", 4, 20, None, 50, limit=3, outcome="timeout"),
        past("dim", 5, 0, 0, 60, "read"),
        past("dim", 6, 5, 5, 80, "read"),
    ]
    picture = drawn(rows, [entry("etl", 7, 500, 510, 1000, limit=2), entry("etl", 8, 600, None, 1000, limit=2)])
    dim, etl = picture.panels
    assert (dim.resource, dim.limits, dim.most_use) == ("dim", (1,), 1)
    assert (etl.limits, etl.most_use, etl.requests) == ((2, 3), 3, 6)
    assert [(nights.seconds(moment), weight) for moment, weight in etl.use] == [
        (0, 1),
        (10, 3),
        (121, 1),
        (131, 0),
        (510, 1),
    ]
    assert (picture.requests, picture.drawn, picture.left_out()) == (8, 8, "")
    assert [nights.seconds(bar.ended) for bar in etl.bars if bar.source.position in (7, 8)] == [1000, 1000]


def test_earlier_rows_are_cut_off():
    (panel,) = timeline([past("a", 1, 0, 10, 50)], [], at(20), at(60)).panels
    (bar,) = panel.bars
    assert (bar.asked, bar.ended) == (at(20), at(50))
    assert panel.use[0] == (at(20), 1)


def test_timeline_draws_a_converted_request_once():
    rows = [past("a", 1, 0, 50, 60, "read", None, outcome="upgraded"), past("a", 1, 0, 60, 90)]
    (panel,) = drawn(rows).panels
    assert [(nights.seconds(bar.asked), nights.seconds(bar.ended)) for bar in panel.bars] == [(0, 60), (60, 90)]
    assert panel.requests == 1
    (panel,) = drawn(rows[:1], [entry("a", 1, 0, 60, 1000)]).panels
    assert [(nights.seconds(bar.asked), nights.seconds(bar.ended)) for bar in panel.bars] == [(0, 60), (60, 1000)]


def test_omissions_are_named():
    rows = [past("a", n, n, n, n + n, limit=500) for n in range(1, 101)]
    picture = drawn([*rows, past("b", 200, 0, 0, 1)], maximum=10, max_panels=1)
    (panel,) = picture.panels
    assert [bar.source.position for bar in panel.bars] == list(range(91, 101))
    assert panel.most_use == 50  # all count
    assert picture.left_out() == (
        "10 of 101 requests are drawn, the longest; the others took 90 s or less each, and count in the use; "
        "least used resources left out: 1"
    )


def test_timeline_of_an_empty_history():
    picture = drawn([])
    assert (picture.panels, picture.left_out()) == ((), "")


# -- pictures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd_night():
    pytest.importorskip("vl_convert", reason="to draw a timeline vl-convert-python is needed")
    rows = [past(ODD[:120], n, 10 * n, 10 * n, 10 * n + 30, limit=3, note=f"{ODD} {n}") for n in range(1, 30)]
    return drawn([*rows, past("b", 50, 0, None, 300, outcome="timeout", program=ODD)], until=400)


@pytest.fixture(scope="module")
def page(odd_night):
    return picture(odd_night, ".html").decode()


class Parsed(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts[len(self.tags) - 1] = self.texts.get(len(self.tags) - 1, "") + data


def test_page_is_self_contained_and_escaped(page):
    parsed = Parsed(page)
    scripts = [number for number, (tag, _) in enumerate(parsed.tags) if tag == "script"]
    assert len(scripts) == 3
    assert not [tag for tag, _ in parsed.tags if tag in ("link", "img", "iframe", "b", "object")]
    assert not [attrs for _, attrs in parsed.tags if "src" in attrs or "href" in attrs]
    policy = next(attrs["content"] for tag, attrs in parsed.tags if "http-equiv" in attrs)
    assert policy.startswith("default-src 'none';")
    specification = json.loads(parsed.texts[scripts[1]])
    notes = {value.get("what") for view in specification["vconcat"] for value in view.get("data", {}).get("values", ())}
    assert any("</script>" in str(note) and "\\x1b[31m\\u202ex\\u2028" in str(note) for note in notes)
    assert not {"\x1b", "\u202e", "\u2028"} & set(parsed.texts[scripts[1]])


def test_svg_has_text_and_shapes_only(odd_night):
    text = picture(odd_night, ".svg").decode()
    root = ET.fromstring(text)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "g", "path", "text", "rect", "defs", "clipPath", "line", "tspan"}
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on") or "href" in name]
    shown = " ".join(filter(None, (element.text for element in root.iter())))
    assert "</script><script>" in shown
    assert not {"\x1b", "\u202e", "\u2028"} & set(text)


def test_png_is_written_also_of_an_empty_night(odd_night):
    assert picture(odd_night, ".png").startswith(b"\x89PNG")
    assert ET.fromstring(picture(drawn([]), ".svg")) is not None


def browser() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


_DRIVE = """<script>
(async function () {
  const log = {}, view = () => window.timeline, wait = ms => new Promise(done => setTimeout(done, ms));
  while (!view()) await wait(20);
  const canvas = document.querySelector("#timeline canvas"), box = canvas.getBoundingClientRect();
  const send = (kind, type, x, y, more) => canvas.dispatchEvent(new kind(type, Object.assign(
    {clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true, view: window}, more)));
  log.zoomed = [];
  for (const y of [100, 200]) {
    for (const type of ["pointermove", "mousemove"]) send(MouseEvent, type, 400, y);
    send(WheelEvent, "wheel", 400, y, {deltaY: -400});
    await view().runAsync();
    log.zoomed.push(view().signal("zoom").from);
  }
  send(MouseEvent, "dblclick", 400, 100);
  await view().runAsync();
  log.again = view().signal("zoom").from;
  log.title = document.title;
  const search = document.querySelector(".vega-bind input");
  search.value = "U2028 17";
  search.dispatchEvent(new Event("input"));
  await wait(200);
  await view().runAsync();
  const bars = (function all(item) {
    return item.marktype === "rect" && item.items.length && item.items[0].datum ? item.items
      : (item.items || []).flatMap(all);
  })(view().scenegraph().root);
  log.found = bars.filter(bar => bar.opacity === 1 && bar.datum.search).map(bar => bar.datum.position);
  for (let y = 20; y < 200 && !log.tip; y += 4)
    for (let x = 100; x < 1000 && !log.tip; x += 30) {
      for (const type of ["pointermove", "mousemove"]) send(MouseEvent, type, x, y);
      await wait(1);
      const tip = document.querySelector("#vg-tooltip-element.visible");
      if (tip) log.tip = [tip.textContent.includes("<\\/script>"), tip.querySelectorAll("script, b").length];
    }
  const told = document.createElement("pre");
  told.id = "told";
  told.textContent = JSON.stringify(log);
  document.body.replaceChildren(told);
})();
</script></body></html>"""


@pytest.mark.skipif(browser() is None, reason="a page is tried in Chromium, which is not there")
def test_page_works_in_a_browser(page, tmp_path):
    """Zoom by the wheel in any view, back by a double click, search, and a text that stays text."""
    file = tmp_path / "night.html"
    file.write_text(page.rpartition("</body>")[0] + _DRIVE, encoding="utf-8")
    done = subprocess.run(
        [
            *(browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=120000"),
            *("--dump-dom", file.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        # It wants to write into both, and a socket's path must be short.
        env={**os.environ, "TZ": "UTC", "HOME": str(tmp_path), "TMPDIR": tempfile.gettempdir()},
    )
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
    answer = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert answer, f"exit code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    log = json.loads(html.unescape(answer[1]))
    (first, last), (first_again, last_again) = log["zoomed"]
    assert nights.START.timestamp() * 1000 < first < first_again < last_again < last
    assert log["again"] is None
    assert set(log["found"]) == {17}
    assert log["tip"] == [True, 0]
    assert log["title"].startswith("sqlsem: ")


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(url: str) -> str:
    with sqlsem.connect(url) as coordinator:
        coordinator.admin.resources()  # the tables are there
    return url


def call(*arguments: str):
    result = CliRunner().invoke(cli.main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_timeline_command_writes_each_format(url: str, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="to draw a timeline vl-convert-python is needed")
    file = tmp_path / "night.svg"
    with sqlsem.connect(url) as coordinator:
        with coordinator.limit("etl", 3, note=ODD.replace("\u2028", "")):
            pass
        with coordinator.mutex("now"):
            result = call("timeline", "--since", "30d", "-o", str(file))
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{file}: all 2 requests are drawn, of 2 resources\n"
    assert "etl: 1 request; limit 3, most in use 1" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("wrong", [["-o", "night.pdf"], ["-o", "night"], [], ["-o", "n.svg", "-n", "0"]])
def test_wrong_usage(url: str, wrong: list[str]) -> None:
    assert call("timeline", *wrong).exit_code == 64


def test_timeline_reports_an_unwritable_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqlsem.cli.nights.picture", lambda *_: b"")
    monkeypatch.setattr("sqlsem.cli.nights.library", lambda: None)
    result = call("timeline", "-o", str(tmp_path / "there is none" / "night.svg"))
    assert result.exit_code == 78
    assert "cannot be written to" in result.output


def test_timeline_without_its_library_names_the_extra(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    result = call("timeline", "-o", "night.svg")
    assert result.exit_code == 78
    assert "pip install 'sqlsem[timeline]'" in result.output


def test_documented_picture_matches_its_script(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="to draw a timeline vl-convert-python is needed")
    script = Path(__file__).resolve().parents[2] / "docs" / "night.py"
    stored = script.with_suffix(".svg").read_text(encoding="utf-8")
    again = tmp_path / "night.py"
    again.write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run([sys.executable, str(again)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    fresh = again.with_suffix(".svg").read_text(encoding="utf-8")

    def words(text: str) -> list[str | None]:
        return [element.text for element in ET.fromstring(text).iter() if element.tag.endswith("text")]

    # (The next version of the drawing library may draw a line in another way.)
    assert words(fresh) == words(stored), "draw it anew: python docs/night.py"
    assert fresh.count("<path") == stored.count("<path")
