"""The commands for rates, runs once per period, leaders and guarded tables: ``sqlsem rates``, ``once`` …"""

from __future__ import annotations

from collections.abc import Sequence

import click

from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import Listing
from sqlsem.cli.known import require_resource
from sqlsem.cli.options import (
    Named,
    allow_new_option,
    json_option,
    name_of,
    one_name,
    rate_window,
    refusing,
    resource_name,
)
from sqlsem.client.once import once_name
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.lists import describe_leader, render_leaders, render_rates, render_runs
from sqlsem.util.printable import clean
from sqlsem.values.locks import Duration
from sqlsem.values.rates import Window

_rate_name = name_of("The rate's name", "rate")
_once_name = Named(refusing(once_name), "job")
_leader_name = name_of("The leader's name", "leader")


@click.group(
    "rates", cls=Listing, invoke_without_command=True, short_help="Show rates: what is used of each window; set, reset."
)
@one_name("name", _rate_name, "rate", "The name, should it be that of a command.")
@json_option
@connecting
def rates(options: Connecting, name: str | None, as_json: bool) -> None:
    """Show rates, or one: each window, its limit, how much of it is used now, and the number of waiters.

    LIMIT is the lowest limit: of the programs that use the rate, and of an operator (`sqlsem rates set`). USED includes
    reservations for soon, and may exceed LIMIT after a cost was adjusted. ROOM IN is the time until 1 more may be used,
    if none may now; waiters come first. LAST is the time since the last use. For the waiters see: sqlsem why rate:NAME.

    \b
    Examples:
      sqlsem rates
      sqlsem rates api --json | jq '.[0].used'
      sqlsem rates set api 100/1m
      sqlsem rates reset api
    """
    with options.coordinator(must_exist=True) as coordinator:
        windows = coordinator.admin.rates(name)
        waiting = {
            resource: len(coordinator.admin.entries(resource)) for resource in {rate.resource for rate in windows}
        }
    plain = [{**rate.as_dict(), "waiting": waiting[rate.resource]} for rate in windows]
    output.show_or_json(as_json, plain, lambda width: render_rates(windows, waiting, width, name))


@rates.command("set", short_help="Set the limits of a rate, whatever programs declare.")
@click.argument("name", type=_rate_name)
@click.argument("windows", metavar="[LIMIT/TIME]...", nargs=-1, type=rate_window)
@click.option("--clear", is_flag=True, help="Remove the limits of operators that are not named here.")
@connecting
def rates_set(options: Connecting, name: str, windows: Sequence[Window], clear: bool) -> None:
    """Set limits of a rate: at most LIMIT in any stretch of TIME, for all processes together.

    Programs that declare a higher limit get this one, and so do programs that declare none (sqlsem run --rate NAME). A
    limit counts at once, also for earlier use. Limits in other windows stay, unless --clear removes them.

    \b
    Examples:
      sqlsem rates set api 100/1m
      sqlsem rates set api 10/1s 1000/1h
      sqlsem rates set api --clear
    """
    if not windows and not clear:
        raise click.UsageError("Say which limits, as in 100/1m, or --clear.")
    limits: dict[Duration, int] = {window.ms / 1000: window.limit for window in windows}
    with options.coordinator(must_exist=True) as coordinator:
        admin = coordinator.admin
        if limits:
            admin.set_rate(name, limits)
        if clear:
            for rate in admin.rates(name):
                if rate.cap is not None and rate.window not in limits:
                    admin.set_rate(name, None, rate.window)
        capped = sorted((rate for rate in admin.rates(name) if rate.cap is not None), key=lambda rate: rate.window)
    words = ", ".join(f"{window.cap:,} in {window.window:g} s" for window in capped) or "no limit of an operator's"
    output.echo(f"Rate {clean(name)}: {words}.")


@rates.command("reset", short_help="Forget the use and debts of a rate.")
@click.argument("name", type=_rate_name)
@connecting
def rates_reset(options: Connecting, name: str) -> int:
    """Reset a rate: delete its use, its debts, and the limits that programs have declared.

    Waiting requests are granted at once, up to the whole limit, so use in the current window may exceed the limit.
    Limits that an operator has set stay.

    \b
    Example:
      sqlsem rates reset api

    \b
    Exit codes: 0 done, 1 nothing is known of that rate.
    """
    with options.coordinator(must_exist=True) as coordinator:
        known = coordinator.admin.reset_rate(name)
    output.echo(f"Rate {clean(name)} begins anew." if known else f"Nothing is known of a rate {clean(name)}.")
    return 0 if known else 1


@click.group("once", cls=Listing, invoke_without_command=True, short_help="Show what runs once per period; forget.")
@one_name("name", _once_name, "job", "The name, should it be that of a command.")
@json_option
@connecting
def once(options: Connecting, name: str | None, as_json: bool) -> None:
    """Show the last successful run of each job that runs once per period (sqlsem run --once-per), or of one.

    BEGAN decides for which period a run counts. TOOK is how long it took, AGO the time since its end, and LOGIN the
    login that ran it. A job that runs now holds the mutex once:NAME, which `sqlsem ls` shows.

    \b
    Examples:
      sqlsem once ls
      sqlsem once ls report --json
      sqlsem once forget report
    """
    with options.coordinator(must_exist=True) as coordinator:
        runs = coordinator.admin.once_runs(name)
    output.show_or_json(as_json, [run.as_dict() for run in runs], lambda width: render_runs(runs, width, name))


@once.command("forget", short_help="Let a job run again in this period.")
@click.argument("name", type=_once_name)
@connecting
def once_forget(options: Connecting, name: str) -> int:
    """Delete the record of a job's last run, so that it may run again in this period.

    For the login of that run, and for operators.

    \b
    Example:
      sqlsem once forget report

    \b
    Exit codes: 0 done, 1 there is no run of that name.
    """
    with options.coordinator(must_exist=True) as coordinator:
        known = coordinator.admin.forget_once(name)
    words = "may run again in this period." if known else "has no recorded run; see: sqlsem once ls"
    output.echo(f"Job {clean(name)} {words}")
    return 0 if known else 1


@click.group("leader", cls=Listing, invoke_without_command=True, short_help="Show the leaders; step-down.")
@one_name("name", _leader_name, "leader", "The name, should it be that of a command.")
@json_option
@connecting
def leader(options: Connecting, name: str | None, as_json: bool) -> None:
    """Show the present leader of each name, or of one: its process, since when it leads, and how many candidates wait.

    A leader is the holder of a mutex, so the list has the holders of all mutexes. INFO is the text that the leader has
    published (sqlsem run --leader NAME --note TEXT).

    \b
    Examples:
      sqlsem leader ls
      sqlsem leader ls scheduler --json | jq -r '.[].info'
      sqlsem leader step-down scheduler
    """
    with options.coordinator(must_exist=True) as coordinator:
        leaders = coordinator.admin.leaders(name)
    plain = [entry.as_dict() for entry in leaders]
    output.show_or_json(as_json, plain, lambda width: render_leaders(leaders, width, name))


@leader.command("step-down", short_help="Ask the present leader to end its term.")
@click.argument("name", type=_leader_name)
@connecting
def leader_step_down(options: Connecting, name: str) -> None:
    """Ask the present leader to end its term, so that the next candidate leads. For operators.

    The leader's row is revoked, as by `sqlsem revoke`: a live leader is notified, and has its grace to stop. Then it
    is a candidate again, behind those that wait, if its program takes part again (sqlsem run --leader does).

    \b
    Example:
      sqlsem leader step-down scheduler

    \b
    Exit codes: 0 the leader is notified, or gone; 1 there is no leader.
    """
    with options.coordinator(must_exist=True) as coordinator:
        leaders = coordinator.admin.leaders(name)
        # (The leader that is named is the one whose term ends, even if another leads by now.)
        gone = coordinator.admin.revoke(leaders[0].fence) if leaders else coordinator.admin.step_down(name)
    who = describe_leader(leaders[0]) if leaders else "The leader"
    if gone:
        output.echo(clean(f"{who} leads {name} no more."))
    else:
        output.echo(clean(f"{who} was notified, and has its grace to stop. Then the next candidate may lead {name}."))


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
