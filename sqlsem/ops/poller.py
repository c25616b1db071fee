"""Reads the overview of a database again and again, also through outages, for `sqlsem top` and the dashboard.

Invariants
    Only the thread of a `Poller` uses its session. ``snapshot`` is replaced, never changed, so any thread may read it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from sqlsem.api.coordinator import Coordinator
from sqlsem.engines.base import AdaptiveTimeout, Session, time_limited
from sqlsem.engines.protocol import Capability
from sqlsem.insight.consequences import Action
from sqlsem.insight.overview import Overview
from sqlsem.insight.reasons import Reason, reasons
from sqlsem.util.printable import clean
from sqlsem.util.threads import ShouldContinue, SupervisedThread
from sqlsem.values.errors import ConfigurationError, SchemaError, SqlsemError
from sqlsem.values.locks import Entry

__all__ = ["Poller", "Snapshot", "one_line", "revoke_row"]

log = logging.getLogger("sqlsem")

#: The first timeout of a call, in seconds: some servers take long to compile a new statement.
TIMEOUT = 15.0
#: How long `Poller.stop` waits for the thread, in seconds; it may be connecting.
STOP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The last overview that was read, and the state of the connection.

    Attributes:
        overview: The last overview; None before the first.
        at: When it arrived, by this host's clock.
        down_since: The start of an outage; None if the last poll succeeded.
        trouble: The error of the last poll.
        rights: The rights of this login beside reading (see `sqlsem.insight.consequences`); None until they are known.
        why: The reasons why requests wait, by position.
    """

    overview: Overview | None = None
    at: datetime | None = None
    down_since: datetime | None = None
    trouble: str = ""
    rights: frozenset[str] | None = None
    why: Mapping[int, Reason] = field(default_factory=dict)


class Poller:
    """Reads the overview every ``every`` seconds, in a thread of its own."""

    def __init__(self, coordinator: Coordinator, every: float) -> None:
        coordinator.engine.require(Capability.ADMINISTRATION, "This")
        self.snapshot = Snapshot()
        self.every = every
        self._coordinator = coordinator
        self._engine = coordinator.engine
        self._timeout = AdaptiveTimeout(TIMEOUT)
        self._session: Session | None = None
        self._poll_requested = threading.Event()
        self._ended = threading.Event()
        self._thread: SupervisedThread | None = None

    @property
    def where(self) -> str:
        """The name of the database in displays."""
        return self._engine.label

    def poll_once(self) -> None:
        """Poll once, in this thread. Raises `ConfigurationError` and `SchemaError`; other errors, as of a database that
        is down, go into the snapshot.
        """
        failure = self._poll()
        if isinstance(failure, (ConfigurationError, SchemaError)):
            raise failure

    def start(self, deliver: Callable[[Snapshot], None]) -> None:
        """Start to poll. ``deliver`` is called after each poll, in another thread; it must not block."""
        self._thread = SupervisedThread("sqlsem-poller", partial(self._run, deliver), self._ended)
        self._thread.begin()

    def poll_now(self) -> None:
        """Poll again at once."""
        self._poll_requested.set()

    def stop(self) -> None:
        """Stop polling; interrupt a running poll."""
        self._ended.set()
        self._poll_requested.set()
        session = self._session
        if session is not None:
            with contextlib.suppress(SqlsemError):
                session.interrupt()
        if self._thread is not None:
            self._thread.join(STOP_SECONDS)

    def _run(self, deliver: Callable[[Snapshot], None], _: ShouldContinue) -> None:
        try:
            while not self._ended.is_set():
                deliver(self.snapshot)
                self._poll_requested.wait(self.every)
                self._poll_requested.clear()
                if not self._ended.is_set():
                    self._poll()
        finally:
            self._close_session()

    def _poll(self) -> Exception | None:
        """Read the overview, in up to two statements; connect if there is no session. Return the error, if any."""
        now = datetime.now().astimezone()
        try:
            rights = self.snapshot.rights
            if self._session is None:
                self._session = self._engine.connect("look")
                with time_limited(self._session, self._engine.setup):
                    self._session.check_schema()
                    rights = self._session.rights()
            with time_limited(self._session, self._timeout):
                overview = self._session.overview()
        except Exception as exc:
            self._close_session()
            if not isinstance(exc, SqlsemError):
                log.exception("Reading the overview of %s failed (this is a fault of sqlsem's)", self.where)
            elif self.snapshot.down_since is None:
                log.info("Cannot read the overview of %s: %s", self.where, exc)
            self.snapshot = replace(self.snapshot, down_since=self.snapshot.down_since or now, trouble=one_line(exc))
            return exc
        # The reasons are computed in this thread: for thousands of requests that takes a second.
        self.snapshot = Snapshot(overview, datetime.now().astimezone(), rights=rights, why=reasons(overview))
        return None

    # -- actions of operators -----------------------------------------------------------------------------------

    def refusal(self, action: Action) -> str | None:
        """Return why the database would refuse an action to this login, if the rights are known; else None."""
        rights = self.snapshot.rights
        if rights is None or action.right in rights:
            return None
        return self._engine.read_only_hint

    def perform(self, action: Action) -> str:
        """Perform an action that an operator has confirmed, and return the result as text. Blocks.

        Raises the coordinator's errors: `ConfigurationError` if this login may not, `NotHeld` if the row or the task
        does not exist or is in another state now, `Unavailable`.
        """
        refused = self.refusal(action)
        if refused is not None:
            raise ConfigurationError(refused)
        try:
            return clean(_perform(self._coordinator, action))
        finally:
            self.poll_now()

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _perform(coordinator: Coordinator, action: Action) -> str:
    name = str(action.resource)
    if action.kind == "pause":
        coordinator.admin.pause(name)
        return f"{name!r} is paused."
    if action.kind == "resume":
        coordinator.admin.resume(name)
        return f"{name!r} goes on."
    if action.kind in ("cap", "uncap"):
        coordinator.admin.set_limit(name, action.cap)
        limit = "no operator's limit" if action.cap is None else f"the limit {action.cap}"
        return f"{name!r} has {limit} now."
    if action.kind == "retry":
        assert action.task_id is not None
        coordinator.admin.retry_task(action.task_id)
        return f"Task {action.task_id} is pending again."
    assert action.position is not None
    _, gone = revoke_row(coordinator, action.position, force=action.kind == "revoke_now")
    if gone:
        return f"Position {action.position} is gone."
    return f"The holder of position {action.position} has been notified, and has its grace to stop."


def revoke_row(coordinator: Coordinator, position: int, *, force: bool = False) -> tuple[Entry | None, bool]:
    """Revoke a row; reap it if its owner is dead. Return the row as it was, if it existed, and True if it is gone now.

    Raises as `Admin.revoke`.
    """
    entry = next((row for row in coordinator.admin.entries() if row.position == position), None)
    if entry is not None and entry.state == "dead":
        # `reap` checks once more that the owner is dead.
        coordinator.admin.reap()
        if all(row.position != position for row in coordinator.admin.entries(entry.resource)):
            return entry, True
    return entry, coordinator.admin.revoke(position, force=force)


def one_line(exc: BaseException) -> str:
    """Return an error's message on one line."""
    return clean(" ".join(str(exc).split())) or type(exc).__name__
