"""``sqlsem batch``: shows batches, waits for them, resumes their callbacks, abandons them."""

from __future__ import annotations

import re

import click

from sqlsem import batches
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import Listing, Loaded
from sqlsem.cli.here import running_callbacks
from sqlsem.cli.options import duration, json_option, most_option, name_of, one_name, pass_url_option, shared_option
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.batches import render_batches
from sqlsem.util.printable import clean
from sqlsem.values.batches import BatchEntry
from sqlsem.values.errors import BatchFailed, ConfigurationError

#: How many batches are read: by ``batch resume`` without an argument, and by ``batch abandon``.
MAX_RESUMED = 1000
_batch_name = name_of("The batch's name", "batch")


@click.group(
    "batch",
    cls=Listing,
    commands=Loaded({"run": "part:batch_run"}),
    invoke_without_command=True,
    short_help="Run a part of a batch; show batches; wait, resume, abandon.",
)
@one_name("name", _batch_name, "batch", "The name, should it be that of a command.")
@most_option(20)
@json_option
@connecting
def batch(options: Connecting, name: str | None, maximum: int, as_json: bool) -> None:
    """Show batches, the newest first: their parts, how long each took, and what became of the callback.

    A part is expected, running, succeeded or failed; the one that was last is marked. A batch is open, succeeded,
    failed (a part has), expired (not done within its window) or abandoned.

    \b
    Examples:
      sqlsem batch
      sqlsem batch nightly --max 1 --json
      sqlsem batch resume nightly
      sqlsem batch abandon nightly
    """
    with options.coordinator(must_exist=True) as coordinator:
        entries = batches.list_batches(coordinator, name, maximum)
    output.show_or_json(as_json, [row.as_dict() for row in entries], lambda width: render_batches(entries, width, name))


@batch.command("resume", short_help="Run the callback of a batch whose process died.")
@click.argument("which", required=False, metavar="[NAME|ID]")
@click.option("--name", type=_batch_name, metavar="NAME", help="The name, should it be a number.")
@shared_option
@pass_url_option
@connecting
def batch_resume(options: Connecting, which: str | None, name: str | None, shared: bool, pass_url: bool) -> int:
    """Run the callback of a batch whose process died before its end; with a batch's number also a failed callback.
    Without an argument: the callbacks of all batches.

    Commands and Python functions run on this host; functions are imported also from the current folder, after all
    others. A callback that only its own program knows (a lambda, a session's code) must be resumed by that.

    \b
    Examples:
      sqlsem batch resume
      sqlsem batch resume nightly
      sqlsem batch resume 42

    \b
    Exit codes: 0 done, or nothing was left to do; 1 it failed; 78 there is
      no such batch, its callback is not kept, or others can write the
      SQLite file.
    """
    if which is not None and name is not None:
        raise click.UsageError("Say which batch once.")
    with running_callbacks(options, shared, pass_url) as coordinator:
        targets: list[int | str]
        if which is not None or name is not None:
            targets = [_which_batch(which, name)]
        else:
            rows = batches.list_batches(coordinator, None, MAX_RESUMED)
            targets = list(dict.fromkeys(row.name for row in rows if row.callback_status in ("pending", "running")))
        count, code = 0, 0
        for target in targets:
            try:
                while batches.resume(coordinator, target):
                    count += 1
                    output.echo(f"Done: the callback of batch {clean(repr(target))}.")
                    if isinstance(target, int):
                        break
            except BatchFailed as exc:
                output.print_error(exc)
                code = 1
            except ConfigurationError as exc:
                if which is not None or name is not None:
                    raise
                output.print_error(exc)  # and continue with the other batches
                code = 1
        if not count and not code:
            output.echo("Nothing was left to do.")
    return code


@batch.command("wait", short_help="Wait until a batch has succeeded, and its callback is done.")
@click.argument("name", type=_batch_name)
@click.option("--timeout", type=duration, help="Give up after this time.")
@shared_option
@pass_url_option
@connecting
def batch_wait(options: Connecting, name: str, timeout: float | None, shared: bool, pass_url: bool) -> None:
    """Wait until the newest batch of a name has succeeded, and its callback is done. If the process that ran the
    callback dies meanwhile, the callback runs here, as in `sqlsem batch resume`.

    \b
    Examples:
      sqlsem batch wait nightly --timeout 6h && ./publish.sh

    \b
    Exit codes: 0 done; 1 a part or the callback has failed, the window is
      over, or an operator has abandoned the batch; 75 time is up; 78 there
      is no batch of that name.
    """
    with running_callbacks(options, shared, pass_url) as coordinator:
        entries = batches.list_batches(coordinator, name, 1)
        if not entries:
            raise ConfigurationError(f"There is no batch {name!r}; see: sqlsem batch", resource=name)
        parts, window = [part.part for part in entries[0].parts], entries[0].window
        batch = coordinator.batch(name, parts, window=window)
        with options.progress(lambda: _work_left(batch.entry()), reads=True):
            entry = batch.wait(timeout)
    output.echo(f"Done: batch {entry.batch_id} of {clean(name)!r}.")


def _work_left(entry: BatchEntry | None) -> str | None:
    """Return the parts of a batch that have not succeeded, or the state of its callback, as text."""
    if entry is None:
        return None
    missing = [part for part in entry.parts if part.status != "succeeded"]
    if not missing:
        return f"batch {entry.batch_id} of {entry.name!r}: its callback is {entry.callback_status}"
    named = ", ".join(f"{part.part} ({part.status})" for part in missing)
    return f"batch {entry.batch_id} of {entry.name!r}: {len(missing)} of {len(entry.parts)} parts left: {named}"


@batch.command("abandon", short_help="Give up a batch; the next start of a part begins a new one.")
@click.argument("which", required=False, metavar="NAME|ID")
@click.option("--name", type=_batch_name, metavar="NAME", help="The name, should it be a number.")
@connecting
def batch_abandon(options: Connecting, which: str | None, name: str | None) -> int:
    """Abandon the newest batch of a name, or the batch with that number: one that is open or has failed, or whose
    callback is pending or has failed. Its callback will not run. Its parts no longer count, and the next start of a
    part begins a new batch. For operators; recorded in `sqlsem history --operations`.

    \b
    Examples:
      sqlsem batch abandon nightly
      sqlsem batch abandon 42

    \b
    Exit codes: 0 done; 1 it has ended, or its callback runs; 78 there is
      no such batch.
    """
    if (which is None) == (name is None):
        raise click.UsageError("Say which batch, once: its name or its number.")
    target = _which_batch(which, name)
    with options.coordinator() as coordinator:
        number = batches.abandon(coordinator, target)
        if number is not None:
            output.echo(f"Abandoned: batch {number}.")
            return 0
        entries = batches.list_batches(coordinator, target if isinstance(target, str) else None, MAX_RESUMED)
        entry = next((batch for batch in entries if isinstance(target, str) or batch.batch_id == target), None)
    if entry is None:
        raise ConfigurationError(f"There is no batch {target!r}; see: sqlsem batch")
    running = entry.callback_status == "running"
    reason = f"its callback runs ({clean(entry.callback_owner or '')})" if running else f"it is {entry.status}"
    output.echo(f"Nothing to abandon: batch {entry.batch_id} of {clean(entry.name)!r} has ended, {reason}.")
    return 1


def _which_batch(which: str | None, name: str | None) -> int | str:
    if which is None or name is not None:
        return name or ""
    return int(which) if re.fullmatch(r"[0-9]{1,18}", which) else _batch_name(which)
