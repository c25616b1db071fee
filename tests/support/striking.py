"""Raise a KeyboardInterrupt at one chosen moment, as a signal handler would."""

import dis
import functools
import itertools
import linecache
import sys
from pathlib import Path

import sqlsem

PACKAGE = str(Path(sqlsem.__file__).parent)


@functools.cache
def after_calls(code):
    """Return the events at which a signal that came during a call may strike."""
    steps = list(dis.get_instructions(code))
    return {step.offset for before, step in itertools.pairwise(steps) if before.opname.startswith("CALL")}


def interrupted(trace, do):
    """Return True if a KeyboardInterrupt came out of ``do``, which runs under that tracer."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


#: Instructions that enter a block and never leave it: of Python 3.10, of 3.11 to 3.13, from 3.14 on.
ENTER = {"SETUP_WITH", "BEFORE_WITH", "LOAD_SPECIAL"}


@functools.cache
def entering(code):
    """Return the offsets of instructions that run for a line which enters a ``with`` block."""
    lines = [line for start, end, line in code.co_lines() for _ in range(start, end)]
    entered = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ENTER:
            at = first = last = instruction.offset
            while first > 0 and lines[first - 1] == lines[at]:
                first -= 1
            while last < len(lines) and lines[last] == lines[at]:
                last += 1
            entered.update(range(first, last))
    return entered


def leaves_with(frame):
    """Return True if this is the line of a ``with`` once more, just before its ``__exit__`` is called.

    No signal can strike there (CPython checks for them after calls, at loops and at entries), and an exception that is
    raised there would skip ``__exit__``.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ") and frame.f_lasti not in entering(frame.f_code)


def struck(number, do, files=PACKAGE):
    """Strike at the line of that number which ``do`` runs through; return the place, None if there are fewer lines.

    ``files``: only lines of files whose names begin so count.
    """
    seen, place = 0, None

    def trace(frame, event, _):
        nonlocal seen, place
        code = frame.f_code
        if not code.co_filename.startswith(files):
            return None
        # (At its very entry an __exit__ can do nothing: see tests/faults/test_interrupt.)
        at_entry = code.co_name == "__exit__" and frame.f_lasti < 12
        if event == "line" and not leaves_with(frame) and not at_entry:
            seen += 1
            if seen == number:
                place = f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})"
                raise KeyboardInterrupt
        return trace

    interrupted(trace, do)
    return place


def every_line(prepare):
    """Strike at each line, one at a time, of the function that ``prepare(number)`` returns; yields the places."""
    for number in itertools.count(1):
        place = struck(number, prepare(number))
        if place is None:
            assert number > 10
            return
        yield place
