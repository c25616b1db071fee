"""Leaders that die, are told to end, or are cut off: the next one leads, but never beside one that trusts its term."""

import _thread
import asyncio
import contextlib
import os
import signal
import time
from collections import Counter

import pytest
from support import Standstills, remains, slack

import sqlsem

GRACE = 1.5
#: The longest time from the end of the grace to the next term: a check, on a busy machine.
CHECK = 20.0


def callbacks(channel):
    def say(event):
        return lambda term: channel.tell(event, at=time.monotonic(), fence=term.fence)

    return {"on_started": say("started"), "on_stopped": say("stopped")}


@contextlib.contextmanager
def taking_part(channel, url, options, own, settings):
    """Yield a coordinator, and then raise SIGTERM; ``own``: with the program's own handler of SIGTERM."""
    struck = []
    if own:
        signal.signal(signal.SIGTERM, lambda number, frame: struck.append(number))
    coordinator = sqlsem.connect(url, **options, **(settings or {"grace": GRACE}))
    channel.tell("asks")
    yield coordinator
    channel.tell("left", struck=struck)
    signal.raise_signal(signal.SIGTERM)  # the program's own again
    channel.tell("after", struck=struck)


def lead(channel, url, options, name, own=None, settings=None):
    """Take part until told to end."""
    with taking_part(channel, url, options, own, settings) as coordinator:
        with coordinator.leader(name, f"pid {os.getpid()}", **callbacks(channel)) as term:
            while not term.ending.wait(60):
                pass


def lead_awaiting(channel, url, options, name, own=None, settings=None):
    async def main():
        async with coordinator.aio.leader(name, f"pid {os.getpid()}", **callbacks(channel)) as term:
            if own:
                await term.ending.wait()
            else:
                await asyncio.sleep(600)

    with taking_part(channel, url, options, own, settings) as coordinator:
        asyncio.run(main())


def lead_again(channel, url, options, name, settings):
    """Take part again and again."""
    coordinator = sqlsem.connect(url, **options, **settings)
    leader = coordinator.leader(name, **callbacks(channel))
    channel.tell("asks")
    leader.run(lambda term: term.ending.wait())


@pytest.fixture(params=[lead, lead_awaiting], ids=["sync", "aio"])
def face(request):
    return request.param


def start(spawn, function, name, **arguments):
    child = spawn(function, name=name, **arguments)
    child.expect("asks")
    return child


def end(child):
    """End a process that leads."""
    child.process.send_signal(signal.SIGTERM)
    child.expect("stopped")
    assert child.next() is None
    assert child.process.wait(20) == 128 + signal.SIGTERM


def test_a_killed_leader_is_followed_by_the_next(spawn, connect, name, face, waiting):
    first = start(spawn, face, name)
    began = first.expect("started")
    second = start(spawn, face, name)
    waiting(name, 2)
    assert connect().leader(name).current().info == f"pid {first.pid}"
    killed = first.kill()
    followed = second.expect("started")
    assert followed["at"] < killed + GRACE + CHECK
    assert followed["fence"] > began["fence"]
    assert connect().leader(name).current().info == f"pid {second.pid}"
    end(second)


def test_sigterm_steps_down_at_once(spawn, database, name, face, waiting):
    first = start(spawn, face, name, settings={"grace": 90})
    first.expect("started")
    second = start(spawn, face, name, settings={"grace": 90})
    waiting(name, 2)
    first.process.send_signal(signal.SIGTERM)
    stopped = first.expect("stopped")
    assert stopped["at"] <= second.expect("started")["at"]  # at once, without a wait for the grace of 90 s
    assert first.next() is None  # its block was left, not ended
    assert first.process.wait(20) == 128 + signal.SIGTERM
    end(second)
    assert database.queue(name) == []


def test_sigterm_while_it_waits(spawn, database, name, face, waiting):
    first = start(spawn, face, name, settings={"grace": 90})
    first.expect("started")
    second = start(spawn, face, name, settings={"grace": 90})
    waiting(name, 2)
    second.process.send_signal(signal.SIGTERM)
    assert second.next() is None
    assert second.process.wait(20) == 128 + signal.SIGTERM
    assert len(database.queue(name)) == 1
    end(first)


def wait_beside_slow_threads(channel, url, options, name):
    """Wait to lead, where a new thread runs only after a while."""
    start = _thread.start_new_thread

    def run_late(call, arguments):
        time.sleep(0.5)  # as on a busy machine
        channel.tell("runs")
        call(*arguments)

    def start_slowly(call, arguments):
        channel.tell("starts")
        start(run_late, (call, arguments))

    _thread.start_new_thread = start_slowly
    coordinator = sqlsem.connect(url, **options, grace=90)
    channel.tell("asks")
    with coordinator.leader(name):
        pass


def test_sigterm_waits_for_threads_that_do_not_run_yet(spawn, connect, name, waiting):
    """If the interpreter ends before a started thread runs, the thread crashes the process."""
    with connect().leader(name):
        child = start(spawn, wait_beside_slow_threads, name)
        waiting(name, 2)
        child.process.send_signal(signal.SIGTERM)
        events = Counter(event["event"] for event in iter(child.next, None))
        assert events["starts"] >= 1
        assert events["runs"] == events["starts"]
        assert child.process.wait(20) == 128 + signal.SIGTERM


def test_a_handler_of_the_programs_own_decides(spawn, database, name, face):
    child = start(spawn, face, name, own=True)
    child.expect("started")
    child.process.send_signal(signal.SIGTERM)
    child.expect("stopped")
    assert child.expect("left")["struck"] == [signal.SIGTERM]
    assert child.expect("after")["struck"] == [signal.SIGTERM] * 2
    assert child.rest()[-1]["event"] == "end"
    assert database.queue(name) == []


@pytest.mark.engines("postgresql")
def test_disconnected_leader_stops_before_the_next_leads(spawn, database, proxied, proxy, name, waiting):
    settings = {"grace": 3.0, "retry": 1.0}
    first = spawn(lead_again, name=name, settings=settings, url=proxied.url)
    first.expect("asks")
    began = first.expect("started")
    second = start(spawn, lead_again, name, settings=settings)
    waiting(name, 2)
    cut = time.monotonic()
    with Standstills() as still:
        proxy.cut()
        stopped = first.expect("stopped")
        followed = second.expect("started")
    assert cut < stopped["at"]
    assert stopped["at"] < followed["at"] or still.between(cut, stopped["at"])
    assert followed["at"] < cut + 3.0 + slack(10)
    assert followed["fence"] > began["fence"]
    # After the reconnect, the first one takes part again, and leads when the second has ended.
    proxy.forward()
    waiting(name, 2)
    remains(lambda: len(database.queue(name)) == 2, 0.5, "it waits")
    second.kill()
    assert first.expect("started")["fence"] > followed["fence"]
    end(first)
