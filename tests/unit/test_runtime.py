"""Values of threads, also of the virtual threads of a simulation."""

import threading

from sqlsem.util import runtime


class Fiber(runtime.Runtime):
    """A virtual thread, with values of its own."""

    def __init__(self):
        self.values = {}

    def namespace(self, local):
        return self.values.setdefault(local, {})


def in_thread(call):
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def test_value_per_thread_is_made_once_in_each_thread():
    stacks = runtime.PerThread(list)
    stacks.get().append("main")
    assert in_thread(lambda: (stacks.get().append("other"), stacks.get())[1]) == ["other"]
    assert stacks.get() == ["main"]
    assert runtime.PerThread(list).get() == []


def test_value_per_thread_is_that_of_the_virtual_thread():
    stacks, fibers = runtime.PerThread(list), [Fiber(), Fiber()]
    stacks.get().append("thread")
    for number, fiber in enumerate(fibers):
        with runtime.instead(fiber):
            stacks.get().append(number)
    for number, fiber in enumerate(fibers):
        with runtime.instead(fiber):
            assert stacks.get() == [number]
    assert stacks.get() == ["thread"]


def test_value_made_by_a_signal_handler_is_kept():
    """A handler may use the lock between the check for a value and its making."""
    made = []

    def make():
        if not made:
            made.append(None)
            stacks.get().append("handler's")
        return []

    stacks = runtime.PerThread(make)
    assert stacks.get() == ["handler's"]
