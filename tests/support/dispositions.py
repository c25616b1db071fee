"""What the processes that tests start do on signals: the same, however the tests themselves were started."""

from __future__ import annotations

import signal

#: Python ignores these itself, and has `subprocess` undo that.
BY_PYTHON = {getattr(signal, name) for name in ("SIGPIPE", "SIGXFZ", "SIGXFSZ") if hasattr(signal, name)}


def pass_on_no_ignored_signals() -> None:
    """Have child processes begin with the usual dispositions.

    nohup ignores SIGHUP, and a shell SIGINT and SIGQUIT of what it starts in the background; children would inherit it.
    A signal with a handler is ignored here as before, and has its default in whatever is executed.
    """
    for number in signal.valid_signals() - BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _ignore)


def _ignore(_number: int, _frame: object) -> None:
    pass
