"""SIGTERM in a child of `multiprocessing`, as an exception of its main thread.

Python calls a signal handler between two instructions of the main thread. A signal that arrives after the last
instruction before a blocking call interrupts nothing, and its handler runs when the call returns, which may be never:
the end of a ``with Pool()`` block sends SIGTERM just when its workers begin to wait. Therefore a thread reads the
numbers of the signals that arrive (`signal.set_wakeup_fd`), and interrupts the main thread by another signal, SIGURG,
until the handler has run. (A program that sets a descriptor of its own later, as asyncio does with handlers of signals,
is on its own.)
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["Termination"]

#: Seconds between two interrupts of the main thread, and their largest number.
INTERVAL, INTERRUPTS = 0.02, 500


class Termination:
    """The handler of SIGTERM. The first signal raises `SystemExit`; a second one kills the process.

    Attributes:
        arrived: Set when the first signal is handled.

    Args:
        is_exiting: Returns True when the process is ending, which no exception must interrupt.
    """

    def __init__(self, is_exiting: Callable[[], bool]) -> None:
        self.arrived = threading.Event()
        self._is_exiting = is_exiting
        self._pid = os.getpid()
        self._main = threading.get_ident()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    @classmethod
    def begin(cls, is_exiting: Callable[[], bool]) -> Termination | None:
        """Handle SIGTERM from now on. Return None, and change nothing, if the program handles SIGTERM or SIGURG, or has
        a descriptor for signals. Only the main thread may call it. (On Windows no other process can send SIGTERM.)
        """
        global _current
        if any(signal.getsignal(number) is not signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGURG)):
            return None
        termination = cls(is_exiting)
        previous = signal.set_wakeup_fd(termination._writer, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            termination._close()
            return None
        _thread.start_new_thread(termination._interrupt_main, ())
        signal.signal(signal.SIGURG, _do_nothing)
        signal.signal(signal.SIGTERM, termination)
        _current = termination
        return termination

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != self._pid:  # called by the handler of a forked process
            os.kill(os.getpid(), number)
            return
        self.arrived.set()
        if not self._is_exiting():
            raise SystemExit(128 + number)

    def _interrupt_main(self) -> None:
        while not self.arrived.is_set():
            if signal.SIGTERM not in os.read(self._reader, 64):
                continue
            # (A process that is being forked still has our descriptor, so the signal may be its own.)
            for _ in range(INTERRUPTS):
                if self.arrived.wait(INTERVAL):
                    break
                signal.pthread_kill(self._main, signal.SIGURG)

    def end(self) -> None:
        """Handle no signal any more."""
        for number, handler in ((signal.SIGTERM, self), (signal.SIGURG, _do_nothing)):
            if signal.getsignal(number) is handler:
                signal.signal(number, signal.SIG_DFL)
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._writer):
            signal.set_wakeup_fd(current)
        self._close()

    def _close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Python calls the handlers of all signals that have arrived when one of them interrupts a call."""


_current: Termination | None = None


def _end_in_forked_child() -> None:
    """A forked process has no thread that interrupts; if it is a child of `multiprocessing`, it begins anew."""
    global _current
    if _current is not None:
        _current.end()
        _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_forked_child)
