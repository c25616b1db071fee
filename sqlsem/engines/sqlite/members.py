"""The beacons of members on SQLite: files that they keep locked, beside the database."""

from __future__ import annotations

import time

from sqlsem.engines.sqlite import fork
from sqlsem.engines.sqlite.beacons import Beacons
from sqlsem.engines.sqlite.connection import SqliteConnection
from sqlsem.engines.sqlite.users import user_name
from sqlsem.engines.statements.members import MemberStatements

#: A free beacon that no member names is orphaned after this many seconds.
ORPHANED_SECONDS = 60.0


class SqliteMembers(SqliteConnection, MemberStatements):
    """The beacon of this session's member, and the file that has its rows."""

    @property
    def beacons(self) -> Beacons:
        return self.engine.beacons

    def login(self) -> str:
        return user_name()

    def create_beacon(self) -> str | None:
        if self.options.lease is not None:
            return None
        with fork.forks_blocked:  # so that no fork comes in between
            before, self.beacon = self.beacon, self.engine.beacons.create()
        if before is not None:
            before.remove()
        return self.beacon.name

    def keep_beacon(self, member_id: int) -> bool:
        self.require_in_place(file_by_file=True)
        # If the beacon's file was removed, create a new one: other processes cannot test a missing beacon.
        if self.beacon is None:
            return True
        self.beacon.touch()
        return self.beacon.in_place or self.reattach_member(member_id)

    def follow_member(self) -> bool:
        known, self.engine.files = self.engine.files, self.files
        return known is None or self.files is None or known.database == self.files.database

    def sweep_beacons(self) -> None:
        known = {row["beacon"] for row in self.rows("beacons")}
        for name in self.engine.beacons.names():
            if name not in known:
                with self.engine.beacons.probe(name) as probe:
                    age = 0.0 if probe.seen is None else abs(time.time() - probe.seen)
                    if probe.held is False and age > ORPHANED_SECONDS:
                        probe.remove()
