"""A KeyboardInterrupt at one line of the package, as out of a signal handler."""

import itertools
import linecache
import sys
from pathlib import Path

import sqlsem

PACKAGE = str(Path(sqlsem.__file__).parent)


def struck(number, do):
    """Where it struck: at the line of that number which ``do`` runs through; None where there are fewer."""
    seen, where, inside = 0, None, set()

    def leaves_with(frame):
        # A 'with' line comes a second time as its block ends, where no signal strikes: see tests/faults/test_interrupt.
        if not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            return False
        inside.symmetric_difference_update({(id(frame), frame.f_lineno)})
        return (id(frame), frame.f_lineno) not in inside

    def trace(frame, event, _):
        nonlocal seen, where
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        if event == "call":
            inside.difference_update([place for place in inside if place[0] == id(frame)])  # ids are used again
        # (At its very entry an __exit__ can do nothing: see there, too.)
        at_entry = code.co_name == "__exit__" and frame.f_lasti < 12
        if event == "line" and not leaves_with(frame) and not at_entry:
            seen += 1
            if seen == number:
                where = f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})"
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return where


def every_line(prepare):
    """Strike at each line, one at a time, of what ``prepare(number)`` returns; yields the places."""
    for number in itertools.count(1):
        where = struck(number, prepare(number))
        if where is None:
            assert number > 10
            return
        yield where
