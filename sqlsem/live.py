"""What goes on in a database, looked at again and again, on through an outage: for what people leave open.

Invariants
    Only the thread of a `Live` uses its session. ``seen`` is replaced, never changed, so that anybody may read it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

from sqlsem.coordinator import Coordinator
from sqlsem.core.threads import ShouldContinue, SupervisedThread
from sqlsem.engines.base import AdaptiveTimeout, Session, time_limited
from sqlsem.engines.protocol import AdminSession
from sqlsem.errors import ConfigurationError, SchemaError, SqlsemError
from sqlsem.insight.consequences import Action
from sqlsem.insight.overview import Overview
from sqlsem.insight.reasons import Reason, reasons
from sqlsem.model import Entry
from sqlsem.printable import clean

__all__ = ["Live", "Seen", "in_a_line", "take_away"]

log = logging.getLogger("sqlsem")

#: Seconds that an answer may take, at first: some servers compile for long what they are asked for the first time.
PATIENCE = 15.0
#: Seconds to wait for the thread at the end; it may be connecting.
PARTING = 1.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen last.

    Attributes:
        overview: The last one; None before the first.
        at: When that came, by this host's clock.
        down_since: Since when there has been none; None while all is well.
        trouble: Why not.
        rights: What this login may do beside looking (see `sqlsem.insight.consequences`); None until that is known.
        why: Why those wait who wait, by position.
    """

    overview: Overview | None = None
    at: datetime | None = None
    down_since: datetime | None = None
    trouble: str = ""
    rights: frozenset[str] | None = None
    why: Mapping[int, Reason] = field(default_factory=dict)


class Live:
    """Looks every so many seconds, in a thread of its own.

    Args:
        coordinator: The database.
        every: Seconds between two looks.
    """

    def __init__(self, coordinator: Coordinator, every: float) -> None:
        coordinator.engine.require(AdminSession, "This")
        self.seen = Seen()
        self.every = every
        self._coordinator = coordinator
        self._engine = coordinator.engine
        self._allowance = AdaptiveTimeout(PATIENCE)
        self._session: Session | None = None
        self._soon = threading.Event()
        self._ended = threading.Event()
        self._thread: SupervisedThread | None = None

    @property
    def where(self) -> str:
        """The database in words."""
        return self._engine.label

    def first_look(self) -> None:
        """Look once, here and now. Raises `ConfigurationError` and `SchemaError` for what waiting does not mend; a
        database that is away is waited for.
        """
        failure = self._look()
        if isinstance(failure, (ConfigurationError, SchemaError)):
            raise failure

    def start(self, tell: Callable[[Seen], None]) -> None:
        """Begin to look. ``tell`` is called with what is seen after each look, in another thread; it must not block."""
        self._thread = SupervisedThread("sqlsem-live", partial(self._run, tell), self._ended)
        self._thread.begin()

    def look_now(self) -> None:
        """Look again at once."""
        self._soon.set()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self._soon.set()
        session = self._session
        if session is not None:
            with contextlib.suppress(SqlsemError):
                session.interrupt()
        if self._thread is not None:
            self._thread.join(PARTING)

    def _run(self, tell: Callable[[Seen], None], _: ShouldContinue) -> None:
        try:
            while not self._ended.is_set():
                tell(self.seen)
                self._soon.wait(self.every)
                self._soon.clear()
                if not self._ended.is_set():
                    self._look()
        finally:
            self._drop()

    def _look(self) -> Exception | None:
        """One look: one call of the session's, of two statements at the most; a new session where there is none."""
        now = datetime.now().astimezone()
        try:
            rights = self.seen.rights
            if self._session is None:
                self._session = self._engine.connect("look")
                with time_limited(self._session, self._engine.setup):
                    self._session.check_schema()
                    rights = self._session.rights()
            with time_limited(self._session, self._allowance):
                overview = self._session.overview()
        except Exception as exc:
            self._drop()
            if not isinstance(exc, SqlsemError):
                log.exception("A look at %s failed (this is a fault of sqlsem's)", self.where)
            elif self.seen.down_since is None:
                log.info("Nothing can be seen of %s: %s", self.where, exc)
            self.seen = replace(self.seen, down_since=self.seen.down_since or now, trouble=in_a_line(exc))
            return exc
        # Here, and not where it is shown: among thousands it takes a second to tell.
        self.seen = Seen(overview, datetime.now().astimezone(), rights=rights, why=reasons(overview))
        return None

    # -- what operators do --------------------------------------------------------------------------------------

    def refusal(self, action: Action) -> str | None:
        """Why the database would refuse an action to this login, as far as that is known beforehand."""
        rights = self.seen.rights
        if rights is None or action.right in rights:
            return None
        return self._engine.read_only_hint

    def perform(self, action: Action) -> str:
        """Do what an operator has confirmed, and say what has come of it. Blocks.

        Raises what the coordinator's calls raise: `ConfigurationError` where the database refuses it to this login,
        `NotHeld` where the row or the task is not there, or in another state by now, `Unavailable`.
        """
        refused = self.refusal(action)
        if refused is not None:
            raise ConfigurationError(refused)
        try:
            return clean(_perform(self._coordinator, action))
        finally:
            self.look_now()

    def _drop(self) -> None:
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
        return f"{name!r} has no cap." if action.cap is None else f"{name!r} is capped at {action.cap}."
    if action.kind == "retry":
        assert action.task_id is not None
        coordinator.admin.retry_task(action.task_id)
        return f"Task {action.task_id} is pending again."
    assert action.position is not None
    _, gone = take_away(coordinator, action.position, force=action.kind == "revoke_now")
    if gone:
        return f"Position {action.position} is gone."
    return f"The holder of position {action.position} has been told, and has its grace to stop."


def take_away(coordinator: Coordinator, position: int, *, force: bool = False) -> tuple[Entry | None, bool]:
    """`Admin.revoke`, for people: the row as it was, if it was there, and whether it is gone. Raises as that."""
    entry = next((one for one in coordinator.admin.entries() if one.position == position), None)
    if entry is not None and entry.state == "dead":
        # Anyone who looks for the dead makes sure of that once more.
        coordinator.admin.reap()
        if all(one.position != position for one in coordinator.admin.entries(entry.resource)):
            return entry, True
    return entry, coordinator.admin.revoke(position, force=force)


def in_a_line(exc: BaseException) -> str:
    """What an error says, in a line."""
    return clean(" ".join(str(exc).split())) or type(exc).__name__
