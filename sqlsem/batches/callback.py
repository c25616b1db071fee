"""The callback of a batch: one process claims it, runs it, and records how it ended."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable

from sqlsem import bodies
from sqlsem.batches.declaration import Declaration, brief
from sqlsem.client.client import DatabaseClient
from sqlsem.client.held.claims import Claim, owner_name
from sqlsem.client.options import Alarm
from sqlsem.engines.base import Session
from sqlsem.values.batches import Callback
from sqlsem.values.errors import BatchFailed, SqlsemError

log = logging.getLogger("sqlsem")


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


def resume(declaration: Declaration) -> bool:
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
        resume(declaration)
    except SqlsemError as exc:
        log.warning("Cannot resume earlier batches of %r: %s", declaration.name, exc)
