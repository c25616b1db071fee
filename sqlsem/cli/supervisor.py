"""Holds a lock while a command runs, and ends the command when the lock is lost: what ``sqlsem run`` does.

Three processes: *we* hold the lock; the *command* is our child; the *guard* is another child of ours, which ends the
command when we die (see `sqlsem.guard`).

Without a terminal (cron, services, CI) the command gets a session of its own, so that everything it starts can be
found and ended with it. On a terminal it stays in our process group, for Ctrl-C, Ctrl-Z and job control to work as
without us; there its descendants are found through /proc, on Linux.

A daemon that has left both its session and its parents (forked twice) is found on Linux in two ways: while we live its
parent is we (PR_SET_CHILD_SUBREAPER); and it has our mark in its environment, by which the guard finds it as well.
Elsewhere, or when it has cleared its environment and we are killed, it survives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Protocol, TypeVar

from sqlsem import guard
from sqlsem.cli.joining import Joinable, Joined
from sqlsem.coordinator import Coordinator
from sqlsem.core import nesting
from sqlsem.core.grants import Grant
from sqlsem.core.leading import LONGEST_PAUSE_SECONDS
from sqlsem.core.pauses import pauses
from sqlsem.core.threads import spawn
from sqlsem.errors import LockLost, Unavailable
from sqlsem.model import Duration, monotonic

__all__ = [
    "CANNOT_RUN",
    "NOT_FOUND",
    "Events",
    "Job",
    "Obtainable",
    "Signals",
    "SteppingDown",
    "Stopped",
    "lead",
    "run",
    "run_joined",
]

#: Exit codes of a command that cannot be started, as shells have them.
NOT_FOUND, CANNOT_RUN = 127, 126
#: Sent to us, these go to the command.
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
#: Of these the terminal has sent the command one of its own.
FROM_KEYBOARD = ("SIGINT", "SIGQUIT", "SIGHUP")
#: A net under signals that did not wake us.
NET_SECONDS = 0.5
#: Of prctl(2): makes us the parent of orphans below us (Linux).
PR_SET_CHILD_SUBREAPER = 36
log = logging.getLogger("sqlsem")
T = TypeVar("T")
#: What happens while we wait: ("signal", its number), ("child", 0) has ended, ("lost", the grant's position; 0: what
#: was joined), ("asked", 0) for the lock.
Events = SimpleQueue[tuple[str, int]]


class Stopped(Exception):
    """A signal came while we waited for the lock."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Our handlers, while it lasts: signals become events in a queue. Only the main thread may enter.

    No handler raises: Python drops what is raised while it happens to run a ``__del__``, and the signal were lost.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for name in FORWARDED:
            number = getattr(signal, name, None)
            # What anyone who started us ignores (nohup, a background job of a script), stays ignored.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._caught)
        if hasattr(signal, "SIGCHLD"):
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._child)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    # SimpleQueue.put may be called in a handler, whatever that interrupted.

    def _caught(self, number: int, _: FrameType | None) -> None:
        self._events.put(("signal", number))

    def _child(self, _number: int, _frame: FrameType | None) -> None:
        self._events.put(("child", 0))


class Obtainable(Protocol):
    """What a grant is had of: a `sqlsem.Lock`, or what is adopted."""

    def acquire(self, *, timeout: Duration | None) -> bool:
        """Have it; False when not in time."""

    @property
    def grant(self) -> Grant:
        """What this thread has."""


@dataclass
class SteppingDown:
    """What SIGTERM does to one who leads."""

    patience: float  # seconds from the SIGTERM that the command gets to its SIGKILL
    asked: bool = False


@dataclass(frozen=True)
class Job:
    """A command, and how it runs."""

    command: Sequence[str]  # the program and its arguments
    environment: Mapping[str, str]  # to which the grant is added
    kill_after: float  # seconds between asking it to end (SIGTERM) and making it (SIGKILL)
    #: Called with the grant and the process id.
    started: Callable[[Grant, int], object] = lambda grant, pid: None
    #: Called with the grant, which is held still, and the exit status, when it has ended, and all that has joined.
    finished: Callable[[Grant, int], object] = lambda grant, status: None
    #: None: SIGTERM is the command's affair.
    step_down: SteppingDown | None = None

    def environment_with(self, grant: Grant | None, mark: str, more: Mapping[str, str]) -> dict[str, str]:
        """What the command finds of the grant, and what it must not wait for: all that is held until it has ended. (One
        that has joined finds what those above tell it.)
        """
        held = {}
        if grant is not None:
            held = {
                "SQLSEM_RESOURCE": grant.resource,
                "SQLSEM_POSITION": str(grant.position),
                "SQLSEM_FENCE": str(grant.fence),
                nesting.HELD: nesting.tell(grant.holding, self.environment),
            }
        return {
            **self.environment,
            **held,
            # Of those above us, too, who shall find what is below them.
            guard.MARKS: ":".join([*filter(None, [self.environment.get(guard.MARKS)]), mark]),
            **more,
        }


def run(
    make_lock: Callable[[Callable[[Grant], object]], Obtainable],
    job: Job,
    *,
    coordinator: Coordinator,
    events: Events,
    timeout: float | None,
) -> tuple[int | None, LockLost | None]:
    """Run a command holding the lock that ``make_lock(on_lost)`` makes; called in the main thread.

    Args:
        make_lock: Makes the lock, given what to call when it is lost.
        job: The command.
        coordinator: Whose lock it is.
        events: The queue of the `Signals` that have been entered.
        timeout: Seconds to wait for the lock; None for ever, 0 not at all.

    Returns the exit status (None: the lock was not had in time) and the error, if the lock was lost.
    Raises `OSError` when the command cannot be started, and `Stopped` when a signal came while waiting: then the
    coordinator must be closed, which ends the wait.
    """
    running = threading.Event()
    ended = threading.Event()

    def on_lost(grant: Grant) -> None:
        events.put(("lost", grant.position))
        joinable.tell()
        # In a thread of the coordinator's, which goes on to give up the row that an operator wants: not before the
        # command has ended. (What was lost in any other way, it does not make later.)
        if running.is_set() and threading.current_thread() is not threading.main_thread():
            ended.wait(job.kill_after + NET_SECONDS)

    lock = make_lock(on_lost)
    # The system frees the beacon of an SQLite member at once: then the guard has no time for politeness.
    options = coordinator.engine.options
    polite = job.kill_after if coordinator.engine.beacon_may_fail and (options.grace or options.lease) else 0.0
    joinable = Joinable(polite)
    with guard.Guard() as guarding, joinable:
        guarding.start()
        grant = _acquire(lock, timeout, events)
        if grant is None:
            return None, None
        status = 0
        try:
            if not grant.lost:
                status = _supervise(job, grant, events, guarding, polite, running, joinable.environment)
                joinable.end()
                job.finished(grant, status)
        finally:
            joinable.end()  # they work under this lock, so it is not given back before they have ended
            ended.set()
            lost = _released(grant)
        return status, lost


def lead(
    make_lock: Callable[[Callable[[Grant], object]], Obtainable],
    job: Job,
    *,
    coordinator: Coordinator,
    events: Events,
) -> int:
    """`run`, term after term: when the lock is lost, or the place in its queue, the command is ended, and the lock is
    asked for anew, also while the database is away. On SIGTERM the command is ended (`Job.step_down`), and the lock
    given back. Returns the exit status of the command that has ended by itself, or for SIGTERM. Raises as `run`.
    """
    waits = _waits()
    while True:
        why: LockLost | Unavailable | None
        try:
            status, why = run(make_lock, job, coordinator=coordinator, events=events, timeout=None)
        except (LockLost, Unavailable) as exc:  # while it waited
            why = exc
        else:
            if status is not None and (why is None or (job.step_down is not None and job.step_down.asked)):
                return status
            waits = _waits()
        log.warning("takes part again: %s", why)
        _rest(next(waits), events)


def _waits() -> Iterator[float]:
    return pauses(first=0.1, longest=LONGEST_PAUSE_SECONDS)


def _rest(seconds: float, events: Events) -> None:
    """Raises `Stopped` when a signal comes meanwhile."""
    until = monotonic() + seconds
    while (left := until - monotonic()) > 0:
        with contextlib.suppress(Empty):
            what, number = events.get(timeout=min(left, NET_SECONDS))
            if what == "signal":
                raise Stopped(number)


def run_joined(job: Job, events: Events) -> tuple[int, bool]:
    """Run a command under the lock of the `sqlsem run` above. Returns the exit status, and whether the lock has ended,
    and the command with it. Raises as `run`, and `Joined`.
    """
    over = threading.Event()

    def end() -> None:
        over.set()
        events.put(("lost", 0))

    link = Joined(job.environment, end)
    job = dataclasses.replace(job, kill_after=min(job.kill_after, link.polite))
    try:
        with guard.Guard() as guarding:
            status = _supervise(job, None, events, guarding, job.kill_after, threading.Event(), {})
        return status, over.is_set()
    finally:
        link.leave()


def _released(grant: Grant) -> LockLost | None:
    """Give the lock back; the error, if it was lost."""
    try:
        grant.release()
    except LockLost as exc:
        return exc
    return None


def run_after(obtain: Callable[[], bool], job: Job, events: Events) -> int | None:
    """Run a command when something was obtained that nobody holds; its exit status, None where it was not obtained.
    Raises as `run`.
    """
    if _in_thread(lambda: obtain() or None, events) is None:
        return None
    with guard.Guard() as guarding:
        return _supervise(job, None, events, guarding, job.kill_after, threading.Event(), {})


def _acquire(lock: Obtainable, timeout: float | None, events: Events) -> Grant | None:
    return _in_thread(lambda: lock.grant if lock.acquire(timeout=timeout) else None, events)


def _in_thread(obtain: Callable[[], T | None], events: Events) -> T | None:
    """Obtain something in a thread, so that this one is free for signals."""
    had: list[T | None] = []
    failed: list[BaseException] = []

    def acquire() -> None:
        try:
            had.append(obtain())
        except BaseException as exc:
            failed.append(exc)
        finally:
            events.put(("asked", 0))

    # Its name is what the queue shows of us beside the program's.
    spawn(acquire, "run")
    what = ""
    while what != "asked":
        try:
            what, number = events.get(timeout=NET_SECONDS)
        except Empty:
            continue
        if what == "signal":
            raise Stopped(number)
    if failed:
        raise failed[0]
    return had[0] if had else None


def _supervise(
    job: Job,
    grant: Grant | None,
    events: Events,
    guarding: guard.Guard,
    polite: float,
    running: threading.Event,
    more: Mapping[str, str],
) -> int:
    """Run the command to its end; its exit status, as a shell tells it."""
    alone = guard.POSIX and not _has_terminal()  # it leads a session of its own
    mark = os.urandom(8).hex()
    with _adopting() as adopts:
        others = frozenset(guard.children()) if adopts else None
        # Descriptors that we were given are the command's, as in diff <(a) <(b); our own are never inherited.
        child = subprocess.Popen(  # noqa: S603 - to run what the user typed is the purpose
            job.command,
            env=job.environment_with(grant, mark, more),
            close_fds=not guard.POSIX,
            start_new_session=alone,
        )
        running.set()
        tree = guard.Tree(child.pid, alone, mark, others)
        guarding.watch(tree, polite)
        if grant is not None:
            job.started(grant, child.pid)
        if not guard.POSIX:
            _tell_end(child, events)
        try:
            _attend(child, tree, events, job, 0 if grant is None else grant.position)
        except BaseException:
            guard.end(tree, job.kill_after, lambda: child.poll() is not None)
            raise
        finally:
            guarding.dismiss(tree)
    status = child.wait()
    return 128 - status if status < 0 else status


def _attend(child: subprocess.Popen[bytes], tree: guard.Tree, events: Events, job: Job, term: int) -> None:
    """Until the command has ended: hand signals on to it, and end it when the lock is lost (whose position is ``term``;
    what is told of an earlier one comes too late).
    """
    at_last = math.inf  # when it must have ended
    while child.poll() is None:
        if monotonic() > at_last:
            guard.end(tree, 0.0, lambda: child.poll() is not None)
        try:
            what, number = events.get(timeout=NET_SECONDS)
        except Empty:
            continue
        if what == "child" and tree.others is not None:
            _bury({*tree.others, child.pid})
        if what == "lost" and number == term:
            guard.end(tree, job.kill_after, lambda: child.poll() is not None)
        elif what == "signal" and child.poll() is None:
            name = signal.Signals(number).name
            if not (name in FROM_KEYBOARD and _in_foreground()):
                guard.send(child.pid, number, tree.whole)
            if name == "SIGTERM" and job.step_down is not None:
                job.step_down.asked = True
                at_last = min(at_last, monotonic() + job.step_down.patience)


def _tell_end(child: subprocess.Popen[bytes], events: Events) -> None:
    """Where there is no SIGCHLD: an event when the command has ended, by a thread."""

    def wait() -> None:
        child.wait()
        events.put(("child", 0))

    spawn(wait, "sqlsem-child")


# -- terminals --------------------------------------------------------------------------------------------------------


def _has_terminal() -> bool:
    """Whether we have a controlling terminal."""
    if not guard.POSIX:
        return True  # Ctrl-C reaches everybody on the console
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _in_foreground() -> bool:
    """Whether a key pressed on the terminal signals our process group, and so the command as well."""
    if not guard.POSIX:
        return True
    try:
        tty = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return False  # it hung up; another SIGHUP does no harm
    try:
        return os.tcgetpgrp(tty) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(tty)


# -- the command's family ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _adopting() -> Iterator[bool]:
    """While it lasts, descendants that lose their parents become our children (on Linux): whether it is so."""
    prctl = None
    if sys.platform == "linux":
        try:
            import ctypes

            prctl = ctypes.CDLL(None, use_errno=True).prctl
            if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl")
        except (ImportError, OSError, AttributeError) as exc:
            log.info("A daemon that the command starts may survive the lock: %s", exc)
            prctl = None
    try:
        yield prctl is not None
    finally:
        if prctl is not None:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _bury(others: set[int]) -> None:
    """Collect what has become our child and has ended; the others are awaited elsewhere."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in others:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            return
