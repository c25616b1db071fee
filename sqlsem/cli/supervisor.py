"""Holds a lock while a command runs, and ends the command when the lock is lost, for ``sqlsem run``.

There are three processes: *we* hold the lock, the *command* is our child, and the *killer* is our second child, which
ends the command if we die (see `sqlsem.util.tree_killer`).

Without a terminal (cron, services, CI) the command gets a session of its own, so that everything it starts can be
found and ended with it. On a terminal the command stays in our process group, so that Ctrl-C, Ctrl-Z and job control
work as usual; there its descendants are found through /proc, on Linux.

A daemon that has left both its session and its parents (forked twice) is found on Linux in two ways: it becomes our
child (PR_SET_CHILD_SUBREAPER) while we live, and it has our mark in its environment, which the killer looks for. On
other systems, or if it has cleared its environment and we are killed, it survives.
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
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from sqlsem.api.coordinator import Coordinator
from sqlsem.cli.joining import Joinable, Joined
from sqlsem.cli.signals import handled
from sqlsem.client.grants import Grant
from sqlsem.client.held.registry import LostCallback
from sqlsem.client.leader import retry_pauses
from sqlsem.client.monitors import parent_locks
from sqlsem.util import tree_killer
from sqlsem.util.threads import spawn
from sqlsem.util.tree_killer import ProcessTree
from sqlsem.values.errors import LockLost, Unavailable
from sqlsem.values.locks import monotonic

#: Exit codes of a command that cannot be started, as in shells.
NOT_FOUND, CANNOT_RUN = 127, 126
#: Signals that we pass on to the command.
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
#: Signals that the terminal sends to the command as well.
FROM_KEYBOARD = ("SIGINT", "SIGQUIT", "SIGHUP")
#: The longest wait for an event: a signal may fail to wake us.
POLL_SECONDS = 0.5
#: An operation of prctl(2): makes us the parent of orphans below us (Linux).
PR_SET_CHILD_SUBREAPER = 36
log = logging.getLogger("sqlsem")
T = TypeVar("T")
#: Events while we wait: ("signal", its number), ("child", 0): a child has ended, ("lost", the grant's position; 0 for
#: a joined lock), ("acquired", 0): the attempt to acquire the lock has ended.
Events = SimpleQueue[tuple[str, int]]
#: Acquires a lock. Gets the function to call when the lock is lost, and the timeout in seconds (None: for ever, 0: do
#: not wait). Returns None if the lock is not granted in time.
Acquire = Callable[[LostCallback, float | None], Grant | None]


class Stopped(Exception):
    """A signal arrived while we waited for the lock."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def signals_to(events: Events) -> Iterator[None]:
    """A context in which signals become events. Only the main thread may enter it."""
    with (
        handled(FORWARDED, lambda number: events.put(("signal", number))),
        handled(["SIGCHLD"], lambda _: events.put(("child", 0))),
    ):
        yield


@dataclass
class StepDown:
    """The settings and state of a leader that gives up its term on SIGTERM."""

    kill_after: float  # seconds between the command's SIGTERM and its SIGKILL
    requested: bool = False


@dataclass(frozen=True)
class Job:
    """A command, and how it runs."""

    command: Sequence[str]  # the program and its arguments
    environment: Mapping[str, str]  # variables of the grant are added
    kill_after: float  # seconds between SIGTERM and SIGKILL
    #: Called when the wait is over, before the command starts.
    obtained: Callable[[], object] = lambda: None
    #: Called with the grant and the process id when the command has started.
    started: Callable[[Grant, int], object] = lambda grant, pid: None
    #: Called with the grant, which is still held, and the exit status when the command and all joined ones have ended.
    finished: Callable[[Grant, int], object] = lambda grant, status: None
    #: None: SIGTERM is only passed on to the command.
    step_down: StepDown | None = None

    def environment_with(self, grant: Grant | None, mark: str, extra: Mapping[str, str]) -> dict[str, str]:
        """Return the command's environment: with the grant's variables, and the locks that it must not wait for, as we
        hold them until it has ended. (A joined command has those of its parent.)
        """
        held = {}
        if grant is not None:
            held = {
                "SQLSEM_RESOURCE": grant.resource,
                "SQLSEM_POSITION": str(grant.position),
                "SQLSEM_FENCE": str(grant.fence),
                parent_locks.HELD: parent_locks.environment_value(grant.state, self.environment),
            }
        return {
            **self.environment,
            **held,
            # With the marks of our parents, which also have to find this command.
            tree_killer.MARKS: ":".join([*filter(None, [self.environment.get(tree_killer.MARKS)]), mark]),
            **extra,
        }


def run(
    acquire: Acquire, job: Job, *, coordinator: Coordinator, events: Events, timeout: float | None
) -> tuple[int | None, LockLost | None]:
    """Run a command holding the lock that ``acquire`` acquires; called in the main thread. ``coordinator`` is that of
    the lock, ``events`` the queue of the `signals_to` context.

    Return the exit status (None: the lock was not granted in time) and the error, if the lock was lost.
    Raise `OSError` if the command cannot be started, and `Stopped` if a signal arrived while waiting: then the
    coordinator must be closed, which ends the wait.
    """
    running = threading.Event()
    ended = threading.Event()

    def on_lost(grant: Grant) -> None:
        events.put(("lost", grant.position))
        joinable.end_joined()
        # Called in a thread of the coordinator, which then removes the row that an operator has revoked. Hold it up
        # until the command has ended. (A lock that was lost in another way is lost already.)
        if running.is_set() and threading.current_thread() is not threading.main_thread():
            ended.wait(job.kill_after + POLL_SECONDS)

    # The system frees the beacon of an SQLite member at once when we die: then the killer sends SIGKILL at once.
    options = coordinator.engine.options
    orphan_kill_after = (
        job.kill_after if coordinator.engine.beacon_may_fail and (options.grace or options.lease) else 0.0
    )
    joinable = Joinable(orphan_kill_after)
    with tree_killer.TreeKiller() as killer, joinable:
        killer.start()
        grant = _in_thread(lambda: acquire(on_lost, timeout), events)
        if grant is None:
            return None, None
        job.obtained()
        status = 0
        try:
            if not grant.lost:
                status = _supervise(job, grant, events, killer, orphan_kill_after, running, joinable.environment)
                joinable.end()
                job.finished(grant, status)
        finally:
            joinable.end()  # joined commands run under this lock, which is released when they have ended
            ended.set()
            lost = _release(grant)
        return status, lost


def lead(acquire: Acquire, job: Job, *, coordinator: Coordinator, events: Events) -> int:
    """`run` a command in each term of a leader.

    When the lock is lost, or the waiting row, the command is ended, and the lock requested again, also during an outage
    of the database. On SIGTERM the command is ended (`Job.step_down`), and the lock released. Return the exit status of
    the command when it ended by itself or after SIGTERM. Raise as `run` does.
    """
    pauses = retry_pauses()
    while True:
        why: LockLost | Unavailable | None
        try:
            status, why = run(acquire, job, coordinator=coordinator, events=events, timeout=None)
        except (LockLost, Unavailable) as exc:  # while waiting for the lock
            why = exc
        else:
            if status is not None and (why is None or (job.step_down is not None and job.step_down.requested)):
                return status
            pauses = retry_pauses()
        log.warning("takes part in the election again: %s", why)
        _sleep_unless_signaled(next(pauses), events)


def _sleep_unless_signaled(seconds: float, events: Events) -> None:
    """Sleep; raise `Stopped` when a signal arrives."""
    deadline = monotonic() + seconds
    while (remaining := deadline - monotonic()) > 0:
        with contextlib.suppress(Empty):
            event, number = events.get(timeout=min(remaining, POLL_SECONDS))
            if event == "signal":
                raise Stopped(number)


def run_joined(job: Job, events: Events) -> tuple[int, bool]:
    """Run a command under the lock of a parent `sqlsem run`. Return the exit status, and True if the command was ended
    because the lock has ended. Raise as `run` and `Joined` do.
    """
    lock_ended = threading.Event()

    def end() -> None:
        lock_ended.set()
        events.put(("lost", 0))

    link = Joined(job.environment, end)
    job = dataclasses.replace(job, kill_after=min(job.kill_after, link.kill_after))
    try:
        status = _run_without_lock(job, events)
        return status, lock_ended.is_set()
    finally:
        link.leave()


def _release(grant: Grant) -> LockLost | None:
    """Release the lock; return the error if it was lost."""
    try:
        grant.release()
    except LockLost as exc:
        return exc
    return None


def run_after(obtain: Callable[[], bool], job: Job, events: Events) -> int | None:
    """Run a command after ``obtain()``, without any lock. Return its exit status; None if ``obtain()`` returned False.
    Raise as `run` does.
    """
    if not _in_thread(obtain, events):
        return None
    job.obtained()
    return _run_without_lock(job, events)


def _run_without_lock(job: Job, events: Events) -> int:
    with tree_killer.TreeKiller() as killer:
        return _supervise(job, None, events, killer, job.kill_after, threading.Event(), {})


def _in_thread(obtain: Callable[[], T], events: Events) -> T:
    """Call ``obtain`` in a thread, so that this one is free for signals; return its result."""
    result: Future[T] = Future()

    def set_result() -> None:
        try:
            result.set_result(obtain())
        except BaseException as exc:
            result.set_exception(exc)
        finally:
            events.put(("acquired", 0))

    # The queue shows the thread's name as our owner.
    spawn(set_result, "run")
    event = ""
    while event != "acquired":
        try:
            event, number = events.get(timeout=POLL_SECONDS)
        except Empty:
            continue
        if event == "signal":
            raise Stopped(number)
    return result.result()


def _supervise(
    job: Job,
    grant: Grant | None,
    events: Events,
    killer: tree_killer.TreeKiller,
    orphan_kill_after: float,
    running: threading.Event,
    extra_environment: Mapping[str, str],
) -> int:
    """Run the command to its end; return its exit status as a shell would."""
    own_session = tree_killer.POSIX and not _has_terminal()
    mark = os.urandom(8).hex()
    with _as_subreaper() as is_subreaper:
        others = frozenset(tree_killer.children()) if is_subreaper else None
        # The command inherits descriptors that we inherited, as in diff <(a) <(b); our own are never inherited.
        child = subprocess.Popen(  # noqa: S603 - to run what the user typed is the purpose
            job.command,
            env=job.environment_with(grant, mark, extra_environment),
            close_fds=not tree_killer.POSIX,
            start_new_session=own_session,
        )
        running.set()
        tree = ProcessTree(child.pid, own_session, mark, others)
        killer.watch(tree, orphan_kill_after)
        if grant is not None:
            job.started(grant, child.pid)
        if not tree_killer.POSIX:
            _watch_in_thread(child, events)
        try:
            _wait_for_end(child, tree, events, job, 0 if grant is None else grant.position)
        except BaseException:
            tree_killer.end(tree, job.kill_after, lambda: child.poll() is not None)
            raise
        finally:
            killer.dismiss(tree)
    status = child.wait()
    return 128 - status if status < 0 else status


def _wait_for_end(
    child: subprocess.Popen[bytes], tree: tree_killer.ProcessTree, events: Events, job: Job, term: int
) -> None:
    """Wait until the command has ended. Pass signals on to it, and end it when the lock is lost.

    ``term``: the lock's position. Losses of earlier terms are ignored.
    """
    kill_at = math.inf
    while child.poll() is None:
        if monotonic() > kill_at:
            tree_killer.end(tree, 0.0, lambda: child.poll() is not None)
        try:
            event, number = events.get(timeout=POLL_SECONDS)
        except Empty:
            continue
        if event == "child" and tree.others is not None:
            _collect_zombies({*tree.others, child.pid})
        if event == "lost" and number == term:
            tree_killer.end(tree, job.kill_after, lambda: child.poll() is not None)
        elif event == "signal" and child.poll() is None:
            name = signal.Signals(number).name
            if not (name in FROM_KEYBOARD and _in_foreground()):
                tree_killer.send(child.pid, number, tree.leads_session)
            if name == "SIGTERM" and job.step_down is not None:
                job.step_down.requested = True
                kill_at = min(kill_at, monotonic() + job.step_down.kill_after)


def _watch_in_thread(child: subprocess.Popen[bytes], events: Events) -> None:
    """Start a thread that puts an event when the command has ended, on systems without SIGCHLD."""

    def wait() -> None:
        child.wait()
        events.put(("child", 0))

    spawn(wait, "sqlsem-child")


# -- terminals --------------------------------------------------------------------------------------------------------


def _has_terminal() -> bool:
    """Return True if we have a controlling terminal."""
    if not tree_killer.POSIX:
        return True  # Ctrl-C reaches every process of the console
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _in_foreground() -> bool:
    """Return True if a key pressed on the terminal signals our process group, and so the command as well."""
    if not tree_killer.POSIX:
        return True
    try:
        with open("/dev/tty", "rb", buffering=0) as tty:
            return os.tcgetpgrp(tty.fileno()) == os.getpgrp()
    except OSError:  # the terminal has hung up: another SIGHUP does no harm
        return False


# -- the command's process tree ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_subreaper() -> Iterator[bool]:
    """A context in which orphaned descendants become our children. Yield False if the system cannot do that."""
    prctl = None
    if sys.platform == "linux":
        try:
            import ctypes

            prctl = ctypes.CDLL(None, use_errno=True).prctl
            if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl")
        except (ImportError, OSError, AttributeError) as exc:
            log.info("A daemon that the command starts may outlive the lock: %s", exc)
            prctl = None
    try:
        yield prctl is not None
    finally:
        if prctl is not None:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _collect_zombies(others: set[int]) -> None:
    """Collect the exit status of ended orphans that became our children. ``others``: children that are not orphans."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in others:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
        except ChildProcessError:
            return
