"""`Part`, one run of a part of a batch: claimed at its start, ended by its ``with`` block or by hand."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable

from sqlsem.batches.declaration import CallbackClaim, Declaration, brief, listed, run_callback, take_over
from sqlsem.bodies import format_error
from sqlsem.client.held.claims import Claim, owner_name
from sqlsem.client.operations.backoff import backoff_delays
from sqlsem.engines.base import Session
from sqlsem.values.batches import BatchEntry, PartEnd, PartEntry, PartStart
from sqlsem.values.errors import BatchFailed, ConfigurationError, NotHeld, SqlsemError

log = logging.getLogger("sqlsem")


class Part(Claim):
    """One run of a part, made by `Batch.part`; to be used once. The part has succeeded at the end of its ``with``
    block, and has failed if the block raises any exception. (Without a block: `start`, then `finish` or `fail`.)

    A success raises no error if other parts failed: `Batch.wait` and ``on_failed`` report these. The end of the block
    raises `BatchFailed` if the success does not count: it came after the window, an operator had abandoned the batch,
    or the claim was lost during an outage. It also raises if this part was the last one and the callback failed. Run
    the part again then. A part may run again at any time: the batch waits for it once more.

    Attributes:
        name: The part's name.
        batch_id: The number of the batch, once started.
        attempt: How often the part was started in this batch.
        is_last: True after the end if this part was the last to succeed, so that the batch has succeeded.
    """

    _started = False
    _callback: CallbackClaim | None = None  # if this part was the last one

    def __init__(self, declaration: Declaration, name: str) -> None:
        self._declaration = declaration
        self._client = declaration.client
        self.title = f"Part {name!r} of batch {declaration.name!r}"
        self.name = name
        self.batch_id: int | None = None
        self.attempt: int | None = None
        self.is_last = False

    # -- its start ----------------------------------------------------------------------------------------------

    def start(self) -> Part:
        """Start the part in the newest batch; in a new one if that has succeeded or its window is over.

        Raises `ConfigurationError` if the part runs already, and if the open batch has other parts.
        """
        if self._started:
            raise NotHeld(f"{self!r} was started before; each run needs a part of its own: batch.part({self.name!r})")
        batch_to_repeat = self._batch_to_repeat()
        if batch_to_repeat is None:
            take_over(self._declaration)
        self._started = True
        self._uid = uuid.uuid4().hex
        try:
            # From here on the database may have recorded the start.
            self.opened(self._client.claims, self._ending("interrupted while it was started"))
            reply = self._start()
            if reply.code != "started":
                self.mark_ended()
                raise ConfigurationError(self._why_refused(reply), resource=self._declaration.name)
            self.batch_id, self.attempt = reply.batch_id, reply.attempt
            if reply.previous is not None:
                self._report_expired(reply.previous)
            if batch_to_repeat not in (None, reply.batch_id):
                take_over(self._declaration)
            self._ending_call = self._ending("it was dropped without an end")
            return self
        except BaseException:
            self.leave()  # the caller gets no part to end
            raise

    def _batch_to_repeat(self) -> int | None:
        """Return the newest batch if this part was its last one and the callback has not ended.

        This process may replace one that died in the callback: then the part joins that batch, and runs the callback.
        """
        self._declaration.recover()
        entry = self._declaration.entry()
        part = _part_of(entry, self.name)
        if entry is None or part is None or not part.is_last or entry.callback_status not in ("pending", "running"):
            return None
        return entry.batch_id

    def _start(self) -> PartStart:
        declaration, name, uid, owner = self._declaration, self.name, self._uid, owner_name()

        def start(session: Session, me: int) -> PartStart:
            return session.start_part(
                me,
                declaration.name,
                name,
                declaration.parts,
                declaration.window,
                owner,
                uid,
                declaration.stored_callback,
            )

        # If the part runs already, its process may be dead: wait until that process's grace is over.
        pause_lengths = backoff_delays(self._client.retry)
        while True:
            reply = self._client.member.call("start of a part", start, counts_as_heartbeat=True)
            if reply.code not in ("running", "in_callback"):
                return reply
            running = _part_of(declaration.entry(reply.batch_id), name)
            pause = next(pause_lengths, None)
            is_missing = reply.code == "in_callback" or (running is not None and running.missing_for is not None)
            if pause is None or not is_missing:
                return reply
            time.sleep(pause)
            declaration.recover()

    def _why_refused(self, reply: PartStart) -> str:
        batch_label = f"{reply.batch_id} of {self._declaration.name!r}"
        entry = self._declaration.entry(reply.batch_id)
        parts = entry.parts if entry is not None else ()
        if reply.code == "differs":
            existing, declared = {part.part for part in parts}, set(self._declaration.parts)
            additional = f"it also has {', '.join(sorted(existing - declared))}" if existing - declared else ""
            missing = f"it lacks {', '.join(sorted(declared - existing))}" if declared - existing else ""
            opened = f"login {entry.opened_by} opened it at {entry.opened_at}; " if entry is not None else ""
            return (
                f"Batch {batch_label} is open with other parts: {' and '.join(filter(None, (additional, missing)))}; "
                f"{opened}declare the same in all parts (a change takes effect with the next batch), or have "
                f"an operator run: sqlsem batch abandon {reply.batch_id}"
            )
        if reply.code == "in_callback" and entry is not None:
            return (
                f"The callback of batch {batch_label} runs already ({entry.callback_owner} since "
                f"{entry.callback_started}); its process is missing, but not yet for its grace: start part "
                f"{self.name!r} again in a moment"
            )
        running = _part_of(entry, self.name)
        runner = "elsewhere"
        if running is not None:
            runner = f"{running.host}:{running.pid} since {running.started_at}, login {running.login}"
        if running is not None and running.missing_for is not None:
            runner += f", missing for {running.missing_for:.0f} s but not yet for its grace"
        return f"{self.title} runs already ({runner}); wait until it has ended"

    def _report_expired(self, batch_id: int) -> None:
        missing = self._declaration.errors_of(batch_id, "failed", "expected", "running")
        self._declaration.alarm(
            self._declaration.failure(
                f"has expired: {listed(missing)}; a new batch has begun without it", batch_id, missing
            )
        )

    # -- its end ------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Record the part as succeeded; run the callback if it was the last. Return True if it was.

        Raises `BatchFailed`; see the class.
        """
        self.require_open()
        try:
            # If the end was recorded though the reply was lost, the deferred call returns the callback's claim.
            ended = self._record(None, otherwise="its end could not be recorded")
            self.is_last = ended.is_last
        except BaseException as exc:
            self.leave()
            if self._callback is not None:
                self._callback.leave()
            failure = self._declaration.failure(
                f"may lack part {self.name!r}, whose end could not be recorded ({brief(format_error(exc))}); see "
                f"sqlsem batch, and if it has failed run it again",
                self.batch_id,
                {self.name: "its end could not be recorded"},
            )
            failure.__cause__ = exc
            self._declaration.alarm(failure)
            raise
        if self._callback is not None:
            run_callback(self._declaration, self._callback)
        does_not_count = self._why_it_does_not_count(ended)
        if does_not_count is not None:
            self._declaration.alarm(does_not_count)
            raise does_not_count
        self._report_incomplete_batch(ended)
        take_over(self._declaration)
        return self.is_last

    def _report_incomplete_batch(self, ended: PartEnd) -> None:
        """Raise the alarm if this part was the last to end, but no callback runs. The part itself has succeeded."""
        if ended.batch_status == "failed" and ended.batch_id is not None:
            failed = self._declaration.errors_of(ended.batch_id, "failed")
            self._declaration.alarm(
                self._declaration.failure(
                    f"has failed, though part {self.name!r} has succeeded: {listed(failed)}; run these parts again, "
                    f"and the last of them continues the batch",
                    ended.batch_id,
                    failed,
                )
            )
        elif ended.is_last and ended.callback is None and (why := self._declaration.why_pending(ended.batch_id)):
            self._declaration.alarm(
                self._declaration.failure(f"has succeeded, but its callback is pending: {why}", ended.batch_id)
            )

    def _why_it_does_not_count(self, ended: PartEnd) -> BatchFailed | None:
        if ended.code == "late" and ended.batch_status == "abandoned":
            return self._declaration.failure(
                f"was abandoned before part {self.name!r} ended: that does not count; run the part again",
                ended.batch_id,
                {self.name: "ended after the batch was abandoned"},
            )
        if ended.code == "late":
            return self._declaration.failure(
                f"was over, or its window of {self._declaration.window:g} s, when part {self.name!r} ended: that does "
                f"not count; run the part again, or declare a longer window",
                ended.batch_id,
                {self.name: "ended after the window"},
            )
        if ended.code != "succeeded":
            return self._declaration.failure(
                f"has given up part {self.name!r}: this process was out of the database's reach for longer than its "
                f"grace; what the part did does not count, run it again",
                self.batch_id,
                {self.name: "its process was given up"},
            )
        return None

    def fail(self, error: BaseException | str) -> None:
        """Record the part as failed, and call ``on_failed``."""
        self.require_open()
        text = format_error(error) or "it said nothing"
        failure = self._declaration.failure(
            f"has a failed part: {self.name!r} ({brief(text)}); run it again", self.batch_id, {self.name: text}
        )
        if isinstance(error, BaseException):
            failure.__cause__ = error
        try:
            self._record(text, otherwise=text)
        except BaseException:
            self.leave()
            raise
        finally:
            self._declaration.alarm(failure)
        take_over(self._declaration)

    def _record(self, error: str | None, *, otherwise: str) -> PartEnd:
        """Record the end; if that fails, a deferred call records it as failed with the error ``otherwise``."""
        self._ending_call = self._ending(otherwise)
        try:
            self._declaration.recover()
        except SqlsemError as exc:
            log.warning("Cannot check the other parts of %r: %s", self._declaration.name, exc)
        end_part = self._ending(error)

        def end(session: Session, me: int) -> PartEnd:
            ended = end_part(session, me)
            if ended.callback is not None:
                self._callback = CallbackClaim(self._client, ended.callback, self._uid)
            return ended

        return self.end_by("end of a part", end, otherwise=self._ending_call)

    def _ending(self, error: str | None) -> Callable[[Session, int], PartEnd]:
        """Return the call that ends the part. (It must not refer to this object, as it also ends a dropped part.)"""
        batch, part, uid, owner, stored = (
            self._declaration.name,
            self.name,
            self._uid,
            owner_name(),
            self._declaration.stored_callback,
        )
        return lambda session, me: session.end_part(me, batch, part, uid, error, owner, stored)

    # -- its block ----------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        if self.batch_id is None:
            raise NotHeld(f"{self.title} was not started")
        super().require_open()

    def __enter__(self) -> Part:
        return self.start()

    def _succeed(self) -> None:
        self.finish()

    def _fail(self, error: BaseException) -> None:
        self.fail(error)


def _part_of(entry: BatchEntry | None, name: str) -> PartEntry | None:
    return {part.part: part for part in entry.parts}.get(name) if entry is not None else None
