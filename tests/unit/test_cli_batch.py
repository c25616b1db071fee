"""``sqlsem batch run``, with real processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support.commands import PATIENCE, Bench, alive, call, lines, pids, until

import sqlsem
from sqlsem import batches
from sqlsem.client.connection.membership import Membership

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and process groups")

TWO = ("--parts", "a,b", "--window", "6h")


def part(bench: Bench, name: str, *options: str, status: int = 0) -> tuple[int, str]:
    """Run a command as a part; return the exit code and standard error."""
    code, _, words = bench.run(
        "-q", "batch", "run", "nightly", "--part", name, *options, "--", "sh", "-c", f"exit {status}"
    )
    return code, words


def parts_of(coordinator: sqlsem.Coordinator) -> list[tuple[int, str, dict[str, str]]]:
    """Return the number and status of each batch, oldest first, with the status of its parts."""
    entries = batches.list_batches(coordinator, "nightly")
    rows = [(entry.batch_id, entry.status, {row.part: row.status for row in entry.parts}) for entry in entries]
    return rows[::-1]


def test_later_parts_use_the_parts_of_the_first(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    assert part(bench, "b")[0] == 78, "no call has named the parts"
    callback = ("--callback-shell", f"echo published >> {bench.told}")
    assert part(bench, "a", *TWO, *callback) == (0, "")
    assert part(bench, "c")[0] == 78, "no such part"
    assert part(bench, "b") == (0, "")
    assert lines(bench.told) == ["published"]
    assert parts_of(coordinator) == [(1, "succeeded", {"a": "succeeded", "b": "succeeded"})]


def test_failed_part_has_the_exit_code_and_runs_again(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    code, words = part(bench, "a", *TWO, status=3)
    assert code == 3
    assert "has a failed part: 'a' (The command ended with status 3)" in words
    code, words = part(bench, "b")
    assert code == 0
    assert words.count("has failed, though part 'b' has succeeded") == 1
    assert part(bench, "a") == (0, "")
    assert parts_of(coordinator) == [(1, "succeeded", {"a": "succeeded", "b": "succeeded"})]


def test_part_fails_if_its_command_cannot_be_started(
    bench: Bench, coordinator: sqlsem.Coordinator, tmp_path: Path
) -> None:
    program = tmp_path / "without-interpreter"  # found only when it is started
    program.write_text(f"#!{tmp_path / 'missing'}\n")
    program.chmod(0o755)
    code, _, words = bench.run("-q", "batch", "run", "nightly", "--part", "a", *TWO, "--", str(program))
    assert code == 127, words
    assert str(program) in words
    assert parts_of(coordinator) == [(1, "open", {"a": "failed", "b": "expected"})]


def test_new_batch_has_the_parts_but_no_callback_of_the_last(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    for name in ("a", "b", "a"):
        assert part(bench, name, *(TWO if not parts_of(coordinator) else ())) == (0, "")
    assert [status for _, status, _ in parts_of(coordinator)] == ["succeeded", "open"]
    assert part(bench, "b", "--callback-shell", "true") == (0, "")
    code, words = part(bench, "a")
    assert code == 78
    assert "has ended (succeeded), and its callback is not taken over" in words
    assert len(parts_of(coordinator)) == 2
    assert part(bench, "a", "--callback-shell", "true") == (0, "")


def test_failed_callback_is_repeated_by_the_last_part(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    only = ("--parts", "a", "--window", "1h")
    code, words = part(bench, "a", *only, "--callback-shell", f"test -e {bench.told}")
    assert code == 1
    assert words.count("The callback of batch 1 of 'nightly' has failed") == 1
    Path(bench.told).touch()
    assert part(bench, "a") == (0, "")
    assert [status for _, status, _ in parts_of(coordinator)] == ["succeeded"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signals_end_the_command_and_the_part(
    number: int, code: int, bench: Bench, coordinator: sqlsem.Coordinator
) -> None:
    """SIGTERM is passed on; of a killed part the command is ended, too."""
    sleeps = 'import os, sys, time; open(sys.argv[1], "a").write(f"pid {os.getpid()}\\n"); time.sleep(600)'
    command = [sys.executable, "-c", sleeps, str(bench.told)]
    process = bench.start("-q", "batch", "run", "nightly", "--part", "a", *TWO, "--", *command)
    (pid,) = until(lambda: pids(bench.told), "the command runs")
    busy, words = part(bench, "a")
    assert busy == 78
    assert "runs already" in words
    process.send_signal(number)
    assert process.wait(PATIENCE) == code
    until(lambda: not alive(pid), "the command has ended")
    assert part(bench, "a")[0] == 0, "it joins the same batch"
    assert parts_of(coordinator) == [(1, "open", {"a": "succeeded", "b": "expected"})]


def test_part_that_does_not_count_is_exit_code_1(bench: Bench, coordinator: sqlsem.Coordinator) -> None:
    """Once its batch is abandoned."""
    command = ["sh", "-c", f"{sys.executable} -m sqlsem -q batch abandon nightly"]
    assert bench.run("-q", "batch", "run", "nightly", "--part", "a", *TWO, "--pass-url", "--", *command)[0] == 1
    assert [status for _, status, _ in parts_of(coordinator)] == ["abandoned"]


def test_lost_part_ends_its_command(
    bench: Bench, coordinator: sqlsem.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as this process knows, another one may start the part."""
    monkeypatch.setattr(Membership, "verify", lambda self: None)
    monkeypatch.setattr(Membership, "seconds_until_loss", lambda self: 0.0)
    arguments = ["--url", bench.url, "-q", "batch", "run", "nightly", "--part", "a", *TWO, "--", "sleep", "600"]
    result = call(*arguments)
    assert result.exit_code == 76, result.output
    assert "was lost: this process was out of the database's reach" in result.stderr
    assert parts_of(coordinator) == [(1, "open", {"a": "failed", "b": "expected"})]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--part", "a", *TWO], 64),
        (["--part", "a", *TWO, "--callback-sql", "x", "--callback-shell", "y", "--", "true"], 64),
        (["--part", "a", "--parts", "a,a", "--window", "1h", "--", "true"], 78),
        (["--part", "a", "--parts", "a,,b", "--window", "1h", "--", "true"], 64),
        (["--part", "a", *TWO, "--", "./no-such-program"], 127),
    ],
)
def test_wrong_part_is_refused_before_it_starts(
    options: list[str], code: int, bench: Bench, coordinator: sqlsem.Coordinator
) -> None:
    assert bench.run("-q", "batch", "run", "nightly", *options)[0] == code
    assert parts_of(coordinator) == []
