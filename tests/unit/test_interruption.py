"""Another thread ends a function that a worker runs, and interrupts nothing else."""

from __future__ import annotations

import json
import sys
import threading
import time

import pytest

from sqlsem.bodies import Allowed, running
from sqlsem.values.errors import TaskInterrupted

pytestmark = pytest.mark.skipif(sys.implementation.name != "cpython", reason="others cannot")


def call(function: str, started: running.Started, *arguments: object) -> str | None:
    body = json.dumps({"function": f"{__name__}:{function}", "args": arguments, "kwargs": {}})
    return running._run_call(body, Allowed(), started)


def work(rounds: int) -> int:
    return sum(1 for _ in range(rounds))


def for_ever() -> None:
    while True:
        time.sleep(0.001)


def traced_to_its_end() -> int:
    """Return the number of lines of a traced function; a search that continues at every step would not end."""
    lines = 0

    def tracer(frame, event, _):
        nonlocal lines
        lines += 1
        if lines > 10_000:
            raise AssertionError("it has no end")
        return tracer

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        (lambda: work(3))()
    finally:
        sys.settrace(before)
    return lines


def test_uninterrupted_thread_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(running, "_raise_in", lambda *arguments: raised.append(arguments) or True)
    assert call("work", lambda strike: None, 10) == "10"
    assert raised == []


def test_interrupted_thread_ends() -> None:
    def started(strike: running.Stop) -> None:
        threading.Timer(0.05, strike).start()

    with pytest.raises(TaskInterrupted):
        call("for_ever", started)
    assert traced_to_its_end() > 3


def test_interrupt_yields_result_or_exception() -> None:
    """It has a result or was interrupted, and the next function is not interrupted."""
    ended = {"result": 0, "struck": 0}
    for number in range(300):
        strikers: list[threading.Thread] = []

        def started(strike: running.Stop, number: int = number, strikers: list[threading.Thread] = strikers) -> None:
            striker = threading.Thread(target=lambda: (work(number * 40), strike()))
            strikers.append(striker)
            striker.start()

        try:
            assert call("work", started, 6000) == "6000"
            ended["result"] += 1
        except TaskInterrupted:
            ended["struck"] += 1
        strikers[0].join()
        work(2000)
    assert ended["struck"], ended
    assert traced_to_its_end() > 3
