"""The options before the command: the database, and the options of `sqlsem.connect`."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

import sqlsem
from sqlsem import config, engines
from sqlsem.cli.progress import attempts_shown, progress_shown
from sqlsem.config import files
from sqlsem.engines.base import Engine, Options
from sqlsem.engines.protocol import Capability
from sqlsem.ops.terminal import output
from sqlsem.values.errors import ConfigurationError

log = logging.getLogger("sqlsem")

#: The defaults of options.
DEFAULTS: dict[str, Any] = {"schema": "sqlsem", "table": "ProcessControl", "grace": 5.0, "lease": None, "retry": 10.0}
#: The part of messages about the embedded file.
NOT_NAMED = ", of this user and host only, as no database is named (see: sqlsem config)"


@dataclass
class Connecting:
    """The options before the command, completed by the environment and the configuration files."""

    url: str | None
    profile: str | None
    given: dict[str, Any]  # the options of `DEFAULTS` that the command line has
    verbose: int
    quiet: bool = False

    @functools.cached_property
    def settings(self) -> config.Settings:
        """The database, by the command line, the environment or a file."""
        named = "--url" if self.url else "--profile"
        settings = config.resolve(self.url or None, profile=self.profile, named=named)
        for warning in settings.warnings:
            output.say(f"warning: {warning}")
        return settings

    @property
    def options(self) -> dict[str, Any]:
        """The options of `sqlsem.connect`."""
        return {**DEFAULTS, **self.settings.options, **self.given}

    @property
    def sources(self) -> dict[str, str]:
        """The origin of each of the `options`, as text."""
        given = {name: f"--{name}" for name in self.given}
        return {**dict.fromkeys(DEFAULTS, "the default"), **self.settings.sources, **given}

    @property
    def kill_after(self) -> float:
        """The default time between SIGTERM and SIGKILL for a command whose lock is lost, in seconds."""
        grace, lease = self.options["grace"], self.options["lease"]
        life: float = grace if lease is None else lease
        return min(1.0, life / 5) / 2

    @property
    def chosen_url(self) -> str:
        """The database's URL. It may contain a password: never print it."""
        return self.settings.url

    def engine(self) -> Engine:
        """Return the engine, without a coordinator."""
        options = Options(**{name: value for name, value in self.options.items() if name != "retry"})
        url = engines.plain(self.chosen_url)
        return engines.of_url(url)(url, options)

    @contextlib.contextmanager
    def coordinator(
        self,
        *,
        announced: bool = False,
        must_exist: bool = False,
        bare: bool = False,
        runs: str | None = None,
        draws: bool = False,
    ) -> Iterator[sqlsem.Coordinator]:
        """A context with a coordinator, which connects on first use and is closed at the end.

        Args:
            announced: Do not print which database is used: the caller has done that.
            must_exist: Do not create a missing SQLite file (unless it is the default one).
            bare: Allow engines without tables.
            runs: The plural name of the code from the database that the command runs ("tasks"). Then the database is
                always printed.
            draws: The command draws on the whole terminal, also while the database is out of reach.
        """
        with sqlsem.connect(self.chosen_url, **self.options) as coordinator:
            if not bare:  # a lock in the memory of this command would block no other process
                coordinator.engine.require(Capability.TABLES, "The command line")
            if must_exist and not self.settings.embedded:
                coordinator.engine.creates = False
            label, source = coordinator.engine.label, self.settings.source
            if runs is not None and not self.quiet:
                output.say(f"{runs} come from {label}{NOT_NAMED if self.settings.embedded else f', named by {source}'}")
            elif self.settings.embedded and not announced and not self.quiet and _first_in_terminal():
                # A user who forgot to name a database must not believe that others use the same one.
                output.say(f"this is {label}{NOT_NAMED}")
            else:
                log.info("%s, from %s", label, source)
            with contextlib.nullcontext() if draws or self.quiet or self.verbose else attempts_shown(coordinator):
                yield coordinator

    def progress(
        self, describe: Callable[[], str | None], *, reads: bool = False
    ) -> contextlib.AbstractContextManager[object]:
        """Return a context in which a terminal shows the progress; see `progress_shown`. Not with -q or -v."""
        return contextlib.nullcontext() if self.quiet or self.verbose else progress_shown(describe, reads=reads)


def _first_in_terminal() -> bool:
    """Return True for the first command of a terminal's session, and always without a terminal."""
    if sys.stderr is None or not sys.stderr.isatty() or not hasattr(os, "getsid"):
        return True
    import platformdirs  # (most commands name a database)

    record, session = platformdirs.user_state_path("sqlsem") / "told", f"{os.getsid(0)}\n".encode()
    with contextlib.suppress(OSError, ConfigurationError):
        if files.read(record).data == session:
            return False
    with contextlib.suppress(OSError):  # then the message is printed again
        record.write_bytes(session)
    return True


connecting = click.make_pass_decorator(Connecting)
