"""Publishes lock events to the log, to subscribers of the package (metrics, traces) and to callbacks of the program.

Subscribers of the package are called in the thread or task that acquires, so they must be quick.

Callbacks of the program may block, raise or acquire locks, and none of that may harm a lock. So the thread
``sqlsem-events`` calls the functions one after the other, in the order of the events. Coroutine functions are awaited
one after the other in the event loop in which `EventBus.on` was called. No thread waits for a callback. If
`MAX_BACKLOG` events wait for callbacks, further events are dropped. Events of locks that a callback acquires are not
published to callbacks: they would cause events without end.

Without subscribers an event costs one dictionary lookup and one check of the logger's level.
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

from sqlsem.util import shutdown
from sqlsem.util.threads import ShouldContinue, SupervisedThread, call_and_log, log
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.events import EVENTS, Deadlocked, Event, Granted, Lost, Released, TimedOut, Waiting

if TYPE_CHECKING:
    import asyncio

    from sqlsem.client.callers import Caller
    from sqlsem.values.locks import Request

__all__ = ["EventBus", "Subscriber", "Subscription", "TraceContext", "Tracer", "drain", "global_bus"]

E = TypeVar("E", bound=Event)
T = TypeVar("T")

_changing = threading.Lock()  # held while subscribers are added or removed
Subscriber = Callable[[Event], object]
Listener = Callable[[E], object]
#: The greatest number of events that may wait for callbacks.
MAX_BACKLOG = 10_000

_in_callback: contextvars.ContextVar[bool] = contextvars.ContextVar("sqlsem_in_callback", default=False)


class Subscription(Generic[E]):
    """The result of `sqlsem.on`. `undo` ends the subscription, and so does the end of its ``with`` block.

    >>> with sqlsem.on("lost", alarm):  # doctest: +SKIP
    ...     main()

    Without a callback it is a decorator, which returns the function unchanged:

    >>> @sqlsem.on("waiting")  # doctest: +SKIP
    ... def show(event):
    ...     print(f"{event.resource}: behind {event.behind}")
    """

    def __init__(self, bus: EventBus, kind: str) -> None:
        self._event_bus = bus
        self.kind = kind
        self._subscribers: list[Subscriber] = []

    def __call__(self, callback: Callable[[E], T]) -> Callable[[E], T]:
        """Subscribe a callback. Raises `ConfigurationError` for a coroutine function if no event loop runs."""
        if not callable(callback):
            raise ConfigurationError(f"on({self.kind!r}, …) takes a function of one argument, not {callback!r}")
        subscriber = (
            _async_subscriber(callback)
            if _is_coroutine(callback)
            else functools.partial(_deliver, cast("Subscriber", callback))
        )
        self._subscribers.append(subscriber)
        self._event_bus.add(self.kind, subscriber)
        return callback

    def undo(self) -> None:
        """Unsubscribe. Earlier events may still be delivered. Idempotent."""
        while self._subscribers:
            self._event_bus.remove(self.kind, self._subscribers.pop())

    def __enter__(self) -> Subscription[E]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<Subscription {self.kind!r}{'' if self._subscribers else ', ended'}>"


class TraceContext(Protocol):
    """Traces one acquisition and its grant. The threads or tasks that acquire and release call it: it must be quick."""

    #: Appended to the row's ``requesting_id``, so that waiters behind the row can link to this trace.
    suffix: str

    def record(self, event: Event) -> None:
        """Record an event of the acquisition or the grant."""

    def acquisition_ended(self) -> None:
        """Record that the acquisition succeeded or failed. The grant may still be held. Idempotent."""


#: Starts the trace of an acquisition. Arguments: the requests, the database, the caller.
Tracer = Callable[["Sequence[Request]", str, str], TraceContext]


class EventBus:
    """The subscribers to the lock events of one coordinator. ``parent``: the bus of all coordinators.

    Attributes:
        subscribers: The subscribers to each kind of event, including the parent's.
        tracer: Starts the trace of each acquisition, if there is one.
    """

    def __init__(self, database: str = "", parent: EventBus | None = None) -> None:
        self._database = database
        self._parent = parent
        self._own: dict[str, tuple[Subscriber, ...]] = dict.fromkeys(EVENTS, ())
        self._own_tracer: Tracer | None = None
        self.subscribers: dict[str, tuple[Subscriber, ...]] = {}
        self.tracer: Tracer | None = None
        self._children: weakref.WeakSet[EventBus] = weakref.WeakSet()
        with _changing:
            if parent is not None:
                parent._children.add(self)
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
        """Call a function with an event of `sqlsem.events` whenever it happens to a lock of this process: ``sqlsem.on``
        for the locks of all databases, ``coordinator.on`` for those of one.

        Args:
            kind: ``"waiting"``, ``"granted"``, ``"released"``, ``"lost"``, ``"deadlock"`` or ``"timeout"``.
            callback: The function; without it the result is a decorator.

        The thread ``sqlsem-events`` calls all functions one after the other; a coroutine function is awaited in the
        event loop that runs now. A callback that blocks delays other callbacks, but no lock. If a callback raises, the
        error is logged (ERROR), and the callback stays subscribed. At most 10,000 events wait for callbacks; further
        events are dropped, with a warning. Events of locks that a callback itself acquires are not delivered.

        Raises `ConfigurationError` for an unknown kind.

        >>> undo = sqlsem.on("lost", lambda event: page(event.resource, event.why)).undo  # doctest: +SKIP
        """
        if not isinstance(kind, str) or kind not in EVENTS:
            raise ConfigurationError(f"There is no event {kind!r}; there are {', '.join(map(repr, EVENTS))}")
        subscription: Subscription[Any] = Subscription(self, kind)
        if callback is not None:
            subscription(callback)
        return subscription

    def add(self, kind: str, subscriber: Subscriber) -> None:
        """Add a subscriber, which is called at once with each event of a kind."""
        with _changing:
            self._own[kind] = (*self._own[kind], subscriber)
            self._refresh()

    def remove(self, kind: str, subscriber: Subscriber) -> None:
        """Remove a subscriber of a kind."""
        with _changing:
            self._own[kind] = tuple(other for other in self._own[kind] if other is not subscriber)
            self._refresh()

    def _refresh(self) -> None:
        """Merge the own subscribers and the parent's, so that `publish` need not. Called with the lock held."""
        parent = self._parent
        self.subscribers = {
            kind: own if parent is None else (*own, *parent.subscribers[kind]) for kind, own in self._own.items()
        }
        self.tracer = self._own_tracer or (None if parent is None else parent.tracer)
        for child in list(self._children):
            child._refresh()

    def set_tracer(self, tracer: Tracer | None) -> None:
        """Trace each acquisition from now on; None: stop tracing."""
        with _changing:
            self._own_tracer = tracer
            self._refresh()
        for kind in EVENTS:
            self.remove(kind, _traced)
            if tracer is not None:
                self.add(kind, _traced)

    def start_trace(self, requests: Sequence[Request], caller: Caller) -> TraceContext | None:
        """Start the trace of an acquisition, if there is a tracer. Never raises."""
        tracer = self.tracer
        try:
            return None if tracer is None else tracer(requests, self._database, caller.owner)
        except Exception:
            log.exception("Tracing the acquisition of %r failed", requests[0].resource)
            return None

    def end_trace(self, trace: TraceContext) -> None:
        """Record in a trace that its acquisition has ended. Never raises."""
        try:
            trace.acquisition_ended()
        except Exception:
            log.exception("Tracing failed")

    def common_fields(self, request: Request, position: int | None, caller: Caller) -> dict[str, Any]:
        """Return the fields that all events have."""
        return {
            **{name: getattr(request, name) for name in ("resource", "access", "limit", "weight", "note")},
            **{"position": position, "database": self._database, "caller": caller.owner},
        }

    def has_subscribers(self, kind: str, level: int) -> bool:
        """Return True if there are subscribers of this kind, or the logger is enabled for ``level``."""
        return bool(self.subscribers[kind]) or log.isEnabledFor(level)

    def publish(self, event: Event, trace: TraceContext | None = None) -> None:
        """Log an event and pass it to all subscribers. Never raises, and does not block."""
        level = event.log_level
        if log.isEnabledFor(level):
            log.log(level, event.template, *event.words, extra=event.as_dict())
        subscribers = self.subscribers[event.name]
        for subscriber in subscribers if trace is None else (*subscribers, trace.record):
            try:
                subscriber(event)
            except Exception:
                log.exception("Publishing the event of %r at %s failed", event.resource, event.position)


def _traced(_: Event) -> None:
    """Do nothing. A subscriber that makes `publish` reach the trace of an event that has no other subscriber."""


#: The subscribers to the lock events of all databases.
global_bus = EventBus()


# -- callbacks ------------------------------------------------------------------------------------------------------


def _is_coroutine(callback: Callable[..., object]) -> bool:
    function = callback
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _name(callback: Callable[..., object], event: Event) -> str:
    return f"The subscriber to {event.name!r}, {callback!r},"


class _DeliveryQueue:
    """The callbacks to call, and their thread. (Signal handlers may put into a `queue.SimpleQueue`, too.)"""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.thread = SupervisedThread("sqlsem-events", self.run)
        self.is_dropping = False

    def put(self, job: Callable[[], object]) -> None:
        backlog = self.jobs.qsize()
        if backlog >= MAX_BACKLOG:
            if not self.is_dropping:
                self.is_dropping = True
                _log_dropping()
            return
        self.is_dropping = self.is_dropping and backlog > MAX_BACKLOG // 2
        self.jobs.put(job)
        self.thread.begin()

    def run(self, _: ShouldContinue) -> None:
        _in_callback.set(True)
        while True:
            job = self.jobs.get()
            shutdown.block_daemon_thread()
            job()


def _log_dropping() -> None:
    log.warning("Callbacks of sqlsem.on are %d events behind: events are dropped until they catch up", MAX_BACKLOG)


_deliveries = _DeliveryQueue()


def _reset_after_fork() -> None:
    """Reset the queue in a forked child: it has no threads, and its parent delivers the earlier events."""
    global _deliveries, _changing
    _deliveries, _changing = _DeliveryQueue(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def drain(seconds: float) -> None:
    """Wait, for ``seconds`` at most, until the events published so far are delivered."""
    if _deliveries.thread.runs and not _in_callback.get():
        done = threading.Event()
        _deliveries.jobs.put(done.set)
        done.wait(seconds)


def _deliver(callback: Callable[[Event], object], event: Event) -> None:
    if not _in_callback.get():
        _deliveries.put(functools.partial(call_and_log, _name(callback, event), callback, event))


class _AsyncHandler:
    """A subscriber that calls a coroutine function in its event loop."""

    def __init__(self, callback: Callable[[Event], Any], loop: asyncio.AbstractEventLoop) -> None:
        self._callback = callback
        self._loop = loop
        self._events: deque[Event] = deque()
        self._task: asyncio.Task[None] | None = None
        self._dropping = False

    def __call__(self, event: Event) -> None:
        if _in_callback.get() or self._loop.is_closed():
            return
        if len(self._events) >= MAX_BACKLOG:
            if not self._dropping:
                self._dropping = True
                _log_dropping()
            return
        self._events.append(event)
        if self._task is None:
            try:
                self._loop.call_soon_threadsafe(self._start)
            except RuntimeError:  # the loop was closed at this moment, so no task can handle the event
                self._events.clear()

    def _start(self) -> None:
        if self._task is None and self._events:
            self._task = self._loop.create_task(self._serve(), name="sqlsem-events")

    async def _serve(self) -> None:
        _in_callback.set(True)  # in this task only
        try:
            while self._events:
                event = self._events.popleft()
                try:
                    await self._callback(event)
                except Exception:
                    log.exception("%s failed", _name(self._callback, event))
            self._dropping = False
        except BaseException:  # the task was cancelled because the loop ends
            self._events.clear()
            raise
        finally:
            self._task = None
            if self._events:  # an event came at this moment
                self._loop.call_soon(self._start)


def _async_subscriber(callback: Callable[..., object]) -> Subscriber:
    import asyncio  # here: programs without asyncio do not load it

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            f"{callback!r} is a coroutine function, and no event loop runs here that could await it; call on(…) in the "
            f"loop, or give it a plain function"
        ) from None
    return cast("Subscriber", _AsyncHandler(callback, loop))
