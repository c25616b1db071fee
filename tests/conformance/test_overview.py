"""The overview: locks, members, queues, batches and rates in one snapshot."""

import contextlib
import dataclasses
import time
from datetime import datetime, timedelta, timezone

import pytest
from support import PATIENCE, Attempt, until

from sqlsem.insight.overview import Percentiles

TABLES = pytest.mark.engines("sqlite", "postgresql", "mssql")


def same(row, other):
    """True if two rows differ only in values that change by themselves."""
    passing = {name: None for name in ("seconds", "missing_for", "callback_seconds") if hasattr(row, name)}
    return dataclasses.replace(row, **passing) == dataclasses.replace(other, **passing)


@TABLES
def test_overview_shows_queue_and_settings(connect, database, name):
    coordinator = connect()
    with coordinator.limit(name, 3, weight=2, note="a <b>"), coordinator.read(name("r")):
        late = Attempt(coordinator.limit(name, 3, weight=2))
        until(lambda: len(database.queue(name)) == 3)
        coordinator.admin.set_limit(name, 7)
        coordinator.admin.pause(name("p"))
        coordinator.admin.set_stale_after(name("p"), 90)
        overview = coordinator.admin.overview()
        own_entries = [entry for entry in overview.entries if entry.resource.startswith(name)]
        assert [row.state for row in own_entries] == ["holds", "waits", "holds"]
        alone = [entry for entry in coordinator.admin.entries() if entry.resource.startswith(name)]
        assert all(same(*pair) for pair in zip(own_entries, alone, strict=True))
        assert abs(overview.taken_at - datetime.now(timezone.utc)) < timedelta(minutes=10)
        settings = {row.resource: row for row in overview.resources}
        listed = {row.resource: row for row in coordinator.admin.resources()}
        for resource in (name, name("r"), name("p")):
            plain = dataclasses.replace(settings[resource], paused_at=None, paused_by=None, cap_by=None)
            assert plain == dataclasses.replace(listed[resource], paused_at=None, paused_by=None, cap_by=None)
        assert (settings[name].cap, settings[name].holding, settings[name].waiting) == (7, 1, 1)
        assert abs(settings[name("p")].paused_at - overview.taken_at) < timedelta(minutes=10)
        assert settings[name].paused_at is None
        assert overview.only(name).entries == [entry for entry in overview.entries if entry.resource == name]
        assert {row.resource for row in overview.only(name).resources} == {name}
        coordinator.admin.set_limit(name, None)
        coordinator.admin.resume(name("p"))
        coordinator.admin.set_stale_after(name("p"), None)
    late.leave()
    assert overview.as_dict()["entries"]


@TABLES
def test_overview_shows_members(connect, database, name):
    coordinator, leased = connect(grace=30), connect(lease=20)
    with coordinator.mutex(name), leased.mutex(name("b")):
        late = Attempt(coordinator.mutex(name("b")))
        until(lambda: len(database.queue(name)) == 3)
        overview = coordinator.admin.overview()
        of = {
            entry.resource: next(member for member in overview.members if member.member_id == entry.member_id)
            for entry in overview.entries
            if entry.resource.startswith(name) and entry.state == "holds"
        }
        own_member, other = of[name], of[name("b")]
        assert (own_member.kind, own_member.grace, own_member.missing_for, own_member.grace_left) == (
            "beacon",
            30,
            None,
            None,
        )
        assert (own_member.holding, own_member.waiting) == (1, 1)
        assert (other.kind, other.grace, other.missing_for) == ("lease", 20, None)
        assert 0 < other.grace_left <= 20
        assert (other.holding, other.waiting) == (1, 0)
        assert own_member.host is not None
        assert own_member.pid is not None
        assert own_member.joined_at <= overview.taken_at
    late.leave()


@TABLES
@pytest.mark.leaves_rows
def test_overview_shows_missing_member(database, name, connect):
    session = database.session(grace=60)
    member_id = session.register_member("host", 7, "program")
    watcher = connect()

    def member():
        return next((row for row in watcher.admin.overview().members if row.member_id == member_id), None)

    assert member().missing_for is None
    session.interrupt()  # as if the process had died
    session.close()
    until(lambda: (entry := member()) is None or entry.missing_for is not None)
    entry = member()
    assert entry.grace_left <= 60
    if database.engine != "sqlite":  # on SQLite the file system proves a death at once
        assert entry.grace_left > 0
    database.rows(f"DELETE FROM {database.beside('member')} WHERE member_id = ?", member_id)


@TABLES
def test_how_long_it_was_held_of_late(connect, name, database):
    coordinator = connect()
    assert name not in coordinator.admin.overview().holds
    for number in range(3):
        with coordinator.mutex(name, note=f"note {number}"):
            time.sleep(0.02)  # the time of the hold
    with pytest.raises(TimeoutError), coordinator.mutex(name):
        coordinator.mutex(name).acquire(timeout=0)
        raise TimeoutError
    with coordinator.mutex(name):
        times = coordinator.admin.overview().holds[name]
    assert [hold.note for hold in times.holds][-3:] == ["note 2", "note 1", "note 0"]
    assert times.held.count == len(times.holds) >= 3
    assert 0 <= times.held.p10 <= times.held.p50 <= times.held.p90 <= times.held.p99 < 60
    assert times.held.p90 > 0.005
    assert times.waited.p50 < 60
    assert set(times.as_dict()) == {"held", "waited"}


@TABLES
def test_work_queues_and_batches(connect, name):
    coordinator = connect()
    queue = coordinator.queue(name)
    first, _ = queue.put(1, order=1), queue.put(2, order=2)
    with pytest.raises(ZeroDivisionError), queue.try_claim():
        raise ZeroDivisionError
    daily = coordinator.batch(name("batch"), parts=["a", "b"], window="1h")
    with daily.part("a"):
        overview = coordinator.admin.overview()
        counts = next(row for row in overview.queues if row.queue == name)
        assert (counts.pending, counts.failed, counts.blocked_by) == (1, 1, first)
        assert counts == dataclasses.replace(coordinator.admin.queues(name)[0], oldest=counts.oldest, rate=counts.rate)
        batch_entry = next(batch for batch in overview.batches if batch.name == name("batch"))
        assert (batch_entry.status, [part.status for part in batch_entry.parts]) == ("open", ["running", "expected"])
        assert batch_entry.parts[0].missing_for is None
        assert batch_entry.window == 3600
        assert batch_entry.opened_at <= overview.taken_at
    with daily.part("b"):
        pass
    assert all(batch.name != name("batch") for batch in coordinator.admin.overview().batches)
    with pytest.raises(ZeroDivisionError), daily.part("a"):
        raise ZeroDivisionError
    failed = next(batch for batch in coordinator.admin.overview().batches if batch.name == name("batch"))
    assert failed.parts[0].status == "failed"
    assert failed.parts[0].error


def rated(overview, name):
    return [rate for rate in overview.rates if rate.name.startswith(name)]


@pytest.mark.timing(0.1)
@TABLES
def test_overview_shows_rates(connect, database, name, threads):
    coordinator = connect()
    assert rated(coordinator.admin.overview(), name) == []
    windows = {"1h": 5, "2h": 9}
    coordinator.rate(name, windows, cost=3).take()
    with coordinator.rate(name, windows, cost=2) as grant:
        grant.adjust(1)
    rate_grant = coordinator.rate(name("b"), 1, per="1h").take()
    threads.start(coordinator.rate(name("b"), 1, per="1h").take, timeout=PATIENCE)
    until(lambda: database.queue(f"rate:{name('b')}"), "it waits")
    overview, listed = coordinator.admin.overview(), coordinator.admin.rates()
    own_rates = rated(overview, name)
    assert [(row.name, row.window, row.limit, row.used) for row in own_rates] == [
        *((name, 3600, 5, 4), (name, 7200, 9, 4), (name("b"), 3600, 1, 1)),
    ]
    assert [(row.taken, row.returned, row.waits) for row in own_rates[:2]] == [(5, 1, 0)] * 2
    assert [row.free_in > 3500 for row in own_rates] == [False, False, True]
    assert own_rates[0].free_in == own_rates[1].free_in == 0
    assert own_rates[2].free_in <= 3637, "with the part of the window in which it was taken"
    alone = [row for row in listed if row.name.startswith(name)]
    passing = {"idle": 0, "free_in": 0}
    assert [dataclasses.replace(row, **passing) for row in own_rates] == [
        dataclasses.replace(row, **passing) for row in alone
    ]
    assert all(abs(row.free_in - other.free_in) < 60 for row, other in zip(own_rates, alone, strict=True))
    assert [rate.name for rate in coordinator.admin.rates(name)] == [name] * 2
    assert overview.only(f"rate:{name}").rates == own_rates[:2]
    assert own_rates[0].as_dict() in overview.as_dict()["rates"]
    rate_grant.adjust(0)
    threads.join()


@TABLES
def test_when_there_is_room_again(connect, name):
    """Slots leave the window one by one: `free_in` is the time until the first leaves, or until a debt is paid."""
    coordinator = connect()
    rate = coordinator.rate(name, 2, per="100s")
    rate.take()
    until(lambda: rated(coordinator.admin.overview(), name)[0].idle > 2.5, "time passes")
    second = rate.take()
    (row,) = rated(coordinator.admin.overview(), name)
    assert 0 < row.free_in <= 101 - 1.5, "when the first one leaves"
    before = row.free_in
    second.adjust(9)
    (row,) = rated(coordinator.admin.overview(), name)
    assert (row.limit, row.used) == (2, 10)
    assert row.free_in > before, "when the second one leaves, too"


@pytest.mark.timing(0.1)
@TABLES
@pytest.mark.leaves_rows
def test_overview_lists_waited_and_recent_rates_first(connect, database, name, threads):
    coordinator = connect()
    grant = coordinator.rate(name("waited"), 1, per="1h").take()
    threads.start(coordinator.rate(name("waited"), 1, per="1h").take, timeout=PATIENCE)
    until(lambda: database.queue(f"rate:{name('waited')}"), "it waits")
    now = int(database.rows(f"SELECT MAX(seen_ms) FROM {database.beside('rate_window')}")[0][0])
    table = database.beside("rate_window")
    rows = [(f"rate:{name(str(number))}", 1000, 7, now + 1000 + number) for number in range(202)]
    insert = f"INSERT INTO {table} (resource_id, window_ms, rate_limit, seen_ms) VALUES (?, ?, ?, ?)"
    with contextlib.closing(database.raw()) as raw:
        raw.cursor().executemany(database.sql(insert), rows)
    listed = coordinator.admin.overview().rates
    database.rows(f"DELETE FROM {table} WHERE resource_id LIKE ? AND rate_limit = 7", f"rate:{name}%")
    grant.adjust(0)  # grants the waiting thread
    threads.join()
    assert {row.name for row in listed} == {name("waited"), *(name(str(number)) for number in range(3, 202))}
    assert len(listed) == 200


@pytest.mark.engines("postgresql", "mssql")
def test_two_statements(connect, database, monkeypatch, name):
    connect().rate(name, 5, per="1h").take()
    session = database.session()
    statements = []
    rows = session.rows
    monkeypatch.setattr(session, "rows", lambda name, *rest: statements.append(name) or rows(name, *rest))
    overview = session.overview()
    session.close()
    assert len(rated(overview, name)) == 1
    assert statements == ["entries", "overview"]


@pytest.mark.engines("sqlite")
def test_overview_is_a_single_snapshot(database, name, connect):
    """A concurrent write is seen whole or not at all."""
    coordinator = connect()
    session = database.session()
    entries = session.entries

    def slow(resource):
        listed = entries(resource)
        coordinator.admin.pause(name)
        return listed

    session.entries = slow
    assert session.overview().resources == []
    session.entries = entries
    assert session.overview().resources[0].paused
    session.close()
    coordinator.admin.resume(name)


def test_overview_percentiles_match_python():
    percentiles = Percentiles.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (percentiles.p10, percentiles.p50, percentiles.p90, percentiles.count) == (1.4, 3.0, 4.6, 5)
    assert Percentiles.of([7.0]) == Percentiles(7.0, 7.0, 7.0, 7.0, 1)
