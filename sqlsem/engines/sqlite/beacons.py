"""SQLite's beacons: one empty file for each member, in a folder beside the database, locked for as long as it lives.

The table that names them can be written by everybody who may take part, and the folder perhaps by more. So what stands
there is a *name*, never a path; no link is followed; nothing is opened but regular files in the folder itself, never
truncated, never waited for; and nothing is removed but an empty file that was just found to be locked by nobody.

Whatever cannot be looked at (a file of somebody else's) is believed to live: only a lock that is free says that its
holder is dead. What can never have been a beacon (a link, a pipe, a folder, a file with something in it) is not there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path

import filelock

from sqlsem.errors import Unavailable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Beacon", "Beacons", "Look"]

log = logging.getLogger("sqlsem")

_NAME = re.compile(r"[0-9a-f]{32}")
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_FILE |= getattr(os, "O_NOCTTY", 0)
#: What says that there is no beacon of that name, and there never was one that could be tested.
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO}
_lit: weakref.WeakSet[Beacon] = weakref.WeakSet()


class Beacon:
    """A beacon of ours, held."""

    def __init__(self, beacons: Beacons, name: str, lock: int | filelock.BaseFileLock) -> None:
        self.name = name
        self._beacons = beacons
        self._lock: int | filelock.BaseFileLock | None = lock
        self._touched = time.monotonic()
        _lit.add(self)

    def touch(self, seldom: float = 0.0) -> None:
        """Leave a sign of life, unless the last one is younger than ``seldom`` seconds."""
        now = time.monotonic()
        if self._lock is None or now - self._touched < seldom:
            return
        self._touched = now
        # (Only for people, who read when somebody died: the lock is what counts.)
        with contextlib.suppress(OSError):
            os.utime(self._lock if isinstance(self._lock, int) else self._beacons.folder / self.name)

    @property
    def in_place(self) -> bool:
        """Whether others find it: somebody may have cleaned up."""
        if not isinstance(self._lock, int):
            return os.path.lexists(self._beacons.folder / self.name)
        with self._beacons._open() as folder:
            return folder is not None and _same(folder, self.name, os.fstat(self._lock))

    def put_out(self) -> None:
        """Let go of it, and remove it. May be repeated; never raises."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        with contextlib.suppress(OSError):
            if isinstance(lock, int):
                # Removed first: nobody must find a free lock under the name of a member that is still there.
                with self._beacons._open() as folder:
                    if folder is not None and _same(folder, self.name, os.fstat(lock)):
                        os.unlink(self.name, dir_fd=folder)
            else:
                lock.release()
                os.unlink(self._beacons.folder / self.name)
        if isinstance(lock, int):
            os.close(lock)

    def let_go(self) -> None:
        """Let go of it, and leave the file: whoever finds it knows that its member is dead."""
        lock, self._lock = self._lock, None
        if isinstance(lock, int):
            os.close(lock)
        elif lock is not None:
            lock.release()

    def abandon(self) -> None:
        """In a forked child: close what was inherited. The parent's lock stays what it is."""
        lock, self._lock = self._lock, None
        if isinstance(lock, int):
            os.close(lock)

    __del__ = abandon


class Look:
    """What a test found, and kept as it was found until the end of the ``with`` block."""

    def __init__(self, held: bool | None, seen: float | None = None) -> None:
        #: True: its holder lives. False: nobody holds it any more. None: there is none of that name.
        self.held = held
        #: The last sign of life by the host's clock, in seconds since 1970, where there is a file.
        self.seen = seen

    def remove(self) -> None:
        """Remove the file, if it was found to be held by nobody and is still the same."""

    def __enter__(self) -> Look:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Let go of the file."""


class _Free(Look):
    """A file that nobody held, and that nobody can light meanwhile: names are used once."""

    def __init__(self, folder: int, name: str, fd: int, found: os.stat_result) -> None:
        super().__init__(False, found.st_mtime)
        self._folder, self._name, self._fd, self._found = folder, name, fd, found

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            if _same(self._folder, self._name, self._found):
                os.unlink(self._name, dir_fd=self._folder)

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # not only closed: a fork may have copied it just now
        os.close(self._fd)
        os.close(self._folder)


class _FreeByPath(Look):
    """The same where a file cannot be named by its folder's descriptor."""

    def __init__(self, path: Path, lock: filelock.BaseFileLock, found: os.stat_result) -> None:
        super().__init__(False, found.st_mtime)
        self._path, self._lock = path, lock

    def remove(self) -> None:
        self._lock.release()  # what is open cannot be removed there
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


class Beacons:
    """The beacons of one database. ``by_path``: without descriptors of folders, which Windows does not have."""

    def __init__(self, database: Path, *, private: bool = False, by_path: bool = fcntl is None) -> None:
        # Beside the file itself, wherever a link to it may be: all who use it must find the same folder.
        self._database = Path(os.path.realpath(database))
        self.folder = self._database.with_name(self._database.name + "-members")
        self._private = private
        self._by_path = by_path
        self._warned = False

    # -- ours

    def light(self) -> Beacon:
        """A new one, held. Raises `Unavailable` when that cannot be."""
        try:
            self._make_folder()
            for _ in range(3):  # (who may read the folder may come first, and be in the way)
                name = uuid.uuid4().hex
                lock = self._light_by_path(name) if self._by_path else self._light(name)
                if lock is not None:
                    return Beacon(self, name, lock)
        except OSError as exc:
            raise Unavailable(f"Cannot lock a file in {self.folder}: {exc}; check its permissions") from exc
        raise Unavailable(f"Cannot lock a file in {self.folder}: other programs lock each new one; find them (fuser)")

    def _light(self, name: str) -> int | None:
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

    def _light_by_path(self, name: str) -> filelock.BaseFileLock | None:
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
        """Give what was just made to whom the database belongs, for those who may write that: they have to test it.
        (Not to those who may only read: anyone who can open a file can lock it, and so keep the dead alive.)
        """
        if self._private:
            return
        of = os.stat(self._database)
        own = os.fstat(fd)
        if (of.st_uid, of.st_gid) != (own.st_uid, own.st_gid):
            with contextlib.suppress(OSError):  # only root may give away, others only to a group of theirs
                os.chown(fd, of.st_uid if os.geteuid() == 0 else -1, of.st_gid)
        mode = 0o700 if folder else 0o600
        for write, rights in ((stat.S_IWGRP, 0o070), (stat.S_IWOTH, 0o007)):
            if of.st_mode & write:
                mode |= rights if folder else rights & 0o066
        os.fchmod(fd, mode | stat.S_IMODE(own.st_mode) & stat.S_ISGID)

    # -- anybody's

    def look(self, name: object) -> Look:
        """Test the beacon of that name, which comes from a table that others write."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            return Look(None)
        try:
            return self._look_by_path(name) if self._by_path else self._look(name)
        except OSError as exc:
            if exc.errno in _NOT_THERE:
                return Look(None)
            if not self._warned:
                self._warned = True
                log.warning(
                    "Cannot test the beacon %s in %s: %s; its holder is believed to live. Check the permissions, or "
                    "take the row away with: sqlsem revoke POSITION --force",
                    name,
                    self.folder,
                    exc,
                )
            return Look(True)

    def _look(self, name: str) -> Look:
        folder = os.open(self.folder, os.O_RDONLY | _FOLDER)
        fd = -1
        try:
            if not _is_beacon(os.stat(name, dir_fd=folder, follow_symlinks=False)):
                return Look(None)
            fd = os.open(name, os.O_RDONLY | _FILE, dir_fd=folder)
            found = os.fstat(fd)
            if not _is_beacon(found):
                return Look(None)
            try:
                # Shared, so that two who test do not take each other for the holder.
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Look(True, found.st_mtime)
            free = _Free(folder, name, fd, found)
            folder = fd = -1
            return free
        finally:
            for one in (folder, fd):
                if one >= 0:
                    os.close(one)

    def _look_by_path(self, name: str) -> Look:
        path = self.folder / name
        if not stat.S_ISDIR(os.lstat(self.folder).st_mode):
            return Look(None)
        found = os.lstat(path)
        if not _is_beacon(found):
            return Look(None)
        lock = filelock.FileLock(path, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return Look(True, found.st_mtime)
        return _FreeByPath(path, lock, found)

    def held(self) -> list[str]:
        """The beacons that a living process holds, whether a table names them or not."""
        found = []
        for name in self.names():
            with self.look(name) as look:
                if look.held:
                    found.append(name)
        return found

    def names(self) -> list[str]:
        """The beacons that are there, held or not."""
        try:
            return [name for name in os.listdir(self.folder) if _NAME.fullmatch(name)]
        except OSError:
            return []

    @contextlib.contextmanager
    def _open(self) -> Iterator[int | None]:
        """The folder, to name files by; None when it is not there, or not a folder."""
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


def _is_beacon(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_size == 0


def _same(folder: int, name: str, known: os.stat_result) -> bool:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return _is_beacon(found) and (found.st_dev, found.st_ino) == (known.st_dev, known.st_ino)


def _after_fork_in_child() -> None:
    # The lock goes when the last descriptor of it does: the child's must not outlive the parent.
    for beacon in list(_lit):
        beacon.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
