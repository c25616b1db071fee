"""The command for tables that can be written only under a lock: ``sqlsem guard``."""

from __future__ import annotations

import click

from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.known import require_resource
from sqlsem.cli.options import allow_new_option, json_option, resource_name
from sqlsem.ops.terminal import output
from sqlsem.util.printable import clean

__all__ = ["guard"]


@click.command(short_help="Refuse writes into a table without its lock.")
@click.argument("table", required=False)
@click.option("--resource", type=resource_name, metavar="NAME", help="The lock that guards it.")
@allow_new_option
@click.option("--list", "listed", is_flag=True, help="List the guarded tables; without TABLE.")
@click.option("--remove", is_flag=True, help="Take the guard off TABLE.")
@json_option
@connecting
def guard(
    options: Connecting,
    table: str | None,
    resource: str | None,
    allow_new: bool,
    listed: bool,
    remove: bool,
    as_json: bool,
) -> None:
    """Have the database refuse writes into a table by transactions that do not hold its lock.

    TABLE is a table of the same database, as SQL names it there: dbo.ledger, public."Order line". A trigger refuses
    each statement whose transaction has not asserted (grant.assert_held, grant.session, assert_holding) a grant of
    NAME that may write and is still held. Run it again to guard new partitions. Needs the right to put triggers on the
    table. PostgreSQL and SQL Server.

    \b
    Examples:
      sqlsem guard dbo.ledger --resource ledger
      sqlsem guard --list
      sqlsem guard dbo.ledger --remove

    \b
    Exit codes: 0 done, 1 a guard is not in order (--list), 78 there is no
      such table, or this login may not.
    """
    if listed == (table is not None):
        raise click.UsageError("Name a TABLE, or give --list.")
    if (resource is None) != (listed or remove):
        raise click.UsageError("--resource NAME says which lock guards TABLE; --list and --remove go without.")
    if as_json and not listed:
        raise click.UsageError("--json is for --list.")
    with options.coordinator(must_exist=True) as coordinator:
        if table is None:
            tables = coordinator.admin.guarded_tables()
            if as_json:
                output.print_json([guarded.as_dict() for guarded in tables])
            for guarded in () if as_json else tables:
                problem = f": {guarded.problem}" if guarded.problem else ""
                output.echo(clean(f"{guarded.schema}.{guarded.table}  guarded by {guarded.resource}{problem}"))
            if not tables and not as_json:
                output.echo("No table is guarded.")
            if any(guarded.problem for guarded in tables):
                raise click.exceptions.Exit(1)
        elif remove:
            removed = coordinator.admin.unguard_table(table)
            if not removed:
                raise click.ClickException(f"{table} is not guarded; see: sqlsem guard --list")
            output.echo(clean(f"{table} can be written without a lock again."))
        elif resource is not None:
            if not allow_new:
                require_resource(coordinator, resource)
            trigger_count = coordinator.admin.guard_table(table, resource)
            suffix = (
                f" ({trigger_count} triggers, with its partitions)"
                if trigger_count > 1
                else ""
                if trigger_count
                else " already"
            )
            output.echo(clean(f"{table} is guarded by {resource}{suffix}."))
            if trigger_count and coordinator.engine.guard_hint:
                output.echo(coordinator.engine.guard_hint)
