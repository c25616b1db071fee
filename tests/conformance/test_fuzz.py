"""Several processes, many locks of all kinds at random, one process killed: the recorded history must obey the rule."""

import os
import random
import threading
import time

import pytest
from support import Stay, check_history, make_lock

import sqlsem

LIMITS = {"a": 1, "b": 3, "c": 5, "d": 1}


def plan(chance, name):
    """Return the next request, as arguments of `make_lock`."""
    resource = chance.choice("abcd")
    full = f"{name}-{resource}"
    if resource in "bc":
        return {"kind": "limit", "name": full, "limit": LIMITS[resource], "weight": chance.randint(1, 3)}
    kind = chance.choice(["mutex", "read", "read", "write", "stage", "stage"])
    more = {"order": chance.choice([100, 200])} if kind == "stage" else {}
    return {"kind": kind, "name": full, **more}


def fuzz(channel, url, options, name, seed, rounds, grace):
    coordinator = sqlsem.connect(url, **options, grace=grace, retry=60)
    coordinator.admin.entries(name)
    failures = []

    def work(number):
        chance = random.Random(seed * 100 + number)
        for _ in range(rounds):
            spec = plan(chance, name)
            if chance.random() < 0.15:
                more = plan(chance, name)
                spec = spec if more["name"] == spec["name"] else [spec, more]
            timeout = chance.choice([None, None, None, 0.05, 0])
            lock = make_lock(coordinator, spec)
            if not lock.acquire(timeout=timeout):
                continue
            grant = lock.grant
            specs = spec if isinstance(spec, list) else [spec]
            channel.tell("entered", thread=number, positions=grant.positions, specs=specs)
            time.sleep(chance.random() * 0.01)
            channel.tell("left", thread=number)
            lock.release()

    def guarded(number):
        try:
            work(number)
        except BaseException as exc:
            failures.append(repr(exc))

    channel.tell("ready", pid=os.getpid())
    channel.ask()
    workers = [threading.Thread(target=guarded, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    coordinator.close()
    channel.tell("done", failures=failures)


def access(spec):
    return {"read": "read", "stage": f"stage:{spec.get('order')}"}.get(spec["kind"], "write")


def stays_of(events, died):
    """Return the stays that a process reported; a kill during a stay ends it."""
    inside, stays = {}, []
    for event in events:
        if event["event"] == "entered":
            inside[event["thread"]] = event
        elif event["event"] == "left":
            stays.append((inside.pop(event["thread"]), event["at"]))
    stays += [(event, died) for event in inside.values()]
    return [
        Stay(
            spec["name"],
            entered["positions"][spec["name"]],
            entered["at"],
            left_at,
            access(spec),
            spec.get("weight", 1),
            spec.get("limit", 1),
        )
        for entered, left_at in stays
        for spec in entered["specs"]
    ]


def run(spawn, database, name, processes, rounds):
    children = [
        spawn(fuzz, name=name, seed=random.randrange(10**6), rounds=rounds, grace=1.0) for _ in range(processes)
    ]
    for child in children:
        child.expect("ready")
    for child in children:
        child.send(go=True)
    events = {child: [] for child in children}
    victim = children[-1]
    while len(events[victim]) < rounds:  # about a third of its rounds
        event = victim.next()
        assert event is not None
        assert event["event"] != "done", event
        events[victim].append(event)
    died = victim.kill()
    while (event := victim.next()) is not None:
        events[victim].append(event)
    for child in children[:-1]:
        events[child] = child.rest(timeout=60 + rounds)
        (done,) = [event for event in events[child] if event["event"] == "done"]
        assert done["failures"] == []
    stays = [stay for child in children for stay in stays_of(events[child], died)]
    count = check_history(stays)
    remaining_rows = [row for row in database.queue(name) if row[2].split(":")[1] != str(victim.pid)]
    assert remaining_rows == []
    return count


def test_random_use_by_processes_keeps_the_rule(spawn, database, name):
    assert run(spawn, database, name, processes=3, rounds=20) > 60


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_random_use_by_processes_keeps_the_rule_for_long(spawn, database, name):
    assert run(spawn, database, name, processes=6, rounds=500) > 2000
