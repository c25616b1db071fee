"""Correct programs pass mypy, and misspelt ones fail: in mypy, and when called."""

import subprocess
import sys
from pathlib import Path

import pytest

import sqlsem
from sqlsem import aio

ROOT = Path(__file__).resolve().parents[2]


def test_the_typed_example():
    """(``.ci/run`` checks it with all the rest.)"""
    pytest.importorskip("mypy", reason="mypy is not installed (pip install --group lint)")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "tests/typing"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_typing_cases_contain_refusals():
    assert (ROOT / "tests/typing/api.py").read_text().count("# type: ignore[") > 15


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: sqlsem.limit("etl", 3, timout=5), r"limit\(\) has no option 'timout'; did you mean 'timeout'\?"),
        (lambda c: sqlsem.mutex("etl", reentrnt=True), r"mutex\(\) .* 'reentrant'"),
        (lambda c: sqlsem.read("etl", weight=2), r"read\(\) has no option 'weight'"),
        (lambda c: sqlsem.all_of(sqlsem.mutex("a"), tmeout=3), r"all_of\(\) .* 'timeout'"),
        (lambda c: aio.stage("etl", 1, on_loss=print), r"stage\(\) .* 'on_lost'"),
        (lambda c: c.limit("etl", 3, timout=5), r"limit\(\) .* 'timeout'"),
        (lambda c: c.aio.write("etl", nte="x"), r"write\(\) .* 'note'"),
        (lambda c: c.mutex("etl", coordinator=c), r"mutex\(\) has no option 'coordinator'; it has cancel_on_lost, "),
        (lambda c: c.queue("q", on_fail="stop"), r"queue\(\) .* 'on_failure'"),
        (lambda c: c.queue("q").put(1, oder=3), r"put\(\) .* 'order'"),
        (lambda c: c.batch("r", ["a"], window=5, on_fail=print), r"batch\(\) .* 'on_failed'"),
        (lambda c: sqlsem.connect("sqlite:///x.db", graze=5), r"connect\(\) .* 'grace'"),
        (lambda c: sqlsem.configure(leese=5), r"configure\(\) .* 'lease'"),
    ],
)
def test_a_misspelt_option(tmp_path, call, words):
    with sqlsem.connect(tmp_path / "x.db") as coordinator:
        with pytest.raises(sqlsem.ConfigurationError, match=words):
            call(coordinator)
        with pytest.raises(TypeError, match=words):
            call(coordinator)


def test_all_of_takes_locks_only(tmp_path):
    with pytest.raises(sqlsem.ConfigurationError, match=r"all_of takes locks, not 'a'; write all_of\(sqlsem"):
        sqlsem.all_of("a", "b")
    with sqlsem.connect(tmp_path / "x.db") as coordinator, sqlsem.connect(tmp_path / "x.db") as other:
        for face in (coordinator, coordinator.aio):
            assert "b" in repr(face.all_of(face.mutex("a"), face.limit("b", 2)))
            with pytest.raises(sqlsem.ConfigurationError, match="make its locks"):
                face.all_of(other.mutex("a"))


def test_a_worker_is_at_hand():
    from sqlsem import tasks

    assert sqlsem.Worker is tasks.Worker
