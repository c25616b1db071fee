"""The adapter for Airflow, with real Airflow; that has an environment of its own, as it pins what it needs."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support import slack

import sqlsem

PYTHON = os.environ.get("SQLSEM_TEST_AIRFLOW")
SCRIPT = Path(__file__).parent / "airflow_nightly.py"


@pytest.mark.timeout(300)
@pytest.mark.skipif(not PYTHON, reason="set SQLSEM_TEST_AIRFLOW to a Python that has apache-airflow-core and sqlsem")
def test_a_task_waits_in_the_triggerer_and_goes_on_with_the_lock(tmp_path):
    dags = tmp_path / "dags"
    dags.mkdir()
    script = Path(shutil.copy(SCRIPT, dags / "nightly.py"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(sqlsem.__file__).parents[1]),
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "SQLSEM_URL": f"sqlite:///{tmp_path}/locks.db",
    }

    def run(*arguments):
        return subprocess.run(
            [PYTHON, *arguments], env=environment, check=True, capture_output=True, text=True, timeout=slack(120)
        )

    run("-m", "airflow", "db", "migrate")
    done = run(str(script))
    reports = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("told ")]
    free, waiting, busy, fails, states, rows_left, again, refused = reports
    assert free == {"task": "free", "rows": [[free["rows"][0][0], "mine"]]}
    # It has waited behind the holder, and runs with the row of its wait.
    _, (place, note) = waiting["waiting"]
    assert note.startswith("nightly/busy ")
    assert busy == {"task": "busy", "rows": [[place, note]]}
    assert [row[1] for row in fails["rows"]] == [None]
    assert states == {"states": {"free": "success", "busy": "success", "fails": "failed"}}
    assert rows_left == {"left": []}
    # With an expired token it requested the lock again.
    assert again["task"] == "busy"
    assert again["rows"][0][0] > place
    assert "is of a coordinator" in refused["refused"]
    assert "cannot be called outside" not in done.stdout.split('told {"left"')[0]
