"""A TCP proxy on loopback that can fail in the ways of networks."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable


def _error(**fields: str) -> bytes:
    """Return PostgreSQL's message with that content (see "Message Formats" in its documentation)."""
    body = b"".join(kind.encode() + text.encode() + b"\0" for kind, text in fields.items()) + b"\0"
    return b"E" + struct.pack("!i", len(body) + 4) + body


#: The server's last message after an administrator's pg_terminate_backend.
TERMINATED = _error(S="FATAL", V="FATAL", C="57P01", M="terminating connection due to administrator command")

#: With this, close() sends a reset instead of an orderly end.
RESET = struct.pack("ii", 1, 0)


class Link:
    """One connection through the proxy: two sockets, two threads that carry bytes."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self.proxy, self.client = proxy, client
        self.server: socket.socket | None = None
        self.hole = False  # after it swallowed bytes, the link is unusable for ever
        self.swallow_answer = False
        self.answers = b""  # the incomplete message of the server, where messages are counted
        self.purpose = ""  # the purpose of the connection, from the client's startup message
        self.heard = time.monotonic()  # the time of the last bytes
        self.answered = threading.Event()

    def start(self) -> None:
        if self.proxy.mode == "hole":
            self.hole = True
        else:
            self.server = self.proxy.connect()
            threading.Thread(target=self._carry, args=(self.server, self.client, False), daemon=True).start()
        threading.Thread(target=self._carry, args=(self.client, self.server, True), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket | None, request: bool) -> None:
        while True:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            self.heard = time.monotonic()
            if self.hole:
                if not data:
                    return  # the end is not passed on, either
                continue
            if not data:
                break
            if request:
                if not self.purpose:
                    self.purpose = data.decode("latin-1")
                silenced = self.proxy.silence_setup_of
                if silenced and silenced in self.purpose and data[:1] in b"PQ":
                    self.proxy.silence_setup_of = ""
                    self.proxy.silenced += 1
                    self.hole = True
                    continue
                rule = self.proxy.lose_answer_to
                if rule is not None and rule(data):
                    self.proxy.lose_answer_to = None
                    self.swallow_answer = True
            elif self.swallow_answer:
                if data.endswith(b"Z\x00\x00\x00\x05I"):  # ready for the next query: it is committed
                    self.reset()
                    self.answered.set()
                    self.proxy.lost_answers += 1
                continue
            if self.proxy.mode == "slow":
                time.sleep(self.proxy.delay)
            try:
                if not request and (self.answers or self.proxy.end_after is not None):
                    if self._ends(data):
                        break
                else:
                    target.sendall(data)
            except OSError:  # the other side has closed meanwhile
                break
        self.close()

    def _ends(self, data: bytes) -> bool:
        """Pass the server's messages on one by one, and its end after the last allowed one. True if that was now."""
        self.answers += data
        while len(self.answers) >= 5:
            (length,) = struct.unpack_from("!i", self.answers, 1)
            if len(self.answers) < length + 1:
                break
            message, self.answers = self.answers[: length + 1], self.answers[length + 1 :]
            self.client.sendall(message)
            if self.proxy.counts_down():
                self.client.sendall(TERMINATED)
                return True
        return False

    def close(self) -> None:
        for end in (self.client, self.server):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def reset(self) -> None:
        """Send the client a reset, and the server an end."""
        with contextlib.suppress(OSError):
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._wake(self.client)
        self.close_server_side()

    def close_server_side(self) -> None:
        if self.server is not None:
            with contextlib.suppress(OSError):
                self.server.shutdown(socket.SHUT_RDWR)
            self.server.close()

    @staticmethod
    def _wake(end: socket.socket) -> None:
        # A socket that another thread reads is closed only when that thread lets go of it; shutting down the reading
        # side wakes it, and sends nothing.
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RD)
        end.close()


class Proxy:
    """Forwards connections to ``127.0.0.1:port`` (or to a Unix socket) until told otherwise.

    forward   as if it were not there
    slow      each piece of data is delayed by ``delay`` seconds
    cut       connections are reset, new ones too
    hole      what arrives is swallowed, new connections are accepted and never answered; nobody is told
    """

    def __init__(self, target: tuple[str, int] | str) -> None:
        self.target = target
        self.mode = "forward"
        self.delay = 0.0
        self.lose_answer_to: Callable[[bytes], bool] | None = None
        self.lost_answers = 0
        #: The next connection for this purpose gets no answer to its first statement, and none to any other.
        self.silence_setup_of = ""
        self.silenced = 0
        self.accepted = 0
        self.dropped = 0  # because they were silent
        #: The server's side of a connection ends, with the words of an administrator's doing, after so many messages
        #: of its answers, counted over all connections.
        self.end_after: int | None = None
        self._counting = threading.Lock()
        self._closed = threading.Event()
        self.links: list[Link] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def connect(self) -> socket.socket:
        if isinstance(self.target, str):
            end = socket.socket(socket.AF_UNIX)
            end.connect(self.target)
            return end
        return socket.create_connection(self.target)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(self, client)
            self.accepted += 1
            if self.mode == "cut":
                link.reset()
                continue
            self.links.append(link)
            try:
                link.start()
            except OSError:  # the server is away
                link.reset()

    def forward(self) -> None:
        self.mode = "forward"

    def slow(self, delay: float) -> None:
        self.mode, self.delay = "slow", delay

    def drop_idle(self, seconds: float) -> None:
        """From now on end every connection that is silent for so long, as HAProxy and firewalls do."""

        def watch() -> None:
            while not self._closed.wait(seconds / 10):
                for link in list(self.links):
                    if time.monotonic() - link.heard > seconds:
                        self.links.remove(link)
                        self.dropped += 1
                        link.close()

        threading.Thread(target=watch, name="proxy-idle", daemon=True).start()

    def counts_down(self) -> bool:
        """Count a message of the server, and return True if it was the last allowed one."""
        with self._counting:
            if self.end_after is None:
                return False
            self.end_after = self.end_after - 1 if self.end_after > 1 else None
            return self.end_after is None

    def cut(self) -> None:
        """Reset all connections, and each new one."""
        self.mode = "cut"
        self.cut_once()

    def cut_once(self) -> None:
        """Reset the present connections."""
        links, self.links = self.links, []
        for link in links:
            link.reset()

    def hole(self) -> None:
        """Swallow all bytes from now on."""
        self.mode = "hole"
        for link in self.links:
            link.hole = True

    def server_notices(self) -> None:
        """End the server's side of connections that are black holes."""
        for link in self.links:
            if link.hole:
                link.close_server_side()

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self.links:
            link.close()
        self._thread.join(10)
