"""A process of a certification (`sqlsem.ops.certify.children`). It reads a job from standard input, writes events to
standard output, both as lines of JSON, and ends when standard input is closed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from sqlsem import engines
from sqlsem.api.coordinator import Coordinator, connect
from sqlsem.api.locks import Lock
from sqlsem.engines.base import Engine, Options
from sqlsem.engines.mssql.odbc import load_driver
from sqlsem.ops.certify.sessions import Session, server_words
from sqlsem.util.threads import spawn
from sqlsem.values.errors import LockLost

#: The limit of each kind of lock that `hammer` acquires.
LIMITS = {"mutex": 1, "limit": 3, "read": 1, "write": 1}
#: The timeout of one request of `hammer`, in seconds; after it the next request follows.
ASK_SECONDS = 5.0


class Orders:
    """The job that the certification has sent, and its command to end."""

    def __init__(self) -> None:
        line = sys.stdin.readline()
        if not line:
            os._exit(3)  # the certification has ended
        self.order: dict[str, Any] = json.loads(line)
        self.over = threading.Event()
        self._guard = threading.Lock()
        spawn(self._listen, "listen")

    def _listen(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command.get("do") == "end":
                break
        self.over.set()
        # A process that waits for a lock must not outlive the certification.
        if not threading.Event().wait(10.0):
            os._exit(3)

    def emit(self, event: str, **data: Any) -> None:
        """Write an event. Its time ``at`` is that of a clock which all processes of this host share."""
        with self._guard:
            try:
                print(json.dumps({"event": event, "at": time.monotonic(), **data}), flush=True)
            except BrokenPipeError:
                self.over.set()  # the certification has ended, and reads no more


def hold(orders: Orders, coordinator: Coordinator, engine: Engine, resource: str, limit: int = 1) -> None:
    """Hold a lock until the end, or until it is lost."""
    lock = coordinator.limit(resource, limit)
    lock.acquire(timeout=ASK_SECONDS * 4)
    grant = lock.grant
    assert grant is not None
    orders.emit("holds", position=grant.position, pid=os.getpid())
    while not orders.over.wait(0.05):
        if grant.lost:
            orders.emit("lost")
            return
    lock.release()


def hold_session(orders: Orders, coordinator: Coordinator, engine: Engine, resource: str) -> None:
    """Hold a lock in a plain session until the end."""
    session = Session(engine)
    answer = session.acquire(resource)
    orders.emit("holds", position=answer.position, code=answer.code, pid=os.getpid(), session=session.number)
    orders.over.wait()
    session.release(resource)
    session.close()


class Inside:
    """Records the present holders in a table of its own, so that violations are found without using the protocol."""

    def __init__(self, engine: Engine, resource: str, who: str) -> None:
        self.session = Session(engine)
        self.resource = resource
        self.who = who

    def enter(self, access: str) -> str | None:
        """Record that this process holds the lock. Return a text about holders that must not hold it as well."""
        self.session.rows("enter", self.resource, self.who, access)
        others = [(str(who), str(kind)) for who, kind in self.session.rows("others", self.resource, self.who)]
        if access == "limit":
            bad = others if len(others) >= LIMITS["limit"] else []
        else:
            bad = [entry for entry in others if access != "read" or entry[1] != "read"]
        return f"{access} of {self.who} was inside {self.resource} together with {bad}" if bad else None

    def count(self) -> None:
        """Add 1 to the counter by a plain read, and then a write of that number plus 1."""
        seen = int(self.session.value("read_counter"))
        self.session.rows("write_counter", seen + 1)

    def leave(self) -> None:
        """Remove the record of this process."""
        self.session.rows("leave", self.resource, self.who)


def hammer(
    orders: Orders,
    coordinator: Coordinator,
    engine: Engine,
    resource: str,
    kinds: list[str],
    seconds: float,
    face: str = "library",
    counts: bool = False,
    hold_seconds: float = 0.0,
) -> None:
    """Acquire and release locks of these kinds in turn. Write an event for each hold, with its times by this clock."""
    session = Session(engine) if face == "session" else None
    who = f"{os.getpid()}.{0 if session is None else session.number}"
    inside = Inside(engine, resource, who)
    orders.emit("ready", who=who, session=None if session is None else session.number)
    deadline = time.monotonic() + seconds
    turns = 0
    while time.monotonic() < deadline and not orders.over.is_set():
        kind = kinds[turns % len(kinds)]
        turns += 1
        lock = _lock(coordinator, kind, resource)
        if session is not None:
            access = "write" if kind in ("mutex", "limit") else kind
            granted = session.acquire(resource, LIMITS[kind], access, int(ASK_SECONDS * 1000)).code >= 0
        else:
            granted = lock.acquire(timeout=ASK_SECONDS)
        if not granted:
            continue
        since = time.monotonic()
        bad = inside.enter(kind)
        if counts:
            inside.count()
        if hold_seconds:
            orders.over.wait(hold_seconds)
        inside.leave()
        until = time.monotonic()
        try:
            if session is not None:
                lost = session.release(resource) != 0
            else:
                lock.release()
                lost = False
        except LockLost:
            lost = True
        orders.emit("held", kind=kind, since=since, until=until, bad=bad, lost=lost)


def _lock(coordinator: Coordinator, kind: str, resource: str) -> Lock:
    if kind == "limit":
        return coordinator.limit(resource, LIMITS["limit"])
    lock: Lock = getattr(coordinator, kind)(resource)
    return lock


def pooled(orders: Orders, coordinator: Coordinator, engine: Engine, resource: str) -> None:
    """Hold a lock in a connection of the driver's own pool, close that and open it again. Write an event with the
    results of another session's requests meanwhile.
    """
    module = load_driver("pyodbc")
    text = getattr(engine, "odbc_string", None)
    if module is None or text is None:
        orders.emit("pooled", same=False)
        return
    vars(module)["pooling"] = True  # in this process only, and before its first connection
    first, other = Session(engine), Session(engine)
    first.wire.connection.close()
    first.wire.connection = module.connect(text, autocommit=True)
    number, position = first.number, first.acquire(resource).position
    first.wire.connection.close()
    between = other.acquire(resource, timeout_ms=0).code
    first.wire.connection = module.connect(text, autocommit=True)
    same = first.number == number
    after = other.acquire(resource, timeout_ms=int(ASK_SECONDS * 1000)).code
    renewed = int(first.value("renew", resource, position))
    orders.emit("pooled", same=same, between=between, after=after, renewed=renewed)


JOBS: dict[str, Callable[..., None]] = {"hold": hold, "hold_session": hold_session, "hammer": hammer, "pooled": pooled}


def main() -> None:
    """Do one job."""
    orders = Orders()
    url, options = orders.order["url"], orders.order["options"]
    engine = engines.of_url(url)(url, Options(schema=options["schema"], table=options["table"]))
    try:
        with connect(url, **options) as coordinator:
            JOBS[orders.order["job"]](orders, coordinator, engine, **orders.order["arguments"])
    except Exception as exc:
        orders.emit("failed", words=server_words(exc, engine))
    orders.emit("end")
    os._exit(0)  # a normal exit would wait for the listening thread, which is blocked in a read
