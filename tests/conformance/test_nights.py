"""The history that the engines record under load is in order, and can be replayed."""

import random
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest
from support import PATIENCE, until
from support.nights import handed_over

import sqlsem
from sqlsem.cli import nights
from sqlsem.insight import audit as module
from sqlsem.insight.audit import audit
from sqlsem.insight.replay import ReplaySettings, replay

#: All events of these tests are younger than this many seconds.
SINCE = 3600


def night_of(coordinator, resource=None):
    night = nights.Night(coordinator, resource, SINCE)
    return night, list(night.past())


def crowd(connect, threads, name, number=6, rounds=8):
    """Run all kinds of locks at once: mutexes, weights, readers, writers, conversions, stages, groups and timeouts."""

    def work(seed):
        rng = random.Random(seed)
        coordinator = connect()
        for _ in range(rounds):
            action = rng.choice(["mutex", "limit", "heavy", "read", "upgrade", "downgrade", "stage", "both", "hurry"])
            pause = rng.uniform(0, 0.02)
            if action == "mutex":
                with coordinator.mutex(name("mutex"), timeout=PATIENCE):
                    time.sleep(pause)
            elif action in ("limit", "heavy"):
                with coordinator.limit(name("limit"), 3, weight=1 if action == "limit" else 3, timeout=PATIENCE):
                    time.sleep(pause)
            elif action == "stage":
                with coordinator.stage(name("stage"), rng.choice([100, 200]), timeout=PATIENCE):
                    time.sleep(pause)
            elif action == "both":
                locks = [coordinator.limit(name("limit"), 3), coordinator.mutex(name("mutex"))]
                with sqlsem.all_of(*locks, timeout=PATIENCE):
                    time.sleep(pause)
            elif action == "hurry":
                lock = coordinator.mutex(name("mutex"))
                if lock.acquire(timeout=0.01):
                    lock.release()
            elif action == "downgrade":
                with coordinator.write(name("table"), timeout=PATIENCE) as grant:
                    grant.downgrade()
                    time.sleep(pause)
            else:
                with coordinator.read(name("table"), timeout=PATIENCE) as grant:
                    time.sleep(pause)
                    if action == "upgrade":
                        try:
                            grant.upgrade(timeout=PATIENCE)
                        except sqlsem.Deadlock:
                            continue
                        time.sleep(pause)

    for seed in range(number):
        threads.start(work, seed)
    threads.join()


def test_history_under_load_is_in_order(connect, threads, name):
    crowd(connect, threads, name)
    coordinator = connect()
    until(
        lambda: not [entry for entry in coordinator.admin.entries() if entry.resource.startswith(name)], "all have left"
    )
    for resource in ("mutex", "limit", "table", "stage"):
        night, past = night_of(coordinator, name(resource))
        result = audit(past, night.entries)
        assert result.ok, result.findings
        assert result.finished == len(past)
        assert result.grants == len({row.position for row in past if row.granted_at is not None})


def test_open_holds_and_waits_are_counted(connect, threads, name):
    coordinator, other = connect(), connect()
    with coordinator.mutex(name, timeout=PATIENCE):
        threads.start(lambda: other.mutex(name, timeout=PATIENCE).__enter__())
        until(lambda: len(coordinator.admin.entries(name)) == 2, "the other one waits")
        night, past = night_of(coordinator, name)
        assert (len(night.entries), past) == (2, [])
        assert audit(past, night.entries).ok
        result = replay(past, night.entries)
        assert (result.unfinished, result.everything.would.granted) == (2, 1)
    threads.join()
    assert [entry.state for entry in coordinator.admin.entries(name)] == ["holds"]
    other.close()


def test_caps_and_pauses_count_from_when_they_were_set(connect, threads, name, monkeypatch):
    monkeypatch.setattr(module, "SETTING_DELAY", timedelta(0))
    coordinator, *others = (connect() for _ in range(3))

    def found(earlier=0):
        night = nights.Night(coordinator, name, SINCE)
        ruled = [replace(ruling, since=ruling.since - timedelta(seconds=earlier)) for ruling in night.rulings()]
        return [finding.kind for finding in audit(night.past(), night.entries, ruled).findings]

    with coordinator.limit(name, 3):
        pass  # the audit knows every grant since the end of this hold
    with coordinator.limit(name, 3), others[0].limit(name, 3):
        coordinator.admin.set_limit(name, 1)
        threads.start(others[1].limit(name, 3, timeout=PATIENCE).acquire)
        until(lambda: len(coordinator.admin.entries(name)) == 3, "one waits, as the cap is passed already")
        assert (found(), found(earlier=SINCE)) == ([], ["cap"])
        coordinator.admin.pause(name)
    coordinator.admin.resume(name)
    until(
        lambda: [entry.state for entry in coordinator.admin.entries(name)] == ["holds"], "it is granted after the pause"
    )
    threads.join()
    assert (found(), set(found(earlier=SINCE))) == ([], {"cap", "pause"})
    coordinator.admin.set_limit(name, None)
    assert found() == []
    others[1].close()


def test_pages_have_every_row_once(connect, name, monkeypatch):
    monkeypatch.setattr(nights, "PAGE_ROWS", 7)
    coordinator = connect()
    for number in range(60):
        with coordinator.read(name, note=str(number)) as grant:
            if number % 5 == 0:
                grant.upgrade()
    _, past = night_of(coordinator, name)
    assert len(past) == 72
    assert Counter(row.note for row in past) == Counter([str(n) for n in range(60)] + [str(n) for n in range(0, 60, 5)])
    ends = [row.ended_at for row in past]
    assert ends == sorted(ends, reverse=True)
    assert past == coordinator.admin.history(name, maximum=1000) or len({row.ended_at for row in past}) < len(past)


def test_a_history_that_is_pruned_while_it_is_read(connect, name, monkeypatch):
    """The reader does not wait for pruned rows."""
    monkeypatch.setattr(nights, "PAGE_ROWS", 5)
    coordinator = connect()
    for _ in range(20):
        with coordinator.mutex(name):
            pass
    night = nights.Night(coordinator, name, SINCE)
    pages = night.past()
    first = next(pages)
    assert first.resource == name
    monkeypatch.setattr(coordinator.admin, "history", lambda *_, **__: [])
    assert len(list(pages)) == 4  # the rest of the page that was read


def test_replay_of_a_real_history_is_close_to_it(connect, threads, name):
    """The replay gives the waits that were recorded, apart from the short time of each change of holders."""

    def work(seed):
        rng = random.Random(seed)
        coordinator = connect()
        for _ in range(3):
            with coordinator.limit(name, 2, weight=rng.choice([1, 1, 2]), timeout=PATIENCE):
                time.sleep(rng.uniform(0.1, 0.2))

    for seed in range(5):
        threads.start(work, seed)
    threads.join()
    _, past = night_of(connect(), name)
    both = replay(past).resources[name]
    moments = handed_over(past) + 0.01
    assert both.was.granted == both.would.granted == 15
    assert -0.01 <= (both.was.end - both.would.end).total_seconds() <= moments
    assert -0.01 <= both.was.wait_p99 - both.would.wait_p99 <= moments
    assert -0.01 <= both.was.wait_total - both.would.wait_total <= moments * both.was.granted
    more = replay(past, settings=ReplaySettings(limits={name: 10})).resources[name].would
    assert more.wait_total == pytest.approx(0)
