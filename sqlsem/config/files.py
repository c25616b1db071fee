"""Reads files with settings or secrets: opens each once, follows no links, and checks the open file itself.

A path that is checked first and read later may lead to another file by then. So a `Folder` is opened, and files are
opened in it; owner, mode and size are read from the open file. All code that reads settings or secrets uses this
module.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sqlsem.values.errors import ConfigurationError

#: The largest file that is read.
MAX_BYTES = 1_000_000
#: Attempts to read a file that is written at the same time.
ATTEMPTS = 3
_BY_DESCRIPTOR = os.name == "posix" and os.open in os.supports_dir_fd
_CLOSED = getattr(os, "O_CLOEXEC", 0)
# O_PATH: a folder that may be passed through, but not listed, can be opened as well.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | _CLOSED
_FILE = os.O_RDONLY | _CLOSED
for _name in ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"):  # O_NONBLOCK: a pipe must not keep us waiting
    _FILE |= getattr(os, _name, 0)


class Unfit(ConfigurationError):
    """A file that is not read: it is a link, no regular file, too large, or changes all the time."""


class _Changed(Exception):
    """The file was written while it was read."""


@dataclass(frozen=True)
class Content:
    """A file that was read."""

    path: Path
    data: bytes
    status: os.stat_result
    folder: os.stat_result

    @property
    def others(self) -> str | None:
        """Say which other user can change the file (not the administrator); None if there is none."""
        return _writers(self.path, self.status) or _writers(self.path.parent, self.folder, sticky=True)

    @property
    def readable_by_others(self) -> bool:
        """True if other users can read the file."""
        return os.name == "posix" and bool(self.status.st_mode & (stat.S_IROTH | stat.S_IRGRP))


class Folder:
    """An open folder. Files are opened in it, even if its path leads to another folder by now."""

    def __init__(self, path: Path, within: Folder | None = None) -> None:
        """Open the folder ``path``; with ``within``, the parent folder of that one (``path`` must be its path)."""
        self.path = path
        self._fd: int | None = None
        if _BY_DESCRIPTOR:
            if within is None:
                self._fd = os.open(path, _FOLDER)
            else:
                self._fd = os.open("..", _FOLDER, dir_fd=within._fd)
        self.status = os.stat(path) if self._fd is None else os.fstat(self._fd)

    @property
    def others(self) -> str | None:
        """Say which other user can put a file into the folder (not the administrator); None if there is none."""
        return _writers(self.path, self.status)

    def read(self, name: str, maximum: int = MAX_BYTES) -> Content:
        """Read a file of the folder.

        Raises `OSError` if the file cannot be opened, and `Unfit` if it must not be read.
        """
        for _ in range(ATTEMPTS):
            with contextlib.suppress(_Changed):
                return self._read(name, maximum)
        raise Unfit(f"{self.path / name} is being written; try again when that is done")

    def _read(self, name: str, maximum: int) -> Content:
        path = self.path / name
        if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():
            raise Unfit(f"{path} is a link, and links are not followed")
        try:
            fd = os.open(path, _FILE) if self._fd is None else os.open(name, _FILE, dir_fd=self._fd)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.EMLINK):
                raise Unfit(f"{path} is a link, and links are not followed") from exc
            if exc.errno in (errno.ENXIO, errno.EOPNOTSUPP):  # a socket, a device without its driver
                raise Unfit(f"{path} is not a regular file") from exc
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise Unfit(f"{path} is not a regular file")
            _require_small(path, status.st_size, maximum)
            parts, length = [], 0
            while length <= maximum and (part := os.read(fd, maximum + 1 - length)):
                parts.append(part)
                length += len(part)
            after = os.fstat(fd)
        finally:
            os.close(fd)
        _require_small(path, length, maximum)
        if (after.st_mtime_ns, after.st_ctime_ns, after.st_size) != (status.st_mtime_ns, status.st_ctime_ns, length):
            raise _Changed
        return Content(path, b"".join(parts), after, self.status)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _require_small(path: Path, size: int, maximum: int) -> None:
    if size > maximum:
        raise Unfit(f"{path} is larger than {maximum:,} bytes, and is not read")


def read(path: Path, maximum: int = MAX_BYTES) -> Content:
    """Read a file that the user has named: links to it are followed, to the end, before anything is opened.

    Raises as `Folder.read`.
    """
    real = Path(os.path.realpath(path))
    with Folder(real.parent) as folder:
        return folder.read(real.name, maximum)


def writable_by_others(path: Path) -> str | None:
    """Say which other user can change a file or a folder (not the administrator); None if there is none.

    In a folder like ``/tmp`` other users cannot change a file of this user, but they can put files into the folder.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        return _writers(path, status)
    return _writers(path, status) or _writers(path.parent, path.parent.stat(), sticky=True)


def _writers(path: Path, status: os.stat_result, *, sticky: bool = False) -> str | None:
    """Say which other user can write to a file or folder; with ``sticky``, replace this user's files in a folder."""
    if os.name != "posix":
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {_user(status.st_uid)}"
    if sticky and status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & stat.S_IWOTH:
        return f"everybody can write to {path}"
    if status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid, status.st_uid):
        return f"group {status.st_gid} can write to {path}"
    return None


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _is_private(gid: int, uid: int) -> bool:
    """Return True if a group has only this user: many systems give each user such a group."""
    import grp

    if gid == 0:
        return True
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == _user(uid) and not set(group.gr_mem) - {_user(uid)}
