"""Heartbeats while a program keeps the gate in an open transaction."""

import contextlib

import pytest
from support import until

import sqlsem

pytestmark = pytest.mark.engines("mysql")


def test_an_open_transaction_stops_no_heartbeat(connect, database, name):
    with contextlib.closing(database.raw(autocommit=False)) as connection, connect(grace=1.0).mutex(name) as grant:
        ((begin,),) = database.rows("SELECT max(heartbeat_at) FROM sqlsem_member")
        database.insert_bare(connection.cursor(), name("bare"), "bare")
        until(
            lambda: database.rows("SELECT max(heartbeat_at) FROM sqlsem_member")[0][0] > begin + 3,
            "heartbeats are sent for longer than the grace",
        )
        grant.check()
        connection.rollback()


def test_a_removal_waits_for_a_heartbeat(database, name):
    """It locks the member's row before it decides, so no heartbeat is accepted and then lost."""
    with contextlib.closing(database.session(grace=0.0)) as mine, contextlib.closing(database.session()) as other:
        number = mine.register_member("h", 1, "p")
        database.rows("UPDATE sqlsem_member SET missing_since = 1, beacon = 'none' WHERE member_id = ?", number)
        with contextlib.closing(database.raw(autocommit=False)) as connection:
            cursor = connection.cursor()
            cursor.execute("UPDATE sqlsem_member SET missing_since = NULL WHERE member_id = %s", (number,))
            with pytest.raises(sqlsem.Unavailable):  # it waits for this heartbeat, until its time limit
                other.check_member(number)
            connection.commit()
        assert database.rows("SELECT count(*) FROM sqlsem_member WHERE member_id = ?", number) == [(1,)]
        database.rows("DELETE FROM sqlsem_member WHERE member_id = ?", number)
