"""Metrics for Prometheus: of this process's locks (`Collector`), and of a whole database (``Exporter``).

>>> sqlsem.metrics.register()  # doctest: +SKIP

Needs prometheus_client: ``pip install sqlsem[metrics]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from sqlsem.client.client import open_clients
from sqlsem.client.event_bus import EventBus, Subscriber, global_bus
from sqlsem.ops.metrics.labels import MAX_LABELS, Few, Patterns, label
from sqlsem.values.errors import ConfigurationError
from sqlsem.values.events import Behind, Event, Granted, Released, TimedOut

try:
    import prometheus_client
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.metrics_core import Metric
except ImportError as exc:
    raise ConfigurationError(
        "Metrics need prometheus_client; install it with: pip install 'sqlsem[metrics]'", code="driver"
    ) from exc

if TYPE_CHECKING:
    from sqlsem.api.coordinator import Coordinator

__all__ = ["Collector", "register"]

#: The upper bounds of the histograms, in seconds: from a free mutex to a job of a night.
BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400)


class Collector:
    """Counts the events of this process's locks for a registry of prometheus_client, from its creation on.

    Args:
        coordinator: Count only the locks of this coordinator; left out, those of all databases.
        patterns: Resources that share a label (``load:*``). In other names, numbers become ``*``. See `Patterns`.
        maximum: At most this many patterns have a label of their own. The others share ``other``, and
            ``sqlsem_client_other_events_total`` counts their events.
        blame: Count the waiting time by holder. This costs a query at the beginning of each wait, unless the log (at
            INFO) needs that query, too.

    >>> REGISTRY.register(sqlsem.metrics.Collector(patterns=["dim_*"]))  # doctest: +SKIP
    """

    def __init__(
        self,
        coordinator: Coordinator | None = None,
        *,
        patterns: Sequence[str] = (),
        maximum: int = MAX_LABELS,
        blame: bool = True,
    ) -> None:
        self._client = None if coordinator is None else coordinator.client
        self._pattern = Patterns(patterns)
        self._few, self._few_blamed = Few(maximum), Few(maximum)
        by_resource = ("resource",)
        self._grants = _counter("grants", "Locks that were granted.", by_resource)
        self._waited = _histogram("wait_seconds", "Seconds from a request to its grant.", by_resource)
        self._held = _histogram("hold_seconds", "Seconds from a grant to its release.", by_resource)
        self._failures = {
            "timeout": _counter("timeouts", "Requests that were not granted in time.", by_resource),
            "deadlock": _counter("deadlocks", "Requests that were chosen as the victims of deadlocks.", by_resource),
            "lost": _counter("lost", "Locks, and rows of waiting requests, that were lost.", by_resource),
        }
        self._blamed = _counter(
            "blamed_seconds",
            "Seconds waited, by the holder that blocked the request when its wait began.",
            ("resource", "holder_program", "holder_note"),
        )
        self._other = _counter("other_events", "Events that were counted under the label 'other'.", ())
        self._subscribers: dict[str, Subscriber] = {
            "granted": self._granted,
            "released": self._released,
            "timeout": self._timed_out,
            "deadlock": self._failed,
            "lost": self._failed,
        }
        if blame:
            self._subscribers["waiting"] = self._ignored
        self._event_bus: EventBus = global_bus if self._client is None else self._client.event_bus
        for kind, subscriber in self._subscribers.items():
            self._event_bus.add(kind, subscriber)

    def close(self) -> None:
        """Stop counting."""
        for kind, subscriber in self._subscribers.items():
            self._event_bus.remove(kind, subscriber)

    def describe(self) -> Sequence[Metric]:
        """Return no metrics in advance; without this method, a registry would collect at once."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all current values."""
        yield from self._now()
        for metric in (self._grants, self._waited, self._held, *self._failures.values(), self._blamed, self._other):
            yield from metric.collect()

    def _now(self) -> Iterator[Metric]:
        """Yield the numbers of holders and waiters. (Read from the present locks: a count of events could become
        wrong.)
        """
        holding: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for client in open_clients() if self._client is None else [self._client]:
            holding.update(
                self._label(ticket.resource) for grant in client.registry.grants() for ticket in grant.state.tickets
            )
            waiting.update(
                self._label(waiter.ticket.resource)
                for waiter in (*client.waiter_queues.waiters(), *client.priority_waiters.waiters())
            )
        for name, help_text, values in (
            ("holding", "Locks that this process holds.", holding),
            ("waiting", "Requests of this process that wait.", waiting),
        ):
            family = GaugeMetricFamily(f"sqlsem_client_{name}", help_text, labels=["resource"])
            for resource, number in values.items():
                family.add_metric([resource], number)
            yield family

    def _label(self, resource: str) -> str:
        (own_label,) = self._few.of(self._pattern(resource))
        return own_label

    def _counted(self, event: Event) -> str:
        pattern = self._pattern(event.resource)
        (own_label,) = self._few.of(pattern)
        if own_label != pattern:
            self._other.inc()
        return own_label

    # -- events (called by the thread or task that acquires, so they must be quick) ----------------------------------

    def _ignored(self, event: Event) -> None:
        """Do nothing. If the event has a subscriber, sqlsem queries the holder that blocks a request."""

    def _granted(self, event: Event) -> None:
        event = cast("Granted", event)
        if event.access != "upgrade":
            resource = self._counted(event)
            self._grants.labels(resource).inc()
            self._waited.labels(resource).observe(event.waited)
        self._blame(event.resource, event.behind, event.waited)

    def _released(self, event: Event) -> None:
        self._held.labels(self._counted(event)).observe(cast("Released", event).held)

    def _timed_out(self, event: Event) -> None:
        event = cast("TimedOut", event)
        self._failed(event)
        self._blame(event.resource, event.behind, event.waited)

    def _failed(self, event: Event) -> None:
        self._failures[event.name].labels(self._counted(event)).inc()

    def _blame(self, resource: str, behind: Behind | None, seconds: float) -> None:
        if behind is not None:
            labels = self._few_blamed.of(self._pattern(resource), label(behind.program), label(behind.note))
            self._blamed.labels(*labels).inc(seconds)


def _counter(name: str, help_text: str, labels: Sequence[str]) -> prometheus_client.Counter:
    return prometheus_client.Counter(f"sqlsem_client_{name}", help_text, labels, registry=None)


def _histogram(name: str, help_text: str, labels: Sequence[str]) -> prometheus_client.Histogram:
    return prometheus_client.Histogram(f"sqlsem_client_{name}", help_text, labels, registry=None, buckets=BUCKETS)


def register(
    registry: CollectorRegistry | None = None,
    *,
    coordinator: Coordinator | None = None,
    patterns: Sequence[str] = (),
    maximum: int = MAX_LABELS,
    blame: bool = True,
) -> Collector:
    """Register a `Collector` of this process's locks, by default in the registry of prometheus_client.

    Arguments are those of `Collector`.

    >>> prometheus_client.start_http_server(9464, "127.0.0.1")  # doctest: +SKIP
    >>> sqlsem.metrics.register()  # doctest: +SKIP
    """
    collector = Collector(coordinator, patterns=patterns, maximum=maximum, blame=blame)
    (registry or prometheus_client.REGISTRY).register(collector)
    return collector
