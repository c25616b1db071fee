"""Runs ``sqlsem demo``: several processes share a limit, and the screen shows their queue.

It works on an SQLite file of its own, in a folder that is removed afterwards, so that no real queue is disturbed. Each
worker, once granted, leaves a file in that folder while it works, and counts the files: a check that does not depend on
sqlsem.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

import sqlsem
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.queues import render_queues
from sqlsem.util.runtime import Thread
from sqlsem.util.threads import spawn
from sqlsem.values.locks import Entry, Resource

__all__ = ["demo"]

RESOURCE = "demo"
#: Seconds between two reads of the queue.
LOOK_SECONDS = 0.1
#: Seconds that a worker works after its grant: from, to.
WORK_SECONDS = (0.2, 0.9)
#: How long workers may take to get ready on a busy machine, and to end by themselves.
START_SECONDS, END_SECONDS = 60.0, 10.0


@dataclass
class _Reports:
    """The reports of the workers."""

    ready: int = 0
    turns: int = 0
    max_reported: int = 0
    waited: float = 0.0
    longest: float = 0.0
    max_read: int = 0
    killed: str | None = None
    reclaimed: float | None = None
    guard: threading.Lock = field(default_factory=threading.Lock)


def demo(console: Console, *, seconds: float, workers: int, limit: int) -> int:
    """Run the demo. Return 0 if the limit was kept and 1 if not. Draws on ``console`` if that is a terminal."""
    reports = _Reports()
    with tempfile.TemporaryDirectory(prefix="sqlsem-demo-", ignore_cleanup_errors=True) as folder:
        inside = Path(folder, "inside")
        inside.mkdir()
        url = f"sqlite:///{Path(folder, 'demo.db')}"
        console.print(f"{workers} processes share a limit of {limit}, for {seconds:g} s.")
        processes: list[subprocess.Popen[str]] = []
        readers: list[Thread] = []
        try:
            with sqlsem.connect(url) as coordinator:
                coordinator.admin.entries()  # makes the tables
                for number in range(workers):
                    process = _start(url, inside, limit)
                    processes.append(process)
                    readers.append(spawn(partial(_read, process, reports), f"reader-{number}"))
                _wait_until_ready(reports, processes)
                _watch(console, coordinator, reports, seconds, limit, processes, inside)
        finally:
            _stop(processes)
            for reader in readers:
                reader.join(END_SECONDS)
    console.print(_summary(reports, seconds, workers, limit))
    return 0 if reports.turns and max(reports.max_reported, reports.max_read) <= limit else 1


def _start(url: str, inside: Path, limit: int) -> subprocess.Popen[str]:
    return subprocess.Popen(  # noqa: S603 - this file
        [sys.executable, "-m", "sqlsem.ops.demo", url, str(inside), str(limit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()  # the worker then ends
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _read(process: subprocess.Popen[str], reports: _Reports) -> None:
    """Read the reports of one worker, one line a turn. Runs in a thread."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            turn = json.loads(line)
            with reports.guard:
                if "ready" in turn:
                    reports.ready += 1
                    continue
                reports.turns += 1
                reports.max_reported = max(reports.max_reported, turn["inside"])
                reports.waited += turn["waited"]
                reports.longest = max(reports.longest, turn["waited"])


def _wait_until_ready(reports: _Reports, processes: Sequence[subprocess.Popen[str]]) -> None:
    """Wait until all workers are ready."""
    deadline = time.monotonic() + START_SECONDS
    while reports.ready < len(processes) and time.monotonic() < deadline:
        if any(process.poll() is not None for process in processes):
            break  # (it has printed its error; the other workers continue without it)
        time.sleep(0.02)
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.write("go\n")
                process.stdin.flush()


def _watch(
    console: Console,
    coordinator: sqlsem.Coordinator,
    reports: _Reports,
    seconds: float,
    limit: int,
    processes: Sequence[subprocess.Popen[str]],
    inside: Path,
) -> None:
    """Read and show the queue until the time is over; half way through, kill one of the holders."""
    began = time.monotonic()
    printed_at = began
    victim: Entry | None = None
    killed_at = 0.0
    live = output.picture(console) if console.is_terminal else None
    if live is not None:
        live.start()
    try:
        while (elapsed := time.monotonic() - began) < seconds:
            entries = coordinator.admin.entries(RESOURCE)
            positions = {entry.position for entry in entries}
            holding = sum(entry.state == "holds" for entry in entries)
            reports.max_read = max(reports.max_read, holding)
            if victim is None and elapsed > seconds / 2 and os.name == "posix":
                victim = _kill_one(entries, processes, inside)
                killed_at = time.monotonic()
                reports.killed = f"{victim.host}:{victim.pid}" if victim else None
            elif victim is not None and reports.reclaimed is None and victim.position not in positions:
                reports.reclaimed = time.monotonic() - killed_at
            if live is not None:
                live.update(_picture(entries, reports, console.width, limit, seconds - elapsed), refresh=True)
            elif time.monotonic() - printed_at >= 1:
                printed_at = time.monotonic()
                console.print(
                    f"{elapsed:4.0f} s: {holding} holding, {len(entries) - holding} waiting, {reports.turns} grants"
                )
            time.sleep(min(LOOK_SECONDS, max(0.0, seconds - elapsed)))
    finally:
        if live is not None:
            live.stop()


def _picture(entries: Sequence[Entry], reports: _Reports, width: int, limit: int, remaining: float) -> RenderableType:
    holding = sum(entry.state == "holds" for entry in entries)
    queue = Resource(RESOURCE, None, False, None, holding, len(entries) - holding)
    foot = f"{reports.turns} grants so far, {remaining:.0f} s to go"
    if reports.killed is not None:
        foot += f"; {reports.killed} was killed" + ("" if reports.reclaimed is None else ", and its lock is free again")
    return Group(
        Text(f"[{'#' * holding}{'.' * max(0, limit - holding)}]", style="bold green"),
        render_queues([(queue, entries)], width),
        Text(foot, style="dim"),
    )


def _kill_one(entries: Sequence[Entry], processes: Sequence[subprocess.Popen[str]], inside: Path) -> Entry | None:
    """Kill a worker that holds the lock and works; return its entry, or None if there is no such worker now."""
    for entry in entries:
        process = next((candidate for candidate in processes if candidate.pid == entry.pid), None)
        if process is None or entry.state != "holds" or process.poll() is not None:
            continue
        # Stop the worker first: its file may be removed only when it no longer works, and before another one is
        # granted.
        process.send_signal(signal.SIGSTOP)
        try:
            (inside / str(process.pid)).unlink()
        except FileNotFoundError:
            process.send_signal(signal.SIGCONT)  # it is just beginning or ending its work
            continue
        process.kill()
        return entry
    return None


def _summary(reports: _Reports, seconds: float, workers: int, limit: int) -> Text:
    maximum = max(reports.max_reported, reports.max_read)
    kept = (
        f"never more than {limit} at a time"
        if maximum <= limit
        else f"{maximum} AT A TIME, MORE THAN THE LIMIT OF {limit}"
    )
    parts = [
        f"In {seconds:g} s, {workers} processes acquired the lock {reports.turns} times: {kept}, by their own count. "
        f"They waited {reports.waited / max(1, reports.turns):.1f} s on average, {reports.longest:.1f} s at most."
    ]
    if reports.killed is not None:
        back = "for the next request" if reports.reclaimed is None else f"{reports.reclaimed:.1f} s later"
        parts.append(f"A holder was killed (SIGKILL); its lock was free again {back}, without any cleaning up.")
    if not reports.turns:
        parts = ["No worker was granted the lock; run it for longer (--seconds)."]
    return Text(" ".join(parts))


def _work(url: str, inside: Path, limit: int) -> None:
    """Run a worker: acquire and release again and again, until standard input is closed."""
    stopped = threading.Event()
    mark = inside / str(os.getpid())

    def listen() -> None:
        sys.stdin.read()
        stopped.set()  # waiters are granted as holders release, and release at once

    with sqlsem.connect(url) as coordinator, contextlib.suppress(KeyboardInterrupt):
        lock = coordinator.limit(RESOURCE, limit, note=f"worker {os.getpid()}")
        print(json.dumps({"ready": os.getpid()}), flush=True)
        sys.stdin.readline()  # all start together
        spawn(listen, "listen")
        while not stopped.is_set():
            with lock as grant:
                if stopped.is_set():
                    break
                mark.touch()
                count = len(list(inside.iterdir()))
                time.sleep(random.uniform(*WORK_SECONDS))
                mark.unlink()
            print(json.dumps({"inside": count, "waited": grant.waited}), flush=True)


if __name__ == "__main__":
    _work(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
