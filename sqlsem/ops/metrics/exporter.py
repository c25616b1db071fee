"""Metrics of a whole database, for ``sqlsem metrics``: one overview and the use of rates for each scrape."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from sqlsem.api.coordinator import Coordinator
from sqlsem.engines.base import AdaptiveTimeout, Session, time_limited
from sqlsem.engines.protocol import Capability
from sqlsem.insight.chains import RootBlocker, is_waiting, root_blockers
from sqlsem.insight.overview import Overview, Percentiles
from sqlsem.ops.metrics.labels import MAX_LABELS, OTHER, Few, Patterns, label
from sqlsem.values.errors import SqlsemError
from sqlsem.values.locks import Entry, Past, monotonic
from sqlsem.values.names import RATE_PREFIX
from sqlsem.values.rates import RateEntry
from sqlsem.values.tasks import QueueCounts

__all__ = ["Exporter"]

T = TypeVar("T")

#: How long scrapes get the same metrics, so that frequent scrapes do not load the database.
FRESH_SECONDS = 1.0
#: The first timeout of a read, in seconds. (Prometheus itself waits for 10 s.)
PATIENCE_SECONDS = 8.0
#: At most so many seconds between two overviews count as waiting time: longer ago, the waits are unknown.
LONGEST_GAP_SECONDS = 300.0

#: The outcomes of requests that their owners did not end: the owner died, an operator revoked the row, or it was lost.
ENDS = ("reaped", "revoked", "lost")
#: The outcome of a request for a rate that was not granted in time.
TIMEOUT = "timeout"
#: The most requests of each outcome that are counted.
MAX_ENDS = 1000

#: The database's counters of each window of a rate: the metric's name, its help text, and its attribute.
RATE_COUNTERS: tuple[tuple[str, str, Callable[[RateEntry], int]], ...] = (
    ("rate_taken", "The use taken from rates, including what `adjust` added.", lambda rate: rate.taken),
    ("rate_returned", "The use that `adjust` returned to rates.", lambda rate: rate.returned),
    ("rate_waits", "Requests for rates that were granted after a wait.", lambda rate: rate.waits),
)

#: A metric's name, its help text, the names of its labels, and its values by labels.
_Rows = tuple[str, str, tuple[str, ...], Mapping[tuple[str, ...], float]]


class Exporter:
    """A collector for prometheus_client with the metrics of a whole database, of all members.

    While the database is out of reach, ``sqlsem_up`` is 0, and there are no other metrics.

    Args:
        coordinator: The database. The exporter only reads; it does not become a member.
        patterns: Resources (and queues) that share a label; see `Patterns`.
        maximum: At most this many patterns, queues and blamed holders have a label of their own. The others share
            ``other``; ``sqlsem_other`` is their number.
        once: Collect only once; then there are no counters, which grow from scrape to scrape.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        patterns: Sequence[str] = (),
        maximum: int = MAX_LABELS,
        once: bool = False,
    ) -> None:
        coordinator.engine.require(Capability.ADMINISTRATION, "An exporter")
        self._coordinator = coordinator
        self._session: Session | None = None
        self._timeout = AdaptiveTimeout(PATIENCE_SECONDS)
        self._scrape_lock = threading.Lock()  # one scrape at a time; guards all fields below
        self._last_metrics: tuple[float, list[Metric]] | None = None
        self._once = once
        self._maximum = maximum
        self._pattern = Patterns(patterns)
        self._few = {"resource": Few(maximum), "queue": Few(maximum), "holder": Few(maximum)}
        self._rates: Sequence[RateEntry] = ()
        self._ageing: Mapping[str, float] = {}
        self._blamed: dict[tuple[str, ...], float] = {}
        self._before: float | None = None  # time of the last overview, by this host's clock
        self._ends: Counter[tuple[str, str]] | None = None  # within the last hour
        self._known_ends: set[tuple[str, int, str]] | None = (
            None  # the ends that are counted, or are from before the start
        )
        #: The database's counters of each window, at the last read.
        self._known_rates: Mapping[tuple[str, float], RateEntry] | None = None
        # By metric and labels, since this exporter began.
        self._counted: defaultdict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)
        self._started_counters: set[tuple[str, ...]] = set()
        #: The error of the last read, if it failed.
        self.trouble: SqlsemError | None = None

    def close(self) -> None:
        """Close its connection."""
        with self._scrape_lock:
            self._close_session()

    def describe(self) -> Sequence[Metric]:
        """Return no metrics in advance; without this method, a registry would collect at once."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all current values."""
        with self._scrape_lock:
            now = monotonic()
            if self._last_metrics is None or now - self._last_metrics[0] >= FRESH_SECONDS:
                self._last_metrics = monotonic(), self._metrics(self._read_overview(), now)
            return iter(self._last_metrics[1])

    def count_ends(self) -> None:
        """Count the requests of the last hour that their owners did not end, for the next scrapes: four statements. The
        server calls this once a minute. If it fails, the next scrapes leave these metrics out.
        """
        with self._scrape_lock:
            ends: dict[tuple[str, int, str], tuple[str, str]] = {}
            try:
                for outcome in (*ENDS, TIMEOUT):
                    for past in self._read_on_session(partial(_ended, outcome=outcome)):
                        if outcome in ENDS or past.resource.startswith(RATE_PREFIX):
                            ends[past.resource, past.position, outcome] = self._pattern(past.resource), outcome
            except SqlsemError as exc:
                self.trouble, self._ends = exc, None
                return
            self._ends = Counter(ends.values())
            if self._known_ends is not None:
                for key in ends.keys() - self._known_ends:
                    pattern, outcome = ends[key]
                    if outcome == TIMEOUT:
                        self._count("rate_timeouts", pattern, 1)
                    else:
                        self._count("ended", pattern, 1, outcome)
            self._known_ends = set(ends)

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read_overview(self) -> Overview | None:
        self.trouble = None
        try:
            overview, self._rates, self._ageing = self._read_on_session(_read)
            return overview
        except SqlsemError as exc:
            self.trouble = exc
            return None

    def _read_on_session(self, call: Callable[[Session], T]) -> T:
        """Read on the open session; reconnect at once if it was lost."""
        if self._session is not None:
            try:
                with time_limited(self._session, self._timeout):
                    return call(self._session)
            except SqlsemError:
                self._close_session()
        try:
            self._session = self._coordinator.engine.connect("look")
            with time_limited(self._session, self._timeout):
                self._session.check_schema()
                return call(self._session)
        except BaseException:
            self._close_session()
            raise

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    # -- metrics ----------------------------------------------------------------------------------------------------

    def _metrics(self, overview: Overview | None, began: float) -> list[Metric]:
        rows: list[_Rows] = [("up", "1 if the database could be read, else 0.", (), {(): float(overview is not None)})]
        counters: list[Metric] = []
        if overview is not None:
            blockers = root_blockers(overview)
            rows += self._rows(overview, blockers)
            if not self._once:
                self._add_blame(blockers, began)
                self._add_rates()
                counters += self._counter_metrics()
        gauges = [_metric(GaugeMetricFamily, *row) for row in rows]
        took: _Rows = ("scrape_seconds", "Seconds that this read of the database took.", (), {(): monotonic() - began})
        return [*gauges, *counters, _metric(GaugeMetricFamily, *took)]

    def _rows(self, overview: Overview, blockers: Iterable[RootBlocker]) -> Iterator[_Rows]:
        names = {resource.resource for resource in overview.resources} | {entry.resource for entry in overview.entries}
        names |= {rate.resource for rate in self._rates} | self._ageing.keys()
        patterns = {name: self._pattern(name) for name in names}
        matter: Counter[tuple[str, ...]] = Counter((patterns[name],) for name in names)
        matter.update((patterns[entry.resource],) for entry in overview.entries)
        few = self._few["resource"].all_of(matter)
        labels = {name: few[(pattern,)] for name, pattern in patterns.items()}
        yield from _queues(overview, labels)
        yield from _used(self._rates, labels)
        yield (
            "ageing_seconds",
            "The waiting time that a step of priority is worth, on resources with priorities; the longest.",
            ("resource",),
            _max((labels[name], seconds) for name, seconds in self._ageing.items()),
        )
        yield from _times(overview, labels)
        yield from self._ends_last_hour()
        yield from self._root_blockers(blockers)
        yield from _members(overview)
        queue_few = self._few["queue"].all_of(
            {(label(queue.queue),): queue.pending + queue.running + queue.failed for queue in overview.queues}
        )
        queues = {queue.queue: queue_few[(label(queue.queue),)] for queue in overview.queues}
        yield from _tasks(overview.queues, queues)
        yield (
            "other",
            "Resources and queues that share the label 'other'.",
            ("kind",),
            {
                ("resource",): sum(own == (OTHER,) for own in labels.values()),
                ("queue",): sum(queue == (OTHER,) for queue in queues.values()),
            },
        )

    def _ends_last_hour(self) -> Iterator[_Rows]:
        if self._ends is None or not self._once:
            return
        ends = [(pattern, outcome, count) for (pattern, outcome), count in self._ends.items() if outcome in ENDS]
        zero = [((OTHER, outcome), 0.0) for outcome in ENDS]
        few = self._few["resource"]
        yield (
            "ended_last_hour",
            f"Requests that died, were revoked or lost within the last hour, up to {MAX_ENDS} of each outcome.",
            ("resource", "outcome"),
            _sum([*zero, *(((*few.of(pattern), outcome), float(count)) for pattern, outcome, count in ends)]),
        )

    def _holder(self, entry: Entry) -> tuple[str, ...]:
        return self._pattern(entry.resource), label(entry.program), label(entry.note)

    def _root_blockers(self, blockers: Iterable[RootBlocker]) -> Iterator[_Rows]:
        """Yield the root blockers: the number of their waiters, and how long these have waited."""
        waiters: Counter[tuple[str, ...]] = Counter()
        seconds: Counter[tuple[str, ...]] = Counter()
        for blocker in blockers:
            waiters[self._holder(blocker.entry)] += blocker.waiters
            seconds[self._holder(blocker.entry)] += blocker.waiting_seconds  # type: ignore[assignment]  # a number
        few = self._few["holder"].all_of(seconds)
        labels = ("resource", "holder_program", "holder_note")
        for name, help_text, values in (
            ("blocked", "Requests that wait for this holder, directly or through others, on any resource.", waiters),
            ("blocked_seconds", "Seconds that the present waiters for this holder have waited so far.", seconds),
        ):
            yield name, help_text, labels, _sum((few[holder], number) for holder, number in values.items())

    def _add_blame(self, blockers: Iterable[RootBlocker], now: float) -> None:
        """Add to each root blocker the time that its waiters have waited since the last read or their requests."""
        gap = 0.0 if self._before is None else min(now - self._before, LONGEST_GAP_SECONDS)
        self._before = now
        for blocker in blockers:
            holder = self._few["holder"].of(*self._holder(blocker.entry))
            seconds = min(gap * blocker.waiters, blocker.waiting_seconds)
            self._blamed[holder] = self._blamed.get(holder, 0.0) + seconds

    def _count(self, name: str, pattern: str, number: int, *more: str) -> None:
        """Add to a counter. The number of its labels stays bounded, however many names come and go."""
        counted = self._counted[name]
        labels = *self._few["resource"].of(pattern), *more
        if labels not in counted and len({first for first, *_ in counted} - {OTHER}) >= self._maximum:
            labels = OTHER, *more
        counted[labels] += number

    def _add_rates(self) -> None:
        """Add the use since the last read. (The database deletes an unused window, and later counts it from 0; the
        exporter's counters must not decrease then.)
        """
        known = {(rate.resource, rate.window): rate for rate in self._rates}
        for name, _, number in RATE_COUNTERS:
            more: dict[str, int] = {}  # by rate: each use counts in all windows of the rate
            for key, window in known.items():
                before = None if self._known_rates is None else self._known_rates.get(key)
                increase = number(window)
                if before is not None and number(before) <= increase:
                    increase -= number(before)
                more[window.resource] = max(more.get(window.resource, 0), increase)
            for resource, increase in more.items():
                self._count(name, self._pattern(resource), 0 if self._known_rates is None else increase)
        self._known_rates = known

    def _counter_metrics(self) -> Iterator[Metric]:
        yield _metric(
            CounterMetricFamily,
            "blamed_seconds",
            "Seconds waited, by the root blocker of the wait; since this exporter began.",
            ("resource", "holder_program", "holder_note"),
            self._blamed,
        )
        for outcome in ENDS:
            self._counted["ended"].setdefault((OTHER, outcome), 0)
        yield self._counter(
            "ended",
            "Requests that died, were revoked or were lost, since this exporter began; counted once a minute.",
            ("resource", "outcome"),
        )
        for name, help_text, _ in RATE_COUNTERS:
            yield self._counter(name, f"{help_text} Since this exporter began.", ("resource",))
        yield self._counter(
            "rate_timeouts",
            "Requests for rates that were not granted in time, since this exporter began; counted once a minute.",
            ("resource",),
        )

    def _counter(self, name: str, help_text: str, labels: tuple[str, ...]) -> Metric:
        # Begin with 0: Prometheus sees no increase in a counter that appears with its first count.
        counted = self._counted[name]
        started = {key: number if (name, *key) in self._started_counters else 0 for key, number in counted.items()}
        self._started_counters |= {(name, *key) for key in counted}
        return _metric(CounterMetricFamily, name, help_text, labels, started)


def _read(session: Session) -> tuple[Overview, Sequence[RateEntry], Mapping[str, float]]:
    return (
        session.overview(),
        session.rates(None) if session.offers(Capability.RATES) and session.has_feature("rates") else (),
        session.priorities() if session.offers(Capability.PRIORITIES) and session.has_feature("priorities") else {},
    )


def _ended(session: Session, outcome: str) -> list[Past]:
    return session.history(None, MAX_ENDS, since=3600.0, outcome=outcome)


def _metric(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    help_text: str,
    labels: tuple[str, ...],
    values: Mapping[tuple[str, ...], float],
) -> Metric:
    family = kind(f"sqlsem_{name}", help_text, labels=labels)
    for labels_of_value, value in values.items():
        family.add_metric(labels_of_value, value)
    return family


def _sum(values: Iterable[tuple[tuple[str, ...], float]]) -> dict[tuple[str, ...], float]:
    sums: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for labels, value in values:
        sums[labels] += value
    return dict(sums)


def _max(values: Iterable[tuple[tuple[str, ...], float]]) -> dict[tuple[str, ...], float]:
    maxima: dict[tuple[str, ...], float] = {}
    for labels, value in values:
        maxima[labels] = max(maxima.get(labels, value), value)
    return maxima


def _queues(overview: Overview, labels: Mapping[str, tuple[str, ...]]) -> Iterator[_Rows]:
    """Yield the metrics of resources."""
    by_resource = ("resource",)
    entries = [(entry, labels[entry.resource]) for entry in overview.entries]
    inside = [(entry, name) for entry, name in entries if entry.state in ("holds", "revoked")]
    waiting = [(entry, name) for entry, name in entries if is_waiting(entry)]
    zero = [(name, 0.0) for name in set(labels.values())]  # so that an idle resource is 0 instead of missing

    def count(rows: Iterable[tuple[Entry, tuple[str, ...]]]) -> dict[tuple[str, ...], float]:
        return _sum([*zero, *((name, 1.0) for _, name in rows)])

    def oldest(rows: Iterable[tuple[Entry, tuple[str, ...]]]) -> dict[tuple[str, ...], float]:
        return _max([*zero, *((name, entry.seconds) for entry, name in rows)])

    settings = [(setting, labels[setting.resource]) for setting in overview.resources]
    caps = _max((name, -setting.cap) for setting, name in settings if setting.cap is not None)
    dead = [(entry, name) for entry, name in entries if entry.state == "dead"]
    missing = [(entry, name) for entry, name in entries if entry.missing_for is not None and entry.state != "dead"]
    paused = [*zero, *((name, 1.0) for setting, name in settings if setting.paused)]
    for name_of_metric, help_text, values in (
        ("holding", "Requests that hold.", count(inside)),
        ("waiting", "Requests that wait.", count(waiting)),
        ("dead", "Rows whose owner is dead; the next waiter that checks removes them.", count(dead)),
        ("missing", "Rows whose owner cannot be found, but counts as alive until its grace is over.", count(missing)),
        ("held_weight", "The total weight of the holders.", _sum((name, entry.weight) for entry, name in inside)),
        ("longest_wait_seconds", "Seconds that the oldest present waiter has waited.", oldest(waiting)),
        ("longest_hold_seconds", "Seconds that the oldest present holder has held.", oldest(inside)),
        ("paused", "Resources that an operator has paused.", _sum(paused)),
        ("cap", "The lowest cap that an operator has set.", {name: -cap for name, cap in caps.items()}),
    ):
        yield name_of_metric, help_text, by_resource, values


def _used(rates: Sequence[RateEntry], labels: Mapping[str, tuple[str, ...]]) -> Iterator[_Rows]:
    """Yield the use of rates."""
    numbers: tuple[tuple[str, str, Callable[[RateEntry], float]], ...] = (
        ("rate_limit", "The limit of a rate in a window, as declared last.", lambda rate: rate.limit),
        (
            "rate_used",
            "The use that counts in the window now, including reservations for soon.",
            lambda rate: rate.used,
        ),
        (
            "rate_debt",
            "The use above the limit, by costs that were raised later.",
            lambda rate: max(0, rate.used - rate.limit),
        ),
    )
    for name, help_text, number in numbers:
        values = _sum(((*labels[rate.resource], f"{rate.window:g}"), number(rate)) for rate in rates)
        yield name, help_text, ("resource", "window"), values


def _times(overview: Overview, labels: Mapping[str, tuple[str, ...]]) -> Iterator[_Rows]:
    """Yield the recent times of holds and waits, for resources that are in use now."""
    holds: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    waits: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for resource, times in overview.holds.items():
        name = labels.get(resource, (OTHER,))
        holds[name] += [hold.held for hold in times.holds]
        waits[name] += [hold.waited for hold in times.holds]
    for name_of_metric, help_text, samples in (
        ("recent_hold_seconds", "Recent times for which locks were held, of resources that are in use now.", holds),
        ("recent_wait_seconds", "Recent waiting times of the same locks.", waits),
    ):
        values: dict[tuple[str, ...], float] = {}
        for names, seconds in samples.items():
            shares = Percentiles.of(seconds)
            for quantile, value in (("0.5", shares.p50), ("0.9", shares.p90), ("0.99", shares.p99)):
                key = (*names, quantile)
                values[key] = value
        yield name_of_metric, help_text, ("resource", "quantile"), values


def _members(overview: Overview) -> Iterator[_Rows]:
    kinds: Counter[tuple[str, ...]] = Counter({("beacon",): 0, ("lease",): 0})
    kinds.update((member.kind,) for member in overview.members)
    yield "members", "Processes and sessions that take part.", ("kind",), kinds
    missing = sum(member.is_missed for member in overview.members)
    yield "members_missing", "Members that cannot be found, within their grace or with rows.", (), {(): missing}
    states: Counter[tuple[str, ...]] = Counter({("open",): 0, ("failed",): 0})
    states.update((batch.status,) for batch in overview.batches)
    yield "batches", "Batches that are open or have failed.", ("status",), states
    overdue = sum(batch.overdue for batch in overview.batches)
    yield "batches_overdue", "Open batches whose window is over.", (), {(): overdue}


def _tasks(queues: Sequence[QueueCounts], labels: Mapping[str, tuple[str, ...]]) -> Iterator[_Rows]:
    states: tuple[tuple[str, Callable[[QueueCounts], int]], ...] = (
        ("pending", lambda queue: queue.pending),
        ("running", lambda queue: queue.running - queue.lost),
        ("lost", lambda queue: queue.lost),
        ("finished", lambda queue: queue.finished),
        ("failed", lambda queue: queue.failed),
        ("cancelled", lambda queue: queue.cancelled),
    )
    yield (
        "tasks",
        "Tasks of a work queue; ended tasks as long as the database keeps them.",
        ("queue", "state"),
        _sum(((*labels[queue.queue], state), count(queue)) for queue in queues for state, count in states),
    )
    blocked = _sum((labels[queue.queue], float(queue.blocked_by is not None)) for queue in queues)
    for name, help_text, values in (
        (
            "oldest_pending_seconds",
            "Seconds for which the oldest pending task could have been started.",
            _max((labels[queue.queue], queue.oldest or 0.0) for queue in queues),
        ),
        (
            "task_rate",
            "Attempts at tasks that ended in the last five minutes, per minute.",
            _sum((labels[queue.queue], queue.rate) for queue in queues),
        ),
        ("queues_blocked", "Work queues in which a failed task blocks later orders.", blocked),
    ):
        yield name, help_text, ("queue",), values
