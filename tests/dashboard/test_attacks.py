"""Malicious or broken clients: the dashboard still answers, and its memory and its log stay small."""

import contextlib
import logging
import socket
import time

import pytest
from support import PATIENCE, until
from support.overviews import FakePoller, entry, overview

from sqlsem.ops.dashboard import feed
from sqlsem.ops.dashboard import server as serving

try:
    import httpx2 as httpx
except ImportError:  # on Python 3.10
    import httpx

TOKEN = "correct-horse-battery-staple"
#: The headers that any request needs.
HOST = b"Host: 127.0.0.1\r\n"
FORM_TYPE = b"Content-Type: application/x-www-form-urlencoded\r\n"
FORM = b"POST /login HTTP/1.1\r\n" + HOST + FORM_TYPE + b"Origin: http://127.0.0.1\r\nContent-Length: 99\r\n\r\ntok"
HALVES = {"headers": b"GET / HTTP/1.1\r\n" + HOST + b"X-Half: ", "form": FORM, "nothing": b""}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(serving, "TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(serving, "CHECK_SECONDS", 0.05)


@pytest.fixture
def silent(caplog):
    """The log stays empty: a client could fill it otherwise."""
    caplog.set_level(logging.WARNING)
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


@pytest.fixture
def connect():
    """``connect(url, sent)`` opens a socket, sends that, and leaves it open."""
    with contextlib.ExitStack() as opened:

        def connect(url, sent=b""):
            host, _, port = url.removeprefix("http://").rpartition(":")
            connection = opened.enter_context(socket.create_connection((host, int(port)), PATIENCE))
            if sent:
                connection.sendall(sent)
            return connection

        yield connect


def ends(connection):
    """Wait until the server ends a connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


def answers(url):
    return httpx.get(url, timeout=PATIENCE).status_code == 200


@pytest.mark.parametrize("half", HALVES)
def test_incomplete_request_times_out(half, live, serve, connect, impatient, silent):
    url = serve(live, token=TOKEN)
    halves = [connect(url, HALVES[half]) for _ in range(40)]
    assert answers(url)
    assert all(ends(halve) for halve in halves)
    assert answers(url)


def test_slow_request_times_out(live, serve, connect, impatient, silent):
    url = serve(live)
    connection = connect(url, HALVES["headers"])
    with pytest.raises(ConnectionError):
        for _ in range(int(PATIENCE / 0.05)):
            connection.sendall(b"x")
            time.sleep(0.05)


def test_broken_forms_leave_the_log_empty(live, serve, connect, silent):
    url = serve(live, token=TOKEN, allow_changes=True)
    for path in (b"/login", b"/do", b"/logout"):
        for _ in range(10):
            connect(url, FORM.replace(b"/login", path)).close()
    (server,) = serve.servers
    assert answers(url)
    until(lambda: not server.server_state.tasks, "they have ended")


def test_garbage_leaves_the_log_empty(live, serve, connect, silent):
    url = serve(live)
    upgrade = b"GET / HTTP/1.1\r\n" + HOST + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    for sent in (b"\0" * 100 + b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", upgrade):
        for _ in range(10):
            connect(url, sent)
    assert answers(url)


def test_oldest_connections_make_room(live, serve, connect, monkeypatch, silent):
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 20)
    url = serve(live)
    opened = [connect(url, HALVES["headers"]) for _ in range(100)]
    assert answers(url)
    (server,) = serve.servers
    until(lambda: len(server.server_state.connections) <= 20, "the oldest ones are closed")
    assert ends(opened[0])


def test_unread_answer_times_out(serve, impatient, silent):
    url = serve(FakePoller(overview(entry(position, note="x" * 900) for position in range(1, 2001))))
    host, _, port = url.removeprefix("http://").rpartition(":")
    (server,) = serve.servers
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(b"GET / HTTP/1.1\r\n" + HOST + b"\r\n")
        until(lambda: server.server_state.tasks, "it is being answered")
        until(lambda: not server.server_state.connections, "it is ended")


def test_streams_are_limited_when_opened_together(live, serve, connect, monkeypatch, silent):
    monkeypatch.setattr(feed, "MAX_STREAMS", 20)
    url = serve(live)
    connections = [connect(url, b"GET /events?q=%d HTTP/1.1\r\n" % number + HOST + b"\r\n") for number in range(100)]
    statuses = [int(opened.recv(12).split()[1]) for opened in connections]
    assert (statuses.count(200), statuses.count(503)) == (20, 80)
    for opened in connections:
        opened.close()
    (server,) = serve.servers
    until(lambda: not server.server_state.tasks, "all have ended")
    with httpx.stream("GET", f"{url}/events", timeout=PATIENCE) as answer:
        assert answer.status_code == 200


def test_long_range_header_is_cheap(live, serve, connect):
    """Starlette before 0.49.1 needs time that grows with the square: 0.7 s for 10,000 digits, 21 s for 60,000."""
    url = serve(live, private=True, token=TOKEN)

    def cost(digits):
        began = time.process_time()  # the server is a thread of this process
        request = b"GET /static/dashboard.js HTTP/1.1\r\n" + HOST + b"Connection: close\r\nRange: bytes=%s\r\n\r\n"
        connection = connect(url, request % (b"9" * digits))
        status = int(connection.recv(12).split()[1])
        assert ends(connection)
        return time.process_time() - began, status

    short, long = (min(cost(digits) for _ in range(3)) for digits in (1000, 15_000))
    assert long[1] in (200, 206, 400, 416)
    assert long[0] < 20 * max(short[0], 0.005)
    assert cost(60_000)[1] in (400, 431), "longer than headers may be"
