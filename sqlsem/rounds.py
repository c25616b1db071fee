"""Rounds: parts that run side by side, each in a process of its own; the last one out starts what comes next, once.

A round is open from the start of its first part until every part has ended. When all of them have succeeded within the
window, exactly one of them, the last, is told so, and runs the continuation. Everything about the rounds of one name is
decided in the database, one decision after the other, so that parts that end at the same instant are told apart.

A part, and the continuation, belongs to this process's member. When the process dies the part has failed, and the
continuation is done again by whoever looks next. So a continuation is run again only after the process that ran it died
or lost the database for longer than its grace: make it one that may be repeated.

>>> nightly = sqlsem.round("nightly", ["sales", "stock"], window="6h").then(publish)  # doctest: +SKIP
>>> with nightly.part("sales"):  # doctest: +SKIP
...     load_sales()
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sqlsem import bodies
from sqlsem.core.defaults import Coordinated, process_of
from sqlsem.core.options import Alarm
from sqlsem.core.process import Process
from sqlsem.engines.roles import RoundSession
from sqlsem.errors import ConfigurationError, Deadlock, NotHeld, RoundFailed, SqlsemError, Timeout
from sqlsem.model import (
    Continuation,
    Duration,
    PartEnd,
    PartStart,
    RoundEntry,
    check_duration,
    check_name,
    monotonic,
)

if TYPE_CHECKING:
    from sqlsem.engines.base import Session

__all__ = ["Part", "Round", "list_rounds", "resume", "round"]

log = logging.getLogger("sqlsem")
T = TypeVar("T")

#: Seconds between two looks at a round that somebody waits for: at first, and at the most.
SHORTEST, LONGEST = 0.005, 0.5
#: Seconds between two tests whether those who run its parts still live.
RECOVER_EVERY = 1.0
#: How often a call is repeated that the server ended for a deadlock with others.
MOST_DEADLOCKS = 5


class Round:
    """A named round; see `round`. May be used from many threads at once, again and again.

    Attributes:
        name: Its name.
        parts: The names of its parts.
        window: Seconds from the opening within which every part must have succeeded.
    """

    def __init__(
        self,
        name: str,
        parts: Iterable[str],
        *,
        window: Duration,
        on_failed: Alarm | None = None,
        coordinator: Coordinated | None = None,
    ) -> None:
        self.name = check_name("The round's name", name)
        if isinstance(parts, str) or not isinstance(parts, Iterable):
            raise ConfigurationError(f"The parts of round {name!r} must be a list of names, not {parts!r}")
        self.parts = tuple(check_name(f"A part of round {name!r}", part) for part in parts)
        if not self.parts:
            raise ConfigurationError(f"Round {name!r} has no parts; name all of them: parts=['a', 'b']")
        twice = sorted({part for part in self.parts if self.parts.count(part) > 1})
        if twice:
            raise ConfigurationError(f"Round {name!r} names a part twice: {', '.join(twice)}; each part is one job")
        self.window = check_duration(f"The window of round {name!r}", window, zero=False)
        if self.window < 0.001:
            raise ConfigurationError(f"The window of round {name!r} must be at least a millisecond, not {window!r}")
        if on_failed is not None and not callable(on_failed):
            raise ConfigurationError(f"on_failed must be a function that takes a RoundFailed, not {on_failed!r}")
        self._on_failed = on_failed
        self._given = coordinator
        self._then: tuple[str | None, str | None] = (None, None)
        self._function: Callable[[], object] | None = None

    @property
    def process(self) -> Process:
        """For the package; programs have no use for it."""
        process = process_of(self._given)
        process.engine.require(RoundSession, f"Round {self.name!r}")
        return process

    def then(self, what: Any) -> Round:
        """Say what the last part to succeed shall do after it; gives the round itself.

        Args:
            what: A function without arguments, or a `sqlsem.Call`, `sqlsem.Sql` or `sqlsem.Shell`. What can be found by
                its name can be resumed by any process, also by ``sqlsem rounds resume``; a lambda or a function inside
                another only by a process that declares it. Declare the same in all parts.

        Raises `ConfigurationError` for what cannot be called, imported or kept.
        """
        function = None
        if isinstance(what, bodies.Call):
            found = bodies.find(what.function)
            if not callable(found) or inspect.iscoroutinefunction(found):
                raise ConfigurationError(f"{what.function} is no plain function, so round {self.name!r} cannot call it")
            kept = bodies.encode(what)
        elif isinstance(what, bodies.Sql | bodies.Shell):
            kept = bodies.encode(what)
        elif not callable(what) or inspect.iscoroutinefunction(what):
            raise ConfigurationError(
                f"Round {self.name!r} cannot continue with {what!r}; give it a plain function, Call, Sql or Shell"
            )
        else:
            function = what
            try:
                kept = bodies.encode(what)
            except ConfigurationError:
                kept = ("local", "")
        self._then = (kept[0], kept[1] or None)
        self._function = function
        return self

    def part(self, name: str) -> Part:
        """One run of one part: ``with round.part("a"): …``. Raises `ConfigurationError` when there is no such part."""
        if name not in self.parts:
            raise ConfigurationError(f"Round {self.name!r} has no part {name!r}; it has {', '.join(self.parts)}")
        return Part(self, name)

    def entry(self) -> RoundEntry | None:
        """The newest round of this name, with its parts; None when there never was one."""
        found = self._call("look at a round", lambda session, _: session.list_rounds(self.name, None, 1))
        return found[0] if found else None

    def wait(self, timeout: Duration | None = None, *, started: bool = False) -> RoundEntry:
        """Wait until the newest round (or the first, if there was none) has succeeded, and its continuation is done.

        Args:
            timeout: Wait so long at the most, then raise `Timeout`.
            started: It is enough that the continuation runs.

        Raises `RoundFailed` when the round has failed, its window is over, or its continuation has failed. Tests
        whether those who run its parts still live, and takes over a continuation whose process died.
        """
        deadline = None if timeout is None else monotonic() + check_duration("timeout", timeout)
        pause, recover_at = SHORTEST, 0.0
        number: int | None = None
        while True:
            if monotonic() >= recover_at:
                self._recover()
                recover_at = monotonic() + RECOVER_EVERY
            entry = self.entry() if number is None else self._entry(number)
            if entry is not None:
                number = entry.round_id
                self._require_well(entry)
                if entry.then_status in ("none", "finished") and entry.status == "succeeded":
                    return entry
                if entry.then_status == "running" and started:
                    return entry
                if entry.then_status == "pending" and self.resume():
                    continue
            left = pause if deadline is None else deadline - monotonic()
            if left <= 0:
                raise Timeout(f"{_state(self.name, entry)} after {timeout} of waiting", resource=self.name)
            time.sleep(min(left, pause * random.uniform(0.8, 1.2)))
            pause = min(pause * 1.5, LONGEST)

    def _require_well(self, entry: RoundEntry) -> None:
        failed = _errors(entry, "failed")
        if entry.status in ("failed", "abandoned"):
            raise self._failure(f"has failed: {_told(failed)}; run these parts again", entry.round_id, failed)
        if entry.status == "expired" or entry.overdue:
            lacks = _errors(entry, "failed", "expected", "running")
            raise self._failure(f"was not done within {entry.window:g} s: {_told(lacks)}", entry.round_id, lacks)
        if entry.then_status == "failed":
            raise self._failure(
                f"has succeeded, but its continuation failed: {_first_line(entry.then_error)}; mend that and run: "
                f"sqlsem rounds resume {entry.round_id}",
                entry.round_id,
            )

    def resume(self) -> bool:
        """Run the continuation of a round of this name whose process died before its end, if there is one: whether
        there was. Raises `RoundFailed` when it fails.
        """
        self._recover()
        duty = _claim(self.process, self.name, None, self._then[0] is not None)
        if duty is None:
            return False
        log.warning("Taking over the continuation of round %d of %r", duty.then.round_id, self.name)
        self._carry_out(duty)
        return True

    # -- inside -------------------------------------------------------------------------------------------------

    def _call(self, what: str, call: Callable[[Session, int], T]) -> T:
        return _call(self.process, what, call)

    def _entry(self, number: int) -> RoundEntry | None:
        found = self._call("look at a round", lambda session, _: session.list_rounds(None, number, 1))
        return found[0] if found else None

    def _failure(self, what: str, number: int | None, failed: dict[str, str] | None = None) -> RoundFailed:
        which = f"Round {number} of" if number is not None else "Round"
        return RoundFailed(f"{which} {self.name!r} {what}", resource=self.name, round_id=number, failed=failed)

    def _alarm(self, failure: RoundFailed) -> None:
        """Tell the hook. What goes wrong in it must not hide what it is told."""
        log.error("%s", failure)
        if self._on_failed is not None:
            try:
                self._on_failed(failure)
            except Exception:
                log.exception("on_failed of round %r failed", self.name)

    def _recover(self) -> None:
        """Act for those whose process died; the alarm for each round in which a part failed by that."""
        for number in self._call("recovery of a round", lambda session, me: session.recover_rounds(self.name, me)):
            failed = self._wrong(number, "failed")
            self._alarm(self._failure(f"has failed parts: {_told(failed)}; run these again", number, failed))

    def _wrong(self, number: int, *states: str) -> dict[str, str]:
        """As `_errors`. For what is told once: rather with less than not at all."""
        try:
            entry = self._entry(number)
        except SqlsemError as exc:
            log.warning("The parts of round %d of %r cannot be read: %s", number, self.name, exc)
            return {}
        return _errors(entry, *states) if entry is not None else {}

    def _take_over(self) -> None:
        """What others have left undone must not keep us from our own."""
        try:
            self.resume()
        except SqlsemError as exc:
            log.warning("Looking after earlier rounds of %r: %s", self.name, exc)

    def _carry_out(self, duty: _Continuing) -> None:
        kind, body = self._then
        if kind is not None:  # what was kept is for those who declare nothing themselves
            duty.then = dataclasses.replace(duty.then, kind=kind, body=body)
        _carry_out(duty, self._function, self._alarm)

    def __repr__(self) -> str:
        return f"<Round {self.name!r} of {', '.join(self.parts)}>"


class Part:
    """One run of a part, made by `Round.part`. Leave its ``with`` block well and the part has succeeded; with an error,
    whatever its kind, and it has failed. (Without a block: `start`, then `done` or `failed`.) To be used once.

    Leaving the block raises `RoundFailed` when this part was the last to end but others have failed, when it ended
    after the window, when it was given up because the database was out of reach, and when the continuation failed.

    Attributes:
        name: The part's name.
        round_id: The number of the round, once started.
        attempt: How often the part was started in this round.
        is_last: After the end: whether this success was the last, and so the round's.
    """

    can_be_lost: ClassVar[bool] = False
    # (Of the class too, for one whose making was interrupted.)
    _uid: str | None = None
    _ended = False

    def __init__(self, of: Round, name: str) -> None:
        self._round = of
        self._process = of.process
        self._pid = os.getpid()
        self.name = name
        self.round_id: int | None = None
        self.attempt: int | None = None
        self.is_last = False

    def start(self) -> Part:
        """Start the part, in the open round or, where there is none, in a new one.

        Raises `ConfigurationError` when it runs already, or has succeeded while the round waits for others, or the open
        round has other parts.
        """
        if self._uid is not None:
            raise NotHeld(f"{self!r} was started before; each run needs a part of its own: round.part({self.name!r})")
        self._round._take_over()
        self._pid = os.getpid()
        self._uid = uuid.uuid4().hex
        try:
            self._process.claims.add(self)
            self._process.member.stir()
            began = self._start()
            if began.code != "started":
                self._settle()
                raise ConfigurationError(self._why_refused(began), resource=self._round.name)
            self.round_id, self.attempt = began.round_id, began.attempt
            if began.previous is not None:
                self._tell_expired(began.previous)
            return self
        except BaseException:
            # It may be recorded as started, and who called does not have it.
            self._give_up("interrupted while it was started")
            raise

    def __del__(self) -> None:
        # An interrupt can strike between the start and the block that would end it.
        if self._uid is not None and not self._ended and self._pid == os.getpid():
            self._process.member.leftovers.append(self._ending("it was dropped without an end"))

    def _start(self) -> PartStart:
        asked = self._round
        owner = _owner()

        def start(session: Session, member_id: int) -> PartStart:
            assert self._uid is not None
            return session.start_part(
                member_id, asked.name, self.name, asked.parts, asked.window, owner, self._uid, asked._then
            )

        # Where its process is missing, it may be dead: that is known when its grace is over.
        deadline = monotonic() + self._process.retry
        pause = SHORTEST
        while True:
            began: PartStart = _call(self._process, "start of a part", start, sign=True)
            if began.code != "running" or monotonic() > deadline:
                return began
            entry = asked._entry(began.round_id)
            missing = entry is not None and any(
                part.part == self.name and part.missing_for is not None for part in entry.parts
            )
            if not missing:
                return began
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST)
            asked._recover()

    def _why_refused(self, began: PartStart) -> str:
        name, number = self._round.name, began.round_id
        entry = self._round._entry(number)
        parts = entry.parts if entry is not None else ()
        if began.code == "differs":
            there, ours = {part.part for part in parts}, set(self._round.parts)
            more = f"it also has {', '.join(sorted(there - ours))}" if there - ours else ""
            less = f"it lacks {', '.join(sorted(ours - there))}" if ours - there else ""
            return (
                f"Round {number} of {name!r} is open with other parts: {' and '.join(filter(None, (more, less)))}; "
                f"declare the same in all of them (a change takes effect with the next round)"
            )
        if began.code == "succeeded":
            waits = ", ".join(part.part for part in parts if part.status != "succeeded")
            return (
                f"Part {self.name!r} has succeeded already in round {number} of {name!r}, which waits for "
                f"{waits or 'nothing any more'}; the next round begins when they have ended or its window is over"
            )
        who = next((part for part in parts if part.part == self.name), None)
        told = f"{who.host}:{who.pid} since {who.started_at}" if who is not None else "elsewhere"
        if who is not None and who.missing_for is not None:
            told += f", missing for {who.missing_for:.0f} s but not yet for its grace"
        return f"Part {self.name!r} of round {name!r} runs already ({told}); wait until it has ended"

    def _tell_expired(self, number: int) -> None:
        lacks = self._round._wrong(number, "failed", "expected", "running")
        self._round._alarm(
            self._round._failure(f"has expired: {_told(lacks)}; a new round has begun without it", number, lacks)
        )

    def done(self) -> bool:
        """The part has succeeded. When it was the last, runs the continuation. Whether it was. See the class for what
        it raises.
        """
        self._require()
        duty: _Continuing | None = None
        try:
            ended, duty = self._end(None)
            self.is_last = ended.is_last
            self._settle()
        except BaseException as exc:
            # Should it have been recorded all the same, this gives the continuation back.
            self._give_up("its end could not be recorded")
            if duty is not None:
                duty.close()
            failure = self._round._failure(
                f"may lack part {self.name!r}, whose end could not be recorded ({_first_line(bodies.told(exc))}); see "
                f"sqlsem rounds, and if it has failed run it again",
                self.round_id,
                {self.name: "its end could not be recorded"},
            )
            failure.__cause__ = exc
            self._round._alarm(failure)
            raise
        if duty is not None:
            self._round._carry_out(duty)
        self._require_success(ended)
        self._round._take_over()
        return self.is_last

    def _require_success(self, ended: PartEnd) -> None:
        failure = None
        if ended.code == "late":
            failure = self._round._failure(
                f"was over, or its window of {self._round.window:g} s, when part {self.name!r} ended: that does not "
                f"count; run the part again, or declare a longer window",
                ended.round_id,
                {self.name: "ended after the window"},
            )
        elif ended.code != "succeeded":
            failure = self._round._failure(
                f"has given up part {self.name!r}: this process was out of the database's reach for longer than its "
                f"grace; what the part did does not count, run it again",
                self.round_id,
                {self.name: "its process was given up"},
            )
        elif ended.round_status == "failed":
            failed = self._round._wrong(ended.round_id, "failed") if ended.round_id is not None else {}
            failure = self._round._failure(
                f"has failed, though part {self.name!r} has succeeded: {_told(failed)}; run these parts again, and the "
                f"last of them continues the round",
                ended.round_id,
                failed,
            )
        if failure is not None:
            self._round._alarm(failure)
            raise failure

    def failed(self, error: BaseException | str) -> None:
        """The part has failed. Tells the alarm hook at once."""
        self._require()
        told = bodies.told(error) or "it said nothing"
        failure = self._round._failure(
            f"has a failed part: {self.name!r} ({_first_line(told)}); run it again", self.round_id, {self.name: told}
        )
        if isinstance(error, BaseException):
            failure.__cause__ = error
        try:
            self._end(told)
            self._settle()
        except BaseException:
            self._give_up(told)
            raise
        finally:
            self._round._alarm(failure)
        self._round._take_over()

    def _end(self, error: str | None) -> tuple[PartEnd, _Continuing | None]:
        asked, process, uid = self._round, self._process, self._uid
        try:
            asked._recover()
        except SqlsemError as exc:
            log.warning("Looking after other parts of %r: %s", asked.name, exc)
        assert uid is not None
        ending = self._ending(error)

        def end(session: Session, member_id: int) -> tuple[PartEnd, _Continuing | None]:
            ended = ending(session, member_id)
            return ended, None if ended.then is None else _Continuing(process, ended.then, uid)

        return _call(process, "end of a part", end)

    def _settle(self) -> None:
        self._ended = True
        self._process.claims.discard(self)

    def _ending(self, error: str | None) -> Callable[[Session, int], PartEnd]:
        """What ends it. (Not of this object itself, which may be on its way out.)"""
        round_name, name, uid, owner, then = self._round.name, self.name, self._uid, _owner(), self._round._then
        assert uid is not None
        return lambda session, me: session.end_part(me, round_name, name, uid, error, owner, then)

    def _give_up(self, error: str) -> None:
        """Where it has not ended, let it fail as soon as the database can be reached again."""
        if not self._ended and self._pid == os.getpid():
            self._process.member.later(self._ending(error))
            self._settle()  # afterwards: what is said twice does no harm

    def _require(self) -> None:
        if self._uid is None or self.round_id is None:
            raise NotHeld(f"{self!r} was not started")
        if self._pid != os.getpid():
            raise NotHeld(f"{self!r} belongs to the process that this one was forked from")
        if self._ended:
            raise NotHeld(f"{self!r} has ended before")

    def lose(self, why: str) -> None:
        """Nothing has been heard of the database for too long. What became of the part, its end will tell."""

    def __enter__(self) -> Part:
        return self.start()

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: object) -> None:
        try:
            if self._ended:  # by hand
                return
            if exc is None:
                self.done()
                return
            try:
                self.failed(exc)
            except SqlsemError as struck:
                log.warning("%r: %s", self, struck)  # what went wrong inside matters more
        except BaseException:
            self._give_up("interrupted while it ended")
            raise

    def __repr__(self) -> str:
        return f"<Part {self.name!r} of round {self._round.name!r}>"


def _call(process: Process, what: str, call: Callable[[Session, int], T], *, sign: bool = False) -> T:
    """A call on the main session. All of ours may be repeated, and a server undoes what it ends for a deadlock."""
    for _ in range(MOST_DEADLOCKS):
        try:
            return process.member.call(what, call, sign=sign)
        except Deadlock as exc:
            log.warning("%s has to be tried again: %s", what, exc)
    return process.member.call(what, call, sign=sign)


class _Continuing:
    """A continuation that is ours to run. The pulse must look after it; and as nobody takes it over while this process
    lives, it gives itself back when an interrupt parts it from whoever would have run and ended it.
    """

    can_be_lost: ClassVar[bool] = False
    ended = True  # (until it is complete)

    def __init__(self, process: Process, then: Continuation, uid: str) -> None:
        self.process = process
        self.then = then
        self.closing: Callable[[Session, int], bool] = lambda session, me: session.return_then(me, uid)
        self.pid = os.getpid()
        self.ended = False
        process.claims.add(self)
        process.member.stir()

    def __del__(self) -> None:
        if not self.ended and self.pid == os.getpid():
            self.process.member.leftovers.append(self.closing)

    def end(self, error: str | None) -> bool:
        """Record how it ended, at the latest when the database can be reached again; False when it was given up."""
        number, attempt = self.then.round_id, self.then.attempt
        self.closing = lambda session, me: session.end_then(me, number, attempt, error)
        try:
            told = _call(self.process, "end of a continuation", self.closing)
        except BaseException:
            self.close()
            raise
        self._settle()
        return told

    def _settle(self) -> None:
        self.ended = True
        self.process.claims.discard(self)

    def close(self) -> None:
        """Where nothing has been recorded yet, see to it that something is: others may run it, or how it ended."""
        if not self.ended and self.pid == os.getpid():
            self.process.member.later(self.closing)
            self._settle()  # afterwards, as above

    def lose(self, why: str) -> None:
        """As for a part."""

    def __repr__(self) -> str:
        return f"<Continuation of round {self.then.round_id} of {self.then.name!r}>"


def _claim(process: Process, name: str | None, number: int | None, own: bool) -> _Continuing | None:
    uid, owner = uuid.uuid4().hex, _owner()

    def claim(session: Session, member_id: int) -> _Continuing | None:
        then = session.claim_then(member_id, name, number, owner, uid, own)
        return None if then is None else _Continuing(process, then, uid)

    try:
        return _call(process, "resuming a round", claim, sign=True)
    except BaseException:
        process.member.later(lambda session, me: session.return_then(me, uid))
        raise


def _carry_out(duty: _Continuing, function: Callable[[], object] | None, alarm: Alarm) -> None:
    """Run a continuation and record how it ended. Raises `RoundFailed` when it failed."""
    try:
        _run_and_end(duty, function, alarm)
    except BaseException:
        duty.close()
        raise


def _run_and_end(duty: _Continuing, function: Callable[[], object] | None, alarm: Alarm) -> None:
    then = duty.then
    which = f"The continuation of round {then.round_id} of {then.name!r}"
    try:
        if function is not None:
            function()
        else:
            bodies.run(then.kind, then.body or "", duty.process)
    except BaseException as exc:
        if duty.pid != os.getpid():
            raise  # a child that was forked in it: its parent has it
        told = bodies.told(exc)
        try:
            duty.end(told)
        except SqlsemError as struck:
            log.warning("%s: %s", which, struck)
        failure = RoundFailed(
            f"{which} has failed: {_first_line(told)}; mend that and run: sqlsem rounds resume {then.round_id}",
            resource=then.name,
            round_id=then.round_id,
        )
        failure.__cause__ = exc
        alarm(failure)
        if not isinstance(exc, Exception):
            raise
        raise failure from exc
    if duty.pid != os.getpid():
        raise NotHeld(f"{which} belongs to the process that this one was forked from")
    if not duty.end(None):
        failure = RoundFailed(
            f"{which} has ended, but this process had been out of the database's reach for longer than its grace: "
            f"another may have run it too",
            resource=then.name,
            round_id=then.round_id,
        )
        alarm(failure)
        raise failure


def _owner() -> str:
    name = threading.current_thread().name[:255]
    return name.replace("\0", "?").encode(errors="replace").decode()  # what any database can keep


def _errors(entry: RoundEntry, *states: str) -> dict[str, str]:
    """The parts in these states, with what is wrong with each."""
    words = {"expected": "never started", "running": "still running"}
    return {part.part: part.error or words.get(part.status, "") for part in entry.parts if part.status in states}


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0][:200]


def _told(failed: dict[str, str]) -> str:
    return ", ".join(f"{part} ({_first_line(error)})" for part, error in failed.items()) or "nothing is known"


def _state(name: str, entry: RoundEntry | None) -> str:
    if entry is None:
        return f"No part of round {name!r} has started"
    if entry.status == "succeeded":
        return f"The continuation of round {entry.round_id} of {name!r} is still {entry.then_status}"
    waits = ", ".join(f"{part.part} ({part.status})" for part in entry.parts if part.status != "succeeded")
    return f"Round {entry.round_id} of {name!r} still waits for {waits}"


# -- what people see and operators do ---------------------------------------------------------------------------------


def list_rounds(coordinator: Coordinated, name: str | None = None, most: int = 20) -> list[RoundEntry]:
    """Rounds with their parts, of one name or all, newest first."""
    return coordinator.process.look(lambda session: session.list_rounds(name, None, most), RoundSession)


def resume(coordinator: Coordinated, which: int | str) -> bool:
    """Run a continuation that nobody runs: of the oldest such round of a name, or of the round of that number, then
    also one that has failed. False when there is none. Raises `RoundFailed` when it fails, `ConfigurationError` when
    only the process that declared it can run it, or there is no such round.
    """
    name = check_name("The round's name", which) if isinstance(which, str) else None
    number = which if isinstance(which, int) else None
    look = coordinator.process.look(lambda session: session.list_rounds(name, number, 20), RoundSession)
    if not look:
        raise ConfigurationError(f"There is no round {which!r}; see: sqlsem rounds")
    operator = Round(look[0].name, [part.part for part in look[0].parts], window=1, coordinator=coordinator)
    operator._recover()  # logs what it finds out
    duty = _claim(coordinator.process, name, number, False)
    if duty is None:
        for entry in coordinator.process.look(lambda session: session.list_rounds(name, number, 20), RoundSession):
            if entry.then_status == "pending" and entry.then_kind in ("local", "session"):
                whose = "a function" if entry.then_kind == "local" else "the code of a database session"
                raise ConfigurationError(
                    f"The continuation of round {entry.round_id} of {entry.name!r} is {whose} that is not kept here; "
                    f"it is resumed by whoever declared it (Round.resume(), the next start of a part, or round_resume)"
                )
        return False
    _carry_out(duty, None, lambda failure: log.error("%s", failure))
    return True


def round(
    name: str,
    parts: Iterable[str],
    *,
    window: Duration,
    on_failed: Alarm | None = None,
    coordinator: Coordinated | None = None,
) -> Round:
    """A round: parts that run side by side, the last of which to succeed starts what comes next, exactly once.

    >>> nightly = sqlsem.round("nightly", ["a", "b", "c"], window="6h", on_failed=page_somebody)  # doctest: +SKIP
    >>> nightly.then(sqlsem.Sql("EXEC publish"))  # doctest: +SKIP
    >>> with nightly.part("a"):  # doctest: +SKIP
    ...     load_a()

    Args:
        name: Its name.
        parts: The names of all its parts. Every process declares the same.
        window: How long a round may take from the start of its first part; seconds, a `timedelta`, or ``"90m"``,
            ``"6h"``, ``"2d"``. A success that comes later does not count; the first start after it begins a new round.
        on_failed: Called with a `RoundFailed` in the process that finds out: its own part failed, another's process
            died, an earlier round expired with parts missing, the continuation failed. What it raises is logged.
        coordinator: The database; left out, the default one.

    Raises `ConfigurationError` for no parts, the same part twice, and a window of zero or less.
    """
    return Round(name, parts, window=window, on_failed=on_failed, coordinator=coordinator)
