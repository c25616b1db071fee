"""The modules that a program loads: each `sqlsem` on the command line, and each small job, pays for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE, Database

import sqlsem

posix = pytest.mark.skipif(os.name != "posix", reason="forks")

#: Modules that are slow to load, or that locks do not need. Each is loaded at its first use.
HEAVY = {
    *("asyncio", "click", "cronsim", "filelock", "hashlib", "importlib.metadata", "importlib.resources", "pathlib"),
    *("platformdirs", "psycopg", "pyodbc", "rich", "socket", "sqlalchemy", "sqlite3", "statistics", "subprocess"),
    *("textual", "tomllib", "urllib.parse", "uuid", "wrapt", "zoneinfo"),
    *("sqlsem.aio", "sqlsem.batches", "sqlsem.bodies", "sqlsem.cli", "sqlsem.client.client", "sqlsem.config"),
    *(
        "sqlsem.engines.base",
        "sqlsem.insight.blockers",
        "sqlsem.insight.overview",
        "sqlsem.ops",
        "sqlsem.sql",
        "sqlsem.tasks",
        "sqlsem.testing",
    ),
}
#: Those that `sqlsem run` needs.
NEEDED_BY_RUN = {
    *("click", "pathlib", "platformdirs", "socket", "subprocess", "urllib.parse", "uuid"),
    *("sqlsem.cli", "sqlsem.client.client", "sqlsem.config", "sqlsem.engines.base", "sqlsem.ops", "sqlsem.sql"),
}
#: The greatest numbers of modules, without those of Python's own start.
IMPORT_MODULES, RUN_MODULES = 145, 280
#: Prints the modules that a program has loaded, at its end.
REPORT = """
import atexit, sys
early = set(sys.modules)
atexit.register(lambda: print(*sorted(set(sys.modules) - early), file=open({path!r}, "w")))
"""
RUN = "import sys; sys.argv[0] = 'sqlsem'; from sqlsem.cli import main; main(prog_name='sqlsem')"


def loaded(code: str, folder: Path, *arguments: str) -> set[str]:
    """Return the modules that a program loads."""
    path = folder / "modules"
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(path=str(path)) + code, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return set(path.read_text().split())


def test_import_loads_only_modules_of_locks(tmp_path: Path) -> None:
    modules = loaded("import sqlsem", tmp_path)
    assert "sqlsem.api.locks" in modules
    assert modules & HEAVY == set()
    assert len(modules) <= IMPORT_MODULES


def test_using_a_lock_loads_no_more_than_its_engine(tmp_path: Path) -> None:
    code = f"import sqlsem\nwith sqlsem.connect({f'sqlite:///{tmp_path}/x.db'!r}).mutex('x'): pass"
    spared = HEAVY - NEEDED_BY_RUN - {"hashlib", "sqlite3"} | {
        "click",
        "uuid",
        "sqlsem.cli",
        "sqlsem.config",
        "sqlsem.ops",
    }
    assert loaded(code, tmp_path) & spared == set()


@posix
@pytest.mark.engines("sqlite", "postgresql")
def test_run_loads_only_its_modules(database: Database, tmp_path: Path) -> None:
    driver = {"sqlite": "sqlite3, hashlib", "postgresql": "psycopg"}[database.engine]  # (Psycopg loads asyncio.)
    modules = loaded(RUN, tmp_path, "--url", database.url, "run", "--mutex", "x", "--", "true")
    modules -= loaded(f"import {driver}", tmp_path)
    assert "sqlsem.client.client" in modules
    assert modules & (HEAVY - NEEDED_BY_RUN) == set()
    assert len(modules) <= RUN_MODULES


def test_late_names_are_there_at_their_first_use(tmp_path: Path) -> None:
    code = "import sqlsem\nfor name in [*sqlsem.LATE, *sqlsem.LATE_MODULES]:\n    assert name in dir(sqlsem)\n"
    code += "    assert name not in vars(sqlsem) or name in sqlsem.LATE_MODULES\n    first = getattr(sqlsem, name)\n"
    code += "    assert vars(sqlsem)[name] is getattr(sqlsem, name) is first\n"
    loaded(f"{code}from sqlsem import queue, Worker, aio\nassert queue is sqlsem.queue", tmp_path)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'sqlsem' has no attribute 'mutx'"):
        sqlsem.mutx  # type: ignore[attr-defined]  # noqa: B018


@posix
def test_child_forked_during_a_late_import_can_import(tmp_path: Path) -> None:
    """A child that inherits the lock of a module that another thread imports waits for ever when it imports that."""
    (tmp_path / "slowly_loaded.py").write_text("import test_loading_events as e\ne.begun.set()\ne.forked.wait(1)\n")
    (tmp_path / "test_loading_events.py").write_text(
        "import threading\nbegun, forked = threading.Event(), threading.Event()\n"
    )
    code = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(tmp_path)!r})
import test_loading_events as e
from sqlsem.util import late

def load():
    with late.importing:
        import slowly_loaded

thread = threading.Thread(target=load)
thread.start()
assert e.begun.wait({PATIENCE})
child = os.fork()
if child == 0:
    signal.alarm({int(PATIENCE)})  # (ends a child that waits for ever)
    import slowly_loaded
    with late.importing:
        os._exit(7)
e.forked.set()
thread.join()
with late.importing:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * PATIENCE)
    assert done.returncode == 0, done.stderr


@posix
def test_thread_that_imports_late_may_fork() -> None:
    code = "import os\nfrom sqlsem.util import late\nwith late.importing:\n    child = os.fork()\n"
    code += "if child == 0:\n    os._exit(7)\n"
    code += "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
