"""The options before the command: which database it is, and how to take part."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

import sqlsem
from sqlsem import config, engines
from sqlsem.engines.base import Engine, Options
from sqlsem.engines.roles import Tables
from sqlsem.terminal import output

__all__ = ["Connecting", "connecting"]

log = logging.getLogger("sqlsem")

#: What is not said on the command line or in a file.
DEFAULTS = {"schema": "sqlsem", "table": "ProcessControl", "grace": 5.0, "lease": None, "retry": 10.0}


@dataclass
class Connecting:
    """The options before the command; and what the environment and the files add to them."""

    url: str | None
    profile: str | None
    given: dict[str, Any]  # of `DEFAULTS`, what was said on the command line
    verbose: int

    @functools.cached_property
    def settings(self) -> config.Settings:
        """Which database it is."""
        named = "--url" if self.url else "--profile"
        found = config.resolve(self.url or None, profile=self.profile, named=named)
        for warning in found.warnings:
            output.say(f"warning: {warning}")
        return found

    def _option(self, name: str) -> Any:
        return self.given.get(name, self.settings.options.get(name, DEFAULTS[name]))

    @property
    def options(self) -> dict[str, Any]:
        """Those of `sqlsem.connect`."""
        return {name: self._option(name) for name in DEFAULTS}

    @property
    def schema(self) -> str:
        """The schema of the tables."""
        return str(self._option("schema"))

    @property
    def table(self) -> str:
        """The name of the queue's table."""
        return str(self._option("table"))

    @property
    def life(self) -> float:
        """The grace or, if there is one, the lease."""
        lease = self._option("lease")
        return float(self._option("grace") if lease is None else lease)

    @property
    def retry(self) -> float:
        """For how long to try when the database is away."""
        return float(self._option("retry"))

    @property
    def chosen_url(self) -> str:
        """Never to be printed."""
        return self.settings.url

    def engine(self) -> Engine:
        """The engine alone, for what a coordinator would be too much."""
        grace, lease = self._option("grace"), self._option("lease")
        options = Options(grace=grace, lease=lease, schema=self.schema, table=self.table)
        url = engines.plain(self.chosen_url)
        return engines.of_url(url)(url, options)

    @contextlib.contextmanager
    def coordinator(
        self, *, told: bool = False, looks: bool = False, bare: bool = False
    ) -> Iterator[sqlsem.Coordinator]:
        """A coordinator, closed in the end. Connects when it is used.

        Args:
            told: It is known already where that is.
            bare: An engine without tables will do.
            looks: It does not create an SQLite file that is not there (unless nobody has named one).
        """
        with sqlsem.connect(self.chosen_url, **self.options) as coordinator:
            if not bare:  # a lock in the memory of this command would keep nobody out
                coordinator.engine.require(Tables, "The command line")
            if looks and not self.settings.embedded:
                coordinator.engine.creates = False
            if self.settings.embedded and not told:
                # Anyone who forgot to name a database must not think that others are in the same one.
                output.say(f"this is {coordinator.engine.where}, {config.EMBEDDED}")
            else:
                log.info("%s, from %s", coordinator.engine.where, self.settings.source)
            yield coordinator


connecting = click.make_pass_decorator(Connecting)
