"""Ends commands with all that they started when the process that runs them dies; and ends them by the same means while
it lives. For ``sqlsem run``, workers and callbacks of batches.

The guard is this file, run as a script. It does nothing but read a pipe whose other end only the process has that runs
commands. When that dies in any way whatever (``kill -9``, out of memory), the system closes the pipe, and the guard
ends the commands: nothing goes on unlocked and unnoticed, or beside its next attempt. Linux's PR_SET_PDEATHSIG would do
the same for a command alone, not for what it started, on Linux only, and to set it Python would have to run code
between fork and exec, which is not safe beside threads.

So nothing of sqlsem or its dependencies is imported here: the guard has to be small and quick.
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

__all__ = ["MARKS", "POSIX", "Guard", "Tree", "children", "end", "send"]

POSIX = os.name == "posix"
#: The variable by which what a command starts is found.
MARKS = "SQLSEM_RUN"
#: Sleep between looks at processes that are about to end.
LOOK_SECONDS = 0.01
#: How often what is left is killed: what is being forked meanwhile is found the next time.
KILLS = 3


def send(pid: int, number: int, whole: bool) -> None:
    """A signal for a process or, if it is to have the ``whole``, for the group that it leads."""
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


class Tree:
    """The command, and how to find what it has started."""

    def __init__(self, root: int, whole: bool, mark: str, others: frozenset[int] | None) -> None:
        self.root = root
        self.born = (_process(root) or (0, 0, ""))[2]  # its number may be another's one day
        self.whole = whole  # it leads a session of its own
        self.mark = mark  # one of those in the environment of what it started
        self.others = others  # our other children, when those that lose their parents become ours; else None

    def family(self) -> dict[int, str]:
        """The process with all that it started, as far as that is found: number and birth."""
        processes = _processes()
        me = os.getpid()
        found = {pid for pid in processes if self.mark in _marks(pid)}
        if self.root in processes and processes[self.root][2] == self.born:
            found.add(self.root)
        if self.others is not None:
            found |= {pid for pid, (parent, _, _) in processes.items() if parent == me and pid not in self.others}
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
    for part in environment.split(b"\0"):
        name, _, value = part.partition(b"=")
        if name == MARKS.encode():
            return value.decode(errors="replace").split(":")
    return []


def children() -> set[int]:
    """The processes whose parent we are."""
    me = os.getpid()
    return {pid for pid, (parent, _, _) in _processes().items() if parent == me}


def end(tree: Tree, patience: float, ended: Callable[[], bool]) -> None:
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
            send(root, signal.SIGTERM, whole)
        for pid in family:
            if pid != root and not (whole and _group(pid) == root):
                send(pid, signal.SIGTERM, False)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if ended() and not left() and not (whole and _group_exists(root)):
                break
            time.sleep(LOOK_SECONDS)
    for _ in range(KILLS):
        family.update(tree.family())
        if not ended() or (whole and _group_exists(root)):
            send(root, signal.SIGKILL, whole)
        alive = left() - {root}
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


class Guard:
    """The guard as the process has it that is watched: one for all of its commands, started with the first of them and
    ended with the last ``with`` block. Where none can be had, things go on without, and the log says so.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._started = False
        self._hooked = False

    def __enter__(self) -> Guard:
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
        """Start the guard process, if that was not done before."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        import logging  # the guard process itself needs neither
        import subprocess

        if self._started:
            return
        self._started = True
        log = logging.getLogger("sqlsem")
        if not POSIX or not sys.executable or not os.path.isfile(__file__):
            log.info("No guard here: commands would survive a kill -9 of this process")
            return
        if not self._hooked:
            os.register_at_fork(after_in_child=self._forked)
            self._hooked = True
        try:
            # A session of its own: what ends our whole group shall not end the guard as well.
            self._process = subprocess.Popen(  # noqa: S603 - a file of ours
                [sys.executable, "-I", "-S", __file__],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as exc:
            log.warning("No guard: %s", exc)

    def _forked(self) -> None:
        """Leave the guard to the parent. Its end of the pipe must not live on here, or the parent's end went unseen."""
        self._lock = threading.Lock()
        process, self._process, self._started = self._process, None, False
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.returncode = 0  # not our child: nobody waits for it here

    def watch(self, tree: Tree, patience: float) -> None:
        """Have this ended when our process dies: by SIGTERM, and by SIGKILL after ``patience`` seconds."""
        self._tell(f"watch {tree.mark} {tree.root} {int(tree.whole)} {patience}\n")

    def dismiss(self, tree: Tree) -> None:
        """Leave this alone from now on: it has ended."""
        self._tell(f"dismiss {tree.mark}\n")

    def _tell(self, line: str) -> None:
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
                    "The guard is gone; commands would survive a kill -9 of this process"
                )
                self._process.stdin.close()
                self._process.wait()
                self._process = None


def main() -> None:
    """Remember what to end, and end it when the pipe closes."""
    watched: dict[str, tuple[Tree, float]] = {}
    for line in sys.stdin:
        what, mark, *rest = line.split()
        watched.pop(mark, None)
        if what == "watch":
            root, whole, patience = rest
            watched[mark] = Tree(int(root), whole == "1", mark, None), float(patience)
    threads = [threading.Thread(target=_end_orphan, args=one) for one in watched.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_orphan(tree: Tree, patience: float) -> None:
    def ended() -> bool:
        if sys.platform == "linux" and os.path.isdir("/proc/self"):
            now = _process(tree.root)
            return now is None or now[2] != tree.born
        try:
            os.kill(tree.root, 0)
        except OSError:
            return True
        return False

    end(tree, patience, ended)


if __name__ == "__main__":
    for _name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, _name), signal.SIG_IGN)
    main()
