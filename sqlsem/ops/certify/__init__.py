"""``sqlsem certify``: shows in minutes whether sqlsem works on a database server, in a schema of its own.

Each check is a function (`sqlsem.ops.certify.checks`), registered with its number and a title, that raises `Failed` or
`NotPossible`. An error of the driver is a failure, with the server's message. `certify` installs the schema, runs the
checks in order, and removes everything that it has created, whatever happens.
"""

from __future__ import annotations

import contextlib
import platform
import socket
import time
import urllib.parse
from collections.abc import Callable, Collection
from typing import Any

import sqlsem
from sqlsem import engines
from sqlsem.ops.certify import checks
from sqlsem.ops.certify.bench import Bench, Wishes
from sqlsem.ops.certify.registry import CHECKS, Check
from sqlsem.ops.certify.results import Failed, Notes, NotPossible, Report, Result
from sqlsem.ops.certify.sessions import Session, server_words

__all__ = ["CHECKS", "Bench", "Check", "Report", "Result", "Wishes", "certify", "checks", "hidden_words"]

#: Added to a failure if the server has ended the idle connection meanwhile.
CRASHED = "meanwhile the server has ended a connection that did nothing: it crashed or was restarted, see its log"
#: Words that stay in a document although a server, a login or a database has that name.
NO_NAMES = frozenset({*engines.SCHEMES, "sqlsem", "master", "public", "localhost"})


def certify(
    bench: Bench,
    numbers: Collection[int],
    *,
    began: Callable[[Report], object] = lambda report: None,
    done: Callable[[Result], object] = lambda result: None,
    with_host: bool = False,
) -> Report:
    """Install the schema, run the checks of these numbers, and remove everything that was created.

    Without ``numbers``, all checks are run. ``began`` is called before the first one, with the facts, and ``done`` with
    each result. ``with_host`` keeps the names of hosts and logins in the document.
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


def facts(bench: Bench) -> dict[str, Any]:
    """Return the facts about the server, the driver and this client."""
    found: dict[str, Any] = {"engine": bench.engine.name}
    with contextlib.closing(Session(bench.engine)) as session:
        found |= {str(name): None if value is None else _line(value) for name, value in session.rows("facts")}
    with contextlib.closing(bench.engine.connect("look")) as examined:
        checks = examined.diagnose()
    found["driver"] = next((check.detail for check in checks if check.name == "driver"), "of Python")
    found["sqlsem"] = sqlsem.__version__
    found["python"] = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()}"
    found["schema"] = bench.schema
    return found


def _line(value: object) -> str:
    return str(value).partition("\n")[0].strip()


def hidden_words(bench: Bench) -> dict[str, str]:
    """Return words that would identify the server, the login or this host, each with the mark that replaces it."""
    hidden = {socket.gethostname(): "<client>", socket.getfqdn(): "<client>"}
    if "://" in bench.url:
        hidden[urllib.parse.urlsplit(bench.url).hostname or ""] = "<server>"
    words: dict[str, str] = getattr(bench.engine, "words", {})
    for key, value in words.items():
        if key.lower() in ("server", "address", "addr", "servername", "dsn", "host"):
            hidden[value] = hidden[value.partition(",")[0]] = "<server>"
    with contextlib.closing(Session(bench.engine)) as session:
        hidden |= {str(word): str(mark) for word, mark in session.rows("hidden") if word}
    if bench.folder is not None:
        hidden[str(bench.folder.parent)] = "<folder>"
    return {word: mark for word, mark in hidden.items() if len(word) > 2 and word.lower() not in NO_NAMES}
