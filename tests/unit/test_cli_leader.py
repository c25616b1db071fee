"""``sqlsem run --leader``, with real processes."""

import json
import os
import signal
import sys
from queue import SimpleQueue

import pytest
from support.commands import PATIENCE, alive, lines, pids, until

from sqlsem.cli import supervisor
from sqlsem.values.errors import LockLost, Unavailable

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and process groups")

#: Writes its process id and its fence; ends with 5 at SIGTERM.
LEADS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
with open(sys.argv[1], "a") as file: file.write(f"pid {os.getpid()} {os.environ['SQLSEM_FENCE']}\\n")
while True: time.sleep(0.05)
"""
#: Ignores requests to end.
STUBBORN = LEADS.replace("lambda *_: os._exit(5)", "signal.SIG_IGN")


def candidate(bench, *options, code=LEADS):
    """Start a candidate; its command writes into the file of the bench."""
    arguments = ("run", "--leader", "scheduler", *options, "--", sys.executable, "-c", code, bench.told)
    return bench.start(*arguments)


def led(bench, terms):
    """Wait for that many terms, and return the process ids of their commands; all but the last one have ended."""
    leaders = until(lambda: pids(bench.told) if len(pids(bench.told)) >= terms else None, f"term {terms}")
    assert not any(alive(pid) for pid in leaders[:-1])
    return leaders


def waiting(coordinator, number):
    until(lambda: len(coordinator.admin.entries("scheduler")) == number, f"{number} take part")


def test_sigterm_elects_the_next_leader(bench, coordinator):
    first = candidate(bench, "--note", "http://etl1:8080")
    led(bench, 1)
    assert coordinator.leader("scheduler").current().info == "http://etl1:8080"
    second = candidate(bench)
    waiting(coordinator, 2)
    assert len(pids(bench.told)) == 1
    first.terminate()
    assert first.wait(PATIENCE) == 5
    led(bench, 2)
    assert coordinator.leader("scheduler").current().pid == second.pid
    second.terminate()
    assert second.wait(PATIENCE) == 5
    assert coordinator.admin.entries("scheduler") == []


def test_lost_leader_ends_command_and_campaigns_again(bench, coordinator):
    first = candidate(bench)
    led(bench, 1)
    second = candidate(bench)
    waiting(coordinator, 2)
    coordinator.admin.revoke(coordinator.admin.entries("scheduler")[0].position)
    led(bench, 2)
    assert coordinator.leader("scheduler").current().pid == second.pid
    waiting(coordinator, 2)  # the first one again, at the end
    assert first.poll() is None
    second.kill()  # and its command with it, by the guard
    until(lambda: len(pids(bench.told)) == 3, "the first one leads again")
    until(lambda: not alive(pids(bench.told)[1]), "the killer has ended the command")
    assert coordinator.leader("scheduler").current().pid == first.pid
    fences = [int(line.split()[2]) for line in lines(bench.told)]
    assert fences == sorted(set(fences))


def test_stubborn_leader_command_is_killed(bench, coordinator):
    process = candidate(bench, "--kill-after", "0.2", code=STUBBORN)
    (pid,) = led(bench, 1)
    process.terminate()
    assert process.wait(PATIENCE) == 128 + signal.SIGKILL
    assert not alive(pid)
    assert coordinator.admin.entries("scheduler") == []


def test_leader_run_ends_with_its_command(bench, coordinator):
    assert bench.run("run", "--leader", "scheduler", "--", "sh", "-c", "exit 7") == (7, "", "")
    assert coordinator.admin.entries("scheduler") == []


def test_signal_ends_a_waiting_candidate(bench, coordinator):
    with coordinator.mutex("scheduler"):
        process = candidate(bench)
        waiting(coordinator, 2)
        process.terminate()
        assert process.wait(PATIENCE) == 143
        assert len(coordinator.admin.entries("scheduler")) == 1
    assert pids(bench.told) == []


def test_unstartable_leader_command_is_reported(bench):
    code, _, err = bench.run("run", "--leader", "scheduler", "--", "./no-such-program")
    assert code == 127
    assert "no such" in err.lower()


# -- terms, one after the other ---------------------------------------------------------------------------------------


@pytest.fixture
def terms(monkeypatch):
    """``terms(*outcomes)``: the results of one term after the other; the exit code, or the exception."""

    def terms(*outcomes, events=(), requested=False):
        remaining = list(outcomes)

        def run(make_lock, job, **_):
            job.step_down.requested = requested
            outcome = remaining.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        monkeypatch.setattr(supervisor, "run", run)
        monkeypatch.setattr(supervisor, "retry_pauses", lambda: iter([0.01] * 10))
        queue = SimpleQueue()
        for event in events:
            queue.put(event)
        job = supervisor.Job(["true"], {}, 0.5, step_down=supervisor.StepDown(1.0))
        code = supervisor.lead(lambda on_lost: None, job, coordinator=None, events=queue)
        assert remaining == []
        return code

    return terms


def test_candidate_campaigns_again_after_any_loss(terms):
    lost, away = LockLost("its row was removed"), Unavailable("the database is away")
    assert terms((143, lost), away, away, lost, (143, lost), (3, None)) == 3


def test_stopped_leader_does_not_campaign_again(terms):
    assert terms((143, LockLost("at the same time")), requested=True) == 143


def test_signal_between_two_terms_ends_the_run(terms):
    with pytest.raises(supervisor.Stopped):
        terms((143, LockLost("lost")), events=[("child", 0), ("signal", signal.SIGTERM)])


def test_leaders_are_listed_and_step_down(bench, coordinator):
    coordinator.admin.resources()  # the tables are there
    assert bench.run("leader", "ls")[:2] == (0, "There is no leader.\n")
    assert bench.run("leader", "step-down", "scheduler")[0] == 1
    first = candidate(bench, "--note", "http://etl1:8080")
    led(bench, 1)
    second = candidate(bench)
    waiting(coordinator, 2)
    heads, row = bench.run("leader", "ls")[1].splitlines()
    assert heads.split() == ["NAME", "LEADER", "SINCE", "WAITING", "FENCE", "INFO"]
    assert row.split()[0] == "scheduler"
    assert row.split()[-1] == "http://etl1:8080"
    (plain,) = json.loads(bench.run("leader", "ls", "scheduler", "--json")[1])
    assert (plain["pid"], plain["info"], plain["waiting"]) == (first.pid, "http://etl1:8080", 1)
    code, words, _ = bench.run("leader", "step-down", "scheduler")
    assert code == 0
    assert f":{first.pid} " in words
    led(bench, 2)
    waiting(coordinator, 2)  # the first takes part again, behind the second
    assert [leader.waiting for leader in coordinator.admin.leaders("scheduler")] == [1]
    assert coordinator.admin.leaders("scheduler")[0].pid == second.pid
    first.terminate()  # while it waits
    assert first.wait(PATIENCE) == 143
    second.terminate()
    assert second.wait(PATIENCE) == 5
