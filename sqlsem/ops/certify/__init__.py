"""``sqlsem certify``: shows in minutes whether sqlsem works on a database server, in a schema of its own.

Each check is a function (`sqlsem.ops.certify.checks`), registered with its number and a title, that raises `Failed` or
`NotPossible`. An error of the driver is a failure, with the server's message. `certify` installs the schema, runs the
checks in order, and removes everything that it has created, whatever happens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection

from sqlsem.ops.certify import checks
from sqlsem.ops.certify.bench import Bench, Wishes
from sqlsem.ops.certify.facts import facts, hidden_words
from sqlsem.ops.certify.registry import CHECKS, Check
from sqlsem.ops.certify.results import Failed, Notes, NotPossible, Report, Result
from sqlsem.ops.certify.sessions import server_words

__all__ = ["CHECKS", "Bench", "Check", "Report", "Result", "Wishes", "certify", "checks"]

#: Added to a failure if the server has ended the idle connection meanwhile.
CRASHED = "meanwhile the server has ended a connection that did nothing: it crashed or was restarted, see its log"


def certify(
    bench: Bench,
    numbers: Collection[int],
    *,
    began: Callable[[Report], object] = lambda report: None,
    done: Callable[[Result], object] = lambda result: None,
    with_host: bool = False,
) -> Report:
    """Install the schema, run the checks of these numbers, and remove everything that was created.

    Args:
        bench: The database, and the schema in it.
        numbers: The numbers of the checks; if it is empty, all checks.
        began: Called with the facts, before the first check.
        done: Called with each result.
        with_host: Keep names of hosts and logins in the document.
    """
    report = Report({})
    try:
        failed = _installed(bench, report, began, with_host)
        if failed is not None:
            report.results.append(failed)
            done(failed)
        else:
            for number in sorted(CHECKS):
                if number in numbers or not numbers:
                    report.results.append(run(bench, CHECKS[number]))
                    done(report.results[-1])
    finally:
        report.left = bench.remove()
    return report


def _installed(bench: Bench, report: Report, began: Callable[[Report], object], with_host: bool) -> Result | None:
    """Collect the facts, and install. Return the result of a failure; None if all succeeded."""
    since = time.monotonic()
    try:
        report.facts = facts(bench)
        report.hidden = {} if with_host else hidden_words(bench)
        began(report)
        bench.install()
    except Exception as exc:
        words = server_words(exc, bench.engine)
        return Result(0, "init", "failed", words, round(time.monotonic() - since, 3))
    return None


def run(bench: Bench, check: Check) -> Result:
    """Run one check."""
    notes, began = Notes(), time.monotonic()

    def result(state: str, detail: str) -> Result:
        return Result(check.number, check.title, state, detail, round(time.monotonic() - began, 3), notes.figures)

    def failed(words: str) -> Result:
        return result("failed", _after(notes, f"{words} ({CRASHED})" if bench.idle_has_ended() else words))

    if not check.applies(bench.engine.name):
        return result("not possible", check.elsewhere)
    try:
        bench.open_idle()
        check.run(bench, notes)
    except NotPossible as exc:
        return result("not possible", str(exc))
    except Failed as exc:
        return failed(str(exc))
    except Exception as exc:
        return failed(server_words(exc, bench.engine))
    finally:
        with contextlib.suppress(Exception):  # a check may have broken a connection, which then cannot be closed
            bench.close_opened()
    if notes.skipped and not notes.words:
        return result("not possible", notes.detail)
    return result("ok", notes.detail)


def _after(notes: Notes, words: str) -> str:
    return f"{words} (before: {notes.detail})" if notes.detail else words
