"""Measure what a start costs: of a program that imports sqlsem, and of `sqlsem run`; beside peers."""

from __future__ import annotations

import importlib.util
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.printed import console, judged, table

__all__ = ["startup"]

#: The targets, in ms of processor time: of the import, above Python's own start; of the command, in all.
IMPORT_MS, RUN_MS = 70, 200
#: The peers whose import is measured.
IMPORTED = ("filelock", "procrastinate", "psycopg")


def startup(engine: str, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the processor time of each program in ms, as medians of starts that take turns."""
    python = [sys.executable, "-c"]
    programs: dict[str, Sequence[str]] = {"Python alone": [*python, "pass"]}
    for name in ("sqlsem", *(name for name in IMPORTED if importlib.util.find_spec(name) is not None)):
        programs[f"import {name}"] = [*python, f"import {name}"]
    command = ["run", "--mutex", "bench", "--", "true"]
    programs["sqlsem run"] = [sys.executable, "-m", "sqlsem", "--quiet", "--url", url, *command]
    with tempfile.TemporaryDirectory() as folder:
        if shutil.which("flock"):
            programs["flock(1)"] = ["flock", str(Path(folder) / "lock"), "true"]
        times: dict[str, list[float]] = {name: [] for name in programs}
        for turn in range(options["starts"] + 1):
            for name, program in programs.items():
                taken = _processor_ms(program)
                if turn:  # the first start writes the compiled modules
                    times[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    result = table(f"Start-up ({engine}), ms of processor time", "program", "in all", "above Python's start")
    for name, taken in medians.items():
        above = taken - medians["Python alone"]
        all_text = judged(taken, RUN_MS, ".0f") if (name, engine) == ("sqlsem run", "postgresql") else f"{taken:.0f}"
        result.add_row(name, all_text, judged(above, IMPORT_MS, ".0f") if name == "import sqlsem" else f"{above:.0f}")
    console.print(result)
    return medians


def _processor_ms(program: Sequence[str]) -> float:
    """Run a program to its end, and return the processor time that it and its children took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) * 1000
