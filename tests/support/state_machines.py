"""Run Hypothesis state machines that compare an engine with a model.

A failing example is not shrunk, as this would take minutes on a database; the failure prints how to run it again.
"""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


class DatabaseMachine(RuleBasedStateMachine):
    """Drives sessions of a database directly: without threads and waiting, so that every answer is determined."""

    database: Any = None
    name = "model"
    #: Counts the examples, each of which has names of its own in the database.
    examples = itertools.count()

    def join(self) -> tuple[int, Any]:
        """Return a new member and its session."""
        session = self.database.session(grace=0)
        return session.register_member("host", 1, "model"), session


def run_machine(machine: type[RuleBasedStateMachine], **options: Any) -> None:
    """Run a state machine with these `hypothesis.settings`: max_examples, stateful_step_count and others."""
    common = {
        **{"print_blob": True, "suppress_health_check": list(HealthCheck)},
        "phases": [Phase.explicit, Phase.reuse, Phase.generate],
    }
    run_state_machine_as_test(machine, settings=settings(**{**common, **options}))


def run_in_database(machine: type[DatabaseMachine], database: Any, name: str, **options: Any) -> None:
    """Run a state machine on a database."""
    attributes = {"database": database, "name": str(name), "examples": itertools.count()}
    run_machine(type("Machine", (machine,), attributes), **options)
