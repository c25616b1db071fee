"""The files that a connection has open: the database, its ``-wal`` and its ``-shm``.

SQLite coordinates by locks on these files. Two connections exclude each other only while both have the same three
files open. If a file is deleted, renamed, replaced or truncated, connections that opened it before and connections that
open it later no longer exclude each other, and SQLite reports no error. So `OpenFiles` stores the device and inode of
each file, and compares them with those of the paths after each transaction.

A process loses all its POSIX locks on a file when it closes any descriptor of that file, for example by
``open(path).read()``. The next process that closes the database would then take itself for the last one, and delete
``-wal`` and ``-shm``. `protect_log` holds locks that stay when other descriptors are closed (open file description
locks, on Linux).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import stat
import struct
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from sqlsem.engines.base import Disconnected
from sqlsem.engines.failures import Replaced
from sqlsem.engines.sqlite.users import user_name
from sqlsem.values.errors import ConfigurationError, Unavailable

try:
    import fcntl
except ImportError:  # Windows, where a file that is open can be neither deleted nor renamed
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("sqlsem")

#: The suffixes of the files that SQLite opens, follows or deletes beside a database.
BESIDE = ("-journal", "-wal", "-shm")
#: While this byte is locked, SQLite believes that a process is still writing a journal, and ignores the journal.
_RESERVED_BYTE = (0x40000000 + 1, 1)
#: Device and inode.
Identity = tuple[int, int]
_SET_LOCK: int | None = getattr(fcntl, "F_OFD_SETLK", None) if sys.platform == "linux" else None
#: By the suffix of the file: the bytes (first, number) that SQLite itself locks in shared mode while a connection is
#: open. The lock in the database keeps other processes from deleting ``-wal``, the lock in ``-shm`` from initialising
#: it again.
_KEPT_BYTES = {"": (0x40000000 + 2, 510), "-shm": (128, 1)}
#: If a folder was unchanged for this long, its next change gives it other times. The first number is for file systems
#: that count parts of a millisecond, the second for all others.
_SETTLED_NS, _SETTLED_COARSE_NS = 1_000_000_000, 5_000_000_000
_DESCRIPTORS = "/proc/self/fd"


class OpenFiles:
    """The files of one connection that has read once. ``before``: the result of `identify` before it was opened."""

    __slots__ = ("_folder", "_folder_asked", "_folder_when_compared", "_is_link", "_known", "database", "names", "path")

    #: The files of the latest connection to each path that were found among the descriptors of this process.
    _verified: ClassVar[dict[str, tuple[tuple[str, int, int, int], ...]]] = {}

    def __init__(self, path: Path, before: Identity | None, *, wal: bool, read_only: bool) -> None:
        self.path = path
        real = os.path.realpath(path)
        # Each change of a name in a folder changes the folder's times. So if the times are those of the last
        # comparison, the files are the same, provided that the folder had not changed right before that comparison.
        self._folder = os.path.dirname(real)
        self._folder_when_compared: tuple[int, int, int, int] | None = None
        self._folder_asked = -math.inf
        self._is_link = os.path.islink(path)  # its target is in another folder
        #: By their suffixes.
        self.names = {"": str(path), "-wal": f"{real}-wal", "-shm": f"{real}-shm"} if wal else {"": str(path)}
        if os.name != "posix":
            self.names = {}
        known = []
        for suffix, name in self.names.items():
            try:
                found = os.stat(name)
            except FileNotFoundError:
                if suffix and read_only:  # a reader cannot create them
                    continue
                raise Disconnected(f"{name} was removed while it was opened") from None
            known.append((name, found.st_ino, found.st_dev, int(suffix != "-wal")))
        self._known = tuple(known)
        #: Device and inode of the database.
        self.database: Identity | None = (known[0][2], known[0][1]) if known else None
        if before not in (None, self.database) or not self._are_open():
            raise Disconnected(f"SQLite file {path} was replaced while it was opened")

    def require_in_place(self) -> None:
        """Raise `Replaced` unless the paths still lead to the files that are open."""
        if self._folder_when_compared is None or _stamp(self._folder) != self._folder_when_compared:
            self.compare()

    def compare(self) -> None:
        """Raise `Replaced` as `require_in_place` does, but compare file by file, and find truncated files, too."""
        stamp, was_settled, self._folder_when_compared = None, self._folder_when_compared is not None, None
        now = time.monotonic()
        # (Seldom, if the folder changes often.)
        if (was_settled or now - self._folder_asked > _SETTLED_NS / 2e9) and not self._is_link:
            self._folder_asked = now
            stamp = _settled(self._folder)
        name = ""
        try:
            for name, inode, device, size in self._known:
                found = os.stat(name)
                if found.st_ino != inode or found.st_dev != device:
                    raise self._replaced(f"{name} is another file now")
                if found.st_size < size:
                    raise self._replaced(f"{name} was truncated")
        except Replaced:
            raise
        except OSError as exc:
            raise self._replaced(f"{name} cannot be found any more ({exc.strerror})") from None
        self._folder_when_compared = stamp

    def require_same(self, others: OpenFiles) -> None:
        """Raise `Replaced` unless another connection has the same files open."""
        known = {name: found for name, *found in others._known}
        for name, *found in self._known:
            if known.get(name, found) != found:
                raise self._replaced(f"{name} is another file now")

    def without_log(self) -> OpenFiles:
        """Return the files that must stay while the connection is closed: the database, but not the log."""
        files = copy.copy(self)
        files._known = self._known[:1]
        return files

    def identity(self, suffix: str) -> Identity | None:
        """Return device and inode of the file with this suffix."""
        name = self.names.get(suffix)
        return next(((device, inode) for known, inode, device, _ in self._known if known == name), None)

    def _replaced(self, what: str) -> Replaced:
        return Replaced(
            f"SQLite file {self.path} was replaced, truncated or moved while it was in use: {what}. Stop every "
            f"program that uses a database before its files are touched"
        )

    def _are_open(self) -> bool:
        """Return True if this process has all the files open, as far as the system shows that."""
        if self._verified.get(str(self.path)) == self._known or not os.path.isdir(_DESCRIPTORS):
            return True
        found = {(descriptor.st_ino, descriptor.st_dev) for descriptor in _stats_of_descriptors().values()}
        if not found.issuperset((inode, device) for _, inode, device, _ in self._known):
            return False
        self._verified[str(self.path)] = self._known
        return True


def _stamp(folder: str) -> tuple[int, int, int, int] | None:
    """Return a value that changes when a name in a folder changes; None if the folder cannot be read."""
    try:
        found = os.stat(folder)
    except OSError:
        return None
    return found.st_ino, found.st_dev, found.st_mtime_ns, found.st_ctime_ns


def _settled(folder: str) -> tuple[int, int, int, int] | None:
    """Return the stamp of a folder whose names have been unchanged for long enough, or None."""
    stamp = _stamp(folder)
    if stamp is None:
        return None
    settled = _SETTLED_NS if all(moment % 1_000_000 for moment in stamp[2:]) else _SETTLED_COARSE_NS
    return stamp if time.time_ns() - max(stamp[2:]) > settled else None


def identify(path: Path) -> Identity | None:
    """Return device and inode of a database; None if it is missing. Raises `ConfigurationError` if the path, or that of
    a file beside it, leads to a file that SQLite cannot have created.
    """
    if os.name != "posix":
        return None
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise Unavailable(f"Cannot open {path}: {exc}; check the path and its permissions", code="sqlite-file") from exc
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(
            f"{path} is {_kind(found)}, not an SQLite database; name another file", code="sqlite-file"
        )
    _require_one_name(str(path), found)
    real = os.path.realpath(path)
    for suffix in BESIDE:
        _require_ours(f"{real}{suffix}", found, suffix)
    return found.st_dev, found.st_ino


def _require_ours(name: str, database: os.stat_result, suffix: str) -> None:
    try:
        found = os.lstat(name)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(
            f"{name} is {_kind(found)}; SQLite would follow or wait for it. Remove it", code="sqlite-file"
        )
    _require_one_name(name, found)
    # SQLite trusts a journal: it writes its content into the database, and deletes the file that it names.
    if suffix == "-journal" and found.st_uid not in (os.geteuid(), database.st_uid, 0):
        raise ConfigurationError(
            f"{name} belongs to {user_name(found.st_uid)}, who does not own the database: SQLite would do what stands "
            f"in it, and delete any file that it names. Remove it",
            code="sqlite-file",
        )


def _require_one_name(name: str, found: os.stat_result) -> None:
    if found.st_nlink > 1:
        raise ConfigurationError(
            f"{name} has {found.st_nlink} names (hard links); programs that open a database by different names do not "
            f"exclude each other. Remove the other names (find {os.path.dirname(name)} -xdev -inum {found.st_ino})",
            code="sqlite-file",
        )


def _kind(found: os.stat_result) -> str:
    """Return the kind of a file for messages."""
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(found.st_mode), "a device")


# -- protecting the log --------------------------------------------------------------------------------------------
# Closing a descriptor drops the POSIX locks of all connections of this process to that file, also those of the
# program's own connections. So a descriptor is closed only if no other one of that file is open. The caller holds
# `fork.forks_blocked`.


class _LockedFile:
    """A descriptor whose file is locked for some sessions."""

    def __init__(self, fd: int, place: tuple[int, int]) -> None:
        self.fd = fd
        self._place = place
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self.is_locked = False

    def lock(self, kind: int, place: tuple[int, int] | None = None) -> None:
        """Lock (`fcntl.F_RDLCK`) or unlock (`fcntl.F_UNLCK`) bytes; by default those of `_KEPT_BYTES`."""
        assert _SET_LOCK is not None
        fcntl.fcntl(self.fd, _SET_LOCK, struct.pack("hhqqi4x", kind, os.SEEK_SET, *(place or self._place), 0))
        if place is None:
            self.is_locked = kind == fcntl.F_RDLCK


_locked_files: dict[Identity, _LockedFile] = {}


def protect_log(files: OpenFiles, user: object) -> bool:
    """Keep other programs from deleting ``-wal`` and ``-shm`` until `unprotect_log`. Return False if that is not
    possible.
    """
    if _SET_LOCK is None:
        return False
    try:
        for suffix, place in _KEPT_BYTES.items():
            identity = files.identity(suffix)
            if identity is None:
                return False
            kept = _locked_file(files.names[suffix], identity, place)
            if kept is None:
                return False  # the file was replaced just now, as the next transaction will notice
            if not kept.is_locked:
                kept.lock(fcntl.F_RDLCK)
            kept.users.add(user)
    except OSError as exc:
        log.debug("Cannot protect %s and %s from being deleted: %s", *list(files.names.values())[1:], exc)
        return False
    return True


def _locked_file(name: str, identity: Identity, place: tuple[int, int]) -> _LockedFile | None:
    """Return the locked descriptor of a file; None if the name leads to another file now."""
    if identity not in _locked_files:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(fd)
        _locked_files[found.st_dev, found.st_ino] = _LockedFile(fd, place)
    return _locked_files.get(identity)


@contextlib.contextmanager
def no_journal(path: Path, identity: Identity | None) -> Iterator[None]:
    """Make SQLite ignore a journal that appears after `identify`, during a connection's first read. sqlsem's databases
    need no journal. (If one existed before, a dead process left it, and `identify` has accepted it.)
    """
    kept = None
    if _SET_LOCK is not None and identity is not None and not os.path.lexists(f"{os.path.realpath(path)}-journal"):
        with contextlib.suppress(OSError):
            kept = _locked_file(str(path), identity, _KEPT_BYTES[""])
            if kept is not None:
                kept.lock(fcntl.F_RDLCK, _RESERVED_BYTE)
    try:
        yield
    finally:
        if kept is not None:
            kept.lock(fcntl.F_UNLCK, _RESERVED_BYTE)


def unprotect_log(user: object) -> None:
    """End the protection of the log for ``user``, so that the last connection to close can delete it."""
    for kept in _locked_files.values():
        kept.users.discard(user)
        if kept.is_locked and not kept.users:
            with contextlib.suppress(OSError):
                kept.lock(fcntl.F_UNLCK)


def close_unused() -> None:
    """Close the descriptors that no session uses."""
    unused = {identity: kept for identity, kept in _locked_files.items() if not kept.users}
    if not unused:
        return
    others = _stats_of_descriptors(without={kept.fd for kept in _locked_files.values()})
    still_open = {(descriptor.st_dev, descriptor.st_ino) for descriptor in others.values()}
    for identity, kept in unused.items():
        if identity not in still_open:
            del _locked_files[identity]
            os.close(kept.fd)


def _stats_of_descriptors(without: frozenset[int] | set[int] = frozenset()) -> dict[int, os.stat_result]:
    """Return the open files of this process, by descriptor."""
    stats = {}
    for name in os.listdir(_DESCRIPTORS):
        if int(name) not in without:
            with contextlib.suppress(OSError):  # closed meanwhile
                stats[int(name)] = os.fstat(int(name))
    return stats


def _after_fork_in_child() -> None:
    # The locks belong to the parent's descriptors. A child has no POSIX locks to lose.
    for kept in _locked_files.values():
        with contextlib.suppress(OSError):
            os.close(kept.fd)
    _locked_files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
