"""A server that speaks enough TDS (7.4) for real drivers to log in, with TLS too. A function of the test answers every
statement, so that a test can have the answers of a SQL Server in trouble at will.

    def answer(said: Said) -> Answer: ...

    with TdsServer(answer) as server:
        pyodbc.connect(f"Driver={driver};Server=127.0.0.1,{server.port};…")
        server.said       # all statements so far

An answer is made of the tokens below: ``error(1205, "…") + done(ERROR)``. `SILENT` gives none until the client cancels,
`DEAF` ignores the cancel too; `CUT` ends the connection, `Later` answers after a while (or the cancel before).
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from sqlsem import sql

# -- packets and tokens, as in Microsoft's "MS-TDS" -----------------------------------------------------------------

BATCH, RPC, REPLY, ATTENTION, LOGIN, PRELOGIN = 0x01, 0x03, 0x04, 0x06, 0x10, 0x12
DONE, DONE_PROC, DONE_IN_PROC = 0xFD, 0xFE, 0xFF
#: Bits of the status in a DONE token.
MORE, ERROR, COUNT, ATTENDED = 0x01, 0x02, 0x10, 0x20
#: In prelogin: TLS not at all, for the login only, for everything.
NO_TLS, TLS_OFF, TLS_ON = 2, 0, 1

#: An untrusted certificate, for the name localhost.
CERTIFICATE = Path(__file__).parent / "mssql" / "untrusted.pem"


def _wide(text: str) -> bytes:
    return text.encode("utf-16-le")


def _short(text: str) -> bytes:
    return bytes([len(_wide(text)) // 2]) + _wide(text)


def _long(text: str) -> bytes:
    return struct.pack("<H", len(_wide(text)) // 2) + _wide(text)


def _token(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + struct.pack("<H", len(body)) + body


def done(status: int = 0, rows: int = 0, kind: int = DONE) -> bytes:
    """Return the token for the end of a statement, or of the answer."""
    return bytes([kind]) + struct.pack("<HHQ", status, 0, rows)


def error(number: int, text: str, severity: int = 16, state: int = 1, *, kind: int = 0xAA) -> bytes:
    body = struct.pack("<iBB", number, state, severity) + _long(text) + _short("fake") + _short("")
    return _token(kind, body + struct.pack("<i", 1))


def warning(number: int, text: str) -> bytes:
    """Return an informational message."""
    return error(number, text, 0 if number == 5701 else 10, kind=0xAB)


def failure(number: int, text: str, severity: int = 16) -> bytes:
    """Return an error, and the end of the answer."""
    return error(number, text, severity) + done(ERROR)


Value: TypeAlias = "int | str | None"


def rows(names: Sequence[str], *found: Sequence[Value]) -> bytes:
    """Return a result: a column holds numbers (bigint) or texts (nvarchar), as its first value that is not NULL."""
    kinds = [next((type(row[at]) for row in found if row[at] is not None), int) for at in range(len(names))]
    body = b"\x81" + struct.pack("<H", len(names))
    for name, kind in zip(names, kinds, strict=True):
        how = b"\x26\x08" if kind is int else b"\xe7\x40\x1f\x09\x04\xd0\x00\x34"
        body += struct.pack("<IH", 0, 9) + how + _short(name)
    for row in found:
        body += b"\xd1"
        for value, kind in zip(row, kinds, strict=True):
            if kind is int:
                body += b"\x00" if value is None else b"\x08" + struct.pack("<q", value)
            else:
                body += b"\xff\xff" if value is None else struct.pack("<H", len(_wide(str(value)))) + _wide(str(value))
    return body


def result(names: Sequence[str], *found: Sequence[Value]) -> bytes:
    """Return a result, and the end of the answer."""
    return rows(names, *found) + done(COUNT, len(found))


def _changed(what: int, new: bytes, old: bytes) -> bytes:
    return _token(0xE3, bytes([what]) + new + old)


def logged_in() -> bytes:
    """Return the answer to an accepted login."""
    acknowledged = b"\x01\x74\x00\x00\x04" + _short("Microsoft SQL Server") + b"\x10\x00\x10\x00"
    return (
        _changed(1, _short("fake"), _short("master"))
        + warning(5701, "Changed database context to 'fake'.")
        + _changed(7, b"\x05\x09\x04\xd0\x00\x34", b"\x00")
        + _changed(2, _short("us_english"), _short(""))
        + _token(0xAD, acknowledged)
        + _changed(4, _short("4096"), _short("4096"))
        + done()
    )


# -- statements of clients -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """One statement.

    Attributes:
        text: The statement; of an RPC, the statement that it has the server run, or else its own name.
        rpc: The procedure that was called by its name or number, as in ``sp_prepexec``; empty for a batch.
        types: How a prepared statement declares its parameters.
        session: On which connection, counted from 1.
    """

    text: str
    rpc: str = ""
    types: str = ""
    session: int = 0


_NUMBERED = {10: "sp_executesql", 11: "sp_prepare", 12: "sp_execute", 13: "sp_prepexec", 15: "sp_unprepare"}


def _body(data: bytes) -> bytes:
    return data[struct.unpack_from("<I", data)[0] :]  # behind the headers


def _called(data: bytes, session: int, prepared: dict[int, tuple[str, str]]) -> Said:
    """Parse an RPC. Parameters are read as far as they are numbers and texts, which is all that is used."""
    length, at = struct.unpack_from("<H", data)[0], 2
    if length == 0xFFFF:
        name = _NUMBERED.get(struct.unpack_from("<H", data, at)[0], "?")
        at += 2
    else:
        name = data[at : at + 2 * length].decode("utf-16-le")
        at += 2 * length
    at += 2  # flags
    values: list[Value] = []
    while at < len(data) and len(values) < 4:
        at += 1 + 2 * data[at] + 1  # the parameter's name, its status
        kind = data[at]
        at += 1
        if kind == 0x26:  # a number
            size, at = data[at + 1], at + 2
            values.append(int.from_bytes(data[at : at + size], "little", signed=True) if size else None)
            at += size
        elif kind in (0xE7, 0x63):  # nvarchar, ntext
            maximum = struct.unpack_from("<I" if kind == 0x63 else "<H", data, at)[0]
            at += (4 if kind == 0x63 else 2) + 5
            if kind == 0x63:
                size, at = struct.unpack_from("<i", data, at)[0], at + 4
            elif maximum == 0xFFFF:  # max: in pieces
                pieces, at = b"", at + 8
                while True:
                    size = struct.unpack_from("<I", data, at)[0]
                    at += 4
                    if not size:
                        break
                    pieces, at = pieces + data[at : at + size], at + size
                values.append(pieces.decode("utf-16-le"))
                continue
            else:
                size, at = struct.unpack_from("<H", data, at)[0], at + 2
            values.append(None if size in (-1, 0xFFFF) else data[at : at + size].decode("utf-16-le"))
            at += 0 if size in (-1, 0xFFFF) else size
        else:
            break  # one of the statement's own parameters
    texts = [value for value in values if isinstance(value, str)]
    if name == "sp_prepexec":
        types, text = texts[:2] if len(texts) > 1 else ("", "".join(texts))
        return Said(text, name, types, session)
    if name == "sp_execute":
        text, types = prepared.get(int(values[0] or 0), ("?", "")) if values else ("?", "")
        return Said(text, name, types, session)
    if name in ("sp_executesql", "sp_describe_undeclared_parameters"):
        return Said(texts[0] if texts else "", name, texts[1] if len(texts) > 1 else "", session)
    return Said(name, name, "", session)


# -- answers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Later:
    """An answer after so many seconds; a client that leaves before does not get it."""

    seconds: float
    answer: bytes
    #: Called just before the answer is sent, unless the client has cancelled.
    then: Callable[[], object] = lambda: None


class _Token:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


SILENT, DEAF, CUT = _Token("SILENT"), _Token("DEAF"), _Token("CUT")
Answer: TypeAlias = "bytes | Later | _Token"


def plain(said: Said) -> Answer:
    """Answer every statement with success, and no rows."""
    del said
    return done()


# -- the server -----------------------------------------------------------------------------------------------------


class _Gone(Exception):
    """The client has gone, or is disconnected."""


@dataclass
class TdsServer:
    """The server; see the module. ``login`` is the answer to a login, ``tls`` one of NO_TLS, TLS_OFF, TLS_ON,
    ``drivers`` the answer to the statements of drivers themselves after a login.
    """

    answer: Callable[[Said], Answer] = plain
    login: Callable[[], Answer] = logged_in
    tls: int = NO_TLS
    drivers: Answer = field(default_factory=done)
    said: list[Said] = field(default_factory=list)
    #: How often clients cancelled.
    attentions: int = 0
    #: Connections, by how they ended.
    accepted: int = 0
    ended: int = 0

    def __enter__(self) -> TdsServer:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._closing = threading.Event()
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="tds", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End all connections."""
        with self._guard:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def sockets(self) -> set[int]:
        """Return its ends of the connections."""
        with self._guard:
            return {connection.fileno() for connection in self._open}

    def texts(self, pattern: str = "") -> list[str]:
        """Return the statements so far that contain this."""
        return [statement.text for statement in list(self.said) if re.search(pattern, statement.text)]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.accepted += 1
            with self._guard:
                self._open.add(client)
            threading.Thread(target=self._serve, args=(client, self.accepted), daemon=True).start()

    def _serve(self, client: socket.socket, number: int) -> None:
        with contextlib.suppress(_Gone, OSError, ssl.SSLError):
            _Conversation(self, client, number).run()
        with self._guard:
            self._open.discard(client)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
        client.close()
        self.ended += 1


class _Conversation:
    """One connection."""

    def __init__(self, server: TdsServer, client: socket.socket, number: int) -> None:
        self.server, self.client, self.number = server, client, number
        self.line: socket.socket | ssl.SSLSocket | _Wrapped = client
        self.prepared: dict[int, tuple[str, str]] = {}
        self.everything = server.tls == TLS_ON  # is encrypted, not the login alone

    def run(self) -> None:
        while True:
            kind, data = self._message()
            if kind == PRELOGIN:
                self._prelogin(data)
            elif kind == LOGIN:
                self._give(self.server.login())
                if isinstance(self.line, _Wrapped) and not self.everything:
                    self.line = self.client
            elif kind == BATCH:
                self._asked(Said(_body(data).decode("utf-16-le"), session=self.number))
            elif kind == RPC:
                self._asked(_called(_body(data), self.number, self.prepared))
            elif kind == ATTENTION:
                self._attention()

    def _asked(self, said: Said) -> None:
        self.server.said.append(said)
        if said.rpc in ("sp_unprepare", "sp_prepare"):
            self._send(done(kind=DONE_PROC))
            return
        own = said.rpc.startswith("[sys].")
        answer = self.server.drivers if own else self.server.answer(said)
        if said.rpc and isinstance(answer, Later):
            self._give(Later(answer.seconds, self._returned(said, answer.answer), answer.then))
        elif said.rpc and isinstance(answer, bytes):
            self._send(self._returned(said, answer))
        else:
            self._give(answer)

    def _returned(self, said: Said, answer: bytes) -> bytes:
        """Return an answer as a procedure gives it."""
        failed = bool(answer[-13:]) and answer[-13] == DONE and answer[-12] & ERROR
        found = answer[:-13] + bytes([DONE_IN_PROC, answer[-12] | MORE]) + answer[-11:]
        if said.rpc == "sp_prepexec":
            handle = len(self.prepared) + 1
            self.prepared[handle] = (said.text, said.types)
            found += b"\x79" + struct.pack("<i", 0)
            found += b"\xac" + struct.pack("<H", 0) + _short("") + b"\x01" + struct.pack("<IH", 0, 0)
            found += b"\x26\x04\x04" + struct.pack("<i", handle)
        else:
            found += b"\x79" + struct.pack("<i", 0)
        return found + done(ERROR if failed else 0, kind=DONE_PROC)

    def _give(self, answer: Answer) -> None:
        if isinstance(answer, bytes):
            self._send(answer)
        elif isinstance(answer, Later):
            if self._quiet(answer.seconds):
                answer.then()
                self._send(answer.answer)
        elif answer is CUT:
            raise _Gone
        elif answer is DEAF:
            self.server._closing.wait()
            raise _Gone

    def _quiet(self, seconds: float) -> bool:
        """Wait so long; False if the client sent something (only a cancel is possible) or left meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.server._closing.is_set():
                raise _Gone
            if select.select([self.client], [], [], min(left, 0.1))[0]:
                return False
        return True

    def _attention(self) -> None:
        self.server.attentions += 1
        self._send(done(ATTENDED))

    # -- packets

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.line.recv(count - len(data))
            if not piece:
                raise _Gone
            data += piece
        return data

    def _message(self) -> tuple[int, bytes]:
        data = b""
        while True:
            kind, status, length = struct.unpack(">BBH4x", self._read(8))
            data += self._read(length - 8)
            if status & 1:
                return kind, data

    def _send(self, data: bytes, kind: int = REPLY) -> None:
        pieces = [data[at : at + 4088] for at in range(0, len(data), 4088)] or [b""]
        for number, piece in enumerate(pieces, 1):
            head = struct.pack(">BBHHBB", kind, number == len(pieces), len(piece) + 8, 0, number & 255, 0)
            self.line.sendall(head + piece)

    def _prelogin(self, data: bytes) -> None:
        if self.server.tls != NO_TLS and _wanted(data) == TLS_ON:
            self.everything = True
        tls = TLS_ON if self.everything else self.server.tls
        options = [(0, b"\x10\x00\x10\x00\x00\x00"), (1, bytes([tls])), (2, b"\x00"), (4, b"\x00")]
        head, body = b"", b""
        for number, value in options:
            head += struct.pack(">BHH", number, 5 * len(options) + 1 + len(body), len(value))
            body += value
        self._send(head + b"\xff" + body)
        if self.server.tls != NO_TLS and _wanted(data) != NO_TLS:
            self.line = _Wrapped(self)


def _wanted(prelogin: bytes) -> int:
    """Return what a client's prelogin says of TLS."""
    at = 0
    while prelogin[at] != 0xFF:
        number, offset, _ = struct.unpack_from(">BHH", prelogin, at)
        if number == 1:
            return prelogin[offset]
        at += 5
    return NO_TLS


class _Wrapped:
    """Start TLS as TDS 7 has it: the handshake inside prelogin packets, then the packets inside TLS."""

    def __init__(self, conversation: _Conversation) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # later ones send tickets when packets are no longer wrapped
        context.load_cert_chain(CERTIFICATE)
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._coming, self._going, server_side=True)
        self._client = conversation.client
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                if self._going.pending:
                    conversation._send(self._going.read(), PRELOGIN)
                self._coming.write(conversation._message()[1])
        conversation._send(self._going.read(), PRELOGIN)

    def recv(self, count: int) -> bytes:
        while True:
            try:
                return self._tls.read(count)
            except ssl.SSLWantReadError:
                piece = self._client.recv(65536)
                if not piece:
                    return b""
                self._coming.write(piece)
            except ssl.SSLZeroReturnError:
                return b""

    def sendall(self, data: bytes) -> None:
        self._tls.write(data)
        self._client.sendall(self._going.read())


# -- answers for sqlsem's client -------------------------------------------------------------------------------------

#: The names of all procedures, by which an answer is chosen.
PROCEDURES = frozenset(
    name
    for script in sql.rerunnable("mssql")
    for name in re.findall(
        r"^(?:CREATE(?: OR ALTER)?|ALTER) PROCEDURE \S+?\.\[?(\w+)", sql.script("mssql", script), re.MULTILINE
    )
)


def member(**answers: Answer | Callable[[Said], Answer]) -> Callable[[Said], Answer]:
    """Answers as a database with the sqlsem tables would, to one process without competitors. ``answers``: to other
    procedures, or in place of these, by their names.
    """
    given: list[int] = []

    def register(_: Said) -> bytes:
        given.append(len(given) + 1)
        return result(("position", "granted"), (given[-1], 1))

    def ping(_: Said) -> bytes:
        return result(("known", "position", "revoked"), (1, None, None), *((1, position, 0) for position in given))

    common: dict[str, Any] = {
        "settings": result(("name", "value"), ("schema_version", str(sql.LATEST)), ("oldest_client", "1")),
        "register_member": result(("member_id",), (7,)),
        "reattach_member": result(("known",), (1,)),
        "heartbeat": ping,
        "register": register,
        "release": result(("code",), (0,)),
        **answers,
    }
    assert common.keys() <= PROCEDURES, f"no such procedures: {common.keys() - PROCEDURES}"

    def answer(said: Said) -> Answer:
        if "OBJECT_ID" in said.text:
            return result(("there",), (1,))
        found = re.match(r"(?:SET NOCOUNT ON; )?EXEC \w+\.\[?(\w+)", said.text)
        reply = common.get(found[1], done()) if found else done()
        return reply(said) if callable(reply) else reply

    return answer
