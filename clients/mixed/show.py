"""Start the participants, read their output, and check their turns."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clients.mixed import dotnet
from clients.mixed.participants import CLOCKS, Run, connect, find_psql, psql_environment, psql_script, value_of

__all__ = ["Turn", "judge", "show"]

#: Timeouts on a busy machine: until all participants are ready, and for the run in addition to its work.
START_SECONDS, RUN_SECONDS = 60.0, 120.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Turn:
    """A participant's hold, by the database's clock: ``entered`` read after the grant, ``left`` before the release."""

    who: str
    position: int
    entered: int
    left: int


@dataclass
class Participant:
    """The process of a participant."""

    who: str
    process: subprocess.Popen[str]
    script: str = "\n"  # its input when all are ready
    ready: threading.Event = field(default_factory=threading.Event)
    turns: list[Turn] = field(default_factory=list)
    errors: str = ""


def judge(turns: Sequence[Turn], limit: int) -> tuple[int, list[str]]:
    """Return the highest number of concurrent holds, and the violations of limit and order."""
    wrong = []
    marks = sorted([(turn.entered, 1) for turn in turns] + [(turn.left, -1) for turn in turns])
    maximum = now = 0
    for _, change in marks:
        now += change
        maximum = max(maximum, now)
    if maximum > limit:
        wrong.append(f"{maximum} WERE INSIDE AT A TIME, MORE THAN THE LIMIT OF {limit}")
    for turn in turns:
        # In order: a granted participant is among the first `limit` of those that have not left, granted or not.
        ahead = [other for other in turns if other.position < turn.position and other.left > turn.entered]
        if len(ahead) >= limit:
            before = ", ".join(str(other.position) for other in ahead)
            wrong.append(
                f"{turn.who} WENT IN WITH POSITION {turn.position}, OUT OF ORDER: BEFORE IT WERE STILL {before}"
            )
    if len({turn.position for turn in turns}) < len(turns):
        wrong.append("A POSITION WAS GIVEN TWICE")
    return maximum, wrong


def _start(
    name: str, words: Sequence[str], *, first: str = "", script: str = "\n", env: dict[str, str] | None = None
) -> Participant:
    process = subprocess.Popen(  # noqa: S603 - fixed programs
        list(words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=ROOT,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end is noticed and reported later
        process.stdin.write(first)
        process.stdin.flush()
    return Participant(name, process, script)


def _participants(run: Run, folder: Path, left_out: list[str]) -> Iterator[Participant]:
    """Start the participants; add to ``left_out`` each that cannot run here."""
    settings = repr((run.url, run.engine, run.schema, run.resource, run.limit, run.turns, run.seconds)) + "\n"
    us = [sys.executable, "-m", "clients.mixed", "--participant"]
    for number in (1, 2):
        yield _start(f"Python {number}", [*us, "python"], first=settings)
    yield _start("bare", [*us, "bare"], first=settings)

    postgres = run.engine == "postgresql"
    lacks = dotnet.lacks(odbc=postgres)
    if lacks:
        left_out.append(f"C# (it needs {lacks})")
    else:
        program = folder / "demo.exe"
        dotnet.compile_sources([dotnet.CLIENT, dotnet.CLIENT.with_name("Demo.cs")], program)
        values = (run.schema, run.resource, run.limit, run.turns, run.seconds)
        words = ["mono", str(program), "odbc" if postgres else "sqlclient", *map(str, values)]
        place = dotnet.odbc_of_postgres(run.url) if postgres else dotnet.ado_of_mssql(run.url)
        for number in (1, 2):
            yield _start(f"C# {number}", words, env={"SQLSEM_DEMO_CONNECTION": place})

    psql = find_psql()
    if not postgres:
        left_out.append("psql (this is not PostgreSQL)")
    elif psql is None:
        left_out.append("psql (it is not installed)")
    else:
        words = [psql, "-X", "-q", "-A", "-t", "-F", " ", "-v", "ON_ERROR_STOP=1", "-f", "-"]
        yield _start("psql", words, first="SELECT 'ready';\n", script=psql_script(run), env=psql_environment(run.url))


class _Transcript:
    """Prints a line for each event, with the time since ``began`` by the database's clock."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._guard = threading.Lock()
        self.began = 0

    def note(self, participant: str, action: str, position: int, at: int) -> None:
        with self._guard:
            self._echo(f"{(at - self.began) / 1e6:8.3f} s  {participant:<10}  {action:<3}  position {position}")


def _read(participant: Participant, transcript: _Transcript) -> None:
    """Read the output of one participant, in a thread."""
    assert participant.process.stdout is not None
    entered = 0
    for line in participant.process.stdout:
        words = line.split()
        if words[:1] == ["ready"]:
            participant.ready.set()
        elif len(words) == 3 and words[0] in ("in", "out"):
            position, at = int(words[1]), int(words[2])
            transcript.note(participant.who, words[0], position, at)
            if words[0] == "in":
                entered = at
            else:
                participant.turns.append(Turn(participant.who, position, entered, at))
    participant.ready.set()  # it has ended: do not wait for it


def _listen(participant: Participant) -> None:
    """Read the standard error of one participant, in a thread; shown if it fails."""
    assert participant.process.stderr is not None
    participant.errors = participant.process.stderr.read()


def show(run: Run, echo: Callable[[str], None]) -> int:
    """Run it; return 0 if limit and order were kept and all participants had all turns, else 1."""
    left_out: list[str] = []
    participants: list[Participant] = []
    threads: list[threading.Thread] = []
    transcript = _Transcript(echo)
    with tempfile.TemporaryDirectory(prefix="sqlsem-demo-", ignore_cleanup_errors=True) as folder:
        try:
            for participant in _participants(run, Path(folder), left_out):
                participants.append(participant)
                for target, arguments in ((_read, (participant, transcript)), (_listen, (participant,))):
                    threads.append(threading.Thread(target=target, args=arguments, daemon=True))
                    threads[-1].start()
            deadline = time.monotonic() + START_SECONDS
            for participant in participants:
                participant.ready.wait(max(0.0, deadline - time.monotonic()))
            names = ", ".join(participant.who for participant in participants)
            echo(f"{names}: {run.turns} turns each, at most {run.limit} inside at a time.")
            for reason in left_out:
                echo(f"Left out: {reason}.")
            with contextlib.closing(connect(run)) as witness:
                transcript.began = value_of(witness, CLOCKS[run.engine])
            for participant in participants:
                assert participant.process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    participant.process.stdin.write(participant.script)
                    participant.process.stdin.close()
            deadline = time.monotonic() + RUN_SECONDS + len(participants) * run.turns * run.seconds
            for participant in participants:
                with contextlib.suppress(subprocess.TimeoutExpired):  # reported below, by its turns
                    participant.process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for participant in participants:
                if participant.process.poll() is None:
                    participant.process.kill()
                    participant.process.wait()
            for thread in threads:
                thread.join()
    return _conclude(run, participants, echo)


def _conclude(run: Run, participants: Sequence[Participant], echo: Callable[[str], None]) -> int:
    turns = [turn for participant in participants for turn in participant.turns]
    maximum, wrong = judge(turns, run.limit)
    for participant in participants:
        code = participant.process.returncode
        if code or len(participant.turns) != run.turns:
            last = participant.errors.strip().splitlines()[-5:]
            wrong.append(
                f"{participant.who} HAD {len(participant.turns)} OF {run.turns} TURNS (exit code {code})"
                + "".join(f"\n    {line}" for line in last)
            )
    for message in wrong:
        echo(message)
    if not wrong:
        echo(
            f"{len(turns)} turns: never more than {run.limit} inside ({maximum} at the most), and all were granted "
            f"in the order of the positions."
        )
    return 1 if wrong else 0
