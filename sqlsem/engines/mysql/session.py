"""The sessions of MariaDB and MySQL: the beacons of members are locks by name of their main sessions."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pymysql
from pymysql.constants import ER

from sqlsem.engines import borrowed
from sqlsem.engines.base import Busy
from sqlsem.engines.mysql.connection import Answer, MysqlConnection, for_driver, rows_of
from sqlsem.engines.mysql.doctor import MysqlDoctor
from sqlsem.engines.protocol import Check, Plan
from sqlsem.engines.statements.all import AllStatements
from sqlsem.engines.statements.session import BorrowedStatements, Probe
from sqlsem.util.printable import first_line
from sqlsem.values.errors import Unavailable
from sqlsem.values.locks import Heartbeat

if TYPE_CHECKING:
    from sqlsem.engines.mysql.engine import MysqlEngine

#: The number of locks of rows that one heartbeat frees.
FREED = 1000
#: Seconds for which an installation waits for another one.
INSTALLATION_SECONDS = 60
#: The errors of ALTER TABLE for a column or an index that exists.
ADDED_BEFORE = (ER.DUP_FIELDNAME, ER.DUP_KEYNAME)


class MysqlSession(MysqlConnection, AllStatements):
    """One connection with all capabilities: the beacon of its member, and the locks of its rows, on which the waiters
    behind them sleep.
    """

    writes_heartbeats = True
    _working: Any = None  # the connection of the SQL of a task
    _beacon: str | None = None

    def __init__(self, engine: MysqlEngine, connection: Any) -> None:
        super().__init__(engine, connection)
        #: The positions of the rows whose locks this session may keep.
        self._kept: set[int] = set()

    @property
    def beacons(self) -> MysqlSession:
        return self

    def probe(self, name: object) -> Probe:
        if not isinstance(name, str):
            return Probe(None)
        owner = self.row("beacon_owner", (f"{self.lock_prefix}{name}",))[0]
        return Probe(None if owner is None else True)  # (a live member may have lost its session, so never False)

    def renew_alone(self, member_id: int) -> bool:
        # Not under the gate, which a transaction of another program may keep. (A removal locks the member's row before
        # it decides: see `given_up` in client.sql.)
        return self.run("renew", (member_id,)).rowcount == 1

    def login(self) -> str:
        return self.login_name

    def create_beacon(self) -> str | None:
        if self.options.lease is not None:
            return None
        self.remove_beacon()
        beacon = secrets.token_hex(12)
        if self.row("take_beacon", (f"{self.lock_prefix}{beacon}",))[0] != 1:
            raise Unavailable(
                f"{self.engine.label} gives no lock by name (GET_LOCK); see: sqlsem doctor", code="session"
            )
        self._beacon = beacon
        return beacon

    def remove_beacon(self) -> None:
        beacon, self._beacon = self._beacon, None
        if beacon is not None and self.usable:
            self.run("give_beacon", (f"{self.lock_prefix}{beacon}",))

    def insert(self, values: dict[str, Any]) -> int:
        position = super().insert(values)
        if self.options.lease is None:
            self._kept.add(position)
            self.after_commit(f"GET_LOCK('{self.lock_prefix}{position}', 0)")
        return position

    def heartbeat(self, member_id: int) -> Heartbeat:
        answer = super().heartbeat(member_id)
        # Other sessions and triggers remove rows, too. The locks of these are freed here.
        if gone := sorted(self._kept - answer.positions)[:FREED]:
            locks = ", ".join(f"RELEASE_LOCK('{self.lock_prefix}{position}')" for position in gone)
            self.execute_text(f"DO {locks}")
            self._kept.difference_update(gone)
        return answer

    def remove(self, resource: str, position: int, requesting_id: str | None, outcome: str) -> bool:
        if self.options.lease is None:
            self._kept.discard(position)
            self.after_commit(f"RELEASE_LOCK('{self.lock_prefix}{position:d}')")
        return super().remove(resource, position, requesting_id, outcome)

    def register_alone(self, values: dict[str, Any]) -> int | None:
        answer = self.run_alone("insert_first", {**values, "prefix": self.lock_prefix})
        _begin, _gate, inserted, *_ = answer.rowcounts
        if inserted:
            assert answer.lastrowid is not None
            self._kept.add(answer.lastrowid)
            return answer.lastrowid
        self.execute_text(f"DO RELEASE_LOCK('{self.lock_prefix}{answer.lastrowid}')")
        return None

    def leave_alone(self, values: dict[str, Any]) -> bool:
        lock = f"{self.lock_prefix}{values['position']}"
        _begin, _gate, _history, deleted, *_ = self.run_alone("leave_alone", {**values, "lock": lock}).rowcounts
        self._kept.discard(values["position"])
        return deleted == 1

    # -- the tables -----------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, str] | None:
        return super().settings() or None

    def install(self, plan: Plan) -> None:
        if self.row("lock_installation", {"seconds": INSTALLATION_SECONDS})[0] != 1:
            raise Busy(f"{self.engine.label}: another program installs the tables; try again")
        # (A statement that changes tables commits by itself. The lock ends with this session.)
        settings = self.settings()
        if settings is None:
            self.require_own_table()
        for version, text in plan(settings or {}):
            for statement in statements_of(text):
                self._run_statement(for_driver(statement))
            if version is not None:
                self.run("set_version", (str(version),))
        self.follow_origin()  # The first session has nothing to write then; another transaction may keep the settings.

    def _run_statement(self, statement: str) -> None:
        """Run a statement of a script. (An interrupted installation may have added its columns and indexes.)"""
        try:
            self.execute_text(statement)
        except Unavailable as exc:
            if not isinstance(exc.__cause__, pymysql.MySQLError) or exc.__cause__.args[0] not in ADDED_BEFORE:
                raise

    def diagnose(self) -> list[Check]:
        return MysqlDoctor(self).examine()

    # -- the SQL of tasks ---------------------------------------------------------------------------------------

    def execute(self, text: str) -> str | None:
        # It gets a connection of its own, with the server's settings, because it may manage transactions itself.
        self._working = connection = self.engine.open_connection()
        try:
            with connection.cursor() as cursor:
                cursor.execute("START TRANSACTION")
                cursor.execute(text)
                while cursor.nextset():
                    pass
            connection.commit()
        except (pymysql.MySQLError, OSError) as exc:
            if isinstance(exc, pymysql.MySQLError) and connection.open:
                raise Unavailable(f"{self.engine.label}: {first_line(exc.args[-1] if exc.args else exc)}") from exc
            raise self.translate(exc) from exc
        finally:
            self._working = None
            with contextlib.suppress(pymysql.MySQLError, OSError):
                connection.close()
        return None

    def cancel_running(self) -> None:
        working = self._working
        if working is not None:
            with contextlib.closing(self.engine.open_connection()) as killer, killer.cursor() as cursor:
                cursor.execute(self.queries["kill"], (working.thread_id(),))


class _NewerTask(Exception):
    """Another task has the key of a task that was put."""


class BorrowedMysqlSession(BorrowedStatements, MysqlSession):
    """A session that runs its statements by the caller's cursor."""

    def __init__(self, engine: MysqlEngine, cursor: Any) -> None:
        self.engine, self.options, self.queries = engine, engine.options, engine.queries()
        self._cursor = cursor
        self.login_name = str(self.row("facts")[0])

    def execute_text(self, text: str, parameters: Any = ()) -> Answer:
        """Run one statement. (The caller's connection may not take several.)"""
        borrowed.execute(self._cursor, text if parameters else text % (), parameters)
        return Answer(rows_of(self._cursor), [self._cursor.rowcount], self._cursor.lastrowid)

    def run(self, name: str, parameters: Any = ()) -> Answer:
        answer = super().run(name, parameters)
        if name == "put_task" and answer.rowcount > 1:  # it updated a row instead
            raise _NewerTask
        return answer

    def _put_with_key(self, values: dict[str, Any], before: dict[str, Any], replace: bool) -> int:
        try:
            return super()._put_with_key(values, before, replace)
        except _NewerTask:
            # The task with this key is newer than the snapshot of the caller's transaction, which sees it from here on.
            self.run("disown_task", {"uid": values["uid"]})
            return super()._put_with_key(values, before, replace)


def statements_of(text: str) -> Iterator[str]:
    """Yield the statements of a script, without comments. ``DELIMITER`` lines set their end, as in other tools."""
    delimiter, statement = ";", ""
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("--"):
            continue
        change = re.match(r"DELIMITER (\S+)\s*$", line)
        if change:
            delimiter = change[1]
            continue
        statement += line
        if line.rstrip().endswith(delimiter):
            body = statement.rstrip().removesuffix(delimiter)
            statement = ""
            if body.strip():
                yield body
