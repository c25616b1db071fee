"""`grant.contended`: the event that is set when a request waits behind the grant."""

import asyncio
import contextlib

import pytest
from support import PATIENCE, Attempt, remains, until

import sqlsem

pytestmark = [pytest.mark.faces("sync", "aio"), pytest.mark.locks, pytest.mark.quiet, pytest.mark.timing(0.1)]

PAIRS = {
    "mutex": (lambda c, name: c.mutex(name), lambda c, name: c.mutex(name)),
    "limit": (lambda c, name: c.limit(name, 2), lambda c, name: c.limit(name, 2, weight=2)),
    "read": (lambda c, name: c.read(name), lambda c, name: c.write(name)),
    "stage": (lambda c, name: c.stage(name, 1), lambda c, name: c.stage(name, 2)),
    "all_of": (lambda c, name: sqlsem.all_of(c.mutex(name("other")), c.mutex(name)), lambda c, name: c.mutex(name)),
}


def contended(grant):
    """The event, of either API."""
    inner = getattr(grant, "inner", grant)
    return inner.contended if inner is grant else grant._loop.call(lambda: made(inner))


async def made(grant):
    return grant.contended


@pytest.mark.timing(1.0)
@pytest.mark.parametrize("member", ["another member", "this member"])
@pytest.mark.parametrize("kind", PAIRS)
def test_contended_is_set_by_a_new_waiter(connect, name, kind, member):
    first, second = PAIRS[kind]
    coordinator = connect()
    other = connect() if member == "another member" else coordinator
    with first(coordinator, name) as grant:
        event = contended(grant)
        assert not event.is_set()
        attempt = Attempt(second(other, name))
        until(event.is_set, "the grant is contended")
        assert contended(grant) is event
    attempt.leave()


@pytest.mark.parametrize("member", ["another member", "this member"])
def test_contended_is_set_by_an_earlier_waiter(connect, database, name, member):
    coordinator = connect()
    other = connect() if member == "another member" else coordinator
    with coordinator.mutex(name) as grant:
        attempt = Attempt(other.mutex(name))
        until(lambda: len(database.queue(name)) == 2, "it waits")
        until(contended(grant).is_set, "the grant is contended")
    attempt.leave()


def test_contended_ignores_holders_and_other_resources(connect, database, name):
    holder, other = connect(), connect()
    with holder.read(name) as first, holder.mutex(name("b")):
        attempt = Attempt(other.read(name))
        second = attempt.granted()
        elsewhere = Attempt(other.mutex(name("b")))
        events = [contended(first), contended(second)]
        remains(lambda: not any(event.is_set() for event in events), 0.5, "not contended")
        attempt.leave()
    elsewhere.leave()


def test_contended_is_set_again_after_clear(connect, name):
    first, other = connect(), connect()
    with first.mutex(name) as grant:
        event = contended(grant)
        attempt = Attempt(other.mutex(name))
        for _ in range(2):
            until(event.is_set, "the grant is contended")
            event.clear()
        until(event.is_set, "the grant is contended")
    attempt.leave()


def test_contention_polling_ends_with_the_grant(connect, name):
    coordinator = connect()
    with coordinator.mutex(name) as grant:
        contended(grant)
        watch = coordinator.client.contention_monitor
        until(lambda: watch.thread.runs, "the polling thread runs")
    watch.thread.thread.join(PATIENCE)
    assert not watch.thread.runs
    assert not watch._watched


def test_contention_polling_needs_a_use_of_contended(connect, name):
    coordinator = connect()
    with coordinator.mutex(name):
        assert not coordinator.client.contention_monitor.thread.runs


def test_contention_polling_reads_many_resources_at_once(connect, name):
    first, other = connect(), connect()
    with contextlib.ExitStack() as stack:
        grants = [stack.enter_context(first.mutex(name(number))) for number in range(6)]
        events = [contended(grant) for grant in grants]
        attempt = Attempt(other.mutex(name(3)))
        until(events[3].is_set, "the grant is contended")
        assert [event.is_set() for event in events] == [number == 3 for number in range(6)]
    attempt.leave()


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_contended_is_set_for_all_readers_by_an_upgrade(connect, name, threads):
    first, other = connect(), connect()
    with first.read(name) as early:
        reader = Attempt(other.read(name))
        grant = reader.granted()
        late = Attempt(first.read(name))
        events = [contended(early), contended(late.granted())]

        def upgrade():
            inner = getattr(grant, "inner", grant)
            if inner is grant:
                grant.upgrade(timeout=PATIENCE)
            else:
                grant._loop.run(inner.upgrade(timeout=PATIENCE))

        threads.start(upgrade)
        until(lambda: all(event.is_set() for event in events), "all other grants are contended")
        late.leave()
    threads.join()
    reader.leave()


@pytest.mark.faces("aio")
async def test_contended_can_be_awaited(connect, name):
    coordinator = connect()
    plain = getattr(coordinator, "_coordinator", coordinator)
    released = []

    async def gives_way():
        async with plain.mutex(name) as grant:
            await asyncio.wait_for(grant.contended.wait(), PATIENCE)
            released.append(True)

    task = asyncio.create_task(gives_way())
    await asyncio.sleep(0.05)
    async with plain.mutex(name):
        await task
        assert released == [True]
