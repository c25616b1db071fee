"""The checker of histories finds each kind of fault."""

import pytest
from support import Stay, check_history, overlap


def stays(*rows, **common):
    return [
        Stay("a", number, *row[:2], **{**common, **(row[2] if len(row) > 2 else {})}) for number, row in enumerate(rows)
    ]


def test_checker_accepts_correct_histories():
    assert check_history(stays((0, 1), (1, 2), (2, None))) == 3
    assert check_history(stays((0, 9), (1, 2), (3, 4), limit=2)) == 3
    assert check_history(stays((0, 9), (1, 9), access="read")) == 2
    assert check_history(stays((1, 2), (0, 2), limit=2)) == 2  # woken in the other order, both are allowed
    assert check_history([Stay("a", 1, 0, 5), Stay("b", 2, 0, 5)]) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        stays((0, 2), (1, 3)),
        stays((0, None), (1, 3)),
        stays((5, 6), (1, 2)),  # overtaken
        stays((0, 9), (1, 9), (2, 9), limit=2),
        stays((0, 9, {"weight": 2}), (1, 9), limit=2),
        stays((0, 9, {"access": "read"}), (1, 9)),
        stays((0, 9), (1, 9, {"access": "read"})),
        stays((0, 9, {"access": "stage:1"}), (1, 9, {"access": "stage:2"})),
        stays((0, 9, {"limit": 1}), (1, 9, {"limit": 5})),
        [Stay("a", 1, 0, 1), Stay("a", 1, 2, 3)],
    ],
)
def test_checker_finds_wrong_histories(wrong):
    with pytest.raises(AssertionError):
        check_history(wrong)


def test_checker_respects_a_cap():
    with pytest.raises(AssertionError):
        check_history(stays((0, 9), (1, 9), limit=2), caps={"a": 1})


def test_overlap_counts_simultaneous_holders():
    assert overlap(stays((0, 3), (1, 2), (2, 4))) == 2
