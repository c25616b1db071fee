"""SQL Server and Azure SQL, through pyodbc or mssql-python."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Generator, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from sqlsem import sql
from sqlsem.deadlocks import Found
from sqlsem.engines.base import Busy, Check, Creator, Disconnected, Engine, Options, Plan, Session
from sqlsem.engines.roles import already_upgrading
from sqlsem.errors import ConfigurationError, Deadlock, SchemaError, SqlsemError, TaskFailed, Unavailable
from sqlsem.model import (
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

#: Longest wait in one call, in seconds: each takes one of the server's worker threads.
_LONGEST_WAIT = 15.0
#: How texts of up to so many UTF-16 units are declared (pyodbc.SQL_WVARCHAR).
_TEXT, _SQL_WVARCHAR = 4000, -9
#: Tasks put in one round trip: ten parameters each, and a statement has 2,100 at most.
_TASKS_A_TRIP = 100
#: Names of this host.
_HERE = frozenset({"localhost", "127.0.0.1", "::1", ".", "(local)"})
#: How long a statement that was cancelled may go on, in seconds, before its connection is shut.
_CANCEL = 2.0
#: What comes after a login may take so many seconds, before the connection is shut.
_CONNECT = 5.0
#: A statement that the server does not answer at all is given up after its own time and this, in seconds.
_MARGIN = 30

_GO = re.compile(r"^[ \t]*GO[ \t]*\r?$", re.MULTILINE | re.IGNORECASE)
_NUMBER = re.compile(r"\((\d{2,9})\)")
#: Where the driver puts the server's own number; one that stands before may be part of a name.
_LAST_NUMBER = re.compile(r"\((\d{2,9})\)\s*\(SQL\w+\)")
#: What our own routines raise.
_OURS = range(50000, 50100)
#: Where there is no number: how what they raise begins, before any name.
_OUR_WORDS = (
    (50002, "sqlsem: busy: "),
    (50005, "sqlsem: this member is not known here"),
    (50003, "sqlsem: this connection changed sessions"),
    (50001, r"sqlsem: [\w ]+ must not be (called|started|ended|resumed|declared)? ?(inside|in) an open transaction"),
)
#: No number, and the one that engines which only speak T-SQL give to all they have no number for: the text must do.
_VAGUE = frozenset({0, 33557097})
_PREFIXES = re.compile(r"^(?:\s*\[[^\]]*\])+\s*")
_LOST_STATES = frozenset(
    {"08001", "08003", "08007", "08S01", "08S02", "01002", "HYT00", "HYT01", "HY117", "HY008", "IMC06"}
)
#: The line or the session is gone, or this server cannot serve the database now: another session may do better.
_LOST_NUMBERS = frozenset(
    {20, 64, 121, 233, 596, 997, 10053, 10054, 10060, 10061, 10928, 10929, 10936, 11001, 17142, 17197, 6002, 6005}
    | {20002, 20003, 20004, 20006, 20009, 20047, 40143, 40197, 40501, 40540, 40613, 42108, 42109, 49918, 49919, 49920}
    # It starts, is restored, changes its role, or lets in administrators only.
    | {615, 904, 921, 922, 923, 924, 927, 942, 952, 954, 955, 976, 978, 979, 982, 983, 988, 4060, 4064, 4221}
    | {18401, 18451, 18461, 35250, 49510}
)
#: A statement is the victim (deadlock, no locks left, no memory for it) or has waited for long: it may be repeated.
_BUSY_NUMBERS = frozenset({701, 1204, 1205, 1222, 8645, 8651, 50002})
#: The server knows who asks and lets nobody of that name in.
_LOGIN_NUMBERS = frozenset({18450, 18452, 18456, 18470, 18486, 18487, 18488})
#: Azure SQL: by the firewall, or as there is no such server.
_BARRED_NUMBERS = frozenset({40532, 40615, 40914, 47073})
#: Of a login, where there is no number: the database is not ready yet.
_STARTING_WORDS = ("cannot open database", "script upgrade mode", "is not currently available", "availability group")
#: Of TLS, what stays as it is however often one tries.
_TLS_WORDS = ("certificate", "unsupported protocol", "no protocols", "key too small", "no shared cipher")
_DRIVER_NUMBER = re.compile(r"ODBC Driver (\d+) for SQL Server")

_loading = threading.Lock()
_connecting = threading.Lock()
#: Connections that belong to a parent process: letting go of the objects would say goodbye in its name.
_abandoned: list[Any] = []


def _unlock_in_child() -> None:
    """Another thread may have been connecting when the process forked; in the child it does not exist."""
    global _loading, _connecting
    _loading, _connecting = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


class SqlServerEngine(Engine):
    """A SQL Server database (2016 or later), or one of Azure SQL."""

    name = "mssql"
    async_sessions = 8  # a wait blocks one at a time, in a thread
    setup_timeout = 15.0  # the first calls of procedures compile them

    def __init__(self, url: str, options: Options, creator: Creator | None = None) -> None:
        super().__init__(url, options, creator)
        self._words: dict[str, str] = {}
        self._let_in = False  # somebody of this process has been, by this login
        if url and "://" in url:
            self._words = _words_of_url(url)
        elif url:
            self._words = _words_of_odbc(url)
        self._driver_module: Any = None

    @property
    def where(self) -> str:
        if self.creator is not None:
            return "the SQL Server database of creator="
        server = self._word("server", "address", "addr", "servername") or self._word("dsn") or "localhost"
        port = self._word("port")
        database = self._word("database") or "(default)"
        return f"SQL Server database {database} on {server}{f':{port}' if port else ''}"

    @property
    def _port(self) -> int | None:
        """The server's, as far as it can be told without asking anybody."""
        server = self._word("server", "address", "addr", "servername")
        if server is None or "\\" in server:
            return None
        port = self._word("port") or server.partition(",")[2].strip() or "1433"
        return int(port) if port.isdigit() else None

    def _word(self, *names: str) -> str | None:
        for key, value in self._words.items():
            if key.lower() in names:
                return value
        return None

    @property
    def odbc_string(self) -> str:
        """The connection string for an ODBC driver, password and all."""
        words = dict(self._words)
        if (self._word("driver") or "").replace("_", "-").lower() == "mssql-python":
            words = {key: value for key, value in words.items() if key.lower() != "driver"}
        lower = {key.lower() for key in words}
        if "driver" not in lower and "dsn" not in lower and "filedsn" not in lower:
            words = {"Driver": _choose_driver(), **words}
        return _join(self._completed(words, "main"))

    def _completed(self, words: dict[str, str], purpose: str) -> dict[str, str]:
        lower = {key.lower(): key for key in words}
        driver = words.get(lower.get("driver", ""), "").lower()
        port = lower.get("port")
        found = dict(words)
        if "freetds" in driver or "tdsodbc" in driver:
            if "tds_version" not in lower:
                found["TDS_Version"] = "7.4"
        else:
            if port is not None and "server" in lower:  # Microsoft's drivers know no Port
                found[lower["server"]] = f"{found[lower['server']]},{found.pop(port)}"
            if "connectretrycount" not in lower:  # (a DSN's own is overridden)
                # The driver would connect anew in silence, and the beacon be gone.
                found["ConnectRetryCount"] = "0"
        if "app" not in lower:
            found["APP"] = f"sqlsem {purpose}"
        return found

    def reach(self, purpose: str) -> SqlServerSession:
        if self.creator is not None:
            session = SqlServerSession(self, self._created(), None)
            self._let_in = True
            return session
        # The socket is told by being new; so one at a time. A server that does not answer must not hold up others.
        alone = _connecting.acquire(timeout=2 * self.options.connect_timeout)
        before = _sockets() if alone else None
        # The driver bounds the login, but not what it asks after that.
        limit, port = self.options.connect_timeout + _CONNECT, self._port

        def shut() -> None:
            found = _new_socket(before, port) if port is not None else None
            if found is not None:
                found.shut()

        overdue = threading.Timer(limit, shut)
        overdue.daemon = True
        overdue.start()
        try:
            connection = self._connect(purpose)
            handle = _new_socket(before)
        finally:
            overdue.cancel()
            if alone:
                _connecting.release()
        self._let_in = True
        return SqlServerSession(self, connection, handle)

    def _created(self) -> Any:
        assert self.creator is not None
        try:
            connection = self.creator()
        except Exception as exc:
            if isinstance(exc, (ConfigurationError, Unavailable)):
                raise
            raise self._refused(exc) from exc
        self._autocommit(connection)
        return connection

    def _autocommit(self, connection: Any) -> None:
        try:
            connection.autocommit = True
        except AttributeError:  # a method or property with a setter of its own
            connection.setautocommit(True)

    def _connect(self, purpose: str) -> Any:
        wanted = (self._word("driver") or "").lower().replace("_", "-")
        if wanted == "mssql-python":
            module = _import("mssql_python")
        else:
            module = _import("pyodbc")
            if module is None:
                module = _import("mssql_python")
        if module is None:
            raise ConfigurationError(
                "SQL Server needs a driver, which is not installed; get it with: pip install 'sqlsem[mssql]'"
            )
        timeout = max(1, math.ceil(self.options.connect_timeout))
        words = dict(self._words)
        failure: Exception | None = None
        try:
            if module.__name__ == "mssql_python":
                words = {key: value for key, value in words.items() if key.lower() not in ("driver", "tds_version")}
                words = {
                    key: value
                    for key, value in self._completed(words, purpose).items()
                    if key.lower() not in ("app", "connectretrycount")
                }
                return module.connect(_join(words), autocommit=True, timeout=0)
            lower = {key.lower() for key in words}
            if not lower & {"driver", "dsn", "filedsn"}:
                words = {"Driver": _choose_driver(), **words}
            return module.connect(_join(self._completed(words, purpose)), autocommit=True, timeout=timeout)
        except ConfigurationError:
            raise
        except Exception as exc:
            failure = self._refused(exc)
        # Outside the handler: the driver's text could repeat parts of the string, so it is not chained.
        raise failure

    def _refused(self, exc: Exception) -> Exception:
        """What a failed attempt to connect means; never with a secret in it."""
        state, number, text = _details(exc)
        text, low = self._clean(text), text.lower()
        numbers = {number, *_numbers(exc)}  # Windows tells all there are; the login has always "failed", too
        if "ssl provider" in low and any(words in low for words in _TLS_WORDS):
            return ConfigurationError(
                f"No encrypted connection to {self.where}: {text}; give this computer the certificate of who signed "
                f"the server's, or, on a network that you trust, write TrustServerCertificate=yes"
            )
        if "encryption not supported on" in low:
            return ConfigurationError(
                f"{self.where} offers no encryption, and the driver wants it: {text}; give the server a certificate, "
                f"or, on a network that you trust, write Encrypt=no"
            )
        if numbers & _LOST_NUMBERS or (numbers <= _VAGUE and any(words in low for words in _STARTING_WORDS)):
            return Disconnected(f"Cannot reach {self.where}: {text}")
        if numbers & _BARRED_NUMBERS:
            return ConfigurationError(f"{self.where} does not let this computer in: {text}")
        if numbers & _LOGIN_NUMBERS or state == "28000" or (numbers <= _VAGUE and "login failed" in low):
            if self._let_in and not numbers & (_LOGIN_NUMBERS - {18456}):
                # The same login was good before. This is what a server says that starts, or is just failed over to.
                return Disconnected(f"{self.where} refuses a login that it took before: {text}")
            return ConfigurationError(f"{self.where} refuses this login: {text}; check user and password in the URL")
        if state in ("IM002", "01000"):
            return ConfigurationError(
                f"The ODBC driver cannot be loaded: {text}; install Microsoft's ODBC Driver 18 for SQL Server, or "
                f"FreeTDS, or: pip install mssql-python (and driver=mssql-python in the URL)"
            )
        return Disconnected(f"Cannot reach {self.where}: {text}")

    def _clean(self, text: str) -> str:
        for key, value in self._words.items():
            if key.lower() in ("pwd", "password", "accesstoken") and value:
                text = text.replace(value, "…")
        return text

    @property
    def here(self) -> bool:
        """Whether the server is on this host, as the URL says."""
        server = self._word("server", "address", "addr", "servername") or ""
        return re.split(r"[,\\]", server.removeprefix("tcp:"))[0].lower() in _HERE

    def checks_certificate(self, driver: str) -> bool | None:
        """Whether the driver makes sure that the server is who it says; None: that is set elsewhere."""
        trusted = (self._word("trustservercertificate") or "").lower()
        encrypt = (self._word("encrypt") or "").lower()
        if self.creator is not None or self._word("dsn", "filedsn") or not re.search(r"msodbcsql|mssql_python", driver):
            return None
        newest = re.search(r"msodbcsql\D*1[0-7]\D", driver) is None  # 17 and older do not by themselves
        return trusted not in ("yes", "true") and (
            encrypt in ("yes", "true", "mandatory", "strict") or (not encrypt and newest)
        )

    def pinning(self, cursor: Any, ticket: Ticket) -> Generator[Any, Any, bool]:
        yield cursor.execute(self.queries()["pin"], (ticket.resource, ticket.position, ticket.requesting_id))
        while cursor.description is None:
            if not (yield cursor.nextset()):
                return False
        row = yield cursor.fetchone()
        while (yield cursor.nextset()):
            pass
        return bool(row and row[0])


class SqlServerSession(Session):
    """One connection in autocommit mode: the routines make their own transactions."""

    def __init__(self, engine: SqlServerEngine, connection: Any, handle: _Handle | None) -> None:
        self._engine = engine
        self._options = engine.options
        self._queries = engine.queries()
        self._connection = connection
        self._handle = handle
        self._lost = False
        self._abandoned = False
        #: One cursor a statement: each keeps it prepared.
        self._cursors: dict[str, Any] = {}
        self._sized = _is_microsofts(connection)
        self._running: Any = None
        self._latest: Any = None  # the same, and what ran last
        self._stopped: Any = None  # what was cancelled
        self._cancelling = threading.Lock()  # a driver is in a cancel: what it works on must not be freed
        with contextlib.suppress(Exception):  # not every driver has it
            connection.timeout = int(_LONGEST_WAIT + max(self._options.patience, self._options.grace)) + _MARGIN

    def prepare(self, purpose: str) -> None:
        # The SQL of tasks waits for locks, and runs, as long as its author let it.
        patience = -1 if purpose == "work" else int(self._options.patience * 1000)
        if purpose == "work":
            with contextlib.suppress(Exception):  # as above
                self._connection.timeout = 0
        text = self._queries["session"].replace(":lock_timeout", str(patience))
        self._execute("session", text, ())
        if purpose in ("main", "wait"):
            with contextlib.suppress(SchemaError, ConfigurationError):  # told by check_schema, or by the first call
                self._run(f"warm_{purpose}")

    def _execute(self, name: str, text: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        if None in parameters:
            text = _with_nulls(text, tuple(value is None for value in parameters))
            parameters = [value for value in parameters if value is not None]
        with self._translated():
            key = text if len(parameters) < 20 else name
            cursor = self._cursors.get(key)
            if cursor is None:
                cursor = self._cursors[key] = self._connection.cursor()
            self._running = self._latest = cursor
            complete = False
            try:
                if parameters:
                    if self._sized:
                        cursor.setinputsizes([_size(value) for value in parameters])
                    cursor.execute(text, tuple(parameters))
                else:
                    cursor.execute(text)
                rows: list[tuple[Any, ...]] = []
                while True:
                    if cursor.description is not None:
                        rows += [tuple(row) for row in cursor.fetchall()]
                    if not cursor.nextset():
                        break
                complete = True
                return rows
            except Exception:
                complete = True  # the driver's word; the line is in order, or known to be broken
                self._cursors.pop(key, None)
                raise
            finally:
                self._running = None
                if not complete:  # what a signal handler raised: the answer is still to come
                    self._lost = True

    def _run(self, name: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self._execute(name, self._queries[name], parameters)

    def _value(self, name: str, *parameters: Any) -> Any:
        rows = self._run(name, *parameters)
        if not rows:
            raise Unavailable(f"{self._engine.where}: {name} gave no answer")
        return rows[0][0]

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        if self._lost:
            raise Disconnected(f"Lost the connection to {self._engine.where}")
        try:
            yield
        except (ConfigurationError, Unavailable, SchemaError, Deadlock):
            raise
        except Exception as exc:
            known = type(exc).__module__.startswith(("pyodbc", "mssql_python")) or self._engine.creator is not None
            if not known and not self._lost:
                raise
            raise self._meaning(*self._told(exc)) from exc

    def _meaning(self, state: str, number: int, text: str) -> Exception:
        where, schema = self._engine.where, self._options.schema
        text = self._engine._clean(text)
        low = text.lower()
        if number in _VAGUE:
            number = next((known for known, start in _OUR_WORDS if re.match(start, text)), number)
        # Numbers come first, and our own alone: the texts repeat names, which may have any words in them.
        if number in _OURS:
            if number == 50002:
                return Busy(f"{where}: somebody keeps a lock in an open transaction: {text}")
            if number == 50005:
                self._lost = True  # whoever keeps this session comes back as a new member
                return Disconnected(f"{where}: {text}")
            if number in (50001, 50003, 50006):
                return ConfigurationError(f"{where}: {text}")
            return Unavailable(f"{where}: {text}")
        vague = number in _VAGUE
        if self._lost or state in _LOST_STATES or number in _LOST_NUMBERS or (vague and _sounds_lost(low)):
            self._lost = True
            return Disconnected(f"Lost the connection to {where}: {text}")
        if number in (1205, 1204) or state == "40001" or (vague and "deadlock" in low):
            # Between rows of the tables, and over in a moment; no deadlock between locks, which find_deadlock tells.
            return Busy(f"{where} undid this statement to let others go on: {text}")
        if number in _BUSY_NUMBERS or (vague and ("lock timeout" in low or "lock request time out" in low)):
            return Busy(f"{where}: somebody keeps a lock in an open transaction, or it has too much to do: {text}")
        missing = "does not exist" in low or "could not find stored" in low or "invalid object name" in low
        if number in (208, 2812) or (vague and missing):
            return SchemaError(f"{where}: {text}; create or upgrade the sqlsem tables with: sqlsem init")
        if number == 229 or (vague and ("permission denied" in low or "permission was denied" in low)):
            return ConfigurationError(
                f"{where}: {text}; an administrator can add this user to {schema}_user (or {schema}_operator, for what "
                f"operators do): ALTER ROLE {schema}_user ADD MEMBER … (see: sqlsem sql mssql permissions)"
            )
        if number == 3906 or (vague and "read-only" in low):
            self._lost = True  # the primary may be had at the same address in a moment
            return Disconnected(f"{where} is read-only (a secondary replica?): {text}")
        return Unavailable(f"{where}: {text}")

    def _told(self, exc: Exception) -> tuple[str, int, str]:
        """As `_details`, but where the driver keeps the error to itself, the number comes from the server.

        One does behind a warning: pyodbc tells the first of several messages only, and SQL Server sends warnings as
        they come. mssql-python tells no numbers.
        """
        state, number, text = _details(exc)
        warned = state.startswith("01") and state not in _LOST_STATES
        silent = not number and type(exc).__module__.startswith("mssql_python") and not _sounds_lost(text.lower())
        if self._lost or not (warned or silent):
            return state, number, text
        _drain(self._latest)
        try:
            cursor = self._running = self._connection.cursor()
            cursor.execute(self._queries["last_error"])
            last = int(cursor.fetchone()[0])
            cursor.close()
        except Exception as more:
            return _details(more) if warned else (state, number, text)
        finally:
            self._running = None
        if warned and last:
            return "", last, f"error {last}, of which the driver tells only the warning that came before it: {text}"
        return state, last or number, text

    # -- membership ---------------------------------------------------------------------------------------------

    def enrol(self, host: str, pid: int, program: str) -> int:
        lease = self._options.lease
        lease_ms = None if lease is None else int(lease * 1000)
        return int(self._value("enrol", host[:255], pid, program[:255], int(self._options.grace * 1000), lease_ms))

    def resume(self, member_id: int) -> bool:
        return bool(self._value("resume_member", member_id))

    def ping(self, member_id: int) -> Pulse:
        rows = self._run("ping", member_id)
        if not rows or not rows[0][0]:
            return Pulse(False)
        return Pulse(
            True,
            frozenset(int(row[1]) for row in rows if row[1] is not None),
            frozenset(int(row[1]) for row in rows if row[1] is not None and row[2]),
        )

    def resign(self, member_id: int) -> None:
        self._run("resign", member_id)

    # -- requests -----------------------------------------------------------------------------------------------

    def register(
        self, member_id: int, requesting_id: str, owner: str, uid: str, requests: Sequence[Request], only_if_free: bool
    ) -> list[Ticket] | None:
        common = (member_id, requesting_id, owner, uid, int(only_if_free))
        patience = int(self._options.patience * 1000)
        if len(requests) == 1:
            one = requests[0]
            position, granted = self._run(
                "register", *common, one.resource, one.access, one.limit, one.weight, one.note, patience
            )[0]
            return None if position is None else [Ticket(one.resource, int(position), requesting_id, bool(granted))]
        asked = json.dumps(
            [
                {"resource": r.resource, "access": r.access, "limit": r.limit, "weight": r.weight, "note": r.note}
                for r in requests
            ]
        )
        rows = self._run("register_all", *common, asked, patience)
        return [Ticket(name, int(position), requesting_id, bool(granted)) for name, position, granted in rows] or None

    def release(self, ticket: Ticket, outcome: str) -> bool:
        return bool(self._value("release", ticket.resource, ticket.position, ticket.requesting_id, outcome) == 0)

    def cancel(self, member_id: int, uid: str, outcome: str) -> int:
        return int(self._value("cancel", member_id, uid, outcome))

    def wait(self, ticket: Ticket, timeout: float, nudge: threading.Event) -> bool | None:
        return self._wait("wait", (ticket.resource, ticket.position), timeout, nudge)

    def _wait(self, name: str, key: tuple[Any, ...], timeout: float, nudge: threading.Event) -> bool | None:
        deadline = time.monotonic() + min(timeout, _LONGEST_WAIT)
        pause = 0.01
        while True:
            left = max(0.0, deadline - time.monotonic())
            code = self._value(name, *key, int(left * 1000))
            if code == 0:
                return True
            if code == -2:
                return None
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if code in (-1, -3):  # nothing there to wait for, or not by this session
                if nudge.wait(min(pause, left)):
                    nudge.clear()
                pause = min(pause * 1.5, 0.1)

    def find_deadlock(self, member_id: int) -> Found | None:
        return Found.of_rows(self._run("find_deadlock", member_id))

    # -- conversions --------------------------------------------------------------------------------------------

    def begin_upgrade(self, ticket: Ticket, only_if_free: bool) -> Upgrading:
        key = (ticket.resource, ticket.position, ticket.requesting_id)
        code = self._run("begin_upgrade", *key, int(only_if_free), int(self._options.patience * 1000))[0][0]
        if code == -3:
            raise already_upgrading(self.entries(ticket.resource), ticket)
        return {0: Upgrading.DONE, 1: Upgrading.BEGUN, -1: Upgrading.NOT_YET, -2: Upgrading.GONE}[code]

    def upgrade(self, ticket: Ticket, timeout: float, nudge: threading.Event) -> bool | None:
        return self._wait("upgrade", (ticket.resource, ticket.position, ticket.requesting_id), timeout, nudge)

    def downgrade(self, ticket: Ticket) -> bool:
        return bool(self._value("downgrade", ticket.resource, ticket.position, ticket.requesting_id) == 0)

    # -- what people see and operators do -----------------------------------------------------------------------

    def entries(self, resource: str | None) -> list[Entry]:
        return [Entry(*_aware(row)) for row in self._run("entries", resource)]

    def history(
        self,
        resource: str | None,
        most: int,
        *,
        since: float | None = None,
        until: float | None = None,
        outcome: str | None = None,
    ) -> list[Past]:
        ages = [None if age is None else round(age * 1000) for age in (since, until)]
        return [Past(*_aware(row)) for row in self._run("past", resource, most, *ages, outcome)]

    def resources(self) -> list[Resource]:
        return [
            Resource(name, cap, bool(paused), stale, int(holding), int(waiting))
            for name, cap, paused, stale, holding, waiting in self._run("resources")
        ]

    def set_resource(self, resource: str, what: str, value: int | None) -> None:
        self._run("set_resource", resource, what, value)

    def revoke(self, position: int, force: bool) -> int:
        return int(self._value("revoke", position, int(force)))

    def reap(self) -> int:
        return int(self._value("reap"))

    def prune(self, most: int) -> int:
        return int(self._value("prune", most))

    # -- the work queue -----------------------------------------------------------------------------------------

    def put_tasks(self, queue: str, uid: str, tasks: Sequence[NewTask]) -> list[int]:
        asked = [
            (
                *(queue, f"{uid}.{number}", one.kind, one.body, one.order, round(one.after * 1000)),
                *(one.max_attempts, round(one.backoff * 1000), one.on_failure, one.note),
            )
            for number, one in enumerate(tasks, 1)
        ]
        if len(asked) == 1:
            return [int(self._run("put_task", *asked[0])[0][0])]
        # Not as JSON in one parameter: engines that only speak T-SQL do not read quotation marks in strings.
        found: list[int] = []
        self._run("begin")
        try:
            for start in range(0, len(asked), _TASKS_A_TRIP):
                some = asked[start : start + _TASKS_A_TRIP]
                text = "\n".join([self._queries["put_task"]] * len(some))
                rows = self._execute("put_tasks", text, [value for one in some for value in one])
                found += [int(row[0]) for row in rows]
            self._run("commit")
        except BaseException:
            with contextlib.suppress(Unavailable):  # lost, and the transaction with it
                self._run("rollback")
            raise
        return found

    def claim_task(self, member_id: int, queue: str, owner: str, uid: str, again: bool) -> Claimed | None:
        rows = self._run("claim_task", member_id, queue, owner, uid, int(again))
        return Claimed(*rows[0]) if rows else None

    def end_task(self, member_id: int, end: End) -> str | None:
        ended = (member_id, end.task_id, end.attempt, end.outcome, end.result, end.error)
        status: str | None = self._run("end_task", *ended)[0][0]
        return status

    def next_task(
        self, member_id: int, end: End, queue: str, owner: str, uid: str, again: bool
    ) -> tuple[str | None, Claimed | None]:
        ended = (member_id, end.task_id, end.attempt, end.outcome, end.result, end.error)
        status, *claimed = self._run("next_task", *ended, queue, owner, uid, int(again))[0]
        return status, None if claimed[0] is None else Claimed(*claimed)

    def next_tasks(
        self, member_id: int, ends: Sequence[End], queue: str, owner: str, uid: str, again: bool, most: int
    ) -> tuple[list[str | None], list[Claimed]]:
        # One batch of a statement for each: as JSON in one parameter, results and errors with quotation marks would be
        # mangled by engines that only speak T-SQL.
        statuses: list[str | None] = []
        for start in range(0, len(ends), _TASKS_A_TRIP):
            some = ends[start : start + _TASKS_A_TRIP]
            text = [self._queries["end_task"]] * len(some)
            values: list[Any] = []
            for end in some:
                values += [member_id, end.task_id, end.attempt, end.outcome, end.result, end.error]
            last = start + len(some) == len(ends)
            if last and most:
                text.append(self._queries["claim_tasks"])
                values += [member_id, queue, owner, uid, int(again), most]
            rows = self._execute("next_tasks", "\n".join(text), values)
            statuses += [row[0] for row in rows[: len(some)]]
            if last:
                return statuses, [Claimed(*row) for row in rows[len(some) :]]
        rows = self._run("claim_tasks", member_id, queue, owner, uid, int(again), most) if most else []
        return [], [Claimed(*row) for row in rows]

    def return_claim(self, member_id: int, queue: str, uid: str) -> int:
        return int(self._run("return_claim", member_id, queue, uid)[0][0])

    def recover_tasks(self, queue: str | None, mine: int | None) -> int:
        return int(self._run("recover_tasks", queue, mine)[0][0])

    def queue_state(self, queue: str) -> QueueState:
        pending, running, next_pending, failed, error = self._run("queue_state", queue)[0]
        return QueueState(bool(pending), bool(running), bool(next_pending), failed, error)

    def list_tasks(self, queue: str | None, status: str | None, most: int) -> list[TaskEntry]:
        return [TaskEntry(*_aware(row)) for row in self._run("list_tasks", queue, status, most)]

    def task_attempts(self, task_id: int) -> list[Attempt]:
        return [Attempt(*_aware(row)) for row in self._run("task_attempts", task_id)]

    def set_task(self, task_id: int, what: str) -> int:
        return int(self._run("set_task", task_id, what)[0][0])

    def prune_tasks(self, most: int) -> int:
        return int(self._run("prune_tasks", most)[0][0])

    def execute(self, text: str) -> str | None:
        count = -1
        self._run("execute")
        try:
            cursor = self._running = self._latest = self._connection.cursor()
            with contextlib.suppress(Exception):  # not every driver has it
                cursor.noscan = True  # a brace is a brace
            try:
                cursor.execute(text)  # as a batch: in a scope of its own it could not end the transaction
                while True:
                    if cursor.rowcount >= 0:
                        count = max(count, 0) + cursor.rowcount
                    if not cursor.nextset():
                        break
            finally:
                self._running = None
        except Exception as exc:
            state, number, words = self._told(exc)
            # What a driver says of a statement that was cancelled depends on how far it was; the line is in order.
            stopped = state == "HY008" or (self._stopped is self._latest and not self._lost)
            if not stopped:
                meaning = self._meaning(state, number, words)
                if self._lost:
                    raise meaning from exc
            with contextlib.suppress(Unavailable):  # lost, and the transaction with it
                self._run("rollback")
            if stopped:
                raise TaskFailed("The SQL was cancelled") from exc
            # The task's own fault: none of the advice that our own statements would give.
            raise TaskFailed(f"The SQL failed: {self._engine._clean(words)}") from exc
        if self._stopped is cursor:  # that need not be told as an error, though the server has stopped in the middle
            self._run("rollback")
            raise TaskFailed("The SQL was cancelled")
        if self._value("executed") > 1:
            raise TaskFailed("The SQL left a transaction open, which was rolled back; commit at its end")
        return None if count < 0 else f"{count} row{'' if count == 1 else 's'}"

    # -- rounds -------------------------------------------------------------------------------------------------

    def recover_rounds(self, name: str | None, mine: int | None) -> list[int]:
        return [int(row[0]) for row in self._run("recover_rounds", name, mine)]

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
        asked = ("\n".join(parts), round(window * 1000))  # names contain no control characters
        return PartStart(*self._run("start_part", member_id, name, part, *asked, owner, uid, *then)[0])

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
        outcome = "succeeded" if error is None else "failed"
        code, number, is_last, status, attempt, kind, body = self._run(
            "end_part", member_id, name, part, uid, outcome, error, owner, *then
        )[0]
        ours = None if attempt is None else Continuation(number, name, attempt, kind, body)
        return PartEnd(code, number, bool(is_last), status, ours)

    def claim_then(
        self, member_id: int, name: str | None, round_id: int | None, owner: str, uid: str, own: bool
    ) -> Continuation | None:
        rows = self._run("claim_then", member_id, name, round_id, owner, uid, int(own))
        return Continuation(*rows[0]) if rows else None

    def return_then(self, member_id: int, uid: str) -> bool:
        return bool(self._value("return_then", member_id, uid))

    def end_then(self, member_id: int, round_id: int, attempt: int, error: str | None) -> bool:
        return bool(self._value("end_then", member_id, round_id, attempt, error))

    def list_rounds(self, name: str | None, round_id: int | None, most: int) -> list[RoundEntry]:
        return RoundEntry.of_rows(_aware(row) for row in self._run("list_rounds", name, round_id, most))

    # -- upkeep -------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, str] | None:
        if self._value("version") is None:
            return None
        return {str(name): str(value) for name, value in self._run("settings")}

    def install(self, plan: Plan) -> None:
        self._execute("install", "SET LOCK_TIMEOUT -1", ())
        self._execute("install", "BEGIN TRANSACTION", ())
        try:
            self._run("install_lock")
            there = self._value("version") is not None
            found = self._run("installed") if there else []
            for version, text in plan(int(found[0][0]) if found else 0):
                for batch in _GO.split(text):
                    if batch.strip():
                        self._execute("install", batch, ())
                if version is not None:
                    self._run("set_version", str(version))
            self._execute("install", "COMMIT TRANSACTION", ())
        except BaseException:
            with contextlib.suppress(Exception):
                self._execute("install", "IF @@TRANCOUNT > 0 ROLLBACK TRANSACTION", ())
            raise

    def diagnose(self) -> list[Check]:
        import secrets

        texts = sql.queries("mssql", self._options.schema, self._options.table, "doctor")
        schema = self._options.schema
        checks: list[Check] = []

        def ask(name: str, *parameters: Any) -> tuple[Any, ...]:
            return self._execute(f"doctor {name}", texts[name], parameters)[0]

        def check(name: str, ok: bool, detail: str, mend: str = "") -> None:
            checks.append(Check(name, ok, detail, mend))

        check("driver", True, self._driver())
        version, product, edition, updateable = ask("server")
        first = str(version).partition("\n")[0].strip()
        major = int(str(product).partition(".")[0]) if str(product).partition(".")[0].isdigit() else 0
        ok = major >= 13 or edition in (5, 8) or "babelfish" in first.lower()
        check("server", ok, first, "" if ok else "Use SQL Server 2016 or later, or Azure SQL.")
        if updateable == "READ_ONLY":
            check("primary", False, "the database is read-only here", "Connect to the primary replica.")
        else:
            check("primary", True, "writable")

        user, there, execute, operate = ask("permission")
        if there:
            ok = bool(execute)
            mend = f"As an administrator: ALTER ROLE {schema}_user ADD MEMBER [{user}]; or, without tables: sqlsem init"
            told = f"{user} may take locks{' and operate' if operate else ''}"
            check("permission", ok, told if ok else f"{user} may not execute {schema}.register", "" if ok else mend)

        snapshot, durability, level = ask("settings")
        check("isolation", True, "read committed" + (" with row versions" if snapshot else " with locks"))
        mend = "A crash of the server can undo what was granted; prefer DELAYED_DURABILITY = DISABLED or ALLOWED."
        ok = durability != "FORCED"
        check("durability", ok, f"delayed durability is {str(durability).lower()}", "" if ok else mend)
        if level < 130 and "babelfish" not in first.lower():
            mend = "ALTER DATABASE … SET COMPATIBILITY_LEVEL = 130 (or later); all_of needs OPENJSON."
            check("compatibility", False, f"the database's compatibility level is {level}", mend)

        before = time.time()
        (clock,) = ask("clock")
        after = time.time()
        shown = clock.replace(tzinfo=timezone.utc).timestamp()
        apart = max(0.0, before - shown, shown - after)
        mend = "" if apart <= 60 else "Harmless here, as only the database's clock counts; but set one of them right."
        check("clock", True, f"the database's and ours are {apart:.1f} s apart", mend)

        checks.append(self._encryption(texts["encryption"]))

        # A pool that lends its connections out by the transaction breaks whatever belongs to a session.
        mend = "Turn connection pooling off, or use a lease: sqlsem --lease 30 …, connect(lease=30)."
        name = f"sqlsem.{schema}.doctor.{secrets.token_hex(8)}"
        session, taken = ask("beacon_take", name)
        other = self._engine.connect("look")
        try:
            assert isinstance(other, SqlServerSession)
            other_session, seen = other._execute("doctor", texts["beacon_look"], (name,))[0]
        finally:
            other.close()
        session_after, given = ask("beacon_give", name)
        if session == session_after and session != other_session and taken >= 0 and seen < 0 and given:
            check("beacon", True, "a session's lock outlives its statement, and excludes others")
        elif self._options.lease is not None:
            check("beacon", True, "connections are shared by a pool; the lease stands in for the beacon")
        else:
            check("beacon", False, "a session's lock does not stay with its connection: a pool shares it", mend)
        return checks

    def _encryption(self, text: str) -> Check:
        told = "it is not told here whether the line is encrypted (that takes VIEW SERVER STATE)"
        encrypted = None
        with contextlib.suppress(SqlsemError, IndexError):
            encrypted = self._execute("doctor encryption", text, ())[0][0] == "TRUE"
            told = "the line is encrypted" if encrypted else "the line is not encrypted"
        checked = self._engine.checks_certificate(self._driver())
        if encrypted is not False and checked is not None:
            told += f"; the server's certificate is {'' if checked else 'not '}checked"
        mend = "Over a network that you do not trust, write Encrypt=yes and TrustServerCertificate=no."
        if self._engine.here or (encrypted is not False and checked):
            mend = ""
        return Check("encryption", True, told, mend)

    def _driver(self) -> str:
        module = type(self._connection).__module__.partition(".")[0]
        told = module
        with contextlib.suppress(Exception):
            import importlib.metadata

            told = f"{module} {importlib.metadata.version(module.replace('_', '-'))}"
        if module == "pyodbc":
            with contextlib.suppress(Exception):
                info, pyodbc = self._connection.getinfo, _import("pyodbc")
                told += f", {info(pyodbc.SQL_DRIVER_NAME)} {info(pyodbc.SQL_DRIVER_VER)}"
        return told

    @property
    def usable(self) -> bool:
        return not self._lost

    def abandon(self) -> None:
        self._lost = self._abandoned = True
        _abandoned.append((self._connection, self._cursors))
        handle, self._handle = self._handle, None
        if handle is not None and handle.there():
            # The parent's socket must not stay open here, or the server would not see the parent die. What is put in
            # its place keeps the number from being given to a file of the child's.
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, handle.number)
                os.close(null)

    def interrupt(self) -> None:
        self._lost = True
        running, handle = self._running, self._handle
        if handle is not None:
            handle.shut()
        elif running is not None:
            with contextlib.suppress(Exception):
                running.cancel()

    def cancel_running(self) -> None:
        running = self._running
        if running is None:
            return

        def insist() -> None:
            if self._running is running:
                self.interrupt()

        # The server is told first, as it may find out late that a socket was shut; but it need not listen.
        timer = threading.Timer(_CANCEL, insist)
        timer.daemon = True
        timer.start()
        with self._cancelling, contextlib.suppress(Exception):
            if self._running is running:
                self._stopped = running
                running.cancel()

    def close(self) -> None:
        self._lost = True
        if self._abandoned:
            return
        handle, self._handle = self._handle, None
        self._cursors.clear()
        if handle is not None:
            handle.shut()  # a pool of the driver manager's would keep the connection open, and its locks
        if not self._cancelling.acquire(timeout=_CANCEL):
            _abandoned.append((self._connection, self._latest))  # for ever; the line is shut all the same
            return
        try:
            with contextlib.suppress(Exception):
                self._connection.close()
        finally:
            self._cancelling.release()


# -- connection strings ---------------------------------------------------------------------------------------------


def _words_of_url(url: str) -> dict[str, str]:
    bad = "This is not a URL for SQL Server; write mssql://user:password@host:1433/database"
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
        query = urllib.parse.parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ConfigurationError(bad) from None  # the message may repeat parts of the URL
    words: dict[str, str] = {}
    names = {"driver": "Driver", "encrypt": "Encrypt", "trustservercertificate": "TrustServerCertificate", "app": "APP"}
    for key, value in query:
        words[names.get(key.lower(), key)] = value
    lower = {key.lower() for key in words}
    if host and "server" not in lower:
        words["Server"] = host
        if port:
            words["Port"] = str(port)
    if parts.path.strip("/"):
        words["Database"] = urllib.parse.unquote(parts.path.strip("/"))
    if parts.username:
        words["UID"] = urllib.parse.unquote(parts.username)
        words["PWD"] = urllib.parse.unquote(parts.password or "")
    elif not lower & {"authentication", "trusted_connection", "uid"}:
        words["Trusted_Connection"] = "yes"
    return words


def _words_of_odbc(text: str) -> dict[str, str]:
    """``Driver={…};Server=…`` as a dictionary; a brace in a braced value is doubled."""
    words: dict[str, str] = {}
    at = 0
    while at < len(text):
        key, separator, _ = text[at:].partition("=")
        if not separator:
            if text[at:].strip(" ;\t\r\n"):
                raise ConfigurationError("This ODBC string has a part without '='; write Key=value;Key=value")
            break
        at += len(key) + 1
        if text.startswith("{", at):
            match = re.compile(r"\{((?:[^}]|\}\})*)\}\s*(?:;|$)").match(text, at)
            if match is None:
                raise ConfigurationError("This ODBC string has a '{' without its '}'; a '}' inside is written '}}'")
            value, at = match.group(1).replace("}}", "}"), match.end()
        else:
            value = text[at:].partition(";")[0]
            at += len(value) + 1
            value = value.strip()
        words[key.strip(" ;\t\r\n")] = value
    return words


def _join(words: dict[str, str]) -> str:
    return ";".join(f"{key}={_escaped(value)}" for key, value in words.items())


def _escaped(value: str) -> str:
    if re.fullmatch(r"[^;{}\[\]()?*!@=\s](?:[^;{}\[\]()?*!@=]*[^;{}\[\]()?*!@=\s])?", value):
        return value
    return "{" + value.replace("}", "}}") + "}" if value else value


def _choose_driver() -> str:
    pyodbc = _import("pyodbc")
    there = list(pyodbc.drivers()) if pyodbc is not None else []
    numbered = [(int(match[1]), name) for name in there if (match := _DRIVER_NUMBER.fullmatch(name))]
    if numbered:
        return str(max(numbered)[1])
    for name in there:
        if "freetds" in name.lower():
            return str(name)
    raise ConfigurationError(
        "No ODBC driver for SQL Server is installed; install Microsoft's ODBC Driver 18 for SQL Server or FreeTDS, or: "
        "pip install 'sqlsem[mssql]' mssql-python (and driver=mssql-python in the URL)"
    )


def _import(name: str) -> Any:
    """The driver, with its pool off; None when it is not there."""
    import importlib

    with _loading:
        try:
            module = importlib.import_module(name)
        except ImportError:
            return None
        if name == "pyodbc":
            vars(module)["pooling"] = False  # a pool would keep our session, and its locks, after close()
        else:
            with contextlib.suppress(Exception):
                module.pooling(enabled=False)
        return module


# -- errors and values ----------------------------------------------------------------------------------------------


def _details(exc: Exception) -> tuple[str, int, str]:
    """SQLSTATE, the server's own number (0: none) and the message in one line."""
    state, text = _state_and_text(exc)
    numbers = _numbers(exc)
    text = text.partition("\n")[0]
    text = _PREFIXES.sub("", text.partition("DDBC Error: ")[2] or text)
    text = re.sub(r"\s*\(SQL\w+\)\s*$", "", text.strip())
    return state, numbers[-1] if numbers else 0, text


def _state_and_text(exc: Exception) -> tuple[str, str]:
    if len(exc.args) >= 2 and isinstance(exc.args[0], str) and len(exc.args[0]) == 5:
        return exc.args[0], str(exc.args[1])
    if len(exc.args) >= 2 and isinstance(exc.args[1], str) and len(exc.args[1]) == 5:
        return exc.args[1], str(exc.args[0])
    return "", str(exc)


def _numbers(exc: Exception) -> list[int]:
    """The server's numbers that the driver tells."""
    if type(exc).__module__.startswith("mssql_python"):
        return []  # it leaves them out; what looks like one is part of a name
    text = _state_and_text(exc)[1]
    return [int(one) for one in _LAST_NUMBER.findall(text) or _NUMBER.findall(text)]


def _drain(cursor: Any) -> None:
    """Read what is left of a statement's answer, errors and all: until then no other statement can be sent."""
    for _ in range(1000):
        try:
            if not cursor.nextset():
                return
        except Exception as exc:
            if _state_and_text(exc)[0] in _LOST_STATES:
                return


@functools.lru_cache(maxsize=256)
def _with_nulls(text: str, nulls: tuple[bool, ...]) -> str:
    """NULL in the place of some of the marks: as a parameter, the driver would ask the server for its type, in a round
    trip of its own.
    """
    first, *others = text.split("?")
    return first + "".join(f"{'NULL' if null else '?'}{rest}" for null, rest in zip(nulls, others, strict=True))


def _is_microsofts(connection: Any) -> bool:
    """Whether a connection is pyodbc's, through Microsoft's driver."""
    if type(connection).__module__ != "pyodbc":
        return False
    pyodbc = _import("pyodbc")
    try:
        return "msodbcsql" in str(connection.getinfo(pyodbc.SQL_DRIVER_NAME)).lower()
    except pyodbc.Error:  # it does not say: then nothing is lost but a little speed
        return False


def _size(value: Any) -> Any:
    """How to declare a parameter, where the driver would declare texts by their lengths: each would be a statement of
    its own to the server, with a plan of its own to keep.
    """
    if isinstance(value, str) and len(value.encode("utf-16-le", "surrogatepass")) <= 2 * _TEXT:
        return _SQL_WVARCHAR, _TEXT, 0
    return None


_LOST_WORDS: tuple[str, ...] = (
    "communication link failure",
    "tcp provider",
    "connection is closed",
    "connection is broken",
    "closed connection",
    "write to the server failed",
    "read from the server failed",
    "unable to connect",
    "timeout expired",
    "dbprocess is dead",
    "terminating connection",
    "server closed the connection",
    "killed state",
)


def _sounds_lost(text: str) -> bool:
    return any(words in text for words in _LOST_WORDS)


def _aware(row: tuple[Any, ...]) -> list[Any]:
    return [value.replace(tzinfo=timezone.utc) if isinstance(value, datetime) else value for value in row]


# -- the socket beneath ---------------------------------------------------------------------------------------------


def _sockets() -> dict[int, str] | None:
    """This process's sockets, number → identity, where the system tells (Linux)."""
    found = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return None
    for name in names:
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


class _Handle(NamedTuple):
    """A socket by its number, which may be another's once its owner has closed it, and by what the system calls it."""

    number: int
    identity: str

    def there(self) -> bool:
        """Whether the number is still this socket's."""
        try:
            return os.readlink(f"/proc/self/fd/{self.number}") == self.identity
        except OSError:
            return False

    def shut(self) -> None:
        """Shut it down: the server sees that, and a thread that waits for an answer which may never come wakes up."""
        if self.there():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.number)) as line:
                line.shutdown(socket.SHUT_RDWR)


def _new_socket(before: dict[int, str] | None, port: int | None = None) -> _Handle | None:
    """The one connected TCP socket that was not there before; None when that cannot be told. ``port``: of its peer."""
    after = _sockets() if before is not None else None
    if before is None or after is None:
        return None
    new = []
    for number, target in after.items():
        if before.get(number) == target:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as line:
            if line.family in (socket.AF_INET, socket.AF_INET6) and line.type == socket.SOCK_STREAM:
                peer = line.getpeername()
                if port is None or peer[1] == port:
                    new.append(_Handle(number, target))
    return new[0] if len(new) == 1 else None


SqlServerEngine.session_class = SqlServerSession
engine = SqlServerEngine
