"""Reset the signal dispositions of processes that tests start, however the tests themselves were started."""

from __future__ import annotations

import signal

#: Python ignores these itself, and `subprocess` resets them.
BY_PYTHON = {getattr(signal, name) for name in ("SIGPIPE", "SIGXFZ", "SIGXFSZ") if hasattr(signal, name)}


def pass_on_no_ignored_signals() -> None:
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
