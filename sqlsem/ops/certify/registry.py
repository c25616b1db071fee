"""The checks by number: functions that `check` registers, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlsem import sql
from sqlsem.ops.certify.bench import Bench
from sqlsem.ops.certify.results import Notes

__all__ = ["CHECKS", "Check", "check"]

#: The function of a check. It raises `Failed` or `NotPossible`; an error of the driver is a failure, too.
Run = Callable[[Bench, Notes], None]


@dataclass(frozen=True)
class Check:
    """A check with its number, which stays the same."""

    number: int
    title: str
    run: Run
    #: The statements of certify.sql that it needs. On an engine that lacks one of them, the check does not apply.
    needs: tuple[str, ...]
    #: The reason why the check does not apply to such an engine.
    elsewhere: str

    def applies(self, engine: str) -> bool:
        """Return True if the check applies to an engine."""
        return set(self.needs) <= set(sql.queries(engine, file="certify"))


CHECKS: dict[int, Check] = {}


def check(number: int, title: str, *needs: str, elsewhere: str = "") -> Callable[[Run], Run]:
    """Register the function as the check of that number."""

    def register(run: Run) -> Run:
        assert number not in CHECKS, number
        CHECKS[number] = Check(number, title, run, needs, elsewhere)
        return run

    return register
