"""A waiter need not poll while an earlier waiter of its process must be granted first: compared with the rule."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlsem.values.locks import Request

ACCESS = ("write", "read", "stage:1")
LIMITS = (None, 1, 2, 3)
#: All requests of a small world.
SMALL = [
    Request("x", access, limit, weight)
    for access, limit, weight in itertools.product(ACCESS, LIMITS, (1, 2, 3))
    if limit is None or weight <= limit
]
CAPS = (None, 1, 2, 3, 4)


def overtakes(earlier, later, ahead, between=(), cap=None):
    """True if the later request may be granted while the earlier one may not."""
    return later.fits((*ahead, earlier, *between), cap) and not earlier.fits(ahead, cap)


@pytest.mark.parametrize("later", SMALL, ids=str)
def test_keeps_out_agrees_with_the_rule(later):
    """In a small world, one row ahead and a cap cover all cases, so the test also finds needless polls."""
    ahead = [
        (),
        *((request,) for request in SMALL),
        *((dataclasses.replace(request, weight=3, limit=None),) for request in SMALL),
    ]
    for earlier in SMALL:
        overtaken = any(overtakes(earlier, later, rows, cap=cap) for rows in ahead for cap in CAPS)
        assert earlier.keeps_out(later) is not overtaken, earlier


#: Holders beside a request of that world.
BESIDE = [
    Request("x", access, limit, weight)
    for access, limit, weight in itertools.product(ACCESS, (None, 1, 2, 3, 4, 5, 6), (1, 2, 3, 4))
    if limit is None or weight <= limit
]


@pytest.mark.parametrize("held", SMALL, ids=str)
def test_covers_agrees_with_the_rule(held):
    """A holder that acquires again is granted at once only if no possible holder beside it makes the request wait."""
    possible = [(other, cap) for other in BESIDE for cap in CAPS if held.fits([other], cap)]
    for request in SMALL:
        alone = all(request.fits([], cap) for cap in CAPS if held.fits([], cap))
        fits = alone and all(request.fits([other], cap) for other, cap in possible)
        assert held.covers(request) is fits, request


requests = st.builds(
    lambda access, limit, weight: Request("x", access, limit, weight if limit is None else min(weight, limit)),
    st.sampled_from([*ACCESS, "stage:2"]),
    st.one_of(st.none(), st.integers(1, 12)),
    st.integers(1, 8),
)
queues = st.lists(requests, max_size=6)


@settings(max_examples=2000)
@given(queues, requests, queues, requests, st.one_of(st.none(), st.integers(1, 12)))
def test_excluded_request_is_never_granted(ahead, earlier, between, later, cap):
    if earlier.keeps_out(later):
        assert not overtakes(earlier, later, ahead, between, cap)


@settings(max_examples=500)
@given(queues, requests, st.integers(0, 5), st.integers(0, 5))
def test_longer_queue_never_helps_a_request(ahead, request, number, place):
    """A read that stops at the deciding row gives the same answer as the sum over all rows."""
    rows = [*ahead, *ahead[:number]]
    beside = [other for other in rows if not (request.shared and other.access == request.access)]
    limits = [other.limit for other in (request, *beside) if other.limit is not None]
    assert request.fits(rows, None) is (not limits or sum(x.weight for x in (request, *beside)) <= min(limits))
    if request.fits(rows, None):
        assert request.fits(rows[:place], None)
