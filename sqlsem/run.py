"""What ``sqlsem run`` does: hold a lock while a command runs, and end the command when the lock is lost.

Three processes: *we* hold the lock; the *command* is our child; the *guard* is another child of ours, that is this
file run as a script. The guard does nothing but read a pipe whose other end only we have. When we die in any way
whatever (``kill -9``, out of memory), the system closes the pipe, and the guard ends the command: nothing goes on
unlocked and unnoticed. Linux's PR_SET_PDEATHSIG would do the same for the command alone, not for what it started, on
Linux only, and to set it Python would have to run code between fork and exec, which is not safe beside threads.

Without a terminal (cron, services, CI) the command gets a session of its own, so that everything it starts can be
found and ended with it. On a terminal it stays in our process group, for Ctrl-C, Ctrl-Z and job control to work as
without us; there its descendants are found through /proc, on Linux.
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
    from collections.abc import Callable, Mapping, Sequence
    from queue import SimpleQueue
    from types import FrameType, TracebackType
    from typing import Any

    from sqlsem.coordinator import Coordinator, Grant
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

    Returns the exit status (None: the lock was not had in time) and the error, if the lock was lost.
    Raises `OSError` when the command cannot be started, and `Stopped` when a signal came while waiting: then the
    coordinator must be closed, which ends the wait.
    """
    import threading

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
                environment = {
                    **os.environ,
                    "SQLSEM_RESOURCE": grant.resource,
                    "SQLSEM_POSITION": str(grant.position),
                    "SQLSEM_FENCE": str(grant.fence),
                }
                code = _supervise(command, environment, events, guard, kill_after, running, lambda p: started(grant, p))
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
    events: SimpleQueue[tuple[str, int]],
    guard: _Guard,
    kill_after: float,
    running: threading.Event,
    started: Callable[[int], object],
) -> int:
    """Run the command to its end; its exit status, as a shell tells it."""
    from queue import Empty

    terminal = _has_terminal()
    # Descriptors that we were given are the command's, as in diff <(a) <(b); our own are never inherited.
    child = subprocess.Popen(  # noqa: S603 - to run what the user typed is the purpose
        command, env=environment, close_fds=not POSIX, start_new_session=POSIX and not terminal
    )
    running.set()
    whole = POSIX and not terminal
    guard.watch(child.pid, whole)
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
            if what == "lost":
                _end(child.pid, whole, kill_after, lambda: child.poll() is not None)
            elif what == "signal" and child.poll() is None:
                name = signal.Signals(number).name
                if not (terminal and name in FROM_KEYBOARD and _in_foreground()):
                    _send(child.pid, number, whole)
    except BaseException:
        _end(child.pid, whole, kill_after, lambda: child.poll() is not None)
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
    found: dict[int, tuple[int, int, str]] = {}
    try:
        names = os.listdir("/proc") if sys.platform == "linux" else []
    except OSError:
        names = []
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields and fields[0] not in (b"Z", b"X"):
                found[int(name)] = (int(fields[1]), int(fields[3]), fields[19].decode())
    return found


def _family(root: int, whole: bool) -> dict[int, str]:
    """The process with its descendants and, when it leads a session, that session's members: number and birth."""
    processes = _processes()
    found = {root}
    grown = True
    while grown:
        more = {
            pid for pid, (parent, session, _) in processes.items() if parent in found or (whole and session == root)
        }
        grown = not more <= found
        found |= more
    return {pid: processes[pid][2] for pid in found if pid in processes}


def _end(root: int, whole: bool, patience: float, ended: Callable[[], bool]) -> None:
    """SIGTERM for a process and what it started; after ``patience`` seconds SIGKILL for what is left of them."""
    if not POSIX:
        os.kill(root, signal.SIGTERM)  # which is TerminateProcess there
        return
    family = _family(root, whole)

    def left() -> set[int]:
        now = _processes()
        return {pid for pid, born in family.items() if pid in now and now[pid][2] == born}

    if patience > 0:
        _send(root, signal.SIGTERM, whole)
        for pid in family:
            if pid != root and not (whole and _group(pid) == root):
                _send(pid, signal.SIGTERM, False)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if ended() and not left() and not (whole and _group_exists(root)):
                return
            time.sleep(LOOK)
    family.update(_family(root, whole) if whole or not ended() else {})
    if not ended() or (whole and _group_exists(root)):
        _send(root, signal.SIGKILL, whole)
    for pid in left() - {root}:
        _send(pid, signal.SIGKILL, False)


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

    def watch(self, pid: int, whole: bool) -> None:
        self._tell(f"{pid} {int(whole)}\n")

    def dismiss(self) -> None:
        self._tell("0 0\n")

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
    root, whole, born = 0, False, ""
    for line in sys.stdin:
        root, flag = map(int, line.split())
        whole = bool(flag)
        born = _processes().get(root, (0, 0, ""))[2]

    def ended() -> bool:
        now = _processes()
        if now:
            return root not in now or now[root][2] != born
        try:
            os.kill(root, 0)
        except OSError:
            return True
        return False

    if root and (whole or not ended()):
        _end(root, whole, patience, ended)


if __name__ == "__main__":
    for _name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, _name), signal.SIG_IGN)
    _guard(float(sys.argv[1]))
