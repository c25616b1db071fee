"""``python -m clients.mixed``: Python, C#, psql and a bare participant on one limit."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support import TESTS

from clients.mixed import dotnet
from clients.mixed.participants import find_psql
from clients.mixed.show import Turn, judge


def run_demo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clients.mixed", *words],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        timeout=150,
        check=False,
    )


@pytest.mark.engines("postgresql", "mssql")
def test_demo_mixed(database):
    done = run_demo("--url", database.url, "--schema", database.schema, "--turns", "3", "--seconds", "0.05")
    assert done.returncode == 0, done.stdout + done.stderr
    events = re.findall(r"^ *[\d.]+ s  (\S+(?: \d)?) +(in|out) +position (\d+)$", done.stdout, re.MULTILINE)
    actors = {"Python 1", "Python 2", "bare"}
    postgres = database.engine == "postgresql"
    if dotnet.lacks(odbc=postgres) is None:
        actors |= {"C# 1", "C# 2"}
    else:
        assert "Left out: C# (it needs " in done.stdout
    if postgres and find_psql():
        actors.add("psql")
    else:
        assert "Left out: psql (" in done.stdout
    assert {actor for actor, _, _ in events} == actors
    assert len(events) == 2 * 3 * len(actors)
    assert f"{3 * len(actors)} turns: never more than 3 inside" in done.stdout
    assert database.queue("demo-") == []


def test_demo_mixed_needs_a_server(tmp_path):
    done = run_demo("--url", f"sqlite:///{tmp_path / 'x.db'}")
    assert done.returncode == 2
    assert "PostgreSQL or SQL Server" in done.stderr


@pytest.mark.engines("postgresql")
def test_demo_mixed_without_tables(database):
    done = run_demo("--url", database.url, "--schema", "nowhere")
    assert done.returncode == 1
    assert "sqlsem init" in done.stderr


@pytest.mark.parametrize(
    ("turns", "wrong"),
    [
        ([Turn("a", 1, 0, 10), Turn("b", 2, 5, 12), Turn("c", 3, 10, 20), Turn("d", 4, 12, 20)], None),
        ([Turn("a", 1, 0, 10), Turn("b", 2, 5, 12), Turn("c", 3, 9, 20)], "3 WERE INSIDE"),
        ([Turn("a", 1, 0, 10), Turn("b", 2, 20, 30), Turn("c", 3, 15, 18), Turn("d", 4, 19, 40)], None),
        ([Turn("a", 1, 0, 10), Turn("b", 2, 20, 30), Turn("c", 3, 21, 30), Turn("d", 4, 11, 12)], "OUT OF ORDER"),
        ([Turn("a", 1, 0, 10), Turn("b", 1, 20, 30)], "GIVEN TWICE"),
    ],
)
def test_judge(turns, wrong):
    _, faults = judge(turns, 2)
    if wrong is None:
        assert faults == []
    else:
        assert any(wrong in fault for fault in faults), faults
