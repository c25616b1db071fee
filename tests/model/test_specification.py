"""The specifications in proof/ hold, and each of their properties can fail."""

import itertools
import math
import re

import pytest
from support import TESTS

from proof import check, tlc
from sqlsem.client.waiters.state import FINAL, Facts, WaiterState, next_step
from sqlsem.util.timing import DEFAULT

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
    for name in ("Queues", "Queue", "HandOver", "Rates", "Blocked", "Waiters"):
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


FLAGS = ("is_victim", "is_blocked", "can_share", "is_first", "is_held", "polls_for_others", "has_connection")
ANSWERS = {False: "unknown", True: "granted", None: "gone"}


def steps_of_waiters():
    """Return module ``WaiterSteps``: the next steps of all states, with all facts of a waiter whose wait goes on."""
    rows = []
    states = [state for state in WaiterState if state not in FINAL]
    for state, answer, has_row, time_up in itertools.product(states, ANSWERS, (False, True), (False, True)):
        goes_on = answer is False and has_row and not time_up
        for values in itertools.product((False, True), repeat=len(FLAGS)):
            if not goes_on and 0 < sum(values) < len(FLAGS):
                continue
            flags = dict(zip(FLAGS, values, strict=True))
            facts = Facts(answer=answer, has_row=has_row, deadline=0.0 if time_up else math.inf, **flags)
            step = next_step(state, facts, 0.0, DEFAULT)
            fields = {"has_row": has_row, "time_up": time_up, **flags}
            record = ", ".join(f"{name} |-> {str(value).upper()}" for name, value in fields.items())
            rows.append(f'<<"{state.name}", [answer |-> "{ANSWERS[answer]}", {record}], "{step.state.name}">>')
    table = ",\n  ".join(rows)
    return (
        f"---- MODULE WaiterSteps ----\nEXTENDS Waiters\nTable == <<\n  {table}\n>>\n"
        "ASSUME \\A n \\in DOMAIN Table : Step(Table[n][1], Table[n][2]) = Table[n][3]\n====\n"
    )


@needs_tlc
@pytest.mark.parametrize("changed", [False, True])
def test_waiters_take_the_steps_of_the_specification(changed):
    module = steps_of_waiters()
    if changed:
        module = module.replace('], "LOCAL_WAIT">>', '], "POLLED">>', 1)
    config = 'SPECIFICATION Spec\nCONSTANTS\n Waiter = {1}\n Others = 0\n MaxFaults = 0\n Mutant = "none"\n'
    outcome = tlc.run("WaiterSteps", config, files={"WaiterSteps.tla": module})
    assert bool(outcome.violated) == changed, outcome.output[-2000:]


@needs_tlc
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "one", [model_check for model_check in check.CHECKS if model_check.name not in QUICK], ids=lambda value: value.name
)
def test_specification_holds_at_length(one):
    good, outcome = check.carry_out(one, seconds=3000)
    assert good, outcome.output[-3000:]
