"""Insert bugs that a search has to find."""

import pytest

from sqlsem.testing.simulate import SimulationFailed, simulate

#: The kinds of failure that any program can have.
FOUND = ("overlap", "limit", "order", "loss", "phantom", "left", "stuck", "alone")


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
