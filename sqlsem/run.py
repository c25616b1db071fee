"""What ``sqlsem run`` does: hold a lock while a command runs, and end the command when the lock is lost.

Three processes: *we* hold the lock; the *command* is our child; the *guard* is another child of ours, that is this
file run as a script. The guard does nothing but read a pipe whose other end only we have. When we die in any way
whatever (``kill -9``, out of memory), the system closes the pipe, and the guard ends the command: nothing goes on
unlocked and unnoticed. Linux's PR_SET_PDEATHSIG would do the same for the command alone, not for what it started, on
Linux only, and to set it Python would have to run code between fork and exec, which is not safe beside threads.

Without a terminal (cron, services, CI) the command gets a session of its own, so that everything it starts can be
found and ended with it. On a terminal it stays in our process group, for Ctrl-C, Ctrl-Z and job control to work as
without us; there its descendants are found through /proc, on Linux.

A daemon that has left both its session and its parents (forked twice) is found on Linux in two ways: while we live its
parent is we (PR_SET_CHILD_SUBREAPER); and it has our mark in its environment, by which the guard finds it as well.
Elsewhere, or when it has cleared its environment and we are killed, it survives.
"""

# Nothing of sqlsem or its dependencies is imported when this starts: the guard has to be small and quick.
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from queue import SimpleQueue
    from types import FrameType, TracebackType
    from typing import Any

    from sqlsem.coordinator import Coordinator
    from sqlsem.core.grants import Grant
    from sqlsem.locks import Lock

__all__ = ["CANNOT_RUN", "NOT_FOUND", "Signals", "Stopped", "run"]

#: Exit codes of a command that cannot be started, as shells have them.
NOT_FOUND, CANNOT_RUN = 127, 126
#: Sent to us, these go to the command.
FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
#: Of these the terminal has sent the command one of its own.
FROM_KEYBOARD = ("SIGINT", "SIGQUIT", "SIGHUP")
#: Sleep between looks at processes that are about to end, and a net under signals that did not wake us (seconds).
LOOK, NET = 0.01, 0.5
POSIX = os.name == "posix"
#: The variable by which what a command starts is found, and what makes us the parent of orphans below us (Linux).
MARKS, PR_SET_CHILD_SUBREAPER = "SQLSEM_RUN", 36


class Stopped(Exception):
    """A signal came while we waited for the lock."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Our handlers, while it lasts: signals become events in a queue. Only the main thread may enter.

    No handler raises: Python drops what is raised while it happens to run a ``__del__``, and the signal were lost.
    """

    def __init__(self, events: SimpleQueue[tuple[str, int]]) -> None:
        self._events = events
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for name in FORWARDED:
            number = getattr(signal, name, None)
            # What whoever started us ignores (nohup, a background job of a script), stays ignored.
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


def run(
    make_lock: Callable[[Callable[[Grant], object]], Lock],
    command: Sequence[str],
    *,
    coordinator: Coordinator,
    events: SimpleQueue[tuple[str, int]],
    timeout: float | None,
    kill_after: float,
    started: Callable[[Grant, int], object],
    environment: Mapping[str, str] | None = None,
) -> tuple[int | None, Exception | None]:
    """Run ``command`` holding the lock that ``make_lock(on_lost)`` makes; called in the main thread.

    Args:
        make_lock: Makes the lock, given what to call when it is lost.
        command: The program and its arguments.
        coordinator: Whose lock it is.
        events: The queue of the `Signals` that have been entered.
        timeout: Seconds to wait for the lock; None for ever, 0 not at all.
        kill_after: Seconds between asking the command to end (SIGTERM) and making it (SIGKILL).
        started: Called with the grant and the process id.
        environment: The command's, to which the grant is added; left out, ours.

    Returns the exit status (None: the lock was not had in time) and the error, if the lock was lost.
    Raises `OSError` when the command cannot be started, and `Stopped` when a signal came while waiting: then the
    coordinator must be closed, which ends the wait.
    """
    import secrets
    import threading

    from sqlsem.core import nesting
    from sqlsem.errors import LockLost

    running = threading.Event()
    ended = threading.Event()

    def on_lost(_: Grant) -> None:
        events.put(("lost", 0))
        # In a thread of the coordinator's, which goes on to give up the row that an operator wants: not before the
        # command has ended. (What was lost in any other way, it does not make later.)
        if running.is_set() and threading.current_thread() is not threading.main_thread():
            ended.wait(kill_after + NET)

    lock = make_lock(on_lost)
    # The system frees the beacon of an SQLite member at once: then the guard has no time for politeness.
    options = coordinator.engine.options
    polite = kill_after if coordinator.engine.beacon_may_fail and (options.grace or options.lease) else 0.0
    with _Guard(polite) as guard:
        grant = _acquire(lock, timeout, events)
        if grant is None:
            return None, None
        code, was_lost = 0, grant.lost
        try:
            if not was_lost:
                mark = secrets.token_hex(8)
                inherited = os.environ if environment is None else environment
                own = {
                    **inherited,
                    "SQLSEM_RESOURCE": grant.resource,
                    "SQLSEM_POSITION": str(grant.position),
                    "SQLSEM_FENCE": str(grant.fence),
                    # What it must not wait for: all this is held until it has ended.
                    nesting.HELD: nesting.tell(grant.holding, inherited),
                    # Of those above us, too, who shall find what is below them.
                    MARKS: ":".join([*filter(None, [inherited.get(MARKS)]), mark]),
                }
                with _adopting() as adopts:
                    code = _supervise(
                        command, own, mark, adopts, events, guard, kill_after, running, lambda p: started(grant, p)
                    )
        finally:
            ended.set()
            try:
                grant.release()
            except LockLost as exc:
                lost: Exception | None = exc
            else:
                lost = None
        return code, lost


def _acquire(lock: Lock, timeout: float | None, events: SimpleQueue[tuple[str, int]]) -> Grant | None:
    """Acquire in a thread, so that this one is free for signals."""
    import threading
    from queue import Empty

    had: list[Grant] = []
    failed: list[BaseException] = []

    def acquire() -> None:
        try:
            if lock.acquire(timeout=timeout):
                had.append(lock.grant)
        except BaseException as exc:
            failed.append(exc)
        finally:
            events.put(("asked", 0))

    # Its name is what the queue shows of us beside the program's.
    threading.Thread(target=acquire, name="run", daemon=True).start()
    what = ""
    while what != "asked":
        try:
            what, number = events.get(timeout=NET)
        except Empty:
            continue
        if what == "signal":
            raise Stopped(number)
    if failed:
        raise failed[0]
    return had[0] if had else None


def _supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    mark: str,
    adopts: bool,
    events: SimpleQueue[tuple[str, int]],
    guard: _Guard,
    kill_after: float,
    running: threading.Event,
    started: Callable[[int], object],
) -> int:
    """Run the command to its end; its exit status, as a shell tells it."""
    from queue import Empty

    terminal = _has_terminal()
    ours = frozenset(_children()) if adopts else None
    # Descriptors that we were given are the command's, as in diff <(a) <(b); our own are never inherited.
    child = subprocess.Popen(  # noqa: S603 - to run what the user typed is the purpose
        command, env=environment, close_fds=not POSIX, start_new_session=POSIX and not terminal
    )
    running.set()
    tree = _Tree(child.pid, POSIX and not terminal, mark, ours)
    guard.watch(tree)
    started(child.pid)
    if not POSIX:
        import threading

        def wait() -> None:
            child.wait()
            events.put(("child", 0))

        threading.Thread(target=wait, name="sqlsem-child", daemon=True).start()
    try:
        while child.poll() is None:
            try:
                what, number = events.get(timeout=NET)
            except Empty:
                continue
            if what == "child" and ours is not None:
                _bury({*ours, child.pid})
            if what == "lost":
                _end(tree, kill_after, lambda: child.poll() is not None)
            elif what == "signal" and child.poll() is None:
                name = signal.Signals(number).name
                if not (terminal and name in FROM_KEYBOARD and _in_foreground()):
                    _send(child.pid, number, tree.whole)
    except BaseException:
        _end(tree, kill_after, lambda: child.poll() is not None)
        raise
    finally:
        guard.dismiss()
    code = child.wait()
    return 128 - code if code < 0 else code


# -- terminals --------------------------------------------------------------------------------------------------------


def _has_terminal() -> bool:
    """Whether we have a controlling terminal."""
    if not POSIX:
        return True  # Ctrl-C reaches everybody on the console
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _in_foreground() -> bool:
    """Whether a key pressed on the terminal signals our process group, and so the command as well."""
    if not POSIX:
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


# -- ending processes -------------------------------------------------------------------------------------------------


def _send(pid: int, number: int, whole: bool) -> None:
    try:
        if whole:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it ended; or it is another user's by now (sudo), and not ours to signal


def _processes() -> dict[int, tuple[int, int, str]]:
    """Every process's parent, session and time of birth; nothing where there is no /proc. Zombies are left out."""
    try:
        names = os.listdir("/proc") if sys.platform == "linux" else []
    except OSError:
        names = []
    return {int(name): found for name in names if name.isdigit() and (found := _process(int(name))) is not None}


def _process(pid: int) -> tuple[int, int, str] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[1]), int(fields[3]), fields[19].decode()


class _Tree:
    """The command, and how to find what it has started."""

    def __init__(self, root: int, whole: bool, mark: str, ours: frozenset[int] | None) -> None:
        self.root = root
        self.born = (_process(root) or (0, 0, ""))[2]  # its number may be another's one day
        self.whole = whole  # it leads a session of its own
        self.mark = mark  # one of those in the environment of what it started
        self.ours = ours  # our other children, when those that lose their parents become ours; else None

    def family(self) -> dict[int, str]:
        """The process with all that it started, as far as that is found: number and birth."""
        processes = _processes()
        me = os.getpid()
        found = {pid for pid in processes if self.mark in _marks(pid)}
        if self.root in processes and processes[self.root][2] == self.born:
            found.add(self.root)
        if self.ours is not None:
            found |= {pid for pid, (parent, _, _) in processes.items() if parent == me and pid not in self.ours}
        grown = True
        while grown:
            more = {
                pid
                for pid, (parent, session, _) in processes.items()
                if parent in found or (self.whole and session == self.root)
            }
            grown = not more <= found
            found |= more
        found.discard(me)
        return {pid: processes[pid][2] for pid in found if pid in processes}


def _marks(pid: int) -> list[str]:
    """The marks in a process's environment, where we may look at that."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        return []
    for one in environment.split(b"\0"):
        name, _, value = one.partition(b"=")
        if name == MARKS.encode():
            return value.decode(errors="replace").split(":")
    return []


def _children() -> set[int]:
    me = os.getpid()
    return {pid for pid, (parent, _, _) in _processes().items() if parent == me}


@contextlib.contextmanager
def _adopting() -> Iterator[bool]:
    """While it lasts, descendants that lose their parents become our children (on Linux): whether it is so."""
    prctl = None
    if sys.platform == "linux":
        import logging

        try:
            import ctypes

            prctl = ctypes.CDLL(None, use_errno=True).prctl
            if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl")
        except (ImportError, OSError, AttributeError) as exc:
            logging.getLogger("sqlsem").info("A daemon that the command starts may survive the lock: %s", exc)
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


def _end(tree: _Tree, patience: float, ended: Callable[[], bool]) -> None:
    """SIGTERM for a process and what it started; after ``patience`` seconds SIGKILL for what is left of them."""
    root, whole = tree.root, tree.whole
    if not POSIX:
        os.kill(root, signal.SIGTERM)  # which is TerminateProcess there
        return
    family = tree.family()

    def left() -> set[int]:
        now = _processes()
        return {pid for pid, born in family.items() if pid in now and now[pid][2] == born}

    if patience > 0:
        if whole or not ended():
            _send(root, signal.SIGTERM, whole)
        for pid in family:
            if pid != root and not (whole and _group(pid) == root):
                _send(pid, signal.SIGTERM, False)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if ended() and not left() and not (whole and _group_exists(root)):
                break
            time.sleep(LOOK)
    for _ in range(3):  # what is being forked meanwhile is found the next time
        family.update(tree.family())
        if not ended() or (whole and _group_exists(root)):
            _send(root, signal.SIGKILL, whole)
        alive = left() - {root}
        for pid in alive:
            _send(pid, signal.SIGKILL, False)
        if not alive:
            return


def _group_exists(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


# -- the guard --------------------------------------------------------------------------------------------------------


class _Guard:
    """Our side of the guard. Where none can be had, things go on without, and the log says so."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Guard:
        import logging

        if POSIX and sys.executable and os.path.isfile(__file__):
            try:
                # A session of its own: what ends our whole group shall not end the guard as well.
                self._process = subprocess.Popen(  # noqa: S603 - this file
                    [sys.executable, "-I", "-S", __file__, str(self._patience)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as exc:
                logging.getLogger("sqlsem").warning("No guard: %s", exc)
        else:
            logging.getLogger("sqlsem").info("No guard here: the command would survive a kill -9 of sqlsem run")
        return self

    def watch(self, tree: _Tree) -> None:
        self._tell(f"{tree.root} {int(tree.whole)} {tree.mark}\n")

    def dismiss(self) -> None:
        self._tell("0 0 -\n")

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            except OSError:
                import logging

                logging.getLogger("sqlsem").warning("The guard is gone; the command would survive a kill -9")

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            if self._process.stdin is not None:
                with contextlib.suppress(OSError):
                    self._process.stdin.close()
            self._process.wait()


def _guard(patience: float) -> None:
    """The guard's side: remember whom to end, and end it when the pipe closes."""
    tree = _Tree(0, False, "", None)
    for line in sys.stdin:
        root, whole, mark = line.split()
        tree = _Tree(int(root), whole == "1", mark, None)

    def ended() -> bool:
        if sys.platform == "linux" and os.path.isdir("/proc/self"):
            now = _process(tree.root)
            return now is None or now[2] != tree.born
        try:
            os.kill(tree.root, 0)
        except OSError:
            return True
        return False

    if tree.root:
        _end(tree, patience, ended)


if __name__ == "__main__":
    for _name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, _name), signal.SIG_IGN)
    _guard(float(sys.argv[1]))
