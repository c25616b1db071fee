"""Spans for waiting and holding, on every engine, with both APIs, read from the SDK's in-memory exporter."""

import re

import pytest
from support import Attempt, until

import sqlsem
from sqlsem.client.event_bus import global_bus

sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

pytestmark = [pytest.mark.faces("sync", "aio"), pytest.mark.locks, pytest.mark.quiet]


@pytest.fixture
def traced():
    """The tracer, and a function that returns ended spans by name."""
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))

    def ended(name=None):
        return [span for span in exporter.get_finished_spans() if name in (None, span.name)]

    with sqlsem.otel.instrument(provider):
        yield provider.get_tracer("program"), ended
    assert global_bus.tracer is None


@pytest.fixture
def waits():
    """Return a function that blocks until ``number`` waits have begun."""
    begun = []
    with sqlsem.on("waiting", begun.append):
        yield lambda number=1: until(lambda: len(begun) >= number, "they wait")


KINDS = {
    "mutex": (lambda c, name: c.mutex(name, note="n"), ("write", 1, 1)),
    "limit": (lambda c, name: c.limit(name, 3, weight=2, note="n"), ("write", 3, 2)),
    "read": (lambda c, name: c.read(name, note="n"), ("read", 1, 1)),
    "stage": (lambda c, name: c.stage(name, 5, note="n"), ("stage:5", 1, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_hold_is_a_span(connect, name, traced, kind):
    _, ended = traced
    make, requested = KINDS[kind]
    with make(connect(), name) as grant:
        assert ended() == []
    hold, lock = ended()
    assert (hold.name, lock.name) == ("sqlsem.hold", "sqlsem.lock")
    assert hold.parent.span_id == lock.context.span_id
    assert lock.start_time <= hold.start_time <= hold.end_time <= lock.end_time
    attributes = hold.attributes
    assert (attributes["sqlsem.access"], attributes["sqlsem.limit"], attributes["sqlsem.weight"]) == requested
    assert (attributes["sqlsem.resource"], attributes["sqlsem.note"]) == (name, "n")
    assert attributes["sqlsem.position"] == grant.position
    assert attributes["sqlsem.outcome"] == "released"
    assert hold.status.is_ok is True or hold.status.status_code.name == "UNSET"


@pytest.mark.parametrize("member", ["another member", "this member"])
def test_a_wait_has_a_link_to_the_holder(connect, name, traced, waits, member):
    _, ended = traced
    coordinator = connect()
    other = connect() if member == "another member" else coordinator
    with coordinator.mutex(name, note="a\x1b[2J<b>"):
        note = re.search(
            r":00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}$", coordinator.admin.entries(name)[0].requesting_id
        )
        attempt = Attempt(other.mutex(name))
        waits()
    attempt.leave()
    until(lambda: len(ended("sqlsem.lock")) == 2, "both have ended")
    (wait,) = ended("sqlsem.wait")
    holder, waiter = ended("sqlsem.lock")
    assert (f"{holder.context.trace_id:032x}", f"{holder.context.span_id:016x}") == note.groups()
    (link,) = wait.links
    assert (link.context.trace_id, link.context.span_id) == (holder.context.trace_id, holder.context.span_id)
    assert wait.parent.span_id == waiter.context.span_id
    assert wait.context.trace_id != holder.context.trace_id
    assert wait.attributes["sqlsem.outcome"] == "granted"
    assert wait.attributes["sqlsem.behind.note"] == "a\\x1b[2J<b>"
    assert wait.end_time > wait.start_time


def test_a_span_of_the_program_is_the_parent_and_is_linked_to(connect, name, traced, waits):
    if type(connect()).__name__ == "Face":
        pytest.skip("the span of a thread is not that of the task which it stands for")
    tracer, ended = traced
    first, other = connect(), connect()
    with tracer.start_as_current_span("load") as load, first.mutex(name):
        attempt = Attempt(other.mutex(name))
        waits()
    attempt.leave()
    until(lambda: len(ended("sqlsem.hold")) == 2, "both have ended")
    hold = ended("sqlsem.hold")[0]
    assert hold.parent.span_id == load.get_span_context().span_id
    (wait,) = ended("sqlsem.wait")
    assert wait.links[0].context.span_id == load.get_span_context().span_id
    assert len(ended("sqlsem.lock")) == 1, "the other one's, which had none"


def test_span_of_a_failed_acquire(connect, name, traced):
    _, ended = traced
    first, other = connect(), connect()
    with first.mutex(name):
        assert not other.mutex(name).acquire(timeout=0)
        assert not other.mutex(name).acquire(timeout=1)
        with pytest.raises(sqlsem.Deadlock):
            first.mutex(name).acquire()
    (wait,) = ended("sqlsem.wait")
    assert wait.attributes["sqlsem.outcome"] == "timeout"
    assert wait.status.status_code.name == "ERROR"
    assert len(ended("sqlsem.lock")) == 4
    assert len(ended("sqlsem.hold")) == 1


@pytest.mark.quiet(False)
def test_span_of_a_lost_lock(connect, name, traced):
    _, ended = traced
    coordinator = connect()
    lock = coordinator.mutex(name)
    lock.acquire()
    coordinator.client.registry.mark_lost([lock.grant.position], "it was taken away")  # (publishes no event)
    coordinator.client.registry.publish_lost(lock.grant.state)
    (hold,) = ended("sqlsem.hold")
    assert hold.attributes["sqlsem.outcome"] == "lost"
    assert hold.status.description == "it was taken away"
    with pytest.raises(sqlsem.LockLost):
        lock.release()


@pytest.mark.engines("sqlite", "postgresql", "mssql")
def test_a_reader_that_becomes_the_writer(connect, name, traced, waits):
    _, ended = traced
    first, other = connect(), connect()
    with other.read(name) as second:
        reader = Attempt(first.read(name))
        grant = reader.granted()
        inner = getattr(grant, "inner", grant)
        with pytest.raises(sqlsem.Timeout):
            grant.upgrade(timeout=1) if inner is grant else grant._loop.call(lambda: inner.upgrade(timeout=1))
        assert second.position
    inner.upgrade() if inner is grant else grant._loop.call(inner.upgrade)
    reader.leave()
    until(lambda: len(ended("sqlsem.hold")) == 2, "both have ended")
    (wait,) = ended("sqlsem.wait")
    assert wait.attributes["sqlsem.outcome"] == "timeout"
    assert len(wait.links) == 1
    (hold,) = (span for span in ended("sqlsem.hold") if span.attributes["sqlsem.position"] == grant.position)
    assert [event.name for event in hold.events] == ["upgraded"]
    assert hold.attributes["sqlsem.outcome"] == "released"


def test_all_of_is_a_single_span(connect, name, traced):
    _, ended = traced
    coordinator = connect()
    with sqlsem.all_of(coordinator.mutex(name("a")), coordinator.read(name("b"))):
        pass
    (hold,) = ended("sqlsem.hold")
    assert hold.attributes["sqlsem.resource"] == (name("a"), name("b"))


def test_interrupted_wait_ends_its_span(connect, name, traced, waits):
    _, ended = traced
    first, other = connect(), connect()
    with first.mutex(name):
        attempt = Attempt(other.mutex(name))
        waits()
        other.close()
        attempt.failed()
    (wait,) = ended("sqlsem.wait")
    assert wait.attributes["sqlsem.outcome"] == "cancelled"


def test_no_spans_without_a_tracer(connect, name):
    coordinator = connect()
    with coordinator.mutex(name):
        (entry,) = coordinator.admin.entries(name)
        assert "-" not in entry.requesting_id.rpartition(":")[2]


def test_invalid_traceparent_is_no_link(connect, database, name, traced):
    """An invalid trace mark in a `requesting_id`, which any program may write, makes no link."""
    _, ended = traced
    first, other = connect(), connect()
    with first.mutex(name), other.mutex(name("connected")):
        own = first.admin.entries(name)[0].requesting_id
        marks = [":00-" + "z" * 32 + "-" + "1" * 16 + "-01", ":00-" + "0" * 32 + "-" + "0" * 16 + "-00"]
        for mark in marks:
            database.rows("UPDATE {table} SET requesting_id = ? WHERE resource_id = ?", f"x{mark}", name)
            assert not other.mutex(name).acquire(timeout=1)
        database.rows("UPDATE {table} SET requesting_id = ? WHERE resource_id = ?", own, name)
    assert [len([link for link in wait.links if link.context.is_valid]) for wait in ended("sqlsem.wait")] == [0, 0]
