"""The output of the commands that report on the past."""

from __future__ import annotations

import json
import sqlite3
import time

import pytest
from support.commands import call

import sqlsem

ODD = "a<b>\x1b[31m‮x"


@pytest.fixture
def url(url: str) -> str:
    with sqlsem.connect(url) as coordinator:
        coordinator.admin.resources()  # the tables are there
    return url


def write(url: str, *rows: tuple[object, ...]) -> None:
    """Rows of history: resource, position, requested, granted and ended (seconds ago); limit; note."""
    now = time.time()
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        connection.executemany(
            "INSERT INTO sqlsem_history (resource_id, queue_position, requesting_id, access_type, weight, "
            "requested_at, granted_at, ended_at, outcome, concurrency_limit, host, note) "
            "VALUES (?, ?, 'x' || ?, 'write', 1, ?, ?, ?, 'released', ?, 'h', ?)",
            [
                (resource, position, position, now - requested, now - granted, now - ended, limit, note)
                for resource, position, requested, granted, ended, limit, note in rows
            ],
        )


def test_audit_and_replay_report_an_empty_history(url: str) -> None:
    result = call("audit")
    assert result.exit_code == 0
    assert "Checked 0 finished requests" in result.stdout
    assert "No limit was exceeded" in result.stdout
    result = call("replay", "--since", "30d")
    assert (result.exit_code, result.stdout) == (0, "There was no request in that time.\n")


def test_audit_of_an_orderly_history(url: str) -> None:
    with sqlsem.connect(url) as coordinator:
        for _ in range(3):
            with coordinator.limit("etl", 3):
                pass
        with coordinator.mutex("now"):
            result = call("audit", "--since", "30d")
            assert result.exit_code == 0, result.output
            assert "3 finished requests and 1 that hold or wait, of 2 resources: granted 4 times" in result.stdout
            report = json.loads(call("audit", "etl", "--json").stdout)
    assert (report["ok"], report["finished"], report["present"], report["grants"]) == (True, 3, 0, 3)
    assert report["first_end"] <= report["last_end"] <= report["taken_at"]


def test_audit_shows_violations(url: str) -> None:
    write(url, ("etl", 1, 100, 100, 50, 1, None), ("etl", 2, 90, 80, 40, 1, ODD), ("b", 3, 9, 9, 5, 1, None))
    result = call("audit", "--since", "1h")
    assert result.exit_code == 1
    assert "etl  position 2" in result.stdout
    assert "it was granted beside more than the limit allows: 1" in result.stdout
    assert "Not in order: 1 finding." in result.stdout
    assert "a<b>\\x1b[31m\\u202ex" in result.stdout
    assert result.stdout.replace("\n", "").isprintable()
    told = call("audit", "--json")
    assert told.exit_code == 1
    (finding,) = json.loads(told.stdout)["findings"]
    assert (finding["kind"], finding["position"], [row["position"] for row in finding["rows"]]) == ("limit", 2, [2, 1])
    assert finding["rows"][0]["note"] == ODD
    assert call("audit", "b").exit_code == 0
    assert call("audit", "--since", "20s").exit_code == 0  # the rest is too long ago


def test_audit_counts_findings_it_does_not_show(url: str) -> None:
    write(url, *(("etl", number, 100, 100, 50, 1, None) for number in range(1, 60)))
    result = call("audit")
    assert result.exit_code == 1
    assert "… and 38 findings more" in result.stdout
    assert "Not in order: 58 findings." in result.stdout


def test_replay_compares_waits_under_another_limit(url: str) -> None:
    write(url, *(("etl", n, 1000, 1000 - 100 * (n - 1), 1000 - 100 * n, 1, None) for n in range(1, 5)))
    result = call("replay", "--limit", "etl=2")
    assert result.exit_code == 0, result.output
    was, would = (line.split() for line in result.stdout.splitlines()[1:3])
    assert was[:4] == ["etl", "was", "4", "0"]
    assert was[-1] == would[-1] == "100%"
    assert (was[-2], would[-2]) == ("10m00s", "3m20s")
    report = json.loads(call("replay", "etl", "--limit", "etl=4", "--json").stdout)
    assert report["resources"]["etl"]["would"]["wait_total"] == pytest.approx(0, abs=0.01)
    assert not report["left_out"]


def test_audit_names_omissions(url: str) -> None:
    write(url, *(("etl", n, 1000, 1000 - 100 * (n - 1), 1000 - 100 * n, 1, None) for n in range(1, 5)))
    result = call("replay", "-n", "2")
    assert "Requests that ended before" in result.stdout
    assert json.loads(call("replay", "-n", "2", "--json").stdout)["left_out"]
    assert "left out" not in call("replay", "-n", "4").stdout


def test_audit_of_an_unused_name(url: str) -> None:
    result = call("replay", "--limit", "elt=2")
    assert result.exit_code == 78
    assert "There were no requests for 'elt'" in result.output


@pytest.mark.parametrize("wrong", ["etl", "etl=", "=3", "etl=0", "etl=-1", "etl=99999999999", " =3"])
def test_replay_refuses_wrong_terms(url: str, wrong: str) -> None:
    assert call("replay", "--limit", wrong).exit_code == 64
    assert call("replay", "--weight", wrong).exit_code == 64


def test_replay_refuses_a_weight_above_the_limit(url: str) -> None:
    write(url, ("etl", 1, 100, 100, 50, 5, None))
    result = call("replay", "--limit", "etl=2", "--weight", "etl=3")
    assert result.exit_code == 78
    assert "weighs 3, which never fits into a limit of 2" in result.output
