"""Insert bugs that a search has to find, and record its schedules."""

import pytest

from sqlsem.testing import simulate as simulation
from sqlsem.testing.simulate import SimulationFailed, simulate

#: The kinds of failure that any program can have.
FOUND = ("overlap", "limit", "order", "loss", "phantom", "left", "stuck", "alone")


def noted_in(bugs):
    """Return a decorator for functions that seed a bug; it notes them with the options of their search."""

    def bug(**options):
        def note(put_in):
            bugs[put_in.__name__] = (put_in, options)
            return put_in

        return note

    return bug


def traces(servers, settings, seeds):
    """Return the trace of each seed's schedule; they run one after the other."""
    lines_of = {}
    with servers as make:
        for seed in seeds:
            trace = []
            simulation._run(settings, make, seed, None, trace)
            lines_of[seed] = [line for line in trace if " log " not in line]  # (those have numbers of processes)
    return lines_of


def found(put_in, schedules=5_000, **options):
    """Return the failure that a search finds with this bug. Without the bug the same schedule passes.

    The search is bounded by schedules: the seconds only matter for a bug that is not found.
    """
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch)
        with pytest.raises(SimulationFailed) as failed:
            simulate(**options, schedules=schedules, seconds=500)
    failure = failed.value
    print(f"{failure.kind} after {failure.schedules} schedules: {failure.schedule}\n{failure.why}")
    simulate(**options, replay=failure.schedule)
    return failure
