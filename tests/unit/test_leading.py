"""The effects of SIGTERM on leaders in the main thread, also on idle event loops, and on a program's own handlers."""

import asyncio
import contextlib
import ctypes
import functools
import os
import select
import selectors
import signal
import threading

import pytest

import sqlsem.testing
from sqlsem.aio.wakeup import SignalWakeup

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="handlers of signals are the main thread's"
)
posix = pytest.mark.skipif(os.name != "posix", reason="needs signals of POSIX")


def strike():
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def _default_handler():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    handler_left = signal.signal(signal.SIGTERM, before)
    assert handler_left is signal.SIG_DFL, "the handler of before is there again"
    assert signal.set_wakeup_fd(-1) == -1, "no wakeup descriptor is left"


@pytest.fixture
def coordinator():
    with sqlsem.testing.memory() as locks:
        yield locks


def test_sigterm_leaves_the_leaders_block(coordinator):
    stopped = []
    with pytest.raises(SystemExit) as ended, coordinator.leader("a", on_stopped=stopped.append) as term:
        strike()
        pytest.fail("it went on")
    assert ended.value.code == 143
    assert stopped == [term]
    assert coordinator.admin.entries("a") == []
    assert term.ending.is_set()


def test_nested_leaders_stop_at_a_signal(coordinator):
    stopped = []
    with pytest.raises(SystemExit), coordinator.leader("a", on_stopped=lambda term: stopped.append(term.name)):
        with coordinator.leader("b", on_stopped=lambda term: stopped.append(term.name)):
            strike()
    assert stopped == ["b", "a"]


def test_signal_during_exit_waits_for_its_end(coordinator):
    calls = []

    def stop(term):
        strike()
        calls.append("stopped")

    with pytest.raises(SystemExit) as ended:
        with coordinator.leader("a", on_stopped=stop):
            pass
    assert ended.value.code == 143
    assert calls == ["stopped"]
    assert coordinator.admin.entries("a") == []


def test_second_signal_changes_nothing(coordinator):
    calls = []

    def stop(term):
        strike()
        calls.append("stopped")

    with pytest.raises(SystemExit), coordinator.leader("a", on_stopped=stop):
        strike()
    assert calls == ["stopped"]
    assert coordinator.admin.entries("a") == []


def test_programs_own_sigterm_handler_is_called(coordinator):
    struck = []
    own = lambda number, frame: struck.append(number)  # noqa: E731
    signal.signal(signal.SIGTERM, own)
    with coordinator.leader("a") as term:
        strike()
        assert term.ending.wait(10)
        term.check()  # it leads until the program leaves
    assert struck == [signal.SIGTERM]
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is own


def test_handler_set_inside_the_block_stays(coordinator):
    struck = []
    with coordinator.leader("a"):
        handler = signal.getsignal(signal.SIGTERM)
        own = lambda number, frame: struck.append(number)  # noqa: E731
        signal.signal(signal.SIGTERM, own)
    assert signal.getsignal(signal.SIGTERM) is own
    with coordinator.leader("a"):
        strike()
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is own
    assert struck == [signal.SIGTERM]
    assert callable(handler)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, None])
def test_foreign_signal_handlers_are_kept(coordinator, handler):
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)
    before = signal.getsignal(signal.SIGTERM)
    with coordinator.leader("a", handle_sigterm=handler is not None):
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is before


def test_candidate_that_never_leads_restores_the_handler(coordinator):
    with coordinator.mutex("a"), pytest.raises(sqlsem.Deadlock), coordinator.leader("a"):
        pytest.fail("it leads")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# -- on an event loop


class StruckSelector(selectors.SelectSelector):
    """A selector that gets SIGTERM after Python's last instruction before it waits.

    The signal is raised, and the selector waits, from within `map`: the interpreter handles no signal in between. (The
    functions of `signal` that raise one handle it before they return.)
    """

    armed = False
    woken = None

    def _select(self, readers, writers, _, timeout=None):
        if not self.armed or timeout == 0:
            return select.select(readers, writers, [], timeout)
        self.armed = False
        calls = [
            functools.partial(ctypes.PyDLL(None)["raise"], signal.SIGTERM),
            functools.partial(select.select, readers, writers, [], 10.0),
        ]
        _, ready = map(functools.partial.__call__, calls)
        self.woken = bool(ready[0])
        return ready


@pytest.fixture
def selector():
    return StruckSelector()


@pytest.fixture
def loop(selector):
    loop = asyncio.SelectorEventLoop(selector)
    yield loop
    loop.close()


@posix
def test_sigterm_wakes_a_loop_about_to_wait(coordinator, selector, loop):
    async def lead():
        async with coordinator.aio.leader("a"):
            selector.armed = True
            await asyncio.sleep(600)

    with pytest.raises(SystemExit) as ended:
        loop.run_until_complete(lead())
    assert ended.value.code == 143
    assert selector.woken
    assert coordinator.admin.entries("a") == []


@posix
def test_own_handler_wakes_a_loop_about_to_wait(coordinator, selector, loop):
    struck = []
    signal.signal(signal.SIGTERM, lambda number, frame: struck.append(number))

    async def lead():
        async with coordinator.aio.leader("a") as term:
            selector.armed = True
            await term.ending.wait()

    loop.run_until_complete(lead())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert selector.woken
    assert struck == [signal.SIGTERM]


@posix
def test_sigterm_wakes_the_leader_left_of_two(coordinator, selector, loop):
    async def lead(name, may_end):
        async with coordinator.aio.leader(name) as term:
            await asyncio.wait(
                [asyncio.ensure_future(event.wait()) for event in (may_end, term.ending)],
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def main():
        first, second = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.ensure_future(lead(name, event)) for name, event in (("a", first), ("b", second))]
        while len(coordinator.admin.entries("a") + coordinator.admin.entries("b")) < 2:
            await asyncio.sleep(0.01)
        first.set()
        await tasks[0]
        selector.armed = True
        await tasks[1]

    signal.signal(signal.SIGTERM, lambda number, frame: None)
    loop.run_until_complete(main())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert selector.woken


@posix
def test_loops_own_signal_handlers_are_called(coordinator, loop):
    """The loop handles one signal before the block begins, and another one from within the block on."""

    async def main():
        events = {number: asyncio.Event() for number in (signal.SIGUSR1, signal.SIGUSR2)}

        async def strike(number):
            os.kill(os.getpid(), number)
            await asyncio.wait_for(events[number].wait(), 20)
            events[number].clear()

        loop.add_signal_handler(signal.SIGUSR1, events[signal.SIGUSR1].set)
        async with coordinator.aio.leader("a"):
            await strike(signal.SIGUSR1)
        await strike(signal.SIGUSR1)
        async with coordinator.aio.leader("a"):
            loop.add_signal_handler(signal.SIGUSR2, events[signal.SIGUSR2].set)
            await strike(signal.SIGUSR2)
        for number in events:
            await strike(number)
            loop.remove_signal_handler(number)

    loop.run_until_complete(main())


@posix
def test_signal_as_the_block_ends_reaches_the_loop(loop):
    """A signal whose number was written, and is not read yet, is passed on when the block ends."""

    async def main():
        event = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, event.set)
        wakeup = SignalWakeup.begin()
        os.kill(os.getpid(), signal.SIGUSR1)
        wakeup.end()
        await asyncio.wait_for(event.wait(), 20)
        loop.remove_signal_handler(signal.SIGUSR1)

    loop.run_until_complete(main())


@posix
def test_wakeup_of_a_closed_loop_is_replaced(loop):
    async def begin():
        return SignalWakeup.begin()

    abandoned = asyncio.new_event_loop()
    old = abandoned.run_until_complete(begin())
    abandoned.close()
    new = loop.run_until_complete(begin())
    assert new not in (None, old)
    old.end()
    assert loop.run_until_complete(begin()) is new
    new.end()
    new.end()


@posix
def test_second_loop_leaves_the_wakeup_to_the_first(loop):
    async def begin():
        return SignalWakeup.begin()

    first = loop.run_until_complete(begin())
    with contextlib.closing(asyncio.new_event_loop()) as second:
        assert second.run_until_complete(begin()) is None
    first.end()


@posix
def test_uvloop_keeps_its_own_wakeup(coordinator):
    uvloop = pytest.importorskip("uvloop")
    event = asyncio.Event()

    async def strike():
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(event.wait(), 20)
        event.clear()

    async def main():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, event.set)
        async with coordinator.aio.leader("a") as term:
            await strike()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(term.ending.wait(), 20)
        await strike()

    signal.signal(signal.SIGTERM, lambda number, frame: None)
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        loop.run_until_complete(main())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
