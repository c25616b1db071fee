"""Where the command line prints: everything through here, so that everything is clean. See `sqlsem.printable`."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import sys
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from sqlsem.printable import clean, clean_json, clean_trace

if TYPE_CHECKING:
    from rich.live import Live

__all__ = [
    "CleanConsole",
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
    "write_error",
]


class _Output(io.FileIO):
    """A standard stream whose write errors are remembered instead of raised.

    A full disk, a reader that has left, or a terminal that is gone must not decide about locks and commands. Nothing
    stays in a buffer either: Python would try to write that at its end, and exit with 120.
    """

    #: The first error of a write.
    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write the bytes, or drop them. (Also on a stream that does not block, as other programs may have set it.)"""
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
    """Make the standard streams of this process usable, whatever it was started with. For the start of a command.

    - A closed one becomes /dev/null. Otherwise the next file or socket to be opened would get its number, and a child
      process would take that for its standard output.
    - Errors of writing are remembered (`write_error`), not raised.
    - Standard output escapes what its encoding lacks, as standard error always does.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)  # the lowest number that is free, so usually this one
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
    """A text stream onto a file descriptor, in place of Python's own."""
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
    """Return why something was not written to standard output; None if all was. A terminal that is gone is no error:
    nobody is there to miss anything.
    """
    with contextlib.suppress(OSError):  # of a stream that is not ours, and says so at its own end
        sys.stdout.flush()
    error = _error_of_stdout()
    return None if error is None or error.errno == errno.EIO else error


def is_gone() -> bool:
    """True if nothing more can be written to standard output: time to end, for a command that only shows."""
    return _error_of_stdout() is not None


def echo(*lines: str, err: bool = False) -> None:
    """Print lines; a line break within one of them is not ours, and is escaped."""
    click.echo("\n".join(map(clean, lines)), err=err)


def say(text: str) -> None:
    """Print a line on stderr about what a command does."""
    echo(f"sqlsem: {text}", err=True)


def print_error(text: object) -> None:
    """What went wrong: one line on stderr, whatever a driver put into its message."""
    echo(f"sqlsem: error: {' '.join(str(text).split())}", err=True)


def print_json(value: Any) -> None:
    """Print JSON for programs: the same value in every encoding of standard output."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(clean_json(value, ascii_only=codecs.lookup(encoding).name != "utf-8"))


def print_trace() -> None:
    """The traceback of what is being handled."""
    echo(*clean_trace(traceback.format_exc()).split("\n"), err=True)


def print_usage(error: click.ClickException) -> None:
    """What click says of a wrong call, in which the arguments are repeated."""
    # What click lists itself, in lines, is no argument.
    own = "\n\t" if isinstance(error, click.MissingParameter) else ""
    told = clean(error.format_message(), keep=own)
    plain = click.UsageError(told, error.ctx) if isinstance(error, click.UsageError) else click.ClickException(told)
    words = io.StringIO()
    plain.show(words)
    echo(*words.getvalue().rstrip().expandtabs(4).split("\n"), err=True)


class CleanConsole(Console):
    """A console that lets nothing unprintable through, whatever it is given to draw.

    What is drawn in columns has to be clean before, as its width is measured; this is the net below.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As `rich.console.Console.render`; the console's own control sequences stay."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(clean(segment.text, keep="\n"), segment.style)


def console() -> CleanConsole:
    """Colours and the terminal's width on a terminal; plain and as wide as need be into a pipe or a file."""
    found = CleanConsole(highlight=False)
    if not found.is_terminal and not os.environ.get("COLUMNS"):
        return CleanConsole(highlight=False, width=100_000)
    return found


def picture(on: Console, **options: Any) -> Live:
    """A place of a terminal for what is drawn again and again."""
    from rich.live import Live  # most commands need not load it

    return Live(console=on, auto_refresh=False, **options)


def show(on: Console, what: RenderableType) -> None:
    """Draw; into a pipe without blanks at the ends of lines."""
    if on.is_terminal:
        on.print(what)
        return
    with on.capture() as captured:
        on.print(what)
    echo(*(line.rstrip() for line in captured.get().removesuffix("\n").split("\n")))
