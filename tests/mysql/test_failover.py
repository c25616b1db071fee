"""Another server, or the same one after a restart: graces begin anew, and no number is given twice."""

import contextlib

import pymysql
import pytest

from sqlsem.engines.base import Busy, Disconnected

pytestmark = pytest.mark.engines("mysql")

#: At least so many positions are skipped: the old server may have given them away.
SKIPPED = 10**9


@pytest.fixture
def fresh(mariadb_server, make_database):
    return make_database(mariadb_server)


def pair(database, name):
    """Take and leave a lock in a new process's way; return its position and its member's number."""
    with database.coordinator() as coordinator, coordinator.mutex(name) as grant:
        (entry,) = coordinator.admin.entries(name)
        return grant.position, entry.member_id


def test_numbers_are_skipped_after_a_failover(fresh, name):
    position, member = pair(fresh, name)
    for _ in range(4):
        fresh.rows("UPDATE sqlsem_setting SET value = 'elsewhere' WHERE name = 'origin'")
        later, later_member = pair(fresh, name)
        assert later > position + SKIPPED
        assert later_member > member + 10**6
        position, member = pair(fresh, name)
        assert position < later + 100, "only once"
        assert member < later_member + 100


@pytest.mark.parametrize("setting", ["origin", "started"])
def test_graces_begin_anew(fresh, setting):
    """No member could be seen while the server was away."""
    with contextlib.closing(fresh.session(grace=60)) as session, contextlib.closing(fresh.session(lease=30)) as leased:
        number, with_lease = session.register_member("h", 1, "p"), leased.register_member("h", 2, "p")
        fresh.rows("UPDATE sqlsem_member SET missing_since = 1, heartbeat_at = 1, lease_until = lease_until - 1000")
        fresh.rows(f"UPDATE sqlsem_setting SET value = '1' WHERE name = '{setting}'")
        with contextlib.closing(fresh.session()):
            pass
        left = fresh.seconds_until("heartbeat_at")
        rows = fresh.rows(
            f"SELECT member_id, missing_since, {left}, {fresh.seconds_until('lease_until')} FROM sqlsem_member"
        )
        members = {row[0]: row[1:] for row in rows}
        assert members[number][0] is None
        assert -30 < members[number][1] <= 0
        assert 0 < members[with_lease][2] <= 30
        session.deregister_member(number)
        leased.deregister_member(with_lease)


def test_an_orderly_connection_changes_nothing(fresh):
    """Also the first one after an installation, which other transactions may keep from writing."""
    before = fresh.rows("SELECT last_position, writes FROM sqlsem_gate")
    for _ in range(3):
        with contextlib.closing(fresh.session()):
            pass
    assert fresh.rows("SELECT last_position, writes FROM sqlsem_gate") == before


@pytest.mark.parametrize(
    ("state", "expected", "is_usable"),
    [("Synced", Busy, True), ("Donor/Desynced", Disconnected, False), ("Joined", Disconnected, False)],
)
def test_node_behind_its_cluster_is_left(fresh, monkeypatch, state, expected, is_usable):
    """A statement that waited for the writes of other nodes ends as one that waited for a lock."""
    with contextlib.closing(fresh.session(lease=30)) as session:
        session.in_cluster = True
        monkeypatch.setattr(session, "_node_state", lambda: state)
        error = session.translate(pymysql.err.OperationalError(1205, "Lock wait timeout exceeded"))
        assert type(error) is expected
        assert (state in str(error)) is not is_usable
        assert session.usable is is_usable
