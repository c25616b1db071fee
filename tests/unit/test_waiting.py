"""The connections of the pool for waits: none is lost, and none is used twice."""

import pytest

import sqlsem
from sqlsem.client.connection import wait_pool


@pytest.fixture
def client(tmp_path):
    with sqlsem.connect(tmp_path / "locks.db") as coordinator:
        coordinator.mutex("a").acquire()  # there are tables now
        yield coordinator.client


def test_full_wait_pool_keeps_idle_connections(client, monkeypatch):
    room = client.wait_pool
    with room.connection(1.0) as connection:
        pass
    monkeypatch.setattr(room._permits, "size", 0)
    with room.connection(1.0) as session:
        assert session is None
    monkeypatch.undo()
    with room.connection(1.0) as session:
        assert session is connection


def test_wait_pool_keeps_few_connections(client):
    room, connections = client.wait_pool, []
    with room.connection(1.0) as connection, room.connection(1.0) as second, room.connection(1.0) as three:
        connections += [connection, second, three]
    assert len(set(map(id, connections))) == 3
    assert len(room.sessions()) == wait_pool.MAX_IDLE_CONNECTIONS


def test_failed_connection_is_closed(client):
    room = client.wait_pool
    with pytest.raises(ZeroDivisionError), room.connection(1.0) as session:
        raise ZeroDivisionError
    assert room.sessions() == []
    with room.connection(1.0) as another:
        assert another is not session
