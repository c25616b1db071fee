"""The environment of tasks and callbacks that this process runs: their database, and the folder of their imports."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sqlsem import config
from sqlsem.api import default
from sqlsem.api.coordinator import Coordinator
from sqlsem.cli.connecting import Connecting
from sqlsem.config import files
from sqlsem.ops.terminal import output
from sqlsem.util.credentials import has_secret
from sqlsem.values.errors import ConfigurationError


def folders_to_import_from() -> Sequence[str]:
    """Return the current folder, unless other users can write to it."""
    if getattr(sys.flags, "safe_path", False):
        return ()
    try:
        here = os.getcwd()
        why = files.writable_by_others(Path(here))
    except FileNotFoundError:  # the folder was removed
        return ()
    if why is not None:
        output.say(f"warning: Nothing is imported from the current folder, as {why}; to import from it: --path {here}")
        return ()
    return (here,)


def require_own_database(coordinator: Coordinator, shared: bool) -> None:
    """Raise `ConfigurationError` if other users can write the SQLite file whose code runs here, unless ``shared``."""
    file = coordinator.engine.local_file
    if file is None or shared:
        return
    file = file.resolve()
    if not file.exists():
        coordinator.admin.resources()  # creates the file
    why = files.writable_by_others(file)
    if why is not None:
        raise ConfigurationError(
            f"The tasks in {file} would run as this user, and {why}. If that is intended: --shared; else name a "
            f"database of your own",
            code="sqlite-file",
        )


@contextlib.contextmanager
def running_callbacks(options: Connecting, shared: bool, pass_url: bool) -> Iterator[Coordinator]:
    """A context with a coordinator, in which callbacks of batches may run here: commands and functions find this
    database, and functions are imported also from the current folder, after all others.
    """
    with options.coordinator(runs="callbacks") as coordinator, same_database(options, pass_url):
        require_own_database(coordinator, shared)
        coordinator.admin.resources()  # imports the driver before the current folder is in sys.path
        sys.path.extend(folder for folder in folders_to_import_from() if folder not in sys.path)
        yield coordinator


@contextlib.contextmanager
def same_database(options: Connecting, pass_url: bool) -> Iterator[None]:
    """A context in which Python functions that use sqlsem find this command's database; commands do, too, if the URL
    may be passed on to them.
    """
    url = options.chosen_url
    before = os.environ.get("SQLSEM_URL")
    hand_on = pass_url or (options.url is not None and not has_secret(url))
    environment = config.environment(url, hand_on=hand_on)
    if "SQLSEM_URL" in environment:
        os.environ["SQLSEM_URL"] = environment["SQLSEM_URL"]
    try:
        with default.configured(url, **options.options):
            yield
    finally:
        if before is None:
            os.environ.pop("SQLSEM_URL", None)
        else:
            os.environ["SQLSEM_URL"] = before
