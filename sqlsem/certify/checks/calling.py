"""How callers come: with whatever settings, rights and habits. Check 13."""

from __future__ import annotations

from sqlsem.certify.bench import Bench
from sqlsem.certify.registry import check
from sqlsem.certify.results import Notes

__all__: list[str] = []


@check(13, "APPLOCK_MODE outside of a transaction", "applock_mode", elsewhere="only SQL Server has it")
def applock_mode(bench: Bench, notes: Notes) -> None:
    """Ask for a transaction's lock where there is no transaction: NoLock, and no error."""
    mode = bench.session().value("applock_mode")
    notes.require(mode == "NoLock", f"APPLOCK_MODE(…, 'Transaction') outside of a transaction is {mode}, not NoLock")
    notes.note("NoLock")
