"""Runs the tests in another order (``./test.sh --shuffle SEED``), with an even seed each on fresh databases: a test
that relies on what earlier ones have done or left fails then, and code that relies on an earlier session.

The files have a random order, and the tests of each file. A seed gives two tests the same order in each run, however
many tests the run has.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

__all__ = ["scope_of_databases", "shuffle"]


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Put tests into the order of this seed. Tests of a file stay together."""

    def draw(name: str) -> float:
        return random.Random(f"{seed} {name}").random()

    items.sort(key=lambda item: (draw(item.nodeid.split("::", 1)[0]), draw(item.nodeid)))


def scope_of_databases(*, config: pytest.Config, **_: Any) -> str:
    """Return the scope of the databases that tests share."""
    seed = config.option.shuffle
    return "session" if seed is None or seed % 2 else "function"
