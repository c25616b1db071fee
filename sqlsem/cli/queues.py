"""``sqlsem queues``: shows the work queues, and sets their limits and rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import Listing
from sqlsem.cli.options import json_option, name_of, one_name, rate_window, setting, whole_number
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.tasks import describe_limits, render_counts
from sqlsem.util.printable import clean
from sqlsem.values.rates import Window

__all__ = ["queues"]

_queue_name = name_of("The queue's name", "queue")


@click.group(
    cls=Listing,
    invoke_without_command=True,
    short_help="Show the work queues: counts, limits and rates; set these.",
)
@one_name("queue", _queue_name, "queue", "The queue, should it be named like a command.")
@json_option
@connecting
def queues(options: Connecting, queue: str | None, as_json: bool) -> None:
    """Show the work queues, or one: how many tasks are in each state, and the task that holds it up.

    FINISHED, FAILED and CANCELLED count the tasks that the database keeps (setting history_days). RUNNING includes
    tasks whose worker is dead; LOST counts only these. OLDEST is how long the oldest task that could start has waited.
    A MINUTE is how many tasks ended per minute in the last five. LIMIT is how many may run at a time, of the queue and
    of each key; and how many may start in a time window, as in 100/1m.

    \b
    Examples:
      sqlsem queues
      sqlsem queues nightly --json | jq '.[0].pending'
      sqlsem queues set mails --limit 10 --per-key 2
      sqlsem queues set mails --rate-per-key 100/1m
    """
    with options.coordinator(must_exist=True) as coordinator:
        rows, limits = coordinator.admin.queues(queue), coordinator.admin.queue_limits(queue)
    limits_by_queue = {row.queue: [limit.as_dict() for limit in limits if limit.queue == row.queue] for row in rows}
    plain = [{**row.as_dict(), "limits": limits_by_queue[row.queue]} for row in rows]
    output.show_or_json(as_json, plain, lambda width: render_counts(rows, width, queue, limits))


@queues.command(
    "set", short_help="Set how many tasks of a queue, or of a key, run at a time, or start in so long; weights of keys."
)
@click.argument("queue", type=_queue_name)
@click.option("--key", type=name_of("The key"), metavar="KEY", help="Only for this key.")
@setting(
    "limit",
    "No limit (for a key: that of --per-key).",
    "Set a limit, or none.",
    type=whole_number(0, "a whole number from 0 on"),
    metavar="N",
    help="At most N run at a time. 0: none.",
)
@setting(
    "per_key",
    "No limit of each key.",
    "Set a limit, or none.",
    type=whole_number(0, "a whole number from 0 on"),
    metavar="N",
    help="At most N of each key run at a time.",
)
@setting(
    "rate",
    "No rate (for a key: that of --rate-per-key).",
    "Set a rate, or none.",
    type=rate_window,
    metavar="N/TIME",
    help="At most N start in any TIME.",
)
@setting(
    "rate_per_key",
    "No rate of each key.",
    "Set a rate, or none.",
    type=rate_window,
    metavar="N/TIME",
    help="At most N of each key start in any TIME.",
)
@click.option(
    "--weight",
    type=whole_number(1, "a whole number from 1 on"),
    metavar="N",
    help="With --key: N times the share of workers that other keys have (default 1).",
)
@connecting
def queues_set(
    options: Connecting, queue: str, key: str | None, changes: Mapping[str, Any], weight: int | None
) -> None:
    """Set how many tasks of a queue may run at a time, on all workers together, and how many may start in a time
    window: of all keys, of each key, or of one key; and the weight by which workers choose between keys. A change
    counts at once for new claims; running tasks go on. Tasks get their key when they are put (sqlsem put --key). For
    operators.

    \b
    Examples:
      sqlsem queues set mails --limit 10 --per-key 2
      sqlsem queues set mails --key tenant-7 --limit 5 --weight 3
      sqlsem queues set mails --rate 1000/1m --rate-per-key 100/1m
      sqlsem queues set mails --no-per-key
    """
    if weight is None and not changes:
        raise click.UsageError(
            "Say what to set: --limit, --per-key, --rate or --rate-per-key, each with or without --no-…, or --weight."
        )
    if key is None and weight is not None:
        raise click.UsageError("--weight goes with --key.")
    if key is not None and "per_key" in changes:
        raise click.UsageError("--per-key is of all keys of a queue; of one key it is --limit.")
    if key is not None and "rate_per_key" in changes:
        raise click.UsageError("--rate-per-key is of all keys of a queue; of one key it is --rate.")
    with options.coordinator(must_exist=True) as coordinator:
        target = coordinator.queue(queue)
        if "limit" in changes:
            target.set_limit(changes["limit"], key=key)
        if "per_key" in changes:
            target.set_key_limit(changes["per_key"])
        if "rate" in changes:
            target.set_rate(*_limit_and_window(changes["rate"]), key=key)
        if "rate_per_key" in changes:
            target.set_key_rate(*_limit_and_window(changes["rate_per_key"]))
        if key is not None and weight is not None:
            target.set_weight(key, None if weight == 1 else weight)
        lines = list(describe_limits(target.limits()))
    output.echo(*map(clean, lines or [f"Nothing is set of {queue!r} any more."]))


def _limit_and_window(rate: Window | None) -> tuple[int | None, float | None]:
    return (None, None) if rate is None else (rate.limit, rate.ms / 1000)
