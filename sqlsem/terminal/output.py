"""Where the command line prints: everything through here, so that everything is clean. See `sqlsem.printable`."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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
    "let_terminal_go",
    "picture",
    "print_error",
    "print_json",
    "print_trace",
    "print_usage",
    "say",
    "show",
]


def echo(*lines: str, err: bool = False) -> None:
    """Print lines; a line break within one of them is not ours, and is escaped."""
    click.echo("\n".join(map(clean, lines)), err=err)


def say(text: str) -> None:
    """A line on stderr beside what a command does. The terminal may be gone, which must not keep us from doing it."""
    with contextlib.suppress(OSError):
        echo(f"sqlsem: {text}", err=True)


def print_error(text: object) -> None:
    """What went wrong: one line on stderr, whatever a driver put into its message."""
    echo(f"sqlsem: error: {' '.join(str(text).split())}", err=True)


def print_json(value: Any) -> None:
    """JSON for programs."""
    click.echo(clean_json(value))


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


def let_terminal_go() -> None:
    """Once the terminal is gone, what is printed goes nowhere. Else Python, which prints at its end what could not be
    printed before, would make another exit code (120) of what went well.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
            os.get_terminal_size(stream.fileno())
        except OSError as exc:
            if exc.errno == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


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
