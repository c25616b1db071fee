"""Measure the cost of a guarded table's trigger per statement: inserts of one row, beside a table without it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import sqlsem
from benchmarks.printed import console, table

__all__ = ["guards"]

#: Statements of a transaction.
LENGTH = 100
#: Grants of the resource that one process holds at the same time, as of a limit.
HOLDERS = 50


def guards(engine: str, url: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the microseconds of an insert: without a guard; asserted; by a session's grant; the last with other
    holders.
    """
    if engine != "postgresql":
        console.print("guards: only PostgreSQL is measured.")
        return {}
    import psycopg

    name = "bench guarded"
    times_of: dict[str, list[float]] = {}
    with sqlsem.connect(url) as coordinator, psycopg.connect(url) as connection, contextlib.ExitStack() as stack:
        for kind in ("plain", "guarded"):
            connection.execute(f"CREATE UNLOGGED TABLE IF NOT EXISTS public.bench_{kind} (a integer)")
        connection.commit()
        coordinator.admin.guard_table("public.bench_guarded", name)
        stack.callback(connection.commit)
        stack.callback(connection.execute, "DROP TABLE public.bench_plain, public.bench_guarded")
        grant = stack.enter_context(coordinator.limit(name, HOLDERS + 1))

        def turn(text: str, begin: Callable[[], None]) -> float:
            began = time.perf_counter()
            begin()
            for _ in range(LENGTH):
                connection.execute(text)
            connection.commit()
            return (time.perf_counter() - began) / LENGTH * 1e6

        plain, guarded = (f"INSERT INTO public.bench_{kind} VALUES (1)" for kind in ("plain", "guarded"))
        turns = max(3, options["rounds"] // LENGTH * options["turns"])
        for more in (False, True):
            if more:
                for _ in range(HOLDERS):
                    stack.enter_context(coordinator.limit(name, HOLDERS + 1))
            suffix = f", {HOLDERS} other holders" if more else ""
            for _ in range(turns):
                times_of.setdefault("no guard", []).append(turn(plain, lambda: None))
                asserting = turn(guarded, lambda: grant.assert_held(connection.cursor()))
                times_of.setdefault(f"asserted{suffix}", []).append(asserting)
                with grant.session(connection):
                    times_of.setdefault(f"grant.session{suffix}", []).append(turn(guarded, lambda: None))
    best = {way: min(times) for way, times in times_of.items()}  # other programs only add time
    shown = table("A statement on a guarded table (µs)", "", "insert", "more than without")
    for way, minimum in best.items():
        shown.add_row(way, f"{minimum:.0f}", f"{minimum - best['no guard']:.0f}")
    console.print(shown)
    return best
