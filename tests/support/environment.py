"""One environment for all tests and their processes, however the run was started.

A terminal or none, a locale, a time zone, colours, settings of libpq, of git or of Python, a home with files of its
user, ignored signals, a umask: each changes what programs print or do. `fix` replaces all of them. A test that is about
one of them sets it itself.
"""

from __future__ import annotations

import contextlib
import locale
import os
import re
import signal
import site
import time
from pathlib import Path

__all__ = ["BY_PYTHON", "VALUES", "fix"]

#: The variables that are removed, and `VALUES` that are set.
REMOVED = re.compile(
    r"COLUMNS|LINES|COLORTERM|NO_COLOR|FORCE_COLOR|CLICOLOR(_FORCE)?|PY_COLORS"  # the terminal
    r"|LANG(UAGE)?|LC_\w+"
    r"|(?i:\w+_proxy)"  # (servers of tests listen on this machine)
    r"|XDG_\w+"
    r"|PG(?!_)\w+"  # libpq's: the user, the service, options
    r"|GIT_(?!CONFIG)\w+"  # a run from a hook of git
    r"|ODBC\w+"
    r"|SQLSEM_(?!TEST_|SOAK_|SNAPSHOTS)\w+"
    r"|PYTHON(UTF8|COERCECLOCALE|IOENCODING|LEGACYWINDOWS\w+|OPTIMIZE|SAFEPATH|UNBUFFERED|INSPECT|STARTUP|VERBOSE|WARNINGS)"
)
VALUES = {
    "TERM": "xterm-256color",
    "LC_ALL": "C.UTF-8",
    "TZ": "Pacific/Chatham",  # not UTC, and no whole number of hours from it: mistakes show
    "SQLSEM_CONFIG": "",  # ignores files of configuration
}
#: Python ignores these itself, and `subprocess` resets them.
BY_PYTHON = {getattr(signal, name) for name in ("SIGPIPE", "SIGXFZ", "SIGXFSZ") if hasattr(signal, name)}


def fix(home: Path) -> None:
    """Fix the environment of this process and of those that it starts. ``home`` becomes their home folder."""
    for name in list(os.environ):
        if REMOVED.fullmatch(name):
            del os.environ[name]
    for name in ("COLUMNS", "LINES"):  # the import of `readline` has set them, and `os.environ` does not know of it
        os.unsetenv(name)
    if site.ENABLE_USER_SITE:  # packages may be installed there
        os.environ["PYTHONUSERBASE"] = site.getuserbase()
    os.environ.update(VALUES, HOME=str(home), USERPROFILE=str(home))
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, VALUES["LC_ALL"])
    if hasattr(time, "tzset"):
        time.tzset()
    os.umask(0o022)
    _ignore_no_signals_in_children()


def _ignore_no_signals_in_children() -> None:
    """Let child processes begin with the default dispositions.

    nohup ignores SIGHUP; a shell ignores SIGINT and SIGQUIT of its background jobs. Children would inherit that. A
    signal that was ignored gets a handler that does nothing: this process ignores it as before, and a program that it
    executes begins with the default.
    """
    for number in signal.valid_signals() - BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _ignore)


def _ignore(_number: int, _frame: object) -> None:
    pass
