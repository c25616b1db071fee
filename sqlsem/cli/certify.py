"""``sqlsem certify``: shows whether sqlsem works on a server, by checks that create and remove their own schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.options import duration, json_option
from sqlsem.cli.signals import handled
from sqlsem.ops import certify as certifying
from sqlsem.ops.terminal import output
from sqlsem.util.printable import clean_json
from sqlsem.values.errors import ConfigurationError

#: The duration of --long without a value.
LONG = "10m"


def numbers(value: str) -> frozenset[int]:
    """Convert numbers of checks: ``1,2,8-11``."""
    selected: set[int] = set()
    for part in value.split(","):
        first, dash, last = part.strip().partition("-")
        if not all(number.isdigit() and len(number) <= 2 for number in (first, *([last] if dash else []))):
            raise click.BadParameter(f"{value!r} is not numbers of checks, such as 1,2,8-11")
        selected |= set(range(int(first), int(last if dash else first) + 1))
    unknown = sorted(selected - set(certifying.CHECKS))
    if unknown or not selected:
        raise click.BadParameter(
            f"there is no check {', '.join(map(str, unknown))}; there are 1 to {max(certifying.CHECKS)}"
        )
    return frozenset(selected)


@click.command(short_help="Show whether sqlsem works on this server.")
@click.argument("url", required=False)
@click.option("--only", type=numbers, metavar="NUMBERS", help="Only these checks, as 1,2,8-11.")
@click.option("--skip", type=numbers, metavar="NUMBERS", help="All but these.")
@click.option(
    "--seconds",
    type=duration,
    default="5",
    help="The duration of each measurement.",
)
@click.option(
    "--long",
    type=duration,
    is_flag=False,
    flag_value=LONG,
    metavar="[DURATION]",
    help=f"Also run a soak test with kills, and measure for this time.  [{LONG} without a value]",
)
@click.option(
    "--max-sessions",
    type=click.IntRange(6, 1000),
    default=20,
    metavar="N",
    help="Open at most N sessions at a time.",
)
@click.option(
    "--databases", is_flag=True, help="Allow creating (and dropping) databases of other collations and settings."
)
@click.option("--admin-url", metavar="URL", help="A login for the tasks of an administrator: databases, users, KILL.")
@click.option(
    "--restart",
    type=duration,
    metavar="DURATION",
    help="Wait this time for you to restart the server or to fail it over (check 24).",
)
@json_option
@click.option(
    "-o", "--output", "file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON to this file."
)
@click.option("--with-host", is_flag=True, help="Keep names of hosts, databases and logins in the JSON.")
@connecting
def certify(
    options: Connecting,
    /,
    url: str | None,
    only: frozenset[int] | None,
    skip: frozenset[int] | None,
    as_json: bool,
    file: Path | None,
    with_host: bool,
    **wishes: Any,
) -> int:
    """Show whether sqlsem works on this server: 25 checks, one line each.

    URL is a database in which this login may create a schema; left out, the one that other commands use. Works in a
    schema of its own and removes it, also after Ctrl-C or SIGTERM. Nothing of others is read, changed or ended. With
    --json or -o it gives a document without passwords and names of hosts, to be sent to the project.

    \b
    Examples:
      sqlsem certify mssql://sa@host/db -o result.json
      sqlsem certify --only 1,2,3 --databases
      sqlsem certify --long 30m --max-sessions 100

    \b
    Exit codes: 0 no check has failed, 1 one has (or something could
      not be removed), 64 wrong usage, 69 out of reach, 78 configuration.
    """
    if url is not None:
        options = Connecting(url, None, options.given, options.verbose, options.quiet)
    wishes["seconds"] = min(wishes["seconds"], 3600.0)
    wishes["databases"] |= wishes["admin_url"] is not None
    selected = (only or frozenset(certifying.CHECKS)) - (skip or frozenset())
    if not selected:
        raise click.UsageError("No check is left: --skip names all of them.")
    chosen = {name: value for name, value in options.options.items() if name != "schema"}
    engine = options.engine()
    if engine.local_file is None:
        engine.connect("look").close()  # out of reach, or not allowed, is no failed check
    bench = certifying.Bench(options.chosen_url, chosen, certifying.Wishes(**wishes))
    bench.say = output.say

    def echo(*lines: str) -> None:
        if not as_json:
            output.echo(*lines)

    def end(number: int) -> None:
        if not bench.removing:
            raise SystemExit(128 + number)

    with handled(("SIGTERM", "SIGHUP", "SIGBREAK"), end):  # as Ctrl-C does: the schema is removed
        report = certifying.certify(
            bench,
            selected,
            began=lambda report: echo(f"{bench.named.label}, {bench.engine.schema_label}", *report.head()),
            done=lambda result: echo(result.line),
            with_host=with_host,
        )
    if file is not None:
        try:
            file.write_text(clean_json(report.document()) + "\n", encoding="utf-8")
        except OSError as exc:
            raise ConfigurationError(f"Cannot write {file}: {exc.strerror}") from exc
    if as_json:
        output.print_json(report.document())
    echo(report.summary)
    return 0 if report.ok else 1
