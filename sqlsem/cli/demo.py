"""``sqlsem demo``."""

from __future__ import annotations

import click

from sqlsem.cli.options import duration
from sqlsem.ops import demo as show
from sqlsem.ops.terminal import output

__all__ = ["demo"]


@click.command(short_help="Watch several processes share a limit.")
@click.option("--seconds", type=duration, default="10", show_default=True, help="How long it lasts.")
@click.option("--workers", type=click.IntRange(2, 32), default=8, show_default=True, help="Processes that take part.")
@click.option("--limit", type=click.IntRange(1, 32), default=3, show_default=True, help="Holders at a time.")
def demo(seconds: float, workers: int, limit: int) -> int:
    """Watch several processes share a limit, on a file of its own that is removed afterwards.

    Your queues are not touched. Half way through, one of the holders is killed (SIGKILL), to show that its lock is
    released without a clean-up. Each worker counts the holders by itself, without sqlsem.

    \b
    Examples:
      sqlsem demo
      sqlsem demo --workers 12 --limit 4 --seconds 20

    \b
    Exit codes: 0 the limit was kept, 1 it was not.
    """
    return show.demo(output.console(), seconds=seconds, workers=workers, limit=limit)
