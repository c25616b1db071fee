"""Callbacks at the end of the interpreter, and after a fork; an event without a listener costs no query."""

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import PATIENCE, until

import sqlsem
import sqlsem.testing
from sqlsem.client import event_bus


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )


def test_events_are_delivered_at_exit():
    done = run(
        """
import sqlsem, sqlsem.testing
sqlsem.on("released", lambda event: print(event.resource, "was released"))
with sqlsem.testing.memory() as locks, locks.mutex("etl"):
    pass
"""
    )
    assert (done.stdout, done.stderr, done.returncode) == ("etl was released\n", "", 0)


def test_blocked_callback_does_not_delay_exit():
    done = run(
        """
import threading, sqlsem, sqlsem.testing
sqlsem.on("released", lambda event: threading.Event().wait())
with sqlsem.testing.memory() as locks, locks.mutex("etl"):
    pass
"""
    )
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
def test_forked_child_keeps_its_subscriptions(tmp_path):
    done = run(
        """
import os, sys, threading, sqlsem
gate, told = threading.Event(), []

def tell(event):
    gate.wait()
    print(os.getpid() == parent, event.resource, flush=True)

parent = os.getpid()
sqlsem.on("released", tell)
with sqlsem.connect(sys.argv[1]) as locks:
    with locks.mutex("before"):
        pass
    child = os.fork()
    gate.set()
    if child:
        os.waitpid(child, 0)
    else:
        with locks.mutex("after"):
            pass
""",
        f"sqlite:///{tmp_path}/locks.db",
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert sorted(done.stdout.splitlines()) == ["False after", "True before"]


def test_holders_are_not_queried_without_a_listener(tmp_path, monkeypatch, caplog):
    with (
        sqlsem.connect(f"sqlite:///{tmp_path}/locks.db") as coordinator,
        sqlsem.connect(f"sqlite:///{tmp_path}/locks.db") as second,
    ):
        looks = []
        session = type(second.engine).session_class
        entries = session.entries
        monkeypatch.setattr(session, "entries", lambda self, name: looks.append(name) or entries(self, name))

        def wait_in_vain():
            with coordinator.mutex("etl"):
                assert not second.mutex("etl").acquire(timeout=0.1)

        def enter():
            with second.mutex("etl"):
                pass

        def wait_for_queries(number):
            with ThreadPoolExecutor(1) as pool:
                with coordinator.mutex("etl"):
                    done = pool.submit(enter)
                    until(lambda: len(looks) >= number, "the holder is queried")
                done.result(PATIENCE)
            assert looks == ["etl"] * number

        caplog.set_level(logging.WARNING, "sqlsem")
        wait_in_vain()
        assert looks == []
        with second.on("waiting", print):
            wait_for_queries(1)
        wait_in_vain()
        assert looks == ["etl"]
        caplog.set_level(logging.INFO, "sqlsem")
        wait_for_queries(2)


def test_failing_subscriber_harms_no_lock(caplog):
    def fails(event):
        raise ValueError("no")

    with sqlsem.testing.memory() as locks:
        locks.client.event_bus.add("granted", fails)
        with locks.mutex("etl"):
            pass
    assert [
        record.levelname for record in caplog.records if "Publishing the event of 'etl'" in record.getMessage()
    ] == ["ERROR"]


def test_unread_subscription_is_bounded():
    subscription = sqlsem.on("lost")
    assert repr(subscription) == "<Subscription 'lost', ended>"
    subscription(print)
    assert repr(subscription) == "<Subscription 'lost'>"
    subscription.undo()


def test_order_is_kept_across_threads():
    """One thread calls the listeners, also where several threads start at once."""
    positions = []
    with sqlsem.testing.memory() as locks, locks.on("granted", lambda event: positions.append(event.position)):
        with locks.on("released", lambda event: positions.append(event.position)):

            def work():
                for _ in range(50):
                    with locks.mutex("etl"):
                        pass

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
            event_bus.drain(PATIENCE)
            until(lambda: len(positions) == 400, "all events arrive")
    threads = [worker for worker in threading.enumerate() if worker.name == "sqlsem-events"]
    assert len(threads) == 1
    for position in set(positions):
        assert positions.count(position) == 2
