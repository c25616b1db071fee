"""``sqlsem run --once-per``, with real processes."""

import json
import os

import pytest
from support.commands import PATIENCE, lines, pids, until

import sqlsem

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and process groups")

#: Notes that it ran, and ends with the status that it is given.
RAN = ["sh", "-c", 'echo ran >> "$0"; exit $1']
LONG = "366d"


def once(bench, status=0, *options, per=f"report={LONG}"):
    return bench.run("run", "--once-per", per, *options, "--", *RAN, bench.told, str(status))


def test_once_command_runs_a_single_time(bench):
    assert once(bench) == (0, "", "")
    assert once(bench) == (0, "", "")
    assert lines(bench.told) == ["ran"]
    with sqlsem.connect(bench.url) as coordinator:
        assert coordinator.once("report", LONG).begin() is None


def test_failed_once_may_be_retried(bench):
    assert once(bench, 3)[0] == 3
    assert once(bench)[0] == 0
    assert once(bench)[0] == 0
    assert lines(bench.told) == ["ran"] * 2


def test_many_hosts_run_once(bench):
    command = ["run", "--once-per", f"report={LONG}", "--", *RAN, str(bench.told), "0"]
    several = [bench.start(*command) for _ in range(5)]
    assert [process.wait(PATIENCE) for process in several] == [0] * 5
    assert lines(bench.told) == ["ran"]


def test_next_host_runs_when_the_first_dies(bench):
    options = ["run", "--once-per", f"report={LONG}"]
    first = bench.listen(*options)
    second = bench.start(*options, "--", *RAN, bench.told, "0")
    until(lambda: len(bench.entries()) == 2, "the second one waits")
    first.kill()
    assert second.wait(PATIENCE) == 0
    assert lines(bench.told)[-1] == "ran"
    assert once(bench)[0] == 0
    assert lines(bench.told).count("ran") == 1


def test_skipped_run_is_reported(bench):
    bench.listen("run", "--once-per", f"report={LONG}")
    code, _, err = once(bench, 0, "--timeout", "0")
    assert code == 75
    assert "'once:report'" in err
    assert once(bench, 0, "--timeout", "0", "-E", "0")[0] == 0
    assert lines(bench.told)[1:] == []


def test_signal_ends_a_wait_for_another_run(bench):
    bench.listen("run", "--once-per", f"report={LONG}")
    waiting = bench.start("run", "--once-per", f"report={LONG}", "--", *RAN, bench.told, "0")
    until(lambda: len(bench.entries()) == 2, "the second one waits")
    waiting.terminate()
    assert waiting.wait(PATIENCE) == 143
    assert len(bench.entries()) == 1


def test_once_beside_a_lock_uses_the_locks_name(bench):
    """``--mutex report --once-per 1d``: the command's environment names the first lock."""
    script = 'echo "$SQLSEM_RESOURCE" >> "$0"'
    command = ["run", "--limit", "report=2", "--once-per", LONG, "--", "sh", "-c", script, bench.told]
    assert bench.run(*command)[0] == 0
    assert bench.run(*command)[0] == 0
    assert lines(bench.told) == ["report"]
    assert once(bench) == (0, "", "")
    assert lines(bench.told) == ["report"]
    assert bench.entries() == []


def test_lost_run_is_not_done(bench):
    process = bench.listen("run", "--once-per", f"report={LONG}")
    with sqlsem.connect(bench.url) as coordinator:
        coordinator.admin.revoke(bench.entries()[0].position, force=True)
    assert process.wait(PATIENCE) == 76
    assert pids(bench.told)
    assert once(bench)[0] == 0
    assert lines(bench.told)[-1] == "ran"


def test_runs_are_listed_and_forgotten(bench):
    bench.run("init")
    assert bench.run("once", "ls")[:2] == (0, "No run is recorded.\n")
    assert once(bench)[0] == 0
    heads, row = bench.run("once", "ls")[1].splitlines()
    assert heads.split() == ["NAME", "BEGAN", "TOOK", "AGO", "LOGIN", "FENCE"]
    assert row.split()[0] == "report"
    (plain,) = json.loads(bench.run("once", "ls", "report", "--json")[1])
    assert (plain["name"], str(plain["fence"])) == ("report", row.split()[-1])
    assert json.loads(bench.run("once", "ls", "other", "--json")[1]) == []
    assert bench.run("once", "forget", "report")[:2] == (0, "Job report may run again in this period.\n")
    assert bench.run("once", "forget", "report")[:2] == (1, "Job report has no recorded run; see: sqlsem once ls\n")
    assert once(bench)[0] == 0
    assert lines(bench.told) == ["ran"] * 2
