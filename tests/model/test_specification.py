"""The specifications in proof/ hold, and each of their properties can fail."""

import re

import pytest
from support import TESTS

from proof import check, tlc

LACKS = tlc.lacks()
#: The checks in every run of the tests; the others take minutes.
QUICK = (
    "Gated",
    "Ungated",
    'HandOver: Mutant = "token used twice"',
    'Queues: Mutant = "no gate"',
    'Queue: Mutant = "no watch", Requester = {a}, AnyTurn = TRUE, AtOnce = TRUE, MaxRequests = 2, MaxFaults = 2',
)
needs_tlc = pytest.mark.skipif(bool(LACKS), reason=f"TLC needs {LACKS}")


def test_each_mutant_of_a_specification_is_checked():
    checked = {model_check.constants.get("Mutant", "").strip('"') for model_check in check.CHECKS}
    for name in ("Queues", "Queue", "HandOver", "Rates", "Blocked"):
        text = (TESTS.parent / "proof" / f"{name}.tla").read_text(encoding="utf-8")
        compared = re.findall(r'Mutant (?:[=#] ("[^"]+")|\\in \{([^}]+)\})', text)
        named = {name for some in compared for name in re.findall(r'"([^"]+)"', " ".join(some))}
        assert named
        assert named <= checked, f"{name}.tla"


def test_quick_checks_are_known_checks():
    assert set(QUICK) <= {model_check.name for model_check in check.CHECKS}


def test_replaced_text_must_exist():
    with pytest.raises(ValueError, match="has no constant Colour"):
        check.Check("MCQueues", "Queues", constants={"Colour": "1"}).text()


@needs_tlc
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "one", [model_check for model_check in check.CHECKS if model_check.name in QUICK], ids=lambda value: value.name
)
def test_specification_holds_quickly(one):
    good, outcome = check.carry_out(one)
    assert good, outcome.output[-3000:]


@needs_tlc
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "one", [model_check for model_check in check.CHECKS if model_check.name not in QUICK], ids=lambda value: value.name
)
def test_specification_holds_at_length(one):
    good, outcome = check.carry_out(one, seconds=3000)
    assert good, outcome.output[-3000:]
