"""The checks of `sqlsem doctor` on SQLite."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sqlite3
import stat
from pathlib import Path

from sqlsem.engines.base import Busy
from sqlsem.engines.doctor import Doctor
from sqlsem.engines.protocol import Check
from sqlsem.engines.sqlite import fork, wal
from sqlsem.engines.sqlite.connection import SqliteConnection
from sqlsem.engines.sqlite.users import user_name
from sqlsem.values.errors import Unavailable

#: The types of network file systems.
NETWORK = "nfs cifs smb 9p afs ceph lustre gpfs beegfs gluster ncpfs davfs sshfs s3fs rclone gcsfuse juicefs"


class SqliteDoctor(Doctor):
    """Checks of a file, its folder and its file system."""

    def __init__(self, session: SqliteConnection) -> None:
        super().__init__(session.engine)
        self._session = session
        self._path = session.engine.path
        self._beacons = session.engine.beacons

    def driver(self) -> Check:
        modern = sqlite3.sqlite_version_info >= (3, 35)
        mend = "" if modern else "Use a Python whose SQLite is 3.35 or later (sqlite3.sqlite_version)."
        detail = f"SQLite {sqlite3.sqlite_version} of Python {platform.python_version()}"
        if wal.MUST_BE_ALONE:
            detail += "; its WAL-reset bug is worked around here (other programs that write this file want 3.51.3)"
        return Check("driver", modern, detail, mend)

    def file_system(self) -> Check:
        # The file is on the file system of the longest mount point that contains it (Linux only).
        mount_point, kind = "", ""
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
                _, point, fstype, *_ = line.split(" ")
                point = point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
                if len(point) >= len(mount_point) and self._path.resolve().is_relative_to(point):
                    mount_point, kind = point, fstype
        remote = kind.removeprefix("fuse.").startswith(tuple(NETWORK.split()))
        mend = "Locks of files cannot be trusted there. Use a local path, or a database server ($SQLSEM_URL)."
        detail = f"{kind} on {mount_point}" if kind else "not known on this system; it must be a local one"
        return Check("file system", not remote, detail, mend if remote else "")

    def journal(self) -> Check:
        mode = self._session.rows_of_text(self.texts["journal_mode"])[0]["journal_mode"]
        mend = "" if mode == "wal" else "Close every program that has the file open, and run this again."
        detail = f"journal_mode is {mode}"
        if mode == "wal" and self._session.log_is_protected:
            detail += "; no other program can remove the log while it is used"
        elif mode == "wal":
            detail += "; a program that opens and closes the file itself may lose its locks (they are declared lost)"
        return Check("journal", mode == "wal", detail, mend)

    def writable(self) -> Check:
        try:
            with fork.forks_blocked, self._session.transaction():
                pass
        except Busy as exc:
            return Check("writable", False, str(exc), "Find the program with a long transaction on this file.")
        except Unavailable as exc:
            return Check("writable", False, str(exc), "Make the file and its folder writable for this user.")
        files = [file for file in (self._path, self._path.parent) if not os.access(file, os.W_OK)]
        mend = f"Make {' and '.join(map(str, files))} writable." if files else ""
        return Check("writable", not files, "the file and its folder" if not files else "not everything is", mend)

    def access(self) -> Check | None:
        return Check("access", *_access(self._path)) if os.name == "posix" else None

    def beacon(self) -> Check:
        foreign_owner = self._owner_of_beacons()
        if foreign_owner is not None:
            folder = self._beacons.folder
            mend = f"Stop all programs that use the database, and remove the folder: rm -r {folder}"
            return Check("beacon", False, f"{folder} belongs to {foreign_owner}, who does not own the database", mend)
        try:
            beacon = self._beacons.create()
            try:
                with self._beacons.probe(beacon.name) as probe:
                    held = probe.held is True
            finally:
                beacon.remove()
        except Unavailable as exc:
            return Check("beacon", False, str(exc), f"Make the folder {self._beacons.folder} writable for this user.")
        mend = "" if held else "This file system does not lock files; use a local one."
        detail = "a lock on a file excludes others" if held else "a locked file does not look locked"
        return Check("beacon", held, detail, mend)

    def _owner_of_beacons(self) -> str | None:
        """Return the owner of the beacons' folder if that is another user: it could remove beacons."""
        if os.name != "posix":
            return None
        try:
            owner = self._beacons.folder.lstat().st_uid
        except OSError:
            return None
        return None if owner in (os.geteuid(), self._path.stat().st_uid, 0) else user_name(owner)

    def disk(self) -> Check:
        left = shutil.disk_usage(self._path.parent).free / 2**20
        detail = f"{left / 1024:,.1f} GB free" if left >= 1024 else f"{left:,.0f} MB free"
        return Check(
            "disk", left >= 10, detail, "" if left >= 100 else "Free some room: with a full disk nothing is granted."
        )


def _access(path: Path) -> tuple[bool, str, str]:
    """Return the result of the check of the file's permissions: ok, detail and remedy."""
    found, folder = path.stat(), path.parent.stat()
    writes = reads = ""
    for who, read, write, enter in (
        (f"everybody in group {_group_name(found.st_gid)}", stat.S_IRGRP, stat.S_IWGRP, stat.S_IXGRP),
        ("everybody on this host", stat.S_IROTH, stat.S_IWOTH, stat.S_IXOTH),
    ):
        if folder.st_mode & enter:
            writes = who if found.st_mode & write else writes
            reads = who if found.st_mode & read else reads
    if writes:
        return (
            True,
            f"{writes} may write it",
            f"An SQLite file knows no roles: who may write it may take, keep and remove every lock, and put tasks "
            f"that workers run. If that is not meant: chmod 600 {path}",
        )
    if reads:
        return True, f"{user_name(found.st_uid)} may write it; {reads} may read names, notes and tasks", ""
    return True, f"only {'this user' if found.st_uid == os.geteuid() else user_name(found.st_uid)} (and root)", ""


def _group_name(number: int) -> str:
    import grp

    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
