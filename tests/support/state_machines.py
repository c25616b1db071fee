"""Run Hypothesis state machines that compare an engine with a model.

A failing example is not shrunk, as this would take minutes on a database; the failure prints how to run it again.
"""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_machine(machine: type[RuleBasedStateMachine], **limits: Any) -> None:
    """Run a state machine. ``limits`` are options of `hypothesis.settings`: max_examples and stateful_step_count."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            **limits,
            deadline=None,
            print_blob=True,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def run_in_database(machine: type[RuleBasedStateMachine], database: Any, name: str, **limits: Any) -> None:
    """Run a state machine with the attributes ``database``, ``name`` and ``examples``, which counts its examples."""
    attributes = {"database": database, "name": str(name), "examples": itertools.count()}
    run_machine(type("Machine", (machine,), attributes), **limits)
