"""``sqlsem metrics``: serves metrics of the database to Prometheus, or prints them once."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.ops.hosts import LOOPBACK, Hosts, is_loopback
from sqlsem.ops.terminal import output
from sqlsem.util.threads import spawn
from sqlsem.values.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlsem.ops.metrics.exporter import Exporter

#: The pause between two counts of the requests that died, were revoked or were lost.
COUNT_EVERY_SECONDS = 60.0


def address(value: str) -> tuple[str, int]:
    """Convert ``HOST:PORT``, ``[::1]:PORT`` or ``PORT`` (on loopback)."""
    host, _, port = value.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise click.BadParameter(f"{value!r} is not HOST:PORT or PORT")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


@click.command(
    short_help="Serve metrics for Prometheus.",
    epilog="""\b
Examples:
  sqlsem metrics                         http://127.0.0.1:9464/metrics
  sqlsem metrics --listen 0.0.0.0:9464   for a Prometheus on another host
  sqlsem metrics --once                  now, to stdout
  sqlsem metrics --once -o sqlsem.prom   into a file, for node_exporter
""",
)
@click.option(
    "--listen",
    type=address,
    metavar="HOST:PORT",
    default="127.0.0.1:9464",
    help="The address for scrapes. There is no password: clients that can reach it see names, programs and notes.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="HOST",
    help="Another host name that scrapes may use, besides its address and this host's names; may be repeated.",
)
@click.option("--once", is_flag=True, help="Print them once, and end.")
@click.option("--dashboard", "shown", flag_value="dashboard", help="Print a dashboard for Grafana, and end.")
@click.option("--alerts", "shown", flag_value="alerts", help="Print alert rules for Prometheus, and end.")
@click.option(
    "-o",
    "--output",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --once: write them atomically to this file (for the textfile collector).",
)
@click.option(
    "--pattern",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Resources that match share a label, as dim_*; may be repeated. In all others, numbers become *.",
)
@click.option(
    "--max",
    "maximum",
    type=click.IntRange(1, 10_000),
    default=100,
    help="The most labels of a kind; the others share 'other'.",
)
@connecting
def metrics(
    connection: Connecting,
    listen: tuple[str, int],
    names: tuple[str, ...],
    once: bool,
    shown: str | None,
    file: Path | None,
    patterns: tuple[str, ...],
    maximum: int,
) -> None:
    """Serve metrics for Prometheus of everything in the database: holders, waiters, blockers, tasks.

    Each scrape takes a few statements, on a connection of its own; the role sqlsem_reader is enough. With --once, the
    exit code is 69 if the database is out of reach; otherwise sqlsem_up is 0 until it is back.
    """
    if shown == "dashboard":
        from sqlsem.ops.metrics import grafana  # which other commands do not need

        output.echo(*json.dumps(grafana.dashboard(), indent=1).split("\n"))
        return
    if shown == "alerts":
        text = resources.files("sqlsem.ops.metrics").joinpath("alerts.yaml").read_text(encoding="utf-8")
        output.echo(*text.removesuffix("\n").split("\n"))
        return
    from sqlsem.ops.metrics.exporter import Exporter  # needs prometheus_client, which other commands do not

    if file is not None and not once:
        raise click.UsageError("--output goes with --once")
    with connection.coordinator(must_exist=True) as coordinator:
        exporter = Exporter(coordinator, patterns=patterns, maximum=maximum, once=once)
        with contextlib.closing(exporter):
            if once:
                exporter.count_ends()
                _print(exporter, file)
            else:
                _serve(exporter, *listen, names)


def _print(exporter: Exporter, file: Path | None) -> None:
    import prometheus_client  # which other commands do not need

    registry = prometheus_client.CollectorRegistry()
    registry.register(exporter)
    if file is None:
        output.echo(*prometheus_client.generate_latest(registry).decode().removesuffix("\n").split("\n"))
    else:
        try:
            prometheus_client.write_to_textfile(str(file), registry)
        except (OSError, ValueError) as exc:  # ValueError: no file can have that name
            raise ConfigurationError(f"Cannot write {file}: {exc}") from exc
    if exporter.trouble is not None:
        raise exporter.trouble


def _serve(exporter: Exporter, host: str, port: int, names: tuple[str, ...]) -> None:
    import prometheus_client  # which other commands do not need

    from sqlsem.ops.metrics.serving import Server  # the same

    registry = prometheus_client.CollectorRegistry()
    registry.register(exporter)
    local = is_loopback(host)
    here = LOOPBACK if local else {*LOOPBACK, socket.gethostname(), socket.getfqdn()}
    try:
        server = Server((host, port), registry, Hosts({host, *here, *names}, addresses=not local))
    except OSError as exc:
        raise ConfigurationError(f"Cannot listen on {host}:{port}: {exc.strerror}; choose another --listen") from exc
    thread = spawn(server.serve_forever, "scrapes")
    shown = f"[{host}]" if ":" in host else host
    output.say(f"metrics at http://{shown}:{server.server_port}/metrics")
    try:
        while True:
            exporter.count_ends()
            time.sleep(COUNT_EVERY_SECONDS)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
