"""The server ends the session of a host that has vanished, and keeps that of a process that is idle or paused."""

import contextlib
import os
import signal
import socket
import sys
import time

import psutil
import pytest
from support import PATIENCE, until

import sqlsem
from sqlsem.engines.mysql import connection
from sqlsem.values.locks import MAX_SECONDS

pytestmark = pytest.mark.engines("mysql")

#: After one silent second the server sends probes, and ends the session when it gets no answer to two.
KEEPALIVE = {"tcp_keepalive_time": 1, "tcp_keepalive_interval": 1, "tcp_keepalive_probes": 2}
SILENT = 3.0
GRACE = 2.0
#: The option of Linux by which a socket is closed without a word to the other side. (Python has no name for it.)
TCP_REPAIR = 19


@pytest.fixture
def probing(mariadb_server):
    """The server sends probes to the sessions that begin in this test."""
    before = {name: mariadb_server.rows(f"SELECT @@global.{name}")[0][0] for name in KEEPALIVE}
    for name, seconds in KEEPALIVE.items():
        mariadb_server.rows(f"SET GLOBAL {name} = {seconds}")
    yield
    for name, seconds in before.items():
        mariadb_server.rows(f"SET GLOBAL {name} = {seconds}")


def hold(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    with coordinator.mutex(name) as grant:
        channel.tell("holds")
        while channel.ask()["do"] == "check":
            channel.tell("checked", lost=grant.lost)
        vanish()


def vanish():
    """End this process as if its host lost its power: its connections send nothing."""
    for end in psutil.Process().net_connections("tcp"):
        with socket.socket(fileno=os.dup(end.fd)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def may_vanish():
    """Return True if this process may set that option."""
    if sys.platform != "linux":
        return False
    with contextlib.suppress(OSError), socket.socket() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        return True
    return False


@pytest.mark.skipif(not may_vanish(), reason="needs Linux and the right CAP_NET_ADMIN")
def test_lock_of_a_vanished_host_is_free_after_its_grace(probing, spawn, connect, name):
    holder = spawn(hold, name=name)
    holder.expect("holds")
    began = time.monotonic()
    holder.send(do="vanish")
    with connect(grace=GRACE).mutex(name, timeout=4 * PATIENCE):
        assert GRACE - 1 < time.monotonic() - began < GRACE + SILENT + PATIENCE


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX")
def test_paused_process_keeps_its_lock_longer_than_probes_take(probing, spawn, connect, name):
    """The kernel answers them."""
    holder = spawn(hold, name=name)
    holder.expect("holds")
    other = connect()
    os.kill(holder.pid, signal.SIGSTOP)
    assert not other.mutex(name).acquire(timeout=GRACE + 2 * SILENT)
    os.kill(holder.pid, signal.SIGCONT)
    holder.send(do="check")
    assert not holder.expect("checked")["lost"]
    holder.kill()
    with other.mutex(name, timeout=PATIENCE):
        pass


def test_silent_session_ends_and_idle_session_stays(database, monkeypatch, timing):
    """Without probes, as behind a proxy, the server ends a session that sends no heartbeat."""

    def has_ended(session):
        number = session.connection.thread_id()
        return database.rows("SELECT 1 FROM information_schema.processlist WHERE id = ?", number) == []

    monkeypatch.setattr(connection, "IDLE_SECONDS", 1)
    timing(idle_heartbeat=0.25)
    with contextlib.ExitStack() as stack:
        coordinator, silent = (
            stack.enter_context(contextlib.closing(new(grace=0.6))) for new in (database.coordinator, database.session)
        )
        with coordinator.mutex("a"):
            pass
        idle = coordinator.client.member.main.session
        assert idle.idle == silent.idle == 1
        until(lambda: has_ended(silent), "the silent session has ended")
        time.sleep(2 * idle.idle)
        assert not has_ended(idle)
        assert coordinator.client.member.main.session is idle


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, 240),
        ({"grace": 3600.0}, 4 * 1200),
        ({"lease": 3600.0}, 4 * 1200),
        ({"grace": MAX_SECONDS}, connection.LONGEST_IDLE_SECONDS),
    ],
)
def test_session_lives_for_four_heartbeats(database, options, seconds):
    """A member with a long grace or lease sends few of them."""
    with contextlib.closing(database.session(**options)) as session:
        assert session.idle == seconds
        assert session.execute_text("SELECT @@session.wait_timeout").rows == [(session.idle,)]
