"""What comes after a batch: claimed by one process, run there, and how it ended."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable

from sqlsem import bodies
from sqlsem.batches.declaration import Declaration, brief
from sqlsem.core.claims import Claim, owner_name
from sqlsem.core.options import Alarm
from sqlsem.core.process import Process
from sqlsem.engines.base import Session
from sqlsem.errors import BatchFailed, SqlsemError
from sqlsem.model import Continuation

__all__ = ["ContinuationClaim", "carry_out", "claim_continuation", "resume", "take_over"]

log = logging.getLogger("sqlsem")


class ContinuationClaim(Claim):
    """A continuation that is ours to run. Until it has run, its end is that others may."""

    def __init__(self, process: Process, continuation: Continuation, uid: str) -> None:
        self._process = process
        self.continuation = continuation
        self.title = f"The continuation of batch {continuation.batch_id} of {continuation.name!r}"
        self.opened(process.claims, lambda session, me: session.return_then(me, uid))

    def run(self, function: Callable[[], object] | None, alarm: Alarm) -> None:
        """Run it, as kept or as this function, and record how it ended. Raises `BatchFailed` when it failed."""
        try:
            try:
                self._run(function)
            except BaseException as exc:
                if self.is_inherited:
                    raise  # a child that was forked in it: its parent has it
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
            bodies.run(self.continuation.kind, self.continuation.body or "", self._process)

    def _record_failure(self, exc: BaseException) -> BatchFailed:
        words = bodies.format_error(exc)
        try:
            self._record(words)
        except SqlsemError as struck:
            log.warning("%s: %s", self.title, struck)
        failure = self._failure(
            f"has failed: {brief(words)}; mend that and run: sqlsem batches resume {self.continuation.batch_id}"
        )
        failure.__cause__ = exc
        return failure

    def _record(self, error: str | None) -> bool:
        """How it ended; False when it was given up meanwhile."""
        batch_id, attempt = self.continuation.batch_id, self.continuation.attempt
        return self.end_by("end of a continuation", lambda session, me: session.end_then(me, batch_id, attempt, error))

    def _failure(self, what: str) -> BatchFailed:
        return BatchFailed(f"{self.title} {what}", resource=self.continuation.name, batch_id=self.continuation.batch_id)


def claim_continuation(
    process: Process, name: str | None, batch_id: int | None, *, own: bool
) -> ContinuationClaim | None:
    """A continuation that nobody runs, of a batch of this name or number. ``own``: this process declares it."""
    uid, owner = uuid.uuid4().hex, owner_name()

    def claim(session: Session, me: int) -> ContinuationClaim | None:
        found = session.claim_then(me, name, batch_id, owner, uid, own)
        return None if found is None else ContinuationClaim(process, found, uid)

    try:
        return process.member.call("resuming a batch", claim, sign=True)
    except BaseException:
        process.member.later(lambda session, me: session.return_then(me, uid))
        raise


def carry_out(declaration: Declaration, claim: ContinuationClaim) -> None:
    """Run it as this process declares it. (What is kept is for those who declare nothing themselves.)"""
    kind, body = declaration.kept
    if kind is not None:
        claim.continuation = dataclasses.replace(claim.continuation, kind=kind, body=body)
    claim.run(declaration.function, declaration.alarm)


def resume(declaration: Declaration) -> bool:
    """See `Batch.resume`."""
    declaration.recover()
    claim = claim_continuation(declaration.process, declaration.name, None, own=declaration.kept[0] is not None)
    if claim is None:
        return False
    log.warning("Taking over: %s", claim.title)
    carry_out(declaration, claim)
    return True


def take_over(declaration: Declaration) -> None:
    """What others have left undone must not keep us from our own."""
    try:
        resume(declaration)
    except SqlsemError as exc:
        log.warning("Looking after earlier batches of %r: %s", declaration.name, exc)
