"""SQLite, through the standard library: several processes on one host, nothing to install or start.

The file's write lock is the gate. A member's beacon is a lock on a file of its own beside the database; the system
frees it the moment the process dies, so a member whose file can be locked is dead for certain and is removed without
waiting for its grace. (A beacon file that is *not there* proves nothing; then grace runs, as on the other engines.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import sqlite3
import stat
import threading
import time
import urllib.parse
import weakref
from collections.abc import Generator, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import platformdirs

from sqlsem import deadlocks
from sqlsem.engines.base import (
    GROUP_SIZE,
    GROUPED,
    Busy,
    Check,
    Creator,
    Disconnected,
    Engine,
    Options,
    Plan,
    Session,
    setting_number,
)
from sqlsem.engines.beacons import Beacon, Beacons
from sqlsem.errors import ConfigurationError, SchemaError, Unavailable
from sqlsem.model import (
    READ,
    UPGRADE,
    WRITE,
    Attempt,
    Claimed,
    Continuation,
    End,
    Entry,
    NewTask,
    PartEnd,
    PartStart,
    Past,
    Pulse,
    QueueState,
    Request,
    Resource,
    RoundEntry,
    TaskEntry,
    Ticket,
    Upgrading,
)

log = logging.getLogger("sqlsem")

#: How often the next in line looks whether the file changed: at first, and at the most (seconds). Who is further back
#: looks so many times more seldom: as many must leave before, one after the other.
SHORTEST, LONGEST = 0.0001, 0.02
#: What looking seldom may cost: this share of the time for which nothing has happened at all, but no more than so long.
SHARE, SLOWEST = 0.05, 0.5
#: How often the next in line tests whether those ahead of it still live. Who is further back does so more seldom, too.
TEST_EVERY, TEST_SELDOM = 0.25, 8.0
LAST = 2**63 - 1
#: Seconds after which a beacon that nobody holds and no member names is somebody's rest.
ORPHANED = 60.0
#: Seconds for which the SQL of a task waits for the file's write lock.
SQL_PATIENCE = 60.0


class SqliteEngine(Engine):
    """An SQLite file."""

    name = "sqlite"
    beacon_may_fail = False
    setup_timeout = None

    def __init__(self, url: str, options: Options, creator: Creator | None = None) -> None:
        super().__init__(url, options, creator)
        if creator is not None:
            raise ConfigurationError("SQLite takes a file, not creator=; write sqlite:///file.db")
        location, _, query = url.partition("://")[2].partition("?")
        location = urllib.parse.unquote(location)
        # As SQLAlchemy has it: three slashes and a relative path, four and an absolute one.
        location = location[1:] if location.startswith("/") else location
        if not location or location == ":memory:":
            raise ConfigurationError(
                "An SQLite database in memory cannot be shared with other processes; name a file: sqlite:///file.db"
            )
        if "\0" in location:
            raise ConfigurationError("The path of the SQLite file has a NUL character (%00) in it; remove that")
        self._mode = _mode(query)
        self.creates = self._mode == "rwc"
        self.path = Path(location).expanduser().absolute()
        #: Whether it is in this user's own folder, and so nobody else's business.
        self.private = self.path.parent == platformdirs.user_state_path("sqlsem").absolute()
        self._private_since: int | None = None  # checked by this process
        self.beacons = Beacons(self.path, private=self.private)

    @property
    def where(self) -> str:
        return f"SQLite file {self.path}"

    @property
    def place(self) -> str:
        return f"prefix {self.options.schema}_"

    def installed_version(self) -> int:
        if not self.path.exists():
            return 0
        queries = self.queries()
        try:
            file = f"{self.path.as_uri()}?mode=ro"  # `connect` might create it
            with contextlib.closing(sqlite3.connect(file, uri=True, timeout=5)) as connection:
                if connection.execute(queries["version"]).fetchone() is None:
                    return 0
                return setting_number(dict(connection.execute(queries["settings"]).fetchall()), "schema_version")
        except sqlite3.Error as exc:
            raise Unavailable(f"Cannot read {self.where}: {exc}; check the path and its permissions") from exc

    def open(self) -> sqlite3.Connection:
        """A connection that waits for nothing by itself."""
        try:
            if not (self.creates or self.path.exists()):
                raise SchemaError(f"{self.where} is not there; check the path, or create it with: sqlsem init")
            if self.private and self._private_since != os.getpid():
                self._make_private()
                self._private_since = os.getpid()
            elif self.creates:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            place: Any = self.path
            if not self.creates:
                place = f"{self.path.as_uri()}?mode={self._mode.removesuffix('c')}"
            return sqlite3.connect(
                place, timeout=0, isolation_level=None, check_same_thread=False, uri=not self.creates
            )
        except (OSError, sqlite3.Error) as exc:
            raise Unavailable(f"Cannot open {self.where}: {exc}; check the path and its permissions") from exc

    def _make_private(self) -> None:
        """The default database is its user's alone, whatever the umask: those who can read it see what is locked and
        can keep the dead alive; those who can write it hold every lock.
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
                f"The folder {folder} belongs to {user_name(owner)}, not to {user_name(mine)}: whoever it belongs to "
                f"could do anything with the locks in it. Set $HOME (or $XDG_STATE_HOME) to a folder of your own, or "
                f"name the database in $SQLSEM_URL"
            )
        if self.creates:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        members = self.beacons.folder
        for path in (folder, *(Path(f"{self.path}{end}") for end in ("", "-wal", "-shm", "-journal")), members):
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                if found.st_mode & 0o077 and found.st_uid == mine and not stat.S_ISLNK(found.st_mode):
                    told = (path, stat.filemode(found.st_mode))
                    try:
                        path.chmod(stat.S_IMODE(found.st_mode) & 0o700)
                        log.warning("%s was open to other users (%s); closed", *told)
                    except PermissionError as exc:  # some file systems know no permissions
                        log.warning("%s is open to other users (%s) and cannot be closed: %s", *told, exc)

    def reach(self, purpose: str) -> SqliteSession:
        return SqliteSession(self)

    def pinning(self, cursor: Any, ticket: Ticket) -> Generator[Any, Any, bool]:
        yield cursor.execute(self.queries()["pin"], (ticket.resource, ticket.position, ticket.requesting_id))
        return bool(cursor.rowcount == 1)


class SqliteSession(Session):
    """One connection. Statements that find the file locked are tried again for as long as ``patience``."""

    def __init__(self, engine: SqliteEngine) -> None:
        self._engine = engine
        self._options = engine.options
        self._queries = engine.queries()
        self._connection: sqlite3.Connection | None = None
        self._beacon: Beacon | None = None
        self._interrupted = False
        self._given_up = False
        self._working: sqlite3.Connection | None = None  # runs the SQL of a task
        self._executing_in = 0  # which thread
        self._cancelled = threading.Event()
        # How the last wait ended: position, the file's version then, quiet since when, when the others were tested.
        self._left: tuple[int, Any, float, float] | None = None
        _sessions.add(self)

    def prepare(self, purpose: str) -> None:
        """Create the tables where they are missing: nothing needs to be installed by hand."""
        if self._engine.creates and self.settings() is None:
            self.install(self._engine.plan)

    def _open(self) -> sqlite3.Connection:
        """The connection; opened when first needed, and again after a fork."""
        if self._connection is None:
            if self._interrupted:
                raise Disconnected(f"The connection to {self._engine.where} was closed")
            connection = self._engine.open()
            self._connection = connection
            if self._engine.creates:
                # One host only, so several may read while one writes.
                self._rows("PRAGMA journal_mode = WAL")
            # Against a crash of this process the file system's cache is enough; one of the host ends every holder.
            self._rows("PRAGMA synchronous = NORMAL")
        return self._connection

    # -- statements ---------------------------------------------------------------------------------------------

    def _execute(self, statement: str, parameters: Any, fetch: bool) -> Any:
        with _busy:
            cursor = self._open().execute(statement, parameters)
            return cursor.fetchall() if fetch else cursor

    def _try(self, statement: str, parameters: Any, fetch: bool) -> Any:
        try:
            return self._execute(statement, parameters, fetch)
        except sqlite3.Error as exc:
            if "Could not decode" in str(exc) and fetch and self._connection is not None:
                # Somebody else's bytes that are no text: one such row must not blind everybody for the others.
                self._connection.text_factory = _text
                return self._try(statement, parameters, fetch)
            if not _is_busy(exc):
                raise self._translate(exc) from exc
        # SQLite's own handler waits at least a millisecond, which is an age here, and never jitters.
        deadline = time.monotonic() + self._options.patience
        pause = 0.0001
        while True:
            time.sleep(random.uniform(0.5, 1) * pause)
            pause = min(pause * 1.3, 0.01)
            try:
                return self._execute(statement, parameters, fetch)
            except sqlite3.Error as exc:
                if not _is_busy(exc):
                    raise self._translate(exc) from exc
                if time.monotonic() > deadline:
                    raise Busy(
                        f"{self._engine.where} has been locked by another program for {self._options.patience:g} s; "
                        f"find the one with a long transaction"
                    ) from exc

    def _run(self, statement: str, parameters: Any = ()) -> sqlite3.Cursor:
        """For statements that return no rows."""
        cursor: sqlite3.Cursor = self._try(statement, parameters, False)
        return cursor

    def _rows(self, statement: str, parameters: Any = ()) -> list[Any]:
        rows: list[Any] = self._try(statement, parameters, True)
        return rows

    def _query(self, name: str, parameters: Any = ()) -> sqlite3.Cursor:
        return self._run(self._queries[name], parameters)

    def _all(self, name: str, parameters: Any = ()) -> list[Any]:
        return self._rows(self._queries[name], parameters)

    def _one(self, name: str, parameters: Any = ()) -> Any:
        rows = self._all(name, parameters)
        return rows[0] if rows else None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        # _busy is taken by the caller, in its own frame: an interrupt can part a generator from its end, but not a
        # lock from its 'with'.
        try:
            self._roll_back()  # what an interrupt may have left open
            self._run("BEGIN IMMEDIATE")
            yield
            self._run("COMMIT")
        except GeneratorExit:
            raise  # dropped by an interrupt some time ago; the next transaction has rolled this one back
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
                self._connection.execute("ROLLBACK")

    def _translate(self, exc: sqlite3.Error) -> Exception:
        text, where = str(exc), self._engine.where
        if self._interrupted or (isinstance(exc, sqlite3.ProgrammingError) and "closed" in text):
            return Disconnected(f"The connection to {where} was closed")
        if "no such table" in text or "no such column" in text:
            return SchemaError(f"{where}: {text}; create or upgrade the sqlsem tables with: sqlsem init")
        if "not a database" in text:
            return ConfigurationError(f"{where} is not an SQLite database; name another file")
        if "readonly" in text:
            return Unavailable(f"{where} is read-only; make the file and its folder writable")
        if "full" in text:
            return Unavailable(f"{where}: the disk is full; free some room ({text})")
        if "unable to open" in text:
            return Unavailable(f"Cannot open {where}: {text}; check the path and its permissions")
        return Unavailable(f"{where}: {text}")

    # -- membership ---------------------------------------------------------------------------------------------

    def _light(self) -> str | None:
        """Take a new beacon; None where a lease stands for it."""
        if self._options.lease is not None:
            return None
        with _busy:  # no fork comes between
            before, self._beacon = self._beacon, self._engine.beacons.light()
        if before is not None:
            before.put_out()
        return self._beacon.name

    def enrol(self, host: str, pid: int, program: str) -> int:
        lease = self._options.lease
        values = {
            "beacon": self._light(),
            "host": host,
            "pid": pid,
            "program": program,
            "login": user_name(),
            "grace": int(self._options.grace * 1000),
            "lease": None if lease is None else int(lease * 1000),
        }
        with _busy, self._writing():
            number = self._query("enrol", values).lastrowid
        assert number is not None
        return number

    def resume(self, member_id: int) -> bool:
        beacon = self._light()
        with _busy, self._writing():
            return self._query("resume_member", {"beacon": beacon, "member": member_id}).rowcount == 1

    def ping(self, member_id: int) -> Pulse:
        # Where somebody cleaned up, light a new one: nobody can test a file that is not there.
        if self._beacon is not None:
            self._beacon.touch()
            if not self._beacon.in_place and not self.resume(member_id):
                return Pulse(False)
        member = self._one("member", (member_id,))
        if member is None:
            return Pulse(False)
        _, _, lease_until, missing_since, *_ = member
        if lease_until is not None or missing_since is not None:
            with _busy, self._writing():
                if self._query("renew", (member_id,)).rowcount != 1:
                    return Pulse(False)
        rows = self._all("positions", (member_id,))
        return Pulse(True, frozenset(row[0] for row in rows), frozenset(row[0] for row in rows if row[1]))

    def resign(self, member_id: int) -> None:
        with _busy, self._writing():
            self._bury(member_id, "released")
            self._query("resign", (member_id,))
        self._put_out()

    def _put_out(self) -> None:
        if self._beacon is not None:
            beacon, self._beacon = self._beacon, None
            beacon.put_out()

    # -- requests -----------------------------------------------------------------------------------------------

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        if only_if_free:
            # The dead must not stand in the way of a try.
            for request in requests:
                if not self._may_enter(request):
                    self._test_ahead(request, LAST, member_id)
        with _busy, self._writing():
            self._give_sign(member_id)
            state = [self._one("anybody", {"resource": one.resource, "member": member_id}) for one in requests]
            if not state[0][1]:
                raise self._given_up_error()
            busy = [there for there, _ in state]
            # A row of ours can only be there when somebody is.
            if any(busy) and (found := self._all("find", {"member": member_id, "uid": uid})):
                return [Ticket(row[0], row[1], row[2], bool(row[3])) for row in found]
            granted = [not there or self._may_enter(request) for there, request in zip(busy, requests, strict=True)]
            if only_if_free and not all(granted):
                return None
            tickets = []
            for number, request in enumerate(requests, 1):
                position = self._query(
                    "insert",
                    {
                        "resource": request.resource,
                        "requesting_id": requesting_id,
                        "access": request.access,
                        "limit": request.limit,
                        "weight": request.weight,
                        "member": member_id,
                        "owner": owner,
                        "uid": uid if len(requests) == 1 else f"{uid}.{number}",
                        "granted": granted[number - 1],
                        "note": request.note,
                    },
                ).lastrowid
                assert position is not None
                tickets.append(Ticket(request.resource, position, requesting_id, granted[number - 1]))
        return tickets

    def _ahead(self, request: Request, position: int) -> tuple[int, bool]:
        """How many of the conflicting rows ahead must leave before one may enter (about, but at least 1 and at the most
        all), and whether one may enter now.
        """
        number, load, lowest, paused, let_in = self._one(
            "ahead",
            {
                "resource": request.resource,
                "position": position,
                "access": request.access,
                "limit": request.limit,
            },
        )
        excess = load + request.weight - lowest
        leaving = number if paused else -(-excess * number // max(load, 1))
        return max(1, min(leaving, number)), bool(let_in) or (not paused and excess <= 0)

    def _may_enter(self, request: Request) -> bool:
        return self._ahead(request, LAST)[1]

    def release(self, ticket: Ticket, outcome: str) -> bool:
        with _busy, self._writing():
            return self._remove(ticket.resource, ticket.position, ticket.requesting_id, outcome)

    def _remove(self, resource: str, position: int, requesting_id: str | None, outcome: str) -> bool:
        values = {"resource": resource, "position": position, "requesting_id": requesting_id}
        self._query("keep_one", {**values, "outcome": outcome, "login": user_name()})
        return self._query("delete_one", values).rowcount == 1

    def _bury(self, member_id: int, outcome: str, seen: float | None = None) -> int:
        """End all rows of a member, which is still there to tell who it was."""
        self._query("keep_all", {"member": member_id, "outcome": outcome, "login": user_name(), "seen": seen})
        return self._query("delete_all", {"member": member_id}).rowcount

    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        with _busy, self._writing():
            rows = self._all("find", {"member": member_id, "uid": uid})
            for resource, position, requesting_id, _ in rows:
                self._remove(resource, position, requesting_id, outcome)
        return len(rows)

    # -- conversions --------------------------------------------------------------------------------------------

    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        key = {"resource": ticket.resource, "position": ticket.position}
        mine = {**key, "requesting_id": ticket.requesting_id}
        # The dead must not stand in the way.
        row = self._one("granted_row", mine)
        if row is not None and row[0] == READ:
            self._test_inside(ticket, row[2])
        with _busy, self._writing():
            row = self._one("granted_row", mine)
            if row is None:
                return Upgrading.GONE
            access, limit, member_id = row
            self._give_sign(member_id)
            self._require_convertible(ticket, access, limit)
            if access != READ:
                return Upgrading.DONE if access == WRITE else Upgrading.BEGUN
            other = self._one("other_upgrading", key)
            if other is not None:
                if other[2]:
                    raise self._already_upgrading(ticket)
                return Upgrading.NOT_YET  # it will soon be gone
            free = self._all("free_readers", key)
            if not free and not self._all("others_inside", key):
                self._convert(key, WRITE, "upgraded")
                return Upgrading.DONE
            # Readers that an operator alone holds up are not to be let in, nor shut out if they are entering now.
            if only_if_free or any(held for _, held in free):
                return Upgrading.NOT_YET
            for position, _ in free:
                self._query("grant", {"resource": ticket.resource, "position": position})
            self._query("set_access", {**key, "access": UPGRADE})
        return Upgrading.BEGUN

    def upgrade(self, ticket: Ticket, timeout: float, nudge: threading.Event) -> bool | None:
        deadline = time.monotonic() + timeout
        key = {"resource": ticket.resource, "position": ticket.position}
        mine = {**key, "requesting_id": ticket.requesting_id}
        seen, changed, tested = None, time.monotonic(), -TEST_SELDOM
        while True:
            version = (self._one("data_version")[0], id(self._connection))
            now = time.monotonic()
            if version != seen or nudge.is_set():
                nudge.clear()
                seen, changed = version, now
                row = self._one("granted_row", mine)
                if row is None:
                    return None
                if row[0] != UPGRADE:
                    return bool(row[0] == WRITE)
                if not self._all("others_inside", key):
                    with _busy, self._writing():
                        row = self._one("granted_row", mine)
                        if row is not None and row[0] == UPGRADE:
                            self._give_sign(row[2])
                            self._convert(key, WRITE, "upgraded")
                            return True
                    seen = None
                    continue
            if now >= deadline:
                return False
            if now - tested >= TEST_EVERY:
                tested = now
                if self._test_inside(ticket, row[2]):
                    seen = None
                    continue
            pause = min(max(SHORTEST, (now - changed) * SHARE), LONGEST)
            nudge.wait(min(pause * random.uniform(0.8, 1.2), deadline - now))

    def _test_inside(self, ticket: Ticket, mine: int) -> bool:
        """Test whether the others inside still live; True when somebody was removed."""
        key = {"resource": ticket.resource, "position": ticket.position}
        removed = False
        for position, member_id in self._all("others_inside", key):
            if member_id != mine:
                removed = self._suspect(ticket.resource, position, member_id) or removed
        return removed

    def _convert(self, key: dict[str, Any], access: str, outcome: str) -> None:
        """Change what a row is from now on, and write down what it was until now."""
        if outcome == "upgraded":
            self._query("set_access", {**key, "access": READ})
        self._query("keep_one", {**key, "requesting_id": None, "outcome": outcome, "login": None})
        self._query("set_access", {**key, "access": access})
        self._query("grant", key)

    def _require_convertible(self, ticket: Ticket, access: str, limit: int | None) -> None:
        if access not in (READ, UPGRADE, WRITE) or limit != 1:
            raise ConfigurationError(
                f"{ticket.resource!r} at {ticket.position} is neither reader nor writer (but {access!r} with a limit "
                f"of {limit}) and cannot be converted; use read(…), write(…) or mutex(…)",
                resource=ticket.resource,
            )

    def downgrade(self, ticket: Ticket) -> bool:
        key = {"resource": ticket.resource, "position": ticket.position}
        with _busy, self._writing():
            row = self._one("granted_row", {**key, "requesting_id": ticket.requesting_id})
            if row is None:
                return False
            access, limit, _ = row
            self._require_convertible(ticket, access, limit)
            if access == WRITE:
                self._convert(key, READ, "downgraded")
            elif access == UPGRADE:
                self._query("set_access", {**key, "access": READ})
        return True

    # -- waiting ------------------------------------------------------------------------------------------------

    def wait(self, ticket: Ticket, timeout: float, nudge: threading.Event) -> bool | None:
        deadline = time.monotonic() + timeout
        key = {"resource": ticket.resource, "position": ticket.position}
        row = self._one("row", key)
        if row is None or row[5]:
            return None
        if row[4]:
            return True
        request, member_id = Request(ticket.resource, row[0], row[1], row[2]), row[3]
        seen, known, distance = None, None, 1
        quiet_since, tested = time.monotonic(), -TEST_SELDOM
        if self._left is not None and self._left[0] == ticket.position:
            _, known, quiet_since, tested = self._left  # one long wait comes in slices
        while True:
            version = (self._one("data_version")[0], id(self._connection))
            now = time.monotonic()
            if version != seen or nudge.is_set():
                nudge.clear()
                seen = version
                if version != known:
                    known, quiet_since = version, now
                distance, free = self._ahead(request, ticket.position)
                if free:
                    with _busy, self._writing():
                        self._give_sign(member_id)
                        return True if self._query("grant", key).rowcount == 1 else None
            if now >= deadline:
                self._left = (ticket.position, known, quiet_since, tested)
                return False
            if now - tested >= min(TEST_EVERY * distance, TEST_SELDOM):
                tested = now
                if self._one("row", key) is None:
                    return None
                if self._test_ahead(request, ticket.position, member_id):
                    seen = None
                    continue
            pause = min(max(SHORTEST * distance, (now - quiet_since) * SHARE), LONGEST * distance, SLOWEST)
            nudge.wait(min(pause * random.uniform(0.8, 1.2), deadline - now))

    def _test_ahead(self, request: Request, position: int, mine: int | None) -> bool:
        """Test whether those ahead still live; True when somebody was removed."""
        values = {"resource": request.resource, "position": position, "access": request.access}
        removed = False
        for blocker, member_id in self._all("owners_ahead", values):
            if mine is None or member_id != mine:
                removed = self._suspect(request.resource, blocker, member_id) or removed
        return removed

    def _suspect(self, resource: str, position: int, member_id: int | None) -> bool:
        """Test the owner of one row and act on it; True when rows were removed."""
        key = {"resource": resource, "position": position}
        if member_id is None:
            stale = self._one("stale", key)
            if not stale or not stale[0]:
                return False
            with _busy, self._writing():
                return self._remove(resource, position, None, "reaped")
        member = self._one("member", (member_id,))
        if member is None:
            with _busy, self._writing():
                return self._bury(member_id, "reaped") > 0
        _, grace_ms, _, _, now, _ = member
        row = self._one("row", key)
        if row is not None and row[6] is not None and row[6] + grace_ms / 1000 <= now:
            with _busy, self._writing():
                return self._remove(resource, position, None, "revoked")
        return self._test_member(member_id)

    def _test_member(self, member_id: int) -> bool:
        """Test whether a member still lives and act on it; True when it was removed, with its rows."""
        member = self._one("member", (member_id,))
        if member is None:
            return False
        beacon, _, lease_until, missing_since, now, seen_at = member
        with self._engine.beacons.look(beacon) as look:
            dead = False
            if lease_until is None:
                if look.held:
                    return False
                dead = look.held is False
                if not dead and missing_since is None:
                    with _busy, self._writing():
                        self._query("miss", {"member": member_id, "beacon": beacon})
            elif lease_until >= now:
                return False
            with _busy, self._writing():
                if self._one("given_up", {"member": member_id, "beacon": beacon, "dead": dead}) is None:
                    return False
                self._bury(member_id, "reaped", min(now, max(seen_at, look.seen or 0.0)))
                self._query("resign", (member_id,))
            look.remove()
        return True

    def _missing(self, row: Sequence[Any]) -> tuple[bool, float | None]:
        """Whether the member that the last columns of a row tell of is dead, so that whoever may removes it; and for
        how many seconds it has been missing. Writes nothing.
        """
        grace, owned, beacon, lease_until, missing_since, seen_at, now = row[-7:]
        if not owned:
            return False, None
        if grace is None:  # the member is not there any more, its row is anybody's to remove
            return True, None
        if lease_until is not None:
            return lease_until < now, now - seen_at if lease_until < now else None
        with self._engine.beacons.look(beacon) as look:
            if look.held:
                return False, None
            since = missing_since if missing_since is not None else min(now, max(seen_at, look.seen or 0.0))
            dead = look.held is False or (missing_since is not None and missing_since + grace <= now)
        return dead, max(0.0, now - since)

    def find_deadlock(self, member_id: int) -> deadlocks.Found | None:
        if self._one("holds_and_waits", (member_id,)) is None:
            return None
        rows = self._all("those_who_wait")
        found = [
            knot
            for knot in deadlocks.find(
                [deadlocks.Row(*row[:8]) for row in rows],
                {row[1]: row[8] for row in rows if row[8] is not None},
            )
            if knot.victim.member == member_id
        ]
        for knot in found:
            members = {row[2]: row[9:11] for row in rows}
            there = {who[0] for who in knot.whos}
            # Whoever died holds nobody up for long.
            if all(self._lives(one) for one in there - {member_id}):
                return deadlocks.steps_of(knot, {one: (*members[one], None) for one in there})
        return None

    def _lives(self, member_id: int) -> bool:
        self._test_member(member_id)
        member = self._one("member", (member_id,))
        return member is not None and member[3] is None and (member[2] is None or member[2] >= member[4])

    # -- what people see and operators do -----------------------------------------------------------------------

    def entries(self, resource: str | None) -> list[Entry]:
        entries = []
        for row in self._all("entries", {"resource": resource}):
            dead, missing_for = self._missing(row)
            shown = _shown(row[:-6], 13, 14)
            shown[16] = missing_for
            if dead:
                shown[2] = "dead"
            entries.append(Entry(*shown))
        return entries

    def history(
        self,
        resource: str | None,
        most: int,
        *,
        since: float | None = None,
        until: float | None = None,
        outcome: str | None = None,
    ) -> list[Past]:
        which = {"resource": resource, "most": most, "since": since, "until": until, "outcome": outcome}
        return [Past(*_shown(row, 7, 8, 9)) for row in self._all("past", which)]

    def resources(self) -> list[Resource]:
        waits: dict[str, list[bool]] = {}
        for entry in self.entries(None):
            waiting = entry.state == "waits" or (entry.state == "dead" and entry.granted_at is None)
            waits.setdefault(entry.resource, []).append(waiting)
        return [
            Resource(name, cap, bool(paused), stale, waits.get(name, []).count(False), waits.get(name, []).count(True))
            for name, cap, paused, stale in self._all("resources")
        ]

    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        with _busy, self._writing():
            self._query("set_resource", {"resource": resource, "what": what, "value": value})
            self._query("tidy_resource", {"resource": resource})

    def revoke(self, position: int, force: bool) -> int:
        with _busy, self._writing():
            self._query("revoke", {"position": position, "login": user_name()})
            row = self._one("revoked_row", (position,))
            if row is None:
                return -1
            resource, granted, member_id = row
            if force or not granted or member_id is None:
                self._remove(resource, position, None, "revoked")
                return 0
        return 1

    def reap(self) -> int:
        rows = self._all("all_rows")
        for resource, position in rows:
            row = self._one("row", {"resource": resource, "position": position})
            if row is not None:
                self._suspect(resource, position, row[3])
        self.recover_rounds(None, None)
        for member_id, beacon in self._all("idle_members"):
            with self._engine.beacons.look(beacon) as look:
                if not look.held:
                    with _busy, self._writing():
                        self._query("resign", (member_id,))
                    look.remove()
        self._sweep()
        return len(set(rows) - set(self._all("all_rows")))

    def _sweep(self) -> None:
        """Remove the files of those who died before they were members, or after they were removed."""
        known = {row[0] for row in self._all("beacons")}
        for name in self._engine.beacons.names():
            if name not in known:
                with self._engine.beacons.look(name) as look:
                    if look.held is False and look.seen is not None and abs(time.time() - look.seen) > ORPHANED:
                        look.remove()

    def prune(self, most: int) -> int:
        with _busy, self._writing():
            return self._query("prune", (most,)).rowcount

    # -- the work queue -----------------------------------------------------------------------------------------

    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        numbers: list[int] = []
        login = user_name()
        with _busy, self._writing():
            for number, task in enumerate(tasks, 1):
                values = {
                    "queue": queue,
                    "order": task.order,
                    "kind": task.kind,
                    "body": task.body,
                    "note": task.note,
                    "on_failure": task.on_failure,
                    "max_attempts": task.max_attempts,
                    "backoff": round(task.backoff * 1000),
                    "uid": f"{uid}.{number}",
                    "after": task.after,
                    "login": login,
                }
                self._query("put_task", values)
                numbers.append(self._one("put_before", (values["uid"],))[0])
        return numbers

    def claim_task(self, member_id: int, queue: str, owner: str, uid: str, again: bool) -> Claimed | None:
        values = {"queue": queue, "member": member_id, "owner": owner, "uid": uid}
        # Reading takes no lock: a queue with nothing to do costs the others nothing.
        if not again and self._one("next_pending", {"queue": queue}) is None:
            self._require_member(member_id)
            return None
        with _busy, self._writing():
            return self._claim(values, again)

    def _claim(self, values: dict[str, Any], again: bool) -> Claimed | None:
        key = {name: values[name] for name in ("queue", "member", "uid")}
        self._give_sign(values["member"])
        found = self._one("claimed_before", key) if again else None
        if found is None:
            found = self._one("next_pending", {"queue": values["queue"]})
            if found is None:
                return None
            claim = {name: values[name] for name in ("member", "owner", "uid")}
            if self._query("claim_task", {**claim, "task": found[0]}).rowcount != 1:
                self._require_member(values["member"])
        return Claimed(*self._one("claimed", (found[0],)))

    def _require_member(self, member_id: int) -> None:
        if self._one("member", (member_id,)) is None:
            raise self._given_up_error()

    def _given_up_error(self) -> Disconnected:
        # A row of a member that is not there is anybody's to remove: nobody must believe that it holds.
        self._given_up = True  # whoever keeps this session comes back as a new member
        return Disconnected(f"{self._engine.where} has given this process up while it was out of reach")

    def _give_sign(self, member_id: int) -> None:
        """In the transaction that grants, claims or starts something: see `Session`. Beacons are files, and tell
        without a sign.
        """
        if self._options.lease is None:
            if self._beacon is not None:
                self._beacon.touch(self._options.grace / 8)
        elif self._query("renew_old", (member_id,)).rowcount != 1:
            self._require_member(member_id)

    def end_task(self, member_id: int, end: End) -> str | None:
        with _busy, self._writing():
            return self._end(member_id, end)

    def _end(self, member_id: int, end: End) -> str | None:
        key = {"task": end.task_id, "attempt": end.attempt, "member": member_id, "outcome": end.outcome}
        what = {"error": end.error, "result": end.result}
        if self._query("keep_attempt", {**key, **what}).rowcount != 1:
            found = self._one("ended_before", key)
            return found[0] if found else None
        self._query("end_task", {"task": end.task_id, "outcome": end.outcome, **what})
        status: str = self._one("task_status", (end.task_id,))[0]
        return status

    def next_task(
        self, member_id: int, end: End, queue: str, owner: str, uid: str, again: bool
    ) -> tuple[str | None, Claimed | None]:
        values = {"queue": queue, "member": member_id, "owner": owner, "uid": uid}
        with _busy, self._writing():
            return self._end(member_id, end), self._claim(values, again)

    def next_tasks(
        self, member_id: int, ends: Sequence[End], queue: str, owner: str, uid: str, again: bool, most: int
    ) -> tuple[list[str | None], list[Claimed]]:
        with _busy, self._writing():
            statuses = [self._end(member_id, end) for end in ends]
            return statuses, self._claim_group(member_id, queue, owner, uid, again, most) if most else []

    def _claim_group(self, member_id: int, queue: str, owner: str, uid: str, again: bool, most: int) -> list[Claimed]:
        key = {"queue": queue, "member": member_id, "uid": uid}
        self._give_sign(member_id)
        if again and (found := self._all("claimed_before", key)):
            return [Claimed(*self._one("claimed", (task_id,))) for task_id, _ in found]
        self._require_member(member_id)
        group: list[Claimed] = []
        size = 0
        for task, kind, losses in self._all("next_group", {"queue": queue, "most": most}):
            alone = losses > 0 or kind not in GROUPED
            if group and (alone or size > GROUP_SIZE):
                break
            self._query("claim_task", {"task": task, "member": member_id, "owner": owner, "uid": uid})
            group.append(Claimed(*self._one("claimed", (task,))))
            size += len(group[-1].body)
            if alone:
                break
        return group

    def return_claim(self, member_id: int, queue: str, uid: str) -> int:
        with _busy, self._writing():
            found = self._all("claimed_before", {"queue": queue, "member": member_id, "uid": uid})
            for task_id, attempt in found:
                self._end(member_id, End(task_id, attempt, "returned"))
        return len(found)

    def recover_tasks(self, queue: str | None, mine: int | None) -> int:
        members = [row[0] for row in self._all("task_members", {"queue": queue}) if row[0] != mine]
        for member_id in members:
            self._test_member(member_id)
        if all(self._one("member", (member_id,)) for member_id in members):
            return 0
        with _busy, self._writing():
            self._query("keep_lost", {"queue": queue})
            return self._query("recover_tasks", {"queue": queue}).rowcount

    def queue_state(self, queue: str) -> QueueState:
        pending, running, next_pending, failed, error = self._one("queue_state", {"queue": queue})
        return QueueState(bool(pending), bool(running), bool(next_pending), failed, error)

    def list_tasks(self, queue: str | None, status: str | None, most: int) -> list[TaskEntry]:
        wanted = {"queue": queue, "status": "running" if status == "lost" else status, "most": most}
        if status in ("running", "lost"):
            wanted["most"] = -1  # who is dead shows only when looked at
        entries = []
        for row in self._all("list_tasks", wanted):
            shown = _shown(row[:-7], 12, 13, 14, 15)
            if self._missing(row)[0]:
                shown[6] = "lost"
            if status is None or shown[6] == status:
                entries.append(TaskEntry(*shown))
        return entries[:most]

    def task_attempts(self, task_id: int) -> list[Attempt]:
        attempts = []
        for row in self._all("task_attempts", {"task": task_id}):
            shown = _shown(row[:-7], 8, 9)
            if self._missing(row)[0]:
                shown[2] = "lost"
            attempts.append(Attempt(*shown))
        return attempts

    def set_task(self, task_id: int, what: str) -> int:
        runner = self._one("task_runner", (task_id,))
        recovered = False
        if runner is not None:
            queue, member_id = runner
            self._test_member(member_id)
            recovered = self._one("member", (member_id,)) is None and self.recover_tasks(queue, None) > 0
        with _busy, self._writing():
            found = self._one("task_status", (task_id,))
            if recovered and what == "retry" and found is not None and found[0] == "pending":
                return 0
            if found is None:
                return -1
            if found[0] == "running":
                return 1
            if found[0] not in {"retry": ("failed", "cancelled"), "cancel": ("pending", "failed")}[what]:
                return -2
            self._query(f"{what}_task", (task_id,))
        return 0

    def prune_tasks(self, most: int) -> int:
        with _busy, self._writing():
            self._query("prune_task_log", {"most": most})
            return self._query("prune_tasks", {"most": most}).rowcount

    def execute(self, text: str) -> str | None:
        with _calm:
            while _forks:
                _calm.wait()
            self._executing_in = threading.get_ident()
            _executing.add(self)
        try:
            self._execute_text(text)
        finally:
            self._end_executing()
        return None

    def _execute_text(self, text: str) -> None:
        # Not through _open: a connection of its own, whose transactions are the text's.
        self._working = connection = self._engine.open()
        asked = 0

        def allow(*_: object) -> int:
            # Asked before each statement: what has not begun when it is cancelled does not begin.
            nonlocal asked
            asked += 1
            return sqlite3.SQLITE_DENY if self._cancelled.is_set() else sqlite3.SQLITE_OK

        # What manages transactions itself, or cannot run in one, is left alone.
        first = re.match(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/|;)*(\w*)", text, re.DOTALL)
        alone = first is not None and first[1].upper() in ("BEGIN", "PRAGMA", "VACUUM", "ATTACH", "DETACH")
        timeout = f"PRAGMA busy_timeout = {SQL_PATIENCE * 1000:.0f};"
        script = f"{timeout}\n{text}" if alone else f"BEGIN IMMEDIATE;\n{timeout}\n{text}\n;"
        deadline = time.monotonic() + SQL_PATIENCE
        pause = 0.001
        try:
            connection.set_authorizer(allow)
            while True:
                asked = 0
                try:
                    connection.executescript(script)
                    break
                except sqlite3.Error as exc:
                    # Waiting for the write lock can be cancelled, as SQLite's own cannot.
                    if alone or asked > 1 or not _is_busy(exc) or time.monotonic() > deadline:
                        raise
                self._cancelled.wait(random.uniform(0.5, 1) * pause)
                pause = min(pause * 1.5, 0.05)
            if connection.in_transaction:
                if alone:
                    raise Unavailable(f"{self._engine.where}: the SQL left a transaction open; end it with COMMIT")
                connection.execute("COMMIT")
        except sqlite3.Error as exc:
            if self._cancelled.is_set():
                raise Unavailable(f"{self._engine.where}: the SQL was ended before its time ({exc})") from exc
            raise self._translate(exc) from exc
        finally:
            self._working = None
            connection.close()

    def _end_executing(self) -> None:
        with _calm:
            _executing.discard(self)
            _calm.notify_all()

    # -- rounds -------------------------------------------------------------------------------------------------

    def recover_rounds(self, name: str | None, mine: int | None) -> list[int]:
        members = [row[0] for row in self._all("round_members", {"name": name}) if row[0] != mine]
        for member_id in members:
            self._test_member(member_id)
        if all(self._one("member", (member_id,)) for member_id in members):
            return []
        with _busy, self._writing():
            self._query("recover_then", {"name": name})
            found = [row[0] for row in self._all("orphaned_rounds", {"name": name})]
            for round_id in found:
                self._query("recover_parts", (round_id,))
                self._query("fail_round", {"round": round_id})
        return found

    def start_part(
        self,
        member_id: int,
        name: str,
        part: str,
        parts: Sequence[str],
        window: float,
        owner: str,
        uid: str,
        then: tuple[str | None, str | None],
    ) -> PartStart:
        with _busy, self._writing():
            self._require_member(member_id)
            self._give_sign(member_id)
            now = self._one("clock")[0]
            latest: tuple[int, str | None, float] = self._one("latest_round", (name,)) or (0, None, now)
            round_id, status, opened = latest
            there = {row[0]: row[1:] for row in self._all("round_parts", (round_id,))}
            part_status, part_uid, part_member, attempt, started = there.get(part, (None, None, None, 0, None))
            if not (part_uid == uid and part_status == "running" and part_member == member_id):  # else a reply was lost
                ended = None
                if status not in ("open", "failed"):
                    ended = status or ""
                elif opened + window <= now:
                    ended = "expired"
                    self._query("close_round", {"status": ended, "now": now, "round": round_id})
                elif status == "failed" and (set(there) != set(parts) or part_status == "succeeded"):
                    ended = "abandoned"
                    self._query("close_round", {"status": ended, "now": None, "round": round_id})
                elif set(there) != set(parts):
                    return PartStart("differs", round_id, None, None)
                elif part_status == "succeeded":
                    return PartStart("succeeded", round_id, None, None)
                elif part_status == "running" and self._one("member", (part_member,)) is not None:
                    return PartStart("running", round_id, None, None)
                if ended is None:
                    if now == opened:  # the clock ticks in milliseconds, but only one part begins with its round
                        now += 1e-6
                    self._query("reopen_round", {"round": round_id, "window": round(window * 1000)})
                else:
                    values = {"name": name, "window": round(window * 1000), "now": now}
                    self._query("open_round", {**values, "login": user_name()})
                    round_id, opened, attempt = self._one("latest_round", (name,))[0], now, 0
                    for one in parts:
                        self._query("open_part", (round_id, one))
                    self._query("prune_round_parts", {"name": name, "now": now})
                    self._query("prune_rounds", {"name": name, "now": now})
                key = {"round": round_id, "part": part}
                self._query("start_part", {**key, "uid": uid, "member": member_id, "owner": owner, "now": now})
                self._keep_then(round_id, then)
                attempt, started = attempt + 1, now
            opening = attempt == 1 and started == opened
            previous = self._one("expired_by", {"name": name, "round": round_id}) if opening else None
            return PartStart("started", round_id, attempt, previous[0] if previous else None)

    def _keep_then(self, round_id: int, then: tuple[str | None, str | None]) -> None:
        if then[0] is not None:
            self._query("keep_then", {"round": round_id, "kind": then[0], "body": then[1]})

    def end_part(
        self,
        member_id: int,
        name: str,
        part: str,
        uid: str,
        error: str | None,
        owner: str,
        then: tuple[str | None, str | None],
    ) -> PartEnd:
        with _busy, self._writing():
            now = self._one("clock")[0]
            found = self._one("started_part", {"name": name, "part": part, "uid": uid})
            if found is None:
                return PartEnd("lost", None, False, None, None)
            round_id, status, until, part_status, part_member, part_error = found
            there = part_member == member_id and self._one("member", (member_id,)) is not None
            if not there or (part_status == "failed" and part_error == "its process died"):
                return PartEnd("lost", round_id, False, status, None)
            self._give_sign(member_id)  # the continuation may come with it
            key = {"round": round_id, "part": part}
            mine = {"round": round_id, "member": member_id, "uid": uid}
            if part_status == "running":
                code = "succeeded" if error is None else "failed"
                if error is None and (status != "open" or until < now):
                    code, error = "late", "ended after the window"
                part_status = "succeeded" if error is None else "failed"
                self._query("end_part", {**key, "status": part_status, "error": error, "now": now})
                self._keep_then(round_id, then)
                self._query("fail_round", {"round": round_id})
                if self._query("succeed_round", {"round": round_id, "now": now}).rowcount == 1:
                    self._query("mark_last", key)
                    self._query("begin_then", {**mine, "own": then[0] is not None, "owner": owner, "now": now})
            else:
                code = "late" if part_error == "ended after the window" else part_status
                if part_status == "succeeded" and error is not None:
                    self._query("return_then", {"member": member_id, "uid": uid})
            status, is_last = self._one("ended_part", key)
            claimed = self._one("claimed_then", {"member": member_id, "uid": uid})
            return PartEnd(code, round_id, bool(is_last), status, self._continuation(claimed))

    @staticmethod
    def _continuation(row: Any) -> Continuation | None:
        if row is None:
            return None
        round_id, name, attempt, kind, body = row
        return Continuation(round_id, name, attempt, kind, body)

    def claim_then(
        self, member_id: int, name: str | None, round_id: int | None, owner: str, uid: str, own: bool
    ) -> Continuation | None:
        mine = {"member": member_id, "uid": uid}
        with _busy, self._writing():
            self._require_member(member_id)
            self._give_sign(member_id)
            found = self._one("claimed_then", mine)
            if found is None:
                self._query("claim_then", {**mine, "name": name, "round": round_id, "owner": owner, "own": own})
                found = self._one("claimed_then", mine)
        return self._continuation(found)

    def return_then(self, member_id: int, uid: str) -> bool:
        with _busy, self._writing():
            return self._query("return_then", {"member": member_id, "uid": uid}).rowcount == 1

    def end_then(self, member_id: int, round_id: int, attempt: int, error: str | None) -> bool:
        key = {"round": round_id, "attempt": attempt, "member": member_id}
        with _busy, self._writing():
            if self._query("end_then", {**key, "error": error}).rowcount == 1:
                return True
            return self._one("ended_then", key) is not None

    def list_rounds(self, name: str | None, round_id: int | None, most: int) -> list[RoundEntry]:
        rows = self._all("list_rounds", {"name": name, "round": round_id, "most": most})
        found = []
        for row in rows:
            shown = _shown(row[:-7], 4, 5, 12, 13, 24, 25)
            shown[28] = self._missing(row)[1]
            found.append(shown)
        return RoundEntry.of_rows(found)

    # -- upkeep -------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, str] | None:
        if self._one("version") is None:
            return None
        return dict(self._all("settings"))

    def install(self, plan: Plan) -> None:
        with _busy, self._writing():
            # Under the lock: somebody may just have done it.
            current = self.settings()
            for version, text in plan(0 if current is None else setting_number(current, "schema_version")):
                for statement in _statements(text):
                    self._run(statement)
                if version is not None:
                    self._query("set_version", (str(version),))

    def diagnose(self) -> list[Check]:
        import platform
        import shutil

        from sqlsem import sql

        engine = self._engine
        ask = sql.queries("sqlite", self._options.schema, self._options.table, "doctor")
        checks = []

        def check(name: str, ok: bool, detail: str, mend: str = "") -> None:
            checks.append(Check(name, ok, detail, mend))

        modern = sqlite3.sqlite_version_info >= (3, 35)
        mend = "" if modern else "Use a Python whose SQLite is 3.35 or later (sqlite3.sqlite_version)."
        check("driver", modern, f"SQLite {sqlite3.sqlite_version} of Python {platform.python_version()}", mend)

        # The longest mount point that contains the file tells its file system. Only Linux says.
        place, kind = "", ""
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
                _, point, fstype, *_ = line.split(" ")
                point = point.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
                if len(point) >= len(place) and engine.path.resolve().is_relative_to(point):
                    place, kind = point, fstype
        network = "nfs cifs smb 9p afs ceph lustre gpfs beegfs gluster ncpfs davfs sshfs s3fs rclone gcsfuse juicefs"
        remote = kind.removeprefix("fuse.").startswith(tuple(network.split()))
        mend = "Locks of files cannot be trusted there. Use a local path, or a database server ($SQLSEM_URL)."
        told = f"{kind} on {place}" if kind else "not known on this system; it must be a local one"
        check("file system", not remote, told, mend if remote else "")

        mode = self._rows(ask["journal_mode"])[0][0]
        mend = "" if mode == "wal" else "Close every program that has the file open, and run this again."
        check("journal", mode == "wal", f"journal_mode is {mode}", mend)

        try:
            with _busy, self._writing():
                pass
            files = [file for file in (engine.path, engine.path.parent) if not os.access(file, os.W_OK)]
            mend = f"Make {' and '.join(map(str, files))} writable." if files else ""
            check("writable", not files, "the file and its folder" if not files else "not everything is", mend)
        except Busy as exc:
            check("writable", False, str(exc), "Find the program with a long transaction on this file.")
        except Unavailable as exc:
            check("writable", False, str(exc), "Make the file and its folder writable for this user.")

        if os.name == "posix":
            check("access", *_access(engine.path))

        try:
            beacon = engine.beacons.light()
            try:
                with engine.beacons.look(beacon.name) as look:
                    held = look.held is True
            finally:
                beacon.put_out()
            mend = "" if held else "This file system does not lock files; use a local one."
            told = "a lock on a file excludes others" if held else "a locked file does not look locked"
            check("beacon", held, told, mend)
        except Unavailable as exc:
            check("beacon", False, str(exc), f"Make the folder {engine.beacons.folder} writable for this user.")

        left = shutil.disk_usage(engine.path.parent).free / 2**20
        told = f"{left / 1024:,.1f} GB free" if left >= 1024 else f"{left:,.0f} MB free"
        check("disk", left >= 10, told, "" if left >= 100 else "Free some room: a full disk lets nobody in.")
        return checks

    @property
    def usable(self) -> bool:
        return not (self._given_up or self._interrupted)

    def interrupt(self) -> None:
        self._interrupted = True
        for connection in (self._connection, self._working):
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.interrupt()

    def cancel_running(self) -> None:
        self._cancelled.set()
        with _calm:
            # Again and again: an interrupt between two statements interrupts nothing.
            while self in _executing:
                connection = self._working
                if connection is not None:
                    with contextlib.suppress(sqlite3.Error):
                        connection.interrupt()
                if self._executing_in == threading.get_ident():
                    return  # in a signal handler: it ends when that has returned
                _calm.wait(0.02)

    def close(self) -> None:
        self._interrupted = True
        self._end_executing()  # should an interrupt have parted it from its end
        self._put_out()
        self.let_go()

    def let_go(self) -> None:
        """Close the connection for now."""
        with _busy:
            connection, self._connection = self._connection, None
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()


# SQLite keeps tables of its file locks for the whole process; a child that was forked while they were in use would
# believe in locks that are not there, and wait for others for ever (sqlite.org/howtocorrupt.html, "Carrying an open
# database connection across a fork"). So no statement runs during a fork, and no connection is open. The beacons are
# file locks of their own, so nothing is lost by that. The SQL of a task cannot be cut in two: a fork waits for its end.
_busy = threading.RLock()
_sessions: weakref.WeakSet[SqliteSession] = weakref.WeakSet()
#: Guards what follows: which sessions run the SQL of tasks, and how many forks wait for their end, or are under way.
_calm = threading.Condition()
_executing: weakref.WeakSet[SqliteSession] = weakref.WeakSet()
_forks = 0
_still: int | None = None  # the thread that has taken _busy for its fork


def _before_fork() -> None:
    global _forks, _still
    mine = threading.get_ident()
    with _calm:
        _forks += 1
        # (Bounded, as a session that was dropped does not tell. Of this thread: a signal handler forks in the middle.)
        told = False
        while any(session._executing_in != mine for session in list(_executing)):
            if not _calm.wait(1.0) and not told:
                told = True
                log.warning("A fork waits until the SQL that a task runs on SQLite has ended")
    _busy.acquire()
    _still = mine
    for session in list(_sessions):
        session.let_go()


def _after_fork_in_parent() -> None:
    global _forks, _still
    # (What a signal handler raises while we wait ends the wait, but not the fork.)
    if _still == threading.get_ident():
        _still = None
        _busy.release()
    with _calm:
        _forks -= 1
        _calm.notify_all()


def _after_fork_in_child() -> None:
    global _busy, _calm, _executing, _forks, _still
    _busy, _calm = threading.RLock(), threading.Condition()
    _executing, _forks, _still = weakref.WeakSet(), 0, None
    _sessions.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _mode(query: str) -> str:
    """What ``?mode=`` says; there are no other options."""
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    mode = options.pop("mode", "rwc")
    if options or mode not in ("ro", "rw", "rwc"):
        raise ConfigurationError(
            f"?{query} is not known in the URL of an SQLite file; there are ?mode=ro (only look), ?mode=rw (the file "
            f"must be there) and ?mode=rwc (it is created when it is not, as without)"
        )
    return mode


def _access(path: Path) -> tuple[bool, str, str]:
    """For doctor: who else may use the file."""
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
            f"An SQLite file knows no roles: whoever may write it may take, keep and remove every lock, and put tasks "
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


def user_name(number: int | None = None) -> str:
    """The name of an operating system's user (left out: who runs this process), or else the number."""
    try:
        import pwd
    except ImportError:  # Windows
        import getpass

        return getpass.getuser()
    if number is None:
        number = os.geteuid()
    if number not in _user_names:  # a directory service may take long to answer
        try:
            _user_names[number] = pwd.getpwuid(number).pw_name
        except KeyError:
            _user_names[number] = str(number)
    return _user_names[number]


_user_names: dict[int, str] = {}


def _is_busy(exc: sqlite3.Error) -> bool:
    text = str(exc)
    return "database is locked" in text or "database table is locked" in text or "database schema is locked" in text


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _shown(row: Sequence[Any], *times: int) -> list[Any]:
    """A row for people; ``times`` are the columns that hold one. SQLite keeps anything in any column, so what somebody
    wrote by hand need not be what it should: that must not hide the other rows.
    """
    shown = [_text(value) if isinstance(value, bytes) else value for value in row]
    for column in times:
        shown[column] = _time(shown[column])
    return shown


def _time(seconds: object) -> datetime | None:
    if not isinstance(seconds, (int, float)):
        return None
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except (ValueError, OverflowError, OSError):  # beyond the years that can be told
        return None


def _statements(text: str) -> Iterator[str]:
    """Split a script at the ends of its statements."""
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


engine = SqliteEngine
