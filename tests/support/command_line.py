"""List all commands of the command line, found by walking it, each with arguments that work."""

from __future__ import annotations

from collections.abc import Iterator

import click

from sqlsem import cli

#: The words of a command: ``("tasks", "log")``.
Path = tuple[str, ...]

#: Arguments for each command, in an order in which they run on one empty database: a later command may need what
#: an earlier one has put or set. ``{port}`` is free, ``{folder}`` is the test's. A new command needs a line here.
EXAMPLES: dict[Path, tuple[str, ...]] = {
    ("init",): (),
    ("sql",): ("sqlite", "drop"),
    ("doctor",): (),
    ("run",): ("--mutex", "a", "--", "touch", "{folder}/ran"),
    ("ls",): (),
    ("why",): ("a",),
    ("history",): (),
    ("put",): ("q", "--shell", "echo done"),
    ("tasks", "cancel"): ("1",),
    ("tasks", "retry"): ("1",),
    ("work",): ("q", "--idle-exit", "1ms"),
    ("tasks", "wait"): ("q", "--timeout", "1m"),
    ("tasks", "log"): ("1",),
    ("tasks", "show"): ("1",),
    ("tasks",): (),
    ("queues",): (),
    ("queues", "set"): ("q", "--limit", "3"),
    ("schedules",): (),
    ("schedules", "pause"): ("nightly",),
    ("schedules", "resume"): ("nightly",),
    ("schedules", "remove"): ("nightly",),
    ("batch", "run"): ("nightly", "--part", "a", "--parts", "a,b", "--window", "6h", "--", "touch", "{folder}/part"),
    ("batch",): (),
    ("batch", "resume"): (),
    ("batch", "abandon"): ("nightly",),
    ("batch", "wait"): ("nightly", "--timeout", "0"),
    ("config",): (),
    ("config", "allow"): (),
    ("config", "deny"): (),
    ("rates",): (),
    ("rates", "set"): ("api", "5/1m"),
    ("rates", "reset"): ("api",),
    ("once",): (),
    ("once", "forget"): ("report",),
    ("leader",): (),
    ("leader", "step-down"): ("scheduler",),
    ("set",): ("a", "--limit", "3"),
    ("pause",): ("a",),
    ("resume",): ("a",),
    ("revoke",): ("999",),
    ("reap",): (),
    ("guard",): ("--list",),
    ("timeline",): ("-o", "{folder}/night.html"),
    ("replay",): (),
    ("audit",): (),
    ("top",): (),
    ("dashboard",): ("--port", "{port}"),
    ("metrics",): ("--listen", "{port}"),
    ("certify",): ("--only", "13"),
    ("completion",): ("bash",),
    ("man",): (),
    ("demo",): ("--seconds", "2", "--workers", "2", "--limit", "1"),
}
#: The commands that answer at ``{port}`` until a signal ends them.
SERVES = {("dashboard",), ("metrics",)}


def commands() -> Iterator[tuple[Path, click.Command]]:
    """Yield every command with its words: also the subcommands of `tasks` and others."""
    for name, command in cli.main.commands.items():
        yield (name,), command
        for below, other in getattr(command, "commands", {}).items():
            yield (name, below), other


def examples() -> dict[Path, tuple[str, ...]]:
    """Return `EXAMPLES`, after a check that no command is missing."""
    assert set(EXAMPLES) == {path for path, _ in commands()}, "a command without an example in support.command_line"
    return EXAMPLES
