"""The dashboard for Grafana, which ``sqlsem metrics --dashboard`` prints."""

from __future__ import annotations

import re
import string
from typing import Any

__all__ = ["dashboard"]

Json = dict[str, Any]

COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

# Words of the queries below: the exporters and the resources that the user has chosen, and the time of a rate. ``BY``
# stands for the labels in the query's legend.
WORDS = {"AT": 'instance=~"$instance"', "OF": 'resource=~"$resource"', "INTERVAL": "$__rate_interval"}

#: The legend of a line for each holder.
HOLDER = "{{resource}} {{holder_program}} {{holder_note}}"


def _number(title: str, description: str, query: str, unit: str = "short", red: int = 1) -> Json:
    """Return a panel with one current number, which is red from ``red`` on."""
    steps = [{"color": "green", "value": None}, {"color": "red", "value": red}]
    return {
        "type": "stat",
        "title": title,
        "description": description,
        "targets": _targets({"": query}),
        "fieldConfig": {
            "defaults": {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"},
        "gridPos": {"h": 4, "w": 4},
        "datasource": SOURCE,
    }


def _graph(
    title: str,
    queries: dict[str, str],
    width: int,
    description: str = "",
    *,
    unit: str = "short",
    stacked: bool = False,
) -> Json:
    """Return a panel with lines over time. The keys of ``queries`` are the legends of the lines."""
    drawing = {"fillOpacity": 10, "stacking": {"mode": "normal" if stacked else "none"}}
    return {
        "type": "timeseries",
        "title": title,
        "description": description,
        "targets": _targets(queries),
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": drawing}, "overrides": []},
        "options": {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "gridPos": {"h": 8, "w": width},
        "datasource": SOURCE,
    }


def _targets(queries: dict[str, str]) -> list[Json]:
    return [
        {
            "refId": letter,
            "datasource": SOURCE,
            "expr": _in_full(query, legend),
            "legendFormat": legend,
        }
        for letter, (legend, query) in zip(string.ascii_uppercase, queries.items(), strict=False)
    ]


def _in_full(query: str, legend: str) -> str:
    labels = ", ".join(re.findall(r"{{(\w+)}}", legend))
    words = {**WORDS, "BY": f"by ({labels})"}
    return re.sub("|".join(words), lambda word: words[word[0]], query)


def _ninth_decile(histogram: str) -> str:
    return f"histogram_quantile(0.9, sum by (le, resource) (rate({histogram}_bucket{{OF}}[INTERVAL])))"


def _row(title: str) -> Json:
    return {"type": "row", "title": title, "collapsed": False, "gridPos": {"h": 1, "w": COLUMNS}, "panels": []}


#: The panels, which follow each other from left to right, in rows.
PANELS = [
    _row("Now"),
    _number("Waiting", "Requests that wait.", "sum(sqlsem_waiting{AT,OF})", red=50),
    _number(
        "Longest wait",
        "For how long the oldest request has waited.",
        "max(sqlsem_longest_wait_seconds{AT,OF})",
        unit="s",
        red=3600,
    ),
    _number(
        "Dead or missing",
        "Rows whose owner is dead, or cannot be found.",
        "sum(sqlsem_dead{AT,OF}) + sum(sqlsem_missing{AT,OF})",
    ),
    _number("Failed tasks", "Of all work queues.", 'sum(sqlsem_tasks{AT,state="failed"})'),
    _number("Paused", "Resources that an operator has paused.", "sum(sqlsem_paused{AT,OF})"),
    _number("Exporter", "1 while an exporter cannot read its database.", "1 - min(sqlsem_up{AT})"),
    _row("Waiters and holders"),
    _graph(
        "Waiting",
        {"{{resource}}": "sum BY (sqlsem_waiting{AT,OF})"},
        12,
        "Requests that wait, by resource.",
        stacked=True,
    ),
    _graph(
        "Holding",
        {"{{resource}}": "sum BY (sqlsem_holding{AT,OF})"},
        12,
        "Requests that hold, by resource.",
        stacked=True,
    ),
    _graph(
        "Wait caused by holders",
        {HOLDER: "topk(10, sum BY (rate(sqlsem_blamed_seconds_total{AT,OF}[INTERVAL])))"},
        12,
        "Waiters' seconds a second, by the holder for which they wait in the end.",
    ),
    _graph(
        "Blocked now",
        {HOLDER: "topk(10, sum BY (sqlsem_blocked{AT,OF}))"},
        12,
        "Requests that wait for this holder, also behind other requests.",
    ),
    _graph("Longest wait", {"{{resource}}": "max BY (sqlsem_longest_wait_seconds{AT,OF})"}, 8, unit="s"),
    _graph("Longest hold", {"{{resource}}": "max BY (sqlsem_longest_hold_seconds{AT,OF})"}, 8, unit="s"),
    _graph(
        "Bad ends",
        {"{{resource}} {{outcome}}": "sum BY (increase(sqlsem_ended_total{AT,OF}[1h])) > 0"},
        8,
        "Requests that died, were revoked or were lost within the hour before.",
    ),
    _row("Recent times, of resources in use"),
    _graph(
        "Waits, 90th percentile",
        {"{{resource}}": 'max BY (sqlsem_recent_wait_seconds{AT,OF,quantile="0.9"})'},
        12,
        unit="s",
    ),
    _graph(
        "Holds, 90th percentile",
        {"{{resource}}": 'max BY (sqlsem_recent_hold_seconds{AT,OF,quantile="0.9"})'},
        12,
        unit="s",
    ),
    _row("Work queues and batches"),
    _graph("Pending tasks", {"{{queue}}": 'sum BY (sqlsem_tasks{AT,state="pending"})'}, 6, stacked=True),
    _graph("Oldest pending task", {"{{queue}}": "max BY (sqlsem_oldest_pending_seconds{AT})"}, 6, unit="s"),
    _graph("Attempts a minute", {"{{queue}}": "sum BY (sqlsem_task_rate{AT})"}, 6),
    _graph(
        "Batches",
        {"{{status}}": "sum BY (sqlsem_batches{AT})", "overdue": "sum(sqlsem_batches_overdue{AT})"},
        6,
        "Open and failed ones.",
    ),
    _row("Rates"),
    _graph(
        "Used, of the limit",
        {"{{resource}} in {{window}} s": "sum BY (sqlsem_rate_used{AT,OF}) / sum BY (sqlsem_rate_limit{AT,OF})"},
        8,
        "What counts now of what may be used in the window.",
        unit="percentunit",
    ),
    _graph(
        "Waiters, and debt",
        {
            "waiting {{resource}}": 'sum BY (sqlsem_waiting{AT,OF,resource=~"rate:.*"})',
            "debt {{resource}} in {{window}} s": "sum BY (sqlsem_rate_debt{AT,OF})",
        },
        8,
        "Requests in the queue of a rate; costs adjusted beyond the limit.",
    ),
    _graph(
        "Acquired from rates, a second",
        {
            "{{resource}}": "sum BY (rate(sqlsem_rate_taken_total{AT,OF}[INTERVAL]))",
            "waited {{resource}}": "sum BY (rate(sqlsem_rate_waits_total{AT,OF}[INTERVAL]))",
            "timeout {{resource}}": "sum BY (rate(sqlsem_rate_timeouts_total{AT,OF}[INTERVAL]))",
        },
        8,
        "The cost of all grants; how many requests waited, and how many timed out. Requests that are refused at"
        " once are counted by programs only.",
    ),
    _row("Programs that register sqlsem.metrics"),
    _graph(
        "Grants a second", {"{{resource}}": "sum BY (rate(sqlsem_client_grants_total{OF}[INTERVAL]))"}, 6, unit="ops"
    ),
    _graph("Wait, 90th percentile", {"{{resource}}": _ninth_decile("sqlsem_client_wait_seconds")}, 6, unit="s"),
    _graph("Hold, 90th percentile", {"{{resource}}": _ninth_decile("sqlsem_client_hold_seconds")}, 6, unit="s"),
    _graph(
        "Lost, deadlocks, timeouts",
        {
            "lost {{resource}}": "sum BY (rate(sqlsem_client_lost_total{OF}[INTERVAL]))",
            "deadlock {{resource}}": "sum BY (rate(sqlsem_client_deadlocks_total{OF}[INTERVAL]))",
            "timeout {{resource}}": "sum BY (rate(sqlsem_client_timeouts_total{OF}[INTERVAL]))",
        },
        6,
        unit="ops",
    ),
]


def _variable(name: str, text: str, metric: str) -> Json:
    """Return a filter of the dashboard: the values of the label ``name``."""
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "label": text,
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "definition": query,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "refresh": 2,
    }


def dashboard() -> Json:
    """Return the dashboard, ready for JSON."""
    panels, x, y = [], 0, 0
    for number, panel in enumerate(PANELS, 1):
        size = panel["gridPos"]
        panels.append({**panel, "id": number, "gridPos": {**size, "x": x, "y": y}})
        x += size["w"]
        if x == COLUMNS:
            x, y = 0, y + size["h"]
    return {
        "title": "sqlsem",
        "uid": "sqlsem",
        "tags": ["sqlsem"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                _variable("instance", "Exporter", "sqlsem_up"),
                _variable("resource", "Resource", "sqlsem_waiting"),
            ]
        },
        "annotations": {"list": []},
        "panels": panels,
    }
