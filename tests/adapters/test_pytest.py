"""The plugin of pytest, with real pytest, and real workers of xdist."""

from pathlib import Path

import pytest

import sqlsem

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
#: Tests that write a line at their start and at their end.
CROWD = """
    import pathlib, time
    import pytest

    @pytest.mark.sqlsem("gate", limit=2)
    @pytest.mark.parametrize("number", range(6))
    def test_crowd(number):
        log("in")
        time.sleep(0.3)
        log("out")

    def log(what):
        with open(pathlib.Path(__file__).parent / "log", "a") as file:
            file.write(what + "\\n")
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run pytest on a text; the locks are in a file of this test's own."""
    monkeypatch.setenv("SQLSEM_URL", f"sqlite:///{pytester.path / 'locks.db'}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def run(text, *arguments):
        pytester.makepyfile(text)
        return pytester.runpytest_subprocess("-p", "sqlsem.adapters.pytest", "--strict-markers", *arguments)

    return run


@pytest.fixture
def others(pytester):
    with sqlsem.connect(f"sqlite:///{pytester.path / 'locks.db'}") as coordinator:
        yield coordinator


def test_workers_share_a_limit(run, pytester, others):
    run(CROWD, "-n", "4").assert_outcomes(passed=6)
    inside, maximum = 0, 0
    for line in (pytester.path / "log").read_text().split():
        inside += 1 if line == "in" else -1
        maximum = max(maximum, inside)
    assert maximum <= 2
    past = others.admin.history("gate")
    assert len(past) == 6
    assert len({row.pid for row in past}) > 1, "one worker did it all"


def test_wait_timeout_is_a_test_error(run, others):
    text = """
        import pytest

        @pytest.mark.sqlsem(resource="gate", timeout=0.2)
        def test_it(): pass
    """
    with others.mutex("gate"):
        result = run(text)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*Timeout: Did not get * on 'gate' within 0.2 s: 'gate' is held by *"])


def test_fixtures_run_inside_the_lock(run, others):
    text = """
        import pytest

        @pytest.fixture
        def held(sqlsem):
            yield sqlsem.mutex("gate").locked()
            assert sqlsem.mutex("gate").locked()

        @pytest.mark.sqlsem("gate")
        def test_inside(held):
            assert held

        def test_outside(sqlsem):
            assert not sqlsem.mutex("gate").locked()
    """
    run(text).assert_outcomes(passed=2)
    assert others.admin.entries("gate") == []


def test_failing_test_releases_its_lock(run, others):
    text = """
        import pytest

        @pytest.mark.sqlsem("gate")
        def test_it(): raise ValueError
    """
    run(text).assert_outcomes(failed=1)
    assert [hold.outcome for hold in others.admin.history("gate")] == ["released"]


def test_readers_and_several_at_once(run, others):
    text = """
        import pytest

        @pytest.mark.sqlsem("prices", access="read")
        @pytest.mark.sqlsem("gate", limit=3)
        def test_it(sqlsem):
            kinds = {one.resource: one.access for name in ("prices", "gate") for one in sqlsem.admin.entries(name)}
            assert kinds == {"prices": "read", "gate": "write"}
    """
    with others.read("prices"):
        run(text).assert_outcomes(passed=1)


@pytest.mark.parametrize("marker", ["'gate', limt=2", "", "'gate', access='look'", "'gate', limit=0"])
def test_invalid_marker_is_reported(run, marker):
    text = f"""
        import pytest

        @pytest.mark.sqlsem({marker})
        def test_it(): pass
    """
    result = run(text)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*pytest.mark.sqlsem:*"])


def test_pytest_loads_the_plugin_by_itself():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\n"sqlsem.adapters.pytest" = "sqlsem.adapters.pytest"' in text
