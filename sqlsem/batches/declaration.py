"""A batch as this process declares it, and the calls that read and recover the batches of that name. Its callback: one
process claims that, runs it, and records how it ended.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from sqlsem import bodies
from sqlsem.client.client import DatabaseClient
from sqlsem.client.defaults import Coordinated, client_of
from sqlsem.client.held.claims import Claim, owner_name
from sqlsem.client.options import Alarm
from sqlsem.engines.base import Session
from sqlsem.engines.protocol import Capability
from sqlsem.util.printable import first_line
from sqlsem.values.batches import BatchEntry, Callback
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


class CallbackClaim(Claim):
    """A claimed callback. If the claim is dropped before the callback has run, another process may run it."""

    def __init__(self, client: DatabaseClient, callback: Callback, uid: str) -> None:
        self._client = client
        self.callback = callback
        self.title = f"The callback of batch {callback.batch_id} of {callback.name!r}"
        self.opened(client.claims, lambda session, me: session.return_callback(me, uid))

    def run(self, function: Callable[[], object] | None, alarm: Alarm) -> None:
        """Run the callback, or ``function`` in its place, and record how it ended. Raises `BatchFailed` if it fails."""
        try:
            try:
                self._run(function)
            except BaseException as exc:
                if self.is_inherited:
                    raise  # in a child that the callback forked: the parent has the claim
                failure = self._record_failure(exc)
                alarm(failure)
                if not isinstance(exc, Exception):
                    raise
                raise failure from exc
            self.require_open()
            if not self._record(None):
                failure = self._failure(
                    "has ended, but this process had been out of the database's reach for longer than its grace: "
                    "another may have run it too"
                )
                alarm(failure)
                raise failure
        except BaseException:
            self.leave()
            raise

    def _run(self, function: Callable[[], object] | None) -> None:
        if function is not None:
            function()
        else:
            bodies.run(self.callback.kind, self.callback.body or "", self._client)

    def _record_failure(self, exc: BaseException) -> BatchFailed:
        error = bodies.format_error(exc)
        try:
            self._record(error)
        except SqlsemError as record_error:
            log.warning("%s: %s", self.title, record_error)
        failure = self._failure(
            f"has failed: {brief(error)}; correct that and run: sqlsem batch resume {self.callback.batch_id}"
        )
        failure.__cause__ = exc
        return failure

    def _record(self, error: str | None) -> bool:
        """Record how the callback ended; return False if the claim was lost meanwhile."""
        batch_id, attempt = self.callback.batch_id, self.callback.attempt
        return self.end_by("end of a callback", lambda session, me: session.end_callback(me, batch_id, attempt, error))

    def _failure(self, problem: str) -> BatchFailed:
        return BatchFailed(f"{self.title} {problem}", resource=self.callback.name, batch_id=self.callback.batch_id)


def claim_callback(
    client: DatabaseClient, name: str | None, batch_id: int | None, *, own: bool
) -> CallbackClaim | None:
    """Claim a callback that no process runs, of a batch of this name or number.

    ``own``: this process declares a callback for the batch, and runs that one.
    """
    uid, owner = uuid.uuid4().hex, owner_name()

    def claim(session: Session, me: int) -> CallbackClaim | None:
        callback = session.claim_callback(me, name, batch_id, owner, uid, own)
        return None if callback is None else CallbackClaim(client, callback, uid)

    try:
        return client.member.call("resuming a batch", claim, counts_as_heartbeat=True)
    except BaseException:
        client.member.defer(lambda session, me: session.return_callback(me, uid))
        raise


def run_callback(declaration: Declaration, claim: CallbackClaim) -> None:
    """Run a callback as this process declares it. (Processes that declare none run the text in the database.)"""
    kind, body = declaration.stored_callback
    if kind is not None:
        claim.callback = dataclasses.replace(claim.callback, kind=kind, body=body)
    claim.run(declaration.function, declaration.alarm)


def resume_callback(declaration: Declaration) -> bool:
    """See `Batch.resume`."""
    declaration.recover()
    claim = claim_callback(declaration.client, declaration.name, None, own=declaration.stored_callback[0] is not None)
    if claim is None:
        return False
    log.warning("Taking over: %s", claim.title)
    run_callback(declaration, claim)
    return True


def take_over(declaration: Declaration) -> None:
    """Run the callback that a dead process left, if any. An error is logged: it must not stop this process's part."""
    try:
        resume_callback(declaration)
    except SqlsemError as exc:
        log.warning("Cannot resume earlier batches of %r: %s", declaration.name, exc)
