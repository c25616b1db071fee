"""The commands that list and operate queues of locks: ``sqlsem ls``, ``history``, ``set`` …"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.text import Text

import sqlsem
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.known import kept_lines, require_resource
from sqlsem.cli.options import age, allow_new_option, duration, json_option, most_option, often, resource_name, setting
from sqlsem.insight.patterns import is_pattern
from sqlsem.insight.reasons import Reason, reasons
from sqlsem.insight.words import by_login, counted, requester, seconds_in_words
from sqlsem.ops.poller import revoke_row
from sqlsem.ops.terminal import output
from sqlsem.ops.terminal.queues import as_dict, by_resource, render_history, render_operations, render_queues
from sqlsem.util.printable import clean
from sqlsem.values import locks
from sqlsem.values.errors import Unavailable
from sqlsem.values.locks import Entry, Resource

#: Queues, and the reasons why their requests wait.
Queues = tuple[list[tuple[Resource, list[Entry]]], dict[int, Reason]]
#: How requests end.
OUTCOMES = ("released", "timeout", "cancelled", "reaped", "revoked", "lost", "upgraded", "downgraded", "handed_over")


@click.command()
@click.argument("resource", required=False, type=resource_name)
@click.option("--watch", type=often, metavar="SECONDS", help="Look again every so often, until Ctrl-C.")
@json_option
@connecting
def ls(options: Connecting, resource: str | None, watch: float | None, as_json: bool) -> None:
    """Show holders and waiters, in the order of the queue.

    ACCESS is write (a mutex or a writer), read, "limit 3", limit (the number is set on the server) or "stage 200", with
    the weight if it is not 1: "limit 8 x2". STATE is holds, waits, revoked (the holder was notified) or dead (the next
    request for the lock removes the row).

    FOR is how long a request has held or waited, WHO its host and process, WHY its blocker or the rule that blocks it,
    and about when it will be granted (`sqlsem why` has more). A note in brackets says that the process cannot be
    found, and for how long. After its grace it counts as dead, and the next waiter removes its rows.

    \b
    Examples:
      sqlsem ls
      sqlsem ls etl --watch 1
      sqlsem ls --json | jq '.[].entries[] | select(.state == "waits")'
    """
    with options.coordinator(must_exist=True) as coordinator:

        def print_kept_locks() -> None:
            for line in kept_lines(coordinator, resource):
                output.say(line)

        def read_queues() -> Queues:
            overview = coordinator.admin.overview()
            if resource is not None:
                entries = [entry for entry in overview.entries if entry.resource == resource]
                return by_resource(entries, overview.resources, resource), reasons(overview)
            return by_resource(overview.entries, overview.resources, None), reasons(overview)

        console = output.console()
        if watch is None:
            queues, why = read_queues()
            plain = [as_dict(queue, entries, why) for queue, entries in queues]
            output.show_or_json(as_json, plain, lambda width: render_queues(queues, width, resource, why))
            print_kept_locks()
        elif console.is_terminal and not as_json:
            _watch(read_queues, console, resource, watch)
        else:
            while not output.is_gone():
                now = datetime.now().astimezone()
                try:
                    queues, why = read_queues()
                except Unavailable as exc:
                    output.print_error(f"{exc}; trying again")
                else:
                    if as_json:
                        plain = [as_dict(queue, entries, why) for queue, entries in queues]
                        output.print_json({"at": now.isoformat(), "queues": plain})
                    else:
                        output.echo(f"-- {now:%Y-%m-%d %H:%M:%S}")
                        output.show(console, render_queues(queues, console.width, resource, why))
                    print_kept_locks()
                time.sleep(watch)


def _watch(read_queues: Callable[[], Queues], console: Console, only: str | None, every: float) -> None:
    """Draw the queues again and again; during an outage of the database, draw the last ones that were read."""
    last_shown: RenderableType = Text("")
    with output.picture(console, vertical_overflow="visible") as live:
        while not output.is_gone():
            try:
                queues, why = read_queues()
                last_shown = shown = render_queues(queues, console.width, only, why)
            except Unavailable as exc:
                error = Text(f"{datetime.now():%H:%M:%S}  {clean(str(exc))}", style="bold red")
                shown = Group(last_shown, Text(""), error)
            live.update(shown, refresh=True)
            time.sleep(every)


@click.command(short_help="Show finished requests, the newest first.")
@click.argument("resource", required=False, type=resource_name)
@click.option("--since", type=age, metavar="TIME", help="Only requests that ended since then: 24h, 02:00.")
@click.option("--until", type=age, metavar="TIME", help="Only requests that ended before: 1h, 2026-01-31.")
@click.option("--outcome", type=click.Choice(OUTCOMES), metavar="OUTCOME", help="Only requests that ended so.")
@click.option("--who", metavar="WHO", help="Only of this login, host, host:pid or program; or ended by this login.")
@click.option("--operations", is_flag=True, help="Show actions of operators instead: pauses, caps, revocations …")
@most_option(20)
@json_option
@connecting
def history(
    options: Connecting, /, resource: str | None, outcome: str | None, operations: bool, as_json: bool, **filters: Any
) -> None:
    """Show finished requests, the newest first: the process, how long it waited and held, the outcome and who ended it.

    OUTCOME is released, timeout or cancelled (while waiting), died (the process died; the login that found it is shown;
    filter by --outcome reaped), revoked (by that operator) or lost. upgraded and downgraded requests go on with another
    access, handed_over ones in another process. HELD of a request whose process died ends with its last heartbeat. With
    --operations: the actions of operators on this resource or work queue, or on all.

    \b
    Examples:
      sqlsem history etl --since 24h
      sqlsem history --who etl1:4711
      sqlsem history --operations --who anna
      sqlsem history --outcome reaped -n 1000 --json
    """
    if operations and outcome is not None:
        raise click.UsageError("--outcome filters requests; leave out --operations.")
    with options.coordinator(must_exist=True) as coordinator:
        if operations:
            done = coordinator.admin.operations(resource, **filters)
        else:
            past = coordinator.admin.history(resource, outcome=outcome, **filters)
    if operations:
        output.show_or_json(as_json, [row.as_dict() for row in done], lambda width: render_operations(done, width))
    else:
        output.show_or_json(as_json, [row.as_dict() for row in past], lambda width: render_history(past, width))


CONFLICT = "An option and its --no-… cannot be combined."


@click.command("set", short_help="Set a resource's limit, or when rows are stale.")
@click.argument("resource", type=resource_name)
@setting(
    "limit",
    "Remove the limit; refused while requests rely on it.",
    CONFLICT,
    type=click.IntRange(1, locks.MAX_INT),
    help="At most N, whatever limit requests declare; N for requests that declare none.",
)
@setting(
    "stale_after",
    "Never remove them.",
    CONFLICT,
    type=duration,
    help="Remove rows that no process keeps alive (made by plain INSERTs) at this age: 90s, 5m, 2h, 1d.",
)
@setting(
    "priorities",
    "First come, first served. Waiting requests with a priority fail.",
    CONFLICT,
    type=duration,
    is_flag=False,
    flag_value="1m",
    help="Grant by priority; requests must name one. A step of priority is worth this much waiting time (1m).",
)
@allow_new_option
@connecting
def set_(options: Connecting, resource: str, changes: Mapping[str, Any], allow_new: bool) -> None:
    """Set a resource's limit, its priorities, or the age at which rows of bare participants are removed.

    A request that declares a higher limit gets this one; so does a request that declares none. A change applies at
    once, but holders keep the lock. A RESOURCE that ends with * stands for all resources with that prefix that have no
    limit of their own; of several such patterns the longest applies.

    \b
    Examples:
      sqlsem set etl --limit 2
      sqlsem set 'tenant:*' --limit 4
      sqlsem set etl --no-limit --stale-after 2h
      sqlsem set etl --priorities 5m
    """
    if not changes:
        raise click.UsageError(
            "Say what to set: --limit N, --stale-after 2h, --priorities 1m, or one of --no-limit, --no-stale-after and "
            "--no-priorities."
        )
    if changes.get("stale_after") == 0:
        raise click.UsageError("--stale-after must be above 0; to never remove anything: --no-stale-after.")
    if changes.get("priorities") == 0:
        raise click.UsageError("--priorities must be above 0: the waiting time that a step of priority is worth.")
    sets_pattern = is_pattern(resource) and "stale_after" not in changes

    def change(admin: sqlsem.Admin) -> None:
        calls = {"limit": admin.set_limit, "stale_after": admin.set_stale_after, "priorities": admin.set_priorities}
        for name, value in changes.items():
            calls[name](resource, value)

    _change(options, resource, allow_new or sets_pattern, change)


@click.command()
@click.argument("resource", type=resource_name)
@allow_new_option
@connecting
def pause(options: Connecting, resource: str, allow_new: bool) -> None:
    """Grant no requests of a resource until `sqlsem resume`.

    Holders keep the lock; new requests are queued.

    \b
    Example:
      sqlsem pause etl
    """
    _change(options, resource, allow_new, lambda admin: admin.pause(resource))


@click.command()
@click.argument("resource", type=resource_name)
@allow_new_option
@connecting
def resume(options: Connecting, resource: str, allow_new: bool) -> None:
    """Grant requests again, after `sqlsem pause`.

    \b
    Example:
      sqlsem resume etl
    """
    _change(options, resource, allow_new, lambda admin: admin.resume(resource))


def _change(options: Connecting, resource: str, allow_new: bool, change: Callable[[sqlsem.Admin], object]) -> None:
    """Change the settings of a resource, and print them."""
    with options.coordinator(must_exist=True) as coordinator:
        if not allow_new:
            require_resource(coordinator, resource)
        change(coordinator.admin)
        _print_settings(coordinator, resource)


def _print_settings(coordinator: sqlsem.Coordinator, resource: str) -> None:
    found = next((row for row in coordinator.admin.resources() if row.resource == resource), None)
    row = found or Resource(resource, None, False, None, 0, 0)
    parts = [
        f"paused{by_login(row.paused_by)}" if row.paused else "not paused",
        "no limit set" if row.cap is None else f"limit set to {row.cap}{clean(row.whose_cap)}",
        "rows never stale" if row.stale_after is None else f"rows stale after {seconds_in_words(row.stale_after)}",
    ]
    if row.ageing is not None:
        parts.append(f"by priority (a step is worth {seconds_in_words(row.ageing)} of waiting)")
    output.echo(f"{clean(resource)}: {', '.join(parts)}; {row.holding} holding, {row.waiting} waiting")


@click.command(short_help="Revoke a lock, or a request that waits.")
@click.argument("position", type=click.IntRange(1), required=False)
@click.option("--member", type=click.IntRange(1), metavar="N", help="All rows of this member, and the member itself.")
@click.option("--login", metavar="NAME", help="All rows of all members of this login, and the members themselves.")
@click.option("--force", is_flag=True, help="At once: others may be granted before the holder knows.")
@connecting
def revoke(options: Connecting, position: int | None, member: int | None, login: str | None, force: bool) -> None:
    """Revoke a lock or a waiting request, by its position (see `sqlsem ls`); or all rows of a member, or of a login,
    with its members.

    A request that waits is removed at once. A living holder is notified, and has its grace to stop (`sqlsem run` ends
    its command); with --force the lock is removed at once.

    \b
    Examples:
      sqlsem revoke 4711
      sqlsem revoke 4711 --force
      sqlsem revoke --login nightly_etl --force

    \b
    Exit codes: 0 the row is removed, or its holder notified; 1 there is
      no such row.
    """
    if sum(value is not None for value in (position, member, login)) != 1:
        raise click.UsageError("Name one of POSITION, --member and --login.")
    with options.coordinator(must_exist=True) as coordinator:
        if position is None:
            number = coordinator.admin.revoke_members(member=member, login=login, force=force)
        else:
            entry, gone = revoke_row(coordinator, position, force=force)
    if position is None:
        output.echo(
            f"{number} members are gone, with their rows."
            if force
            else f"{number} members are gone; members that still hold something have been told, and have their "
            f"grace to stop. Not to wait: --force"
        )
        return
    subject = f"Position {position}"
    if entry is not None:
        subject += f" of {clean(entry.resource)} ({clean(requester(entry))})"
    if gone:
        output.echo(f"{subject} is gone.")
    else:
        output.echo(
            f"{subject}: its living holder has been told, and has its grace to stop (5 s unless it chose another); "
            f"then it is removed. Not to wait: --force"
        )


@click.command()
@connecting
def reap(options: Connecting) -> None:
    """Find dead members now, and remove them with their rows.

    Waiters do this anyway; this command cleans up resources without waiters. Living members are not affected. A member
    that cannot be found has its grace to return: on a database server the first call finds it missing, and a call after
    the grace removes it.

    \b
    Example:
      sqlsem reap
    """
    with options.coordinator(must_exist=True) as coordinator:
        before = {member.member_id for member in coordinator.admin.overview().members if member.missing_for is not None}
        rows = coordinator.admin.reap()
        after = coordinator.admin.overview().members
    gone = len(before - {row.member_id for row in after})
    missing = sum(row.missing_for is not None for row in after)
    output.echo(f"{counted(gone, 'dead member')} and {counted(rows, 'row')} removed.")
    if missing:
        output.echo(f"{counted(missing, 'more member')} cannot be found, with a grace to return. Then: sqlsem reap")
