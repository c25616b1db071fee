"""A recorded trace is a behaviour of the specification; an altered trace is not."""

import contextlib
import dataclasses
import itertools
import random
import threading
import time

import pytest
from support import until
from support.journals import Journal, records

import sqlsem
from proof import tlc, traces
from sqlsem.cli.nights import Night
from sqlsem.insight.audit import audit

LACKS = tlc.lacks()
WORKERS, THREADS, ROUNDS = 3, 3, 3


def churn(channel, url, options, name, journal, seed, stays):
    """Acquire and release, upgrade at times, and write down the times. ``stays``: hold for ever."""
    book = Journal(journal)
    coordinator = sqlsem.connect(url, **options, grace=1)
    first_inside = threading.Event()

    def note(event, grant):
        book.note(what=event, at=time.time(), resource=grant.resource, position=grant.position)

    def work(number, rng):
        locks = {
            "mutex": lambda: coordinator.mutex(f"{name}-mutex"),
            "pair": lambda: coordinator.limit(f"{name}-pair", 2),
            "read": lambda: coordinator.read(f"{name}-table"),
            "write": lambda: coordinator.write(f"{name}-table"),
        }
        if number:
            first_inside.wait()
        with locks["mutex"]() as grant:  # two more requests of a process wait behind its first one
            note("enter", grant)
            first_inside.set()
            if number == 0:
                until(lambda: len(coordinator.admin.entries(f"{name}-mutex")) > 2, "two wait")
            time.sleep(0.005)  # (no engine's clock is too coarse to tell these visits apart)
            note("leave", grant)
        for _ in range(ROUNDS):
            kind = rng.choice(list(locks))
            with locks[kind]() as grant:
                note("enter", grant)
                time.sleep(rng.uniform(0, 0.02))
                if kind == "read" and rng.random() < 0.5:
                    with contextlib.suppress(sqlsem.Deadlock):  # another reader upgrades
                        grant.upgrade(timeout=5)
                note("leave", grant)
        if stays and number == 0:
            with locks["pair"]() as grant:
                note("enter", grant)
                channel.tell("inside")
                channel.ask()

    rng = random.Random(seed)
    threads = [threading.Thread(target=work, args=(number, random.Random(rng.random()))) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    coordinator.close()
    channel.tell("done")


@pytest.fixture
def recorded(spawn, database, name, tmp_path):
    """Record the events of some processes; one of them is killed in between, and its rows are removed."""
    journal = tmp_path / "journal"
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    children = [
        spawn(churn, name=str(name), journal=str(journal), seed=seed + number, stays=number == 0)
        for number in range(WORKERS)
    ]
    children[0].expect("inside")
    children[0].kill()
    for child in children[1:]:
        child.expect("done")
    visits: dict[tuple[str, int], traces.Visit] = {}
    with database.coordinator(grace=30) as coordinator:
        until(
            lambda: coordinator.admin.reap() is not None and database.queue(name) == [],
            "the rows of the dead are removed",
        )
        past = [row for row in Night(coordinator, None, 3600).past() if row.resource.startswith(f"{name}-")]
    assert audit(past).ok
    positions = {(row.resource, row.position) for row in past}
    for words in records(journal):
        key = (words["resource"], words["position"])
        assert key in positions, "a visit without a row"
        if words["what"] == "enter":
            visits[key] = traces.Visit(*key, entered=words["at"], left=None)
        else:
            visits[key] = dataclasses.replace(visits[key], left=words["at"])
    return traces.events(past, visits.values(), unit=1e-3 if database.engine == "sqlite" else 1e-6)


# -- alterations: each is none of the behaviours of the specification, however the processes went ----------------------


def _at(trace, kind, but=lambda event: True):
    return next(n for n, event in enumerate(trace) if event.what == kind and but(event))


def _key(event):
    return event.resource, event.number


def _of(key):
    return lambda event: _key(event) == key


def _mutexes(trace):
    """Return the indices at which visits of the mutex begin, in order."""
    return [n for n, event in enumerate(trace) if event.what == "granted" and event.resource.endswith("-mutex")]


def _moved(trace, moving, at):
    """Return the trace with that event at another time."""
    return sorted(
        [*trace[:moving], *trace[moving + 1 :], dataclasses.replace(trace[moving], at=at)], key=lambda event: event.at
    )


def _swapped_grants(trace):
    """Swap the grants of two successive waiters for the mutex: each is granted at the other's time."""
    first, second = next(
        (a, b)
        for a, b in itertools.pairwise(_mutexes(trace))
        if trace[_at(trace, "registered", _of(_key(trace[b])))].at < trace[a].at < trace[b].at
    )
    changed = list(trace)
    changed[first] = dataclasses.replace(trace[second], at=trace[first].at)
    changed[second] = dataclasses.replace(trace[first], at=trace[second].at)
    return changed


def _overlap(trace):
    """Extend a stay in the mutex until after the next grant."""
    first, other = (trace[n] for n in _mutexes(trace)[:2])
    return _moved(trace, _at(trace, "ended", _of(_key(first))), other.at + 1)


def _without_request(trace):
    """Return a trace with a grant that was never requested."""
    granted = trace[_at(trace, "granted")]
    return [e for e in trace if not (e.what == "registered" and _key(e) == _key(granted))]


def _someone_elses_row(trace):
    """Return a trace in which a client releases a row of another."""
    end = _at(trace, "ended")
    other = next(event.who for event in trace if event.who != trace[end].who)
    changed = list(trace)
    changed[end] = dataclasses.replace(trace[end], who=other)
    return changed


def _told_too_late(trace):
    """Let a program work on after its row is gone."""
    ended = {_key(event): event.at for event in trace if event.what == "ended"}
    leaving = _at(trace, "left", lambda e: _key(e) in ended)
    return _moved(trace, leaving, ended[_key(trace[leaving])] + 1)


def _number_out_of_order(trace):
    """Let a number appear after a higher one."""
    first, second = sorted(
        (e for e in trace if e.what == "registered" and e.resource.endswith("-mutex")), key=lambda event: event.number
    )[:2]
    without = [e for e in trace if _key(e) != _key(first)]
    return sorted([*without, dataclasses.replace(first, at=second.at + 1)], key=lambda event: event.at)


ALTERED = (
    _swapped_grants,
    _overlap,
    _without_request,
    _someone_elses_row,
    _told_too_late,
    _number_out_of_order,
)


@pytest.mark.skipif(bool(LACKS), reason=f"TLC needs {LACKS}")
@pytest.mark.timeout(1200)
@pytest.mark.engines("sqlite", "postgresql")
def test_a_recorded_history_is_a_behaviour_of_the_specification(recorded):
    verdict = traces.check(recorded)
    assert verdict.accepted, verdict
    assert verdict.events == len(recorded) > 100
    later = [dataclasses.replace(event, number=event.number + 10**10) for event in recorded]
    assert traces.module(later) == traces.module(recorded), "numbers after a failover"
    assert {"registered", "granted", "entered", "left", "ended", "removed"} <= {event.what for event in recorded}
    for alter in ALTERED:
        altered = alter(recorded)
        assert traces.module(altered) != traces.module(recorded), alter.__doc__
        assert not traces.check(altered).accepted, alter.__doc__
