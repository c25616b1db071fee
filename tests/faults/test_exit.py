"""Interpreters that end with locks held."""

import logging
import os
import sys
import threading
import time

import pytest
from support import until

import sqlsem

#: A grace so long that whoever gets in earlier did not owe it to the grace.
GRACE = 120.0


def rows_are_gone(database, name):
    """At once, before anybody looks after the dead."""
    until(lambda: database.queue(name) == [], "the rows are gone")


@pytest.mark.parametrize("how", ["return", "sys.exit", "exception", "thread", "other_thread_holds"])
def test_an_orderly_end_gives_everything_back(spawn, database, name, how):
    child = spawn(end_while_holding, name=str(name), how=how)
    child.expect("held")
    assert len(database.queue(name)) == 2
    child.send(do="end")
    assert child.process.wait(60) == {"sys.exit": 3, "exception": 1}.get(how, 0)
    rows_are_gone(database, name)
    if how == "exception":
        assert "ZeroDivisionError" in child.errors()


def end_while_holding(channel, url, options, name, how):
    coordinator = sqlsem.connect(url, **options, grace=GRACE)

    def hold():
        coordinator.mutex(f"{name}-a").acquire()
        coordinator.limit(f"{name}-b", 2).acquire()

    if how in ("thread", "other_thread_holds"):
        ready = threading.Event()

        def run():
            hold()
            ready.set()
            if how == "other_thread_holds":
                time.sleep(3600)

        threading.Thread(target=run, daemon=True).start()
        ready.wait()
    else:
        hold()
    channel.tell("held")
    channel.ask()
    if how == "sys.exit":
        sys.exit(3)
    if how == "exception":
        _ = 1 / 0


def test_an_end_while_other_threads_wait(spawn, database, name, connect):
    """Daemon threads that wait do not keep the process, nor their places; nor do they come back to complain."""
    lock = connect().mutex(str(name))
    lock.acquire()
    child = spawn(end_while_waiting, name=str(name))
    until(lambda: len(database.queue(name)) == 4, "three wait")
    child.send(do="end")
    assert child.process.wait(60) == 0
    until(lambda: len(database.queue(name)) == 1, "the waiters are gone")
    # (Python aborts a process whose daemon threads write to standard error at its very end.)
    assert child.errors() == ""
    lock.release()


def end_while_waiting(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    for _ in range(3):
        threading.Thread(target=coordinator.mutex(name).acquire, daemon=True).start()
    channel.ask()


def test_an_end_inside_a_with_block_of_another_thread(spawn, database, name):
    child = spawn(end_inside_a_block, name=str(name))
    child.expect("held")
    child.send(do="end")
    assert child.process.wait(60) == 0
    rows_are_gone(database, name)


def end_inside_a_block(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    entered = threading.Event()

    def work():
        with coordinator.mutex(name):
            entered.set()
            time.sleep(3600)

    threading.Thread(target=work, daemon=True).start()
    entered.wait()
    channel.tell("held")
    channel.ask()


def test_a_thread_that_is_not_a_daemon_finishes_its_work(spawn, database, name):
    """The interpreter waits for it, and what it holds stays held until then."""
    child = spawn(end_before_a_thread, name=str(name))
    child.expect("main ends")
    child.expect("end")
    assert child.expect("left")["lost"] is False
    assert child.process.wait(60) == 0
    rows_are_gone(database, name)


def end_before_a_thread(channel, url, options, name):
    coordinator = sqlsem.connect(url, **options, grace=GRACE)
    ended = threading.Event()

    def work():
        with coordinator.mutex(name) as grant:
            entered.set()
            ended.wait()
            threading.main_thread().join()
            grant.check()
            lost = grant.lost
        channel.tell("left", lost=lost)

    entered = threading.Event()
    threading.Thread(target=work).start()
    entered.wait()
    channel.tell("main ends")
    ended.set()


def test_an_abrupt_end_is_recovered_from_like_a_kill(agents, spawn, database, name, waiting):
    child = spawn(end_abruptly, name=str(name))
    child.expect("held")
    (waiter,) = agents(1, grace=1)
    entry = waiter.ask("mutex", name)
    waiting(name, 2)
    child.send(do="end")
    assert child.process.wait(60) == 7
    entry.get()
    waiter.release()
    assert database.queue(name) == []


def end_abruptly(channel, url, options, name):
    sqlsem.connect(url, **options, grace=1).mutex(name).acquire()
    channel.tell("held")
    channel.ask()
    os._exit(7)


@pytest.mark.engines("postgresql")
def test_an_end_while_the_database_is_away(own_postgres_server, restarted, spawn, name):
    """Nothing can be given back; the process ends all the same, and soon."""
    child = spawn(end_while_holding, url=restarted.url, name=str(name), how="return")
    child.expect("held")
    own_postgres_server.stop("fast")
    child.send(do="end")
    assert child.process.wait(60) == 0


@pytest.mark.engines("postgresql")
def test_an_end_while_the_database_never_answers(proxy, proxied, spawn, name):
    child = spawn(end_while_holding, url=proxied.url, name=str(name), how="return")
    child.expect("held")
    proxy.hole()
    child.send(do="end")
    assert child.process.wait(60) == 0
    proxy.server_notices()


def test_a_coordinator_that_is_dropped_gives_its_locks_back_at_the_end(spawn, database, name):
    child = spawn(drop_everything, name=str(name))
    child.expect("dropped")
    assert child.process.wait(60) == 0
    rows_are_gone(database, name)


def drop_everything(channel, url, options, name):
    import gc

    logging.basicConfig(level=logging.INFO)
    sqlsem.connect(url, **options, grace=GRACE).mutex(name).acquire()
    gc.collect()
    channel.tell("dropped")
