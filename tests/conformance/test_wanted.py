"""`grant.wanted`: who holds something is told that somebody waits behind it."""

import asyncio
import contextlib
import threading

import pytest
from support import PATIENCE, Attempt, remains, until

import sqlsem

pytestmark = [pytest.mark.faces("sync", "aio"), pytest.mark.locks, pytest.mark.quiet]

PAIRS = {
    "mutex": (lambda c, name: c.mutex(name), lambda c, name: c.mutex(name)),
    "limit": (lambda c, name: c.limit(name, 2), lambda c, name: c.limit(name, 2, weight=2)),
    "read": (lambda c, name: c.read(name), lambda c, name: c.write(name)),
    "stage": (lambda c, name: c.stage(name, 1), lambda c, name: c.stage(name, 2)),
    "all_of": (lambda c, name: sqlsem.all_of(c.mutex(name("other")), c.mutex(name)), lambda c, name: c.mutex(name)),
}


def wanted(grant):
    """The event, of either face."""
    inner = getattr(grant, "inner", grant)
    return inner.wanted if inner is grant else grant._loop.call(lambda: made(inner))


async def made(grant):
    return grant.wanted


@pytest.mark.parametrize("where", ["another member", "this member"])
@pytest.mark.parametrize("kind", PAIRS)
def test_somebody_comes(connect, name, kind, where):
    first, second = PAIRS[kind]
    coordinator = connect()
    other = connect() if where == "another member" else coordinator
    with first(coordinator, name) as grant:
        event = wanted(grant)
        assert not event.is_set()
        attempt = Attempt(second(other, name))
        until(event.is_set, "it is wanted")
        assert wanted(grant) is event
    attempt.granted()
    attempt.leave()


@pytest.mark.parametrize("where", ["another member", "this member"])
def test_somebody_is_there_already(connect, database, name, where):
    coordinator = connect()
    other = connect() if where == "another member" else coordinator
    with coordinator.mutex(name) as grant:
        attempt = Attempt(other.mutex(name))
        until(lambda: len(database.queue(name)) == 2, "it waits")
        until(wanted(grant).is_set, "it is wanted")
    attempt.granted()
    attempt.leave()


def test_those_ahead_and_those_beside_do_not_want_it(connect, database, name):
    """... nor those who want something else."""
    one, other = connect(), connect()
    with one.read(name) as first, one.mutex(name("b")):
        attempt = Attempt(other.read(name))
        second = attempt.granted()
        elsewhere = Attempt(other.mutex(name("b")))
        events = [wanted(first), wanted(second)]
        remains(lambda: not any(event.is_set() for event in events), 1.5, "nobody wants it")
        attempt.leave()
    elsewhere.granted()
    elsewhere.leave()


def test_cleared_it_is_told_again(connect, name):
    first, other = connect(), connect()
    with first.mutex(name) as grant:
        event = wanted(grant)
        attempt = Attempt(other.mutex(name))
        for _ in range(2):
            until(event.is_set, "it is wanted")
            event.clear()
        until(event.is_set, "it is wanted")
    attempt.granted()
    attempt.leave()


def test_nobody_looks_for_what_is_held_no_more(connect, name):
    coordinator = connect()
    with coordinator.mutex(name) as grant:
        wanted(grant)
        watch = coordinator.process.wanted
        until(lambda: watch.thread.runs, "somebody looks")
    watch.thread.thread.join(PATIENCE)
    assert not watch.thread.runs
    assert not watch._watched


def test_nobody_looks_unless_somebody_wants_to_know(connect, name):
    coordinator = connect()
    with coordinator.mutex(name):
        assert not coordinator.process.wanted.thread.runs


def test_many_resources_are_asked_for_at_once(connect, name):
    first, other = connect(), connect()
    with contextlib.ExitStack() as stack:
        grants = [stack.enter_context(first.mutex(name(number))) for number in range(6)]
        events = [wanted(grant) for grant in grants]
        attempt = Attempt(other.mutex(name(3)))
        until(events[3].is_set, "it is wanted")
        assert [event.is_set() for event in events] == [number == 3 for number in range(6)]
    attempt.granted()
    attempt.leave()


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_a_reader_that_upgrades_wants_all_others_to_leave(connect, name):
    first, other = connect(), connect()
    with first.read(name) as early:
        reader = Attempt(other.read(name))
        grant = reader.granted()
        late = Attempt(first.read(name))
        events = [wanted(early), wanted(late.granted())]

        def upgrade():
            inner = getattr(grant, "inner", grant)
            if inner is grant:
                grant.upgrade(timeout=PATIENCE)
            else:
                grant._loop.run(inner.upgrade(timeout=PATIENCE))

        thread = threading.Thread(target=upgrade)
        thread.start()
        until(lambda: all(event.is_set() for event in events), "all others are wanted")
        late.leave()
    thread.join(PATIENCE)
    reader.leave()


@pytest.mark.faces("aio")
def test_a_task_awaits_it(connect, name):
    coordinator = connect()
    plain = getattr(coordinator, "_coordinator", coordinator)

    async def main():
        gone = []

        async def gives_way():
            async with plain.mutex(name) as grant:
                await asyncio.wait_for(grant.wanted.wait(), PATIENCE)
                gone.append(True)

        task = asyncio.create_task(gives_way())
        await asyncio.sleep(0.05)
        async with plain.mutex(name):
            await task
            assert gone == [True]

    asyncio.run(main())
