"""The commands with a live view: ``sqlsem top``, ``sqlsem dashboard`` and ``sqlsem demo``."""

from __future__ import annotations

import importlib
import os
import secrets
import stat
import sys
from pathlib import Path

import click

from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.options import duration, often
from sqlsem.config import files
from sqlsem.ops import demo as show
from sqlsem.ops.hosts import LOOPBACK, Hosts, is_loopback
from sqlsem.ops.poller import Poller
from sqlsem.ops.terminal import output
from sqlsem.values.errors import ConfigurationError

TOKEN = "SQLSEM_DASHBOARD_TOKEN"  # noqa: S105 - the name of the variable
interval_option = click.option("--interval", type=often, default="2", metavar="SECONDS", help="Time between refreshes.")


def _require(module: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as exc:
        raise ConfigurationError(
            f"sqlsem {extra} needs {module.partition('.')[0]} ({exc}); install it with: pip install 'sqlsem[{extra}]'"
        ) from exc


@click.command(short_help="Show queues and holders live, and operate them by keys.")
@interval_option
@connecting
def top(options: Connecting, interval: float) -> int:
    """Show a live view: queues and why each request waits, root blockers, members, work queues, batches, times.

    Press ? for the keys. An action (p pause, r resume, c cap, x revoke, t retry) first shows its consequences, and is
    performed only when you press y. Reading needs the role sqlsem_reader, actions need sqlsem_operator.

    During an outage of the database it says since when, and tries again until the database is back.

    \b
    Examples:
      sqlsem top
      sqlsem --profile prod top --interval 10
      NO_COLOR=1 sqlsem top
    """
    _require("textual", "top")
    from sqlsem.ops.tui.app import Top  # loads Textual, which no other command needs

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("sqlsem top needs a terminal; for a pipe or a file there is: sqlsem ls --watch 2")
    with options.coordinator(must_exist=True, draws=True) as coordinator:
        live = Poller(coordinator, interval)
        live.poll_once()
        program = Top(live)
        program.run()
    return program.return_code or 0


@click.command(short_help="Show queues and holders live, in a browser.")
@click.option("--host", default="127.0.0.1", help="The address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, help="0: any that is free.")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="HOST",
    help="A host name that requests may use, as behind a proxy (repeatable). Then reading needs the token, too.",
)
@click.option("--allow-changes", is_flag=True, help="Requests with the token may pause, cap, revoke and retry.")
@click.option("--private", is_flag=True, help="Show nothing without the token.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The token's file, which only you can read. Left out: "
    f"${TOKEN}; else a token is made, and printed on stderr. (All users of this host could read an argument.)",
)
@click.option("--tls-cert", type=click.Path(exists=True), metavar="FILE", help="Serve HTTPS with this certificate.")
@click.option("--tls-key", type=click.Path(exists=True), metavar="FILE", help="Its key, if that is not in it.")
@interval_option
@connecting
def dashboard(
    options: Connecting,
    host: str,
    port: int,
    names: tuple[str, ...],
    allow_changes: bool,
    private: bool,
    token_file: Path | None,
    tls_cert: str | None,
    tls_key: str | None,
    interval: float,
) -> None:
    """Show the views of `sqlsem top` in a browser.

    By default it listens only on this host, and changes nothing. From another host, use
    ssh -L 8765:127.0.0.1:8765 HOST. With --host of another address, TLS is required, and the token for reading, too.

    \b
    Examples:
      sqlsem dashboard
      sqlsem dashboard --allow-changes
      sqlsem dashboard --host 10.0.0.5 --name locks.example.com \\
        --tls-cert cert.pem --tls-key key.pem --token-file token
    """
    for module in ("starlette", "jinja2", "uvicorn"):
        _require(module, "dashboard")
    from sqlsem.ops.dashboard import server  # loads Starlette and uvicorn, which no other command needs
    from sqlsem.ops.dashboard.app import Dashboard  # the same

    if tls_key and not tls_cert:
        raise click.UsageError("--tls-key is the key of a --tls-cert.")
    local = is_loopback(host)
    if not local and not tls_cert:
        raise click.UsageError(
            f"{host} can be reached from elsewhere, and the token could be read on its way: add --tls-cert; or listen "
            f"on 127.0.0.1, behind a proxy with TLS (--name) or ssh -L."
        )
    private = private or bool(names) or not local
    token, is_new = _token(token_file) if allow_changes or private else (None, False)
    with options.coordinator(must_exist=True) as coordinator:
        live = Poller(coordinator, interval)
        live.poll_once()
        hosts = Hosts({host, *names, *(LOOPBACK if local else ())})
        application = Dashboard(live, hosts, token, private=private, allow_changes=allow_changes)
        listener = server.listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        url = f"http{'s' if tls_cert else ''}://{shown}:{listener.getsockname()[1]}/"

        def ready() -> None:
            output.say(f"the dashboard is at {url} (Ctrl-C ends it)")
            if is_new:
                output.say(f"the token: {token}")

        server.serve(application, listener, ready, (tls_cert, tls_key) if tls_cert else None)


def _token(file: Path | None) -> tuple[str, bool]:
    """Return the token, and True if it is new."""
    if file is not None:
        try:
            content = files.read(file)
            if os.name == "posix" and stat.S_IMODE(content.status.st_mode) & 0o077:
                raise ConfigurationError(f"{file} can be read or written by others; close it with: chmod 600 {file}")
            return content.data.decode("ascii").strip(), False
        except (OSError, ValueError) as exc:
            raise ConfigurationError(f"Cannot read the token from {file}: {exc}") from exc
    given = os.environ.get(TOKEN)
    return (given, False) if given else (secrets.token_urlsafe(24), True)


@click.command(short_help="Watch several processes share a limit.")
@click.option("--seconds", type=duration, default="10", help="How long it lasts.")
@click.option("--workers", type=click.IntRange(2, 32), default=8, help="Processes that take part.")
@click.option("--limit", type=click.IntRange(1, 32), default=3, help="Holders at a time.")
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
