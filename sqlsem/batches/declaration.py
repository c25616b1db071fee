"""A batch as this process declares it, and the calls that read and recover the batches of that name."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from sqlsem import bodies
from sqlsem.client.client import DatabaseClient
from sqlsem.client.defaults import Coordinated, client_of
from sqlsem.client.options import Alarm
from sqlsem.engines.base import Session
from sqlsem.engines.protocol import Capability
from sqlsem.util.printable import first_line
from sqlsem.values.batches import BatchEntry
from sqlsem.values.errors import BatchFailed, ConfigurationError, SqlsemError
from sqlsem.values.locks import Duration, check_duration, check_name

log = logging.getLogger("sqlsem")
T = TypeVar("T")

#: How much of an error another message quotes.
MAX_QUOTED_CHARACTERS = 200
MIN_WINDOW_SECONDS = 0.001
MAX_PARTS = 10_000


class Declaration:
    """The state that `Batch`, its parts and its callback share.

    Attributes:
        name, parts, window: As of `Batch`.
        stored_callback: The callback's kind and text, as the database stores them; (None, None) if there is none.
        function: The callback, if it is a function of this process.
    """

    def __init__(
        self,
        name: str,
        parts: Iterable[str],
        window: Duration,
        on_failed: Alarm | None,
        coordinator: Coordinated | None,
    ) -> None:
        self.name = check_name("The batch's name", name)
        if isinstance(parts, str) or not isinstance(parts, Iterable):
            raise ConfigurationError(f"The parts of batch {name!r} must be a list of names, not {parts!r}")
        self.parts = tuple(check_name(f"A part of batch {name!r}", part) for part in parts)
        if not self.parts:
            raise ConfigurationError(f"Batch {name!r} has no parts; name all of them: parts=['a', 'b']")
        if len(self.parts) > MAX_PARTS:
            raise ConfigurationError(f"Batch {name!r} has {len(self.parts)} parts, at most {MAX_PARTS} are allowed")
        counts = Counter(self.parts)
        twice = sorted(part for part, count in counts.items() if count > 1)
        if twice:
            raise ConfigurationError(f"Batch {name!r} names a part twice: {', '.join(twice)}; each part is one job")
        self.window = check_duration(f"The window of batch {name!r}", window, zero=False)
        if self.window < MIN_WINDOW_SECONDS:
            raise ConfigurationError(f"The window of batch {name!r} must be at least a millisecond, not {window!r}")
        if on_failed is not None and not callable(on_failed):
            raise ConfigurationError(f"on_failed must be a function that takes a BatchFailed, not {on_failed!r}")
        self._on_failed = on_failed
        self._coordinator = coordinator
        self.stored_callback: tuple[str | None, str | None] = (None, None)
        self.function: Callable[[], object] | None = None

    @property
    def client(self) -> DatabaseClient:
        """The client of the batch's database; without a coordinator, that of the current default one."""
        client = client_of(self._coordinator)
        client.engine.require(Capability.BATCHES, f"Batch {self.name!r}")
        return client

    def declare_callback(self, callback: Any) -> None:
        """Set the callback; see `sqlsem.batch`."""
        function = None
        if isinstance(callback, bodies.Call):
            target = bodies.import_by_name(callback.function)
            if not callable(target) or inspect.iscoroutinefunction(target):
                raise ConfigurationError(
                    f"{callback.function} is no plain function, so batch {self.name!r} cannot call it"
                )
            kind, body = bodies.encode(callback)
        elif isinstance(callback, bodies.Sql | bodies.Shell):
            kind, body = bodies.encode(callback)
        elif not callable(callback) or inspect.iscoroutinefunction(callback):
            raise ConfigurationError(
                f"Batch {self.name!r} cannot continue with {callback!r}; give it a plain function, Call, Sql or Shell"
            )
        else:
            function = callback
            try:
                kind, body = bodies.encode(callback)
            except ConfigurationError:
                kind, body = "local", ""
        self.stored_callback = (kind, body or None)
        self.function = function

    # -- in the database ----------------------------------------------------------------------------------------

    def call(self, title: str, call: Callable[[Session, int], T]) -> T:
        """Make a call on the main connection, which may be repeated after a lost reply."""
        return self.client.member.call(title, call)

    def entry(self, batch_id: int | None = None) -> BatchEntry | None:
        """Return a batch with its parts: the one with that number, or the newest one of this name."""
        name = self.name if batch_id is None else None
        entries = self.call("look at a batch", lambda session, _: session.list_batches(name, batch_id, 1))
        return entries[0] if entries else None

    def why_pending(self, batch_id: int | None) -> str | None:
        """Return why the callback of a batch waits for another process; None if it does not. Raises no errors."""
        try:
            entry = self.entry(batch_id)
        except SqlsemError as exc:
            log.warning("The callback of batch %s of %r cannot be read: %s", batch_id, self.name, exc)
            return None
        if entry is None or entry.callback_status != "pending":
            return None
        return why_not_here(entry)

    def recover(self) -> None:
        """Mark parts of dead processes as failed; raise the alarm for each batch that has such a part."""
        for batch_id in self.call("recovery of a batch", lambda session, me: session.recover_batches(self.name, me)):
            failed = self.errors_of(batch_id, "failed")
            self.alarm(self.failure(f"has failed parts: {listed(failed)}; run these again", batch_id, failed))

    # -- failures -----------------------------------------------------------------------------------------------

    def errors_of(self, batch_id: int, *states: str) -> dict[str, str]:
        """Read a batch and return `errors_in` it; an empty result if it cannot be read: a report must not fail."""
        try:
            entry = self.entry(batch_id)
        except SqlsemError as exc:
            log.warning("The parts of batch %d of %r cannot be read: %s", batch_id, self.name, exc)
            return {}
        return errors_in(entry, *states) if entry is not None else {}

    def failure(self, problem: str, batch_id: int | None, failed: dict[str, str] | None = None) -> BatchFailed:
        """Return a `BatchFailed` about a batch and its failed parts."""
        batch = f"Batch {batch_id} of" if batch_id is not None else "Batch"
        return BatchFailed(f"{batch} {self.name!r} {problem}", resource=self.name, batch_id=batch_id, failed=failed)

    def alarm(self, failure: BatchFailed) -> None:
        """Log a failure and call ``on_failed``. An exception of that is logged: it must not hide the failure."""
        log.error("%s", failure)
        if self._on_failed is not None:
            try:
                self._on_failed(failure)
            except Exception:
                log.exception("on_failed of batch %r failed", self.name)


def why_not_here(entry: BatchEntry) -> str:
    """Return why this process does not run a pending callback, and how it can be run."""
    if entry.callback_kind == "session":
        return "it is the code of a database session, which runs it by batch_resume"
    if entry.callback_kind == "local":
        return (
            "it is a function that only its own program knows; a process that declares it can resume it "
            "(Batch.resume(), or the next start of a part)"
        )
    return (
        f"login {entry.callback_kept_by} keeps it, and only that login, putters and operators may run it: "
        f"sqlsem batch resume {entry.batch_id}"
    )


def errors_in(entry: BatchEntry, *states: str) -> dict[str, str]:
    """Return the parts in these states, each with its error."""
    texts = {"expected": "never started", "running": "still running"}
    return {part.part: part.error or texts.get(part.status, "") for part in entry.parts if part.status in states}


def brief(error: str | None) -> str:
    """Return the first line of an error, shortened, for another message."""
    return first_line(error)[:MAX_QUOTED_CHARACTERS]


def listed(failed: dict[str, str]) -> str:
    """Return parts and their errors as text."""
    return ", ".join(f"{part} ({brief(error)})" for part, error in failed.items()) or "nothing is known"
