"""The events of `sqlsem.on` and the lines of the logger, for every primitive, on every engine, with both APIs."""

import asyncio
import contextlib
import logging
import threading

import pytest
from support import PATIENCE, Attempt, until

import sqlsem
from sqlsem.client import event_bus
from sqlsem.values import events

pytestmark = [pytest.mark.faces("sync", "aio"), pytest.mark.locks]

#: For each kind: a lock, a lock that makes it wait, and the values in the events of the first.
KINDS = {
    "mutex": (lambda c, name: c.mutex(name, note="n"), lambda c, name: c.mutex(name), ("write", 1, 1)),
    "limit": (lambda c, name: c.limit(name, 2, note="n"), lambda c, name: c.limit(name, 2, weight=2), ("write", 2, 1)),
    "read": (lambda c, name: c.read(name, note="n"), lambda c, name: c.write(name), ("read", 1, 1)),
    "write": (lambda c, name: c.write(name, note="n"), lambda c, name: c.read(name), ("write", 1, 1)),
    "stage": (lambda c, name: c.stage(name, 2, note="n"), lambda c, name: c.stage(name, 1), ("stage:2", 1, 1)),
}


@pytest.fixture
def told():
    """Return a function that lists all events in the order of their delivery."""
    published = []
    subscriptions = [sqlsem.on(kind, published.append) for kind in events.EVENTS]
    yield lambda: event_bus.drain(PATIENCE) or list(published)
    for subscription in subscriptions:
        subscription.undo()


def upgrade(grant, **options):
    inner = getattr(grant, "inner", grant)
    if inner is grant:
        grant.upgrade(**options)
    else:
        grant._loop.call(lambda: inner.upgrade(**options))


def names(published):
    return [event.name for event in published]


@pytest.mark.parametrize("kind", KINDS)
def test_granted_and_released(connect, name, told, kind):
    make, _, requested = KINDS[kind]
    with make(connect(), name) as grant:
        granted = told()[-1]
    released = told()[-1]
    assert names(told()) == ["granted", "released"]
    assert isinstance(granted, events.Granted)
    assert isinstance(released, events.Released)
    for event in (granted, released):
        assert (event.resource, event.position, event.note) == (name, grant.position, "n")
        assert (event.access, event.limit, event.weight) == requested
        assert event.caller == grant.state.caller.owner
    assert granted.at_once
    assert granted.waited == grant.waited
    assert released.held >= 0


@pytest.mark.parametrize("member", ["another member", "this member"])
@pytest.mark.parametrize("kind", KINDS)
def test_wait_event_names_the_holders(connect, name, told, kind, member):
    make, keeps_out, _ = KINDS[kind]
    coordinator = connect()
    other = connect() if member == "another member" else coordinator
    with keeps_out(coordinator, name) as first:
        waiting = Attempt(make(other, name))
        until(lambda: "waiting" in names(told()), "the wait was told")
    waiting.leave()
    (wait,) = (event for event in told() if isinstance(event, events.Waiting))
    assert wait.behind.position == first.position
    assert wait.behind.state == "holds"
    assert wait.behind.requesting_id == first.state.tickets[0].requesting_id
    assert wait.behind.pid
    assert wait.behind.program
    own = [event for event in told() if event.position == wait.position]
    assert names(own) == ["waiting", "granted", "released"]
    assert not own[1].at_once
    assert own[1].waited > 0


def test_wait_event_of_local_waiter_names_remote_holder(connect, name, told, monkeypatch):
    """Each local waiter's event names the remote holder, and the database is asked once."""
    holder, other = connect(), connect()
    with holder.mutex(name, note="the first") as first:
        attempts = []
        for number in range(4):
            attempts.append(Attempt(other.mutex(name)))
            until(lambda: names(told()).count("waiting") == number + 1, "it waits")  # noqa: B023
    for attempt in attempts:
        attempt.leave()
    behind = [event.behind for event in told() if isinstance(event, events.Waiting)]
    assert [entry.position for entry in behind] == [first.position] * 4
    assert {entry.note for entry in behind} == {"the first"}


def test_group_publishes_an_event_per_resource(connect, name, told):
    coordinator = connect()
    with sqlsem.all_of(coordinator.mutex(name("a")), coordinator.read(name("b"))):
        pass
    assert [(event.name, event.resource) for event in told()] == [
        ("granted", name("a")),
        ("granted", name("b")),
        ("released", name("a")),
        ("released", name("b")),
    ]


@pytest.mark.parametrize("timeout", [0, 1])
def test_a_timeout(connect, name, told, timeout):
    first, other = connect(), connect()
    with first.mutex(name):
        with other.mutex(name("connected")):
            assert not other.limit(name, 2).acquire(timeout=timeout)
    (late,) = (event for event in told() if isinstance(event, events.TimedOut))
    assert late.timeout == timeout
    assert (late.position is None) == (timeout == 0)
    assert late.waited >= timeout
    own = [event for event in told() if event.resource == name]
    assert names(own) == ["granted", *(["waiting"] if timeout else []), "timeout", "released"]


def test_a_reader_that_becomes_the_writer(connect, name, told):
    first, other = connect(), connect()
    with other.read(name) as second:
        reader = Attempt(first.read(name))
        grant = reader.granted()
        with pytest.raises(sqlsem.Timeout):
            upgrade(grant, timeout=0)
        with pytest.raises(sqlsem.Timeout):
            upgrade(grant, timeout=1)
    upgrade(grant)
    reader.leave()
    own = [event for event in told() if event.position == grant.position]
    assert [(event.name, event.access) for event in own] == [
        ("granted", "read"),
        ("timeout", "upgrade"),
        ("waiting", "upgrade"),
        ("timeout", "upgrade"),
        ("granted", "upgrade"),
        ("released", "write"),
    ]
    assert own[2].behind.position == second.position
    assert own[2].described == f"upgrade on {name!r}"


def test_a_deadlock(connect, name, told):
    coordinator = connect()
    with coordinator.mutex(name), pytest.raises(sqlsem.Deadlock) as caught:
        coordinator.mutex(name).acquire()
    (deadlocked,) = (event for event in told() if isinstance(event, events.Deadlocked))
    assert deadlocked.why == str(caught.value)
    assert deadlocked.position is None
    assert names(told()) == ["granted", "deadlock", "released"]


def test_lost_event_is_published(connect, name, told, caplog):
    coordinator = connect()
    lock = coordinator.mutex(name)
    lock.acquire()
    grant = lock.grant
    coordinator.client.mark_lost([grant.position], "it was taken away")
    with pytest.raises(sqlsem.LockLost):
        lock.release()
    until(lambda: "lost" in names(told()), "it is told")
    (lost,) = (event for event in told() if isinstance(event, events.Lost))
    assert (lost.position, lost.why) == (grant.position, "it was taken away")
    assert lost.held >= 0
    assert names(told()) == ["granted", "lost"]
    assert f"Lost the lock on {name!r} at {grant.position}: it was taken away" in caplog.messages


def test_a_row_that_is_gone_when_it_is_given_back_is_lost(connect, database, name, told):
    lock = connect().mutex(name)
    lock.acquire()
    database.rows("DELETE FROM {table} WHERE queue_position = ?", lock.grant.position)
    with pytest.raises(sqlsem.LockLost):
        lock.release()
    assert names(told()) == ["granted", "lost"]


def test_revoked_waiter_publishes_lost(connect, database, name, told):
    first, other = connect(), connect()
    with first.mutex(name):
        waiting = Attempt(other.mutex(name))
        until(lambda: "waiting" in names(told()), "it waits")
        (wait,) = (event for event in told() if isinstance(event, events.Waiting))
        database.rows("DELETE FROM {table} WHERE queue_position = ?", wait.position)
        assert isinstance(waiting.failed(), sqlsem.LockLost)
    (lost,) = (event for event in told() if isinstance(event, events.Lost))
    assert (lost.position, lost.held) == (wait.position, None)


def test_coordinator_publishes_only_its_own_events(connect, name):
    first, other = connect(), connect()
    published = []
    with first.on("granted", published.append), first.mutex(name("a")), other.mutex(name("b")):
        pass
    event_bus.drain(PATIENCE)
    assert [event.resource for event in published] == [name("a")]
    with first.mutex(name("c")):
        pass
    event_bus.drain(PATIENCE)
    assert len(published) == 1, "told after it was undone"


def test_callbacks_that_raise_or_block_harm_no_lock(connect, name, caplog):
    coordinator = connect()
    gate, thread_names = threading.Event(), []

    def fails(event):
        raise SystemExit("no")

    def blocks(event):
        assert gate.wait(PATIENCE)
        thread_names.append(threading.current_thread().name)

    with coordinator.on("granted", fails), coordinator.on("granted", blocks), coordinator.on("released", fails):
        for _ in range(3):
            with coordinator.mutex(name):
                pass
        gate.set()
        event_bus.drain(PATIENCE)
    assert thread_names == ["sqlsem-events"] * 3
    assert sum("The subscriber to" in message for message in caplog.messages) == 6


def test_locks_of_a_callback_publish_no_events(connect, name):
    coordinator = connect()
    plain = getattr(coordinator, "_coordinator", coordinator)
    resources = []

    def takes(event):
        resources.append(event.resource)
        with plain.mutex(name("inner")):
            pass

    with coordinator.on("granted", takes), coordinator.mutex(name("outer")):
        pass
    event_bus.drain(PATIENCE)
    assert resources == [name("outer")]


def test_unread_events_are_dropped(connect, name, monkeypatch, caplog):
    monkeypatch.setattr(event_bus, "MAX_BACKLOG", 10)
    coordinator = connect()
    gate, received = threading.Event(), []

    def blocks(event):
        gate.wait(PATIENCE)
        received.append(event)

    with coordinator.on("granted", blocks):
        for _ in range(30):
            with coordinator.mutex(name):
                pass
        gate.set()
        event_bus.drain(PATIENCE)
    assert 10 <= len(received) <= 11
    assert sum("events are dropped" in message for message in caplog.messages) == 1


def test_log_lines_are_written_once_with_details(connect, name, caplog):
    first, other = connect(), connect()
    note = "a\x1b[2Jb\r\nERROR sqlsem forged\u202e<b>"
    with caplog.at_level(logging.DEBUG, "sqlsem"):
        with first.mutex(name, note=note):
            waiting = Attempt(other.mutex(name))
            until(lambda: any(message.startswith("Waiting for") for message in caplog.messages), "it waits")
        waiting.leave()
    records = [record for record in caplog.records if hasattr(record, "event")]
    assert [record.event for record in records].count("waiting") == 1
    (wait,) = (record for record in records if record.event == "waiting")
    assert wait.behind["note"] == "a\\x1b[2Jb\\r\\nERROR sqlsem forged\\u202e<b>"
    assert wait.resource == name
    assert wait.behind["state"] == "holds"
    for record in records:
        assert record.getMessage().isprintable()
        assert record.note is None or record.note.isprintable()
        assert record.levelno < logging.WARNING


# -- in an event loop


@pytest.mark.faces("aio")
def test_coroutine_functions_are_awaited_in_their_loop(connect, name):
    coordinator = connect()
    coordinator = getattr(coordinator, "_coordinator", coordinator)
    received = []

    async def main():
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        async def tell(event):
            await asyncio.sleep(0)
            assert asyncio.get_running_loop() is loop
            received.append(event)
            if event.name == "released":
                done.set()
            if event.name == "granted":
                raise ValueError("one that fails is called again")

        with contextlib.ExitStack() as stack:
            for kind in ("waiting", "granted", "released"):
                stack.enter_context(coordinator.on(kind, tell))
            async with coordinator.mutex(name):
                pass
            await asyncio.wait_for(done.wait(), PATIENCE)
            done.clear()
            async with coordinator.mutex(name):
                pass
            await asyncio.wait_for(done.wait(), PATIENCE)

    asyncio.run(main())
    assert names(received) == ["granted", "released"] * 2


def test_subscription_to_unknown_event_is_refused(connect):
    coordinator = connect()
    with pytest.raises(sqlsem.ConfigurationError, match="no event 'grant'; there are 'waiting', 'granted'"):
        coordinator.on("grant", print)

    async def tell(event):
        pass

    with pytest.raises(sqlsem.ConfigurationError, match="no event loop runs here"):
        coordinator.on("granted", tell)
    with pytest.raises(sqlsem.ConfigurationError, match="takes a function"):
        coordinator.on("granted", 5)


def test_subscription_as_a_decorator(connect, name):
    coordinator = connect()
    received = []
    subscription = coordinator.on("granted")

    @subscription
    def tell(event):
        received.append(event)

    with coordinator.mutex(name):
        pass
    event_bus.drain(PATIENCE)
    subscription.undo()
    subscription.undo()
    with coordinator.mutex(name):
        pass
    event_bus.drain(PATIENCE)
    assert len(received) == 1
    tell("itself")
    assert received[-1] == "itself"
