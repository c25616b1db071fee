"""Draw the slopes: ``python -m benchmarks.growth.picture FIGURES.json PICTURE.svg`` draws earlier measurements."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.growth import shown
from benchmarks.printed import ENGINES

COLOURS = {"postgresql": "#336791", "sqlite": "#d9822b"}
PEERS = {"pg_advisory_lock": "#777777", "SKIP LOCKED": "#777777", "Procrastinate": "#a05195", "PgQueuer": "#4f9d69"}
#: The same figures make the same file, and texts stay texts.
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "sqlsem",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.markersize": 3.5,
}


def draw(figures: dict[str, Any], file: str | Path) -> None:
    """Write the picture of the results of `growth` (``{engine: {…}}``)."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(2, 3, figsize=(11, 6.2), layout="constrained")
        for axis, panel in zip(axes.flat, (_handoffs, _tries, _pairs, _tasks, _rows, _pages), strict=True):
            panel(
                axis, {engine: figures_of_engine for engine, figures_of_engine in figures.items() if engine in COLOURS}
            )
            axis.set_xscale("symlog" if panel in (_pairs, _tasks) else "log", **_linear(panel))
            axis.minorticks_off()
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=6.5, framealpha=0.6)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def _linear(panel: Any) -> dict[str, Any]:
    """Begin an axis at 0, unless it is logarithmic."""
    return {"linthresh": 1000} if panel in (_pairs, _tasks) else {}


def _words(axes: Any, title: str, across: str, up: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(across)
    axes.set_ylabel(up)


def _line(axes: Any, points: Iterable[tuple[float, float | None]], label: str, colour: str, style: str = "-") -> None:
    pairs = sorted((x, y) for x, y in points if y is not None)  # None: not measured
    if pairs:
        axes.plot(*zip(*pairs, strict=True), style, marker="o", color=colour, label=label)


def _target(axes: Any, value: float, label: str) -> None:
    axes.axhline(value, color="#c0392b", linewidth=0.8, linestyle=":", label=label)


def _crowds(figures: dict[str, Any], several: bool) -> list[dict[str, Any]]:
    own_crowds = [crowd for crowd in figures.get("waiters", ()) if "subject" not in crowd]
    fewest = min((crowd["waiters"] for crowd in own_crowds), default=0)
    return [crowd for crowd in own_crowds if (crowd["processes"] > 1) is several or crowd["waiters"] == fewest]


def _handoffs(axes: Any, figures: dict[str, Any]) -> None:
    _words(axes, "Hand-offs a second", "waiters on one resource", "a second")
    for engine, figures_of_engine in figures.items():
        for several, style in ((False, "-"), (True, "--")):
            form = "processes of 100" if several else "one process"
            points = [(point["waiters"], point["rate"]) for point in _crowds(figures_of_engine, several)]
            _line(axes, points, f"{ENGINES[engine]}, {form}", COLOURS[engine], style)
        raw = [
            crowd for crowd in figures_of_engine.get("waiters", ()) if "subject" in crowd and crowd["processes"] == 1
        ]
        points = [(crowd["waiters"], crowd["rate"]) for crowd in raw]
        _line(axes, points, "pg_advisory_lock, a connection each", PEERS["pg_advisory_lock"])
    axes.set_ylim(bottom=0)


def _tries(axes: Any, figures: dict[str, Any]) -> None:
    _words(axes, "A try (solid), a registration (dashed)", "waiters on one resource", "µs")
    for engine, figures_of_engine in figures.items():
        for column, style in (("attempt", "-"), ("registration", "--")):
            points = [(point["waiters"], point[column]) for point in _crowds(figures_of_engine, False)]
            _line(axes, points, ENGINES[engine] if style == "-" else "", COLOURS[engine], style)
    axes.set_ylim(bottom=0)


def _grown(curve: dict[str, Any]) -> list[tuple[float, float]]:
    first = curve["points"][0]
    return [
        (point["done"], point["cost"] / point["without"] * first["without"] / first["cost"])
        for point in curve["points"]
    ]


def _pairs(axes: Any, figures: dict[str, Any]) -> None:
    _words(axes, "A pair, under an old snapshot", "pairs done under it", "times the first")
    styles = {"repeatable read": "-", "prepared": "--", "standby": ":", "reader": "-"}
    for engine, figures_of_engine in figures.items():
        for kind, curve in figures_of_engine.get("snapshots", {}).get("a pair", {}).get("sqlsem", {}).items():
            _line(axes, _grown(curve), f"{ENGINES[engine]}, {kind}", COLOURS[engine], styles[kind])
    _target(axes, shown.SNAPSHOT, "wanted, at most")
    axes.set_ylim(bottom=0)


def _tasks(axes: Any, figures: dict[str, Any]) -> None:
    _words(axes, "A task (claim and end), under an old snapshot", "tasks done under it", "times the first")
    for engine, figures_of_engine in figures.items():
        for subject, kinds in figures_of_engine.get("snapshots", {}).get("a task", {}).items():
            label = f"sqlsem, {ENGINES[engine]}" if subject == "sqlsem" else subject
            curve = next(iter(kinds.values()))
            _line(axes, _grown(curve), label, PEERS.get(subject, COLOURS[engine]))
    _target(axes, shown.SNAPSHOT, "wanted, at most")
    axes.set_yscale("log")


def _looks(axes: Any, figures: dict[str, Any], subject: str, columns: dict[str, str]) -> None:
    for engine, figures_of_engine in figures.items():
        looks = figures_of_engine.get("looking", {}).get(subject, {})
        for column, style in columns.items():
            points = [(float(number), look[column]) for number, look in looks.items() if column in look]
            _line(axes, points, f"{ENGINES[engine]}, {column} ({subject})", COLOURS[engine], style)


def _rows(axes: Any, figures: dict[str, Any]) -> None:
    _words(axes, "Looking at all of them", "how many", "ms")
    _looks(axes, figures, "rows of one resource", {"entries": "-", "ls": "--"})
    _looks(axes, figures, "waiting owners", {"chain": ":"})
    axes.set_yscale("log")
    _target(axes, shown.ROWS, "wanted for 10,000 rows, at most")


def _pages(axes: Any, figures: dict[str, Any]) -> None:
    _words(axes, "A page of 100", "how many there are", "ms")
    _looks(axes, figures, "rows of history", {"page": "-", "of a resource": "--"})
    _looks(axes, figures, "pending tasks", {"tasks": ":"})
    axes.set_yscale("log")
    _target(axes, shown.PAGE, "wanted, at most")


if __name__ == "__main__":
    source, target = sys.argv[1:]
    measured = json.loads(Path(source).read_text(encoding="utf-8"))
    draw({engine: found["growth"] for engine, found in measured.items() if isinstance(found, dict)}, target)
