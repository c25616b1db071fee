"""The exporter's server: accepted clients, and the effects of hostile ones."""

import contextlib
import socket
import threading
import urllib.error
import urllib.request

import prometheus_client
import pytest
from support import PATIENCE, until

from sqlsem.ops.hosts import LOOPBACK, Hosts
from sqlsem.ops.metrics import serving

HALVES = {"nothing": b"", "headers": b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: "}


class Numbers:
    """A collector."""

    def __init__(self):
        self.failure = None

    def describe(self):
        return ()

    def collect(self):
        if self.failure is not None:
            raise self.failure
        yield from (
            prometheus_client.metrics_core.GaugeMetricFamily(f"number_{index}", "x" * 500, index)
            for index in range(3000)
        )


@pytest.fixture
def numbers():
    return Numbers()


@pytest.fixture
def serve(numbers):
    with contextlib.ExitStack() as ended:

        def serve(hosts=None, host="127.0.0.1"):
            registry = prometheus_client.CollectorRegistry()
            registry.register(numbers)
            server = serving.Server((host, 0), registry, Hosts(LOOPBACK) if hosts is None else hosts)
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            for end in (thread.join, server.server_close, server.shutdown):
                ended.callback(end)
            return server

        yield serve


@pytest.fixture
def connect():
    with contextlib.ExitStack() as opened:

        def connect(server, sent):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", server.server_port), PATIENCE))
            connection.sendall(sent)
            return connection

        yield connect


def scrape(server, **headers):
    """Return the status and the text."""
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


@pytest.mark.parametrize("host", ["127.0.0.1:9464", "localhost:9464", "LOCALHOST", "[::1]:9464"])
def test_exporter_answers_by_its_own_names(serve, host):
    status, body = scrape(serve(), Host=host)
    assert (status, "number_7 7.0" in body) == (200, True)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9464", "10.0.0.5", "user@127.0.0.1", "127.0.0.1,evil.example", ""]
)
def test_exporter_refuses_the_names_of_others(serve, host):
    status, body = scrape(serve(), Host=host)
    assert (status, "number" in body) == (421, False)


def test_exporter_refuses_two_names_at_once(serve, connect):
    connection = connect(serve(), b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n")
    assert connection.recv(1000).split()[1] == b"421"


@pytest.mark.parametrize(("host", "status"), [("10.0.0.5:9464", 200), ("etl1", 200), ("evil.example", 421)])
def test_exporter_on_the_network_answers_addresses(serve, host, status):
    assert scrape(serve(Hosts({"etl1"}, addresses=True)), Host=host)[0] == status


@pytest.mark.parametrize("half", HALVES)
def test_half_scrapes_leave_few_threads(serve, connect, half):
    server, before = serve(), threading.active_count()
    halves = [connect(server, HALVES[half]) for _ in range(200)]
    assert scrape(server)[0] == 200
    until(lambda: threading.active_count() - before <= serving.MAX_CONNECTIONS, "few threads are left")
    assert halves[0].recv(1) == b"", "the oldest ones are closed"


def test_half_scrapes_are_given_up(serve, connect, monkeypatch):
    monkeypatch.setattr(serving._Handler, "timeout", 0.2)
    server = serve()
    connections = [connect(server, sent) for sent in HALVES.values()]
    for connection in connections:
        while connection.recv(1000):
            pass
    until(lambda: not server._connections, "nothing is left of them")


def test_unread_answer_times_out_at_the_exporter(serve, monkeypatch, capfd, caplog):
    monkeypatch.setattr(serving._Handler, "timeout", 0.2)
    server = serve()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.server_port))
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until(lambda: True in server._connections.values(), "it is being answered")
        until(lambda: not server._connections, "it is given up")
    assert scrape(server)[0] == 200
    assert capfd.readouterr().err == ""
    assert caplog.records == []


def test_a_fault_of_the_exporter_is_printed(serve, numbers, capsys):
    numbers.failure = RuntimeError("odd")
    status, body = scrape(serve())
    assert (status, "a fault of sqlsem's" in body) == (500, True)
    assert "RuntimeError: odd (this is a fault of sqlsem's" in capsys.readouterr().err
    numbers.failure = None
