"""The measurements run, as small as possible: their figures have no meaning here."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import mariadb_lacks

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--rounds 5 --processes 2 --crew 4 --seconds 0.2 --turns 1 --waiters 2 --wait 6 --locks 3 --threads 2 --tasks 20 "
    "--workers 2 --put 20 --idle 1 --puts 5 --pending 1000 --finished 10 --claims 30 --quick --crowds 3,5 --under 20 "
    "--rows 3,5 --past 3,5 --owners 3,5 --budget 5 --moments 6"
)
ALL = "uncontended handoff limit aio waiters connections tasks puts idle claim growth estimates guards rates"


@pytest.mark.soak
def test_every_measurement_runs(tmp_path):
    figures = tmp_path / "figures.json"
    words = [*ALL.split(), *SMALL.split(), "--engine", "sqlite", "--json", str(figures)]
    if importlib.util.find_spec("matplotlib"):
        words += ["--picture", str(tmp_path / "slopes.svg")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(figures.read_text())["sqlite"]
    assert set(results) == set(ALL.split())
    assert results["handoff"]["sqlsem"]["overlaps"] == 0
    assert results["waiters"]["calls"] > 0
    assert [figure["rate"] > 0 for figure in results["growth"]["waiters"]] == [True, True]


@pytest.mark.soak
@pytest.mark.skipif(bool(mariadb_lacks()), reason="needs MariaDB")
def test_measurements_run_on_mariadb(tmp_path):
    figures = tmp_path / "figures.json"
    measurements = ["uncontended", "handoff", "limit", "waiters", "tasks", "puts", "growth"]
    # (Each commit waits for the disk.)
    words = [*measurements, *SMALL.split(), "--seconds", "5", "--engine", "mysql", "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(figures.read_text())["mysql"]
    assert {"sqlsem", "least durable row", "GET_LOCK"} <= set(results["uncontended"])
    assert results["handoff"]["sqlsem"]["overlaps"] == results["handoff"]["GET_LOCK"]["overlaps"] == 0
    assert {"sqlsem", "SKIP LOCKED"} <= set(results["tasks"]["rates"])
    assert [figure["rate"] > 0 for figure in results["growth"]["waiters"]] == [True, True]
