"""SQLite's beacons: one empty file for each member, in a folder beside the database, locked while the member lives.

All participants can write the table that names the beacons, and other users may be able to write the folder. So the
table holds a *name*, never a path. No link is followed. Only regular files in the folder itself are opened; opening one
never truncates it, and never waits. Only an empty file is removed, right after it was found unlocked.

A beacon that cannot be tested (a file of another user) counts as held: only a free lock proves that its holder is dead.
A file that can never have been a beacon (a link, a pipe, a folder, a file with content) counts as missing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sqlsem.engines.statements.session import Probe
from sqlsem.util import late
from sqlsem.values.errors import Unavailable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import filelock

log = logging.getLogger("sqlsem")

_NAME = re.compile(r"[0-9a-f]{32}")
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_FILE |= getattr(os, "O_NOCTTY", 0)
#: The errors for a name without a beacon that could ever have been tested.
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO}
_own_beacons: weakref.WeakSet[Beacon] = weakref.WeakSet()


class Beacon:
    """A beacon that this process holds."""

    def __init__(self, beacons: Beacons, name: str, lock: int | filelock.BaseFileLock) -> None:
        self.name = name
        self._beacons = beacons
        self._lock: int | filelock.BaseFileLock | None = lock
        self.touched_at = time.monotonic()
        _own_beacons.add(self)

    def touch(self) -> None:
        """Set the file's time to now."""
        if self._lock is None:
            return
        self.touched_at = time.monotonic()
        # (Only to display the time of death. Whether a member is dead, the lock decides.)
        with contextlib.suppress(OSError):
            os.utime(self._lock if isinstance(self._lock, int) else self._beacons.folder / self.name)

    @property
    def in_place(self) -> bool:
        """False if the file was removed or replaced, so that other processes cannot test it."""
        if not isinstance(self._lock, int):
            return os.path.lexists(self._beacons.folder / self.name)
        with self._beacons._open() as folder:
            return folder is not None and _same(folder, self.name, os.fstat(self._lock))

    def remove(self) -> None:
        """Unlock and remove the file. Idempotent; never raises."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        with contextlib.suppress(OSError):
            if isinstance(lock, int):
                # Remove it before it is unlocked: a free lock would prove that the member is dead, but its row
                # still exists.
                with self._beacons._open() as folder:
                    if folder is not None and _same(folder, self.name, os.fstat(lock)):
                        os.unlink(self.name, dir_fd=folder)
            else:
                lock.release()
                os.unlink(self._beacons.folder / self.name)
        if isinstance(lock, int):
            os.close(lock)

    def release(self) -> None:
        """Unlock the file and leave it: the free lock proves that its member is dead."""
        lock, self._lock = self._lock, None
        if isinstance(lock, int):
            os.close(lock)
        elif lock is not None:
            lock.release()

    def discard(self) -> None:
        """Close the inherited descriptor in a forked child; the parent's lock stays."""
        lock, self._lock = self._lock, None
        if isinstance(lock, int):
            os.close(lock)

    __del__ = discard


class _Free(Probe):
    """A beacon with a free lock, which stays locked by the tester until the end of the ``with`` block. No process can
    take it meanwhile, because each name is used once.
    """

    def __init__(self, folder: int, name: str, fd: int, status: os.stat_result) -> None:
        super().__init__(False, status.st_mtime)
        self._folder, self._name, self._fd, self._status = folder, name, fd, status

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            if _same(self._folder, self._name, self._status):
                os.unlink(self._name, dir_fd=self._folder)

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # (Closing is not enough: a fork may have copied the descriptor.)
        os.close(self._fd)
        os.close(self._folder)


class _FreeByPath(Probe):
    """A beacon with a free lock, on systems without descriptors of folders."""

    def __init__(self, path: Path, lock: filelock.BaseFileLock, status: os.stat_result) -> None:
        super().__init__(False, status.st_mtime)
        self._path, self._lock = path, lock

    def remove(self) -> None:
        self._lock.release()  # (These systems cannot remove an open file.)
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class Beacons:
    """The beacons of one database. ``by_path``: open files by their paths, because Windows has no descriptors of
    folders.
    """

    def __init__(self, database: Path, *, private: bool = False, by_path: bool = fcntl is None) -> None:
        # The folder is beside the file itself, not beside a link to it: all processes must find the same folder.
        self._database = Path(os.path.realpath(database))
        self.folder = self._database.with_name(self._database.name + "-members")
        self._private = private
        self._by_path = by_path
        self._warned = False

    # -- this process's beacons

    def create(self) -> Beacon:
        """Create and hold a new beacon. Raises `Unavailable` if that fails."""
        try:
            self._make_folder()
            for _ in range(3):  # (Another user that reads the folder may lock the file first.)
                name = os.urandom(16).hex()
                lock = self._lock_by_path(name) if self._by_path else self._create(name)
                if lock is not None:
                    return Beacon(self, name, lock)
        except OSError as exc:
            raise Unavailable(
                f"Cannot lock a file in {self.folder}: {exc}; check its permissions", code="sqlite-file"
            ) from exc
        raise Unavailable(
            f"Cannot lock a file in {self.folder}: other programs lock each new one; find them (fuser)",
            code="sqlite-file",
        )

    def _create(self, name: str) -> int | None:
        with self._open() as folder:
            if folder is None:
                raise FileNotFoundError(errno.ENOENT, "it is not a folder (links are not followed)")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE
            fd = os.open(name, flags, 0o600, dir_fd=folder)
            try:
                self._adopt(fd, folder=False)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException as exc:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                os.close(fd)
                if isinstance(exc, BlockingIOError):
                    return None
                raise
            return fd

    def _lock_by_path(self, name: str) -> filelock.BaseFileLock | None:
        """Lock the file of a beacon, created if it is missing; return None if another process has the lock."""
        with late.importing:
            import filelock  # for systems without descriptors of folders; it loads asyncio
        lock = filelock.FileLock(self.folder / name, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return None
        return lock

    def _make_folder(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.folder, 0o700)
            if not self._by_path:
                with self._open() as folder:
                    if folder is not None:
                        self._adopt(folder, folder=True)

    def _adopt(self, fd: int, *, folder: bool) -> None:
        """Give a new file or folder the owner and the write permissions of the database: all its writers must be able
        to test beacons. (Its readers get no permission: a process that can open a file can lock it, and then a dead
        member would seem alive.)
        """
        if self._private:
            return
        database = os.stat(self._database)
        own = os.fstat(fd)
        if (database.st_uid, database.st_gid) != (own.st_uid, own.st_gid):
            with contextlib.suppress(OSError):  # only root may change the owner, others only to a group of their own
                os.chown(fd, database.st_uid if os.geteuid() == 0 else -1, database.st_gid)
        mode = 0o700 if folder else 0o600
        for write, rights in ((stat.S_IWGRP, 0o070), (stat.S_IWOTH, 0o007)):
            if database.st_mode & write:
                mode |= rights if folder else rights & 0o066
        os.fchmod(fd, mode | stat.S_IMODE(own.st_mode) & stat.S_ISGID)

    # -- all beacons

    def probe(self, name: object) -> Probe:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return Probe(None)
        try:
            return self._probe_by_path(name) if self._by_path else self._probe(name)
        except OSError as exc:
            if exc.errno in _NOT_THERE:
                return Probe(None)
            if not self._warned:
                self._warned = True
                log.warning(
                    "Cannot test the beacon %s in %s: %s; its holder is believed to live. Check the permissions, or "
                    "take the row away with: sqlsem revoke POSITION --force",
                    name,
                    self.folder,
                    exc,
                )
            return Probe(True)

    def _probe(self, name: str) -> Probe:
        folder = os.open(self.folder, os.O_RDONLY | _FOLDER)
        fd = -1
        try:
            if not _is_beacon(os.stat(name, dir_fd=folder, follow_symlinks=False)):
                return Probe(None)
            fd = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
            status = os.fstat(fd)
            if not _is_beacon(status):
                return Probe(None)
            try:
                # A shared lock: else two testers would take each other for the holder.
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Probe(True, status.st_mtime)
            free = _Free(folder, name, fd, status)
            folder = fd = -1
            return free
        finally:
            for descriptor in (folder, fd):
                if descriptor >= 0:
                    os.close(descriptor)

    def _probe_by_path(self, name: str) -> Probe:
        path = self.folder / name
        if not stat.S_ISDIR(os.lstat(self.folder).st_mode) or not _is_beacon(status := os.lstat(path)):
            return Probe(None)
        lock = self._lock_by_path(name)
        return Probe(True, status.st_mtime) if lock is None else _FreeByPath(path, lock, status)

    def held(self) -> list[str]:
        """Return the names of all held beacons, including those that are not in the table."""
        held = []
        for name in self.names():
            with self.probe(name) as probe:
                if probe.held:
                    held.append(name)
        return held

    def names(self) -> list[str]:
        """Return the names of all beacons, held or not."""
        try:
            return [name for name in os.listdir(self.folder) if _NAME.fullmatch(name)]
        except OSError:
            return []

    @contextlib.contextmanager
    def _open(self) -> Iterator[int | None]:
        """Open the folder; yield None if it is missing or no folder."""
        try:
            folder = os.open(self.folder, os.O_RDONLY | _FOLDER)
        except OSError as exc:
            if exc.errno not in _NOT_THERE:
                raise
            yield None
            return
        try:
            yield folder
        finally:
            os.close(folder)


def _is_beacon(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def _same(folder: int, name: str, known: os.stat_result) -> bool:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return _is_beacon(status) and (status.st_dev, status.st_ino) == (known.st_dev, known.st_ino)


def _after_fork_in_child() -> None:
    # A lock lasts until its last descriptor is closed, and the child's copies must not outlive the parent.
    for beacon in list(_own_beacons):
        beacon.discard()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
