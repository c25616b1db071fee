"""SQLite: a granting process notifies the waiter. A notification alone grants nothing, and no wait depends on it."""

import contextlib
import sys
import threading
import time

import pytest
from support import PATIENCE

from sqlsem.engines.sqlite import notifier
from sqlsem.engines.statements import locks
from sqlsem.values.locks import Request

pytestmark = pytest.mark.engines("sqlite")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs sockets whose names are no files")


@pytest.fixture
def queue(database, name):
    """Two members, a holder and a waiter: their sessions and tickets, a thread that waits, and its answers."""
    with contextlib.ExitStack() as stack:
        first, second, waiting = (stack.enter_context(contextlib.closing(database.session())) for _ in range(3))
        holder_id, waiter_id = first.register_member("h", 1, "p"), second.register_member("h", 1, "p")
        (held,) = first.register(holder_id, "one", "o", f"{name}.1", [Request(name)], False)
        (waiting_ticket,) = second.register(waiter_id, "two", "o", f"{name}.2", [Request(name)], False)
        answers = []

        def wait():
            answers.append(waiting.wait(waiting_ticket, 4 * PATIENCE, threading.Event()))

        thread = threading.Thread(target=wait)
        yield first, waiting, held, waiting_ticket, thread, answers
        first.deregister_member(holder_id)
        second.deregister_member(waiter_id)


def seldom(monkeypatch):
    """Make pauses so long that a waiter without a notification does not poll during the test."""
    monkeypatch.setattr(locks.QueueDistance, "pause", lambda *_: 4 * PATIENCE)


@pytest.fixture
def asleep(queue, monkeypatch):
    """An event that is set once the waiter has polled and sleeps: a later notification ends its sleep."""
    session_notifier, polled = queue[1].sleeper, threading.Event()
    sleep = session_notifier.wait

    def wait(*arguments):
        polled.set()
        return sleep(*arguments)

    monkeypatch.setattr(session_notifier, "wait", wait)
    return polled


@linux
def test_granted_waiter_is_notified(queue, asleep, monkeypatch):
    first, waiting, held, _, thread, answers = queue
    seldom(monkeypatch)
    thread.start()
    assert asleep.wait(PATIENCE)
    assert first.release(held, "released")
    thread.join(PATIENCE)
    assert answers == [True]
    assert waiting.sleeper.trusted


@linux
def test_waiter_in_another_session_is_notified_there(queue, asleep, database, monkeypatch):
    """The slices of one wait may use different sessions: the notification reaches the current one."""
    first, waiting, held, waiting_ticket, thread, answers = queue
    seldom(monkeypatch)
    with contextlib.closing(database.session()) as before:
        assert before.wait(waiting_ticket, 0.01, threading.Event()) is False
        thread.start()
        assert asleep.wait(PATIENCE)
        assert first.release(held, "released")
        thread.join(PATIENCE)
    assert answers == [True]
    assert waiting.sleeper.trusted


@linux
def test_notification_alone_grants_nothing(queue, monkeypatch):
    first, _, held, waiting_ticket, thread, answers = queue
    seldom(monkeypatch)
    thread.start()
    for _ in range(20):
        time.sleep(0.05)
        first.sleeper.notify([waiting_ticket.position])
    assert not answers
    first.release(held, "released")
    thread.join(PATIENCE)
    assert answers == [True]


def test_waiter_without_notification_polls(queue, monkeypatch):
    first, waiting, held, _, thread, answers = queue
    monkeypatch.setattr(notifier, "_socket", lambda: None)  # like other systems, or another container
    thread.start()
    time.sleep(0.3)
    first.release(held, "released")
    thread.join(PATIENCE)
    assert answers == [True]
    assert not waiting.sleeper.trusted


def test_foreign_release_grants_nothing(queue):
    first, waiting, held, waiting_ticket, _, _ = queue
    assert not first.release(held._replace(requesting_id="somebody else's"), "released")
    assert waiting.wait(waiting_ticket, 0, threading.Event()) is False
    assert [entry.state for entry in first.entries(held.resource)] == ["holds", "waits"]


def test_a_lease_is_renewed_by_its_owner(database, name):
    """A release grants no member with a lease, which must prove first that it lives."""
    with contextlib.closing(database.session(lease=30)) as leased, contextlib.closing(database.session()) as first:
        holder_id, waiter_id = first.register_member("h", 1, "p"), leased.register_member("h", 1, "p")
        (held,) = first.register(holder_id, "one", "o", f"{name}.1", [Request(name)], False)
        (waiting_ticket,) = leased.register(waiter_id, "two", "o", f"{name}.2", [Request(name)], False)
        first.release(held, "released")
        assert [entry.state for entry in first.entries(name)] == ["waits"]
        assert leased.wait(waiting_ticket, 0, threading.Event()) is True
        assert [entry.state for entry in first.entries(name)] == ["holds"]
        first.deregister_member(holder_id)
        leased.deregister_member(waiter_id)


def test_notified_grant_respects_operators_settings(queue):
    first, waiting, held, waiting_ticket, _, _ = queue
    first.set_resource(held.resource, "paused", 1)
    assert first.release(held, "released")
    assert [entry.state for entry in first.entries(held.resource)] == ["waits"]
    first.set_resource(held.resource, "paused", 0)
    assert waiting.wait(waiting_ticket, 0, threading.Event()) is True


@linux
def test_unread_notifications_do_not_block_the_sender(tmp_path):
    """Unread messages fill the sender's buffer in the end."""
    file = tmp_path / "x.db"
    file.touch()
    with contextlib.ExitStack() as stack:
        sender, *receivers = (
            stack.enter_context(contextlib.closing(notifier.UnixSocketNotifier(file, "t"))) for _ in range(402)
        )
        for position, receiver in enumerate(receivers):
            receiver.listen(position)
        sender.notify(range(len(receivers)))
        assert all(receiver.wait(5.0, threading.Event()) for receiver in receivers)
