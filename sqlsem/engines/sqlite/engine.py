"""An SQLite file: its URL, its permissions, and the opening of connections and sessions."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import urllib.parse
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

import platformdirs

from sqlsem.engines.base import Creator, Options, Session
from sqlsem.engines.failures import Replaced
from sqlsem.engines.sqlite import fork, wal
from sqlsem.engines.sqlite.beacons import Beacons
from sqlsem.engines.sqlite.files import OpenFiles, identify
from sqlsem.engines.sqlite.session import BorrowedSqliteSession, SqliteSession
from sqlsem.engines.sqlite.users import user_name
from sqlsem.engines.statements.session import StatementEngine
from sqlsem.values.errors import ConfigurationError, SchemaError, Unavailable
from sqlsem.values.locks import Ticket

log = logging.getLogger("sqlsem")


class SqliteEngine(StatementEngine):
    """An SQLite file."""

    name = "sqlite"
    session_class: ClassVar[type[SqliteSession]] = SqliteSession
    beacon_may_fail = False
    setup_timeout = None

    def __init__(self, url: str, options: Options, creator: Creator | None = None) -> None:
        super().__init__(url, options, creator)
        if creator is not None:
            raise ConfigurationError("SQLite takes a file, not creator=; write sqlite:///file.db")
        location, _, query = url.partition("://")[2].partition("?")
        location = urllib.parse.unquote(location)
        # (As in SQLAlchemy: three slashes before a relative path, four before an absolute one.)
        location = location[1:] if location.startswith("/") else location
        if not location or location == ":memory:":
            raise ConfigurationError(
                "An SQLite database in memory cannot be shared with other processes; name a file: sqlite:///file.db",
                code="sqlite-file",
            )
        if "\0" in location:
            raise ConfigurationError("The path of the SQLite file has a NUL character (%00) in it; remove that")
        self._mode = _mode(query)
        self.creates = self._mode == "rwc"
        self.path = Path(location).expanduser().absolute()
        # (Not read from the database: the caller has a transaction, and our session may be waiting for its end.)
        self.known_identity = str(self.path)
        #: True if the file is in this user's own folder: then it is closed to other users.
        self.private = self.path.parent == platformdirs.user_state_path("sqlsem").absolute()
        self._private_since: int | None = None  # the process that has closed the file to other users
        #: The files of the main session, which hold the rows of this process.
        self.files: OpenFiles | None = None
        self.beacons: Beacons = Beacons(self.path, private=self.private)

    @property
    def label(self) -> str:
        return f"SQLite file {self.path}"

    @property
    def idle_heartbeat(self) -> float:
        """Shorter than that of a server, so that a deleted file is noticed soon (`SqliteSession.install`)."""
        return self.options.timing.idle_file_heartbeat

    @property
    def local_file(self) -> Path | None:
        return self.path

    @property
    def writable(self) -> bool:
        """True if the file is opened for writing and this user can write it."""
        return self._mode != "ro" and os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)

    @property
    def read_only_hint(self) -> str:
        return f"{self.label} can only be read from here; to change anything, open it so that it may be written"

    def open_session(self, purpose: str) -> SqliteSession:
        session = SqliteSession(self)
        session.is_second = purpose in ("wait", "work")
        return session

    def session_on(self, cursor: Any) -> Session:
        return BorrowedSqliteSession(self, cursor)

    def open(self) -> sqlite3.Connection:
        """Open a connection without a busy timeout of its own."""
        identify(self.path)
        try:
            if not (self.creates or self.path.exists()):
                raise SchemaError(
                    f"{self.label} is not there; check the path, or create it with: sqlsem init", code="sqlite-file"
                )
            if self.private and self._private_since != os.getpid():
                self._make_private()
                self._private_since = os.getpid()
            elif self.creates:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            location: Any = self.path
            if not self.creates:
                location = f"{self.path.as_uri()}?mode={self._mode.removesuffix('c')}"
            connection = sqlite3.connect(
                location, timeout=0, isolation_level=None, check_same_thread=False, uri=not self.creates
            )
            connection.execute("PRAGMA trusted_schema = OFF")  # views and triggers may be of another user
            if wal.MUST_BE_ALONE:
                connection.execute("PRAGMA wal_autocheckpoint = 0")
        except (OSError, sqlite3.Error) as exc:
            raise Unavailable(
                f"Cannot open {self.label}: {exc}; check the path and its permissions", code="sqlite-file"
            ) from exc
        connection.row_factory = sqlite3.Row
        return connection

    def follow_link(self) -> None:
        """Use the beacons beside the open file: the path may be a link, which now leads to another file."""
        beacons = Beacons(self.path, private=self.private)
        if beacons.folder != self.beacons.folder:
            self.beacons = beacons

    def _make_private(self) -> None:
        """Close the default database to other users, whatever the umask. A reader could see locks and keep dead members
        alive; a writer could take every lock.
        """
        if os.name != "posix":
            return  # a user's folder is closed to others there
        folder = self.path.parent
        if self.creates:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        owner, mine = folder.stat().st_uid, os.geteuid()
        if owner != mine:
            raise ConfigurationError(
                f"The folder {folder} belongs to {user_name(owner)}, not to {user_name(mine)}: its owner "
                f"could do anything with the locks in it. Set $HOME (or $XDG_STATE_HOME) to a folder of your own, or "
                f"name the database in $SQLSEM_URL",
                code="sqlite-file",
            )
        if self.creates:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        members = self.beacons.folder
        for path in (folder, *(Path(f"{self.path}{end}") for end in ("", "-wal", "-shm", "-journal")), members):
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if status.st_mode & 0o077 and status.st_uid == mine and not stat.S_ISLNK(status.st_mode):
                    path_and_mode = (path, stat.filemode(status.st_mode))
                    try:
                        path.chmod(stat.S_IMODE(status.st_mode) & 0o700)
                        log.warning("%s was open to other users (%s); closed", *path_and_mode)
                    except PermissionError as exc:  # some file systems know no permissions
                        log.warning("%s is open to other users (%s) and cannot be closed: %s", *path_and_mode, exc)

    def read_settings(self) -> dict[str, str] | None:
        # The usual open would create the file.
        if not self.path.exists():
            return {}
        queries = self.queries()
        identify(self.path)
        try:
            uri = f"file:{urllib.parse.quote(str(self.path))}?mode=ro"
            with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5)) as connection:
                if connection.execute(queries["version"]).fetchone() is None:
                    return {}
                return dict(connection.execute(queries["settings"]).fetchall())
        except sqlite3.Error as exc:
            raise Unavailable(
                f"Cannot read {self.label}: {exc}; check the path and its permissions", code="sqlite-file"
            ) from exc

    def pin_steps(self, cursor: Any, ticket: Ticket) -> Generator[Any, Any, bool]:
        try:
            yield cursor.execute(self.queries()["pin"], (ticket.resource, ticket.position, ticket.requesting_id))
            return bool(cursor.rowcount == 1)
        finally:
            self._require_in_place()

    def _require_in_place(self) -> None:
        """Raise `Replaced` unless the files are in place. The caller's transaction has the file's write lock, for which
        another thread may wait with forks blocked: so do not wait for that thread, unless the files seem to be gone.
        """
        try:
            if (known := self.files) is not None:
                known.require_in_place()
        except Replaced:
            # (A fork in another thread closes our connections, and then SQLite may delete the log.)
            with fork.forks_blocked:
                if self.files is not None:
                    self.files.require_in_place()

    def same_database(self, identity: str, other: str) -> bool:
        try:
            return os.path.samefile(identity, other)
        except OSError:  # for example a database in memory
            return False


def _mode(query: str) -> str:
    """Return the value of ``?mode=``, the only option."""
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    mode = options.pop("mode", "rwc")
    if options or mode not in ("ro", "rw", "rwc"):
        raise ConfigurationError(
            f"?{query} is not known in the URL of an SQLite file; there are ?mode=ro (only look), ?mode=rw (the file "
            f"must be there) and ?mode=rwc (it is created when it is not, as without)",
            code="url",
        )
    return mode
