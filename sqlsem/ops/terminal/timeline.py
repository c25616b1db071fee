"""Draws a timeline: makes a Vega-Lite specification, which `vl-convert` converts to a page, an SVG or a PNG.

Texts of users (names, notes) get into the page only as JSON beside the script, with every `<` escaped, and are shown as
plain text: they are never interpreted as markup.
"""

from __future__ import annotations

import html
import json
import re
from datetime import datetime
from typing import Any

from sqlsem.insight.timeline import Bar, Panel, Timeline
from sqlsem.insight.words import counted, requester, seconds_in_words
from sqlsem.util.printable import clean, clean_json
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.locks import Past

__all__ = ["FORMATS", "library", "picture"]

#: The formats of a picture: suffixes of its file's name.
FORMATS = (".html", ".svg", ".png")
WIDTH, LANE_HEIGHT, LEAST_HEIGHT, MAX_HEIGHT, USE_HEIGHT = 1000, 9, 27, 270, 45
#: Colours that are distinguishable with red-green colour blindness, and that differ in brightness.
COLOURS = {"waits": "#e9c46a", "gave up": "#c1121f", "holds": "#2a6f97", "ended badly": "#6a040f"}
BADLY = ("reaped", "revoked", "lost")
USE_COLOUR, LIMIT_COLOUR = "#8fb8a8", "#333333"
LONGEST_NAME = 60
#: The fields that a search covers, besides the name of the resource.
SEARCHED = ", ".join(f"datum.{name}" for name in ("position", "who", "what", "ended", "access", "state"))
#: The labels of the time axis, as short as possible.
TIME = (
    "timeFormat(datum.value, seconds(datum.value) ? '%H:%M:%S' : "
    "hours(datum.value) || minutes(datum.value) ? '%H:%M' : '%b %d')"
)

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; \
style-src 'unsafe-inline'; img-src data: blob:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 1rem; color: #222; background: #fff; }}
h1 {{ font-size: 1.2rem; }} p {{ max-width: 60rem; }}
.vega-bind {{ margin: .5rem 0; }} .vega-bind input {{ font-size: 1rem; width: 20rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{words}</p>
<p>Turn the wheel to zoom, drag to move, double-click to see all again; point at a bar to read what it was.</p>
<div id="timeline" role="img" aria-label="{title}"></div>
<script>{script}</script>
<script id="specification" type="application/json">{specification}</script>
<script>
const given = JSON.parse(document.getElementById("specification").textContent);
vegaEmbed("#timeline", given, {{actions: false, renderer: "canvas"}})
  .then(function (made) {{ window.timeline = made.view; }});
</script>
</body>
</html>
"""


def library() -> Any:
    """Import and return vl_convert. Raises `ConfigurationError` if it is not installed."""
    try:
        import vl_convert
    except ImportError:
        raise ConfigurationError(
            "To draw a timeline vl-convert-python is needed; install it with: pip install 'sqlsem[timeline]'",
            code="driver",
        ) from None
    return vl_convert


def picture(timeline: Timeline, kind: str) -> bytes:
    """Return the content of a picture's file, which has one of `FORMATS`. Raises `ConfigurationError` if vl_convert is
    not installed.
    """
    vl_convert = library()
    if kind == ".html":
        script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
        script = re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE)
        specification = clean_json(_specification(timeline, search=True), indent=None).replace("<", "\\u003c")
        words = timeline.left_out()
        page = _PAGE.format(
            title=html.escape(_title(timeline)),
            words=html.escape(words[:1].upper() + words[1:] + "." if words else "All requests are drawn."),
            script=script,
            specification=specification,
        )
        return page.encode()
    specification = json.dumps(_specification(timeline, search=False))
    if kind == ".svg":
        return str(vl_convert.vegalite_to_svg(specification, allowed_base_urls=[])).encode()
    return bytes(vl_convert.vegalite_to_png(specification, scale=1.5, allowed_base_urls=[]))


def _moment(moment: datetime) -> str:
    return moment.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _title(timeline: Timeline) -> str:
    return f"sqlsem: {_moment(timeline.begin)} to {_moment(timeline.end)}"


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _short(text: str) -> str:
    cleaned = clean(text)
    return cleaned if len(cleaned) <= LONGEST_NAME else cleaned[: LONGEST_NAME - 1] + "…"


def _heading(panel: Panel) -> str:
    limits = " and ".join(map(str, panel.limits)) or "none"
    count = counted(panel.requests, "request", ",")
    return f"{_short(panel.resource)}: {count}; limit {limits}, most in use {panel.most_use}"


def _stretches(bar: Bar) -> list[dict[str, Any]]:
    """Return the parts of a bar, one or two: the wait, and the hold."""
    row = bar.source
    outcome = row.outcome if isinstance(row, Past) else row.state
    who = requester(row)
    inside = row.granted_at
    fields = {
        "lane": bar.lane,
        "who": clean(who),
        "what": clean(" ".join(filter(None, (row.program, row.note)))),
        "ended": clean(outcome),
        "position": row.position,
        "weight": row.weight,
        "access": clean(row.access),
        "waited": seconds_in_words(max(0.0, ((inside or bar.ended) - row.requested_at).total_seconds())),
        "held": "" if inside is None else seconds_in_words(max(0.0, (bar.ended - inside).total_seconds())),
    }
    parts = []
    entered = bar.ended if inside is None else min(max(inside, bar.asked), bar.ended)
    if entered > bar.asked:
        gave_up = inside is None and isinstance(row, Past)
        state = "gave up" if gave_up else "waits"
        parts.append({**fields, "from": _ms(bar.asked), "to": _ms(entered), "state": state})
    if inside is not None:
        state = "ended badly" if outcome in BADLY else "holds"
        parts.append({**fields, "from": _ms(entered), "to": _ms(bar.ended), "state": state})
    return parts


def _time(axis: dict[str, Any] | None) -> dict[str, Any]:
    return {"field": "from", "type": "temporal", "axis": axis, "scale": {"nice": False}}


def _amount(field: str, domain: list[float], **more: Any) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "scale": {"domain": domain, "nice": False}, **more}


def _bars(panel: Panel, search: bool) -> dict[str, Any]:
    colours = {"domain": list(COLOURS), "range": list(COLOURS.values())}
    encoding: dict[str, Any] = {
        "x": _time(None),
        "x2": {"field": "to"},
        "y": _amount("lane", [panel.lanes, 0], axis=None),
        "y2": {"field": "under"},
        "color": {"field": "state", "type": "nominal", "title": None, "scale": colours, "legend": {"orient": "top"}},
    }
    if search:
        names = ("who", "what", "position", "access", "weight", "waited", "held", "ended")
        encoding["tooltip"] = [{"field": name, "type": "nominal"} for name in names]
        encoding["opacity"] = {
            "condition": {"test": "!search || indexof(datum.search, lower(search)) >= 0", "value": 1},
            "value": 0.1,
        }
    return {
        "title": {"text": _heading(panel), "anchor": "start", "fontSize": 12},
        "width": WIDTH,
        "height": max(LEAST_HEIGHT, min(MAX_HEIGHT, LANE_HEIGHT * panel.lanes)),
        "data": {"values": [part for bar in panel.bars for part in _stretches(bar)]},
        "transform": [
            {"calculate": "datum.lane + 0.85", "as": "under"},
            {"calculate": f"lower(join([{json.dumps(clean(panel.resource))}, {SEARCHED}], ' '))", "as": "search"},
        ],
        "mark": {"type": "rect", "clip": True, "stroke": None, "minBandSize": 1},
        "encoding": encoding,
    }


def _use(panel: Panel, timeline: Timeline) -> dict[str, Any]:
    top = max([1, panel.most_use, *panel.limits])
    axis = {"values": sorted({0, panel.most_use, *panel.limits}), "format": "d"}
    steps = [{"from": _ms(moment), "weight": weight} for moment, weight in panel.use]
    steps = [{"from": _ms(timeline.begin), "weight": 0}, *steps, {"from": _ms(timeline.end), "weight": 0}]
    return {
        "width": WIDTH,
        "height": USE_HEIGHT,
        "layer": [
            {
                "data": {"values": steps},
                "mark": {"type": "area", "interpolate": "step-after", "clip": True, "color": USE_COLOUR},
                "encoding": {
                    "x": _time({"title": None, "labelExpr": TIME}),
                    "y": _amount("weight", [0, top * 1.1], title="in use", axis=axis),
                },
            },
            {
                "data": {"values": [{"limit": limit} for limit in panel.limits]},
                "mark": {"type": "rule", "strokeDash": [6, 3], "color": LIMIT_COLOUR},
                "encoding": {"y": {"field": "limit", "type": "quantitative"}},
            },
        ],
    }


def _specification(timeline: Timeline, *, search: bool) -> dict[str, Any]:
    views: list[dict[str, Any]] = []
    for panel in timeline.panels:
        views += [_bars(panel, search), _use(panel, timeline)]
    if not views:
        views = [{"data": {"values": [{}]}, "mark": {"type": "text", "text": "Nothing has happened."}, "width": WIDTH}]
    for number, view in enumerate(views):
        # All views zoom together, as they share a scale and the name of its field.
        (view["layer"][0] if "layer" in view else view)["name"] = f"view{number}"
    specification: dict[str, Any] = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "vconcat": views,
        "spacing": 6,
        "resolve": {"scale": {"x": "shared", "color": "shared"}},
        "background": "white",
    }
    if search:
        zoomed = [f"view{number}" for number in range(len(views))] if timeline.panels else []
        specification["params"] = [
            {"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales", "views": zoomed}
        ] * bool(zoomed) + [
            {"name": "search", "value": "", "bind": {"input": "search", "placeholder": "who, what, how it ended"}}
        ]
    else:
        specification["title"] = {"text": _title(timeline), "subtitle": timeline.left_out(), "anchor": "start"}
    return specification
