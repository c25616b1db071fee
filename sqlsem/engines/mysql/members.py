"""The beacons of members on MariaDB and MySQL: locks by name of their main sessions."""

from __future__ import annotations

import secrets
from typing import Any

from sqlsem.engines.mysql.connection import MysqlConnection
from sqlsem.engines.mysql.database import MysqlDatabase
from sqlsem.engines.statements.members import MemberStatements
from sqlsem.engines.statements.session import Probe
from sqlsem.values.errors import Unavailable
from sqlsem.values.locks import Heartbeat

#: The number of locks of rows that one heartbeat frees.
FREED = 1000


class MysqlMembers(MysqlConnection, MemberStatements):
    """The beacon of this session's member, and the locks of its rows, on which the waiters behind them sleep."""

    writes_heartbeats = True
    _beacon: str | None = None

    def __init__(self, engine: MysqlDatabase, connection: Any) -> None:
        super().__init__(engine, connection)
        #: The positions of the rows whose locks this session may keep.
        self._kept: set[int] = set()

    @property
    def beacons(self) -> MysqlMembers:
        return self

    def probe(self, name: object) -> Probe:
        """Test a beacon: see `sqlsem.engines.statements.session.Beacons`."""
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
