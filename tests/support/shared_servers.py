"""The servers that all workers of a run share. The first worker to need one starts it; the end of the run stops it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import filelock

from support.forks import TESTS
from support.mariadb import MariaDBServer
from support.postgres import PostgresServer

#: The file with the process id of the run, in the run's folder.
RUN = "run"
#: Stops the servers if the run is killed.
_GUARDIAN = """
import pathlib, shutil, sys
import psutil
sys.path.insert(0, sys.argv[3])
from support import shared_servers
try:
    psutil.Process(int(sys.argv[1])).wait()
except psutil.NoSuchProcess:
    pass
directory = pathlib.Path(sys.argv[2])
if directory.exists():
    shared_servers.stop_all(directory)
    shutil.rmtree(directory, ignore_errors=True)
"""


def share(directory: Path, name: str, kind: type[Any]) -> Any:
    """Return the run's server of this kind in a folder of the run's folder; start it if there is none."""
    note = directory / name / "port"
    with filelock.FileLock(directory / "lock"):
        if note.exists():
            return kind(directory / name, int(note.read_text()))
        _start_guardian(directory)
        options = {"guarded": False} if kind is MariaDBServer else {}  # it outlives the worker that starts it
        server = kind.create(directory / name, **options)
        note.write_text(str(server.port))
        return server


def _start_guardian(directory: Path) -> None:
    started = directory / "guardian"
    if started.exists():
        return
    started.touch()
    subprocess.Popen(
        [sys.executable, "-c", _GUARDIAN, (directory / RUN).read_text(), str(directory), str(TESTS)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def stop_all(directory: Path) -> None:
    """Stop the servers in the run's folder."""
    if (directory / "postgres").exists():
        with contextlib.suppress(AssertionError, OSError):  # it may be down already
            PostgresServer(directory / "postgres", 0).stop("immediate")
    if (directory / "mariadb").exists():
        with contextlib.suppress(AssertionError, OSError):
            MariaDBServer(directory / "mariadb", 0).close()
