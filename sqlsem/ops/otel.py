"""OpenTelemetry spans for waiting and holding, with a link from the waiter to the holder.

>>> sqlsem.otel.instrument()  # doctest: +SKIP

Only the API is used (``pip install sqlsem[otel]``); the program's SDK decides where spans are exported.

A request stores the ``traceparent`` of its current span at the end of its row's ``requesting_id``. This needs no column
and no statement, waiters read that row anyway, and it stays in the history. (The note belongs to the program, and
``owner`` names the thread, so neither would do.) Without a current span, a span ``sqlsem.lock`` begins at the request
and ends at the release, so that there is a span to link to.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sqlsem.client.event_bus import global_bus
from sqlsem.util.printable import clean
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.events import Deadlocked, Event, Granted, Lost, Released, TimedOut, Waiting
from sqlsem.values.locks import Request

try:
    from opentelemetry import context, trace
    from opentelemetry.trace import Link, Span, Tracer, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as exc:
    raise ConfigurationError(
        "Traces need opentelemetry-api; install it with: pip install 'sqlsem[otel]'", code="driver"
    ) from exc

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

    from sqlsem.api.coordinator import Coordinator

__all__ = ["Instrumentation", "instrument"]

_TRACEPARENT = re.compile(r":(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})$")
_propagator = TraceContextTextMapPropagator()


class Instrumentation:
    """The result of `instrument`: ends tracing with `undo`, or as a context manager."""

    def __init__(self, tracer: Tracer, coordinator: Coordinator | None) -> None:
        self._event_bus = global_bus if coordinator is None else coordinator.client.event_bus
        self._event_bus.set_tracer(functools.partial(_Acquired, tracer))

    def undo(self) -> None:
        """Trace no further locks. Idempotent."""
        self._event_bus.set_tracer(None)

    def __enter__(self) -> Instrumentation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()


def instrument(
    tracer_provider: TracerProvider | None = None, *, coordinator: Coordinator | None = None
) -> Instrumentation:
    """Record each wait and each hold as a span, ``sqlsem.wait`` and ``sqlsem.hold``, below the span that is current at
    the request. A wait has a link to the holder's span, if the holder is traced too.

    Args:
        tracer_provider: The provider; left out, the global one.
        coordinator: Trace only the locks of this coordinator; left out, the locks of all databases.

    A further call replaces the previous instrumentation.
    """
    tracer = trace.get_tracer("sqlsem", tracer_provider=tracer_provider)
    return Instrumentation(tracer, coordinator)


class _Acquired:
    """The spans of one acquisition and its grant: a `sqlsem.client.event_bus.TraceContext`."""

    def __init__(self, tracer: Tracer, requests: Sequence[Request], database: str, caller: str) -> None:
        self._tracer = tracer
        self._attributes = _attributes(requests, database, caller)
        self._context = context.get_current()
        self._spans: dict[str, Span] = {}  # the open ones, by name: 'lock', 'wait' and 'hold'
        if not trace.get_current_span().get_span_context().is_valid:
            self._begin("lock")
            self._context = trace.set_span_in_context(self._spans["lock"], self._context)
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, self._context)
        #: Appended to the row's ``requesting_id``.
        self.suffix = f":{carrier['traceparent']}" if "traceparent" in carrier else ""

    def record(self, event: Event) -> None:
        """Record an event in the spans."""
        if isinstance(event, Waiting):
            self._wait(event)
        elif isinstance(event, Granted):
            self._end("wait", "granted")
            if event.access != "upgrade" and "hold" not in self._spans:
                self._begin("hold", {"sqlsem.waited": event.waited})
            hold = self._spans.get("hold")
            if hold is not None and event.access == "upgrade":
                hold.add_event("upgraded", {"sqlsem.resource": clean(event.resource)})
            if hold is not None and event.position is not None:
                hold.set_attribute("sqlsem.position", event.position)
        elif isinstance(event, TimedOut | Deadlocked):
            self._end("wait", event.name, event.why if isinstance(event, Deadlocked) else "not granted in time")
            if event.access != "upgrade":
                self._end("lock")
        elif isinstance(event, Released):
            self._end("hold", event.name)
            self._end("lock")
        elif isinstance(event, Lost):
            self._end("wait", event.name, event.why)
            self._end("hold", event.name, event.why)
            self._end("lock")

    def acquisition_ended(self) -> None:
        """End the spans of an acquisition without an outcome: it was cancelled or interrupted."""
        if "hold" not in self._spans:
            self._end("wait", "cancelled")
            self._end("lock")

    def _begin(
        self, name: str, extra: Mapping[str, AttributeValue] | None = None, links: Sequence[Link] | None = None
    ) -> None:
        attributes = {**self._attributes, **(extra or {})}
        span = self._tracer.start_span(f"sqlsem.{name}", self._context, attributes=attributes, links=links)
        self._spans[name] = span

    def _wait(self, event: Waiting) -> None:
        wait = self._spans.get("wait")
        if wait is not None:  # of `all_of`: the wait for the next lock
            wait.add_event("waiting", _behind(event))
            return
        links = []
        match = None if event.behind is None else _TRACEPARENT.search(event.behind.requesting_id)
        if match is not None:
            holder = _propagator.extract({"traceparent": match[1]}, context=context.Context())
            links = [trace.Link(trace.get_current_span(holder).get_span_context(), {"sqlsem.role": "holder"})]
        self._begin("wait", _behind(event), links)

    def _end(self, name: str, outcome: str | None = None, error: str | None = None) -> None:
        span = self._spans.pop(name, None)
        if span is None:
            return
        if outcome is not None:
            span.set_attribute("sqlsem.outcome", outcome)
        if error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, clean(error)))
        span.end()


def _behind(event: Waiting) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {"sqlsem.waits_for": clean(event.resource)}
    if event.behind is not None:
        attributes["sqlsem.behind"] = clean(str(event.behind))
        if event.behind.note is not None:
            attributes["sqlsem.behind.note"] = clean(event.behind.note)
    return attributes


def _attributes(requests: Sequence[Request], database: str, caller: str) -> dict[str, AttributeValue]:
    """Return the attributes of the first request, with the names of all."""
    first = requests[0]
    attributes: dict[str, AttributeValue | None] = {
        "sqlsem.resource": [clean(request.resource) for request in requests]
        if len(requests) > 1
        else clean(first.resource),
        "sqlsem.access": first.access,
        "sqlsem.limit": first.limit,
        "sqlsem.weight": first.weight,
        "sqlsem.note": None if first.note is None else clean(first.note),
        "sqlsem.database": clean(database),
        "sqlsem.caller": clean(caller),
    }
    return {name: value for name, value in attributes.items() if value is not None}
