"""A block that one thread enters and another one leaves, like a block in a generator."""

import gc
import threading

import pytest
from support import PATIENCE, until

pytestmark = pytest.mark.locks


def named(lock, held):
    with lock as grant:
        held.append(grant)
        yield


def unnamed(lock, held):
    with lock:
        held.append(lock.grant)
        yield


def close(generator):
    generator[0].close()


def collect(generator):
    generator.clear()
    gc.collect()


def fail(generator):
    with pytest.raises(ZeroDivisionError):
        generator[0].throw(ZeroDivisionError())


def elsewhere(leave, generator):
    thread = threading.Thread(target=leave, args=(generator,))
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("leave", [close, collect, fail])
def test_generator_left_by_another_thread_releases(connect, name, caplog, leave):
    coordinator, held = connect(), []
    generator = [named(coordinator.mutex(name), held)]
    next(generator[0])
    elsewhere(leave, generator)
    until(lambda: coordinator.admin.entries(name) == [], "it is released")
    assert held[0].state.released
    assert "which did not enter it; its grant is released" in caplog.text
    assert f"{__file__}:" in caplog.text
    with coordinator.mutex(name):
        pass


@pytest.mark.parametrize("leave", [close, collect, fail])
def test_generator_that_names_no_grant_is_told_of(connect, name, caplog, leave):
    coordinator, held = connect(), []
    generator = [unnamed(coordinator.mutex(name), held)]
    next(generator[0])
    elsewhere(leave, generator)
    assert "which did not enter it; it stays held" in caplog.text
    held[0].release()
