"""Handlers of signals, for as long as a command needs them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def handled(names: Iterable[str], handle: Callable[[int], object]) -> Iterator[None]:
    """A context in which ``handle`` is called with the number of each of these signals that arrives. Only the main
    thread may enter it.

    If ``handle`` raises an exception during a ``__del__``, Python drops that, and the signal is lost. It may call
    `queue.SimpleQueue.put` at any time.
    """
    before: dict[int, Any] = {}
    for name in names:
        number = getattr(signal, name, None)
        # A signal that our parent ignores (nohup, a background job of a script) stays ignored.
        if number is not None and (name == "SIGCHLD" or signal.getsignal(number) is not signal.SIG_IGN):
            before[number] = signal.signal(number, lambda caught, _: handle(caught))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
