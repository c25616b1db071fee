"""``sqlsem completion``: the scripts by which shells complete words, and the answers to these scripts. ``sqlsem man``:
the manual page, made of the help of all commands.

A script calls ``sqlsem`` with `VARIABLE` in its environment for each word. Names come from the database, if it answers
within `LIMIT_SECONDS`. Nothing is printed about errors, as the user is in the middle of a line.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import NoReturn

import click
from click import shell_completion

import sqlsem
from sqlsem import batches
from sqlsem.cli.connecting import DEFAULTS, Connecting
from sqlsem.config import reading
from sqlsem.ops.terminal import output
from sqlsem.util.threads import spawn

#: The variable that a script sets, to the name of the shell and the word "complete".
VARIABLE = "SQLSEM_COMPLETE"
#: How long the database may take, in seconds.
LIMIT_SECONDS = 1.0
#: How many rows are read for names.
MAX_ROWS = 1000
#: The names that a shell takes as one word without quotes. Others are not offered: a name in the database may come from
#: another user, and the shell would run what it says.
PLAIN = re.compile(r"[\w.@%+:,/][\w.@%+:,/=-]*")
#: The names of each kind that a database has.
SOURCES: dict[str, Callable[[sqlsem.Coordinator], Iterable[str]]] = {
    "resource": lambda coordinator: (row.resource for row in coordinator.admin.resources()),
    "queue": lambda coordinator: (task.queue for task in coordinator.admin.tasks(maximum=MAX_ROWS)),
    "rate": lambda coordinator: (rate.name for rate in coordinator.admin.rates()),
    "job": lambda coordinator: (run.name for run in coordinator.admin.once_runs()),
    "leader": lambda coordinator: (leader.name for leader in coordinator.admin.leaders()),
    "batch": lambda coordinator: (batch.name for batch in batches.list_batches(coordinator, None, MAX_ROWS)),
    "schedule": lambda coordinator: (schedule.name for schedule in coordinator.admin.schedules()),
}


@click.command(short_help="Print the script by which a shell completes words.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script by which a shell completes commands, options, profiles, and the names of resources, queues,
    rates, jobs, leaders, batches and schedules.

    Names come from the database that the line names so far (--url, --profile), else from the usual one. If it does not
    answer within a second, no names are offered. Names that need quotes are never offered.

    \b
    Examples:
      source <(sqlsem completion bash)        in ~/.bashrc
      source <(sqlsem completion zsh)         in ~/.zshrc, after compinit
      sqlsem completion fish | source         in config.fish
    """
    kind = shell_completion.get_completion_class(shell)
    assert kind is not None
    variables = {"prog_name": "sqlsem", "complete_var": VARIABLE, "complete_func": "_sqlsem_completion"}
    output.echo(*(kind.source_template % variables).strip().splitlines())


def answer(main: click.Command, environment: MutableMapping[str, str] = os.environ) -> NoReturn:
    """Print the words that a script asks for, and end the process."""
    with contextlib.suppress(Exception), contextlib.redirect_stderr(io.StringIO()):
        kind = shell_completion.get_completion_class(environment.pop(VARIABLE).partition("_")[0])
        if kind is not None:
            output.echo(*kind(main, {}, "sqlsem", VARIABLE).complete().splitlines())
            sys.stdout.flush()
    os._exit(0)  # without a wait for the thread that asks the database


def names(context: click.Context, kind: str, incomplete: str) -> list[shell_completion.CompletionItem]:
    """Return the names of a kind that begin with the incomplete word, as far as they can be found in time."""
    found: list[str] = []

    def read() -> None:
        with contextlib.suppress(Exception):
            found.extend(_profiles() if kind == "profile" else _names_in_database(context, kind))

    spawn(read, "sqlsem-completion").join(LIMIT_SECONDS)
    matching = {name for name in tuple(found) if name.startswith(incomplete) and PLAIN.fullmatch(name)}
    return [shell_completion.CompletionItem(name) for name in sorted(matching)]


def _profiles() -> Iterable[str]:
    named = os.environ.get("SQLSEM_CONFIG")
    user = reading.find_user_file() if named is None else reading.find_named_file(named)
    project = reading.find_project_file(user).file if named is None else None
    return [name for file in (user, project) if file is not None for name in file.profiles]


def _names_in_database(context: click.Context, kind: str) -> list[str]:
    given = context.find_root().params
    options = {name: given[name] for name in DEFAULTS if given.get(name) is not None}
    connecting = Connecting(given.get("url"), given.get("profile"), {**options, "retry": 0.0}, 0, quiet=True)
    with connecting.coordinator(must_exist=True) as coordinator:
        coordinator.engine.creates = False
        return list(SOURCES[kind](coordinator))


@click.command(short_help="Print the manual page.")
def man() -> None:
    """Print the manual page: the help of all commands, for man(1).

    \b
    Examples:
      sqlsem man | man -l -
      sqlsem man > ~/.local/share/man/man1/sqlsem.1
    """
    output.echo(*manual(click.get_current_context().find_root()))


def manual(root: click.Context) -> Iterator[str]:
    """Yield the lines of the manual page of a command and all its subcommands."""
    yield f'.TH SQLSEM 1 "" "sqlsem {sqlsem.__version__}" "sqlsem"'
    yield from (".SH NAME", r"sqlsem \- coordinate work through a SQL database")
    yield from (".SH SYNOPSIS", r"\fBsqlsem\fP [\fIOPTIONS\fP] \fICOMMAND\fP [\fIARGS\fP]...")
    yield ".SH DESCRIPTION"
    yield from _described(root.command, root)
    yield ".SH COMMANDS"
    for context in _below(root, root.command):
        yield f".SS {_plain(context.command_path)}"
        yield f"{_plain(context.command.get_usage(context).removeprefix('Usage: '))}"
        yield ".PP"
        yield from _described(context.command, context)
    if root.command.epilog:
        yield ".SH EXAMPLES, EXIT CODES"
        yield from _text(root.command.epilog)


def _below(root: click.Context, group: click.Command, words: str = "") -> Iterator[click.Context]:
    """Yield a context for each command below a group. Its name is all words of the command."""
    for name in group.list_commands(root) if isinstance(group, click.Group) else ():
        child = group.get_command(root, name) if isinstance(group, click.Group) else None
        if child is not None:
            yield click.Context(child, parent=root, info_name=f"{words}{name}")
            yield from _below(root, child, f"{words}{name} ")


def _described(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the help text and the options of a command."""
    yield from _text(command.help or "")
    if context.parent is not None and command.epilog:
        yield from _text(command.epilog)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            yield ".TP"
            yield rf"\fB{_plain(record[0])}\fP"
            yield _plain(record[1])
    yield ".PP"


def _text(text: str) -> Iterator[str]:
    r"""Yield the paragraphs of a help text. A paragraph that begins with ``\b`` keeps its lines."""
    for paragraph in re.split(r"\n\s*\n", text.replace("\f", "").strip("\n")):
        lines = paragraph.strip("\n").splitlines()
        as_is = bool(lines) and lines[0].strip() == "\b"
        yield ".PP"
        if as_is:
            yield ".nf"
            yield from map(_plain, lines[1:])
            yield ".fi"
        else:
            yield from (_plain(line.strip()) for line in lines if line.strip())


def _plain(text: str) -> str:
    """Return a line of text, escaped for man(1)."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
