"""Ends commands and all that they started: on request, and when the process that runs them dies.

`TreeKiller` starts a second process, the *killer*, which is this file, run as a script. The killer reads a pipe whose
other end only the process that runs commands has. When that process dies in any way (``kill -9``, out of memory), the
system closes the pipe, and the killer ends the commands: no command goes on without its lock, or beside its next
attempt. `sqlsem run`, workers and callbacks of batches use it. (Linux's PR_SET_PDEATHSIG ends only the command itself,
works on Linux only, and needs Python code between fork and exec, which is not safe beside threads.)

This module imports nothing of sqlsem or its dependencies: the killer must be small and start quickly.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

__all__ = ["MARKS", "POSIX", "ProcessTree", "TreeKiller", "children", "end", "send"]

POSIX = os.name == "posix"
#: The environment variable with the marks by which all processes that a command started are found.
MARKS = "SQLSEM_RUN"
#: The pause between two checks whether processes have ended.
CHECK_SECONDS = 0.01
#: How often all remaining processes are killed: a process that is being forked meanwhile is found the next time.
KILLS = 3


def send(pid: int, number: int, to_group: bool) -> None:
    """Send a signal to a process or, with ``to_group``, to the process group that it leads."""
    try:
        if to_group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended; or it belongs to another user now (sudo)


def _processes() -> dict[int, tuple[int, int, str]]:
    """Return every process's parent, session and start time; empty without /proc. Zombies are left out."""
    try:
        names = os.listdir("/proc") if sys.platform == "linux" else []
    except OSError:
        names = []
    return {int(name): entry for name in names if name.isdigit() and (entry := _process(int(name))) is not None}


def _process(pid: int) -> tuple[int, int, str] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[1]), int(fields[3]), fields[19].decode()


class ProcessTree:
    """A command, and how to find the processes that it has started."""

    def __init__(self, root: int, leads_session: bool, mark: str, others: frozenset[int] | None) -> None:
        self.root = root
        self.start_time = (_process(root) or (0, 0, ""))[2]  # tells it from a later process with the same pid
        self.leads_session = leads_session
        self.mark = mark  # in the environment of every process that it started
        self.others = others  # our other children, if orphans below us become our children; else None

    def find(self) -> dict[int, str]:
        """Return the process and all it started, as far as they can be found: pid and start time."""
        processes = _processes()
        me = os.getpid()
        tree = {pid for pid in processes if self.mark in _marks(pid)}
        if self.root in processes and processes[self.root][2] == self.start_time:
            tree.add(self.root)
        if self.others is not None:
            tree |= {pid for pid, (parent, _, _) in processes.items() if parent == me and pid not in self.others}
        grown = True
        while grown:
            added = {
                pid
                for pid, (parent, session, _) in processes.items()
                if parent in tree or (self.leads_session and session == self.root)
            }
            grown = not added <= tree
            tree |= added
        tree.discard(me)
        return {pid: processes[pid][2] for pid in tree if pid in processes}


def _marks(pid: int) -> list[str]:
    """Return the marks in a process's environment; empty if we may not read that."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
    except OSError:
        return []
    for part in environment.split(b"\0"):
        name, _, value = part.partition(b"=")
        if name == MARKS.encode():
            return value.decode(errors="replace").split(":")
    return []


def children() -> set[int]:
    """Return the pids of our child processes."""
    me = os.getpid()
    return {pid for pid, (parent, _, _) in _processes().items() if parent == me}


def end(tree: ProcessTree, kill_after: float, has_ended: Callable[[], bool]) -> None:
    """Send SIGTERM to a process and all it started; after ``kill_after`` seconds send SIGKILL to the remaining ones.

    ``has_ended``: returns True if the root process has ended.
    """
    root, leads_session = tree.root, tree.leads_session
    if not POSIX:
        os.kill(root, signal.SIGTERM)  # on Windows this is TerminateProcess
        return
    members = tree.find()

    def remaining() -> set[int]:
        processes = _processes()
        return {pid for pid, start in members.items() if pid in processes and processes[pid][2] == start}

    if kill_after > 0:
        if leads_session or not has_ended():
            send(root, signal.SIGTERM, leads_session)
        for pid in members:
            if pid != root and not (leads_session and _group(pid) == root):
                send(pid, signal.SIGTERM, False)
        deadline = time.monotonic() + kill_after
        while time.monotonic() < deadline:
            if has_ended() and not remaining() and not (leads_session and _group_exists(root)):
                break
            time.sleep(CHECK_SECONDS)
    for _ in range(KILLS):
        members.update(tree.find())
        if not has_ended() or (leads_session and _group_exists(root)):
            send(root, signal.SIGKILL, leads_session)
        alive = remaining() - {root}
        for pid in alive:
            send(pid, signal.SIGKILL, False)
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


class TreeKiller:
    """The killer process of this process: starts with the first command, and ends with the last ``with`` block.

    If the killer cannot be started, commands run without it, and the log says so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started = False
        self._hooked = False

    def __enter__(self) -> TreeKiller:
        with self._lock:
            self._users += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            process, self._process, self._started = self._process, None, False
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()

    def start(self) -> None:
        """Start the killer process, unless it runs."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        import logging  # the killer process itself needs neither
        import subprocess

        if self._started:
            return
        self._started = True
        log = logging.getLogger("sqlsem")
        if not POSIX or not sys.executable or not os.path.isfile(__file__):
            log.info("On this system commands go on after a kill -9 of this process")
            return
        if not self._hooked:
            os.register_at_fork(after_in_child=self._forked)
            self._hooked = True
        try:
            # In a session of its own: a signal to our whole process group must not end the killer.
            self._process = subprocess.Popen(  # noqa: S603 - our own file
                [sys.executable, "-I", "-S", __file__],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as exc:
            log.warning("Commands would go on after a kill -9 of this process, as no other can be started: %s", exc)

    def _forked(self) -> None:
        """Leave the killer to the parent. Close the pipe in the child, or the killer would miss the parent's end."""
        self._lock = threading.Lock()
        process, self._process, self._started = self._process, None, False
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.returncode = 0  # not our child, so there is nothing to wait for

    def watch(self, tree: ProcessTree, kill_after: float) -> None:
        """Have the killer end ``tree`` if this process dies: SIGTERM, and SIGKILL after ``kill_after`` seconds."""
        self._send_line(f"watch {tree.mark} {tree.root} {int(tree.leads_session)} {kill_after}\n")

    def dismiss(self, tree: ProcessTree) -> None:
        """Have the killer discard ``tree``, which has ended."""
        self._send_line(f"dismiss {tree.mark}\n")

    def _send_line(self, line: str) -> None:
        with self._lock:
            self._start()
            if self._process is None:
                return
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(line.encode())
            except OSError:
                import logging

                logging.getLogger("sqlsem").warning(
                    "The process that ends commands is gone; they would go on after a kill -9 of this process"
                )
                self._process.stdin.close()
                self._process.wait()
                self._process = None


def main() -> None:
    """Read process ids from the pipe, and end these processes when the pipe is closed. The killer process runs this."""
    watched: dict[str, tuple[ProcessTree, float]] = {}
    for line in sys.stdin:
        request, mark, *rest = line.split()
        watched.pop(mark, None)
        if request == "watch":
            root, leads_session, kill_after = rest
            watched[mark] = ProcessTree(int(root), leads_session == "1", mark, None), float(kill_after)
    threads = [threading.Thread(target=_end_orphan, args=entry) for entry in watched.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_orphan(tree: ProcessTree, kill_after: float) -> None:
    def has_ended() -> bool:
        if sys.platform == "linux" and os.path.isdir("/proc/self"):
            process = _process(tree.root)
            return process is None or process[2] != tree.start_time
        try:
            os.kill(tree.root, 0)
        except OSError:
            return True
        return False

    end(tree, kill_after, has_ended)


if __name__ == "__main__":
    for _name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, _name), signal.SIG_IGN)
    main()
