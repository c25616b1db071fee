"""``sqlsem config``: shows the database that is used and why, and allows or denies projects' files."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from sqlsem import config
from sqlsem.cli.connecting import Connecting, connecting
from sqlsem.cli.group import Showing
from sqlsem.cli.options import json_option
from sqlsem.config import allowing, reading
from sqlsem.ops.terminal import output
from sqlsem.util.credentials import hide_secrets
from sqlsem.util.printable import clean
from sqlsem.values.errors import ConfigurationError

_file = click.Path(dir_okay=False, path_type=Path)


@click.group(
    "config", cls=Showing, invoke_without_command=True, short_help="Show which database is used and why; allow, deny."
)
@json_option
@connecting
def config_(options: Connecting, as_json: bool) -> None:
    """Show each setting with its source: the database, the options, and the configuration files. Prints no passwords,
    and does not connect.

    A project's file (sqlsem.toml, or [tool.sqlsem] of pyproject.toml) may come from someone else. By itself it may
    choose a profile of your own file, and set retry and require_server. Any other setting is followed only after you
    allow the file; after a change, allow it again.

    \b
    Examples:
      sqlsem config show
      sqlsem config allow              the project's file that is found from here
      sqlsem config deny ./sqlsem.toml

    \b
    Exit codes: 0 shown, 78 the configuration cannot be followed, and why.
    """
    error: ConfigurationError | None = None
    settings: config.Settings | None = None
    try:
        settings = options.settings
    except ConfigurationError as exc:
        error = exc
    rows: dict[str, str] = {}
    sources: dict[str, str] = {}
    if settings is not None:
        rows["database"] = hide_secrets(settings.url)
        rows.update((name, "none" if value is None else str(value)) for name, value in options.options.items())
        sources = {"database": settings.source, **options.sources}
    rows.update(_files())
    if as_json:
        output.print_json({**rows, "sources": sources, "error": None if error is None else str(error)})
    else:
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, text in rows.items():
            source = f"(from: {sources[name]})" if name in sources else ""
            table.add_row(name, Text(clean(text), overflow="fold"), Text(clean(source), overflow="fold"))
        output.show(output.console(), table)
    if error is not None:
        raise error


def _files() -> dict[str, str]:
    """Describe the configuration files."""
    named = os.environ.get("SQLSEM_CONFIG")
    if named is not None:
        return {"files": f"only {named}, by $SQLSEM_CONFIG" if named else "none, as $SQLSEM_CONFIG is empty"}
    user, files = None, {}
    try:
        user = reading.find_user_file()
        files["user_file"] = f"{reading.user_path()}{'' if user else ' (is not there)'}"
    except ConfigurationError as exc:
        files["user_file"] = str(exc)
    try:
        search = reading.find_project_file(user)
        words = f"none is looked for there and above, as {search.ended}" if search.ended else "none"
        if search.file is not None:
            harmful = ", ".join(name for name, _ in search.file.shown())
            words = f"{search.file.path} ({f'{allowing.state(search.file)}: {harmful}' if harmful else 'harmless'})"
        files["project_file"] = words
    except ConfigurationError as exc:
        files["project_file"] = str(exc)
    return files


@config_.command("allow", short_help="Allow a project's file with its present content.")
@click.argument("file", required=False, type=_file)
def config_allow(file: Path | None) -> None:
    """Allow a project's file until it changes. Without FILE: the project's file of the current folder.

    Read it first: it decides where locks are kept and whose tasks are run, and a URL may name a library to load. It is
    allowed only for your user.

    \b
    Examples:
      sqlsem config allow
      sqlsem config allow ~/etl/sqlsem.toml

    \b
    Exit codes: 0 allowed, 78 there is no such file, or it would never be
      followed.
    """
    project_file = _project_file() if file is None else reading.project_file(file)
    shown = project_file.shown()
    if not shown:
        output.echo(f"There is nothing to allow in {project_file.path}.")
        return
    allowing.allow(project_file)
    output.echo(
        f"Allowed as long as it stays as it is: {project_file.path}", *(f"  {name} = {text}" for name, text in shown)
    )


@config_.command("deny", short_help="Do not follow a project's file any more.")
@click.argument("file", required=False, type=_file)
def config_deny(file: Path | None) -> None:
    """Withdraw the permission of a project's file. Without FILE: the project's file of the current folder.

    \b
    Examples:
      sqlsem config deny
      sqlsem config deny ~/etl/sqlsem.toml

    \b
    Exit codes: 0 it is no longer allowed, or was not; 78 there is none.
    """
    path = _project_file().path if file is None else Path(os.path.realpath(file.parent)) / file.name
    output.echo(f"{path} {'is not allowed any more' if allowing.deny(path) else 'was not allowed'}.")


def _project_file() -> reading.File:
    """Return the project's file that is found from here."""
    search = reading.find_project_file()
    if search.file is None:
        why = f"; in and above a folder none is looked for, as {search.ended}" if search.ended else ""
        raise ConfigurationError(f"There is no project's file in this folder or above{why}")
    return search.file
