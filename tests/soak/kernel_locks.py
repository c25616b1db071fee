"""The kernel's own locks as a second judge, independent of sqlsem, and the book in which all processes write."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from support.journals import Journal

#: Seconds for which an entrant waits until those before it have tried all files.
TURNSTILE_SECONDS = 0.5


def holders(descriptor: int) -> list[int]:
    """Return the processes with a flock on the file, by the kernel's list. (None, if it was released since.)"""
    inode = os.fstat(descriptor).st_ino
    pids = []
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and int(words[5].rpartition(":")[2]) == inode:
            pids.append(int(words[4]))
    return pids


class KernelLocks:
    """Takes a flock(2) for each critical section, without waiting: a refusal means that another process is in it.

    A limit of three is three files, of which one must be free; readers share one. A refusal is recorded, and the
    section goes on: the cause is found out afterwards, when it is known which processes were asleep.

    Several files are tried one after the other. The entrant holds the turnstile meanwhile, so files found taken were
    all taken when it tried the first of them.
    """

    def __init__(self, folder: str | Path, book: Journal) -> None:
        self._folder, self._book = Path(folder), book
        self._files: dict[str, list[int]] = {}  # kept open: reopening would cost a system call each time
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def enter(self, resource: str, *, access: str = "write", places: int = 1) -> Iterator[None]:
        mode = fcntl.LOCK_SH if access == "read" else fcntl.LOCK_EX
        with self._turnstile(resource) if places > 1 else contextlib.nullcontext(True) as alone:
            taken = self._take(resource, mode, places) if alone else None
        if taken is None:
            yield
            return
        try:
            yield
        finally:
            self._leave(*taken)

    def _take(self, resource: str, mode: int, places: int) -> tuple[str, int] | None:
        """Return a free file; None if all are taken, which is recorded."""
        first, refused, tried = random.randrange(places), [], time.monotonic()
        for number in range(places):
            file = f"{resource}.{(first + number) % places}"
            descriptor = self._open(file)
            try:
                fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
            except BlockingIOError:
                refused += holders(descriptor)
                self._close(file, descriptor)
                continue
            return file, descriptor
        self._book.note(what="refused", resource=resource, tried=tried, at=time.monotonic(), holders=refused)
        return None

    def _leave(self, file: str, descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        self._close(file, descriptor)

    @contextlib.contextmanager
    def _turnstile(self, resource: str) -> Iterator[bool]:
        """Return True if this entrant got the turnstile soon. (Its holder may be asleep. Then this section goes
        unjudged.)
        """
        file = f"{resource}.turnstile"
        descriptor, alone, deadline = self._open(file), False, time.monotonic() + TURNSTILE_SECONDS
        while not alone and time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                time.sleep(0.001)
        try:
            yield alone
        finally:
            self._leave(file, descriptor)

    def _open(self, file: str) -> int:
        with self._guard:
            descriptors = self._files.get(file)
            if descriptors:
                return descriptors.pop()
        return os.open(self._folder / file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _close(self, file: str, descriptor: int) -> None:
        with self._guard:
            self._files.setdefault(file, []).append(descriptor)
