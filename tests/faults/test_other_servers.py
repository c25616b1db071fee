"""A server that does not answer any more, where the URL names others that can serve: the nodes of a cluster.

The servers are one server, by several routes. A route that is a black hole is like a node that hangs: the system
accepts connections, and no answer comes.
"""

import urllib.parse

import pytest
from proxy import Proxy
from support import AMPLE, until

import sqlsem

pytestmark = pytest.mark.engines("mysql")

#: Long beside the pauses of a busy machine. A call gets a third of it.
LEASE = 18.0


@pytest.fixture
def routes(mariadb_server):
    """Two routes to the server that can fail."""
    routes = [Proxy(mariadb_server.address) for _ in range(2)]
    yield routes
    for route in routes:
        route.close()


@pytest.fixture
def url(database, routes):
    """The test's database: by the two routes, and directly."""
    parts = urllib.parse.urlsplit(database.url)
    places = ",".join(f"{parts.hostname}:{port}" for port in (*(route.port for route in routes), parts.port))
    return urllib.parse.urlunsplit(parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@{places}"))


def test_lock_outlasts_two_servers_that_hang(url, routes, name):
    """The second one hangs right after the first one: no server counts as slow because another one was."""
    lost = []
    with sqlsem.connect(url, lease=LEASE, retry=AMPLE["retry"]) as holder:
        assert holder.mutex(name, on_lost=lost.append).acquire()
        member = holder.client.member
        main = member.main
        places = [f"{host}:{port}" for host, port in holder.client.engine.servers]
        for route, place, following in zip(routes, places, places[1:], strict=False):
            assert main.session.server == place
            route.hole()
            member.wake_heartbeat()
            until(
                lambda following=following: main.session is not None and main.session.server == following,
                f"it uses {following}",
            )
            until(lambda: member.seconds_until_loss() > 0.75 * LEASE, "a heartbeat is answered there")
        assert lost == []
        (held,) = holder.client.registry.grants()
        held.check()


def test_connections_that_fail_together_skip_no_server(url, database):
    engine = sqlsem.connect(url, lease=LEASE).client.engine
    first = engine.next_server
    for _ in range(2):  # the main connection, and that of a waiter
        engine.leave_server(first)
    second = engine.next_server
    assert second != first
    engine.leave_server(second)
    assert engine.next_server == f"127.0.0.1:{urllib.parse.urlsplit(database.url).port}"
