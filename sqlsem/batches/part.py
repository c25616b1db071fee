"""A part of a batch: claimed when it starts, and ended with its block."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable

from sqlsem.batches.callback import CallbackClaim, carry_out, take_over
from sqlsem.batches.declaration import Declaration, brief, listed
from sqlsem.bodies import format_error
from sqlsem.core.backoff import backoff_delays
from sqlsem.core.claims import Claim, owner_name
from sqlsem.engines.base import Session
from sqlsem.errors import BatchFailed, ConfigurationError, NotHeld, SqlsemError
from sqlsem.model import BatchEntry, PartEnd, PartEntry, PartStart

__all__ = ["Part"]

log = logging.getLogger("sqlsem")


class Part(Claim):
    """One run of a part, made by `Batch.part`. Leave its ``with`` block well and the part has succeeded; with an error,
    whatever its kind, and it has failed. (Without a block: `start`, then `done` or `failed`.) To be used once.

    A part that has succeeded ends well, whatever became of the others: `Batch.wait` and ``on_failed`` tell which of
    them failed. Leaving the block raises `BatchFailed` when the part does not count, as it ended after the window or
    after an operator had abandoned the batch, or was given up because the database was out of reach; and when this part
    was the last one and the callback failed. Run the part again then. A part may be run again at any time: the
    batch waits for it once more.

    Attributes:
        name: The part's name.
        batch_id: The number of the batch, once started.
        attempt: How often the part was started in this batch.
        is_last: After the end: whether this success was the last, and so the batch's.
    """

    _started = False
    _callback: CallbackClaim | None = None  # ours to run, when this part was the last

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
        """Start the part, in the newest batch or, where that has succeeded or its window is over, in a new one.

        Raises `ConfigurationError` when the part runs already, and when the open batch has other parts.
        """
        if self._started:
            raise NotHeld(f"{self!r} was started before; each run needs a part of its own: batch.part({self.name!r})")
        before = self._batch_to_repeat()
        if before is None:
            take_over(self._declaration)
        self._started = True
        self._uid = uuid.uuid4().hex
        try:
            # It may be recorded as started from here on.
            self.opened(self._client.claims, self._ending("interrupted while it was started"))
            began = self._start()
            if began.code != "started":
                self.settle()
                raise ConfigurationError(self._why_refused(began), resource=self._declaration.name)
            self.batch_id, self.attempt = began.batch_id, began.attempt
            if began.previous is not None:
                self._tell_expired(began.previous)
            if before not in (None, began.batch_id):
                take_over(self._declaration)
            self._closing = self._ending("it was dropped without an end")
            return self
        except BaseException:
            self.leave()  # who called does not have it
            raise

    def _batch_to_repeat(self) -> int | None:
        """Return the newest batch if this part was its last one and the callback has not ended. This start may
        repeat a process that died in the callback: then it joins that batch, and runs the callback at its end.
        """
        self._declaration.recover()
        entry = self._declaration.entry()
        part = _part_of(entry, self.name)
        if entry is None or part is None or not part.is_last or entry.callback_status not in ("pending", "running"):
            return None
        return entry.batch_id

    def _start(self) -> PartStart:
        asked, name, uid, owner = self._declaration, self.name, self._uid, owner_name()

        def start(session: Session, me: int) -> PartStart:
            return session.start_part(me, asked.name, name, asked.parts, asked.window, owner, uid, asked.kept)

        # Where its process is missing, it may be dead: that is known when its grace is over.
        left = backoff_delays(self._client.retry)
        while True:
            began = self._client.member.call("start of a part", start, sign=True)
            if began.code not in ("running", "in_callback"):
                return began
            running = _part_of(asked.entry(began.batch_id), name)
            pause = next(left, None)
            is_missing = began.code == "in_callback" or (running is not None and running.missing_for is not None)
            if pause is None or not is_missing:
                return began
            time.sleep(pause)
            asked.recover()

    def _why_refused(self, began: PartStart) -> str:
        of = f"{began.batch_id} of {self._declaration.name!r}"
        entry = self._declaration.entry(began.batch_id)
        parts = entry.parts if entry is not None else ()
        if began.code == "differs":
            there, ours = {part.part for part in parts}, set(self._declaration.parts)
            more = f"it also has {', '.join(sorted(there - ours))}" if there - ours else ""
            less = f"it lacks {', '.join(sorted(ours - there))}" if ours - there else ""
            return (
                f"Batch {of} is open with other parts: {' and '.join(filter(None, (more, less)))}; "
                f"{_opened(entry)}declare the same in all parts (a change takes effect with the next batch), or have "
                f"an operator run: sqlsem batches abandon {began.batch_id}"
            )
        if began.code == "in_callback" and entry is not None:
            return (
                f"The callback of batch {of} runs already ({entry.callback_owner} since {entry.callback_started}); its "
                f"process is missing, but not yet for its grace: start part {self.name!r} again in a moment"
            )
        running = _part_of(entry, self.name)
        where = "elsewhere"
        if running is not None:
            where = f"{running.host}:{running.pid} since {running.started_at}, login {running.login}"
        if running is not None and running.missing_for is not None:
            where += f", missing for {running.missing_for:.0f} s but not yet for its grace"
        return f"{self.title} runs already ({where}); wait until it has ended"

    def _tell_expired(self, batch_id: int) -> None:
        lacks = self._declaration.errors_of(batch_id, "failed", "expected", "running")
        self._declaration.alarm(
            self._declaration.failure(
                f"has expired: {listed(lacks)}; a new batch has begun without it", batch_id, lacks
            )
        )

    # -- its end ------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """The part has succeeded. When it was the last, runs the callback. Whether it was. See the class for what
        it raises.
        """
        self.require_open()
        try:
            # Should it have been recorded all the same, what is done otherwise gives the callback back.
            ended = self._record(None, otherwise="its end could not be recorded")
            self.is_last = ended.is_last
        except BaseException as exc:
            self.leave()
            if self._callback is not None:
                self._callback.leave()
            failure = self._declaration.failure(
                f"may lack part {self.name!r}, whose end could not be recorded ({brief(format_error(exc))}); see "
                f"sqlsem batches, and if it has failed run it again",
                self.batch_id,
                {self.name: "its end could not be recorded"},
            )
            failure.__cause__ = exc
            self._declaration.alarm(failure)
            raise
        if self._callback is not None:
            carry_out(self._declaration, self._callback)
        does_not_count = self._why_it_does_not_count(ended)
        if does_not_count is not None:
            self._declaration.alarm(does_not_count)
            raise does_not_count
        self._tell_what_keeps_the_batch(ended)
        take_over(self._declaration)
        return self.is_last

    def _tell_what_keeps_the_batch(self, ended: PartEnd) -> None:
        """Call the alarm when this was the last part to end, and nothing follows. The part itself has succeeded."""
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

    def failed(self, error: BaseException | str) -> None:
        """The part has failed. Tells the alarm hook at once."""
        self.require_open()
        words = format_error(error) or "it said nothing"
        failure = self._declaration.failure(
            f"has a failed part: {self.name!r} ({brief(words)}); run it again", self.batch_id, {self.name: words}
        )
        if isinstance(error, BaseException):
            failure.__cause__ = error
        try:
            self._record(words, otherwise=words)
        except BaseException:
            self.leave()
            raise
        finally:
            self._declaration.alarm(failure)
        take_over(self._declaration)

    def _record(self, error: str | None, *, otherwise: str) -> PartEnd:
        """Record its end; what cannot be recorded now, as failed by ``otherwise``."""
        self._closing = self._ending(otherwise)
        try:
            self._declaration.recover()
        except SqlsemError as exc:
            log.warning("Looking after other parts of %r: %s", self._declaration.name, exc)
        end_part = self._ending(error)

        def end(session: Session, me: int) -> PartEnd:
            ended = end_part(session, me)
            if ended.callback is not None:
                self._callback = CallbackClaim(self._client, ended.callback, self._uid)
            return ended

        return self.end_by("end of a part", end, otherwise=self._closing)

    def _ending(self, error: str | None) -> Callable[[Session, int], PartEnd]:
        """What ends it. (Not of this object itself, which may be on its way out.)"""
        of, name, uid, owner, kept = self._declaration.name, self.name, self._uid, owner_name(), self._declaration.kept
        return lambda session, me: session.end_part(me, of, name, uid, error, owner, kept)

    # -- its block ----------------------------------------------------------------------------------------------

    def require_open(self) -> None:
        if self.batch_id is None:
            raise NotHeld(f"{self.title} was not started")
        super().require_open()

    def __enter__(self) -> Part:
        return self.start()

    def _succeed(self) -> None:
        self.done()

    def _fail(self, error: BaseException) -> None:
        self.failed(error)


def _opened(entry: BatchEntry | None) -> str:
    return f"login {entry.opened_by} opened it at {entry.opened_at}; " if entry is not None else ""


def _part_of(entry: BatchEntry | None, name: str) -> PartEntry | None:
    return {part.part: part for part in entry.parts}.get(name) if entry is not None else None
