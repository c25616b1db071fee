"""All faults at once, at random; the recorded history is checked afterwards."""

import logging
import os
import random
import threading
import time

import pytest
from agent import stop
from support import until
from support.journals import Journal, records

import sqlsem
from sqlsem.cli.nights import Night
from sqlsem.insight.audit import audit

SECONDS = 60.0
GRACE = 2.0
WORKERS = 5


def churn(channel, url, options, name, journal, seed):
    """Acquire and release in an endless loop. Note each grant in a journal."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(threadName)s %(levelname)s %(message)s")
    rng = random.Random(seed)
    book = Journal(journal)

    def note(event, grant):
        book.note(what=event, at=time.monotonic(), resource=grant.resource, position=grant.position)

    coordinator = sqlsem.connect(url, **options, grace=GRACE, retry=30)

    def work(number):
        while True:
            kind = rng.choice(["mutex", "pair"])
            resource = f"{name}-{kind}"
            args = (resource,) if kind == "mutex" else (resource, 2)
            lock = getattr(coordinator, {"mutex": "mutex", "pair": "limit"}[kind])(
                *args, on_lost=lambda grant: note("lost", grant)
            )
            try:
                with lock as grant:
                    note("enter", grant)
                    time.sleep(rng.uniform(0, 0.03))
                    # Before the release: a process that slept must check its lock before it claims anything.
                    if grant.lost:
                        continue
                    note("leave", grant)
            except (sqlsem.LockLost, sqlsem.Unavailable) as exc:
                channel.tell("trouble", error=f"{type(exc).__name__}: {exc}")
            except BaseException as exc:
                channel.tell("failed", error=f"{type(exc).__name__}: {exc}")

    for number in range(2):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    channel.tell("ready")
    channel.ask()
    os._exit(0)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_random_faults_keep_the_rule(spawn, database, name, tmp_path):
    journal = tmp_path / "journal"
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    numbers = iter(range(10**6))

    def fresh():
        return spawn(churn, name=str(name), journal=str(journal), seed=seed + next(numbers))

    children = [fresh() for _ in range(WORKERS)]
    killed: dict[int, float] = {}
    stopped: dict[int, tuple] = {}  # pid → child, time of the stop, time to wake it
    every_child = [*children]
    sleeps: list[tuple] = []  # pid, from, to
    terminated: list[float] = []
    done = dict.fromkeys(("kill", "stop", "terminate", "terminate all"), 0)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        time.sleep(rng.uniform(0.05, 0.6))
        for pid, (child, since, end) in list(stopped.items()):
            if time.monotonic() > end:
                sleeps.append((pid, since, time.monotonic()))
                child.resume()
                del stopped[pid]
        fault = rng.choice(list(done))
        child = rng.choice(children)
        if fault == "kill":
            killed[child.pid] = child.kill()
            if child.pid in stopped:  # it had no session until its end
                sleeps.append((child.pid, stopped.pop(child.pid)[1], killed[child.pid]))
            children[children.index(child)] = fresh()
            every_child = [*every_child, *(process for process in children if process not in every_child)]
        elif fault == "stop" and child.pid not in stopped and len(stopped) < 2:
            since = time.monotonic()
            stop(child)
            stopped[child.pid] = (child, since, since + rng.uniform(0, 3 * GRACE))
        elif fault.startswith("terminate") and database.engine == "postgresql":
            maximum = 100 if fault == "terminate all" else 1
            database.rows(
                "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity "
                "WHERE datname = current_database() AND starts_with(application_name, 'sqlsem') "
                "ORDER BY random() LIMIT ?) AS s",
                maximum,
            )
            terminated.append(time.monotonic())
        else:
            continue
        done[fault] += 1
    for child, since, _ in stopped.values():
        sleeps.append((child.pid, since, time.monotonic()))
        child.resume()
    # The queue still works: a new process gets its lock.
    with database.coordinator(grace=30) as coordinator:
        for kind, args in (("mutex", ()), ("limit", (2,))):
            resource = f"{name}-{'mutex' if kind == 'mutex' else 'pair'}"
            assert getattr(coordinator, kind)(resource, *args).acquire(timeout=60), (kind, coordinator.admin.entries())
    for child in children:
        killed[child.pid] = child.kill()
    with database.coordinator(grace=30) as coordinator:
        until(
            lambda: coordinator.admin.reap() is not None and database.queue(name) == [],
            "the rows of the dead are removed",
        )
        # The tables show no fault at any time.
        for resource in (name("mutex"), name("pair")):
            night = Night(coordinator, resource, 3600)
            result = audit(night.past(), night.entries)
            assert result.ok, result.findings
            assert result.grants > 50
    for child in every_child:
        while (event := child.next()) is not None:
            assert event["event"] != "failed", event
    # A process that sleeps while its session is ended cannot learn of it in time: fences and assert_held are for that.
    helpless = [
        (pid, since, until) for pid, since, until in sleeps if any(since - GRACE < at < until for at in terminated)
    ]
    check_journal(journal, killed, helpless, {f"{name}-mutex": 1, f"{name}-pair": 2}, done)


def check_journal(journal, killed, helpless, limits, done):
    stays: dict[tuple, dict] = {}
    for words in records(journal):
        key = (words["resource"], words["position"])
        if words["what"] == "enter":
            assert key not in stays, f"a number was used twice: {key}"
            stays[key] = {"from": words["at"], "pid": words["pid"], "to": killed.get(words["pid"], float("inf"))}
        elif key in stays:  # a grant that was lost before its entry in the journal is no stay
            stays[key]["to"] = min(stays[key]["to"], words["at"])
    for stay in stays.values():
        for pid, since, until_ in helpless:
            if pid == stay["pid"] and stay["from"] < until_ and stay["to"] > since:
                stay["to"] = min(stay["to"], max(since, stay["from"]))
    counts = dict.fromkeys(limits, 0)
    for resource, limit in limits.items():
        own_stays = sorted((stay["from"], position, stay) for (r, position), stay in stays.items() if r == resource)
        counts[resource] = len(own_stays)
        inside: list[tuple] = []
        for entered, position, stay in own_stays:
            inside = [entry for entry in inside if entry[1]["to"] > entered]
            inside.append((position, stay))
            assert len(inside) <= limit, f"{len(inside)} were inside {resource} at {entered}: {inside}"
        if limit == 1:
            # A mutex: order of entry is the order of the numbers.
            assert [position for _, position, _ in own_stays] == sorted(position for _, position, _ in own_stays)
    print(f"{counts} entries beside {done}")
    assert all(count > 50 for count in counts.values()), counts
