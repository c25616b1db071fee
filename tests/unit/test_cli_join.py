"""``sqlsem run --adopt`` and ``--join``, with real processes."""

import os
import sys
import time

import pytest
from support.commands import PATIENCE, alive, lines, pids, until

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and process groups")

#: Writes its process id and its environment's variables; runs until it is ended.
STAYS = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    file.write(f"pid {os.getpid()}\\n")
    file.writelines(f"{n}={os.environ.get(n)}\\n" for n in ("SQLSEM_FENCE", "SQLSEM_TOKEN"))
while True: time.sleep(0.05)
"""
#: Ignores requests to end.
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + STAYS


def joined(bench, code=STAYS, then="exec sleep 1000"):
    """A script that puts a part of its work into the background, which joins the lock."""
    python = f"{sys.executable} -m sqlsem run --join -- {sys.executable} -c '{code}' {bench.told} & "
    script = python + f"while ! grep -q pid {bench.told} 2>/dev/null; do sleep 0.05; done; {then}"
    return bench.start("run", "--mutex", "nightly", "--", "/bin/sh", "-c", script)


def test_command_adopts_a_lock(bench, coordinator):
    with coordinator.mutex("nightly") as grant:
        bench.environment["SQLSEM_TOKEN"] = grant.hand_over()
    process = bench.start("run", "--adopt", "--", sys.executable, "-c", STAYS, bench.told)
    until(lambda: len(lines(bench.told)) == 3, "the command runs")
    assert lines(bench.told)[1:] == [f"SQLSEM_FENCE={grant.fence}", "SQLSEM_TOKEN=None"]
    (row,) = coordinator.admin.entries("nightly")
    assert (row.position, row.pid) == (grant.position, process.pid)
    process.terminate()
    process.wait(PATIENCE)
    assert coordinator.admin.entries("nightly") == []
    # Once only: the second process gets a message, and no lock.
    code, _, err = bench.run("run", "--adopt", "--", "true")
    assert code != 0
    assert "was used" in err


def test_join_without_a_lock_is_refused(bench):
    code, _, err = bench.run("run", "--join", "--", "true")
    assert code != 0
    assert "no lock to join" in err


def test_joined_command_ends_before_the_release(bench, coordinator):
    """Its background process runs on, and no other request is granted beside it."""
    process = joined(bench, then="true")
    (pid,) = until(lambda: pids(bench.told), "the joined command runs")
    with coordinator.mutex("nightly", timeout=PATIENCE):
        assert not alive(pid), "it works beside the next one"
    assert process.wait(PATIENCE) == 0


def test_stubborn_joined_command_is_killed(bench, coordinator):
    joined(bench, STUBBORN, then="true")
    (pid,) = until(lambda: pids(bench.told), "the joined command runs")
    with coordinator.mutex("nightly", timeout=PATIENCE):
        assert not alive(pid)


def test_revoke_ends_the_joined_command(bench, coordinator):
    joined(bench)
    (pid,) = until(lambda: pids(bench.told), "the joined command runs")
    (row,) = coordinator.admin.entries("nightly")
    coordinator.admin.revoke(row.position)
    with coordinator.mutex("nightly", timeout=PATIENCE):
        assert not alive(pid)


def test_killed_parent_ends_its_joined_commands(bench, coordinator):
    process = joined(bench)
    (pid,) = until(lambda: pids(bench.told), "the joined command runs")
    process.kill()
    process.wait(PATIENCE)
    until(lambda: not alive(pid), "the joined command ends")


def test_joined_command_ends_without_the_lock(bench, coordinator):
    """It ends with its own status, and the lock is unchanged."""
    script = (
        f"{sys.executable} -m sqlsem run --join -- sh -c 'exit 7'; echo code $? > {bench.told}; "
        f"echo pid $$ >> {bench.told}; exec sleep 1000"
    )
    bench.start("run", "--mutex", "nightly", "--", "/bin/sh", "-c", script)
    until(lambda: len(lines(bench.told)) == 2, "the script goes on")
    assert lines(bench.told)[0] == "code 7"
    assert not coordinator.mutex("nightly").acquire(timeout=0)
    time.sleep(0.1)
    assert alive(pids(bench.told)[0])
