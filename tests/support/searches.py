"""Bugs that are put in, and have to be found."""

import pytest

from sqlsem.testing.simulate import SimulationFailed, simulate

#: What can be found of any program.
FOUND = ("overlap", "limit", "order", "loss", "phantom", "left", "stuck", "alone")


def found(put_in, schedules=5_000, **options):
    """The failure that a search finds with this bug. Without it the same schedule is a good one.

    The search is bounded by schedules: the seconds are only for a bug that is not found.
    """
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch)
        with pytest.raises(SimulationFailed) as failed:
            simulate(**options, schedules=schedules, seconds=500)
    failure = failed.value
    print(f"{failure.kind} after {failure.schedules} schedules: {failure.schedule}\n{failure.why}")
    simulate(**options, replay=failure.schedule)
    return failure
