"""Metrics: labels that stay few, the counters of this process, and an exporter's view of an overview."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support import PATIENCE, until

import sqlsem
import sqlsem.testing
from sqlsem.cli import main
from sqlsem.ops.metrics import Collector, labels, register
from sqlsem.ops.metrics import exporter as exporter_module
from sqlsem.ops.metrics.exporter import Exporter
from sqlsem.util.printable import clean
from sqlsem.values.errors import Unavailable

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")

PROMTOOL = shutil.which("promtool")
ODD = 'a\x1b[2J<b>\u202e"\\\n# HELP forged 1\n'


def values(collector):
    """All samples, by name and labels."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    text = prometheus_client.generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def values_anew(exporter):
    """All samples of a new poll."""
    exporter._last_metrics = None
    return values(exporter)


def of(samples, name, **sample_labels):
    return samples.get((name, tuple(sorted(sample_labels.items()))))


# -- labels


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("nightly", "nightly"),
        ("load:2026-11-22", "load:*-*-*"),
        ("customer:100000", "customer:*"),
        ("job-5f0c7b1e-4a2d-4b1c-9e7f-aabbccddeeff", "job-*"),
        ("facade", "facade"),
        ("dim_customer", "dim_*"),
    ],
)
def test_pattern_becomes_the_label_of_its_names(name, pattern):
    assert labels.Patterns(["dim_*"])(name) == pattern


@given(st.text(max_size=300), st.integers(1, 5))
def test_labels_are_printable_short_and_few(text, maximum):
    assert clean(labels.label(text)) == labels.label(text)
    assert len(labels.label(text)) <= labels.MAX_CHARACTERS
    label_set = labels.Few(maximum)
    shown = {label_set.of(f"{text}{number}") for number in range(20)}
    assert len(shown) == maximum + 1
    assert (labels.OTHER,) in shown


def test_vanished_labels_make_room_for_new_labels():
    label_set = labels.Few(2)
    assert label_set.all_of({("a",): 1, ("b",): 5, ("c",): 3}) == {("a",): ("other",), ("b",): ("b",), ("c",): ("c",)}
    assert label_set.all_of({("a",): 9, ("c",): 1, ("d",): 1}) == {("a",): ("a",), ("c",): ("c",), ("d",): ("other",)}


# -- this process


@pytest.fixture
def collector():
    new_collector = Collector(patterns=["dim_*"], maximum=3)
    yield new_collector
    new_collector.close()


def test_actions_of_this_process_are_counted(collector):
    with sqlsem.testing.memory() as locks:
        with locks.mutex("load:7", note=ODD):
            held, closed = threading.Event(), threading.Event()

            def hold():
                assert locks.mutex("load:7").acquire(timeout=PATIENCE)
                held.set()
                closed.wait(PATIENCE)

            waiting = threading.Thread(target=hold)
            waiting.start()
            until(lambda: of(values(collector), "sqlsem_client_waiting", resource="load:*") == 1, "it waits")
            assert of(values(collector), "sqlsem_client_holding", resource="load:*") == 1
            late = threading.Thread(target=lambda: locks.limit("load:7", 2).acquire(timeout=0.05))
            late.start()
            late.join(PATIENCE)
        assert held.wait(PATIENCE)
        with locks.read("dim_a"), locks.read("dim_b"), pytest.raises(sqlsem.Deadlock):
            locks.write("dim_b").acquire()
    closed.set()
    waiting.join(PATIENCE)
    samples = values(collector)
    assert of(samples, "sqlsem_client_grants_total", resource="load:*") == 2
    assert of(samples, "sqlsem_client_grants_total", resource="dim_*") == 2
    assert of(samples, "sqlsem_client_wait_seconds_count", resource="load:*") == 2
    assert of(samples, "sqlsem_client_hold_seconds_count", resource="load:*") == 1
    assert of(samples, "sqlsem_client_timeouts_total", resource="load:*") == 1
    assert of(samples, "sqlsem_client_deadlocks_total", resource="dim_*") == 1
    assert of(samples, "sqlsem_client_lost_total", resource="load:*") == 1, "what was held when its coordinator closed"
    (blamed,) = (key for key in samples if key[0] == "sqlsem_client_blamed_seconds_total")
    blame = dict(blamed[1])
    assert blame["resource"] == "load:*"
    assert blame["holder_note"] == labels.label(ODD)
    assert blame["holder_note"].isprintable()
    assert samples[blamed] >= 0.05


def test_many_resources_have_few_labels(collector):
    with sqlsem.testing.memory() as locks:
        for number in range(26):
            with locks.mutex(chr(ord("a") + number)):
                pass
    samples = values(collector)
    assert len([key for key in samples if key[0] == "sqlsem_client_grants_total"]) == 4
    assert of(samples, "sqlsem_client_grants_total", resource="other") == 23
    assert of(samples, "sqlsem_client_other_events_total") == 46


def test_metrics_cover_a_coordinator_until_closed():
    with sqlsem.testing.memory() as first, sqlsem.testing.memory() as other:
        registry = prometheus_client.CollectorRegistry()
        collector = register(registry, coordinator=first)
        for locks in (first, other):
            with locks.mutex("a"):
                pass
        assert registry.get_sample_value("sqlsem_client_grants_total", {"resource": "a"}) == 1
        collector.close()
        with first.mutex("a"):
            pass
        assert registry.get_sample_value("sqlsem_client_grants_total", {"resource": "a"}) == 1


# -- a database


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/locks.db"


def test_waiting_is_attributed_to_holders(url):
    with sqlsem.connect(url) as locks:
        exporter = Exporter(locks)
        locks.queue("q").put({"a": 1})
        locks.admin.set_limit("capped", 3)
        locks.admin.pause("stopped")
        locks.admin.set_priorities("ranked", "5m")
        locks.rate("api", {"1m": 10, 3600: 4}, cost=3).take().adjust(5)
        with locks.mutex("load:7", note=ODD):

            def wait():
                with locks.mutex("load:7"):
                    pass

            waiting = [threading.Thread(target=wait) for _ in range(2)]
            for thread in waiting:
                thread.start()
            until(lambda: len(locks.admin.entries("load:7")) == 3, "two wait")
            values(exporter)
            samples = values_anew(exporter)
        for thread in waiting:
            thread.join(PATIENCE)
    exporter.close()
    assert of(samples, "sqlsem_up") == 1
    assert of(samples, "sqlsem_holding", resource="load:*") == 1
    assert of(samples, "sqlsem_waiting", resource="load:*") == 2
    assert of(samples, "sqlsem_waiting", resource="capped") == 0
    assert of(samples, "sqlsem_cap", resource="capped") == 3
    assert of(samples, "sqlsem_paused", resource="stopped") == 1
    assert of(samples, "sqlsem_ageing_seconds", resource="ranked") == 300
    rates = {
        window: [
            of(samples, f"sqlsem_rate_{kind}", resource="rate:api", window=window) for kind in ("limit", "used", "debt")
        ]
        for window in ("60", "3600")
    }
    assert rates == {"60": [10, 5, 0], "3600": [4, 5, 1]}
    assert of(samples, "sqlsem_waiting", resource="rate:api") == 0
    assert of(samples, "sqlsem_tasks", queue="q", state="pending") == 1
    assert of(samples, "sqlsem_members", kind="beacon") == 1
    assert of(samples, "sqlsem_longest_wait_seconds", resource="load:*") > 0
    blamed = {name: dict(key) for name, key in samples if name.startswith(("sqlsem_blocked", "sqlsem_blamed"))}
    assert set(blamed) == {"sqlsem_blocked", "sqlsem_blocked_seconds", "sqlsem_blamed_seconds_total"}
    assert {label_set["holder_note"] for label_set in blamed.values()} == {labels.label(ODD)}


def test_single_query_for_each_scrape(url, monkeypatch):
    monkeypatch.setattr(exporter_module, "FRESH_SECONDS", PATIENCE)
    calls = []
    with sqlsem.connect(url) as locks:
        exporter = Exporter(locks)
        values(exporter)
        session = exporter._session
        session.overview = lambda: calls.append("overview") or type(session).overview(session)
        values(exporter)  # at once again: the same answer
        assert calls == []
        values_anew(exporter)
        assert exporter._session is session, "one connection"
        assert calls == ["overview"]
        exporter.close()


def test_exporter_reports_an_outage_and_its_end(url, monkeypatch):
    with sqlsem.connect(url) as locks:
        exporter = Exporter(locks)
        assert of(values(exporter), "sqlsem_up") == 1
        connect = type(locks.engine).connect

        def refuses(self, purpose):
            raise Unavailable("it is away")

        monkeypatch.setattr(type(locks.engine), "connect", refuses)
        exporter._close_session()
        samples = values_anew(exporter)
        assert {name for name, _ in samples} == {"sqlsem_up", "sqlsem_scrape_seconds"}
        assert of(samples, "sqlsem_up") == 0
        monkeypatch.setattr(type(locks.engine), "connect", connect)
        assert of(values_anew(exporter), "sqlsem_up") == 1
        exporter.close()


def many(url, number):
    """Put so many resources, all paused by an operator, into the database."""
    with sqlsem.connect(url) as locks:
        locks.admin.pause("r0")
        with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
            columns = [row[1] for row in connection.execute("PRAGMA table_info(sqlsem_resource)")]
            (row,) = connection.execute("SELECT * FROM sqlsem_resource").fetchall()
            at = columns.index("resource_id")
            letters = "abcdefghijklmnopqrstuvwxyz"
            rows = []
            for count in range(number):
                name, rest = "", count + 26
                while rest:
                    name, rest = name + letters[rest % 26], rest // 26
                rows.append((*row[:at], f"x{name}", *row[at + 1 :]))
            connection.executemany(f"INSERT INTO sqlsem_resource VALUES ({', '.join('?' * len(row))})", rows)


def test_a_hundred_thousand_resources(url):
    many(url, 100_000)
    with sqlsem.connect(url) as locks:
        exporter = Exporter(locks)
        for _ in range(4):  # each gets twice the time of the one before, on a machine that is too busy
            samples = values_anew(exporter)
            if of(samples, "sqlsem_up") == 1:
                break
        exporter.close()
    per_name = {}
    for name, key in samples:
        per_name[name] = per_name.get(name, 0) + 1
        assert len(key) <= 3
    assert max(per_name.values()) <= 101
    assert of(samples, "sqlsem_other", kind="resource") == 100_001 - 100
    assert of(samples, "sqlsem_paused", resource="other") == 100_001 - 100


def test_abnormal_ends_are_exported(url):
    with sqlsem.connect(url) as locks:
        lock = locks.mutex("load:7")
        lock.acquire()
        locks.admin.revoke(lock.grant.position, force=True)
        exporter = Exporter(locks, once=True)
        exporter.count_ends()
        samples = values(exporter)
        exporter.close()
    assert of(samples, "sqlsem_ended_last_hour", resource="load:*", outcome="revoked") == 1
    assert of(samples, "sqlsem_ended_last_hour", resource="other", outcome="reaped") == 0
    assert not [name for name, _ in samples if name.startswith("sqlsem_blamed")]


def test_abnormal_ends_are_counted(url):
    def revoke(locks, name):
        lock = locks.mutex(name)
        lock.acquire()
        locks.admin.revoke(lock.grant.position, force=True)

    with sqlsem.connect(url) as locks:
        revoke(locks, "load:7")
        exporter = Exporter(locks)
        exporter.count_ends()
        assert of(values_anew(exporter), "sqlsem_ended_total", resource="other", outcome="revoked") == 0
        revoke(locks, "load:8")
        revoke(locks, "load:9")
        exporter.count_ends()
        exporter.count_ends()
        # At first 0, so that a comparison of two scrapes shows the increase.
        assert of(values_anew(exporter), "sqlsem_ended_total", resource="load:*", outcome="revoked") == 0
        assert of(values_anew(exporter), "sqlsem_ended_total", resource="load:*", outcome="revoked") == 2
        revoke(locks, "load:10")
        exporter.count_ends()
        samples = values_anew(exporter)
        exporter.close()
    assert of(samples, "sqlsem_ended_total", resource="load:*", outcome="revoked") == 3, (
        "what was there before is not ours"
    )
    assert not [name for name, _ in samples if name == "sqlsem_ended_last_hour"]


def test_uses_of_rates_are_counted(url):
    """Rates of one pattern share a counter, which never decreases: not even when a window is pruned."""

    def look():
        samples = values_anew(exporter)
        return [
            of(samples, f"sqlsem_rate_{use}_total", resource="rate:api-*")
            for use in ("taken", "returned", "waits", "timeouts")
        ]

    def forget(name):
        with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as raw:
            raw.execute("DELETE FROM sqlsem_rate_window WHERE resource_id = ?", (f"rate:{name}",))

    with sqlsem.connect(url) as locks:
        locks.rate("api-1", 10, per="1h", cost=7).take()
        exporter = Exporter(locks)
        exporter.count_ends()
        assert look() == [0, 0, 0, None], "what was before is not ours"
        locks.rate("api-1", {"1h": 10, "1d": 100}, cost=2).take().adjust(1)
        locks.rate("api-2", 10, per="1h", cost=10).take()
        assert locks.rate("api-2", 10, per="1h").take(timeout=0.05) is None
        assert locks.rate("api-2", 10, per="1h").take(timeout=0) is None
        exporter.count_ends()
        assert look() == [12, 1, 0, 0]
        assert look() == [12, 1, 0, 1]
        forget("api-2")
        assert look()[0] == 12
        locks.rate("api-2", 10, per="1h", cost=3).take()
        assert look()[0] == 15
        forget("api-1")
        locks.rate("api-1", 100, per="1h", cost=4).take()
        assert look()[0] == 19, "less than before: the counter began at zero again"
        for number in range(200):
            locks.rate(f"other{chr(97 + number // 26)}{chr(97 + number % 26)}", 10, per="1h").take()
        look()
        samples = values_anew(exporter)
        exporter.close()
    labels = [dict(key)["resource"] for name, key in samples if name == "sqlsem_rate_taken_total"]
    assert len(labels) <= 101
    assert sum(of(samples, "sqlsem_rate_taken_total", resource=label) for label in labels) == 219


# -- the command


def test_metrics_once_prints_or_writes_a_file(url, tmp_path):
    with sqlsem.connect(url) as locks, locks.mutex("etl"):
        done = CliRunner().invoke(main, ["--url", url, "metrics", "--once"])
        assert done.exit_code == 0, done.output
        assert 'sqlsem_holding{resource="etl"} 1.0' in done.output
        file = tmp_path / "sqlsem.prom"
        done = CliRunner().invoke(main, ["--url", url, "metrics", "--once", "-o", str(file)])
        assert (done.exit_code, done.output) == (0, "")
        assert 'sqlsem_holding{resource="etl"} 1.0' in file.read_text()
    assert list(tmp_path.glob("*.prom*")) == [file]


def test_wrong_usage(url):
    for arguments, words in (
        (["-o", "x.prom"], "--output goes with --once"),
        (["--listen", "etl"], "'etl' is not HOST:PORT"),
        (["--listen", "1.2.3.4:99999"], "is not HOST:PORT"),
        (["--max", "0"], "is not in the range"),
    ):
        done = CliRunner().invoke(main, ["--url", url, "metrics", *arguments])
        assert done.exit_code == 64, done.output
        assert words in done.output


def test_exporter_serves_http_on_loopback(url):
    with sqlsem.connect(url) as locks, locks.mutex("etl"):
        process = subprocess.Popen(
            [sys.executable, "-m", "sqlsem", "metrics", "--listen", "0"],
            env={**os.environ, "SQLSEM_URL": url},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            line = process.stderr.readline()
            place = re.fullmatch(r"sqlsem: metrics at (http://127\.0\.0\.1:\d+/metrics)\n", line)
            assert place, line
            for _ in range(2):
                with urllib.request.urlopen(place[1], timeout=PATIENCE) as answer:
                    assert 'sqlsem_holding{resource="etl"} 1.0' in answer.read().decode()
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE)


# -- the dashboard and the alert rules


def names_in(text):
    return set(re.findall(r"sqlsem_[a-z_]+", text))


@pytest.fixture(scope="session")
def told(tmp_path_factory):
    """Return the names of all metrics, as samples."""
    with sqlsem.connect(f"sqlite:///{tmp_path_factory.mktemp('all')}/locks.db") as locks:
        locks.queue("q").put({"a": 1})
        locks.admin.set_limit("etl", 3)
        collector, exporter = Collector(coordinator=locks), Exporter(locks)
        for _ in range(2):
            with locks.mutex("etl"):
                pass
        exporter.count_ends()
        with locks.mutex("etl"):
            assert not waits(locks)
            names = {name for source in (collector, exporter) for name, _ in values(source)}
            families = {metric.name for source in (collector, exporter) for metric in source.collect()}
        collector.close()
        exporter.close()
    return names | families | {f"{name}_total" for name in families}


def waits(locks):
    results = []
    thread = threading.Thread(target=lambda: results.append(locks.mutex("etl").acquire(timeout=0.05)))
    thread.start()
    thread.join(PATIENCE)
    return results[0]


@pytest.mark.parametrize("file", ["--dashboard", "--alerts"])
def test_alerts_name_existing_metrics(told, file):
    done = CliRunner().invoke(main, ["metrics", file])
    assert done.exit_code == 0
    named = names_in(done.output)
    assert len(named) > 8
    assert named <= told


def test_page_lists_every_metric(url):
    """With its kind, and its labels as far as a family names them."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    rows = {
        name: (kind, labels) for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| ?(.*?) ?\|", page, re.M)
    }
    with contextlib.closing(sqlsem.connect(url)) as locks:
        collector, exporter, once = Collector(coordinator=locks), Exporter(locks), Exporter(locks, once=True)
        once.count_ends()
        families = [family for source in (collector, exporter, once) for family in source.collect()]
        for source in (collector, exporter, once):
            source.close()
    exported = {family.name + "_total" * (family.type == "counter"): family for family in families}
    assert {name: family.type for name, family in exported.items()} == {name: kind for name, (kind, _) in rows.items()}
    for name, family in exported.items():
        if hasattr(family, "_labelnames"):
            assert re.findall(r"\w+", rows[name][1]) == list(family._labelnames), name


def test_dashboard_is_a_single_document():
    dashboard = json.loads(CliRunner().invoke(main, ["metrics", "--dashboard"]).output)
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) > 15
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}
    assert len(places) == len(dashboard["panels"])
    for panel in panels:
        assert panel["targets"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert not re.search(r"\b[A-Z]{2,}\b", target["expr"])  # an abbreviation that was not replaced


def test_alert_rules_have_the_required_fields(tmp_path):
    yaml = pytest.importorskip("yaml")
    text = CliRunner().invoke(main, ["metrics", "--alerts"]).output
    (group,) = yaml.safe_load(text)["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 10
    for rule in group["rules"]:
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        command = re.search(r"sqlsem ([a-z]+)", rule["annotations"]["description"])
        assert command is None or command[1] in {*main.commands, "why"}


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (on Debian: apt-get install prometheus)")
def test_promtool_accepts_rules_and_queries(url, tmp_path):
    def check(kind, *file, text=None):
        done = subprocess.run([PROMTOOL, "check", kind, *file], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    rules = tmp_path / "alerts.yaml"
    rules.write_text(CliRunner().invoke(main, ["metrics", "--alerts"]).output)
    check("rules", rules)
    # Each query of the dashboard as the expression of a rule.
    dashboard = json.loads(CliRunner().invoke(main, ["metrics", "--dashboard"]).output)
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    lines = ["groups:", "  - name: dashboard", "    rules:"]
    for number, expression in enumerate(expressions):
        plain = expression.replace("$__rate_interval", "5m")
        lines += [f"      - record: dashboard:{number}", f"        expr: {json.dumps(plain)}"]
    rules.write_text("\n".join(lines))
    check("rules", rules)
    with sqlsem.connect(url) as locks:
        locks.admin.resources()
    check("metrics", text=CliRunner().invoke(main, ["--url", url, "metrics", "--once"]).output)
