"""Who is told what happens to locks: the logger, the callbacks of `sqlsem.on`, and taps (metrics).

Taps are the package's own. They are called where it happens, by the thread or task that acquires, and must be quick.

Callbacks are a program's. They may block, raise or take locks themselves, and none of that may harm a lock. So they
are called by a thread of their own, ``sqlsem-events``, one after the other in the order of the events; coroutine
functions are awaited by the event loop in which `EventBus.on` was called, one after the other too. Nobody waits for
them. Those that fall behind lose what comes after `MOST_BEHIND` events. What happens to locks that a callback takes is
told to nobody, as it would never end.

Where nobody listens, each event costs a look into a dictionary, and at the level of the logger.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast, overload

from sqlsem.core import shutdown
from sqlsem.core.callers import Caller
from sqlsem.core.threads import ShouldContinue, SupervisedThread, call_out, voice
from sqlsem.errors import ConfigurationError
from sqlsem.events import EVENTS, Deadlocked, Event, Granted, Lost, Released, TimedOut, Waiting
from sqlsem.model import Request

if TYPE_CHECKING:
    import asyncio

__all__ = ["EventBus", "Subscriber", "Subscription", "TraceContext", "Tracer", "drain", "global_bus"]

log = voice
E = TypeVar("E", bound=Event)
T = TypeVar("T")

_changing = threading.Lock()  # who listens
Subscriber = Callable[[Event], object]
Listener = Callable[[E], object]
#: So many events may wait for callbacks.
MOST_BEHIND = 10_000

_in_callback: contextvars.ContextVar[bool] = contextvars.ContextVar("sqlsem_in_callback", default=False)


class Subscription(Generic[E]):
    """Of one call of `sqlsem.on`; ends with `undo`, or as a context manager.

    >>> with sqlsem.on("lost", alarm):  # doctest: +SKIP
    ...     main()

    Without a callback it is a decorator, which leaves the function as it is:

    >>> @sqlsem.on("waiting")  # doctest: +SKIP
    ... def tell(event):
    ...     print(f"{event.resource}: behind {event.behind}")
    """

    def __init__(self, signals: EventBus, kind: str) -> None:
        self._signals = signals
        self.kind = kind
        self._taps: list[Subscriber] = []

    def __call__(self, callback: Callable[[E], T]) -> Callable[[E], T]:
        """Have it called, too. Raises `ConfigurationError` for a coroutine function where no event loop runs."""
        if not callable(callback):
            raise ConfigurationError(f"on({self.kind!r}, …) takes a function of one argument, not {callback!r}")
        tap = _awaited(callback) if _is_coroutine(callback) else functools.partial(_post, cast("Subscriber", callback))
        self._taps.append(tap)
        self._signals.add(self.kind, tap)
        return callback

    def undo(self) -> None:
        """End it. What has happened before may still be told. May be repeated."""
        while self._taps:
            self._signals.remove(self.kind, self._taps.pop())

    def __enter__(self) -> Subscription[E]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<Subscription {self.kind!r}{'' if self._taps else ', to nobody'}>"


class TraceContext(Protocol):
    """Follows one acquisition, and what was had by it. Called by the one who acquires, and by who ends it: quick."""

    #: What is left at the end of the row's ``requesting_id``, for those who wait behind it.
    mark: str

    def tell(self, event: Event) -> None:
        """What happens to it."""

    def asked(self) -> None:
        """The acquisition is over, well or not; what it had may be held on. May be repeated."""


#: Begins to follow what is asked: the requests, in which database, and by whom.
Tracer = Callable[["Sequence[Request]", str, str], TraceContext]


class EventBus:
    """Who listens to the locks of one coordinator. ``above`` are those who listen to all of them.

    Attributes:
        taps: Who is told of each kind, those above included.
        tracer: What follows each acquisition, if anything does.
    """

    def __init__(self, database: str = "", above: EventBus | None = None) -> None:
        self._database = database
        self._above = above
        self._own: dict[str, tuple[Subscriber, ...]] = dict.fromkeys(EVENTS, ())
        self._own_tracer: Tracer | None = None
        self.taps: dict[str, tuple[Subscriber, ...]] = {}
        self.tracer: Tracer | None = None
        self._below: weakref.WeakSet[EventBus] = weakref.WeakSet()
        with _changing:
            if above is not None:
                above._below.add(self)
            self._refresh()

    @overload
    def on(self, kind: Literal["waiting"], callback: Listener[Waiting] | None = None) -> Subscription[Waiting]: ...
    @overload
    def on(self, kind: Literal["granted"], callback: Listener[Granted] | None = None) -> Subscription[Granted]: ...
    @overload
    def on(self, kind: Literal["released"], callback: Listener[Released] | None = None) -> Subscription[Released]: ...
    @overload
    def on(self, kind: Literal["lost"], callback: Listener[Lost] | None = None) -> Subscription[Lost]: ...
    @overload
    def on(
        self, kind: Literal["deadlock"], callback: Listener[Deadlocked] | None = None
    ) -> Subscription[Deadlocked]: ...
    @overload
    def on(self, kind: Literal["timeout"], callback: Listener[TimedOut] | None = None) -> Subscription[TimedOut]: ...

    def on(self, kind: str, callback: Callable[..., object] | None = None) -> Subscription[Any]:
        """Have a function called with an event of `sqlsem.events` whenever that happens to a lock of this process:
        ``sqlsem.on`` for the locks of all databases, ``coordinator.on`` for those of one.

        Args:
            kind: ``"waiting"``, ``"granted"``, ``"released"``, ``"lost"``, ``"deadlock"`` or ``"timeout"``.
            callback: Left out, what is returned is a decorator.

        A function is called by the thread ``sqlsem-events``, which calls all of them one after the other; a coroutine
        function is awaited in the event loop that runs now. A callback that blocks delays other callbacks and no lock;
        one that raises is written to the log (ERROR), and called the next time all the same. At most 10,000 events wait
        for callbacks; what comes then is dropped, with a warning. Locks that a callback itself takes are told to
        nobody.

        Raises `ConfigurationError` for a kind that does not exist.

        >>> undo = sqlsem.on("lost", lambda event: page(event.resource, event.why)).undo  # doctest: +SKIP
        """
        if not isinstance(kind, str) or kind not in EVENTS:
            raise ConfigurationError(f"There is no event {kind!r}; there are {', '.join(map(repr, EVENTS))}")
        subscription: Subscription[Any] = Subscription(self, kind)
        if callback is not None:
            subscription(callback)
        return subscription

    def add(self, kind: str, tap: Subscriber) -> None:
        """Have it told of each such event, at once."""
        with _changing:
            self._own[kind] = (*self._own[kind], tap)
            self._refresh()

    def remove(self, kind: str, tap: Subscriber) -> None:
        """End that."""
        with _changing:
            self._own[kind] = tuple(one for one in self._own[kind] if one is not tap)
            self._refresh()

    def _refresh(self) -> None:
        """With the lock: who is told now, so that nobody has to look for it while something happens."""
        above = self._above
        self.taps = {kind: own if above is None else (*own, *above.taps[kind]) for kind, own in self._own.items()}
        self.tracer = self._own_tracer or (None if above is None else above.tracer)
        for one in list(self._below):
            one._refresh()

    def set_tracer(self, tracer: Tracer | None) -> None:
        """What follows each acquisition from now on."""
        with _changing:
            self._own_tracer = tracer
            self._refresh()
        for kind in EVENTS:
            self.remove(kind, _traced)
            if tracer is not None:
                self.add(kind, _traced)

    def follow(self, requests: Sequence[Request], caller: Caller) -> TraceContext | None:
        """What follows an acquisition that begins, if anything does. Never raises."""
        tracer = self.tracer
        try:
            return None if tracer is None else tracer(requests, self._database, caller.owner)
        except Exception:
            log.exception("Tracing of %r failed", requests[0].resource)
            return None

    def asked(self, trace: TraceContext) -> None:
        """An acquisition that is followed is over. Never raises."""
        try:
            trace.asked()
        except Exception:
            log.exception("Tracing failed")

    def about(self, request: Request, position: int | None, caller: Caller) -> dict[str, Any]:
        """What all events have."""
        return {
            **{name: getattr(request, name) for name in ("resource", "access", "limit", "weight", "note")},
            **{"position": position, "database": self._database, "caller": caller.owner},
        }

    def wants(self, kind: str, level: int) -> bool:
        """Whether anybody is to be told, the logger at this level included."""
        return bool(self.taps[kind]) or log.isEnabledFor(level)

    def tell(self, event: Event, trace: TraceContext | None = None) -> None:
        """Tell everybody. Never raises, and waits for nothing."""
        level = event.log_level
        if log.isEnabledFor(level):
            log.log(level, event.template, *event.words, extra=event.as_dict())
        taps = self.taps[event.name]
        for tap in taps if trace is None else (*taps, trace.tell):
            try:
                tap(event)
            except Exception:
                log.exception("Telling of %r at %s failed", event.resource, event.position)


def _traced(_: Event) -> None:
    """Somebody wants to know, and hears of it otherwise."""


#: Those who listen to the locks of all databases.
global_bus = EventBus()


# -- callbacks ------------------------------------------------------------------------------------------------------


def _is_coroutine(callback: Callable[..., object]) -> bool:
    function = callback
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _name(callback: Callable[..., object], event: Event) -> str:
    return f"What listens to {event.name!r}, {callback!r},"


class _DeliveryQueue:
    """The thread that calls back. (A `queue.SimpleQueue` may be put into from anywhere, a signal handler too.)"""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.thread = SupervisedThread("sqlsem-events", self.run)
        self.dropping = False

    def put(self, job: Callable[[], object]) -> None:
        behind = self.jobs.qsize()
        if behind >= MOST_BEHIND:
            if not self.dropping:
                self.dropping = True
                _tell_dropping()
            return
        self.dropping = self.dropping and behind > MOST_BEHIND // 2
        self.jobs.put(job)
        self.thread.begin()

    def run(self, _: ShouldContinue) -> None:
        _in_callback.set(True)
        while True:
            job = self.jobs.get()
            shutdown.stay_asleep()
            job()


def _tell_dropping() -> None:
    log.warning("What listens to events (sqlsem.on) is %d behind: events are dropped until it catches up", MOST_BEHIND)


_deliveries = _DeliveryQueue()


def _begin_anew() -> None:
    """In a forked child, which has no threads, and whose parent tells what happened before."""
    global _deliveries, _changing
    _deliveries, _changing = _DeliveryQueue(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def drain(seconds: float) -> None:
    """Wait, for so long at most, until what has happened so far was told."""
    if _deliveries.thread.runs and not _in_callback.get():
        done = threading.Event()
        _deliveries.jobs.put(done.set)
        done.wait(seconds)


def _post(callback: Callable[[Event], object], event: Event) -> None:
    if not _in_callback.get():
        _deliveries.put(functools.partial(call_out, _name(callback, event), callback, event))


class _AsyncHandler:
    """Calls a coroutine function in its event loop: a tap."""

    def __init__(self, callback: Callable[[Event], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._callback = callback
        self._loop = loop
        self._events: deque[Event] = deque()
        self._task: asyncio.Task[None] | None = None
        self._dropping = False

    def __call__(self, event: Event) -> None:
        if _in_callback.get() or self._loop.is_closed():
            return
        if len(self._events) >= MOST_BEHIND:
            if not self._dropping:
                self._dropping = True
                _tell_dropping()
            return
        self._events.append(event)
        if self._task is None:
            try:
                self._loop.call_soon_threadsafe(self._start)
            except RuntimeError:  # closed this instant: nobody is left who could care
                self._events.clear()

    def _start(self) -> None:
        if self._task is None and self._events:
            self._task = self._loop.create_task(self._serve(), name="sqlsem-events")

    async def _serve(self) -> None:
        _in_callback.set(True)  # of this task alone
        try:
            while self._events:
                event = self._events.popleft()
                try:
                    await self._callback(event)
                except Exception:
                    log.exception("%s failed", _name(self._callback, event))
            self._dropping = False
        except BaseException:  # cancelled, as the loop ends
            self._events.clear()
            raise
        finally:
            self._task = None
            if self._events:  # one came at this instant
                self._loop.call_soon(self._start)


def _awaited(callback: Callable[..., object]) -> Subscriber:
    import asyncio  # programs without it need not load it

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            f"{callback!r} is a coroutine function, and no event loop runs here that could await it; call on(…) in the "
            f"loop, or give it a plain function"
        ) from None
    return cast("Subscriber", _AsyncHandler(callback, loop))
