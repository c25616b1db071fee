"""All output of the command line: escapes unprintable characters (`sqlsem.util.printable`), survives write errors."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

import click

from sqlsem.ops.terminal.status import hide_status
from sqlsem.util.printable import clean, clean_json, clean_trace
from sqlsem.values.errors import SqlsemError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from sqlsem.ops.terminal.tables import CleanConsole

__all__ = [
    "console",
    "echo",
    "is_gone",
    "open_streams",
    "picture",
    "print_error",
    "print_json",
    "print_trace",
    "print_usage",
    "say",
    "show",
    "show_or_json",
    "write_error",
]


class _Output(io.FileIO):
    """A standard stream whose write errors are remembered instead of raised.

    A full disk, a reader that has left, or a terminal that is gone must not affect locks and commands. Data that cannot
    be written is dropped: Python would try to write a buffer at its end, and exit with 120.
    """

    #: The first error of a write.
    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write the bytes, or drop them. (Also on a non-blocking stream: other programs may have made it so.)"""
        try:
            written = super().write(data)
            while written is None:
                select.select([], [self], [])
                written = super().write(data)
            return written
        except OSError as exc:
            self.error = self.error or exc
            return len(data)


def open_streams() -> None:
    """Make the standard streams of this process usable, however it was started. Called at the start of a command.

    - A closed stream becomes /dev/null. Otherwise the next file or socket would get its number, and a child process
      would use that as its standard output.
    - Write errors are remembered (`write_error`), not raised.
    - Standard output escapes characters that its encoding lacks, as standard error always does.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)  # gets the lowest free number, usually this one
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the whole process
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream: TextIO | None = getattr(sys, name)
        if stream is None or (stream is getattr(sys, f"__{name}__") and not _is_windows_console(stream)):
            setattr(sys, name, _text_output(number, stream))


def _is_windows_console(stream: TextIO) -> bool:
    return os.name == "nt" and stream.isatty()


def _text_output(number: int, before: TextIO | None) -> TextIO:
    """Return a text stream on a file descriptor, in place of Python's own."""
    by_line = number == 2
    if before is not None:
        with contextlib.suppress(OSError):
            before.flush()
        by_line = by_line or before.isatty() or "PYTHONUNBUFFERED" in os.environ
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(number, "w", closefd=False)),
        encoding="utf-8" if before is None else before.encoding,
        errors="backslashreplace",
        line_buffering=by_line,
    )


def _error_of_stdout() -> OSError | None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.error if isinstance(raw, _Output) else None


def write_error() -> OSError | None:
    """Return the first error of writing to standard output; None if there was none. A terminal that is gone is no
    error, as it has no reader.
    """
    with contextlib.suppress(OSError):  # of a stream that is not ours, which reports it at its own end
        sys.stdout.flush()
    error = _error_of_stdout()
    return None if error is None or error.errno == errno.EIO else error


def is_gone() -> bool:
    """Return True if standard output cannot be written any more: a command that only shows data should end."""
    return _error_of_stdout() is not None


def echo(*lines: str, err: bool = False) -> None:
    """Print lines; line breaks within a line are escaped."""
    hide_status()
    click.echo("\n".join(map(clean, lines)), err=err)


def say(text: str) -> None:
    """Print a line on stderr about what a command does."""
    echo(f"sqlsem: {text}", err=True)


def print_error(text: object) -> None:
    """Print an error as one line on stderr, with its code if it is one of sqlsem's."""
    code = f" [{text.code}]" if isinstance(text, SqlsemError) else ""
    echo(f"sqlsem: error: {' '.join(str(text).split())}{code}", err=True)


def print_json(value: Any) -> None:
    """Print JSON; in ASCII unless standard output is UTF-8."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(clean_json(value, ascii_only=codecs.lookup(encoding).name != "utf-8"))


def print_trace() -> None:
    """Print the traceback of the current exception."""
    echo(*clean_trace(traceback.format_exc()).split("\n"), err=True)


def print_usage(error: click.ClickException) -> None:
    """Print click's message about wrong usage, which repeats arguments: they are escaped."""
    # The line breaks in a list of click's own are kept.
    own = "\n\t" if isinstance(error, click.MissingParameter) else ""
    message = clean(error.format_message(), keep=own)
    escaped = (
        click.UsageError(message, error.ctx) if isinstance(error, click.UsageError) else click.ClickException(message)
    )
    text = io.StringIO()
    escaped.show(text)
    echo(*text.getvalue().rstrip().expandtabs(4).split("\n"), err=True)


def console() -> CleanConsole:
    """Return a console: with colours and the terminal's width, or plain and unlimited for a pipe or file."""
    from sqlsem.ops.terminal.tables import CleanConsole  # loads Rich, which `sqlsem run` does not need

    result = CleanConsole(highlight=False)
    if not result.is_terminal and not os.environ.get("COLUMNS"):
        return CleanConsole(highlight=False, width=100_000)
    return result


def picture(target: Console, **options: Any) -> Live:
    """Return an area of the terminal that is drawn again and again."""
    from rich.live import Live  # most commands need not load it

    return Live(console=target, auto_refresh=False, **options)


def show(target: Console, renderable: RenderableType) -> None:
    """Print a renderable; for a pipe, without blanks at the ends of lines."""
    if target.is_terminal:
        target.print(renderable)
        return
    with target.capture() as captured:
        target.print(renderable)
    echo(*(line.rstrip() for line in captured.get().removesuffix("\n").split("\n")))


def show_or_json(as_json: bool, plain: Any, render: Callable[[int], RenderableType]) -> None:
    """Print a result: as JSON, or as ``render`` draws it within the width of the terminal."""
    if as_json:
        print_json(plain)
    else:
        target = console()
        show(target, render(target.width))
