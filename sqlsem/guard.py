"""Ends a command with all that it started: the guard of ``sqlsem run``, and what that does itself by the same means.

The guard is this file, run as a script. It does nothing but read a pipe whose other end only ``sqlsem run`` has. When
that dies in any way whatever (``kill -9``, out of memory), the system closes the pipe, and the guard ends the command:
nothing goes on unlocked and unnoticed. Linux's PR_SET_PDEATHSIG would do the same for the command alone, not for what
it started, on Linux only, and to set it Python would have to run code between fork and exec, which is not safe beside
threads.

So nothing of sqlsem or its dependencies is imported here: the guard has to be small and quick.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

__all__ = ["MARKS", "POSIX", "Tree", "children", "end", "send"]

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
    for one in environment.split(b"\0"):
        name, _, value = one.partition(b"=")
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


def main(patience: float) -> None:
    """Remember whom to end, and end it when the pipe closes."""
    tree = Tree(0, False, "", None)
    for line in sys.stdin:
        root, whole, mark = line.split()
        tree = Tree(int(root), whole == "1", mark, None)

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
        end(tree, patience, ended)


if __name__ == "__main__":
    for _name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        signal.signal(getattr(signal, _name), signal.SIG_IGN)
    main(float(sys.argv[1]))
