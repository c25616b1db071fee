"""``sqlsem man``: prints the manual page, made of the help of all commands."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

import sqlsem
from sqlsem.ops.terminal import output

__all__ = ["man", "manual"]


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
