"""The classes of commands and groups of the command line, and its exit codes."""

from __future__ import annotations

import importlib
import os
import sys
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from sqlsem.ops.terminal import output
from sqlsem.values import errors
from sqlsem.values.errors import SqlsemError

#: The exit codes of sqlsem, after sysexits.h. (1 is a general failure.)
EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_SOFTWARE, EXIT_IO, EXIT_TEMPFAIL, EXIT_LOST, EXIT_CONFIG = 64, 69, 70, 74, 75, 76, 78
EXIT_CODES: tuple[tuple[type[SqlsemError], int], ...] = (
    (errors.ConfigurationError, EXIT_CONFIG),
    (errors.SchemaError, EXIT_CONFIG),
    (errors.Unavailable, EXIT_UNAVAILABLE),
    (errors.Timeout, EXIT_TEMPFAIL),
    (errors.Deadlock, EXIT_TEMPFAIL),
    (errors.LockLost, EXIT_LOST),
    (errors.NotHeld, 1),
    (errors.BatchFailed, 1),
    (errors.TaskFailed, 1),
)


class Loaded(UserDict[str, Any]):
    """Commands by name, in the order of the help: at first each as its place, such as "locks:ls", in this folder. A
    command's module is imported on first use: importing all of them takes longer than most commands.
    """

    def __getitem__(self, name: str) -> Any:
        if isinstance(self.data[name], str):
            module, _, variable = self.data[name].partition(":")
            self.data[name] = getattr(importlib.import_module(f"{__package__}.{module}"), variable)
        return self.data[name]


class _InOrder(click.Group):
    """A group whose help lists the commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(self.commands)


class Commands(_InOrder):
    """The top group: lists its commands by headings, prints errors as one line, and sets the exit code."""

    #: Print the tracebacks of errors, too.
    traces = False

    def __init__(self, *args: Any, headings: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.headings = headings

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under their headings, all with the same width of the first column."""
        width = max(map(len, self.commands))
        for heading, names in self.headings.items():
            with formatter.section(heading):
                limit = formatter.width - formatter.current_indent - width - 2
                rows = [(name.ljust(width), self.commands[name].get_short_help_str(limit)) for name in names]
                formatter.write_dl(rows)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command like `click.Group.main`, with our exit codes."""
        run_main: Callable[..., Any] = super().main
        if not options.pop("standalone_mode", True):
            return run_main(*args, standalone_mode=False, **options)
        output.open_streams()
        if "SQLSEM_COMPLETE" in os.environ:
            from sqlsem.cli import completion  # only shells need it

            completion.answer(self)
        try:
            code = run_main(*args, standalone_mode=False, **options)
        except click.ClickException as exc:
            output.print_usage(exc)
            code = EXIT_USAGE if isinstance(exc, click.UsageError) else exc.exit_code
        except (click.Abort, KeyboardInterrupt):
            code = 130
        except SqlsemError as exc:
            if self.traces:
                output.print_trace()
            output.print_error(exc)
            code = next(number for kind, number in EXIT_CODES if isinstance(exc, kind))
        except Exception as exc:
            # (Python's own traceback would print the message unescaped.)
            output.print_trace()
            output.print_error(f"{type(exc).__name__}: {exc} (this is a fault of sqlsem's; please report it)")
            code = EXIT_SOFTWARE
        sys.exit((code if isinstance(code, int) else 0) or _exit_code_of_output())


def _exit_code_of_output() -> int:
    """Return the exit code of a command that is done: 0, unless its output could not be written."""
    error = output.write_error()
    if error is None:
        return 0
    if not isinstance(error, BrokenPipeError):  # a reader that has left is no error
        output.print_error(f"Cannot write to standard output: {error.strerror}")
    return EXIT_IO


class WithCommand(click.Command):
    """A command that takes another command with its arguments after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse only the arguments before ``--``."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta["sqlsem.command"] = args[end + 1 :] if end < len(args) else None
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the parts of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND [ARGS]...]"]


class Listing(_InOrder):
    """A command that lists, unless its first argument names one of its subcommands. The word ``own`` stands for the
    list itself, and may be left out.
    """

    # The values of `click.Command`, as those of a group would refuse options after an argument.
    allow_extra_args = False
    allow_interspersed_args = True
    own = "ls"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the list command's own options, unless there is a subcommand."""
        if args and args[0] in self.commands:
            ctx.meta["sqlsem.subcommand"] = list(args)
            if ctx.resilient_parsing:  # a shell completes a word of the subcommand
                ctx.args = list(args)
            return args
        return click.Command.parse_args(self, ctx, args[1:] if args[:1] == [self.own] else args)

    def invoke(self, ctx: click.Context) -> Any:
        """List, or run the subcommand."""
        arguments = ctx.meta.get("sqlsem.subcommand")
        if arguments is None:
            return click.Command.invoke(self, ctx)
        command = self.commands[arguments[0]]
        # (With the parent of this context, so that the usage line of the subcommand lacks this command's arguments.)
        with command.make_context(f"{ctx.info_name} {arguments[0]}", arguments[1:], parent=ctx.parent) as subcontext:
            return command.invoke(subcontext)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the parts of the usage line."""
        return [f"[{self.own}]", *click.Command.collect_usage_pieces(self, ctx)]


class Showing(Listing):
    """A command that shows one thing, unless its first argument names one of its subcommands."""

    own = "show"
