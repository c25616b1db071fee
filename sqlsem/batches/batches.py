"""`Batch`, the API of programs, and the functions of operators: list, resume, abandon."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

from sqlsem.batches import declaration
from sqlsem.batches.declaration import Declaration, brief, errors_in, listed, why_not_here
from sqlsem.batches.part import Part
from sqlsem.client.defaults import Coordinated
from sqlsem.client.operations.backoff import backoff_delays
from sqlsem.client.options import Alarm
from sqlsem.engines.protocol import Capability
from sqlsem.values.batches import BatchEntry
from sqlsem.values.errors import ConfigurationError, Timeout
from sqlsem.values.locks import Duration, check_duration, check_name, monotonic

log = logging.getLogger("sqlsem")

#: How many batches are listed by default.
LIST_LENGTH = 20


class Batch:
    """A named batch; see `batch`. May be used from many threads at once, again and again.

    Attributes:
        name: Its name.
        parts: The names of its parts.
        window: The time within which every part must succeed, in seconds from the start of the first part.
    """

    def __init__(
        self,
        name: str,
        parts: Iterable[str],
        *,
        window: Duration,
        on_success: Any = None,
        on_failed: Alarm | None = None,
        coordinator: Coordinated | None = None,
    ) -> None:
        self._declaration = Declaration(name, parts, window, on_failed, coordinator)
        if on_success is not None:
            self._declaration.declare_callback(on_success)
        self.name = self._declaration.name
        self.parts = self._declaration.parts
        self.window = self._declaration.window

    def part(self, name: str) -> Part:
        """Return one run of a part: ``with batch.part("a"): …``. Raises `ConfigurationError` for an unknown part."""
        if name not in self.parts:
            raise ConfigurationError(f"Batch {self.name!r} has no part {name!r}; it has {', '.join(self.parts)}")
        return Part(self._declaration, name)

    def entry(self) -> BatchEntry | None:
        """Return the newest batch of this name, with its parts; None if there never was one."""
        return self._declaration.entry()

    def wait(self, timeout: Duration | None = None, *, started: bool = False) -> BatchEntry:
        """Wait until the newest batch has succeeded, and its callback is done. (If there is none: the first to start.)

        Args:
            timeout: Raise `Timeout` after this time.
            started: Return when the callback runs, rather than when it has ended.

        Raises `BatchFailed` if the batch has failed, its window is over, or its callback has failed. Meanwhile checks
        whether the processes that run its parts are alive, and takes over a callback whose process died.
        """
        pause_lengths = backoff_delays(None if timeout is None else check_duration("timeout", timeout))
        batch_id, recovered_at = None, -math.inf
        while True:
            if monotonic() >= recovered_at + self._declaration.client.timing.batch_recovery:
                self._declaration.recover()
                recovered_at = monotonic()
            entry = self._declaration.entry(batch_id)
            if entry is not None:
                batch_id = entry.batch_id
                self._raise_failure(entry)
                if entry.callback_status in ("none", "finished") and entry.status == "succeeded":
                    return entry
                if entry.callback_status == "running" and started:
                    return entry
                if entry.callback_status == "pending" and self.resume():
                    continue
            pause = next(pause_lengths, None)
            if pause is None:
                raise Timeout(f"{_state(self.name, entry)} after {timeout} of waiting", resource=self.name)
            time.sleep(pause)

    def _raise_failure(self, entry: BatchEntry) -> None:
        failed = errors_in(entry, "failed")
        if entry.status == "abandoned":
            missing = errors_in(entry, "failed", "expected", "running")
            raise self._declaration.failure(
                f"was abandoned ({listed(missing)}); the next start of a part begins a new one", entry.batch_id, missing
            )
        if entry.status == "failed":
            raise self._declaration.failure(
                f"has failed: {listed(failed)}; run these parts again", entry.batch_id, failed
            )
        if entry.status == "expired" or entry.overdue:
            missing = errors_in(entry, "failed", "expected", "running")
            raise self._declaration.failure(
                f"was not done within {entry.window:g} s: {listed(missing)}", entry.batch_id, missing
            )
        if entry.callback_status == "failed":
            raise self._declaration.failure(
                f"has succeeded, but its callback failed: {brief(entry.callback_error)}; correct that and run: "
                f"sqlsem batch resume {entry.batch_id}",
                entry.batch_id,
            )

    def resume(self) -> bool:
        """Run the callback of a batch of this name if the process that ran it has died. Return True if there was such a
        callback. Raises `BatchFailed` if it fails.
        """
        return declaration.resume_callback(self._declaration)

    def __repr__(self) -> str:
        return f"<Batch {self.name!r} of {', '.join(self.parts)}>"


def _state(name: str, entry: BatchEntry | None) -> str:
    if entry is None:
        return f"No part of batch {name!r} has started"
    if entry.status == "succeeded":
        return f"The callback of batch {entry.batch_id} of {name!r} is still {entry.callback_status}"
    missing = ", ".join(f"{part.part} ({part.status})" for part in entry.parts if part.status != "succeeded")
    return f"Batch {entry.batch_id} of {name!r} still waits for {missing}"


def list_batches(coordinator: Coordinated, name: str | None = None, maximum: int = LIST_LENGTH) -> list[BatchEntry]:
    """Return batches with their parts, of one name or all, newest first."""
    return _read(coordinator, name, None, maximum)


def _read(
    coordinator: Coordinated, name: str | None, batch_id: int | None, maximum: int = LIST_LENGTH
) -> list[BatchEntry]:
    return coordinator.client.with_connection(
        lambda session: session.list_batches(name, batch_id, maximum), Capability.BATCHES
    )


def abandon(coordinator: Coordinated, which: int | str) -> int | None:
    """Abandon the newest batch of a name, or the batch of a number; for operators. Return its number; None if it cannot
    be abandoned: it must be open or failed, or its callback pending or failed. The next start of a part begins a new
    batch.
    """
    name = check_name("The batch's name", which) if isinstance(which, str) else None
    batch_id = which if isinstance(which, int) else None
    return coordinator.client.with_connection(lambda session: session.abandon_batch(name, batch_id), Capability.BATCHES)


def resume(coordinator: Coordinated, which: int | str) -> bool:
    """Run a callback whose process has died. Return False if there is none.

    ``which``: the name of a batch, for the oldest such callback; or the number of a batch. By number a failed callback
    runs again, too. Raises `BatchFailed` if the callback fails, and `ConfigurationError` if there is no such batch, or
    only the process that declared the callback can run it.
    """
    name = check_name("The batch's name", which) if isinstance(which, str) else None
    batch_id = which if isinstance(which, int) else None
    entries = _read(coordinator, name, batch_id)
    if not entries:
        raise ConfigurationError(f"There is no batch {which!r}; see: sqlsem batch")
    # (Without `on_failed`, `recover` only logs the failures that it finds.)
    Declaration(entries[0].name, [part.part for part in entries[0].parts], 1, None, coordinator).recover()
    claim = declaration.claim_callback(coordinator.client, name, batch_id, own=False)
    if claim is None:
        for entry in _read(coordinator, name, batch_id):
            if entry.callback_status == "pending":
                raise ConfigurationError(
                    f"The callback of batch {entry.batch_id} of {entry.name!r} is not run here: {why_not_here(entry)}"
                )
        return False
    claim.run(None, lambda failure: log.error("%s", failure))
    return True


def batch(
    name: str,
    parts: Iterable[str],
    *,
    window: Duration,
    on_success: Any = None,
    on_failed: Alarm | None = None,
    coordinator: Coordinated | None = None,
) -> Batch:
    """Declare a batch: parts that run side by side; the last one to succeed runs a callback, exactly once.

    >>> publish = sqlsem.Sql("EXEC publish")  # doctest: +SKIP
    >>> nightly = sqlsem.batch("nightly", ["a", "b", "c"], window="6h", on_success=publish)  # doctest: +SKIP
    >>> with nightly.part("a"):  # doctest: +SKIP
    ...     load_a()

    Args:
        name: The batch's name.
        parts: The names of all parts. Every process declares the same ones.
        window: How long a batch may take from the start of its first part; seconds, a `timedelta`, or ``"90m"``,
            ``"6h"``, ``"2d"``. A later success does not count; the first start after the window begins a new batch.
        on_success: The callback: a function without arguments, or a `sqlsem.Call`, `sqlsem.Sql` or `sqlsem.Shell`.
            Any process can resume a callback that can be imported by name, also by ``sqlsem batch resume``. A lambda
            or a nested function can be resumed only by a process that declares it. Declare the same in all parts.
        on_failed: Called with a `BatchFailed` in the process that detects the failure: its own part failed, the
            process of another part died, an earlier batch expired with parts missing, or the callback failed. An
            exception of it is logged.
        coordinator: The coordinator of its database; left out, the default one.

    Raises `ConfigurationError` for no parts, a part that is named twice, a window of zero or less, and a callback that
    cannot be called, imported or stored.
    """
    return Batch(name, parts, window=window, on_success=on_success, on_failed=on_failed, coordinator=coordinator)
