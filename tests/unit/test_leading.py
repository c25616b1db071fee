"""The effects of SIGTERM on leaders in the main thread, and on a program's own handlers."""

import signal
import threading

import pytest

import sqlsem.testing

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="handlers of signals are the main thread's"
)


def strike():
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def _default_handler():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    handler_left = signal.signal(signal.SIGTERM, before)
    assert handler_left is signal.SIG_DFL, "the handler of before is there again"


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
